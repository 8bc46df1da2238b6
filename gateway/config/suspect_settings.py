"""Settings of a valid configuration that have no effect, or an effect that few want.

``interlingua check`` prints them as warnings. They are read from a configuration that was loaded,
so that every name in it leads to what it names.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

from backends.pool.settings import PoolSettings
from gateway.config.errors import ConfigIssue, ConfigPath, quote
from gateway.config.loader import LoadedConfig
from gateway.config.schema import Config, GuardrailsConfig, map_model_names
from protocols.core.units import parse_ip


def list_warnings(loaded: LoadedConfig) -> list[ConfigIssue]:
    """The warnings about a configuration, in the order of the file."""
    config = loaded.config
    found = (
        *_list_unused_backends(config),
        *_list_exposed_credentials(config),
        *_list_own_workers(config),
        *_list_timeouts_without_effect(config),
        *_list_equal_fallbacks(config),
        *_list_unguarded_rollouts(config),
    )
    return sorted(
        (loaded.locate_issue(path, message) for path, message in found),
        key=lambda issue: (issue.line, issue.column, issue.message),
    )


def _list_unused_backends(config: Config) -> Iterator[tuple[ConfigPath, str]]:
    used = {
        target.backend
        for model in config.models.values()
        for target in model.resolve_targets().values()
    }
    for name in config.backends:
        if name not in used:
            yield ("backends", name), "no model uses this backend"


def _list_exposed_credentials(config: Config) -> Iterator[tuple[ConfigPath, str]]:
    """Credentials that go to another machine without TLS, by its public name or address."""
    for name, backend in config.backends.items():
        for number, worker in enumerate(
            backend.workers if isinstance(backend, PoolSettings) else ()
        ):
            if worker.auth is None or worker.url is None:
                continue
            url = urlsplit(worker.url)
            if url.scheme == "http" and _is_public(url.hostname or ""):
                message = "the credentials go to this worker without TLS; write https://"
                yield ("backends", name, "workers", number, "url"), message


def _is_public(host: str) -> bool:
    address = parse_ip(host)
    if address is not None:
        return address.is_global
    return "." in host and not host.endswith((".local", ".internal", ".localhost", ".svc"))


def _list_own_workers(config: Config) -> Iterator[tuple[ConfigPath, str]]:
    """Workers that are a listener of this gateway."""
    own = {
        one.address: "a listener of this gateway: its requests come back to it"
        for one in config.listeners
    }
    if config.admin is not None:
        own[config.admin.address] = "the admin listener of this gateway, which serves no models"
    for name, backend in config.backends.items():
        for number, worker in enumerate(
            backend.workers if isinstance(backend, PoolSettings) else ()
        ):
            for address, what in own.items():
                if worker.url is not None and _is_at(worker.url, address):
                    yield ("backends", name, "workers", number, "url"), f"this is {what}"


def _is_at(url: str, address: str) -> bool:
    """Whether a URL leads to an address on which this machine listens."""
    parts = urlsplit(url)
    host, _, port = address.rpartition(":")
    hosts = parts.hostname or "", host.strip("[]")
    is_host = hosts[0] == hosts[1] or all(map(_is_local, hosts))
    return is_host and str(parts.port or (443 if parts.scheme == "https" else 80)) == port


def _is_local(host: str) -> bool:
    address = parse_ip(host)
    if address is None:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _list_timeouts_without_effect(config: Config) -> Iterator[tuple[ConfigPath, str]]:
    """Timeouts above the total one. A default is no mistake: nobody wrote it."""
    for name, backend in config.backends.items():
        if not isinstance(backend, PoolSettings) or backend.timeouts is None:
            continue
        timeouts, defaults = backend.timeouts, type(backend.timeouts)()
        for field in ("first_token", "idle"):
            limit, total = getattr(timeouts, field), timeouts.total
            if limit > total and limit != getattr(defaults, field):
                message = (
                    f"{field} ({limit:g} s) never ends a request: total ({total:g} s) does before"
                )
                yield ("backends", name, "timeouts", field), message


def _list_equal_fallbacks(config: Config) -> Iterator[tuple[ConfigPath, str]]:
    """Fallbacks to the target that failed."""
    owners = map_model_names(config.models)
    for name, model in config.models.items():
        if model.versions is not None or model.fallback is None:
            continue
        [target] = model.resolve_targets().values()
        for number, fallback in enumerate(model.fallback):
            other = config.models.get(owners.get(fallback, ""))
            if other is None or other.versions is not None or other.backend != target.backend:
                continue
            if (other.model or fallback) == (target.model or name):
                message = (
                    f"{quote(fallback)} has the same backend and model, and fails with this one"
                )
                yield ("models", name, "fallback", number), message


def _list_unguarded_rollouts(config: Config) -> Iterator[tuple[ConfigPath, str]]:
    """Rollouts that go on whatever the version answers."""
    for name, model in config.models.items():
        if model.rollout is not None and model.rollout.guardrails == GuardrailsConfig():
            message = (
                "the rollout has no guardrail, so that nothing stops a worse version; add one: "
                "guardrails: {errors: {max_increase: 1%}}"
            )
            yield ("models", name, "rollout"), message
