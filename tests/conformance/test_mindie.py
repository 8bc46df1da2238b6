"""The cases of the wire document, in two releases."""

import httpx
import pytest

from tests.conformance.cases import Case, play
from tests.conformance.conftest import configuration
from tests.conformance.mindie import CASES
from tests.conftest import Serve


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(serve: Serve, case: Case) -> None:
    text, prefix = configuration("mindie", case)
    gateway = await serve(text)

    async with httpx.AsyncClient(base_url=gateway.url + prefix, timeout=30) as http:
        await play(http, case)

    assert all(backend.running == 0 for backend in gateway.app.backends.values())  # type: ignore[attr-defined]


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    assert {case.number for case in CASES} == {f"MI-{n:02}" for n in range(1, 51)}
    assert len({case.id for case in CASES}) == len(CASES)
