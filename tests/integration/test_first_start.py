"""What clients, operators and probes see while a model is being loaded."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from backends.echo import EchoBackend
from gateway.config.listeners import ListenerId
from gateway.runtime.gateway import Gateway, build_services
from tests.conftest import load_config
from tests.integration.test_command import Command
from tests.support.ports import reserve_port

BLOCKING_TORCH = """
import pathlib, time
while not pathlib.Path({release!r}).exists():
    time.sleep(0.05)
raise ImportError("released")
"""
"""A module torch whose import, which is the first part of loading, lasts until a file exists."""
CHAT = {"model": "slow", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}


class SlowModel:
    """A model whose loading lasts until it is released, and fails then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._release_file = folder / "slow", folder / "release"
        self.folder.mkdir()
        (self.folder / "config.json").write_text(
            json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        )
        (self.folder / "model.safetensors").touch()
        (folder / "torch.py").write_text(BLOCKING_TORCH.format(release=str(self._release_file)))
        self.env = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}

    def release(self) -> None:
        self._release_file.touch()


@pytest.fixture
def model(tmp_path: Path) -> SlowModel:
    return SlowModel(tmp_path)


@pytest.fixture
def start(model: SlowModel) -> Iterator[Callable[..., Command]]:
    """Starts commands, which are killed at the end."""
    started: list[Command] = []

    def start_command(*arguments: str) -> Command:
        started.append(Command(*arguments, env=model.env))
        return started[-1]

    yield start_command
    model.release()
    for command in started:
        command.close()


def wait_for_health(url: str, command: Command) -> httpx.Response:
    """The first response of a listener that is about to be bound."""
    until = time.monotonic() + 60
    while True:
        try:
            return httpx.get(f"{url}/health", timeout=30)
        except httpx.TransportError:
            assert time.monotonic() < until, command.read_output()
            assert command.process.poll() is None, command.read_output()
            time.sleep(0.05)


@pytest.mark.parametrize("kind", ["model", "worker", "file"])
def test_listener_answers_503_with_progress_while_the_model_is_loaded(
    start: Callable[..., Command], model: SlowModel, tmp_path: Path, kind: str
) -> None:
    """Given a model that is being loaded, the listener is there, and says so in each protocol."""
    port = reserve_port()
    url = f"http://127.0.0.1:{port}"
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f'listeners: [{{address: "127.0.0.1:{port}", protocols: [openai, anthropic, triton,'
        " {name: tgi, prefix: /tgi}]}]\n"
        f'backends: {{b: {{kind: torch, path: "{model.folder}"}}}}\n'
        "models: {slow: {backend: b}}\n"
    )
    command = start(
        *{
            "model": ("serve", str(model.folder), "--port", str(port), "--admin-port", "off"),
            "worker": ("worker", "--model", str(model.folder), "--port", str(port)),
            "file": ("serve", str(file)),
        }[kind]
    )

    health = wait_for_health(url, command)
    chat = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=30)

    assert (health.status_code, health.headers["retry-after"]) == (503, "5")
    assert health.json()["status"] == "loading"
    progress = health.json()["loading_models"]
    assert list(progress) == ["slow"]
    assert re.fullmatch(r"starting the engine process \(for \d+ s\)", progress["slow"])
    assert (chat.status_code, chat.headers["retry-after"]) == (503, "5")
    assert "still loading" in chat.json()["error"]["message"]
    if kind != "worker":
        messages = httpx.post(f"{url}/v1/messages", json=CHAT, timeout=30)
        assert (messages.status_code, messages.json()["error"]["type"]) == (529, "overloaded_error")

    if kind == "file":
        assert httpx.get(f"{url}/v2/health/ready", timeout=30).status_code == 400
        assert httpx.get(f"{url}/tgi/health", timeout=30).status_code == 503

    until = time.monotonic() + 60
    while "slow is not loaded yet: starting the engine process" not in command.read_output():
        assert time.monotonic() < until, command.read_output()
        time.sleep(0.1)
    if kind == "file":
        return
    assert "interlingua serves" not in command.read_output()
    model.release()
    assert command.ended() == 1
    assert "interlingua can't serve" in command.read_output()


def test_port_in_use_is_reported_before_the_model_is_loaded(
    start: Callable[..., Command], model: SlowModel
) -> None:
    """Given a port in use and a model whose loading takes for ever."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = start("serve", str(model.folder), "--port", port, "--admin-port", "off")

        assert command.ended() == 1

    assert "interlingua can't listen" in command.read_output()
    assert "choose another with --port" in command.read_output()


class OneSocket:
    """The sockets of a gateway that hands over."""

    has_sockets = True

    def __init__(self, one: socket.socket) -> None:
        self._sockets = [one]

    def take_sockets(self, listener_id: ListenerId) -> Sequence[socket.socket]:
        del listener_id
        return self._sockets


@pytest.mark.asyncio
async def test_sockets_of_another_gateway_are_used_when_the_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a socket on which another process serves, and a backend that needs time."""
    is_loaded = asyncio.Event()

    async def warm_up(backend: EchoBackend) -> None:
        del backend
        await is_loaded.wait()

    monkeypatch.setattr(EchoBackend, "warm_up", warm_up, raising=False)
    gateway = Gateway(
        load_config(
            'listeners: [{address: "127.0.0.1:0", protocols: [openai]}]\n'
            "backends: {b: {kind: echo, script: [fine]}}\nmodels: {m: {backend: b}}\n"
        ),
        build_services(),
    )
    with socket.socket() as shared:
        shared.bind(("127.0.0.1", 0))
        shared.listen()
        port = shared.getsockname()[1]
        start_task = asyncio.create_task(gateway.start(OneSocket(shared)))
        async with asyncio.timeout(30):
            await asyncio.sleep(0)
            done, _ = await asyncio.wait({start_task}, timeout=0.2)
            assert not done
            assert not gateway.listener_urls  # it accepts nothing

            is_loaded.set()
            await start_task

        assert list(gateway.listener_urls.values()) == [f"http://127.0.0.1:{port}"]
        await gateway.stop()
