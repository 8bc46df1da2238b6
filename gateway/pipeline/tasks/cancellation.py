"""Requests that cancel another request, by the id that their client gave it."""

import asyncio

from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.state import RequestState
from gateway.pipeline.tasks.information import InformationHandler
from protocols.core.errors import RequestNotFound


class CancellationHandler:
    """Cancels a running request of the same API key, and answers as the protocol does."""

    reads_body = True

    def __init__(self, dispatcher: Dispatcher, information: InformationHandler) -> None:
        self._dispatcher = dispatcher
        self._information = information

    async def answer(self, request: RequestState) -> None:
        """See ``gateway.pipeline.tasks.registry.EndpointHandler``.

        Raises ModelNotFound or RequestNotFound.
        """
        adapter = request.adapter
        info = await asyncio.to_thread(adapter.read_routing_info, request.client_request)
        self._information.build_catalog(request).find_model(info.model, info.version)
        client_id = info.client_id or ""
        name = adapter.name, request.record.key, client_id
        responder = self._dispatcher.named_requests.get(name) if client_id else None
        if responder is None:
            raise RequestNotFound("no running request has this id", id=client_id)
        responder.stop()
        await self._information.answer(request)
