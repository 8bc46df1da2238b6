"""The admin listener of several processes: asks theirs, and makes one answer of what they say.

The processes ask for the key themselves, and refuse what they would refuse alone.
"""

import asyncio
import operator
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import hdrs, web
from msgspec import Struct
from multidict import CIMultiDict
from yarl import URL

from gateway.admin import status as admin_status
from gateway.admin.api import CONNECTION_LIMITS
from gateway.config.types import split_address
from gateway.http_server.aiohttp_listener import ApplicationListener
from gateway.multiprocess.ipc import ServingProcess
from gateway.observability.metrics.catalog import METRICS_BY_NAME
from gateway.observability.prometheus_text import MetricFamily, format_families, parse_families

# Many processes' figures as one's.

_SUMMED_FIELDS: Final = frozenset({"in_flight", "limit"})
"""Of what is told of a worker; the rest is what the first process tells."""


_MERGE_FUNCTIONS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "sum": operator.add,
    "largest": max,
    "smallest": min,
}


class MetricsPage:
    """Metrics in Prometheus's text format, to which others' are added."""

    def __init__(self, text: str = "") -> None:
        self.families = parse_families(text)

    def merge(self, other: "MetricsPage") -> None:
        """Count another process's figures into these."""
        for name, theirs in other.families.items():
            merged = METRICS_BY_NAME[name].merge_mode if name in METRICS_BY_NAME else "sum"
            if merged == "supervisor":
                continue
            join = _MERGE_FUNCTIONS[merged]
            family = self.families.setdefault(name, MetricFamily(theirs.comments, theirs.type))
            ours = family.samples
            for sample, value in theirs.samples.items():
                ours[sample] = join(ours[sample], value) if sample in ours else value

    def select_counters(self) -> "MetricsPage":
        """What of it only grows: counters and histograms."""
        page = MetricsPage()
        page.families = {name: one for name, one in self.families.items() if one.type != "gauge"}
        return page

    def render(self) -> str:
        """As Prometheus reads it."""
        return format_families(self.families.values())


def merge_workers(told: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """What all processes tell of each backend's workers: what they have of it is added up."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for backends in told:
        for name, reports in backends.items():
            known = merged.setdefault(name, {})
            for report in reports:
                url = report["url"]
                known[url] = _merge_worker(known[url], report) if url in known else dict(report)
    return {name: [*known.values()] for name, known in merged.items()}


def merge_responses(path: str, bodies: Sequence[bytes]) -> object:
    """What several processes answer at this path of their admin listeners, as one's answer."""
    told = [msgspec.json.decode(one) for one in bodies]
    match path:
        case "/-/workers":
            return {"backends": merge_workers(one["backends"] for one in told)}
        case "/-/requests":
            every = [running for one in told for running in one["requests"]]
            return {"requests": sorted(every, key=lambda one: -one["age"])}
        case _:
            statuses = msgspec.convert(told, list[admin_status.GatewayStatus])
            return admin_status.merge_statuses(
                statuses, merge_workers(one.workers for one in statuses)
            )


def merge_cancelled(bodies: Sequence[bytes]) -> object:
    """How many requests several processes ended."""
    return {"cancelled": sum(msgspec.json.decode(one)["cancelled"] for one in bodies)}


def _merge_worker(known: dict[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    both = (name for name in _SUMMED_FIELDS if known[name] is not None and report[name] is not None)
    return known | {name: known[name] + report[name] for name in both}


# A request to one process's admin listener, and its answer, a piece at a time.

_HOP_BY_HOP_HEADERS: Final = (
    hdrs.CONNECTION,
    hdrs.CONTENT_LENGTH,
    hdrs.TRANSFER_ENCODING,
    hdrs.KEEP_ALIVE,
    hdrs.EXPECT,
)
"""What belongs to one connection."""
_CLIENT_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, connect=10.0)


async def proxy_request(request: web.Request, path: str) -> web.StreamResponse | None:
    """Ask the listener at this Unix socket; None where it does not answer.

    The answer ends as that one does: whole, or cut.
    """
    url = request.url.with_scheme("http").with_host("localhost").with_port(None)
    answer = web.StreamResponse()
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path),
                timeout=_CLIENT_TIMEOUT,
                auto_decompress=False,
            ) as session,
            session.request(
                request.method,
                url,
                headers=_filter_headers(request.headers),
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            ) as said,
        ):
            answer.set_status(said.status)
            answer.headers.update(_filter_headers(said.headers))
            await answer.prepare(request)
            async for piece in said.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
    except (aiohttp.ClientError, TimeoutError):
        if not answer.prepared:
            return None
        if request.transport is not None:
            request.transport.abort()
    return answer


def _filter_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for name in _HOP_BY_HOP_HEADERS:
        kept.popall(name, None)
    return kept


_MAX_BODY_SIZE: Final = 64 << 10
_BODY_TIMEOUT: Final = 10.0
"""How many seconds a body may take."""
_RELOAD_TIMEOUT: Final = 600.0
"""How many seconds an answer may take: a reload waits for what is new."""
_NO_PROCESS_MESSAGE: Final = "no process serves now"
_PLAYGROUND_PREFIX: Final = "/-/playground/"
"""Below it the listeners answer, a piece at a time."""
_REQUEST_HEADERS: Final = (
    hdrs.HOST,
    hdrs.AUTHORIZATION,
    hdrs.CONTENT_TYPE,
    hdrs.CONTENT_ENCODING,
    hdrs.ORIGIN,
)
_RESPONSE_HEADERS: Final = (
    hdrs.CONTENT_TYPE,
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
    url: URL
    headers: Mapping[str, str]
    body: bytes


class _ProxyResponse(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes


class AdminProxy:
    """Listens at ``address``. ``members`` gives the processes; ``own``, what the supervisor counts.

    ``config`` tells the whole configuration, of which each process has a part. What a process
    counted stays counted when it is gone, as far as it was asked for before.
    """

    def __init__(
        self,
        address: str,
        members: Callable[[], Sequence[ServingProcess]],
        own: Callable[[], bytes],
        config: Callable[[], Awaitable[object]],
    ) -> None:
        self.draining = False
        """Whether all were told to."""
        self._address = address
        self._list_processes = members
        self._render_own_metrics = own
        self._describe_config = config
        self._retired_metrics = MetricsPage()
        self._last_metrics: dict[ServingProcess, MetricsPage] = {}
        made = web.Application(client_max_size=_MAX_BODY_SIZE)
        made.router.add_route("*", "/{path:.*}", self._handle)
        self._listener = ApplicationListener(made, CONNECTION_LIMITS)

    async def listen(self) -> str:
        """Bind; gives the URL. Raises OSError."""
        host, port = split_address(self._address)
        bound = await self._listener.listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{bound}"

    async def close(self) -> None:
        """Take no more requests."""
        await self._listener.close()

    def forget_process(self, member: ServingProcess) -> None:
        """This one is gone."""
        self._retired_metrics.merge(self._last_metrics.pop(member, MetricsPage()).select_counters())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(_PLAYGROUND_PREFIX):
            return await self._proxy_playground(request)  # its body is its listener's to bound
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
        url = URL(f"http://localhost{request.rel_url.raw_path_qs}", encoded=True)
        said = await self._dispatch(_ProxyRequest(request.method, url, headers, body), request.path)
        if said is None:
            return _error_response(HTTPStatus.SERVICE_UNAVAILABLE, _NO_PROCESS_MESSAGE)
        told = {name: said.headers[name] for name in _RESPONSE_HEADERS if name in said.headers}
        return web.Response(status=said.status, body=said.body, headers=told)

    async def _dispatch(self, question: _ProxyRequest, path: str) -> _ProxyResponse | None:
        match question.method, path:
            case "GET", "/metrics":
                return await self._merge_metrics(question)
            case "GET", ("/-/workers" | "/-/status" | "/-/requests"):
                return await self._merge_json(question, path)
            case (("POST" | "DELETE"), "/-/workers"):
                answers = await self._query_all(question)
                return max(answers.values(), key=lambda one: one.status, default=None)
            case "GET", "/-/config":
                return await self._get_config(question)
            case "POST", _ if path.startswith("/-/requests/"):
                return await self._cancel_request(question)
            case (("POST" | "DELETE"), "/-/drain"):
                return await self._set_draining(question)
            case "GET", "/-/ready":
                return await self._query_first(question, HTTPStatus.SERVICE_UNAVAILABLE)
            case "GET", _ if path.startswith("/-/explain/"):
                return await self._query_first(question, HTTPStatus.NOT_FOUND)
            case _:
                return await self._query_first(question, None)

    async def _merge_metrics(self, question: _ProxyRequest) -> _ProxyResponse | None:
        answers = await self._query_all(question)
        if not answers or (odd := _find_error(answers)):
            return odd if answers else None
        self._last_metrics |= {
            member: MetricsPage(said.body.decode()) for member, said in answers.items()
        }
        page = MetricsPage(self._render_own_metrics().decode())
        page.merge(self._retired_metrics)
        for one in self._last_metrics.values():
            page.merge(one)
        return msgspec.structs.replace(next(iter(answers.values())), body=page.render().encode())

    async def _merge_json(self, question: _ProxyRequest, path: str) -> _ProxyResponse | None:
        """One answer of all."""
        answers = await self._query_all(question)
        if not answers or (odd := _find_error(answers)):
            return odd if answers else None
        body = msgspec.json.encode(merge_responses(path, [one.body for one in answers.values()]))
        return msgspec.structs.replace(next(iter(answers.values())), body=body)

    async def _get_config(self, question: _ProxyRequest) -> _ProxyResponse | None:
        """The configuration that each has a part of, if one of them would tell its own."""
        said = await self._query_first(question, None)
        if said is None or said.status != HTTPStatus.OK:
            return said
        return msgspec.structs.replace(
            said, body=msgspec.json.encode(await self._describe_config())
        )

    async def _cancel_request(self, question: _ProxyRequest) -> _ProxyResponse | None:
        """Any may have some that are meant."""
        answers = (await self._query_all(question)).values()
        found = [one for one in answers if one.status == HTTPStatus.OK]
        if not found:
            return next(iter(answers), None)
        body = msgspec.json.encode(merge_cancelled([one.body for one in found]))
        return msgspec.structs.replace(found[0], body=body)

    async def _set_draining(self, question: _ProxyRequest) -> _ProxyResponse | None:
        """Also those that are started from now on."""
        answers = await self._query_all(question)
        if answers and _find_error(answers) is None:
            self.draining = question.method == hdrs.METH_POST
        return max(answers.values(), key=lambda one: one.status, default=None)

    async def _proxy_playground(self, request: web.Request) -> web.StreamResponse:
        """As the first process answers that serves."""
        first = next((one for one in self._list_processes() if one.ready_message), None)
        answer = None if first is None else await proxy_request(request, first.admin_socket)
        return answer or _error_response(HTTPStatus.SERVICE_UNAVAILABLE, _NO_PROCESS_MESSAGE)

    async def _query_all(self, question: _ProxyRequest) -> Mapping[ServingProcess, _ProxyResponse]:
        """What each that serves says."""
        serving = [one for one in self._list_processes() if one.ready_message]
        answers = await asyncio.gather(*(_query_process(one, question) for one in serving))
        return {one: said for one, said in zip(serving, answers, strict=True) if said is not None}

    async def _query_first(
        self, question: _ProxyRequest, unlike: int | None
    ) -> _ProxyResponse | None:
        """What the first says whose answer is no such status; or else what the last says."""
        said: _ProxyResponse | None = None
        for member in [one for one in self._list_processes() if one.ready_message]:
            said = await _query_process(member, question) or said
            if said is not None and said.status != unlike:
                break
        return said


def _find_error(answers: Mapping[ServingProcess, _ProxyResponse]) -> _ProxyResponse | None:
    """One that is no answer to what was asked."""
    return next((one for one in answers.values() if one.status != HTTPStatus.OK), None)


async def _query_process(member: ServingProcess, question: _ProxyRequest) -> _ProxyResponse | None:
    """What it says; None when it is gone, or hangs."""
    limits = aiohttp.ClientTimeout(
        total=_RELOAD_TIMEOUT if question.url.path == "/-/reload" else 10.0
    )
    connector = aiohttp.UnixConnector(member.admin_socket)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limits) as session,
            session.request(
                question.method,
                question.url,
                headers=question.headers,
                data=question.body,
                allow_redirects=False,
            ) as answer,
        ):
            return _ProxyResponse(answer.status, answer.headers, await answer.read())
    except (aiohttp.ClientError, TimeoutError):
        return None


def _error_response(status: HTTPStatus, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message, "field": None}})
    headers = {hdrs.SERVER: "interlingua", hdrs.CACHE_CONTROL: "no-store"}
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
