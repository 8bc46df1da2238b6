"""A client that speaks HTTP/2 gets an error which says that only HTTP/1.1 is served."""

import asyncio
import ssl
from pathlib import Path

import pytest

from tests.conftest import Serve
from tests.support.waiting import PATIENCE

PEM = Path(__file__).parents[2] / "fault" / "loopback.pem"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
CONFIG = """
listeners:
  - {{address: "127.0.0.1:0", protocols: [openai]{tls}}}
backends: {{e: {{kind: echo}}}}
models: {{chat: {{backend: e}}}}
"""


async def exchange(port: int, *pieces: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [PREFACE + SETTINGS],
        [PREFACE, SETTINGS],
        [PREFACE[:9], PREFACE[9:20], PREFACE[20:] + SETTINGS],
    ],
    ids=["at once", "and settings", "in pieces"],
)
async def test_http2_preface_is_answered_with_505(serve: Serve, pieces: list[bytes]) -> None:
    running = await serve(CONFIG.format(tls=""))
    response = await exchange(running.port, *pieces)

    assert response.split(b" ", 2)[1] == b"505"
    assert response.endswith(
        b"\r\n\r\nHTTP/2 is not supported: use HTTP/1.1, or a proxy that translates it\n"
    )


@pytest.mark.parametrize(
    ("offered", "chosen"), [(["h2", "http/1.1"], "http/1.1"), ([], None)], ids=["both", "none"]
)
async def test_tls_offers_only_http11(serve: Serve, offered: list[str], chosen: str | None) -> None:
    running = await serve(CONFIG.format(tls=f", tls: {{cert: {PEM}, key: {PEM}}}"))
    context = ssl.create_default_context(cafile=PEM)
    context.check_hostname = False
    if offered:
        context.set_alpn_protocols(offered)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=context)
    tls = writer.get_extra_info("ssl_object")

    assert tls.selected_alpn_protocol() == chosen

    writer.close()
    response = await exchange(running.port, PREFACE, tls=context)
    assert b" 505 " in response.partition(b"\r\n")[0]
