"""The interface of the explain recorder, and its null default.

The handler and the dispatcher report the steps of each request to one recorder. Unless the request
is to be explained, that is ``NULL_RECORDER``. The real one is in ``gateway.explain.recorder``; the
runtime passes it in as an ``ExplainPolicy``.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from backends.interfaces import RequestObserver
from gateway.auth.api_keys import Principal
from gateway.observability.record import RequestRecord
from gateway.pipeline.http import ResponseWriter
from gateway.pipeline.strategies import ResponseStrategy
from gateway.routing.request_attributes import RequestAttributes
from gateway.routing.router import Route, RouteObserver, Router
from protocols.core.interfaces import ClientAdapter, ClientRequest, RoutingInfo

EXPLAIN_HEADER: Final = "x-interlingua-explain"
"""The request header that requests an explanation, and the response header that contains it."""


class ExplainRecorder(Protocol):
    """Records how one request is handled."""

    @property
    def dry_run(self) -> bool:
        """Whether the request is only explained. No worker and no shadow may get it."""

    @property
    def route_observer(self) -> RouteObserver | None:
        """Observes the routing, if that is recorded."""

    @property
    def request_observer(self) -> RequestObserver | None:
        """Observes the backends, if they are recorded."""

    def wrap_writer(self, writer: ResponseWriter) -> ResponseWriter:
        """The writer, or one that adds the explanation to the response's headers."""

    def record_request(
        self,
        adapter: ClientAdapter,
        client_request: ClientRequest,
        principal: Principal | None,
        peer: str,
    ) -> None:
        """The request was read and authenticated."""

    def record_route(
        self,
        router: Router,
        routing_info: RoutingInfo,
        route: Route,
        get_attributes: Callable[[], RequestAttributes],
    ) -> None:
        """The router chose a target."""

    def record_fallbacks(self, candidates: Iterable[tuple[Route, ResponseStrategy | str]]) -> None:
        """The fallbacks of a dry run: each with its strategy, or why it would be skipped."""

    def record_attempt(self, strategy: ResponseStrategy, max_body_size: int) -> None:
        """A request is about to be sent to a target. Raises an error that ends a dry run."""


class NullRecorder:
    """Records nothing: an ``ExplainRecorder``."""

    dry_run = False
    route_observer = None
    request_observer = None

    def wrap_writer(self, writer: ResponseWriter) -> ResponseWriter:
        """See ``ExplainRecorder``."""
        return writer

    def record_request(self, *_: object) -> None:
        """See ``ExplainRecorder``."""

    def record_route(self, *_: object) -> None:
        """See ``ExplainRecorder``."""

    def record_fallbacks(self, *_: object) -> None:
        """See ``ExplainRecorder``."""

    def record_attempt(self, *_: object) -> None:
        """See ``ExplainRecorder``."""


NULL_RECORDER: Final = NullRecorder()


class ExplainPolicy(Protocol):
    """Returns the recorder of a request whose explanation is requested."""

    def __call__(
        self, record: RequestRecord, principal: Principal | None, *, open_to_all: bool
    ) -> ExplainRecorder:
        """``NULL_RECORDER`` unless ``principal`` may request it.

        ``open_to_all``: requests without a key may, too.
        """


def explain_nothing(
    record: RequestRecord, principal: Principal | None, *, open_to_all: bool
) -> ExplainRecorder:
    """Explains no request: an ``ExplainPolicy``."""
    del record, principal, open_to_all
    return NULL_RECORDER
