"""What a pool may be told."""

from msgspec import Struct, field

from backends.http.interfaces import QueueSettings
from backends.interfaces import Timeouts
from backends.pool.circuit_breaker import HealthSettings
from backends.pool.dns_discovery import DnsSettings, WorkerTemplate
from backends.pool.load_balancing import PolicyName
from backends.pool.retry import RetrySettings


class HealthCheckSettings(Struct, frozen=True):
    """How workers are asked whether they are well.

    Each is asked every ``interval`` seconds, a tenth more or less, and has ``timeout`` seconds.
    ``path`` is asked for by GET in place of the dialect's own probe.
    """

    interval: float = 5.0
    path: str | None = None
    timeout: float = 2.0


class WorkerSourceSettings(Struct, frozen=True, kw_only=True):
    """Somebody who names workers while the pool runs: DNS, or a file that lists them."""

    dns: DnsSettings | None = None
    template: WorkerTemplate = WorkerTemplate()
    """What the workers that DNS names have in common."""
    file: str | None = None


class PoolSettings(Struct, frozen=True, kw_only=True):
    """Everything about a pool beside its workers and their dialect.

    ``max_concurrency`` is how many requests the whole pool has at a time; each worker has its own
    limit beside. Without ``probe`` only requests tell how the workers are. ``models`` are the names
    that the workers are asked about before the first request, where the dialect has questions.
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
    """As the pool is called in logs."""
