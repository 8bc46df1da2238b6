"""The pages on usage and observability list every column and every count of dropped records."""

import re
from pathlib import Path

from gateway.observability.metrics.dropped import DroppedRecordCollector
from gateway.observability.usage import GROUP_COLUMNS, USAGE_COLUMNS

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = (HOWTO / "usage.md").read_text("utf-8")
OBSERVABILITY = (HOWTO / "observability.md").read_text("utf-8")


def test_page_lists_every_usage_column() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [name for name, _ in USAGE_COLUMNS]


def test_page_lists_every_grouping_column() -> None:
    [line] = re.findall(r"^`--by` takes (.*)$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == list(GROUP_COLUMNS)


def test_pages_list_every_dropped_record_metric() -> None:
    exported = [
        one.name for one in DroppedRecordCollector({"log_lines": int, "usage_rows": int}).collect()
    ]
    listed = set(
        re.findall(r"`(\w+_(?:log_lines|usage_rows)_dropped)_total`", PAGE + OBSERVABILITY)
    )

    assert sorted(listed) == sorted(exported)
