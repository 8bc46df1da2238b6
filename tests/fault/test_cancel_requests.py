"""A protocol with cancel requests: one is sent when a response is abandoned."""

import asyncio
from contextlib import aclosing, suppress

import msgspec
import pytest

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import WorkerConfig, make_bearer_credentials
from backends.interfaces import PreparedRequest, Timeouts
from backends.pool.side_requests import CancelSender
from protocols.core.errors import GatewayError
from protocols.core.interfaces import UpstreamRequest
from protocols.core.request import GenerationRequest, Request
from tests.fault.line_protocol import (
    STREAMED,
    UNARY,
    LineProtocol,
    build_context,
    collect_events,
    encode_line,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    HANG,
    RESET,
    Reply,
    ScriptedWorker,
    chunk,
    make_reply,
)

OK: Reply = [make_reply(b"{}")]
STARTED_STREAM = CHUNKED + chunk(encode_line("Hello"))
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)


class CancellableProtocol(LineProtocol):
    """The line protocol with request ids, and a request that cancels by id."""

    def encode_request(self, request: Request) -> UpstreamRequest:
        return UpstreamRequest("/say", msgspec.json.encode({"id": request.client_id}))

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        return UpstreamRequest("/stop", msgspec.json.encode({"id": request.client_id}))


REQUEST = GenerationRequest(
    model="m", kind="completion", prompts=("hi",), stream=True, client_id="the client's own"
)
CANCELLED: list[tuple[str, Reply, GenerationRequest]] = [
    ("before the head", [HANG], REQUEST),
    ("mid-stream", [STARTED_STREAM, HANG], REQUEST),
    ("before a unary response", [HANG], UNARY),
]


@pytest.mark.parametrize(
    ("reply", "client_request"), [one[1:] for one in CANCELLED], ids=[one[0] for one in CANCELLED]
)
async def test_client_disconnect_sends_a_cancel_request(
    reply: Reply, client_request: GenerationRequest
) -> None:
    async with (
        ScriptedWorker(reply, OK) as worker,
        run_pool(
            WorkerConfig(worker.url, credentials=make_bearer_credentials("s3cret")),
            adapter=CancellableProtocol(),
        ) as backend,
    ):
        task = asyncio.get_running_loop().create_task(collect_events(backend, client_request))
        await worker.wait_for_request()
        await asyncio.sleep(0.05)
        task.cancel()
        await worker.wait_for_request(2)

    generate, stop = worker.requests
    assert (generate.path, stop.path) == ("/say", "/stop")
    assert stop.body == generate.body
    assert msgspec.json.decode(stop.body)["id"].startswith("req-1-")
    assert stop.headers["authorization"] == "Bearer s3cret"
    assert stop.connection != generate.connection


async def test_closing_the_stream_sends_a_cancel_request() -> None:
    async with (
        ScriptedWorker([STARTED_STREAM, HANG], OK) as worker,
        run_pool(worker.url, adapter=CancellableProtocol()) as backend,
    ):
        async with aclosing(backend.send(PreparedRequest(STREAMED), build_context())) as batches:
            await anext(batches)
        await worker.wait_for_request(2)

    assert worker.requests[1].path == "/stop"


async def test_each_attempt_has_its_own_request_id() -> None:
    async with (
        ScriptedWorker([reply_text("Hello")]) as worker,
        run_pool(worker.url, adapter=CancellableProtocol()) as backend,
    ):
        for _ in range(3):
            await collect_events(backend)

    assert len({request.body for request in worker.requests}) == 3


async def test_timed_out_worker_gets_a_cancel_request_and_another_serves() -> None:
    async with (
        ScriptedWorker([HANG], OK) as slow,
        ScriptedWorker([reply_text("Hello")]) as good,
        run_pool(
            slow.url, good.url, adapter=CancellableProtocol(), timeouts=HASTY, policy="round_robin"
        ) as backend,
    ):
        assert join_text(await collect_events(backend)) == "Hello"
        await slow.wait_for_request(2)

    assert [request.path for request in slow.requests] == ["/say", "/stop"]


OVER: list[tuple[str, Reply]] = [
    ("error event", [reply_text("Hello")]),
    ("error event, and a body that goes on", [STARTED_STREAM + chunk(b"end\n"), HANG]),
    ("refused", [make_reply(b"{}", "500 Oops")]),
    ("cut", [STARTED_STREAM, CLOSE]),
    ("reset", [RESET]),
]


@pytest.mark.parametrize("reply", [one[1] for one in OVER], ids=[one[0] for one in OVER])
async def test_finished_request_gets_no_cancel_request(reply: Reply) -> None:
    limits = Timeouts(connect=1.0, first_token=1.0, idle=1.0, total=10.0)
    async with ScriptedWorker(reply, OK) as worker:
        async with run_pool(worker.url, adapter=CancellableProtocol(), timeouts=limits) as backend:
            with suppress(GatewayError):
                async with aclosing(
                    backend.send(PreparedRequest(STREAMED), build_context())
                ) as batches:
                    async for _ in batches:
                        pass

        stops = [request for request in worker.requests if request.path == "/stop"]
        assert len(stops) == (reply[-1:] == [HANG])


async def test_protocol_without_cancel_only_closes_the_connection() -> None:
    async with (
        ScriptedWorker([STARTED_STREAM, HANG], OK) as worker,
        run_pool(worker.url) as backend,
    ):
        async with aclosing(backend.send(PreparedRequest(STREAMED), build_context())) as batches:
            await anext(batches)
        await worker.wait_for_disconnect()
        await asyncio.sleep(0.1)

    assert worker.request_count == 1


async def test_pool_close_waits_for_pending_cancel_requests() -> None:
    async with ScriptedWorker([STARTED_STREAM, HANG], [0.2, *OK]) as worker:
        async with (
            run_pool(worker.url, adapter=CancellableProtocol()) as backend,
            aclosing(backend.send(PreparedRequest(STREAMED), build_context())) as batches,
        ):
            await anext(batches)

        assert worker.request_count == 2
        assert worker.active == 0


async def test_concurrent_cancel_requests_are_bounded() -> None:
    upstream = AsyncioHttpClient()
    await upstream.start()
    gate = asyncio.Event()
    async with ScriptedWorker([gate, CLOSE]) as worker:
        stopping = CancelSender(upstream)
        for _ in range(300):
            stopping.send(WorkerConfig(worker.url), UpstreamRequest("/stop", b""))
        await worker.wait_for_request(256)
        gate.set()
        await stopping.aclose()

    await upstream.aclose()

    assert worker.request_count == 256
