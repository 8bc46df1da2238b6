"""The configuration of the gateway that recorded requests are sent to.

It listens on loopback only, has no limits of rates, and records every request. API keys keep their
names, models and tags, but get secrets of their own for this run. With a target, each recorded
model is that target alone: no split, route or fallback changes where a request goes. No rollout
moves a split, and nothing judges or copies requests.
"""

import hashlib
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.interfaces import Timeouts
from backends.pool.settings import CircuitBreakerSettings, PoolSettings, QueueSettings
from gateway.config.listeners import listeners_by_id
from gateway.config.loader import build_default_listener, load_bytes
from gateway.config.registry import ProtocolRegistry
from gateway.config.schema import (
    ApiKeyConfig,
    BackendConfig,
    Config,
    DefaultsConfig,
    ListenerConfig,
    ModelConfig,
    ObservabilityConfig,
    RecordConfig,
    TargetConfig,
    map_model_names,
)
from gateway.observability.record import RequestRecord
from gateway.observability.recording import RecordedRequest
from gateway.pipeline.recording import select_recorded_headers
from protocols import PROTOCOLS
from protocols.core.errors import DeadlineExceeded, Overloaded, WorkerUnreachable

_ADDRESS: Final = "127.0.0.1:0"
_UNLIMITED: Final = 1 << 50
_OTHER_KEY: Final = "replay"
"""The key of requests whose own key the configuration does not have."""
_PROTOCOL_HEADER: Final = "x-interlingua-protocol"
_MODEL_SEGMENT: Final = re.compile(r"/(?:models|serving-endpoints|deployments)/([^/]+)")
_SERVER_ERROR: Final = 500
_SHED: Final = (Overloaded.__name__, DeadlineExceeded.__name__)
"""The errors of a request that waited in vain."""
_VERSION_SEGMENT: Final = re.compile(r"(/models/[^/]+)/versions/[^/]+")


class TargetError(Exception):
    """The target does not exist."""


class ReplayRequest(Struct, frozen=True):
    """A request to send. ``listener`` is the number of the listener in the configuration."""

    listener: int
    path: str
    headers: Mapping[str, str]
    body: bytes


class ReplayTarget(Struct, frozen=True):
    """The configuration, and how recorded requests are sent to it."""

    config: Config
    name: str
    """The target as it is shown: ``model@version``, a URL or a file."""
    key_secrets: Mapping[str, str]
    """The secret of each API key by its name; empty if clients need none."""
    is_redirected: bool
    """Whether all requests go to one target, under the names of the recorded models."""

    def build_request(self, recorded: RecordedRequest) -> ReplayRequest | None:
        """The request to send; None if no listener speaks its protocol, or has such a path."""
        mount = self._find_mount(recorded)
        if mount is None:
            return None
        number, path = mount
        if not path.startswith("/"):  # behind the gateway's address it might name another host
            return None
        body = recorded.request
        if self.is_redirected and not recorded.model.endswith("*"):
            path = _rename_in_path(path, recorded.model)
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                body = {**body, "model": recorded.model}
        if recorded.query:
            path += f"?{recorded.query}"
        headers = {
            **select_recorded_headers(recorded.headers),
            "x-request-id": recorded.id,
            _PROTOCOL_HEADER: recorded.protocol,
        }
        headers = {name: value for name, value in headers.items() if _can_be_sent(name + value)}
        if self.key_secrets:
            secret = self.key_secrets.get(recorded.key, self.key_secrets[_OTHER_KEY])
            headers["authorization"] = f"Bearer {secret}"
        content = recorded.request_text.encode() if body is None else msgspec.json.encode(body)
        return ReplayRequest(number, path, headers, content)

    def _find_mount(self, recorded: RecordedRequest) -> tuple[int, str] | None:
        """The number of the listener, and the path there."""
        mounts = [
            (number, mount.prefix)
            for number, listener in enumerate(listeners_by_id(self.config).values())
            for mount in listener.protocols
            if mount.name == recorded.protocol
        ]
        for number, prefix in sorted(mounts, key=lambda mount: -len(mount[1])):
            if prefix and recorded.path.startswith(f"{prefix}/"):
                return number, recorded.path
        if not mounts:
            return None
        number, prefix = mounts[0]
        return number, prefix + recorded.path.removeprefix(_find_default_prefix(recorded.protocol))

    def has_sent(self, record: RequestRecord) -> bool:
        """Whether a failed request reached its target, or another reason is the target's.

        Else it waited for a worker or for memory of this gateway, or no worker could be reached.
        """
        if record.status < _SERVER_ERROR:
            return True
        if record.worker_failures:
            errors = {failure.error for failure in record.worker_failures}
            return errors != {WorkerUnreachable.__name__}
        backend = self.config.backends.get(record.backend)
        is_remote = backend is None or isinstance(backend, PoolSettings)
        return record.worker != "" or record.error not in _SHED or not is_remote


def _can_be_sent(text: str) -> bool:
    """Whether a header may have this text: a recording is a file that others may have written."""
    return text.isascii() and text.isprintable()


def _find_default_prefix(protocol: str) -> str:
    """The prefix of a protocol's paths where the configuration has no listeners."""
    mounts = build_default_listener(ProtocolRegistry(PROTOCOLS)).protocols
    return next((mount.prefix for mount in mounts if mount.name == protocol), "")


def _rename_in_path(path: str, model: str) -> str:
    """The path with the model's own name, instead of an alias or a pinned version."""
    path = _VERSION_SEGMENT.sub(r"\1", path)
    found = _MODEL_SEGMENT.search(path)
    if found is None or unquote(found[1]) == model:
        return path
    return path[: found.start(1)] + quote(model, safe="") + path[found.end(1) :]


class WorkerOptions(Struct, frozen=True):
    """The worker of a replay."""

    url: str
    protocol: str
    model: str | None = None
    """Its name for the model; by default the recorded one."""
    key: str | None = None
    """Its API key."""
    profile: str | None = None
    """The profile of the protocol; by default the first."""


def build_config_target(
    config: Config, filename: str, target: str | None, models: Collection[str], folder: str
) -> ReplayTarget:
    """Requests for these recorded models go to ``target`` of a configuration.

    ``target`` is MODEL or MODEL@VERSION; with None, the configuration routes. Recordings
    are written to ``folder``. Raises TargetError.
    """
    record = RecordConfig(
        to=folder, share=1.0, bodies="full", retention=_UNLIMITED, size=_UNLIMITED
    )
    if target is None:
        return _build_target(config, filename, record, is_redirected=False)
    name, version, config = _redirect(config, target, models)
    return _build_target(config, f"{name}@{version}", record, is_redirected=True)


def build_worker_target(
    worker: WorkerOptions, models: Collection[str], folder: str
) -> ReplayTarget:
    """Requests for these recorded models go to one worker, by its name for the model.

    Raises ConfigError for a URL or a protocol that can't be used.
    """
    url, model = worker.url, worker.model
    served = {
        name: {"backend": "worker", "model": model or name} for name in sorted(models) or ["*"]
    }
    address: dict[str, object] = {"url": url}
    if worker.key is not None:
        address["auth"] = {"bearer": worker.key}
    backend: dict[str, object] = {"protocol": worker.protocol, "workers": [address]}
    if worker.profile is not None:
        backend["profile"] = worker.profile
    text = {
        "version": 1,
        "backends": {"worker": backend},
        "models": served,
    }
    loaded = load_bytes(msgspec.json.encode(text), "<worker>", env={}, insecure=True)
    record = RecordConfig(
        to=folder, share=1.0, bodies="full", retention=_UNLIMITED, size=_UNLIMITED
    )
    return _build_target(loaded.config, url, record, is_redirected=True)


def _redirect(config: Config, target: str, models: Collection[str]) -> tuple[str, str, Config]:
    """The target's model and version, and the configuration in which each model is this target."""
    requested, _, version = target.partition("@")
    name = map_model_names(config.models).get(requested)
    if name is None:
        names = ", ".join(sorted(config.models))
        raise TargetError(f"there is no model {requested!r}; the configuration has {names}")
    model = config.models[name]
    targets = model.resolve_targets()
    if not version:
        weights = model.resolve_weights()
        version = max(weights, key=lambda one: weights[one])
    if version not in targets:
        known = ", ".join(targets)
        raise TargetError(f"the model {name!r} has no version {version!r}; it has {known}")
    chosen = targets[version]
    pinned = replace(
        model,
        aliases=(),
        backend=None,
        model=None,
        versions={version: TargetConfig(chosen.backend, chosen.model or name)},
        split=None,
        fallback=None,
    )
    return (
        name,
        version,
        replace(
            config,
            models=dict.fromkeys(sorted(models) or [name], pinned),
            backends={chosen.backend: config.backends[chosen.backend]},
            routes=(),
        ),
    )


def _build_target(
    config: Config, name: str, record: RecordConfig, *, is_redirected: bool
) -> ReplayTarget:
    key_secrets = {key.name: secrets.token_urlsafe() for key in config.keys}
    if key_secrets or config.identity is not None:
        key_secrets[_OTHER_KEY] = secrets.token_urlsafe()
    known = {key.name: key for key in config.keys}
    keys = tuple(
        replace(
            known.get(key, ApiKeyConfig(name=key, sha256="")),
            sha256=hashlib.sha256(secret.encode()).hexdigest(),
            limits=None,
            **({"models": None} if is_redirected else {}),
        )
        for key, secret in key_secrets.items()
    )
    models: dict[str, ModelConfig] = {
        model: replace(one, rollout=None, shadow=None, judge=None, record=None)
        for model, one in config.models.items()
    }
    defaults: DefaultsConfig = replace(config.defaults, limits=None, record=record)
    config = replace(
        config,
        backends={one: _keep_load(backend) for one, backend in config.backends.items()},
        listeners=tuple(map(_listen_on_loopback, config.listeners))
        or (_listen_on_loopback(build_default_listener(ProtocolRegistry(PROTOCOLS))),),
        admin=None,
        defaults=defaults,
        models=models,
        routes=tuple(replace(route, record=None) for route in config.routes),
        keys=keys,
        keys_file=None,
        identity=None,
        state=None,
        observe=ObservabilityConfig(),
    )
    return ReplayTarget(config, name, key_secrets, is_redirected)


_NEVER: Final = 1 << 30
_CONNECT_TIMEOUT: Final = 60.0
_QUEUE: Final = QueueSettings(max=100_000, wait=3600.0)
_BREAKER: Final = CircuitBreakerSettings(
    consecutive_failures=_NEVER,
    failure_rate=1.0,
    min_requests=_NEVER,
    adaptive_concurrency=False,
)


def _keep_load(backend: BackendConfig) -> BackendConfig:
    """The backend without whatever would refuse requests on behalf of its workers.

    No worker is ejected or gets fewer requests after a 429, no queue is full, and a slow connection
    is waited for.
    """
    if not isinstance(backend, PoolSettings):
        return backend
    timeouts = backend.timeouts or Timeouts()
    return replace(
        backend,
        breaker=_BREAKER,
        queue=_QUEUE,
        health=replace(backend.health, fall=_NEVER),
        timeouts=replace(timeouts, connect=max(timeouts.connect, _CONNECT_TIMEOUT)),
    )


def _listen_on_loopback(listener: ListenerConfig) -> ListenerConfig:
    return replace(listener, address=_ADDRESS, tls=None, cors=None, protocol_header=True)
