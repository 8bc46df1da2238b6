"""Counts what a JSON body consists of before it is decoded.

Decoding holds the interpreter's lock, so that a thread delays all other requests, too; its time
depends on the number of values, not on the bytes. A scan of bytes is a hundred times as fast.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from protocols.core.errors import RequestTooLarge
from protocols.core.json_text import remove_strings

_SMALL: Final = 64 << 10
"""A body of up to so many bytes is decoded at once, whatever it consists of."""


class BodyCounts(Struct, frozen=True):
    """How many objects and values a body may have; see ``gateway.config.schema``."""

    objects: int = 20_000
    values: int = 1_000_000

    def needs_check(self, size: int) -> bool:
        """Whether a body of so many bytes may have counts above the limits."""
        return size > _SMALL and (size > 2 * self.values or size > 3 * self.objects)

    def check(self, body: bytes, references: Iterable[tuple[bytes, int]] = ()) -> None:
        """Raises RequestTooLarge for more objects or values than allowed, in a JSON body.

        ``references`` is what it refers to, and how often.
        """
        parts = [(body, 1), *references]
        if self._count(parts) is None:
            return
        if (
            excess := self._count([(b"".join(remove_strings(one, b"{[,")), n) for one, n in parts])
        ) is not None:
            raise excess

    def _count(self, parts: Iterable[tuple[bytes, int]]) -> RequestTooLarge | None:
        """The error of a body in which these bytes are structure."""
        objects = sum(n * one.count(b"{") for one, n in parts)
        values = 1 + sum(n * (one.count(b",") + one.count(b"[")) for one, n in parts)
        if objects > self.objects:
            text = f"the body has {objects} objects; `limits.body_objects` allows {self.objects}"
            return RequestTooLarge(text, limit=None)  # of bytes
        if values > self.values:
            text = f"the body has {values} values; `limits.body_values` allows {self.values}"
            return RequestTooLarge(text, limit=None)  # of bytes
        return None
