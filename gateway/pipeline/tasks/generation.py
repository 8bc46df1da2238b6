"""Requests that a model answers: text, embeddings, scores, tokens."""

import asyncio
from functools import partial
from typing import Final

from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext
from gateway.pipeline.admission import Admission
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.http import LARGE_BODY, parse_seconds
from gateway.pipeline.model_access import check_named_models, names_only_routed_model
from gateway.pipeline.services import GatewayServices, HandlerSettings
from gateway.pipeline.state import RequestState
from gateway.pipeline.tasks.information import InformationHandler
from gateway.pipeline.tasks.stored_responses import load_references
from gateway.routing.router import Router
from protocols.core.interfaces import Clock

_COPIES: Final = 3
"""How often a large body is in memory: as it was read, which is reserved already unless it was
compressed, decoded, and as the worker gets it. Of a stream that has begun, it is once."""
_TIMEOUT_HEADER: Final = "x-interlingua-timeout"
"""The request header with the client's timeout, in seconds."""


class GenerationHandler:
    """Decodes what routing needs, routes, limits, and sends the request to its target."""

    reads_body = True

    def __init__(
        self,
        router: Router,
        settings: HandlerSettings,
        services: GatewayServices,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
        information: InformationHandler,
    ) -> None:
        self._router = router
        self._settings = settings
        self._clock = services.clock
        self._reference_loader = services.reference_loader
        self._admission = admission
        self._dispatcher = dispatcher
        self._information = information

    async def answer(self, request: RequestState) -> None:
        """See ``gateway.pipeline.tasks.registry.EndpointHandler``."""
        adapter, call, principal = request.adapter, request.client_request, request.principal
        if len(call.body) < LARGE_BODY:
            info = request.routing_info = adapter.read_routing_info(call)
        else:
            request.copies_size = len(call.body) * (_COPIES - 1)
            is_compressed = "content-encoding" in call.headers
            request.http.reserve_memory(
                request.copies_size + (len(call.body) if is_compressed else 0)
            )
            info = await asyncio.to_thread(adapter.read_routing_info, call)
            request.routing_info = info
        request.context = make_context(request, self._clock, self._settings)
        if call.endpoint.is_stateful:
            await load_references(request, self._reference_loader, self._settings)
        if info.inform:
            await self._information.answer(request)
            return
        if info.other_names or not info.model:
            request.routing_info = replace(info, model=self._router.find_name(info))
        if (
            principal is not None
            and principal.models is not None
            and not names_only_routed_model(call, info)
        ):
            is_allowed = partial(self._router.allows_worker_model, allowed_models=principal.models)
            await check_named_models(call, info, is_allowed)
        self._admission.admit(request)
        await self._dispatcher.dispatch(request)


def make_context(request: RequestState, clock: Clock, settings: HandlerSettings) -> RequestContext:
    """What backends see of a request whose body was read."""
    call, timeouts, received_at = request.client_request, settings.timeouts, clock()
    headers = call.headers
    deadline = Deadline(clock, timeouts.total, received_at)
    if (
        _TIMEOUT_HEADER in headers
        and (seconds := parse_seconds(headers[_TIMEOUT_HEADER])) is not None
    ):
        deadline.shorten(seconds)
    traceparent = headers.get("traceparent")
    return RequestContext(
        id=request.record.id,
        deadline=deadline,
        clock=clock,
        timeouts=timeouts,
        principal=request.record.key or None,
        traceparent=traceparent,
        observer=request.backend_observer,
        received_at=received_at,
        tracestate=traceparent and headers.get("tracestate"),
        attempt_trace=request.attempt_trace,
        offload_to_thread=len(call.body) >= LARGE_BODY,
        reserve_memory=request.http.reserve_response,
    )
