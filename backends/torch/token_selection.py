"""From logits to events: sampling, beam search, grammars, logprobs and ends of choices."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

import msgspec
import torch

from backends.torch.beam_search import Beam, BeamSearch
from backends.torch.call_formats import CallFormat, decode_parameters
from backends.torch.detokenizer import (
    Detokenizer,
    OutputText,
    OutputToken,
    ReadyText,
    TokenBytes,
    TokenDecoder,
)
from backends.torch.grammar_source import GrammarSource
from backends.torch.ipc import (
    BeamSearchParams,
    ChoiceEndEvent,
    EngineEvent,
    EngineToken,
    GenerateCommand,
    PromptEchoEvent,
    TokenAlternative,
)
from backends.torch.kv_cache import BLOCK_SIZE
from backends.torch.loaded_model import LoadedModel
from backends.torch.output_formats import OutputRules, detect_reasoning_mark
from backends.torch.prompt_lookup import PromptLookup
from backends.torch.rejection import RequestRejectedError
from backends.torch.sampling import (
    SampledLogprob,
    apply_penalties,
    apply_watermark,
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
from backends.torch.structured_output import (
    NO_CANDIDATES_ERROR,
    GrammarCompiler,
    GrammarState,
    OutputConstraint,
    build_output_grammar,
)
from backends.torch.tokenization import InputProcessor
from backends.torch.tool_calls import (
    ResponseTemplateRules,
    build_function_schema,
    get_response_template,
)

# Structured output and tool calls: grammars from the request to the logits.

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT: Final = 10.0
"""Seconds that a request waits for its grammar to compile."""
MAX_PENDING_REQUESTS: Final = 256
"""Maximum number of requests that wait for a grammar."""
_PROMPT_TAIL: Final = 64
"""Tokens at the end of the prompt that may contain the start of reasoning."""


class GrammarManager:
    """Holds requests with structured output or tool calls until their grammars are compiled."""

    def __init__(
        self, tokenizer: Any, input_processor: InputProcessor, compiler: GrammarCompiler
    ) -> None:
        self._input_processor = input_processor
        self._compiler = compiler
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {str(token): int(number) for number, token in added if token.special}
        self._tokenizer = tokenizer
        self._response_template = get_response_template(tokenizer)
        self._waiting: dict[EngineRequest, Future[GrammarState]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def start_compilation(self, request: EngineRequest) -> bool:
        """Whether the request must wait for its grammar. Raises RequestRejectedError."""
        command = request.command
        calls = self._find_call_format(command)
        if command.output_format is None and command.function_choice is None:
            if command.input.turns:
                request.parser_rules = self._make_output_rules(request, None)
            return False
        if self._parses_by_template(command):
            request.parser_rules = self._make_template_rules(request, self._response_template)
            return False
        if _is_unconstrained(command) and not (calls and calls.constrains_free_choice):
            request.parser_rules = self._make_output_rules(request, calls)
            return False
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            raise RequestRejectedError(
                "overloaded", "too many requests with structured output are being prepared"
            )
        grammar = self._build_grammar(request, calls)
        self._waiting[request] = self._compiler.compile_grammar(grammar)
        return True

    def _build_grammar(self, request: EngineRequest, calls: CallFormat | None) -> GrammarSource:
        """The grammar of the output; it sets the rules of its parser."""
        command, choice = request.command, request.command.function_choice
        names = () if choice is None else choice.names
        functions = tuple(one for one in command.input.functions if one.name in names)
        rules = self._make_output_rules(request, calls)
        if rules is not None:
            request.parser_rules = msgspec.structs.replace(
                rules,
                schemas={one.name: decode_parameters(one) for one in functions},
                is_enforced=True,
                is_either=choice is not None
                and (choice.required or command.output_format is not None),
            )
        constraint = OutputConstraint(
            command.output_format,
            choice,
            functions,
            calls,
            None if rules is None else rules.reasoning,
            rules is not None and rules.is_open,
        )
        return build_output_grammar(constraint, self._special_tokens)

    def pop_finished(self, now: float) -> list[tuple[EngineRequest, RequestRejectedError | None]]:
        """The requests that no longer wait, each with its error, if any."""
        finished = []
        for request, future in list(self._waiting.items()):
            if future.done():
                finished.append((request, _get_compile_result(request, future)))
            elif now - request.arrived_at >= COMPILE_TIMEOUT:
                message = f"the output format could not be compiled within {COMPILE_TIMEOUT:g} s"
                param = _get_grammar_param(request.command)
                finished.append(
                    (request, RequestRejectedError("unsupported", message, param=param))
                )
        for request, _ in finished:
            del self._waiting[request]
        return finished

    def remove(self, request: EngineRequest) -> None:
        """Remove a request that has been cancelled."""
        self._waiting.pop(request, None)

    def _find_call_format(self, command: GenerateCommand) -> CallFormat | None:
        """The format of calls in the output; None if no function may be called.

        Raises RequestRejectedError if the format is not known.
        """
        if command.function_choice is None:
            return None
        template = self._input_processor.get_chat_template(command.input)
        features = self._input_processor.get_features(template)
        if features.call_format is not None or self._parses_by_template(command):
            return features.call_format
        if not (self._input_processor.serves_unknown_calls and _is_unconstrained(command)):
            raise RequestRejectedError(
                "unsupported",
                f"tool calls of this model are not understood: {features.problem}; "
                "tool_choice must be none",
                param="tools",
            )
        return None

    def _parses_by_template(self, command: GenerateCommand) -> bool:
        """Whether the tokenizer's response template parses the output."""
        return self._response_template is not None and _is_unconstrained(command)

    def _make_output_rules(
        self, request: EngineRequest, calls: CallFormat | None
    ) -> OutputRules | None:
        """How the output is parsed; None if it has no reasoning and no calls."""
        prompt_input = request.command.input
        reasoning = None
        if prompt_input.turns and not prompt_input.continue_final:
            reasoning = detect_reasoning_mark(self._input_processor.get_chat_template(prompt_input))
        if reasoning is None and calls is None:
            return None
        marks = "\0".join(one.texts for one in (reasoning, calls) if one is not None)
        markers = {number for text, number in self._special_tokens.items() if text in marks}
        schemas = {one.name: decode_parameters(one) for one in prompt_input.functions}
        tail = self._tokenizer.decode(
            request.groups[0].prompt[-_PROMPT_TAIL:], skip_special_tokens=False
        )
        is_open = reasoning is not None and tail.rstrip().endswith(reasoning.opening.rstrip())
        return OutputRules(reasoning, calls, schemas, is_open, frozenset(markers))

    def _make_template_rules(self, request: EngineRequest, template: Any) -> ResponseTemplateRules:
        prompt = self._tokenizer.decode(request.groups[0].prompt, skip_special_tokens=False)
        tools = [
            {"type": "function", "function": build_function_schema(function)}
            for function in request.command.input.functions
        ]
        return ResponseTemplateRules(
            template, prompt, tools, frozenset(self._special_tokens.values())
        )


def _is_unconstrained(command: GenerateCommand) -> bool:
    """Whether the model may freely choose whether, which and how many functions it calls."""
    function_choice, functions = command.function_choice, command.input.functions
    return (
        function_choice is not None
        and command.output_format is None
        and not function_choice.required
        and function_choice.parallel
        and len(function_choice.names) == len(functions)
        and not any(function.strict for function in functions)
    )


def _get_compile_result(
    request: EngineRequest, future: Future[GrammarState]
) -> RequestRejectedError | None:
    error = future.exception()
    if error is None:
        request.grammar_state = future.result()
        return None
    if isinstance(error, RequestRejectedError):
        return _add_param(error, request)
    _log.error("a grammar could not be compiled", exc_info=error)
    return RequestRejectedError("failed", f"the local model failed: {type(error).__name__}")


def _add_param(error: RequestRejectedError, request: EngineRequest) -> RequestRejectedError:
    return RequestRejectedError(
        error.failure_kind, str(error), param=_get_grammar_param(request.command)
    )


def _get_grammar_param(command: GenerateCommand) -> str:
    """The request field that the grammar comes from."""
    return "tools" if command.output_format is None else command.output_format.param


# --- sampling step ------------------------------------------------------------------------------


def mask_logits(logits: torch.Tensor, sequences: Sequence[TokenSequence]) -> None:
    """Mask the tokens that the grammars forbid, in place on ``logits`` (sequences, vocabulary)."""
    for row_logits, sequence in zip(logits, sequences, strict=True):
        if sequence.grammar_state is None:
            continue
        try:
            forbidden = torch.from_numpy(sequence.grammar_state.get_forbidden_tokens())
        except RequestRejectedError as error:
            sequence.rejection = _add_param(error, sequence.group.request)
        else:
            row_logits.masked_fill_(forbidden.to(row_logits.device), float("-inf"))


def accept_token(sequence: TokenSequence, token: int) -> bool:
    """Advance the sequence's grammar by a token; False if it is not allowed."""
    if sequence.grammar_state is not None and sequence.rejection is None:
        try:
            sequence.grammar_state.accept_token(token)
        except RequestRejectedError as error:
            sequence.rejection = _add_param(error, sequence.group.request)
    return sequence.rejection is None


def fail_without_tokens(sequence: TokenSequence) -> None:
    """Reject the request: no token is allowed for any beam of a search."""
    error = RequestRejectedError("invalid", NO_CANDIDATES_ERROR)
    sequence.rejection = _add_param(error, sequence.group.request)


# Beam search: the beams of a prompt advance together, each as a sequence of its own.

_PENALTY_RANGES = (("length_penalty", 40.0), ("diversity_penalty", 1e6))
"""Larger values would make scores infinite or NaN."""
AppendToken = Callable[[TokenSequence, int, SampledLogprob | None], bool]
"""Appends a token to a sequence; returns whether the sequence has ended."""


def make_beam_searches(
    beams: BeamSearchParams, end_token_count: int
) -> list[BeamSearch[TokenSequence]]:
    """One search for each group of beams; ``end_token_count``: tokens that end a hypothesis.

    Raises RequestRejectedError.
    """
    for name, limit in _PENALTY_RANGES:
        value = getattr(beams, name)
        if not abs(value) <= limit:
            raise RequestRejectedError(
                "invalid",
                f"{name} is {value}; it must be between {-limit:g} and {limit:g}",
                param=name,
            )
    size = beams.width // beams.groups
    return [
        BeamSearch(size, end_token_count, beams.length_penalty, beams.diversity_penalty)
        for _ in range(beams.groups)
    ]


def compute_max_length(context: int, blocks: int, request: EngineRequest) -> int:
    """The maximum length of a sequence; beams share the KV cache equally."""
    if request.command.beams is None:
        return context
    return min(context, blocks // request.command.beams.width * BLOCK_SIZE)


def select_best_beams(group: SequenceGroup) -> list[TokenSequence]:
    """The best finished beams, best first; repeated if there are fewer than choices."""
    pairs = (pair for search in group.beam_searches for pair in search.finished)
    best = [sequence for _, sequence in sorted(pairs, key=lambda pair: -pair[0])]
    return [best[rank % len(best)].fork() for rank in range(group.request.command.n)]


def step_beams(
    logits: torch.Tensor, sequences: Sequence[TokenSequence], append_token: AppendToken
) -> list[TokenSequence]:
    """Advance each beam of a prompt by one token. Returns the sequences that have ended.

    ``logits`` has a row for each beam. The search scores are the model's log probabilities after
    biases, penalties, grammars and the watermark; temperature and truncation have no effect.
    """
    log_probs = logits.log_softmax(-1)
    scores = log_probs.clone()
    mask_logits(scores, sequences)
    for row_logits, sequence in zip(scores, sequences, strict=True):
        sampling_input = sequence.make_sampling_input()
        apply_penalties(row_logits, sampling_input)
        if (watermark := sampling_input.rules.watermark) is not None:
            apply_watermark(row_logits, watermark, sampling_input.history.tail(watermark.width))
    previous_tokens: list[int] = []
    finished: list[TokenSequence] = []
    for search, slots in _group_by_search(sequences):
        step = _BeamStep([sequences[i] for i in slots], log_probs[slots], append_token)
        length = len(step.sequences[0].output) + 1
        assigned = search.advance(scores[slots], length, step.extend_beam, previous_tokens)
        step.apply_beams(assigned)
        previous_tokens += [beam.hypothesis.output[-1] for beam in assigned]
        if search.is_done:
            finished += step.sequences
        if search.is_done and not search.finished:
            fail_without_tokens(step.sequences[0])
    return finished


def _group_by_search(
    sequences: Sequence[TokenSequence],
) -> Iterator[tuple[BeamSearch[TokenSequence], list[int]]]:
    """The unfinished searches, each with the indices of its sequences."""
    for number, search in enumerate(sequences[0].group.beam_searches):
        if not search.is_done:
            samples = enumerate(sequence.sample for sequence in sequences)
            yield search, [i for i, sample in samples if sample // search.size == number]


class _BeamStep:
    """The sequences of one search in one step, and the model's own log probabilities for each."""

    def __init__(
        self, sequences: list[TokenSequence], log_probs: torch.Tensor, append_token: AppendToken
    ) -> None:
        self.sequences = sequences
        self._log_probs = log_probs
        self._append_token = append_token
        self._top_logprobs = sequences[0].group.request.command.logprobs

    def extend_beam(self, slot: int, token: int) -> tuple[TokenSequence, bool]:
        """See ``BeamSearch.advance``."""
        sequence, logprob = self.sequences[slot].fork(), None
        if self._top_logprobs is not None:
            (logprob,) = get_logprobs(
                self._log_probs[slot : slot + 1], [token], [self._top_logprobs]
            )
        return sequence, self._append_token(sequence, token, logprob)

    def apply_beams(self, assigned: Sequence[Beam[TokenSequence]]) -> None:
        """Assign beams to sequences; a beam from another slot forks that slot's KV cache."""
        for slot, (sequence, beam) in enumerate(zip(self.sequences, assigned, strict=False)):
            if beam.parent != slot:
                sequence.cache.free()
                sequence.cache = self.sequences[beam.parent].cache.fork()
            sequence.continue_from(beam.hypothesis)


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
