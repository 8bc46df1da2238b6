"""Asks for more of what is shared before it is used up, beside all requests."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from gateway.limits.lent import LeasedCounter
from gateway.limits.ports import LeaseStore, LeaseStoreUnavailable
from protocols.core.interfaces import Clock

RENEW_INTERVAL: Final = 0.25
"""Seconds between two askings, where nothing is wanted at once; a quarter more or less by luck, so
that of several processes not always the same one comes first."""
MIN_RENEW_INTERVAL: Final = 0.025
"""Seconds between two at least."""


class LeaseRenewer:
    """Keeps the counters of the configuration that is served supplied."""

    def __init__(
        self,
        lender: LeaseStore,
        counters: Callable[[], Sequence[LeasedCounter]],
        bell: asyncio.Event,
        clock: Clock,
        draw: Callable[[], float],
    ) -> None:
        """The ``bell`` is rung by a counter that can't wait."""
        self._store = lender
        self._get_counters = counters
        self._wake_event = bell
        self._clock = clock
        self._draw = draw
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask again and again."""
        self._task = asyncio.get_running_loop().create_task(self._renew_periodically())

    async def aclose(self) -> None:
        """Tell what was used, and let go of what is held."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.renew_leases(last=True)

    async def renew_leases(self, *, last: bool = False) -> None:
        """Ask for all that is wanted now. With ``last`` everything is let go."""
        asked, counters = self._clock(), self._get_counters()
        wishes = [(one, one.build_lease_request(asked, last=last)) for one in counters]
        pairs = [(one, wish) for one, wish in wishes if wish is not None]
        if not pairs:
            return
        try:
            grants = await self._store.request_leases([wish for _, wish in pairs])
        except LeaseStoreUnavailable:
            now = self._clock()
            for one in counters:
                one.revoke_lease(now)
            return
        now = self._clock()
        for (one, _), grant in zip(pairs, grants, strict=True):
            one.apply_grant(grant, asked, now)

    async def _renew_periodically(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_INTERVAL * (0.75 + self._draw() / 2)):
                    await self._wake_event.wait()
            self._wake_event.clear()
            await self.renew_leases()
            await asyncio.sleep(MIN_RENEW_INTERVAL)
