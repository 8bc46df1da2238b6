"""The sections of the configuration file, as Structs. A key that is not a field here is an error.

Some classes describe how they are written: ``shorthand_field`` is the field that a lone scalar
sets (if it is a URL, ``shorthand_url_field``, where there is one), ``extra_field`` the field that
collects the other keys (only ``extra_keys``, if the class has them), and ``implied_by`` the key
that makes ``kind`` unnecessary. The settings of a backend are defined in the backend.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import astuple

from backends.echo import DEFAULT_TURN, ScriptedFailure, ScriptedTurn
from backends.interfaces import BackendSettings, ModelTimeouts, Timeouts
from backends.log_format import LogFormatChoice
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
    IpNetwork,
    ItemCount,
    ListenAddress,
    ModelAlias,
    ModelName,
    Name,
    NonEmptyStr,
    OptionValue,
    OutputFolder,
    OutputPath,
    PathPrefix,
    PositiveInt,
    Rate,
    RateValue,
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
    """Rate limits; a limit that is left out does not apply."""

    requests: Rate | None = None
    """Requests per period."""
    tokens: Rate | None = None
    """Prompt and completion tokens per period."""
    concurrent: PositiveInt | None = None
    """The number of requests at a time; at a local model, of choices."""
    budget: Budget | None = None
    """Prompt and completion tokens per day, from 00:00 UTC."""


class KeyRateLimitConfig(RateLimitConfig, frozen=True):
    """Rate limits of a key for all models together, and of single models."""

    models: Annotated[Mapping[NonEmptyStr, RateLimitConfig], Meta(min_length=1)] | None = None
    """Additional limits for single models, by the model's name."""


# Server limits.


class ServerLimitsConfig(ConfigSection, frozen=True):
    """Limits of the server, so that no client can take all of its memory or connections.

    On SIGTERM the gateway reports that it is not ready, closes each connection after its response,
    and keeps serving for ``shutdown_delay``. Then it accepts no more requests, and running ones
    have ``drain_timeout`` to finish.
    """

    body: Size = 32 << 20
    """The largest body of a request; a larger one gets status 413. Stored responses and items that
    it refers to count as often as it names them."""
    body_objects: ItemCount = 20_000
    """The most JSON objects (messages, parts, schemas) of a body; with more it gets status 413."""
    body_values: ItemCount = 1_000_000
    """The most values in the arrays and objects of a JSON body, such as token ids; with more it
    gets status 413."""
    header: Size = 16 << 10
    """The largest head of a request: its request line and headers."""
    memory: Size = 512 << 20
    """Memory for clients, all together: bodies of requests (those of 256 KiB and more count three
    times: as read, decoded, and as sent to the worker) and the stored responses that they refer to,
    responses that clients do not read, recordings until they are written, and connections. Beyond
    that, the slowest clients are disconnected, and requests get status 503."""
    connections: PositiveInt = 10_000
    """Limit of client connections of each listener, at most half of the process's limit of open
    files, since each may need one to a worker. At the limit, a new connection closes the one that
    has been idle longest, or else the one with the slowest body."""
    connections_per_address: PositiveInt | None = None
    """Limit of connections of one client address to a listener. By default it is half of
    ``connections``, and loopback addresses are exempt, since local proxies connect from there."""
    tls_handshake_timeout: Timeout = 5.0
    """The time limit for a TLS handshake."""
    header_timeout: Timeout = 10.0
    """The time limit for the head of a request."""
    body_timeout: Timeout = 10.0
    """The longest pause in the body of a request."""
    body_total_timeout: Timeout = 300.0
    """The time limit for the whole body of a request."""
    min_body_rate: PositiveInt = 512
    """The slowest rate of a body after its first 20 seconds, in bytes per second."""
    idle_timeout: Timeout = 75.0
    """How long a connection may wait for its next request."""
    shutdown_delay: Duration = 5.0
    """How long the gateway keeps serving after SIGTERM, so that load balancers notice."""
    drain_timeout: Duration = 60.0
    """How long running requests may take to finish at shutdown, and clients to read their
    responses, after ``shutdown_delay``."""
    model_memory: Size | None = None
    """Memory for all local models with ``keep_alive`` together. A model that does not fit beside
    the others has the one unloaded that was used least recently. By default there is no limit."""
    warmup_timeout: Duration = 120.0
    """How long a reload waits for a new backend, such as for a model to be loaded."""


# JSON Web Tokens.

JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class JwtClaimsConfig(ConfigSection, frozen=True):
    """Names of the claims to read. A dotted name refers to a nested claim."""

    name: NonEmptyStr = "sub"
    """The claim that identifies the client; logs and usage show it as ``jwt:NAME``."""
    models: NonEmptyStr | None = None
    """The claim with the models that the client may use, as a list or a space-separated string
    (``*``: all models). If this is set and a token has no such claim, the client may use none; by
    default it may use all."""
    tags: NonEmptyStr | None = None
    """The claim with the client's tags, by which routes match groups of clients."""


class JwtConfig(ConfigSection, frozen=True, kw_only=True):
    """Authentication by JSON Web Tokens of one issuer, in addition to API keys."""

    issuer: NonEmptyStr
    """The issuer that tokens must name (``iss``); a URL, unless ``jwks`` is set."""
    audience: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)]
    """The accepted audiences; a token must name one of them (``aud``)."""
    jwks: NonEmptyStr | None = None
    """The URL of the issuer's public keys. By default, ``/.well-known/openid-configuration`` below
    ``issuer`` names it."""
    algorithms: Annotated[tuple[JwtAlgorithm, ...], Meta(min_length=1)] = ("RS256", "ES256")
    """The accepted signature algorithms."""
    leeway: Duration = 30.0
    """The tolerated difference between the clocks of the gateway and the issuer."""
    jwks_max_stale: Timeout = 86400.0
    """How long the last keys stay valid while the issuer is unreachable."""
    feedback: bool = False
    """Whether clients with a token may send feedback on their own requests."""
    claims: JwtClaimsConfig = JwtClaimsConfig()
    """The names of the claims to read."""
    tls: ClientTlsSettings | None = None
    """The CA certificates that verify the issuer; by default the system's."""


# State that several gateways share.


StoreFailurePolicy = Literal["local", "open", "closed"]


class SharedStateConfig(ConfigSection, frozen=True):
    """A Redis server that holds the rate limits and rollouts of several gateways."""

    redis: Secret
    """The server's URL, which may contain a password and is never shown: redis://HOST:6379/0, with
    TLS rediss://, for a local socket unix:///PATH."""
    on_failure: StoreFailurePolicy = "local"
    """What happens while Redis is unreachable: each gateway applies its share of every limit
    (``local``), admits all requests (``open``), or rejects all that have a limit (``closed``)."""
    replicas: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """The number of gateways, by which ``local`` divides the limits."""
    prefix: Name = "interlingua"
    """Starts the names of all Redis keys: gateways with the same prefix share their limits."""
    tls: ClientTlsSettings | None = None
    """The CA certificates that verify the server; by default the system's."""


# Stored responses.


class ResponseStoreConfig(ConfigSection, frozen=True):
    """Where responses are stored that later requests may refer to by id.

    Without ``sqlite`` and ``redis``, each serving process keeps them in its memory. Each API key
    sees its own responses only, of which the newest are kept.
    """

    enabled: bool = True
    """Whether responses are stored."""
    sqlite: OutputPath | None = None
    """A SQLite file, which the processes of one machine share."""
    redis: Secret | None = None
    """The URL of a Redis server, which several gateways may share. It may contain a password and is
    never shown."""
    tls: ClientTlsSettings | None = None
    """The CA certificates that verify the Redis server; by default the system's."""
    prefix: Name = "interlingua-responses"
    """Starts the names of all Redis keys."""
    retention: Retention = 86400
    """How long a response is kept."""
    responses_per_key: PositiveInt = 1000
    """How many responses of an API key are kept."""
    bytes_per_key: Size = 64 << 20
    """The size of the responses of an API key that are kept."""
    memory: Size = 256 << 20
    """The size of all responses that a process keeps in its memory."""


# Recordings.

BuiltInPattern = Literal[
    "email", "phone", "credit_card", "api_key", "password", "bearer", "jwt", "private_key"
]


class RedactionConfig(ConfigSection, frozen=True):
    """What is replaced in recordings by ``[redacted:NAME]``, before anything is written.

    It applies to every string of requests and responses. Base64 data is replaced by its size and
    digest, always. Of streams only the times and sizes of their pieces are written, since a secret
    may be split between two of them.
    """

    builtin: tuple[BuiltInPattern, ...] = (
        "email",
        "phone",
        "credit_card",
        "api_key",
        "password",
        "bearer",
        "jwt",
        "private_key",
    )
    """The built-in patterns that are searched for; by default all."""
    fields: tuple[NonEmptyStr, ...] = ()
    """Fields of the JSON body whose values are replaced: by name, at any depth (``password``), or
    by their path from the top, in which ``*`` is any field or element (``messages.*.name``). A
    name for the text of a response, such as ``content``, also hides the recorded answer's."""
    patterns: Mapping[Name, NonEmptyStr] = {}
    """Further regular expressions, by the name that replaces what they find. Of Python's syntax."""


class RecordConfig(ConfigSection, frozen=True, kw_only=True):
    """Records requests with their responses, as JSON lines that replays and comparisons read.

    Writing never delays a response: what can't be written in time is dropped and counted. The files
    can be read by their owner only.
    """

    shorthand_field: ClassVar[str] = "to"

    to: OutputFolder
    """The folder for the files, which is created if it does not exist."""
    share: Share = 1.0
    """The share of the requests that is recorded, also of those that fail."""
    bodies: Literal["redacted", "full", "none"] = "redacted"
    """What is recorded of prompts and responses: their text without personal data and secrets
    (``redacted``, see ``redact``), all of it (``full``), or nothing (``none``)."""
    redact: RedactionConfig = RedactionConfig()
    """What is replaced if bodies are ``redacted``."""
    retention: Retention = 7 * 86400
    """The age at which files are removed."""
    size: Size = 1 << 30
    """The size of the folder at which its oldest files are removed."""


# Traces and metrics.


class CollectorAuthConfig(ConfigSection, frozen=True):
    """Credentials that are sent to a collector."""

    bearer: Secret
    """A token that is sent in the header ``Authorization``."""


class TracingConfig(ConfigSection, frozen=True):
    """Spans of requests, exported by OTLP over HTTP; they never contain a prompt or a response."""

    shorthand_field: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    """The collector's base URL, without ``/v1/traces``."""
    sample: Share = 0.05
    """The share of requests that is traced."""
    trust: bool = False
    """Whether a client's trace context becomes the parent, and its sampling decision applies. By
    default it is only added as a link."""
    auth: CollectorAuthConfig | None = None
    """Credentials for the collector; by default none."""
    headers: Mapping[HeaderName, Secret] = {}
    """Headers of each request to the collector."""
    buffer: PositiveInt = 10_000
    """How many requests may wait for the export; further ones are dropped and counted."""


class OtlpMetricsConfig(ConfigSection, frozen=True):
    """Metrics of OpenTelemetry's conventions for generative AI, exported by OTLP over HTTP."""

    shorthand_field: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    """The collector's base URL, without ``/v1/metrics``."""
    interval: Timeout = 60.0
    """The time between two exports."""
    auth: CollectorAuthConfig | None = None
    """Credentials for the collector; by default none."""
    headers: Mapping[HeaderName, Secret] = {}
    """Headers of each request to the collector."""


class MetricsConfig(ConfigSection, frozen=True):
    """Prometheus metrics, served by the admin listener under ``/metrics``."""

    vllm_compat: bool = False
    """Whether to add vLLM's metric names, so that tools made for vLLM can read them."""
    push: OtlpMetricsConfig | None = None
    """A collector to which some of the metrics are exported; by default none."""


OnLoss = Literal["report", "reject", "ignore"]
UnsupportedContent = Literal["refuse", "report"]


# --- listeners -----------------------------------------------------------------------------------


class TlsConfig(ConfigSection, frozen=True):
    """A listener's certificate and key."""

    cert: FilePath
    """The certificate chain, in PEM."""
    key: FilePath
    """The private key, in PEM and without a password."""


class CorsConfig(ConfigSection, frozen=True):
    """Pages of other origins that may use the listener in a browser (CORS)."""

    origins: Annotated[tuple[CorsOrigin, ...], Meta(min_length=1)]
    """The origins, as browsers send them: https://app.example. One label of the host, or the port,
    may be ``*``: https://*.example.org, http://localhost:*. The origin ``*`` is every one."""
    headers: tuple[HeaderName, ...] = ()
    """Request headers that pages may send beside those of the protocols' clients; ``*`` is every
    one."""
    max_age: Duration = 600.0
    """How long browsers keep the permission."""


class ListenerProtocolConfig(ConfigSection, frozen=True):
    """A protocol on a listener. The protocol's own options stand beside ``name``."""

    shorthand_field: ClassVar[str] = "name"
    extra_field: ClassVar[str] = "options"

    name: NonEmptyStr
    """The protocol's name, such as ``openai`` or ``triton``."""
    profile: NonEmptyStr | None = None
    """A release or flavour of the protocol; by default the protocol's first one."""
    prefix: PathPrefix = ""
    """A path before the protocol's own paths, such as ``/mindie``; by default none."""
    keep_alive: bool = False
    """Whether to keep connections after a response also if the protocol's own server closes them,
    as MindIE does after responses that are not streamed."""
    options: Mapping[str, OptionValue] = {}
    """Options of the protocol."""


class ListenerConfig(ConfigSection, frozen=True):
    """An address and the protocols served there.

    Where several protocols have the same path, a request gets the one that its header
    ``x-interlingua-protocol`` names (if ``protocol_header`` is set), that of its API key, that of
    its model, or else the first in the list.
    """

    address: ListenAddress
    """The address to listen on; port 0 chooses a free port."""
    protocols: Annotated[tuple[ListenerProtocolConfig, ...], Meta(min_length=1)]
    """The protocols that are served."""
    protocol_header: bool = False
    """Whether the header ``x-interlingua-protocol`` of a request may choose the protocol."""
    tls: TlsConfig | None = None
    """The certificate and key for HTTPS; without them the listener speaks plain HTTP."""
    trusted_proxies: tuple[IpNetwork, ...] = ()
    """Networks of proxies, such as ``10.0.0.0/8``, whose ``forwarded_header`` names the client. By
    default no header does. The nearest address that is not of such a proxy is the client's: in the
    log, in sticky assignments, and with ``proxy_protocol`` for the limits of connections."""
    forwarded_header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    """The header in which ``trusted_proxies`` name the client; they must set it or add to it."""
    proxy_protocol: Literal["v2"] | None = None
    """Requires that each connection comes from ``trusted_proxies`` and begins with a header of the
    PROXY protocol, version 2, before TLS and HTTP."""
    default_model: NonEmptyStr | None = None
    """The model whose workers get images, audio and moderations that name no model."""
    cors: CorsConfig | None = None
    """Which pages of other origins may use the listener; by default browsers let none, and without
    keys their requests get status 403."""
    allowed_hosts: tuple[NonEmptyStr, ...] = ()
    """Names that the header ``Host`` may have beside this machine's (``localhost``, loopback
    addresses) on a loopback address without keys, such as that of a proxy on this machine; others
    get status 403, since a web page may stand behind them. ``*`` is every name."""


class AdminConfig(ConfigSection, frozen=True):
    """The admin listener: metrics, health, status and control of the gateway.

    It has limits of its own: 64 connections, and requests of at most 64 KiB.
    """

    address: ListenAddress
    """The address to listen on; port 0 chooses a free port."""
    sha256: Sha256Digest | None = None
    """The SHA-256 digest of the admin key, required beyond loopback addresses."""
    key_for: Literal["all", "changes"] = "all"
    """What needs the key: all requests except health checks, or only those that change something
    (workers, reload, drain, cancel), which is possible on loopback addresses."""


class ApiKeyConfig(ConfigSection, frozen=True, gc=False):
    """An API key, stored as its digest."""

    name: Name
    """The name that logs, usage and routes have for the key."""
    sha256: Sha256Digest
    """The SHA-256 digest of the key, as ``interlingua keys new`` prints it."""
    models: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    """The models that the key may use; by default all.

    With a list, nothing else in a request may name a model for the worker, such as a hosted tool's
    ``model`` or a LoRA adapter, but models of the list that their workers call by the same name.
    """
    protocol: NonEmptyStr | None = None
    """The protocol of its requests where several protocols have the same path."""
    tags: tuple[Name, ...] = ()
    """Tags by which routes match groups of keys."""
    explain: bool = False
    """Whether ``x-interlingua-explain: 1`` is allowed, which explains how a request is routed."""
    limits: KeyRateLimitConfig | None = None
    """Rate limits of the key; they replace ``defaults.limits`` entirely."""
    feedback: bool = False
    """Whether the key may send feedback on the responses to its own requests."""
    feedback_on_all_keys: bool = False
    """Whether the key may also send feedback on the requests of other keys, as a service does that
    collects it for all applications."""


# --- backends ------------------------------------------------------------------------------------


class DefaultsConfig(ConfigSection, frozen=True):
    """Defaults of pools, models and keys."""

    timeouts: Timeouts = Timeouts()
    """Time limits of pools that have none of their own."""
    retries: RetrySettings = RetrySettings()
    """Retries of pools that have none of their own."""
    on_loss: OnLoss = "report"
    """What happens to a request with a parameter that its target does not support: it is served and
    the parameter reported in the header ``x-interlingua-loss`` (``report``), it gets status 400
    (``reject``), or it is served without a report (``ignore``)."""
    unsupported_content: UnsupportedContent = "refuse"
    """What happens to a request with images, audio, videos or files that its target can't see: it
    gets status 400 (``refuse``), or it is served without them and ``on_loss`` applies
    (``report``)."""
    stream_usage: bool = True
    """Whether workers are asked for the usage of each stream, for budgets, usage rows and metrics.
    A client that did not ask for it does not get it. ``false`` changes nothing in a request that is
    passed through, and estimates the usage that no worker reports."""
    limits: KeyRateLimitConfig | None = None
    """Rate limits of each key that has none of its own, and of each token's client. Without keys
    and tokens they apply to all clients together."""
    record: RecordConfig | None = None
    """Recording of the requests of each model that has none of its own; by default none."""


class EchoConfig(BackendSettings, frozen=True, tag="echo"):
    """Responds without a model, for tests and trials."""

    script: tuple[str, ...] = ()
    """The chunks of each response, one token each; without them, the response is the prompt."""
    delay: Duration = 0.0
    """The pause before each chunk."""
    context: TokenCount | None = None
    """Limit of a prompt's words, which count as its tokens; by default none."""
    fail: ScriptedFailure | None = None
    """A simulated failure of each request; by default none."""
    turn: ScriptedTurn = DEFAULT_TURN
    """What each response holds beside its text."""


BackendConfig = EchoConfig | TorchSettings | PoolSettings


# --- models --------------------------------------------------------------------------------------


class TargetConfig(ConfigSection, frozen=True):
    """The target of a version."""

    backend: NonEmptyStr
    """The backend's name."""
    model: NonEmptyStr | None = None
    """The backend's name for the model; by default the public name."""


class TrafficSplitConfig(ConfigSection, frozen=True, kw_only=True):
    """How the traffic is split between versions."""

    name: Name | None = None
    """Splits with the same name, by default the model's, assign the same users to the same
    versions, in every gateway."""
    weights: Annotated[Mapping[Name, Weight], Meta(min_length=1)]
    """Each version's weight, as whole numbers or percentages."""
    sticky: Annotated[tuple[StickySource, ...], Meta(min_length=1)] | None = None
    """Sources of the user's identity. The first one that a request has assigns it to a version,
    always the same one; a request without any, as by default, is assigned at random."""


class RolloutStepConfig(ConfigSection, frozen=True):
    """What a step of a rollout needs before the next one."""

    requests: PositiveInt = 200
    """The least number of requests to the version in the step."""
    time: Duration = 600.0
    """How long the step lasts at least."""


class IncreaseConfig(ConfigSection, frozen=True, kw_only=True):
    """How much higher than the other versions' a measure may be."""

    max_increase: Share
    """Of errors, in points of the share of failed requests; of a time or tokens, relative to the
    others'."""


class DecreaseConfig(ConfigSection, frozen=True, kw_only=True):
    """How much lower than the other versions' a share of feedback may be."""

    max_decrease: Share
    """In points of the share."""


class CompareGuardrailsConfig(ConfigSection, frozen=True):
    """Shares of good responses, as ``interlingua compare`` measures them; of those that apply."""

    json_valid: DecreaseConfig | None = None
    """The text is JSON, where the request requires that."""
    tool_calls: DecreaseConfig | None = None
    """The model calls a tool, where the request has some."""
    tool_arguments: DecreaseConfig | None = None
    """The arguments of all calls fit the schemas of the request's tools."""
    stop_strings: DecreaseConfig | None = None
    """The text has none of the request's stop strings."""
    not_truncated: DecreaseConfig | None = None
    """No choice ends at the limit of tokens."""
    not_refused: DecreaseConfig | None = None
    """The text does not begin as a refusal, in English, and is not marked as one."""
    not_empty: DecreaseConfig | None = None
    """There is text or a tool call."""

    def list_limits(self) -> Mapping[str, DecreaseConfig]:
        """The guardrails that are set, by the name of their measure."""
        limits = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: limit for name, limit in limits if limit is not None}


class GuardrailsConfig(ConfigSection, frozen=True):
    """What must not get worse. A guardrail is breached once that is known with certainty."""

    errors: IncreaseConfig | None = None
    """The share of requests that fail, other than by the client's fault; with those that a fallback
    then answers."""
    first_token_p50: IncreaseConfig | None = None
    """The median of the time to the first token: it shows a slower version soonest."""
    first_token_p95: IncreaseConfig | None = None
    """The 95th percentile of the time to the first token of streams."""
    duration_p50: IncreaseConfig | None = None
    """The median of the time that successful requests take."""
    duration_p95: IncreaseConfig | None = None
    """Their 95th percentile."""
    completion_tokens_p50: IncreaseConfig | None = None
    """The median of the tokens of successful responses, which are paid for."""
    completion_tokens_p95: IncreaseConfig | None = None
    """Their 95th percentile."""
    feedback: Mapping[Name, DecreaseConfig] = {}
    """Feedback by its name: booleans, or numbers from 0 to 1."""
    compare: CompareGuardrailsConfig = CompareGuardrailsConfig()
    """What the gateway measures of complete responses."""

    def list_quantiles(self) -> Mapping[str, IncreaseConfig]:
        """The guardrails of quantiles that are set, by their names: COLUMN_pPERCENT."""
        names = (name for name in self.__struct_fields__ if name.endswith(("_p50", "_p95")))
        limits = ((name, getattr(self, name)) for name in names)
        return {name: limit for name, limit in limits if limit is not None}


class RolloutConfig(ConfigSection, frozen=True, kw_only=True):
    """A guarded rollout: the gateway raises a version's share step by step, or goes back.

    It needs a ``split`` with the other versions, and ``observe.usage``. All gateways and processes
    share its state: in PostgreSQL, if the usage rows are there; else in the Redis server of
    ``state``; else in the SQLite file of the usage rows. ``interlingua rollout`` shows and steers
    it.
    """

    to: Name
    """The version that is rolled out."""
    steps: Annotated[tuple[PositiveInt, ...], Meta(min_length=1)] = (1, 5, 25, 100)
    """Its share of the split in each step, in percent, rising. At 100 the rollout is complete; a
    last step below 100 is held at its share, and its guardrails are still checked."""
    start_with: Literal["split", "shadow"] = "split"
    """``shadow``: before the first step, the model's ``shadow`` traffic to the version decides: its
    responses count instead of requests of the split, of which the version gets none."""
    step_at_least: RolloutStepConfig = RolloutStepConfig()
    """What a step needs before the next one."""
    step_at_most: Duration = 86400.0
    """A step that lasts longer holds, with its share."""
    guardrails: GuardrailsConfig = GuardrailsConfig()
    """What must not get worse."""
    require: Literal["no_breach", "proof"] = "no_breach"
    """What ends a step: that no guardrail is breached, or that it is proven of each that the
    version is not worse than it may be. Feedback of users counts only once they get the version:
    copies of requests have none but that of a judge."""
    on_breach: Literal["rollback", "hold"] = "rollback"
    """Whether a breach sends no more requests to the version, or keeps the share."""
    webhook: Secret | None = None
    """A URL to which each move is posted as JSON: a new step, a rollback, a command. It is never
    shown. One gateway posts it, at most three times within 30 s; requests don't wait for it."""
    check_every: Duration = 10.0
    """How often the guardrails are checked, and the split follows the shared state; at least 1s."""


JUDGE_FEEDBACK: Final = "judge"
"""The name of the feedback of a judge; clients can't send it."""


class JudgeConfig(ConfigSection, frozen=True, kw_only=True):
    """A model that judges answers by a rubric. Its verdicts are feedback of the name ``judge``.

    It needs ``observe.feedback``. A rollout takes them as evidence only if its guardrails name
    them: ``feedback: {judge: {max_decrease: 5%}}``.
    """

    model: NonEmptyStr
    """The model that judges: another one of this file. Its workers get the last text of each judged
    request, and the answer."""
    rubric: Annotated[str, Meta(min_length=1, max_length=65536)]
    """What makes an answer good."""
    share: Share = 1.0
    """The share of the answers that is judged."""
    requests: Rate = RateValue(60, 60)
    """How many answers of each version each process has judged; further ones are not."""
    tokens: Rate = RateValue(1_000_000, 86400)
    """How many tokens that may take for each version, in prompts and verdicts."""
    timeout: Duration = 60.0
    """The time limit for a verdict."""


class ShadowConfig(ConfigSection, frozen=True, kw_only=True):
    """Shadow traffic: a share of a model's requests is mirrored; the responses are discarded."""

    to: NonEmptyStr
    """A version of the model, or another model."""
    share: Share
    """The share of the requests that is mirrored."""
    max_concurrency: PositiveInt = 4
    """How many copies run at a time; further ones are dropped."""
    timeout: Duration = 60.0
    """The time limit for the whole response to a copy."""


class ModelLimitsConfig(ConfigSection, frozen=True):
    """Limits of a model's requests, in tokens. Without them only the backend's own limits apply."""

    context: TokenCount | None = None
    """Limit of prompt and response together."""
    max_tokens: TokenCount | None = None
    """Limit of the response."""


class ModelDefaultsConfig(ConfigSection, frozen=True):
    """Defaults of parameters that a request does not set. A protocol's own defaults come first."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """The sampling temperature; 0 is greedy decoding."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Samples from the most likely tokens with this probability in total."""
    top_k: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Samples from this number of the most likely tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Excludes tokens below this share of the most likely token's probability."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Divides the scores of tokens that occurred before; 1 is no penalty."""
    max_tokens: TokenCount | None = None
    """Limit of the response, in tokens."""


class ModelConfig(ConfigSection, frozen=True):
    """A public model: one target, or named versions and how the traffic is split between them.

    A model whose name ends with ``*``, such as ``openai/*``, serves every name with this beginning
    that no other model has; the longest beginning counts. The model ``*`` serves all names, which
    its workers get as they are.
    """

    extra_field: ClassVar[str] = "options"
    extra_keys: ClassVar[frozenset[str]] = frozenset(PROTOCOLS)

    aliases: tuple[ModelAlias, ...] = ()
    """Other names of the model."""
    list_aliases: bool = True
    """Whether the listings of OpenAI, Azure OpenAI and Anthropic show the aliases, too."""
    backend: NonEmptyStr | None = None
    """The backend of a model with one target; a model has this or ``versions``."""
    model: NonEmptyStr | None = None
    """The backend's name for the model; by default the public name. In a model whose name ends with
    ``*``, ``*`` is the rest of the requested name."""
    versions: Annotated[Mapping[Name, TargetConfig], Meta(min_length=1)] | None = None
    """The target of each version, by the version's name."""
    split: TrafficSplitConfig | None = None
    """How the traffic is split between versions. By default the highest numbered one gets all of
    it; clients can still name the others."""
    task: ModelTask | None = None
    """What the model does; ``chat`` models serve text completions, too. By default that of its
    backend: of a local model the task that its files say, else ``chat``."""
    limits: ModelLimitsConfig = ModelLimitsConfig()
    """Limits of the model's requests, in tokens."""
    defaults: ModelDefaultsConfig = ModelDefaultsConfig()
    """Defaults of parameters that a request does not set."""
    on_loss: OnLoss | None = None
    """What happens to a request with an unsupported parameter; by default ``defaults.on_loss``."""
    timeouts: ModelTimeouts | None = None
    """Time limits of the model's streams; by default those of its backend."""
    unsupported_content: UnsupportedContent | None = None
    """What happens to a request with content that the target can't see; by default
    ``defaults.unsupported_content``."""
    protocol: NonEmptyStr | None = None
    """The protocol of the model's requests where several protocols have the same path."""
    fallback: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    """Fallbacks if the target fails: versions of this model or other models, in this order. A
    request that pins a version has no fallback."""
    fallback_requires_access: bool = False
    """Whether to skip fallback models that the request's API key or token may not use."""
    rollout: RolloutConfig | None = None
    """A guarded rollout of a version; by default none."""
    shadow: ShadowConfig | None = None
    """Shadow traffic to another version or model; by default none."""
    judge: JudgeConfig | None = None
    """A model that judges its answers; by default none."""
    record: RecordConfig | None = None
    """Recording of the model's requests; by default ``defaults.record``."""
    options: Mapping[str, Mapping[str, OptionValue]] = {}
    """Options of the model in this protocol."""

    def resolve_targets(self) -> Mapping[str, TargetConfig]:
        """The target of each version, by the version's name; a single target is version 1."""
        if self.versions is not None:
            return self.versions
        assert self.backend is not None  # noqa: S101 - the loader refuses a model without a target
        return {"1": TargetConfig(backend=self.backend, model=self.model)}

    def get_split_name(self, model: str) -> str:
        """The name of the split of this ``model``."""
        return model if self.split is None or self.split.name is None else self.split.name

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


def map_model_tasks(
    models: Mapping[str, ModelConfig | UnsetType], backends: Mapping[str, BackendConfig | UnsetType]
) -> dict[str, ModelTask]:
    """The task of each model: its own, else that of its backend, else ``chat``.

    Models that could not be read (UNSET) are left out.
    """
    tasks: dict[str, ModelTask] = {}
    for name, model in models.items():
        if isinstance(model, ModelConfig) and not isinstance(model.task, UnsetType):
            found = _list_backend_tasks(model, backends)
            tasks[name] = next(found, "chat") if model.task is None else model.task
    return tasks


def _list_backend_tasks(
    model: ModelConfig, backends: Mapping[str, BackendConfig | UnsetType]
) -> Iterator[ModelTask]:
    """The known tasks of a model's backends, as far as the configuration could be read."""
    targets = model.versions.values() if isinstance(model.versions, Mapping) else (model,)
    for target in targets:
        settings = backends.get(getattr(target, "backend", None) or "")
        if isinstance(settings, BackendSettings) and UNSET not in astuple(settings):
            task = settings.model_task
            if task is not None:
                yield task


def is_numeric_version(version: str) -> bool:
    """Whether a version's name is a number."""
    return version.isascii() and version.isdigit()


# --- routes --------------------------------------------------------------------------------------


class RouteMatchConfig(ConfigSection, frozen=True):
    """The conditions of a route; all of them must match. A condition that is left out matches."""

    model: NonEmptyStr | None = None
    """The model that the request names."""
    protocol: NonEmptyStr | None = None
    """The protocol of the request."""
    header: Mapping[HeaderName, NonEmptyStr] = {}
    """Headers with the values that they must have."""
    body: Mapping[NonEmptyStr, OptionValue] = {}
    """Top-level fields of the body with the values that they must have."""
    key: NonEmptyStr | None = None
    """The name of the request's API key."""
    tag: NonEmptyStr | None = None
    """One of the tags of the request's API key or token."""
    share: Share | None = None
    """Selects this share of the matching requests; if the model's split is sticky, the same users
    each time."""


class RouteTargetConfig(ConfigSection, frozen=True):
    """The target of a route: another model, a version, or a version of another model."""

    model: NonEmptyStr | None = None
    """The other model; by default the requested one."""
    version: NonEmptyStr | None = None
    """The version; by default the model's split decides."""


class RouteConfig(ConfigSection, frozen=True, kw_only=True):
    """A route. The first one that matches decides, before the model's split.

    A version that the client pinned is kept.
    """

    name: Name
    """The route's name in logs and explanations."""
    when: RouteMatchConfig = RouteMatchConfig()
    """The conditions; without any, the route matches all requests."""
    to: RouteTargetConfig
    """Where the matching requests go."""
    record: RecordConfig | None = None
    """Recording of the matching requests; by default that of the model they go to."""


# --- observability -------------------------------------------------------------------------------


class AccessLogConfig(ConfigSection, frozen=True):
    """The access log: a line on standard error at the end of each request."""

    format: Literal["auto", "text", "json", "off"] = "auto"
    """The format of a line: ``auto`` is that of ``log_format``, and ``off`` writes none."""
    buffer: PositiveInt = 10_000
    """How many lines may wait to be written; further ones are dropped and counted."""


class FeedbackConfig(ConfigSection, frozen=True):
    """Feedback of clients on responses: ``POST /v1/feedback`` on every listener.

    It is stored beside the rows of ``usage``, which it needs, and as long as they are. API keys and
    tokens need the right to send it. ``interlingua ab --outcome`` compares the versions by it.
    """

    requests: Rate = RateValue(600, 60)
    """How many judgements each API key or token may send; without keys, all clients together."""
    comment: Annotated[int, Meta(ge=0, le=10_000)] = 1000
    """The largest number of characters of a comment; 0 accepts none."""


class UsageConfig(ConfigSection, frozen=True):
    """Usage accounting: a row for each request that reached a model, in SQLite or PostgreSQL.

    ``interlingua usage`` summarizes it.
    """

    shorthand_field: ClassVar[str] = "sqlite"
    shorthand_url_field: ClassVar[str] = "postgres"

    sqlite: OutputPath | None = None
    """The SQLite file, which is created if it does not exist."""
    postgres: Secret | None = None
    """The URL of a PostgreSQL database, which may contain a password and is never shown:
    postgresql://USER@HOST/DATABASE. The table ``interlingua_usage`` is created there."""
    retention: Retention = 90 * 86400
    """The age at which rows are removed."""


class ObservabilityConfig(ConfigSection, frozen=True):
    """What is recorded of requests: never a prompt, a response or a key."""

    log_format: LogFormatChoice = "auto"
    """The format of all lines that ``interlingua serve`` writes to standard error: ``auto`` is text
    on a terminal, and JSON otherwise. The option ``--log-format`` overrides it."""
    access_log: AccessLogConfig = AccessLogConfig()
    """The access log."""
    usage: UsageConfig | None = None
    """Usage accounting; by default none."""
    feedback: FeedbackConfig | None = None
    """Feedback of clients on responses; by default none is accepted."""
    traces: TracingConfig | None = None
    """The export of spans; by default none."""
    metrics: MetricsConfig = MetricsConfig()
    """Prometheus metrics, and their export."""


class Config(ConfigSection, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal[1] = 1
    """The version of the configuration's format."""
    listeners: Annotated[tuple[ListenerConfig, ...], Meta(min_length=1)] = ()
    """The addresses for clients, and the protocols served there."""
    admin: AdminConfig | None = None
    """The admin listener; by default none."""
    limits: ServerLimitsConfig = ServerLimitsConfig()
    """Limits of the server."""
    health: Literal["serving", "strict"] = "serving"
    """What health checks report while a model can't be loaded, or is not loaded yet. ``serving``:
    success, and which models failed or are being loaded; while all of them are, status 503.
    ``strict``: status 503. Only ``/-/ready`` of ``admin`` fails if no backend is ready."""
    defaults: DefaultsConfig = DefaultsConfig()
    """Defaults of pools, models and keys."""
    backends: Annotated[Mapping[Name, BackendConfig], Meta(min_length=1)]
    """Pools of workers and local models, by name."""
    models: Annotated[Mapping[ModelName, ModelConfig], Meta(min_length=1)]
    """The public models, by name."""
    routes: tuple[RouteConfig, ...] = ()
    """Routes to other models or versions; the first one that matches decides."""
    keys: tuple[ApiKeyConfig, ...] = ()
    """The API keys. Without ``keys``, ``keys_file`` and ``identity``, clients need none."""
    keys_file: FilePath | None = None
    """A file of further keys, for many of them: one JSON object a line, with the fields of
    ``keys``. It is reloaded when it changes."""
    identity: JwtConfig | None = None
    """Authentication by JSON Web Tokens; by default none."""
    state: SharedStateConfig | None = None
    """A Redis server that holds the rate limits and rollouts of several gateways; by default each
    gateway has its own."""
    stored_responses: ResponseStoreConfig = ResponseStoreConfig()
    """Where responses are stored that later requests may refer to by id."""
    observe: ObservabilityConfig = ObservabilityConfig()
    """What is recorded of requests: access log, usage, traces and metrics."""
