"""The engine: continuous batching of prefill and decode, one step at a time.

Requests join and leave between steps. Each step is one packed forward pass: one token of each
running sequence, and chunks of prompts in prefill. A request whose client does not read its tokens
(no credit) pauses; it keeps its slot and delays no other.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from backends.torch.attention import BatchSegment
from backends.torch.detokenizer import split_texts
from backends.torch.grammar_compiler import GrammarCompiler
from backends.torch.grammar_manager import GrammarManager
from backends.torch.ipc import (
    DetokenizeCommand,
    DetokenizedEvent,
    EngineEvent,
    EngineStats,
    GenerateCommand,
    PrefillDoneEvent,
    RequestFailedEvent,
    RequestFinishedEvent,
    TokenizeCommand,
    TokensEvent,
)
from backends.torch.kv_cache import BLOCK_SIZE, BlockPool, SequenceCache, hash_blocks
from backends.torch.loaded_model import LoadedModel
from backends.torch.model_files import ModelError
from backends.torch.prompt_lookup import (
    MAX_PASS_TOKENS,
    choose_longest_draft,
)
from backends.torch.rejection import RequestRejectedError
from backends.torch.sampling import SamplingRules
from backends.torch.scheduler import PrefillChunk, Scheduler, SchedulerConfig
from backends.torch.sequence import EngineRequest, SequenceGroup, TokenSequence
from backends.torch.token_selection import TokenSelector
from backends.torch.tokenization import (
    BackgroundTokenizer,
    detokenize_ids,
    measure_input,
    measure_prompts,
)


@dataclass(slots=True)
class EngineCounters:
    """Running totals; see ``ipc.EngineStats``."""

    steps: int = 0
    seconds: float = 0.0
    batched_sequences: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def record_step(self, seconds: float, *, prefilled: int, generated: int, batch: int) -> None:
        """Record a step: prompt tokens read, tokens generated, sequences in the batch."""
        self.steps += 1
        self.seconds += seconds
        self.prompt_tokens += prefilled
        self.completion_tokens += generated
        self.batched_sequences = batch

    def record_finished(self, event: RequestFinishedEvent) -> None:
        """Record a finished request."""
        self.cached_tokens += event.cached_tokens
        self.queue_seconds += event.queue_seconds
        self.prefill_seconds += event.prefill_seconds
        self.decode_seconds += event.decode_seconds

    def make_stats(self, pool: BlockPool, preempted: int) -> EngineStats:
        """The totals as a message."""
        return EngineStats(
            blocks=pool.blocks,
            used_blocks=pool.used_blocks,
            preemptions=preempted,
            steps=self.steps,
            seconds=self.seconds,
            batched_sequences=self.batched_sequences,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            queue_seconds=self.queue_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )


_log = logging.getLogger(__name__)

Drafts = dict[TokenSequence, list[int]]
"""Likely next tokens of running sequences."""


class TorchEngine:
    """Runs many requests on one model, a step at a time."""

    output = "text"
    commands = (GenerateCommand,)

    def __init__(
        self,
        model: LoadedModel,
        limits: SchedulerConfig,
        emit: Callable[[EngineEvent], None],
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` is called from another thread when a grammar or a long input is ready."""
        self._runner = model.runner
        self._tokenizer = model.tokenizer
        self._input_processor = model.input_processor
        self._emit = emit
        self._clock = clock
        longest_draft = choose_longest_draft(
            limits.prompt_lookup, is_exact=model.runner.is_batch_invariant
        )
        self._token_selector = TokenSelector(model, emit, longest_draft)
        self.block_pool = _make_block_pool(model, limits)
        self._scheduler = Scheduler(limits, self.block_pool)
        self._grammar_compiler = GrammarCompiler(
            model.tokenizer, model.runner.vocabulary_size, model.end_tokens, wake
        )
        self._grammar_manager = GrammarManager(
            model.tokenizer, model.input_processor, self._grammar_compiler
        )
        self._requests: dict[int, EngineRequest] = {}
        self._background_tokenizer = BackgroundTokenizer(emit, wake)
        self._shares_prefix_cache = limits.share_prefix_cache
        self._counters = EngineCounters()

    @property
    def active_count(self) -> int:
        """Running sequences and prompts in prefill."""
        return self._scheduler.active_count

    @property
    def waiting_count(self) -> int:
        """Waiting prompts."""
        preparing = len(self._grammar_manager) + len(self._background_tokenizer)
        return self._scheduler.waiting_count + preparing

    @property
    def stats(self) -> EngineStats:
        """The current statistics."""
        return self._counters.make_stats(self.block_pool, self._scheduler.preemption_count)

    @property
    def cache_bytes(self) -> int:
        """The size of the KV cache in bytes."""
        return self.block_pool.tokens * self._runner.cache_bytes_per_token

    def warm_up(self) -> None:
        """Load the vocabulary for grammars, which the first request would otherwise wait for."""
        self._grammar_compiler.load_vocabulary()

    # --- commands -------------------------------------------------------------------------------

    def submit(self, spec: GenerateCommand) -> None:
        """Accept a request; emits a RequestFailedEvent if it is invalid."""
        arrived_at = self._clock()
        try:
            choices = max(spec.n, spec.best_of, len(spec.input.prompts))
            self._scheduler.check_capacity(choices, len(self._background_tokenizer))
            self._input_processor.check_sizes(spec)
        except RequestRejectedError as rejection:
            self._emit(rejection.make_failed_event(spec.request_id))
            return
        self._background_tokenizer.run(
            spec.request_id,
            measure_input(spec),
            lambda: self._tokenize(spec),
            lambda result: self._add_request(spec, arrived_at, *result),
        )

    def _tokenize(self, spec: GenerateCommand) -> tuple[SamplingRules, list[list[int]]]:
        """The sampling rules and the prompts. Raises RequestRejectedError."""
        rules = self._input_processor.build_sampling_rules(spec.sampling)
        return rules, self._input_processor.tokenize_prompts(spec.input, spec.stopping)

    def _add_request(
        self,
        spec: GenerateCommand,
        arrived_at: float,
        rules: SamplingRules,
        prompts: list[list[int]],
    ) -> None:
        """Add a request to the queue, or have its grammar compiled. Raises RequestRejectedError."""
        request = self._build_request(spec, arrived_at, rules, prompts)
        is_waiting = self._grammar_manager.start_compilation(request)
        self._requests[spec.request_id] = request
        if not is_waiting:
            self._scheduler.add_request(request)

    def _build_request(
        self,
        spec: GenerateCommand,
        arrived_at: float,
        rules: SamplingRules,
        prompts: list[list[int]],
    ) -> EngineRequest:
        """Build the state of a request. Raises RequestRejectedError."""
        seed = secrets.randbits(64) if spec.sampling.seed is None else spec.sampling.seed
        salt = b"" if spec.tenant is None or self._shares_prefix_cache else spec.tenant.encode()
        request = EngineRequest(spec, rules, seed, arrived_at, credit=spec.initial_credit)
        request.groups = [
            SequenceGroup(
                request,
                number,
                ids,
                SequenceCache(self.block_pool, len(ids)),
                hash_blocks(ids, salt),
            )
            for number, ids in enumerate(prompts)
        ]
        if spec.beams is not None:
            self._scheduler.check_beam_capacity(spec.beams.width, max(map(len, prompts)))
        for group in request.groups:
            group.beam_searches = self._token_selector.make_beam_searches(spec)
        request.prompt_tokens = sum(map(len, prompts))
        return request

    def tokenize(self, order: TokenizeCommand) -> None:
        """Tokenize a prompt or a conversation; needs no slot."""
        token_bytes = self._token_selector.token_bytes
        try:
            self._input_processor.check_prompt_lengths(order.input)
        except RequestRejectedError as rejection:
            self._emit(rejection.make_failed_event(order.request_id))
            return
        self._background_tokenizer.run(
            order.request_id,
            measure_prompts(order.input),
            lambda: split_texts(token_bytes, self._input_processor.tokenize_input(order.input)),
            lambda tokens: self._emit(TokensEvent(order.request_id, *tokens)),
        )

    def detokenize(self, order: DetokenizeCommand) -> None:
        """Detokenize; needs no slot."""
        self._background_tokenizer.run(
            order.request_id,
            len(order.ids),
            lambda: detokenize_ids(self._tokenizer, order.ids, self._runner.vocabulary_size),
            lambda text: self._emit(DetokenizedEvent(order.request_id, text)),
        )

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        self._background_tokenizer.cancel(number)
        if request := self._requests.pop(number, None):
            self._grammar_manager.remove(request)
            self._scheduler.remove_request(request)

    def credit(self, number: int, tokens: int) -> None:
        """The client has read this many more tokens of a request."""
        if request := self._requests.get(number):
            request.credit += tokens

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step; returns False if there is nothing to do."""
        self._expire_requests()
        self._background_tokenizer.finish_pending()
        self._admit_compiled()
        previous = self._scheduler.preemption_count
        self._scheduler.admit_waiting(self._clock())
        ready = self._scheduler.free_slots_for_sample()
        running, chunks = self._scheduler.schedule()
        if not running and not chunks and not ready:
            return self._scheduler.preemption_count > previous
        started_at = self._clock()
        # With chunks a pass has many tokens already.
        drafts = {} if chunks else _make_drafts(running)
        logits, running, chunks = self._run_pass(running, chunks, drafts)
        lines, further_logits = _split_logits(logits, running, chunks, drafts)
        for chunk, row_logits in zip(chunks, lines[1:], strict=True):
            self._finish_chunk(chunk, row_logits)
        fresh = self._start_samples()
        lines[1:] = [row.group.logits for row in fresh if row.group.logits is not None]
        if rows := [*running, *fresh]:
            self._select_tokens(lines, rows)
        generated = len(rows) + self._accept_drafts(drafts, further_logits)
        prefilled = sum(len(chunk.segment.tokens) for chunk in chunks)
        batch, seconds = len(rows) + len(chunks), self._clock() - started_at
        self._counters.record_step(seconds, prefilled=prefilled, generated=generated, batch=batch)
        return True

    def _expire_requests(self) -> None:
        now = self._clock()
        for request in [request for request in self._requests.values() if now >= request.deadline]:
            self.cancel(request.command.request_id)
            self._emit(
                RequestFailedEvent(
                    request.command.request_id, "deadline", "the request's time is up"
                )
            )

    def _admit_compiled(self) -> None:
        """Admit requests whose grammar has been compiled."""
        for request, refused in self._grammar_manager.pop_finished(self._clock()):
            if refused is None:
                self._scheduler.add_request(request)
            else:
                self._reject_request(request, refused)

    def _reject_request(self, request: EngineRequest, refused: RequestRejectedError) -> None:
        self.cancel(request.command.request_id)
        self._emit(refused.make_failed_event(request.command.request_id))

    def _fail_request(self, request: EngineRequest, error: Exception) -> None:
        self.cancel(request.command.request_id)
        message = f"the local model failed: {type(error).__name__}"
        self._emit(RequestFailedEvent(request.command.request_id, "failed", message))

    def _run_pass(
        self, running: list[TokenSequence], chunks: list[PrefillChunk], drafts: Drafts
    ) -> tuple[torch.Tensor | None, list[TokenSequence], list[PrefillChunk]]:
        """Run the forward pass; returns the logits and the sequences and chunks they belong to.

        If a pass fails (out of memory, for instance), it is repeated without ``drafts``, which are
        cleared, then without the largest chunk, then without the youngest sequence, and so on; the
        request that was left out last fails.
        """
        remaining: list[TokenSequence | PrefillChunk] = [
            *running,
            *sorted(chunks, key=_get_chunk_order),
        ]
        suspect: EngineRequest | None = None
        failure: Exception | None = None
        logits: torch.Tensor | None = None
        while remaining and logits is None:
            try:
                logits = self._runner([_make_segment(item, drafts) for item in remaining])
            except (RuntimeError, MemoryError) as error:
                _log.exception("a forward pass failed")
                if drafts:
                    drafts.clear()
                    continue
                suspect, failure = _get_request(remaining[-1]), error
                remaining = [item for item in remaining if _get_request(item) is not suspect]
        if suspect is not None and failure is not None:
            self._fail_request(suspect, failure)
        return (
            logits,
            [item for item in remaining if isinstance(item, TokenSequence)],
            [item for item in remaining if isinstance(item, PrefillChunk)],
        )

    def _select_tokens(self, lines: list[torch.Tensor], rows: list[TokenSequence]) -> None:
        """Sample a token for each sequence. If that fails, sample for each request."""
        previous = [len(row.output) for row in rows]
        try:
            # ``cat`` makes a copy, which sampling modifies.
            finished = self._token_selector.select_tokens(torch.cat(lines), rows)
        except (RuntimeError, MemoryError):
            _log.exception("sampling for %d sequences failed", len(rows))
            remaining = [at for at, row in enumerate(rows) if len(row.output) == previous[at]]
            finished = self._select_tokens_one_by_one(lines, rows, remaining)
        for row in finished:
            if row.group.request.command.request_id not in self._requests:
                continue  # it was rejected with another of its sequences
            if row.rejection is not None:
                self._reject_request(row.group.request, row.rejection)
                continue
            self._scheduler.finish_sequence(row)
            self._finish_sequence(row)

    def _accept_drafts(
        self, drafts: Drafts, further_logits: Mapping[TokenSequence, torch.Tensor]
    ) -> int:
        """Select the tokens after those of a draft that were right; returns how many.

        A sequence forgets the keys and values of the others.
        """
        accepted, pending = dict.fromkeys(drafts, 0), list(drafts)
        for i in range(max(map(len, drafts.values()), default=0)):
            pending = [
                row
                for row in pending
                if row in self._scheduler.running and drafts[row][i : i + 1] == row.output[-1:]
            ]
            if pending:
                self._select_tokens([further_logits[row][i : i + 1] for row in pending], pending)
            for row in pending:
                accepted[row] += 1
        for row, draft in drafts.items():
            row.finish_draft(len(draft), accepted[row])
        self._counters.draft_tokens += sum(map(len, drafts.values()))
        self._counters.accepted_draft_tokens += sum(accepted.values())
        return sum(accepted.values())

    def _select_tokens_one_by_one(
        self, lines: list[torch.Tensor], rows: list[TokenSequence], missing: list[int]
    ) -> list[TokenSequence]:
        """Sample for each remaining request separately; those whose sampling fails, fail."""
        finished = []
        for request in dict.fromkeys(rows[at].group.request for at in missing):
            indices = [at for at in missing if rows[at].group.request is request]
            try:
                finished += self._token_selector.select_tokens(
                    torch.cat(lines)[indices], [rows[at] for at in indices]
                )
            except (RuntimeError, MemoryError) as error:
                self._fail_request(request, error)
        return finished

    def _finish_chunk(self, chunk: PrefillChunk, logits: torch.Tensor) -> None:
        """Handle the results of a computed chunk."""
        complete = self._scheduler.advance_chunk(chunk)
        group = chunk.sequence
        if isinstance(group, TokenSequence):
            return
        request, end = group.request, group.cache.length
        if group.scores_prompt:
            targets = group.prompt[end - len(chunk.segment.tokens) + 1 : end + 1]
            if targets:
                self._token_selector.score_prompt(group, targets, logits)
        if complete:
            group.logits = logits[-1:].clone()
        if complete and request.prefilled_at is None:
            request.prefilled_at = self._clock()
            self._emit(PrefillDoneEvent(request.command.request_id, request.prompt_tokens))

    def _start_samples(self) -> list[TokenSequence]:
        """Start samples of prompts whose prefill is done, while there are slots."""
        started = []
        while (group := self._scheduler.next_prefilled()) is not None:
            row = self._token_selector.start_sample(group)
            if group.samples_started == group.request.sample_count:
                self._scheduler.prefilled.remove(group)
            if row.max_tokens > 0:
                self._scheduler.start_sequence(row)
                started.append(row)
            else:
                row.cache.free()
                self._finish_sequence(row)
        return started

    def _finish_sequence(self, row: TokenSequence) -> None:
        """Finish a sample, and its request if that was the last one."""
        request = row.group.request
        self._token_selector.finish_sequence(row)
        if request.is_done:
            del self._requests[request.command.request_id]
            finished = self._make_finished_event(request)
            self._counters.record_finished(finished)
            self._emit(finished)

    def _make_finished_event(self, request: EngineRequest) -> RequestFinishedEvent:
        now = self._clock()
        admitted = request.arrived_at if request.admitted_at is None else request.admitted_at
        prefilled = now if request.prefilled_at is None else request.prefilled_at
        return RequestFinishedEvent(
            request_id=request.command.request_id,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.completion_tokens,
            queue_seconds=admitted - request.arrived_at,
            prefill_seconds=prefilled - admitted,
            decode_seconds=now - prefilled,
            max_batch=request.max_batch,
            cached_tokens=sum(group.cached_tokens or 0 for group in request.groups),
            reasoning_tokens=request.reasoning_tokens if request.parses_reasoning else None,
        )


def _count_blocks(model: LoadedModel, limits: SchedulerConfig) -> int:
    """The number of blocks: at least one full context, at most one for each sequence."""
    context = -(-model.runner.context_length // BLOCK_SIZE)
    each = model.runner.cache_bytes_per_token * BLOCK_SIZE
    affordable = limits.cache_bytes // each if each else context * limits.max_sequences
    return max(context, min(affordable, context * limits.max_sequences))


def _make_block_pool(model: LoadedModel, limits: SchedulerConfig) -> BlockPool:
    """Allocate the KV cache. Raises ModelError if there is too little memory."""
    pool = BlockPool(_count_blocks(model, limits))
    kv = SequenceCache(pool, 1)
    try:
        model.runner([BatchSegment(kv, (0,), 0)])
    except (RuntimeError, MemoryError) as error:
        size = pool.tokens * model.runner.cache_bytes_per_token >> 20
        raise ModelError(f"memory: can't allocate {size} MB for the KV cache") from error
    kv.free()
    return pool


def _make_drafts(running: Sequence[TokenSequence]) -> Drafts:
    drafts: Drafts = {}
    tokens = len(running)
    for row in running:
        if draft := row.draft_tokens(MAX_PASS_TOKENS - tokens):
            drafts[row] = draft
            tokens += len(draft)
    return drafts


def _make_segment(item: TokenSequence | PrefillChunk, drafts: Drafts) -> BatchSegment:
    if isinstance(item, PrefillChunk):
        return item.segment
    tokens = [*item.output[-1:], *drafts.get(item, ())]
    return BatchSegment(item.cache, tokens, len(tokens))


def _get_request(item: TokenSequence | PrefillChunk) -> EngineRequest:
    return item.group.request if isinstance(item, TokenSequence) else item.sequence.group.request


def _get_chunk_order(chunk: PrefillChunk) -> tuple[int, ...]:
    return len(chunk.segment.tokens), *chunk.sequence.rank


def _split_logits(
    logits: torch.Tensor | None,
    running: Sequence[TokenSequence],
    chunks: Sequence[PrefillChunk],
    drafts: Drafts,
) -> tuple[list[torch.Tensor], Mapping[TokenSequence, torch.Tensor]]:
    """The logits of the running sequences' next tokens, those of each chunk, and of each draft."""
    if logits is None:
        return [], {}
    sizes = [1 + len(drafts.get(row, ())) for row in running]
    own, *lines = torch.split(
        logits, [sum(sizes), *(chunk.segment.logit_count for chunk in chunks)]
    )
    if not drafts:
        return [own, *lines], {}
    parts = torch.split(own, sizes)
    further = {row: part[1:] for row, part in zip(running, parts, strict=True)}
    return [torch.cat([part[:1] for part in parts]), *lines], further
