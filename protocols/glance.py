"""Answers in one piece, most of which are read at a glance."""

from collections.abc import Callable, Sequence

from gateway.core import sse
from gateway.core.ports import Decoder
from gateway.core.types import Event

Glance = Callable[[bytes], Sequence[Event] | None]
"""The events of a usual answer in one piece; None where it must be read."""


class WholeDecoder:
    """Reads the answer to a request that asks for no stream.

    ``careful`` makes what reads any answer, for one that is not known at a ``glance``, or does not
    come in one piece.
    """

    __slots__ = ("_careful", "_glance", "_held", "_reading")

    def __init__(self, glance: Glance, careful: Callable[[], Decoder]) -> None:
        self._glance = glance
        self._careful = careful
        self._held = b""
        self._reading: Decoder | None = None

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        first = not self._held and self._reading is None
        if first and data.startswith(b"{") and len(data) <= sse.LARGEST:
            self._held = data
            return ()
        return self._carefully().feed(data)

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        if self._reading is None and (events := self._glance(self._held)) is not None:
            return events
        return self._carefully().close()

    def _carefully(self) -> Decoder:
        if self._reading is None:
            self._reading = self._careful()
            self._reading.feed(self._held)
        return self._reading
