"""Faults of one version are found in the right direction by ``ab``, rollouts and ``compare``.

The series of ``make evidence`` (docs/evidence.md) has many more runs of the same.
"""

from pathlib import Path

import pytest

from tests.evidence.series import Fault, run_series


@pytest.mark.parametrize(
    ("fault", "measure", "guardrail", "paired"),
    [
        ("errors", "failed: worse", "errors: ", "failed requests: worse"),
        pytest.param(
            "slower",
            "time to first token",
            "first_token_p50: ",
            "first token",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "broken JSON", "", "json_valid: ", "valid JSON: worse", marks=pytest.mark.slow
        ),
    ],
)
async def test_fault_of_version_2_is_found_as_worse(
    tmp_path: Path, fault: Fault, measure: str, guardrail: str, paired: str
) -> None:
    """Requests that fail, or texts that are no JSON, become four or five times as many.

    The worker of version 2 waits twice as long before it answers.

    ``ab`` looks at errors and times only. The rollout tells how many requests it took.
    """
    [result] = await run_series(tmp_path, fault, runs=1, requests=1000, pairs=300)
    assert result.ab.startswith(measure)
    assert not result.ab or result.ab.endswith(": worse")
    assert result.rollout.startswith(guardrail)
    assert result.rollout.endswith(" requests")
    assert 0 < result.rollout_requests <= 1000
    assert result.rollout_seconds > 0
    assert paired in result.compare
