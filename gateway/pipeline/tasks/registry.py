"""The handler of each task of endpoints (``protocols.core.interfaces.Endpoint.task``)."""

from collections.abc import Mapping
from typing import Protocol

from gateway.pipeline.admission import Admission
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.services import GatewayServices, HandlerSettings
from gateway.pipeline.state import RequestState
from gateway.pipeline.tasks.cancellation import CancellationHandler
from gateway.pipeline.tasks.forwarding import ForwardingHandler
from gateway.pipeline.tasks.generation import GenerationHandler
from gateway.pipeline.tasks.information import InformationHandler
from gateway.pipeline.tasks.stored_responses import StoredResponseHandler
from gateway.pipeline.tasks.token_counts import TokenCountHandler
from gateway.routing.router import Router


class EndpointHandler(Protocol):
    """Answers the requests to endpoints of one task."""

    reads_body: bool
    """Whether it needs the whole body, so that ``request.client_request`` has it."""

    async def answer(self, request: RequestState) -> None:
        """Answer a request of a known caller. Raises GatewayError before the response begins."""


def build_endpoint_handlers(
    router: Router,
    admission: Admission,
    dispatcher: Dispatcher,
    settings: HandlerSettings,
    services: GatewayServices,
) -> Mapping[str, EndpointHandler]:
    """The handlers of one listener, by task."""
    information = InformationHandler(router, settings)
    generation = GenerationHandler(
        router,
        settings,
        services,
        admission=admission,
        dispatcher=dispatcher,
        information=information,
    )
    forwarding = ForwardingHandler(
        router, settings, services, admission=admission, dispatcher=dispatcher
    )
    return {
        "generate": generation,
        "tokenize": TokenCountHandler(generation),
        "inform": information,
        "stop": CancellationHandler(dispatcher, information),
        "recall": StoredResponseHandler(services.reference_loader),
        "proxy": forwarding,
    }
