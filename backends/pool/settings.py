"""The settings of a pool."""

from msgspec import Struct, field

from backends.http.interfaces import QueueSettings
from backends.interfaces import Timeouts
from backends.pool.circuit_breaker import HealthSettings
from backends.pool.dns_discovery import DnsSettings, WorkerTemplate
from backends.pool.load_balancing import PolicyName
from backends.pool.retry import RetrySettings


class HealthCheckSettings(Struct, frozen=True):
    """Active health checks.

    Each worker is checked every ``interval`` seconds, give or take a tenth, with ``timeout``
    seconds to answer. ``path`` is requested by GET instead of the protocol's own health request.
    """

    interval: float = 5.0
    path: str | None = None
    timeout: float = 2.0


class WorkerSourceSettings(Struct, frozen=True, kw_only=True):
    """A source of workers at run time: DNS, or a file that lists them."""

    dns: DnsSettings | None = None
    template: WorkerTemplate = WorkerTemplate()
    """Common settings of the workers found by DNS."""
    file: str | None = None


class PoolSettings(Struct, frozen=True, kw_only=True):
    """All settings of a pool except its workers and their protocol.

    ``max_concurrency`` limits the requests of the whole pool; each worker has its own limit, too.
    Without ``probe`` there are no active health checks. ``models`` are the names whose metadata is
    read from the workers before the first request, if the protocol has metadata requests.
    """

    policy: PolicyName = "least_load"
    timeouts: Timeouts = Timeouts()
    queue: QueueSettings = QueueSettings()
    max_concurrency: int | None = None
    health: HealthSettings = HealthSettings()
    probe: HealthCheckSettings | None = None
    retries: RetrySettings = field(default_factory=RetrySettings)
    models: tuple[str, ...] = ()
    sources: tuple[WorkerSourceSettings, ...] = ()
    name: str = ""
    """The pool's name in logs."""
