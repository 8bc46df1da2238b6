"""Each process's part of what the file allows to the whole gateway."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from msgspec.structs import replace

from gateway import config as c
from gateway.config.complaints import Steps

AllowanceT = TypeVar("AllowanceT", bound=c.Allowance)
Ports = Mapping[c.ListenerId, int]
"""The port of each listener."""


def share(config: c.Config, processes: int, ports: Ports) -> c.Config:
    """What one of so many processes serves: a part of each limit, at the ports that all have.

    Parts are rounded up, so that none is 0.
    """
    listeners = [
        replace(listener, address=f"{listener.address.rpartition(':')[0]}:{ports[listener_id]}")
        for listener_id, listener in c.listeners_by_id(config).items()
    ]
    limits = replace(
        config.limits,
        connections=_part(config.limits.connections, processes),
        connections_per_address=_most(config.limits.connections_per_address, processes),
    )
    backends = {name: _backend(one, processes) for name, one in config.backends.items()}
    models = {name: _model(one, processes) for name, one in config.models.items()}
    if config.state is None:
        config = _keyed(config, processes)
    return replace(
        config,
        listeners=tuple(listeners),
        limits=limits,
        backends=backends,
        models=models,
        state=_state(config.state, processes),
    )


def undivided(config: c.Config) -> Iterator[tuple[Steps, str]]:
    """What several processes can't share, and what to do instead."""
    for name, backend in config.backends.items():
        if isinstance(backend, c.Torch):
            message = (
                "each process would load this model; serve it with `interlingua worker` and name "
                "that in a pool, or leave out --processes"
            )
            yield ("backends", name), message


def _part(whole: int, processes: int) -> int:
    return -(-whole // processes)


def _most(whole: int | None, processes: int) -> int | None:
    return None if whole is None else _part(whole, processes)


def _state(state: c.State | None, processes: int) -> c.State | None:
    return None if state is None else replace(state, replicas=state.replicas * processes)


def _backend(backend: c.Backend, processes: int) -> c.Backend:
    if not isinstance(backend, c.Pool):
        return backend
    workers = (
        replace(one, max_concurrency=_most(one.max_concurrency, processes))
        for one in backend.workers
    )
    return replace(
        backend,
        workers=tuple(workers),
        max_concurrency=_most(backend.max_concurrency, processes),
        total_concurrency=_most(backend.total_concurrency, processes),
        queue=replace(backend.queue, max=_part(backend.queue.max, processes)),
    )


def _keyed(config: c.Config, processes: int) -> c.Config:
    """With a part of what every key may take, where no state tells the processes of each other."""
    keys = (replace(key, limits=_limits(key.limits, processes)) for key in config.keys)
    defaults = replace(config.defaults, limits=_limits(config.defaults.limits, processes))
    return replace(config, keys=tuple(keys), defaults=defaults)


def _limits(limits: c.KeyLimits | None, processes: int) -> c.KeyLimits | None:
    if limits is None:
        return None
    models = {name: _allowance(one, processes) for name, one in (limits.models or {}).items()}
    return replace(_allowance(limits, processes), models=models or None)


def _allowance(told: AllowanceT, processes: int) -> AllowanceT:
    return replace(
        told,
        requests=_rate(told.requests, processes),
        tokens=_rate(told.tokens, processes),
        concurrent=_most(told.concurrent, processes),
        budget=_most(told.budget, processes),
    )


def _rate(told: tuple[int, int] | None, processes: int) -> tuple[int, int] | None:
    return None if told is None else (_part(told[0], processes), told[1])


def _model(model: c.Model, processes: int) -> c.Model:
    if model.shadow is None:
        return model
    most = _part(model.shadow.max_concurrent, processes)
    return replace(model, shadow=replace(model.shadow, max_concurrent=most))
