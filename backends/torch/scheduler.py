"""The scheduler: queue, prefill, slots, KV cache memory and preemption.

The order of sequences is priority, then arrival, then number. If memory runs out, the last sequence
in that order is preempted: its blocks are freed, and it is recomputed later with the same result.
Sequences whose client does not read are preempted first, and lose their slot if others wait.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from backends.torch.attention import BatchSegment
from backends.torch.kv_cache import BLOCK_SIZE, BlockPool
from backends.torch.sequence import EngineRequest, SequenceGroup, TokenSequence
from backends.torch.tokenization import RequestRejectedError, make_too_long_error

# The queue of waiting prompts: by priority, and fair between tenants.
#
# Within a priority each tenant has a queue of its own. Tenants take turns by deficit round robin
# over prompt tokens: each turn adds ``TURN_TOKENS`` to the tenant's budget, and the rest is kept
# for its next turn. A tenant with many requests delays only itself.

TURN_TOKENS = 256
"""Prompt tokens per turn."""


class _TenantQueues:
    """The tenants' queues of one priority."""

    def __init__(self) -> None:
        self._queues: dict[str | None, deque[SequenceGroup]] = {}
        self._deficits: dict[str | None, int] = {}

    def add(self, group: SequenceGroup) -> None:
        tenant = group.request.command.tenant
        # The first tenant gets its turn at once, others when theirs begins.
        self._deficits.setdefault(tenant, 0 if self._queues else TURN_TOKENS)
        self._queues.setdefault(tenant, deque()).append(group)

    def head(self) -> SequenceGroup:
        """The next prompt."""
        while True:
            tenant, line = next(iter(self._queues.items()))
            if len(line[0].prompt) <= self._deficits[tenant]:
                return line[0]
            self._queues[tenant] = self._queues.pop(tenant)
            self._advance_turn()

    def pop(self) -> SequenceGroup:
        group = self.head()
        tenant = group.request.command.tenant
        self._queues[tenant].popleft()
        self._deficits[tenant] -= len(group.prompt)
        self._remove_empty()
        return group

    def filter_groups(self, wanted: Callable[[SequenceGroup], bool]) -> None:
        for tenant, line in self._queues.items():
            self._queues[tenant] = deque(filter(wanted, line))
        self._remove_empty()

    def _remove_empty(self) -> None:
        first = next(iter(self._queues))
        for tenant in [tenant for tenant, line in self._queues.items() if not line]:
            del self._queues[tenant], self._deficits[tenant]
        if self._queues and first not in self._queues:
            self._advance_turn()

    def _advance_turn(self) -> None:
        self._deficits[next(iter(self._queues))] += TURN_TOKENS

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


class FairQueue:
    """All waiting prompts."""

    def __init__(self) -> None:
        self._by_priority: dict[int, _TenantQueues] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: SequenceGroup) -> None:
        """Add a prompt."""
        self._by_priority.setdefault(group.request.command.priority, _TenantQueues()).add(group)
        self._count += 1

    def head(self) -> SequenceGroup | None:
        """The next prompt."""
        return self._by_priority[min(self._by_priority)].head() if self._count else None

    def pop(self) -> SequenceGroup:
        """Remove and return the next prompt."""
        group = self._by_priority[min(self._by_priority)].pop()
        self._count -= 1
        self._remove_empty()
        return group

    def remove(self, job: EngineRequest) -> None:
        """Remove the prompts of a request."""
        lines = self._by_priority.get(job.command.priority)
        if lines is not None:
            lines.filter_groups(lambda group: group.request is not job)
            self._remove_empty()
            self._count = sum(map(len, self._by_priority.values()))

    def _remove_empty(self) -> None:
        for priority in [key for key, lines in self._by_priority.items() if not len(lines)]:
            del self._by_priority[priority]


FAIR_PREEMPTION_INTERVAL = 16
"""Steps between two preemptions for the sake of fairness, so that each sequence makes progress."""


class SchedulerConfig(Struct, frozen=True):
    """The limits of the scheduler and of the KV cache."""

    max_sequences: int = 16
    max_waiting: int = 256
    max_batch_tokens: int = 2048
    """Prompts of one request, and samples of one prompt."""
    max_chunk_tokens: int = 256
    """Prompt tokens read in one step: the more, the longer the other rows wait for theirs."""
    cache_bytes: int = 1 << 30
    """Size of the KV cache in bytes; it always holds one sequence of the full context length."""
    share_prefix_cache: bool = False
    """Whether tenants share the prefix cache."""


class PrefillChunk(Struct, frozen=True):
    """The next piece of what is read."""

    sequence: SequenceGroup | TokenSequence
    segment: BatchSegment


class Scheduler:
    """The requests by what they are at: waiting, being read, read, in rows."""

    def __init__(self, limits: SchedulerConfig, pool: BlockPool) -> None:
        self._limits = limits
        self._block_pool = pool
        self._queue = FairQueue()
        self._arrivals = 0
        self._preempted: list[SequenceGroup | TokenSequence] = []
        """Those that have begun and gave up their blocks."""
        self.prefilling: list[SequenceGroup | TokenSequence] = []
        self.prefilled: list[SequenceGroup] = []
        """Prompts that are read, and have samples yet to be started."""
        self.running: list[TokenSequence] = []
        self.preemption_count = 0
        """How often blocks were given up."""
        self._step = 0
        self._fair_preemption_step = -FAIR_PREEMPTION_INTERVAL
        """The step of the last preemption for the sake of fairness."""

    @property
    def active_count(self) -> int:
        """Rows and prompts in work."""
        return len(self.running) + len(self.prefilling)

    @property
    def waiting_count(self) -> int:
        """Prompts, or samples of prompts, that have no place."""
        return len(self._queue) + len(self._preempted) + len(self.prefilled)

    @property
    def free_slots(self) -> int:
        """Places that nobody has."""
        return self._limits.max_sequences - self.active_count

    # --- who comes and goes ---------------------------------------------------------------------

    def check_capacity(self, choices: int, preparing: int = 0) -> None:
        """Raises RequestRejectedError: the queue is full, or the request is too large.

        ``preparing`` is the number of requests that will join the queue.
        """
        if len(self._queue) + preparing >= self._limits.max_waiting:
            raise RequestRejectedError("overloaded", "the queue of the local model is full")
        if choices > self._limits.max_batch_tokens:
            most = self._limits.max_batch_tokens
            raise RequestRejectedError("invalid", f"at most {most} choices and prompts", param="n")

    def check_beam_capacity(self, width: int, prompt: int) -> None:
        """Raises RequestRejectedError: beams need places and memory for all of them at once."""
        if width > self._limits.max_sequences:
            most = self._limits.max_sequences
            raise RequestRejectedError(
                "invalid", f"at most {most} beams at a time", param="best_of"
            )
        room = self._block_pool.blocks // width * BLOCK_SIZE
        if prompt >= room:
            raise make_too_long_error(prompt, room, "prompt")

    def add_request(self, job: EngineRequest) -> None:
        """Its prompts wait from now on."""
        for group in job.groups:
            group.arrival = self._arrivals
            self._arrivals += 1
            self._queue.add(group)

    def remove_request(self, job: EngineRequest) -> None:
        """Nothing of it waits or works any more."""
        self._queue.remove(job)
        for one in [one for one in self._iterate_scheduled() if one.group.request is job]:
            one.cache.free()
        self.running = [row for row in self.running if row.group.request is not job]
        self.prefilling = [one for one in self.prefilling if one.group.request is not job]
        self.prefilled = [group for group in self.prefilled if group.request is not job]
        self._preempted = [one for one in self._preempted if one.group.request is not job]

    def finish_sequence(self, row: TokenSequence) -> None:
        """A row is complete."""
        self.running.remove(row)
        row.cache.free()

    def start_sequence(self, row: TokenSequence) -> None:
        """A row goes on from here."""
        self.running.append(row)

    def _iterate_scheduled(self) -> Iterator[SequenceGroup | TokenSequence]:
        yield from self.running
        yield from self.prefilling
        yield from self.prefilled

    # --- places ---------------------------------------------------------------------------------

    def admit_waiting(self, now: float) -> None:
        """Start the prefill of waiting prompts while there are slots and blocks.

        Further samples of prompts whose prefill is done get slots first, unless the waiting
        prompt's tenant has fewer slots than the samples' tenant.
        """
        while (one := self._peek_next()) is not None:
            if self._samples_come_first(one):
                return
            while self.free_slots <= 0 or not self._has_blocks(one):
                if not self._preempt_for(one):
                    return
            if one in self._preempted:
                self._preempted.remove(one)
            else:
                self._queue.pop()
            if one.group.request.admitted_at is None:
                one.group.request.admitted_at = now
            self.prefilling.append(one)
            self.prefilling.sort(key=_get_rank)

    def _samples_come_first(self, one: SequenceGroup | TokenSequence) -> bool:
        """Whether samples of a prompt whose prefill is done get a slot before ``one``."""
        groups = [group for group in self.prefilled if group.request.credit > 0]
        if not groups:
            return False
        slots = self._count_slots()
        mine = slots[_get_tenant(one)]
        return any(
            group.rank[0] < one.rank[0] or slots[_get_tenant(group)] <= mine for group in groups
        )

    def _count_slots(self) -> Counter[str | None]:
        """The slots that each tenant has."""
        return Counter(map(_get_tenant, (*self.running, *self.prefilling)))

    def _peek_next(self) -> SequenceGroup | TokenSequence | None:
        """The next to be scheduled: within a priority, preempted ones come before waiting ones.

        A waiting prompt whose tenant has no slot comes before those of tenants that have some.
        """
        head = self._queue.head()
        slots = self._count_slots()
        for one in self._preempted:
            if one.group.request.credit <= 0:
                continue
            if head is None or one.rank[0] < head.rank[0]:
                return one
            has_claim = not slots[_get_tenant(head)] and slots[_get_tenant(one)] > 0
            if one.rank[0] == head.rank[0] and not has_claim:
                return one
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
        """Whether there are places for the next sample of a prompt."""
        return group.request.credit > 0 and self.free_slots >= group.slots_needed

    def free_slots_for_sample(self) -> bool:
        """Whether a sample of a prompt that is read can be started, if need be in another's place.

        Between two passes only.
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

    def _has_blocks(self, one: SequenceGroup | TokenSequence) -> bool:
        """For what is to be read of it and all others, and a block more for each other row."""
        others = sum(row.group is not one.group for row in self.running)
        return (
            sum(map(_count_needed_blocks, [one, *self.prefilling])) + others
            <= self._block_pool.available
        )

    def _preempt_for(self, one: SequenceGroup | TokenSequence) -> bool:
        """Preempt a sequence so that ``one`` can be scheduled. Returns False if none may be.

        That is one whose client does not read, or of lower priority, or of a tenant that has
        several slots while the tenant of ``one`` has none.
        """
        last = max(self._iterate_scheduled(), key=_get_preemption_order, default=one)
        if last.group.request.credit <= 0 or last.rank[0] > one.rank[0]:
            self._preempt(last)
            return True
        unfair = self._find_unfair_sequence(one)
        if unfair is None:
            return False
        self._fair_preemption_step = self._step
        self._preempt(unfair)
        return True

    def _find_unfair_sequence(self, one: SequenceGroup | TokenSequence) -> TokenSequence | None:
        """The last sequence of the tenant with most slots, if the tenant of ``one`` has none.

        Beams are excluded: they are preempted together, which would cost more than it gives.
        """
        if self._step - self._fair_preemption_step < FAIR_PREEMPTION_INTERVAL:
            return None
        slots = self._count_slots()
        if not slots or slots[_get_tenant(one)]:
            return None
        tenant, count = slots.most_common(1)[0]
        candidates = [
            row
            for row in self.running
            if _get_tenant(row) == tenant
            and row.rank[0] >= one.rank[0]
            and not row.group.beam_searches
        ]
        return max(candidates, key=_get_rank) if count > 1 and candidates else None

    # --- memory ---------------------------------------------------------------------------------

    def _reserve_blocks(self, one: SequenceGroup | TokenSequence, tokens: int) -> bool:
        """Room for so many more tokens, taken from those that rank behind, if need be."""
        while one.cache.count_needed_blocks(tokens) > self._block_pool.available:
            last = max(self._iterate_scheduled(), key=_get_preemption_order)
            if (
                last is one
                or _get_preemption_order(last) < _get_preemption_order(one)
                or last in self._get_sibling_beams(one)
            ):
                return False
            self._preempt(last)
        one.cache.reserve(tokens)
        return True

    def _preempt(self, one: SequenceGroup | TokenSequence) -> None:
        """It gives up its blocks, to be read again; with beams the others do, too."""
        for other in [row for row in self._get_sibling_beams(one) if row is not one]:
            self._drop_sequence(other)
        self._drop_sequence(one)

    def _get_sibling_beams(self, one: SequenceGroup | TokenSequence) -> list[TokenSequence]:
        """The beams of a search that have places."""
        if isinstance(one, SequenceGroup) or not one.group.beam_searches:
            return []
        held = (row for row in (*self.running, *self.prefilling) if isinstance(row, TokenSequence))
        return [row for row in held if row.group is one.group]

    def _drop_sequence(self, one: SequenceGroup | TokenSequence) -> None:
        one.cache.free()
        if isinstance(one, SequenceGroup):
            one.prompt_logprobs.clear()
        for place in (self.running, self.prefilling, self.prefilled):
            if one in place:
                place.remove(one)  # type: ignore[arg-type]
        self._preempted.append(one)
        self._preempted.sort(key=_get_rank)
        self.preemption_count += 1

    # --- the next pass --------------------------------------------------------------------------

    def schedule(self) -> tuple[list[TokenSequence], list[PrefillChunk]]:
        """The rows that make a token now, and the next pieces of what is being read."""
        self._step += 1
        before, going = self.preemption_count, self._select_running()
        chunks = self._select_chunks()
        if self.preemption_count > before:
            going = [row for row in going if row in self.running]
            chunks = [chunk for chunk in chunks if chunk.sequence in self.prefilling]
        return going, chunks

    def _select_running(self) -> list[TokenSequence]:
        found = []
        for row in sorted(self.running, key=_get_rank):
            if (
                row.group.request.credit <= 0
                or row not in self.running
                or not self._is_beam_complete(row)
            ):
                continue
            if self._reserve_blocks(row, 1):
                found.append(row)
            else:
                self._preempt(row)
        return found

    def _is_beam_complete(self, row: TokenSequence) -> bool:
        """Whether all beams of its search are here, if it is one: none goes on alone."""
        if not row.group.beam_searches:
            return True
        here = sum(other.group is row.group for other in self.running)
        return here + len(row.group.finished) == row.group.request.sample_count

    def _select_chunks(self) -> list[PrefillChunk]:
        left, found = (
            max(
                BLOCK_SIZE,
                self._limits.max_chunk_tokens - self._limits.max_chunk_tokens % BLOCK_SIZE,
            ),
            [],
        )
        for one in list(self.prefilling):
            if left < BLOCK_SIZE:
                break
            if one not in self.prefilling:
                continue
            if one.cache.length == 0 and not one.scores_prompt:
                one.cache.reuse_prefix(one.group.block_hashes)
                if one.group.cached_tokens is None:
                    one.group.cached_tokens = one.cache.length
            start = one.cache.length
            end = _align_chunk_end(one, start + left)
            if end > start and self._reserve_blocks(one, end - start):
                wants = (
                    end - start
                    if one.scores_prompt
                    else int(one.needs_logits and end == len(one.context_tokens))
                )
                found.append(
                    PrefillChunk(one, BatchSegment(one.cache, one.context_tokens[start:end], wants))
                )
                left -= end - start
        return found

    def advance_chunk(self, chunk: PrefillChunk) -> bool:
        """A chunk went through. Whether that was the last of it."""
        one = chunk.sequence
        one.cache.cache_prefix(one.group.block_hashes)
        if one.cache.length < len(one.context_tokens):
            return False
        self.prefilling.remove(one)
        if isinstance(one, TokenSequence):
            self.running.append(one)
        else:
            self.prefilled.append(one)
        return True


def _align_chunk_end(one: SequenceGroup | TokenSequence, end: int) -> int:
    """Where a chunk may end that would end there: within a prompt only between blocks."""
    end = min(end, len(one.context_tokens))
    return end - end % BLOCK_SIZE if end < one.cache.prompt_length else end


def _count_needed_blocks(one: SequenceGroup | TokenSequence) -> int:
    """Blocks for what is left of it to be read, and a token more."""
    return one.cache.count_needed_blocks(len(one.context_tokens) - one.cache.length + 1)


def _get_tenant(one: SequenceGroup | TokenSequence) -> str | None:
    return one.group.request.command.tenant


def _get_rank(one: SequenceGroup | TokenSequence) -> tuple[int, ...]:
    return one.rank


def _get_preemption_order(one: SequenceGroup | TokenSequence) -> tuple[int, ...]:
    """The greatest gives way first."""
    return (int(one.group.request.credit <= 0), *one.rank)
