"""What is logged again and again is said a few times a second.

A loop that can't accept a connection, since the process has no descriptor left, says so a thousand
times a second; the log must not go down with it.
"""

import logging
from collections.abc import Callable
from typing import Final

from msgspec import Struct

_MOST: Final = 2
"""Times in a second that the same is said, and once of these with its traceback."""
_KNOWN: Final = 256
"""Messages that are told apart."""


class _Heard(Struct):
    """A message: how often it came since when, and how often that was not said."""

    since: float
    times: int = 0
    unsaid: int = 0


class Seldom(logging.Filter):
    """Lets each message of a logger pass, but not too often. ``clock`` gives seconds.

    One with another kind of error is another one. The first that passes again tells how many did
    not.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._heard: dict[tuple[object, ...], _Heard] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging's Filter."""
        now, error = self._clock(), record.exc_info
        name = (record.name, str(record.msg), error and error[0])
        if len(self._heard) >= _KNOWN and name not in self._heard:
            self._heard.clear()
        heard = self._heard.setdefault(name, _Heard(now))
        if now - heard.since >= 1.0:
            heard.since, heard.times = now, 0
        heard.times += 1
        if heard.times > _MOST:
            heard.unsaid += 1
            return False
        if heard.times > 1:
            record.exc_info = None
        if heard.unsaid:
            record.msg = f"{record.getMessage()} ({heard.unsaid} more of these were left out)"
            record.args = ()
            heard.unsaid = 0
        return True
