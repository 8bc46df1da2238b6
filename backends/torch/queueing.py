"""The line of prompts that wait for a place: by priority, and in fair turns between tenants.

Within a priority each tenant has a line of its own. The lines take turns by deficit round robin
over prompt tokens: a turn adds ``TURN`` tokens to what a tenant may have read, and what is left
over stays for its next turn. Who asks for much waits for himself only.
"""

from collections import deque
from collections.abc import Callable

from backends.torch.rows import Group, Job

TURN = 256
"""Prompt tokens."""


class _Lines:
    """The tenants' lines of one priority."""

    def __init__(self) -> None:
        self._lines: dict[str | None, deque[Group]] = {}
        self._may: dict[str | None, int] = {}

    def add(self, group: Group) -> None:
        tenant = group.job.spec.tenant
        # Who comes to an empty line has his turn at once; the others when theirs begins.
        self._may.setdefault(tenant, 0 if self._lines else TURN)
        self._lines.setdefault(tenant, deque()).append(group)

    def head(self) -> Group:
        """Whose turn it is."""
        while True:
            tenant, line = next(iter(self._lines.items()))
            if len(line[0].prompt) <= self._may[tenant]:
                return line[0]
            self._lines[tenant] = self._lines.pop(tenant)
            self._next_turn()

    def take(self) -> Group:
        group = self.head()
        tenant = group.job.spec.tenant
        self._lines[tenant].popleft()
        self._may[tenant] -= len(group.prompt)
        self._tidy()
        return group

    def keep(self, wanted: Callable[[Group], bool]) -> None:
        for tenant, line in self._lines.items():
            self._lines[tenant] = deque(filter(wanted, line))
        self._tidy()

    def _tidy(self) -> None:
        first = next(iter(self._lines))
        for tenant in [tenant for tenant, line in self._lines.items() if not line]:
            del self._lines[tenant], self._may[tenant]
        if self._lines and first not in self._lines:
            self._next_turn()

    def _next_turn(self) -> None:
        self._may[next(iter(self._lines))] += TURN

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))


class Line:
    """All prompts that wait."""

    def __init__(self) -> None:
        self._by_priority: dict[int, _Lines] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: Group) -> None:
        """It waits from now on."""
        self._by_priority.setdefault(group.job.spec.priority, _Lines()).add(group)
        self._count += 1

    def head(self) -> Group | None:
        """Whose turn it is."""
        return self._by_priority[min(self._by_priority)].head() if self._count else None

    def take(self) -> Group:
        """The same, and it waits no more."""
        group = self._by_priority[min(self._by_priority)].take()
        self._count -= 1
        self._tidy()
        return group

    def remove(self, job: Job) -> None:
        """Nothing of this request waits any more."""
        lines = self._by_priority.get(job.spec.priority)
        if lines is not None:
            lines.keep(lambda group: group.job is not job)
            self._tidy()
            self._count = sum(map(len, self._by_priority.values()))

    def _tidy(self) -> None:
        for priority in [key for key, lines in self._by_priority.items() if not len(lines)]:
            del self._by_priority[priority]
