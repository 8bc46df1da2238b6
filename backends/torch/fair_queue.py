"""The queue of waiting prompts: by priority, and fair between tenants.

Within a priority each tenant has a queue of its own. Tenants take turns by deficit round robin
over prompt tokens: each turn adds ``TURN_TOKENS`` to the tenant's budget, and the rest is kept
for its next turn. A tenant without a slot comes before those that have some. A tenant with many
requests delays only itself.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from backends.torch.sequence import EngineRequest, SequenceGroup

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

    def head(self, served: AbstractSet[str | None]) -> SequenceGroup:
        """The next prompt: in the order of turns, of a tenant that is not ``served`` if any waits.

        Its turn may come early, but what it takes then counts against its next turns, and others
        without a slot come before it.
        """
        waiting = [tenant for tenant in self._queues if tenant not in served]
        if 0 < len(waiting) < len(self._queues):
            return self._queues[waiting[0]][0]
        while True:
            tenant, line = next(iter(self._queues.items()))
            if len(line[0].prompt) <= self._deficits[tenant]:
                return line[0]
            self._queues[tenant] = self._queues.pop(tenant)
            self._advance_turn()

    def remove_first(self, tenant: str | None) -> None:
        first = next(iter(self._queues))
        group = self._queues[tenant].popleft()
        if len(group.prompt) > self._deficits[tenant]:  # its turn came early
            self._queues[tenant] = self._queues.pop(tenant)
        # Of many early turns only the last counts, or it would wait for as many turns of others.
        self._deficits[tenant] = max(self._deficits[tenant], 0) - len(group.prompt)
        self._remove_empty(first)

    def filter_groups(self, wanted: Callable[[SequenceGroup], bool]) -> None:
        first = next(iter(self._queues))
        for tenant, line in self._queues.items():
            self._queues[tenant] = deque(filter(wanted, line))
        self._remove_empty(first)

    def _remove_empty(self, first: str | None) -> None:
        """Remove tenants without prompts; a turn begins unless ``first``, who had it, is first."""
        for tenant in [tenant for tenant, line in self._queues.items() if not line]:
            del self._queues[tenant], self._deficits[tenant]
        if self._queues and next(iter(self._queues)) != first:
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

    def head(self, served: AbstractSet[str | None] = frozenset()) -> SequenceGroup | None:
        """The next prompt; of ``served`` tenants, which have slots, only if no other waits."""
        return self._by_priority[min(self._by_priority)].head(served) if self._count else None

    def remove_head(self, group: SequenceGroup) -> None:
        """Remove what ``head`` returned."""
        command = group.request.command
        self._by_priority[command.priority].remove_first(command.tenant)
        self._count -= 1
        self._remove_empty()

    def remove(self, request: EngineRequest) -> None:
        """Remove the prompts of a request."""
        lines = self._by_priority.get(request.command.priority)
        if lines is not None:
            lines.filter_groups(lambda group: group.request is not request)
            self._remove_empty()
            self._count = sum(map(len, self._by_priority.values()))

    def _remove_empty(self) -> None:
        for priority in [key for key, lines in self._by_priority.items() if not len(lines)]:
            del self._by_priority[priority]
