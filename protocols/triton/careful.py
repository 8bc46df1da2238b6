"""JSON as the original's parser reads it, slowly: for the texts that the fast parser refuses.

The original parses with RapidJSON, whose complaints and byte offsets its clients see. It also takes
what JSON does not have: a byte order mark, NaN and Inf, and anything behind a NUL. Every sentence
and offset here was seen from a running server (2.51).
"""

import math
import re
from typing import Any, Final

from msgspec import Raw

from protocols.triton import faults

_DEEPEST: Final = 128
_LARGEST_EXPONENT: Final = 308
_NEARLY_LARGEST: Final = 1.7976931348623157e307
"""An integer above this may not have another digit."""

_HIGH: Final = range(0xD800, 0xDC00)
_LOW: Final = range(0xDC00, 0xE000)
"""The two halves of a surrogate pair."""

_MARK = re.compile(rb"\xef?\xbb?\xbf?")
"""The byte order mark, of which the original takes any part."""
_BLANK = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(rb"[0-9]*")
_HEX = re.compile(rb"[0-9A-Fa-f]{4}")
_WORDS: Final = {b"n": (b"null", None), b"t": (b"true", True), b"f": (b"false", False)}
_ESCAPES: Final = {
    b'"': '"', b"\\": "\\", b"/": "/", b"b": "\b", b"f": "\f", b"n": "\n", b"r": "\r", b"t": "\t",
}  # fmt: skip


def members(text: bytes) -> list[tuple[str, Raw]]:
    """The fields of the object, in order, two of the same name included. Raises Malformed."""
    reader = _Reader(text)
    reader.open()
    if not reader.take(b"{"):
        reader.value()
        reader.close()
        raise faults.no_object()
    found = [(name, Raw(text[start:end])) for name, _, start, end in reader.fields()]
    reader.close()
    return found


def value(text: bytes) -> Any:
    """What the text holds; of two fields alike, the last. Raises Malformed."""
    reader = _Reader(text)
    reader.open()
    found = reader.value()
    reader.close()
    return found


class _Reader:
    """A cursor over the text. Past its end it sees b"", and behind a NUL nothing."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def open(self) -> None:
        self._skip(_MARK)
        self._blank()
        if self._ended():
            raise self._wrong("The document is empty.")

    def close(self) -> None:
        self._blank()
        if not self._ended():
            raise self._wrong("The document root must not be followed by other values.")

    def value(self) -> Any:
        match self._peek():
            case b'"':
                return self._string()
            case b"{":
                self._at += 1
                return {name: what for name, what, _, _ in self.fields()}
            case b"[":
                self._at += 1
                return self._items()
            case b"n" | b"t" | b"f" as first:
                return self._word(first)
            case _:
                return self._number()

    def fields(self) -> list[tuple[str, Any, int, int]]:
        """The fields of an object whose brace was taken: name, value, the value's begin and end."""
        self._enter()
        found: list[tuple[str, Any, int, int]] = []
        self._blank()
        if self.take(b"}"):
            self._depth -= 1
            return found
        while True:
            if self._peek() != b'"':
                raise self._wrong("Missing a name for object member.")
            name = self._string()
            self._blank()
            if not self.take(b":"):
                raise self._wrong("Missing a colon after a name of object member.")
            self._blank()
            start = self._at
            found.append((name, self.value(), start, self._at))
            self._blank()
            if self.take(b"}"):
                self._depth -= 1
                return found
            if not self.take(b","):
                raise self._wrong("Missing a comma or '}' after an object member.")
            self._blank()

    def take(self, wanted: bytes) -> bool:
        """Step over this byte, if it is the next."""
        if self._peek() != wanted:
            return False
        self._at += 1
        return True

    def _items(self) -> list[Any]:
        self._enter()
        found: list[Any] = []
        self._blank()
        if self.take(b"]"):
            self._depth -= 1
            return found
        while True:
            found.append(self.value())
            self._blank()
            if self.take(b"]"):
                self._depth -= 1
                return found
            if not self.take(b","):
                raise self._wrong("Missing a comma or ']' after an array element.")
            self._blank()

    def _word(self, first: bytes) -> bool | None:
        word, meaning = _WORDS[first]
        self._letters(word)
        return meaning

    def _letters(self, word: bytes) -> None:
        for letter in word:
            if not self.take(bytes((letter,))):
                raise self._wrong("Invalid value.")

    def _string(self) -> str:
        pieces = []
        self._at += 1
        while True:
            pieces.append(self._decoded(self._skip(_PLAIN)))
            match self._peek():
                case b'"':
                    self._at += 1
                    return "".join(pieces)
                case b"\\":
                    pieces.append(self._escape())
                case b"" | b"\0":
                    raise self._wrong("Missing a closing quotation mark in string.")
                case _:
                    raise self._wrong("Invalid escape character in string.")

    def _decoded(self, start: int) -> str:
        try:
            return self._text[start : self._at].decode()
        except UnicodeDecodeError as e:
            # The original lets such bytes through to the model; no str can hold them.
            raise faults.unreadable("Invalid encoding in string.", start + e.start) from None

    def _escape(self) -> str:
        start = self._at
        self._at += 1
        kind = self._peek()
        self._at += 1
        if kind != b"u":
            if kind not in _ESCAPES:
                raise faults.unreadable("Invalid escape character in string.", start)
            return _ESCAPES[kind]
        return self._character(self._code(start), start)

    def _character(self, code: int, start: int) -> str:
        if code not in _HIGH and code not in _LOW:
            return chr(code)
        low = 0
        if code in _HIGH and self.take(b"\\") and self.take(b"u"):
            low = self._code(start)
        if low not in _LOW:
            raise faults.unreadable("The surrogate pair in string is invalid.", start)
        return chr(0x10000 + ((code - _HIGH.start) << 10) + low - _LOW.start)

    def _code(self, start: int) -> int:
        found = _HEX.match(self._text, self._at)
        if found is None:
            raise faults.unreadable("Incorrect hex digit after \\u escape in string.", start)
        self._at = found.end()
        return int(found[0], 16)

    def _number(self) -> float:
        start = self._at
        self.take(b"-")
        beyond = self._beyond(start) if self._peek() in {b"N", b"I"} else None
        zero = beyond is not None or self.take(b"0")
        whole = b"0" if zero else self._digits("Invalid value.")
        fraction = self._digits("Miss fraction part in number.") if self.take(b".") else b""
        exponent = self._exponent()
        plain = not fraction and exponent is None
        if float(whole[:-1] or b"0") >= _NEARLY_LARGEST or (
            exponent is not None and exponent > _LARGEST_EXPONENT + len(fraction)
        ):
            raise faults.unreadable("Number too big to be stored in double.", start)
        if beyond is not None:
            return beyond
        literal = self._text[start : self._at]
        return int(literal) if plain else float(literal)

    def _beyond(self, start: int) -> float:
        if self.take(b"N") and self.take(b"a") and self.take(b"N"):
            return math.nan
        # As the original does, look for the other word where the first one broke off.
        if not (self.take(b"I") and self.take(b"n") and self.take(b"f")):
            raise self._wrong("Invalid value.")
        if self._peek() == b"i":
            self._letters(b"inity")
        return -math.inf if self._text[start] == ord("-") else math.inf

    def _exponent(self) -> int | None:
        if not (self.take(b"e") or self.take(b"E")):
            return None
        minus = self.take(b"-")
        if not minus:
            self.take(b"+")
        digits = self._digits("Miss exponent in number.")[:9]
        return -int(digits) if minus else int(digits)

    def _digits(self, missing: str) -> bytes:
        start = self._skip(_DIGITS)
        if start == self._at:
            raise self._wrong(missing)
        return self._text[start : self._at]

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise faults.too_deep()

    def _skip(self, what: re.Pattern[bytes]) -> int:
        """Step over what matches (nothing, at least); where it began."""
        start = self._at
        found = what.match(self._text, start)
        self._at = found.end() if found else start
        return start

    def _blank(self) -> None:
        self._skip(_BLANK)

    def _peek(self) -> bytes:
        return self._text[self._at : self._at + 1]

    def _ended(self) -> bool:
        return self._peek() in {b"", b"\0"}

    def _wrong(self, reason: str) -> Exception:
        return faults.unreadable(reason, self._at)
