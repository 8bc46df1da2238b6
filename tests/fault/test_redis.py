"""50: the Redis of shared limits is down, frozen, slow, flushed or full.

No request waits for it.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from gateway.config.schema import StoreFailurePolicy
from gateway.ratelimit import redis_leases
from gateway.ratelimit.leases import RATE_LEASE_SHARE
from gateway.ratelimit.redis_leases import RedisLeaseStore
from tests.conftest import RunningGateway, Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE, wait_until

OPEN = Path("/proc/self/fd")
DAILY, RATE, SLOTS = 100, 50, 4
LIMITS = {
    "daily": {"requests": f"{DAILY}/day"},
    "rate": {"requests": f"{RATE}/s"},
    "slow": {"concurrent": SLOTS},
}
BACKENDS = {
    "echo": {"kind": "echo", "script": ["Hello"]},
    "slow": {
        "kind": "echo",
        "script": ["first", "second", "third", "fourth", "fifth"],
        "delay": "100ms",
    },
}
MODELS = {name: {"backend": "slow" if name == "slow" else "echo"} for name in LIMITS}


def build_redis_config(redis: RedisServer, limits: Any = None, **state: Any) -> str:
    return build_config(
        backends=BACKENDS,
        models=MODELS,
        defaults={"limits": limits or {"models": LIMITS}},
        state={"redis": redis.url, "replicas": 2} | state,
    )


def build_body(model: str, *, stream: bool = False) -> dict[str, Any]:
    return {"model": model, "prompt": "Hello", "stream": stream}


# ── two gateways with one limit ───────────────────────────────────────────────────────────────────


class KillableGateway(GatewayProcess):
    """A gateway that a test can kill."""

    async def stop(self, within: float = 30.0) -> int:
        code = await super().stop(within)
        return 0 if code == -9 else code


class LoadGenerator:
    """Clients of several gateways, each of which sends a request after its last response."""

    def __init__(self, model: str, clients: int = 2) -> None:
        self.statuses = Counter[int]()
        self.open = 0
        """Streams that have not ended."""
        self.running = self.most = 0
        """Streams with much left to send: at least as many requests run in the gateways."""
        self._model = model
        self._clients = clients

    @asynccontextmanager
    async def on(self, *gateways: GatewayProcess) -> AsyncIterator[None]:
        """Send requests inside the block."""
        clients = [self._ask(one) for one in gateways for _ in range(self._clients)]
        tasks = [asyncio.ensure_future(one) for one in clients]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, gateway: GatewayProcess) -> None:
        url, body = f"{gateway.urls[0]}/v1/completions", build_body(self._model, stream=True)
        while True:
            async with gateway.http.stream("POST", url, json=body) as response:
                self.statuses[response.status_code] += 1
                if response.status_code == 200:
                    await self._read(response)
            await asyncio.sleep(0.005)

    async def _read(self, answer: httpx.Response) -> None:
        self.open += 1
        self.running += 1
        self.most = max(self.most, self.running)
        runs = True
        try:
            async for piece in answer.aiter_lines():
                if runs and "third" in piece:
                    self.running -= 1
                    runs = False
        finally:
            self.open -= 1
            self.running -= runs


@pytest.mark.fault(50)
async def test_two_gateways_never_exceed_shared_limits(tmp_path: Path) -> None:
    """Daily, per second, and concurrent limits hold.

    One gateway is killed: the other gets its slots.
    """
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        text = build_redis_config(redis)
        a, b = [await stack.enter_async_context(KillableGateway(one, text)) for one in folders]

        daily = LoadGenerator("daily")
        async with daily.on(a, b):
            await wait_until(lambda: daily.statuses[200] >= DAILY)
            refused = daily.statuses[429]
            await wait_until(lambda: daily.statuses[429] > refused + 100)
        assert daily.statuses == {200: DAILY, 429: daily.statuses[429]}

        rate, clock = LoadGenerator("rate"), asyncio.get_running_loop().time
        began = clock()
        async with rate.on(a, b):
            await wait_until(lambda: rate.statuses[200] >= 3 * RATE)

        assert set(rate.statuses) == {200, 429}
        assert rate.statuses[200] <= RATE * (1 + clock() - began)

        slow = LoadGenerator("slow", clients=SLOTS)
        async with slow.on(a, b):
            await wait_until(lambda: slow.statuses[200] > 2 * SLOTS)
            a.process.kill()
            await wait_until(lambda: slow.open == SLOTS)
        assert slow.most == SLOTS

        page = await b.http.get(f"{b.urls[-1]}/metrics")
        assert "interlingua_ratelimit_store_up 1.0" in page.text
        assert "interlingua_ratelimit_store_errors_total 0.0" in page.text


@pytest.mark.fault(50)
async def test_requests_before_the_first_lease_are_bounded_by_one_lease(
    serve: Serve,
) -> None:
    """The limit is used up by another gateway, and this one does not know it yet."""
    with RedisServer() as redis:
        one, other = [await serve(build_redis_config(redis, {"requests": "40/day"})) for _ in "ab"]
        used = Counter[int]()

        while used[200] < 40:
            used += await count_statuses(one, 10)
            await asyncio.sleep(0.05)

        assert used[200] == 40
        assert 0 < (await count_statuses(other, 40))[200] <= math.ceil(40 / 2 * RATE_LEASE_SHARE)


# ── failures of Redis ─────────────────────────────────────────────────────────────────────────────

PART = 5
"""Each of two gateways has half of 10 a day."""
REFUSED: dict[StoreFailurePolicy, int] = {"local": 429, "open": 200, "closed": 503}


def get_store(gateway: RunningGateway) -> RedisLeaseStore:
    assert gateway.app._shared_limits is not None
    return gateway.app._shared_limits._store


async def count_statuses(gateway: RunningGateway, times: int) -> Counter[int]:
    answers = [
        await gateway.http.post("/v1/completions", json=build_body("rate")) for _ in range(times)
    ]
    return Counter(one.status_code for one in answers)


async def send_until(
    gateway: RunningGateway, true: Callable[[], object], within: float = PATIENCE
) -> Counter[int]:
    """Send requests until the condition is true; return the number of each status."""
    statuses = Counter[int]()
    async with asyncio.timeout(within):
        while not true():
            statuses += await count_statuses(gateway, 1)
            await asyncio.sleep(0.01)
    return statuses


@pytest.mark.fault(50)
@pytest.mark.parametrize("policy", REFUSED)
async def test_failure_policy_applies_while_redis_is_down(
    serve: Serve, policy: StoreFailurePolicy
) -> None:
    with RedisServer() as redis:
        text = build_redis_config(redis, {"requests": f"{2 * PART}/day"}, on_failure=policy)
        gateway = await serve(text)
        assert await count_statuses(gateway, 1) == {200: 1}

        redis.kill()
        before = 1 + (await send_until(gateway, lambda: not get_store(gateway).up))[200]
        statuses = await count_statuses(gateway, 3 * PART)
        own = statuses.pop(200) if policy == "local" else 0

        assert statuses == {REFUSED[policy]: 3 * PART - own}
        # The local part includes what was used before the outage.
        assert own == (PART - before if policy == "local" else 0)


@pytest.mark.fault(50)
async def test_limits_are_shared_again_after_redis_recovers(serve: Serve) -> None:
    """Redis is down at the start; usage during the outage is not charged to the shared limit."""
    with RedisServer() as redis:
        redis.kill()
        gateway = await serve(build_redis_config(redis, {"requests": f"{2 * PART}/day"}))
        statuses = await send_until(gateway, lambda: not get_store(gateway).up)
        statuses += await count_statuses(gateway, 3 * PART)

        assert PART <= statuses[200] <= 2 * PART

        redis.start()
        await send_until(gateway, lambda: get_store(gateway).up, 2 * redis_leases.STORE_RETRY_DELAY)
        assert (await count_statuses(gateway, 1)) == {200: 1}
        assert redis.call("KEYS", "*") == [b"interlingua:/requests/"]


@pytest.mark.fault(50)
async def test_requests_do_not_wait_for_a_hanging_redis(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer() as redis:
        gateway = await serve(
            build_redis_config(redis, {"requests": "1000000/day", "concurrent": 100})
        )
        requested = asyncio.Event()

        async def never(*_: object) -> None:
            requested.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(get_store(gateway), "request_leases", never)
        await send_until(gateway, requested.is_set)

        assert await count_statuses(gateway, 20) == {200: 20}

        monkeypatch.undo()


def delay_redis(redis: RedisServer) -> Callable[[], object]:
    thread = Thread(target=redis.call, args=("DEBUG", "SLEEP", "2"))
    thread.start()
    return thread.join


def freeze_redis(redis: RedisServer) -> Callable[[], object]:
    redis.freeze()
    return redis.thaw


def fill_redis(redis: RedisServer) -> Callable[[], object]:
    """Fill the memory of Redis, which evicts no key by default."""
    redis.call("CONFIG", "SET", "maxmemory", "1mb")
    return partial(redis.call, "CONFIG", "SET", "maxmemory", "0")


def kill_redis(redis: RedisServer) -> Callable[[], object]:
    redis.kill()
    return redis.start


@pytest.mark.fault(50)
async def test_gateway_recovers_from_every_redis_failure(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local limit holds meanwhile, so all clients are served; nothing leaks."""
    monkeypatch.setattr(redis_leases, "STORE_RETRY_DELAY", 0.2)
    with RedisServer("--enable-debug-command", "local") as redis:
        gateway = await serve(
            build_redis_config(redis, {"requests": "1000000/s", "concurrent": 10})
        )
        store, tasks = get_store(gateway), asyncio.all_tasks()
        assert await count_statuses(gateway, 3) == {200: 3}

        descriptors = len([*OPEN.iterdir()])
        for fail in (freeze_redis, delay_redis, fill_redis, kill_redis):
            back = fail(redis)
            assert set(await send_until(gateway, lambda: not store.up)) <= {200}
            assert await count_statuses(gateway, 3) == {200: 3}
            back()
            assert set(await send_until(gateway, lambda: store.up)) <= {200}
        errors = store.errors
        redis.call("FLUSHALL")

        assert await count_statuses(gateway, 3) == {200: 3}

        await send_until(gateway, lambda: redis.call("KEYS", "interlingua:*"))
        assert (store.up, store.errors) == (True, errors)

        await wait_until(lambda: asyncio.all_tasks() <= tasks)
        assert len([*OPEN.iterdir()]) <= descriptors
