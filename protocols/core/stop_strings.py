"""Stop strings in streamed text: no character of a stop string is ever sent."""

from collections.abc import Sequence


class StopStringFilter:
    """Holds back the end of the text while it may be the start of a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include
        self._buffer = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string that ended the text, if any."""
        if not self._stops:
            return text, None
        pending = self._buffer + text
        first, matched = len(pending), None
        for stop in self._stops:
            at = pending.find(stop, 0, first + len(stop) - 1)
            if 0 <= at < first:
                first, matched = at, stop
        if matched is not None:
            self._buffer = ""
            return pending[: first + (len(matched) if self._include_stop else 0)], matched
        keep = self._partial_match_length(pending)
        self._buffer = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """The text held back, at the end of a text without a stop string."""
        pending, self._buffer = self._buffer, ""
        return pending

    def _partial_match_length(self, text: str) -> int:
        """The number of characters at the end of ``text`` that may start a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
