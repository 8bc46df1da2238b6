"""The settings of a pool: its section of the configuration, and what discovery makes of it."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from backends.http.interfaces import (
    WorkerConfig,
    WorkerCredentials,
    make_basic_credentials,
    make_bearer_credentials,
    make_header_credentials,
    make_query_credentials,
)
from backends.interfaces import BackendSettings, Timeouts
from backends.pool.load_balancing import PolicyName
from protocols.core.units import (
    ConfigSection,
    Duration,
    FilePath,
    HeaderName,
    HostPort,
    NameserverAddress,
    NonEmptyStr,
    OptionValue,
    PositiveInt,
    Secret,
    Share,
    Size,
    SrvName,
    TemplatePath,
    Timeout,
    WorkerUrl,
)

DEFAULT_MAX_RESPONSE_SIZE: Final = 32 << 20
RetryReason = Literal["connect", "429", "500", "502", "503", "504", "before_first_token"]
"""``before_first_token``: the worker accepted the request, then the connection broke, the first
token timed out, or the response began with an error."""
_RETRY_REASONS: tuple[RetryReason, ...] = get_args(RetryReason)


class RetrySettings(ConfigSection, frozen=True):
    """Retries at another worker when one fails before its response starts.

    ``max`` is the number of retries per request, not counting workers that cannot be reached.
    ``budget`` limits retries to a share of the recent requests.
    """

    max: Annotated[int, Meta(ge=0, le=10)] = 1
    budget: Share = 0.2
    on: tuple[RetryReason, ...] = _RETRY_REASONS


class HeaderAuthSettings(ConfigSection, frozen=True):
    """A key in a header of this name."""

    name: HeaderName
    value: Secret


class QueryAuthSettings(ConfigSection, frozen=True):
    """A key in a parameter of the URL's query."""

    name: NonEmptyStr
    value: Secret


class BasicAuthSettings(ConfigSection, frozen=True):
    """HTTP Basic authentication."""

    user: NonEmptyStr
    password: Secret


class WorkerAuthSettings(ConfigSection, frozen=True):
    """Credentials that are sent to a worker, in one of four ways.

    ``bearer`` is a token in the header ``Authorization``; ``header`` a key in a header of another
    name, such as ``api-key``; ``query`` a key in the URL's query; ``basic`` a user and a password.
    """

    bearer: Secret | None = None
    header: HeaderAuthSettings | None = None
    query: QueryAuthSettings | None = None
    basic: BasicAuthSettings | None = None

    def make_credentials(self) -> WorkerCredentials | None:
        """What every request to the worker contains."""
        if self.bearer is not None:
            return make_bearer_credentials(self.bearer.reveal())
        if self.header is not None:
            return make_header_credentials(self.header.name, self.header.value.reveal())
        if self.query is not None:
            return make_query_credentials(self.query.name, self.query.value.reveal())
        if self.basic is not None:
            return make_basic_credentials(self.basic.user, self.basic.password.reveal())
        return None


class WorkerSourceSettings(ConfigSection, frozen=True):
    """One worker by its base ``url``, or a source of several.

    A URL may have a path, below which the protocol's own paths are. ``/v1`` is left out of them if
    the URL names a version itself: ``https://HOST/api/paas/v4``, ``https://HOST/v1beta/openai``.

    Sources are DNS addresses (``dns``, as host:port), a DNS service (``srv``), or a ``file`` that
    lists workers in this format. A source is read again every ``refresh_interval``; if that fails,
    the last known workers stay.
    """

    shorthand_field: ClassVar[str] = "url"

    url: WorkerUrl | None = None
    dns: HostPort | None = None
    srv: SrvName | None = None
    file: FilePath | None = None
    refresh_interval: Timeout = 10.0
    scheme: Literal["http", "https"] = "http"
    nameserver: NameserverAddress | None = None
    """The address of a nameserver to use instead of the system's."""
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    max_concurrency: PositiveInt | None = None
    auth: WorkerAuthSettings | None = None


WorkerListParser = Callable[[bytes], Sequence[WorkerSourceSettings]]
"""Parses a file that lists workers. Its exception says what is wrong."""


class QueueSettings(ConfigSection, frozen=True):
    """How many requests may wait for a worker with a free slot, and for how long."""

    max: Annotated[int, Meta(ge=0, le=100_000)] = 200
    wait: Duration = 10.0


class ClientTlsSettings(ConfigSection, frozen=True):
    """The CA certificates that verify the server, in PEM."""

    ca: FilePath


class HealthCheckSettings(ConfigSection, frozen=True):
    """Active health checks of each worker, and how a worker returns to rotation.

    ``fall`` failed checks in a row take a worker out of rotation, and ``rise`` successful ones
    bring it back; its share of the traffic then grows over ``slow_start``. When fewer than
    ``panic_threshold`` of the workers are healthy, requests go to all of them. ``path`` defaults to
    the protocol's own health check.
    """

    path: NonEmptyStr | None = None
    interval: Timeout = 5.0
    timeout: Timeout = 2.0
    fall: PositiveInt = 3
    rise: PositiveInt = 2
    slow_start: Duration = 30.0
    panic_threshold: Share = 0.3


class CircuitBreakerSettings(ConfigSection, frozen=True):
    """When failed requests take a worker out of rotation.

    ``consecutive_failures`` do, or a ``failure_rate`` within ``window``, if the window has at least
    ``min_requests``. The worker is out for ``open_for`` the first time, and then for twice as long
    each time.
    """

    consecutive_failures: PositiveInt = 5
    failure_rate: Share = 0.25
    min_requests: PositiveInt = 20
    window: Timeout = 10.0
    open_for: Timeout = 15.0


class DnsSettings(Struct, frozen=True):
    """The name to look up, and how often.

    ``name`` is ``host:port`` for the addresses of a host (A, AAAA), or the bare name of a service
    (SRV): ``_http._tcp.triton.models.svc.cluster.local``. It is looked up again after
    ``refresh_interval`` seconds, or sooner if the record's TTL is shorter; a lookup may take
    ``timeout`` seconds. ``nameserver`` is an IP address, with a port if it is not 53. Without it,
    hosts are looked up by the system's resolver, and services, by their full names, by the system's
    nameservers.
    """

    name: str
    record: Literal["a", "srv"] = "a"
    refresh_interval: float = 10.0
    timeout: float = 5.0
    nameserver: str | None = None


class WorkerTemplate(Struct, frozen=True):
    """The common settings of the workers of one name. ``path`` is the path of their base URL."""

    scheme: Literal["http", "https"] = "http"
    path: str = ""
    weight: int = 1
    max_concurrency: int | None = None
    credentials: WorkerCredentials | None = None

    def __repr__(self) -> str:
        return f"WorkerTemplate({self.scheme!r}, {self.path!r})"

    def make_worker(self, host: str, port: int, factor: int = 1) -> WorkerConfig:
        """The worker at an address or a name, with ``factor`` times the weight."""
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        url = f"{self.scheme}://{authority}{self.path}"
        return WorkerConfig(url, self.weight * factor, self.max_concurrency, self.credentials)


class PoolSettings(BackendSettings, frozen=True, kw_only=True, tag="pool"):
    """Workers that speak one protocol. ``timeouts`` and ``retries`` default to ``defaults``.

    ``max_concurrency`` is the limit of each worker that has none of its own, ``total_concurrency``
    that of the whole pool. ``options`` are the protocol's own settings. ``chat_template`` turns a
    conversation into a prompt, for workers that accept only text: a tokenizer's folder, or a Jinja
    template. ``max_response_size`` is the largest response of a worker that is not a stream; a
    larger one is a worker error.
    """

    implied_by: ClassVar[str | None] = "workers"
    former_files: ClassVar[frozenset[str]] = frozenset({"capabilities"})
    """Former keys that named a file; validation names their replacement."""

    protocol: NonEmptyStr
    workers: Annotated[tuple[WorkerSourceSettings, ...], Meta(min_length=1)]
    profile: NonEmptyStr | None = None
    options: Mapping[str, OptionValue] = {}
    fields: Mapping[str, NonEmptyStr] | None = None
    """Parameter names that the workers use, where no profile defines them."""
    unsupported_parameters: tuple[NonEmptyStr, ...] = ()
    """Parameters that the workers don't support, as `interlingua probe --write` prints them: they
    are not sent, and the gateway emulates what it can."""
    chat_template: TemplatePath | None = None
    policy: PolicyName = "least_load"
    max_concurrency: PositiveInt | None = None
    total_concurrency: PositiveInt | None = None
    queue: QueueSettings = QueueSettings()
    timeouts: Timeouts | None = None
    retries: RetrySettings | None = None
    health: HealthCheckSettings = HealthCheckSettings()
    breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    tls: ClientTlsSettings | None = None
    max_response_size: Size = DEFAULT_MAX_RESPONSE_SIZE

    def make_workers(self, sources: Iterable[WorkerSourceSettings]) -> list[WorkerConfig]:
        """The workers that are given by their URL."""
        return [
            WorkerConfig(source.url, **self._get_worker_options(source))
            for source in sources
            if source.url is not None
        ]

    def make_listed_workers(
        self, source: WorkerSourceSettings, workers: Sequence[WorkerSourceSettings]
    ) -> list[WorkerConfig]:
        """The workers that a file lists. Settings beside the file's name are their defaults."""
        default_weight = WorkerSourceSettings().weight
        return self.make_workers(
            replace(
                worker,
                weight=source.weight if worker.weight == default_weight else worker.weight,
                max_concurrency=worker.max_concurrency or source.max_concurrency,
                auth=worker.auth or source.auth,
            )
            for worker in workers
        )

    def make_template(self, source: WorkerSourceSettings) -> WorkerTemplate:
        """What the workers that a DNS name leads to have in common."""
        return WorkerTemplate(source.scheme, **self._get_worker_options(source))

    def _get_worker_options(self, source: WorkerSourceSettings) -> Mapping[str, Any]:
        return {
            "weight": source.weight,
            "max_concurrency": source.max_concurrency or self.max_concurrency,
            "credentials": source.auth.make_credentials() if source.auth else None,
        }


class PoolContext(Struct, frozen=True):
    """What a pool must know beside its section of the configuration."""

    name: str = ""
    """The pool's name in logs."""
    models: Sequence[str] = ()
    """The models whose metadata is read from the workers before the first request, if the protocol
    has metadata requests."""
    parse_workers: WorkerListParser | None = None
    """Parses the files that list workers."""
    retry_counters: MutableMapping[frozenset[str], Any] | None = None
    """The ``retry.RetryCounters`` of each set of workers. All pools share them."""
