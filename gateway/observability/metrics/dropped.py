"""Metrics of feedback and recordings, and of log lines, usage rows and traces that were dropped."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition

FEEDBACK: Final = MetricDefinition(
    "interlingua_feedback",
    "counter",
    "Requests with feedback, by result: accepted, or the class of the error; and answers that a "
    "model judges: judged, judge_skipped, judge_failed or judge_unreadable.",
    ("result",),
)
FEEDBACK_METRICS: Final = (FEEDBACK,)


class FeedbackCollector(Collector):
    """Counts feedback."""

    def __init__(self, results: Mapping[str, int]) -> None:
        """``results`` gives the count of each result, which are few."""
        self._results = results

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield FEEDBACK.build_family(((name,), count) for name, count in self._results.items())


_DROPPED_COUNTERS: Final = {
    name: MetricDefinition(f"interlingua_{name}_dropped", "counter", help_)
    for name, help_ in (
        ("log_lines", "Log lines dropped because the reader was too slow."),
        ("usage_rows", "Usage rows dropped because they could not be written."),
        ("traces", "Traces dropped because no collector took them in time."),
        (
            "recorded_requests",
            "Requests that were to be recorded and were not: the disk was full or too slow.",
        ),
    )
}
DROPPED_RECORD_METRICS: Final = (*_DROPPED_COUNTERS.values(),)
RECORDED_REQUESTS: Final = MetricDefinition(
    "interlingua_recorded_requests", "counter", "Requests that were written to recordings."
)


class DroppedRecordCollector(Collector):
    """Reports dropped records."""

    def __init__(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """``counts`` gives each count by name: such as ``log_lines``."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        for name, count in self._counts.items():
            yield _DROPPED_COUNTERS[name].build_family([((), count())])


class RecordingCollector(Collector):
    """Reports recorded requests."""

    def __init__(self, count_written: Callable[[], int]) -> None:
        self._count_written = count_written

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield RECORDED_REQUESTS.build_family([((), self._count_written())])
