"""What of a request the choice of a target may go by, beside the model's name."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

Scalar = str | int | float | bool

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_scalar = msgspec.json.Decoder(Scalar | None).decode


class RequestAttributes(Struct):
    """One request. Its body is read when a field of it is first asked for."""

    protocol: str = ""
    headers: Mapping[str, str] = {}
    """Found by lower-case name."""
    body: bytes = b""
    key: str = ""
    """The key's name; "" without one."""
    tags: frozenset[str] = frozenset()
    """The key's."""
    address: str = ""
    """The client's, as its socket tells: what a header says of it, anybody may write."""
    parsed_fields: Mapping[str, Raw] | None = None
    """The body's fields, once they were read."""

    def read_field(self, name: str) -> Scalar | None:
        """What the body's top level says under a name; None where that is no scalar."""
        if self.parsed_fields is None:
            self.parsed_fields = _read_fields(self.body)
        raw = self.parsed_fields.get(name)
        return None if raw is None else _read_scalar(raw)

    def read_source(self, source: str) -> str:
        """What one source says of who asks: ``header:NAME``, ``body:FIELD``, ``key``, ``address``.

        "" where it says nothing. Of a body's field, a text and a whole number are taken.
        """
        kind, _, name = source.partition(":")
        match kind:
            case "header":
                return self.headers.get(name, "")
            case "body":
                found = self.read_field(name)
                return str(found) if type(found) in (str, int) else ""
            case "key":
                return self.key
            case _:
                return self.address

    def find_first_source(self, sources: Sequence[str]) -> tuple[str, str]:
        """The first source that says something, and what it says; "" twice where none does."""
        for source in sources:
            if said := self.read_source(source):
                return source, said
        return "", ""


def _read_fields(body: bytes) -> Mapping[str, Raw]:
    """The fields of an object. What is none has none: it is for the dialect to refuse it."""
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _read_scalar(raw: Raw) -> Scalar | None:
    try:
        found: Scalar | None = _decode_scalar(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found
