"""The parameters of generate: which values are taken, and what is said of the others."""

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.conformance.cases import Case
from gateway.conformance.mindie.words import asked, refused, talk, text, whole

_INT = "2147483647"
_SEED = "seed must be unsigned type."
_REPETITION = "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got {}."
_TIMEOUT = "Parameter timeout must be strictly positive and small than 65535 seconds, got {}."
_NEW_TOKENS = f"Parameter max_new_tokens must be in (0,{_INT}], got {{}}."
_TOP_K = f"Parameter top_k must be in -1 || (0,{_INT}], got {{}}"
_BATCH = f"Parameter batch_size must be in (0,{_INT}], got {{}}."
_TEMPERATURE = "Parameter temperature must be in (0.0,3.40282e+38], got {}."
_TOP_P = "Parameter top_p must be in (0.0,1.0], got {}."
_TYPICAL_P = "Parameter typical_p must be in (0.0,1.0], got {}."
_PRIORITY = "Parameter priority must be in [1,5], got {}."

_WRONG: Mapping[str, tuple[str, Any, str]] = {
    "MI-18 0": ("max_new_tokens", 0, _NEW_TOKENS.format(0)),
    "MI-18 -1": ("max_new_tokens", -1, _NEW_TOKENS.format(-1)),
    "MI-18 2147483648": ("max_new_tokens", 2**31, _NEW_TOKENS.format(2**31)),
    "MI-19 2.5": ("max_new_tokens", 2.5, "max_new_tokens must be integer type."),
    "MI-19 a string": ("max_new_tokens", "5", "max_new_tokens must be integer type."),
    "MI-20 0": ("temperature", 0, _TEMPERATURE.format(0)),
    "MI-20 0.0": ("temperature", 0.0, _TEMPERATURE.format(0.0)),
    "MI-21 a string": ("temperature", "1", "temperature must be float type."),
    "MI-21 true": ("temperature", True, "temperature must be float type."),
    "MI-22 0": ("top_p", 0, _TOP_P.format(0)),
    "MI-22 1.01": ("top_p", 1.01, _TOP_P.format(1.01)),
    "MI-24 -1": ("top_k", -1, _TOP_K.format(-1)),
    "MI-25": ("typical_p", -1.0, _TYPICAL_P.format(-1.0)),
    "MI-26 -1": ("seed", -1, _SEED),
    "MI-26 0.5": ("seed", 0.5, _SEED),
    "MI-27": ("repetition_penalty", 0, _REPETITION.format(0)),
    "MI-28": ("details", "true", "details must be boolean type."),
    "MI-28 1": ("details", 1, "details must be boolean type."),
    "MI-28 do_sample": ("do_sample", "true", "do_sample must be boolean type."),
    "MI-28 watermark": ("watermark", 0, "watermark must be boolean type."),
    "MI-29 0": ("batch_size", 0, _BATCH.format(0)),
    "MI-30": ("priority", 6, _PRIORITY.format(6)),
    "MI-30 0": ("priority", 0, _PRIORITY.format(0)),
    "MI-31 0": ("timeout", 0, _TIMEOUT.format(0)),
    "MI-31 65536": ("timeout", 65536, _TIMEOUT.format(65536)),
}
_TAKEN: Mapping[str, dict[str, Any]] = {
    "MI-21": {"temperature": 1},
    "MI-22": {"top_p": 1.0},
    "MI-24": {"top_k": 0},
    "MI-26": {"seed": 0},
    "MI-26 null": {"seed": None},
    "MI-29": {"batch_size": 100},
    "MI-30 1": {"priority": 1},
    "MI-31": {"timeout": 65535},
    "MI-32": {"perf_stat": "x"},
}


def _wrong() -> Iterator[Case]:
    for number, (name, value, said) in _WRONG.items():
        yield text(number, asked(**{name: value}), **refused(said))


def _taken() -> Iterator[Case]:
    for number, parameters in _TAKEN.items():
        yield text(number, asked(**parameters), body_is=whole())


_NATIVE = {"inputs": "hi", "model": "mock"}
_DETAILS = {"details": {"finish_reason": "length", "generated_tokens": 20}}

PARAMETERS = (
    *_wrong(),
    *_taken(),
    text(
        "MI-18 the first in the server's order is told",
        asked(max_new_tokens=0, top_p=2, temperature=-1),
        **refused(_TEMPERATURE.format(-1)),
    ),
    text(
        "MI-19 null",
        asked(max_new_tokens=None, details=True),
        model="mock-long",
        body_has=_DETAILS,
    ),
    talk("MI-20 in a conversation", {"temperature": 0}, body_has={"model": "mock"}),
    Case(
        "MI-23",
        "POST",
        "/infer",
        body={**_NATIVE, "parameters": {"top_p": 1.0}},
        **refused(_TOP_P.format(1.0)),
    ),
    Case(
        "MI-23 0.99",
        "POST",
        "/infer",
        body={**_NATIVE, "parameters": {"top_p": 0.99}},
        body_is={"generated_text": "Hello world!"},
    ),
)
