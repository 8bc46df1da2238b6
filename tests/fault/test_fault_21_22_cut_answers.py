"""An answer stops before its end: the client is told, and never given an end (21, 22)."""

import pytest

from tests.conftest import Serve
from tests.fakes import CHUNKED, CLOSE, END, RESET, Reply, chunk, head
from tests.fault.fronts import (
    CHAT,
    HELLO,
    SAYS,
    WHOLE,
    Client,
    answer,
    ask,
    assert_refused,
    assert_told,
    before,
    crossed,
    one_record,
    raw,
    reports,
)

BODY = answer("Hello")
PLAIN = head(content_type="text/event-stream")
"""Of an answer that ends with its connection."""
CUT: dict[str, Reply] = {
    "21 before the last chunk": [SAYS, CLOSE],
    "21 in a pause": [SAYS, 0.05, CLOSE],
    "21 by a reset": [SAYS, 0.05, RESET],
    "21 inside a chunk": [SAYS, b"ff\r\ndata: {", CLOSE],
    "21 inside a chunk's size": [SAYS, b"f", CLOSE],
    "21 inside an event": [SAYS, chunk(b"data: {"), END],
    "21 after its last chunk": [SAYS, END],
    "22 after an event": [PLAIN + HELLO, CLOSE],
    "22 in a pause": [PLAIN + HELLO, 0.05, CLOSE],
    "22 inside an event": [PLAIN + HELLO + b"data: {", CLOSE],
}


@crossed(CUT, "21 in a pause", "22 after an event")
async def test_fault_21_22_a_stream_that_is_cut_is_told(
    serve: Serve, client: Client, case: Reply
) -> None:
    async with raw(case) as worker, raw(case) as other:
        front = await before(serve, worker, other)
        got = await ask(front, client, stream=True)
        record = await one_record(front)

    assert_told(got, client)
    assert (record.outcome, record.error, record.tokens) == ("truncated", "StreamBroken", 2)
    assert (worker.asked, other.asked) == (1, 0), "what was said is final"
    assert reports(front)[0].error == "disconnect"


WHOLES: dict[str, Reply] = {
    "21": [CHUNKED + chunk(BODY[:-9]), CLOSE],
    "21 but for the last chunk": [CHUNKED + chunk(BODY), CLOSE],
    "22": [head(content_type="application/json") + BODY[:-9], CLOSE],
}


@crossed(WHOLES, "21")
async def test_fault_21_22_a_whole_answer_that_is_cut_is_none(
    serve: Serve, client: Client, case: Reply
) -> None:
    async with raw(case) as worker:
        front = await before(serve, worker)
        got = await ask(front, client, stream=False)
        record = await one_record(front)

    assert_refused(got, *client.bad)
    assert (record.outcome, record.usage) == ("worker_error", None)


@pytest.mark.parametrize("reply", WHOLES.values(), ids=WHOLES)
async def test_fault_21_22_another_worker_makes_up_for_a_whole_answer(
    serve: Serve, reply: Reply
) -> None:
    async with raw(reply) as worker, raw([WHOLE]) as other:
        front = await before(serve, worker, other)
        got = await ask(front, CHAT, stream=False)

    assert got.status_code == 200
    assert (worker.asked, other.asked) == (1, 1)
