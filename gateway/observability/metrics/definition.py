"""Metric definitions: name, type, labels, help text and merge mode.

Collectors, the reference page and the merging of several processes' pages all read them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from backends.histogram import Histogram

MergeMode = Literal["sum", "largest", "smallest", "supervisor"]
"""How samples of several processes are merged. ``supervisor``: only the supervisor reports it."""
MetricSamples = Iterable[tuple[Sequence[str], float]]
"""Label values and sample value."""

OVERFLOW_LABEL: Final = "_other"
"""The label value once a table is full: the model ``*`` accepts any name."""
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def increment_bounded(
    counts: Counter[tuple[str, ...]], labels: tuple[str, ...], max_label_sets: int
) -> None:
    """Count these labels; once there are ``max_label_sets``, new ones under OVERFLOW_LABEL."""
    if labels not in counts and len(counts) >= max_label_sets:
        labels = (OVERFLOW_LABEL,) * len(labels)
    counts[labels] += 1


class MetricDefinition(Struct, frozen=True):
    """A metric. ``name`` does not include the suffix ``_total`` of counters."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label_names: tuple[str, ...] = ()
    merge_mode: MergeMode = "sum"

    @property
    def sample_name(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def build_family(self, samples: MetricSamples) -> Metric:
        """Build a counter or gauge family for prometheus_client."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.label_names)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family

    def format_histogram_lines(
        self, histograms: Iterable[tuple[Sequence[str], Histogram]]
    ) -> Iterator[str]:
        """Format the lines of a histogram; empty histograms are omitted.

        Histograms are most of the page, and prometheus_client is slow at formatting them.
        """
        yield f"# HELP {self.name} {self.help}\n# TYPE {self.name} histogram\n"
        for values, histogram in histograms:
            *counts, total = accumulate(histogram.counts)
            if not total:
                continue
            texts = (value.translate(_LABEL_ESCAPES) for value in values)
            pairs = zip(self.label_names, texts, strict=True)
            labels = ",".join(f'{label}="{value}"' for label, value in pairs)
            label_prefix, label_set = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
            for edge, count in zip(histogram.edges, counts, strict=True):
                yield f'{self.name}_bucket{{{label_prefix}le="{edge}"}} {count}\n'
            yield f'{self.name}_bucket{{{label_prefix}le="+Inf"}} {total}\n'
            yield f"{self.name}_sum{label_set} {histogram.total}\n"
            yield f"{self.name}_count{label_set} {total}\n"
