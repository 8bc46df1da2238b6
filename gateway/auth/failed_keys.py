"""Throttles requests with wrong API keys, by the network of the client's address.

After some failures, further ones of the network are answered with 429, in no log line of their own:
one line a second says how many. Requests with a valid key are never delayed, whoever shares their
address.
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
_MAX_NETWORKS: Final = 10_000
_LOG_INTERVAL: Final = 1.0


class FailedKeyThrottle:
    """Counts the wrong keys of each network. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._networks: OrderedDict[str | bytes, tuple[float, float]] = OrderedDict()
        """The failures of a network that still count, at a time; the last one to fail is last."""
        self._unlogged = 0
        self._log_timer: asyncio.TimerHandle | None = None

    def count_failure(self, address: str, error: Unauthorized) -> ClientError:
        """The error that answers a wrong key: ``error``, or RateLimitExceeded after too many."""
        network, now = get_client_network(address), self._clock()
        failures, counted_at = self._networks.pop(network, (0.0, now))
        failures = max(failures - _RATE * (now - counted_at), 0.0) + 1
        is_throttled = failures > _BURST
        self._networks[network] = min(failures, _BURST), now
        if len(self._networks) > _MAX_NETWORKS:
            self._networks.popitem(last=False)
        if not is_throttled:
            return error
        self._unlogged += 1
        if self._log_timer is None:
            loop = asyncio.get_running_loop()
            self._log_timer = loop.call_later(_LOG_INTERVAL, self._log_throttled)
        text = "too many requests without a valid API key came from this address"
        return RateLimitExceeded(text, retry_after=1.0)

    def _log_throttled(self) -> None:
        self._log_timer = None
        count, self._unlogged = self._unlogged, 0
        log.warning("%d requests without a valid API key were answered with 429", count)
