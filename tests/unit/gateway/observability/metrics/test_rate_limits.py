from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest

from gateway.observability.metrics.rate_limits import (
    RATE_LIMIT_STORE_METRICS,
    RateLimitStoreCollector,
)


class FakeStore(Struct):
    errors: int = 0
    up: bool = True


def render_samples(store: FakeStore) -> list[str]:
    registry = CollectorRegistry()
    registry.register(RateLimitStoreCollector(store))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_rate_limit_store_metrics_are_exported() -> None:
    assert render_samples(FakeStore()) == [
        "interlingua_ratelimit_store_errors_total 0.0",
        "interlingua_ratelimit_store_up 1.0",
    ]
    assert render_samples(FakeStore(3, up=False)) == [
        "interlingua_ratelimit_store_errors_total 3.0",
        "interlingua_ratelimit_store_up 0.0",
    ]


def test_store_errors_are_summed_and_store_up_is_the_minimum() -> None:
    assert [one.merge_mode for one in RATE_LIMIT_STORE_METRICS] == ["sum", "smallest"]
