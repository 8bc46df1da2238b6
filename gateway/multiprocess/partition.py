"""Divides the configured limits among the serving processes."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from msgspec.structs import replace

from backends.pool.settings import PoolSettings
from backends.torch.settings import TorchSettings
from gateway.config import listeners as config_listeners
from gateway.config import schema
from gateway.config.errors import ConfigPath

RateLimitT = TypeVar("RateLimitT", bound=schema.RateLimitConfig)
ListenerPorts = Mapping[config_listeners.ListenerId, int]
"""The port of each listener."""


def partition_config(config: schema.Config, processes: int, ports: ListenerPorts) -> schema.Config:
    """The configuration of one process: its part of each limit, at the shared ports.

    Parts are rounded up, so that none is 0.
    """
    listeners = [
        replace(listener, address=f"{listener.address.rpartition(':')[0]}:{ports[listener_id]}")
        for listener_id, listener in config_listeners.listeners_by_id(config).items()
    ]
    limits = replace(
        config.limits,
        memory=_divide(config.limits.memory, processes),
        connections=_divide(config.limits.connections, processes),
        connections_per_address=_divide_optional(config.limits.connections_per_address, processes),
    )
    backends = {name: _partition_backend(one, processes) for name, one in config.backends.items()}
    models = {name: _partition_model(one, processes) for name, one in config.models.items()}
    observe = config.observe
    if observe.feedback is not None:
        amount, period = observe.feedback.requests
        share = replace(observe.feedback, requests=(_divide(amount, processes), period))
        config = replace(config, observe=replace(observe, feedback=share))
    if config.state is None:
        config = _partition_all_key_limits(config, processes)
    return replace(
        config,
        listeners=tuple(listeners),
        limits=limits,
        backends=backends,
        models=models,
        state=_partition_state(config.state, processes),
    )


def find_unpartitionable(config: schema.Config) -> Iterator[tuple[ConfigPath, str]]:
    """Find what several processes cannot share; yields paths and messages."""
    for name, backend in config.backends.items():
        if isinstance(backend, TorchSettings):
            message = (
                "each process would load this model; serve it with `interlingua worker` and name "
                "that in a pool, or leave out --processes"
            )
            yield ("backends", name), message


def _divide(limit: int, processes: int) -> int:
    return -(-limit // processes)


def _divide_optional(limit: int | None, processes: int) -> int | None:
    return None if limit is None else _divide(limit, processes)


def _partition_state(
    state: schema.SharedStateConfig | None, processes: int
) -> schema.SharedStateConfig | None:
    return None if state is None else replace(state, replicas=state.replicas * processes)


def _partition_backend(backend: schema.BackendConfig, processes: int) -> schema.BackendConfig:
    if not isinstance(backend, PoolSettings):
        return backend
    workers = (
        replace(one, max_concurrency=_divide_optional(one.max_concurrency, processes))
        for one in backend.workers
    )
    return replace(
        backend,
        workers=tuple(workers),
        max_concurrency=_divide_optional(backend.max_concurrency, processes),
        total_concurrency=_divide_optional(backend.total_concurrency, processes),
        queue=replace(backend.queue, max=_divide(backend.queue.max, processes)),
    )


def _partition_all_key_limits(config: schema.Config, processes: int) -> schema.Config:
    """Divide the limits of all keys; used without shared state."""
    keys = (
        replace(key, limits=_partition_key_limits(key.limits, processes)) for key in config.keys
    )
    defaults = replace(
        config.defaults, limits=_partition_key_limits(config.defaults.limits, processes)
    )
    return replace(config, keys=tuple(keys), defaults=defaults)


def _partition_key_limits(
    limits: schema.KeyRateLimitConfig | None, processes: int
) -> schema.KeyRateLimitConfig | None:
    if limits is None:
        return None
    models = {
        name: _partition_rate_limit(one, processes) for name, one in (limits.models or {}).items()
    }
    return replace(_partition_rate_limit(limits, processes), models=models or None)


def _partition_rate_limit(limits: RateLimitT, processes: int) -> RateLimitT:
    return replace(
        limits,
        requests=_divide_rate(limits.requests, processes),
        tokens=_divide_rate(limits.tokens, processes),
        concurrent=_divide_optional(limits.concurrent, processes),
        budget=_divide_optional(limits.budget, processes),
    )


def _divide_rate(limits: tuple[int, int] | None, processes: int) -> tuple[int, int] | None:
    return None if limits is None else (_divide(limits[0], processes), limits[1])


def _partition_model(model: schema.ModelConfig, processes: int) -> schema.ModelConfig:
    if model.shadow is None:
        return model
    max_concurrency = _divide(model.shadow.max_concurrency, processes)
    return replace(model, shadow=replace(model.shadow, max_concurrency=max_concurrency))
