"""The loop's one step: admit, read prompts, make one token for every row, tell what came of it.

New requests join between two steps and a cancelled one leaves at the next. Every step is one packed
pass: a token of each row that goes on, and chunks of the prompts that are being read. A request
whose client does not take its tokens (no credit) rests; it keeps its place and holds up no other.
"""

import functools
import heapq
import logging
import secrets
from collections.abc import Callable, Sequence

import torch
from msgspec import Struct

from backends.torch.assembly import Model
from backends.torch.forward import Segment
from backends.torch.reading import Refused
from backends.torch.rows import Group, Job, Reason, Row
from backends.torch.sampler import Likely, likelihoods, pick, seed_of
from backends.torch.spec import (
    Alternative,
    Echo,
    Failed,
    Finished,
    Generate,
    News,
    Started,
    Token,
    Tokenize,
    Tokens,
)
from backends.torch.text import Detokenizer, Release, Taken, TokenBytes, Transcript, cut

_log = logging.getLogger(__name__)


class Limits(Struct, frozen=True):
    """How much at once."""

    rows: int = 16
    waiting: int = 256
    batch: int = 2048
    """Prompts of one request, and samples of one prompt."""
    chunk: int = 256
    """Prompt tokens read in one step: the more, the longer the other rows wait for theirs."""


class Engine:
    """Answers many requests with one model, a step at a time."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        tell: Callable[[News], None],
        clock: Callable[[], float],
    ) -> None:
        self._forward = model.forward
        self._tokenizer = model.tokenizer
        self._reader = model.reader
        self._ends = model.ends
        self._limits = limits
        self._tell = tell
        self._clock = clock
        self._bytes = TokenBytes(model.tokenizer)
        self._waiting: list[tuple[int, int, Group]] = []
        self._arrivals = 0
        self._reading: list[Group] = []
        self._read: list[Group] = []
        """Prompts that are read, and have samples yet to be started."""
        self._rows: list[Row] = []
        self._jobs: dict[int, Job] = {}

    @property
    def rows(self) -> int:
        """Rows and prompts in work."""
        return len(self._rows) + len(self._reading)

    @property
    def waiting(self) -> int:
        """Prompts that have no place yet."""
        return len(self._waiting)

    # --- what comes in --------------------------------------------------------------------------

    def submit(self, spec: Generate) -> None:
        """A new request; it is told if it can't be done."""
        try:
            if len(self._waiting) >= self._limits.waiting:
                raise Refused("overloaded", "the queue of the local model is full")
            if max(spec.n, spec.best_of, len(spec.input.prompts)) > self._limits.batch:
                most = self._limits.batch
                raise Refused("invalid", f"at most {most} choices and prompts", param="n")
            rules = self._reader.rules(spec.picking)
            prompts = self._reader.prompts(spec.input, spec.ending)
        except Refused as refused:
            self._tell(refused.told(spec.job))
            return
        given = spec.picking.seed
        seed = secrets.randbits(64) if given is None else given
        job = Job(spec, rules, seed, self._clock(), credit=spec.credit)
        job.groups = [Group(job, number, ids) for number, ids in enumerate(prompts)]
        job.prompt_tokens = sum(map(len, prompts))
        self._jobs[spec.job] = job
        for group in job.groups:
            heapq.heappush(self._waiting, (spec.priority, self._arrivals, group))
            self._arrivals += 1

    def tokenize(self, order: Tokenize) -> None:
        """Cut a text, at once: it takes no row."""
        self._tell(Tokens(order.job, *cut(self._tokenizer, self._bytes, order.text)))

    def cancel(self, number: int) -> None:
        """Nobody waits for this request any more."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        self._rows = [row for row in self._rows if row.group.job is not job]
        self._reading = [group for group in self._reading if group.job is not job]
        self._read = [group for group in self._read if group.job is not job]
        if any(entry[2].job is job for entry in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[2].job is not job]
            heapq.heapify(self._waiting)

    def credit(self, number: int, tokens: int) -> None:
        """So many tokens of a request were taken."""
        if job := self._jobs.get(number):
            job.credit += tokens

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step. False: there is nothing to do now."""
        self._expire()
        self._admit()
        going = [row for row in self._rows if row.group.job.credit > 0]
        reading = self._next_chunks()
        if not going and not reading and not (self._read and self._free):
            return False
        try:
            self._compute(going, reading)
        except RuntimeError as error:  # out of memory, or a kernel that fails
            _log.exception("a pass of the model failed")
            self._fail_all(f"the local model failed: {type(error).__name__}")
        return True

    @property
    def _free(self) -> int:
        return self._limits.rows - len(self._rows) - len(self._reading)

    def _expire(self) -> None:
        now = self._clock()
        for job in [job for job in self._jobs.values() if now >= job.deadline]:
            self.cancel(job.spec.job)
            self._tell(Failed(job.spec.job, "deadline", "the request's time is up"))

    def _fail_all(self, message: str) -> None:
        jobs = {row.group.job.spec.job for row in self._rows}
        jobs |= {group.job.spec.job for group in (*self._reading, *self._read)}
        for number in jobs:
            self.cancel(number)
            self._tell(Failed(number, "failed", message))

    def _admit(self) -> None:
        """Begins to read new prompts, where places are free and no read prompt waits for one."""
        while self._free > 0 and self._waiting and not self._read:
            _, _, group = heapq.heappop(self._waiting)
            if group.job.admitted is None:
                group.job.admitted = self._clock()
            self._reading.append(group)

    def _next_chunks(self) -> list[tuple[Group, Segment]]:
        """The next pieces of the prompts that are being read, in order of arrival."""
        left, found = self._limits.chunk, []
        for group in self._reading:
            start = group.kv.length
            tokens = group.prompt[start : start + left]
            if tokens:
                last = start + len(tokens) == len(group.prompt)
                scores = group.job.spec.prompt_logprobs is not None
                wants = len(tokens) if scores else int(last)
                found.append((group, Segment(group.kv, tokens, wants)))
                left -= len(tokens)
        return found

    def _compute(self, going: list[Row], reading: list[tuple[Group, Segment]]) -> None:
        segments = [Segment(row.kv, row.output[-1:]) for row in going]
        segments.extend(chunk for _, chunk in reading)
        # Without segments there are only further samples of prompts that were read before.
        found = [self._forward(segments)] if segments else []
        for logits in found:
            at = len(going)
            for group, chunk in reading:
                self._take_chunk(group, chunk, logits[at : at + chunk.wants])
                at += chunk.wants
        fresh = self._start_samples()
        rows = [*going, *fresh]
        if rows:
            first = [row.group.logits for row in fresh if row.group.logits is not None]
            self._choose(torch.cat([*(logits[: len(going)] for logits in found), *first]), rows)

    def _take_chunk(self, group: Group, chunk: Segment, logits: torch.Tensor) -> None:
        """A chunk of a prompt went through."""
        job, end = group.job, group.kv.length
        if job.spec.prompt_logprobs is not None:
            targets = group.prompt[end - len(chunk.tokens) + 1 : end + 1]
            if targets:
                log_probs = logits[: len(targets)].log_softmax(-1)
                tops = [job.spec.prompt_logprobs] * len(targets)
                group.scored.extend(
                    map(self._token, targets, likelihoods(log_probs, targets, tops))
                )
        if end < len(group.prompt):
            return
        group.logits = logits[-1:].clone()
        self._reading.remove(group)
        self._read.append(group)
        if job.prefilled is None:
            job.prefilled = self._clock()
            self._tell(Started(job.spec.job, job.prompt_tokens))

    def _start_samples(self) -> list[Row]:
        """Samples of prompts that are read, as far as there are places."""
        found = []
        for group in list(self._read):
            while self._free > 0 and group.started < group.job.samples:
                row = self._sample(group)
                if row.limit > 0:
                    self._rows.append(row)
                    found.append(row)
                else:
                    self._end(row)
            if group.started == group.job.samples:
                self._read.remove(group)
        return found

    def _sample(self, group: Group) -> Row:
        job, number = group.job, group.started
        ending = job.spec.ending
        group.started += 1
        last = group.started == job.samples
        room = self._forward.context - len(group.prompt)
        decode = functools.partial(self._decode, skip=ending.skip_special_tokens)
        ends = () if ending.ignore_eos else tuple(self._ends)
        row = Row(
            group,
            number,
            seed_of(job.seed, group.number * job.samples + number),
            group.kv if last else group.kv.copy(),
            Transcript(Detokenizer(decode, group.prompt), ending.stop, include=ending.include_stop),
            room if ending.max_tokens is None else min(room, ending.max_tokens),
            (*ends, *ending.stop_token_ids),
        )
        if job.spec.echo and not job.chooses:
            self._tell(self._echo(group, row.choice))
        return row

    # --- what comes of it -----------------------------------------------------------------------

    def _choose(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """One token for each row, and what follows from it."""
        judged = [i for i, row in enumerate(rows) if _wants_logprobs(row.group.job)]
        log_probs = logits[judged].log_softmax(-1) if judged else logits[:0]
        chosen = pick(logits, [row.drawn() for row in rows])
        tops = [rows[i].group.job.spec.logprobs or 0 for i in judged]
        found = likelihoods(log_probs, [chosen[i] for i in judged], tops) if judged else []
        likely = dict(zip(judged, found, strict=True))
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            row.group.job.batch = max(row.group.job.batch, len(rows))
            self._accept(row, token, likely.get(i))

    def _accept(self, row: Row, token: int, likely: Likely | None) -> None:
        job, ending = row.group.job, row.group.job.spec.ending
        row.output.append(token)
        job.completion_tokens += 1
        if likely is not None:
            row.likelihood += likely.logprob
        reason = self._ending_token(token, job)
        if reason is None or ending.include_stop:
            wanted = likely is not None and job.spec.logprobs is not None
            detail = self._token(token, likely) if wanted and likely is not None else None
            scan = reason is None and len(row.output) > ending.min_tokens
            row.transcript.add(Taken(token, detail), scan=scan)
        if reason is not None:
            row.reason, row.stop = reason, token if reason == "stop" else None
        elif row.transcript.stopped is not None:
            row.reason, row.stop = "stop", row.transcript.stopped
        elif len(row.output) < row.limit:
            if release := row.transcript.take():
                self._release(row, release)
            return
        self._rows.remove(row)
        self._end(row)

    def _ending_token(self, token: int, job: Job) -> Reason | None:
        ending = job.spec.ending
        if token in ending.stop_token_ids:
            return "stop"
        return "eos" if token in self._ends and not ending.ignore_eos else None

    def _release(self, row: Row, release: Release) -> None:
        job = row.group.job
        if job.chooses:
            row.kept.append(release)
        else:
            job.credit -= len(release.tokens)
            self._tell(row.piece(release, row.choice))

    def _end(self, row: Row) -> None:
        """A sample is complete; perhaps its job is."""
        group, job = row.group, row.group.job
        if release := row.transcript.close():
            self._release(row, release)
        if row.transcript.stopped is not None and row.reason != "eos":
            row.reason, row.stop = "stop", row.transcript.stopped
        group.ended.append(row)
        if not job.chooses:
            self._tell(row.end(row.choice))
        elif group.done:
            self._tell_best(group)
        if job.done:
            del self._jobs[job.spec.job]
            self._tell(self._finished(job))

    def _tell_best(self, group: Group) -> None:
        job = group.job
        for rank, row in enumerate(group.best()):
            choice = group.number * job.spec.n + rank
            if job.spec.echo:
                self._tell(self._echo(group, choice))
            for release in row.kept:
                self._tell(row.piece(release, choice))
            self._tell(row.end(choice))

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
        )

    # --- tokens as they are told ----------------------------------------------------------------

    def _decode(self, ids: Sequence[int], *, skip: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return text

    def _token(self, token: int, likely: Likely) -> Token:
        top = tuple(Alternative(i, self._bytes(i), value) for i, value in likely.top)
        return Token(token, self._bytes(token), likely.logprob, top)

    def _echo(self, group: Group, choice: int) -> Echo:
        """The prompt, as its tokens spell it."""
        spec, first = group.job.spec, group.prompt[0]
        text = self._decode(group.prompt, skip=True)
        if spec.prompt_logprobs is None:
            return Echo(spec.job, choice, text)
        tokens = (Token(first, self._bytes(first), None), *group.scored)
        return Echo(spec.job, choice, text, tokens)


def _wants_logprobs(job: Job) -> bool:
    return job.spec.logprobs is not None or job.chooses
