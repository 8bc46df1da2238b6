"""The life of one exchange, from a request to its sink.

find        which dialect and endpoint the path belongs to, before anything of the body is read
admit       who asks
peek        which model (protocols/<dialect>)
route       which target (gateway/router.py), and which in its stead
relay       the client's own bytes, where the target's workers speak the client's dialect, or
translate   the one internal request (gateway/relaying.py, gateway/translation.py)
exchange    the answer, into the sink (gateway/exchange.py)

Whatever goes wrong while nothing was sent is told in the caller's dialect, by ``refuse``.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gateway.arrival import decompress, request_id, seconds
from gateway.auth import Keyring, Principal, authorize
from gateway.core.context import Clock, Context, Deadline, Timeouts
from gateway.core.errors import (
    DeadlineExceeded,
    GatewayError,
    InternalError,
    Overloaded,
    RateLimited,
    RequestNotFound,
    Unsupported,
    WorkerError,
)
from gateway.core.ports import (
    About,
    Call,
    Dialect,
    Envelope,
    Reply,
    Tokenizer,
    Tokenizing,
)
from gateway.exchange import Answering, Exchange, note, send
from gateway.paths import Found, Paths
from gateway.relaying import relaying
from gateway.router import Route, Router
from gateway.seam import Request as HttpRequest
from gateway.seam import Sink
from gateway.telemetry import Observer, Record
from gateway.traits import Traits
from gateway.translation import Translation

log = logging.getLogger("interlingua")


class Settings(Struct, frozen=True):
    """The limits of every exchange. ``body`` is in bytes."""

    body: int = 8 << 20
    timeouts: Timeouts = Timeouts()
    dialect_header: bool = False
    """Whether a request may name its dialect where several have its path."""


class Surroundings(Struct, frozen=True):
    """What the outside world gives an exchange; a test gives its own."""

    clock: Clock
    now: Callable[[], float]
    """Unix seconds."""
    new_id: Callable[[], str]
    draw: Callable[[], float]
    """A number in [0, 1), for splits."""
    observe: Observer


class _Asked(Struct, frozen=True):
    """What an exchange is about, whichever target answers."""

    dialect: Dialect
    call: Call
    envelope: Envelope
    context: Context
    sink: Sink
    record: Record


class _Asker(Struct, frozen=True):
    """Who asks, and what."""

    dialect: Dialect
    call: Call
    principal: Principal | None
    peer: str

    def traits(self) -> Traits:
        """What the choice of a target may go by."""
        call, who = self.call, self.principal
        key, tags = ("", frozenset[str]()) if who is None else (who.name, who.tags)
        return Traits(self.dialect.name, call.headers, call.body, key, tags, self.peer)


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
    ) -> None:
        """``pages``: what the gateway itself answers, to anybody, unless a dialect has the path."""
        self._paths = paths
        self._pages = {path: page for path, page in pages.items() if not paths.claims(path)}
        self._router = router
        self._keyring = keyring
        self._settings = settings
        self._clock = surroundings.clock
        self._now = surroundings.now
        self._new_id = surroundings.new_id
        self._observe = surroundings.observe
        self._running: dict[tuple[str, str, str], Exchange] = {}

    async def serve(self, http: HttpRequest, sink: Sink) -> None:
        """Answer one request. Raises only what cancels its task."""
        began = self._clock()
        record = Record(request_id(http.headers) or self._new_id(), path=http.path[:200])
        try:
            await self._serve(http, sink, record)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            record.duration = self._clock() - began
            self._observe(record)

    async def _serve(self, http: HttpRequest, sink: Sink, record: Record) -> None:
        if (page := self._pages.get(http.path)) is not None:
            send(sink, page(), record)
            return
        try:
            found = self._paths.find(http.method, http.path)
            if found.rivals:
                found = found.among(self._meant(http, found))
        except GatewayError as error:
            dialect = self._paths.owner(http.path).dialect
            record.dialect = dialect.name
            self._refuse(dialect, error, None, sink, record)
            return
        mount, call = found.mount, self._call(found, http, record)
        record.dialect = mount.dialect.name
        try:
            principal = self._admit(call, record)
            call = replace(call, body=await self._body(http))
            asker = _Asker(mount.dialect, call, principal, http.peer)
            match call.endpoint.task:
                case "inform":
                    send(sink, mount.dialect.inform(call, self._router), record)
                case "generate":
                    await self._generate(asker, sink, record)
                case "tokenize":
                    await self._tokenize(asker, sink, record)
                case "stop":
                    self._stop(mount.dialect, call, record)
                    send(sink, mount.dialect.inform(call, self._router), record)
        except GatewayError as error:
            self._refuse(mount.dialect, error, call, sink, record)
        except Exception:
            log.exception("exchange %s failed", record.id)
            bug = InternalError("the gateway failed; its log has the cause")
            self._refuse(mount.dialect, bug, call, sink, record)

    def _meant(self, http: HttpRequest, found: Found) -> Iterator[str]:
        """The dialects that are named for a request whose path several have, in their order."""
        if self._settings.dialect_header:
            yield http.headers.get("x-interlingua-dialect", "")
        principal = self._keyring.known(http.headers)
        yield (principal and principal.dialect) or ""
        yield self._router.dialect(found.params.get("model", "")) or ""

    def _call(self, found: Found, http: HttpRequest, record: Record) -> Call:
        return Call(
            found.endpoint,
            found.params,
            http.headers,
            http.query,
            b"",
            http.path,
            record.id,
            self._now(),
        )

    def _admit(self, call: Call, record: Record) -> Principal | None:
        if call.endpoint.open:
            return None
        principal = self._keyring.authenticate(call.headers)
        record.key = principal.name if principal else ""
        return principal

    async def _body(self, http: HttpRequest) -> bytes:
        body = await http.body(self._settings.body)
        if encoding := http.headers.get("content-encoding", ""):
            return decompress(body, encoding, self._settings.body)
        return body

    async def _generate(self, asker: _Asker, sink: Sink, record: Record) -> None:
        """Ask the route's target, and in its stead those that it falls back to."""
        dialect, call = asker.dialect, asker.call
        envelope, route = self._route(asker, record)
        asked = _Asked(dialect, call, envelope, self._context(call, record), sink, record)
        rest = self._router.after(route, asker.traits)
        while True:
            try:
                await self._exchange(asked, route)
            except GatewayError as error:
                following = next(rest, None)
                if sink.started or following is None or not _passes_on(error):
                    raise
                record.fell_back += (f"{route.named} {type(error).__name__}",)
                route = following
                self._label(record, route, envelope.stream)
            else:
                return

    async def _exchange(self, asked: _Asked, route: Route) -> None:
        call, record = asked.call, asked.record
        about = About(
            record.id,
            int(call.began),
            asked.envelope.model,
            route.target.version,
            route.target.model,
            asked.context,
        )

        def translate() -> Translation:
            return Translation(asked.dialect, call, route, about)

        relayed = relaying(asked.dialect, call, route, about, translate)
        answering: Answering = translate() if relayed is None else relayed
        record.stream = asked.envelope.stream if relayed is None else relayed.streams
        record.losses = answering.losses
        request = answering.request
        if request.timeout is not None:
            asked.context.deadline.shorten(request.timeout)
        exchange = Exchange(answering, asked.context, asked.sink, record)
        client_id = asked.envelope.client_id or request.client_id or ""
        name = (asked.dialect.name, record.key, client_id)
        self._running[name] = exchange
        try:
            await exchange.run(stream=record.stream)
        finally:
            if self._running.get(name) is exchange:
                del self._running[name]

    def _route(self, asker: _Asker, record: Record) -> tuple[Envelope, Route]:
        envelope = asker.dialect.peek(asker.call)
        route = self._router.route(envelope.model, envelope.version, asker.traits)
        authorize(asker.principal, route.asked)
        self._label(record, route, envelope.stream)
        return envelope, route

    async def _tokenize(self, asker: _Asker, sink: Sink, record: Record) -> None:
        dialect, call = asker.dialect, asker.call
        _, route = self._route(asker, record)
        backend = route.target.backend
        if not isinstance(dialect, Tokenizing) or not isinstance(backend, Tokenizer):
            raise Unsupported(f"the model {route.model.info.name!r} does not tell its tokens")
        text = dialect.text(call)
        context = self._context(call, record)
        try:
            async with asyncio.timeout(context.deadline.remaining()):
                tokens = await backend.tokenize(text, context)
        except TimeoutError:
            raise DeadlineExceeded("the request's time is up") from None
        send(sink, dialect.tokens(call, tokens), record)

    def _stop(self, dialect: Dialect, call: Call, record: Record) -> None:
        """End the running request that the client names; only its own.

        Raises ModelNotFound or RequestNotFound.
        """
        envelope = dialect.peek(call)
        self._router.find(envelope.model, envelope.version)
        asked = envelope.client_id or ""
        running = self._running.get((dialect.name, record.key, asked)) if asked else None
        if running is None:
            raise RequestNotFound("no running request has this id", id=asked)
        running.stop()

    def _context(self, call: Call, record: Record) -> Context:
        timeouts = self._settings.timeouts
        deadline = Deadline(self._clock, timeouts.total)
        if (asked := seconds(call.headers.get("x-interlingua-timeout"))) is not None:
            deadline.shorten(asked)
        return Context(
            record.id,
            deadline,
            self._clock,
            timeouts,
            record.key or None,
            call.headers.get("traceparent"),
            self._clock(),
        )

    @staticmethod
    def _label(record: Record, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
        record.model = route.model.info.name
        record.version = route.target.version
        record.backend = route.target.backend_name
        record.rule = route.why.rule
        record.sticky = "pinned" if route.pinned else route.why.sticky
        record.stream = stream

    def _refuse(
        self, dialect: Dialect, error: GatewayError, call: Call | None, sink: Sink, record: Record
    ) -> None:
        note(record, error)
        if sink.started:  # only a bug comes here: what was begun is cut off, not ended
            record.outcome = "truncated"
            return
        send(sink, dialect.refuse(error, call), record)


def _passes_on(error: GatewayError) -> bool:
    """Whether another target may do better: the fault is not the client's, and time is left."""
    match error:
        case DeadlineExceeded(which=which):
            return which != "total"
        case Overloaded() | WorkerError() | RateLimited():
            return True
        case _:
            return False
