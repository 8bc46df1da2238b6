"""A dialect with a request that stops another: it is sent when an answer is given up."""

import asyncio
from contextlib import aclosing, suppress

import msgspec
import pytest

from backends.http.client import AsyncioHttpClient
from backends.http.interfaces import WorkerConfig
from backends.interfaces import PreparedRequest, Timeouts
from backends.pool.side_requests import CancelSender
from protocols.core.errors import GatewayError
from protocols.core.interfaces import UpstreamRequest
from protocols.core.request import GenerationRequest, Request
from tests.fakes import CHUNKED, CLOSE, HANG, RESET, Reply, ScriptedWorker, chunk, chunked, whole
from tests.fault.lines import STREAMED, UNARY, Lines, context, heard, pool, say, text

GOOD = [chunked(say("Hello"), b"end\n")]
OK: Reply = [whole(b"{}")]
SAYS = CHUNKED + chunk(say("Hello"))
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)


class Stoppable(Lines):
    """Lines, whose requests carry their id, and which stops by it."""

    def encode_request(self, request: Request) -> UpstreamRequest:
        return UpstreamRequest("/say", msgspec.json.encode({"id": request.client_id}))

    def encode_cancel(self, request: Request) -> UpstreamRequest:
        return UpstreamRequest("/stop", msgspec.json.encode({"id": request.client_id}))


ASKED = GenerationRequest(
    model="m", kind="completion", prompts=("hi",), stream=True, client_id="the client's own"
)
GIVEN_UP: list[tuple[str, Reply, GenerationRequest]] = [
    ("before the head", [HANG], ASKED),
    ("mid-stream", [SAYS, HANG], ASKED),
    ("before a whole answer", [HANG], UNARY),
]


@pytest.mark.parametrize(
    ("reply", "asked"), [one[1:] for one in GIVEN_UP], ids=[one[0] for one in GIVEN_UP]
)
async def test_a_client_that_leaves_has_its_request_stopped(
    reply: Reply, asked: GenerationRequest
) -> None:
    async with (
        ScriptedWorker(reply, OK) as worker,
        pool(WorkerConfig(worker.url, bearer="s3cret"), dialect=Stoppable()) as backend,
    ):
        task = asyncio.get_running_loop().create_task(heard(backend, asked))
        await worker.until_asked()
        await asyncio.sleep(0.05)
        task.cancel()
        await worker.until_asked(2)

    said, stop = worker.requests
    assert (said.path, stop.path) == ("/say", "/stop")
    assert stop.body == said.body
    assert msgspec.json.decode(stop.body)["id"].startswith("req-1-")
    assert stop.headers["authorization"] == "Bearer s3cret"
    assert stop.connection != said.connection


async def test_a_consumer_that_stops_in_the_middle_has_it_stopped_too() -> None:
    async with (
        ScriptedWorker([SAYS, HANG], OK) as worker,
        pool(worker.url, dialect=Stoppable()) as backend,
    ):
        async with aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches:
            await anext(batches)
        await worker.until_asked(2)

    assert worker.requests[1].path == "/stop"


async def test_each_call_has_an_id_of_its_own() -> None:
    async with (
        ScriptedWorker(GOOD) as worker,
        pool(worker.url, dialect=Stoppable()) as backend,
    ):
        for _ in range(3):
            await heard(backend)

    assert len({request.body for request in worker.requests}) == 3


async def test_a_worker_that_is_too_slow_is_told_to_stop_and_another_goes_on() -> None:
    async with (
        ScriptedWorker([HANG], OK) as slow,
        ScriptedWorker(GOOD) as good,
        pool(
            slow.url, good.url, dialect=Stoppable(), timeouts=HASTY, policy="round_robin"
        ) as backend,
    ):
        assert text(await heard(backend)) == "Hello"
        await slow.until_asked(2)

    assert [request.path for request in slow.requests] == ["/say", "/stop"]


OVER: list[tuple[str, Reply]] = [
    ("told", GOOD[0:1]),
    ("told, and a body that goes on", [SAYS + chunk(b"end\n"), HANG]),
    ("refused", [whole(b"{}", "500 Oops")]),
    ("cut", [SAYS, CLOSE]),
    ("reset", [RESET]),
]


@pytest.mark.parametrize("reply", [one[1] for one in OVER], ids=[one[0] for one in OVER])
async def test_what_is_over_is_not_stopped(reply: Reply) -> None:
    limits = Timeouts(connect=1.0, first_token=1.0, idle=1.0, total=10.0)
    async with ScriptedWorker(reply, OK) as worker:
        async with pool(worker.url, dialect=Stoppable(), timeouts=limits) as backend:
            with suppress(GatewayError):
                async with aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches:
                    async for _ in batches:
                        pass

        stops = [request for request in worker.requests if request.path == "/stop"]
        assert len(stops) == (reply[-1:] == [HANG])


async def test_a_worker_in_another_dialect_is_only_left() -> None:
    async with ScriptedWorker([SAYS, HANG], OK) as worker, pool(worker.url) as backend:
        async with aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches:
            await anext(batches)
        await worker.until_left()
        await asyncio.sleep(0.1)

    assert worker.asked == 1


async def test_closing_waits_for_what_is_being_sent() -> None:
    async with ScriptedWorker([SAYS, HANG], [0.2, *OK]) as worker:
        async with (
            pool(worker.url, dialect=Stoppable()) as backend,
            aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches,
        ):
            await anext(batches)

        assert worker.asked == 2
        assert worker.active == 0


async def test_no_more_are_sent_at_a_time_than_a_bound_and_none_is_an_error() -> None:
    upstream = AsyncioHttpClient()
    await upstream.start()
    gate = asyncio.Event()
    async with ScriptedWorker([gate, CLOSE]) as worker:
        stopping = CancelSender(upstream)
        for _ in range(300):
            stopping.send(WorkerConfig(worker.url), UpstreamRequest("/stop", b""))
        await worker.until_asked(256)
        gate.set()
        await stopping.aclose()
    await upstream.aclose()

    assert worker.asked == 256
