"""The gateway meets the MindIE cases of two releases."""

import httpx
import pytest

from tests.conformance.cases import Case, run_case
from tests.conformance.conftest import FindGateway
from tests.conformance.mindie import CASES


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(find_gateway: FindGateway, case: Case) -> None:
    gateway, url = await find_gateway("mindie", case)

    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        await run_case(http, case)

    assert all(backend.running == 0 for backend in gateway.app.backends.values())  # type: ignore[attr-defined]


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    assert {case.number for case in CASES} == {f"MI-{n:02}" for n in range(1, 51)}
    assert len({case.id for case in CASES}) == len(CASES)
