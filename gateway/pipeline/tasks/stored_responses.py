"""Stored responses: sent or removed by their id, and loaded where a request refers to them."""

import asyncio
from functools import partial

from backends.interfaces import TIME_IS_UP
from gateway.pipeline.http import LARGE_BODY
from gateway.pipeline.responder import send_reply
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState
from gateway.store.references import ReferenceLoader
from protocols.core.errors import DeadlineExceeded, StoredObjectNotFound
from protocols.core.interfaces import StoresResponses


class StoredResponseHandler:
    """Answers from a stored response of the caller."""

    reads_body = True

    def __init__(self, loader: ReferenceLoader | None) -> None:
        """``loader`` is None if responses are not stored."""
        self._loader = loader

    async def answer(self, request: RequestState) -> None:
        """See ``gateway.pipeline.tasks.registry.EndpointHandler``.

        Raises StoredObjectNotFound or Overloaded.
        """
        adapter, call, loader = request.adapter, request.client_request, self._loader
        assert isinstance(adapter, StoresResponses)  # noqa: S101 - as its endpoint says
        name, owner = adapter.read_stored_id(call), request.record.key
        stored = None if loader is None else await loader.load_response(owner, name, request.http)
        if loader is None or stored is None:
            text = f"Response with id '{name[:128]}' not found."
            raise StoredObjectNotFound(text, id=name)
        if call.endpoint.method == "DELETE":
            await loader.store.remove_response(owner, name)
        response = (
            adapter.encode_stored(call, stored)
            if len(stored.body) < LARGE_BODY
            else await asyncio.to_thread(adapter.encode_stored, call, stored)
        )
        send_reply(request.writer, response, request.record)


async def load_references(
    request: RequestState, loader: ReferenceLoader | None, settings: HandlerSettings
) -> None:
    """Load what a request to a stateful endpoint refers to; have its response stored.

    Raises DeadlineExceeded, and as ``ReferenceLoader.load_parts``.
    """
    adapter, call, context = request.adapter, request.client_request, request.context
    assert isinstance(adapter, StoresResponses)  # noqa: S101 - as its endpoint says
    if loader is None:
        adapter.set_references(call, None)
        return
    owner = request.record.key
    counts = (
        await asyncio.to_thread(adapter.count_references, call)
        if context.offload_to_thread
        else adapter.count_references(call)
    )
    try:
        async with asyncio.timeout(context.deadline.remaining()):
            parts = await loader.load_parts(
                owner,
                counts,
                lambda stored: adapter.read_parts(stored, counts),
                account=request.http,
                body_size=len(call.body),
                limit=settings.max_body_size,
            )
    except TimeoutError:
        raise DeadlineExceeded(TIME_IS_UP) from None
    size = sum(len(part) * counts[name] for name, part in parts.items())
    if parts and settings.body_counts.needs_check(len(call.body) + size):
        references = [(part, counts[name]) for name, part in parts.items()]
        await asyncio.to_thread(settings.body_counts.check, (call.body,), references)
    context.offload_to_thread = len(call.body) + size >= LARGE_BODY
    if size < LARGE_BODY:
        adapter.set_references(call, parts)
    else:
        await asyncio.to_thread(adapter.set_references, call, parts)
    if not request.is_dry_run:
        request.store_response = partial(loader.store.add_response, owner)
