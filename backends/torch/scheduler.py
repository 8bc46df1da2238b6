"""The scheduler: prefill, slots, KV cache memory and preemption.

The order of sequences is priority, then arrival, then number. If memory runs out, the last sequence
in that order is preempted: its blocks are freed, and it is recomputed later with the same result.
Sequences whose client does not read are preempted first, and lose their slot if others wait.

A prompt goes from the fair queue to prefill when there are a slot and blocks for it, is computed in
chunks beside the running sequences, and then starts its samples. All decisions are made between two
forward passes, from the state alone: the scheduler waits for nothing and reads no clock.

What must never happen:

- Two sequences that preempt each other in turn: only a later one in the order gives way to an
  earlier one, and fairness preempts at most once for a tenant in ``FAIR_PREEMPTION_INTERVAL``
  steps.
- A tenant that starves: each gets its turn in the queue, whatever others have sent.
- A sequence that can never run: what does not fit into an empty cache is rejected at the start.
"""

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from backends.torch.attention import BatchSegment
from backends.torch.fair_queue import FairQueue
from backends.torch.kv_cache import BLOCK_SIZE, BlockPool
from backends.torch.prompt_lookup import DraftSetting
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.sequence import EngineRequest, SequenceGroup, TokenSequence

FAIR_PREEMPTION_INTERVAL = 16
"""Steps between two preemptions for one tenant, so that the sequences of others make progress."""


class SchedulerConfig(Struct, frozen=True):
    """The limits of the scheduler and of the KV cache."""

    max_sequences: int = 16
    max_waiting: int = 256
    max_batch_tokens: int = 2048
    """Limit of the prompts of one request, and of the samples of one prompt."""
    max_chunk_tokens: int = 256
    """Prompt tokens computed in one step: more tokens make running sequences wait longer."""
    cache_bytes: int = 1 << 30
    """Size of the KV cache in bytes; it always holds one sequence of the full context length."""
    share_prefix_cache: bool = False
    """Whether tenants share the prefix cache."""
    prompt_lookup: DraftSetting = "auto"


class PrefillChunk(Struct, frozen=True):
    """A part of a prompt that is computed in the next step."""

    sequence: SequenceGroup | TokenSequence
    segment: BatchSegment


class Scheduler:
    """The requests by state: waiting, in prefill, prefill done, running."""

    def __init__(self, limits: SchedulerConfig, pool: BlockPool) -> None:
        self._limits = limits
        self._block_pool = pool
        self._queue = FairQueue()
        self._arrivals = 0
        self._preempted: list[SequenceGroup | TokenSequence] = []
        """Those that lost their blocks and are computed again later."""
        self.prefilling: list[SequenceGroup | TokenSequence] = []
        self.prefilled: list[SequenceGroup] = []
        """Prompts whose prefill is done, with samples still to be started."""
        self.running: list[TokenSequence] = []
        self.preemption_count = 0
        """How many sequences were preempted."""
        self._step = 0
        self._fair_preemption_steps: dict[str | None, int] = {}
        """By tenant, the step of the last preemption for it, unless that is long ago."""

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.running)} running, {len(self.prefilling)} in prefill,"
            f" {self.waiting_count} waiting>"
        )

    @property
    def active_count(self) -> int:
        """Running sequences and prompts in prefill."""
        return len(self.running) + len(self.prefilling)

    @property
    def waiting_count(self) -> int:
        """Prompts, or samples of prompts, without a slot."""
        return len(self._queue) + len(self._preempted) + len(self.prefilled)

    @property
    def free_slots(self) -> int:
        """Unused slots."""
        return self._limits.max_sequences - self.active_count

    # --- requests -------------------------------------------------------------------------------

    def check_capacity(self, choices: int, preparing: int = 0) -> None:
        """Raises RequestRejectedError if the queue is full or the request has too many choices.

        ``preparing`` is the number of requests that will join the queue.
        """
        if len(self._queue) + preparing >= self._limits.max_waiting:
            raise RequestRejectedError("overloaded", "the queue of the local model is full")
        if choices > self._limits.max_batch_tokens:
            most = self._limits.max_batch_tokens
            raise RequestRejectedError("invalid", f"at most {most} choices and prompts", param="n")

    def check_beam_capacity(self, width: int, prompt: int) -> None:
        """Raises RequestRejectedError unless there are slots and memory for all beams at once."""
        if width > self._limits.max_sequences:
            most = self._limits.max_sequences
            raise RequestRejectedError(
                "invalid", f"at most {most} beams at a time", param="best_of"
            )
        room = self._block_pool.blocks // width * BLOCK_SIZE
        if prompt >= room:
            raise make_too_long_error(prompt, room, "prompt")

    def add_request(self, request: EngineRequest) -> None:
        """Add the prompts of a request to the queue."""
        for group in request.groups:
            group.arrival = self._arrivals
            self._arrivals += 1
            self._queue.add(group)

    def remove_request(self, request: EngineRequest) -> None:
        """Remove a request, waiting or running."""
        self._queue.remove(request)
        for sequence in [
            sequence for sequence in self._iterate_scheduled() if sequence.group.request is request
        ]:
            sequence.cache.free()
        self.running = [other for other in self.running if other.group.request is not request]
        self.prefilling = [
            sequence for sequence in self.prefilling if sequence.group.request is not request
        ]
        self.prefilled = [group for group in self.prefilled if group.request is not request]
        self._preempted = [
            sequence for sequence in self._preempted if sequence.group.request is not request
        ]

    def finish_sequence(self, sequence: TokenSequence) -> None:
        """Remove a complete sequence."""
        self.running.remove(sequence)
        sequence.cache.free()

    def start_sequence(self, sequence: TokenSequence) -> None:
        """Add a running sequence."""
        self.running.append(sequence)

    def _iterate_scheduled(self) -> Iterator[SequenceGroup | TokenSequence]:
        yield from self.running
        yield from self.prefilling
        yield from self.prefilled

    # --- slots ----------------------------------------------------------------------------------

    def admit_waiting(self, now: float) -> None:
        """Start the prefill of waiting prompts while there are slots and blocks.

        Further samples of prompts whose prefill is done get slots first, unless the waiting
        prompt's tenant has fewer slots than the samples' tenant.
        """
        while (sequence := self._peek_next()) is not None:
            if self._samples_come_first(sequence):
                return
            while self.free_slots <= 0 or not self._has_blocks(sequence):
                if not self._preempt_for(sequence):
                    return
            if sequence in self._preempted:
                self._preempted.remove(sequence)
            else:
                self._queue.remove_head(sequence.group)
            if sequence.group.request.admitted_at is None:
                sequence.group.request.admitted_at = now
            self.prefilling.append(sequence)
            self.prefilling.sort(key=_get_rank)

    def _samples_come_first(self, sequence: SequenceGroup | TokenSequence) -> bool:
        """Whether samples of a prompt whose prefill is done get a slot before ``sequence``."""
        groups = [group for group in self.prefilled if group.request.credit > 0]
        if not groups:
            return False
        slots = self._count_slots()
        own_slots = slots[_get_tenant(sequence)]
        return any(
            group.rank[0] < sequence.rank[0] or slots[_get_tenant(group)] <= own_slots
            for group in groups
        )

    def _count_slots(self) -> Counter[str | None]:
        """The slots that each tenant has."""
        return Counter(map(_get_tenant, (*self.running, *self.prefilling)))

    def _peek_next(self) -> SequenceGroup | TokenSequence | None:
        """The next to be scheduled: within a priority, preempted ones come before waiting ones.

        A waiting prompt whose tenant has no slot comes before those of tenants that have some.
        """
        slots = self._count_slots()
        head = self._queue.head(slots.keys())
        for sequence in self._preempted:
            if sequence.group.request.credit <= 0:
                continue
            if head is None or sequence.rank[0] < head.rank[0]:
                return sequence
            has_claim = not slots[_get_tenant(head)] and slots[_get_tenant(sequence)] > 0
            if sequence.rank[0] == head.rank[0] and not has_claim:
                return sequence
        return head

    def next_prefilled(self) -> SequenceGroup | None:
        """The prompt whose next sample is started; None if there is no slot.

        Within a priority, that of the tenant with the fewest slots.
        """
        groups = list(filter(self.has_slots, self.prefilled))
        if not groups:
            return None
        slots = self._count_slots()
        return min(groups, key=lambda group: (group.rank[0], slots[_get_tenant(group)]))

    def has_slots(self, group: SequenceGroup) -> bool:
        """Whether there are slots for the next sample of a prompt."""
        return group.request.credit > 0 and self.free_slots >= group.slots_needed

    def free_slots_for_sample(self) -> bool:
        """Whether a sample can be started; preempts another sequence for it if necessary.

        Called between two forward passes only.
        """
        for group in list(self.prefilled):
            while self._lacks_slots(group) and self._preempt_for(group):
                pass
        return any(map(self.has_slots, self.prefilled))

    def _lacks_slots(self, group: SequenceGroup) -> bool:
        return (
            group in self.prefilled
            and group.request.credit > 0
            and self.free_slots < group.slots_needed
        )

    def _has_blocks(self, sequence: SequenceGroup | TokenSequence) -> bool:
        """Whether there are enough blocks to start its prefill.

        Counted are all prefills in progress, and one more block for each running sequence.
        """
        others = sum(other.group is not sequence.group for other in self.running)
        return (
            sum(map(_count_needed_blocks, [sequence, *self.prefilling])) + others
            <= self._block_pool.available
        )

    def _preempt_for(self, sequence: SequenceGroup | TokenSequence) -> bool:
        """Preempt a sequence so that ``sequence`` can be scheduled. Returns False if none may be.

        That is one whose client does not read, or of lower priority, or of a tenant that has
        several slots while the tenant of ``sequence`` has none.
        """
        last = max(self._iterate_scheduled(), key=_get_preemption_order, default=sequence)
        if last.group.request.credit <= 0 or last.rank[0] > sequence.rank[0]:
            self._preempt(last)
            return True
        unfair = self._find_unfair_sequence(sequence)
        if unfair is None:
            return False
        earliest = self._step - FAIR_PREEMPTION_INTERVAL
        self._fair_preemption_steps = {
            tenant: step for tenant, step in self._fair_preemption_steps.items() if step > earliest
        } | {_get_tenant(sequence): self._step}
        self._preempt(unfair)
        return True

    def _find_unfair_sequence(
        self, sequence: SequenceGroup | TokenSequence
    ) -> TokenSequence | None:
        """The last sequence of the tenant with most slots, if the tenant of ``sequence`` has none.

        Beams are excluded: they are preempted together, which would cost more than it gives.
        """
        earlier = self._fair_preemption_steps.get(_get_tenant(sequence))
        if earlier is not None and self._step - earlier < FAIR_PREEMPTION_INTERVAL:
            return None
        slots = self._count_slots()
        if not slots or slots[_get_tenant(sequence)]:
            return None
        tenant, count = slots.most_common(1)[0]
        candidates = [
            other
            for other in self.running
            if _get_tenant(other) == tenant
            and other.rank[0] >= sequence.rank[0]
            and not other.group.beam_searches
        ]
        return max(candidates, key=_get_rank) if count > 1 and candidates else None

    # --- memory ---------------------------------------------------------------------------------

    def _reserve_blocks(self, sequence: SequenceGroup | TokenSequence, tokens: int) -> bool:
        """Reserve blocks for more tokens; preempts sequences that come later in the order."""
        while sequence.cache.count_needed_blocks(tokens) > self._block_pool.available:
            last = max(self._iterate_scheduled(), key=_get_preemption_order)
            if (
                last is sequence
                or _get_preemption_order(last) < _get_preemption_order(sequence)
                or last in self._get_sibling_beams(sequence)
            ):
                return False
            self._preempt(last)
        sequence.cache.reserve(tokens)
        return True

    def _preempt(self, sequence: SequenceGroup | TokenSequence) -> None:
        """Free the blocks of a sequence, and of its sibling beams; it is computed again later."""
        for sibling in self._get_sibling_beams(sequence):
            if sibling is not sequence:
                self._drop_sequence(sibling)
        self._drop_sequence(sequence)

    def _get_sibling_beams(self, sequence: SequenceGroup | TokenSequence) -> list[TokenSequence]:
        """The scheduled beams of the same search."""
        if isinstance(sequence, SequenceGroup) or not sequence.group.beam_searches:
            return []
        scheduled = (
            other for other in (*self.running, *self.prefilling) if isinstance(other, TokenSequence)
        )
        return [other for other in scheduled if other.group is sequence.group]

    def _drop_sequence(self, sequence: SequenceGroup | TokenSequence) -> None:
        sequence.cache.free()
        if isinstance(sequence, SequenceGroup):
            sequence.prompt_logprobs.clear()
        for state in (self.running, self.prefilling, self.prefilled):
            if sequence in state:
                state.remove(sequence)  # type: ignore[arg-type]
        self._preempted.append(sequence)
        self._preempted.sort(key=_get_rank)
        self.preemption_count += 1

    # --- steps ----------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[TokenSequence], list[PrefillChunk]]:
        """The sequences that generate a token in this step, and the chunks of prefill."""
        self._step += 1
        before, going = self.preemption_count, self._select_running()
        chunks = self._select_chunks()
        if self.preemption_count > before:
            going = [sequence for sequence in going if sequence in self.running]
            chunks = [chunk for chunk in chunks if chunk.sequence in self.prefilling]
        return going, chunks

    def _select_running(self) -> list[TokenSequence]:
        selected = []
        for sequence in sorted(self.running, key=_get_rank):
            if (
                sequence.group.request.credit <= 0
                or sequence not in self.running
                or not self._is_beam_complete(sequence)
            ):
                continue
            if self._reserve_blocks(sequence, 1):
                selected.append(sequence)
            else:
                self._preempt(sequence)
        return selected

    def _is_beam_complete(self, sequence: TokenSequence) -> bool:
        """Whether all beams of its search are running: beams advance together."""
        if not sequence.group.beam_searches:
            return True
        here = sum(other.group is sequence.group for other in self.running)
        return here + len(sequence.group.finished) == sequence.group.request.sample_count

    def _select_chunks(self) -> list[PrefillChunk]:
        """The chunks of this step, of which tenants of equal priority get equal shares.

        A short prompt does not wait for all that another tenant has queued. What a tenant does not
        need, the others get.
        """
        limit, tenants = self._limits.max_chunk_tokens, self._list_prefills_by_tenant()
        smallest = BLOCK_SIZE * min(len(tenants), 2)
        budget, chunks = max(smallest, limit - limit % BLOCK_SIZE), list[PrefillChunk]()
        for i, (priority, sequences) in enumerate(tenants):
            equal = sum(other == priority for other, _ in tenants[i:])
            share = min(budget, max(BLOCK_SIZE, budget // equal))
            for sequence in sequences:
                if share < BLOCK_SIZE:
                    break
                chunk = self._select_chunk(sequence, share)
                if chunk is not None:
                    chunks.append(chunk)
                    share -= len(chunk.segment.tokens)
                    budget -= len(chunk.segment.tokens)
        return chunks

    def _list_prefills_by_tenant(self) -> list[tuple[int, list[SequenceGroup | TokenSequence]]]:
        """The prefills of each tenant, with their priority.

        Of equal ones, the tenant that came first is the first, so that it always goes on; then come
        those with the shortest prefills.
        """
        prefills = dict[tuple[int, str | None], list[SequenceGroup | TokenSequence]]()
        for sequence in self.prefilling:
            prefills.setdefault((sequence.rank[0], _get_tenant(sequence)), []).append(sequence)
        order, seen = list[tuple[int, int, tuple[int, str | None]]](), set[int]()
        for key, sequences in prefills.items():
            missing = sum(len(one.context_tokens) - one.cache.length for one in sequences)
            order.append((key[0], missing if key[0] in seen else 0, key))
            seen.add(key[0])
        return [(key[0], prefills[key]) for *_, key in sorted(order, key=lambda one: one[:2])]

    def _select_chunk(
        self, sequence: SequenceGroup | TokenSequence, budget: int
    ) -> PrefillChunk | None:
        """The next chunk of a prefill, with at most ``budget`` tokens; None if it gets none."""
        if sequence not in self.prefilling:  # preempted for another one
            return None
        if sequence.cache.length == 0 and not sequence.scores_prompt:
            sequence.cache.reuse_prefix(sequence.group.block_hashes)
            if sequence.group.cached_tokens is None:
                sequence.group.cached_tokens = sequence.cache.length
        start = sequence.cache.length
        end = _align_chunk_end(sequence, start + budget)
        if end <= start or not self._reserve_blocks(sequence, end - start):
            return None
        wants = (
            end - start
            if sequence.scores_prompt
            else int(sequence.needs_logits and end == len(sequence.context_tokens))
        )
        segment = BatchSegment(sequence.cache, sequence.context_tokens[start:end], wants)
        return PrefillChunk(sequence, segment)

    def advance_chunk(self, chunk: PrefillChunk) -> bool:
        """Record a computed chunk. Returns whether it was the last of its prompt."""
        sequence = chunk.sequence
        sequence.cache.cache_prefix(sequence.group.block_hashes)
        if sequence.cache.length < len(sequence.context_tokens):
            return False
        self.prefilling.remove(sequence)
        if isinstance(sequence, TokenSequence):
            self.running.append(sequence)
        else:
            self.prefilled.append(sequence)
        return True


def _align_chunk_end(sequence: SequenceGroup | TokenSequence, end: int) -> int:
    """Move the end of a chunk to a block boundary, unless the prompt ends there."""
    end = min(end, len(sequence.context_tokens))
    return end - end % BLOCK_SIZE if end < sequence.cache.prompt_length else end


def _count_needed_blocks(sequence: SequenceGroup | TokenSequence) -> int:
    """Blocks needed to finish the prefill and for one more token."""
    return sequence.cache.count_needed_blocks(
        len(sequence.context_tokens) - sequence.cache.length + 1
    )


def _get_tenant(sequence: SequenceGroup | TokenSequence) -> str | None:
    return sequence.group.request.command.tenant


def _get_rank(sequence: SequenceGroup | TokenSequence) -> tuple[int, ...]:
    return sequence.rank


def _get_preemption_order(sequence: SequenceGroup | TokenSequence) -> tuple[int, ...]:
    """The sort key for preemption: the greatest is preempted first."""
    return (int(sequence.group.request.credit <= 0), *sequence.rank)
