"""What is counted of an arm, and what is left out."""

import pytest
from msgspec.structs import replace

from gateway.core.histogram import Histogram
from gateway.core.types import Usage
from gateway.figures import DURATION, FIRST_TOKEN, LENGTH, PER_TOKEN, Figures
from gateway.telemetry import Record

STREAM = Record("r", first_token=0.5, duration=2.5, usage=Usage(3, 5), finish=("eos",))


def counted(record: Record) -> tuple[int, int, int, int]:
    """How often each thing was measured: first token, duration, time per token, length."""
    figures = Figures(Histogram)
    figures.add(record)
    histograms = (figures.first_token, figures.duration, figures.per_token, figures.completion)
    first, duration, per_token, length = (sum(one.counts) for one in histograms)
    return first, duration, per_token, length


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        pytest.param(STREAM, (1, 1, 1, 1), id="a stream"),
        pytest.param(replace(STREAM, outcome="cancelled"), (1, 0, 0, 0), id="left in its midst"),
        pytest.param(replace(STREAM, first_token=None), (0, 1, 0, 1), id="in one piece"),
        pytest.param(replace(STREAM, usage=Usage(3, 1)), (1, 1, 0, 1), id="a single token"),
        pytest.param(replace(STREAM, first_token=None, finish=()), (0, 1, 0, 0), id="vectors"),
        pytest.param(Record("r", duration=1.0), (0, 0, 0, 0), id="no answer of a model"),
    ],
)
def test_what_is_measured_of_which_exchange(
    record: Record, wanted: tuple[int, int, int, int]
) -> None:
    assert counted(record) == wanted


def test_the_first_token_is_no_part_of_the_time_per_token() -> None:
    figures = Figures(Histogram)
    figures.add(STREAM)
    assert figures.per_token.total == pytest.approx(0.5)


def test_an_edge_is_part_of_what_lies_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        histogram.add(value)
    assert histogram.counts == [1, 2, 1]
    assert histogram.total == 7.5


@pytest.mark.parametrize(
    ("edges", "standard"),
    [
        (
            FIRST_TOKEN,
            "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0",
        ),
        (PER_TOKEN, "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5"),
        (
            DURATION,
            "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92",
        ),
        (LENGTH, "1 4 16 64 256 1024 4096 16384 65536 262144"),
    ],
)
def test_every_edge_of_the_standard_is_there(edges: tuple[float, ...], standard: str) -> None:
    assert list(edges) == sorted(edges)
    assert set(edges) >= set(map(float, standard.split()))
