"""The page of all metrics: what each is called, counts, and is told by."""

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.reference.markdown import MADE, code, table
from gateway.told import Merged, Told

_INTRO: Final = """# Metrics

What the admin listener tells under `/metrics`, in Prometheus's text format. Times are in seconds,
sizes in bytes. Labels hold configured names only, never a key itself, a client or a text; a model
`*` takes any name, and past a bound these are all `_other`.

A histogram has `_bucket`, `_sum` and `_count`. What has nothing to tell yet is not there, but for
its name.

With several processes their pages are added up to one; a gauge says below where it is not.
"""
_MERGED: Final[Mapping[Merged, str]] = {
    "sum": "",
    "largest": "the largest",
    "smallest": "the smallest",
    "supervisor": "told by the supervisor",
}


def page(parts: Mapping[str, Sequence[Told]]) -> str:
    """The page. ``parts`` are the metrics, by what they are about."""
    head = ("name", "type", "labels", "meaning", "of several processes")
    told = [MADE, "", _INTRO]
    for name, metrics in parts.items():
        told += [f"## {name}", "", table(head, map(_row, metrics))]
    return "\n".join(told)


def _row(one: Told) -> tuple[str, ...]:
    labels = ", ".join(map(code, one.labels))
    return code(one.shown), one.kind, labels, one.help, _MERGED[one.merged]
