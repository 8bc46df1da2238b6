"""The admin listener: paths, authentication, workers, web UI and playground."""

import asyncio
import hashlib
import hmac
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib import resources
from typing import Annotated, Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta, Struct

from backends.http.interfaces import WorkerConfig
from gateway.admin.application_listener import ApplicationListener, BodyReader
from gateway.config.schema import AdminConfig, ServerLimitsConfig
from gateway.explain.report import ExplainRequest, Explanation, format_explanation
from gateway.http_server.connection import HandleRequest
from gateway.http_server.web_pages import is_local_host, names_local_host
from gateway.memory import MemoryBudget
from gateway.routing.failed_models import list_failures, list_loading
from protocols.core.catalog import Catalog
from protocols.core.errors import MalformedRequest
from protocols.core.interfaces import Headers
from protocols.core.json_text import decode_json
from protocols.core.units import parse_worker_url as check_url
from protocols.core.units import split_address
from protocols.json_body import read_object

# Requests, responses and errors of the admin listener.

log = logging.getLogger("interlingua")

AiohttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""A request handler; aiohttp passes it to middlewares as ``handler``."""
BodyT = TypeVar("BodyT")

MAX_BODY_SIZE: Final = 64 << 10
"""Maximum bytes of a body."""
_BODY_TIMEOUT: Final = 10.0
"""Seconds to receive a body."""
CONNECTION_LIMITS: Final = ServerLimitsConfig(
    header=8 << 10,
    connections=64,
    connections_per_address=1 << 16,  # none: operators may share an address, and they have the key
    header_timeout=5.0,
    body_timeout=_BODY_TIMEOUT,
)
"""The admin listener's own, apart from those of clients."""
_BODY_BUDGET: Final = MemoryBudget(16 << 20)
"""For the bodies of playground requests."""
_ERROR_FIELD = re.compile(r"`\$\.(\w+)`|field `([^`]*)`")
RESPONSE_HEADERS: Final = {
    hdrs.SERVER: "interlingua",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response."""
_STATUS_MESSAGES: Final[Mapping[int, str]] = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: f"the body is larger than {MAX_BODY_SIZE} bytes",
}


class AdminError(Exception):
    """An error response."""

    def __init__(
        self, status: HTTPStatus, message: str, field: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = headers


@web.middleware
async def error_middleware(request: web.Request, handler: AiohttpHandler) -> web.StreamResponse:
    """Add the common headers, and turn exceptions into JSON errors."""
    try:
        response = await handler(request)
    except AdminError as error:
        response = _error_response(error.status, error.message, error.field, error.headers)
    except web.HTTPException as error:
        message = _STATUS_MESSAGES.get(error.status, "the request cannot be handled")
        response = _error_response(error.status, message, None, {})
        if (allowed_methods := error.headers.get(hdrs.ALLOW)) is not None:
            response.headers[hdrs.ALLOW] = allowed_methods
    except Exception:
        log.exception("an admin request failed")
        response = _error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error", None, {})
    response.headers.update(RESPONSE_HEADERS)
    return response


async def read_json_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Decode a JSON body. The content type check rejects cross-site HTML forms."""
    encoded = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity"
    if request.content_type != "application/json" or encoded:
        message = "the content type must be application/json"
        raise AdminError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            body = await request.read()
    except TimeoutError:
        raise AdminError(HTTPStatus.REQUEST_TIMEOUT, "the body took too long") from None
    try:
        read_object(body)  # for better error messages
        return decode_json(body, kind=kind)
    except MalformedRequest as error:
        raise AdminError(HTTPStatus.BAD_REQUEST, error.message) from None
    except msgspec.ValidationError as error:
        text = str(error)
        match = _ERROR_FIELD.search(text)
        field = (match[1] or match[2]) if match else None
        message = text.partition(" - at ")[0]
        raise AdminError(HTTPStatus.BAD_REQUEST, message, field) from None


def json_response(status: int, payload: object) -> web.Response:
    """Build a JSON response."""
    return web.Response(
        status=status, body=msgspec.json.encode(payload), content_type="application/json"
    )


def _error_response(
    status: int, message: str, field: str | None, headers: Mapping[str, str]
) -> web.Response:
    response = json_response(status, {"error": {"message": message, "field": field}})
    response.headers.update(headers)
    return response


# The services behind the admin listener.


@runtime_checkable
class WorkerSet(Protocol):
    """The workers of a backend, which can be changed at runtime."""

    def report_workers(self) -> Any:
        """A JSON-serializable report of each worker, without keys."""

    def add_worker(self, worker: WorkerConfig) -> bool:
        """Add a worker or replace the one with its URL; returns whether it is new.

        Raises ValueError if it cannot be added.
        """

    def remove_worker(self, url: str) -> bool:
        """Remove a worker; returns whether it existed. Raises ValueError if it cannot be."""


class ReloadReport(Protocol):
    """The result of a reload."""

    @property
    def hash(self) -> str:
        """The hash of the configuration in effect."""

    @property
    def filename(self) -> str:
        """The configuration file."""

    @property
    def issues(self) -> Sequence[Any]:
        """Errors with line and column; empty if the reload succeeded."""


class SupportsExplain(Protocol):
    """Explains requests."""

    def find_explanation(self, id: str, /) -> Explanation | None:  # noqa: A002 - the usual name
        """The explanation of a request that asked for one."""

    async def explain_request(self, question: ExplainRequest) -> Any:
        """Explain a request by a dry run. Raises LookupError for an invalid question."""


class StatusService(Protocol):
    """Reports and changes the state of the gateway."""

    async def get_config(self) -> Any:
        """The configuration as JSON, with masked secrets."""

    def get_status(self) -> Any:
        """The status."""

    def start(self) -> None:
        """Start to sample the statistics."""

    def stop(self) -> None:
        """Sample no more."""

    def get_history(self) -> Any:
        """The statistics of the last 15 minutes."""

    def list_requests(self) -> Sequence[Any]:
        """The running requests, the oldest first."""

    def list_finished(self) -> Sequence[Any]:
        """The records of the last finished requests, the latest first."""

    def cancel_request(self, id: str) -> int:  # noqa: A002 - the usual name
        """Cancel the requests with this id; returns their number."""

    def set_draining(self, *, on: bool) -> None:
        """Start or stop draining."""

    def get_listener_handler(self, number: int) -> HandleRequest | None:
        """The request handler of the listener with this index, or None."""


class AddsRoutes(Protocol):
    """A part of the admin API with paths of its own."""

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""


class AdminServices(Struct, frozen=True, kw_only=True):
    """The services of an admin listener; a service that is None has no paths.

    ``get_unready_reason`` returns why the gateway is not ready, or None if it is;
    ``list_failed_models`` the models that can't be loaded.
    ``render_metrics`` returns the page for Prometheus.
    """

    get_unready_reason: Callable[[], str | None]
    worker_sets: Mapping[str, WorkerSet]
    list_failed_models: Callable[[], Sequence[str]] = tuple
    render_metrics: Callable[[], bytes] = bytes
    reload_config: Callable[[], Awaitable[ReloadReport]] | None = None
    explain_service: SupportsExplain | None = None
    status_service: StatusService | None = None
    list_experiments: AiohttpHandler | None = None
    """Answers ``GET /-/experiments``."""
    list_rollouts: AiohttpHandler | None = None
    """Answers ``GET /-/rollouts``."""
    usage_api: AddsRoutes | None = None
    list_listener_urls: Callable[[], Sequence[str]] = tuple
    """The URLs at which models are served."""


class HasReadiness(Protocol):
    """A backend that reports its readiness."""

    @property
    def ready(self) -> bool:
        """Whether the backend can answer requests."""


def get_unready_reason(
    catalog: Catalog, backends: Mapping[str, HasReadiness], failed_models: Sequence[str] = ()
) -> str | None:
    """Why the gateway is not ready; None if it is. ``backends`` are by name.

    ``failed_models`` are those without which it is not ready.
    """
    if not catalog.ready:
        return "the gateway drains"
    if failed_models:
        return f"models can't be loaded: {', '.join(failed_models)}"
    if any(backend.ready for backend in backends.values()):
        return None
    reasons = list_failures(backends) | list_loading(backends)
    failures = [f"{name}: {reason}" for name, reason in reasons.items()]
    return "; ".join(["no backend is ready", *failures])


# Listing, adding and removing workers.


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


# The files of the web UI, which contain no data of the gateway.

_UI_PATH: Final = "/-/ui/"
_UI_FILES: Final = resources.files("gateway.admin") / "static"
_CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No external resources, no inline scripts, and no text is parsed as HTML."""


async def redirect_to_ui(request: web.Request) -> web.Response:
    """Redirect to the web UI."""
    del request
    return web.Response(status=HTTPStatus.FOUND, headers={hdrs.LOCATION: _UI_PATH})


async def serve_ui_file(request: web.Request) -> web.Response:
    """Serve a file of the web UI."""
    name = request.match_info["file"] or "index.html"
    file = {entry.name: entry for entry in _UI_FILES.iterdir()}.get(name)
    content_type = _CONTENT_TYPES.get(name.rpartition(".")[2])
    if file is None or content_type is None:
        raise AdminError(HTTPStatus.NOT_FOUND, "there is no such path")
    headers = {
        hdrs.CONTENT_TYPE: content_type,
        hdrs.CONTENT_SECURITY_POLICY: _CONTENT_SECURITY_POLICY,
        "Referrer-Policy": "no-referrer",
    }
    return web.Response(body=file.read_bytes(), headers=headers)


# The playground: requests of the web UI to a listener. The admin key is not forwarded; a client's
# key is sent as ``x-api-key``.

_ADMIN_HEADERS: Final = frozenset({"authorization", "cookie", "host", "origin", "referer"})
"""Request headers that are not forwarded to the listener."""
_HOP_BY_HOP_HEADERS: Final = frozenset({"connection", "content-length", "transfer-encoding"})


class _PlaygroundRequest:
    """A ``gateway.pipeline.http.HttpRequest``."""

    headers: Mapping[str, str]
    head = None

    def __init__(self, raw: web.Request) -> None:
        path, _, query = raw.raw_path.partition("?")
        self.method = raw.method
        self.path = "/" + path.split("/", 4)[4]
        self.query = query
        self.headers = {
            name.lower(): value
            for name, value in raw.headers.items()
            if name.lower() not in _ADMIN_HEADERS
        }
        self.peer = raw.remote or ""
        self._raw = raw
        self._reader = BodyReader(CONNECTION_LIMITS, _BODY_BUDGET)

    async def body(self, limit: int) -> bytes:
        return await self._reader.read(self._raw, limit)

    def reserve_memory(self, size: int) -> None:
        self._reader.reserve_memory(size)

    def release_memory(self) -> None:
        """Give the budget of bodies back what the request took of it."""
        self._reader.release()


class _PlaygroundResponseWriter:
    """A ``gateway.pipeline.http.ResponseWriter``."""

    needs_drain = True

    def __init__(self, raw: web.Request) -> None:
        self._raw = raw
        self._response = web.StreamResponse()
        self._buffer: list[bytes] = []
        self.started = False
        self._finished = False

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.write(body)
        self.finish()

    def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self._response.set_status(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP_HEADERS:
                self._response.headers[name] = value
        self._response.headers.update(RESPONSE_HEADERS)
        self._response.headers[hdrs.CONTENT_SECURITY_POLICY] = "default-src 'none'; sandbox"

    def write(self, data: bytes) -> None:
        if self._raw.method != hdrs.METH_HEAD:  # a response to HEAD has no body
            self._buffer.append(data)

    def finish(self) -> None:
        self._finished = True

    async def drain(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._raw)
        data = b"".join(self._buffer)
        self._buffer.clear()
        await self._response.write(data)

    async def close(self) -> web.StreamResponse:
        """Send the rest; abort the connection if the response is not finished."""
        await self.drain()
        if self._finished:
            await self._response.write_eof()
        elif self._raw.transport is not None:
            self._raw.transport.abort()
        return self._response


async def serve_playground(
    status_service: StatusService, request: web.Request
) -> web.StreamResponse:
    """Forward the request to a listener's handler."""
    handle_request = status_service.get_listener_handler(int(request.match_info["listener"]))
    if handle_request is None:
        raise AdminError(HTTPStatus.NOT_FOUND, "there is no such listener", "listener")
    writer = _PlaygroundResponseWriter(request)
    http_request = _PlaygroundRequest(request)
    try:
        await handle_request(http_request, writer)
        return await writer.close()
    finally:
        http_request.release_memory()


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
        origin = request.headers.get(hdrs.ORIGIN, "")
        if (
            origin
            and request.method not in _SAFE_METHODS
            and origin.partition("://")[2] != host_header
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
