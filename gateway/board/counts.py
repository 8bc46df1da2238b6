"""What a page of metrics has counted so far, by model and version."""

from collections import defaultdict

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Target = tuple[str, str]
"""Model and version."""
_GOOD = frozenset({"ok", "cancelled"})
"""Outcomes that are no failure: a client may leave."""


class Unreadable(Exception):
    """A page that is none of a gateway's."""


class Count(Struct):
    """Of one version. ``below`` counts first tokens up to each edge, in seconds."""

    requests: float = 0
    errors: float = 0
    tokens: float = 0
    below: dict[float, float] = {}

    def since(self, before: "Count") -> "Count":
        """What came after that."""
        return Count(
            self.requests - before.requests,
            self.errors - before.errors,
            self.tokens - before.tokens,
            {edge: count - before.below.get(edge, 0) for edge, count in self.below.items()},
        )

    def first_token(self, share: float) -> float | None:
        """Within how many seconds this share of first tokens came; None where there was none.

        Between two edges it is as if all lay evenly; above the last one nothing is known, and the
        last one is told.
        """
        edges = sorted(self.below)
        wanted = share * self.below[edges[-1]] if edges else 0.0
        low, passed = 0.0, 0.0
        for edge in edges if wanted else ():
            count = self.below[edge]
            if count >= wanted:
                part = (wanted - passed) / (count - passed)
                return low + (edge - low) * part if edge != float("inf") else low
            low, passed = edge, count
        return None


class Counts(Struct):
    """Of all of them. ``running`` is how many exchanges there are now."""

    of: dict[Target, Count] = {}
    running: float = 0

    @property
    def requests(self) -> float:
        """Of all together."""
        return sum(one.requests for one in self.of.values())


def read(text: str) -> Counts:
    """What the page says. Raises Unreadable."""
    found: defaultdict[Target, Count] = defaultdict(Count)
    counts, known = Counts(), False
    try:
        for family in text_string_to_metric_families(text):
            known = known or family.name.startswith("interlingua_")
            for sample in family.samples:
                if sample.name == "interlingua_requests_in_flight":
                    counts.running += sample.value
                elif "version" in sample.labels and sample.labels.get("model"):
                    _take(found[sample.labels["model"], sample.labels["version"]], sample)
    except ValueError:
        known = False
    if not known:
        raise Unreadable("it is no page of a gateway's metrics")
    counts.of = {target: one for target, one in found.items() if one.requests}
    return counts


def _take(count: Count, sample: Sample) -> None:
    match sample.name:
        case "interlingua_requests_total":
            count.requests += sample.value
            count.errors += 0 if sample.labels["outcome"] in _GOOD else sample.value
        case "interlingua_tokens_total" if sample.labels["direction"] == "output":
            count.tokens += sample.value
        case "interlingua_time_to_first_token_seconds_bucket":
            edge = float(sample.labels["le"])
            count.below[edge] = count.below.get(edge, 0) + sample.value
        case _:
            pass
