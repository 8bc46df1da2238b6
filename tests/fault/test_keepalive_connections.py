"""A worker closes keep-alive connections in use: no client notices (fault 17)."""

import asyncio
import random

import pytest

from tests.conftest import Serve
from tests.fault.protocol_clients import (
    CLIENTS,
    build_good_reply,
    create_raw_worker,
    get_worker_reports,
    serve_gateway,
)
from tests.support.fakes import CLOSE, RESET, Step

PAIRS = 125
"""Pairs of requests from each of four clients: 500 for each protocol to close, 1,000 in all."""


@pytest.mark.fault(17)
@pytest.mark.parametrize("how", [CLOSE, RESET], ids=["closed", "reset"])
async def test_connection_closed_during_reuse_loses_no_request(serve: Serve, how: Step) -> None:
    """The worker closes each connection about 2 ms after a response, as a request is sent."""
    rng = random.Random(17)
    script = [
        [*build_good_reply(stream=False), rng.uniform(0.0, 0.004), how] for _ in range(4 * PAIRS)
    ]

    async with create_raw_worker(*script) as worker:
        gateway = await serve_gateway(serve, worker)

        async def one_after_another(number: int) -> list[int]:
            pauses = random.Random(number)
            path, body = CLIENTS[0].protocol.call("m", stream=False)
            codes = []
            for _ in range(PAIRS):
                response = await gateway.http.post(path, content=body)
                codes.append(response.status_code)
                await asyncio.sleep(pauses.uniform(0.0, 0.004))
            return codes

        statuses = await asyncio.gather(*map(one_after_another, range(4)))
        [report] = get_worker_reports(gateway)

    assert {status for codes in statuses for status in codes} == {200}
    assert [record.outcome for record in gateway.records] == ["ok"] * 4 * PAIRS
    assert worker.request_count >= 4 * PAIRS
    assert (report.state, report.error, report.in_flight) == ("up", "", 0)
