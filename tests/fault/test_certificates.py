"""Workers with invalid certificates are rejected and named; the gateway renews its own (55)."""

import asyncio
import re
import ssl
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from cryptography import x509

from tests.conftest import Serve
from tests.fault.certificates import Authority, create_server_context, get_serial
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.protocol_clients import CHAT, STREAM, WELL, send_request, serve_gateway
from tests.support.tcp_server import run_server
from tests.support.waiting import PATIENCE, wait_until

WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "expired": ({"ended": timedelta(days=1)}, "certificate has expired"),
    "another address": ({"host": "127.0.0.2"}, "IP address mismatch"),
    "a name": ({"host": "worker.example"}, "IP address mismatch"),
    "signed by itself": ({"alone": True}, "self-signed certificate"),
}
REQUEST = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class CountingWorker:
    """Answers requests and counts the connections that sent one."""

    def __init__(self) -> None:
        self.request_count = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(WELL)
                continue
            self.request_count += 1
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            writer.write(STREAM)


async def send_to_tls_worker(serve: Serve, ca: Path, pem: Path) -> tuple[int, httpx.Response]:
    """Return the number of requests that a worker with this certificate got, and the response."""
    worker = CountingWorker()
    async with run_server(worker.answer, tls=create_server_context(pem)) as url:
        gateway = await serve_gateway(serve, url, tls={"ca": str(ca)})
        response = await send_request(gateway, CHAT, stream=True)
    return worker.request_count, response


def assert_not_connected(port: int, answer: httpx.Response) -> None:
    """The worker got no request, and the client's error does not mention certificates."""
    assert port == 0
    assert answer.status_code in (502, 503)
    assert "certificate" not in answer.text


@pytest.mark.fault(55)
@pytest.mark.parametrize("case", WRONG)
async def test_worker_with_invalid_certificate_gets_no_request(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """The log names the worker and the reason."""
    how, why = WRONG[case]
    authority = Authority(tmp_path)

    assert_not_connected(*await send_to_tls_worker(serve, authority.path, authority.issue(**how)))
    assert re.search(rf"worker https://127\.0\.0\.1:\d+ .*{why}", caplog.text)


@pytest.mark.fault(55)
async def test_worker_with_unknown_ca_gets_no_request(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose certificate the CA signed gets one."""
    authority, other = Authority(tmp_path), Authority.of_one(tmp_path)
    assert_not_connected(*await send_to_tls_worker(serve, authority.path, other.issue()))
    assert "unable to get local issuer certificate" in caplog.text

    _, response = await send_to_tls_worker(serve, authority.path, authority.issue())
    assert (response.status_code, response.text.endswith("data: [DONE]\n\n")) == (200, True)


@pytest.mark.fault(55)
async def test_certificate_renewal_under_load_loses_no_request(
    tmp_path: Path,
) -> None:
    """Open connections and streams continue; new connections get the new certificate."""
    authority = Authority(tmp_path)
    first, second = authority.issue(), authority.issue()
    pem = tmp_path / "tls.pem"
    pem.write_bytes(first.read_bytes())
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    tls = {"cert": str(pem), "key": str(pem)}
    echo = {"kind": "echo", "script": ["t "] * 5, "delay": "20ms"}
    text = build_config(listeners=[here | {"tls": tls}], backends={"echo": echo})
    trusting = ssl.create_default_context(cafile=str(authority.path))
    responses, over = list[bytes](), asyncio.Event()

    async with GatewayProcess(tmp_path, text) as gateway:

        async def client(*, keep: bool) -> None:
            connector = aiohttp.TCPConnector(ssl=trusting, force_close=not keep)
            async with aiohttp.ClientSession(connector=connector) as session:
                while not over.is_set():
                    url = f"{gateway.urls[0]}/v1/chat/completions"
                    async with session.post(url, json=REQUEST) as response:
                        responses.append(await response.read())

        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(client(keep=number % 2 == 0))
            assert await read_served(gateway, trusting) == get_serial(first.read_bytes())

            new_file = pem.with_suffix(".new")
            new_file.write_bytes(second.read_bytes())
            new_file.replace(pem)
            async with asyncio.timeout(PATIENCE):
                while await read_served(gateway, trusting) != get_serial(second.read_bytes()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            so_far = len(responses)
            await wait_until(lambda: len(responses) >= so_far + 40)
            over.set()

    assert len(responses) > 40
    assert all(one.endswith(b"data: [DONE]\n\n") for one in responses)


async def read_served(gateway: GatewayProcess, trusting: ssl.SSLContext) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trusting)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(certificate).serial_number
