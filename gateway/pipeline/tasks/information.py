"""Requests that need no model: listings, versions, health."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

from gateway.auth.api_keys import may_explain
from gateway.pipeline.responder import send_reply
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState
from gateway.routing.router import PrincipalCatalog, Router
from protocols.core.interfaces import HttpResponse

_LONG_LIST: Final = 100
"""Models from which on building their list would delay other requests."""
_CACHED_LISTS: Final = 32
_ListKey = tuple[int, str, frozenset[str] | None, bool]


class InformationHandler:
    """Answers from the catalog of models.

    A list of models is cached while no model changes; a long one is built in a thread.
    """

    reads_body = True

    def __init__(self, router: Router, settings: HandlerSettings) -> None:
        self._router = router
        self._settings = settings
        self._model_lists: dict[_ListKey, tuple[tuple[object, ...], HttpResponse]] = {}
        """Responses with lists of models, and the readiness for which they are valid."""

    async def answer(self, request: RequestState) -> None:
        """See ``gateway.pipeline.tasks.registry.EndpointHandler``."""
        catalog = self.build_catalog(request)
        send_reply(request.writer, await self._build_response(request, catalog), request.record)

    def build_catalog(self, request: RequestState) -> PrincipalCatalog:
        """The models that the caller may see."""
        principal = request.principal
        return PrincipalCatalog(
            self._router,
            None if principal is None else principal.models,
            may_explain(principal, open_to_all=self._settings.explain_without_key),
        )

    async def _build_response(
        self, request: RequestState, catalog: PrincipalCatalog
    ) -> HttpResponse:
        adapter, call = request.adapter, request.client_request
        if not call.endpoint.lists_models:
            response = adapter.handle_info_request(call, catalog)
            await _complete_all(catalog.loads)
            return response
        key = (id(adapter), call.endpoint.path, catalog.allowed_models, catalog.shows_targets)
        readiness = self._router.read_readiness()
        cached = self._model_lists.get(key)
        if cached is not None and cached[0] == readiness:
            return cached[1]
        if self._router.model_count > _LONG_LIST:
            response = await asyncio.to_thread(adapter.handle_info_request, call, catalog)
        else:
            response = adapter.handle_info_request(call, catalog)
        if len(self._model_lists) >= _CACHED_LISTS:
            self._model_lists.pop(next(iter(self._model_lists)))
        self._model_lists[key] = readiness, response
        return response


async def _complete_all(loads: Sequence[Awaitable[bool]]) -> None:
    """Wait for all models, then raise the first error."""
    for result in await asyncio.gather(*loads, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
