"""Every Struct that the file may hold. What is no field here is an error there.

Some classes say more of how they are written: ``short`` is the field that a lone scalar stands for,
``rest`` the field that takes the keys which are no field's (``rest_keys``, where not just any), and
``implied_by`` the key that makes ``kind`` needless.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import asdict

from gateway.config.allowances import KeyRateLimitConfig
from gateway.config.entrance import ServerLimitsConfig
from gateway.config.identity import JwtConfig
from gateway.config.pools import PoolConfig, RetryConfig, TimeoutsConfig
from gateway.config.section import BackendConfigBase, ConfigSection, OptionValue, PositiveInt
from gateway.config.state import SharedStateConfig
from gateway.config.traces import MetricsConfig, TracingConfig
from gateway.config.units import (
    DeviceName,
    Duration,
    FilePath,
    HeaderName,
    ListenAddress,
    ModelAlias,
    ModelName,
    Name,
    NonEmptyStr,
    OutputPath,
    PathPrefix,
    Retention,
    Secret,
    Sha256Digest,
    Share,
    Size,
    StickySource,
    TemplatePath,
    Weight,
    WeightsPath,
)
from protocols import DIALECTS

OnLoss = Literal["report", "reject", "ignore"]
TokenCount = Annotated[int, Meta(ge=1, le=1_000_000_000)]


# --- where clients come in -----------------------------------------------------------------------


class TlsConfig(ConfigSection, frozen=True):
    """A listener's certificate chain and private key, in PEM."""

    cert: FilePath
    key: FilePath


class ListenerProtocolConfig(ConfigSection, frozen=True):
    """A dialect as a listener has it. Its own settings stand beside ``name``."""

    short: ClassVar[str] = "name"
    rest: ClassVar[str] = "options"

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


class EchoConfig(BackendConfigBase, frozen=True, tag=str.lower):
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


class TorchConfig(BackendConfigBase, frozen=True, tag=str.lower):
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

    rest: ClassVar[str] = "options"
    rest_keys: ClassVar[frozenset[str]] = frozenset(DIALECTS)

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

    short: ClassVar[str] = "sqlite"

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
