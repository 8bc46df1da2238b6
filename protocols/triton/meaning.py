"""From tensors and parameters to the internal request."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from msgspec import Raw

from protocols import params
from protocols.core.errors import InvalidParameter, MalformedRequest, UnsupportedFeature
from protocols.core.request import GenerationRequest, ResponseOptions
from protocols.params import Param, ParamType, ParsedParams
from protocols.triton import document, faults, guided
from protocols.triton.tensors import InputTensor, TritonRequest
from protocols.triton.vocabulary import PROMPT_INPUT, OutputSpec, TritonProfile

PromptMode = Literal["raw", "chat"]
TemplatingMode = Literal["raw", "server"]
TEMPLATING_MODES: Final[Mapping[PromptMode, TemplatingMode]] = {"raw": "raw", "chat": "server"}
"""What the words of the configuration are in ``Templating.mode``."""

_SAMPLING_PARAMETERS = "sampling_parameters"
_Coercion = tuple[Callable[[Any], Any], Collection[type]]
_COERCIONS: Final[Mapping[ParamType, _Coercion]] = {
    "int": (int, (str, float, bool)),
    "strict int": (int, (str, float, bool)),
    "float": (float, (str, bool)),
    "bool": (bool, (bool, int, float, str, list, dict, type(None))),
    "str": (str, (int, float, bool)),
}
"""What converts a parameter of each type, and from what."""
_PROMPT_INPUTS: Final = frozenset({PROMPT_INPUT, _SAMPLING_PARAMETERS})
_LOGPROB_OUTPUTS = frozenset(
    {"cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}
)
_TOKEN_COUNT_OUTPUTS = frozenset({"num_input_tokens", "num_output_tokens"})


def build_request(
    sent: TritonRequest, profile: TritonProfile, mode: TemplatingMode, *, stream: bool
) -> GenerationRequest:
    """What the client asks; ``mode`` says how a prompt becomes the model's input.

    Raises InvalidParameter and Unsupported.
    """
    said = _collect_parameters(sent, profile)
    if profile.cancel_flag and bytes(said.pop(profile.cancel_flag, b"")) == b"true":
        text = "a running request is ended by closing its connection"
        raise UnsupportedFeature(text, param=profile.cancel_flag)
    values = _read_sampling_values(said, profile)
    values.given |= {*sent.inputs, *said} - _find_declined_flags(said, profile)
    asked = {one.name for one in list_requested_outputs(profile, values.given)}
    if _LOGPROB_OUTPUTS & asked and "logprobs.top" not in values:
        values["logprobs.top"] = 0
    values["templating.mode"] = mode
    echo = _read_echo(said, profile, streaming=sent.streaming is True)
    return GenerationRequest(
        model=sent.model,
        kind="completion",
        prompts=tuple(sent.inputs[PROMPT_INPUT].values),
        echo=echo or None,
        stream=stream,
        want=ResponseOptions(
            "final" if asked & _TOKEN_COUNT_OUTPUTS else "none", details="finish_reason" in asked
        ),
        output=guided.read_output_format(said, profile.guide_style),
        client_id=sent.id,
        priority=sent.priority,
        timeout=sent.timeout,
        extra=_collect_extra_fields(said, profile),
        **values.build_request_arguments(),
    )


def list_requested_outputs(profile: TritonProfile, given: Collection[str]) -> list[OutputSpec]:
    """The outputs beside the text that were asked for, by flags among ``Request.given``."""
    if profile.output_flags.isdisjoint(given):
        return []
    return [output for output in profile.outputs if output.flag in given]


def _find_declined_flags(said: Mapping[str, Raw], profile: TritonProfile) -> set[str]:
    """The flags for outputs that were sent, and do not ask for them."""
    flags = profile.output_flags.intersection(said)
    return {name for name in flags if bytes(said[name]) != b"true"}


def _collect_parameters(sent: TritonRequest, profile: TritonProfile) -> dict[str, Raw]:
    """Everything but the prompt and the id, by name, as JSON."""
    parameters = sent.parameters
    if _SAMPLING_PARAMETERS in sent.inputs:
        parameters = _unpack_sampling_parameters(
            sent.inputs[_SAMPLING_PARAMETERS].values[0], profile
        )
    said = {**parameters}
    said.pop("id", None)
    for name, tensor in sent.inputs.items():
        if name not in _PROMPT_INPUTS:
            said[name] = document.encode_raw(_get_tensor_value(tensor, profile))
    return said


def _unpack_sampling_parameters(text: str, profile: TritonProfile) -> dict[str, Raw]:
    """The sampling parameters that came as one string. They replace all others."""
    try:
        fields = document.parse_fields(text.encode())
    except MalformedRequest as e:
        complaint = (
            f"{profile.error_prefix}'{_SAMPLING_PARAMETERS}' is not the JSON text of an object: {e}"
        )
        raise faults.build_model_error(_SAMPLING_PARAMETERS, complaint) from None
    return {n: fields[n] for n in fields.names if document.parse_value(fields[n]) is not None}


def _get_tensor_value(tensor: InputTensor, profile: TritonProfile) -> Any:
    """A tensor as one value: the batch shares one sampling, or can't be answered."""
    if profile.inputs[tensor.name].dims != (1,):
        return tensor.values
    first = tensor.values[0]
    if isinstance(first, float) and not math.isfinite(first):
        raise faults.build_model_error(tensor.name, f"'{tensor.name}' must be a finite number")
    if tensor.values != [first] * len(tensor.values):
        raise UnsupportedFeature(
            f"input '{tensor.name}' must be the same for every prompt of a batch",
            param=tensor.name,
        )
    return first


def _read_sampling_values(said: Mapping[str, Raw], profile: TritonProfile) -> ParsedParams:
    values = ParsedParams()
    try:
        rows = params.select_by_wire(profile.parameters, said)
        for row, what in [(row, _read_param_value(row, said[row.wire], profile)) for row in rows]:
            params.store_param(row, what, values)
    except InvalidParameter as e:
        raise faults.build_model_error(e.param or "", profile.error_prefix + e.message) from None
    if "sampling.seed" in values:
        values["sampling.seed"] %= 2**64
    for path in ("stopping.stop", "sampling.bad_words"):
        if path in values:
            values[path] = tuple(word for word in values[path] if word)
    return values


def _read_param_value(row: Param, raw: Raw, profile: TritonProfile) -> Any:
    """The value, as the model's own conversion makes it."""
    what = document.parse_value(raw)
    if profile.coerces_params:
        what = _coerce_value(row, what)
    if type(what) is float and not math.isfinite(what):
        raise faults.build_model_error(row.wire, f"'{row.wire}' must be a finite number")
    return what


def _coerce_value(row: Param, what: Any) -> Any:
    """The value as Python's constructors have it, of the kinds that these take."""
    if row.type not in _COERCIONS:
        return what
    convert, kinds = _COERCIONS[row.type]
    if type(what) not in kinds:
        return what
    try:
        return convert(what)
    except (ValueError, OverflowError):
        return what  # the table complains of it


def _read_echo(said: Mapping[str, Raw], profile: TritonProfile, *, streaming: bool) -> bool:
    sent = [bytes(said[name]) for name in profile.exclude_prompt_flags if name in said]
    if not streaming:
        return sent[0] == b"false" if sent else profile.echoes_prompt
    if sent == [b"false"] and profile.rejects_stream_echo:
        flag = profile.exclude_prompt_flags[0]
        text = f"{profile.error_prefix}When streaming, `{flag}` = False is not allowed."
        raise faults.build_model_error(flag, text)
    return False


def _collect_extra_fields(said: Mapping[str, Raw], profile: TritonProfile) -> dict[str, Raw]:
    apart = (
        *profile.stream_flags,
        *profile.exclude_prompt_flags,
        *guided.GUIDE_PARAM_NAMES[profile.guide_style],
    )
    return {
        name: raw
        for name, raw in said.items()
        if name not in profile.parameters.by_wire
        and name not in apart
        and name not in profile.output_flags
    }
