"""Limits how often a message is logged.

A process without free file descriptors would log a failed accept a thousand times a second, and
one with a full disk each write that fails.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from msgspec import Struct

log = logging.getLogger("interlingua")

WARNING_INTERVAL: Final = 60.0
"""Seconds between equal warnings of ``RareWarnings``."""
_MAX_PER_SECOND: Final = 2
"""Equal messages per second; only the first one keeps its traceback."""
_MAX_TRACKED_MESSAGES: Final = 256
"""Distinct messages that are tracked."""


class _MessageState(Struct):
    """How often a message was logged in its window, and how often it was suppressed."""

    window_start: float
    count: int = 0
    suppressed: int = 0


class LogRateFilter(logging.Filter):
    """Limits how often each message is logged. ``clock`` gives seconds.

    Messages with different exception types are different. The next message that passes says how
    many were suppressed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._message_states: dict[tuple[object, ...], _MessageState] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging's Filter."""
        now, error = self._clock(), record.exc_info
        name = (record.name, str(record.msg), error and error[0])
        if len(self._message_states) >= _MAX_TRACKED_MESSAGES and name not in self._message_states:
            self._message_states.clear()
        state = self._message_states.setdefault(name, _MessageState(now))
        if now - state.window_start >= 1.0:
            state.window_start, state.count = now, 0
        state.count += 1
        if state.count > _MAX_PER_SECOND:
            state.suppressed += 1
            return False
        if state.count > 1:
            record.exc_info = None
        if state.suppressed:
            record.msg = f"{record.getMessage()} ({state.suppressed} more of these were left out)"
            record.args = ()
            state.suppressed = 0
        return True


class RareWarnings:
    """Logs each kind of warning at most once a minute, with the number of those before it.

    ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._unlogged = Counter[str]()

    def add(self, message: str, *values: object) -> None:
        """Log this warning, or count it; ``message`` is its kind."""
        now = self._clock()
        if abs(now - self._logged_at.get(message, float("-inf"))) < WARNING_INTERVAL:
            self._unlogged[message] += 1
            return
        self._logged_at[message] = now
        before = self._unlogged.pop(message, 0)
        more = f" ({before} more since the last such warning)" if before else ""
        log.warning("%s%s", message % values, more)
