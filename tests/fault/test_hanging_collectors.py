"""53: a collector of traces and metrics hangs or is down. Responses are unaffected."""

import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.waiting import wait_until

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
BUFFER = 10
REQUESTS = 100
SCRAPERS = 10


@contextmanager
def run_silent_listener() -> Iterator[tuple[str, list[socket.socket]]]:
    """Run a listener that accepts connections and never reads or writes."""
    taken: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                taken.append(listener.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in taken:
                one.close()


@asynccontextmanager
async def run_gateway(folder: Path, url: str) -> AsyncIterator[GatewayProcess]:
    text = build_config(
        observe={
            "access_log": {"format": "off"},
            "traces": {"otlp": url, "sample": 1, "buffer": BUFFER},
            "metrics": {"push": {"otlp": url, "interval": "10ms"}},
        }
    )
    async with GatewayProcess(folder, text) as gateway:
        yield gateway


async def send_chats(gateway: GatewayProcess, times: int) -> None:
    """Send requests, each faster than the gateway's timeout for a collector."""
    async with httpx.AsyncClient(timeout=4) as http:
        for _ in range(times):
            response = await http.post(f"{gateway.urls[0]}/v1/chat/completions", json=REQUEST)
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")


async def get_dropped_traces(gateway: GatewayProcess) -> float:
    page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")
    [dropped] = re.findall(r"^interlingua_traces_dropped_total (\S+)$", page.text, re.MULTILINE)
    return float(dropped)


@pytest.mark.fault(53)
async def test_hanging_collector_drops_traces_and_no_responses(tmp_path: Path) -> None:
    with run_silent_listener() as (url, taken):
        async with run_gateway(tmp_path, url) as gateway:
            await send_chats(gateway, 1)
            await wait_until(lambda: len(taken) >= 2)  # traces and metrics

            await send_chats(gateway, REQUESTS)

            assert REQUESTS - BUFFER <= await get_dropped_traces(gateway) <= REQUESTS + 1
            assert await gateway.stop() == 0


@pytest.mark.fault(53)
async def test_unreachable_collector_does_not_affect_responses(tmp_path: Path) -> None:
    with run_silent_listener() as (url, _):
        pass
    async with run_gateway(tmp_path, url) as gateway:
        await send_chats(gateway, REQUESTS)
        await wait_until(lambda: "accepts nothing" in gateway.read_output())

        await send_chats(gateway, 1)

        assert await gateway.stop() == 0

    assert gateway.read_output().count("accepts nothing") <= 2


@pytest.mark.fault(53)
async def test_metrics_scraper_that_never_reads_does_not_affect_responses(
    tmp_path: Path,
) -> None:
    """Several scrapers request more pages than the socket buffers hold."""
    async with GatewayProcess(tmp_path, build_config()) as gateway:
        before = gateway.get_resident_memory()
        host = httpx.URL(gateway.urls[-1])
        request = f"GET /metrics HTTP/1.1\r\nHost: {host.host}:{host.port}\r\n\r\n".encode()
        scrapers = [
            _connect_with_small_buffer(str(host.host), host.port or 0) for _ in range(SCRAPERS)
        ]
        for one in scrapers:
            one.sendall(request * 100)
        await send_chats(gateway, REQUESTS)

        page = await gateway.http.get(f"{gateway.urls[-1]}/metrics")

        assert f'outcome="ok",protocol="openai",split="",version="1"}} {REQUESTS}.0' in page.text
        assert gateway.get_resident_memory() - before < 64 << 20
        assert await gateway.stop() == 0

        for one in scrapers:
            one.close()


def _connect_with_small_buffer(host: str, port: int) -> socket.socket:
    """Open a connection with a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, port))
    return client
