"""A pool of workers, from its configuration to the words of the backend that it becomes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import asdict, replace

from backends.http import HttpUpstream
from backends.upstream import Worker
from gateway import config as c
from gateway.core.ports import Dialect, WorkerDialect
from gateway.core.restricted import RestrictedAdapter


def crew(name: str, told: c.Pool, dialect: Dialect, models: Sequence[str]) -> Mapping[str, Any]:
    """What makes the pool called ``name``, beside the clock and luck.

    ``models`` are what it is asked for, by the workers' own names.
    """
    fixed = [_worker(one, told) for one in told.workers if one.url is not None]
    settings = _settings(told) | {
        "name": name,
        "models": tuple(models),
        "sources": [_source(one, told) for one in told.workers if one.url is None],
    }
    return {
        "workers": fixed,
        "dialect": dialect,
        "settings": settings,
        "upstream": HttpUpstream(ca=told.tls.ca if told.tls else None),
        "readers": {one.file: _reader(one, told) for one in told.workers if one.file is not None},
    }


def restricted(pool: c.Pool, dialect: Dialect) -> Dialect:
    """The workers' dialect, without the parameters that they do not support."""
    if not pool.unsupported_parameters:
        return dialect
    adapter = cast("WorkerDialect", dialect)
    return cast("Dialect", RestrictedAdapter(adapter, pool.unsupported_parameters))


def _settings(told: c.Pool) -> dict[str, Any]:
    probe = asdict(told.health)
    health = {key: probe.pop(key) for key in ("fall", "rise", "slow_start", "panic")}
    return {
        "policy": told.policy,
        "timeouts": asdict(told.timeouts or c.Timeouts()),
        "retries": asdict(told.retries or c.Retries()),
        "queue": asdict(told.queue),
        "max_concurrency": told.total_concurrency,
        "health": health | asdict(told.breaker),
        "probe": probe,
    }


def _worker(one: c.Worker, pool: c.Pool) -> Worker:
    return Worker(one.url or "", **_common(one, pool))


def _common(one: c.Worker, pool: c.Pool) -> dict[str, Any]:
    return {
        "weight": one.weight,
        "max_concurrency": one.max_concurrency or pool.max_concurrency,
        "bearer": one.auth.bearer.reveal() if one.auth else None,
    }


def _source(one: c.Worker, pool: c.Pool) -> dict[str, Any]:
    if one.file is not None:
        return {"file": one.file}
    asked = {
        "name": one.dns or one.srv,
        "record": "srv" if one.dns is None else "a",
        "every": one.every,
        "nameserver": one.nameserver,
    }
    return {"dns": asked, "template": {"scheme": one.scheme, **_common(one, pool)}}


def _reader(listed: c.Worker, pool: c.Pool) -> Callable[[bytes], Sequence[Worker]]:
    """Reads a file that lists workers, as the configuration would.

    What stands beside the file's name holds for each of them that says nothing else.
    """
    plain = c.Worker()

    def read(data: bytes) -> Sequence[Worker]:
        found = []
        for one in c.workers(data, "workers", env={}):
            weight = listed.weight if one.weight == plain.weight else one.weight
            most = one.max_concurrency or listed.max_concurrency
            whole = replace(one, weight=weight, max_concurrency=most, auth=one.auth or listed.auth)
            found.append(_worker(whole, pool))
        return found

    return read
