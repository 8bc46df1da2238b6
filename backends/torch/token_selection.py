"""From logits to events: sampling, log probabilities, and the ends of choices.

Each step has one row of logits for each sequence. The rows of beam searches are taken out first
(``beam_sequences``); the others are masked by their grammars (``grammar_manager``) and sampled
together. The selected token is appended to its sequence, whose text is emitted as far as no stop
string may begin in it. If only the best samples are wanted, all are withheld until the last ends.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from backends.torch.beam_search import BeamSearch
from backends.torch.beam_sequences import (
    compute_max_length,
    make_beam_searches,
    select_best_beams,
    step_beams,
)
from backends.torch.detokenizer import (
    Detokenizer,
    OutputText,
    OutputToken,
    ReadyText,
    TokenBytes,
    TokenDecoder,
)
from backends.torch.grammar_manager import accept_token, mask_logits
from backends.torch.ipc import (
    ChoiceEndEvent,
    EngineEvent,
    EngineToken,
    GenerateCommand,
    PromptEchoEvent,
    TokenAlternative,
)
from backends.torch.loaded_model import LoadedModel
from backends.torch.prompt_lookup import PromptLookup
from backends.torch.sampling import (
    SampledLogprob,
    derive_seed,
    get_logprobs,
    sample_tokens,
)
from backends.torch.sequence import (
    ChoiceEvent,
    EngineRequest,
    SequenceGroup,
    StopReason,
    TokenSequence,
)


class TokenSelector:
    """Selects the next tokens of sequences and emits the resulting events."""

    def __init__(
        self, model: LoadedModel, emit: Callable[[EngineEvent], None], longest_draft: int
    ) -> None:
        """``longest_draft``: the most tokens of a draft; 0: no prompt lookup."""
        self._tokenizer = model.tokenizer
        self._context_length = model.runner.context_length
        self._longest_draft = longest_draft
        self._end_tokens = model.end_tokens
        self._emit = emit
        self.token_bytes = TokenBytes(model.tokenizer)

    # --- generation -----------------------------------------------------------------------------

    def make_beam_searches(self, command: GenerateCommand) -> Sequence[BeamSearch[TokenSequence]]:
        """The beam searches for a prompt; none if the request uses sampling."""
        if command.beams is None:
            return ()
        end_token_count = 0 if command.stopping.ignore_eos else len(self._end_tokens)
        return make_beam_searches(
            command.beams, end_token_count + len(command.stopping.stop_token_ids)
        )

    def start_sample(self, group: SequenceGroup) -> TokenSequence:
        """Start the next sample of a prefilled prompt."""
        request, sample = group.request, group.samples_started
        stopping = request.command.stopping
        group.samples_started += 1
        is_last = group.samples_started == request.sample_count
        remaining = compute_max_length(
            self._context_length, group.cache.pool.blocks, request
        ) - len(group.prompt)
        decode = self._make_decoder(request)
        end_tokens = () if stopping.ignore_eos else tuple(self._end_tokens)
        sequence = TokenSequence(
            group=group,
            sample=sample,
            seed=derive_seed(request.seed, group.number * request.sample_count + sample),
            cache=group.cache if is_last else group.cache.fork(),
            output_text=OutputText(
                Detokenizer(decode, group.prompt), stopping.stop, include=stopping.include_stop
            ),
            max_tokens=remaining
            if stopping.max_tokens is None
            else min(remaining, stopping.max_tokens),
            min_length_forbidden=(*end_tokens, *stopping.stop_token_ids),
        )
        if self._longest_draft and not group.beam_searches:
            sequence.prompt_lookup = PromptLookup(group.prompt, self._longest_draft)
        if request.grammar_state is not None:
            sequence.grammar_state = request.grammar_state.copy()
            sequence.discouraged_tokens = tuple(self._end_tokens) if stopping.ignore_eos else ()
        sequence.output_parser = (
            None if request.parser_rules is None else request.parser_rules.make_parser()
        )
        if request.command.echo and not request.returns_best_only:
            self._emit(self._make_prompt_echo(group, sequence.choice_index))
        return sequence

    def select_tokens(
        self, logits: torch.Tensor, sequences: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        """Append one token to each sequence. Returns the sequences that have ended."""
        for sequence in sequences:
            sequence.group.request.max_batch = max(sequence.group.request.max_batch, len(sequences))
        beam_indices: dict[SequenceGroup, list[int]] = {}
        for i, sequence in enumerate(sequences):
            if sequence.group.beam_searches:
                beam_indices.setdefault(sequence.group, []).append(i)
        finished = []
        for indices in beam_indices.values():
            finished += step_beams(
                logits[indices], [sequences[i] for i in indices], self._append_token
            )
        if beam_indices:
            other_indices = [
                i for i, sequence in enumerate(sequences) if not sequence.group.beam_searches
            ]
            logits, sequences = logits[other_indices], [sequences[i] for i in other_indices]
        return finished + self._sample_tokens(logits, sequences)

    def _sample_tokens(
        self, logits: torch.Tensor, sequences: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        logprob_indices = [
            i for i, sequence in enumerate(sequences) if _wants_logprobs(sequence.group.request)
        ]
        log_probs = logits[logprob_indices].log_softmax(-1) if logprob_indices else logits[:0]
        mask_logits(logits, sequences)
        chosen = sample_tokens(logits, [sequence.make_sampling_input() for sequence in sequences])
        tops = [sequences[i].group.request.command.logprobs or 0 for i in logprob_indices]
        logprobs: dict[int, SampledLogprob] = {}
        if logprob_indices:
            results = get_logprobs(log_probs, [chosen[i] for i in logprob_indices], tops)
            logprobs = dict(zip(logprob_indices, results, strict=True))
        finished = []
        for i, (sequence, token) in enumerate(zip(sequences, chosen, strict=True)):
            if self._accept_token(sequence, token, logprobs.get(i)):
                finished.append(sequence)
        return finished

    def _accept_token(
        self, sequence: TokenSequence, token: int, logprob: SampledLogprob | None
    ) -> bool:
        """Append a token and emit text that is ready; returns whether the sequence has ended."""
        sequence.group.request.completion_tokens += 1
        is_finished = self._append_token(sequence, token, logprob)
        if not is_finished and (ready := sequence.output_text.pop_ready()):
            self._emit_text(sequence, ready)
        return is_finished

    def _append_token(
        self, sequence: TokenSequence, token: int, logprob: SampledLogprob | None
    ) -> bool:
        """Append a token; returns whether the sequence has ended."""
        request, stopping = sequence.group.request, sequence.group.request.command.stopping
        if not accept_token(sequence, token):
            return True
        sequence.output.append(token)
        if logprob is not None:
            sequence.cumulative_logprob += logprob.logprob
        reason = self._get_end_reason(token, request)
        if reason is None or stopping.include_stop:
            engine_token = None
            if logprob is not None and request.command.logprobs is not None:
                engine_token = self._make_token(token, logprob)
            scan = reason is None and len(sequence.output) > stopping.min_tokens
            sequence.output_text.add_token(OutputToken(token, engine_token), scan=scan)
        if reason is not None:
            sequence.reason, sequence.stop = reason, token if reason == "stop" else None
        elif sequence.output_text.stopped is not None:
            sequence.reason, sequence.stop = "stop", sequence.output_text.stopped
        elif sequence.grammar_state is not None and sequence.grammar_state.is_finished:
            sequence.reason = "eos"
        else:
            return len(sequence.output) >= sequence.max_tokens
        return True

    def _get_end_reason(self, token: int, request: EngineRequest) -> StopReason | None:
        stopping = request.command.stopping
        if token in stopping.stop_token_ids:
            return "stop"
        return "eos" if token in self._end_tokens and not stopping.ignore_eos else None

    def _emit_text(self, sequence: TokenSequence, ready: ReadyText) -> None:
        request = sequence.group.request
        if request.returns_best_only:
            sequence.withheld_text.append(ready)
        else:
            self._emit_all(request, sequence.map_text(ready, sequence.choice_index))

    def finish_sequence(self, sequence: TokenSequence) -> None:
        """Emit the last text and the end of a sample, or the best samples once all have ended."""
        group, request = sequence.group, sequence.group.request
        group.finished.append(sequence)
        if not group.beam_searches:
            self._close_output(sequence)
        if not request.returns_best_only:
            self._emit_all(request, sequence.map_end(sequence.choice_index))
        elif group.is_done:
            self._emit_best(group)

    def _close_output(self, sequence: TokenSequence) -> None:
        if ready := sequence.output_text.close():
            self._emit_text(sequence, ready)
        if sequence.output_text.stopped is not None and sequence.reason != "eos":
            sequence.reason, sequence.stop = "stop", sequence.output_text.stopped

    def _emit_best(self, group: SequenceGroup) -> None:
        request = group.request
        best = select_best_beams(group) if group.beam_searches else group.select_best()
        for sequence in best if group.beam_searches else ():
            self._close_output(sequence)
            request.completion_tokens += len(sequence.output)
        for rank, sequence in enumerate(best):
            choice = group.number * request.command.n + rank
            if request.command.echo:
                self._emit(self._make_prompt_echo(group, choice))
            for ready in sequence.withheld_text:
                self._emit_all(request, sequence.map_text(ready, choice))
            self._emit_all(request, sequence.map_end(choice))

    def _emit_all(self, request: EngineRequest, events: Iterable[ChoiceEvent]) -> None:
        """Emit events and deduct their tokens from the credit, which limits unread tokens."""
        for event in events:
            if not request.returns_best_only and not isinstance(event, ChoiceEndEvent):
                request.credit -= event.token_count
            self._emit(event)

    # --- token details --------------------------------------------------------------------------

    def score_prompt(
        self, group: SequenceGroup, targets: Sequence[int], logits: torch.Tensor
    ) -> None:
        """Record log probabilities of prompt tokens, each from the logits before it."""
        log_probs = logits[: len(targets)].log_softmax(-1)
        tops = [group.request.command.prompt_logprobs or 0] * len(targets)
        group.prompt_logprobs.extend(
            map(self._make_token, targets, get_logprobs(log_probs, targets, tops))
        )

    def _make_decoder(self, request: EngineRequest) -> TokenDecoder:
        """The decoder of a request's tokens; it keeps markers of tool calls for the parser."""
        skip = request.command.stopping.skip_special_tokens
        if request.parser_rules is None or not skip:
            return functools.partial(self._decode, skip=skip)
        skipped = frozenset(self._tokenizer.all_special_ids) - request.parser_rules.marker_tokens
        return lambda ids: self._decode([i for i in ids if i not in skipped], skip=False)

    def _decode(self, ids: Sequence[int], *, skip: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return text

    def _make_token(self, token: int, logprob: SampledLogprob) -> EngineToken:
        top = tuple(TokenAlternative(i, self.token_bytes(i), value) for i, value in logprob.top)
        return EngineToken(token, self.token_bytes(token), logprob.logprob, top)

    def _make_prompt_echo(self, group: SequenceGroup, choice: int) -> PromptEchoEvent:
        """The prompt as the client sent it, or decoded from its tokens."""
        command, first_token = group.request.command, group.prompt[0]
        # A chat template adds text that is not part of the client's prompt.
        prompt = (
            command.input.prompts[group.number] if command.input.as_user_message else group.prompt
        )
        text = prompt if isinstance(prompt, str) else self._decode(prompt, skip=True)
        if command.prompt_logprobs is None:
            return PromptEchoEvent(command.request_id, choice, text)
        tokens = (
            EngineToken(first_token, self.token_bytes(first_token), None),
            *group.prompt_logprobs,
        )
        return PromptEchoEvent(command.request_id, choice, text, tokens)


def _wants_logprobs(request: EngineRequest) -> bool:
    return request.command.logprobs is not None or request.returns_best_only
