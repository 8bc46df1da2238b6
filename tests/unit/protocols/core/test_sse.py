"""Server-sent events are parsed for any split of the bytes and any server's format."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core import sse
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import Event


def parse_events(data: bytes, size: int = 1 << 16, limit: int = 1 << 20) -> list[bytes]:
    """Parse ``data`` in pieces of ``size``, and return the data of the events."""
    splitter = sse.SseParser(limit=limit)
    events: list[bytes] = []
    for i in range(0, len(data), size):
        events += splitter.feed(data[i : i + size])
    splitter.close()
    return events


@pytest.mark.parametrize(
    ("wire", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\rdata: b\r\r", [b"a\nb"]),
        (b": x\r\rdata: a\r\n\rdata: b\n\n\rdata: c\n\r\n", [b"a", b"b", b"c"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n\ndata: d\r\r", [b"a", b"b", b"c", b"d"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": a comment\n\ndata: a\n\n", [b"a"]),
        (b"event: x\nid: 1\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\n\n\ndata: a\n\n\n", [b"a"]),
        (b"", []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_sse_events_are_parsed_in_any_packet_size(
    wire: bytes, events: list[bytes], size: int
) -> None:
    assert parse_events(wire, size) == events


@given(
    payloads=st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b and b"\r" not in b)),
    size=st.integers(1, 40),
)
def test_formatted_events_are_parsed_back(payloads: list[bytes], size: int) -> None:
    wire = b"".join(map(sse.format_event, payloads))

    assert parse_events(wire, size) == payloads


@pytest.mark.parametrize(
    ("wire", "last"),
    [
        (b"data: a", [b"a"]),
        (b"data: a\n", [b"a"]),
        (b"data: a\r", [b"a"]),
        (b"data: a\n\ndata: b\ndata: c\n", [b"b\nc"]),
        (b"data: a\n\n", []),
        (b"data: a\n\n: ping", []),
    ],
)
def test_end_of_the_body_ends_the_last_event(wire: bytes, last: list[bytes]) -> None:
    parser = sse.SseParser()
    list(parser.feed(wire))

    assert parser.close() == last


def test_unreadable_last_event_raises_stream_broken() -> None:
    def read(payload: bytes, events: list[Event]) -> None:
        try:
            msgspec.json.decode(payload)
        except msgspec.DecodeError as error:
            raise WorkerFailed("can't be read") from error
        raise WorkerFailed("an error of the worker")

    for wire, kind in ((b'data: {"a', StreamBroken), (b"data: {}", WorkerFailed)):
        parser = sse.SseParser()
        list(parser.feed(wire))
        with pytest.raises(kind):
            sse.read_last_event(parser, read)


def test_event_over_the_size_limit_raises_worker_failed() -> None:
    with pytest.raises(WorkerFailed):
        parse_events(b"data: " + b"x" * 300, size=50, limit=200)
    with pytest.raises(WorkerFailed):
        parse_events(b"data: xxxxxxxxxx\n" * 40, size=50, limit=200)


@pytest.mark.parametrize("wire", [b'data: a\n\n{"error":"x"}', b'data: a\n\n{"error":"x"}\n'])
def test_stray_line_is_kept_for_the_adapter(wire: bytes) -> None:
    splitter = sse.SseParser()

    assert list(splitter.feed(wire)) == [b"a"]

    splitter.close()
    assert splitter.stray_line == b'{"error":"x"}'


@pytest.mark.parametrize(
    ("pieces", "whole", "stream"),
    [
        ([b"\xef", b"\xbb", b"\xbf ", b'{"a"', b":1}"], b'{"a":1}', b""),
        ([b"", b" \n", b"[1]"], b"[1]", b""),
        ([b"\xef\xbb\xbfdata: {}\n\n"], None, b"\xef\xbb\xbfdata: {}\n\n"),
        ([b"\xef", b"x"], None, b"\xefx"),
    ],
)
def test_unary_body_is_detected_by_its_first_byte(
    pieces: list[bytes], whole: bytes | None, stream: bytes
) -> None:
    body = sse.ResponseBodyReader((b"{", b"["))
    assert b"".join(map(body.feed, pieces)) == stream
    assert body.unary_body == whole


def test_body_declared_as_stream_is_never_unary() -> None:
    body = sse.ResponseBodyReader(is_detected=True)

    assert body.feed(b'{"a":1}') == b'{"a":1}'
    assert body.unary_body is None


def test_unary_body_over_the_size_limit_raises_worker_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_UNARY_BYTES", 10)
    body = sse.ResponseBodyReader()

    body.feed(b'{"a"')

    with pytest.raises(WorkerFailed):
        body.feed(b"x" * 10)


def test_leading_blanks_before_a_stream_are_dropped() -> None:
    whole, parts = sse.ResponseBodyReader(), sse.ResponseBodyReader()

    assert whole.feed(b" data: a\n\n") == b"data: a\n\n"
    assert b"".join(map(parts.feed, (b" ", b"data: a\n\n"))) == b"data: a\n\n"


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_event_of_too_many_objects_is_refused_however_it_is_read(size: int) -> None:
    """The events before it are returned; one with fewer objects is none too many."""
    data = b"data: a\n\ndata: [" + b"{}," * 30_000 + b"0]\n\n"
    few = b"data: [" + b"{}," * 19_000 + b'"' + b"{" * 30_000 + b'"]\n\n'
    parser, payloads = sse.SseParser(), list[bytes]()

    with pytest.raises(WorkerFailed, match="30000 objects; the limit is 20000"):  # noqa: PT012
        for start in range(0, len(data), size):
            for payload in parser.feed(data[start : start + size]):
                payloads.append(payload)

    assert payloads == [b"a"]
    assert list(sse.SseParser().feed(few)) == [few[6:-2]]
    assert not sse.is_plain_event(few)
