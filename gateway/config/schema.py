"""The sections of the configuration file, as Structs. A key that is not a field here is an error.

Some classes describe how they are written: ``shorthand_field`` is the field that a lone scalar
sets, ``extra_field`` the field that collects the other keys (only ``extra_keys``, if the class has
them), and ``implied_by`` the key that makes ``kind`` unnecessary. The settings of a backend are
defined in the backend.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, UnsetType

from backends.echo import ScriptedFailure
from backends.interfaces import BackendSettings, Timeouts
from backends.pool.settings import (
    ClientTlsSettings,
    PoolSettings,
    RetrySettings,
)
from backends.torch.settings import TorchSettings
from protocols import PROTOCOLS
from protocols.core.catalog import ModelTask
from protocols.core.units import (
    Budget,
    CollectorUrl,
    ConfigSection,
    CorsOrigin,
    Duration,
    FilePath,
    HeaderName,
    ListenAddress,
    ModelAlias,
    ModelName,
    Name,
    NonEmptyStr,
    OptionValue,
    OutputPath,
    PathPrefix,
    PositiveInt,
    Rate,
    Retention,
    Secret,
    Sha256Digest,
    Share,
    Size,
    StickySource,
    Timeout,
    TokenCount,
    Weight,
)

# Rate limits.


class RateLimitConfig(ConfigSection, frozen=True):
    """Rate limits; a limit that is left out does not apply.

    ``tokens`` and ``budget`` count prompt and completion tokens; ``budget`` is per day, from
    00:00 UTC. ``concurrent`` is the number of requests at a time; at a local model, of choices.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrent: PositiveInt | None = None
    budget: Budget | None = None


class KeyRateLimitConfig(RateLimitConfig, frozen=True):
    """Rate limits of a key for all models together, and additional limits for single models."""

    models: Annotated[Mapping[NonEmptyStr, RateLimitConfig], Meta(min_length=1)] | None = None


# Server limits.


class ServerLimitsConfig(ConfigSection, frozen=True):
    """Limits of the server.

    ``body`` and ``header`` are the largest sizes of a request's body and head. All bodies together
    may take ``buffered_bodies`` of memory; beyond that, requests get status 503.

    ``connections`` is capped at half of the process's limit of open files, since each connection
    may need one to a worker. At the limit, a new connection closes the one that has been idle
    longest, or else the one with the slowest body. One client address may have
    ``connections_per_address``, by default half of ``connections``; loopback addresses are exempt
    from the default, since local proxies connect from there.

    ``tls_handshake_timeout`` is the time limit for a TLS handshake; ``header_timeout``, for the
    head of a request; ``body_timeout``, for a pause in its body; ``body_total_timeout``, for the
    whole body, which must also arrive at ``min_body_rate`` (bytes per second) after its first 20
    seconds; ``idle_timeout``, for the wait for the next request on a connection.

    On SIGTERM the gateway reports that it is not ready, closes each connection after its response,
    and keeps serving for ``shutdown_delay``, so that load balancers notice. Then it accepts no more
    requests, and running ones have ``drain_timeout`` to finish.

    ``warmup_timeout`` is how long a reload waits for a new backend: for a model to be loaded.
    """

    body: Size = 8 << 20
    header: Size = 16 << 10
    buffered_bodies: Size = 512 << 20
    connections: PositiveInt = 10_000
    connections_per_address: PositiveInt | None = None
    tls_handshake_timeout: Timeout = 5.0
    header_timeout: Timeout = 10.0
    body_timeout: Timeout = 10.0
    body_total_timeout: Timeout = 300.0
    min_body_rate: PositiveInt = 512
    idle_timeout: Timeout = 75.0
    shutdown_delay: Duration = 5.0
    drain_timeout: Duration = 60.0
    warmup_timeout: Duration = 120.0


# JSON Web Tokens.

JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class JwtClaimsConfig(ConfigSection, frozen=True):
    """Names of the claims to read. A dotted name refers to a nested claim.

    ``name`` identifies the client; logs and usage show it as ``jwt:NAME``. ``models`` lists the
    models that the client may use, as a list or a space-separated string (``*``: all models); if
    this is set and the claim is missing, the client may use none. ``tags`` are for routes.
    """

    name: NonEmptyStr = "sub"
    models: NonEmptyStr | None = None
    tags: NonEmptyStr | None = None


class JwtConfig(ConfigSection, frozen=True, kw_only=True):
    """Authentication by JSON Web Tokens of one issuer, in addition to API keys.

    ``audience`` lists the accepted audiences. ``jwks`` is the URL of the issuer's public keys; if
    left out, ``issuer`` must be a URL, and ``/.well-known/openid-configuration`` there names them.
    ``leeway`` is the tolerated clock difference. While the issuer is unreachable, the last keys
    stay valid for ``jwks_max_stale``.
    """

    issuer: NonEmptyStr
    audience: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)]
    jwks: NonEmptyStr | None = None
    algorithms: Annotated[tuple[JwtAlgorithm, ...], Meta(min_length=1)] = ("RS256", "ES256")
    leeway: Duration = 30.0
    jwks_max_stale: Timeout = 86400.0
    claims: JwtClaimsConfig = JwtClaimsConfig()
    tls: ClientTlsSettings | None = None


# State that several gateways share.


StoreFailurePolicy = Literal["local", "open", "closed"]


class SharedStateConfig(ConfigSection, frozen=True):
    """A Redis server that holds the rate limits of several gateways.

    ``redis`` is its URL, which may contain a password and is never shown: redis://HOST:6379/0, with
    TLS rediss://, for a local socket unix:///PATH. ``prefix`` starts the names of all Redis keys:
    gateways with the same prefix share their limits.
    """

    redis: Secret
    on_failure: StoreFailurePolicy = "local"
    """What happens while Redis is unreachable: each gateway applies its share of every limit
    (``local``), admits all requests (``open``), or rejects all that have a limit (``closed``)."""
    replicas: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """The number of gateways, by which ``local`` divides the limits."""
    prefix: Name = "interlingua"
    tls: ClientTlsSettings | None = None


# Traces and metrics.


class CollectorAuthConfig(ConfigSection, frozen=True):
    """Credentials that are sent to a collector."""

    bearer: Secret


class TracingConfig(ConfigSection, frozen=True):
    """Spans of requests, exported by OTLP over HTTP; they never contain a prompt or a response.

    ``otlp`` is the collector's base URL, without ``/v1/traces``. ``sample`` is the share of
    requests that is traced. The trace context of a client is added as a link; with ``trust`` it
    becomes the parent, and its sampling decision applies. At most ``buffer`` requests wait for the
    export; further ones are dropped and counted.
    """

    shorthand_field: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    sample: Share = 0.05
    trust: bool = False
    auth: CollectorAuthConfig | None = None
    headers: Mapping[HeaderName, Secret] = {}
    """Headers of each request to the collector."""
    buffer: PositiveInt = 10_000


class OtlpMetricsConfig(ConfigSection, frozen=True):
    """Metrics of OpenTelemetry's conventions for generative AI, exported by OTLP over HTTP.

    ``otlp`` is the collector's base URL, without ``/v1/metrics``.
    """

    shorthand_field: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    interval: Timeout = 60.0
    auth: CollectorAuthConfig | None = None
    headers: Mapping[HeaderName, Secret] = {}


class MetricsConfig(ConfigSection, frozen=True):
    """Prometheus metrics, served by the admin listener under ``/metrics``.

    ``vllm_compat`` adds vLLM's metric names, so that tools made for vLLM can read them. ``push``
    exports some of the metrics to a collector.
    """

    vllm_compat: bool = False
    push: OtlpMetricsConfig | None = None


OnLoss = Literal["report", "reject", "ignore"]


# --- listeners -----------------------------------------------------------------------------------


class TlsConfig(ConfigSection, frozen=True):
    """A listener's certificate chain and private key, in PEM."""

    cert: FilePath
    key: FilePath


class CorsConfig(ConfigSection, frozen=True):
    """Pages of other origins that may use the listener in a browser (CORS).

    ``origins`` are written as the browser sends them: https://app.example. One label of the host,
    or the port, may be ``*``: https://*.example.org, http://localhost:*. The origin ``*`` is every
    one. ``headers`` are request headers that pages may send beside those of the protocols' clients,
    or ``*``. Browsers keep the permission for ``max_age``.
    """

    origins: Annotated[tuple[CorsOrigin, ...], Meta(min_length=1)]
    headers: tuple[HeaderName, ...] = ()
    max_age: Duration = 600.0


class ListenerProtocolConfig(ConfigSection, frozen=True):
    """A protocol on a listener. The protocol's own options stand beside ``name``.

    ``keep_alive`` keeps connections after a response also if the protocol's own server closes them,
    as MindIE does after responses that are not streamed.
    """

    shorthand_field: ClassVar[str] = "name"
    extra_field: ClassVar[str] = "options"

    name: NonEmptyStr
    profile: NonEmptyStr | None = None
    prefix: PathPrefix = ""
    keep_alive: bool = False
    options: Mapping[str, OptionValue] = {}


class ListenerConfig(ConfigSection, frozen=True):
    """An address and the protocols served there; port 0 chooses a free port.

    Where several protocols have the same path, a request gets the one that its header
    ``x-interlingua-protocol`` names (if ``protocol_header`` is set), that of its API key, that of
    its model, or else the first in the list.
    """

    address: ListenAddress
    protocols: Annotated[tuple[ListenerProtocolConfig, ...], Meta(min_length=1)]
    protocol_header: bool = False
    tls: TlsConfig | None = None
    http_server: Literal["native", "aiohttp"] = "native"
    """The HTTP server: the gateway's own, or aiohttp's, which is the reference in tests."""
    default_model: NonEmptyStr | None = None
    """The model whose workers get images, audio and moderations that name no model."""
    cors: CorsConfig | None = None
    """Without it, browsers let no page of another origin use the listener."""


class AdminConfig(ConfigSection, frozen=True):
    """The admin listener. ``sha256`` is the digest of its key, required beyond loopback.

    It has limits of its own: 64 connections, and requests of at most 64 KiB.
    """

    address: ListenAddress
    sha256: Sha256Digest | None = None
    key_for: Literal["all", "changes"] = "all"
    """What needs the key: all requests except health checks, or only those that change something
    (workers, reload, drain, cancel), which is possible on loopback addresses."""


class ApiKeyConfig(ConfigSection, frozen=True, gc=False):
    """An API key, stored as its SHA-256. ``models`` are those that it may use; None means all."""

    name: Name
    sha256: Sha256Digest
    models: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    protocol: NonEmptyStr | None = None
    """The protocol of its requests where several protocols have the same path."""
    tags: tuple[Name, ...] = ()
    """Tags by which routes match groups of keys."""
    explain: bool = False
    """Whether ``x-interlingua-explain: 1`` is allowed, which explains how a request is routed."""
    limits: KeyRateLimitConfig | None = None
    """Replaces ``defaults.limits`` entirely."""


# --- backends ------------------------------------------------------------------------------------


class DefaultsConfig(ConfigSection, frozen=True):
    """Defaults of pools, models and keys.

    ``limits`` apply to each key that has none of its own and to each token's client; without keys
    and tokens they apply to all clients together.
    """

    timeouts: Timeouts = Timeouts()
    retries: RetrySettings = RetrySettings()
    on_loss: OnLoss = "report"
    limits: KeyRateLimitConfig | None = None


class EchoConfig(BackendSettings, frozen=True, tag="echo"):
    """Responds without a model: with the chunks of ``script``, or with the prompt itself."""

    script: tuple[str, ...] = ()
    delay: Duration = 0.0
    context: TokenCount | None = None
    fail: ScriptedFailure | None = None


BackendConfig = EchoConfig | TorchSettings | PoolSettings


# --- models --------------------------------------------------------------------------------------


class TargetConfig(ConfigSection, frozen=True):
    """A backend, and that backend's name for the model (None: the public one)."""

    backend: NonEmptyStr
    model: NonEmptyStr | None = None


class TrafficSplitConfig(ConfigSection, frozen=True, kw_only=True):
    """How the traffic is split between versions.

    The first of ``sticky`` that a request has assigns it to a version, always the same one; a
    request without any is assigned at random. Splits with the same ``name`` (by default the
    model's) assign the same users to the same versions, in every gateway.
    """

    name: Name | None = None
    weights: Annotated[Mapping[Name, Weight], Meta(min_length=1)]
    sticky: Annotated[tuple[StickySource, ...], Meta(min_length=1)] | None = None


class ShadowConfig(ConfigSection, frozen=True, kw_only=True):
    """Shadow traffic: a share of a model's requests is mirrored, and the responses are discarded.

    ``to`` is a version of the model, or another model. At most ``max_concurrency`` copies run at a
    time, and further ones are dropped. ``timeout`` limits the whole response to a copy.
    """

    to: NonEmptyStr
    share: Share
    max_concurrency: PositiveInt = 4
    timeout: Duration = 60.0


class ModelLimitsConfig(ConfigSection, frozen=True):
    """In tokens: ``context`` limits prompt and response together, ``max_tokens`` the response."""

    context: TokenCount | None = None
    max_tokens: TokenCount | None = None


class ModelDefaultsConfig(ConfigSection, frozen=True):
    """Defaults of parameters that a request does not set. A protocol's own defaults come first."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    max_tokens: TokenCount | None = None


class ModelConfig(ConfigSection, frozen=True):
    """A public model: one target, or named versions and how the traffic is split between them.

    Without a split, the highest numbered version gets all the traffic; clients can still name the
    others. Options of a single protocol stand under that protocol's name.

    A model whose name ends with ``*``, such as ``openai/*``, serves every name with this beginning
    that no other model has; the longest beginning counts. In ``model``, ``*`` is the rest of the
    requested name. The model ``*`` serves all names, which its workers get as they are.
    """

    extra_field: ClassVar[str] = "options"
    extra_keys: ClassVar[frozenset[str]] = frozenset(PROTOCOLS)

    aliases: tuple[ModelAlias, ...] = ()
    backend: NonEmptyStr | None = None
    model: NonEmptyStr | None = None
    versions: Annotated[Mapping[Name, TargetConfig], Meta(min_length=1)] | None = None
    split: TrafficSplitConfig | None = None
    task: ModelTask = "chat"
    limits: ModelLimitsConfig = ModelLimitsConfig()
    defaults: ModelDefaultsConfig = ModelDefaultsConfig()
    on_loss: OnLoss | None = None
    protocol: NonEmptyStr | None = None
    """The protocol of its requests where several protocols have the same path."""
    fallback: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    """Fallbacks if the target fails: versions of this model or other models, in this order. A
    request that pins a version has no fallback."""
    fallback_requires_access: bool = False
    """Whether to skip fallback models that the request's API key or token may not use."""
    shadow: ShadowConfig | None = None
    options: Mapping[str, Mapping[str, OptionValue]] = {}

    def resolve_targets(self) -> Mapping[str, TargetConfig]:
        """The target of each version, by the version's name; a single target is version 1."""
        if self.versions is not None:
            return self.versions
        assert self.backend is not None  # noqa: S101 - the loader refuses a model without a target
        return {"1": TargetConfig(backend=self.backend, model=self.model)}

    def resolve_weights(self) -> Mapping[str, int]:
        """Each version's weight; without a split, one version has them all."""
        if self.split is not None:
            return self.split.weights
        targets = self.resolve_targets()
        numbers = [name for name in targets if is_numeric_version(name)]
        return {max(numbers, key=int) if numbers else next(iter(targets)): 1}


def map_model_names(models: Mapping[str, ModelConfig | UnsetType]) -> dict[str, str]:
    """The model of each name that a request may use: models' own names, and their aliases.

    Models and aliases that could not be read (UNSET) are left out.
    """
    names = {name: name for name in models}
    for name, model in models.items():
        for alias in (model.aliases or ()) if isinstance(model, ModelConfig) else ():
            if alias:
                names.setdefault(alias, name)
    return names


def is_numeric_version(version: str) -> bool:
    """Whether a version's name is a number."""
    return version.isascii() and version.isdigit()


# --- routes --------------------------------------------------------------------------------------


class RouteMatchConfig(ConfigSection, frozen=True):
    """The conditions of a route; all of them must match. A condition that is left out matches.

    ``header`` and ``body`` list headers and top-level fields of the body with the values that they
    must have. ``tag`` is one of the key's tags. ``share`` selects a share of the matching requests;
    if the model's split is sticky, the same users each time.
    """

    model: NonEmptyStr | None = None
    protocol: NonEmptyStr | None = None
    header: Mapping[HeaderName, NonEmptyStr] = {}
    body: Mapping[NonEmptyStr, OptionValue] = {}
    key: NonEmptyStr | None = None
    tag: NonEmptyStr | None = None
    share: Share | None = None


class RouteTargetConfig(ConfigSection, frozen=True):
    """The target of a route: another model, a version, or a version of another model."""

    model: NonEmptyStr | None = None
    version: NonEmptyStr | None = None


class RouteConfig(ConfigSection, frozen=True, kw_only=True):
    """A route. The first one that matches decides, before the model's split.

    A version that the client pinned is kept.
    """

    name: Name
    when: RouteMatchConfig = RouteMatchConfig()
    to: RouteTargetConfig


# --- observability -------------------------------------------------------------------------------


class AccessLogConfig(ConfigSection, frozen=True):
    """The access log: a line on standard error at the end of each request.

    ``buffer`` is how many lines may wait to be written; further ones are dropped and counted.
    """

    format: Literal["json", "off"] = "json"
    buffer: PositiveInt = 10_000


class UsageConfig(ConfigSection, frozen=True):
    """Usage accounting: a row for each request that reached a model, in SQLite or PostgreSQL.

    The file, or the table ``interlingua_usage``, is created if it does not exist;
    ``interlingua usage`` summarizes it. ``postgres`` is a URL, which may contain a password and is
    never shown: postgresql://USER@HOST/DATABASE. Rows older than ``retention`` are removed.
    """

    shorthand_field: ClassVar[str] = "sqlite"

    sqlite: OutputPath | None = None
    postgres: Secret | None = None
    retention: Retention = 90 * 86400


class ObservabilityConfig(ConfigSection, frozen=True):
    """What is recorded of requests: never a prompt, a response or a key."""

    access_log: AccessLogConfig = AccessLogConfig()
    usage: UsageConfig | None = None
    traces: TracingConfig | None = None
    metrics: MetricsConfig = MetricsConfig()


class Config(ConfigSection, frozen=True, kw_only=True):
    """The whole file.

    ``keys_file`` names a file of further keys, for many of them: one JSON object a line, with the
    fields of ``keys``. It is reloaded when it changes.
    """

    version: Literal[1] = 1
    listeners: Annotated[tuple[ListenerConfig, ...], Meta(min_length=1)] = ()
    admin: AdminConfig | None = None
    limits: ServerLimitsConfig = ServerLimitsConfig()
    defaults: DefaultsConfig = DefaultsConfig()
    backends: Annotated[Mapping[Name, BackendConfig], Meta(min_length=1)]
    models: Annotated[Mapping[ModelName, ModelConfig], Meta(min_length=1)]
    routes: tuple[RouteConfig, ...] = ()
    keys: tuple[ApiKeyConfig, ...] = ()
    keys_file: FilePath | None = None
    identity: JwtConfig | None = None
    state: SharedStateConfig | None = None
    observe: ObservabilityConfig = ObservabilityConfig()
