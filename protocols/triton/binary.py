"""Tensors as raw bytes: little-endian, row by row; a string is its length and its bytes."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from protocols.triton import faults

_STRUCT_CODES: Final[Mapping[str, str]] = {
    "BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f",
}  # fmt: skip
_STRING_LENGTH: Final = struct.Struct("<I")


def unpack_tensor(name: str, datatype: str, data: bytes) -> list[Any]:
    """The elements. Raises InvalidParameter for what is cut short or is not text."""
    if datatype == "BYTES":
        return list(_unpack_strings(name, data))
    code = _STRUCT_CODES.get(datatype)
    if code is None:
        return []
    count, rest = divmod(len(data), struct.calcsize(code))
    if rest:
        text = f"input '{name}' has {len(data)} bytes, which is no whole number of {datatype}"
        raise faults.build_value_error(name, text)
    return list(struct.unpack(f"<{count}{code}", data))


def pack_tensor(datatype: str, values: Sequence[Any]) -> bytes:
    """The bytes of these elements; None is zero."""
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
            raise faults.build_value_error(name, f"{text} 4 bytes but only {left} bytes available")
        (length,) = _STRING_LENGTH.unpack_from(data, at)
        at += _STRING_LENGTH.size
        if length > left:
            text = f"incomplete string data for inference input '{name}', expecting string of"
            text = f"{text} length {length} but only {left} bytes available"
            raise faults.build_value_error(name, text)
        try:
            yield data[at : at + length].decode()
        except UnicodeDecodeError:
            raise faults.build_value_error(name, f"input '{name}' is not UTF-8") from None
        at += length
