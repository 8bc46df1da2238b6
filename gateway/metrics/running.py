"""The exchanges that are not over. Asked at each look; nothing is kept here."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.telemetry import RequestRecord
from gateway.told import MetricDefinition

REQUESTS_IN_FLIGHT: Final = MetricDefinition(
    "interlingua_requests_in_flight",
    "gauge",
    "Exchanges that are not over: queued for a worker, waiting for their answer, or streaming it.",
    ("model", "phase"),
)
RUNNING_REQUEST_METRICS: Final = (REQUESTS_IN_FLIGHT,)


class RunningRequestCollector(Collector):
    """Looks at their records."""

    def __init__(
        self, live: Callable[[], Iterable[RequestRecord]], queued: Callable[[], Collection[str]]
    ) -> None:
        """``live`` gives those, ``queued`` the ids of the ones that wait for a worker."""
        self._get_records = live
        self._get_queued_ids = queued

    def count_by_phase(self) -> Counter[tuple[str, str]]:
        """How many there are by model and phase."""
        queued = self._get_queued_ids()
        return Counter((one.model, _get_phase(one, queued)) for one in self._get_records())

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        yield REQUESTS_IN_FLIGHT.build_family(self.count_by_phase().items())


def _get_phase(record: RequestRecord, queued: Collection[str]) -> str:
    if record.first_byte is not None:
        return "streaming"
    return "queued" if record.id in queued else "waiting"
