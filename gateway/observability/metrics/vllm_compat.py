"""The same figures by the names that vLLM has for them, for what reads a vLLM server's page.

The names and labels are those of vLLM's docs/usage/metrics.md; ``model_name`` is the public name
of a model, whatever its versions. The gateway stands for one server, so ``engine`` is 0.
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
"""What vLLM calls an end, where it has another word."""

REQUESTS_RUNNING: Final = MetricDefinition(
    "vllm:num_requests_running", "gauge", "Requests being answered.", _VLLM_LABELS
)
REQUESTS_WAITING: Final = MetricDefinition(
    "vllm:num_requests_waiting", "gauge", "Requests that wait.", _VLLM_LABELS
)
PROMPT_TOKENS: Final = MetricDefinition(
    "vllm:prompt_tokens", "counter", "Tokens of prompts.", _VLLM_LABELS
)
GENERATION_TOKENS: Final = MetricDefinition(
    "vllm:generation_tokens", "counter", "Tokens of answers.", _VLLM_LABELS
)
REQUEST_SUCCESS: Final = MetricDefinition(
    "vllm:request_success",
    "counter",
    "Choices that ended, by the reason.",
    (*_VLLM_LABELS, "finished_reason"),
)
_HistogramGetter = Callable[[RequestStats[Histogram]], Histogram]
_VLLM_HISTOGRAMS: Final[tuple[tuple[MetricDefinition, _HistogramGetter], ...]] = tuple(
    (MetricDefinition(f"vllm:{name}", "histogram", help_, _VLLM_LABELS), of)
    for name, help_, of in (
        ("time_to_first_token_seconds", "To the first token.", lambda one: one.first_token),
        (
            "inter_token_latency_seconds",
            "Between tokens: a mean of each.",
            lambda one: one.per_token,
        ),
        (
            "request_time_per_output_token_seconds",
            "After the first token, by their number.",
            lambda one: one.per_token,
        ),
        ("e2e_request_latency_seconds", "From end to end.", lambda one: one.duration),
        ("request_prompt_tokens", "The length of prompts.", lambda one: one.prompt_tokens),
        ("request_generation_tokens", "The length of answers.", lambda one: one.completion_tokens),
    )
)
VLLM_METRICS: Final = (
    *(REQUESTS_RUNNING, REQUESTS_WAITING, PROMPT_TOKENS, GENERATION_TOKENS, REQUEST_SUCCESS),
    *(told for told, _ in _VLLM_HISTOGRAMS),
)


class VllmCollector(Collector):
    """Adds up what is counted of a model's arms. Nothing is kept here."""

    def __init__(
        self,
        arms: Callable[[], Mapping[StatsKey, RequestStats[Histogram]]],
        running: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """``arms`` gives figures, ``running`` how many exchanges run, by model and phase."""
        self._get_stats = arms
        self._count_running = running

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
        for told, of in _VLLM_HISTOGRAMS:
            yield from told.format_histogram_lines(
                ((model, _ENGINE_INDEX), _sum_histograms(map(of, figures)))
                for model, figures in self._group_by_model().items()
            )

    def _group_by_model(self) -> Mapping[str, list[RequestStats[Histogram]]]:
        """The figures of each model's arms. What came to no model is none."""
        found: dict[str, list[RequestStats[Histogram]]] = {}
        for (model, _, _), figures in self._get_stats().items():
            if model:
                found.setdefault(model, []).append(figures)
        return found

    def _count_tokens(self, wanted: str) -> Counter[str]:
        found = Counter[str]()
        for model, every in self._group_by_model().items():
            for figures in every:
                for (direction, _), count in figures.tokens.items():
                    found[model] += count if direction == wanted else 0
        return found

    def _count_finishes(self) -> Counter[tuple[str, str, str]]:
        found = Counter[tuple[str, str, str]]()
        for model, every in self._group_by_model().items():
            for figures in every:
                for (reason,), count in figures.finish_reasons.items():
                    found[model, _ENGINE_INDEX, _FINISH_REASONS.get(reason, reason)] += count
        return found


def _add_labels(counts: Mapping[str, int]) -> MetricSamples:
    return (((model, _ENGINE_INDEX), count) for model, count in counts.items())


def _sum_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """All of them as one: they have the same edges."""
    first, *others = histograms
    found = Histogram(first.edges)
    for one in (first, *others):
        found.counts = [a + b for a, b in zip(found.counts, one.counts, strict=True)]
        found.total += one.total
    return found
