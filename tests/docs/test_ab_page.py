"""The page on A/B tests lists every metric of a version."""

import re
from pathlib import Path

from msgspec.structs import replace

from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.record import RequestRecord, ignore_record
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
_, _, TABLE = (HOWTO / "ab-test.md").read_text("utf-8").partition("## Metrics per version")
TABLE, _, _ = TABLE.partition("\n## ")


def test_page_lists_every_metric_of_a_version() -> None:
    documented = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE)))
    metrics = MetricsCollector(ignore_record, dict)
    losses = (UnsupportedParameter("top_k", "dropped"),)
    good = RequestRecord(
        "r",
        model="chat",
        version="1",
        split="s",
        fallback_from="chat@2",
        first_token=0.1,
        overhead=0.001,
        usage=Usage(2, 3),
        finish_reasons=("eos",),
        unsupported_parameters=losses,
    )
    metrics.record_request(good)
    cut = replace(good, outcome="truncated", error="StreamBroken", stream=True, tokens=3)
    metrics.record_request(cut)
    exported = set(
        re.findall(r"^interlingua_(\w+)\{.*split=", metrics.render_page().decode(), re.MULTILINE)
    )

    plain = {re.sub("_(bucket|sum|count)$", "", name) for name in exported}

    assert plain == set(documented)
