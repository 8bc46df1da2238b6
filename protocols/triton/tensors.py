"""Tensors: read from JSON, checked against the model; binary tensors; number formats."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from msgspec import Raw, Struct

from protocols.core.errors import InvalidParameter
from protocols.triton import errors
from protocols.triton.params import Datatype, InputSpec, TritonProfile

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
    parameters: dict[str, Raw] = {}
    streaming: bool | None = None
    """Whether the request sets the streaming flag, on any endpoint."""
    priority: int | None = None
    timeout: float | None = None
    """The timeout in seconds. Only infer has fields for it and for the priority."""

    def add_input(self, tensor: InputTensor) -> None:
        """Add a tensor. Raises InvalidParameter for a duplicate name."""
        if tensor.name in self.inputs:
            tag = errors.build_request_tag(self.id)
            text = f"{tag}input '{tensor.name}' already exists in request"
            raise errors.build_value_error(tensor.name, text)
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
"""Parameter names of shapes."""
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


def flatten_values(what: Any) -> list[Any]:
    """Yield the elements of a scalar or of a nested array."""
    if type(what) is not list:
        return [what]
    if list not in set(map(type, what)):
        return what
    found: list[Any] = []
    rest: list[Any] = [what]
    while rest:
        one = rest.pop()
        if type(one) is list:
            rest.extend(reversed(one))
        else:
            found.append(one)
    return found


def check_values(name: str, datatype: str, values: list[Any]) -> list[Any]:
    """Convert JSON values to the tensor's type. Raises InvalidParameter.

    Triton truncates an integer that is too large for its type; the gateway rejects it.
    """
    kinds, widest = _JSON_TYPES[datatype]
    for one in values:
        if type(one) not in kinds or (widest is not None and one not in widest):
            raise errors.build_type_error(name, _TYPE_ERRORS[datatype])
        if widest is not None and one not in INTEGER_RANGES[datatype]:
            text = f"input '{name}' has a value out of the range of {datatype}"
            raise errors.build_value_error(name, text)
    return values


def build_tensor(spec: InputSpec, what: Any, profile: TritonProfile) -> InputTensor:
    """Build a tensor from a plain value without a shape. Raises InvalidParameter."""
    values = flatten_values(what)
    if spec.datatype == "BYTES":
        check_values(spec.name, spec.datatype, values)
    count = len(what) if type(what) is list else 1
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

    Fixed dimensions are filled from the innermost outwards; the innermost
    free one takes the rest.
    """
    count, rest = divmod(count, math.prod(d for d in dims if d >= 0))
    shape = list(dims)
    for i in reversed(range(len(dims))):
        if dims[i] < 0:
            shape[i], count = count, 1
    return None if rest or count != 1 else tuple(shape)


def check_inputs(sent: TritonRequest, profile: TritonProfile) -> None:
    """Check the inputs against the model. Raises InvalidParameter."""
    required = profile.required_inputs
    missing = [name for name in required if name not in sent.inputs]
    if len(sent.inputs) < len(required):
        raise _build_missing_error(sent, profile, missing)
    for name, tensor in sent.inputs.items():
        if name not in profile.inputs:
            text = f"unexpected inference input '{name}' for model '{sent.model}'"
            raise errors.build_value_error(name, text)
        if tensor.datatype != profile.inputs[name].datatype:
            raise _build_datatype_error(sent, tensor, profile.inputs[name])
    if missing:
        raise _build_missing_error(sent, profile, missing)
    if profile.max_batch_size:
        _check_batch(sent, profile)
    for name, tensor in sent.inputs.items():
        wanted = profile.input_shapes[name]
        if tensor.shape != wanted and not _matches_shape(wanted, tensor.shape):
            raise _build_shape_error(sent, tensor, profile)
        if len(tensor.values) != math.prod(tensor.shape):
            raise _build_count_error(sent, tensor)


def _matches_shape(wanted: Shape, got: Shape) -> bool:
    return len(wanted) == len(got) and all(
        want in {-1, one} for want, one in zip(wanted, got, strict=True)
    )


def _build_missing_error(
    sent: TritonRequest, profile: TritonProfile, missing: list[str]
) -> InvalidParameter:
    inputs = profile.inputs.values()
    least = sum(not one.optional for one in inputs)
    most = sum(one.is_counted for one in inputs)
    between = f"between {least} and {most}" if least < most else f"{least}"
    text = (
        f"{errors.build_request_tag(sent.id)}expected number of inputs {between} but got"
        f" {len(sent.inputs)} inputs for model '{sent.model}'. Got input(s)"
        f" [{_quote_names(sent.inputs)}], but missing required input(s) [{_quote_names(missing)}]."
        " Please provide all required input(s)."
    )
    return InvalidParameter(text, param=missing[0], problem="missing")


def _quote_names(names: Any) -> str:
    return ",".join(f"'{name}'" for name in names)


def _build_datatype_error(
    sent: TritonRequest, tensor: InputTensor, spec: InputSpec
) -> InvalidParameter:
    text = (
        f"{errors.build_request_tag(sent.id)}inference input '{spec.name}' data-type is"
        f" '{tensor.datatype}', but model '{sent.model}' expects '{spec.datatype}'"
    )
    return errors.build_value_error(spec.name, text)


def _check_batch(sent: TritonRequest, profile: TritonProfile) -> None:
    """Check that all inputs have the batch size of the last one, in Triton's order if known."""
    batch: int | None = None
    for tensor in reversed(sent.inputs.values()):
        if not tensor.shape:
            continue
        if not tensor.values and tensor.datatype in ELEMENT_SIZES:
            raise _build_size_error(sent, tensor, 1)
        if batch is None:
            batch = tensor.shape[0]
        if tensor.shape[0] != batch:
            text = f"input '{tensor.name}' batch size does not match other inputs"
            text = f"{errors.build_request_tag(sent.id)}{text} for '{sent.model}'"
            raise errors.build_value_error(tensor.name, text)
    if batch is not None and batch > profile.max_batch_size:
        text = (
            f"inference request batch-size must be <= {profile.max_batch_size} for '{sent.model}'"
        )
        raise errors.build_value_error("text_input", errors.build_request_tag(sent.id) + text)


def _build_shape_error(
    sent: TritonRequest, tensor: InputTensor, profile: TritonProfile
) -> InvalidParameter:
    wanted = profile.input_shapes[tensor.name]
    text = (
        f"{errors.build_request_tag(sent.id)}unexpected shape for input '{tensor.name}' for model"
        f" '{sent.model}'. Expected {_format_shape(wanted)}, got {_format_shape(tensor.shape)}."
    )
    return errors.build_value_error(
        tensor.name, text + (_BATCH_NOTE if profile.max_batch_size else "")
    )


def _format_shape(shape: Shape) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _build_count_error(sent: TritonRequest, tensor: InputTensor) -> InvalidParameter:
    count, wanted = len(tensor.values), math.prod(tensor.shape)
    if tensor.datatype in ELEMENT_SIZES:
        return _build_size_error(sent, tensor, wanted)
    where = f"inference input '{tensor.name}' for model '{sent.model}'"
    if count > wanted:
        text = f"unexpected number of string elements {count} for {where}, expecting {wanted}"
    else:
        text = f"expected {wanted} string elements for {where}, got {count}"
    return errors.build_value_error(tensor.name, errors.build_request_tag(sent.id) + text)


def _build_size_error(sent: TritonRequest, tensor: InputTensor, wanted: int) -> InvalidParameter:
    size = next(size for kind, size in ELEMENT_SIZES.items() if kind == tensor.datatype)
    text = (
        f"{errors.build_request_tag(sent.id)}input byte size mismatch for input"
        f" '{tensor.name}' for model '{sent.model}'. Expected {wanted * size},"
        f" got {len(tensor.values) * size}"
    )
    return errors.build_value_error(tensor.name, text)


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
    count, rest = divmod(len(data), struct.calcsize(code))
    if rest:
        text = f"input '{name}' has {len(data)} bytes, which is no whole number of {datatype}"
        raise errors.build_value_error(name, text)
    return list(struct.unpack(f"<{count}{code}", data))


def pack_tensor(datatype: str, values: Sequence[Any]) -> bytes:
    """Encode the elements; None is zero."""
    if datatype == "BYTES":
        return b"".join([_STRING_LENGTH.pack(len(one)) + one for one in map(str.encode, values)])
    return struct.pack(f"<{len(values)}{_STRUCT_CODES[datatype]}", *(one or 0 for one in values))


def _unpack_strings(name: str, data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        left = len(data) - at - _STRING_LENGTH.size
        if left < 0:
            text = f"incomplete string length indicator for inference input '{name}', expecting"
            left += _STRING_LENGTH.size
            raise errors.build_value_error(name, f"{text} 4 bytes but only {left} bytes available")
        (length,) = _STRING_LENGTH.unpack_from(data, at)
        at += _STRING_LENGTH.size
        if length > left:
            text = f"incomplete string data for inference input '{name}', expecting string of"
            text = f"{text} length {length} but only {left} bytes available"
            raise errors.build_value_error(name, text)
        try:
            yield data[at : at + length].decode()
        except UnicodeDecodeError:
            raise errors.build_value_error(name, f"input '{name}' is not UTF-8") from None
        at += length
