"""Messages of HTTP whose head is that of one before, but for how long the body is. Pure."""

import re
from typing import Final, Generic, TypeVar

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(0|[1-9][0-9]{0,8})\r\n", re.IGNORECASE)
_DIGITS: Final = 10
"""Bytes from where a length begins in which its line ends."""
_LONG: Final = 4096
"""Bytes of the longest head that is known: it is kept as long as its connection."""
_USELESS: Final = 32
"""Messages that are only parsed after a head was learnt and did not come again."""

_SIZE: Final = "content-length"

Told = TypeVar("Told")


class Glance(Generic[Told]):
    """Knows one head by its bytes, and what a parser made of it.

    Clients and workers say the same with each message of a connection; only the length of the body
    differs. Where all else is the same, byte for byte, a parser would say the same, too.
    """

    __slots__ = ("_after", "_before", "_end", "_head", "_idle", "_used", "headers", "size", "told")

    def __init__(self) -> None:
        self._head = b""
        """As it came last; empty where none is known."""
        self._end = 0
        """How long that is."""
        self._before = self._after = b""
        """The same, up to the digits of the body's length, and after them."""
        self._used = True
        """It has come again, or there was none yet."""
        self._idle = 1
        """Messages that are still to be parsed before one is learnt: many lines bring only one."""
        self.headers: dict[str, str] = {}
        self.size = 0
        """How many bytes the body has, as the head that came last says."""
        self.told: Told | None = None
        """What else was made of it."""

    def body(self, data: bytes) -> int:
        """Where the body begins, if ``data`` begins with the known head; else 0."""
        if data.startswith(self._head):
            self._used = True
            return self._end
        return self._resized(data) if data.startswith(self._before) else 0

    def learn(self, data: bytes, headers: dict[str, str], told: Told) -> None:
        """Know the head that ``data`` begins with, of which a parser has made these headers.

        What has lines beside theirs is not learnt, nor what tells no length of a body, or tells it
        in several ways.
        """
        if _SIZE not in headers:
            return
        if self._idle:
            self._idle -= 1
            return
        if not self._used:
            self._head = self._before = self._after = b""
            self._end, self.told = 0, None
            self._used, self._idle = True, _USELESS
            return
        end = data.find(b"\r\n\r\n") + 4
        lines = len(headers) + 2  # the first and the empty one
        found = _LENGTH.search(data, 0, end)
        if (
            found is not None
            and end <= _LONG
            and data.count(b"\n", 0, end) == lines == data.count(b"\r", 0, end)
        ):
            self._head, self._end = data[:end], end
            self._before, self._after = data[: found.start(1)], data[found.end(1) : end]
            self.headers, self.size, self.told = headers, int(found[1]), told
            self._used = False

    def _resized(self, data: bytes) -> int:
        """See ``body``, of a body that has another length than the last."""
        start, after = len(self._before), self._after
        end = data.find(b"\r", start, start + _DIGITS)
        digits = data[start:end]
        if not after or not data.startswith(after, end) or not digits.isdigit():
            return 0
        size = int(digits)
        if b"%d" % size != digits:  # a header tells it as it was written
            return 0
        self._end = end + len(after)
        self._head = data[: self._end]
        self.headers = {**self.headers, _SIZE: digits.decode()}
        self.size = size
        self._used = True
        return self._end
