"""JSON as Triton's parser reads it; slow, for texts that the fast parser rejects.

Triton parses with RapidJSON, whose error texts and byte offsets its clients see. It also accepts
what is not JSON: a byte order mark, NaN and Inf, and anything after a NUL byte. All texts and
offsets here were observed on a running server (2.51).
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import MAX_DEPTH, JsonDecoder, JsonTooDeep
from protocols.triton import errors

_MAX_EXPONENT: Final = 308
_MAX_EXTENDABLE_INTEGER: Final = 1.7976931348623157e307
"""A larger integer cannot take another digit."""

_HIGH_SURROGATES: Final = range(0xD800, 0xDC00)
_LOW_SURROGATES: Final = range(0xDC00, 0xE000)

_BYTE_ORDER_MARK = re.compile(rb"\xef?\xbb?\xbf?")
"""The byte order mark; Triton accepts any prefix of it."""
_WHITESPACE = re.compile(rb"[ \t\n\r]*")
_PLAIN_TEXT = re.compile(rb'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(rb"[0-9]*")
_HEX_DIGITS = re.compile(rb"[0-9A-Fa-f]{4}")
_LITERALS: Final = {b"n": (b"null", None), b"t": (b"true", True), b"f": (b"false", False)}
_ESCAPES: Final = {
    b'"': '"', b"\\": "\\", b"/": "/", b"b": "\b", b"f": "\f", b"n": "\n", b"r": "\r", b"t": "\t",
}  # fmt: skip


def parse_rapidjson_members(text: bytes) -> list[tuple[str, Raw]]:
    """Parse an object into fields in order, including duplicates. Raises MalformedRequest."""
    reader = _RapidJsonReader(text)
    reader.read_start()
    if not reader.skip_byte(b"{"):
        reader.read_value()
        reader.check_end()
        raise errors.build_not_object_error()
    members = [(name, Raw(text[start:end])) for name, _, start, end in reader.read_members()]
    reader.check_end()
    return members


def parse_rapidjson_value(text: bytes) -> Any:
    """Parse a value; of duplicate fields, the last one counts. Raises MalformedRequest."""
    reader = _RapidJsonReader(text)
    reader.read_start()
    value = reader.read_value()
    reader.check_end()
    return value


class _RapidJsonReader:
    """A cursor over the text. At the end and after a NUL byte it reads b""."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._position = 0
        self._depth = 0

    def read_start(self) -> None:
        self._skip_pattern(_BYTE_ORDER_MARK)
        self._skip_whitespace()
        if self._is_at_end():
            raise self._build_error("The document is empty.")

    def check_end(self) -> None:
        self._skip_whitespace()
        if not self._is_at_end():
            raise self._build_error("The document root must not be followed by other values.")

    def read_value(self) -> Any:
        match self._peek():
            case b'"':
                return self._read_string()
            case b"{":
                self._position += 1
                return {name: value for name, value, _, _ in self.read_members()}
            case b"[":
                self._position += 1
                return self._read_items()
            case b"n" | b"t" | b"f" as first:
                return self._read_literal(first)
            case _:
                return self._read_number()

    def read_members(self) -> list[tuple[str, Any, int, int]]:
        """Read the members of an object after its brace: name, value, start and end."""
        missing_comma = "Missing a comma or '}' after an object member."
        return self._read_sequence(self._read_member, b"}", missing_comma)

    def _read_items(self) -> list[Any]:
        missing_comma = "Missing a comma or ']' after an array element."
        return self._read_sequence(self.read_value, b"]", missing_comma)

    def _read_sequence(
        self, read_element: Callable[[], Any], end: bytes, missing_comma: str
    ) -> list[Any]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise errors.build_depth_error()
        elements: list[Any] = []
        self._skip_whitespace()
        while not self.skip_byte(end):
            if elements:
                if not self.skip_byte(b","):
                    raise self._build_error(missing_comma)
                self._skip_whitespace()
            elements.append(read_element())
            self._skip_whitespace()
        self._depth -= 1
        return elements

    def _read_member(self) -> tuple[str, Any, int, int]:
        if self._peek() != b'"':
            raise self._build_error("Missing a name for object member.")
        name = self._read_string()
        self._skip_whitespace()
        if not self.skip_byte(b":"):
            raise self._build_error("Missing a colon after a name of object member.")
        self._skip_whitespace()
        start = self._position
        return name, self.read_value(), start, self._position

    def skip_byte(self, byte: bytes) -> bool:
        """Skip this byte if it is next."""
        if self._peek() != byte:
            return False
        self._position += 1
        return True

    def _read_literal(self, first: bytes) -> bool | None:
        word, value = _LITERALS[first]
        self._read_letters(word)
        return value

    def _read_letters(self, word: bytes) -> None:
        for letter in word:
            if not self.skip_byte(bytes((letter,))):
                raise self._build_error("Invalid value.")

    def _read_string(self) -> str:
        pieces = []
        self._position += 1
        while True:
            pieces.append(self._decode_text(self._skip_pattern(_PLAIN_TEXT)))
            match self._peek():
                case b'"':
                    self._position += 1
                    return "".join(pieces)
                case b"\\":
                    pieces.append(self._read_escape())
                case b"" | b"\0":
                    raise self._build_error("Missing a closing quotation mark in string.")
                case _:
                    raise self._build_error("Invalid escape character in string.")

    def _decode_text(self, start: int) -> str:
        try:
            return self._text[start : self._position].decode()
        except UnicodeDecodeError as e:
            # Triton passes such bytes to the model; a str cannot hold them.
            raise errors.build_json_error("Invalid encoding in string.", start + e.start) from None

    def _read_escape(self) -> str:
        start = self._position
        self._position += 1
        kind = self._peek()
        self._position += 1
        if kind != b"u":
            if kind not in _ESCAPES:
                raise errors.build_json_error("Invalid escape character in string.", start)
            return _ESCAPES[kind]
        return self._read_character(self._read_code_unit(start), start)

    def _read_character(self, code: int, start: int) -> str:
        if code not in _HIGH_SURROGATES and code not in _LOW_SURROGATES:
            return chr(code)
        low = 0
        if code in _HIGH_SURROGATES and self.skip_byte(b"\\") and self.skip_byte(b"u"):
            low = self._read_code_unit(start)
        if low not in _LOW_SURROGATES:
            raise errors.build_json_error("The surrogate pair in string is invalid.", start)
        return chr(0x10000 + ((code - _HIGH_SURROGATES.start) << 10) + low - _LOW_SURROGATES.start)

    def _read_code_unit(self, start: int) -> int:
        digits = _HEX_DIGITS.match(self._text, self._position)
        if digits is None:
            raise errors.build_json_error("Incorrect hex digit after \\u escape in string.", start)
        self._position = digits.end()
        return int(digits[0], 16)

    def _read_number(self) -> float:
        start = self._position
        self.skip_byte(b"-")
        non_finite = self._read_non_finite(start) if self._peek() in {b"N", b"I"} else None
        is_zero = non_finite is not None or self.skip_byte(b"0")
        integer = b"0" if is_zero else self._read_digits("Invalid value.")
        fraction = (
            self._read_digits("Miss fraction part in number.") if self.skip_byte(b".") else b""
        )
        exponent = self._read_exponent()
        if float(integer[:-1] or b"0") >= _MAX_EXTENDABLE_INTEGER or (
            exponent is not None and exponent > _MAX_EXPONENT + len(fraction)
        ):
            raise errors.build_json_error("Number too big to be stored in double.", start)
        if non_finite is not None:
            return non_finite
        literal = self._text[start : self._position]
        return int(literal) if not fraction and exponent is None else float(literal)

    def _read_non_finite(self, start: int) -> float:
        if self.skip_byte(b"N") and self.skip_byte(b"a") and self.skip_byte(b"N"):
            return math.nan
        # Like Triton, try the other word at the position where the first one failed.
        if not (self.skip_byte(b"I") and self.skip_byte(b"n") and self.skip_byte(b"f")):
            raise self._build_error("Invalid value.")
        if self._peek() == b"i":
            self._read_letters(b"inity")
        return -math.inf if self._text[start] == ord("-") else math.inf

    def _read_exponent(self) -> int | None:
        if not (self.skip_byte(b"e") or self.skip_byte(b"E")):
            return None
        is_negative = self.skip_byte(b"-")
        if not is_negative:
            self.skip_byte(b"+")
        digits = self._read_digits("Miss exponent in number.")[:9]
        return -int(digits) if is_negative else int(digits)

    def _read_digits(self, missing: str) -> bytes:
        start = self._skip_pattern(_DIGITS)
        if start == self._position:
            raise self._build_error(missing)
        return self._text[start : self._position]

    def _skip_pattern(self, pattern: re.Pattern[bytes]) -> int:
        """Skip what matches (possibly nothing); return its start."""
        start = self._position
        match = pattern.match(self._text, start)
        self._position = match.end() if match else start
        return start

    def _skip_whitespace(self) -> None:
        self._skip_pattern(_WHITESPACE)

    def _peek(self) -> bytes:
        return self._text[self._position : self._position + 1]

    def _is_at_end(self) -> bool:
        return self._peek() in {b"", b"\0"}

    def _build_error(self, reason: str) -> Exception:
        return errors.build_json_error(reason, self._position)


# A JSON body as this adapter needs it: all fields, in the order in which they were sent.


class _UniqueName(str):
    """A field name that equals no other, so that a dict can hold duplicates."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


_decode_members = JsonDecoder(dict[_UniqueName, Raw], dec_hook=str.__new__).decode
_decode_any = JsonDecoder().decode


class OrderedFields(dict[str, Raw]):
    """The fields of an object: ``names`` as sent, and the first value of each name.

    ``values`` are the decoded values, if the fast parser read them.
    """

    __slots__ = ("_nested_fields", "_values", "names")

    def __init__(
        self, names: list[str], raws: Iterable[Raw], values: Mapping[str, Any] | None = None
    ) -> None:
        self.names = names
        self._values = values
        self._nested_fields: dict[str, OrderedFields] = {}
        pairs = [*zip(names, raws, strict=True)]
        super().__init__(pairs)
        if len(self) < len(pairs):
            self.update(reversed(pairs))

    def get_value(self, name: str) -> Any:
        """The decoded value of a field. Raises MalformedRequest."""
        return parse_value(self[name]) if self._values is None else self._values[name]

    def parse_nested(self, name: str) -> "OrderedFields":
        """The fields of a field that is an object, parsed once. Raises MalformedRequest."""
        fields = self._nested_fields.get(name)
        if fields is None:
            text, values = bytes(self[name]), self._values and self._values[name]
            fields = _build_fields(text, values) if type(values) is dict else parse_fields(text)
            self._nested_fields[name] = fields
        return fields


def parse_fields(text: bytes) -> OrderedFields:
    """Parse an object. Raises MalformedRequest, also if the text holds none."""
    try:
        values = _decode_any(text)
        if type(values) is not dict:
            raise errors.build_not_object_error()
        return _build_fields(text, values)
    except JsonTooDeep:
        raise errors.build_depth_error() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pairs = parse_rapidjson_members(text)
        return OrderedFields([name for name, _ in pairs], [raw for _, raw in pairs])


def _build_fields(text: bytes, values: Mapping[str, Any]) -> OrderedFields:
    """The fields of an object whose ``values`` are known; of duplicates these are the last."""
    members = _decode_members(text)
    if len(members) == len(values):
        return OrderedFields([*values], members.values(), values)
    return OrderedFields([*map(str, members)], members.values())


def fields_of(call: ClientRequest) -> OrderedFields:
    """Parse the body of a client request, once. Raises MalformedRequest."""
    fields: OrderedFields | None = call.__dict__.get("fields")
    if fields is None:
        fields = call.__dict__["fields"] = parse_fields(call.body)
    return fields


def parse_value(text: bytes) -> Any:
    """Parse a value. Raises MalformedRequest."""
    try:
        return _decode_any(text)
    except JsonTooDeep:
        raise errors.build_depth_error() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return parse_rapidjson_value(bytes(text))  # a Raw cannot be sliced


def encode_raw(value: Any) -> Raw:
    """Encode JSON text for ``extra``."""
    return Raw(msgspec.json.encode(value))
