"""JSON bodies, read with one funnel for everything that can be wrong with them."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from gateway.core.errors import Malformed
from gateway.core.ports import Call

_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_anything = msgspec.json.Decoder().decode
_ESCAPED = re.compile(rb"\\u")
"""Asked where there is a backslash at all. For a megabyte ``in`` takes 1 ms, and this 0.3 ms."""
_AT = re.compile(r"\(byte (\d+)\)")
_WRONG = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_object(body: bytes) -> dict[str, Raw]:
    """The fields of a JSON object, their values left as they were sent; of two alike, the last.

    Raises Malformed for whatever is not a JSON object in UTF-8: also for what msgspec reports
    outside its own error tree (bytes that are not UTF-8, nesting too deep).
    """
    try:
        _check_text(body)
        return _fields(body)
    except _WRONG as e:
        raise _malformed(body, e) from None


def unchecked_fields(call: Call) -> Mapping[str, Raw] | None:
    """What ``read_object`` gives of a call's body, its texts unchecked; None where it can't.

    It is kept with the call until ``fields_of`` takes it.
    """
    try:
        fields = _fields(call.body)
    except _WRONG:
        return None
    call.__dict__["fields"] = fields
    return fields


def fields_of(call: Call) -> Mapping[str, Raw]:
    """What ``read_object`` gives of a call's body. Raises Malformed."""
    fields: Mapping[str, Raw] | None = call.__dict__.pop("fields", None)
    if fields is None:
        return read_object(call.body)
    body = call.body
    if not body.isascii() or body.find(b"\\") >= 0:
        try:
            _check_text(body)
        except _WRONG as e:
            raise _malformed(body, e) from None
    return fields


def _check_text(body: bytes) -> None:
    if not body.isascii():
        body.decode()
    if body.find(b"\\") >= 0 and _ESCAPED.search(body):
        _anything(body)  # a lone surrogate hides in a value that is kept as it is


def _malformed(body: bytes, error: Exception) -> Malformed:
    match error:
        case UnicodeDecodeError():
            return Malformed("the body is not UTF-8", problem="encoding", at=error.start)
        case RecursionError():
            return Malformed("the body is nested too deep", problem="depth")
        case msgspec.ValidationError():
            return Malformed("the body must be a JSON object", problem="object")
        case _:
            at = _AT.search(str(error))
            text = str(error) if body.strip() else "the body is empty"
            return Malformed(text, at=int(at[1]) if at else None)


def value(raw: Raw) -> Any:
    """What a field holds. Raises Malformed."""
    try:
        return _anything(raw)
    except UnicodeDecodeError as e:
        raise Malformed("the body is not UTF-8", problem="encoding", at=e.start) from None
    except RecursionError:
        raise Malformed("the body is nested too deep", problem="depth") from None
    except msgspec.DecodeError as e:
        raise Malformed(str(e)) from None
