"""The life of one exchange, from a request to its sink.

find        which dialect and endpoint the path belongs to, before anything of the body is read
admit       who asks
peek        which model (protocols/<dialect>)
route       which target (gateway/router.py)
decode      the one internal request
answer      events (backends/<backend>), written by the dialect's encoder as they come, or folded

Whatever goes wrong is told in the caller's dialect: by ``refuse`` while nothing was sent, and by
``Encoder.error`` after that. An end is never made up.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing

from msgspec import Struct
from msgspec.structs import replace

from gateway.arrival import decompress, request_id, seconds
from gateway.auth import Keyring, Principal, authorize
from gateway.core import loss
from gateway.core.aggregate import Fold
from gateway.core.context import Clock, Context, Deadline, Timeouts
from gateway.core.errors import (
    ClientError,
    ClientGone,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    RequestNotFound,
    StreamBroken,
    Unsupported,
)
from gateway.core.ports import (
    About,
    Backend,
    Call,
    Dialect,
    Encoder,
    Envelope,
    Reply,
    Tokenizer,
    Tokenizing,
)
from gateway.core.types import Done, Request, Usage
from gateway.emulation import Around, around
from gateway.fitting import fit
from gateway.paths import Found, Paths
from gateway.router import Route, Router
from gateway.seam import Request as HttpRequest
from gateway.seam import Sink
from gateway.telemetry import Observer, Record

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


class _Work(Struct):
    """An exchange that has a target: what the writing of its answer needs."""

    request: Request
    route: Route
    encoder: Encoder
    context: Context
    sink: Sink
    record: Record
    headers: tuple[tuple[str, str], ...] = ()
    around: Around | None = None
    scope: asyncio.Timeout | None = None
    stopped: bool = False

    @property
    def backend(self) -> Backend:
        return self.route.target.backend


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
        pages: Mapping[str, Reply],
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
        self._running: dict[tuple[str, str, str], _Work] = {}

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
            self._send(sink, page, record)
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
            match call.endpoint.task:
                case "inform":
                    self._send(sink, mount.dialect.inform(call, self._router), record)
                case "generate":
                    await self._generate(mount.dialect, call, principal, sink, record)
                case "tokenize":
                    await self._tokenize(mount.dialect, call, principal, sink, record)
                case "stop":
                    self._stop(mount.dialect, call, record)
                    self._send(sink, mount.dialect.inform(call, self._router), record)
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

    async def _generate(
        self,
        dialect: Dialect,
        call: Call,
        principal: Principal | None,
        sink: Sink,
        record: Record,
    ) -> None:
        envelope, route = self._route(dialect, call, principal, record)
        request = dialect.decode(call, route.model.info)
        request = fit(request, route, dialect.names(call), dialect.name)
        context = self._context(call, request.timeout, record)
        headers = self._judge(dialect, call, request, route, record)
        about = About(
            context.id,
            int(call.began),
            envelope.model,
            route.target.version,
            route.target.model,
            context,
        )
        encoder = dialect.encoder(call, request, about)
        request, outside = around(request)
        work = _Work(request, route, encoder, context, sink, record, headers, outside)
        name = (dialect.name, record.key, envelope.client_id or request.client_id or "")
        try:
            async with asyncio.timeout(context.deadline.remaining()) as work.scope:
                self._running[name] = work
                await (self._stream(work) if envelope.stream else self._whole(work))
        except TimeoutError:
            gone = ClientGone("the request was stopped")
            late = DeadlineExceeded("the request's time is up")
            self._fail(work, gone if work.stopped else late)
        except GatewayError as error:
            self._fail(work, error)
        finally:
            if self._running.get(name) is work:
                del self._running[name]

    def _route(
        self, dialect: Dialect, call: Call, principal: Principal | None, record: Record
    ) -> tuple[Envelope, Route]:
        envelope = dialect.peek(call)
        route = self._router.route(envelope.model, envelope.version)
        authorize(principal, route.model.info.name)
        self._label(record, route, envelope.stream)
        return envelope, route

    async def _tokenize(
        self,
        dialect: Dialect,
        call: Call,
        principal: Principal | None,
        sink: Sink,
        record: Record,
    ) -> None:
        _, route = self._route(dialect, call, principal, record)
        backend = route.target.backend
        if not isinstance(dialect, Tokenizing) or not isinstance(backend, Tokenizer):
            raise Unsupported(f"the model {route.model.info.name!r} does not tell its tokens")
        text = dialect.text(call)
        context = self._context(call, None, record)
        try:
            async with asyncio.timeout(context.deadline.remaining()):
                tokens = await backend.tokenize(text, context)
        except TimeoutError:
            raise DeadlineExceeded("the request's time is up") from None
        self._send(sink, dialect.tokens(call, tokens), record)

    def _stop(self, dialect: Dialect, call: Call, record: Record) -> None:
        """End the running request that the client names; only its own.

        Raises ModelNotFound or RequestNotFound.
        """
        envelope = dialect.peek(call)
        self._router.find(envelope.model, envelope.version)
        asked = envelope.client_id or ""
        work = self._running.get((dialect.name, record.key, asked)) if asked else None
        if work is None or work.scope is None:
            raise RequestNotFound("no running request has this id", id=asked)
        work.stopped = True
        work.scope.reschedule(asyncio.get_running_loop().time())

    async def _stream(self, work: _Work) -> None:
        """Write events as they come.

        The answer is opened by its first bytes, so that what fails before them gets a true status.
        """
        sink, encoder = work.sink, work.encoder
        done = False
        async with aclosing(work.backend.answer(work.request, work.context)) as batches:
            async for batch in batches:
                events = work.around.apply(batch) if work.around else batch
                data = encoder.write(events)
                for event in events:
                    if type(event) is Usage:
                        work.record.usage = event
                    elif type(event) is Done:
                        done = True
                if data:
                    if not sink.started:
                        self._open(work)
                    sink.write(data)
                    if sink.pressure:
                        await sink.drain()
        if not done:
            raise StreamBroken("the answer stopped before its end")
        if not sink.started:
            self._open(work)
        sink.finish()

    async def _whole(self, work: _Work) -> None:
        fold = Fold()
        async with aclosing(work.backend.answer(work.request, work.context)) as batches:
            async for batch in batches:
                fold.add(work.around.apply(batch) if work.around else batch)
        answer = fold.result()
        work.record.usage = answer.usage
        reply = work.encoder.whole(answer)
        extra = (*work.encoder.headers(), *work.headers)
        self._send(work.sink, replace(reply, headers=(*reply.headers, *extra)), work.record)

    def _open(self, work: _Work) -> None:
        encoder = work.encoder
        headers = (("Content-Type", encoder.content_type), *encoder.headers(), *work.headers)
        work.record.status = 200
        work.sink.start(200, (("x-request-id", work.record.id), *headers))

    def _fail(self, work: _Work, error: GatewayError) -> None:
        if not work.sink.started:
            raise error
        self._note(work.record, error)
        work.record.outcome = "truncated"
        work.sink.write(work.encoder.error(error))
        work.sink.finish()

    def _judge(
        self, dialect: Dialect, call: Call, request: Request, route: Route, record: Record
    ) -> tuple[tuple[str, str], ...]:
        """The headers that report losses. Raises Unsupported where a loss is not accepted."""
        rule = "reject" if call.headers.get("x-interlingua-strict") == "1" else route.model.on_loss
        if rule == "ignore":
            return ()
        found = route.target.backend.losses(request, dialect.names(call))
        if not found:
            return ()
        if rule == "reject":
            names = ", ".join(one.field for one in found)
            raise Unsupported(
                f"the model {route.model.info.name!r} can't honour: {names}", param=found[0].field
            )
        record.losses = found
        return (("x-interlingua-loss", loss.header(found)),)

    def _context(self, call: Call, timeout: float | None, record: Record) -> Context:
        """``timeout`` is the client's own, in seconds."""
        timeouts = self._settings.timeouts
        deadline = Deadline(self._clock, timeouts.total)
        if timeout is not None:
            deadline.shorten(timeout)
        if (asked := seconds(call.headers.get("x-interlingua-timeout"))) is not None:
            deadline.shorten(asked)
        return Context(record.id, deadline, self._clock, timeouts, record.key or None)

    @staticmethod
    def _label(record: Record, route: Route, stream: bool) -> None:  # noqa: FBT001 - a label's value
        record.model = route.model.info.name
        record.version = route.target.version
        record.backend = route.target.backend_name
        record.stream = stream

    def _refuse(
        self, dialect: Dialect, error: GatewayError, call: Call | None, sink: Sink, record: Record
    ) -> None:
        self._note(record, error)
        if sink.started:  # only a bug comes here: what was begun is cut off, not ended
            record.outcome = "truncated"
            return
        self._send(sink, dialect.refuse(error, call), record)

    @staticmethod
    def _note(record: Record, error: GatewayError) -> None:
        record.error = type(error).__name__
        if isinstance(error, ClientError):
            record.outcome = "client_error"
        else:
            record.outcome = "worker_error" if error.blame == "worker" else "gateway_error"

    @staticmethod
    def _send(sink: Sink, reply: Reply, record: Record) -> None:
        record.status = reply.status
        sink.start(reply.status, (("x-request-id", record.id), *reply.headers))
        sink.write(reply.body)
        sink.finish()
