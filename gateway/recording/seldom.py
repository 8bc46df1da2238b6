"""What is logged again and again is said a few times a second.

A loop that can't accept a connection, since the process has no descriptor left, says so a thousand
times a second; the log must not go down with it.
"""

import logging
from collections.abc import Callable
from typing import Final

from msgspec import Struct

_MAX_PER_SECOND: Final = 2
"""Times in a second that the same is said, and once of these with its traceback."""
_MAX_TRACKED_MESSAGES: Final = 256
"""Messages that are told apart."""


class _MessageState(Struct):
    """A message: how often it came since when, and how often that was not said."""

    window_start: float
    count: int = 0
    suppressed: int = 0


class LogRateFilter(logging.Filter):
    """Lets each message of a logger pass, but not too often. ``clock`` gives seconds.

    One with another kind of error is another one. The first that passes again tells how many did
    not.
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
        heard = self._message_states.setdefault(name, _MessageState(now))
        if now - heard.window_start >= 1.0:
            heard.window_start, heard.count = now, 0
        heard.count += 1
        if heard.count > _MAX_PER_SECOND:
            heard.suppressed += 1
            return False
        if heard.count > 1:
            record.exc_info = None
        if heard.suppressed:
            record.msg = f"{record.getMessage()} ({heard.suppressed} more of these were left out)"
            record.args = ()
            heard.suppressed = 0
        return True
