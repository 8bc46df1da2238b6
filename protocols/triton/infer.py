"""Reading a body of infer: tensors with shapes, as JSON or as raw bytes behind the JSON."""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw, Struct

from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import ClientRequest
from protocols.triton import binary, document, faults, tensors
from protocols.triton.document import OrderedFields
from protocols.triton.generate import read_request_id
from protocols.triton.tensors import InputTensor, TritonRequest
from protocols.triton.vocabulary import PROMPT_INPUT, TritonProfile

_INTEGER_PATTERN = re.compile(r"\s*([+-]?[0-9]+)")
_DATATYPES: Final = frozenset(
    {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
     "FP32", "FP64", "BYTES", "BF16"}
)  # fmt: skip
_DATA_SOURCE_ERROR: Final = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
    " 'shared_memory_region' in 'parameters'. But"
)
_SUPPORTED_ENCODINGS: Final = frozenset({"identity", "gzip", "deflate"})
"""The body comes to us without them."""
_MAX_PRIORITY: Final = 255
_JSON_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "array": list,
    "boolean": bool,
}


class RequestedOutputs(Struct, frozen=True):
    """How the answer shall come: which outputs (None: all), and which of them as raw bytes."""

    outputs: Mapping[str, bool] | None
    binary_by_default: bool

    def includes(self, name: str) -> bool:
        """Whether this output is wanted."""
        return self.outputs is None or name in self.outputs

    def is_binary(self, name: str) -> bool:
        """Whether this output is wanted as raw bytes."""
        return self.binary_by_default if self.outputs is None else self.outputs.get(name, False)


def read_infer_request(call: ClientRequest, profile: TritonProfile) -> TritonRequest:
    """The tensors and parameters. Raises Malformed, InvalidParameter and Unsupported."""
    if not has_supported_encoding(call):
        raise faults.build_compression_error()
    length = _read_header_length(call)
    model = call.path_params["model"]
    if length == 0:
        return _read_raw_prompt(call.body, model, profile)
    fields = _parse_body_fields(call.body[:length])
    sent = TritonRequest(model, read_request_id(fields))
    _read_parameters(sent, fields)
    rest = memoryview(call.body)[length:]
    for spec in _read_member(fields, "inputs", "array"):
        rest = _read_input(sent, spec, rest)
    if rest:
        text = f"unexpected additional input data for model '{model}'"
        raise faults.build_value_error("inputs", text)
    _check_outputs(_read_outputs(fields), model, profile)
    tensors.check_inputs(sent, profile)
    return sent


def has_supported_encoding(call: ClientRequest) -> bool:
    """Whether the body is compressed in a way that this endpoint knows, or not at all."""
    return call.headers.get(faults.CONTENT_ENCODING_HEADER, "identity") in _SUPPORTED_ENCODINGS


def read_requested_outputs(call: ClientRequest) -> RequestedOutputs:
    """How to answer a body that ``read`` has read."""
    length = _read_header_length(call)
    if length == 0:
        return RequestedOutputs(None, binary_by_default=True)
    fields = _parse_body_fields(call.body[:length])
    raw = fields.get("parameters")
    parameters = {} if raw is None else document.parse_value(raw)
    return RequestedOutputs(
        _read_outputs(fields) or None, binary_by_default=parameters.get("binary_data_output", False)
    )


def _read_header_length(call: ClientRequest) -> int:
    """How much of the body is JSON. 0: none, it is one raw tensor."""
    size = len(call.body)
    header = call.headers.get(faults.JSON_LENGTH_HEADER)
    if header is None:
        return size
    number = _INTEGER_PATTERN.match(header)
    if number is None:
        text = f"Unable to parse Inference-Header-Content-Length, got: {header}"
        raise faults.build_value_error(faults.JSON_LENGTH_HEADER, text)
    if not 0 <= int(number[1]) <= size:
        text = f"inference header size should be in range (0, {size}), got: {header}"
        raise faults.build_value_error(faults.JSON_LENGTH_HEADER, text)
    return int(number[1])


def _parse_body_fields(text: bytes) -> OrderedFields:
    try:
        return document.parse_fields(text)
    except MalformedRequest as e:
        if e.problem != "object":
            raise
        raise faults.build_type_error("inputs", _describe_missing_member("inputs")) from None


def _read_raw_prompt(data: bytes, model: str, profile: TritonProfile) -> TritonRequest:
    """The whole body is the prompt, where the model has no other input."""
    count = sum(one.is_counted for one in profile.inputs.values())
    if count != 1:
        text = (
            f"{faults.build_request_tag(None)}Raw request must only have 1 input (found 1) to be deduced but got"
            f" {count} inputs in '{model}' model configuration"
        )
        raise faults.build_value_error("inputs", text)
    (prompt,) = binary.unpack_tensor(PROMPT_INPUT, "BYTES", len(data).to_bytes(4, "little") + data)
    sent = TritonRequest(model)
    sent.add_input(InputTensor(PROMPT_INPUT, "BYTES", (1,), [prompt]))
    return sent


def _describe_missing_member(name: str) -> str:
    return f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"


def _read_member(holder: OrderedFields | dict[str, Any], name: str, kind: str) -> Any:
    """A member of this kind. Raises InvalidParameter, also when there is none."""
    if name not in holder:
        raise faults.build_type_error(name, _describe_missing_member(name))
    found = holder[name]
    return _check_kind(
        name, document.parse_value(found) if isinstance(holder, OrderedFields) else found, kind
    )


def _check_kind(name: str, found: Any, kind: str) -> Any:
    if not isinstance(found, _JSON_KINDS[kind]):
        text = f"Unable to parse '{name}': attempt to access JSON non-{kind} as {kind}"
        raise faults.build_type_error(name, text)
    return found


def _check_unsigned(name: str, found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**64:
        text = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise faults.build_type_error(name, f"Unable to parse '{name}': {text}")
    return found


def _read_parameters(sent: TritonRequest, fields: OrderedFields) -> None:
    raw = fields.get("parameters")
    if raw is None:
        return
    if not bytes(raw).startswith(b"{"):
        text = "failed to get request params.: attempt to get members for non-object"
        raise faults.build_type_error("parameters", text)
    inner = document.parse_fields(bytes(raw))
    for name in inner.names:
        _read_parameter(sent, name, inner[name])


def _read_parameter(sent: TritonRequest, name: str, raw: Raw) -> None:
    what = document.parse_value(raw)
    if name == "priority":
        sent.priority = min(_check_unsigned(name, what), _MAX_PRIORITY) or None
    elif name == "timeout":
        sent.timeout = _check_unsigned(name, what) / 1_000_000 or None
    elif name in {"sequence_start", "sequence_end", "binary_data_output"}:
        _check_kind(name, what, "boolean")
    elif name == "sequence_id":
        if not isinstance(what, str):
            _check_unsigned(name, what)
    elif name.startswith("triton_"):
        text = "parameter keys starting with 'triton_' are reserved for Triton usage and should"
        raise faults.build_value_error(name, f"{text} not be specified.")
    elif isinstance(what, str | int | float):
        sent.parameters.setdefault(name, raw)
    else:
        raise faults.build_parameter_type_error(name)


def _read_input(sent: TritonRequest, spec: Any, rest: memoryview) -> memoryview:
    """Take one input; what is left of the raw bytes."""
    holder = spec if isinstance(spec, dict) else {}
    given = holder.get("parameters")
    parameters = given if isinstance(given, dict) else {}
    _check_source(holder, parameters)
    name = _read_member(holder, "name", "string")
    datatype = _read_member(holder, "datatype", "string")
    shape = tuple(_check_unsigned("shape", one) for one in _read_member(holder, "shape", "array"))
    if datatype not in _DATATYPES:
        raise faults.build_value_error(name, f"invalid datatype for input {name}")
    if "shared_memory_region" in parameters:
        region = parameters["shared_memory_region"]
        raise faults.build_value_error(name, f"Unable to find shared memory region: '{region}'")
    size = 0
    if "binary_data_size" in parameters:
        size = _check_unsigned("binary_data_size", parameters["binary_data_size"])
        if size > len(rest):
            text = f"unexpected size for input '{name}', expecting {size - len(rest)} additional"
            raise faults.build_value_error(name, f"{text} bytes for model '{sent.model}'")
        values = binary.unpack_tensor(name, datatype, bytes(rest[:size]))
    else:
        data = tensors.flatten_values(_read_member(holder, "data", "array"))
        values = tensors.check_values(name, datatype, data)
    sent.add_input(InputTensor(name, datatype, shape, values))
    return rest[size:]


def _check_source(holder: dict[str, Any], parameters: dict[str, Any]) -> None:
    found = [name for name in ("data",) if name in holder]
    found += [name for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if len(found) != 1:
        what = "set" + "".join(f" '{name}'" for name in found) if found else "no field is set"
        raise faults.build_value_error("inputs", f"{_DATA_SOURCE_ERROR} {what}")


def _read_outputs(fields: OrderedFields) -> dict[str, bool]:
    """The outputs that were named, and whether each shall come as raw bytes."""
    if fields.get("outputs") is None:
        return {}
    found: dict[str, bool] = {}
    for spec in _read_member(fields, "outputs", "array"):
        holder = spec if isinstance(spec, dict) else {}
        name = _read_member(holder, "name", "string")
        given = holder.get("parameters")
        parameters = given if isinstance(given, dict) else {}
        found.setdefault(
            name, _check_kind("binary_data", parameters.get("binary_data", False), "boolean")
        )
    return found


def _check_outputs(named: Mapping[str, bool], model: str, profile: TritonProfile) -> None:
    known = {one.name for one in profile.outputs}
    for name in named:
        if name not in known:
            text = f"unexpected inference output '{name}' for model '{model}'"
            raise faults.build_value_error("outputs", text)
