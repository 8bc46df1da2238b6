"""The experiments of a configuration: which splits they are, and whether the counts must fit."""

import pytest

from gateway.config.loader import load_text
from gateway.evidence import experiments
from gateway.evidence.experiments import Experiment, list_experiments
from gateway.observability.record import RequestRecord
from gateway.observability.usage import UsageExtract, build_usage_row

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{echo: {{kind: echo}}}}
models:
  chat:
    versions: {{"1": {{backend: echo}}, "2": {{backend: echo}}}}
    split: {{weights: {weights}}}
    {rollout}
observe: {{usage: usage.sqlite}}
"""


def report(monkeypatch: pytest.MonkeyPatch, weights: str, rollout: str = "") -> list[Experiment]:
    """Report the experiments of a configuration after 200 requests to each version."""
    rows = [
        build_usage_row(
            RequestRecord(
                id=f"{version}-{n}",
                protocol="openai",
                started_at=float(n),
                model="chat",
                version=version,
                split="chat",
                outcome="ok",
            )
        )
        for n in range(200)
        for version in ("1", "2")
    ]
    extract = UsageExtract(["chat"], rows, [])
    monkeypatch.setattr(experiments, "read_sqlite_usage", lambda *_: extract)
    text = CONFIG.format(weights=weights, rollout=rollout)
    return list_experiments(load_text(text, "g.yaml", env={}))


def test_counts_that_do_not_fit_the_weights_are_implausible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [one] = report(monkeypatch, '{"1": 99, "2": 1}')
    assert not one.is_plausible


@pytest.mark.parametrize("weights", ['{"1": 99, "2": 1}', '{"1": 100, "2": 0}'])
def test_model_with_a_rollout_is_compared_without_its_weights(
    monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    [one] = report(monkeypatch, weights, 'rollout: {to: "2"}')
    assert (one.ratio, one.is_plausible, one.problem) == (None, True, "")
    assert [version.assigned for version in one.versions] == [200, 200]
    assert len(one.reports) == 1


def test_split_with_one_version_is_no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(monkeypatch, '{"1": 100, "2": 0}') == []
