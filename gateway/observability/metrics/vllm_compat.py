"""The same numbers under vLLM's metric names, for dashboards made for vLLM.

Names and labels are those of vLLM's docs/usage/metrics.md. ``model_name`` is the public model name,
over all versions. The gateway appears as one server, so ``engine`` is 0.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.histogram import Histogram
from gateway.observability.metrics.definition import MetricDefinition, MetricSamples
from gateway.observability.stats import RequestStats, StatsKey

_VLLM_LABELS: Final = ("model_name", "engine")
_ENGINE_INDEX: Final = "0"
_FINISH_REASONS: Final[Mapping[str, str]] = {"eos": "stop", "tool_calls": "stop"}
"""vLLM's finish reasons, where they differ."""

REQUESTS_RUNNING: Final = MetricDefinition(
    "vllm:num_requests_running", "gauge", "Running requests.", _VLLM_LABELS
)
REQUESTS_WAITING: Final = MetricDefinition(
    "vllm:num_requests_waiting", "gauge", "Queued requests.", _VLLM_LABELS
)
PROMPT_TOKENS: Final = MetricDefinition(
    "vllm:prompt_tokens", "counter", "Prompt tokens.", _VLLM_LABELS
)
GENERATION_TOKENS: Final = MetricDefinition(
    "vllm:generation_tokens", "counter", "Generated tokens.", _VLLM_LABELS
)
REQUEST_SUCCESS: Final = MetricDefinition(
    "vllm:request_success",
    "counter",
    "Finished choices, by finish reason.",
    (*_VLLM_LABELS, "finished_reason"),
)
_HistogramGetter = Callable[[RequestStats[Histogram]], Histogram]
_VLLM_HISTOGRAMS: Final[tuple[tuple[MetricDefinition, _HistogramGetter], ...]] = tuple(
    (MetricDefinition(f"vllm:{name}", "histogram", help_, _VLLM_LABELS), of)
    for name, help_, of in (
        ("time_to_first_token_seconds", "Time to first token.", lambda one: one.first_token),
        (
            "inter_token_latency_seconds",
            "Mean time between tokens, one value per stream.",
            lambda one: one.per_token,
        ),
        (
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, one value per stream.",
            lambda one: one.per_token,
        ),
        ("e2e_request_latency_seconds", "End-to-end latency.", lambda one: one.duration),
        ("request_prompt_tokens", "Prompt tokens per request.", lambda one: one.prompt_tokens),
        (
            "request_generation_tokens",
            "Generated tokens per request.",
            lambda one: one.completion_tokens,
        ),
    )
)
VLLM_METRICS: Final = (
    *(REQUESTS_RUNNING, REQUESTS_WAITING, PROMPT_TOKENS, GENERATION_TOKENS, REQUEST_SUCCESS),
    *(definition for definition, _ in _VLLM_HISTOGRAMS),
)


class VllmCollector(Collector):
    """Sums the statistics of a model over versions and splits; it keeps no state."""

    def __init__(
        self,
        get_stats: Callable[[], Mapping[StatsKey, RequestStats[Histogram]]],
        count_running: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """``count_running`` gives the number of running requests by model and phase."""
        self._get_stats = get_stats
        self._count_running = count_running

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        waiting, running = Counter[str](), Counter[str]()
        for model in self._group_by_model():
            waiting[model] = running[model] = 0
        for (model, phase), count in self._count_running().items():
            (waiting if phase == "queued" else running)[model] += count
        yield REQUESTS_RUNNING.build_family(_add_labels(running))
        yield REQUESTS_WAITING.build_family(_add_labels(waiting))
        yield PROMPT_TOKENS.build_family(_add_labels(self._count_tokens("input")))
        yield GENERATION_TOKENS.build_family(_add_labels(self._count_tokens("output")))
        yield REQUEST_SUCCESS.build_family(self._count_finishes().items())

    def format_histograms(self) -> Iterator[str]:
        """See ``gateway.observability.metrics.requests.TextCollector``."""
        for definition, read_histogram in _VLLM_HISTOGRAMS:
            yield from definition.format_histogram_lines(
                ((model, _ENGINE_INDEX), _sum_histograms(map(read_histogram, every)))
                for model, every in self._group_by_model().items()
            )

    def _group_by_model(self) -> Mapping[str, list[RequestStats[Histogram]]]:
        """The statistics of each model. Requests without a model are omitted."""
        totals: dict[str, list[RequestStats[Histogram]]] = {}
        for (model, _, _), stats in self._get_stats().items():
            if model:
                totals.setdefault(model, []).append(stats)
        return totals

    def _count_tokens(self, direction: str) -> Counter[str]:
        totals = Counter[str]()
        for model, every in self._group_by_model().items():
            for stats in every:
                for (label, _), count in stats.tokens.items():
                    totals[model] += count if label == direction else 0
        return totals

    def _count_finishes(self) -> Counter[tuple[str, str, str]]:
        totals = Counter[tuple[str, str, str]]()
        for model, every in self._group_by_model().items():
            for stats in every:
                for (reason,), count in stats.finish_reasons.items():
                    totals[model, _ENGINE_INDEX, _FINISH_REASONS.get(reason, reason)] += count
        return totals


def _add_labels(counts: Mapping[str, int]) -> MetricSamples:
    return (((model, _ENGINE_INDEX), count) for model, count in counts.items())


def _sum_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of histograms with equal edges."""
    first, *others = histograms
    totals = Histogram(first.edges)
    for one in (first, *others):
        totals.counts = [a + b for a, b in zip(totals.counts, one.counts, strict=True)]
        totals.total += one.total
    return totals
