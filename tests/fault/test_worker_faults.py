"""A worker may do anything; the client is told the truth, and the gateway stays well."""

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
from tests.fakes import (
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
    whole,
)
from tests.fault.lines import (
    STREAMED,
    UNARY,
    Hear,
    LineDecoder,
    Lines,
    context,
    every_way,
    heard,
    pool,
    say,
    text,
)

GOOD = [chunked(say("Hello"), say(" world"), b"end\n")]
HASTY = Timeouts(connect=1.0, first_token=0.2, idle=0.2, total=10.0)


async def ask(*replies: Reply, hear: Hear = heard) -> list[Event]:
    """The events of one streamed request to one worker of this script."""
    async with ScriptedWorker(*replies) as worker, pool(worker.url) as backend:
        return await hear(backend)


@every_way
async def test_a_good_answer_ends_in_exactly_one_done(hear: Hear) -> None:
    events = await ask(GOOD, hear=hear)

    assert text(events) == "Hello world"
    assert [type(event) for event in events[-2:]] == [ChoiceEnd, StreamEnd]
    assert sum(isinstance(event, StreamEnd) for event in events) == 1


async def test_a_dialects_headers_are_passed_on_by_name_only() -> None:
    async with ScriptedWorker(GOOD) as worker, pool(worker.url) as backend:
        await heard(backend)

    assert "content-type" in worker.requests[0].headers
    assert "x-secret" not in worker.requests[0].headers


# ── broken answers ──────────────────────────────────────────────────────────────────────────────


class Broken(Struct, frozen=True):
    """What a worker writes, what the client hears of it, and how it ends."""

    name: str
    reply: Reply
    error: type[GatewayError]
    said: str = ""


SAYS = chunk(say("Hello"))
LINES = say("Hello") + b"end\n"
BROKEN = [
    Broken("reset before the first byte", [RESET], StreamBroken),
    Broken("closed before the first byte", [CLOSE], StreamBroken),
    Broken("closed inside the status line", [b"HTTP/1.1 20", CLOSE], WorkerError),
    Broken("closed inside the headers", [b"HTTP/1.1 200 OK\r\nContent-", CLOSE], WorkerError),
    Broken("closed after the head", [CHUNKED, CLOSE], StreamBroken),
    Broken("cut mid-stream", [CHUNKED + SAYS, CLOSE], StreamBroken, "Hello"),
    Broken("cut later", [CHUNKED + SAYS, 0.05, SAYS, 0.05, CLOSE], StreamBroken, "HelloHello"),
    Broken("reset mid-stream", [CHUNKED + SAYS, 0.1, RESET], StreamBroken, "Hello"),
    Broken("cut inside a chunk", [CHUNKED + SAYS + b"ff\r\n{", CLOSE], StreamBroken, "Hello"),
    Broken("cut before the last chunk", [CHUNKED + SAYS, CLOSE], StreamBroken, "Hello"),
    Broken("a chunk of no size", [CHUNKED + SAYS, 0.05, b"zz\r\n"], StreamBroken, "Hello"),
    Broken("no end in the dialect", [chunked(say("Hello"))], StreamBroken, "Hello"),
    Broken("ended by the close", [head() + say("Hello"), CLOSE], StreamBroken, "Hello"),
    Broken("too short", [head(content_length="99") + say("Hello"), CLOSE], StreamBroken, "Hello"),
    Broken("too long", [head(content_length="9") + say("Hello")], WorkerFailed),
    Broken(
        "two lengths",
        [b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\nContent-Length: 23\r\n\r\n" + LINES, HANG],
        WorkerFailed,
    ),
    Broken(
        "length and chunks",
        [head(content_length="22", transfer_encoding="chunked") + SAYS + END],
        WorkerFailed,
    ),
    Broken("garbage", [b"\x00\xff hello\r\n\r\n", HANG], WorkerFailed),
    Broken("another protocol", [b"220 mail ready\r\n", HANG], WorkerFailed),
    Broken("HTTP of no version", [b"HTTP/9.x 200 OK\r\n\r\n", HANG], WorkerFailed),
    Broken("a header with a NUL", [b"HTTP/1.1 200 OK\r\na: b\x00c\r\n\r\n", HANG], WorkerFailed),
    Broken("a header of 20 KB", [head(a="x" * 20_000), HANG], WorkerFailed),
    Broken("1000 headers", [head(**{f"h{i}": "x" for i in range(1000)}), HANG], WorkerFailed),
    Broken("101", [head("101 Go On", upgrade="x", connection="upgrade")], WorkerFailed),
    Broken("204", [head("204 No Content")], WorkerFailed),
    Broken("500", [whole(b'{"error":"boom"}', "500 Internal Server Error")], WorkerFailed),
    Broken("invalid JSON", [chunked(say("Hello"), b"{nope\n", b"end\n")], WorkerFailed),
    Broken("compressed", [whole(b"\x1f\x8b", content_encoding="gzip")], WorkerFailed),
    Broken("429", [whole(b"{}", "429 Too Many Requests", retry_after="7")], RateLimitExceeded),
]  # fmt: skip


@every_way
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
async def test_a_broken_answer_is_an_error_after_what_was_said(case: Broken, hear: Hear) -> None:
    events: list[Event] = []
    quick = Timeouts(connect=1.0, first_token=1.0, idle=1.0, total=10.0)
    async with ScriptedWorker(case.reply) as worker, pool(worker.url, timeouts=quick) as backend:
        with pytest.raises(case.error) as caught:
            await hear(backend, into=events)

    assert text(events) == case.said
    assert not any(isinstance(event, StreamEnd) for event in events)
    assert "127.0.0.1" not in caught.value.message


async def test_retry_after_comes_through_the_dialect() -> None:
    with pytest.raises(RateLimitExceeded) as caught:
        await ask([whole(b"{}", "429 Too Many Requests", retry_after="7")])

    assert caught.value.retry_after == 7


ENDLESS = [
    (
        "too much",
        [head("500 Oops", transfer_encoding="chunked"), *[chunk(b"x" * 9999)] * 40],
        65536,
    ),
    ("too slow", [whole(b"x" * 99, "500 Oops")[:-50]], 49),
]


@pytest.mark.parametrize(("name", "reply", "read"), ENDLESS)
async def test_an_error_is_told_before_its_body_ends(name: str, reply: Reply, read: int) -> None:
    never = asyncio.Event()
    async with ScriptedWorker([*reply, never]) as worker, pool(worker.url) as backend:
        began = asyncio.get_running_loop().time()
        with pytest.raises(WorkerFailed, match=f"failed: {read} bytes"):
            await heard(backend, UNARY)
        took = asyncio.get_running_loop().time() - began

    assert took < (0.9 if name == "too much" else 3)


async def test_an_early_refusal_is_heard_before_the_body_is_read() -> None:
    early: Reply = [whole(b"{}", "413 Content Too Large"), CLOSE]
    async with ScriptedWorker(early, read_body=False) as worker, pool(worker.url) as backend:
        with pytest.raises(WorkerFailed, match="the worker failed: 2 bytes"):
            await heard(backend)


async def test_a_whole_answer_has_a_largest_size() -> None:
    line = say("x" * 1000)
    async with (
        ScriptedWorker([whole(line * 2000 + b"end\n")]) as worker,
        pool(worker.url, max_response_size=1 << 20) as one,
    ):
        with pytest.raises(WorkerFailed, match="larger"):
            await heard(one, UNARY)


class Curt(LineDecoder):
    def close(self) -> Sequence[Event]:
        return super().close()[:-1]


class Briefly(Lines):
    def create_decoder(self, request: Request) -> ResponseDecoder:
        return Curt()


@every_way
async def test_the_body_s_end_is_an_answer_s_where_the_dialect_has_no_other(hear: Hear) -> None:
    async with ScriptedWorker(GOOD) as worker, pool(worker.url, dialect=Briefly()) as backend:
        events = await hear(backend)

    assert sum(isinstance(event, StreamEnd) for event in events) == 1
    assert isinstance(events[-1], StreamEnd)


async def test_a_consumer_that_stops_reading_stops_the_worker() -> None:
    line = chunk(say("x" * 1000))
    flood: Reply = [CHUNKED, *[line] * 20_000, chunk(b"end\n"), END]
    async with ScriptedWorker(flood) as worker, pool(worker.url) as backend:
        taken = 0
        async with aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches:
            async for _, batch in batches:
                if not taken:
                    await asyncio.sleep(0.3)
                    assert worker.active == 1, "20 MB lie in between"
                taken += len(batch)

    assert taken == 20_002, "each line, End and Done"


async def test_one_who_takes_no_more_at_once_gets_the_rest_later() -> None:
    """Whoever reads is told by an empty batch, each time."""
    said = [chunk(say(f"{number} ")) for number in range(5)]
    slowly: Reply = [step for one in said for step in (one, 0.05)]
    taken: list[Sequence[Event]] = []

    def take(data: bytes | None, batch: Sequence[Event]) -> bool:
        del data
        taken.append(batch)
        return False

    script = [CHUNKED, *slowly, chunk(b"end\n"), END]
    async with (
        ScriptedWorker(script) as worker,
        pool(worker.url) as backend,
        aclosing(backend.send(PreparedRequest(STREAMED), context(), take)) as batches,
    ):
        first, *empty, last = [batch async for _, batch in batches]

    assert text(first) == "0 "
    assert text([event for batch in taken for event in batch]) == "1 2 3 4 "
    assert [len(batch) for batch in empty] == [0] * len(taken)
    assert isinstance(last[-1], StreamEnd)


async def test_what_went_wrong_in_the_taking_is_not_the_worker_s_fault() -> None:
    def take(data: bytes | None, batch: Sequence[Event]) -> bool:
        raise LookupError(data, batch)

    script: Reply = [CHUNKED + SAYS, 0.05, SAYS, HANG]
    async with ScriptedWorker(script) as worker, pool(worker.url) as backend:
        with pytest.raises(LookupError):
            async for _ in backend.send(PreparedRequest(STREAMED), context(), take):
                pass
        await worker.until_left()
        [report] = backend.report_workers()

    assert (report.state, report.error, report.in_flight) == ("up", "", 0)


# ── time limits ─────────────────────────────────────────────────────────────────────────────────


class Silent(Struct, frozen=True):
    """A worker that falls silent, and the limit that notices."""

    name: str
    reply: Reply
    which: str
    said: str = ""


SILENT = [
    Silent("never answers", [HANG], "first_token"),
    Silent("head only", [CHUNKED, HANG], "first_token"),
    Silent("half a head", [b"HTTP/1.1 200 OK\r\nCont", HANG], "first_token"),
    Silent("half an event", [CHUNKED + chunk(b'{"te'), HANG], "first_token"),
    Silent("one event", [CHUNKED + SAYS, HANG], "idle", "Hello"),
    Silent("two events", [CHUNKED + SAYS, 0.1, SAYS, HANG], "idle", "HelloHello"),
]


@every_way
@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.name)
async def test_fault_02_05_a_silent_worker_is_left(case: Silent, hear: Hear) -> None:
    events: list[Event] = []
    async with ScriptedWorker(case.reply) as worker, pool(worker.url, timeouts=HASTY) as backend:
        with pytest.raises(DeadlineExceeded) as caught:
            await hear(backend, into=events)
        await worker.until_left()

    assert caught.value.phase == case.which
    assert text(events) == case.said


@pytest.mark.parametrize("asked", [STREAMED, UNARY], ids=["streamed", "whole"])
async def test_the_deadline_ends_everything(asked: GenerationRequest) -> None:
    limits = Timeouts(connect=1.0, first_token=9.0, idle=9.0, total=0.3)
    async with ScriptedWorker([HANG]) as worker, pool(worker.url, timeouts=limits) as backend:
        with pytest.raises(DeadlineExceeded) as caught:
            await heard(backend, asked)
        await worker.until_left()

    assert caught.value.phase == "total"


@every_way
async def test_the_limit_between_events_does_not_wait_for_that_of_the_first(hear: Hear) -> None:
    limits = Timeouts(connect=1.0, first_token=9.0, idle=0.2, total=20.0)
    async with (
        ScriptedWorker([CHUNKED + SAYS, HANG]) as worker,
        pool(worker.url, timeouts=limits) as backend,
        asyncio.timeout(3),
    ):
        with pytest.raises(DeadlineExceeded, match="stopped sending"):
            await hear(backend)


async def test_a_slow_consumer_is_no_silent_worker() -> None:
    go_on = asyncio.Event()
    reply: Reply = [CHUNKED + SAYS, go_on, SAYS, chunk(b"end\n"), END]
    events: list[Event] = []
    async with (
        ScriptedWorker(reply) as worker,
        pool(worker.url, timeouts=HASTY) as backend,
        aclosing(backend.send(PreparedRequest(STREAMED), context())) as batches,
    ):
        async for _, batch in batches:
            events += batch
            if not go_on.is_set():
                await asyncio.sleep(0.6)
                go_on.set()

    assert text(events) == "HelloHello"


async def test_a_whole_answer_may_take_longer_than_a_first_token() -> None:
    reply: Reply = [0.5, whole(LINES)]
    async with ScriptedWorker(reply) as worker, pool(worker.url, timeouts=HASTY) as backend:
        assert text(await heard(backend, UNARY)) == "Hello"


@every_way
async def test_a_pause_within_the_limit_does_no_harm(hear: Hear) -> None:
    limits = Timeouts(connect=1.0, first_token=1.0, idle=1.0, total=10.0)
    reply: Reply = [CHUNKED + SAYS, 0.6, SAYS, 0.6, chunk(b"end\n"), 0.3, END]
    async with ScriptedWorker(reply) as worker, pool(worker.url, timeouts=limits) as backend:
        assert text(await hear(backend)) == "HelloHello"
