"""What the file may say of a pool of workers."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta

from gateway.config.section import Option, Section, Settings, Several
from gateway.config.units import (
    Duration,
    FilePath,
    Nameserver,
    Place,
    Secret,
    Service,
    Share,
    TemplatePath,
    Text,
    Timeout,
    WorkerUrl,
)

Failure = Literal["connect", "429", "500", "502", "503", "504", "before_first_token"]
_FAILURES: tuple[Failure, ...] = get_args(Failure)


class Timeouts(Section, frozen=True):
    """Separate limits of an exchange, in seconds."""

    connect: Timeout = 2.0
    first_token: Timeout = 60.0
    idle: Timeout = 30.0
    total: Timeout = 600.0


class Retries(Section, frozen=True):
    """Whether another worker is asked when one fails before its answer began.

    ``max`` is how many more may be asked, beside those that can't be reached. ``budget`` is the
    part of recent requests that may be asked again at all.
    """

    max: Annotated[int, Meta(ge=0, le=10)] = 1
    budget: Share = 0.2
    on: tuple[Failure, ...] = _FAILURES


class Auth(Section, frozen=True):
    """What a worker wants to be shown."""

    bearer: Secret


class Worker(Section, frozen=True):
    """One process behind a URL, which is its base, without the dialect's path; or several.

    Several are told by DNS: by the addresses of a name (``dns``, as host:port) or by the places of
    a service (``srv``), or listed in a ``file``, of which each entry is written like one of these.
    They are looked for again ``every`` so often, and the last that were found are kept.
    """

    short: ClassVar[str] = "url"

    url: WorkerUrl | None = None
    dns: Place | None = None
    srv: Service | None = None
    file: FilePath | None = None
    every: Timeout = 10.0
    scheme: Literal["http", "https"] = "http"
    nameserver: Nameserver | None = None
    """An address to ask in place of the system's nameservers."""
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    max_concurrency: Several | None = None
    auth: Auth | None = None


class Queue(Section, frozen=True):
    """How many requests may wait for a worker with a free place, and how long."""

    max: Annotated[int, Meta(ge=0, le=100_000)] = 200
    wait: Duration = 10.0


class Trust(Section, frozen=True):
    """Who has signed the certificates of those who are asked, in PEM."""

    ca: FilePath


class Health(Section, frozen=True):
    """Probes that are sent to each worker, and how a worker comes back.

    ``fall`` probes that fail in a row take a worker out, ``rise`` good ones bring it back; its
    share then grows to the whole within ``slow_start``. When fewer than ``panic`` of the workers
    are in, all are asked. ``path`` left out is the dialect's own.
    """

    path: Text | None = None
    every: Timeout = 5.0
    timeout: Timeout = 2.0
    fall: Several = 3
    rise: Several = 2
    slow_start: Duration = 30.0
    panic: Share = 0.3


class Breaker(Section, frozen=True):
    """When requests that fail take a worker out.

    ``failures`` in a row do, or ``rate`` of those within ``window``, if they are at least
    ``least``: the first time for ``open``, then for twice as long.
    """

    failures: Several = 5
    rate: Share = 0.25
    least: Several = 20
    window: Timeout = 10.0
    open: Timeout = 15.0


class Pool(Settings, frozen=True, tag=str.lower):
    """Workers that speak one dialect. ``timeouts`` and ``retries`` left out are the defaults'.

    ``max_concurrency`` holds for each worker that does not say its own, ``total_concurrency`` for
    all of them together. ``options`` are the dialect's own settings. ``template`` makes a prompt of
    a conversation, for workers that take only text: a tokenizer's folder, or a Jinja template.
    """

    implied_by: ClassVar[str | None] = "workers"
    former_files: ClassVar[frozenset[str]] = frozenset({"capabilities"})
    """Keys that once named a file. The checks say what stands in their place."""

    dialect: Text
    workers: Annotated[tuple[Worker, ...], Meta(min_length=1)]
    profile: Text | None = None
    options: Mapping[str, Option] = {}
    fields: Mapping[str, Text] | None = None
    """The names by which workers take parameters, where no profile has them."""
    unsupported_parameters: tuple[Text, ...] = ()
    """Parameters that the workers don't support, as `interlingua probe --write` prints them: they
    are not sent, and the gateway emulates what it can."""
    template: TemplatePath | None = None
    policy: Literal["round_robin", "least_load", "two_choices", "prefix", "session"] = "least_load"
    max_concurrency: Several | None = None
    total_concurrency: Several | None = None
    queue: Queue = Queue()
    timeouts: Timeouts | None = None
    retries: Retries | None = None
    health: Health = Health()
    breaker: Breaker = Breaker()
    tls: Trust | None = None
