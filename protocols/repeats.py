"""Events that differ from the one before in nothing but their text, as nearly all of a stream do.

A JSON string that stands between the same bytes as before means what that event meant, with another
text. Seeing so takes a fraction of the time of reading an event, and many at once take hardly more.
"""

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from operator import itemgetter
from typing import Any, Final

import msgspec

from gateway.core.types import Event, Served, Start, Text

_encode = msgspec.json.Encoder().encode
_read_text = msgspec.json.Decoder(str).decode
_read_lines = msgspec.json.Decoder(str).decode_lines

_ONCE: Final = frozenset({Served, Start})
PROBE: Final = "Would this change more than the text?"
_PROBE: Final = _encode(PROBE)
_TRIES: Final = 8
"""Of a worker whose events differ in more no likeness is sought for ever."""
_OTHERS: Final = 4
"""Events that are looked behind for those that are alike."""
_FEW: Final = 2
"""Of fewer nothing is to be gained by taking them together."""
_AT_ONCE: Final = 1 << 15
"""Bytes that are cut apart together: an event that differs may not cost another look at all of a
read.
"""


class Repeats:
    """What the events of one stream have in common, as far as it was learned."""

    __slots__ = ("_after", "_before", "_size", "_tail", "_tries", "head")

    def __init__(self) -> None:
        self._before = b""
        """Of an event's data, up to its text; empty where nothing is known."""
        self._after = b""
        self.head = b""
        """The same of a whole event."""
        self._tail = b""
        self._size = 0
        """Bytes of an event but for its text."""
        self._tries = _TRIES

    def learn(
        self, payload: bytes, text: str, read: Callable[[bytes], Any], probed: object
    ) -> bool:
        """The data of an event said ``text`` alone; whether others can be like it.

        ``probed`` is what ``read`` gives for one that differs in nothing but its text, which is
        PROBE. If there can be none, what was learned before still counts.
        """
        if not self._tries:
            return False
        self._tries -= 1
        said = _encode(text)
        before, found, after = payload.partition(said)
        if not found or said.find(b"\\") >= 0:
            return False
        try:
            alike: bool = read(before + _PROBE + after) == probed
        except msgspec.DecodeError:
            return False
        if alike:
            self._before, self._after = before + b'"', b'"' + after
            self.head, self._tail = b"data: " + self._before, self._after + b"\n\n"
            self._size = len(self.head) + len(self._tail)
        return alike

    def forget(self) -> None:
        """Something else was said, after which the same may mean another thing."""
        self._before = self.head = b""

    def text(self, payload: bytes) -> str | None:
        """What an event says; None where it is not like the one that was learned."""
        before, after = self._before, self._after
        if not before or not payload.startswith(before) or not payload.endswith(after):
            return None
        return _text(payload[len(before) - 1 : len(payload) - len(after) + 1])

    def run(self, data: bytes, start: int, texts: list[str]) -> int:
        """Adds what the whole events from ``start`` on say, and gives where these end.

        One may say nothing, which is a text, too.
        """
        head, tail = self.head, self._tail
        if not head or not data.startswith(head, start):
            return start
        if len(data) - start >= 2 * self._size or not data.endswith(tail):
            return self._run(data, start, texts)
        text = _text(data[start + len(head) - 1 : len(data) - len(tail) + 1])
        if text is None:
            return start
        texts.append(text)
        return len(data)

    def together(
        self, data: bytes, start: int, pieces: Sequence[bytes] = ()
    ) -> tuple[str, int, int]:
        """What the same events say as one, in how many of them, and where these end.

        ``pieces`` are those that ``data`` came in, where that is known.
        """
        head, tail = self.head, self._tail
        if not head or not data.startswith(head, start):
            return "", 0, start
        if len(data) - start >= 2 * self._size or not data.endswith(tail):
            found = self._apart(data, start, pieces) if pieces else None
            return self._together(data, start) if found is None else found
        text = _text(data[start + len(head) - 1 : len(data) - len(tail) + 1])
        if text is None:
            return "", 0, start
        return text, 1 if text else 0, len(data)

    def _run(self, data: bytes, start: int, texts: list[str]) -> int:
        """``run`` where there may be many."""
        for parts, end in self._cut(data, start):
            known = _texts(parts)
            if known is None:
                return self._each(data, start, texts)
            texts += known
            start = end
        return start

    def _together(self, data: bytes, start: int) -> tuple[str, int, int]:
        """``together`` where there may be many."""
        said: list[str] = []
        count = 0
        for parts, end in self._cut(data, start):
            known = _plain(parts) or _texts(parts)
            if known is None:
                rest: list[str] = []
                start = self._each(data, start, rest)
                said += rest
                count += len(rest) - rest.count("")
                break
            said += known
            count += len(parts) - known.count("")
            start = end
        return "".join(said), count, start

    def _apart(
        self, data: bytes, start: int, pieces: Sequence[bytes]
    ) -> tuple[str, int, int] | None:
        """``together`` of events of which each came alone; None where they did not, or may not."""
        first, last, left = 0, len(pieces), start
        while left > 0 and first < _OTHERS:
            left -= len(pieces[first])
            first += 1
        head, tail = self.head, self._tail
        while last > first and not pieces[last - 1].endswith(tail):
            last -= 1
        if left or last - first < _FEW:
            return None
        parts = [*map(itemgetter(slice(len(head), -len(tail))), pieces[first:last])]
        whole = (tail + head).join(parts)
        start += len(head)
        end = start + len(whole)
        if not data.startswith(whole, start) or not data.startswith(tail, end):
            return None
        known = _plain(parts) or _texts(parts)
        if known is None:
            return None
        return "".join(known), len(parts) - known.count(""), end + len(tail)

    def _cut(self, data: bytes, start: int) -> Iterator[tuple[list[bytes], int]]:
        """What stands in the quotes of the whole events from ``start`` on, and where these end.

        They are cut by length alone: that they are alike shows when they are put together again.
        Where they are not, nothing is given in their place, and no more may be asked for.
        """
        head, tail = self.head, self._tail
        last = data.rfind(tail, start + len(head))
        if last < 0:
            return
        between, said = tail + head, itemgetter(slice(len(head), 1 - len(tail)))
        reading = BytesIO(data)
        while start < last and data.startswith(head, start):
            reading.seek(start)
            lines = reading.readlines(min(last - start, _AT_ONCE))[::2]  # each event has two
            parts = [*map(said, lines)]
            whole = between.join(parts)
            end = start + len(head) + len(whole)
            alike = data.startswith(whole, start + len(head)) and data.startswith(tail, end)
            start = end + len(tail)
            yield parts if alike else [], start

    def _each(self, data: bytes, start: int, texts: list[str]) -> int:
        """The same one by one."""
        head, tail = self.head, self._tail
        while data.startswith(head, start):
            end = data.find(tail, start + len(head))
            text = None if end < 0 else _text(data[start + len(head) - 1 : end + 1])
            if text is None:
                break
            texts.append(text)
            start = end + len(tail)
        return start


def text_alone(events: Sequence[Event]) -> Text | None:
    """The text that an event said; None where it said more, but for what is told only once."""
    if not events or type(last := events[-1]) is not Text:
        return None
    return last if len(events) == 1 or _ONCE.issuperset(map(type, events[:-1])) else None


def _text(quoted: bytes) -> str | None:
    """What a JSON string says; None where it is none."""
    try:
        return _read_text(quoted)
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None


def _plain(parts: list[bytes]) -> list[str] | None:
    """What stands in the quotes of many, as one text; None where that may not be what each says."""
    said = b"".join(parts)
    if not said or not said.isascii() or said.find(b"\\") >= 0 or not all(parts):
        return None
    text = _text(b'"%b"' % said)
    return None if text is None else [text]


def _texts(parts: list[bytes]) -> list[str] | None:
    """What stands in the quotes of many, without a newline; None of none, or if one is no text."""
    try:
        texts = _read_lines(b'"%b"' % b'"\n"'.join(parts))
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None
    return texts if len(texts) == len(parts) else None  # a line is one text, or more
