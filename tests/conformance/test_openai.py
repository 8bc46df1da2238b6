"""The gateway meets the OpenAI cases."""

import pytest

from tests.conformance.azure import NUMBERS
from tests.conformance.cases import Case
from tests.conformance.conftest import RunCase
from tests.conformance.openai import CASES


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("openai", case)


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    several = {41, 52, 53, 56}  # need several requests: tests/integration/test_responses_api.py
    responses = {f"RS-{n:02}" for n in range(1, 61) if n not in several}

    assert {case.number for case in CASES} == {f"W{n}" for n in range(1, 84)} | responses | NUMBERS
    assert len({case.id for case in CASES}) == len(CASES)
