"""Throttles requests with wrong API keys, by the network of the client's address.

After some failures, further ones of the network are answered with 429, in no log line of their own:
one line a second says how many. Nor have those lines of their own that come from very many
networks. Requests with a valid key are never delayed, whoever shares their address.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from protocols.core.errors import ClientError, RateLimitExceeded, Unauthorized
from protocols.core.units import get_client_network

log = logging.getLogger("interlingua")

_BURST: Final = 100
"""Failures of a network that are answered with 401."""
_RATE: Final = 10.0
"""How many more per second."""
_LOGGED_BURST: Final = 1000
"""Failures of all networks that have log lines of their own."""
_LOGGED_RATE: Final = 100.0
_MAX_NETWORKS: Final = 10_000
_LOG_INTERVAL: Final = 1.0


class FailedKeyThrottle:
    """Counts the wrong keys of each network. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._networks: OrderedDict[str | bytes, tuple[float, float]] = OrderedDict()
        """The failures of a network that still count, at a time; the last one to fail is last."""
        self._all = 0.0, clock()
        """Those of all networks."""
        self._unlogged = 0
        self._log_timer: asyncio.TimerHandle | None = None

    def count_failure(self, address: str, error: Unauthorized) -> tuple[ClientError, bool]:
        """The error that answers a wrong key, and whether it has a log line of its own.

        It is ``error``, or RateLimitExceeded after too many of the network.
        """
        network, now = get_client_network(address), self._clock()
        counted = self._networks.pop(network, (0.0, now))
        self._networks[network], is_throttled = _count(counted, now, _BURST, _RATE)
        if len(self._networks) > _MAX_NETWORKS:
            self._networks.popitem(last=False)
        is_logged = False
        if not is_throttled:
            self._all, is_frequent = _count(self._all, now, _LOGGED_BURST, _LOGGED_RATE)
            is_logged = not is_frequent
        if not is_logged:
            self._unlogged += 1
            if self._log_timer is None:
                loop = asyncio.get_running_loop()
                self._log_timer = loop.call_later(_LOG_INTERVAL, self._log_throttled)
        if not is_throttled:
            return error, is_logged
        text = "too many requests without a valid API key came from this address"
        return RateLimitExceeded(text, retry_after=1.0), False

    def _log_throttled(self) -> None:
        self._log_timer = None
        count, self._unlogged = self._unlogged, 0
        log.warning("%d requests without a valid API key have no line of their own", count)


def _count(
    counted: tuple[float, float], now: float, burst: int, rate: float
) -> tuple[tuple[float, float], bool]:
    """The failures that count after one more, at this time; and whether they are too many."""
    failures, counted_at = counted
    failures = max(failures - rate * (now - counted_at), 0.0) + 1
    return (min(failures, burst), now), failures > burst
