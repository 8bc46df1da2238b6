"""A pool of workers, from its configuration to the words of the backend that it becomes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import asdict, replace

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import WorkerConfig
from gateway.config import loader, schema
from protocols.core.interfaces import ClientAdapter, UpstreamAdapter
from protocols.core.restricted import RestrictedAdapter


def build_pool_arguments(
    name: str, told: schema.PoolConfig, dialect: ClientAdapter, models: Sequence[str]
) -> Mapping[str, Any]:
    """What makes the pool called ``name``, beside the clock and luck.

    ``models`` are what it is asked for, by the workers' own names.
    """
    fixed = [_build_worker(one, told) for one in told.workers if one.url is not None]
    settings = _build_pool_settings(told) | {
        "name": name,
        "models": tuple(models),
        "sources": [_build_discovery_source(one, told) for one in told.workers if one.url is None],
    }
    return {
        "workers": fixed,
        "dialect": dialect,
        "settings": settings,
        "upstream": AsyncioHttpClient(ca=told.tls.ca if told.tls else None),
        "readers": {
            one.file: _make_worker_file_reader(one, told)
            for one in told.workers
            if one.file is not None
        },
    }


def restricted(pool: schema.PoolConfig, dialect: ClientAdapter) -> ClientAdapter:
    """The workers' dialect, without the parameters that they do not support."""
    if not pool.unsupported_parameters:
        return dialect
    adapter = cast("UpstreamAdapter", dialect)
    return cast("ClientAdapter", RestrictedAdapter(adapter, pool.unsupported_parameters))


def _build_pool_settings(told: schema.PoolConfig) -> dict[str, Any]:
    probe = asdict(told.health)
    health = {key: probe.pop(key) for key in ("fall", "rise", "slow_start", "panic")}
    return {
        "policy": told.policy,
        "timeouts": asdict(told.timeouts or schema.TimeoutsConfig()),
        "retries": asdict(told.retries or schema.RetryConfig()),
        "queue": asdict(told.queue),
        "max_concurrency": told.total_concurrency,
        "health": health | asdict(told.breaker),
        "probe": probe,
    }


def _build_worker(one: schema.WorkerSourceConfig, pool: schema.PoolConfig) -> WorkerConfig:
    return WorkerConfig(one.url or "", **_build_worker_options(one, pool))


def _build_worker_options(
    one: schema.WorkerSourceConfig, pool: schema.PoolConfig
) -> dict[str, Any]:
    return {
        "weight": one.weight,
        "max_concurrency": one.max_concurrency or pool.max_concurrency,
        "bearer": one.auth.bearer.reveal() if one.auth else None,
    }


def _build_discovery_source(
    one: schema.WorkerSourceConfig, pool: schema.PoolConfig
) -> dict[str, Any]:
    if one.file is not None:
        return {"file": one.file}
    asked = {
        "name": one.dns or one.srv,
        "record": "srv" if one.dns is None else "a",
        "every": one.every,
        "nameserver": one.nameserver,
    }
    return {"dns": asked, "template": {"scheme": one.scheme, **_build_worker_options(one, pool)}}


def _make_worker_file_reader(
    listed: schema.WorkerSourceConfig, pool: schema.PoolConfig
) -> Callable[[bytes], Sequence[WorkerConfig]]:
    """Reads a file that lists workers, as the configuration would.

    What stands beside the file's name holds for each of them that says nothing else.
    """
    plain = schema.WorkerSourceConfig()

    def read(data: bytes) -> Sequence[WorkerConfig]:
        found = []
        for one in loader.load_worker_list(data, "workers", env={}):
            weight = listed.weight if one.weight == plain.weight else one.weight
            most = one.max_concurrency or listed.max_concurrency
            whole = replace(one, weight=weight, max_concurrency=most, auth=one.auth or listed.auth)
            found.append(_build_worker(whole, pool))
        return found

    return read
