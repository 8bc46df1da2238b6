"""Headers of the PROXY protocol are decoded or rejected."""

import socket
import struct

import pytest

from gateway.http_server.proxy_protocol import ProxyHeaderError, parse_header

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


def build_header(client: str = "192.0.2.7", command: int = 0x21, extensions: bytes = b"") -> bytes:
    family, code = (socket.AF_INET6, 0x21) if ":" in client else (socket.AF_INET, 0x11)
    packed = socket.inet_pton(family, client)
    addresses = packed + packed + struct.pack("!HH", 1234, 443) + extensions
    return SIGNATURE + struct.pack("!BBH", command, code, len(addresses)) + addresses


@pytest.mark.parametrize(
    ("client", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
    ],
)
def test_address_of_the_client_is_read(client: str, address: str) -> None:
    header = build_header(client, extensions=b"\x04\x00\x02ab")
    assert parse_header(header + b"GET / HTTP/1.1") == (address, len(header))


def test_header_may_arrive_in_any_pieces() -> None:
    header = build_header()
    assert [parse_header(header[:size]) for size in range(len(header))] == [None] * len(header)


@pytest.mark.parametrize(
    "header",
    [
        build_header(command=0x20),
        SIGNATURE + b"\x20\x00\x00\x00",
        SIGNATURE + b"\x21\x00\x00\x03abc",
    ],
    ids=["local", "local without addresses", "unspecified"],
)
def test_connection_of_the_proxy_itself_has_no_client(header: bytes) -> None:
    assert parse_header(header) == (None, len(header))


@pytest.mark.parametrize(
    "data",
    [
        b"G",
        b"PROXY TCP4 192.0.2.7 192.0.2.8 1234 443\r\n",
        b"\x16\x03\x01\x02",
        SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12),
        SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12),
        SIGNATURE + b"\x21\x12\x00\x0c" + bytes(12),
        SIGNATURE + b"\x21\x31\x00\xd8" + bytes(216),
        SIGNATURE + b"\x21\x11\x00\x0b" + bytes(11),
        SIGNATURE + b"\x21\x21\x00\x0c" + bytes(12),
        SIGNATURE + b"\x21\x11\xff\xff",
    ],
    ids=[
        "http",
        "version 1",
        "tls",
        "another version",
        "another command",
        "udp",
        "unix",
        "short ipv4",
        "short ipv6",
        "huge",
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProxyHeaderError):
        parse_header(data)
