"""The Prometheus text format, version 0.0.4: reading a page of metrics and writing it again.

Samples keep their name and labels as one string, since merging pages needs no more than that and a
page may have thousands of them. ``parse_labels`` splits one of these strings.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, field
from prometheus_client.parser import text_string_to_metric_families

_SAMPLE: Final = re.compile(
    r"([A-Za-z_:][A-Za-z0-9_:]*)(\{.*\})?[ \t]+([^ \t]+)(?:[ \t]+-?[0-9]+)?[ \t]*"
)
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
}
_COMMENT_WORDS: Final = 3
"""Those before the text of a HELP or TYPE line: ``#``, the keyword and the name."""


class MetricFamily(Struct):
    """A metric: its HELP and TYPE lines, its type, and the value of each sample.

    A sample is called by its name and labels, as they stand on the page.
    """

    comments: list[str] = field(default_factory=list)
    type: str = "untyped"
    samples: dict[str, float] = field(default_factory=dict)


def parse_families(text: str) -> dict[str, MetricFamily]:
    """Read the metrics of a page, by name. Raises ValueError for a line that is no sample."""
    families: dict[str, MetricFamily] = {}
    current = ""
    for line in text.split("\n"):
        if line.startswith("#"):
            current = _read_comment(line, families) or current
        elif line.strip():
            if (match := _SAMPLE.fullmatch(line)) is None:
                raise ValueError(f"not a sample: {line[:80]!r}")
            name, labels, value = match.groups()
            if not _is_sample_of(name, current, families):
                current = name
            family = families.setdefault(current, MetricFamily())
            family.samples[name + (labels or "")] = float(value)
    return families


def _read_comment(line: str, families: dict[str, MetricFamily]) -> str | None:
    """Add a HELP or TYPE line to its metric and return the metric's name."""
    _, keyword, name, *rest = (*line.split(" ", _COMMENT_WORDS), "", "")
    if keyword not in ("HELP", "TYPE") or not name:
        return None
    family = families.setdefault(name, MetricFamily())
    family.comments.append(line)
    if keyword == "TYPE":
        family.type = rest[0]
    return name


def _is_sample_of(name: str, metric: str, families: Mapping[str, MetricFamily]) -> bool:
    if name == metric:
        return True
    suffixes = _SUFFIXES.get(families[metric].type, ()) if metric in families else ()
    return name.startswith(metric) and name[len(metric) :] in suffixes


def parse_labels(sample: str) -> tuple[str, dict[str, str]]:
    """Split a sample of ``MetricFamily.samples`` into its name and its labels, unescaped.

    Raises ValueError for malformed labels.
    """
    [family] = text_string_to_metric_families(f"{sample} 0\n")
    [parsed] = family.samples
    return parsed.name, parsed.labels


def format_families(families: Iterable[MetricFamily]) -> str:
    """Write a page of these metrics."""
    lines: list[str] = []
    for family in families:
        lines += family.comments
        lines += (f"{sample} {value}" for sample, value in family.samples.items())
    return "".join(f"{line}\n" for line in lines)
