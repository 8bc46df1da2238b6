"""What stands behind the admin listener, as far as it sees."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from backends.http.interfaces import WorkerConfig
from gateway.explain.report import ExplainRequest
from gateway.pipeline.http import HttpRequest, ResponseWriter
from protocols.core.catalog import Catalog

HandleRequest = Callable[[HttpRequest, ResponseWriter], Awaitable[None]]
"""What answers a listener's requests."""


@runtime_checkable
class WorkerSet(Protocol):
    """The workers of one backend, which may change while it runs."""

    def report_workers(self) -> Any:
        """What is known of each worker now, as JSON can say it: never a key."""

    def add_worker(self, worker: WorkerConfig) -> bool:
        """Add a worker, or put it in the place of the one with its URL; whether it is a new one.

        Raises ValueError with why it can't be.
        """

    def remove_worker(self, url: str) -> bool:
        """Remove a worker; whether there was one. Raises ValueError with why it can't be."""


class ReloadReport(Protocol):
    """How a reload ended."""

    @property
    def hash(self) -> str:
        """That of the configuration which is served now."""

    @property
    def filename(self) -> str:
        """What was read."""

    @property
    def issues(self) -> Sequence[Any]:
        """What is wrong with it, each with its line and column; nothing where it is served."""


class SupportsExplain(Protocol):
    """Who can tell what becomes of requests."""

    def find_explanation(self, id: str, /) -> Any | None:  # noqa: A002 - what it is called everywhere
        """What is known of one that asked for it."""

    async def explain_request(self, question: ExplainRequest) -> Any:
        """What would become of one. Raises LookupError with what is wrong with the question."""


class StatusService(Protocol):
    """Who knows how the gateway is."""

    async def get_config(self) -> Any:
        """What is served, as JSON can say it: never a secret."""

    def get_status(self) -> Any:
        """How everything is."""

    def list_requests(self) -> Sequence[Any]:
        """The exchanges that run, the oldest first."""

    def cancel_request(self, id: str) -> int:  # noqa: A002 - what it is called everywhere
        """End those of this id; how many there were."""

    def set_draining(self, *, on: bool) -> None:
        """Say that no more requests should come, or that they may again."""

    def get_listener_handler(self, number: int) -> HandleRequest | None:
        """What serves the listener of this place in the configuration."""


class AdminServices(Struct, frozen=True, kw_only=True):
    """What an admin listener tells of, and what it may change; what is None has no paths.

    ``obstacle`` tells why no request can be answered now, None where some can; ``metrics`` gives
    what Prometheus reads.
    """

    get_unready_reason: Callable[[], str | None]
    worker_sets: Mapping[str, WorkerSet]
    render_metrics: Callable[[], bytes] = bytes
    reload_config: Callable[[], Awaitable[ReloadReport]] | None = None
    explain_service: SupportsExplain | None = None
    status_service: StatusService | None = None


class HasReadiness(Protocol):
    """A backend, as far as readiness goes."""

    @property
    def ready(self) -> bool:
        """Whether it could answer now, as far as is known."""


def get_unready_reason(catalog: Catalog, backends: Iterable[HasReadiness]) -> str | None:
    """Why no request can be answered now; None where some can."""
    if not catalog.ready:
        return "the gateway drains"
    if not any(backend.ready for backend in backends):
        return "no backend is ready"
    return None
