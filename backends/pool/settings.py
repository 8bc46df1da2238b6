"""The settings of a pool: its section of the configuration, and what discovery makes of it."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, cast, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from backends.http.interfaces import (
    DEFAULT_MAX_HEAD,
    WorkerConfig,
    WorkerCredentials,
    make_basic_credentials,
    make_bearer_credentials,
    make_header_credentials,
    make_query_credentials,
)
from backends.interfaces import BackendSettings, Timeouts
from backends.pool.load_balancing import PolicyName
from protocols.core.interfaces import UpstreamRequest
from protocols.core.json_counts import ResponseCounts
from protocols.core.sse import MAX_EVENT_BYTES
from protocols.core.units import (
    ConfigSection,
    Duration,
    FilePath,
    HeaderName,
    HeaderValue,
    HostPort,
    ItemCount,
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

DEFAULT_MAX_RESPONSE_SIZE: Final = MAX_EVENT_BYTES
DEFAULT_MAX_EMBEDDINGS_SIZE: Final = 160 << 20
RetryReason = Literal["connect", "429", "500", "502", "503", "504", "before_first_token"]
_RETRY_REASONS: tuple[RetryReason, ...] = get_args(RetryReason)


class RetrySettings(ConfigSection, frozen=True):
    """Retries at another worker when one fails before its response starts."""

    max: Annotated[int, Meta(ge=0, le=10)] = 1
    """The number of retries per request, not counting workers that cannot be reached."""
    budget: Share = 0.2
    """Limits retries to this share of the recent requests."""
    on: tuple[RetryReason, ...] = _RETRY_REASONS
    """The failures that are retried. ``before_first_token``: the worker accepted the request, then
    the connection broke, the first token timed out, or the response began with an error."""


class HeaderAuthSettings(ConfigSection, frozen=True):
    """A key in a header."""

    name: HeaderName
    """The header's name, such as ``api-key``."""
    value: Secret
    """The key."""


class QueryAuthSettings(ConfigSection, frozen=True):
    """A key in the query of the URL."""

    name: NonEmptyStr
    """The parameter's name."""
    value: Secret
    """The key."""


class BasicAuthSettings(ConfigSection, frozen=True):
    """HTTP Basic authentication."""

    user: NonEmptyStr
    """The user's name."""
    password: Secret
    """The user's password."""


class WorkerAuthSettings(ConfigSection, frozen=True):
    """Credentials that are sent to a worker, in one of four ways."""

    bearer: Secret | None = None
    """A token that is sent in the header ``Authorization``."""
    header: HeaderAuthSettings | None = None
    """A key in a header of another name."""
    query: QueryAuthSettings | None = None
    """A key in the query of the URL."""
    basic: BasicAuthSettings | None = None
    """A user and a password, for HTTP Basic authentication."""

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
    """One worker by its URL, or a source of several: DNS addresses, a DNS service or a file."""

    shorthand_field: ClassVar[str] = "url"

    url: WorkerUrl | None = None
    """The worker's base URL. It may have a path, below which the protocol's own paths are; ``/v1``
    is left out of them if the URL names a version itself: ``https://HOST/api/paas/v4``,
    ``https://HOST/v1beta/openai``."""
    dns: HostPort | None = None
    """A host name and a port; each address of the name is a worker."""
    srv: SrvName | None = None
    """The name of a DNS service (SRV); each of its targets is a worker."""
    file: FilePath | None = None
    """A file that lists workers in this format."""
    refresh_interval: Timeout = 10.0
    """How often the source is read again; if that fails, the last known workers stay."""
    scheme: Literal["http", "https"] = "http"
    """The scheme of the URLs of workers that DNS names."""
    nameserver: NameserverAddress | None = None
    """The address of a nameserver to use instead of the system's."""
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    """The share of requests that the worker gets, relative to the other workers."""
    max_concurrency: PositiveInt | None = None
    """Limit of the worker's requests at a time; by default the pool's."""
    auth: WorkerAuthSettings | None = None
    """Credentials that are sent to the worker; by default none."""
    headers: Mapping[HeaderName, HeaderValue] = {}
    """Headers of each request to the worker, such as ``OpenAI-Organization``. They replace headers
    of the same name that a client sent."""

    def make_credentials(self) -> WorkerCredentials | None:
        """What every request to the worker contains."""
        credentials = self.auth.make_credentials() if self.auth else None
        if not self.headers:
            return credentials
        values = {name: cast("Secret", value).reveal() for name, value in self.headers.items()}
        return (credentials or WorkerCredentials()).add_headers(values)


WorkerListParser = Callable[[bytes], Sequence[WorkerSourceSettings]]
"""Parses a file that lists workers. Its exception says what is wrong."""


class QueueSettings(ConfigSection, frozen=True):
    """The queue of requests that wait for a worker with a free slot."""

    max: Annotated[int, Meta(ge=0, le=100_000)] = 200
    """How many requests may wait; further ones are rejected as overload."""
    wait: Duration = 10.0
    """How long a request may wait."""


class ClientTlsSettings(ConfigSection, frozen=True):
    """How a server's certificate is verified."""

    ca: FilePath
    """The CA certificates, in PEM."""


class HealthCheckSettings(ConfigSection, frozen=True):
    """Active health checks of each worker, and how a worker returns to rotation."""

    path: NonEmptyStr | None = None
    """The path that is requested; by default that of the protocol's own health check."""
    interval: Timeout = 5.0
    """The time between two checks of a worker."""
    timeout: Timeout = 2.0
    """The time limit for a check."""
    fall: PositiveInt = 3
    """How many failed checks in a row take a worker out of rotation."""
    rise: PositiveInt = 2
    """How many successful checks in a row bring a worker back."""
    slow_start: Duration = 30.0
    """How long the share of the traffic of a returned worker grows."""
    panic_threshold: Share = 0.3
    """When fewer than this share of the workers are healthy, requests go to all of them."""


class CircuitBreakerSettings(ConfigSection, frozen=True):
    """When failed requests take a worker out of rotation."""

    consecutive_failures: PositiveInt = 5
    """How many failures in a row take a worker out."""
    failure_rate: Share = 0.25
    """The share of failed requests within ``window`` that takes a worker out."""
    min_requests: PositiveInt = 20
    """How many requests the window must have before ``failure_rate`` counts."""
    window: Timeout = 10.0
    """The time over which ``failure_rate`` is measured."""
    open_for: Timeout = 15.0
    """How long a worker is out the first time; each further time is twice as long."""
    adaptive_concurrency: bool = True
    """Whether a worker that answers 429 gets fewer requests at once for a while."""


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
    """Workers that speak one protocol."""

    implied_by: ClassVar[str | None] = "workers"
    former_files: ClassVar[frozenset[str]] = frozenset({"capabilities"})
    """Former keys that named a file; validation names their replacement."""

    protocol: NonEmptyStr
    """The protocol that the workers speak."""
    workers: Annotated[tuple[WorkerSourceSettings, ...], Meta(min_length=1)]
    """The workers, or sources of them."""
    profile: NonEmptyStr | None = None
    """A release or flavour of the protocol; by default the protocol's first one."""
    options: Mapping[str, OptionValue] = {}
    """The protocol's own settings."""
    fields: Mapping[str, NonEmptyStr] | None = None
    """Parameter names that the workers use, where no profile defines them."""
    unsupported_parameters: tuple[NonEmptyStr, ...] = ()
    """Parameters that the workers don't support, as `interlingua probe --write` prints them: they
    are not sent, and the gateway emulates what it can."""
    chat_template: TemplatePath | None = None
    """Turns a conversation into a prompt, for workers that accept only text: a tokenizer's folder,
    or a Jinja template."""
    policy: PolicyName = "least_load"
    """How a worker is chosen: in turn (``round_robin``), the least loaded one (``least_load``), the
    less loaded of two random ones (``two_choices``), or the same one for the same beginning of a
    prompt (``prefix``) or the same user (``session``)."""
    max_concurrency: PositiveInt | None = None
    """Limit of requests at a time of each worker that has none of its own; by default none."""
    total_concurrency: PositiveInt | None = None
    """Limit of requests at a time of the whole pool; by default none."""
    queue: QueueSettings = QueueSettings()
    """How many requests may wait for a worker, and for how long."""
    timeouts: Timeouts | None = None
    """Time limits of requests; by default ``defaults.timeouts``."""
    retries: RetrySettings | None = None
    """Retries at another worker; by default ``defaults.retries``."""
    health: HealthCheckSettings = HealthCheckSettings()
    """Active health checks of the workers."""
    breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    """When failed requests take a worker out of rotation."""
    tls: ClientTlsSettings | None = None
    """The CA certificates that verify workers with HTTPS; by default the system's."""
    max_response_size: Size = DEFAULT_MAX_RESPONSE_SIZE
    """The largest response of a worker that is not a stream; a larger one is a worker error."""
    max_embeddings_size: Size = DEFAULT_MAX_EMBEDDINGS_SIZE
    """The largest response with embeddings: 2,048 vectors of 3,072 numbers have up to 130 MiB."""
    max_response_objects: ItemCount = ResponseCounts().objects
    """The most JSON objects (choices, tool calls, log probabilities) of a response that is not a
    stream; with more it is a worker error."""
    max_response_values: ItemCount = ResponseCounts().values
    """The most values in the arrays and objects of a response that is not a stream; with more it is
    a worker error. The numbers of vectors in the form of OpenAI do not count."""
    max_response_head: Size = DEFAULT_MAX_HEAD
    """The largest head (all headers) of a worker's response; a larger one is a worker error."""

    def list_response_limits(self) -> tuple[int, int, ResponseCounts]:
        """The size, also with embeddings, and the counts that a unary response may have."""
        counts = ResponseCounts(self.max_response_objects, self.max_response_values)
        return self.max_response_size, self.max_embeddings_size, counts

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
                headers={**source.headers, **worker.headers},
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
            "credentials": source.make_credentials(),
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
    build_health_requests: Callable[[], Mapping[str, UpstreamRequest]] = dict
    """Builds the health request of each protocol that workers may speak, by its name, to name the
    right one in the log."""
