"""Bodies of infer: tensors with shapes, as JSON or as binary data after the JSON."""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.core.errors import MalformedRequest
from protocols.core.extra import KeyTree, read_extra_fields
from protocols.core.interfaces import ClientRequest
from protocols.core.request import ExtraFields, FieldPath
from protocols.triton import errors, rapidjson, tensors
from protocols.triton.params import PROMPT_INPUT, TritonProfile
from protocols.triton.rapidjson import OrderedFields
from protocols.triton.requests import check_encoding, check_kind, read_request_id
from protocols.triton.tensors import InputTensor, TritonRequest

_INTEGER_PATTERN = re.compile(r"\s*([+-]?[0-9]{1,18})(?![0-9])")
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
    return check_kind(name, rapidjson.parse_value(value) if type(value) is Raw else value, kind)


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
    elif name == "binary_data_output":
        check_kind(name, value, "boolean")
    elif name in {"sequence_start", "sequence_end"}:
        check_kind(name, value, "boolean")
        request.add_parameter(name, value, fields)
    elif name == "sequence_id":
        if not isinstance(value, str):
            _check_unsigned(name, value)
        request.add_parameter(name, value, fields)
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
        outputs.setdefault(name, check_kind("binary_data", is_binary, "boolean"))
    return outputs


def _check_outputs(requested: Mapping[str, bool], model: str, profile: TritonProfile) -> None:
    known = {output.name for output in profile.outputs}
    for name in requested:
        if name not in known:
            text = f"unexpected inference output '{name}' for model '{model}'"
            raise errors.build_value_error("outputs", text)
