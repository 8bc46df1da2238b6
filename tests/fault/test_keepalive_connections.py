"""A worker closes connections that it was thought to keep: no client notices (fault 17)."""

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
"""Of requests in a row from each of four clients: 500 for each way to close, 1,000 in all."""


@pytest.mark.fault(17)
@pytest.mark.parametrize("how", [CLOSE, RESET], ids=["closed", "reset"])
async def test_connection_closed_during_reuse_loses_no_request(serve: Serve, how: Step) -> None:
    """The worker ends each connection some 2 ms after an answer; requests come about then."""
    luck = random.Random(17)
    script = [
        [*build_good_reply(stream=False), luck.uniform(0.0, 0.004), how] for _ in range(4 * PAIRS)
    ]
    async with create_raw_worker(*script) as worker:
        front = await serve_gateway(serve, worker)

        async def one_after_another(number: int) -> list[int]:
            pauses = random.Random(number)
            path, body = CLIENTS[0].way.call("m", stream=False)
            got = []
            for _ in range(PAIRS):
                answer = await front.http.post(path, content=body)
                got.append(answer.status_code)
                await asyncio.sleep(pauses.uniform(0.0, 0.004))
            return got

        statuses = await asyncio.gather(*map(one_after_another, range(4)))
        [report] = get_worker_reports(front)

    assert {status for got in statuses for status in got} == {200}
    assert [record.outcome for record in front.records] == ["ok"] * 4 * PAIRS
    assert worker.request_count >= 4 * PAIRS
    assert (report.state, report.error, report.in_flight) == ("up", "", 0)
