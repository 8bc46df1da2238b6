"""The page on reloading lists every metric of it."""

import re
from pathlib import Path

from gateway.observability.metrics.reloads import ReloadCollector
from gateway.runtime.reload import ReloadResult

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "reload.md").read_text("utf-8")


def test_page_lists_every_reload_metric() -> None:
    reloads = ReloadCollector("hash", lambda: 0.0)
    reloads.record_reload(ReloadResult("hash"))
    exported = {sample.name for family in reloads.collect() for sample in family.samples}

    documented = set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE)) & exported

    assert {name for name in exported if not name.endswith("_created")} == documented
