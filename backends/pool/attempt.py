"""One request at one worker: what it answers, as events, and how far that has come."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final

from msgspec import Struct

from backends.pool.errand import keyed
from backends.pool.member import Member
from backends.pool.watch import Watch
from backends.upstream import Reading, Upstream
from gateway.core.context import Clock, Deadline, Timeouts
from gateway.core.errors import DeadlineExceeded, GatewayError, StreamBroken, WorkerFailed
from gateway.core.ports import Decoder, Passage, Pieces, WireRequest
from gateway.core.types import (
    Done,
    EmbedRequest,
    Event,
    Request,
    Served,
    Start,
    Text,
    Timing,
    Usage,
)

Piece = tuple[bytes | None, Sequence[Event]]
"""Events, with their bytes in the client's dialect where the worker wrote them already."""
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
_SILENT: Final = (Start, Served, Timing, Usage)
"""Events that tell nothing of an answer's content."""


class Work(Struct, frozen=True):
    """One request on its way. ``wire`` has no worker's key yet."""

    request: Request
    wire: WireRequest
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


class Attempt:
    """One request at one worker, which is told to that worker's health.

    ``accepted``: the worker began an answer that looked good.
    """

    def __init__(self, member: Member, work: Work, means: Means) -> None:
        self._member = member
        self._work = work
        self._means = means
        self._began = means.clock()
        self._passage = work.passage()
        self._held: list[Piece] | None = []
        """What came before there was anything to pass on; then None."""
        self._size = 0
        self._pushed_back = False
        self._sent = False
        self._over = False
        self.accepted = False

    @property
    def abandoned(self) -> bool:
        """Whether the worker may still be at work, on what nobody waits for any more."""
        return self._sent and not self._over

    async def pieces(self) -> Pieces:
        """The answer, whose last event is Done.

        A stream comes from its first content on; an answer in one piece when the whole of it is
        there. Until then another worker can make up for it. Raises DeadlineExceeded, WorkerError,
        and what the dialect reads in a worker's error. Whatever ends this early closes the
        worker's connection at once.
        """
        work, timeouts = self._work, self._means.timeouts
        # The first token of an answer in one piece is its last: only the deadline bounds it.
        first = timeouts.first_token if work.request.stream else None
        watch = Watch(work.deadline, self._means.clock, first=first, idle=timeouts.idle)
        self._member.waiting.add(watch.give_up)
        try:
            reading = await self._open(watch)
            try:
                await self._accept(reading, watch)
                while not self._over:
                    for piece in self._read(await watch.read(reading), watch):
                        yield piece
                await _see_the_end(reading, watch)
            except GatewayError:
                if self.accepted:  # what else comes there must not be taken for another answer
                    reading.abort()
                raise
            finally:
                watch.stop()
                reading.release()
        except GatewayError as error:
            self._failed(error)
            raise
        finally:
            self._member.waiting.discard(watch.give_up)

    async def _open(self, watch: Watch) -> Reading:
        member, means = self._member, self._means
        wire = keyed(self._work.wire, member.worker)
        self._sent = True
        reading = await watch.open(
            means.upstream.open(member.worker.url, wire, means.timeouts.connect)
        )
        member.reached()
        return reading

    async def _accept(self, reading: Reading, watch: Watch) -> None:
        """Look at an answer's head. Raises what it means that it is not a good one."""
        if reading.status != HTTPStatus.OK:
            raise await self._refusal(reading, watch)
        self.accepted = True
        encoding = reading.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise WorkerFailed("the worker sent an encoded body, which was not asked for")

    async def _refusal(self, reading: Reading, watch: Watch) -> GatewayError:
        """What an answer of another status than 200 means."""
        status, headers = reading.status, reading.headers
        if status < HTTPStatus.BAD_REQUEST:
            return WorkerFailed(f"the worker answered {status}", status=status)
        watch.hurry(_LAST_SECONDS)
        body = bytearray()
        with suppress(GatewayError):  # what has come says enough
            while len(body) < _ERROR_BYTES and (data := await watch.read(reading)):
                body += data
        told = bytes(body[:_ERROR_BYTES])
        self._pushed_back = "retry-after" in headers or b"overloaded" in told.lower()
        return self._work.read_error(status, headers, told)

    def _read(self, data: bytes, watch: Watch) -> Sequence[Piece]:
        """What the next bytes mean, of which there are none at the body's end."""
        if data:
            self._weigh(len(data), watch)
            raw, events = self._passage.feed(data)
        else:
            raw, events = self._passage.close()
            if not events or not isinstance(events[-1], Done):
                events = [*events, Done()]
        if events and isinstance(events[-1], Done):
            self._over = True
            self._member.succeeded()
        if not raw and not events:
            return ()
        if self._held is None:
            return ((raw, events),)
        self._held.append((raw, events))
        if not self._over and not (self._work.request.stream and any(map(_says, events))):
            return ()
        self._begun_at(watch)
        self._timed()
        held, self._held = self._held, None
        return held

    def _begun_at(self, watch: Watch) -> None:
        """The worker is heard."""
        watch.begun()
        self._member.waiting.discard(watch.give_up)

    def _weigh(self, size: int, watch: Watch) -> None:
        """Bound what is kept of an answer before any of it is passed on."""
        self._size += size
        if not self._work.request.stream:
            watch.begun()
            if self._size > _WHOLE_BYTES:
                raise WorkerFailed(f"the worker's answer is larger than {_WHOLE_BYTES} bytes")
        elif self._held is not None and self._size > _SILENT_BYTES:
            raise WorkerFailed(f"the worker sent {_SILENT_BYTES} bytes and said nothing")

    def _timed(self) -> None:
        """The first token came, or its time is over.

        How long a whole text takes says more about the text than about the worker.
        """
        request = self._work.request
        if not self._work.aside and (request.stream or isinstance(request, EmbedRequest)):
            now = self._means.clock()
            self._member.smoothed.add(now, now - self._began)

    def _failed(self, error: GatewayError) -> None:
        if isinstance(error, DeadlineExceeded):
            if error.which == "first_token":
                self._timed()
        elif not self.accepted or isinstance(error, StreamBroken):
            self._over = True
        if not self._work.aside:
            self._member.failed(error, pushed_back=self._pushed_back)


class Translated:
    """A Passage for an answer of which nothing is passed on as it is."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def feed(self, data: bytes) -> Piece:
        """See ``gateway.core.ports.Passage``."""
        return None, self._decoder.feed(data)

    def close(self) -> Piece:
        """See ``gateway.core.ports.Passage``."""
        return None, self._decoder.close()


def _says(event: Event) -> bool:
    """Whether it tells anything of an answer's content, or of its end."""
    if isinstance(event, Text):
        return bool(event.text or event.token_ids or event.logprobs)
    return not isinstance(event, _SILENT)


async def _see_the_end(reading: Reading, watch: Watch) -> None:
    """Wait a little for the body's end, for the connection's sake: the answer has been told."""
    watch.hurry(_LAST_SECONDS)
    with suppress(GatewayError):
        while await watch.read(reading):
            pass
