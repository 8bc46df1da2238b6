"""The page on usage knows every column and every count."""

import re
from pathlib import Path

from gateway.observability.metrics.system import DroppedRecordCollector
from gateway.observability.usage import GROUP_COLUMNS, USAGE_COLUMNS

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "usage.md").read_text("utf-8")


def test_every_column_is_told_of() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [name for name, _ in USAGE_COLUMNS]


def test_all_that_it_may_be_summed_by_is_told_of() -> None:
    [line] = re.findall(r"^`--by` takes (.*)$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == list(GROUP_COLUMNS)


def test_every_count_of_what_is_lost_is_told_of() -> None:
    counted = [
        one.name for one in DroppedRecordCollector({"log_lines": int, "usage_rows": int}).collect()
    ]
    assert sorted(set(re.findall(r"`(\w+_lost)_total`", PAGE))) == sorted(counted)
