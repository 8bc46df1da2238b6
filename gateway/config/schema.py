"""Every Struct that the file may hold. What is no field here is an error there.

Some classes say more of how they are written: ``short`` is the field that a lone scalar stands for,
``rest`` the field that takes the keys which are no field's (``rest_keys``, where not just any), and
``implied_by`` the key that makes ``kind`` needless.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import asdict

from gateway.config.types import (
    Budget,
    CollectorUrl,
    DeviceName,
    Duration,
    FilePath,
    HeaderName,
    HostPort,
    ListenAddress,
    ModelAlias,
    ModelName,
    Name,
    NameserverAddress,
    NonEmptyStr,
    OutputPath,
    PathPrefix,
    Rate,
    Retention,
    Secret,
    Sha256Digest,
    Share,
    Size,
    SrvName,
    StickySource,
    TemplatePath,
    Timeout,
    Weight,
    WeightsPath,
    WorkerUrl,
)
from protocols import PROTOCOLS

# What every part of the file is built on.

OptionValue = str | int | float | bool
"""What a dialect's own setting may be."""

PositiveInt = Annotated[int, Meta(ge=1, le=100_000)]


class ConfigSection(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the file."""


class BackendConfigBase(ConfigSection, frozen=True, tag_field="kind"):
    """What one backend is made from."""

    implied_by: ClassVar[str | None] = None

    @property
    def kind(self) -> str:
        """Its name in the registry of backends."""
        return str(self.__struct_config__.tag)


# What the file may say of a pool of workers.

RetryCondition = Literal["connect", "429", "500", "502", "503", "504", "before_first_token"]
_RETRY_CONDITIONS: tuple[RetryCondition, ...] = get_args(RetryCondition)


class TimeoutsConfig(ConfigSection, frozen=True):
    """Separate limits of an exchange, in seconds."""

    connect: Timeout = 2.0
    first_token: Timeout = 60.0
    idle: Timeout = 30.0
    total: Timeout = 600.0


class RetryConfig(ConfigSection, frozen=True):
    """Whether another worker is asked when one fails before its answer began.

    ``max`` is how many more may be asked, beside those that can't be reached. ``budget`` is the
    part of recent requests that may be asked again at all.
    """

    max: Annotated[int, Meta(ge=0, le=10)] = 1
    budget: Share = 0.2
    on: tuple[RetryCondition, ...] = _RETRY_CONDITIONS


class UpstreamAuthConfig(ConfigSection, frozen=True):
    """What a worker wants to be shown."""

    bearer: Secret


class WorkerSourceConfig(ConfigSection, frozen=True):
    """One process behind a URL, which is its base, without the dialect's path; or several.

    Several are told by DNS: by the addresses of a name (``dns``, as host:port) or by the places of
    a service (``srv``), or listed in a ``file``, of which each entry is written like one of these.
    They are looked for again ``every`` so often, and the last that were found are kept.
    """

    shorthand_field: ClassVar[str] = "url"

    url: WorkerUrl | None = None
    dns: HostPort | None = None
    srv: SrvName | None = None
    file: FilePath | None = None
    every: Timeout = 10.0
    scheme: Literal["http", "https"] = "http"
    nameserver: NameserverAddress | None = None
    """An address to ask in place of the system's nameservers."""
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    max_concurrency: PositiveInt | None = None
    auth: UpstreamAuthConfig | None = None


class QueueConfig(ConfigSection, frozen=True):
    """How many requests may wait for a worker with a free place, and how long."""

    max: Annotated[int, Meta(ge=0, le=100_000)] = 200
    wait: Duration = 10.0


class ClientTlsConfig(ConfigSection, frozen=True):
    """Who has signed the certificates of those who are asked, in PEM."""

    ca: FilePath


class HealthCheckConfig(ConfigSection, frozen=True):
    """Probes that are sent to each worker, and how a worker comes back.

    ``fall`` probes that fail in a row take a worker out, ``rise`` good ones bring it back; its
    share then grows to the whole within ``slow_start``. When fewer than ``panic`` of the workers
    are in, all are asked. ``path`` left out is the dialect's own.
    """

    path: NonEmptyStr | None = None
    every: Timeout = 5.0
    timeout: Timeout = 2.0
    fall: PositiveInt = 3
    rise: PositiveInt = 2
    slow_start: Duration = 30.0
    panic: Share = 0.3


class CircuitBreakerConfig(ConfigSection, frozen=True):
    """When requests that fail take a worker out.

    ``failures`` in a row do, or ``rate`` of those within ``window``, if they are at least
    ``least``: the first time for ``open``, then for twice as long.
    """

    failures: PositiveInt = 5
    rate: Share = 0.25
    least: PositiveInt = 20
    window: Timeout = 10.0
    open: Timeout = 15.0


class PoolConfig(BackendConfigBase, frozen=True, tag="pool"):
    """Workers that speak one dialect. ``timeouts`` and ``retries`` left out are the defaults'.

    ``max_concurrency`` holds for each worker that does not say its own, ``total_concurrency`` for
    all of them together. ``options`` are the dialect's own settings. ``template`` makes a prompt of
    a conversation, for workers that take only text: a tokenizer's folder, or a Jinja template.
    """

    implied_by: ClassVar[str | None] = "workers"
    former_files: ClassVar[frozenset[str]] = frozenset({"capabilities"})
    """Keys that once named a file. The checks say what stands in their place."""

    dialect: NonEmptyStr
    workers: Annotated[tuple[WorkerSourceConfig, ...], Meta(min_length=1)]
    profile: NonEmptyStr | None = None
    options: Mapping[str, OptionValue] = {}
    fields: Mapping[str, NonEmptyStr] | None = None
    """The names by which workers take parameters, where no profile has them."""
    unsupported_parameters: tuple[NonEmptyStr, ...] = ()
    """Parameters that the workers don't support, as `interlingua probe --write` prints them: they
    are not sent, and the gateway emulates what it can."""
    template: TemplatePath | None = None
    policy: Literal["round_robin", "least_load", "two_choices", "prefix", "session"] = "least_load"
    max_concurrency: PositiveInt | None = None
    total_concurrency: PositiveInt | None = None
    queue: QueueConfig = QueueConfig()
    timeouts: TimeoutsConfig | None = None
    retries: RetryConfig | None = None
    health: HealthCheckConfig = HealthCheckConfig()
    breaker: CircuitBreakerConfig = CircuitBreakerConfig()
    tls: ClientTlsConfig | None = None


# What clients may take of the models, by their keys.


class RateLimitConfig(ConfigSection, frozen=True):
    """How much may be taken; what is left out is not limited.

    ``tokens`` and ``budget`` are of prompts and answers together, ``budget`` from 00:00 UTC to the
    next; ``concurrent`` is how many requests at a time.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrent: PositiveInt | None = None
    budget: Budget | None = None


class KeyRateLimitConfig(RateLimitConfig, frozen=True):
    """How much a key may take of all models together, and beside that of some of them."""

    models: Annotated[Mapping[NonEmptyStr, RateLimitConfig], Meta(min_length=1)] | None = None


# What the file may say of how much the gateway takes in, and for how long.


class ServerLimitsConfig(ConfigSection, frozen=True):
    """What the gateway takes in.

    Of ``connections`` at most half as many are taken as the process may have files open, since
    each may need one to a worker. Where all are taken, a new one ends that which has waited longest
    for a request. ``head_time`` is how long the head of a request may take; ``body_pause``, how
    long nothing of its body may come; ``keep``, how long a connection may wait for its next
    request.

    At SIGTERM the gateway is not ready any more, ends each connection with its answer, and goes on
    as before for ``lame_duck``, so that whoever sends requests learns of it. Then it takes no more,
    and ``drain`` is how long running answers may go on.

    ``warm`` is how long a reload waits for a new backend to get ready: a model to be loaded.
    """

    body: Size = 8 << 20
    header: Size = 16 << 10
    connections: PositiveInt = 10_000
    connections_per_address: PositiveInt | None = None
    head_time: Timeout = 10.0
    body_pause: Timeout = 10.0
    keep: Timeout = 75.0
    lame_duck: Duration = 5.0
    drain: Duration = 60.0
    warm: Duration = 120.0


# What the file may say of who signs tokens, beside the keys that it lists itself.

JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class JwtClaimsConfig(ConfigSection, frozen=True):
    """Where a token says what. A name with dots leads into what is nested.

    ``name`` is its holder, whom logs and usage call ``jwt:`` and that. With ``models`` he may ask
    for those that it lists, by a list or a text with blanks (``*``: all), and for none where it
    lists none; ``tags`` are what rules may know him by.
    """

    name: NonEmptyStr = "sub"
    models: NonEmptyStr | None = None
    tags: NonEmptyStr | None = None


class JwtConfig(ConfigSection, frozen=True, kw_only=True):
    """Tokens (JWT) that this issuer has signed are taken as keys are.

    ``audience`` is what one of them must be meant for. ``jwks`` is where its public keys are; left
    out, ``issuer`` is a URL, and its ``/.well-known/openid-configuration`` tells. ``leeway`` is how
    far clocks may be apart. While the issuer can't be asked, the keys that were had last are good
    for ``keep``.
    """

    issuer: NonEmptyStr
    audience: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)]
    jwks: NonEmptyStr | None = None
    algorithms: Annotated[tuple[JwtAlgorithm, ...], Meta(min_length=1)] = ("RS256", "ES256")
    leeway: Duration = 30.0
    keep: Timeout = 86400.0
    claims: JwtClaimsConfig = JwtClaimsConfig()
    tls: ClientTlsConfig | None = None


# What the file may say of what several gateways share.


class SharedStateConfig(ConfigSection, frozen=True):
    """A Redis that keeps what is left of the keys' limits, for several gateways together.

    ``redis`` is its URL, which may hold a password and is never shown: redis://HOST:6379/0, with
    TLS rediss://, on this machine also unix:///PATH. ``prefix`` is what all names there begin with:
    gateways with the same one share their limits.
    """

    redis: Secret
    on_failure: Literal["local", "open", "closed"] = "local"
    """While it can't be asked: each gateway admits its part of every limit (``local``), everything
    is admitted (``open``), or nothing that has a limit (``closed``)."""
    replicas: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """How many gateways there are: what ``local`` divides by."""
    prefix: Name = "interlingua"
    tls: ClientTlsConfig | None = None


# What the file may say of where traces and figures go, beside the page of metrics.


class TracingConfig(ConfigSection, frozen=True):
    """Spans of exchanges, sent to a collector by OTLP over HTTP: never a prompt or an answer.

    ``otlp`` is its base URL, without ``/v1/traces``. A ``sample`` of all exchanges is traced. What
    a client says of a trace is linked to; with ``trust`` it is followed, and decides what is
    sampled. At most ``buffer`` exchanges wait to be sent; what comes beyond is counted.
    """

    shorthand_field: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    sample: Share = 0.05
    trust: bool = False
    auth: UpstreamAuthConfig | None = None
    headers: Mapping[HeaderName, Secret] = {}
    """Of each request to the collector."""
    buffer: PositiveInt = 10_000


class OtlpMetricsConfig(ConfigSection, frozen=True):
    """Figures of OpenTelemetry's conventions for generative models, sent by OTLP over HTTP.

    ``otlp`` is the collector's base URL, without ``/v1/metrics``.
    """

    shorthand_field: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    every: Timeout = 60.0
    auth: UpstreamAuthConfig | None = None
    headers: Mapping[HeaderName, Secret] = {}


class MetricsConfig(ConfigSection, frozen=True):
    """What is counted of exchanges is told at the admin listener, under ``/metrics``.

    With ``vllm_compat`` there are vLLM's names for it, too, so that what reads vLLM's page reads
    the gateway's. ``push`` sends some of it to a collector.
    """

    vllm_compat: bool = False
    push: OtlpMetricsConfig | None = None


OnLoss = Literal["report", "reject", "ignore"]
TokenCount = Annotated[int, Meta(ge=1, le=1_000_000_000)]


# --- where clients come in -----------------------------------------------------------------------


class TlsConfig(ConfigSection, frozen=True):
    """A listener's certificate chain and private key, in PEM."""

    cert: FilePath
    key: FilePath


class ListenerProtocolConfig(ConfigSection, frozen=True):
    """A dialect as a listener has it. Its own settings stand beside ``name``."""

    shorthand_field: ClassVar[str] = "name"
    extra_field: ClassVar[str] = "options"

    name: NonEmptyStr
    profile: NonEmptyStr | None = None
    prefix: PathPrefix = ""
    options: Mapping[str, OptionValue] = {}


class ListenerConfig(ConfigSection, frozen=True):
    """An address and the dialects mounted on it; port 0 is any that is free.

    Of several dialects with one path, a request means: the one its header ``x-interlingua-dialect``
    names (where ``dialect_header`` allows it), its key's, its model's, or else the first.
    """

    address: ListenAddress
    dialects: Annotated[tuple[ListenerProtocolConfig, ...], Meta(min_length=1)]
    dialect_header: bool = False
    tls: TlsConfig | None = None
    front: Literal["native", "reference"] = "native"
    """What speaks HTTP there: our own, or aiohttp's server, which that is held against."""


class AdminConfig(ConfigSection, frozen=True):
    """The admin listener. ``sha256`` is its key's, which one beyond this machine must have."""

    address: ListenAddress
    sha256: Sha256Digest | None = None


class ApiKeyConfig(ConfigSection, frozen=True):
    """An API key, known by its SHA-256. ``models``: those it may ask for; None means all."""

    name: Name
    sha256: Sha256Digest
    models: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    dialect: NonEmptyStr | None = None
    """What its holder speaks where several dialects have one path."""
    tags: tuple[Name, ...] = ()
    """What rules may know it by, with others."""
    explain: bool = False
    """Whether its holder may ask, by ``x-interlingua-explain: 1``, where requests go and why."""
    limits: KeyRateLimitConfig | None = None
    """In the place of all of ``defaults.limits``."""


# --- who answers ---------------------------------------------------------------------------------


class DefaultsConfig(ConfigSection, frozen=True):
    """What holds where nothing nearer says otherwise.

    ``limits`` are those of each key that has none of its own, and of each holder of a token;
    where there are neither, those of all clients together.
    """

    timeouts: TimeoutsConfig = TimeoutsConfig()
    retries: RetryConfig = RetryConfig()
    on_loss: OnLoss = "report"
    limits: KeyRateLimitConfig | None = None


class EchoFailureConfig(ConfigSection, frozen=True):
    """Fail after so many pieces: as a worker that errs, is cut, is at its limit, or is down."""

    how: Literal["error", "cut", "rate", "down"]
    after: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    retry_after: Duration = 2.0


class EchoConfig(BackendConfigBase, frozen=True, tag="echo"):
    """Answers without a model: the pieces of ``script``, or what it was told."""

    script: tuple[str, ...] = ()
    delay: Duration = 0.0
    context: TokenCount | None = None
    fail: EchoFailureConfig | None = None


class WatermarkConfig(ConfigSection, frozen=True):
    """How texts are marked where a request asks for it: what transformers' detector is told."""

    key: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 15485863
    """Whoever knows it can find the mark, and remove it; this one is known to all."""
    ratio: Annotated[float, Meta(gt=0, le=0.99)] = 0.25
    """The share of the vocabulary that is favoured, another one for each token."""
    bias: Annotated[float, Meta(gt=0, le=100)] = 2.0
    """How much: it is added to the logits."""
    scheme: Literal["lefthash", "selfhash"] = "lefthash"
    """Whether a token has a part in choosing its own list; that takes longer."""
    width: Annotated[int, Meta(ge=1, le=64)] = 1
    """How many tokens choose the next one's list; with lefthash it is always the last."""


class TorchConfig(BackendConfigBase, frozen=True, tag="torch"):
    """A local model.

    ``task`` is what it is for, where its files would say something else. ``matryoshka`` are the
    sizes to which its vectors may be cut; left out, those that its files name. ``memory`` is for
    the keys and values of what is in work or may be wanted again; one whole context always fits.
    """

    path: WeightsPath
    task: Literal["generate", "embedding"] | None = None
    device: DeviceName = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """int8 is for text on a processor: faster, smaller, and not quite the same answers."""
    max_concurrency: PositiveInt = 16
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    memory: Size = 1 << 30
    watermark: WatermarkConfig = WatermarkConfig()
    template: TemplatePath | None = None
    """A tokenizer's folder, or a chat template's file, in the place of the model's own."""
    trust_templates: bool = False
    """Whether a request may bring a chat template: it is a program, and costs what it costs."""
    matryoshka: Annotated[tuple[TokenCount, ...], Meta(min_length=1)] | None = None


BackendConfig = EchoConfig | TorchConfig | PoolConfig


# --- what clients ask for ------------------------------------------------------------------------


class TargetConfig(ConfigSection, frozen=True):
    """A backend, and that backend's name for the model (None: the public one)."""

    backend: NonEmptyStr
    model: NonEmptyStr | None = None


class TrafficSplitConfig(ConfigSection, frozen=True, kw_only=True):
    """How much of the traffic each version takes.

    Who asks is held to one version by the first of ``sticky`` that a request has; without one, each
    request is sent by chance. The same are held to the same wherever the split has the same
    ``name`` (left out, the model's), whichever gateway is asked.
    """

    name: Name | None = None
    weights: Annotated[Mapping[Name, Weight], Meta(min_length=1)]
    sticky: Annotated[tuple[StickySource, ...], Meta(min_length=1)] | None = None


class ShadowConfig(ConfigSection, frozen=True, kw_only=True):
    """A part of a model's requests is copied to another target, whose answers nobody gets.

    ``to`` is a version of the model, or another model. At most ``max_concurrent`` copies run at a
    time, and the others are left out; each has ``timeout`` for its whole answer.
    """

    to: NonEmptyStr
    share: Share
    max_concurrent: PositiveInt = 4
    timeout: Duration = 60.0


class ModelLimitsConfig(ConfigSection, frozen=True):
    """In tokens: prompt and answer together, and the answer alone."""

    context: TokenCount | None = None
    max_tokens: TokenCount | None = None


class ModelDefaultsConfig(ConfigSection, frozen=True):
    """What holds where a client was silent. A dialect's own promise to its clients comes first."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    max_tokens: TokenCount | None = None

    def get_sampling_defaults(self) -> Mapping[str, float | int]:
        """Those that say how a token is picked."""
        return {
            name: value for name, value in self._get_set_values().items() if name != "max_tokens"
        }

    def get_stopping_defaults(self) -> Mapping[str, float | int]:
        """Those that say when to stop."""
        return {
            name: value for name, value in self._get_set_values().items() if name == "max_tokens"
        }

    def _get_set_values(self) -> dict[str, float | int]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class ModelConfig(ConfigSection, frozen=True):
    """A public model: one target, or numbered versions of it and how they share the traffic.

    Of versions without a split, the highest number takes all; the others are for who names them.
    What only one dialect asks of a model stands under that dialect's name.
    """

    extra_field: ClassVar[str] = "options"
    extra_keys: ClassVar[frozenset[str]] = frozenset(PROTOCOLS)

    aliases: tuple[ModelAlias, ...] = ()
    backend: NonEmptyStr | None = None
    model: NonEmptyStr | None = None
    versions: Annotated[Mapping[Name, TargetConfig], Meta(min_length=1)] | None = None
    split: TrafficSplitConfig | None = None
    task: Literal["chat", "embedding"] = "chat"
    limits: ModelLimitsConfig = ModelLimitsConfig()
    defaults: ModelDefaultsConfig = ModelDefaultsConfig()
    on_loss: OnLoss | None = None
    dialect: NonEmptyStr | None = None
    """What its clients speak where several dialects have one path."""
    fallback: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    """Who answers where the target can't: versions of this model, or other models, in this order.
    A version that a client pinned is never answered by another."""
    shadow: ShadowConfig | None = None
    options: Mapping[str, Mapping[str, OptionValue]] = {}

    def resolve_targets(self) -> Mapping[str, TargetConfig]:
        """Every version's target, by the version's name; a lone target is version 1."""
        if self.versions is not None:
            return self.versions
        assert self.backend is not None  # noqa: S101 - the loader refuses a model without a target
        return {"1": TargetConfig(backend=self.backend, model=self.model)}

    def resolve_weights(self) -> Mapping[str, int]:
        """Each version's share of the traffic; without a split, one takes it all."""
        if self.split is not None:
            return self.split.weights
        targets = self.resolve_targets()
        numbers = [name for name in targets if is_numeric_version(name)]
        return {max(numbers, key=int) if numbers else next(iter(targets)): 1}


def is_numeric_version(version: str) -> bool:
    """Whether a version's name is a number."""
    return version.isascii() and version.isdigit()


# --- exceptions ----------------------------------------------------------------------------------


class RouteMatchConfig(ConfigSection, frozen=True):
    """What must hold for a rule to be followed, all of it. What is left out holds always.

    ``header`` and ``body`` give what must stand there, the body's fields being those of its top
    level. ``tag`` is one of the key's. ``share`` takes a part of those for whom the rest holds, and
    the same ones each time where the model's split is sticky.
    """

    model: NonEmptyStr | None = None
    dialect: NonEmptyStr | None = None
    header: Mapping[HeaderName, NonEmptyStr] = {}
    body: Mapping[NonEmptyStr, OptionValue] = {}
    key: NonEmptyStr | None = None
    tag: NonEmptyStr | None = None
    share: Share | None = None


class RouteTargetConfig(ConfigSection, frozen=True):
    """Where a request goes instead: to another model, to a version, or to both at once."""

    model: NonEmptyStr | None = None
    version: NonEmptyStr | None = None


class RouteConfig(ConfigSection, frozen=True, kw_only=True):
    """An exception. The first rule that holds is followed, before the model's split is asked.

    A version that a client pinned is left as it is.
    """

    name: Name
    when: RouteMatchConfig = RouteMatchConfig()
    use: RouteTargetConfig


# --- what is told of it all ----------------------------------------------------------------------


class AccessLogConfig(ConfigSection, frozen=True):
    """A line on standard error for each exchange, at its end.

    ``buffer`` is how many lines may wait for whoever reads them; what comes beyond is counted.
    """

    format: Literal["json", "off"] = "json"
    buffer: PositiveInt = 10_000


class UsageConfig(ConfigSection, frozen=True):
    """A row for each exchange that came to a model, in a file of SQLite or in PostgreSQL.

    The file, or the table ``interlingua_usage``, is made if it is not there; ``interlingua usage``
    sums it. ``postgres`` is a URL, which may hold a password and is never shown:
    postgresql://USER@HOST/DATABASE. Older rows than ``keep`` are removed.
    """

    shorthand_field: ClassVar[str] = "sqlite"

    sqlite: OutputPath | None = None
    postgres: Secret | None = None
    keep: Retention = 90 * 86400


class ObservabilityConfig(ConfigSection, frozen=True):
    """What is kept of exchanges that are over: never a prompt, an answer or a key."""

    access_log: AccessLogConfig = AccessLogConfig()
    usage: UsageConfig | None = None
    traces: TracingConfig | None = None
    metrics: MetricsConfig = MetricsConfig()


class Config(ConfigSection, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal[1] = 1
    listeners: Annotated[tuple[ListenerConfig, ...], Meta(min_length=1)] = ()
    admin: AdminConfig | None = None
    limits: ServerLimitsConfig = ServerLimitsConfig()
    defaults: DefaultsConfig = DefaultsConfig()
    backends: Annotated[Mapping[Name, BackendConfig], Meta(min_length=1)]
    models: Annotated[Mapping[ModelName, ModelConfig], Meta(min_length=1)]
    routes: tuple[RouteConfig, ...] = ()
    keys: tuple[ApiKeyConfig, ...] = ()
    identity: JwtConfig | None = None
    state: SharedStateConfig | None = None
    observe: ObservabilityConfig = ObservabilityConfig()
