"""Stop strings in a stream of text: no character that belongs to one is ever sent."""

from collections.abc import Sequence


class StopStringFilter:
    """Holds back the end of a text while it could still be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include
        self._buffer = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """What may be sent now, and the stop string that ended the text, if one did."""
        if not self._stops:
            return text, None
        held = self._buffer + text
        first, matched = len(held), None
        for stop in self._stops:
            at = held.find(stop, 0, first + len(stop) - 1)
            if 0 <= at < first:
                first, matched = at, stop
        if matched is not None:
            self._buffer = ""
            return held[: first + (len(matched) if self._include_stop else 0)], matched
        keep = self._partial_match_length(held)
        self._buffer = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._buffer = self._buffer, ""
        return held

    def _partial_match_length(self, text: str) -> int:
        """How many characters at the end of ``text`` could begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
