"""The admin listener: its paths, and what stands before them."""

import hashlib
import hmac
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from gateway.admin import page
from gateway.admin.answers import (
    MAX_BODY_SIZE,
    AdminError,
    AiohttpHandler,
    error_middleware,
    json_response,
    read_json_body,
)
from gateway.admin.playing import serve_playground
from gateway.admin.ports import AdminServices, ReloadReport, StatusService, SupportsExplain
from gateway.admin.workers import WorkerApi
from gateway.config.types import parse_ip, split_address
from gateway.explain.report import ExplainRequest
from gateway.http_server.sockets import ListenSockets

_METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_HOST_HEADER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:@/?#\\]+)(?::[0-9]{1,5})?")
_SAFE_METHODS: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})


class AdminServer:
    """The admin listener at ``address`` (``host:port``), for what is ``behind`` it.

    ``sha256`` is that of the key, which a listener beyond this machine must have: ValueError
    otherwise. On this machine the host that is asked for must be this machine, too, or any page in
    a browser here could ask by a name that leads here.
    """

    def __init__(self, address: str, behind: AdminServices, *, sha256: str | None = None) -> None:
        self._host, self._port = split_address(address)
        self._is_local = _is_local_host(self._host)
        if sha256 is None and not self._is_local:
            raise ValueError(f"the admin listener at {address} is beyond this machine: give a key")
        self._key_sha256 = sha256.lower() if sha256 is not None else None
        self._services = behind
        self._sockets: ListenSockets | None = None
        self._public_handlers: frozenset[AiohttpHandler] = frozenset(
            {self._get_live, self._get_ready, page.redirect_to_ui, page.serve_ui_file}
        )
        self._runner = web.AppRunner(
            self.build_application(),
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=logging.getLogger("interlingua.http"),
            auto_decompress=False,
            shutdown_timeout=1.0,
        )

    def build_application(self) -> web.Application:
        """Its paths, and what stands before them."""
        made = web.Application(
            middlewares=[error_middleware, self._authorize], client_max_size=MAX_BODY_SIZE
        )
        paths, behind = made.router, self._services
        paths.add_get("/-/live", self._get_live)
        paths.add_get("/-/ready", self._get_ready)
        paths.add_get("/metrics", self._get_metrics)
        WorkerApi(behind.worker_sets).add_routes(paths)
        if behind.reload_config is not None:
            paths.add_post("/-/reload", partial(_reload_config, behind.reload_config))
        if behind.explain_service is not None:
            paths.add_post("/-/explain", partial(_explain_request, behind.explain_service))
            paths.add_get("/-/explain/{id:.+}", partial(_get_explanation, behind.explain_service))
        if behind.status_service is not None:
            _add_status_routes(paths, behind.status_service)
        return made

    def set_key(self, sha256: str | None) -> None:
        """Ask for another key from now on."""
        self._key_sha256 = sha256.lower() if sha256 is not None else None

    async def listen(self, path: str = "", given: Sequence[socket.socket] = ()) -> str:
        """Bind; gives the URL, with the port that the system chooses for 0.

        With a ``path`` it is a Unix socket there, of which no URL tells. Sockets that are ``given``
        listen already, and nothing is bound.
        """
        await self._runner.setup()
        if path:
            await web.UnixSite(self._runner, path).start()
            return ""
        assert self._runner.server is not None  # noqa: S101 - it was set up
        self._sockets = ListenSockets(self._runner.server)
        bound = await self._sockets.listen(self._host, self._port, given=given)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{bound}"

    @property
    def socket_fds(self) -> Sequence[int]:
        """The descriptors of its listening sockets."""
        return () if self._sockets is None else self._sockets.fds

    def stop_accepting(self) -> None:
        """Take no more connections. Those that are there go on."""
        if self._sockets is not None:
            self._sockets.stop_accepting()

    async def close(self) -> None:
        """Take no more requests, and let go of those that run."""
        if self._sockets is not None:
            await self._sockets.wait_closed()
        await self._runner.cleanup()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: AiohttpHandler) -> web.StreamResponse:
        asked = request.headers.get(hdrs.HOST, "")
        host = _HOST_HEADER.fullmatch(asked)
        if self._is_local and not (host and _is_local_host(host[1].strip("[]"))):
            raise AdminError(HTTPStatus.FORBIDDEN, "ask for this machine: localhost or 127.0.0.1")
        if request.match_info.handler not in self._public_handlers:
            self._check_key(request.headers.get(hdrs.AUTHORIZATION, ""))
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin and request.method not in _SAFE_METHODS and origin.partition("://")[2] != asked:
            # A page elsewhere may send it without a body: its browser says where it is from.
            raise AdminError(HTTPStatus.FORBIDDEN, "a page that is from elsewhere can't ask for it")
        return await handler(request)

    def _check_key(self, given: str) -> None:
        if self._key_sha256 is None:
            return
        scheme, _, key = given.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._key_sha256):
            message = "give the admin's key as Authorization: Bearer"
            raise AdminError(HTTPStatus.UNAUTHORIZED, message, **{hdrs.WWW_AUTHENTICATE: "Bearer"})

    async def _get_live(self, request: web.Request) -> web.Response:
        del request
        return json_response(HTTPStatus.OK, {"status": "live"})

    async def _get_ready(self, request: web.Request) -> web.Response:
        del request
        if (why := self._services.get_unready_reason()) is not None:
            raise AdminError(HTTPStatus.SERVICE_UNAVAILABLE, why)
        return json_response(HTTPStatus.OK, {"status": "ready"})

    async def _get_metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=self._services.render_metrics(), headers={hdrs.CONTENT_TYPE: _METRICS_CONTENT_TYPE}
        )


def _add_status_routes(paths: web.UrlDispatcher, overview: StatusService) -> None:
    """The paths that tell how the gateway is, and the page that shows it."""
    paths.add_get("/", page.redirect_to_ui)
    paths.add_get("/-/ui", page.redirect_to_ui)
    paths.add_get("/-/ui/{file:.*}", page.serve_ui_file)
    paths.add_get("/-/config", partial(_get_config, overview))
    paths.add_get("/-/status", partial(_get_status, overview))
    paths.add_get("/-/requests", partial(_get_requests, overview))
    paths.add_post("/-/requests/{id:.+}/cancel", partial(_cancel_request, overview))
    paths.add_post("/-/drain", partial(_set_draining, overview, on=True))
    paths.add_delete("/-/drain", partial(_set_draining, overview, on=False))
    paths.add_route(
        "*", r"/-/play/{listener:\d{1,4}}/{path:.*}", partial(serve_playground, overview)
    )


async def _get_config(overview: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, await overview.get_config())


async def _get_status(overview: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, overview.get_status())


async def _get_requests(overview: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, {"requests": overview.list_requests()})


async def _cancel_request(overview: StatusService, request: web.Request) -> web.Response:
    if not (count := overview.cancel_request(request.match_info["id"])):
        raise AdminError(HTTPStatus.NOT_FOUND, "no request of this id runs", "id")
    return json_response(HTTPStatus.OK, {"cancelled": count})


async def _set_draining(overview: StatusService, request: web.Request, *, on: bool) -> web.Response:
    del request
    overview.set_draining(on=on)
    return json_response(HTTPStatus.OK, {"draining": on})


async def _reload_config(
    reload: Callable[[], Awaitable[ReloadReport]], request: web.Request
) -> web.Response:
    del request
    told = await reload()
    if not told.issues:
        return json_response(HTTPStatus.OK, {"hash": told.hash})
    message = f"{told.filename} is wrong; the configuration stays as it was"
    wrong = {"message": message, "field": None}
    given = {"error": wrong, "complaints": told.issues, "hash": told.hash}
    return json_response(HTTPStatus.UNPROCESSABLE_ENTITY, given)


async def _explain_request(explain: SupportsExplain, request: web.Request) -> web.Response:
    question = await read_json_body(request, ExplainRequest)
    try:
        return json_response(HTTPStatus.OK, await explain.explain_request(question))
    except LookupError as error:
        raise AdminError(HTTPStatus.BAD_REQUEST, str(error.args[0])) from None


async def _get_explanation(explain: SupportsExplain, request: web.Request) -> web.Response:
    found = explain.find_explanation(request.match_info["id"])
    if found is None:
        message = "no request of this id is among the last that were explained"
        raise AdminError(HTTPStatus.NOT_FOUND, message, "id")
    return json_response(HTTPStatus.OK, found)


def _is_local_host(host: str) -> bool:
    found = parse_ip(host)
    return found.is_loopback if found else host.lower() == "localhost"
