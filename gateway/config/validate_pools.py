"""Validates pools of workers: their sources, credentials, headers and TLS."""

from collections.abc import Sequence
from typing import Final

from backends.pool.settings import PoolSettings, WorkerAuthSettings, WorkerSourceSettings
from gateway.config.errors import ConfigPath, join_names, quote
from gateway.config.validation_context import ValidationContext, is_set

_SOURCES: Final = ("url", "dns", "srv", "file")
_DISCOVERY: Final = ("refresh_interval", "scheme", "nameserver")
_DEFAULT_WORKER: Final = WorkerSourceSettings()
_AUTH_KINDS: Final = ("bearer", "header", "query", "basic")
RESERVED_HEADERS: Final = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "expect", "host",
     "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
"""Headers that a worker's settings may not have: the HTTP client or the protocol sets them."""


def check_pool(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> None:
    """Report issues of a pool and of its workers."""
    health = pool.health.path if is_set(pool.health) else None
    if is_set(health) and health is not None and not health.startswith("/"):
        message = "is not a path; write it as /health: it is appended to the worker's URL"
        context.add_issue((*path, "health", "path"), message)
    if is_set(pool.workers):
        _check_workers(pool.workers, (*path, "workers"), context)
        _check_pool_tls(pool, (*path, "tls"), context)


def _check_workers(
    workers: Sequence[WorkerSourceSettings], path: ConfigPath, context: ValidationContext
) -> None:
    numbers_by_url: dict[str, int] = {}
    for n, worker in enumerate(workers):
        if not is_set(worker):
            continue
        at = (*path, n)
        _check_worker_auth(worker.auth, (*at, "auth"), context)
        _check_worker_headers(worker, (*at, "headers"), context)
        sources = [name for name in _SOURCES if getattr(worker, name) is not None]
        if len(sources) != 1:
            context.add_issue(at, f"a worker needs one of {join_names(_SOURCES)}; give exactly one")
        elif is_set(worker.url) and worker.url is not None:
            first = numbers_by_url.setdefault(worker.url, n)
            if first != n:
                message = f"this is workers[{first}] again; increase the weight of that one"
                context.add_issue((*at, "url"), message)
            for name in _DISCOVERY:
                if getattr(worker, name) != getattr(_DEFAULT_WORKER, name):
                    message = "has no effect together with url; remove it"
                    context.add_issue((*at, name), message, key=True)
        elif worker.dns is not None and worker.scheme == "https":
            context.add_issue(
                (*at, "scheme"),
                "https verifies a name, and dns gives only addresses; list the workers by url, "
                "or use srv",
            )


def _check_worker_auth(
    auth: WorkerAuthSettings | None, path: ConfigPath, context: ValidationContext
) -> None:
    """Report credentials of no kind or of several, and headers that a client may not set."""
    if not is_set(auth) or auth is None:
        return
    kinds = [name for name in _AUTH_KINDS if getattr(auth, name) is not None]
    empty = [
        name for name in _AUTH_KINDS if name not in kinds and context.is_present((*path, name))
    ]
    for name in empty:
        context.add_issue((*path, name), "has no value; give it one or remove the key")
    if len(kinds) != 1 and not empty:
        context.add_issue(path, f"auth needs one of {join_names(_AUTH_KINDS)}; give exactly one")
    name = auth.header.name if is_set(auth.header) and auth.header is not None else ""
    if is_set(name) and name.lower() in RESERVED_HEADERS:
        message = f"the gateway sets {name} itself; name the header of the key"
        context.add_issue((*path, "header", "name"), message)


def _check_worker_headers(
    worker: WorkerSourceSettings, path: ConfigPath, context: ValidationContext
) -> None:
    """Report headers that the gateway or ``auth`` sets, and names that differ in case alone."""
    if not is_set(worker.headers):
        return
    auth = worker.auth if is_set(worker.auth) else None
    header = auth.header if auth is not None and is_set(auth.header) else None
    owners = dict.fromkeys(RESERVED_HEADERS, "the gateway sets it itself")
    if header is not None and is_set(header.name):
        owners[header.name.lower()] = "`auth` sets it"
    elif auth is not None and (auth.bearer is not None or auth.basic is not None):
        owners["authorization"] = "`auth` sets it"
    for name in worker.headers:
        if (owner := owners.get(name.lower())) is not None:
            context.add_issue((*path, name), f"{owner}; remove it here", key=True)
        owners.setdefault(name.lower(), f"{quote(name)} is the same header, without case")


def check_listed_workers(
    workers: Sequence[WorkerSourceSettings], context: ValidationContext
) -> None:
    """Report issues of the workers in a worker list file, where each must have a URL."""
    _check_workers(workers, (), context)
    for n, worker in enumerate(workers):
        if is_set(worker) and worker.url is None:
            context.add_issue((n,), "each worker in a file needs a url; add it")


def _check_pool_tls(pool: PoolSettings, path: ConfigPath, context: ValidationContext) -> None:
    plaintext = [
        is_set(one) and is_set(one.url) and is_set(one.scheme)
        and not (one.url or "https:").startswith("https:")
        and one.scheme == "http"
        for one in pool.workers
    ]  # fmt: skip
    if pool.tls is not None and plaintext and all(plaintext):
        message = "no worker uses TLS, so this has no effect"
        context.add_issue(path, f"{message}; write https:// or remove it", key=True)
