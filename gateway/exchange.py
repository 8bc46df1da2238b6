"""One try at an answer: from a target's events to a sink.

What goes wrong before the first byte is raised, so that it can be told with a true status, or made
up for by another target. After that it is told in the stream, which then ends without its normal
end. An end is never made up.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from gateway.core.context import Context
from gateway.core.errors import (
    ClientError,
    ClientGone,
    DeadlineExceeded,
    GatewayError,
    StreamBroken,
)
from gateway.core.lookout import Lookout
from gateway.core.loss import Loss
from gateway.core.ports import Encoder, Headers, Piece, Pieces, Reply, Take
from gateway.core.types import (
    CallStart,
    Done,
    End,
    Event,
    FinishReason,
    Refusal,
    Request,
    Text,
    Thought,
    Usage,
)
from gateway.seam import Sink
from gateway.telemetry import Record

_SAYING = frozenset({Text, Thought, Refusal, CallStart})
"""What begins an answer that streams."""
_BROKEN: Final = "the answer stopped before its end"


class Answering(Protocol):
    """How the answer comes about: translated, or relayed."""

    losses: tuple[Loss, ...]
    """What of the request is lost, and told."""

    @property
    def request(self) -> Request:
        """What is asked, as far as it was read."""

    def encoder(self) -> Encoder:
        """What writes the answer; the same one each time."""

    def opening(self) -> Headers:
        """A stream's headers, once its first events are there."""

    def heard(self, events: Sequence[Event]) -> Sequence[Event]:
        """What these events of a stream come to; each batch is told once, in its turn."""

    def whole(self, events: Sequence[Event], body: bytes | None) -> Reply:
        """An answer in one piece; ``body`` where a worker wrote it already.

        Raises StreamBroken where the events are not those of a whole answer.
        """

    async def gathered(self) -> Piece:
        """All of an answer in one piece, heard; its last event is Done, or it broke off."""

    def pieces(self, take: Take | None = None) -> Pieces:
        """The answer; ends with Done or raises. Closing it stops the work at once.

        See ``gateway.core.ports.Pouring`` for ``take``.
        """


class Exchange(Struct, eq=False):
    """One request, one target, one sink."""

    _answering: Answering
    _context: Context
    _sink: Sink
    _record: Record
    _lookout: Lookout
    """It has the context's clock."""
    _task: asyncio.Task[Any] | None = None
    """What answers, as long as it may be ended."""
    _cut: bool = False
    """Whether it was ended."""
    _why: GatewayError | None = None
    """Why it was stopped, if it was."""
    _since: float = math.inf
    """Since when the client is to take what was written, by the context's clock."""
    _deaf: bool = False
    _said: bool = False
    """Whether some of the answer itself was written."""
    _done: bool = False
    _ends: bool = False
    """Whether a stream's end was written: whatever fails now, its client misses nothing."""
    _ended: list[FinishReason] = []

    @property
    def record(self) -> Record:
        """What is known of it so far."""
        return self._record

    @property
    def age(self) -> float:
        """Seconds since its request was read."""
        return self._elapsed()

    @property
    def started(self) -> bool:
        """Whether some of its answer was passed on."""
        return self._sink.started

    def stop(self, why: GatewayError | None = None) -> None:
        """End it, since its client says so, or who runs the gateway: that is ``why``."""
        self._why = why or ClientGone("the request was stopped")
        self._end()

    async def run(self, live: set["Exchange"], *, stream: bool) -> None:
        """Answer, as one of those that are ``live``. Raises GatewayError while nothing was sent."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        cancelled, context = task.cancelling(), self._context
        live.add(self)
        try:
            self._lookout.add(self, context.deadline.within(context.timeouts.idle))
            self._task = task
            if stream:
                await self._stream()
            else:
                self._give(*await self._answering.gathered())
        except asyncio.CancelledError:
            if self._ends:
                return
            if not self._cut or task.cancelling() > cancelled + 1:  # others want it to end, too
                raise
            if self._deaf:
                self._give_up()
            else:
                self._fail(self._why or DeadlineExceeded("the request's time is up"))
        except GatewayError as error:
            self._fail(error)
        finally:
            self._task = None
            live.discard(self)
            if self._cut:
                task.uncancel()
            self._lookout.drop(self)
            if context.asked is not None:
                self._record.overhead = context.asked - context.received

    def _end(self) -> None:
        """Let what answers run no further."""
        if self._task is not None and not self._cut:
            self._cut = True
            self._task.cancel()

    def look(self, now: float) -> None:
        """Look whether time is up, and whether the client still takes what is written.

        One that holds up a write for as long as a worker may be silent would keep its worker's
        place, and is let go.
        """
        ends, idle = self._context.deadline.at, self._context.timeouts.idle
        self._deaf = self._since + idle <= now
        if ends <= now or self._deaf:
            self._end()
        else:
            self._lookout.add(self, min(ends, self._since + idle, now + idle))

    async def _stream(self) -> None:
        """Write events as they come.

        The answer is opened by its first bytes, so that what fails before them gets a true status.
        Its end is written with its last piece.
        """
        sink = self._sink
        pieces = self._answering.pieces(self._take)
        try:
            async for data, events in pieces:
                more = self._take(data, events)
                if self._done:
                    self._finish()
                elif not more:
                    self._since = self._context.clock()
                    await sink.drain()
                    self._since = math.inf
        finally:
            await pieces.aclose()
        self._finish()

    def _finish(self) -> None:
        """All has been said. Raises StreamBroken where it has not."""
        if self._ends:
            return
        self._check()
        if not self._sink.started:
            self._open(self._elapsed())
        self._sink.finish()
        self._ends = True

    def _take(self, data: bytes | None, events: Sequence[Event]) -> bool:
        """Write what came; whether the client takes more at once."""
        events = self._answering.heard(events)
        out = self._answering.encoder().write(events) if data is None and events else data
        self._record.tokens += self._note(events)
        if out:
            if not self._said:
                self._said = self._begin(events)
            self._sink.write(out)
        return not (self._sink.started and self._sink.pressure)

    def _give(self, body: bytes | None, said: Sequence[Event]) -> None:
        """Send an answer in one piece."""
        if not said or type(said[-1]) is not Done:
            raise StreamBroken(_BROKEN)
        record, reasons = self._record, []
        for event in said:
            if type(event) is End:
                reasons.append(event.reason)
            elif type(event) is Usage:
                record.usage = event
        record.finish = tuple(reasons)
        send(self._sink, self._answering.whole(said, body), record)

    def _check(self) -> None:
        """Raises StreamBroken unless all has been said."""
        if not self._done:
            raise StreamBroken(_BROKEN)
        self._record.finish = tuple(self._ended)

    def _note(self, events: Sequence[Event]) -> int:
        """Keep what an exchange is told by; gives how many tokens were said."""
        tokens = 0
        for event in events:
            if type(event) is Text:
                tokens += event.tokens
            elif type(event) is Usage:
                self._record.usage = event
            elif type(event) is End:
                self._ended.append(event.reason)
            elif type(event) is Done:
                self._done = True
        return tokens

    def _begin(self, events: Sequence[Event]) -> bool:
        """Open the answer, if it is not open; whether these events say something of it."""
        elapsed = self._elapsed()
        if not self._sink.started:
            self._open(elapsed)
        if said := not _SAYING.isdisjoint(map(type, events)):
            self._record.first_token = elapsed
        return said

    def _open(self, elapsed: float) -> None:
        record = self._record
        record.status = 200
        record.first_byte = elapsed
        headers = (("x-request-id", record.id), *record.told, *self._answering.opening())
        self._sink.start(200, headers)

    def _elapsed(self) -> float:
        return self._context.clock() - self._context.began

    def _give_up(self) -> None:
        """Leave the answer as it is: what more is written would not be read either."""
        note(self._record, ClientGone("the client does not read"))
        self._record.outcome = "cancelled"

    def _fail(self, error: GatewayError) -> None:
        if self._ends:
            return
        if not self._sink.started:
            raise error
        note(self._record, error)
        self._record.outcome = "truncated"
        self._sink.write(self._answering.encoder().error(error))
        self._sink.finish()


def send(sink: Sink, reply: Reply, record: Record) -> None:
    """A whole answer."""
    record.status = reply.status
    headers = (("x-request-id", record.id), *record.told, *reply.headers)
    sink.whole(reply.status, headers, reply.body)


def note(record: Record, error: GatewayError) -> None:
    """What went wrong, for the record."""
    record.error = type(error).__name__
    if isinstance(error, ClientError):
        record.outcome = "client_error"
    else:
        record.outcome = "worker_error" if error.blame == "worker" else "gateway_error"
