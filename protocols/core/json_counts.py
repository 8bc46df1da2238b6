"""Counts what a JSON text consists of before it is decoded.

Decoding holds the interpreter's lock, so that a thread delays all other requests, too; its time
depends on the number of values, not on the bytes. A scan of bytes is a hundred times as fast. The
same scan bounds the body of a request, the response of a worker, and an event of its stream.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from msgspec import Struct

from protocols.core.errors import GatewayError, RequestTooLarge, WorkerFailed
from protocols.core.json_text import count_rare, remove_strings

SMALL_TEXT: Final = 64 << 10
"""A text of up to so many bytes is decoded at once, whatever it consists of."""

_OBJECT_SIZE: Final = 256
"""Bytes that a decoded object takes, besides its values."""
_VALUE_SIZE: Final = 40
"""Bytes that a decoded value takes, with its place in a list."""


class JsonCounts(Struct, frozen=True):
    """How many objects and values a JSON text may have."""

    objects: int = 20_000
    values: int = 1_000_000

    subject: ClassVar[str] = "worker's event"
    settings: ClassVar[str] = ""
    """What the names of its settings begin with; "" if there are none."""

    def needs_check(self, size: int) -> bool:
        """Whether a text of so many bytes may have counts above the limits."""
        return size > SMALL_TEXT and (size > 2 * self.values or size > 3 * self.objects)

    def check(self, pieces: Sequence[bytes], references: Iterable[tuple[bytes, int]] = ()) -> None:
        """Raises WorkerFailed, or RequestTooLarge, for more objects or values than allowed.

        The text is in ``pieces``, which are joined only if it may be above a limit; ``references``
        is what it refers to, and how often.
        """
        others = [*references]
        if self._find_excess([*((piece, 1) for piece in pieces), *others]) is None:
            return
        excess = self._find_excess(
            (b"".join(remove_strings(one, b"{[,")), count)
            for one, count in [(b"".join(pieces), 1), *others]
        )
        if excess is not None:
            raise self.build_error(excess)

    def estimate_size(self, text: bytes) -> int:
        """About how many bytes the objects and values take, besides strings, once they are decoded.

        Raises as ``check``.
        """
        structure = b"".join(remove_strings(text, b"{[,"))
        if (excess := self._find_excess(((structure, 1),))) is not None:
            raise self.build_error(excess)
        return _OBJECT_SIZE * structure.count(b"{") + _VALUE_SIZE * len(structure)

    def build_error(self, text: str) -> GatewayError:
        """The error with this text."""
        return WorkerFailed(text)

    def _find_excess(self, parts: Iterable[tuple[bytes, int]]) -> str | None:
        """What is wrong with a text in which these bytes are structure."""
        objects, values = 0, 1
        for one, count in parts:
            objects += count * count_rare(one, b"{")
            values += count * (count_rare(one, b",") + count_rare(one, b"["))
        for name, found, limit in (
            ("objects", objects, self.objects),
            ("values", values, self.values),
        ):
            if found > limit:
                setting = f"`{self.settings}_{name}` allows" if self.settings else "the limit is"
                return f"the {self.subject} has {found} {name}; {setting} {limit}"
        return None


class BodyCounts(JsonCounts, frozen=True):
    """Those of a request's body, and of what it refers to."""

    subject: ClassVar[str] = "body"
    settings: ClassVar[str] = "limits.body"

    def build_error(self, text: str) -> GatewayError:
        """See JsonCounts."""
        return RequestTooLarge(text, limit=None)  # of bytes


class ResponseCounts(JsonCounts, frozen=True):
    """Those of a worker's response that is not a stream."""

    objects: int = 200_000
    """Enough for the log probabilities of 9,000 tokens with 20 alternatives each."""
    values: int = 4_000_000

    subject: ClassVar[str] = "worker's response"
    settings: ClassVar[str] = "max_response"


EVENT_COUNTS: Final = JsonCounts()
"""Those of an event of a worker's stream, which is decoded by the thread of the event loop."""
FULL_EVENT_COUNTS: Final = JsonCounts(ResponseCounts().objects, ResponseCounts().values)
"""Those of an event that repeats the entire response, as the last ones of the Responses API do."""
