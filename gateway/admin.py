"""The admin listener: is the gateway alive, can it answer, and which workers has it.

GET     /-/live                         200 for as long as the process answers
GET     /-/ready                        503 while it drains, or while nobody could answer
GET     /metrics                        what all exchanges came to, for Prometheus
GET     /-/workers                      what is known of each backend's workers
POST    /-/workers                      ``{"backend", "url", "weight"?, "max_concurrency"?}``
DELETE  /-/workers?backend=B&url=U
POST    /-/reload                       200 with the new ``{"hash"}``; 422 with ``{"complaints"}``
POST    /-/explain                      what would become of a request; its body is a Question
GET     /-/explain/{id}                 what became of one of the last that asked to be explained

What it refuses it tells as ``{"error": {"message": "...", "field": "..." or null}}``. The first two
tell nothing and are open to all; for everything else the key is asked for before anything is read.
"""

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta, Struct

from backends.upstream import Worker
from gateway.config.addresses import literal, split_address
from gateway.config.addresses import worker as check_url
from gateway.core.catalog import Catalog
from gateway.core.errors import Malformed
from gateway.watching.question import Question
from protocols.body import read_object

log = logging.getLogger("interlingua")

Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What answers; aiohttp gives it to those that stand before it by the name ``handler``."""

_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
_BODY: Final = 64 << 10
_PATIENCE: Final = 10.0
"""How many seconds a body may take."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:@/?#\\]+)(?::[0-9]{1,5})?")
_FIELD = re.compile(r"`\$\.(\w+)`|field `([^`]*)`")
_HEADERS: Final = {
    hdrs.SERVER: "interlingua",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
}
_SAID: Final[Mapping[int, str]] = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: f"the body is larger than {_BODY} bytes",
}


@runtime_checkable
class WorkerSet(Protocol):
    """The workers of one backend, which may change while it runs."""

    def snapshot(self) -> Any:
        """What is known of each worker now, as JSON can say it: never a key."""

    def add(self, worker: Worker) -> bool:
        """Add a worker, or put it in the place of the one with its URL; whether it is a new one.

        Raises ValueError with why it can't be.
        """

    def remove(self, url: str) -> bool:
        """Remove a worker; whether there was one. Raises ValueError with why it can't be."""


class Reloaded(Protocol):
    """How a reload ended."""

    @property
    def hash(self) -> str:
        """That of the configuration which is served now."""

    @property
    def filename(self) -> str:
        """What was read."""

    @property
    def complaints(self) -> Sequence[Any]:
        """What is wrong with it, each with its line and column; nothing where it is served."""


class Explaining(Protocol):
    """Who can tell what becomes of requests."""

    def find(self, id: str, /) -> Any | None:  # noqa: A002 - what it is called everywhere
        """What is known of one that asked for it."""

    async def explain(self, question: Question) -> Any:
        """What would become of one. Raises LookupError with what is wrong with the question."""


class Answering(Protocol):
    """A backend, as far as readiness goes."""

    @property
    def ready(self) -> bool:
        """Whether it could answer now, as far as is known."""


def obstacle(catalog: Catalog, backends: Iterable[Answering]) -> str | None:
    """Why no request can be answered now; None where some can."""
    if not catalog.ready:
        return "the gateway drains"
    if not any(backend.ready for backend in backends):
        return "no backend is ready"
    return None


class _Addition(Struct, frozen=True, forbid_unknown_fields=True):
    """A body of POST; the bounds are those of the configuration."""

    backend: str
    url: str
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None


Body = TypeVar("Body", _Addition, Question)


class _Refused(Exception):
    """What is answered in place of what was asked for."""

    def __init__(
        self, status: HTTPStatus, message: str, field: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = headers


class Admin:
    """The admin listener at ``address`` (``host:port``).

    ``obstacle`` tells why no request can be answered now, None where some can; ``metrics`` gives
    what Prometheus reads. ``sha256`` is that of the key, which a listener beyond this machine must
    have: ValueError otherwise. On this machine the host that is asked for must be this machine,
    too, or any page in a browser here could ask by a name that leads here.
    """

    def __init__(
        self,
        address: str,
        *,
        obstacle: Callable[[], str | None],
        pools: Mapping[str, WorkerSet],
        metrics: Callable[[], bytes] = bytes,
        sha256: str | None = None,
        reload: Callable[[], Awaitable[Reloaded]] | None = None,
        explain: Explaining | None = None,
    ) -> None:
        self._host, self._port = split_address(address)
        self._here = _is_here(self._host)
        if sha256 is None and not self._here:
            raise ValueError(f"the admin listener at {address} is beyond this machine: give a key")
        self._sha256 = sha256.lower() if sha256 is not None else None
        self._obstacle = obstacle
        self._pools = pools
        self._metrics = metrics
        self._reload = reload
        self._explain = explain
        self._runner = web.AppRunner(
            self.application(),
            handle_signals=False,
            access_log=None,
            logger=logging.getLogger("interlingua.http"),
            auto_decompress=False,
            shutdown_timeout=1.0,
        )

    def application(self) -> web.Application:
        """Its paths, and what stands before them."""
        made = web.Application(middlewares=[_tell, self._guard], client_max_size=_BODY)
        made.router.add_get("/-/live", self._live)
        made.router.add_get("/-/ready", self._ready)
        made.router.add_get("/-/workers", self._list)
        made.router.add_get("/metrics", self._count)
        made.router.add_post("/-/workers", self._add)
        made.router.add_delete("/-/workers", self._remove)
        if self._reload is not None:
            made.router.add_post("/-/reload", partial(self._renew, self._reload))
        if self._explain is not None:
            made.router.add_post("/-/explain", partial(self._foretell, self._explain))
            made.router.add_get("/-/explain/{id:.+}", partial(self._recall, self._explain))
        return made

    def rekey(self, sha256: str | None) -> None:
        """Ask for another key from now on."""
        self._sha256 = sha256.lower() if sha256 is not None else None

    async def listen(self, path: str = "") -> str:
        """Bind; gives the URL, with the port that the system chooses for 0.

        With a ``path`` it is a Unix socket there, of which no URL tells.
        """
        await self._runner.setup()
        if path:
            await web.UnixSite(self._runner, path).start()
            return ""
        await web.TCPSite(self._runner, self._host, self._port).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Take no more requests, and let go of those that run."""
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Serve) -> web.StreamResponse:
        host = _HOST.fullmatch(request.headers.get(hdrs.HOST, ""))
        if self._here and not (host and _is_here(host[1].strip("[]"))):
            raise _Refused(HTTPStatus.FORBIDDEN, "ask for this machine: localhost or 127.0.0.1")
        if request.match_info.handler not in (self._live, self._ready):
            self._check_key(request.headers.get(hdrs.AUTHORIZATION, ""))
        return await handler(request)

    def _check_key(self, given: str) -> None:
        if self._sha256 is None:
            return
        scheme, _, key = given.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._sha256):
            message = "give the admin's key as Authorization: Bearer"
            raise _Refused(HTTPStatus.UNAUTHORIZED, message, **{hdrs.WWW_AUTHENTICATE: "Bearer"})

    async def _live(self, request: web.Request) -> web.Response:
        del request
        return _reply(HTTPStatus.OK, {"status": "live"})

    async def _ready(self, request: web.Request) -> web.Response:
        del request
        if (why := self._obstacle()) is not None:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, why)
        return _reply(HTTPStatus.OK, {"status": "ready"})

    async def _count(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self._metrics(), headers={hdrs.CONTENT_TYPE: _EXPOSITION})

    async def _list(self, request: web.Request) -> web.Response:
        del request
        known = {name: pool.snapshot() for name, pool in self._pools.items()}
        return _reply(HTTPStatus.OK, {"backends": known})

    async def _add(self, request: web.Request) -> web.Response:
        wanted = await _read(request, _Addition)
        pool = self._pool(wanted.backend)
        try:
            worker = Worker(check_url(wanted.url), wanted.weight, wanted.max_concurrency)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the URL {error}", "url") from None
        try:
            new = pool.add(worker)
        except ValueError as error:
            raise _Refused(HTTPStatus.CONFLICT, str(error), "url") from None
        told = {
            "backend": wanted.backend,
            "url": worker.url,
            "weight": worker.weight,
            "max_concurrency": worker.max_concurrency,
        }
        return _reply(HTTPStatus.CREATED if new else HTTPStatus.OK, told)

    async def _remove(self, request: web.Request) -> web.Response:
        asked = request.query
        for name in asked:
            if name not in ("backend", "url"):
                raise _Refused(HTTPStatus.BAD_REQUEST, "there is no such parameter", name)
        for name in ("backend", "url"):
            if len(asked.getall(name, [])) != 1:
                raise _Refused(HTTPStatus.BAD_REQUEST, "it must be given, once", name)
        pool = self._pool(asked["backend"])
        try:
            found = pool.remove(asked["url"])
        except ValueError as error:
            raise _Refused(HTTPStatus.CONFLICT, str(error), "url") from None
        if not found:
            raise _Refused(HTTPStatus.NOT_FOUND, "the backend has no such worker", "url")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _renew(
        self, reload: Callable[[], Awaitable[Reloaded]], request: web.Request
    ) -> web.Response:
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin and urlsplit(origin).netloc != request.headers.get(hdrs.HOST):
            # It has no body, so a page elsewhere could send it: its browser says where it is from.
            raise _Refused(HTTPStatus.FORBIDDEN, "a page that is from elsewhere can't ask for it")
        told = await reload()
        if not told.complaints:
            return _reply(HTTPStatus.OK, {"hash": told.hash})
        message = f"{told.filename} is wrong; the configuration stays as it was"
        wrong = {"message": message, "field": None}
        given = {"error": wrong, "complaints": told.complaints, "hash": told.hash}
        return _reply(HTTPStatus.UNPROCESSABLE_ENTITY, given)

    async def _foretell(self, explain: Explaining, request: web.Request) -> web.Response:
        question = await _read(request, Question)
        try:
            return _reply(HTTPStatus.OK, await explain.explain(question))
        except LookupError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error.args[0])) from None

    async def _recall(self, explain: Explaining, request: web.Request) -> web.Response:
        found = explain.find(request.match_info["id"])
        if found is None:
            message = "no request of this id is among the last that were explained"
            raise _Refused(HTTPStatus.NOT_FOUND, message, "id")
        return _reply(HTTPStatus.OK, found)

    def _pool(self, name: str) -> WorkerSet:
        if name not in self._pools:
            known = ", ".join(self._pools) or "none"
            message = f"there is no such backend with workers; known: {known}"
            raise _Refused(HTTPStatus.NOT_FOUND, message, "backend")
        return self._pools[name]


@web.middleware
async def _tell(request: web.Request, handler: Serve) -> web.StreamResponse:
    """Every answer's headers, and what went wrong in the one form that this listener has."""
    try:
        answer = await handler(request)
    except _Refused as refused:
        answer = _error(refused.status, refused.message, refused.field, refused.headers)
    except web.HTTPException as refused:
        said = _SAID.get(refused.status, "it can't be answered")
        answer = _error(refused.status, said, None, {})
        if (allowed := refused.headers.get(hdrs.ALLOW)) is not None:
            answer.headers[hdrs.ALLOW] = allowed
    except Exception:
        log.exception("the admin listener broke")
        answer = _error(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error", None, {})
    answer.headers.update(_HEADERS)
    return answer


async def _read(request: web.Request, kind: type[Body]) -> Body:
    """The body. A form that a page elsewhere may send unasked is refused by its type."""
    encoded = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity"
    if request.content_type != "application/json" or encoded:
        raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send it as application/json")
    try:
        async with asyncio.timeout(_PATIENCE):
            body = await request.read()
    except TimeoutError:
        raise _Refused(HTTPStatus.REQUEST_TIMEOUT, "the body took too long") from None
    try:
        read_object(body)  # tells better what is wrong with it
        return msgspec.json.decode(body, type=kind)
    except Malformed as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, error.message) from None
    except msgspec.ValidationError as error:
        text = str(error)
        found = _FIELD.search(text)
        field = (found[1] or found[2]) if found else None
        message = text.partition(" - at ")[0]
        raise _Refused(HTTPStatus.BAD_REQUEST, message, field) from None


def _is_here(host: str) -> bool:
    found = literal(host)
    return found.is_loopback if found else host.lower() == "localhost"


def _reply(status: int, told: object) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(told), content_type="application/json"
    )


def _error(
    status: int, message: str, field: str | None, headers: Mapping[str, str]
) -> web.Response:
    made = _reply(status, {"error": {"message": message, "field": field}})
    made.headers.update(headers)
    return made
