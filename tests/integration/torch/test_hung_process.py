"""An engine process that hangs is killed and replaced; a slow one is not."""

import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from backends.interfaces import PreparedRequest, StreamItems
from backends.torch.backend import TorchBackend
from backends.torch.engine_client import EngineProcess
from protocols.core.errors import StreamBroken
from protocols.core.events import StreamEnd
from protocols.core.request import Message, PromptOptions, TextPart
from tests.integration.torch.test_backend import (
    LONG,
    collect_events,
    drain,
    make_context,
    make_request,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


async def assert_restarted(own: TorchBackend, before: EngineProcess) -> None:
    """Assert that another process has replaced the first."""
    assert (await collect_events(own, make_request()))[-1] == StreamEnd()
    assert own.process is not before
    assert own.read_stats()["restarts"] == 1
    assert before.exit_code is not None


async def test_hung_engine_process_is_killed_and_restarted(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.torch.engine_client.MAX_SILENCE", 2.5)
    own = TorchBackend(path=str(tiny_folder), threads=1)
    await own.start()
    await own.warm_up()

    async with aclosing(own.send(PreparedRequest(LONG), make_context())) as stream:
        await anext(stream)
        before = own.process
        assert before is not None
        assert before.pid is not None

        os.kill(before.pid, signal.SIGSTOP)
        with pytest.raises(StreamBroken):
            await drain(stream)

    await assert_restarted(own, before)
    assert before.exit_code == -signal.SIGKILL

    await own.aclose()


async def generate_repeatedly(own: TorchBackend, stream: StreamItems) -> None:
    """Generate until an error; one response may finish before the next heartbeat."""
    await drain(stream)
    while True:
        await collect_events(own, LONG)


async def test_endless_engine_step_restarts_the_process(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = TorchBackend(path=str(tiny_folder), threads=1)
    await own.start()
    await own.warm_up()

    async with aclosing(own.send(PreparedRequest(LONG), make_context())) as stream:
        await anext(stream)
        before = own.process
        assert before is not None

        monkeypatch.setattr("backends.torch.engine_client.MAX_STEP_SECONDS", -1.0)
        with pytest.raises(StreamBroken):
            await generate_repeatedly(own, stream)

        monkeypatch.undo()

    await assert_restarted(own, before)

    await own.aclose()


SLOW = (
    "{% for i in range(1000) %}{% for j in range(1000) %}{% for k in range(20) %}"
    "{% endfor %}{% endfor %}{% endfor %}so"
)


async def test_long_computation_is_not_treated_as_a_hang(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow template blocks the engine loop for seconds while heartbeats continue."""
    monkeypatch.setattr("backends.torch.engine_client.MAX_SILENCE", 2.5)
    own = TorchBackend(path=str(tiny_folder), threads=1, trust_request_chat_template=True)
    await own.start()
    await own.warm_up()
    messages = (Message("user", (TextPart("hi"),)),)
    request = make_request(
        kind="chat", prompts=(), messages=messages, templating=PromptOptions(template=SLOW)
    )

    # On busy cores the template takes minutes, which is not what is tested.
    events = await collect_events(own, request, seconds=900)

    assert events[-1] == StreamEnd()
    assert own.read_stats()["restarts"] == 0

    await own.aclose()
