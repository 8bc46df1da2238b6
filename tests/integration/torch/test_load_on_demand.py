"""Local models that are loaded at their first request, within one limit of memory."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from backends.interfaces import Deadline, PreparedRequest, RequestContext, Timeouts, ignore_memory
from backends.model_memory import ModelMemory
from backends.torch.backend import TorchBackend
from protocols.core.errors import Overloaded, WorkerUnreachable
from protocols.core.events import StreamEnd
from protocols.core.request import GenerationRequest, SamplingParams, StopConditions
from tests.conftest import Serve
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

MakeBackend = Callable[..., TorchBackend]


@pytest_asyncio.fixture
async def make_backend(tiny_folder: Path) -> AsyncIterator[MakeBackend]:
    """Makes a backend of the tiny model that is loaded on demand."""
    backends: list[TorchBackend] = []

    def make(memory: ModelMemory | None = None, **settings: Any) -> TorchBackend:
        options = {"path": str(tiny_folder), "threads": 1, "keep_alive": 60, **settings}
        options.setdefault("kv_cache_memory", 1 << 20)
        backends.append(TorchBackend(memory=memory, **options))
        return backends[-1]

    yield make
    for backend in backends:
        await backend.aclose()


async def generate(
    backend: TorchBackend, keep_alive: float | None = None, *, tokens: int = 4, seconds: float = 200
) -> bool:
    """Whether the response is complete."""
    clock = time.monotonic
    request = GenerationRequest(
        model="m",
        kind="completion",
        prompts=("Hello",),
        sampling=SamplingParams(temperature=0),
        stopping=StopConditions(max_tokens=tokens, ignore_eos=True),
        keep_alive=keep_alive,
    )
    context = RequestContext(
        "x", Deadline(clock, 200.0), clock, ignore_memory, Timeouts(first_token=seconds)
    )
    batches = [batch async for _, batch in backend.send(PreparedRequest(request), context)]
    return isinstance(batches[-1][-1], StreamEnd)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_model_is_loaded_at_its_first_request_and_unloaded_when_idle(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend(keep_alive=0.3)
    await backend.start()
    await backend.warm_up()
    assert (backend.ready, backend.process, backend.report_model().loaded) == (True, None, False)

    for _ in range(2):
        assert await generate(backend)
        state = backend.report_model()
        assert (state.loaded, state.expires_in) == (True, 0)
        assert state.memory_bytes > 50 << 20
        assert backend.process is not None
        pid = backend.process.pid
        assert pid is not None
        await wait_until(lambda: not backend.report_model().loaded, 200)
        await wait_until(lambda pid=pid: not is_running(pid), 200)  # type: ignore[misc]
        assert backend.ready
        assert backend.report_model().features is not None


async def test_request_sets_how_long_the_model_stays(make_backend: MakeBackend) -> None:
    backend = make_backend(keep_alive=0)
    assert await generate(backend, keep_alive=-1)
    assert backend.report_model().expires_in is None
    assert await generate(backend, keep_alive=3600)
    assert backend.report_model().expires_in in (3599, 3600)
    assert await generate(backend)
    await wait_until(lambda: not backend.report_model().loaded, 200)


async def test_two_models_take_turns_within_the_limit(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds one of the two. No request fails, also while both are wanted."""
    memory = ModelMemory(1 << 40)
    first, second = make_backend(memory), make_backend(memory)
    assert await generate(first)
    memory.limit = int(first.report_model().memory_bytes * 1.5)
    monkeypatch.setattr("backends.torch.backend._PROCESS_BYTES", memory.limit // 2)

    assert await generate(second)
    assert (first.report_model().loaded, second.report_model().loaded) == (False, True)

    running = asyncio.ensure_future(generate(second, tokens=60))
    async with asyncio.timeout(200):
        while second.idle:  # noqa: ASYNC110 - a pause might outlast the request
            await asyncio.sleep(0)
    results = await asyncio.gather(generate(first), generate(second), running)
    assert all(results)
    assert first.report_model().loaded != second.report_model().loaded


async def test_model_above_the_limit_is_refused_with_both_sizes(make_backend: MakeBackend) -> None:
    backend = make_backend(ModelMemory(100 << 20), kv_cache_memory=1 << 30)
    with pytest.raises(WorkerUnreachable, match=r"needs about 1,6\d\d MB.*model_memory is 105 MB"):
        await generate(backend)
    assert backend.failure is not None
    assert not backend.ready


async def test_waiting_requests_are_bounded(make_backend: MakeBackend) -> None:
    backend = make_backend(queue=2)
    waiting = [asyncio.ensure_future(generate(backend)) for _ in range(2)]
    await wait_until(lambda: backend.process is not None, 200)
    with pytest.raises(Overloaded, match="2 requests wait already") as error:
        await generate(backend)
    assert error.value.retry_after == 5
    assert await asyncio.gather(*waiting) == [True, True]


async def test_unloading_cancels_a_load_without_waiting_requests(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend()
    with pytest.raises(Overloaded, match="still loading"):
        await generate(backend, seconds=0.05)
    await backend.unload()
    assert not backend.report_model().loaded
    assert await generate(backend)


CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [ollama]}}]
backends:
  first: {{kind: torch, path: "{path}", threads: 1, kv_cache_memory: 1MiB, keep_alive: 5m}}
  second: {{kind: torch, path: "{path}", threads: 1, kv_cache_memory: 1MiB}}
models: {{first: {{backend: first}}, second: {{backend: second}}}}
"""


async def test_ollama_clients_load_and_unload(serve: Serve, tiny_folder: Path) -> None:
    gateway = await serve(CONFIG.format(path=tiny_folder))
    second = gateway.app.active_snapshots[-1].backends["second"]
    await wait_until(lambda: second.ready, 200)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=200) as client:

        async def list_running() -> dict[str, Any]:
            models = (await client.get("/api/ps")).json()["models"]
            return {one["name"]: one for one in models}

        async def load(model: str, keep_alive: Any) -> tuple[str, str | None]:
            body = {"model": model, "prompt": "", "keep_alive": keep_alive}
            answer = await client.post("/api/generate", json=body)
            return answer.json()["done_reason"], answer.headers.get("x-interlingua-loss")

        assert list(await list_running()) == ["second:latest"]
        assert await load("first", "1h") == ("load", None)
        running = await list_running()
        assert running["first:latest"]["size"] > 50 << 20
        assert running["first:latest"]["expires_at"] < "2100"
        assert running["second:latest"]["expires_at"] > "2300"

        body = {"model": "first", "prompt": "a", "stream": False, "keep_alive": "1h"}
        body["options"] = {"num_predict": 2}
        answer = await client.post("/api/generate", json=body)
        assert "keep_alive" not in answer.headers.get("x-interlingua-loss", "")
        answer = await client.post("/api/generate", json=body | {"model": "second"})
        assert "keep_alive=dropped" in answer.headers["x-interlingua-loss"]

        assert await load("first", 0) == ("unload", None)
        assert await load("second", 0) == ("unload", "keep_alive=dropped")
        assert list(await list_running()) == ["second:latest"]
