"""The line of prompts that wait for a place: by priority, and in fair turns between tenants.

Within a priority each tenant has a line of its own. The lines take turns by deficit round robin
over prompt tokens: a turn adds ``TURN`` tokens to what a tenant may have read, and what is left
over stays for its next turn. Who asks for much waits for himself only.
"""

from collections import deque
from collections.abc import Callable

from backends.torch.rows import EngineRequest, SequenceGroup

TURN_TOKENS = 256
"""Prompt tokens."""


class _TenantQueues:
    """The tenants' lines of one priority."""

    def __init__(self) -> None:
        self._queues: dict[str | None, deque[SequenceGroup]] = {}
        self._deficits: dict[str | None, int] = {}

    def add(self, group: SequenceGroup) -> None:
        tenant = group.request.command.tenant
        # Who comes to an empty line has his turn at once; the others when theirs begins.
        self._deficits.setdefault(tenant, 0 if self._queues else TURN_TOKENS)
        self._queues.setdefault(tenant, deque()).append(group)

    def head(self) -> SequenceGroup:
        """Whose turn it is."""
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
    """All prompts that wait."""

    def __init__(self) -> None:
        self._by_priority: dict[int, _TenantQueues] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: SequenceGroup) -> None:
        """It waits from now on."""
        self._by_priority.setdefault(group.request.command.priority, _TenantQueues()).add(group)
        self._count += 1

    def head(self) -> SequenceGroup | None:
        """Whose turn it is."""
        return self._by_priority[min(self._by_priority)].head() if self._count else None

    def pop(self) -> SequenceGroup:
        """The same, and it waits no more."""
        group = self._by_priority[min(self._by_priority)].pop()
        self._count -= 1
        self._remove_empty()
        return group

    def remove(self, job: EngineRequest) -> None:
        """Nothing of this request waits any more."""
        lines = self._by_priority.get(job.command.priority)
        if lines is not None:
            lines.filter_groups(lambda group: group.request is not job)
            self._remove_empty()
            self._count = sum(map(len, self._by_priority.values()))

    def _remove_empty(self) -> None:
        for priority in [key for key, lines in self._by_priority.items() if not len(lines)]:
            del self._by_priority[priority]
