"""The loop's one step: admit, read prompts, make one token for every row, tell what came of it.

New requests join between two steps and a cancelled one leaves at the next. Every step is one packed
pass: a token of each row that goes on, and chunks of the prompts that are being read. A request
whose client does not take its tokens (no credit) rests; it keeps its place and holds up no other.
"""

import logging
import secrets
from collections.abc import Callable

import torch

from backends.torch.assembly import Model
from backends.torch.attention import Segment
from backends.torch.choosing import Chooser
from backends.torch.counting import Tally
from backends.torch.grammar import Grammars
from backends.torch.guiding import Guiding
from backends.torch.kv import BLOCK, Kv, Pool, chained
from backends.torch.models import ModelError
from backends.torch.reading import Refused
from backends.torch.rows import Group, Job, Row
from backends.torch.scheduler import Chunk, Limits, Scheduler
from backends.torch.spec import (
    Failed,
    Figures,
    Finished,
    Generate,
    News,
    Started,
    Tokenize,
    Tokens,
)
from backends.torch.text import cut

_log = logging.getLogger(__name__)


class Engine:
    """Answers many requests with one model, a step at a time."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        tell: Callable[[News], None],
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` is called from another thread when a step may find something to do."""
        self._forward = model.forward
        self._tokenizer = model.tokenizer
        self._reader = model.reader
        self._tell = tell
        self._clock = clock
        self._chooser = Chooser(model, tell)
        self.pool = _pool(model, limits)
        self._queue = Scheduler(limits, self.pool)
        self._grammars = Grammars(model.tokenizer, model.forward.vocabulary, model.ends, wake)
        self._guiding = Guiding(model.tokenizer, model.reader, self._grammars)
        self._jobs: dict[int, Job] = {}
        self._tally = Tally()

    @property
    def rows(self) -> int:
        """Rows and prompts in work."""
        return self._queue.busy

    @property
    def waiting(self) -> int:
        """Prompts that have no place yet."""
        return self._queue.waiting + len(self._guiding)

    @property
    def figures(self) -> Figures:
        """What it holds and has done."""
        return self._tally.figures(self.pool, self._queue.preempted)

    @property
    def memory(self) -> int:
        """Bytes that keys and values may take."""
        return self.pool.tokens * self._forward.token_bytes

    def prepare(self) -> None:
        """Do at once what the first request of a kind would have to wait for."""
        self._grammars.prepare()

    # --- what comes in --------------------------------------------------------------------------

    def submit(self, spec: Generate) -> None:
        """A new request; it is told if it can't be done."""
        try:
            job = self._job(spec)
            held = self._guiding.holds(job)
        except Refused as refused:
            self._tell(refused.told(spec.job))
            return
        self._jobs[spec.job] = job
        if not held:
            self._queue.add(job)

    def _job(self, spec: Generate) -> Job:
        """What a request comes to. Raises Refused."""
        self._queue.check(max(spec.n, spec.best_of, len(spec.input.prompts)))
        rules = self._reader.rules(spec.picking)
        prompts = self._reader.prompts(spec.input, spec.ending)
        given = spec.picking.seed
        seed = secrets.randbits(64) if given is None else given
        job = Job(spec, rules, seed, self._clock(), credit=spec.credit)
        job.groups = [
            Group(job, number, ids, Kv(self.pool, len(ids)), chained(ids))
            for number, ids in enumerate(prompts)
        ]
        if spec.beams is not None:
            self._queue.check_beams(spec.beams.width, max(map(len, prompts)))
        for group in job.groups:
            group.searches = self._chooser.searches(spec)
        job.prompt_tokens = sum(map(len, prompts))
        return job

    def tokenize(self, order: Tokenize) -> None:
        """Cut a text, at once: it takes no row."""
        self._tell(Tokens(order.job, *cut(self._tokenizer, self._chooser.bytes, order.text)))

    def cancel(self, number: int) -> None:
        """Nobody waits for this request any more."""
        if job := self._jobs.pop(number, None):
            self._guiding.remove(job)
            self._queue.remove(job)

    def credit(self, number: int, tokens: int) -> None:
        """So many tokens of a request were taken."""
        if job := self._jobs.get(number):
            job.credit += tokens

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step. False: there is nothing to do now."""
        self._expire()
        self._settle()
        before = self._queue.preempted
        self._queue.admit(self._clock())
        ready = self._queue.clear()
        going, reading = self._queue.plan()
        if not going and not reading and not ready:
            return self._queue.preempted > before
        began = self._clock()
        logits, going, reading = self._pass(going, reading)
        lines = [] if logits is None else list(torch.split(logits, _counts(going, reading)))
        for chunk, line in zip(reading, lines[1:], strict=True):
            self._take_chunk(chunk, line)
        fresh = self._start_samples()
        lines[1:] = [row.group.logits for row in fresh if row.group.logits is not None]
        if rows := [*going, *fresh]:
            self._choose(lines, rows)
        read = sum(len(chunk.segment.tokens) for chunk in reading)
        batch, seconds = len(rows) + len(reading), self._clock() - began
        self._tally.step(seconds, read=read, made=len(rows), batch=batch)
        return True

    def _expire(self) -> None:
        now = self._clock()
        for job in [job for job in self._jobs.values() if now >= job.deadline]:
            self.cancel(job.spec.job)
            self._tell(Failed(job.spec.job, "deadline", "the request's time is up"))

    def _settle(self) -> None:
        """Requests whose answers have a form go on when that is understood."""
        for job, refused in self._guiding.settled(self._clock()):
            if refused is None:
                self._queue.add(job)
            else:
                self._refuse(job, refused)

    def _refuse(self, job: Job, refused: Refused) -> None:
        self.cancel(job.spec.job)
        self._tell(refused.told(job.spec.job))

    def _fail(self, job: Job, error: Exception) -> None:
        self.cancel(job.spec.job)
        message = f"the local model failed: {type(error).__name__}"
        self._tell(Failed(job.spec.job, "failed", message))

    def _pass(
        self, going: list[Row], reading: list[Chunk]
    ) -> tuple[torch.Tensor | None, list[Row], list[Chunk]]:
        """The logits, and whose they are.

        A pass that fails, be it for want of memory, is tried again with less, the largest chunk
        left out first and then the youngest row; the request without which it goes through fails.
        """
        left: list[Row | Chunk] = [*going, *sorted(reading, key=_size)]
        suspect: Job | None = None
        failure: Exception | None = None
        logits: torch.Tensor | None = None
        while left and logits is None:
            try:
                logits = self._forward([_segment(one) for one in left])
            except (RuntimeError, MemoryError) as error:
                _log.exception("a pass of the model failed")
                suspect, failure = _job(left[-1]), error
                left = [one for one in left if _job(one) is not suspect]
        if suspect is not None and failure is not None:
            self._fail(suspect, failure)
        return (
            logits,
            [one for one in left if isinstance(one, Row)],
            [one for one in left if isinstance(one, Chunk)],
        )

    def _choose(self, lines: list[torch.Tensor], rows: list[Row]) -> None:
        """A token for each row, by its line; where that fails, for as many as possible."""
        before = [len(row.output) for row in rows]
        try:
            # The copy that this makes is changed on the way.
            ended = self._chooser.choose(torch.cat(lines), rows)
        except (RuntimeError, MemoryError):
            _log.exception("the draw of %d tokens failed", len(rows))
            left = [at for at, row in enumerate(rows) if len(row.output) == before[at]]
            ended = self._choose_apart(lines, rows, left)
        for row in ended:
            if row.group.job.spec.job not in self._jobs:
                continue  # it was refused with another of its rows
            if row.refused is not None:
                self._refuse(row.group.job, row.refused)
                continue
            self._queue.end(row)
            self._end(row)

    def _choose_apart(
        self, lines: list[torch.Tensor], rows: list[Row], left: list[int]
    ) -> list[Row]:
        """Each request of those left for itself. Whose draw fails then, fails."""
        ended = []
        for job in dict.fromkeys(rows[at].group.job for at in left):
            own = [at for at in left if rows[at].group.job is job]
            try:
                ended += self._chooser.choose(torch.cat(lines)[own], [rows[at] for at in own])
            except (RuntimeError, MemoryError) as error:
                self._fail(job, error)
        return ended

    def _take_chunk(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """A chunk went through."""
        complete = self._queue.advance(chunk)
        group = chunk.reader
        if isinstance(group, Row):
            return
        job, end = group.job, group.kv.length
        if group.scores:
            targets = group.prompt[end - len(chunk.segment.tokens) + 1 : end + 1]
            if targets:
                self._chooser.score(group, targets, logits)
        if complete:
            group.logits = logits[-1:].clone()
        if complete and job.prefilled is None:
            job.prefilled = self._clock()
            self._tell(Started(job.spec.job, job.prompt_tokens))

    def _start_samples(self) -> list[Row]:
        """Samples of prompts that are read, as far as there are places."""
        found = []
        for group in list(self._queue.read):
            while group.started < group.job.samples and self._queue.fits(group):
                row = self._chooser.sample(group)
                if row.limit > 0:
                    self._queue.start(row)
                    found.append(row)
                else:
                    row.kv.free()
                    self._end(row)
            if group.started == group.job.samples:
                self._queue.read.remove(group)
        return found

    def _end(self, row: Row) -> None:
        """A sample is complete; perhaps its job is."""
        job = row.group.job
        self._chooser.end(row)
        if job.done:
            del self._jobs[job.spec.job]
            finished = self._finished(job)
            self._tally.finish(finished)
            self._tell(finished)

    def _finished(self, job: Job) -> Finished:
        now = self._clock()
        admitted = job.arrived if job.admitted is None else job.admitted
        prefilled = now if job.prefilled is None else job.prefilled
        return Finished(
            job.spec.job,
            job.prompt_tokens,
            job.completion_tokens,
            admitted - job.arrived,
            prefilled - admitted,
            now - prefilled,
            job.batch,
            sum(group.found or 0 for group in job.groups),
        )


def _blocks(model: Model, limits: Limits) -> int:
    """How many blocks the memory gives: for one whole context at least, for all rows at most."""
    context = -(-model.forward.context // BLOCK)
    each = model.forward.token_bytes * BLOCK
    affordable = limits.memory // each if each else context * limits.rows
    return max(context, min(affordable, context * limits.rows))


def _pool(model: Model, limits: Limits) -> Pool:
    """The memory of all rows, all of it taken now. Raises ModelError."""
    pool = Pool(_blocks(model, limits))
    kv = Kv(pool, 1)
    try:
        model.forward([Segment(kv, (0,), 0)])
    except (RuntimeError, MemoryError) as error:
        size = pool.tokens * model.forward.token_bytes >> 20
        raise ModelError(f"memory: {size} MB for keys and values can't be had") from error
    kv.free()
    return pool


def _segment(one: Row | Chunk) -> Segment:
    return Segment(one.kv, one.output[-1:]) if isinstance(one, Row) else one.segment


def _job(one: Row | Chunk) -> Job:
    return one.group.job if isinstance(one, Row) else one.reader.group.job


def _size(chunk: Chunk) -> tuple[int, ...]:
    return len(chunk.segment.tokens), *chunk.reader.rank


def _counts(going: list[Row], reading: list[Chunk]) -> list[int]:
    """How many lines of logits belong to all rows, and to each chunk."""
    return [len(going), *(chunk.segment.wants for chunk in reading)]
