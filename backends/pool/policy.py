"""Which of several workers is asked next. Pure: no clock, no luck, no I/O."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol, TypeVar

PolicyName = Literal["round_robin", "least_load"]


class Load(Protocol):
    """A worker as a policy sees it. ``key`` is its own; ``weight`` is at least 1."""

    @property
    def key(self) -> int:
        """What tells it from the others."""

    @property
    def weight(self) -> int:
        """Its share, beside the others'."""

    @property
    def in_flight(self) -> int:
        """The requests that it has now."""


LoadT = TypeVar("LoadT", bound=Load)


class Policy(Protocol):
    """Picks one of the workers that may be asked, of which there is at least one."""

    def pick(self, loads: Sequence[LoadT]) -> LoadT:
        """The one to ask."""


class RoundRobin:
    """Each in turn, as often as its weight says, and evenly spread: a a b a and not a a a b.

    Every worker gains its weight at each pick, and the richest is picked and pays what all gained.
    One that can't be asked just now neither gains nor pays.
    """

    def __init__(self) -> None:
        self._credit: dict[int, int] = {}

    def pick(self, loads: Sequence[LoadT]) -> LoadT:
        """The richest; of equals the first."""
        credit = self._credit
        for load in loads:
            credit[load.key] = credit.get(load.key, 0) + load.weight
        richest = max(loads, key=lambda load: credit[load.key])
        credit[richest.key] -= sum(load.weight for load in loads)
        return richest


class LeastLoad:
    """The one that would have the fewest requests for its weight; equals take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def pick(self, loads: Sequence[LoadT]) -> LoadT:
        """The least loaded."""
        after = [(load.in_flight + 1) / load.weight for load in loads]
        least = min(after)
        return self._turns.pick([load for load, n in zip(loads, after, strict=True) if n == least])


POLICIES: Final[Mapping[PolicyName, type[RoundRobin | LeastLoad]]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
}
