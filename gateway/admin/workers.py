"""Workers that are listed, added and removed by hand."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from backends.http.interfaces import WorkerConfig
from gateway.admin.answers import AdminError, json_response, read_json_body
from gateway.admin.ports import WorkerSet
from gateway.config.types import parse_worker_url as check_url


class _AddWorkerRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A body of POST; the bounds are those of the configuration."""

    backend: str
    url: str
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class WorkerApi:
    """Those of ``pools``, each by its backend's name."""

    def __init__(self, pools: Mapping[str, WorkerSet]) -> None:
        self._worker_sets = pools

    def add_routes(self, paths: web.UrlDispatcher) -> None:
        """Give them their paths."""
        paths.add_get("/-/workers", self._list_workers)
        paths.add_post("/-/workers", self._add_worker)
        paths.add_delete("/-/workers", self._remove_worker)

    async def _list_workers(self, request: web.Request) -> web.Response:
        del request
        known = {name: pool.report_workers() for name, pool in self._worker_sets.items()}
        return json_response(HTTPStatus.OK, {"backends": known})

    async def _add_worker(self, request: web.Request) -> web.Response:
        wanted = await read_json_body(request, _AddWorkerRequest)
        pool = self._get_worker_set(wanted.backend)
        try:
            worker = WorkerConfig(check_url(wanted.url), wanted.weight, wanted.max_concurrency)
        except ValueError as error:
            raise AdminError(HTTPStatus.BAD_REQUEST, f"the URL {error}", "url") from None
        try:
            new = pool.add_worker(worker)
        except ValueError as error:
            raise AdminError(HTTPStatus.CONFLICT, str(error), "url") from None
        told = {
            "backend": wanted.backend,
            "url": worker.url,
            "weight": worker.weight,
            "max_concurrency": worker.max_concurrency,
        }
        return json_response(HTTPStatus.CREATED if new else HTTPStatus.OK, told)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        asked = request.query
        for name in asked:
            if name not in ("backend", "url"):
                raise AdminError(HTTPStatus.BAD_REQUEST, "there is no such parameter", name)
        for name in ("backend", "url"):
            if len(asked.getall(name, [])) != 1:
                raise AdminError(HTTPStatus.BAD_REQUEST, "it must be given, once", name)
        pool = self._get_worker_set(asked["backend"])
        try:
            found = pool.remove_worker(asked["url"])
        except ValueError as error:
            raise AdminError(HTTPStatus.CONFLICT, str(error), "url") from None
        if not found:
            raise AdminError(HTTPStatus.NOT_FOUND, "the backend has no such worker", "url")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    def _get_worker_set(self, name: str) -> WorkerSet:
        if name not in self._worker_sets:
            known = ", ".join(self._worker_sets) or "none"
            message = f"there is no such backend with workers; known: {known}"
            raise AdminError(HTTPStatus.NOT_FOUND, message, "backend")
        return self._worker_sets[name]
