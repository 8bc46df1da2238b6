"""What the admin API needs of the gateway: its services, most of them optional."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aiohttp import web
from msgspec import Struct

from backends.http.interfaces import WorkerConfig
from gateway.admin.http import AiohttpHandler
from gateway.explain.report import ExplainRequest, Explanation
from gateway.http_server.connection import HandleRequest
from gateway.routing.failed_models import list_failures, list_loading
from protocols.core.catalog import Catalog


@runtime_checkable
class WorkerSet(Protocol):
    """The workers of a backend, which can be changed at runtime."""

    def report_workers(self) -> Any:
        """A JSON-serializable report of each worker, without keys."""

    def add_worker(self, worker: WorkerConfig) -> bool:
        """Add a worker or replace the one with its URL; returns whether it is new.

        Raises ValueError if it cannot be added.
        """

    def remove_worker(self, url: str) -> bool:
        """Remove a worker; returns whether it existed. Raises ValueError if it cannot be."""


class ReloadReport(Protocol):
    """The result of a reload."""

    @property
    def hash(self) -> str:
        """The hash of the configuration in effect."""

    @property
    def filename(self) -> str:
        """The configuration file."""

    @property
    def issues(self) -> Sequence[Any]:
        """Errors with line and column; empty if the reload succeeded."""


class SupportsExplain(Protocol):
    """Explains requests."""

    def find_explanation(self, id: str, /) -> Explanation | None:  # noqa: A002 - the usual name
        """The explanation of a request that asked for one."""

    async def explain_request(self, question: ExplainRequest) -> Any:
        """Explain a request by a dry run. Raises LookupError for an invalid question."""


class StatusService(Protocol):
    """Reports and changes the state of the gateway."""

    async def get_config(self) -> Any:
        """The configuration as JSON, with masked secrets."""

    def get_status(self) -> Any:
        """The status."""

    def start(self) -> None:
        """Start to sample the statistics."""

    def stop(self) -> None:
        """Sample no more."""

    def get_history(self) -> Any:
        """The statistics of the last 15 minutes."""

    def list_requests(self) -> Sequence[Any]:
        """The running requests, the oldest first."""

    def list_finished(self) -> Sequence[Any]:
        """The records of the last finished requests, the latest first."""

    def cancel_request(self, id: str) -> int:  # noqa: A002 - the usual name
        """Cancel the requests with this id; returns their number."""

    def set_draining(self, *, on: bool) -> None:
        """Start or stop draining."""

    def get_listener_handler(self, number: int) -> HandleRequest | None:
        """The request handler of the listener with this index, or None."""


class AddsRoutes(Protocol):
    """A part of the admin API with paths of its own."""

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""


class AdminServices(Struct, frozen=True, kw_only=True):
    """The services of an admin listener; a service that is None has no paths.

    ``get_unready_reason`` returns why the gateway is not ready, or None if it is;
    ``list_failed_models`` the models that can't be loaded.
    ``render_metrics`` returns the page for Prometheus.
    """

    get_unready_reason: Callable[[], str | None]
    worker_sets: Mapping[str, WorkerSet]
    list_failed_models: Callable[[], Sequence[str]] = tuple
    render_metrics: Callable[[], bytes] = bytes
    reload_config: Callable[[], Awaitable[ReloadReport]] | None = None
    explain_service: SupportsExplain | None = None
    status_service: StatusService | None = None
    list_experiments: AiohttpHandler | None = None
    """Answers ``GET /-/experiments``."""
    list_rollouts: AiohttpHandler | None = None
    """Answers ``GET /-/rollouts``."""
    usage_api: AddsRoutes | None = None
    list_listener_urls: Callable[[], Sequence[str]] = tuple
    """The URLs at which models are served."""


class HasReadiness(Protocol):
    """A backend that reports its readiness."""

    @property
    def ready(self) -> bool:
        """Whether the backend can answer requests."""


def get_unready_reason(
    catalog: Catalog, backends: Mapping[str, HasReadiness], failed_models: Sequence[str] = ()
) -> str | None:
    """Why the gateway is not ready; None if it is. ``backends`` are by name.

    ``failed_models`` are those without which it is not ready.
    """
    if not catalog.ready:
        return "the gateway drains"
    if failed_models:
        return f"models can't be loaded: {', '.join(failed_models)}"
    if any(backend.ready for backend in backends.values()):
        return None
    reasons = list_failures(backends) | list_loading(backends)
    failures = [f"{name}: {reason}" for name, reason in reasons.items()]
    return "; ".join(["no backend is ready", *failures])
