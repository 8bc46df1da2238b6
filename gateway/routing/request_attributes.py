"""The attributes of a request that routing reads beside the model's name."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from protocols.core.json_text import JsonDecoder

Scalar = str | int | float | bool

_decode_fields = JsonDecoder(dict[str, Raw]).decode
_decode_scalar = JsonDecoder(Scalar | None).decode


class RequestAttributes(Struct):
    """One request's attributes. Its body is parsed when a field of it is first read."""

    protocol: str = ""
    headers: Mapping[str, str] = {}
    """By lower-case name."""
    body: bytes = b""
    key: str = ""
    """The API key's name; "" without one."""
    tags: frozenset[str] = frozenset()
    """The API key's tags."""
    address: str = ""
    """The client's address from its socket, not from a header that anybody could send."""
    parsed_fields: Mapping[str, Raw] | None = None
    """The body's fields, once it was parsed."""

    def read_field(self, name: str) -> Scalar | None:
        """A scalar of the body's top level; None if there is none of this name."""
        if self.parsed_fields is None:
            self.parsed_fields = _read_fields(self.body)
        raw = self.parsed_fields.get(name)
        return None if raw is None else _read_scalar(raw)

    def read_source(self, source: str) -> str:
        """The value of a sticky source: ``header:NAME``, ``body:FIELD``, ``key``, ``address``.

        "" if it is not present. A body's field must be a string or an integer.
        """
        kind, _, name = source.partition(":")
        match kind:
            case "header":
                return self.headers.get(name, "")
            case "body":
                value = self.read_field(name)
                return str(value) if type(value) in (str, int) else ""
            case "key":
                return self.key
            case _:
                return self.address

    def find_first_source(self, sources: Sequence[str]) -> tuple[str, str]:
        """The first source that is present, and its value; two empty strings if none is."""
        for source in sources:
            if value := self.read_source(source):
                return source, value
        return "", ""


def _read_fields(body: bytes) -> Mapping[str, Raw]:
    """The fields of a JSON object. Any other body has none; the protocol rejects it later."""
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _read_scalar(raw: Raw) -> Scalar | None:
    try:
        value: Scalar | None = _decode_scalar(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value
