"""Reading what is no scalar: objects and arrays inside a request, and complaints about them.

Complaints carry the wire path of the value (``messages[0].content``), the problem, and what was
there, so that another dialect of the family can say the same in its own words.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from protocols.body import decode_value
from protocols.core.errors import InvalidParameter

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_array = msgspec.json.Decoder(list[Raw]).decode

NULL = Raw(b"null")

_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def describe_type(got: Any) -> str:
    """What a JSON value is, in words."""
    return _TYPE_NAMES.get(type(got), "a value")


def missing_error(at: str) -> InvalidParameter:
    """A required value is not there, or null."""
    return InvalidParameter(f"Missing required parameter: '{at}'.", param=at, problem="missing")


def invalid_type_error(at: str, expected: str, got: Any) -> InvalidParameter:
    """``expected`` is in words: ``an object``."""
    text = f"Invalid type for '{at}': expected {expected}, but got {describe_type(got)} instead."
    return InvalidParameter(text, param=at, problem="type", expected=expected, got=got)


def invalid_value_error(at: str, got: Any, allowed: tuple[str, ...]) -> InvalidParameter:
    """None of those allowed."""
    shown = str(got)[:64]
    names = ", ".join(f"'{name}'" for name in allowed)
    text = f"Invalid value: '{shown}'. Supported values are: {names}."
    return InvalidParameter(text, param=at, problem="value", expected=allowed, got=got)


def empty_value_error(at: str, got: Any = ()) -> InvalidParameter:
    """An array or a string that must hold something."""
    what = "string" if isinstance(got, str) else "array"
    article = "an" if what == "array" else "a"
    text = (
        f"Invalid '{at}': empty {what}. Expected {article} {what} with minimum length 1, "
        f"but got an empty {what} instead."
    )
    return InvalidParameter(text, param=at, problem="empty", got=got)


def too_long_error(at: str, limit: int, got: Any) -> InvalidParameter:
    """A string or an array over its limit."""
    what = "string" if isinstance(got, str) else "array"
    article = "an" if what == "array" else "a"
    text = (
        f"Invalid '{at}': {what} too long. Expected {article} {what} with maximum length {limit}, "
        f"but got {article} {what} with length {len(got)} instead."
    )
    return InvalidParameter(text, param=at, problem="too_long", expected=limit, got=got)


def conflict_error(at: str, text: str) -> InvalidParameter:
    """Two fields that do not go together."""
    return InvalidParameter(text, param=at, problem="conflict")


def null_to_none(raw: Raw | None) -> Raw | None:
    """The value, or None where it is ``null``."""
    return None if raw is None or raw == NULL else raw


def as_object(raw: Raw, at: str) -> dict[str, Raw]:
    """An object's fields. Raises InvalidParameter, or Malformed."""
    got = decode_value(raw)
    if not isinstance(got, dict):
        raise invalid_type_error(at, "an object", got)
    return _decode_object(raw)


def as_array(raw: Raw, at: str) -> list[Raw]:
    """An array's items. Raises InvalidParameter, or Malformed."""
    got = decode_value(raw)
    if not isinstance(got, list):
        raise invalid_type_error(at, "an array", got)
    return _decode_array(raw)


def as_text(fields: Mapping[str, Raw], name: str, at: str) -> str:
    """A required string of an object at ``at``. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    where = f"{at}.{name}" if at else name
    if raw is None:
        raise missing_error(where)
    got = decode_value(raw)
    if not isinstance(got, str):
        raise invalid_type_error(where, "a string", got)
    return got


def as_optional_text(fields: Mapping[str, Raw], name: str, at: str) -> str | None:
    """A string of an object at ``at``, or None. Raises InvalidParameter."""
    return None if null_to_none(fields.get(name)) is None else as_text(fields, name, at)


def as_optional_bool(fields: Mapping[str, Raw], name: str, at: str) -> bool | None:
    """A boolean of an object at ``at``, or None. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    if raw is None:
        return None
    got = decode_value(raw)
    if not isinstance(got, bool):
        raise invalid_type_error(f"{at}.{name}", "a boolean", got)
    return got
