"""From logits to events: sampling, beam search, grammars, logprobs and ends of choices."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch

from backends.torch.beam_search import Beam, BeamSearch
from backends.torch.detokenizer import (
    Detokenizer,
    OutputText,
    OutputToken,
    ReadyText,
    TokenBytes,
    TokenDecoder,
)
from backends.torch.ipc import (
    BeamSearchParams,
    ChoiceEndEvent,
    EngineEvent,
    EngineToken,
    FunctionChoice,
    GenerateCommand,
    PromptEchoEvent,
    TokenAlternative,
)
from backends.torch.kv_cache import BLOCK_SIZE
from backends.torch.loaded_model import LoadedModel
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
    GrammarSource,
    GrammarState,
    build_calls_grammar,
    build_format_grammar,
)
from backends.torch.tokenization import InputProcessor, RequestRejectedError
from backends.torch.tool_calls import (
    ResponseTemplateRules,
    ToolCallFormat,
    ToolCallRules,
    build_function_schema,
    detect_tool_call_format,
    get_response_template,
)

# Answers that have a form, and those that may call functions: from the request to the rows.

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT: Final = 10.0
"""Seconds that a request waits for its grammar."""
MAX_PENDING_REQUESTS: Final = 256
"""Requests that wait for one."""


class GrammarManager:
    """Readies jobs whose answers have a form; they wait here for their grammars."""

    def __init__(self, tokenizer: Any, reader: InputProcessor, grammars: GrammarCompiler) -> None:
        self._input_processor = reader
        self._compiler = grammars
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {str(token): int(number) for number, token in added if token.special}
        self._tokenizer = tokenizer
        self._response_template = get_response_template(tokenizer)
        self._waiting: dict[EngineRequest, Future[GrammarState]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def start_compilation(self, job: EngineRequest) -> bool:
        """Whether the job has to wait until it is ``settled``. Raises RequestRejectedError."""
        spec = job.command
        if spec.output_format is None and spec.function_choice is None:
            return False
        if self._response_template is not None and _is_unconstrained(spec):
            job.parser_rules = self._make_template_rules(job, self._response_template)
            return False
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            raise RequestRejectedError(
                "overloaded", "too many requests with structured output are being prepared"
            )
        self._waiting[job] = self._compiler.compile_grammar(self._build_grammar(job))
        return True

    def _build_grammar(self, job: EngineRequest) -> GrammarSource:
        spec, calling = job.command, job.command.function_choice
        if calling is None:
            return () if spec.output_format is None else build_format_grammar(spec.output_format)
        family = detect_tool_call_format(self._input_processor.get_chat_template(spec.input))
        job.parser_rules = self._make_tool_call_rules(family, calling, spec)
        functions = [one for one in spec.input.functions if one.name in calling.names]
        return build_calls_grammar(
            calling, functions, family, self._special_tokens, spec.output_format
        )

    def pop_finished(self, now: float) -> list[tuple[EngineRequest, RequestRejectedError | None]]:
        """The jobs that wait no longer, with what is wrong where something is."""
        found = []
        for job, asked in list(self._waiting.items()):
            if asked.done():
                found.append((job, _get_compile_result(job, asked)))
            elif now - job.arrived_at >= COMPILE_TIMEOUT:
                text = f"the form of the answer could not be prepared within {COMPILE_TIMEOUT:g} s"
                found.append(
                    (
                        job,
                        RequestRejectedError(
                            "unsupported", text, param=_get_grammar_param(job.command)
                        ),
                    )
                )
        for job, _ in found:
            del self._waiting[job]
        return found

    def remove(self, job: EngineRequest) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(job, None)

    def _make_tool_call_rules(
        self, family: ToolCallFormat, calling: FunctionChoice, spec: GenerateCommand
    ) -> ToolCallRules:
        texts = (
            family.format_calls([])
            + family.call_prefix
            + family.name_separator
            + family.call_suffix
        )
        marks = frozenset(number for text, number in self._special_tokens.items() if text in texts)
        free = bool(family.trigger) and not calling.required and spec.output_format is None
        return ToolCallRules(family, calling.names, free, marks)

    def _make_template_rules(self, job: EngineRequest, template: Any) -> ResponseTemplateRules:
        prompt = self._tokenizer.decode(job.groups[0].prompt, skip_special_tokens=False)
        tools = [
            {"type": "function", "function": build_function_schema(one)}
            for one in job.command.input.functions
        ]
        return ResponseTemplateRules(
            template, prompt, tools, frozenset(self._special_tokens.values())
        )


def _is_unconstrained(spec: GenerateCommand) -> bool:
    """Whether a request leaves it all to the model: to call or not, what, and how often."""
    calling, functions = spec.function_choice, spec.input.functions
    return (
        calling is not None
        and spec.output_format is None
        and not calling.required
        and calling.parallel
        and len(calling.names) == len(functions)
        and not any(one.strict for one in functions)
    )


def _get_compile_result(
    job: EngineRequest, asked: Future[GrammarState]
) -> RequestRejectedError | None:
    error = asked.exception()
    if error is None:
        job.grammar_state = asked.result()
        return None
    if isinstance(error, RequestRejectedError):
        return _add_param(error, job)
    _log.error("a grammar could not be compiled", exc_info=error)
    return RequestRejectedError("failed", f"the local model failed: {type(error).__name__}")


def _add_param(refused: RequestRejectedError, job: EngineRequest) -> RequestRejectedError:
    return RequestRejectedError(
        refused.failure_kind, str(refused), param=_get_grammar_param(job.command)
    )


def _get_grammar_param(spec: GenerateCommand) -> str:
    """The field to blame for a grammar."""
    return "tools" if spec.output_format is None else spec.output_format.param


# --- in the step --------------------------------------------------------------------------------


def mask_logits(logits: torch.Tensor, rows: Sequence[TokenSequence]) -> None:
    """Leaves each row of ``logits`` (rows, vocabulary) only what its grammar allows, in place."""
    for line, row in zip(logits, rows, strict=True):
        if row.grammar_state is None:
            continue
        try:
            barred = torch.from_numpy(row.grammar_state.get_forbidden_tokens())
        except RequestRejectedError as refused:
            row.rejection = _add_param(refused, row.group.request)
        else:
            line.masked_fill_(barred.to(line.device), float("-inf"))


def accept_token(row: TokenSequence, token: int) -> bool:
    """Whether this token may come next, by the row's grammar."""
    if row.grammar_state is not None and row.rejection is None:
        try:
            row.grammar_state.accept_token(token)
        except RequestRejectedError as refused:
            row.rejection = _add_param(refused, row.group.request)
    return row.rejection is None


def fail_without_tokens(row: TokenSequence) -> None:
    """No token may come in any of a search's rows."""
    error = RequestRejectedError("invalid", NO_CANDIDATES_ERROR)
    row.rejection = _add_param(error, row.group.request)


# Beam search over rows: the beams of a prompt go on together, each in a row of its own.

_PENALTY_RANGES = (("length_penalty", 40.0), ("diversity_penalty", 1e6))
"""Beyond them scores would be no numbers any more."""
AppendToken = Callable[[TokenSequence, int, SampledLogprob | None], bool]
"""Gives a row a token. Whether it was the row's last."""


def make_beam_searches(beams: BeamSearchParams, ends: int) -> list[BeamSearch[TokenSequence]]:
    """One for each group. ``ends`` is how many tokens end a text. Raises RequestRejectedError."""
    for name, most in _PENALTY_RANGES:
        value = getattr(beams, name)
        if not abs(value) <= most:
            raise RequestRejectedError(
                "invalid", f"{name} is {value}; {-most:g} to {most:g}", param=name
            )
    rules = (beams.width // beams.groups, ends, beams.length_penalty, beams.diversity_penalty)
    return [BeamSearch(*rules) for _ in range(beams.groups)]


def compute_max_length(context: int, blocks: int, job: EngineRequest) -> int:
    """How many tokens a row may have; all beams together need their share of the memory."""
    if job.command.beams is None:
        return context
    return min(context, blocks // job.command.beams.width * BLOCK_SIZE)


def select_best_beams(group: SequenceGroup) -> list[TokenSequence]:
    """What was found, best first. Where there are fewer texts than choices they come again."""
    pairs = (pair for search in group.beam_searches for pair in search.finished)
    found = [row for _, row in sorted(pairs, key=lambda pair: -pair[0])]
    return [found[rank % len(found)].fork() for rank in range(group.request.command.n)]


def step_beams(
    logits: torch.Tensor, rows: Sequence[TokenSequence], extend: AppendToken
) -> list[TokenSequence]:
    """One token for each beam of a prompt, by its line of ``logits``. Returns the rows that ended.

    The search goes by what biases, penalties, forms and the watermark make of the model's log
    probabilities; temperature and truncations are of no concern to it.
    """
    own = logits.log_softmax(-1)
    steered = own.clone()
    mask_logits(steered, rows)
    for line, row in zip(steered, rows, strict=True):
        drawn = row.make_sampling_input()
        apply_penalties(line, drawn)
        if drawn.rules.watermark is not None:
            apply_watermark(
                line, drawn.rules.watermark, drawn.history.tail(drawn.rules.watermark.width)
            )
    taken: list[int] = []
    ended: list[TokenSequence] = []
    for search, slots in _group_by_search(rows):
        beams = _BeamStep([rows[at] for at in slots], own[slots], extend)
        length = len(beams.rows[0].output) + 1
        placed = search.advance(steered[slots], length, beams.grow_beam, taken)
        beams.apply_beams(placed)
        taken += [beam.text.output[-1] for beam in placed]
        if search.is_done:
            ended += beams.rows
        if search.is_done and not search.finished:
            fail_without_tokens(beams.rows[0])
    return ended


def _group_by_search(
    rows: Sequence[TokenSequence],
) -> Iterator[tuple[BeamSearch[TokenSequence], list[int]]]:
    """The searches that go on, and where their rows stand."""
    for number, search in enumerate(rows[0].group.beam_searches):
        if not search.is_done:
            yield search, [at for at, row in enumerate(rows) if row.sample // search.size == number]


class _BeamStep:
    """The rows of one search in one step, and the model's own ``log_probs`` for each."""

    def __init__(
        self, rows: list[TokenSequence], log_probs: torch.Tensor, extend: AppendToken
    ) -> None:
        self.rows = rows
        self._log_probs = log_probs
        self._append_token = extend
        self._top_logprobs = rows[0].group.request.command.logprobs

    def grow_beam(self, slot: int, token: int) -> tuple[TokenSequence, bool]:
        """See ``Search.step``."""
        row, likely = self.rows[slot].fork(), None
        if self._top_logprobs is not None:
            (likely,) = get_logprobs(
                self._log_probs[slot : slot + 1], [token], [self._top_logprobs]
            )
        return row, self._append_token(row, token, likely)

    def apply_beams(self, placed: Sequence[Beam[TokenSequence]]) -> None:
        """Give each row its beam. Whose beam comes from elsewhere takes over its past, too."""
        for slot, (row, beam) in enumerate(zip(self.rows, placed, strict=False)):
            if beam.parent != slot:
                row.cache.free()
                row.cache = self.rows[beam.parent].cache.fork()
            row.take_over(beam.text)


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
