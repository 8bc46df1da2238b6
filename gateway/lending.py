"""Limits that several gateways share: who lends them, and who asks for more."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from gateway.config import schema
from gateway.pipeline.handler import GatewayServices
from gateway.ratelimit.limiter import CounterRegistry
from gateway.ratelimit.redis_limiter import LeasedCounter, LeaseRenewer

if TYPE_CHECKING:
    from gateway.observability.metrics.requests import MetricsCollector
    from gateway.ratelimit.redis_limiter import RedisLeaseStore


class SharedRateLimits:
    """The store, and what asks it beside all requests."""

    def __init__(self, store: "RedisLeaseStore", leasing: LeaseRenewer) -> None:
        self._store = store
        self._renewer = leasing

    @classmethod
    def create(
        cls,
        state: schema.SharedStateConfig | None,
        outside: GatewayServices,
        counters: Callable[[], Sequence[LeasedCounter]],
    ) -> tuple[GatewayServices, Self | None]:
        """The surroundings in which limits are shared, and what shares them, if something is to.

        ``counters`` gives those of the configuration that is served.
        """
        if state is None:
            return outside, None
        from gateway.ratelimit.redis_limiter import RedisLeaseStore, RedisLimitSettings

        ca = state.tls.ca if state.tls else None
        shared = RedisLimitSettings(
            state.redis.reveal(), state.on_failure, state.replicas, state.prefix, ca
        )
        store = RedisLeaseStore(shared, outside.new_id(), clock=outside.clock, draw=outside.draw)
        bell = asyncio.Event()
        leasing = LeaseRenewer(store, counters, bell, outside.clock, outside.draw)
        accounts = CounterRegistry(outside.clock, outside.wall_clock, store, bell.set)
        return replace(outside, counter_registry=accounts), cls(store, leasing)

    def register_metrics(self, metrics: "MetricsCollector") -> None:
        """Let these tell how it goes."""
        from gateway.observability.metrics.system import RateLimitStoreCollector  # noqa: PLC0415 - its library

        metrics.register(RateLimitStoreCollector(self._store))

    def start(self) -> None:
        """Borrow whatever is wanted, from now on."""
        self._renewer.start()

    async def aclose(self) -> None:
        """Tell what was used, and give back what is held."""
        await self._renewer.aclose()
        await self._store.aclose()
