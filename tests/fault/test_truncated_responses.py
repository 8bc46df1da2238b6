"""A response stops before its end: the client gets an error and no end mark (21, 22)."""

import pytest

from tests.conftest import Serve
from tests.fault.protocol_clients import (
    CHAT,
    HELLO,
    STARTED_STREAM,
    UNARY_RESPONSE,
    Client,
    assert_error_in_stream,
    assert_error_response,
    build_response_body,
    create_raw_worker,
    get_single_record,
    get_worker_reports,
    parametrize_cases,
    send_request,
    serve_gateway,
)
from tests.support.fakes import CHUNKED, CLOSE, END, RESET, Reply, chunk, head

BODY = build_response_body("Hello")
PLAIN = head(content_type="text/event-stream")
"""The head of a response that ends with its connection."""
CUT: dict[str, Reply] = {
    "21 before the last chunk": [STARTED_STREAM, CLOSE],
    "21 in a pause": [STARTED_STREAM, 0.05, CLOSE],
    "21 by a reset": [STARTED_STREAM, 0.05, RESET],
    "21 inside a chunk": [STARTED_STREAM, b"ff\r\ndata: {", CLOSE],
    "21 inside a chunk's size": [STARTED_STREAM, b"f", CLOSE],
    "21 inside an event": [STARTED_STREAM, chunk(b"data: {"), END],
    "21 after its last chunk": [STARTED_STREAM, END],
    "22 after an event": [PLAIN + HELLO, CLOSE],
    "22 in a pause": [PLAIN + HELLO, 0.05, CLOSE],
    "22 inside an event": [PLAIN + HELLO + b"data: {", CLOSE],
}


@pytest.mark.fault(21, 22)
@parametrize_cases(CUT, "21 in a pause", "22 after an event")
async def test_truncated_stream_ends_with_an_error(
    serve: Serve, client: Client, case: Reply
) -> None:
    async with create_raw_worker(case) as worker, create_raw_worker(case) as other:
        gateway = await serve_gateway(serve, worker, other)
        response = await send_request(gateway, client, stream=True)
        record = await get_single_record(gateway)

    assert_error_in_stream(response, client)
    assert (record.outcome, record.error, record.tokens) == ("truncated", "StreamBroken", 2)
    assert (worker.request_count, other.request_count) == (1, 0), "the text that was sent is final"
    assert get_worker_reports(gateway)[0].error == "disconnect"


COMPLETE_RESPONSES: dict[str, Reply] = {
    "21": [CHUNKED + chunk(BODY[:-9]), CLOSE],
    "21 but for the last chunk": [CHUNKED + chunk(BODY), CLOSE],
    "22": [head(content_type="application/json") + BODY[:-9], CLOSE],
}


@pytest.mark.fault(21, 22)
@parametrize_cases(COMPLETE_RESPONSES, "21")
async def test_truncated_unary_response_is_an_error(
    serve: Serve, client: Client, case: Reply
) -> None:
    async with create_raw_worker(case) as worker:
        gateway = await serve_gateway(serve, worker)
        response = await send_request(gateway, client, stream=False)
        record = await get_single_record(gateway)

    assert_error_response(response, *client.bad)
    assert (record.outcome, record.usage) == ("worker_error", None)


@pytest.mark.fault(21, 22)
@pytest.mark.parametrize("reply", COMPLETE_RESPONSES.values(), ids=COMPLETE_RESPONSES)
async def test_truncated_unary_response_is_retried_on_another_worker(
    serve: Serve, reply: Reply
) -> None:
    async with create_raw_worker(reply) as worker, create_raw_worker([UNARY_RESPONSE]) as other:
        gateway = await serve_gateway(serve, worker, other)
        response = await send_request(gateway, CHAT, stream=False)

    assert response.status_code == 200
    assert (worker.request_count, other.request_count) == (1, 1)
