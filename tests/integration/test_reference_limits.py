"""Stored responses that a request refers to count against the body limit, in any store."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RunningGateway, Serve
from tests.integration.test_responses_api import ANSWER, respond
from tests.support.fakes import ScriptedWorker
from tests.support.redis_server import RedisServer

PATH = "/v1/responses"
LIMIT = 64 << 10
TEXT = "x" * (LIMIT // 4)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class LimitedGateway:
    """A gateway with a small body limit in front of one worker."""

    def __init__(self, worker: ScriptedWorker, gateway: RunningGateway) -> None:
        self.worker = worker
        self.gateway = gateway
        self.loads: list[str] = []
        store: Any = gateway.app._services.reference_loader.store  # type: ignore[union-attr]
        find_response = store.find_response

        async def count_load(owner: str, name: str) -> Any:
            self.loads.append(name)
            return await find_response(owner, name)

        store.find_response = count_load

    @property
    def budget(self) -> Any:
        return self.gateway.app.memory

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.gateway.http.post(PATH, json={"model": "m", "input": "x"} | fields)

    async def store_response(self) -> tuple[str, str]:
        """Store a response with an input of a quarter of the limit; return both ids."""
        body = (await self.ask(input=TEXT)).json()
        items = (await self.gateway.http.get(f"{PATH}/{body['id']}/input_items")).json()
        self.loads.clear()
        return body["id"], items["data"][0]["id"]


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def stage(
    request: pytest.FixtureRequest, serve: Serve, tmp_path: Path
) -> AsyncIterator[LimitedGateway]:
    store: dict[str, Any] = {}
    if request.param == "sqlite":
        store = {"sqlite": str(tmp_path / "responses.db")}
    elif request.param == "redis":
        store = {"redis": request.getfixturevalue("redis").url, "prefix": tmp_path.name}
    async with ScriptedWorker([respond(ANSWER)]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"w": {"protocol": "openai", "workers": [worker.url]}},
            "models": {"m": {"backend": "w"}},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s", "body": "64KiB"},
            "stored_responses": store,
        }
        yield LimitedGateway(worker, await serve(json.dumps(config)))


def refer(name: str, count: int) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": name}] * count


async def test_references_to_one_item_load_it_once_and_count_each_time(
    stage: LimitedGateway,
) -> None:
    _, item = await stage.store_response()

    sent = await stage.ask(input=refer(item, 3))
    bytes_of_three = len(stage.worker.requests[-1].body)
    requests = len(stage.worker.requests)

    refused = await stage.ask(input=refer(item, 200))

    assert sent.status_code == 200
    assert 3 * len(TEXT) < bytes_of_three < LIMIT
    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == (
        f"the body and the stored items that it refers to are larger than {LIMIT} bytes"
    )
    assert len(stage.worker.requests) == requests
    assert len(stage.loads) == 2
    assert stage.budget.get_use("bodies") == 0


async def test_history_counts_as_the_body_does(stage: LimitedGateway) -> None:
    previous, _ = await stage.store_response()
    statuses = []

    for _ in range(4):
        response = await stage.ask(previous_response_id=previous, input=TEXT)
        statuses.append(response.status_code)
        previous = response.json().get("id", previous)

    assert statuses == [200, 200, 413, 413]
    assert max(len(request.body) for request in stage.worker.requests) < LIMIT
    assert stage.budget.get_use("bodies") == 0


async def test_history_and_stored_responses_need_room_in_the_memory_budget(
    stage: LimitedGateway,
) -> None:
    previous, _ = await stage.store_response()
    stage.budget.limit = stage.budget.used + len(TEXT)

    refused = [
        await stage.ask(previous_response_id=previous),
        await stage.gateway.http.get(f"{PATH}/{previous}"),
        await stage.gateway.http.get(f"{PATH}/{previous}/input_items"),
    ]

    assert [response.status_code for response in refused] == [503] * 3
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert stage.loads == []
    assert stage.budget.get_use("bodies") == 0


async def test_memory_of_history_is_reserved_until_the_response_ends(stage: LimitedGateway) -> None:
    previous, _ = await stage.store_response()
    answers = asyncio.gather(*(stage.ask(previous_response_id=previous) for _ in range(8)))
    peak = 0

    while not answers.done():
        peak = max(peak, stage.budget.get_use("bodies"))
        await asyncio.sleep(0)

    assert [response.status_code for response in await answers] == [200] * 8
    assert peak >= 2 * len(TEXT)
    assert stage.budget.get_use("bodies") == 0
