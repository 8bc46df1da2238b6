"""Metrics of running requests, read whenever the page is rendered."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition
from gateway.observability.record import RequestRecord

REQUESTS_IN_FLIGHT: Final = MetricDefinition(
    "interlingua_requests_in_flight",
    "gauge",
    "Running requests, by phase: queued for a worker, waiting for the response, or streaming it.",
    ("model", "phase"),
)
RUNNING_REQUEST_METRICS: Final = (REQUESTS_IN_FLIGHT,)


class RunningRequestCollector(Collector):
    """Counts running requests from their records."""

    def __init__(
        self,
        get_records: Callable[[], Iterable[RequestRecord]],
        get_queued_ids: Callable[[], Collection[str]],
    ) -> None:
        """``get_records`` gives the running requests, ``get_queued_ids`` the ids of queued ones."""
        self._get_records = get_records
        self._get_queued_ids = get_queued_ids

    def count_by_phase(self) -> Counter[tuple[str, str]]:
        """The number of running requests by model and phase."""
        queued = self._get_queued_ids()
        return Counter((one.model, _get_phase(one, queued)) for one in self._get_records())

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield REQUESTS_IN_FLIGHT.build_family(self.count_by_phase().items())


def _get_phase(record: RequestRecord, queued: Collection[str]) -> str:
    if record.first_byte is not None:
        return "streaming"
    return "queued" if record.id in queued else "waiting"
