"""One request: a worker, its answer as events, and another worker where the first never began."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from backends.http import HttpUpstream
from backends.pool.attempt import Attempt, Means, Translated, Work
from backends.pool.budget import Budget
from backends.pool.discovery import Discovery, Dns, File, Source
from backends.pool.discovery.file import Read
from backends.pool.headers import allowed, traced
from backends.pool.learning import Learner
from backends.pool.member import Member, WorkerReport
from backends.pool.policy import ASKING, NOTHING, make_policy
from backends.pool.probing import Probing
from backends.pool.retry import Retry
from backends.pool.roster import ANY, LAST_PRIORITY, USUAL_PRIORITY, Limits, Roster, Wish
from backends.pool.settings import PoolSettings, SourceSettings
from backends.pool.showing import Shown
from backends.pool.stopping import Stopping
from backends.pool.tally import Tally
from backends.upstream import Connected, Connections, Upstream, Worker
from gateway.core.context import Clock, Context, Deadline
from gateway.core.errors import GatewayError
from gateway.core.lookout import Lookout
from gateway.core.loss import Loss
from gateway.core.ports import (
    About,
    Call,
    Cancelling,
    Dialect,
    Learning,
    Piece,
    Pieces,
    Relay,
    Relaying,
    Take,
    WorkerDialect,
)
from gateway.core.types import Event, Request


class PoolBackend:
    """Answers by asking one of several workers, which all speak one dialect.

    ``settings`` are PoolSettings or a mapping of the same shape. ``draw`` gives a number from 0 up
    to 1. ``upstream`` is how workers are reached; it is started and closed here. ``readers`` read
    the files that list workers, each its own.
    """

    chooses = True
    """See ``gateway.core.ports.Choosing``."""

    def __init__(
        self,
        *,
        workers: Sequence[Worker],
        dialect: WorkerDialect,
        clock: Clock,
        draw: Callable[[], float],
        settings: PoolSettings | Mapping[str, Any] | None = None,
        upstream: Upstream | None = None,
        readers: Mapping[str, Read] | None = None,
    ) -> None:
        told = msgspec.convert(settings or {}, PoolSettings)
        self._dialect = dialect
        self._settings = told
        self._clock = clock
        self._upstream = upstream or HttpUpstream()
        self._tally = Tally()
        self._lookout = Lookout(clock, asyncio.get_running_loop)
        self._means = Means(self._upstream, told.timeouts, clock, self._lookout, self._tally)
        limits = Limits(told.max_concurrency, told.queue, told.health)
        self._asking = ASKING.get(told.policy)
        """What a request says for the choice; None where nothing of it counts."""
        self._roster = Roster(workers, make_policy(told.policy, draw), limits, clock, self._tally)
        self._budget = Budget(told.retries.budget)
        self._learner: Learner | None = None
        if isinstance(dialect, Learning):
            self._learner = Learner(dialect, told.models, self._upstream, clock)
        self._probing: Probing | None = None
        if told.probe is not None:
            self._probing = Probing(
                told.probe,
                dialect.probe,
                self._upstream,
                self._learner,
                draw=draw,
                lost=self._lost,
            )
        self._cancelling = dialect if isinstance(dialect, Cancelling) else None
        self._relaying = dialect if isinstance(dialect, Relaying) else None
        self._stopping = Stopping(self._upstream)
        self._salt = f"{int(draw() * 2**32):08x}"
        self._numbers = itertools.count()
        self._started = False
        sources = [_source(one, readers or {}) for one in told.sources]
        self._discovery = Discovery(told.name, workers, sources, self.replace)

    @property
    def ready(self) -> bool:
        """Whether a worker is there, as far as is known."""
        return self._roster.ready

    def losses(self, request: Request, names: Mapping[str, str]) -> tuple[Loss, ...]:
        """What the workers' dialect can't carry of it."""
        return self._dialect.losses(request, names)

    def replace(self, workers: Sequence[Worker]) -> None:
        """These are the workers from now on; see ``Roster.replace``."""
        self._roster.replace(workers)
        if self._probing is not None and self._started:
            self._probing.watch(self._roster.members)

    @property
    def discovery_failures(self) -> int:
        """How often who names workers failed, or named nobody."""
        return self._discovery.failures

    def snapshot(self) -> Sequence[WorkerReport]:
        """How each worker is now."""
        return self._roster.report()

    @property
    def tally(self) -> Tally:
        """What is counted of it, all that is over by now."""
        self._roster.count()
        return self._tally

    @property
    def queued(self) -> Sequence[str]:
        """See ``Roster.queued``."""
        return self._roster.queued

    @property
    def panics(self) -> bool:
        """See ``Roster.panics``."""
        return self._roster.panics

    @property
    def connections(self) -> Connections:
        """Those to its workers."""
        upstream = self._upstream
        return upstream.connections if isinstance(upstream, Connected) else Connections()

    def add(self, worker: Worker) -> bool:
        """See ``Discovery.add``."""
        return self._discovery.add(worker)

    def remove(self, url: str) -> bool:
        """See ``Discovery.remove``."""
        return self._discovery.remove(url)

    @property
    def by_hand(self) -> Sequence[str]:
        """See ``Discovery.by_hand``."""
        return self._discovery.by_hand

    async def warm(self) -> None:
        """Wait until each worker was probed, if they are."""
        if self._probing is not None:
            await self._probing.looked()

    async def start(self) -> None:
        """Get the HTTP client ready, begin to probe, and look for workers for a little while."""
        await self._upstream.start()
        self._started = True
        if self._probing is not None:
            self._probing.watch(self._roster.members)
        await self._discovery.start()

    async def aclose(self) -> None:
        """Close every connection."""
        self._started = False
        await self._discovery.aclose()
        self._roster.close()
        if self._probing is not None:
            await self._probing.aclose()
        if self._learner is not None:
            await self._learner.aclose()
        await self._stopping.aclose()
        await self._upstream.aclose()
        self._lookout.close()

    def answer(self, request: Request, context: Context) -> AsyncGenerator[Sequence[Event], None]:
        """See ``pour``."""
        return self.pour(request, context, None)

    async def pour(
        self, request: Request, context: Context, take: Take | None
    ) -> AsyncGenerator[Sequence[Event], None]:
        """The events of a worker's answer, one batch for each read that held any.

        What comes before an answer's first content is kept back until that is there: until then
        another worker may be asked instead. Raises Overloaded, DeadlineExceeded, WorkerError, and
        what the dialect reads in a worker's error.
        """
        work = await self._translated(request, context)
        attempt, pieces = await self._begun(work, context)
        try:
            for _, events in pieces:
                yield events
            while not attempt.over:
                _, events = await attempt.more(take)
                yield events
            if not attempt.whole:
                await attempt.end()
        finally:
            self._leave(attempt, work, context)

    async def gather(self, request: Request, context: Context) -> Sequence[Piece]:
        """All that ``pour`` gives, together; raises as that does."""
        return await self._whole(await self._translated(request, context), context)

    def relayed(self, client: Dialect, call: Call, about: About) -> Relay | None:
        """See ``gateway.core.ports.Relayer``."""
        return None if self._relaying is None else self._relaying.relay(client, call, about)

    def relay(self, relay: Relay, context: Context, take: Take | None = None) -> Pieces:
        """See ``gateway.core.ports.Relayer``."""
        return self._pieces(self._work(relay, context), context, take)

    def fetch(self, relay: Relay, context: Context) -> Coroutine[Any, Any, Sequence[Piece]]:
        """See ``gateway.core.ports.Relayer``."""
        return self._whole(self._work(relay, context), context)

    async def _translated(self, request: Request, context: Context) -> Work:
        """The request as the workers' dialect has it."""
        dialect = self._dialect
        deadline = self._deadline(context)
        learner = self._learner
        if learner is not None and not learner.knows(request.model) and not _is_dry(context):
            members = self._roster.choices(ANY)
            await learner.know(request.model, members, deadline)
        if self._cancelling is not None:
            name = f"{context.id}-{self._salt}{next(self._numbers):x}"
            request = replace(request, client_id=name)
        if context.large:
            wire = await asyncio.to_thread(dialect.encode, request)
        else:
            wire = dialect.encode(request)
        wire, own = allowed(wire, context)
        return Work(
            request,
            wire,
            own,
            lambda: Translated(dialect.decoder(request)),
            dialect.read_error,
            deadline,
            context.give_way is not None,
        )

    def _work(self, relay: Relay, context: Context) -> Work:
        wire, own = allowed(relay.wire, context)
        read_error = relay.read_error or self._dialect.read_error
        return Work(relay.request, wire, own, relay.passage, read_error, self._deadline(context))

    def _deadline(self, context: Context) -> Deadline:
        """The exchange's, or the pool's where that is sooner. Raises DeadlineExceeded."""
        now, most = context.clock(), self._settings.timeouts.total
        if now < context.deadline.at <= now + most:
            return context.deadline
        context.deadline.remaining()  # raises where nothing is left
        return Deadline(context.clock, most, now)

    async def _pieces(self, work: Work, context: Context, take: Take | None) -> Pieces:
        """The answer to ``work``, of the first worker that begins one."""
        attempt, pieces = await self._begun(work, context)
        try:
            for piece in pieces:
                yield piece
            while not attempt.over:
                yield await attempt.more(take)
            if not attempt.whole:
                await attempt.end()
        finally:
            self._leave(attempt, work, context)

    async def _whole(self, work: Work, context: Context) -> Sequence[Piece]:
        """The same, all of it together."""
        attempt, pieces = await self._begun(work, context)
        try:
            while not attempt.over:
                pieces.append(await attempt.more())
            if not attempt.whole:
                await attempt.end()
        finally:
            self._leave(attempt, work, context)
        return pieces

    async def _begun(self, work: Work, context: Context) -> tuple[Attempt, list[Piece]]:
        """The first worker's answer that begins, and how it does: all of one in one piece."""
        wish = self._wish(work.request, context)
        watch = context.watch
        show = None if watch is None else Shown(watch, self._settings, self._roster, work)
        retry: Retry | None = None
        now = self._clock()
        self._budget.asked(now)
        if context.asked is None:
            context.asked = now
        while True:
            if show is not None:
                show.before(wish)
            place = self._roster.at_once(wish, now)
            if place is None:
                place = await self._roster.take(wish, work.deadline, context.id)
            if show is not None:
                show.asked(place.member)
            asks = work if context.trace is None else traced(work, context.trace, place.member)
            attempt, pieces = Attempt(place, asks, self._means), None
            try:
                pieces = await attempt.begin()
            except GatewayError as error:
                if show is not None:
                    show.failed(place.member, error)
                if retry is None:
                    retry = Retry(self._settings.retries, self._budget, tally=self._tally)
                    wish = replace(wish, tried=retry.tried)
                now = self._clock()
                self._judge(error, attempt, retry, wish, now)
            else:
                return attempt, pieces
            finally:
                if pieces is None:
                    self._leave(attempt, work, context)

    def _judge(
        self, error: GatewayError, attempt: Attempt, retry: Retry, wish: Wish, now: float
    ) -> None:
        """Raise what the client hears after ``error``, unless another worker may be asked."""
        retry.failed(attempt.member.key, error)
        left = bool(self._roster.choices(wish))
        again = left and wish.give_way is None
        if again and retry.may(error, now, accepted=attempt.accepted):
            return
        last = retry.last(error, left=left)
        if last is error:
            raise error
        raise last from error

    def _leave(self, attempt: Attempt, work: Work, context: Context) -> None:
        """Nobody waits for this worker any more."""
        attempt.close()
        self._roster.give_back(attempt.place)
        if context.trace is not None:
            context.trace.ends(attempt.failure)
        if not attempt.over:  # it may still be at work
            self._tally.abandoned += 1
            self._stop(attempt.member, work.request)

    def _wish(self, request: Request, context: Context) -> Wish:
        """What is to be minded in choosing a worker."""
        if self._asking is None and request.priority is None and context.give_way is None:
            return ANY
        ask = NOTHING if self._asking is None else self._asking(request, context)
        priority = USUAL_PRIORITY if request.priority is None else request.priority
        if context.give_way is not None:
            priority = LAST_PRIORITY
        return Wish(frozenset(), ask, priority, context.give_way)

    def _lost(self, member: Member) -> None:
        """Who still waits to hear from a worker that is out asks another, if there is one."""
        if any(other.was == "up" for other in self._roster.members if other is not member):
            member.forsake()

    def _stop(self, member: Member, request: Request) -> None:
        if self._cancelling is not None and self._started:
            self._stopping.send(member.worker, self._cancelling.cancel(request))


def _is_dry(context: Context) -> bool:
    return context.watch is not None and context.watch.dry


def _source(told: SourceSettings, readers: Mapping[str, Read]) -> Source:
    if told.dns is not None:
        return Dns(told.dns, told.template)
    if told.file is None or told.file not in readers:
        raise ValueError("a source of workers is DNS, or a file and what reads it")
    return File(told.file, readers[told.file])
