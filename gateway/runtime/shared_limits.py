"""Rate limits that several gateways share."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from gateway.config import schema
from gateway.pipeline.services import GatewayServices
from gateway.ratelimit.counters import CounterRegistry
from gateway.ratelimit.leases import LeasedCounter, LeaseRenewer

if TYPE_CHECKING:
    from gateway.observability.metrics.requests import MetricsCollector
    from gateway.ratelimit.redis_leases import RedisLeaseStore


class SharedRateLimits:
    """The lease store, and the task that renews leases in the background."""

    def __init__(self, store: "RedisLeaseStore", renewer: LeaseRenewer) -> None:
        self._store = store
        self._renewer = renewer

    @classmethod
    def create(
        cls,
        state: schema.SharedStateConfig | None,
        services: GatewayServices,
        get_counters: Callable[[], Sequence[LeasedCounter]],
    ) -> tuple[GatewayServices, Self | None]:
        """Set up shared limits, if configured. Returns the services and the shared limits.

        ``get_counters`` gives the leased counters of the current configuration.
        """
        if state is None:
            return services, None
        from gateway.ratelimit.redis_leases import RedisLeaseStore  # noqa: PLC0415 - redis may not be installed

        store = RedisLeaseStore(state, services.new_id(), clock=services.clock, draw=services.draw)
        wake = asyncio.Event()
        renewer = LeaseRenewer(store, get_counters, wake, services.clock, services.draw)
        registry = CounterRegistry(services.clock, services.wall_clock, store, wake.set)
        return replace(services, counter_registry=registry), cls(store, renewer)

    def register_metrics(self, metrics: "MetricsCollector") -> None:
        """Add the metrics of the store."""
        from gateway.observability.metrics.rate_limits import RateLimitStoreCollector  # noqa: PLC0415 - its library

        metrics.register(RateLimitStoreCollector(self._store))

    def start(self) -> None:
        """Start renewing leases."""
        self._renewer.start()

    async def aclose(self) -> None:
        """Report usage, return the leases and close the store."""
        await self._renewer.aclose()
        await self._store.aclose()
