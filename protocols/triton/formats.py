"""Number and text formats of Triton's responses, and their content types."""

import math
import re
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocols.core.interfaces import Headers, ResponseContext

JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"),)
PLAIN_TEXT_HEADERS: Final[Headers] = (("Content-Type", "text/plain"),)
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
_CHUNKED_HEADER: Final = ("Transfer-Encoding", "chunked")
CHUNKED_JSON_HEADERS: Final[Headers] = (*JSON_HEADERS, _CHUNKED_HEADER)
CHUNKED_EVENT_HEADERS: Final[Headers] = (("Content-Type", EVENT_STREAM), _CHUNKED_HEADER)
"""Responses with model output are sent without Content-Length, even unary ones."""

_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_ESCAPE_PATTERN = re.compile(rb"\\(?:u00..|.)")
_NO_EXPONENT_RANGE: Final = (1e-6, 1e-5)
"""Between these Triton writes no exponent."""


def encode_json(value: Any) -> bytes:
    """Encode compact JSON. Escapes of control characters have upper-case hexadecimal digits."""
    text = _encode(value)
    return _ESCAPE_PATTERN.sub(_uppercase_escape, text) if text.find(b"\\u00") >= 0 else text


def encode_json_lines(values: Sequence[Any]) -> bytes:
    """Encode each value as ``encode_json`` does, with a line feed behind it."""
    text = _encode_lines(values)
    return _ESCAPE_PATTERN.sub(_uppercase_escape, text) if text.find(b"\\u00") >= 0 else text


def _uppercase_escape(escape: re.Match[bytes]) -> bytes:
    text = escape[0]
    return text[:2] + text[2:].upper() if text.startswith(b"\\u") else text


def round_to_fp32(value: float | None) -> float | Raw | None:
    """Format a 32-bit float as Triton does: widened, then the shortest text.

    Values that are not finite become null.
    """
    if value is None or not math.isfinite(value):
        return None
    wide: float = struct.unpack("f", struct.pack("f", value))[0]
    low, high = _NO_EXPONENT_RANGE
    if low <= abs(wide) < high:
        return Raw(format(Decimal(repr(wide)), "f").encode())
    return wide


def get_version_number(context: ResponseContext) -> str:
    """Return the version for responses; one without a number is shown as 1."""
    version = context.version
    return version if version.isascii() and version.isdigit() else "1"
