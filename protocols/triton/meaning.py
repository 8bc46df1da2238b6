"""From tensors and parameters to the internal request."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from msgspec import Raw

from gateway.core.errors import InvalidParameter, Malformed, Unsupported
from gateway.core.types import GenerateRequest, Want
from protocols import params
from protocols.params import Param, Type, Values
from protocols.triton import document, faults, guided
from protocols.triton.tensors import Sent, Tensor
from protocols.triton.vocabulary import PROMPT, Output, Profile

Prompts = Literal["raw", "chat"]
Mode = Literal["raw", "server"]
MODES: Final[Mapping[Prompts, Mode]] = {"raw": "raw", "chat": "server"}
"""What the words of the configuration are in ``Templating.mode``."""

_SAMPLING = "sampling_parameters"
_Coercion = tuple[Callable[[Any], Any], Collection[type]]
_COERCED: Final[Mapping[Type, _Coercion]] = {
    "int": (int, (str, float, bool)),
    "strict int": (int, (str, float, bool)),
    "float": (float, (str, bool)),
    "bool": (bool, (bool, int, float, str, list, dict, type(None))),
    "str": (str, (int, float, bool)),
}
"""What converts a parameter of each type, and from what."""
_APART: Final = frozenset({PROMPT, _SAMPLING})
_LOGPROBS = frozenset({"cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"})
_COUNTS = frozenset({"num_input_tokens", "num_output_tokens"})


def request(sent: Sent, profile: Profile, mode: Mode, *, stream: bool) -> GenerateRequest:
    """What the client asks; ``mode`` says how a prompt becomes the model's input.

    Raises InvalidParameter and Unsupported.
    """
    said = _said(sent, profile)
    if profile.cancel_flag and bytes(said.pop(profile.cancel_flag, b"")) == b"true":
        text = "a running request is ended by closing its connection"
        raise Unsupported(text, param=profile.cancel_flag)
    values = _sampled(said, profile)
    values.given |= {*sent.inputs, *said} - _declined(said, profile)
    asked = {one.name for one in wanted(profile, values.given)}
    if _LOGPROBS & asked and "logprobs.top" not in values:
        values["logprobs.top"] = 0
    values["templating.mode"] = mode
    echo = _echo(said, profile, streaming=sent.streaming is True)
    return GenerateRequest(
        model=sent.model,
        kind="completion",
        prompts=tuple(sent.inputs[PROMPT].values),
        echo=echo or None,
        stream=stream,
        want=Want("final" if asked & _COUNTS else "none", details="finish_reason" in asked),
        output=guided.read(said, profile.guide_style),
        client_id=sent.id,
        priority=sent.priority,
        timeout=sent.timeout,
        extra=_extra(said, profile),
        **values.build_request_arguments(),
    )


def wanted(profile: Profile, given: Collection[str]) -> list[Output]:
    """The outputs beside the text that were asked for, by flags among ``Request.given``."""
    if profile.output_flags.isdisjoint(given):
        return []
    return [output for output in profile.outputs if output.flag in given]


def _declined(said: Mapping[str, Raw], profile: Profile) -> set[str]:
    """The flags for outputs that were sent, and do not ask for them."""
    flags = profile.output_flags.intersection(said)
    return {name for name in flags if bytes(said[name]) != b"true"}


def _said(sent: Sent, profile: Profile) -> dict[str, Raw]:
    """Everything but the prompt and the id, by name, as JSON."""
    parameters = sent.parameters
    if _SAMPLING in sent.inputs:
        parameters = _unpacked(sent.inputs[_SAMPLING].values[0], profile)
    said = {**parameters}
    said.pop("id", None)
    for name, tensor in sent.inputs.items():
        if name not in _APART:
            said[name] = document.compact(_content(tensor, profile))
    return said


def _unpacked(text: str, profile: Profile) -> dict[str, Raw]:
    """The sampling parameters that came as one string. They replace all others."""
    try:
        fields = document.fields(text.encode())
    except Malformed as e:
        complaint = f"{profile.error_prefix}'{_SAMPLING}' is not the JSON text of an object: {e}"
        raise faults.refused_by_model(_SAMPLING, complaint) from None
    return {n: fields[n] for n in fields.names if document.value(fields[n]) is not None}


def _content(tensor: Tensor, profile: Profile) -> Any:
    """A tensor as one value: the batch shares one sampling, or can't be answered."""
    if profile.inputs[tensor.name].dims != (1,):
        return tensor.values
    first = tensor.values[0]
    if isinstance(first, float) and not math.isfinite(first):
        raise faults.refused_by_model(tensor.name, f"'{tensor.name}' must be a finite number")
    if tensor.values != [first] * len(tensor.values):
        raise Unsupported(
            f"input '{tensor.name}' must be the same for every prompt of a batch",
            param=tensor.name,
        )
    return first


def _sampled(said: Mapping[str, Raw], profile: Profile) -> Values:
    values = Values()
    try:
        rows = params.sent(profile.parameters, said)
        for row, what in [(row, _plain(row, said[row.wire], profile)) for row in rows]:
            params.put(row, what, values)
    except InvalidParameter as e:
        raise faults.refused_by_model(e.param or "", profile.error_prefix + e.message) from None
    if "sampling.seed" in values:
        values["sampling.seed"] %= 2**64
    for path in ("stopping.stop", "sampling.bad_words"):
        if path in values:
            values[path] = tuple(word for word in values[path] if word)
    return values


def _plain(row: Param, raw: Raw, profile: Profile) -> Any:
    """The value, as the model's own conversion makes it."""
    what = document.value(raw)
    if profile.coerces_params:
        what = _coerced(row, what)
    if type(what) is float and not math.isfinite(what):
        raise faults.refused_by_model(row.wire, f"'{row.wire}' must be a finite number")
    return what


def _coerced(row: Param, what: Any) -> Any:
    """The value as Python's constructors have it, of the kinds that these take."""
    if row.type not in _COERCED:
        return what
    convert, kinds = _COERCED[row.type]
    if type(what) not in kinds:
        return what
    try:
        return convert(what)
    except (ValueError, OverflowError):
        return what  # the table complains of it


def _echo(said: Mapping[str, Raw], profile: Profile, *, streaming: bool) -> bool:
    sent = [bytes(said[name]) for name in profile.exclude_prompt_flags if name in said]
    if not streaming:
        return sent[0] == b"false" if sent else profile.echoes_prompt
    if sent == [b"false"] and profile.rejects_stream_echo:
        flag = profile.exclude_prompt_flags[0]
        text = f"{profile.error_prefix}When streaming, `{flag}` = False is not allowed."
        raise faults.refused_by_model(flag, text)
    return False


def _extra(said: Mapping[str, Raw], profile: Profile) -> dict[str, Raw]:
    apart = (
        *profile.stream_flags,
        *profile.exclude_prompt_flags,
        *guided.NAMES[profile.guide_style],
    )
    return {
        name: raw
        for name, raw in said.items()
        if name not in profile.parameters.by_wire
        and name not in apart
        and name not in profile.output_flags
    }
