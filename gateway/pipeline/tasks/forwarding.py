"""Requests that a worker gets without translation; see ``gateway.pipeline.proxy``."""

from functools import partial

from gateway.pipeline.admission import Admission
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.model_access import check_fields
from gateway.pipeline.proxy import ProxiedBody, ProxiedRequest, get_proxy_adapter
from gateway.pipeline.services import GatewayServices, HandlerSettings
from gateway.pipeline.state import RequestState
from gateway.pipeline.tasks.generation import make_context
from gateway.routing.router import Router
from protocols.core.errors import InvalidParameter
from protocols.core.interfaces import RoutingInfo


class ForwardingHandler:
    """Reads as much of the body as names the model, routes, limits, and forwards."""

    reads_body = False

    def __init__(
        self,
        router: Router,
        settings: HandlerSettings,
        services: GatewayServices,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
    ) -> None:
        self._router = router
        self._settings = settings
        self._clock = services.clock
        self._admission = admission
        self._dispatcher = dispatcher

    async def answer(self, request: RequestState) -> None:
        """See ``gateway.pipeline.tasks.registry.EndpointHandler``."""
        body = ProxiedBody(request.http, self._settings.max_body_size, self._settings.body_counts)
        adapter = get_proxy_adapter(request.adapter)
        request.client_request = await body.find_model(adapter, request.build_client_request)
        model = body.model or self._settings.default_model
        if not model:
            text = "you must provide the field 'model'"
            raise InvalidParameter(text, param="model", problem="missing")
        info = request.routing_info = RoutingInfo(model, replaces_model=True)
        request.backend_observer = None  # it is not explained how a request is forwarded
        request.context = make_context(request, self._clock, self._settings)
        principal = request.principal
        if principal is not None and principal.models is not None:
            is_allowed = partial(self._router.allows_worker_model, allowed_models=principal.models)
            check_fields(body.read_fields(), info, is_allowed)
        self._admission.admit(request)
        proxied = ProxiedRequest(request, self._router, body)
        await proxied.run(self._dispatcher.running_requests)
