"""The wall clock jumps (54): timeouts and limits are unaffected.

All timeouts use a monotonic clock; the wall clock is only for timestamps.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.ratelimit.counters import CounterRegistry
from gateway.runtime.gateway import Gateway, build_services
from tests.conftest import RunningGateway
from tests.fault.gateway_process import build_config
from tests.fault.protocol_clients import (
    CHAT,
    DONE,
    STARTED_STREAM,
    STOP,
    assert_error_in_stream,
    build_event,
    build_pool_config,
    create_raw_worker,
    send_request,
)
from tests.support.fakes import END, HANG, chunk

HOUR = 3600.0
JUMPS = [-HOUR, HOUR]
SHORT = {"idle": "1s", "first_token": "1s"}


class JumpingClock:
    """A wall clock that jumps."""

    def __init__(self) -> None:
        self.off = 0.0

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time() + self.off


@asynccontextmanager
async def run_gateway(text: str, wall: JumpingClock) -> AsyncIterator[RunningGateway]:
    """Run a gateway with this clock."""
    records: list[Any] = []
    accounts = CounterRegistry(time.monotonic, wall.now)
    outside = replace(
        build_services(),
        observe_request=records.append,
        wall_clock=wall.now,
        counter_registry=accounts,
    )
    app = Gateway(load_text(text, "clock.yaml", env=os.environ), outside)
    [url, *_] = await app.start()
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield RunningGateway(url, app, records, http, url)
    finally:
        await app.stop()


@pytest.mark.fault(54)
@pytest.mark.parametrize("jump", JUMPS)
async def test_clock_jump_does_not_end_a_paused_stream(jump: float) -> None:
    """The pause is shorter than the timeout on a monotonic clock."""
    wall, go = JumpingClock(), asyncio.Event()
    rest = chunk(build_event("more") + STOP) + chunk(DONE) + END

    async with (
        create_raw_worker([STARTED_STREAM, go, rest]) as worker,
        run_gateway(build_pool_config([worker.url], timeouts=SHORT), wall) as gateway,
    ):
        task = asyncio.create_task(send_request(gateway, CHAT, stream=True))
        await worker.wait_for_request()
        wall.off = jump
        await asyncio.sleep(0.3)
        go.set()
        response = await task

    assert response.text.endswith("data: [DONE]\n\n")
    assert 0.2 < gateway.records[0].duration < HOUR / 2


@pytest.mark.fault(54)
@pytest.mark.parametrize("jump", JUMPS)
async def test_clock_jump_does_not_prevent_the_idle_timeout(jump: float) -> None:
    wall = JumpingClock()
    async with (
        create_raw_worker([STARTED_STREAM, HANG]) as worker,
        run_gateway(build_pool_config([worker.url], timeouts=SHORT), wall) as gateway,
    ):
        task = asyncio.create_task(send_request(gateway, CHAT, stream=True))
        await worker.wait_for_request()
        wall.off = jump

        assert_error_in_stream(await task, CHAT)

    assert 0.2 < gateway.records[0].duration < HOUR / 2


@pytest.mark.fault(54)
@pytest.mark.parametrize("jump", JUMPS)
async def test_clock_jump_does_not_change_rate_limits(jump: float) -> None:
    key = "secret"
    keys = [
        {
            "name": "k",
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "limits": {"requests": "3/min"},
        }
    ]
    wall = JumpingClock()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}]})

    async with run_gateway(build_config(admin=None, keys=keys), wall) as gateway:

        async def once() -> httpx.Response:
            path = "/v1/chat/completions"
            return await gateway.http.post(path, content=body, headers=headers)

        taken = [(await once()).status_code for _ in range(3)]
        refused = await once()
        wall.off = jump
        still = await once()

    assert taken == [200, 200, 200]
    for response in (refused, still):
        assert response.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert 0 < int(response.headers["retry-after"]) <= 60
