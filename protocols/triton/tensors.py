"""Tensors: read from JSON, checked against the model; binary tensors; number formats."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from msgspec import Raw, Struct

from protocols.core.errors import InvalidParameter
from protocols.core.request import ExtraFields
from protocols.triton import errors
from protocols.triton.params import Datatype, InputSpec, TritonProfile
from protocols.triton.rapidjson import OrderedFields

Shape = tuple[int, ...]


class InputTensor(Struct, frozen=True):
    """A tensor; ``values`` is flat, in row-major order."""

    name: str
    datatype: str
    shape: Shape
    values: list[Any]


class TritonRequest(Struct):
    """A client's tensors and parameters, from either endpoint; the first of each name."""

    model: str
    id: str | None = None
    inputs: dict[str, InputTensor] = {}
    parameters: dict[str, Any] = {}
    """The decoded values."""
    raw_parameters: dict[str, Raw] = {}
    streaming: bool | None = None
    """Whether the request sets the streaming flag, on any endpoint."""
    priority: int | None = None
    timeout: float | None = None
    """The timeout in seconds. Only infer has fields for it and for the priority."""
    unknown: list[ExtraFields] = []
    """Keys of infer beside parameters and in tensors; ``inside`` names the tensor."""

    def add_parameter(self, name: str, value: Any, fields: OrderedFields) -> None:
        """Add a field as a parameter, unless there is one of that name."""
        if name not in self.parameters:
            self.parameters[name] = value
            self.raw_parameters[name] = fields[name]

    def add_input(self, tensor: InputTensor) -> None:
        """Add a tensor. Raises InvalidParameter for a duplicate name."""
        if tensor.name in self.inputs:
            text = f"input '{tensor.name}' already exists in request"
            raise errors.build_core_error(self.id, tensor.name, text)
        self.inputs[tensor.name] = tensor


ELEMENT_SIZES: Final[Mapping[Datatype, int]] = {
    "BOOL": 1, "INT32": 4, "INT64": 8, "UINT32": 4, "UINT64": 8, "FP32": 4,
}  # fmt: skip
"""Bytes of an element; each BYTES element has its own length."""

INTEGER_RANGES: Final[Mapping[str, range]] = {
    "INT32": range(-(2**31), 2**31),
    "INT64": range(-(2**63), 2**63),
    "UINT32": range(2**32),
    "UINT64": range(2**64),
}
_JSON_TYPES: Final[Mapping[str, tuple[frozenset[type], range | None]]] = {
    "BYTES": (frozenset({str}), None),
    "BOOL": (frozenset({bool}), None),
    "FP32": (frozenset({int, float}), None),
    "INT32": (frozenset({int}), INTEGER_RANGES["INT64"]),
    "INT64": (frozenset({int}), INTEGER_RANGES["INT64"]),
    "UINT32": (frozenset({int}), INTEGER_RANGES["UINT64"]),
    "UINT64": (frozenset({int}), INTEGER_RANGES["UINT64"]),
}
"""Python types of JSON values; an integer out of range is rejected."""
_SHAPE_CACHE_SIZE: Final = 1024
_SIGNED_ERROR: Final = (
    "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
)
_UNSIGNED_ERROR: Final = (
    "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
)
_TYPE_ERRORS: Final[Mapping[str, str]] = {
    "BYTES": "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    "BOOL": "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    "FP32": "Unable to parse 'data': attempt to access JSON non-number as double",
    "INT32": _SIGNED_ERROR,
    "INT64": _SIGNED_ERROR,
    "UINT32": _UNSIGNED_ERROR,
    "UINT64": _UNSIGNED_ERROR,
}
_BATCH_NOTE: Final = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
    " prepended to each input shape. If you want to specify the full shape including the batch dim"
    " in your input dims config, try setting max_batch_size to zero. See the model configuration"
    " docs for more info on max_batch_size."
)


def flatten_values(value: Any) -> list[Any]:
    """Return the elements of a scalar or of a nested array."""
    if type(value) is not list:
        return [value]
    if list not in set(map(type, value)):
        return value
    elements: list[Any] = []
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if type(item) is list:
            pending.extend(reversed(item))
        else:
            elements.append(item)
    return elements


def check_values(name: str, datatype: str, values: list[Any]) -> list[Any]:
    """Convert JSON values to the tensor's type. Raises InvalidParameter.

    Triton truncates an integer that is too large for its type; the gateway rejects it.
    """
    kinds, widest = _JSON_TYPES[datatype]
    for value in values:
        if type(value) not in kinds or (widest is not None and value not in widest):
            raise errors.build_type_error(name, _TYPE_ERRORS[datatype])
        if widest is not None and value not in INTEGER_RANGES[datatype]:
            text = f"input '{name}' has a value out of the range of {datatype}"
            raise errors.build_value_error(name, text)
    return values


def build_tensor(spec: InputSpec, value: Any, profile: TritonProfile) -> InputTensor:
    """Build a tensor from a plain value without a shape. Raises InvalidParameter."""
    values = flatten_values(value)
    if spec.datatype == "BYTES":
        check_values(spec.name, spec.datatype, values)
    count = len(value) if type(value) is list else 1
    shape = _infer_shape(profile.input_shapes[spec.name], count)
    if shape is None:
        text = f"The schema can not convert input '{spec.name}' to tensor with proper shape"
        raise errors.build_value_error(spec.name, text)
    if spec.datatype != "BYTES":
        check_values(spec.name, spec.datatype, values)
    return InputTensor(spec.name, spec.datatype, shape, values)


@lru_cache(maxsize=_SHAPE_CACHE_SIZE)
def _infer_shape(dims: Shape, count: int) -> Shape | None:
    """Compute the shape of so many elements; None if they do not fit the dimensions.

    Fixed dimensions are filled from the innermost outwards; the innermost free one takes the rest.
    """
    count, remainder = divmod(count, math.prod(d for d in dims if d >= 0))
    shape = list(dims)
    for i in reversed(range(len(dims))):
        if dims[i] < 0:
            shape[i], count = count, 1
    return None if remainder or count != 1 else tuple(shape)


def check_inputs(request: TritonRequest, profile: TritonProfile) -> None:
    """Check the inputs against the model. Raises InvalidParameter."""
    required = profile.required_inputs
    missing = [name for name in required if name not in request.inputs]
    if len(request.inputs) < len(required):
        raise _build_missing_error(request, profile, missing)
    for name, tensor in request.inputs.items():
        if name not in profile.inputs:
            text = f"unexpected inference input '{name}' for model '{request.model}'"
            raise errors.build_value_error(name, text)
        datatype = profile.inputs[name].datatype
        if tensor.datatype != datatype:
            text = (
                f"inference input '{name}' data-type is '{tensor.datatype}', but model"
                f" '{request.model}' expects '{datatype}'"
            )
            raise errors.build_core_error(request.id, name, text)
    if missing:
        raise _build_missing_error(request, profile, missing)
    if profile.max_batch_size:
        _check_batch(request, profile)
    for name, tensor in request.inputs.items():
        expected = profile.input_shapes[name]
        if tensor.shape != expected and not _matches_shape(expected, tensor.shape):
            text = (
                f"unexpected shape for input '{name}' for model '{request.model}'. Expected"
                f" {_format_shape(expected)}, got {_format_shape(tensor.shape)}."
            )
            note = _BATCH_NOTE if profile.max_batch_size else ""
            raise errors.build_core_error(request.id, name, text + note)
        if len(tensor.values) != math.prod(tensor.shape):
            raise _build_count_error(request, tensor)


def _matches_shape(expected: Shape, shape: Shape) -> bool:
    return len(expected) == len(shape) and all(
        dim in {-1, length} for dim, length in zip(expected, shape, strict=True)
    )


def _format_shape(shape: Shape) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _build_missing_error(
    request: TritonRequest, profile: TritonProfile, missing: list[str]
) -> InvalidParameter:
    inputs = profile.inputs.values()
    minimum = sum(not spec.optional for spec in inputs)
    maximum = sum(spec.is_counted for spec in inputs)
    expected = f"between {minimum} and {maximum}" if minimum < maximum else f"{minimum}"
    text = (
        f"{errors.build_request_tag(request.id)}expected number of inputs {expected} but got"
        f" {len(request.inputs)} inputs for model '{request.model}'. Got input(s)"
        f" [{_quote_names(request.inputs)}], but missing required input(s)"
        f" [{_quote_names(missing)}]. Please provide all required input(s)."
    )
    return InvalidParameter(text, param=missing[0], problem="missing")


def _quote_names(names: Any) -> str:
    return ",".join(f"'{name}'" for name in names)


def _check_batch(request: TritonRequest, profile: TritonProfile) -> None:
    """Check that all inputs have the batch size of the last one, in Triton's order if known."""
    batch: int | None = None
    for tensor in reversed(request.inputs.values()):
        if not tensor.shape:
            continue
        if not tensor.values and tensor.datatype in ELEMENT_SIZES:
            raise _build_size_error(request, tensor, 1)
        if batch is None:
            batch = tensor.shape[0]
        if tensor.shape[0] != batch:
            text = f"input '{tensor.name}' batch size does not match other inputs"
            text = f"{text} for '{request.model}'"
            raise errors.build_core_error(request.id, tensor.name, text)
    maximum = profile.max_batch_size
    if batch is not None and batch > maximum:
        text = f"inference request batch-size must be <= {maximum} for '{request.model}'"
        raise errors.build_core_error(request.id, "text_input", text)


def _build_count_error(request: TritonRequest, tensor: InputTensor) -> InvalidParameter:
    count, expected = len(tensor.values), math.prod(tensor.shape)
    if tensor.datatype in ELEMENT_SIZES:
        return _build_size_error(request, tensor, expected)
    name = f"inference input '{tensor.name}' for model '{request.model}'"
    if count > expected:
        text = f"unexpected number of string elements {count} for {name}, expecting {expected}"
    else:
        text = f"expected {expected} string elements for {name}, got {count}"
    return errors.build_core_error(request.id, tensor.name, text)


def _build_size_error(
    request: TritonRequest, tensor: InputTensor, expected: int
) -> InvalidParameter:
    size = next(size for kind, size in ELEMENT_SIZES.items() if kind == tensor.datatype)
    text = (
        f"input byte size mismatch for input '{tensor.name}' for model '{request.model}'."
        f" Expected {expected * size}, got {len(tensor.values) * size}"
    )
    return errors.build_core_error(request.id, tensor.name, text)


# Binary tensors: little-endian, row-major; a string is its length and its bytes.

_STRUCT_CODES: Final[Mapping[str, str]] = {
    "BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f",
}  # fmt: skip
_STRING_LENGTH: Final = struct.Struct("<I")


def unpack_tensor(name: str, datatype: str, data: bytes) -> list[Any]:
    """Decode the elements. Raises InvalidParameter for truncated data or invalid UTF-8."""
    if datatype == "BYTES":
        return list(_unpack_strings(name, data))
    code = _STRUCT_CODES.get(datatype)
    if code is None:
        return []
    count, remainder = divmod(len(data), struct.calcsize(code))
    if remainder:
        text = f"input '{name}' has {len(data)} bytes, which is no whole number of {datatype}"
        raise errors.build_value_error(name, text)
    return list(struct.unpack(f"<{count}{code}", data))


def pack_tensor(datatype: str, values: Sequence[Any]) -> bytes:
    """Encode the elements; None is zero."""
    if datatype == "BYTES":
        texts = map(str.encode, values)
        return b"".join([_STRING_LENGTH.pack(len(text)) + text for text in texts])
    numbers = (value or 0 for value in values)
    return struct.pack(f"<{len(values)}{_STRUCT_CODES[datatype]}", *numbers)


def _unpack_strings(name: str, data: bytes) -> Iterator[str]:
    start = 0
    while start < len(data):
        available = len(data) - start
        if available < _STRING_LENGTH.size:
            text = f"incomplete string length indicator for inference input '{name}', expecting"
            text = f"{text} 4 bytes but only {available} bytes available"
            raise errors.build_value_error(name, text)
        (length,) = _STRING_LENGTH.unpack_from(data, start)
        start += _STRING_LENGTH.size
        available -= _STRING_LENGTH.size
        if length > available:
            text = f"incomplete string data for inference input '{name}', expecting string of"
            text = f"{text} length {length} but only {available} bytes available"
            raise errors.build_value_error(name, text)
        try:
            yield data[start : start + length].decode()
        except UnicodeDecodeError:
            raise errors.build_value_error(name, f"input '{name}' is not UTF-8") from None
        start += length
