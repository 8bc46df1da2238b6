"""One request at one worker: what it answers, as events, and how far that has come."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final, NoReturn

from msgspec import Struct, field

from backends.pool.errand import keyed
from backends.pool.member import kind
from backends.pool.roster import Place
from backends.pool.tally import Tally
from backends.pool.watch import NEVER, Watch
from backends.upstream import Reading, Upstream
from gateway.core.context import Clock, Deadline, Timeouts
from gateway.core.errors import (
    ClientError,
    DeadlineExceeded,
    GatewayError,
    RateLimited,
    StreamBroken,
    WorkerFailed,
)
from gateway.core.lookout import Lookout
from gateway.core.ports import Decoder, Headers, Passage, Piece, Take, WireRequest
from gateway.core.types import (
    Done,
    Request,
    Served,
    Start,
    Text,
    Timing,
    Usage,
)

ReadError = Callable[[int, Mapping[str, str], bytes], GatewayError]
"""See ``gateway.core.ports.WorkerDialect.read_error``."""

_ERROR_BYTES: Final = 64 << 10
"""As much of an error's body as is read; its shape is known from less."""
_WHOLE_BYTES: Final = 256 << 20
"""The largest answer in one piece. A stream has no such limit: it does not pile up."""
_SILENT_BYTES: Final = 16 << 20
"""How much of a stream may come before it says anything: that much is kept back."""
_LAST_SECONDS: Final = 1.0
"""How long the rest of a body may take when the answer, or its failure, is known already."""
_OK: Final = 200
_NOTHING: Final[Piece] = None, ()
_SILENT: Final = frozenset({Start, Served, Timing, Usage})
"""Events that tell nothing of an answer's content."""


class Work(Struct, frozen=True):
    """One request on its way. ``wire`` has the headers that many have in common."""

    request: Request
    wire: WireRequest
    own: Headers
    """The headers of this request alone, but for the worker's key."""
    passage: Callable[[], Passage]
    """Makes what reads the answer, a new one for each attempt."""
    read_error: ReadError
    deadline: Deadline
    aside: bool = False
    """Nobody waits for it, and what comes of it is no sign of how well a worker is."""


class Means(Struct, frozen=True):
    """What every attempt of a pool needs."""

    upstream: Upstream
    timeouts: Timeouts
    clock: Clock
    lookout: Lookout
    tally: Tally = field(default_factory=Tally)


class Attempt(Watch):
    """One request at one worker, which is told to that worker's health.

    ``begin``, then ``more`` until it is ``over``, then ``end`` unless the ``whole`` of it is there;
    and ``close`` whatever happened, which closes the worker's connection at once where the answer
    is not over. ``accepted``: the worker began an answer that looked good. ``failure`` is why it
    gave no whole one.
    """

    __slots__ = (
        "_means",
        "_passage",
        "_pushed_back",
        "_reading",
        "_streams",
        "_take",
        "_told",
        "_work",
        "accepted",
        "failure",
        "member",
        "over",
        "place",
        "whole",
    )

    def __init__(self, place: Place, work: Work, means: Means) -> None:
        self.place = place
        self.member = place.member
        self._work = work
        self._means = means
        self._passage = work.passage()
        timeouts = means.timeouts
        self._streams = streams = work.request.stream
        # The first token of an answer in one piece is its last: only the deadline bounds it.
        first = place.since + timeouts.first_token if streams else NEVER
        Watch.__init__(self, means.lookout, work.deadline, first, timeouts.idle)
        self._reading: Reading | None = None
        self._pushed_back = False
        self.over = False
        """All is told: the last event was Done, or an error. Else the worker may be at work."""
        self.whole = False
        """Nothing more of an answer in one piece is to be waited for."""
        self.accepted = False
        self.failure: GatewayError | None = None

    async def begin(self) -> list[Piece]:
        """Ask, and wait for the first pieces of an answer.

        A stream begins with its first content, an answer in one piece when the whole of it is
        there. Until then another worker can make up for it. Raises DeadlineExceeded, WorkerError,
        and what the dialect reads in a worker's error.
        """
        member, work = self.member, self._work
        worker = member.worker
        own = work.own if worker.bearer is None else keyed(work.own, worker)
        member.waiting.add(self)
        try:
            self.start(self.place.since)
            reading = self._reading = self._means.upstream.ask(worker.url, work.wire, own)
            if reading is None or not await reading.head():
                reading = await self._dial(own)
            if member.was != "up":
                member.reached()
            if reading.status != _OK:
                raise await self._refusal(reading)
            self.accepted = True
            if "content-encoding" in reading.headers:
                _check(reading.headers["content-encoding"])
            if reading.complete and not self._streams:
                held = self._all(reading.taken())
            else:
                held = await self._first(reading)
            self.whole = reading.complete and not self._streams
        except GatewayError as error:
            self._fail(error)
        finally:
            member.waiting.discard(self)
        if self._streams or work.request.kind == "embedding":
            self._timed()
        return held

    def cut(self) -> None:
        """See Watch."""
        if self._reading is not None:
            self._reading.abort()

    def _all(self, pieces: Sequence[bytes]) -> list[Piece]:
        """What an answer in one piece means whose body this is."""
        if sum(map(len, pieces)) > _WHOLE_BYTES:
            raise self._large()
        passage = self._passage
        held: list[Piece] = []  # not list[Piece](), which costs a hundred times as much
        raw, events = passage.feed(pieces) if pieces else _NOTHING
        if raw or events:
            held.append((raw, events))
        if not events or type(events[-1]) is not Done:
            held.append(_end(passage))
        self.over = True
        self.member.succeeded()
        return held

    async def _first(self, reading: Reading) -> list[Piece]:
        """What the beginning of an answer means; that of one in one piece is the whole of it."""
        streams = self._streams
        held: list[Piece] = []
        size, most = 0, _SILENT_BYTES if streams else _WHOLE_BYTES
        while not self.over:
            pieces = reading.taken() or await self._next(reading)
            if pieces:
                size += sum(map(len, pieces))
                if size > most:
                    raise self._large()
                self.begun = not streams
                piece = self._fed(pieces)
                if piece[0] or piece[1]:
                    held.append(piece)
                    if streams and _begins(piece):
                        break
            if (not pieces or reading.complete) and not self.over:
                held.append(self._closed())
        self.rest()
        self.begun = True
        return held

    async def more(self, take: Take | None = None) -> Piece:
        """The next piece; its last event is Done if it is the last. Raises as ``begin`` does.

        With ``take``, that gets the pieces as they come, and what is returned is the last one; or
        an empty one where it takes no more at once.
        """
        reading = self._reading
        assert reading is not None  # noqa: S101 - it has begun
        try:
            if take is not None:
                self._take, self._told = take, _NOTHING
                self.wait()
                ended = await reading.listen(self._heard)
                self.rest()
                return self._closed() if ended else self._told
            while pieces := await self._next(reading):
                piece = self._fed(pieces)
                if piece[0] or piece[1]:
                    return piece
            return self._closed()
        except GatewayError as error:
            self._fail(error)

    async def end(self) -> None:
        """Wait a little for the body's end, for the connection's sake: the answer has been told."""
        reading = self._reading
        assert reading is not None  # noqa: S101 - it has begun
        self.hurry(_LAST_SECONDS)
        if self._streams and self.longest:
            self._means.tally.paused.add(self.longest)
        with suppress(GatewayError):
            while not reading.complete:
                await self._next(reading)

    def close(self) -> None:
        """Nobody waits any more."""
        self._lookout.drop(self)
        if self._reading is not None:
            self._reading.release()

    async def _dial(self, own: Headers) -> Reading:
        """Send the request over a new connection, and wait for the head of its answer."""
        means, url = self._means, self.member.worker.url
        opening = means.upstream.dial(url, self._work.wire, means.timeouts.connect, own)
        reading = self._reading = await self.open(opening)
        return reading

    async def _refusal(self, reading: Reading) -> GatewayError:
        """What an answer of another status than 200 means."""
        status, headers = reading.status, reading.headers
        if status < HTTPStatus.BAD_REQUEST:
            return WorkerFailed(f"the worker answered {status}", status=status)
        self.hurry(_LAST_SECONDS)
        body = bytearray()
        with suppress(GatewayError):  # what has come says enough
            while len(body) < _ERROR_BYTES and (pieces := await self._next(reading)):
                body += b"".join(pieces)
        told = bytes(body[:_ERROR_BYTES])
        self._pushed_back = "retry-after" in headers or b"overloaded" in told.lower()
        return self._work.read_error(status, headers, told)

    async def _next(self, reading: Reading) -> list[bytes]:
        """The next of the body, [] at its end. Raises DeadlineExceeded or StreamBroken."""
        if reading.complete:
            return reading.taken()
        self.wait()
        pieces = await reading.read()
        self.rest()
        return pieces

    def _heard(self, pieces: Sequence[bytes]) -> bool:
        """Pass on what the next bytes mean; whether more is taken at once."""
        raw, events = self._passage.feed(pieces)
        if events and type(events[-1]) is Done:
            self._succeeded()
            self._told = raw, events  # its reader writes it together with the end
            return False
        more = self._take(raw, events) if raw or events else True
        self.heard()
        return more

    def _fed(self, pieces: Sequence[bytes]) -> Piece:
        """What the next bytes mean."""
        raw, events = self._passage.feed(pieces)
        if events and type(events[-1]) is Done:
            self._succeeded()
        return raw, events

    def _closed(self) -> Piece:
        """What the body's end means; the last event is Done."""
        piece = _end(self._passage)
        self._succeeded()
        return piece

    def _succeeded(self) -> None:
        self.over = True
        self.member.succeeded()

    def _large(self) -> WorkerFailed:
        """Too much came of an answer before any of it was passed on."""
        if self._streams:
            return WorkerFailed(f"the worker sent {_SILENT_BYTES} bytes and said nothing")
        return WorkerFailed(f"the worker's answer is larger than {_WHOLE_BYTES} bytes")

    def _timed(self) -> None:
        """The first token came, or its time is over.

        Of a text in one piece that says more about the text than about the worker.
        """
        if not self._work.aside:
            now = self._means.clock()
            self.member.smoothed.add(now, now - self.place.since)

    def _fail(self, error: GatewayError) -> NoReturn:
        """Raise ``error``, or what was behind it, having told of it."""
        cause = self.cause(error)
        self._failed(cause)
        if cause is error:
            raise error
        raise cause from None

    def _failed(self, error: GatewayError) -> None:
        self.failure = error
        if self.accepted and self._reading is not None:
            self._reading.abort()  # what else comes there must not be taken for another answer
        if isinstance(error, DeadlineExceeded):
            tells = self._streams or self._work.request.kind == "embedding"
            if error.which == "first_token" and tells:
                self._timed()
        elif not self.accepted or isinstance(error, StreamBroken):
            self.over = True
        if not isinstance(error, ClientError) or isinstance(error, RateLimited):
            self._means.tally.failures[kind(error)] += 1
        if not self._work.aside:
            self.member.failed(error, pushed_back=self._pushed_back)


class Translated:
    """A Passage for an answer of which nothing is passed on as it is."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def feed(self, pieces: Sequence[bytes]) -> Piece:
        """See ``gateway.core.ports.Passage``."""
        return None, self._decoder.feed(b"".join(pieces))

    def close(self) -> Piece:
        """See ``gateway.core.ports.Passage``."""
        return None, self._decoder.close()


def _end(passage: Passage) -> Piece:
    """What the body's end means; the last event is Done."""
    raw, events = passage.close()
    if not events or type(events[-1]) is not Done:
        events = [*events, Done()]
    return raw, events


def _check(encoding: str) -> None:
    """Raises WorkerFailed where a body's encoding makes other bytes of it."""
    if encoding.lower() != "identity":
        raise WorkerFailed("the worker sent an encoded body, which was not asked for")


def _begins(piece: Piece) -> bool:
    """Whether it, and what came before it, may be passed on: it tells of content, or the end."""
    for event in piece[1]:
        if type(event) is Text:
            if event.text or event.token_ids or event.logprobs:
                return True
        elif type(event) not in _SILENT:
            return True
    return False
