"""Limits that several gateways share: who lends them, and who asks for more."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from gateway import config as c
from gateway.limits.accounts import Accounts
from gateway.limits.leasing import Leasing
from gateway.limits.lent import Lent
from gateway.server import Surroundings

if TYPE_CHECKING:
    from gateway.limits.shared.store import Store
    from gateway.metrics import Metrics


class Lending:
    """The store, and what asks it beside all requests."""

    def __init__(self, store: "Store", leasing: Leasing) -> None:
        self._store = store
        self._renewer = leasing

    @classmethod
    def create(
        cls, state: c.State | None, outside: Surroundings, counters: Callable[[], Sequence[Lent]]
    ) -> tuple[Surroundings, Self | None]:
        """The surroundings in which limits are shared, and what shares them, if something is to.

        ``counters`` gives those of the configuration that is served.
        """
        if state is None:
            return outside, None
        from gateway.limits.shared.store import Shared, Store  # noqa: PLC0415 - an extra

        ca = state.tls.ca if state.tls else None
        shared = Shared(state.redis.reveal(), state.on_failure, state.replicas, state.prefix, ca)
        store = Store(shared, outside.new_id(), clock=outside.clock, draw=outside.draw)
        bell = asyncio.Event()
        leasing = Leasing(store, counters, bell, outside.clock, outside.draw)
        accounts = Accounts(outside.clock, outside.wall_clock, store, bell.set)
        return replace(outside, counter_registry=accounts), cls(store, leasing)

    def register_metrics(self, metrics: "Metrics") -> None:
        """Let these tell how it goes."""
        from gateway.limits.shared.counts import StoreCounts  # noqa: PLC0415 - its library

        metrics.register(StoreCounts(self._store))

    def start(self) -> None:
        """Borrow whatever is wanted, from now on."""
        self._renewer.start()

    async def aclose(self) -> None:
        """Tell what was used, and give back what is held."""
        await self._renewer.aclose()
        await self._store.aclose()
