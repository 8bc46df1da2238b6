"""Whatever a worker sends, the client gets a correct response or an error."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from msgspec import Struct

from backends.interfaces import PreparedRequest, Timeouts
from protocols.core.errors import (
    DeadlineExceeded,
    GatewayError,
    RateLimitExceeded,
    StreamBroken,
    WorkerError,
    WorkerFailed,
)
from protocols.core.events import ChoiceEnd, Event, StreamEnd
from protocols.core.interfaces import ResponseDecoder
from protocols.core.request import GenerationRequest, Request
from tests.fault.line_protocol import (
    STREAMED,
    UNARY,
    CollectEvents,
    LineDecoder,
    LineProtocol,
    build_context,
    collect_events,
    each_consumer,
    encode_line,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    END,
    HANG,
    RESET,
    Reply,
    ScriptedWorker,
    chunk,
    chunked,
    head,
    make_reply,
)

HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)


async def collect_from_worker(
    *replies: Reply, collect: CollectEvents = collect_events
) -> list[Event]:
    """Return the events of a streamed request to a worker with this script."""
    async with ScriptedWorker(*replies) as worker, run_pool(worker.url) as backend:
        return await collect(backend)


@each_consumer
async def test_complete_response_has_exactly_one_stream_end(collect: CollectEvents) -> None:
    events = await collect_from_worker([reply_text("Hello", " world")], collect=collect)

    assert join_text(events) == "Hello world"
    assert [type(event) for event in events[-2:]] == [ChoiceEnd, StreamEnd]
    assert sum(isinstance(event, StreamEnd) for event in events) == 1


@pytest.mark.parametrize("encoding", ["", "identity", " , identity", "Identity, IDENTITY"])
async def test_response_without_an_encoding_is_read(encoding: str) -> None:
    """The list of encodings may be empty (RFC 9110, 5.6.1 and 8.4)."""
    reply = head(transfer_encoding="chunked", content_encoding=encoding)
    text = reply_text("Hello").partition(b"\r\n\r\n")[2]
    events = await collect_from_worker([reply + text])

    assert join_text(events) == "Hello"


async def test_only_allowed_protocol_headers_are_sent() -> None:
    async with (
        ScriptedWorker([reply_text("Hello", " world")]) as worker,
        run_pool(worker.url) as backend,
    ):
        await collect_events(backend)

    assert "content-type" in worker.requests[0].headers
    assert "x-secret" not in worker.requests[0].headers


# ── faulty responses ──────────────────────────────────────────────────────────────────────────────


class Fault(Struct, frozen=True):
    """What a worker writes, the events that the client gets, and the error that ends them."""

    name: str
    reply: Reply
    error: type[GatewayError]
    text: str = ""


STARTED_STREAM = chunk(encode_line("Hello"))
LINES = encode_line("Hello") + b"end\n"
BROKEN = [
    Fault("reset before the first byte", [RESET], StreamBroken),
    Fault("closed before the first byte", [CLOSE], StreamBroken),
    Fault("closed inside the status line", [b"HTTP/1.1 20", CLOSE], WorkerError),
    Fault("closed inside the headers", [b"HTTP/1.1 200 OK\r\nContent-", CLOSE], WorkerError),
    Fault("closed after the head", [CHUNKED, CLOSE], StreamBroken),
    Fault("cut mid-stream", [CHUNKED + STARTED_STREAM, CLOSE], StreamBroken, "Hello"),
    Fault(
        "cut later",
        [CHUNKED + STARTED_STREAM, 0.05, STARTED_STREAM, 0.05, CLOSE],
        StreamBroken,
        "HelloHello",
    ),
    Fault("reset mid-stream", [CHUNKED + STARTED_STREAM, 0.1, RESET], StreamBroken, "Hello"),
    Fault(
        "cut inside a chunk", [CHUNKED + STARTED_STREAM + b"ff\r\n{", CLOSE], StreamBroken, "Hello"
    ),
    Fault("cut before the last chunk", [CHUNKED + STARTED_STREAM, CLOSE], StreamBroken, "Hello"),
    Fault("a chunk of no size", [CHUNKED + STARTED_STREAM, 0.05, b"zz\r\n"], StreamBroken, "Hello"),
    Fault("no end in the protocol", [chunked(encode_line("Hello"))], StreamBroken, "Hello"),
    Fault("ended by the close", [head() + encode_line("Hello"), CLOSE], StreamBroken, "Hello"),
    Fault(
        "too short",
        [head(content_length="99") + encode_line("Hello"), CLOSE],
        StreamBroken,
        "Hello",
    ),
    Fault("too long", [head(content_length="9") + encode_line("Hello")], WorkerFailed),
    Fault(
        "two lengths",
        [b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\nContent-Length: 23\r\n\r\n" + LINES, HANG],
        WorkerFailed,
    ),
    Fault(
        "length and chunks",
        [head(content_length="22", transfer_encoding="chunked") + STARTED_STREAM + END],
        WorkerFailed,
    ),
    Fault("garbage", [b"\x00\xff hello\r\n\r\n", HANG], WorkerFailed),
    Fault("another protocol", [b"220 mail ready\r\n", HANG], WorkerFailed),
    Fault("HTTP of no version", [b"HTTP/9.x 200 OK\r\n\r\n", HANG], WorkerFailed),
    Fault("a header with a NUL", [b"HTTP/1.1 200 OK\r\na: b\x00c\r\n\r\n", HANG], WorkerFailed),
    Fault("a header of 70 KB", [head(a="x" * 70_000), HANG], WorkerFailed),
    Fault("1000 headers", [head(**{f"h{i}": "x" for i in range(1000)}), HANG], WorkerFailed),
    Fault("101", [head("101 Go On", upgrade="x", connection="upgrade")], WorkerFailed),
    Fault("204", [head("204 No Content")], WorkerFailed),
    Fault("500", [make_reply(b'{"error":"boom"}', "500 Internal Server Error")], WorkerFailed),
    Fault("invalid JSON", [chunked(encode_line("Hello"), b"{nope\n", b"end\n")], WorkerFailed),
    Fault("compressed", [make_reply(b"\x1f\x8b", content_encoding="gzip")], WorkerFailed),
    Fault("429", [make_reply(b"{}", "429 Too Many Requests", retry_after="7")], RateLimitExceeded),
]


@each_consumer
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
async def test_broken_response_raises_after_the_received_text(
    case: Fault, collect: CollectEvents
) -> None:
    events: list[Event] = []
    quick = Timeouts(connect=1.0, first_token=1.0, idle=1.0, total=10.0)
    async with (
        ScriptedWorker(case.reply) as worker,
        run_pool(worker.url, timeouts=quick) as backend,
    ):
        with pytest.raises(case.error) as excinfo:
            await collect(backend, into=events)

    assert join_text(events) == case.text
    assert not any(isinstance(event, StreamEnd) for event in events)
    assert "127.0.0.1" not in excinfo.value.message


async def test_retry_after_is_read_by_the_protocol_adapter() -> None:
    with pytest.raises(RateLimitExceeded) as excinfo:
        await collect_from_worker([make_reply(b"{}", "429 Too Many Requests", retry_after="7")])

    assert excinfo.value.retry_after == 7


ENDLESS = [
    (
        "too much",
        [head("500 Oops", transfer_encoding="chunked"), *[chunk(b"x" * 9999)] * 40],
        65536,
    ),
    ("too slow", [make_reply(b"x" * 99, "500 Oops")[:-50]], 49),
]


@pytest.mark.parametrize(("name", "reply", "read"), ENDLESS)
async def test_error_is_raised_before_the_error_body_ends(
    name: str, reply: Reply, read: int
) -> None:
    never = asyncio.Event()
    async with ScriptedWorker([*reply, never]) as worker, run_pool(worker.url) as backend:
        began = asyncio.get_running_loop().time()
        with pytest.raises(WorkerFailed, match=f"failed: {read} bytes"):
            await collect_events(backend, UNARY)
        took = asyncio.get_running_loop().time() - began

    assert took < (0.9 if name == "too much" else 3)


async def test_error_response_is_read_before_the_upload_ends() -> None:
    early: Reply = [make_reply(b"{}", "413 Content Too Large"), CLOSE]
    async with ScriptedWorker(early, read_body=False) as worker, run_pool(worker.url) as backend:
        with pytest.raises(WorkerFailed, match="the worker failed: 2 bytes"):
            await collect_events(backend)


async def test_unary_response_size_is_limited() -> None:
    line = encode_line("x" * 1000)
    async with (
        ScriptedWorker([make_reply(line * 2000 + b"end\n")]) as worker,
        run_pool(worker.url, max_response_size=1 << 20) as one,
    ):
        with pytest.raises(WorkerFailed, match="larger"):
            await collect_events(one, UNARY)


class DecoderWithoutEnd(LineDecoder):
    def close(self) -> Sequence[Event]:
        return super().close()[:-1]


class ProtocolWithoutEnd(LineProtocol):
    def create_decoder(self, request: Request) -> ResponseDecoder:
        return DecoderWithoutEnd()


@each_consumer
async def test_http_body_end_is_the_stream_end_without_a_protocol_end(
    collect: CollectEvents,
) -> None:
    async with (
        ScriptedWorker([reply_text("Hello", " world")]) as worker,
        run_pool(worker.url, adapter=ProtocolWithoutEnd()) as backend,
    ):
        events = await collect(backend)

    assert sum(isinstance(event, StreamEnd) for event in events) == 1
    assert isinstance(events[-1], StreamEnd)


async def test_slow_consumer_applies_backpressure_to_the_worker() -> None:
    line = chunk(encode_line("x" * 1000))
    flood: Reply = [CHUNKED, *[line] * 20_000, chunk(b"end\n"), END]

    async with ScriptedWorker(flood) as worker, run_pool(worker.url) as backend:
        taken = 0
        async with aclosing(backend.send(PreparedRequest(STREAMED), build_context())) as batches:
            async for _, batch in batches:
                if not taken:
                    await asyncio.sleep(0.3)
                    assert worker.active == 1, "20 MB lie in between"
                taken += len(batch)

    assert taken == 20_002, "each line, the choice's end and the stream's end"


async def test_consumer_that_rejects_a_batch_gets_the_next_batches_later() -> None:
    """Given a worker that sends a chunk when the last one was read, each gives an empty batch."""
    was_read = [asyncio.Event() for _ in range(5)]
    chunks = [chunk(encode_line(f"{number} ")) for number in range(5)]
    slowly: Reply = [step for pair in zip(chunks, was_read, strict=True) for step in pair]
    taken: list[Sequence[Event]] = []
    received: list[Sequence[Event]] = []

    def take(data: bytes | None, batch: Sequence[Event]) -> bool:
        del data
        taken.append(batch)
        return False

    script = [CHUNKED, *slowly, chunk(b"end\n"), END]
    async with (
        ScriptedWorker(script) as worker,
        run_pool(worker.url) as backend,
        aclosing(backend.send(PreparedRequest(STREAMED), build_context(), take)) as batches,
    ):
        for event in was_read:
            received.append((await anext(batches))[1])
            event.set()
        received += [batch async for _, batch in batches]

    first, *empty, last = received
    assert join_text(first) == "0 "
    assert join_text([event for batch in taken for event in batch]) == "1 2 3 4 "
    assert [len(batch) for batch in empty] == [0] * len(taken)
    assert isinstance(last[-1], StreamEnd)


async def test_consumer_exception_does_not_count_against_the_worker() -> None:
    def take(data: bytes | None, batch: Sequence[Event]) -> bool:
        raise LookupError(data, batch)

    script: Reply = [CHUNKED + STARTED_STREAM, 0.05, STARTED_STREAM, HANG]
    async with ScriptedWorker(script) as worker, run_pool(worker.url) as backend:
        with pytest.raises(LookupError):
            async for _ in backend.send(PreparedRequest(STREAMED), build_context(), take):
                pass
        await worker.wait_for_disconnect()
        [report] = backend.report_workers()

    assert (report.state, report.error, report.in_flight) == ("up", "", 0)


# ── timeouts ──────────────────────────────────────────────────────────────────────────────────────


class SilentWorker(Struct, frozen=True):
    """A worker that falls silent, and the timeout that detects it."""

    name: str
    reply: Reply
    which: str
    text: str = ""


SILENT = [
    SilentWorker("never answers", [HANG], "first_token"),
    SilentWorker("head only", [CHUNKED, HANG], "first_token"),
    SilentWorker("half a head", [b"HTTP/1.1 200 OK\r\nCont", HANG], "first_token"),
    SilentWorker("half an event", [CHUNKED + chunk(b'{"te'), HANG], "first_token"),
    SilentWorker("one event", [CHUNKED + STARTED_STREAM, HANG], "idle", "Hello"),
    SilentWorker(
        "two events", [CHUNKED + STARTED_STREAM, 0.1, STARTED_STREAM, HANG], "idle", "HelloHello"
    ),
]


@pytest.mark.fault(2, 5)
@each_consumer
@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.name)
async def test_silent_worker_times_out_and_is_disconnected(
    case: SilentWorker, collect: CollectEvents
) -> None:
    events: list[Event] = []
    async with (
        ScriptedWorker(case.reply) as worker,
        run_pool(worker.url, timeouts=HASTY) as backend,
    ):
        with pytest.raises(DeadlineExceeded) as excinfo:
            await collect(backend, into=events)
        await worker.wait_for_disconnect()

    assert excinfo.value.phase == case.which
    assert join_text(events) == case.text


@pytest.mark.parametrize("client_request", [STREAMED, UNARY], ids=["streamed", "unary"])
async def test_total_timeout_ends_the_request(client_request: GenerationRequest) -> None:
    limits = Timeouts(connect=1.0, first_token=9.0, idle=9.0, total=0.3)
    async with ScriptedWorker([HANG]) as worker, run_pool(worker.url, timeouts=limits) as backend:
        with pytest.raises(DeadlineExceeded) as excinfo:
            await collect_events(backend, client_request)
        await worker.wait_for_disconnect()

    assert excinfo.value.phase == "total"


@each_consumer
async def test_idle_timeout_is_independent_of_the_first_token_timeout(
    collect: CollectEvents,
) -> None:
    limits = Timeouts(connect=1.0, first_token=9.0, idle=0.2, total=20.0)
    async with (
        ScriptedWorker([CHUNKED + STARTED_STREAM, HANG]) as worker,
        run_pool(worker.url, timeouts=limits) as backend,
        asyncio.timeout(30),
    ):
        with pytest.raises(DeadlineExceeded, match="stopped sending"):
            await collect(backend)


async def test_slow_consumer_does_not_trigger_the_idle_timeout() -> None:
    go_on = asyncio.Event()
    reply: Reply = [CHUNKED + STARTED_STREAM, go_on, STARTED_STREAM, chunk(b"end\n"), END]
    events: list[Event] = []

    async with (
        ScriptedWorker(reply) as worker,
        run_pool(worker.url, timeouts=HASTY) as backend,
        aclosing(backend.send(PreparedRequest(STREAMED), build_context())) as batches,
    ):
        async for _, batch in batches:
            events += batch
            if not go_on.is_set():
                await asyncio.sleep(0.6)
                go_on.set()

    assert join_text(events) == "HelloHello"


async def test_first_token_timeout_does_not_apply_to_unary_responses() -> None:
    reply: Reply = [0.5, make_reply(LINES)]
    async with ScriptedWorker(reply) as worker, run_pool(worker.url, timeouts=HASTY) as backend:
        assert join_text(await collect_events(backend, UNARY)) == "Hello"


@each_consumer
async def test_pause_shorter_than_idle_timeout_is_accepted(collect: CollectEvents) -> None:
    limits = Timeouts(connect=1.0, first_token=1.0, idle=1.0, total=10.0)
    reply: Reply = [CHUNKED + STARTED_STREAM, 0.6, STARTED_STREAM, 0.6, chunk(b"end\n"), 0.3, END]
    async with ScriptedWorker(reply) as worker, run_pool(worker.url, timeouts=limits) as backend:
        assert join_text(await collect(backend)) == "HelloHello"
