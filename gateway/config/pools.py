"""What the file may say of a pool of workers."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta

from gateway.config.section import BackendConfigBase, ConfigSection, OptionValue, PositiveInt
from gateway.config.units import (
    Duration,
    FilePath,
    HostPort,
    NameserverAddress,
    NonEmptyStr,
    Secret,
    Share,
    SrvName,
    TemplatePath,
    Timeout,
    WorkerUrl,
)

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

    short: ClassVar[str] = "url"

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


class PoolConfig(BackendConfigBase, frozen=True, tag=str.lower):
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
