"""The gateway meets the Cohere cases that need only a scripted model."""

import pytest

from tests.conformance.cases import Case
from tests.conformance.cohere import CASES
from tests.conformance.conftest import RunCase


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("cohere", case)


def test_case_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
