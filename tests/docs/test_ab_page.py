"""The page on A/B tests lists every metric of a version."""

import re
from pathlib import Path

from msgspec.structs import replace

from gateway.core.loss import Loss
from gateway.core.types import Usage
from gateway.metrics import Metrics
from gateway.telemetry import Record, silent

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
_, _, TABLE = (HOWTO / "ab-test.md").read_text("utf-8").partition("## Metrics per version")
TABLE, _, _ = TABLE.partition("\n## ")


def test_every_metric_of_a_version_is_listed() -> None:
    told = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE)))
    metrics = Metrics(silent, dict)
    losses = (Loss("top_k", "dropped"),)
    good = Record(
        "r",
        model="chat",
        version="1",
        split="s",
        diverted="chat@2",
        first_token=0.1,
        overhead=0.001,
        usage=Usage(2, 3),
        finish=("eos",),
        losses=losses,
    )
    metrics.observe(good)
    cut = replace(good, outcome="truncated", error="StreamBroken", stream=True, tokens=3)
    metrics.observe(cut)
    counted = set(
        re.findall(r"^interlingua_(\w+)\{.*split=", metrics.page().decode(), re.MULTILINE)
    )
    plain = {re.sub("_(bucket|sum|count)$", "", name) for name in counted}
    assert plain == set(told)
