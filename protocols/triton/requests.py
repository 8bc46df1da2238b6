"""Client bodies to the internal request: generate, generate_stream and infer."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols import params
from protocols.core.errors import (
    ClientError,
    InvalidParameter,
    MalformedRequest,
    UnsupportedFeature,
)
from protocols.core.extra import KeyTree, read_extra_fields
from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import decode_json
from protocols.core.request import (
    ChoiceFormat,
    EmbeddingRequest,
    ExtraFields,
    FieldPath,
    GenerationRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutputFormat,
    RegexFormat,
    RerankRequest,
    ResponseOptions,
)
from protocols.json_body import JSON_ERRORS
from protocols.params import Param, ParamType, ParsedParams
from protocols.triton import errors, rapidjson, tensors
from protocols.triton.params import (
    DOCUMENTS_INPUT,
    GUIDE_OBJECT_PARAMS,
    GUIDE_PARAM_NAMES,
    GUIDE_TEXT,
    GUIDE_TYPE,
    PROMPT_INPUT,
    QUERY_INPUT,
    OutputSpec,
    TritonProfile,
)
from protocols.triton.rapidjson import OrderedFields
from protocols.triton.tensors import InputTensor, TritonRequest

# Output formats, by the parameters of each model family.


def read_output_format(parameters: Mapping[str, Any], guide: str) -> OutputFormat | None:
    """Read the output format. Raises InvalidParameter."""
    values = {name: parameters[name] for name in GUIDE_PARAM_NAMES[guide] if name in parameters}
    if guide == "pair" and GUIDE_TYPE in values:
        return _parse_guide_pair(values[GUIDE_TYPE], values.get(GUIDE_TEXT))
    for name in GUIDE_OBJECT_PARAMS:
        if name in values:
            return _parse_guide_object(name, str(values[name]))
    return None


def _parse_guide_object(name: str, text: str) -> OutputFormat:
    try:
        guide = decode_json(text, kind=dict[str, Raw])
        for kind, raw in guide.items():
            value = decode_json(raw)
            if value is not None and value is not False:
                return _build_output_format(kind, value)
    except (*JSON_ERRORS, TypeError):
        pass
    raise errors.build_model_error(
        name, f"'{name}' must be the JSON text of an object with a guide"
    )


def _parse_guide_pair(kind: str, text: str | None) -> OutputFormat:
    try:
        if kind == "json":
            return JsonObjectFormat()
        if text is not None:
            guide = {"json_schema": "json", "ebnf_grammar": "grammar"}.get(kind, kind)
            return _build_output_format(guide, text)
    except (msgspec.DecodeError, TypeError):
        pass
    raise errors.build_model_error(
        GUIDE_TYPE, f"'{GUIDE_TYPE}' and '{GUIDE_TEXT}' do not make a guide"
    )


def _build_output_format(kind: str, value: Any) -> OutputFormat:
    match kind, value:
        case "json_object", True:
            return JsonObjectFormat()
        case "json", str():
            decode_json(value, kind=dict[str, Raw])
            return JsonSchemaFormat(Raw(value))
        case "json", dict():
            return JsonSchemaFormat(Raw(msgspec.json.encode(value)))
        case "regex", str():
            return RegexFormat(value)
        case "grammar", str():
            return GrammarFormat(value)
        case "choice", [str(), *_] if all(isinstance(option, str) for option in value):
            return ChoiceFormat(tuple(value))
        case _:
            raise TypeError(kind)


# --- towards workers ------------------------------------------------------------------------------


_PAIR_TYPES: Final[Mapping[str, str]] = {
    "json_object": "json",
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf_grammar",
}
"""The guide types of ``pair``, by the names of ``object``."""


def write_output_format(output: OutputFormat, guide: str) -> dict[str, str]:
    """Return the parameters for this format; empty if the family supports none."""
    kind, value = _get_guide(output)
    if guide == "object":
        return {GUIDE_OBJECT_PARAMS[0]: msgspec.json.encode({kind: value}).decode()}
    if guide == "none" or kind not in _PAIR_TYPES:
        return {}
    text = {} if value is True else {GUIDE_TEXT: value}
    if isinstance(value, Raw):
        text = {GUIDE_TEXT: bytes(value).decode()}
    return {GUIDE_TYPE: _PAIR_TYPES[kind], **text}


def _get_guide(output: OutputFormat) -> tuple[str, Any]:
    match output:
        case JsonObjectFormat():
            return "json_object", True
        case JsonSchemaFormat(schema):
            return "json", schema
        case RegexFormat(pattern):
            return "regex", pattern
        case ChoiceFormat(options):
            return "choice", options
        case _:
            return "grammar", output.text


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


# Bodies of generate and generate_stream.

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
    request_id: str = _check_kind("id", fields.get_value("id"), "string")
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


# Bodies of infer: tensors with shapes, as JSON or as binary data after the JSON.

_INTEGER_PATTERN = re.compile(r"\s*([+-]?[0-9]+)")
_DATATYPES: Final = frozenset(
    {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
     "FP32", "FP64", "BYTES", "BF16"}
)  # fmt: skip
_INFER_KEYS: Final = frozenset({"id", "parameters", "inputs", "outputs"})
_INPUT_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("name", "datatype", "shape", "data")),
    "parameters": {"binary_data_size": None},
}
_OUTPUT_KEYS: Final[KeyTree] = {"name": None, "parameters": {"binary_data": None}}
_DATA_SOURCE_ERROR: Final = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
    " 'shared_memory_region' in 'parameters'. But"
)
_MAX_PRIORITY: Final = 255
_JSON_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "array": list,
    "boolean": bool,
}


class RequestedOutputs(Struct, frozen=True):
    """The requested outputs (None: all), and which of them as binary data."""

    outputs: Mapping[str, bool] | None
    binary_by_default: bool

    def includes(self, name: str) -> bool:
        """Whether this output is requested."""
        return self.outputs is None or name in self.outputs

    def is_binary(self, name: str) -> bool:
        """Whether this output is requested as binary data."""
        return self.binary_by_default if self.outputs is None else self.outputs.get(name, False)


def read_infer_request(call: ClientRequest, profile: TritonProfile) -> TritonRequest:
    """Read the body. Raises MalformedRequest, InvalidParameter and UnsupportedFeature."""
    check_encoding(call)
    length = _read_header_length(call)
    model = call.path_params["model"]
    if length == 0:
        return _read_raw_prompt(call.body, model, profile)
    fields = _parse_body_fields(call.body[:length])
    request = TritonRequest(model, read_request_id(fields))
    beside: dict[FieldPath, Any] = {
        (name,): fields.get_value(name) for name in fields if name not in _INFER_KEYS
    }
    if beside:
        request.unknown.append(ExtraFields("", beside))
    _read_parameters(request, fields)
    rest = memoryview(call.body)[length:]
    for i, value in enumerate(_read_member(fields, "inputs", "array")):
        rest = _read_input(request, value, rest)
        _keep_unknown_keys(request.unknown, value, f"inputs[{i}]", _INPUT_KEYS)
    if rest:
        text = f"unexpected additional input data for model '{model}'"
        raise errors.build_value_error("inputs", text)
    _check_outputs(_read_outputs(fields, request.unknown), model, profile)
    tensors.check_inputs(request, profile)
    return request


def read_requested_outputs(call: ClientRequest) -> RequestedOutputs:
    """Read the output options of a body."""
    length = _read_header_length(call)
    if length == 0:
        return RequestedOutputs(None, binary_by_default=True)
    fields = _parse_body_fields(call.body[:length])
    raw = fields.get("parameters")
    parameters = {} if raw is None else fields.get_value("parameters")
    return RequestedOutputs(
        _read_outputs(fields, []) or None,
        binary_by_default=parameters.get("binary_data_output", False),
    )


def _read_header_length(call: ClientRequest) -> int:
    """Return the length of the JSON part. 0: the whole body is one binary tensor."""
    size = len(call.body)
    header = call.headers.get(errors.JSON_LENGTH_HEADER)
    if header is None:
        return size
    number = _INTEGER_PATTERN.match(header)
    if number is None:
        text = f"Unable to parse Inference-Header-Content-Length, got: {header}"
        raise errors.build_value_error(errors.JSON_LENGTH_HEADER, text)
    if not 0 <= int(number[1]) <= size:
        text = f"inference header size should be in range (0, {size}), got: {header}"
        raise errors.build_value_error(errors.JSON_LENGTH_HEADER, text)
    return int(number[1])


def _parse_body_fields(text: bytes) -> OrderedFields:
    try:
        return rapidjson.parse_fields(text)
    except MalformedRequest as e:
        if e.problem != "object":
            raise
        raise errors.build_type_error("inputs", _describe_missing_member("inputs")) from None


def _read_raw_prompt(data: bytes, model: str, profile: TritonProfile) -> TritonRequest:
    """Read a body that is only the prompt, if the model has no other input."""
    count = sum(spec.is_counted for spec in profile.inputs.values())
    if count != 1:
        text = (
            "Raw request must only have 1 input (found 1) to be deduced but got"
            f" {count} inputs in '{model}' model configuration"
        )
        raise errors.build_core_error(None, "inputs", text)
    (prompt,) = tensors.unpack_tensor(PROMPT_INPUT, "BYTES", len(data).to_bytes(4, "little") + data)
    request = TritonRequest(model)
    request.add_input(InputTensor(PROMPT_INPUT, "BYTES", (1,), [prompt]))
    return request


def _describe_missing_member(name: str) -> str:
    return f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"


def _read_member(members: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return a member of this type. Raises InvalidParameter, also if it is absent."""
    if name not in members:
        raise errors.build_type_error(name, _describe_missing_member(name))
    value = members[name]
    return _check_kind(name, rapidjson.parse_value(value) if type(value) is Raw else value, kind)


def _check_kind(name: str, value: Any, kind: str) -> Any:
    if not isinstance(value, _JSON_KINDS[kind]):
        text = f"Unable to parse '{name}': attempt to access JSON non-{kind} as {kind}"
        raise errors.build_type_error(name, text)
    return value


def _check_unsigned(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        text = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise errors.build_type_error(name, f"Unable to parse '{name}': {text}")
    return value


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_parameters(request: TritonRequest, fields: OrderedFields) -> None:
    raw = fields.get("parameters")
    if raw is None:
        return
    if not bytes(raw).startswith(b"{"):
        text = "failed to get request params.: attempt to get members for non-object"
        raise errors.build_type_error("parameters", text)
    inner = fields.parse_nested("parameters")
    for name in inner.names:
        _read_parameter(request, name, inner)


def _read_parameter(request: TritonRequest, name: str, fields: OrderedFields) -> None:
    value = fields.get_value(name)
    if name == "priority":
        request.priority = min(_check_unsigned(name, value), _MAX_PRIORITY) or None
    elif name == "timeout":
        request.timeout = _check_unsigned(name, value) / 1_000_000 or None
    elif name in {"sequence_start", "sequence_end", "binary_data_output"}:
        _check_kind(name, value, "boolean")
    elif name == "sequence_id":
        if not isinstance(value, str):
            _check_unsigned(name, value)
    elif name.startswith("triton_"):
        text = "parameter keys starting with 'triton_' are reserved for Triton usage and should"
        raise errors.build_value_error(name, f"{text} not be specified.")
    elif isinstance(value, str | int | float):
        request.add_parameter(name, value, fields)
    else:
        raise errors.build_parameter_type_error(name)


def _read_input(request: TritonRequest, value: Any, rest: memoryview) -> memoryview:
    """Add one input; return the remaining binary data."""
    members = _as_object(value)
    parameters = _as_object(members.get("parameters"))
    _check_source(members, parameters)
    name = _read_member(members, "name", "string")
    datatype = _read_member(members, "datatype", "string")
    shape = tuple(_check_unsigned("shape", dim) for dim in _read_member(members, "shape", "array"))
    if datatype not in _DATATYPES:
        raise errors.build_value_error(name, f"invalid datatype for input {name}")
    if "shared_memory_region" in parameters:
        text = f"Unable to find shared memory region: '{parameters['shared_memory_region']}'"
        raise errors.build_value_error(name, text)
    size = 0
    if "binary_data_size" in parameters:
        size = _check_unsigned("binary_data_size", parameters["binary_data_size"])
        if size > len(rest):
            text = f"unexpected size for input '{name}', expecting {size - len(rest)} additional"
            raise errors.build_value_error(name, f"{text} bytes for model '{request.model}'")
        values = tensors.unpack_tensor(name, datatype, bytes(rest[:size]))
    else:
        data = tensors.flatten_values(_read_member(members, "data", "array"))
        values = tensors.check_values(name, datatype, data)
    request.add_input(InputTensor(name, datatype, shape, values))
    return rest[size:]


def _keep_unknown_keys(
    unknown: list[ExtraFields], tensor: Mapping[str, Any], at: str, known: KeyTree
) -> None:
    """Keep the unknown keys of a valid tensor, for the worker's tensor of that name."""
    if extra := read_extra_fields(tensor, at, known):
        inside = (at.partition("[")[0], tensor["name"])
        unknown.append(replace(extra, inside=inside))


def _check_source(members: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    sources = [name for name in ("data",) if name in members]
    sources += [name for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if len(sources) != 1:
        names = "".join(f" '{name}'" for name in sources)
        problem = f"set{names}" if sources else "no field is set"
        raise errors.build_value_error("inputs", f"{_DATA_SOURCE_ERROR} {problem}")


def _read_outputs(fields: OrderedFields, unknown: list[ExtraFields]) -> dict[str, bool]:
    """Read the requested outputs, and whether each is binary. Add the keys that are unknown."""
    if fields.get("outputs") is None:
        return {}
    outputs: dict[str, bool] = {}
    for i, value in enumerate(_read_member(fields, "outputs", "array")):
        members = _as_object(value)
        name = _read_member(members, "name", "string")
        _keep_unknown_keys(unknown, members, f"outputs[{i}]", _OUTPUT_KEYS)
        is_binary = _as_object(members.get("parameters")).get("binary_data", False)
        outputs.setdefault(name, _check_kind("binary_data", is_binary, "boolean"))
    return outputs


def _check_outputs(requested: Mapping[str, bool], model: str, profile: TritonProfile) -> None:
    known = {output.name for output in profile.outputs}
    for name in requested:
        if name not in known:
            text = f"unexpected inference output '{name}' for model '{model}'"
            raise errors.build_value_error("outputs", text)
