"""The admin listener's status, requests and page with several processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.test_processes import list_serving_pids, wait_until_both_serve
from tests.support.waiting import PATIENCE

SLOW = {"kind": "echo", "script": ["a", "b"], "delay": "30s"}
TEXT = build_config(
    limits={"shutdown_delay": "0s", "drain_timeout": "1s", "connections": 4000},
    backends={
        "echo": {"kind": "echo", "script": ["Hello", " world"]},
        "slow": SLOW,
        "begun": {"kind": "echo", "script": ["a"] * 50, "delay": "100ms"},
        "pool": {
            "protocol": "openai",
            "workers": ["http://127.0.0.1:9"],
            "health": {"interval": "1h"},
        },
    },
    models={
        "m": {"backend": "echo"},
        "slow": {"backend": "slow"},
        "begun": {"backend": "begun"},
        "far": {"backend": "pool"},
    },
)


def build_chat_body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}


class TwoProcessGateway(Struct):
    """A gateway of two processes, and an HTTP client of its admin listener."""

    gateway: GatewayProcess
    admin: httpx.AsyncClient

    async def chat(self, model: str, id: str = "") -> httpx.Response:  # noqa: A002 - as it is called
        """Send a chat request on a new connection, so that either process may accept it."""
        headers = {"x-request-id": id} if id else {}
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"{self.gateway.urls[0]}/v1/chat/completions"
            return await client.post(url, json=build_chat_body(model), headers=headers)

    async def until(self, what: Callable[[list[Any]], object]) -> list[Any]:
        async with asyncio.timeout(PATIENCE):
            while True:
                requests: list[Any] = (await self.admin.get("/-/requests")).json()["requests"]
                if what(requests):
                    return requests
                await asyncio.sleep(0.02)


@pytest.fixture
async def gateway_of_two(tmp_path: Path) -> AsyncIterator[TwoProcessGateway]:
    async with (
        GatewayProcess(tmp_path, TEXT, "--processes", "2") as gateway,
        httpx.AsyncClient(base_url=gateway.urls[-1], timeout=30) as admin,
    ):
        await wait_until_both_serve(gateway)
        yield TwoProcessGateway(gateway, admin)


async def test_admin_listener_aggregates_status_requests_and_cancel_over_processes(
    gateway_of_two: TwoProcessGateway,
) -> None:
    for _ in range(6):
        await gateway_of_two.chat("m")
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(gateway_of_two.chat("slow", f"r{n}")) for n in range(6)]
        requests = await gateway_of_two.until(lambda requests: len(requests) == 6)
        assert {one["id"] for one in requests} == {f"r{n}" for n in range(6)}
        assert [one["age"] for one in requests] == sorted(
            (one["age"] for one in requests), reverse=True
        )

        status = (await gateway_of_two.admin.get("/-/status")).json()
        assert (status["processes"], status["running"]) == (2, 6)

        for n in range(6):
            ended = await gateway_of_two.admin.post(f"/-/requests/r{n}/cancel")
            assert (ended.status_code, ended.json()) == (200, {"cancelled": 1})
    assert [task.result().status_code for task in running] == [499] * 6
    assert (await gateway_of_two.admin.post("/-/requests/r0/cancel")).status_code == 404

    status = (await gateway_of_two.admin.get("/-/status")).json()
    figures = {one["model"]: one for one in status["stats"]}
    assert (figures["m"]["requests"], figures["slow"]["errors"]) == (6, 6)
    assert [one["url"] for one in status["workers"]["pool"]] == ["http://127.0.0.1:9"]

    history = (await gateway_of_two.admin.get("/-/history")).json()
    recent = {one["model"]: one for one in history["versions"]}
    assert (recent["m"]["requests"], recent["slow"]["errors"][0]["count"]) == (6, 6)

    finished = (await gateway_of_two.admin.get("/-/requests/finished")).json()["requests"]
    assert [one["model"] for one in finished] == ["slow"] * 6 + ["m"] * 6
    assert status["listeners"][0]["url"] == gateway_of_two.gateway.urls[0]

    whole = (await gateway_of_two.admin.get("/-/config")).json()
    assert whole["config"]["limits"]["connections"] == 4000
    assert whole["file"]["differs"] is False
    assert whole["config"]["listeners"][0]["address"] == "127.0.0.1:0"


async def test_admin_page_and_playground_work_with_several_processes(
    gateway_of_two: TwoProcessGateway,
) -> None:
    led = await gateway_of_two.admin.get("/")
    assert (led.status_code, led.headers["location"]) == (302, "/-/ui/")

    page = await gateway_of_two.admin.get("/-/ui/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")

    url = "/-/playground/0/v1/chat/completions"
    whole = await gateway_of_two.admin.post(url, json=build_chat_body("m"))
    assert whole.json()["choices"][0]["message"]["content"] == "Hello world"
    assert (await gateway_of_two.admin.get("/-/playground/0/v1/models")).json()["data"][0][
        "id"
    ] == "m"

    elsewhere = await gateway_of_two.admin.post(
        url, json=build_chat_body("m"), headers={"Origin": "http://evil.example"}
    )
    assert elsewhere.status_code == 403

    async with gateway_of_two.admin.stream(
        "POST", url, json=build_chat_body("begun", stream=True)
    ) as response:
        pieces = response.aiter_raw()
        for _ in range(3):
            await anext(pieces)

        [running] = await gateway_of_two.until(len)

        assert running["phase"] == "streaming"
    await gateway_of_two.until(lambda requests: not requests)

    async def lose_it() -> None:
        async with gateway_of_two.admin.stream(
            "POST", url, json=build_chat_body("begun", stream=True)
        ) as response:
            async for _ in response.aiter_raw():
                for one in list_serving_pids(gateway_of_two.gateway):
                    os.kill(one, signal.SIGKILL)

    with pytest.raises(httpx.RemoteProtocolError):
        await lose_it()


async def test_restarted_process_inherits_the_drain_state(
    gateway_of_two: TwoProcessGateway,
) -> None:
    assert (await gateway_of_two.admin.post("/-/drain")).json() == {"draining": True}
    assert (await gateway_of_two.admin.get("/-/ready")).status_code == 503

    for one in list_serving_pids(gateway_of_two.gateway):
        os.kill(one, signal.SIGKILL)
    async with asyncio.timeout(30):
        while (again := await gateway_of_two.admin.get("/-/status")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert again.json()["draining"] is True
    assert (await gateway_of_two.admin.get("/-/ready")).status_code == 503

    await wait_until_both_serve(gateway_of_two.gateway)
    assert (await gateway_of_two.admin.delete("/-/drain")).json() == {"draining": False}
    assert (await gateway_of_two.admin.get("/-/ready")).status_code == 200
