"""Reading a body of infer: tensors with shapes, as JSON or as raw bytes behind the JSON."""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Raw, Struct

from gateway.core.errors import Malformed
from gateway.core.ports import Call
from protocols.triton import binary, document, faults, tensors
from protocols.triton.document import Fields
from protocols.triton.generate import request_id
from protocols.triton.tensors import Sent, Tensor
from protocols.triton.vocabulary import PROMPT, Profile

_INTEGER = re.compile(r"\s*([+-]?[0-9]+)")
_DATATYPES: Final = frozenset(
    {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
     "FP32", "FP64", "BYTES", "BF16"}
)  # fmt: skip
_SOURCES: Final = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
    " 'shared_memory_region' in 'parameters'. But"
)
_ENCODINGS: Final = frozenset({"identity", "gzip", "deflate"})
"""The body comes to us without them."""
_LEAST_URGENT: Final = 255
_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "array": list,
    "boolean": bool,
}


class Wishes(Struct, frozen=True):
    """How the answer shall come: which outputs (None: all), and which of them as raw bytes."""

    outputs: Mapping[str, bool] | None
    binary_by_default: bool

    def includes(self, name: str) -> bool:
        """Whether this output is wanted."""
        return self.outputs is None or name in self.outputs

    def is_binary(self, name: str) -> bool:
        """Whether this output is wanted as raw bytes."""
        return self.binary_by_default if self.outputs is None else self.outputs.get(name, False)


def read(call: Call, profile: Profile) -> Sent:
    """The tensors and parameters. Raises Malformed, InvalidParameter and Unsupported."""
    if not takes(call):
        raise faults.compressed()
    length = _header_length(call)
    model = call.path_params["model"]
    if length == 0:
        return _lone(call.body, model, profile)
    fields = _fields(call.body[:length])
    sent = Sent(model, request_id(fields))
    _read_parameters(sent, fields)
    rest = memoryview(call.body)[length:]
    for spec in _member(fields, "inputs", "array"):
        rest = _read_input(sent, spec, rest)
    if rest:
        text = f"unexpected additional input data for model '{model}'"
        raise faults.wrong_value("inputs", text)
    _check_outputs(_outputs(fields), model, profile)
    tensors.complete(sent, profile)
    return sent


def takes(call: Call) -> bool:
    """Whether the body is compressed in a way that this endpoint knows, or not at all."""
    return call.headers.get(faults.ENCODING, "identity") in _ENCODINGS


def wishes(call: Call) -> Wishes:
    """How to answer a body that ``read`` has read."""
    length = _header_length(call)
    if length == 0:
        return Wishes(None, binary_by_default=True)
    fields = _fields(call.body[:length])
    raw = fields.get("parameters")
    parameters = {} if raw is None else document.value(raw)
    return Wishes(
        _outputs(fields) or None, binary_by_default=parameters.get("binary_data_output", False)
    )


def _header_length(call: Call) -> int:
    """How much of the body is JSON. 0: none, it is one raw tensor."""
    size = len(call.body)
    header = call.headers.get(faults.HEADER)
    if header is None:
        return size
    number = _INTEGER.match(header)
    if number is None:
        text = f"Unable to parse Inference-Header-Content-Length, got: {header}"
        raise faults.wrong_value(faults.HEADER, text)
    if not 0 <= int(number[1]) <= size:
        text = f"inference header size should be in range (0, {size}), got: {header}"
        raise faults.wrong_value(faults.HEADER, text)
    return int(number[1])


def _fields(text: bytes) -> Fields:
    try:
        return document.fields(text)
    except Malformed as e:
        if e.problem != "object":
            raise
        raise faults.wrong_type("inputs", _absent("inputs")) from None


def _lone(data: bytes, model: str, profile: Profile) -> Sent:
    """The whole body is the prompt, where the model has no other input."""
    count = sum(one.is_counted for one in profile.inputs.values())
    if count != 1:
        text = (
            f"{faults.tag(None)}Raw request must only have 1 input (found 1) to be deduced but got"
            f" {count} inputs in '{model}' model configuration"
        )
        raise faults.wrong_value("inputs", text)
    (prompt,) = binary.unpack(PROMPT, "BYTES", len(data).to_bytes(4, "little") + data)
    sent = Sent(model)
    sent.add_input(Tensor(PROMPT, "BYTES", (1,), [prompt]))
    return sent


def _absent(name: str) -> str:
    return f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"


def _member(holder: Fields | dict[str, Any], name: str, kind: str) -> Any:
    """A member of this kind. Raises InvalidParameter, also when there is none."""
    if name not in holder:
        raise faults.wrong_type(name, _absent(name))
    found = holder[name]
    return _kind(name, document.value(found) if isinstance(holder, Fields) else found, kind)


def _kind(name: str, found: Any, kind: str) -> Any:
    if not isinstance(found, _KINDS[kind]):
        text = f"Unable to parse '{name}': attempt to access JSON non-{kind} as {kind}"
        raise faults.wrong_type(name, text)
    return found


def _unsigned(name: str, found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**64:
        text = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise faults.wrong_type(name, f"Unable to parse '{name}': {text}")
    return found


def _read_parameters(sent: Sent, fields: Fields) -> None:
    raw = fields.get("parameters")
    if raw is None:
        return
    if not bytes(raw).startswith(b"{"):
        text = "failed to get request params.: attempt to get members for non-object"
        raise faults.wrong_type("parameters", text)
    inner = document.fields(bytes(raw))
    for name in inner.names:
        _read_parameter(sent, name, inner[name])


def _read_parameter(sent: Sent, name: str, raw: Raw) -> None:
    what = document.value(raw)
    if name == "priority":
        sent.priority = min(_unsigned(name, what), _LEAST_URGENT) or None
    elif name == "timeout":
        sent.timeout = _unsigned(name, what) / 1_000_000 or None
    elif name in {"sequence_start", "sequence_end", "binary_data_output"}:
        _kind(name, what, "boolean")
    elif name == "sequence_id":
        if not isinstance(what, str):
            _unsigned(name, what)
    elif name.startswith("triton_"):
        text = "parameter keys starting with 'triton_' are reserved for Triton usage and should"
        raise faults.wrong_value(name, f"{text} not be specified.")
    elif isinstance(what, str | int | float):
        sent.parameters.setdefault(name, raw)
    else:
        raise faults.not_parameter(name)


def _read_input(sent: Sent, spec: Any, rest: memoryview) -> memoryview:
    """Take one input; what is left of the raw bytes."""
    holder = spec if isinstance(spec, dict) else {}
    given = holder.get("parameters")
    parameters = given if isinstance(given, dict) else {}
    _check_source(holder, parameters)
    name = _member(holder, "name", "string")
    datatype = _member(holder, "datatype", "string")
    shape = tuple(_unsigned("shape", one) for one in _member(holder, "shape", "array"))
    if datatype not in _DATATYPES:
        raise faults.wrong_value(name, f"invalid datatype for input {name}")
    if "shared_memory_region" in parameters:
        region = parameters["shared_memory_region"]
        raise faults.wrong_value(name, f"Unable to find shared memory region: '{region}'")
    size = 0
    if "binary_data_size" in parameters:
        size = _unsigned("binary_data_size", parameters["binary_data_size"])
        if size > len(rest):
            text = f"unexpected size for input '{name}', expecting {size - len(rest)} additional"
            raise faults.wrong_value(name, f"{text} bytes for model '{sent.model}'")
        values = binary.unpack(name, datatype, bytes(rest[:size]))
    else:
        data = tensors.flat(_member(holder, "data", "array"))
        values = tensors.typed(name, datatype, data)
    sent.add_input(Tensor(name, datatype, shape, values))
    return rest[size:]


def _check_source(holder: dict[str, Any], parameters: dict[str, Any]) -> None:
    found = [name for name in ("data",) if name in holder]
    found += [name for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if len(found) != 1:
        what = "set" + "".join(f" '{name}'" for name in found) if found else "no field is set"
        raise faults.wrong_value("inputs", f"{_SOURCES} {what}")


def _outputs(fields: Fields) -> dict[str, bool]:
    """The outputs that were named, and whether each shall come as raw bytes."""
    if fields.get("outputs") is None:
        return {}
    found: dict[str, bool] = {}
    for spec in _member(fields, "outputs", "array"):
        holder = spec if isinstance(spec, dict) else {}
        name = _member(holder, "name", "string")
        given = holder.get("parameters")
        parameters = given if isinstance(given, dict) else {}
        found.setdefault(
            name, _kind("binary_data", parameters.get("binary_data", False), "boolean")
        )
    return found


def _check_outputs(named: Mapping[str, bool], model: str, profile: Profile) -> None:
    known = {one.name for one in profile.outputs}
    for name in named:
        if name not in known:
            text = f"unexpected inference output '{name}' for model '{model}'"
            raise faults.wrong_value("outputs", text)
