"""What a run found, as it is kept in a file; and what it comes to."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from tests.bench.load_generator import Outcome

NOISY = 0.10
"""The share of the machine that others may use before times are not worth being told."""
MOVED = 0.25
"""How far the baseline may move around a measurement."""


class Sample(Struct, frozen=True):
    """One load on one gateway. ``cpu`` is the gateway's, in microseconds for each ``unit``.

    ``beside`` is what the baseline took just before and just after, and ``steady`` whether these
    two were about the same.
    """

    gateway: str
    pair: str
    load: str
    unit: str
    round: int
    cpu: float
    beside: float | None
    steady: bool
    outcome: Outcome

    @property
    def ratio(self) -> float | None:
        """To the baseline."""
        return self.cpu / self.beside if self.beside else None

    @property
    def key(self) -> tuple[str, str, str]:
        """What is repeated in each round."""
        return self.gateway, self.pair, self.load


class StartMeasurement(Struct, frozen=True):
    """A start: ``seconds`` until the first answer, and what is then in memory, in MB.

    ``memory`` is taken again at the end of the round, when nothing is asked any more. ``streams``
    is what a thousand open streams take beside, in MB, where they were tried.
    """

    gateway: str
    round: int
    seconds: float
    memory: float
    after: float
    streams: float | None = None
    streams_failed: int = 0


class Step(Struct, frozen=True):
    """A microbenchmark: ``cpu`` is in microseconds a call."""

    name: str
    cpu: float
    least: float
    most: float


class Spread(Struct, frozen=True):
    """Of what was measured several times."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return (
            f"{format_number(self.median)} ({format_number(self.least)}-{format_number(self.most)})"
        )


class Results(Struct, frozen=True):
    """A whole run. ``others`` is the share of the machine that others used, from 0 to 1."""

    when: str
    machine: str
    revision: str
    others: float
    baseline: str
    versions: dict[str, str]
    missing: dict[str, str]
    """Why a gateway was not measured."""
    samples: list[Sample]
    starts: list[StartMeasurement]
    steps: list[Step]
    against: str = ""
    """The gateway that ours is compared with."""

    @property
    def noisy(self) -> bool:
        """Whether absolute times would log more of the machine than of the gateways."""
        return self.others > NOISY or not all(sample.steady for sample in self.samples)

    def measured(self) -> list[tuple[str, str, str]]:
        """Gateway, pair and load of everything that was measured, in its order."""
        return list(dict.fromkeys(sample.key for sample in self.samples))

    def loads(self) -> list[str]:
        """Their names, in their order."""
        return list(dict.fromkeys(sample.load for sample in self.samples))

    def ratio(self, key: tuple[str, str, str]) -> Spread | None:
        """To the baseline, over all rounds; None where that has no such load."""
        return compute_spread([one.ratio for one in self._of(key) if one.ratio is not None])

    def ratio_to(self, other: str, key: tuple[str, str, str]) -> Spread | None:
        """The CPU beside that of another gateway in the same round, over all rounds."""
        cpus = {one.round: one.cpu for one in self._of((other, *key[1:]))}
        return compute_spread(
            [one.cpu / cpus[one.round] for one in self._of(key) if cpus.get(one.round)]
        )

    def cpu(self, key: tuple[str, str, str]) -> Spread | None:
        """Over all rounds, in microseconds."""
        return compute_spread([one.cpu for one in self._of(key)])

    def errors(self, key: tuple[str, str, str]) -> int:
        """In all rounds together."""
        return sum(one.outcome.errors for one in self._of(key))

    def _of(self, key: tuple[str, str, str]) -> Iterator[Sample]:
        return (sample for sample in self.samples if sample.key == key)


def compute_spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    return Spread(median(values), min(values), max(values)) if values else None


def format_number(value: float) -> str:
    """With as many digits as mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def read(file: Path) -> Results:
    """Raises OSError, and msgspec.MsgspecError for what is no file of results."""
    return msgspec.json.decode(file.read_bytes(), type=Results)
