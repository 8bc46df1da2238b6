"""The results of a run as stored in a file, and values computed from them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from tests.bench.load_generator import Outcome

Key = tuple[str, str, str]
"""Gateway, protocol pair and load."""
NOISY = 0.10
"""The share of the machine beyond which other load makes absolute times useless."""
MOVED = 0.25
"""How much the baseline may change around a measurement."""


class Sample(Struct, frozen=True):
    """One load on one gateway. ``cpu`` is in microseconds for each ``unit``.

    ``baseline_cpu`` is the mean of the baseline's before and after, and ``stable`` whether these
    two were about the same.
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
    """A start: ``seconds`` until the first response, and the memory then, in MB.

    ``memory_after`` is the memory at the end of the round.
    """

    gateway: str
    round: int
    seconds: float
    memory: float
    memory_after: float


class OpenStreams(Struct, frozen=True):
    """The number of open streams, and the memory of each in kB."""

    gateway: str
    streams: int
    per_stream: float


class ScalingSample(Struct, frozen=True):
    """One or several processes under load: CPU in microseconds per request, and the rate.

    ``apart``: the clients ran on other cores, so that the rate is that of the processes' cores.
    """

    processes: int
    cpu: float
    rate: float
    apart: bool


class Step(Struct, frozen=True):
    """A microbenchmark: ``cpu`` is in microseconds per call."""

    name: str
    cpu: float
    least: float
    most: float


class Spread(Struct, frozen=True):
    """The spread of repeated measurements."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return (
            f"{format_number(self.median)} ({format_number(self.least)}-{format_number(self.most)})"
        )


class Results(Struct, frozen=True):
    """A run. ``other_load`` is the used share of the machine without it, from 0 to 1."""

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
    """The gateway that the measured gateway is compared with."""

    @property
    def noisy(self) -> bool:
        """Whether absolute times would mostly show other load on the machine."""
        return self.other_load > NOISY or not all(sample.stable for sample in self.samples)

    def list_keys(self) -> list[Key]:
        """Return gateway, pair and load of everything measured, in order."""
        return list(dict.fromkeys(sample.key for sample in self.samples))

    def loads(self) -> list[str]:
        """The names of the loads, in order."""
        return list(dict.fromkeys(sample.load for sample in self.samples))

    def ratio(self, key: Key) -> Spread | None:
        """To the baseline, over all rounds; None where that has no such load."""
        return compute_spread([one.ratio for one in self._of(key) if one.ratio is not None])

    def ratio_to(self, other: str, key: Key) -> Spread | None:
        """Return the CPU time divided by another gateway's in the same round, over all rounds."""
        cpus = {one.round: one.cpu for one in self._of((other, *key[1:]))}
        return compute_spread(
            [one.cpu / cpus[one.round] for one in self._of(key) if cpus.get(one.round)]
        )

    def added(self, other: str, key: Key, read: Callable[[Sample], float | None]) -> Spread | None:
        """Return what a number exceeds another gateway's by in the same round, over all rounds."""
        lowest = {one.round: read(one) for one in self._of((other, *key[1:]))}
        pairs = [(read(one), lowest.get(one.round)) for one in self._of(key)]
        return compute_spread(
            [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
        )

    def compute_scaling(self) -> float | None:
        """Return the requests per second of two processes divided by those of one, if measured.

        On a machine where the clients need part of the two cores, it is computed from the CPU time
        of a request.
        """
        one, two = ([each for each in self.scaling if each.processes == n] for n in (1, 2))
        if not one or not two:
            return None
        if all(each.apart for each in self.scaling):
            return median(each.rate for each in two) / median(each.rate for each in one)
        return 2 * median(each.cpu for each in one) / median(each.cpu for each in two)

    def cpu(self, key: Key) -> Spread | None:
        """Return microseconds over all rounds."""
        return compute_spread([one.cpu for one in self._of(key)])

    def errors(self, key: Key) -> int:
        """Return the errors of all rounds."""
        return sum(one.outcome.errors for one in self._of(key))

    def _of(self, key: Key) -> Iterator[Sample]:
        return (sample for sample in self.samples if sample.key == key)


def compute_spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of values, None if there are none."""
    return Spread(median(values), min(values), max(values)) if values else None


def format_number(value: float) -> str:
    """Format with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def read(file: Path) -> Results:
    """Read results. Raises OSError, and msgspec.MsgspecError for another kind of file."""
    return msgspec.json.decode(file.read_bytes(), type=Results)
