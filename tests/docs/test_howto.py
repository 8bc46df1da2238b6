"""The pages that a reader may follow to the letter."""

import re
from pathlib import Path

import pytest

from gateway.core.loss import Loss
from gateway.core.types import Usage
from gateway.metrics import Metrics
from gateway.telemetry import Record, silent
from tests.docs.pages import check

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
_, _, ARMS = (HOWTO / "ab-test.md").read_text("utf-8").partition("## What is counted of an arm")
ARMS, _, _ = ARMS.partition("\n## ")


@pytest.mark.parametrize(
    "name", ["ab-test", "processes", pytest.param("forms", marks=pytest.mark.slow)]
)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    check((HOWTO / f"{name}.md").read_text("utf-8"), folder)


def test_every_metric_of_an_arm_is_told_of() -> None:
    told = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", ARMS, re.MULTILINE)))
    metrics = Metrics(silent, dict)
    losses = (Loss("top_k", "dropped"),)
    metrics.observe(
        Record(
            "r",
            model="chat",
            version="1",
            split="s",
            diverted="chat@2",
            error="WorkerFailed",
            first_token=0.1,
            usage=Usage(2, 3),
            finish=("eos",),
            losses=losses,
        )
    )
    counted = set(
        re.findall(r"^interlingua_(\w+)\{.*split=", metrics.page().decode(), re.MULTILINE)
    )
    plain = {re.sub("_(bucket|sum|count)$", "", name) for name in counted}
    assert plain == set(told)
