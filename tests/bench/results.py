"""The results of a run, as a file has them, and what is computed from them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from tests.bench.load_generator import Outcome

Key = tuple[str, str, str]
"""Gateway, protocol pair and load."""
NOISY = 0.10
"""The share of the machine beyond which other load makes absolute times worthless."""
MOVED = 0.25
"""By how much the baseline may change around a measurement."""


class Sample(Struct, frozen=True):
    """One load on one gateway. ``cpu`` is the gateway's, in microseconds for each ``unit``.

    ``baseline_cpu`` is the mean of the baseline's just before and just after, and ``stable``
    whether these two were about the same.
    """

    gateway: str
    pair: str
    load: str
    unit: str
    round: int
    cpu: float
    baseline_cpu: float | None
    stable: bool
    outcome: Outcome

    @property
    def ratio(self) -> float | None:
        """To the baseline."""
        return self.cpu / self.baseline_cpu if self.baseline_cpu else None

    @property
    def key(self) -> Key:
        """What is repeated in each round."""
        return self.gateway, self.pair, self.load


class StartMeasurement(Struct, frozen=True):
    """A start: ``seconds`` until the first answer, and what is then in memory, in MB.

    ``memory_after`` is the memory at the end of the round.
    """

    gateway: str
    round: int
    seconds: float
    memory: float
    memory_after: float


class OpenStreams(Struct, frozen=True):
    """How many streams were open, and the memory that each took, in kB."""

    gateway: str
    streams: int
    per_stream: float


class ScalingSample(Struct, frozen=True):
    """One or several processes under load: CPU in microseconds for each request, and the rate.

    ``apart``: the clients ran on other cores, so that the rate is that of the processes' cores.
    """

    processes: int
    cpu: float
    rate: float
    apart: bool


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
    """A whole run. ``other_load`` is the share of the machine in use without it, from 0 to 1."""

    when: str
    machine: str
    revision: str
    other_load: float
    baseline: str
    versions: dict[str, str]
    missing: dict[str, str]
    """Why a gateway was not measured."""
    samples: list[Sample]
    starts: list[StartMeasurement]
    steps: list[Step]
    open_streams: list[OpenStreams] = []
    scaling: list[ScalingSample] = []
    against: str = ""
    """The gateway that the gateway under test is compared with."""

    @property
    def noisy(self) -> bool:
        """Whether absolute times would log more of the machine than of the gateways."""
        return self.other_load > NOISY or not all(sample.stable for sample in self.samples)

    def list_measured_keys(self) -> list[Key]:
        """Gateway, pair and load of everything that was measured, in its order."""
        return list(dict.fromkeys(sample.key for sample in self.samples))

    def loads(self) -> list[str]:
        """Their names, in their order."""
        return list(dict.fromkeys(sample.load for sample in self.samples))

    def ratio(self, key: Key) -> Spread | None:
        """To the baseline, over all rounds; None where that has no such load."""
        return compute_spread([one.ratio for one in self._of(key) if one.ratio is not None])

    def ratio_to(self, other: str, key: Key) -> Spread | None:
        """The CPU time divided by that of another gateway in the same round, over all rounds."""
        cpus = {one.round: one.cpu for one in self._of((other, *key[1:]))}
        return compute_spread(
            [one.cpu / cpus[one.round] for one in self._of(key) if cpus.get(one.round)]
        )

    def added(self, other: str, key: Key, read: Callable[[Sample], float | None]) -> Spread | None:
        """What a number has more than another gateway's in the same round, over all rounds."""
        lowest = {one.round: read(one) for one in self._of((other, *key[1:]))}
        pairs = [(read(one), lowest.get(one.round)) for one in self._of(key)]
        return compute_spread(
            [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
        )

    def compute_scaling(self) -> float | None:
        """How many times the requests per second of one process two have; None if not measured.

        On a machine where the clients need a part of the two cores, it is computed from the CPU
        time of a request.
        """
        one, two = ([each for each in self.scaling if each.processes == n] for n in (1, 2))
        if not one or not two:
            return None
        if all(each.apart for each in self.scaling):
            return median(each.rate for each in two) / median(each.rate for each in one)
        return 2 * median(each.cpu for each in one) / median(each.cpu for each in two)

    def cpu(self, key: Key) -> Spread | None:
        """Over all rounds, in microseconds."""
        return compute_spread([one.cpu for one in self._of(key)])

    def errors(self, key: Key) -> int:
        """In all rounds together."""
        return sum(one.outcome.errors for one in self._of(key))

    def _of(self, key: Key) -> Iterator[Sample]:
        return (sample for sample in self.samples if sample.key == key)


def compute_spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    return Spread(median(values), min(values), max(values)) if values else None


def format_number(value: float) -> str:
    """With three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def read(file: Path) -> Results:
    """Raises OSError, and msgspec.MsgspecError for what is no file of results."""
    return msgspec.json.decode(file.read_bytes(), type=Results)
