"""Behind trusted proxies, the client's address comes from their headers, and only from theirs."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from tests.conftest import RunningGateway, Serve
from tests.support.waiting import PATIENCE
from tests.unit.gateway.http_server.test_proxy_protocol import SIGNATURE, build_header

PEM = Path(__file__).parents[2] / "fault" / "loopback.pem"
CONFIG = """
listeners:
  - {{address: "127.0.0.1:0", protocols: [openai]{more}}}
limits: {{header_timeout: 1s, connections: 20{limits}}}
backends: {{e: {{kind: echo}}}}
models:
  chat:
    versions: {{"1": {{backend: e}}, "2": {{backend: e}}}}
    split: {{weights: {{"1": 1, "2": 1}}, sticky: [address]}}
"""
TRUSTED = ', trusted_proxies: ["127.0.0.0/8"]'
PROXY = TRUSTED + ", proxy_protocol: v2"
BODY = b'{"model": "chat", "messages": [{"role": "user", "content": "a"}]}'


async def serve_behind(serve: Serve, settings: str = "", limits: str = "") -> RunningGateway:
    return await serve(CONFIG.format(more=settings, limits=limits))


def build_request(*headers: str) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(BODY)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + BODY


async def exchange(
    running: RunningGateway, *pieces: bytes, source: str = "127.0.0.1", end: bool = False
) -> bytes:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", running.port, local_addr=(source, 0)
    )
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        if end:
            writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def find_clients(running: RunningGateway, *pieces: bytes, source: str = "127.0.0.1") -> str:
    response = await exchange(running, *pieces, source=source)
    assert response.startswith(b"HTTP/1.1 200 "), response
    return running.records[-1].client


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([], "127.0.0.1"),
        (["X-Forwarded-For: 192.0.2.7"], "192.0.2.7"),
        (["X-Forwarded-For: 1.1.1.1, 192.0.2.7, 127.0.0.9"], "192.0.2.7"),
        (["X-Forwarded-For: 1.1.1.1", "x-forwarded-for: 192.0.2.7"], "192.0.2.7"),
        (["Forwarded: for=192.0.2.7"], "127.0.0.1"),
    ],
    ids=["none", "one", "several", "several headers", "another header"],
)
async def test_forwarded_address_of_a_trusted_proxy_is_the_client(
    serve: Serve, headers: Sequence[str], client: str
) -> None:
    running = await serve_behind(serve, TRUSTED)
    assert await find_clients(running, build_request(*headers)) == client


async def test_header_forwarded_is_read_where_it_is_configured(serve: Serve) -> None:
    running = await serve_behind(serve, TRUSTED + ", forwarded_header: forwarded")
    request = build_request(
        'Forwarded: for=1.1.1.1, proto=https;For="[2001:db8::7]:4711";by=127.0.0.9',
        "X-Forwarded-For: 192.0.2.8",
    )
    assert await find_clients(running, request) == "2001:db8::7"


@pytest.mark.parametrize("settings", ["", ', trusted_proxies: ["10.0.0.0/8"]'])
async def test_forwarded_address_of_others_is_ignored(serve: Serve, settings: str) -> None:
    running = await serve_behind(serve, settings)
    request = build_request("X-Forwarded-For: 192.0.2.7", "Forwarded: for=192.0.2.7")
    assert await find_clients(running, request) == "127.0.0.1"


async def test_sticky_assignment_follows_the_forwarded_address(serve: Serve) -> None:
    running = await serve_behind(serve, TRUSTED)
    for number in range(40):
        await exchange(running, build_request(f"X-Forwarded-For: 192.0.2.{number}"))
        await exchange(running, build_request(f"X-Forwarded-For: 192.0.2.{number}"))
    versions = [(record.client, record.version) for record in running.records]

    assert versions[::2] == versions[1::2]
    assert {version for _, version in versions} == {"1", "2"}


async def test_proxy_header_names_the_client(serve: Serve) -> None:
    running = await serve_behind(serve, PROXY)
    request = build_request()
    header = build_header("192.0.2.7")

    assert await find_clients(running, header + request) == "192.0.2.7"
    assert await find_clients(running, header, request) == "192.0.2.7"

    pieces = [header[:5], header[5:15], header[15:] + request[:10], request[10:]]
    assert await find_clients(running, *pieces) == "192.0.2.7"
    assert await find_clients(running, build_header("2001:db8::7"), request) == "2001:db8::7"
    assert await find_clients(running, build_header(command=0x20), request) == "127.0.0.1"


async def test_client_behind_proxy_header_cannot_forward_another_address(serve: Serve) -> None:
    running = await serve_behind(serve, PROXY)
    request = build_header("192.0.2.7") + build_request("X-Forwarded-For: 1.1.1.1")
    assert await find_clients(running, request) == "192.0.2.7"


@pytest.mark.parametrize(
    "data",
    [build_request(), b"PROXY TCP4 1.1.1.1 1.1.1.2 1 2\r\n" + build_request(), SIGNATURE + b"zzzz"],
    ids=["no header", "version 1", "invalid"],
)
async def test_connection_without_a_valid_proxy_header_is_closed(serve: Serve, data: bytes) -> None:
    running = await serve_behind(serve, PROXY)
    assert await exchange(running, data) == b""
    assert running.records == []

    [listener] = running.app.listeners.values()
    assert listener.refused_by_reason == {"proxy_header": 1}
    assert listener.connections == 0


async def test_proxy_header_of_others_is_refused(serve: Serve) -> None:
    settings = ', trusted_proxies: ["127.0.0.2"], proxy_protocol: v2'
    running = await serve_behind(serve, settings)
    data = build_header("192.0.2.7") + build_request()

    assert await exchange(running, data) == b""
    assert running.records == []

    [listener] = running.app.listeners.values()
    assert listener.refused_by_reason == {"proxy_untrusted": 1}
    assert await find_clients(running, data, source="127.0.0.2") == "192.0.2.7"


async def test_proxy_header_that_does_not_come_ends_with_the_header_timeout(serve: Serve) -> None:
    running = await serve_behind(serve, PROXY)
    assert await exchange(running, SIGNATURE[:4]) == b""
    assert await exchange(running, build_header()[:20], end=True) == b""

    [listener] = running.app.listeners.values()
    assert listener.connections == 0


async def test_tls_follows_the_proxy_header(serve: Serve) -> None:
    running = await serve_behind(serve, PROXY + f", tls: {{cert: {PEM}, key: {PEM}}}")
    context = ssl.create_default_context(cafile=str(PEM))
    context.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(build_header("192.0.2.7"))
    await writer.start_tls(context)
    writer.write(build_request())
    async with asyncio.timeout(PATIENCE):
        response = await reader.read()

    writer.close()

    assert response.startswith(b"HTTP/1.1 200 ")
    assert running.records[-1].client == "192.0.2.7"


async def test_connections_are_limited_by_the_address_in_the_proxy_header(serve: Serve) -> None:
    running = await serve_behind(serve, PROXY, ", connections_per_address: 2")
    held = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(build_header("192.0.2.7"))
        await writer.drain()
        held.append((reader, writer))
    await asyncio.sleep(0.1)

    assert await exchange(running, build_header("192.0.2.7") + build_request()) == b""
    assert await find_clients(running, build_header("192.0.2.8") + build_request()) == "192.0.2.8"

    for _, writer in held:
        writer.close()


async def test_trusted_proxies_may_have_more_connections_than_one_address(serve: Serve) -> None:
    running = await serve_behind(serve, TRUSTED, ", connections_per_address: 1")
    held = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(3)]

    assert await find_clients(running, build_request()) == "127.0.0.1"

    for _, writer in held:
        writer.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (", proxy_protocol: v2", "set trusted_proxies"),
        (", trusted_proxies: [everyone]", "is not an IP network"),
        (TRUSTED + ", proxy_protocol: v1", "v2"),
    ],
)
def test_invalid_settings_are_reported(settings: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_text(CONFIG.format(more=settings, limits=""), "a.yaml", env={})
