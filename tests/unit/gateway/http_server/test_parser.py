"""The HTTP parser: requests and limits, independent of how the input is split."""

import asyncio
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.http_server.parser import BadRequest, IncomingRequest, RequestParser
from gateway.memory import MemoryBudget
from protocols.core.errors import Overloaded

LINE = 200
FIRST = b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = {
    414: b"GET /" + b"x" * LINE + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    431: b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"x" * LINE + b"\r\n\r\n",
}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    event_loop = asyncio.new_event_loop()
    yield event_loop
    event_loop.close()


@pytest.mark.parametrize("status", LARGE)
def test_oversized_line_is_rejected_at_any_chunk_boundary(
    status: int, loop: asyncio.AbstractEventLoop
) -> None:
    whole = FIRST + LARGE[status]
    for at in range(1, len(whole)):
        arrived: list[IncomingRequest | BadRequest] = []
        reader = RequestParser(LINE, loop, MemoryBudget(), arrived.append, lambda: None)
        reader.feed(whole[:at])
        reader.feed(whole[at:])
        first, second = arrived
        assert isinstance(first, IncomingRequest), at
        assert isinstance(second, BadRequest), at
        assert (first.path, second.status) == ("/first", status), at


def test_line_at_the_size_limit_is_accepted(loop: asyncio.AbstractEventLoop) -> None:
    arrived: list[IncomingRequest | BadRequest] = []
    reader = RequestParser(LINE, loop, MemoryBudget(), arrived.append, lambda: None)
    path, value = "/" + "x" * (LINE - 1), "y" * (LINE - 1)
    reader.feed(f"GET {path} HTTP/1.1\r\nHost: a\r\nA: {value}\r\n\r\n".encode())
    [one] = arrived

    assert isinstance(one, IncomingRequest)
    assert (one.path, one.headers["a"]) == (path, value)


def make_parser(
    loop: asyncio.AbstractEventLoop, budget: MemoryBudget | None = None
) -> tuple[RequestParser, list[IncomingRequest | BadRequest]]:
    """Build a parser, and the list of what it reports."""
    arrived: list[IncomingRequest | BadRequest] = []
    budget = budget or MemoryBudget()
    return RequestParser(LINE, loop, budget, arrived.append, lambda: None), arrived


NAMES = st.sampled_from(["Host", "HOST", "a", "A", "b", "x-long"])
VALUES = st.text(st.sampled_from("xy\xe9\xff"), max_size=5) | st.sampled_from(
    ["x" * (LINE - 6), "x" * LINE]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.data())
def test_first_of_duplicate_headers_is_used(
    loop: asyncio.AbstractEventLoop, headers: list[tuple[str, str]], data: st.DataObject
) -> None:
    headers = [("Host", "x"), *headers]
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers]
    whole = b"".join([b"GET / HTTP/1.1\r\n", *lines, b"\r\n"])
    first_values: dict[str, str] = {}
    for name, value in headers:
        first_values.setdefault(
            name.lower(), value.encode("latin-1").decode("utf-8", "surrogateescape")
        )
    hosts = sum(name.lower() == "host" for name, _ in headers)
    reader, arrived = make_parser(loop)
    at = data.draw(st.integers(0, len(whole)))
    reader.feed(whole[:at])
    reader.feed(whole[at:])
    [one] = arrived

    if any(len(name) + len(value) > LINE for name, value in headers):
        assert isinstance(one, BadRequest)
        assert one.status == 431
    elif hosts > 1:
        assert one == BadRequest(400, "the request must have one header Host")
    else:
        assert isinstance(one, IncomingRequest)
        assert one.headers == first_values


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("count", "fits"), [(127, True), (128, False)])
def test_header_count_limit_is_exact(
    count: int, fits: bool, cut: bool, loop: asyncio.AbstractEventLoop
) -> None:
    reader, arrived = make_parser(loop)
    reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n")
    sent = b"a: b\r\n" * count
    for piece in (sent, b"\r\n") if cut else (sent + b"\r\n",):
        reader.feed(piece)
    [one] = arrived

    assert isinstance(one, IncomingRequest if fits else BadRequest)
    assert fits or one == BadRequest(431, "the request's headers are too large or too many")


def test_oversized_incomplete_head_is_rejected_with_431_at_the_timeout(
    loop: asyncio.AbstractEventLoop,
) -> None:
    reader, arrived = make_parser(loop)
    reader.feed(b"GET / HTTP/1.1\r\nA: " + b"x" * LINE + b"\r\nB: c\r\n")
    assert arrived == []

    reader.reject(408, "the request's head took too long")
    assert arrived == [BadRequest(431, "the request's headers are too large or too many")]


def test_unfinished_head_is_rejected_at_the_total_size_limit(
    loop: asyncio.AbstractEventLoop,
) -> None:
    reader, arrived = make_parser(loop)
    reader.feed(b"GET / HTTP/1.1\r\n")

    for _ in range(8):
        assert arrived == []
        reader.feed(b"A: " + b"x" * (LINE - 5) + b"\r\n")

    assert arrived == [BadRequest(431, "the request's head is too large")]


def test_trailers_are_not_added_to_the_headers(loop: asyncio.AbstractEventLoop) -> None:
    reader, arrived = make_parser(loop)
    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader.feed(chunked + b"2\r\nhi\r\n0\r\nHost: b\r\n" + b"c: d\r\n" * 200 + b"\r\n" + FIRST)
    first, second = arrived

    assert isinstance(first, IncomingRequest)
    assert isinstance(second, IncomingRequest)
    assert first.headers == {"host": "a", "transfer-encoding": "chunked"}
    assert (first.is_complete, loop.run_until_complete(first.body(10))) == (True, b"hi")
    assert (second.path, second.headers) == ("/first", {"host": "a"})


def test_request_after_connection_close_is_rejected(
    loop: asyncio.AbstractEventLoop,
) -> None:
    reader, arrived = make_parser(loop)
    request = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    last = request.replace(b"Host: a", b"Host: a\r\nConnection: close")

    for data in (request, request, last, request):
        reader.feed(data)

    assert arrived[3:] == [BadRequest(400, "the request is not HTTP")]


def test_request_line_with_extra_spaces_is_rejected(loop: asyncio.AbstractEventLoop) -> None:
    """This holds for any split of the input, and after another request."""
    line = BadRequest(400, "the request's first line is not METHOD TARGET HTTP/1.1")
    chunked = (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    )
    for start in (b"GET  /", b"GET /  "):
        odd = start + b" HTTP/1.1\r\nHost: a\r\n\r\n"
        for before in (b"", FIRST, chunked):
            data = before + odd + FIRST
            for at in range(len(data)):
                reader, arrived = make_parser(loop)
                reader.feed(data[:at])
                reader.feed(data[at:])
                assert arrived[-1] == line, (before, at)
                assert len(arrived) == 1 + bool(before)


@pytest.mark.parametrize("protocol", [b"RTSP/1.0", b"ICE/1.0"])
def test_request_of_another_protocol_is_rejected(
    protocol: bytes, loop: asyncio.AbstractEventLoop
) -> None:
    for method in (b"GET", b"OPTIONS", b"SOURCE"):
        reader, arrived = make_parser(loop)
        reader.feed(method + b" / " + protocol + b"\r\nHost: a\r\n\r\n")
        [one] = arrived
        assert isinstance(one, BadRequest)
        assert one.status == 400


def test_duplicate_authorization_and_multiple_hosts_are_rejected(
    loop: asyncio.AbstractEventLoop,
) -> None:
    heads = {
        b"Host: a\r\nAuthorization: Bearer a\r\nauthorization: Bearer b\r\n": "Authorization",
        b"Host: a, b\r\n": "Host",
        b"Host: a b\r\n": "Host",
    }
    for head, name in heads.items():
        reader, arrived = make_parser(loop)
        reader.feed(b"GET / HTTP/1.1\r\n" + head + b"\r\n")
        [one] = arrived
        assert isinstance(one, BadRequest)
        assert (one.status, name in one.message) == (400, True)


def test_chunked_body_is_stored_in_one_buffer(loop: asyncio.AbstractEventLoop) -> None:
    """A chunk does not have an object of its own."""
    reader, arrived = make_parser(loop)
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunks = b"2\r\nab\r\n" * 1000
    tracemalloc.start()
    for _ in range(200):
        reader.feed(chunks)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reader.feed(b"0\r\n\r\n")
    [one] = arrived

    assert isinstance(one, IncomingRequest)
    assert used < 2 * one.body_size == 800_000
    assert loop.run_until_complete(one.body(1 << 20)) == b"ab" * 200_000


def test_body_beyond_the_memory_budget_is_dropped_and_rejected(
    loop: asyncio.AbstractEventLoop,
) -> None:
    budget = MemoryBudget(limit=150)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
    arrived: list[IncomingRequest | BadRequest] = []
    requests = []
    for _ in range(2):
        reader = RequestParser(LINE, loop, budget, arrived.append, lambda: None)
        reader.feed(head + b"x" * 60)
        reader.feed(b"x" * 40)
        requests.append(arrived[-1])
    first, second = requests

    assert isinstance(first, IncomingRequest)
    assert isinstance(second, IncomingRequest)
    assert budget.used == 100
    assert loop.run_until_complete(first.body(1000)) == b"x" * 100
    with pytest.raises(Overloaded) as refused:
        loop.run_until_complete(second.body(1000))
    assert refused.value.retry_after

    first.release_body()
    second.release_body()
    assert budget.used == 0


def test_body_whose_own_connection_is_closed_for_it_is_rejected_whole(
    loop: asyncio.AbstractEventLoop,
) -> None:
    class Slowest:
        """The connection that sends it."""

        min_rate = 512

        def get_slowest_rate(self) -> float:
            return 1.0

        def close_slowest(self) -> None:
            [sender] = arrived
            assert isinstance(sender, IncomingRequest)
            sender.drop_body()

        def close_idle_longest(self) -> bool:
            return False

    budget = MemoryBudget(limit=90)
    reader, arrived = make_parser(loop, budget)
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n" + b"x" * 60)
    [one] = arrived
    assert isinstance(one, IncomingRequest)
    budget.listeners.add(Slowest())

    reader.feed(b"x" * 40)

    with pytest.raises(Overloaded):
        loop.run_until_complete(one.body(1000))
    assert budget.used == 0


def test_content_length_beyond_the_memory_budget_is_rejected_early(
    loop: asyncio.AbstractEventLoop,
) -> None:
    arrived: list[IncomingRequest | BadRequest] = []
    reader = RequestParser(LINE, loop, MemoryBudget(limit=50), arrived.append, lambda: None)
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 51\r\n\r\n")
    [one] = arrived

    assert isinstance(one, IncomingRequest)
    with pytest.raises(Overloaded):
        loop.run_until_complete(asyncio.wait_for(one.body(1000), 5))


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"GET / HTTP/1.1\n",
        b"GET / HTTP/1.1\r\nHost: a\n",
        b"GET / HTTP/1.1\r\nA: b\x00c\r\n",
        b"GET / HTTP/1.1 x",
        b"{",
    ],
)
def test_incomplete_head_is_rejected_as_soon_as_it_is_invalid(
    data: bytes, loop: asyncio.AbstractEventLoop
) -> None:
    for at in range(len(data)):
        reader, arrived = make_parser(loop)
        reader.feed(data[:at])
        reader.feed(data[at:])
        [one] = arrived
        assert isinstance(one, BadRequest)
        assert one.status == 400


def test_incomplete_head_is_checked_in_linear_time(loop: asyncio.AbstractEventLoop) -> None:
    """With a byte at a time, a byte of a longer head costs no more."""
    lines = [b"GET / HTTP/1.1\r\n", *[b"a%d: b\r\n" % n for n in range(60)]]

    def count_calls(head: bytes) -> int:
        reader, _ = make_parser(loop)
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for at in range(len(head)):
                reader.feed(head[at : at + 1])
        finally:
            sys.setprofile(None)
        return calls

    short, long = b"".join(lines[:31]), b"".join(lines)
    assert count_calls(long) * len(short) < 1.2 * count_calls(short) * len(long)


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ([], True),
        ([b"keep-alive"], True),
        ([b"Close"], False),
        ([b"x, close"], False),
        ([b"keep-alive", b"close"], False),
        ([b"closed"], True),
    ],
)
def test_connection_header_decides_whether_the_connection_is_kept(
    options: list[bytes], *, keeps: bool, loop: asyncio.AbstractEventLoop
) -> None:
    reader, arrived = make_parser(loop)
    lines = b"".join(b"Connection: %b\r\n" % option for option in options)
    reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n")
    [one] = arrived

    assert isinstance(one, IncomingRequest)
    assert one.keep_alive == keeps


def test_whitespace_around_header_values_is_removed(loop: asyncio.AbstractEventLoop) -> None:
    reader, arrived = make_parser(loop)
    reader.feed(b"POST / HTTP/1.1\r\nHost:a\r\nB: \t c \t\r\nD:\r\nContent-Length: 2 \r\n\r\nhi")
    [one] = arrived

    assert isinstance(one, IncomingRequest)
    assert one.headers == {"host": "a", "b": "c", "d": "", "content-length": "2"}
    assert loop.run_until_complete(one.body(2)) == b"hi"
