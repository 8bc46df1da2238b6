"""Graceful shutdown: the signals that start it, and the drain of running requests.

A shutdown has these steps, which ``Gateway.stop`` takes in this order:

1. Readiness fails, and each response closes its connection.
2. The shutdown delay passes, so that load balancers notice. New requests are still answered.
3. Listeners close. Running requests may take the drain timeout to finish.
4. Requests that outlast it end with an error, and all connections close.
5. The services close in the reverse order of their start: backends, exporters, the usage store.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final, NamedTuple

from gateway.http_server.listener import Listener
from gateway.pipeline.services import BackgroundRequests
from gateway.runtime.snapshot import ConfigSnapshot
from protocols.core.errors import Overloaded

SHUTDOWN_MESSAGE: Final = (
    "Shutting down: waiting for running requests to finish. "
    "Send the signal again to stop immediately."
)
_ERROR_FLUSH_TIMEOUT: Final = 1.0
"""Seconds to send errors to clients whose requests are stopped."""


class ShutdownSignal:
    """Waits for SIGTERM, SIGINT or ``event``.

    SIGINT skips the shutdown delay: it comes from a terminal, so no load balancer has to notice.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.use_shutdown_delay = True
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.event.set)
        loop.add_signal_handler(signal.SIGINT, self._stop_now)

    async def wait(self) -> None:
        """Wait for the shutdown. Afterwards, another signal ends the process at once."""
        await self.event.wait()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _stop_now(self) -> None:
        self.use_shutdown_delay = False
        self.event.set()


async def drain_listeners(
    listeners: Collection[Listener], snapshots: Sequence[ConfigSnapshot], drain_timeout: float
) -> None:
    """Accept no more connections, let running requests finish, and close the listeners.

    Requests that take more than ``drain_timeout`` seconds end with an error.
    """
    await asyncio.gather(*(listener.drain(drain_timeout) for listener in listeners))
    for snapshot in snapshots:
        await snapshot.stop_requests(Overloaded("the gateway stops"))
    await asyncio.gather(*(listener.drain(_ERROR_FLUSH_TIMEOUT) for listener in listeners))
    await asyncio.gather(*(listener.close() for listener in listeners))


async def drain_snapshots(
    snapshots: Sequence[ConfigSnapshot],
    background: Sequence[BackgroundRequests],
    drain_timeout: float,
) -> None:
    """Wait for the requests of replaced snapshots and for those in the background.

    Returns after ``drain_timeout`` seconds at the latest.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_timeout):
            for snapshot in snapshots:
                await snapshot.wait_idle()
            for one in background:
                await one.wait_idle()


class Service(NamedTuple):
    """A part of the gateway that runs beside its listeners."""

    close: Callable[[], Awaitable[object] | None]
    """Also called if it was not started."""
    start: Callable[[], Awaitable[object] | None] | None = None
    """None if there is nothing to start."""


class ServiceStack:
    """Starts services in their order and closes them in reverse; all, even if one fails."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = list(services)
        self._exit_stack = AsyncExitStack()
        for service in self._services:
            self._exit_stack.push_async_callback(_call, service.close)

    async def start(self) -> None:
        """Start them all. Raises what one raises; ``aclose`` still closes all."""
        for service in self._services:
            if service.start is not None:
                await _call(service.start)

    async def aclose(self) -> None:
        """Close them all, and raise the last exception if some failed."""
        await self._exit_stack.aclose()


async def _call(function: Callable[[], Awaitable[object] | None]) -> None:
    result = function()
    if result is not None:
        await result
