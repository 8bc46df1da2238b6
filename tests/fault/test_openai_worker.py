"""A pool with the OpenAI protocol and a worker that violates it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from time import monotonic

import msgspec
import pytest
from msgspec.structs import replace

from backends.interfaces import PreparedRequest, collect_items
from backends.pool.pool import PoolBackend
from backends.pool.settings import (
    BasicAuthSettings,
    HeaderAuthSettings,
    PoolSettings,
    QueryAuthSettings,
    WorkerAuthSettings,
    WorkerSourceSettings,
)
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import (
    GatewayError,
    RateLimitExceeded,
    StreamBroken,
    WorkerError,
    WorkerFailed,
)
from protocols.core.events import Event, StreamEnd, Usage
from protocols.core.request import GenerationRequest
from protocols.core.units import Secret
from protocols.openai.endpoints import OpenAI
from tests.fault.line_protocol import SOON, build_context, collect_events, join_text
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    END,
    HANG,
    Reply,
    ScriptedWorker,
    chunk,
    head,
    make_reply,
)
from tests.support.waiting import PATIENCE

STREAMED = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)
UNARY = replace(STREAMED, stream=False)
KEY = "s3cret"


def build_completion_event(**fields: object) -> bytes:
    """Build one event of a completion."""
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None} | fields
    base = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
    return b"data: " + msgspec.json.encode({**base, "choices": [choice]}) + b"\n\n"


HELLO = build_completion_event(text="Hello")
STOP = build_completion_event(finish_reason="stop")
ERROR = b'data: {"error":{"message":"x"}}\n\n'
BAD = b"data: {nope\n\n"
DONE = b"data: [DONE]\n\n"
FULL_HELLO = msgspec.json.encode(
    {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)


@asynccontextmanager
async def run_openai_pool(
    *workers: ScriptedWorker, base_path: str = "", auth: WorkerAuthSettings | None = None
) -> AsyncIterator[PoolBackend]:
    auth = auth or WorkerAuthSettings(Secret(KEY))
    sources = tuple(WorkerSourceSettings(one.url + base_path, auth=auth) for one in workers)
    pool = PoolBackend(
        PoolSettings(protocol="openai", workers=sources, timeouts=SOON),
        adapter=OpenAI(),
        clock=monotonic,
        draw=Random(7).random,
        has_health_checks=False,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()


def build_stream(*events: bytes) -> bytes:
    return CHUNKED + b"".join(map(chunk, events))


async def test_streamed_and_unary_responses_have_the_same_content() -> None:
    async with (
        ScriptedWorker([build_stream(HELLO, STOP, DONE) + END], [make_reply(FULL_HELLO)]) as worker,
        run_openai_pool(worker) as pool,
    ):
        answers = []
        for request in (STREAMED, UNARY):
            fold = ResponseAccumulator()
            fold.add(await collect_events(pool, request))
            answers.append(fold.result())

    assert [one.choices[0].text for one in answers] == ["Hello", "Hello"]
    assert [one.choices[0].finish_reason for one in answers] == ["eos", "eos"]
    assert answers[1].usage == Usage(1, 1)


async def test_a_unary_response_has_the_items_of_send_and_frees_its_worker() -> None:
    async with (
        ScriptedWorker([make_reply(FULL_HELLO)], [make_reply(FULL_HELLO)]) as worker,
        run_openai_pool(worker) as pool,
    ):
        prepared = PreparedRequest(UNARY)
        items = await pool.send_unary(prepared, build_context())

        assert items == await collect_items(pool.send(prepared, build_context()))
        assert [one.in_flight for one in pool.report_workers()] == [0]


async def test_a_unary_request_that_is_cancelled_frees_its_worker() -> None:
    async with ScriptedWorker([HANG]) as worker, run_openai_pool(worker) as pool:
        sending = asyncio.create_task(pool.send_unary(PreparedRequest(UNARY), build_context()))
        while not worker.requests:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)

        sending.cancel()

        with pytest.raises(asyncio.CancelledError):
            await sending
        assert [one.in_flight for one in pool.report_workers()] == [0]


@pytest.mark.parametrize(
    ("auth", "query", "header"),
    [
        (WorkerAuthSettings(bearer=Secret(KEY)), "", ("authorization", f"Bearer {KEY}")),
        (
            WorkerAuthSettings(header=HeaderAuthSettings("api-key", Secret(KEY))),
            "",
            ("api-key", KEY),
        ),
        (WorkerAuthSettings(query=QueryAuthSettings("key", Secret(KEY))), f"?key={KEY}", None),
        (
            WorkerAuthSettings(basic=BasicAuthSettings("me", Secret(KEY))),
            "",
            ("authorization", "Basic bWU6czNjcmV0"),
        ),
    ],
)
@pytest.mark.parametrize(
    ("base_path", "path"),
    [
        ("/api/paas/v4", "/api/paas/v4/completions"),
        ("/v1beta/openai", "/v1beta/openai/completions"),
        ("/v1", "/v1/completions"),
        ("/team", "/team/v1/completions"),
    ],
)
async def test_worker_below_another_path_gets_its_kind_of_credentials(
    base_path: str,
    path: str,
    auth: WorkerAuthSettings,
    query: str,
    header: tuple[str, str] | None,
) -> None:
    """This holds for a new connection and for a reused one."""
    async with (
        ScriptedWorker([make_reply(FULL_HELLO)], [make_reply(FULL_HELLO)]) as worker,
        run_openai_pool(worker, base_path=base_path, auth=auth) as pool,
    ):
        for _ in range(2):
            async for _ in pool.send(PreparedRequest(UNARY), build_context()):
                pass

    assert [one.connection for one in worker.requests] == [0, 0]

    for request in worker.requests:
        assert request.path == path + query
        credentials = {"authorization", "api-key"} & request.headers.keys()
        assert [(name, request.headers[name]) for name in credentials] == [header] * bool(header)


async def test_upstream_request_has_only_the_expected_headers() -> None:
    async with (
        ScriptedWorker([make_reply(FULL_HELLO)]) as worker,
        run_openai_pool(worker) as pool,
    ):
        who = build_context(traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        async for _ in pool.send(PreparedRequest(UNARY), who):
            pass
        odd = replace(who, id="bad id\r\nx: y", traceparent=None)
        async for _ in pool.send(PreparedRequest(UNARY), odd):
            pass

    first, second = worker.requests
    assert first.path == "/v1/completions"
    assert first.headers == {
        "host": worker.url.removeprefix("http://"),
        "content-type": "application/json",
        "content-length": str(len(first.body)),
        "accept-encoding": "identity",
        "authorization": f"Bearer {KEY}",
        "x-request-id": "req-1",
        "traceparent": who.traceparent,
    }
    assert second.headers.keys() == first.headers.keys() - {"x-request-id", "traceparent"}


MIB = b"x" * (1 << 20)
FAILURES: list[tuple[str, Reply, type[GatewayError], str]] = [
    ("cut mid-stream", [build_stream(HELLO), CLOSE], StreamBroken, "Hello"),
    ("no end", [build_stream(HELLO) + END], StreamBroken, "Hello"),
    ("ended by the close", [head() + HELLO, CLOSE], StreamBroken, "Hello"),
    ("invalid JSON", [build_stream(HELLO), 0.05, chunk(BAD) + END], WorkerFailed, "Hello"),
    ("an error", [build_stream(HELLO), 0.05, chunk(ERROR) + END], WorkerFailed, "Hello"),
    ("an endless event", [CHUNKED, chunk(b"data: "), *[chunk(MIB)] * 33], WorkerError, ""),
    ("a page", [make_reply(b"<html></html>")], WorkerError, ""),
    ("500", [make_reply(b'{"error":{"message":"boom"}}', "500 Oops")], WorkerFailed, ""),
    ("503", [make_reply(b"overloaded", "503 Busy")], GatewayError, ""),
    ("429", [make_reply(b"{}", "429 Busy", Retry_After="7")], RateLimitExceeded, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [case[1:] for case in FAILURES],
    ids=[case[0] for case in FAILURES],
)
async def test_failure_is_raised_after_the_received_events(
    reply: Reply, error: type[GatewayError], message: str
) -> None:
    events: list[Event] = []
    async with ScriptedWorker(reply) as worker, run_openai_pool(worker) as pool:
        with pytest.raises(error):
            await collect_events(pool, STREAMED, events)

    assert join_text(events) == message
    assert not any(isinstance(event, StreamEnd) for event in events)


async def test_stream_end_is_reported_before_the_http_body_ends() -> None:
    """Bytes after the protocol's end can neither break the response nor delay its end."""
    never = asyncio.Event()
    async with (
        ScriptedWorker([build_stream(HELLO, STOP, DONE), never]) as worker,
        run_openai_pool(worker) as pool,
    ):
        events: list[Event] = []
        async with asyncio.timeout(PATIENCE):
            async for _, batch in pool.send(PreparedRequest(STREAMED), build_context()):
                events += batch
                if isinstance(events[-1], StreamEnd):
                    break

    assert join_text(events) == "Hello"


AFTER: list[tuple[Reply, bool]] = [
    ([CLOSE], False),
    ([HANG], False),
    ([0.05, b"zz"], False),
    ([chunk(HELLO), END], True),
    ([0.05, END], True),
]
"""Steps after the end of a response, and whether the connection can be reused."""


@pytest.mark.parametrize(("after", "reused"), AFTER)
async def test_failure_after_the_stream_end_does_not_affect_the_response(
    after: Reply, *, reused: bool
) -> None:
    first = [build_stream(HELLO, STOP, DONE), *after]
    async with (
        ScriptedWorker(first, [make_reply(FULL_HELLO)]) as worker,
        run_openai_pool(worker) as pool,
        asyncio.timeout(30),
    ):
        events = await collect_events(pool, STREAMED)
        assert join_text(await collect_events(pool, UNARY)) == "Hello"

    assert join_text(events) == "Hello"
    assert sum(isinstance(event, StreamEnd) for event in events) == 1
    assert (worker.requests[1].connection == 0) == reused
