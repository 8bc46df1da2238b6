"""Many processes' figures as one's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field

_LARGEST: Final = frozenset({"interlingua_worker_up"})
"""What is not counted together: it is so where it is so in one process."""
_SUMMED: Final = frozenset({"in_flight", "limit"})
"""Of what is told of a worker; the rest is what the first process tells."""
_OWN: Final = "interlingua_config_"
"""What is known of reloads, the supervisor knows."""


class _Family(Struct):
    """A metric: its lines of comment, and its samples by their name and labels."""

    heads: Sequence[str]
    kind: str = ""
    samples: dict[str, float] = field(default_factory=dict)


class Page:
    """Metrics in Prometheus's text format, to which others' are added."""

    def __init__(self, text: str = "") -> None:
        self.families: dict[str, _Family] = {}
        name = ""
        for line in text.splitlines():
            if not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                self.families[name].samples[sample] = float(value)
                continue
            _, what, name, said = line.split(" ", 3)
            family = self.families.setdefault(name, _Family([]))
            family.heads = [*family.heads, line]
            family.kind = said if what == "TYPE" else family.kind

    def add(self, other: "Page") -> None:
        """Count another process's figures into these."""
        for name, theirs in other.families.items():
            if name.startswith(_OWN):
                continue
            ours = self.families.setdefault(name, _Family(theirs.heads, theirs.kind)).samples
            for sample, value in theirs.samples.items():
                had = ours.get(sample, 0.0)
                ours[sample] = max(had, value) if name in _LARGEST else had + value

    def counts(self) -> "Page":
        """What of it only grows: counters and histograms."""
        page = Page()
        page.families = {name: one for name, one in self.families.items() if one.kind != "gauge"}
        return page

    def text(self) -> str:
        """As Prometheus reads it."""
        lines: list[str] = []
        for family in self.families.values():
            lines += family.heads
            lines += (f"{sample} {value}" for sample, value in family.samples.items())
        return "".join(f"{line}\n" for line in lines)


def workers(told: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """What all processes tell of each backend's workers: what they have of it is added up."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for backends in told:
        for name, reports in backends.items():
            known = merged.setdefault(name, {})
            for report in reports:
                url = report["url"]
                known[url] = _joined(known[url], report) if url in known else dict(report)
    return {name: [*known.values()] for name, known in merged.items()}


def _joined(known: dict[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    both = (name for name in _SUMMED if known[name] is not None and report[name] is not None)
    return known | {name: known[name] + report[name] for name in both}
