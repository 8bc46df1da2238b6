"""A gateway that is told to stop serves on for a while, and says to all that it leaves (47)."""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from gateway.config.loader import load_bytes
from tests.conftest import Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.protocol_clients import wait_until

ENDLESS = {"echo": {"kind": "echo", "script": ["t "] * 600, "delay": "100ms"}}
REQUEST = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
WAYS: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "two processes": ("--processes", "2"),
}


def create_gateway(folder: Path, *more: str, **limits: str) -> GatewayProcess:
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    text = build_config(listeners=[here], backends=ENDLESS, limits=limits)
    return GatewayProcess(folder, text, *more)


async def read_stream(one: GatewayProcess, began: asyncio.Event) -> str:
    """All of an answer that would take a minute."""
    url, got = f"{one.urls[0]}/v1/chat/completions", ""
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", url, json=REQUEST) as answer,
    ):
        async for text in answer.aiter_text():
            got += text
            began.set()
    return got


def create_client_without_keepalive() -> httpx.AsyncClient:
    """Each of its requests has a connection of its own."""
    return httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=20)


async def send_until_refused(
    client: httpx.AsyncClient, one: GatewayProcess
) -> list[httpx.Response]:
    """Every answer of new connections until there are none any more."""
    responses = []
    async with asyncio.timeout(30):
        while True:
            try:
                responses.append(await client.get(f"{one.urls[0]}/v1/models"))
            except httpx.TransportError:
                return responses
            await asyncio.sleep(0.05)


@pytest.mark.fault(47)
@pytest.mark.parametrize("way", WAYS)
async def test_sigterm_serves_during_shutdown_delay_and_then_drains(
    tmp_path: Path, way: str
) -> None:
    """Not ready at once; a kept connection is answered too, and what takes too long is told."""
    began = asyncio.Event()
    async with (
        create_gateway(tmp_path, *WAYS[way], shutdown_delay="2s", drain_timeout="1s") as one,
        httpx.AsyncClient() as kept_alive,
        create_client_without_keepalive() as new,
    ):
        running = asyncio.create_task(read_stream(one, began))
        await began.wait()
        assert (await kept_alive.get(f"{one.urls[0]}/health")).status_code == httpx.codes.OK
        one.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "Shutting down" in one.read_output(), 20)
        ready = await new.get(f"{one.urls[-1]}/-/ready")
        health = await kept_alive.get(f"{one.urls[0]}/health")
        observations = await send_until_refused(new, one)
        whole = await running
        await wait_until(lambda: one.process.poll() is not None, 20)

    assert ready.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert len(observations) > 1
    assert {answer.status_code for answer in observations} == {200}
    for answer in (health, *observations):
        assert answer.headers["connection"] == "close"
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
        await wait_until(lambda: one.process.poll() is not None, 20)


@pytest.mark.fault(47)
async def test_second_sigterm_ends_the_process_at_once(tmp_path: Path) -> None:
    one = create_gateway(tmp_path, shutdown_delay="1h")
    async with one:
        one.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "Shutting down" in one.read_output(), 20)
        served = await one.http.get(f"{one.urls[0]}/v1/models")
        assert served.status_code == httpx.codes.OK
        one.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: one.process.poll() is not None, 20)
        assert one.process.returncode == -signal.SIGTERM
        one.process.returncode = 0  # as GatewayProcess would have it at the end


@pytest.mark.fault(47)
async def test_drain_state_survives_a_reload_and_can_be_cancelled(
    serve: Serve,
) -> None:
    """Listeners that come with it, too."""
    here = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    front = await serve(build_config(admin=None))
    both = build_config(admin=None, listeners=[here, here]).encode()
    front.app.set_draining()
    await front.app.apply_config(load_bytes(both, "g.yaml", env={}, insecure=False))

    async def read_statuses() -> list[tuple[int, bool]]:
        async with create_client_without_keepalive() as new:
            answers = [await new.get(f"{url}/health") for url in front.app.listener_urls.values()]
        return [(one.status_code, "close" in one.headers.get("connection", "")) for one in answers]

    assert await read_statuses() == [(503, True)] * 2
    front.app.set_draining(on=False)
    assert await read_statuses() == [(200, False)] * 2
