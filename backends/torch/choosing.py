"""From logits to what is told: the draw, log probabilities, ends of choices, released text."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from backends.torch.assembly import LoadedModel
from backends.torch.beams import BeamSearch
from backends.torch.guiding import accept_token, mask_logits
from backends.torch.rows import ChoiceEvent, EngineRequest, SequenceGroup, StopReason, TokenSequence
from backends.torch.sampler import SampledLogprob, derive_seed, get_logprobs, sample_tokens
from backends.torch.searching import (
    compute_max_length,
    make_beam_searches,
    select_best_beams,
    step_beams,
)
from backends.torch.spec import (
    ChoiceEndEvent,
    EngineEvent,
    EngineToken,
    GenerateCommand,
    PromptEchoEvent,
    TokenAlternative,
)
from backends.torch.text import (
    Detokenizer,
    OutputText,
    OutputToken,
    ReadyText,
    TokenBytes,
    TokenDecoder,
)


class TokenSelector:
    """Gives rows their tokens, and tells what comes of them."""

    def __init__(self, model: LoadedModel, tell: Callable[[EngineEvent], None]) -> None:
        self._tokenizer = model.tokenizer
        self._context_length = model.runner.context_length
        self._end_tokens = model.end_tokens
        self._emit = tell
        self.token_bytes = TokenBytes(model.tokenizer)

    # --- a choice's life ------------------------------------------------------------------------

    def make_beam_searches(self, spec: GenerateCommand) -> Sequence[BeamSearch[TokenSequence]]:
        """Those of a prompt of this request, if it asks for beams."""
        if spec.beams is None:
            return ()
        ends = 0 if spec.stopping.ignore_eos else len(self._end_tokens)
        return make_beam_searches(spec.beams, ends + len(spec.stopping.stop_token_ids))

    def start_sample(self, group: SequenceGroup) -> TokenSequence:
        """The next sample of a prompt that is read."""
        job, number = group.request, group.samples_started
        ending = job.command.stopping
        group.samples_started += 1
        last = group.samples_started == job.sample_count
        room = compute_max_length(self._context_length, group.cache.pool.blocks, job) - len(
            group.prompt
        )
        decode = self._make_decoder(job)
        ends = () if ending.ignore_eos else tuple(self._end_tokens)
        row = TokenSequence(
            group,
            number,
            derive_seed(job.seed, group.number * job.sample_count + number),
            group.cache if last else group.cache.fork(),
            OutputText(Detokenizer(decode, group.prompt), ending.stop, include=ending.include_stop),
            room if ending.max_tokens is None else min(room, ending.max_tokens),
            (*ends, *ending.stop_token_ids),
        )
        if job.grammar_state is not None:
            row.grammar_state = job.grammar_state.copy()
            row.discouraged_tokens = tuple(self._end_tokens) if ending.ignore_eos else ()
        row.output_parser = None if job.parser_rules is None else job.parser_rules.make_parser()
        if job.command.echo and not job.returns_best_only:
            self._emit(self._make_prompt_echo(group, row.choice_index))
        return row

    def select_tokens(
        self, logits: torch.Tensor, rows: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        """One token for each row, and what follows from it. Returns the rows that ended."""
        for row in rows:
            row.group.request.max_batch = max(row.group.request.max_batch, len(rows))
        together: dict[SequenceGroup, list[int]] = {}
        for i, row in enumerate(rows):
            if row.group.beam_searches:
                together.setdefault(row.group, []).append(i)
        ended = []
        for at in together.values():
            ended += step_beams(logits[at], [rows[i] for i in at], self._append_token)
        if together:
            alone = [i for i, row in enumerate(rows) if not row.group.beam_searches]
            logits, rows = logits[alone], [rows[i] for i in alone]
        return ended + self._sample_tokens(logits, rows)

    def _sample_tokens(
        self, logits: torch.Tensor, rows: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        judged = [i for i, row in enumerate(rows) if _wants_logprobs(row.group.request)]
        log_probs = logits[judged].log_softmax(-1) if judged else logits[:0]
        mask_logits(logits, rows)
        chosen = sample_tokens(logits, [row.make_sampling_input() for row in rows])
        tops = [rows[i].group.request.command.logprobs or 0 for i in judged]
        found = get_logprobs(log_probs, [chosen[i] for i in judged], tops) if judged else []
        likely = dict(zip(judged, found, strict=True))
        ended = []
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if self._accept_token(row, token, likely.get(i)):
                ended.append(row)
        return ended

    def _accept_token(self, row: TokenSequence, token: int, likely: SampledLogprob | None) -> bool:
        """Whether it was the row's last; tells what is sure of the text."""
        row.group.request.completion_tokens += 1
        ended = self._append_token(row, token, likely)
        if not ended and (release := row.output_text.pop_ready()):
            self._emit_text(row, release)
        return ended

    def _append_token(self, row: TokenSequence, token: int, likely: SampledLogprob | None) -> bool:
        """Whether it was the row's last."""
        job, ending = row.group.request, row.group.request.command.stopping
        if not accept_token(row, token):
            return True
        row.output.append(token)
        if likely is not None:
            row.cumulative_logprob += likely.logprob
        reason = self._get_end_reason(token, job)
        if reason is None or ending.include_stop:
            wanted = likely is not None and job.command.logprobs is not None
            detail = self._make_token(token, likely) if wanted and likely is not None else None
            scan = reason is None and len(row.output) > ending.min_tokens
            row.output_text.add_token(OutputToken(token, detail), scan=scan)
        if reason is not None:
            row.reason, row.stop = reason, token if reason == "stop" else None
        elif row.output_text.stopped is not None:
            row.reason, row.stop = "stop", row.output_text.stopped
        elif row.grammar_state is not None and row.grammar_state.is_finished:
            row.reason = "eos"
        else:
            return len(row.output) >= row.max_tokens
        return True

    def _get_end_reason(self, token: int, job: EngineRequest) -> StopReason | None:
        ending = job.command.stopping
        if token in ending.stop_token_ids:
            return "stop"
        return "eos" if token in self._end_tokens and not ending.ignore_eos else None

    def _emit_text(self, row: TokenSequence, release: ReadyText) -> None:
        job = row.group.request
        if job.returns_best_only:
            row.withheld_text.append(release)
        else:
            self._emit_all(job, row.map_text(release, row.choice_index))

    def finish_sequence(self, row: TokenSequence) -> None:
        """A sample is complete: its last text, and its end. Of beams the search knows the texts."""
        group, job = row.group, row.group.request
        group.finished.append(row)
        if not group.beam_searches:
            self._close_output(row)
        if not job.returns_best_only:
            self._emit_all(job, row.map_end(row.choice_index))
        elif group.is_done:
            self._emit_best(group)

    def _close_output(self, row: TokenSequence) -> None:
        if release := row.output_text.close():
            self._emit_text(row, release)
        if row.output_text.stopped is not None and row.reason != "eos":
            row.reason, row.stop = "stop", row.output_text.stopped

    def _emit_best(self, group: SequenceGroup) -> None:
        job = group.request
        found = select_best_beams(group) if group.beam_searches else group.select_best()
        for row in found if group.beam_searches else ():
            self._close_output(row)
            job.completion_tokens += len(row.output)
        for rank, row in enumerate(found):
            choice = group.number * job.command.n + rank
            if job.command.echo:
                self._emit(self._make_prompt_echo(group, choice))
            for release in row.withheld_text:
                self._emit_all(job, row.map_text(release, choice))
            self._emit_all(job, row.map_end(choice))

    def _emit_all(self, job: EngineRequest, news: Iterable[ChoiceEvent]) -> None:
        """What the client gets, and has to take: credit is for what is on its way to him."""
        for one in news:
            if not job.returns_best_only and not isinstance(one, ChoiceEndEvent):
                job.credit -= one.token_count
            self._emit(one)

    # --- tokens as they are told ----------------------------------------------------------------

    def score_prompt(
        self, group: SequenceGroup, targets: Sequence[int], logits: torch.Tensor
    ) -> None:
        """Log probabilities of prompt tokens, each by the line of ``logits`` before it."""
        log_probs = logits[: len(targets)].log_softmax(-1)
        tops = [group.request.command.prompt_logprobs or 0] * len(targets)
        group.prompt_logprobs.extend(
            map(self._make_token, targets, get_logprobs(log_probs, targets, tops))
        )

    def _make_decoder(self, job: EngineRequest) -> TokenDecoder:
        """How a job's tokens are made text: the marks around calls are kept, to be read."""
        skip = job.command.stopping.skip_special_tokens
        if job.parser_rules is None or not skip:
            return functools.partial(self._decode, skip=skip)
        left_out = frozenset(self._tokenizer.all_special_ids) - job.parser_rules.marker_tokens
        return lambda ids: self._decode([i for i in ids if i not in left_out], skip=False)

    def _decode(self, ids: Sequence[int], *, skip: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return text

    def _make_token(self, token: int, likely: SampledLogprob) -> EngineToken:
        top = tuple(TokenAlternative(i, self.token_bytes(i), value) for i, value in likely.top)
        return EngineToken(token, self.token_bytes(token), likely.logprob, top)

    def _make_prompt_echo(self, group: SequenceGroup, choice: int) -> PromptEchoEvent:
        """The prompt, as its tokens spell it, or as it was sent."""
        spec, first = group.request.command, group.prompt[0]
        # What a template puts around a prompt is none of the client's text.
        said = spec.input.prompts[group.number] if spec.input.as_user_message else group.prompt
        text = said if isinstance(said, str) else self._decode(said, skip=True)
        if spec.prompt_logprobs is None:
            return PromptEchoEvent(spec.request_id, choice, text)
        tokens = (EngineToken(first, self.token_bytes(first), None), *group.prompt_logprobs)
        return PromptEchoEvent(spec.request_id, choice, text, tokens)


def _wants_logprobs(job: EngineRequest) -> bool:
    return job.command.logprobs is not None or job.returns_best_only
