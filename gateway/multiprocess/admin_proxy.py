"""The admin listener of several processes: queries each process and merges the responses.

The processes check the key and validate requests themselves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final

import httpx
import msgspec
from aiohttp import hdrs, web
from msgspec import Struct
from multidict import CIMultiDict

from gateway.admin.application_listener import ApplicationListener
from gateway.admin.http import CONNECTION_LIMITS
from gateway.multiprocess.merged_responses import MetricsPage, merge_cancelled, merge_responses
from gateway.multiprocess.serving_process import ServingProcess
from protocols.core.units import split_address

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request


_HOP_BY_HOP_HEADERS: Final = (
    hdrs.CONNECTION,
    hdrs.CONTENT_LENGTH,
    hdrs.TRANSFER_ENCODING,
    hdrs.KEEP_ALIVE,
    hdrs.EXPECT,
)
"""Headers that belong to one connection."""
_STREAM_TIMEOUT: Final = httpx.Timeout(None, connect=10.0)


def connect_to_socket(path: str, timeout: httpx.Timeout) -> httpx.AsyncClient:
    """A client of the listener at a Unix socket."""
    transport = httpx.AsyncHTTPTransport(uds=path, verify=False)  # it has no TLS
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)


def build_url(request: web.Request) -> httpx.URL:
    """The URL of a request at another listener; its path is not decoded and encoded again."""
    return httpx.URL("http://localhost").copy_with(raw_path=request.rel_url.raw_path_qs.encode())


async def proxy_request(request: web.Request, path: str) -> web.StreamResponse | None:
    """Forward a request to the listener at a Unix socket; None if it does not respond.

    If the response is cut off, so is the one to the client.
    """
    response = web.StreamResponse()
    try:
        async with (
            connect_to_socket(path, _STREAM_TIMEOUT) as client,
            client.stream(
                request.method,
                build_url(request),
                headers=_filter_headers(request.headers),
                content=request.content.iter_any() if request.body_exists else None,
            ) as upstream,
        ):
            response.set_status(upstream.status_code)
            response.headers.update(_filter_headers(upstream.headers))
            await response.prepare(request)
            async for chunk in upstream.aiter_raw():
                await response.write(chunk)
            await response.write_eof()
    except httpx.HTTPError:
        if not response.prepared:
            return None
        if request.transport is not None:
            request.transport.abort()
    return response


def _filter_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    filtered = CIMultiDict(headers)
    for name in _HOP_BY_HOP_HEADERS:
        filtered.popall(name, None)
    return filtered


_MAX_BODY_SIZE: Final = 64 << 10
_BODY_TIMEOUT: Final = 10.0
"""Seconds to receive a body."""
_QUERY_TIMEOUT: Final = 10.0
"""Seconds for any other query."""
_RELOAD_TIMEOUT: Final = 600.0
"""Seconds for a reload, which waits for the warmup of backends."""
_MERGED_PATHS: Final = frozenset(
    {"/-/workers", "/-/status", "/-/history", "/-/requests", "/-/requests/finished"}
)
_NO_PROCESS_MESSAGE: Final = "no process is ready"
_PLAYGROUND_PREFIX: Final = "/-/playground/"
"""Requests below this path go to a listener; responses are streamed."""
_REQUEST_HEADERS: Final = (
    hdrs.HOST,
    hdrs.AUTHORIZATION,
    hdrs.CONTENT_TYPE,
    hdrs.CONTENT_ENCODING,
    hdrs.ORIGIN,
)
_RESPONSE_HEADERS: Final = (
    hdrs.CONTENT_TYPE,
    hdrs.CONTENT_DISPOSITION,
    hdrs.SERVER,
    hdrs.CACHE_CONTROL,
    "X-Content-Type-Options",
    hdrs.CONTENT_SECURITY_POLICY,
    "Referrer-Policy",
    hdrs.LOCATION,
    hdrs.WWW_AUTHENTICATE,
    hdrs.ALLOW,
)


class _ProxyRequest(Struct, frozen=True):
    method: str
    url: httpx.URL
    headers: Mapping[str, str]
    body: bytes


class _ProxyResponse(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes


class AdminProxy:
    """Listens at ``address``.

    ``render_own_metrics`` gives the supervisor's metrics. ``describe_config`` gives the whole
    configuration, of which each process has a part. Counters of a process that has ended stay
    included, with their last scraped value.
    """

    def __init__(
        self,
        address: str,
        list_processes: Callable[[], Sequence[ServingProcess]],
        render_own_metrics: Callable[[], bytes],
        describe_config: Callable[[], Awaitable[object]],
    ) -> None:
        self.draining = False
        """Whether the processes drain, also those that start later."""
        self._address = address
        self._list_processes = list_processes
        self._render_own_metrics = render_own_metrics
        self._describe_config = describe_config
        self._retired_metrics = MetricsPage()
        self._last_metrics: dict[ServingProcess, MetricsPage] = {}
        application = web.Application(client_max_size=_MAX_BODY_SIZE)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._listener = ApplicationListener(application, CONNECTION_LIMITS)

    async def listen(self) -> str:
        """Bind; returns the URL. Raises OSError."""
        host, port = split_address(self._address)
        await self._listener.set_up()
        bound_port = await self._listener.listen(host, port)
        display_host = f"[{host}]" if ":" in host else host
        return f"http://{display_host}:{bound_port}"

    async def close(self) -> None:
        """Stop listening and close connections."""
        await self._listener.close()

    def forget_process(self, process: ServingProcess) -> None:
        """Keep the counters of a process that has ended."""
        self._retired_metrics.merge(
            self._last_metrics.pop(process, MetricsPage()).select_counters()
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(_PLAYGROUND_PREFIX):
            return await self._proxy_playground(request)  # the listener limits the body
        try:
            async with asyncio.timeout(_BODY_TIMEOUT):
                body = await request.read()
        except TimeoutError:
            return _error_response(HTTPStatus.REQUEST_TIMEOUT, "the body took too long")
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is larger than {_MAX_BODY_SIZE} bytes"
            return _error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        headers = {
            str(name): request.headers[name] for name in _REQUEST_HEADERS if name in request.headers
        }
        response = await self._dispatch(
            _ProxyRequest(request.method, build_url(request), headers, body), request.path
        )
        if response is None:
            return _error_response(HTTPStatus.SERVICE_UNAVAILABLE, _NO_PROCESS_MESSAGE)
        response_headers = {
            name: response.headers[name] for name in _RESPONSE_HEADERS if name in response.headers
        }
        return web.Response(status=response.status, body=response.body, headers=response_headers)

    async def _dispatch(self, query: _ProxyRequest, path: str) -> _ProxyResponse | None:
        match query.method, path:
            case "GET", "/metrics":
                return await self._merge_metrics(query)
            case "GET", _ if path in _MERGED_PATHS:
                return await self._merge_json(query, path)
            case (("POST" | "DELETE"), "/-/workers"):
                responses = await self._query_all(query)
                return max(responses.values(), key=lambda response: response.status, default=None)
            case "GET", "/-/config":
                return await self._get_config(query)
            case "POST", _ if path.startswith("/-/requests/"):
                return await self._cancel_request(query)
            case (("POST" | "DELETE"), "/-/drain"):
                return await self._set_draining(query)
            case "GET", "/-/ready":
                return await self._query_first(query, HTTPStatus.SERVICE_UNAVAILABLE)
            case "GET", _ if path.startswith("/-/explain/"):
                return await self._query_first(query, HTTPStatus.NOT_FOUND)
            case _:
                return await self._query_first(query, None)

    async def _merge_metrics(self, query: _ProxyRequest) -> _ProxyResponse | None:
        responses = await self._query_all(query)
        if not responses or (error_response := _find_error(responses)):
            return error_response if responses else None
        self._last_metrics |= {
            process: MetricsPage(response.body.decode()) for process, response in responses.items()
        }
        page = MetricsPage(self._render_own_metrics().decode())
        page.merge(self._retired_metrics)
        for process_page in self._last_metrics.values():
            page.merge(process_page)
        return msgspec.structs.replace(next(iter(responses.values())), body=page.render().encode())

    async def _merge_json(self, query: _ProxyRequest, path: str) -> _ProxyResponse | None:
        """Query all processes and merge their JSON responses."""
        responses = await self._query_all(query)
        if not responses or (error_response := _find_error(responses)):
            return error_response if responses else None
        body = msgspec.json.encode(
            merge_responses(path, [response.body for response in responses.values()])
        )
        return msgspec.structs.replace(next(iter(responses.values())), body=body)

    async def _get_config(self, query: _ProxyRequest) -> _ProxyResponse | None:
        """The whole configuration, if a process permits the request."""
        response = await self._query_first(query, None)
        if response is None or response.status != HTTPStatus.OK:
            return response
        return msgspec.structs.replace(
            response, body=msgspec.json.encode(await self._describe_config())
        )

    async def _cancel_request(self, query: _ProxyRequest) -> _ProxyResponse | None:
        """Cancel in all processes."""
        responses = (await self._query_all(query)).values()
        succeeded = [response for response in responses if response.status == HTTPStatus.OK]
        if not succeeded:
            return next(iter(responses), None)
        body = msgspec.json.encode(merge_cancelled([response.body for response in succeeded]))
        return msgspec.structs.replace(succeeded[0], body=body)

    async def _set_draining(self, query: _ProxyRequest) -> _ProxyResponse | None:
        """Drain all processes, also those that start later."""
        responses = await self._query_all(query)
        if responses and _find_error(responses) is None:
            self.draining = query.method == hdrs.METH_POST
        return max(responses.values(), key=lambda response: response.status, default=None)

    async def _proxy_playground(self, request: web.Request) -> web.StreamResponse:
        """Forward to the first process that is ready."""
        process = next(iter(self._list_ready()), None)
        response = None if process is None else await proxy_request(request, process.admin_socket)
        return response or _error_response(HTTPStatus.SERVICE_UNAVAILABLE, _NO_PROCESS_MESSAGE)

    def _list_ready(self) -> Sequence[ServingProcess]:
        """The processes that are ready."""
        return [process for process in self._list_processes() if process.ready_message]

    async def _query_all(self, query: _ProxyRequest) -> Mapping[ServingProcess, _ProxyResponse]:
        """The responses of all processes that are ready."""
        serving = self._list_ready()
        responses = await asyncio.gather(*(_query_process(process, query) for process in serving))
        return {
            process: response
            for process, response in zip(serving, responses, strict=True)
            if response is not None
        }

    async def _query_first(
        self, query: _ProxyRequest, retry_status: int | None
    ) -> _ProxyResponse | None:
        """The first response with another status than ``retry_status``, or the last response."""
        response: _ProxyResponse | None = None
        for process in self._list_ready():
            response = await _query_process(process, query) or response
            if response is not None and response.status != retry_status:
                break
        return response


def _find_error(responses: Mapping[ServingProcess, _ProxyResponse]) -> _ProxyResponse | None:
    """The first response that is not 200."""
    return next(
        (response for response in responses.values() if response.status != HTTPStatus.OK), None
    )


async def _query_process(process: ServingProcess, query: _ProxyRequest) -> _ProxyResponse | None:
    """The response of a process; None if it has ended or does not respond in time."""
    seconds = _RELOAD_TIMEOUT if query.url.path == "/-/reload" else _QUERY_TIMEOUT
    try:
        async with (
            asyncio.timeout(seconds),
            connect_to_socket(process.admin_socket, httpx.Timeout(None)) as client,
        ):
            response = await client.request(
                query.method, query.url, headers=query.headers, content=query.body
            )
    except (httpx.HTTPError, TimeoutError):
        return None
    return _ProxyResponse(response.status_code, response.headers, response.content)


def _error_response(status: HTTPStatus, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message, "field": None}})
    headers = {hdrs.SERVER: "interlingua", hdrs.CACHE_CONTROL: "no-store"}
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
