"""The life of one exchange, from a request to its sink.

find        which dialect and endpoint the path belongs to, before anything of the body is read
admit       who asks
peek        which model (protocols/<dialect>)
route       which target (gateway/router.py)
answer      by that target, or by one in its stead (gateway/answering.py)

Whatever goes wrong while nothing was sent is told in the caller's dialect, by ``refuse``.
"""

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, Protocol

from msgspec import Struct

from gateway.answering import Answers, Asked, label
from gateway.arrival import decompress, request_id, seconds
from gateway.auth import Keyring, Principal, Unsettled, authorize
from gateway.core.context import Clock, Context, Deadline, Timeouts
from gateway.core.errors import (
    DeadlineExceeded,
    GatewayError,
    InternalError,
    RequestNotFound,
    Unsupported,
)
from gateway.core.lookout import Lookout
from gateway.core.ports import (
    Call,
    Dialect,
    Reply,
    Tokenizer,
    Tokenizing,
)
from gateway.core.watching import Trace
from gateway.exchange import note, send
from gateway.limits.accounts import Accounts
from gateway.limits.limiter import Limiter
from gateway.paths import Found, Paths
from gateway.router import Route, Router
from gateway.seam import Request as HttpRequest
from gateway.seam import Sink
from gateway.shadow import Shadows
from gateway.telemetry import Observer, Record
from gateway.watching.kept import Explain, nobody
from gateway.watching.watch import HEADER, Watch

log = logging.getLogger("interlingua")

_WITHIN = "x-interlingua-timeout"
"""The header that says how many seconds a client waits."""
_LARGE = 256 << 10
"""Bytes of a body that take some milliseconds to translate, or many where it has many parts."""
_OF_MODELS: Final = frozenset({"generate", "tokenize"})
"""The tasks that are a model's; the others need none."""


class Settings(Struct, frozen=True):
    """The limits of every exchange. ``body`` is in bytes."""

    body: int = 8 << 20
    timeouts: Timeouts = Timeouts()
    dialect_header: bool = False
    """Whether a request may name its dialect where several have its path."""
    explain: bool = False
    """Whether who has no key may have requests explained."""
    config: str = ""
    """The configuration's hash, for the record."""


class Traces(Protocol):
    """Follows some exchanges from their begin; that they have ended they hear as all do."""

    def begin(self, record: Record, http: HttpRequest) -> None:
        """One begins. One that is followed has its ``record.trace`` and ``record.span`` now."""

    def of(self, record: Record) -> Trace | None:
        """What is told how its answer comes about, if it is followed."""


class Surroundings(Struct, frozen=True):
    """What the outside world gives an exchange; a test gives its own."""

    clock: Clock
    now: Callable[[], float]
    """Unix seconds."""
    new_id: Callable[[], str]
    draw: Callable[[], float]
    """A number in [0, 1), for splits."""
    observe: Observer
    shadows: Shadows
    accounts: Accounts
    """What is used of the keys' limits."""
    explain: Explain = nobody
    """What looks on where a request asks for it and its key may."""
    lost: Mapping[str, Callable[[], int]] = {}
    """How much of what was to be kept is lost, by what it is: see ``gateway.recording.lost``."""
    traces: Traces | None = None
    """What is to be told of exchanges as they come about, where they are traced."""


class Server:
    """Serves one listener."""

    def __init__(
        self,
        paths: Paths,
        router: Router,
        keyring: Keyring,
        settings: Settings,
        surroundings: Surroundings,
        *,
        pages: Mapping[str, Callable[[], Reply]],
        limiter: Limiter | None = None,
    ) -> None:
        """``pages``: what the gateway itself answers, to anybody, unless a dialect has the path.

        ``limiter`` is None where there are no limits.
        """
        self.paths = paths
        self._pages = {path: page for path, page in pages.items() if not paths.claims(path)}
        self._router = router
        self._keyring = keyring
        self._limiter = limiter
        self._settings = settings
        self._clock = surroundings.clock
        self._now = surroundings.now
        self._new_id = surroundings.new_id
        self._observe = surroundings.observe
        self._explain = surroundings.explain
        self._traces = surroundings.traces
        lookout = Lookout(surroundings.clock, asyncio.get_running_loop)
        self.answers = Answers(router, settings.body, surroundings.shadows, lookout)
        self.running = 0
        """The exchanges that it has now."""
        self._over: asyncio.Event | None = None
        """That it has none, once somebody waits for it."""

    def take_over(self, former: "Server") -> None:
        """What runs at ``former`` may be stopped by its clients here, too."""
        self.answers.running = former.answers.running

    def tried(self, key: str | None, explain: Explain, observe: Observer) -> "Server":
        """The same for a request of nobody's, as if it had the key of this name. Raises KeyError.

        What runs here can't be stopped there.
        """
        made = copy.copy(self)
        keyring = self._keyring if key is None else self._keyring.posing(key)
        made._keyring, made.answers = keyring, self.answers.alone()  # noqa: SLF001 - its own
        made._explain, made._observe = explain, observe  # noqa: SLF001 - as above
        made._limiter = made._traces = None  # noqa: SLF001 - as above
        return made

    async def over(self) -> None:
        """Wait for the exchanges that run."""
        self._over = self._over or asyncio.Event()
        while self.running:
            self._over.clear()
            await self._over.wait()

    async def serve(self, http: HttpRequest, sink: Sink) -> None:
        """Answer one request. Raises only what cancels its task."""
        clock, config = self._clock, self._settings.config
        began = clock()
        id_ = request_id(http.headers) or self._new_id()
        record = Record(id_, self._now(), "", http.path[:200], config=config)
        self.running += 1
        try:
            if http.path in self._pages:
                send(sink, self._pages[http.path](), record)
            else:
                await self._serve(http, sink, record)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            self.running -= 1
            if self._over is not None and not self.running:
                self._over.set()
            record.duration = clock() - began
            if self._limiter is not None:
                self._limiter.settle(record)
            self._observe(record)

    async def _serve(self, http: HttpRequest, sink: Sink, record: Record) -> None:
        try:
            found = self._find(http, record)
        except GatewayError as error:
            dialect = self.paths.owner(http.path).dialect
            record.dialect = dialect.name
            self._refuse(dialect, error, None, sink, record)
            return
        if self._traces is not None:
            self._traces.begin(record, http)
        dialect, headers, body = found.mount.dialect, http.headers, b""
        try:
            principal = await self._admit(found, http, record)
            watch = None
            if HEADER in headers and headers[HEADER] == "1":
                watch = self._explain(record, principal, open_to_all=self._settings.explain)
                sink = sink if watch is None else watch.over(sink)
            body = await http.body(self._settings.body)
            if "content-encoding" in headers:
                body = self._unpacked(http, body)
            call = _call(found, http, record, body)
            if watch is not None:
                watch.read(dialect, call, principal, http.peer)
            if found.endpoint.task in _OF_MODELS:
                context, peer = self._context(call, watch, record), http.peer
                envelope = dialect.peek(call)
                asked = Asked(
                    dialect, call, envelope, context, sink, record, principal, peer, watch
                )
                await self._answer(asked)
            else:
                self._tell(dialect, call, sink, record)
        except GatewayError as error:
            self._refuse(dialect, error, _call(found, http, record, body), sink, record)
        except Exception:
            log.exception("exchange %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            self._refuse(dialect, bug, _call(found, http, record, body), sink, record)

    def _find(self, http: HttpRequest, record: Record) -> Found:
        """The endpoint. Raises PathNotFound or MethodNotAllowed."""
        found = self.paths.find(http.method, http.path)
        if found.rivals:
            found = found.among(self._meant(http, found))
        record.dialect = found.mount.dialect.name
        return found

    def _meant(self, http: HttpRequest, found: Found) -> Iterator[str]:
        """The dialects that are named for a request whose path several have, in their order."""
        if self._settings.dialect_header:
            yield http.headers.get("x-interlingua-dialect", "")
        principal = self._keyring.known(http.headers)
        yield (principal and principal.dialect) or ""
        yield self._router.dialect(found.params.get("model", "")) or ""

    async def _admit(self, found: Found, http: HttpRequest, record: Record) -> Principal | None:
        """Who asks. Raises Unauthorized."""
        if found.endpoint.open:
            return None
        keyring, headers = self._keyring, http.headers
        try:
            principal = keyring.authenticate(headers)
        except Unsettled:
            await keyring.settle()
            principal = keyring.authenticate(headers)
        if principal is not None:
            record.key = principal.name
        return principal

    def _unpacked(self, http: HttpRequest, body: bytes) -> bytes:
        encoding = http.headers["content-encoding"]
        return decompress(body, encoding, self._settings.body) if encoding else body

    def _tell(self, dialect: Dialect, call: Call, sink: Sink, record: Record) -> None:
        """Answer what is not a model's to answer."""
        if call.endpoint.task == "stop":
            self._stop(dialect, call, record)
        send(sink, dialect.inform(call, self._router), record)

    def _answer(self, asked: Asked) -> Coroutine[Any, Any, None]:
        """Have a model answer."""
        route, generates = self._route(asked), asked.call.endpoint.task == "generate"
        if self._limiter is not None:
            body = asked.call.body if generates else None
            model = route.model.info
            self._limiter.admit(asked.record, route.asked, model, body, asked.dialect)
        return self.answers.give(asked, route) if generates else _tokenize(asked, route)

    def _route(self, asked: Asked) -> Route:
        """Which target answers. Raises Forbidden where the key is not good for its model."""
        watch, envelope, record = asked.watch, asked.envelope, asked.record
        router = self._router if watch is None else watch.router(self._router)
        route = router.route(envelope.model, envelope.version, asked.traits)
        if watch is not None:
            watch.routed(router, envelope, route, asked.traits())
        authorize(asked.principal, route.asked)
        label(record, route, envelope.stream)
        record.split = route.split
        return route

    def _stop(self, dialect: Dialect, call: Call, record: Record) -> None:
        """End the running request that the client names; only its own.

        Raises ModelNotFound or RequestNotFound.
        """
        envelope = dialect.peek(call)
        self._router.find(envelope.model, envelope.version)
        asked = envelope.client_id or ""
        running = self.answers.running.get((dialect.name, record.key, asked)) if asked else None
        if running is None:
            raise RequestNotFound("no running request has this id", id=asked)
        running.stop()

    def _context(self, call: Call, watch: Watch | None, record: Record) -> Context:
        """What belongs to an exchange whose request is all here."""
        clock, timeouts, headers = self._clock, self._settings.timeouts, call.headers
        received = clock()
        deadline = Deadline(clock, timeouts.total, received)
        if _WITHIN in headers and (asked := seconds(headers[_WITHIN])) is not None:
            deadline.shorten(asked)
        traceparent = headers.get("traceparent")
        return Context(
            record.id,
            deadline,
            clock,
            timeouts,
            record.key or None,
            traceparent,
            received,
            watch,
            received,
            traceparent and headers.get("tracestate"),
            None if self._traces is None else self._traces.of(record),
            len(call.body) >= _LARGE,
        )

    def _refuse(
        self, dialect: Dialect, error: GatewayError, call: Call | None, sink: Sink, record: Record
    ) -> None:
        note(record, error)
        if sink.started:  # only a bug comes here: what was begun is cut off, not ended
            record.outcome = "truncated"
            return
        send(sink, dialect.refuse(error, call), record)


async def _tokenize(asked: Asked, route: Route) -> None:
    """Tell the tokens of a text. Raises Unsupported."""
    dialect, call, context, backend = asked.dialect, asked.call, asked.context, route.target.backend
    if not isinstance(dialect, Tokenizing) or not isinstance(backend, Tokenizer):
        raise Unsupported(f"the model {route.model.info.name!r} does not tell its tokens")
    text = dialect.text(call)
    try:
        async with asyncio.timeout(context.deadline.remaining()):
            tokens = await backend.tokenize(text, context)
    except TimeoutError:
        raise DeadlineExceeded("the request's time is up") from None
    send(asked.sink, dialect.tokens(call, tokens), asked.record)


def _call(found: Found, http: HttpRequest, record: Record, body: bytes) -> Call:
    return Call(
        found.endpoint,
        found.params,
        http.headers,
        http.query,
        body,
        http.path,
        record.id,
        record.began,
    )
