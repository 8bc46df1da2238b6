"""How the original prints: what every answer shares."""

import math
import re
import struct
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core.ports import About, Headers

JSON: Final[Headers] = (("Content-Type", "application/json"),)
PLAIN: Final[Headers] = (("Content-Type", "text/plain"),)
EVENTS: Final = "text/event-stream; charset=utf-8"
_CHUNKED: Final = ("Transfer-Encoding", "chunked")
SAID: Final[Headers] = (*JSON, _CHUNKED)
SAID_AS_EVENTS: Final[Headers] = (("Content-Type", EVENTS), _CHUNKED)
"""What a model says goes out without its length, though it be whole."""

_encode = msgspec.json.Encoder().encode
_ESCAPE = re.compile(rb"\\(?:u00..|.)")
_WRITTEN_OUT: Final = (1e-6, 1e-5)
"""Between these the original writes no exponent."""


def encode(what: Any) -> bytes:
    """Compact JSON. The hexadecimal digits of an escaped control character are capitals."""
    text = _encode(what)
    return _ESCAPE.sub(_capitals, text) if text.find(b"\\u00") >= 0 else text


def _capitals(escape: re.Match[bytes]) -> bytes:
    found = escape[0]
    return found[:2] + found[2:].upper() if found.startswith(b"\\u") else found


def fp32(value: float | None) -> float | Raw | None:
    """A 32-bit float as the original prints it: widened, and then the shortest text for that.

    What is not finite has no JSON; it becomes null.
    """
    if value is None or not math.isfinite(value):
        return None
    wide: float = struct.unpack("f", struct.pack("f", value))[0]
    low, high = _WRITTEN_OUT
    if low <= abs(wide) < high:
        return Raw(format(Decimal(repr(wide)), "f").encode())
    return wide


def version(about: About) -> str:
    """The version that answers; one whose name is no number is shown as the first."""
    served = about.version
    return served if served.isascii() and served.isdigit() else "1"
