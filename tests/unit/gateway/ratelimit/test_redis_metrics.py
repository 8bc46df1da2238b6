from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest

from gateway.observability.metrics.system import RATE_LIMIT_STORE_METRICS, RateLimitStoreCollector


class Asked(Struct):
    errors: int = 0
    up: bool = True


def page(store: Asked) -> list[str]:
    registry = CollectorRegistry()
    registry.register(RateLimitStoreCollector(store))
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_how_it_goes_is_told() -> None:
    assert page(Asked()) == [
        "interlingua_ratelimit_store_errors_total 0.0",
        "interlingua_ratelimit_store_up 1.0",
    ]
    assert page(Asked(3, up=False)) == [
        "interlingua_ratelimit_store_errors_total 3.0",
        "interlingua_ratelimit_store_up 0.0",
    ]


def test_one_process_that_does_not_share_is_told() -> None:
    assert [one.merge_mode for one in RATE_LIMIT_STORE_METRICS] == ["sum", "smallest"]
