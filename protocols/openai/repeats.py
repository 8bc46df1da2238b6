"""Chunks that differ from the one before in nothing but their text, as nearly all of a stream do.

A JSON string that stands between the same bytes as before means what that chunk meant, with another
text. Seeing so takes a fraction of the time of reading a chunk, and many at once take hardly more.
"""

import re
from typing import Final

import msgspec

from protocols.openai.incoming import WireAnswer, read_answer

_encode = msgspec.json.Encoder().encode
_read_text = msgspec.json.Decoder(str).decode

_ESCAPED: Final = re.compile(rb"[\\\x00-\x1f]")
_ODD: Final = re.compile(rb'["\\\x00-\x1f]')
_PROBE: Final = "Would this change more than the text?"
_TRIES: Final = 8
"""Of a worker whose chunks differ in more no likeness is sought for ever."""


class Repeats:
    """What the chunks of one stream have in common, as far as it was learned."""

    __slots__ = ("_after", "_before", "_between", "_head", "_head_size", "_size", "_tail", "_tries")

    def __init__(self) -> None:
        self._before = b""
        """Of a chunk, up to its text; empty where nothing is known."""
        self._after = b""
        self._head = b""
        """The same of a whole event."""
        self._tail = b""
        self._between = b""
        """What stands between the texts of two events."""
        self._head_size = self._size = 0
        """Bytes of an event's head, and of all of it but its text."""
        self._tries = _TRIES

    @property
    def known(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._before)

    def learn(self, chunk: bytes, wire: WireAnswer, text: str) -> bool:
        """This chunk was read as ``wire`` and said ``text`` alone; whether others can be like it.

        If not, what was learned before still counts.
        """
        if not self._tries:
            return False
        self._tries -= 1
        said = _encode(text)
        before, found, after = chunk.partition(said)
        if not found or _ESCAPED.search(said):
            return False
        for choice in wire.choices or ():
            if (delta := choice.delta or choice.message) is None:
                choice.text = _PROBE
            else:
                delta.content = _PROBE
        try:
            alike = read_answer(before + _encode(_PROBE) + after) == wire
        except msgspec.DecodeError:
            return False
        if alike:
            self._before, self._after = before + b'"', b'"' + after
            self._head, self._tail = b"data: " + self._before, self._after + b"\n\n"
            self._between = self._tail + self._head
            self._head_size, self._size = len(self._head), len(self._between)
        return alike

    def forget(self) -> None:
        """Something else was said, after which the same may mean another thing."""
        self._before = self._head = b""

    def text(self, chunk: bytes) -> str | None:
        """What a chunk says; None where it is not like the one that was learned."""
        before, after = self._before, self._after
        if not before or not chunk.startswith(before) or not chunk.endswith(after):
            return None
        end = len(chunk) - len(after)
        if end < len(before):
            return None
        said = chunk[len(before) : end]
        try:
            return said.decode() if _ODD.search(said) is None else _read_text(b'"%b"' % said)
        except (UnicodeDecodeError, msgspec.DecodeError):
            return None

    def run(self, data: bytes, start: int, texts: list[str]) -> int:
        """Adds what the whole events from ``start`` on say, and gives where these end."""
        head, tail = self._head, self._tail
        if not head or not data.startswith(head, start):
            return start
        left = len(data) - start
        if self._size <= left < 2 * self._size and data.endswith(tail):  # most bring one event
            only = data[start + self._head_size : -len(tail)]
            if only.isascii() and _ODD.search(only) is None:
                if only:
                    texts.append(only.decode())
                return len(data)
        parts, between, at = list[bytes](), self._between, start + self._head_size
        while data.startswith(between, end := data.find(b'"', at)):
            parts.append(data[at:end])
            at = end + self._size
        if data.startswith(tail, end):
            parts.append(data[at:end])
        plain, size = _ODD.search(b"".join(parts)) is None, self._size
        for part in parts:
            try:
                text = part.decode() if plain else _read_text(b'"%b"' % part)
            except (UnicodeDecodeError, msgspec.DecodeError):
                break
            start += size + len(part)
            if text:
                texts.append(text)
        return start
