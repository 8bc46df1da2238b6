"""A long model list is built once, in a thread, and again when a model's readiness changes."""

import hashlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.echo import EchoBackend
from gateway.config.loader import load_file
from gateway.pipeline.tasks import information
from gateway.runtime.gateway import Gateway, build_services
from gateway.runtime.reload import ConfigSource
from protocols.core.interfaces import HttpResponse
from protocols.databricks.endpoints import Databricks
from protocols.openai.endpoints import OpenAI
from protocols.ovms.endpoints import OVMS
from tests.conftest import RunningGateway, Serve

PATHS: dict[str, tuple[str, Any]] = {
    "openai": ("/v1/models", OpenAI),
    "ovms": ("/v3/models", OVMS),
    "databricks": ("/serving-endpoints/models", Databricks),
}
EVERY = pytest.mark.parametrize("protocol", PATHS)
COUNT = 10_000


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that built responses of endpoints without a model."""
    threads: list[threading.Thread] = []
    for _, adapter in PATHS.values():
        original = adapter.handle_info_request

        def record(self: Any, *args: Any, original: Any = original) -> HttpResponse:
            threads.append(threading.current_thread())
            response: HttpResponse = original(self, *args)
            return response

        monkeypatch.setattr(adapter, "handle_info_request", record)
    return threads


def make_config(protocol: str, count: int, *, keys: str = "") -> str:
    models = "\n".join(f"  model-{number}: {{backend: e}}" for number in range(count))
    return (
        f'listeners: [{{address: "127.0.0.1:0", protocols: [{protocol}]}}]\n'
        f"backends: {{e: {{kind: echo, script: [Hello]}}}}\nmodels:\n{models}\n{keys}"
    )


async def list_names(gateway: RunningGateway, path: str, key: str = "") -> list[str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await gateway.http.get(path, headers=headers)
    assert response.status_code == 200
    return [one["id"] for one in response.json()["data"]]


@EVERY
async def test_long_model_list_is_built_once_and_in_a_thread(
    serve: Serve, threads: list[threading.Thread], protocol: str
) -> None:
    gateway = await serve(make_config(protocol, COUNT))
    path, _ = PATHS[protocol]

    first = await list_names(gateway, path)

    assert first == [f"model-{number}" for number in range(COUNT)]
    assert await list_names(gateway, path) == first
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_short_model_list_is_built_without_a_thread(
    serve: Serve, threads: list[threading.Thread]
) -> None:
    gateway = await serve(make_config("openai", 3))
    assert len(await list_names(gateway, "/v1/models")) == 3
    assert threads == [threading.main_thread()]


async def test_each_key_gets_the_list_of_its_own_models(serve: Serve) -> None:
    keys = "keys:\n" + "\n".join(
        f'  - {{name: {name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}"{models}}}'
        for name, models in (("one", ", models: [model-1]"), ("two", ", models: [model-2]"))
    )
    gateway = await serve(make_config("openai", 3, keys=keys))

    for _ in range(2):
        assert await list_names(gateway, "/v1/models", "one") == ["model-1"]
        assert await list_names(gateway, "/v1/models", "two") == ["model-2"]


async def test_cached_model_lists_are_bounded(
    serve: Serve, threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(information, "_CACHED_LISTS", 2)
    names = [f"key-{number}" for number in range(3)]
    keys = "keys:\n" + "\n".join(
        f'  - {{name: {name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}",'
        f" models: [model-{number}]}}"
        for number, name in enumerate(names)
    )
    gateway = await serve(make_config("openai", 3, keys=keys))

    for name in (*names, names[2], names[0]):
        await list_names(gateway, "/v1/models", name)

    assert len(threads) == 4  # the third was cached, and the first was evicted for it


async def test_model_list_follows_the_readiness_of_backends(
    serve: Serve, threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OVMS lists only models that are ready."""
    gateway = await serve(make_config("ovms", 200))
    assert len(await list_names(gateway, "/v3/models")) == 200

    monkeypatch.setattr(EchoBackend, "ready", property(lambda self: False))
    assert await list_names(gateway, "/v3/models") == []

    monkeypatch.undo()
    assert len(await list_names(gateway, "/v3/models")) == 200


async def test_model_list_follows_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(make_config("openai", 3), "utf-8")
    read = partial(load_file, str(file), env={})
    first = read()
    app = Gateway(first.config, build_services(), origin=ConfigSource(first, read))
    urls = await app.start()
    try:
        async with httpx.AsyncClient(base_url=urls[0], timeout=30) as client:
            assert len((await client.get("/v1/models")).json()["data"]) == 3

            file.write_text(make_config("openai", 5), "utf-8")
            assert app.reloader is not None
            assert (await app.reloader.reload()).is_ok

            assert len((await client.get("/v1/models")).json()["data"]) == 5
    finally:
        await app.stop()


async def test_task_of_a_model_is_that_of_its_local_model(serve: Serve, tmp_path: Path) -> None:
    """Given the files of an embedding model, and no task in the configuration."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    gateway = await serve(
        'listeners: [{address: "127.0.0.1:0", protocols: [ollama]}]\n'
        f"backends: {{b: {{kind: torch, path: '{tmp_path}', keep_alive: 1h}}}}\n"
        "models: {m: {backend: b}}\n"
    )

    shown = await gateway.http.post("/api/show", json={"model": "m"})
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    refused = await gateway.http.post("/api/chat", json=chat)

    assert shown.json()["capabilities"] == ["embedding"]
    assert refused.status_code == 400
