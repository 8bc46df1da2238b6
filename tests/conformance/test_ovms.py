"""The gateway meets the OVMS cases."""

import pytest

from tests.conformance.cases import Case
from tests.conformance.conftest import RunCase
from tests.conformance.ovms import CASES


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("ovms", case)


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    assert {case.number for case in CASES} == {f"OV-{n:02}" for n in range(1, 51)}
    assert len({case.id for case in CASES}) == len(CASES)
