"""The admin listener: its paths, who may use them, and the handlers of each.

Every request passes two middlewares: the outer one turns exceptions into errors, the inner one
checks the Host header, the key and the origin before a body is read. A path exists only if its
service does (``AdminServices``).

What must never happen:

- A path that is open by mistake: those without a key are listed, all others need it.
- A change that another site causes through a browser on the operator's machine.
"""

import hashlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final

from aiohttp import hdrs, web
from msgspec import Meta, Struct

from backends.http.interfaces import WorkerConfig
from gateway.admin.application_listener import ApplicationListener
from gateway.admin.http import (
    CONNECTION_LIMITS,
    MAX_BODY_SIZE,
    AdminError,
    AiohttpHandler,
    error_middleware,
    json_response,
    read_json_body,
)
from gateway.admin.services import (
    AdminServices,
    ReloadReport,
    StatusService,
    SupportsExplain,
    WorkerSet,
)
from gateway.admin.web_ui import redirect_to_ui, serve_playground, serve_ui_file
from gateway.config.schema import AdminConfig
from gateway.explain.report import ExplainRequest
from gateway.explain.report_text import format_explanation
from gateway.http_server.web_pages import is_local_host, names_local_host
from protocols.core.units import parse_worker_url as check_url
from protocols.core.units import split_address

_METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_UNPRIVILEGED_PATHS: Final = ("/-/explain", "/-/playground/")
_SAFE_METHODS: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})


class AdminServer:
    """The admin listener at ``address`` (``host:port``).

    ``settings.key_for`` says what needs its key. Beyond loopback everything does; without a key,
    ValueError. On loopback, the Host header must be loopback too: this prevents DNS rebinding.
    """

    def __init__(self, settings: AdminConfig, services: AdminServices) -> None:
        self._host, self._port = split_address(settings.address)
        self._is_local = is_local_host(self._host)
        if settings.sha256 is None and not self._is_local:
            message = f"the admin listener at {settings.address} is beyond this machine: give a key"
            raise ValueError(message)
        self.configure_key(settings)
        self._services = services
        self._public_handlers: frozenset[AiohttpHandler] = frozenset(
            {self._get_live, self._get_ready, redirect_to_ui, serve_ui_file}
        )
        self.listener = ApplicationListener(self.build_application(), CONNECTION_LIMITS)

    def build_application(self) -> web.Application:
        """Build the paths and middlewares."""
        application = web.Application(
            middlewares=[error_middleware, self._authorize], client_max_size=MAX_BODY_SIZE
        )
        router, services = application.router, self._services
        router.add_get("/-/live", self._get_live)
        router.add_get("/-/ready", self._get_ready)
        router.add_get("/metrics", self._get_metrics)
        WorkerApi(services.worker_sets).add_routes(router)
        if services.reload_config is not None:
            router.add_post("/-/reload", partial(_reload_config, services.reload_config))
        if services.explain_service is not None:
            router.add_post("/-/explain", partial(_explain_request, services.explain_service))
            router.add_get(
                "/-/explain/{id:.+}", partial(_get_explanation, services.explain_service)
            )
        if services.list_experiments is not None:
            router.add_get("/-/experiments", services.list_experiments)
        if services.list_rollouts is not None:
            router.add_get("/-/rollouts", services.list_rollouts)
        if services.usage_api is not None:
            services.usage_api.add_routes(router)
        if services.status_service is not None:
            _add_status_routes(router, services.status_service)
        return application

    def configure_key(self, settings: AdminConfig) -> None:
        """Use the key of these settings from now on."""
        self._key_sha256 = settings.sha256.lower() if settings.sha256 is not None else None
        self._only_changes_need_key = self._is_local and settings.key_for == "changes"

    async def listen(self, path: str = "", sockets: Sequence[socket.socket] = ()) -> str:
        """Bind; returns the URL, with the port that the system chooses for 0.

        With a ``path``, bind a Unix socket and return "". With ``sockets``, nothing is bound: these
        are used.
        """
        await self.listener.set_up()
        if self._services.status_service is not None:
            self._services.status_service.start()
        if path:
            await self.listener.listen_unix(path)
            return ""
        bound = await self.listener.listen(self._host, self._port, sockets=sockets)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{bound}"

    @property
    def socket_fds(self) -> Sequence[int]:
        """File descriptors of the listening sockets."""
        return self.listener.socket_fds

    def stop_accepting(self) -> None:
        """Accept no more connections; open connections stay."""
        self.listener.stop_accepting()

    async def close(self) -> None:
        """Close the listener and its connections."""
        if self._services.status_service is not None:
            self._services.status_service.stop()
        await self.listener.close()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: AiohttpHandler) -> web.StreamResponse:
        host_header = request.headers.get(hdrs.HOST, "")
        if self._is_local and not names_local_host(host_header):
            message = "the Host header must be localhost or a loopback address"
            raise AdminError(HTTPStatus.FORBIDDEN, message)
        if isinstance(request.match_info.http_exception, web.HTTPNotFound):
            self._reject_client_path(request.path)
        if request.match_info.handler not in self._public_handlers and not (
            self._only_changes_need_key and _is_read(request)
        ):
            self._check_key(request.headers.get(hdrs.AUTHORIZATION, ""))
        origins = request.headers.getall(hdrs.ORIGIN, ())
        if request.method not in _SAFE_METHODS and any(
            origin and origin.partition("://")[2] != host_header for origin in origins
        ):
            # Another site can cause a request without a body, but browsers send its origin.
            raise AdminError(HTTPStatus.FORBIDDEN, "cross-origin requests are not allowed")
        return await handler(request)

    def _reject_client_path(self, path: str) -> None:
        """Tell clients of models that they have the wrong port, before they are asked for a key."""
        if path.startswith("/-/") or not (urls := self._services.list_listener_urls()):
            return
        place = " and ".join(urls) if self._is_local else "the addresses of the setting listeners"
        message = f"this is the admin listener; models are served at {place}"
        raise AdminError(HTTPStatus.NOT_FOUND, message)

    def _check_key(self, authorization: str) -> None:
        if self._key_sha256 is None:
            return
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._key_sha256):
            message = "the admin key is required, as Authorization: Bearer"
            raise AdminError(HTTPStatus.UNAUTHORIZED, message, **{hdrs.WWW_AUTHENTICATE: "Bearer"})

    async def _get_live(self, request: web.Request) -> web.Response:
        del request
        return json_response(HTTPStatus.OK, {"status": "live"})

    async def _get_ready(self, request: web.Request) -> web.Response:
        del request
        if (reason := self._services.get_unready_reason()) is not None:
            raise AdminError(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        status: dict[str, Any] = {"status": "ready"}
        if failed := self._services.list_failed_models():
            status["failed_models"] = failed
        return json_response(HTTPStatus.OK, status)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=self._services.render_metrics(), headers={hdrs.CONTENT_TYPE: _METRICS_CONTENT_TYPE}
        )


def _add_status_routes(router: web.UrlDispatcher, status_service: StatusService) -> None:
    """Add the paths of the status service and the web UI."""
    router.add_get("/", redirect_to_ui)
    router.add_get("/-/ui", redirect_to_ui)
    router.add_get("/-/ui/{file:.*}", serve_ui_file)
    router.add_get("/-/config", partial(_get_config, status_service))
    router.add_get("/-/status", partial(_get_status, status_service))
    router.add_get("/-/history", partial(_get_history, status_service))
    router.add_get("/-/requests", partial(_get_requests, status_service))
    router.add_get("/-/requests/finished", partial(_get_finished_requests, status_service))
    router.add_post("/-/requests/{id:.+}/cancel", partial(_cancel_request, status_service))
    router.add_post("/-/drain", partial(_set_draining, status_service, on=True))
    router.add_delete("/-/drain", partial(_set_draining, status_service, on=False))
    router.add_route(
        "*",
        r"/-/playground/{listener:\d{1,4}}/{path:.*}",
        partial(serve_playground, status_service),
    )


async def _get_config(status_service: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, await status_service.get_config())


async def _get_status(status_service: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, status_service.get_status())


async def _get_requests(status_service: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, {"requests": status_service.list_requests()})


async def _get_history(status_service: StatusService, request: web.Request) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, status_service.get_history())


async def _get_finished_requests(
    status_service: StatusService, request: web.Request
) -> web.Response:
    del request
    return json_response(HTTPStatus.OK, {"requests": status_service.list_finished()})


async def _cancel_request(status_service: StatusService, request: web.Request) -> web.Response:
    if not (count := status_service.cancel_request(request.match_info["id"])):
        raise AdminError(HTTPStatus.NOT_FOUND, "no running request has this id", "id")
    return json_response(HTTPStatus.OK, {"cancelled": count})


async def _set_draining(
    status_service: StatusService, request: web.Request, *, on: bool
) -> web.Response:
    del request
    status_service.set_draining(on=on)
    return json_response(HTTPStatus.OK, {"draining": on})


async def _reload_config(
    reload: Callable[[], Awaitable[ReloadReport]], request: web.Request
) -> web.Response:
    del request
    result = await reload()
    if not result.issues:
        return json_response(HTTPStatus.OK, {"hash": result.hash})
    message = f"{result.filename} is invalid; the configuration is unchanged"
    error = {"message": message, "field": None}
    payload = {"error": error, "issues": result.issues, "hash": result.hash}
    return json_response(HTTPStatus.UNPROCESSABLE_ENTITY, payload)


async def _explain_request(explain: SupportsExplain, request: web.Request) -> web.Response:
    question = await read_json_body(request, ExplainRequest)
    try:
        return json_response(HTTPStatus.OK, await explain.explain_request(question))
    except LookupError as error:
        raise AdminError(HTTPStatus.BAD_REQUEST, str(error.args[0])) from None


async def _get_explanation(explain: SupportsExplain, request: web.Request) -> web.Response:
    """The explanation as JSON, or as text with the query ``format=text``."""
    explanation = explain.find_explanation(request.match_info["id"])
    if explanation is None:
        message = "no recent explanation has this id"
        raise AdminError(HTTPStatus.NOT_FOUND, message, "id")
    if request.query.get("format") == "text":
        return web.Response(text=format_explanation(explanation))
    return json_response(HTTPStatus.OK, explanation)


def _is_read(request: web.Request) -> bool:
    """Whether a request changes nothing in the gateway; the playground is a client of it."""
    return request.method in _SAFE_METHODS or request.path.startswith(_UNPRIVILEGED_PATHS)


class _AddWorkerRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /-/workers; bounds are those of the configuration."""

    backend: str
    url: str
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class WorkerApi:
    """The paths for workers; ``worker_sets`` are by backend name."""

    def __init__(self, worker_sets: Mapping[str, WorkerSet]) -> None:
        self._worker_sets = worker_sets

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""
        router.add_get("/-/workers", self._list_workers)
        router.add_post("/-/workers", self._add_worker)
        router.add_delete("/-/workers", self._remove_worker)

    async def _list_workers(self, request: web.Request) -> web.Response:
        del request
        reports = {name: pool.report_workers() for name, pool in self._worker_sets.items()}
        return json_response(HTTPStatus.OK, {"backends": reports})

    async def _add_worker(self, request: web.Request) -> web.Response:
        command = await read_json_body(request, _AddWorkerRequest)
        pool = self._get_worker_set(command.backend)
        try:
            worker = WorkerConfig(check_url(command.url), command.weight, command.max_concurrency)
        except ValueError as error:
            raise AdminError(HTTPStatus.BAD_REQUEST, f"the URL {error}", "url") from None
        try:
            new = pool.add_worker(worker)
        except ValueError as error:
            raise AdminError(HTTPStatus.CONFLICT, str(error), "url") from None
        payload = {
            "backend": command.backend,
            "url": worker.url,
            "weight": worker.weight,
            "max_concurrency": worker.max_concurrency,
        }
        return json_response(HTTPStatus.CREATED if new else HTTPStatus.OK, payload)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        query = request.query
        for name in query:
            if name not in ("backend", "url"):
                raise AdminError(HTTPStatus.BAD_REQUEST, "there is no such parameter", name)
        for name in ("backend", "url"):
            if len(query.getall(name, [])) != 1:
                message = "the parameter must be given exactly once"
                raise AdminError(HTTPStatus.BAD_REQUEST, message, name)
        pool = self._get_worker_set(query["backend"])
        try:
            removed = pool.remove_worker(query["url"])
        except ValueError as error:
            raise AdminError(HTTPStatus.CONFLICT, str(error), "url") from None
        if not removed:
            raise AdminError(HTTPStatus.NOT_FOUND, "the backend has no such worker", "url")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    def _get_worker_set(self, name: str) -> WorkerSet:
        if name not in self._worker_sets:
            names = ", ".join(self._worker_sets) or "none"
            message = f"there is no such backend with workers; known: {names}"
            raise AdminError(HTTPStatus.NOT_FOUND, message, "backend")
        return self._worker_sets[name]
