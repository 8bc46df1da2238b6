"""From logits to what is told: the draw, log probabilities, ends of choices, released text."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from backends.torch.assembly import Model
from backends.torch.beams import Search
from backends.torch.guiding import bar, take
from backends.torch.rows import Group, Job, Reason, Row, Told
from backends.torch.sampler import Likely, likelihoods, pick, seed_of
from backends.torch.searching import best, longest, searches, step
from backends.torch.spec import Alternative, Echo, Ended, Generate, News, Token
from backends.torch.text import Decode, Detokenizer, Release, Taken, TokenBytes, Transcript


class Chooser:
    """Gives rows their tokens, and tells what comes of them."""

    def __init__(self, model: Model, tell: Callable[[News], None]) -> None:
        self._tokenizer = model.tokenizer
        self._context = model.forward.context
        self._ends = model.ends
        self._tell = tell
        self.bytes = TokenBytes(model.tokenizer)

    # --- a choice's life ------------------------------------------------------------------------

    def searches(self, spec: Generate) -> Sequence[Search[Row]]:
        """Those of a prompt of this request, if it asks for beams."""
        if spec.beams is None:
            return ()
        ends = 0 if spec.ending.ignore_eos else len(self._ends)
        return searches(spec.beams, ends + len(spec.ending.stop_token_ids))

    def sample(self, group: Group) -> Row:
        """The next sample of a prompt that is read."""
        job, number = group.job, group.started
        ending = job.spec.ending
        group.started += 1
        last = group.started == job.samples
        room = longest(self._context, group.kv.pool.blocks, job) - len(group.prompt)
        decode = self._decoder(job)
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
        if job.guide is not None:
            row.guide = job.guide.copy()
            row.shunned = tuple(self._ends) if ending.ignore_eos else ()
        row.speech = None if job.voice is None else job.voice.speech()
        if job.spec.echo and not job.chooses:
            self._tell(self._echo(group, row.choice))
        return row

    def choose(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Row]:
        """One token for each row, and what follows from it. Returns the rows that ended."""
        for row in rows:
            row.group.job.batch = max(row.group.job.batch, len(rows))
        together: dict[Group, list[int]] = {}
        for i, row in enumerate(rows):
            if row.group.searches:
                together.setdefault(row.group, []).append(i)
        ended = []
        for at in together.values():
            ended += step(logits[at], [rows[i] for i in at], self._extend)
        if together:
            alone = [i for i, row in enumerate(rows) if not row.group.searches]
            logits, rows = logits[alone], [rows[i] for i in alone]
        return ended + self._draw(logits, rows)

    def _draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Row]:
        judged = [i for i, row in enumerate(rows) if _wants_logprobs(row.group.job)]
        log_probs = logits[judged].log_softmax(-1) if judged else logits[:0]
        bar(logits, rows)
        chosen = pick(logits, [row.drawn() for row in rows])
        tops = [rows[i].group.job.spec.logprobs or 0 for i in judged]
        found = likelihoods(log_probs, [chosen[i] for i in judged], tops) if judged else []
        likely = dict(zip(judged, found, strict=True))
        ended = []
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if self._accept(row, token, likely.get(i)):
                ended.append(row)
        return ended

    def _accept(self, row: Row, token: int, likely: Likely | None) -> bool:
        """Whether it was the row's last; tells what is sure of the text."""
        row.group.job.completion_tokens += 1
        ended = self._extend(row, token, likely)
        if not ended and (release := row.transcript.take()):
            self._release(row, release)
        return ended

    def _extend(self, row: Row, token: int, likely: Likely | None) -> bool:
        """Whether it was the row's last."""
        job, ending = row.group.job, row.group.job.spec.ending
        if not take(row, token):
            return True
        row.output.append(token)
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
        elif row.guide is not None and row.guide.ended:
            row.reason = "eos"
        else:
            return len(row.output) >= row.limit
        return True

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
            self._tell_all(job, row.told(release, row.choice))

    def end(self, row: Row) -> None:
        """A sample is complete: its last text, and its end. Of beams the search knows the texts."""
        group, job = row.group, row.group.job
        group.ended.append(row)
        if not group.searches:
            self._close(row)
        if not job.chooses:
            self._tell_all(job, row.last(row.choice))
        elif group.done:
            self._tell_best(group)

    def _close(self, row: Row) -> None:
        if release := row.transcript.close():
            self._release(row, release)
        if row.transcript.stopped is not None and row.reason != "eos":
            row.reason, row.stop = "stop", row.transcript.stopped

    def _tell_best(self, group: Group) -> None:
        job = group.job
        found = best(group) if group.searches else group.best()
        for row in found if group.searches else ():
            self._close(row)
            job.completion_tokens += len(row.output)
        for rank, row in enumerate(found):
            choice = group.number * job.spec.n + rank
            if job.spec.echo:
                self._tell(self._echo(group, choice))
            for release in row.kept:
                self._tell_all(job, row.told(release, choice))
            self._tell_all(job, row.last(choice))

    def _tell_all(self, job: Job, news: Iterable[Told]) -> None:
        """What the client gets, and has to take: credit is for what is on its way to him."""
        for one in news:
            if not job.chooses and not isinstance(one, Ended):
                job.credit -= one.count
            self._tell(one)

    # --- tokens as they are told ----------------------------------------------------------------

    def score(self, group: Group, targets: Sequence[int], logits: torch.Tensor) -> None:
        """Log probabilities of prompt tokens, each by the line of ``logits`` before it."""
        log_probs = logits[: len(targets)].log_softmax(-1)
        tops = [group.job.spec.prompt_logprobs or 0] * len(targets)
        group.scored.extend(map(self._token, targets, likelihoods(log_probs, targets, tops)))

    def _decoder(self, job: Job) -> Decode:
        """How a job's tokens are made text: the marks around calls are kept, to be read."""
        skip = job.spec.ending.skip_special_tokens
        if job.voice is None or not skip:
            return functools.partial(self._decode, skip=skip)
        left_out = frozenset(self._tokenizer.all_special_ids) - job.voice.marks
        return lambda ids: self._decode([i for i in ids if i not in left_out], skip=False)

    def _decode(self, ids: Sequence[int], *, skip: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return text

    def _token(self, token: int, likely: Likely) -> Token:
        top = tuple(Alternative(i, self.bytes(i), value) for i, value in likely.top)
        return Token(token, self.bytes(token), likely.logprob, top)

    def _echo(self, group: Group, choice: int) -> Echo:
        """The prompt, as its tokens spell it, or as it was sent."""
        spec, first = group.job.spec, group.prompt[0]
        # What a template puts around a prompt is none of the client's text.
        said = spec.input.prompts[group.number] if spec.input.wrap else group.prompt
        text = said if isinstance(said, str) else self._decode(said, skip=True)
        if spec.prompt_logprobs is None:
            return Echo(spec.job, choice, text)
        tokens = (Token(first, self.bytes(first), None), *group.scored)
        return Echo(spec.job, choice, text, tokens)


def _wants_logprobs(job: Job) -> bool:
    return job.spec.logprobs is not None or job.chooses
