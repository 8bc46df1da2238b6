"""Decodes JSON bodies; every failure becomes a MalformedRequest."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocols.core.errors import MalformedRequest, WorkerFailed
from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import MAX_DEPTH, JsonDecoder, JsonTooDeep

_decode_object = JsonDecoder(dict[str, Raw]).decode
_decode_any = JsonDecoder().decode
_MODEL: Final = "model"
_are_plain = re.compile("[a-z_]*").fullmatch
"""Whether names, joined, have no letter in another case; nearly all have none."""
_BYTE_OFFSET = re.compile(r"\(byte (\d+)\)")
JSON_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError)
"""Errors of a body that is not JSON in UTF-8, or not of the expected type."""


class _AmbiguousName(msgspec.ValidationError):
    """A field's name is another one's but for case, or but for what some servers do not read."""


def _decode_fields(body: bytes) -> dict[str, Raw]:
    """The fields of an object. Raises one of JSON_ERRORS.

    Some servers ignore the case of names, or end them at NUL: such a worker might read another
    model or limit than the gateway where a name equals another one, or ``model``, but for that.
    """
    fields = _decode_object(body)
    if _are_plain("".join(fields)):
        return fields
    seen = {_MODEL: _MODEL}
    for name in fields:
        if "\0" in name:
            raise _AmbiguousName(f"the field {name[:64]!r} has a NUL in its name")
        if seen.setdefault(name.casefold(), name) != name:
            raise _AmbiguousName(f"the field {name[:64]!r} differs from another one in case only")
    return fields


def read_object(body: bytes) -> dict[str, Raw]:
    """The fields of a JSON object, with undecoded values; of duplicate fields, the last.

    Raises MalformedRequest if the body is not a JSON object in UTF-8, also for what msgspec reports
    outside its own error classes (invalid UTF-8, nesting too deep), and for names that some servers
    take for another one.
    """
    try:
        check_unicode(body)
        return _decode_fields(body)
    except JSON_ERRORS as e:
        raise _build_error(body, e) from None


def read_unchecked_fields(call: ClientRequest) -> Mapping[str, Raw] | None:
    """The fields of the body, without a check of their Unicode; None if ``read_object`` refuses it.

    The result is cached on ``call`` until ``pop_fields`` or ``read_fields`` takes it.
    """
    try:
        fields = _decode_fields(call.body)
    except JSON_ERRORS:
        return None
    call.__dict__["fields"] = fields
    return fields


def get_decoded_fields(call: ClientRequest) -> Mapping[str, Raw] | None:
    """The fields that ``read_unchecked_fields`` has cached; None if it has not."""
    fields = call.__dict__.get("fields")
    return fields if type(fields) is dict else None


def pop_fields(call: ClientRequest) -> dict[str, Raw]:
    """Take the fields from the cache or decode them, without a Unicode check.

    Raises one of JSON_ERRORS.
    """
    fields: dict[str, Raw] | None = call.__dict__.pop("fields", None)
    return _decode_fields(call.body) if fields is None else fields


def read_fields(call: ClientRequest) -> Mapping[str, Raw]:
    """The fields of the body, checked. Raises MalformedRequest."""
    fields: Mapping[str, Raw] | None = call.__dict__.pop("fields", None)
    if fields is None:
        return read_object(call.body)
    try:
        check_unicode(call.body)
    except JSON_ERRORS as e:
        raise _build_error(call.body, e) from None
    return fields


def check_unicode(body: bytes) -> None:
    """Check that a JSON body is UTF-8. Raises UnicodeDecodeError.

    The decoder checks escapes everywhere, but UTF-8 only in the strings that it decodes.
    """
    if not body.isascii():
        body.decode()


def _build_error(body: bytes, error: Exception) -> MalformedRequest:
    match error:
        case UnicodeDecodeError():
            return MalformedRequest("the body is not UTF-8", problem="encoding", at=error.start)
        case JsonTooDeep():
            return _build_depth_error()
        case _AmbiguousName():
            return MalformedRequest(str(error))
        case msgspec.ValidationError():
            return MalformedRequest("the body must be a JSON object", problem="object")
        case _:
            try:
                _decode_any(body)
            except JSON_ERRORS as e:
                error = e  # it says more than the error of a value that is not decoded
            at = _BYTE_OFFSET.search(str(error))
            text = str(error) if body.strip() else "the body is empty"
            return MalformedRequest(text, at=int(at[1]) if at else None)


def _build_depth_error() -> MalformedRequest:
    text = f"the body is nested too deep: more than {MAX_DEPTH} levels"
    return MalformedRequest(text, problem="depth")


def build_answer_error(error: Exception) -> WorkerFailed:
    """The error of a worker's answer that can't be decoded."""
    reason = f": {error}" if isinstance(error, JsonTooDeep) else ""
    return WorkerFailed(f"The worker's answer can't be read{reason}.")


def decode_value(raw: Raw | bytes) -> Any:
    """Decode the value of a field. Raises MalformedRequest."""
    try:
        return _decode_any(raw)
    except UnicodeDecodeError as e:
        raise MalformedRequest("the body is not UTF-8", problem="encoding", at=e.start) from None
    except JsonTooDeep:
        raise _build_depth_error() from None
    except msgspec.DecodeError as e:
        raise MalformedRequest(str(e)) from None
