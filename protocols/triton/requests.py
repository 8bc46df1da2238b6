"""Client bodies of generate and generate_stream to the internal request, and what infer shares."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from msgspec import Raw

from protocols import params
from protocols.core.errors import (
    ClientError,
    InvalidParameter,
    MalformedRequest,
    UnsupportedFeature,
)
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
    ResponseOptions,
)
from protocols.params import Param, ParamType, ParsedParams
from protocols.triton import errors, rapidjson, tensors
from protocols.triton.output_format import read_output_format
from protocols.triton.params import (
    DOCUMENTS_INPUT,
    PROMPT_INPUT,
    QUERY_INPUT,
    OutputSpec,
    TritonProfile,
)
from protocols.triton.rapidjson import OrderedFields
from protocols.triton.tensors import InputTensor, TritonRequest

# --- towards workers ------------------------------------------------------------------------------


PromptMode = Literal["raw", "chat"]
TemplatingMode = Literal["raw", "server"]
UsageMode = Literal["none", "final"]
TEMPLATING_MODES: Final[Mapping[PromptMode, TemplatingMode]] = {"raw": "raw", "chat": "server"}
"""``PromptOptions.mode`` by the configured value."""

_SAMPLING_PARAMETERS = "sampling_parameters"
_COERCIONS: Final[Mapping[ParamType, tuple[Callable[[Any], Any], Collection[type]]]] = {
    "int": (int, (str, float, bool)),
    "strict int": (int, (str, float, bool)),
    "float": (float, (str, bool)),
    "bool": (bool, (bool, int, float, str, list, dict, type(None))),
    "str": (str, (int, float, bool)),
}
"""The converter of each parameter type, and the types that it accepts."""
_PROMPT_INPUTS: Final = frozenset({PROMPT_INPUT, _SAMPLING_PARAMETERS})
_LOGPROB_OUTPUTS = frozenset(
    {"cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}
)
_TOKEN_COUNT_OUTPUTS = frozenset({"num_input_tokens", "num_output_tokens"})


def build_request(
    request: TritonRequest, profile: TritonProfile, mode: TemplatingMode, *, stream: bool
) -> GenerationRequest:
    """Build the internal request; ``mode`` says how a prompt becomes the model's input.

    Raises InvalidParameter and UnsupportedFeature.
    """
    fields, raw_fields = _collect_parameters(request, profile)
    if profile.cancel_flag and fields.pop(profile.cancel_flag, None) is True:
        text = "a running request is ended by closing its connection"
        raise UnsupportedFeature(text, param=profile.cancel_flag)
    values = _read_sampling_values(fields, profile)
    values.provided_fields |= {*request.inputs, *fields} - _find_declined_flags(fields, profile)
    requested = {output.name for output in list_requested_outputs(profile, values.provided_fields)}
    if _LOGPROB_OUTPUTS & requested and "logprobs.top" not in values:
        values["logprobs.top"] = 0
    values["templating.mode"] = mode
    echo = _read_echo(fields, profile, streaming=request.streaming is True)
    usage: UsageMode = "final" if requested & _TOKEN_COUNT_OUTPUTS else "none"
    return GenerationRequest(
        model=request.model,
        kind="completion",
        prompts=tuple(request.inputs[PROMPT_INPUT].values),
        echo=echo or None,
        stream=stream,
        response_options=ResponseOptions(usage, details="finish_reason" in requested),
        output=read_output_format(fields, profile.guide_style),
        client_id=request.id,
        priority=request.priority,
        timeout=request.timeout,
        extra=_collect_extra_fields(fields, raw_fields, profile),
        field_extra=tuple(request.unknown),
        **values.build_request_arguments(),
    )


def build_embedding_request(request: TritonRequest) -> EmbeddingRequest:
    """Build the internal request for the tensors of ``params.EMBEDDING``."""
    return EmbeddingRequest(
        model=request.model,
        inputs=tuple(request.inputs[PROMPT_INPUT].values),
        client_id=request.id,
        priority=request.priority,
        timeout=request.timeout,
        extra={name: raw for name, raw in request.parameters.items() if name != "id"},
        field_extra=tuple(request.unknown),
    )


def build_rerank_request(request: TritonRequest) -> RerankRequest:
    """Build the internal request for the tensors of ``params.RERANK``."""
    return RerankRequest(
        model=request.model,
        queries=tuple(request.inputs[QUERY_INPUT].values),
        documents=tuple(request.inputs[DOCUMENTS_INPUT].values),
        client_id=request.id,
        priority=request.priority,
        timeout=request.timeout,
        extra={name: raw for name, raw in request.parameters.items() if name != "id"},
        field_extra=tuple(request.unknown),
    )


def list_requested_outputs(
    profile: TritonProfile, provided_fields: Collection[str]
) -> list[OutputSpec]:
    """Return the requested extra outputs, by flags in ``provided_fields``."""
    if profile.output_flags.isdisjoint(provided_fields):
        return []
    return [output for output in profile.outputs if output.flag in provided_fields]


def _find_declined_flags(fields: Mapping[str, Any], profile: TritonProfile) -> set[str]:
    """Return the output flags that were sent as false."""
    return {name for name in profile.output_flags.intersection(fields) if fields[name] is not True}


def _collect_parameters(
    request: TritonRequest, profile: TritonProfile
) -> tuple[dict[str, Any], Mapping[str, Raw]]:
    """Return everything but prompt and id by name, and the JSON of what was sent as such."""
    parameters, raw_parameters = request.parameters, request.raw_parameters
    if _SAMPLING_PARAMETERS in request.inputs:
        text = request.inputs[_SAMPLING_PARAMETERS].values[0]
        raw_parameters = _unpack_sampling_parameters(text, profile)
        values = {name: raw_parameters.get_value(name) for name in raw_parameters}
        parameters = {name: value for name, value in values.items() if value is not None}
    fields = dict(parameters)
    fields.pop("id", None)
    for name, tensor in request.inputs.items():
        if name not in _PROMPT_INPUTS:
            fields[name] = _get_tensor_value(tensor, profile)
    return fields, {name: raw for name, raw in raw_parameters.items() if name not in request.inputs}


def _unpack_sampling_parameters(text: str, profile: TritonProfile) -> OrderedFields:
    """Read sampling parameters from one JSON string. They replace all others."""
    try:
        return rapidjson.parse_fields(text.encode())
    except MalformedRequest as e:
        text = f"'{_SAMPLING_PARAMETERS}' is not the JSON text of an object: {e}"
        raise errors.build_model_error(_SAMPLING_PARAMETERS, profile.error_prefix + text) from None


def _get_tensor_value(tensor: InputTensor, profile: TritonProfile) -> Any:
    """Read a tensor as one value; all prompts of a batch must have equal sampling parameters."""
    if profile.inputs[tensor.name].dims != (1,):
        return tensor.values
    first = tensor.values[0]
    if isinstance(first, float) and not math.isfinite(first):
        raise errors.build_model_error(tensor.name, f"'{tensor.name}' must be a finite number")
    if tensor.values != [first] * len(tensor.values):
        raise UnsupportedFeature(
            f"input '{tensor.name}' must be the same for every prompt of a batch",
            param=tensor.name,
        )
    return first


def _read_sampling_values(fields: Mapping[str, Any], profile: TritonProfile) -> ParsedParams:
    values = ParsedParams()
    try:
        rows = params.select_by_wire(profile.parameters, fields)
        for row, value in [
            (row, _convert_param_value(row, fields[row.wire], profile)) for row in rows
        ]:
            params.store_param(row, value, values)
    except InvalidParameter as e:
        raise errors.build_model_error(e.param or "", profile.error_prefix + e.message) from None
    for path in ("stopping.stop", "sampling.bad_words"):
        if path in values:
            values[path] = tuple(word for word in values[path] if word)
    return values


def _convert_param_value(row: Param, value: Any, profile: TritonProfile) -> Any:
    """Convert a value as the model would."""
    if profile.coerces_params:
        value = _coerce_value(row, value)
    if type(value) is float and not math.isfinite(value):
        raise errors.build_model_error(row.wire, f"'{row.wire}' must be a finite number")
    return value


def _coerce_value(row: Param, value: Any) -> Any:
    """Convert a value with a Python constructor, from the types that it accepts."""
    if row.type not in _COERCIONS:
        return value
    convert, types = _COERCIONS[row.type]
    if type(value) not in types:
        return value
    try:
        return convert(value)
    except (ValueError, OverflowError):
        return value  # the table reports the error


def _read_echo(fields: Mapping[str, Any], profile: TritonProfile, *, streaming: bool) -> bool:
    flags = [fields[name] for name in profile.exclude_prompt_flags if name in fields]
    if not streaming:
        return flags[0] is False if flags else profile.echoes_prompt
    if len(flags) == 1 and flags[0] is False and profile.rejects_stream_echo:
        flag = profile.exclude_prompt_flags[0]
        text = f"{profile.error_prefix}When streaming, `{flag}` = False is not allowed."
        raise errors.build_model_error(flag, text)
    return False


def _collect_extra_fields(
    fields: Mapping[str, Any], raw_fields: Mapping[str, Raw], profile: TritonProfile
) -> dict[str, Raw]:
    known, other_fields = profile.parameters.by_wire, profile.fields_without_row
    return {
        name: raw_fields[name] if name in raw_fields else rapidjson.encode_raw(value)
        for name, value in fields.items()
        if name not in known and name not in other_fields
    }


_PARAMETERS_KEY = "parameters"
_STREAM = "generate_stream"
_SUPPORTED_ENCODINGS: Final = frozenset({"identity", "gzip", "deflate"})
"""Encodings that infer accepts; they are already removed from the body."""
_SCALAR_TYPES: Final = (str, int, float, bool)
"""The types of a parameter that is not a tensor."""


def read_generate_request(call: ClientRequest, profile: TritonProfile) -> TritonRequest:
    """Read tensors and parameters, checked in the order in which they were sent.

    Raises MalformedRequest and InvalidParameter.
    """
    check_encoding(call)
    fields = rapidjson.fields_of(call)
    model, request_id = call.path_params["model"], read_request_id(fields)
    request = TritonRequest(model, request_id, streaming=_find_stream_flag(fields, profile))
    for name in fields.names:
        if name == _PARAMETERS_KEY:
            _read_nested_parameters(request, fields, profile)
        else:
            _read_field(request, fields, name, profile)
    tensors.check_inputs(request, profile)
    return request


def check_encoding(call: ClientRequest) -> None:
    """Check the compression. Raises InvalidParameter or UnsupportedFeature."""
    if call.endpoint.operation == "infer":
        encoding = call.headers.get(errors.CONTENT_ENCODING_HEADER, "identity")
        if encoding not in _SUPPORTED_ENCODINGS:
            raise errors.build_compression_error()
    elif is_compressed(call):
        raise errors.build_encoding_error()


def is_compressed(call: ClientRequest) -> bool:
    """Whether the body is compressed, which infer accepts and generate does not."""
    return call.headers.get(errors.CONTENT_ENCODING_HEADER, "identity") != "identity"


def read_stream_flag(call: ClientRequest, profile: TritonProfile) -> bool:
    """Whether generate_stream streams; errors in the body are left to the request reader."""
    if call.endpoint.operation != _STREAM:
        return False
    try:
        flag = _find_stream_flag(rapidjson.fields_of(call), profile)
    except MalformedRequest:
        return True
    return is_streamed(call, profile, flag=flag)


def is_streamed(call: ClientRequest, profile: TritonProfile, *, flag: bool | None) -> bool:
    """Whether the response is streamed, by the body's flag if it was sent."""
    is_requested = profile.streams_by_default if flag is None else flag
    return is_requested and call.endpoint.operation == _STREAM


def _find_stream_flag(fields: OrderedFields, profile: TritonProfile) -> bool | None:
    """Return the stream flag that was sent."""
    objects = [fields]
    if _PARAMETERS_KEY in fields and bytes(fields[_PARAMETERS_KEY]).startswith(b"{"):
        objects.append(fields.parse_nested(_PARAMETERS_KEY))
    for members in objects:
        for name in profile.stream_flags:
            if name in members:
                match tensors.flatten_values(members.get_value(name)):
                    case [bool() as flag]:
                        return flag
                    case _:
                        continue
    return None


def read_request_id(fields: OrderedFields) -> str | None:
    """Read the client's request id, up to a NUL byte. Raises InvalidParameter."""
    if "id" not in fields:
        return None
    request_id: str = check_kind("id", fields.get_value("id"), "string")
    return request_id.partition("\0")[0] or None


def find_request_id(call: ClientRequest) -> str | None:
    """Find the request id for an error text: only in the body of a generate request."""
    if not call.endpoint.operation.startswith("generate"):
        return None
    try:
        return read_request_id(rapidjson.parse_fields(call.body))
    except ClientError:
        return None


def _read_nested_parameters(
    request: TritonRequest, fields: OrderedFields, profile: TritonProfile
) -> None:
    if not bytes(fields[_PARAMETERS_KEY]).startswith(b"{"):
        text = (
            f"Expected JSON object for keyword: '{_PARAMETERS_KEY}': attempt to access JSON"
            " non-object as object"
        )
        raise errors.build_type_error(_PARAMETERS_KEY, text)
    try:
        inner = fields.parse_nested(_PARAMETERS_KEY)
        for name in inner.names:
            _read_field(request, inner, name, profile)
    except InvalidParameter as e:
        raise InvalidParameter(
            f"Converting keyword: '{_PARAMETERS_KEY}': {e.message}",
            param=f"{_PARAMETERS_KEY}.{e.param}",
            problem=e.problem,
        ) from None


def _read_field(
    request: TritonRequest, fields: OrderedFields, name: str, profile: TritonProfile
) -> None:
    value = fields.get_value(name)
    if name in profile.inputs:
        request.add_input(tensors.build_tensor(profile.inputs[name], value, profile))
    elif type(value) in _SCALAR_TYPES:
        request.add_parameter(name, value, fields)
    else:
        raise errors.build_parameter_type_error(name)


_JSON_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "array": list,
    "boolean": bool,
}


def check_kind(name: str, value: Any, kind: str) -> Any:
    """The value, if it is of this JSON kind. Raises MalformedRequest with the server's text."""
    if not isinstance(value, _JSON_KINDS[kind]):
        text = f"Unable to parse '{name}': attempt to access JSON non-{kind} as {kind}"
        raise errors.build_type_error(name, text)
    return value
