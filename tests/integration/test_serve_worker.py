"""``interlingua serve http://…`` lists the worker's models and serves no others."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.cli.worker_models import WorkerListingError, list_worker_models
from tests.integration.test_command import Command
from tests.support.fakes import ScriptedWorker, make_reply

LISTINGS = {
    "/v1/models": ["GET", "data", "id"],
    "/api/2.0/serving-endpoints": ["GET", "endpoints", "name"],
    "/v2/repository/index": ["POST", "", "name"],
    "/v3/models": ["GET", "data", "id"],
    "/mindie/v1/models": ["GET", "data", "id"],
}
"""Each protocol's model list: its method, the key of the list, and the key of a name."""
UNKNOWN = {
    "/v1/chat/completions": (404, "model_not_found"),
    "/serving-endpoints/nope/invocations": (404, "RESOURCE_DOES_NOT_EXIST"),
    "/v2/models/nope/generate": (404, "unknown model: 'nope'"),
    "/v3/chat/completions": (404, "is not found"),
    "/mindie/v1/chat/completions": (422, "model nope, but not found"),
}
"""Each protocol's error for an unknown model."""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "text_input": "hi"}


def build_worker_config(*models: str, port: int = 0) -> str:
    entries = ", ".join(f'"{name}": {{backend: e}}' for name in models)
    return (
        f'listeners: [{{address: "127.0.0.1:{port}", protocols: [openai]}}]\n'
        "limits: {shutdown_delay: 0s}\n"
        "backends: {e: {kind: echo, script: [Hi]}}\n"
        f"models: {{{entries}}}\n"
    )


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Starts ``interlingua serve``; stops every process at the end."""
    started: list[Command] = []

    def start_command(*arguments: str) -> Command:
        command = Command("serve", *arguments)
        started.append(command)
        return command

    yield start_command
    for command in started:
        command.close()


def list_names(url: str, path: str = "/v1/models") -> list[str]:
    method, key, name = LISTINGS[path]
    body = httpx.request(method, url + path, json={} if method == "POST" else None).json()
    return [one[name] for one in (body[key] if key else body)]


def chat(url: str, model: str, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(url + path, json=CHAT | {"model": model}, timeout=30)


def test_worker_models_are_listed_in_every_protocol_and_others_are_refused(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(build_worker_config("llama", "org/m-1"))
    worker = start(str(file)).serving()

    gateway = start(f"{worker}/v1/", "--port", "0")
    url = gateway.serving()

    assert "interlingua serves llama, org/m-1 on" in gateway.read_output()
    assert {path: list_names(url, path) for path in LISTINGS} == {
        path: ["llama", "org/m-1"] for path in LISTINGS
    }
    assert chat(url, "org/m-1").json()["choices"][0]["message"]["content"] == "Hi"

    refused = {path: chat(url, "nope", path) for path in UNKNOWN}
    assert {path: one.status_code for path, one in refused.items()} == {
        path: status for path, (status, _) in UNKNOWN.items()
    }
    for path, (_, text) in UNKNOWN.items():
        assert text in refused[path].text


def test_models_of_an_added_or_changed_worker_are_served(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(build_worker_config("first"))
    worker = start(str(file))
    port = int(worker.serving().rpartition(":")[2])

    assert worker.stop() == 0

    gateway = start(f"http://127.0.0.1:{port}", "--port", "0")
    url = gateway.serving()
    assert f"http://127.0.0.1:{port}: the worker does not answer" in gateway.read_output()
    assert "interlingua serves every model name on" in gateway.read_output()
    assert list_names(url) == []
    assert chat(url, "any").status_code == 503  # it is passed on, but no worker answers

    for models in (["first"], ["first", "second"]):
        file.write_text(build_worker_config(*models, port=port))
        worker = start(str(file))
        worker.serving()
        gateway.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 20
        while list_names(url) != models:
            assert time.monotonic() < until, gateway.read_output()
            time.sleep(0.05)
        assert worker.stop() == 0
    gateway.process.send_signal(signal.SIGHUP)  # the last model list remains
    time.sleep(0.5)

    assert list_names(url) == ["first", "second"]
    assert chat(url, "third").status_code == 404


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"data":[{"id":"a"},{"id":"b/c:d"},{"id":"a"}]}', ["a", "b/c:d"]),
        (b'{"data":[{"id":"a"},{"id":"a b"}]}', ["a", "*"]),
        (b'{"data":[{"id":"openai/*"}]}', ["*"]),
        (b'{"data":[]}', []),
    ],
)
async def test_listed_names_that_no_model_can_have_let_every_name_pass(
    body: bytes, names: list[str]
) -> None:
    async with ScriptedWorker(probed=make_reply(body)) as worker:
        assert await asyncio.to_thread(list_worker_models, worker.url) == names
        assert await asyncio.to_thread(list_worker_models, f"{worker.url}/api/v4") == names


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (make_reply(b'{"models":[]}'), "/v1/models is no list of models"),
        (make_reply(b"<html>"), "/v1/models is no list of models"),
        (make_reply(b"{}", "404 Not Found"), "/v1/models gets status 404, no list of models"),
    ],
)
async def test_worker_without_a_listing_has_no_known_models(reply: bytes, reason: str) -> None:
    async with ScriptedWorker(probed=reply) as worker:
        with pytest.raises(WorkerListingError, match=reason):
            await asyncio.to_thread(list_worker_models, worker.url)
    with pytest.raises(WorkerListingError, match="does not answer"):
        await asyncio.to_thread(list_worker_models, "http://127.0.0.1:9")
