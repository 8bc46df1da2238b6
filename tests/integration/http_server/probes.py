"""Valid, invalid and malicious HTTP/1.1 messages, and what a listener must make of each."""

from collections.abc import Sequence

from msgspec import Struct

HOST = b"Host: a\r\n"
Sent = Sequence[bytes | float]
Read = tuple[str, str, str, bytes]
"""Method, path, query and body, as the gateway's handler receives them."""


class Probe(Struct, frozen=True):
    """Bytes to send, and the requests that must reach the handler.

    ``sent`` are bytes and pauses in seconds. ``statuses`` are the expected ones, by default 200 for
    each of the requests in ``read``. ``ends`` says that the listener must close the connection.
    """

    name: str
    sent: Sent
    read: Sequence[Read] = ()
    statuses: Sequence[int] = ()
    ends: bool = False


def build_request(
    *headers: bytes, line: bytes = b"POST /x HTTP/1.1", host: bytes = HOST, body: bytes = b""
) -> bytes:
    """Build one request; ``headers`` are lines without line ends."""
    return b"".join([line, b"\r\n", host, *[one + b"\r\n" for one in headers], b"\r\n", body])


def _build_length_request(value: bytes) -> bytes:
    return build_request(b"Content-Length: " + value, body=b"abcd")


def _build_coding_request(value: bytes, body: bytes = b"4\r\nabcd\r\n0\r\n\r\n") -> bytes:
    return build_request(b"Transfer-Encoding: " + value, body=body)


def _build_chunked_request(body: bytes) -> bytes:
    return _build_coding_request(b"chunked", body)


LENGTHS = [
    b"+4",
    b"-4",
    b"4,4",
    b"4, 4",
    b"0x4",
    b"4a",
    b"a",
    b"4 4",
    b"4.0",
    b"1e1",
    b"\xef\xbc\x94",
    b"9" * 30,
    b"18446744073709551616",
    b"4;",
    b"'4'",
    b"4\x00",
    b"4\x0b",
    b"--4",
    b"4_0",
]
CODINGS = [
    b"identity",
    b"xchunked",
    b"chunkedx",
    b"gzip",
    b"\x0bchunked",
    b"chunked\x00",
    b"chunked;q=1",
    b"chunked, gzip",
    b"chun ked",
    b"\xe3\x84\xa1",
    b"'chunked'",
    b"deflate",
    b"compress",
    b"trailers",
]
SIZES = [
    b"zz",
    b"-4",
    b"+4",
    b"0x4",
    b"4 4",
    b"",
    b" 4",
    b"4\x00",
    b"4a b",
    b"ffffffffffffffffff",
    b"4\x0b",
    b"4,",
    b"_4",
    b"\xef\xbc\x94",
    b"g",
    b"4\n4",
]
LINES = [
    b"GET / HTTP/9.9",
    b"GET / HTTP/2.0",
    b"GET / HTTP/1.1 x",
    b"GET /",
    b"GET",
    b"",
    b"/ HTTP/1.1",
    b"GET / HTTP/1",
    b"GET / HTTP/1.",
    b"GET / HTTP/.1",
    b"GET / HTP/1.1",
    b"GET / http/1.1",
    b"G\x00T / HTTP/1.1",
    b"GET\x00/ HTTP/1.1",
    b"GE T / HTTP/1.1",
    b"G(T / HTTP/1.1",
    b"GET / HTTP/1.1\x00",
    b"GET / HTTP/11",
    b"GET / HTTP/1.12",
    b"GET /\x00 HTTP/1.1",
    b"<html>",
    b"GET / /x HTTP/1.1",
    b"G\xc3\x89T / HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"GET / FTP/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-OpenSSH_9.0",
    b"*1",
    b"EHLO there",
    b"{}",
    b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff",
    b"GET / HTTP/-1.1",
    b"GET / HTTP/1.x",
    b"1GET / HTTP/1.1 1",
    b"GET:/ HTTP/1.1",
    b"=GET / HTTP/1.1@",
    b"GET / RTSP/1.0",
    b"OPTIONS / RTSP/1.0",
    b"SOURCE / ICE/1.0",
    b"GET  / HTTP/1.1",
    b"GET /  HTTP/1.1",
]
HEADERS = [
    b"A : b",
    b" A: b",
    b"A\x00: b",
    b"A: b\x00c",
    b": b",
    b"A",
    b"A b: c",
    b"A\tb: c",
    b"A\x0b: b",
    b"A(b): c",
    b"A: b\rc",
    b"\xc3\xa9: b",
    b"A@b: c",
    b"A[: c",
    b"A{}: c",
    b'A"b: c',
    b"A/b: c",
    b"A;b: c",
    b"A=b: c",
    b"A?b: c",
    b"A,b: c",
    b"A<b: c",
    b"A\x7fb: c",
    b"A\x01b: c",
    b"A: b\x01c",
    b"A: b\x7fc",
]
DOUBLED = [
    (b"Content-Length: 4", b"Content-Length: 5"),
    (b"Content-Length: 4", b"Content-Length: 4"),
    (b"Content-Length: 5", b"Content-Length: 4"),
    (b"Content-Length: 4", b"Transfer-Encoding: chunked"),
    (b"Transfer-Encoding: chunked", b"Content-Length: 4"),
    (b"Transfer-Encoding: chunked", b"Content-Length: 0"),
    (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    (b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    (b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"),
    (b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"),
    (b"Transfer-encoding: chunked", b"content-length: 4"),
    (b"TRANSFER-ENCODING: chunked", b"CONTENT-LENGTH: 4"),
    (b"Content-Length: 4", b"Transfer-Encoding: identity"),
    (b"Host: b", b"Content-Length: 4"),
    (b"Host: a", b"Content-Length: 4"),
    (b"Content-Length: 4", b"Host: b"),
]


def _format_bytes(data: bytes) -> str:
    return ascii(data[:24])[2:-1]


def _build_refused_probes() -> list[Probe]:
    probes = [
        Probe(f"length {_format_bytes(one)}", [_build_length_request(one)]) for one in LENGTHS
    ]
    probes += [
        Probe(f"coding {_format_bytes(one)}", [_build_coding_request(one)]) for one in CODINGS
    ]
    probes += [Probe(f"line {_format_bytes(one)}", [build_request(line=one)]) for one in LINES]
    probes += [Probe(f"header {_format_bytes(one)}", [build_request(one)]) for one in HEADERS]
    body = b"4\r\nabcd\r\n0\r\n\r\n"
    probes += [
        Probe(
            f"doubled {_format_bytes(one)} {_format_bytes(two)}",
            [build_request(one, two, body=body)],
        )
        for one, two in DOUBLED
    ]
    big = b"x" * 9000
    probes += [
        Probe("no host", [build_request(host=b"")]),
        Probe("a list of hosts", [build_request(host=b"Host: a, b\r\n")]),
        Probe(
            "two Authorization headers",
            [build_request(b"Authorization: Bearer a", b"Authorization: Bearer b")],
        ),
        Probe("folded header", [b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n"]),
        Probe("folded by a tab", [b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n\tc\r\n\r\n"]),
        Probe("a bare CR ends a line", [b"GET / HTTP/1.1\rHost: a\r\n\r\n"]),
        Probe("a long header", [build_request(b"A: " + big)]),
        Probe("a long name", [build_request(big + b": a")]),
        Probe("a long target", [build_request(line=b"GET /" + big + b" HTTP/1.1")]),
        Probe("5000 headers", [build_request(*[b"A%d: b" % n for n in range(5000)])]),
        Probe("200 headers", [build_request(*[b"A%d: b" % n for n in range(200)])]),
        Probe("1 MB of headers", [b"GET / HTTP/1.1\r\n", *[b"A: " + b"x" * 8000 + b"\r\n"] * 130]),
        Probe("a header without end", [b"GET / HTTP/1.1\r\nA: ", *[b"x" * 8000] * 40]),
        Probe("a target without end", [b"GET /", *[b"x" * 8000] * 40]),
        Probe(
            "HTTP/1.0 in chunks",
            [build_request(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0", body=body)],
        ),
    ]
    return probes


def _build_accepted_probes() -> list[Probe]:
    get = build_request(line=b"GET /a?b=c HTTP/1.1")
    request: Read = ("GET", "/a", "b=c", b"")
    post: Read = ("POST", "/x", "", b"abcd")
    chunked = _build_chunked_request(b"4\r\nabcd\r\n0\r\n\r\n")
    probes = [
        Probe("plain", [get], [request]),
        Probe("a length", [_build_length_request(b"4")], [post]),
        Probe("a length with zeros", [_build_length_request(b"0004")], [post]),
        Probe("chunks", [chunked], [post]),
        Probe("chunks in capitals", [_build_coding_request(b"Chunked")], [post]),
        Probe(
            "chunks with zeros", [_build_chunked_request(b"0004\r\nabcd\r\n000\r\n\r\n")], [post]
        ),
        Probe("two chunks", [_build_chunked_request(b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n")], [post]),
        Probe("an extension", [_build_chunked_request(b"4;a=b\r\nabcd\r\n0\r\n\r\n")], [post]),
        Probe("a trailer", [_build_chunked_request(b"4\r\nabcd\r\n0\r\nA: b\r\n\r\n")], [post]),
        Probe(
            "a trailer names a length",
            [_build_chunked_request(b"4\r\nabcd\r\n0\r\nX-Content-Length: 9\r\n\r\n")],
            [post],
        ),
        Probe(
            "byte by byte",
            [x for n in range(len(chunked)) for x in (chunked[n : n + 1], 0.0)],
            [post],
        ),
        Probe("one after the other", [get, 0.1, get], [request, request]),
        Probe("at once", [get + get + get], [request] * 3),
        Probe("many at once", [get * 40], [request] * 40),
        Probe(
            "bodies at once", [chunked + _build_length_request(b"4") + get], [post, post, request]
        ),
        Probe("an empty line before", [b"\r\n" + get], [request]),
        Probe(
            "close",
            [build_request(b"Connection: close", line=b"GET /a?b=c HTTP/1.1")],
            [request],
            ends=True,
        ),
        Probe(
            "what follows close is not read",
            [build_request(b"Connection: close", line=b"GET /a?b=c HTTP/1.1") + get],
            [request],
            ends=True,
        ),
        Probe(
            "HTTP/1.0", [build_request(line=b"GET /a?b=c HTTP/1.0", host=b"")], [request], ends=True
        ),
        Probe(
            "HTTP/1.0 kept",
            [build_request(b"Connection: keep-alive", line=b"GET /a?b=c HTTP/1.0")],
            [request],
        ),
        Probe(
            "an upgrade that is not followed",
            [
                build_request(
                    b"Connection: Upgrade, HTTP2-Settings",
                    b"Upgrade: h2c",
                    b"HTTP2-Settings: AAMAAABkAAQAAP__",
                    line=b"GET /a?b=c HTTP/1.1",
                )
            ],
            [request],
        ),
        Probe(
            "an upgrade with a body",
            [
                build_request(
                    b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 4", body=b"abcd"
                )
            ],
            [post],
        ),
        Probe(
            "HEAD",
            [build_request(line=b"HEAD /a?b=c HTTP/1.1") + get],
            [("HEAD", "/a", "b=c", b""), request],
        ),
        Probe(
            "a body that was waited for",
            [build_request(b"Content-Length: 4", b"Expect: 100-continue"), 0.1, b"abcd"],
            [post],
            [100, 200],
        ),
        Probe(
            "one that was not",
            [build_request(b"Content-Length: 4", b"Expect: 100-continue", body=b"abcd")],
            [post],
        ),
        Probe(
            "too large by its length",
            [_build_length_request(b"2000000")],
            statuses=[413],
            ends=True,
        ),
        Probe(
            "too large by and by",
            [
                _build_chunked_request(b"20000\r\n" + b"x" * 0x20000 + b"\r\n"),
                *[b"20000\r\n" + b"x" * 0x20000 + b"\r\n"] * 12,
            ],
            statuses=[413],
            ends=True,
        ),
        Probe(
            "refused unread",
            [
                build_request(
                    b"Content-Length: 9999999", line=b"POST /deny HTTP/1.1", body=b"x" * 100_000
                )
            ],
            statuses=[401],
            ends=True,
        ),
        Probe(
            "a stream", [build_request(line=b"GET /stream HTTP/1.1")], [("GET", "/stream", "", b"")]
        ),
        Probe(
            "a stream over HTTP/1.0",
            [build_request(line=b"GET /stream HTTP/1.0")],
            [("GET", "/stream", "", b"")],
            ends=True,
        ),
        Probe(
            "a host before the path",
            [build_request(line=b"GET http://a/a?b=c HTTP/1.1")],
            [request],
        ),
        Probe(
            "120 headers",
            [build_request(*[b"A%d: b" % n for n in range(120)], line=b"GET /a?b=c HTTP/1.1")],
            [request],
        ),
    ]
    paths = [
        b"//a",
        b"/a/../b",
        b"/%2e%2e/b",
        b"/%00",
        b"/a%2fb",
        b"/./a",
        b"/a//b",
        b"/%zz",
        b"/a;b",
        b"/~a",
        b"*",
    ]
    probes += [
        Probe(
            f"path {_format_bytes(one)}",
            [build_request(line=b"GET " + one + b" HTTP/1.1")],
            [("GET", one.decode(), "", b"")],
        )
        for one in paths
    ]
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        line = f"{method} /a?b=c HTTP/1.1".encode()
        probes.append(Probe(method, [build_request(line=line)], [(method, "/a", "b=c", b"")]))
    small = b"".join(b"1\r\n%c\r\n" % one for one in b"abcd" * (1 << 15))
    probes.append(
        Probe(
            "chunks of one byte",
            [_build_chunked_request(small + b"0\r\n\r\n")],
            [("POST", "/x", "", b"abcd" * (1 << 15))],
        )
    )
    for n in range(1, len(get)):
        probes.append(Probe(f"cut after {n}", [get[:n], 0.02, get[n:]], [request]))
    for n in range(40, len(chunked)):
        probes.append(Probe(f"body cut after {n}", [chunked[:n], 0.02, chunked[n:]], [post]))
    return probes


def _build_broken_body_probes() -> list[Probe]:
    """A valid head with an invalid body: an error response, then the connection is closed."""
    probes = [
        Probe(
            f"size {_format_bytes(one)}",
            [_build_chunked_request(one + b"\r\nabcd\r\n0\r\n\r\n")],
            statuses=[400],
            ends=True,
        )
        for one in SIZES
    ]
    return [
        *probes,
        Probe(
            "a chunk longer than its size",
            [_build_chunked_request(b"4\r\nabcdefgh\r\n0\r\n\r\n")],
            statuses=[400],
            ends=True,
        ),
        Probe(
            "lines end in LF",
            [_build_chunked_request(b"4\nabcd\n0\n\n")],
            statuses=[400],
            ends=True,
        ),
        *[
            Probe(
                f"{name} without end",
                [_build_chunked_request(b"4\r\nabcd\r\n" + begin), *[again * 2000] * 40],
                statuses=[400],
                ends=True,
            )
            for name, begin, again in (
                ("a trailer", b"0\r\nA: ", b"xxxx"),
                ("trailers", b"0\r\n", b"A: b\r\n"),
                ("an extension", b"4;a=", b"xxxx"),
            )
        ],
    ]


def _build_later_probes() -> list[Probe]:
    """Request smuggling: bytes after a valid request that a proxy may read differently."""
    request: Read = ("GET", "/a", "b=c", b"")
    body = b"4\r\nabcd\r\n0\r\n\r\n"
    requests = [(f"length {_format_bytes(one)}", _build_length_request(one)) for one in LENGTHS]
    requests += [(f"coding {_format_bytes(one)}", _build_coding_request(one)) for one in CODINGS]
    requests += [
        (f"doubled {_format_bytes(one)} {_format_bytes(two)}", build_request(one, two, body=body))
        for one, two in DOUBLED
    ]
    get = build_request(line=b"GET /a?b=c HTTP/1.1")
    return [Probe(f"then {name}", [get, 0.2, bad], [request]) for name, bad in requests]


REFUSED = _build_refused_probes()
LATER = _build_later_probes()
ACCEPTED = [*_build_accepted_probes(), *_build_broken_body_probes()]
