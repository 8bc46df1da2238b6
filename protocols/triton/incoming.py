"""What workers answer: an object of the model's outputs, in one piece or one for each event."""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.core.errors import Malformed, WorkerFailed
from gateway.core.types import GenerateRequest, TokenLogprob, TopLogprob
from protocols.triton import document
from protocols.triton.failures import complain
from protocols.triton.tensors import flat
from protocols.triton.vocabulary import TEXT

_CAREFULLY_READ: Final = 1 << 20
"""Bytes of an answer that are worth a second look for numbers which JSON does not have."""
_decode = msgspec.json.Decoder().decode


class Said(Struct):
    """One answer, or a piece of one: in each list an element for each choice, as far as told."""

    texts: list[str]
    reasons: list[str]
    stops: list[str]
    counts: list[int]
    prompt_tokens: int | None
    logprobs: list[tuple[TokenLogprob, ...]]
    model: str | None


class _Candidate(Struct):
    logprob: float | None = None
    rank: int | None = None
    decoded_token: str | None = None


_Column = list[dict[str, _Candidate]]


def read(body: bytes, request: GenerateRequest, wires: Mapping[str, str]) -> Said:
    """What an object holds; ``wires`` are the model's own names for outputs, where they differ.

    Raises what an error in it means, and WorkerFailed for what can't be read.
    """
    try:
        got = _decode(body) if len(body) > _CAREFULLY_READ else document.value(body)
    except (Malformed, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise WorkerFailed("The worker's answer can't be read.") from e
    text = wires.get(TEXT, TEXT)
    complain(got, text)
    if not isinstance(got, dict) or not (text in got or "model_name" in got):
        raise WorkerFailed("The worker's answer is not in its dialect.")

    def output(name: str) -> list[Any]:
        return flat(got[wire]) if (wire := wires.get(name, name)) in got else []

    texts = output(TEXT)
    if not all(isinstance(one, str) for one in texts):
        raise WorkerFailed("The worker's answer is no text.")
    prompt = _counts(output("num_input_tokens"))
    name = got.get("model_name")
    return Said(
        texts,
        _strings(output("finish_reason")),
        _strings(output("stop_reason")),
        _counts(output("num_output_tokens")),
        prompt[0] if prompt else None,
        _logprobs(output("logprobs"), output("output_log_probs"), texts, request),
        name if isinstance(name, str) else None,
    )


def _strings(values: list[Any]) -> list[str]:
    return [one if isinstance(one, str) else "None" for one in values]


def _counts(values: list[Any]) -> list[int]:
    return [one for one in values if type(one) is int and one >= 0]


def _logprobs(
    told: list[Any], numbers: list[Any], texts: list[str], request: GenerateRequest
) -> list[tuple[TokenLogprob, ...]]:
    """For each choice, from either family's output: JSON of candidates, or bare numbers."""
    if request.logprobs is None or not texts:
        return []
    if told:
        return [_column(one, request.logprobs.top) for one in told]
    size = len(numbers) // len(texts)
    return [
        _bare(numbers[i * size : (i + 1) * size], text if size == 1 else "")
        for i, text in enumerate(texts)
    ]


def _column(told: Any, top: int) -> tuple[TokenLogprob, ...]:
    if not isinstance(told, str):
        return ()
    try:
        column = msgspec.convert(document.value(told.encode()), _Column | None)
    except (Malformed, msgspec.ValidationError) as e:
        raise WorkerFailed("The worker's log probabilities can't be read.") from e
    return tuple(_token(one, top) for one in column or () if one)


def _token(candidates: Mapping[str, _Candidate], top: int) -> TokenLogprob:
    """The token that was taken stands first; the likeliest have a rank."""
    found = [
        TopLogprob(one.decoded_token or "", _number(one.logprob), _id(key))
        for key, one in sorted(candidates.items(), key=lambda item: item[1].rank or 0)
        if one.rank is not None and (top < 0 or one.rank <= top)
    ]
    key, taken = next(iter(candidates.items()))
    return TokenLogprob(taken.decoded_token or "", _finite(taken.logprob), tuple(found), _id(key))


def _bare(numbers: list[Any], text: str) -> tuple[TokenLogprob, ...]:
    """Numbers alone: which token each is of shows only where there is one."""
    values = [one if isinstance(one, float) else None for one in numbers]
    return tuple(TokenLogprob(text, _finite(one)) for one in values)


def _id(key: str) -> int | None:
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= 20 else None  # noqa: PLR2004 - more is no token


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is not None and math.isfinite(logprob) else None


def _number(logprob: float | None) -> float:
    return float("-inf") if logprob is None or math.isnan(logprob) else logprob
