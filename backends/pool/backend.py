"""One request: a worker, its answer as events, and another worker where the first never began."""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec import Struct

from backends.pool.policy import POLICIES, Policy, PolicyName
from backends.pool.retry import Retry
from backends.pool.roster import Member, Roster
from backends.pool.watch import Watch
from backends.upstream import AiohttpUpstream, Queue, Reading, Upstream, Worker
from gateway.core.context import Clock, Context, Deadline, Timeouts
from gateway.core.errors import (
    GatewayError,
    Overloaded,
    WorkerFailed,
    WorkerUnreachable,
)
from gateway.core.loss import Loss
from gateway.core.ports import WireRequest, WorkerDialect
from gateway.core.types import Done, Event, Request

_ERROR_BYTES: Final = 64 << 10
"""As much of an error's body as is read; its shape is known from less."""
_WHOLE_BYTES: Final = 256 << 20
"""The largest answer in one piece. A stream has no such limit: it does not pile up."""
_LAST_SECONDS: Final = 1.0
"""How long the rest of a body may take when the answer, or its failure, is known already."""
_PASSED_ON: Final = ("content-type", "accept")
"""The headers of a dialect's own that a worker sees."""
_PLAIN: Final = re.compile(r"[!-~]{1,256}")


class _Work(Struct):
    """One request on its way. ``wire`` has no worker's key yet."""

    request: Request
    wire: WireRequest
    context: Context
    deadline: Deadline

    @property
    def streamed(self) -> bool:
        return self.request.stream


class PoolBackend:
    """Answers by asking one of several workers, which all speak one dialect.

    ``policy`` is one or the name of one. ``timeouts`` are the pool's own. ``upstream`` is how
    workers are reached; it is started and closed here.
    """

    def __init__(
        self,
        *,
        workers: Sequence[Worker],
        dialect: WorkerDialect,
        clock: Clock,
        policy: Policy | PolicyName = "least_load",
        timeouts: Timeouts | None = None,
        queue: Queue | Mapping[str, float] | None = None,
        upstream: Upstream | None = None,
    ) -> None:
        self._dialect = dialect
        self._timeouts = timeouts or Timeouts()
        self._upstream = upstream or AiohttpUpstream()
        chosen = POLICIES[policy]() if isinstance(policy, str) else policy
        self._clock = clock
        self._roster = Roster(workers, chosen, msgspec.convert(queue or {}, Queue), clock)

    @property
    def ready(self) -> bool:
        """Whether a worker is there, as far as is known."""
        return self._roster.ready

    def losses(self, request: Request, names: Mapping[str, str]) -> tuple[Loss, ...]:
        """What the workers' dialect can't carry of it."""
        return self._dialect.losses(request, names)

    async def start(self) -> None:
        """Get the HTTP client ready."""
        await self._upstream.start()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._upstream.aclose()

    async def answer(
        self, request: Request, context: Context
    ) -> AsyncGenerator[Sequence[Event], None]:
        """The events of a worker's answer, one batch for each read that held any.

        Raises Overloaded, DeadlineExceeded, WorkerError, and what the dialect reads in a worker's
        error. Until the first batch another worker may be asked instead.
        """
        wire = self._dialect.encode(request)
        deadline = Deadline(context.clock, context.deadline.remaining(self._timeouts.total))
        work = _Work(request, _allowed(wire, context), context, deadline)
        retry = Retry()
        while True:
            member = await self._roster.take(deadline, retry.tried)
            said = False
            try:
                async with aclosing(self._ask(member, work)) as batches:
                    async for batch in batches:
                        said = True
                        yield batch
            except GatewayError as error:
                retry.tried.add(member.key)
                if said or not retry.again(error):
                    raise
                if not self._roster.left(retry.tried):
                    raise _at_last(error) from error
            else:
                return
            finally:
                self._roster.give_back(member)

    async def _ask(self, member: Member, work: _Work) -> AsyncGenerator[Sequence[Event], None]:
        """One worker's answer. Whatever ends this early closes the worker's connection at once."""
        # The first token of an answer in one piece is its last: only the deadline bounds it.
        first = self._timeouts.first_token if work.streamed else None
        watch = Watch(work.deadline, work.context.clock, first=first, idle=self._timeouts.idle)
        reading = await self._open(member, work.wire, watch)
        try:
            if reading.status != HTTPStatus.OK:
                raise await self._refusal(reading, watch)
            _check_plain(reading)
            async with aclosing(self._events(work, reading, watch)) as batches:
                async for batch in batches:
                    yield batch
            await _see_the_end(reading, watch)
        finally:
            watch.stop()
            reading.release()

    async def _open(self, member: Member, wire: WireRequest, watch: Watch) -> Reading:
        worker = member.worker
        if worker.bearer is not None:
            key = ("Authorization", f"Bearer {worker.bearer}")
            wire = WireRequest(wire.path, wire.body, (*wire.headers, key), wire.method)
        try:
            reading = await watch.open(
                self._upstream.open(worker.url, wire, self._timeouts.connect)
            )
        except WorkerUnreachable as error:
            member.missed(self._clock(), error.__cause__)
            raise
        member.met()
        return reading

    async def _events(
        self, work: _Work, reading: Reading, watch: Watch
    ) -> AsyncGenerator[Sequence[Event], None]:
        """What the body means: ends with Done, which is the last of all."""
        decoder = self._dialect.decoder(work.request)
        streamed, size = work.streamed, 0
        while data := await watch.read(reading):
            if not streamed:
                watch.begun()
                size += len(data)
                if size > _WHOLE_BYTES:
                    raise WorkerFailed(f"the worker's answer is larger than {_WHOLE_BYTES} bytes")
            if events := decoder.feed(data):
                watch.begun()
                yield events
                if isinstance(events[-1], Done):
                    return
        events = decoder.close()
        yield events if events and isinstance(events[-1], Done) else [*events, Done()]

    async def _refusal(self, reading: Reading, watch: Watch) -> GatewayError:
        """What an answer of another status than 200 means."""
        status = reading.status
        if status < HTTPStatus.BAD_REQUEST:
            return WorkerFailed(f"the worker answered {status}", status=status)
        watch.hurry(_LAST_SECONDS)
        body = bytearray()
        with suppress(GatewayError):  # what has come says enough
            while len(body) < _ERROR_BYTES and (data := await watch.read(reading)):
                body += data
        return self._dialect.read_error(status, reading.headers, bytes(body[:_ERROR_BYTES]))


async def _see_the_end(reading: Reading, watch: Watch) -> None:
    """Wait a little for the body's end, for the connection's sake: the answer has been told."""
    watch.hurry(_LAST_SECONDS)
    with suppress(GatewayError):
        while await watch.read(reading):
            pass


def _check_plain(reading: Reading) -> None:
    encoding = reading.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise WorkerFailed("the worker sent an encoded body, which was not asked for")


def _at_last(error: GatewayError) -> GatewayError:
    """What it means that no further worker is left to ask after ``error``."""
    if isinstance(error, WorkerUnreachable):
        return Overloaded("no worker is available")
    return error


def _allowed(wire: WireRequest, context: Context) -> WireRequest:
    """``wire`` with no header that a worker need not see."""
    headers = [one for one in wire.headers if one[0].lower() in _PASSED_ON]
    traces = (("x-request-id", context.id), ("traceparent", context.traceparent))
    headers += [(name, value) for name, value in traces if value and _PLAIN.fullmatch(value)]
    return WireRequest(wire.path, wire.body, tuple(headers), wire.method)
