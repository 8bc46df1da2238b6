"""What a metric is: its name, its type, its labels and its meaning, told in one place each.

Whoever collects it makes its family of this, the reference page and the merging of several
processes' pages read it: so neither can say what the other does not.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from backends.histogram import Histogram

MergeMode = Literal["sum", "largest", "smallest", "supervisor"]
"""What several processes' samples make together. ``supervisor``: only it knows."""
MetricSamples = Iterable[tuple[Sequence[str], float]]
"""Values by the labels' values."""

_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class MetricDefinition(Struct, frozen=True):
    """A metric. ``name`` is without the ``_total`` that a counter's samples end in."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label_names: tuple[str, ...] = ()
    merge_mode: MergeMode = "sum"

    @property
    def sample_name(self) -> str:
        """Its name, as it is asked for."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def build_family(self, samples: MetricSamples) -> Metric:
        """A counter, or a gauge, as prometheus_client writes it."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.label_names)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family

    def format_histogram_lines(
        self, histograms: Iterable[tuple[Sequence[str], Histogram]]
    ) -> Iterator[str]:
        """A histogram's lines: they are the most of the page, and the library would take long.

        What measured nothing is left out.
        """
        yield f"# HELP {self.name} {self.help}\n# TYPE {self.name} histogram\n"
        for values, histogram in histograms:
            *counts, total = accumulate(histogram.counts)
            if not total:
                continue
            texts = (value.translate(_LABEL_ESCAPES) for value in values)
            pairs = zip(self.label_names, texts, strict=True)
            labels = ",".join(f'{label}="{value}"' for label, value in pairs)
            first, own = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
            for edge, count in zip(histogram.edges, counts, strict=True):
                yield f'{self.name}_bucket{{{first}le="{edge}"}} {count}\n'
            yield f'{self.name}_bucket{{{first}le="+Inf"}} {total}\n'
            yield f"{self.name}_sum{own} {histogram.total}\n{self.name}_count{own} {total}\n"
