"""How a model that is loaded on demand is loaded, kept and unloaded, with a stand-in process."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.interfaces import Deadline, PreparedRequest, RequestContext, ignore_memory
from backends.model_memory import ModelMemory
from backends.torch.backend import TorchBackend
from backends.torch.engine_client import EngineEventQueue
from backends.torch.ipc import (
    IPC_VERSION,
    ReadyEvent,
    RequestCommand,
    RequestFinishedEvent,
)
from backends.torch.model_files import estimate_memory
from backends.torch.settings import TorchSettings
from backends.torch.weight_summary import summarize_weights
from protocols.core.errors import WorkerUnreachable
from protocols.core.events import Timing
from protocols.core.request import GenerationRequest
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio

RESIDENT_BYTES = 2 << 30
"""What the process says that it takes, without the KV cache."""


class ProcessStub:
    """An engine process that has loaded its model at once, and runs until ``end`` is set."""

    request_count = 0
    load_error: str | None = None
    ready: ReadyEvent | None = None
    exit_code: int | None = None
    device = "cpu"

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self.end = asyncio.Event()

    async def start(self) -> None:
        pass

    async def read_events(self, ready: asyncio.Event) -> None:
        self.ready = ReadyEvent(
            "generate",
            IPC_VERSION,
            512,
            self.device,
            cache_bytes=self._settings.kv_cache_memory,
            memory_bytes=RESIDENT_BYTES,
        )
        ready.set()
        await self.end.wait()

    async def stop_process(self) -> None:
        pass


@pytest.fixture
def use_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[ProcessStub]], None]:
    """Makes every backend run a stand-in."""

    def use(kind: type[ProcessStub]) -> None:
        monkeypatch.setattr("backends.torch.backend.EngineProcess", kind)

    use(ProcessStub)
    return use


def make_backend(memory: ModelMemory | None = None, **settings: Any) -> TorchBackend:
    options = {"path": "owner/model", "keep_alive": 60, "kv_cache_memory": 1 << 20, **settings}
    return TorchBackend(memory=memory, **options)


@pytest.mark.usefixtures("use_process")
async def test_model_that_takes_more_than_the_limit_is_loaded_again() -> None:
    """Only the estimate is compared with the limit, not what the first load measured."""
    backend = make_backend(ModelMemory(1 << 30))
    for _ in range(2):
        assert await backend.keep_model(None)
        assert backend.report_model().memory_bytes > 1 << 30
        await backend.unload()
        assert not backend.report_model().loaded
    assert backend.failure is None
    await backend.aclose()


async def test_model_whose_request_gave_up_is_unloaded_when_idle(
    use_process: Callable[[type[ProcessStub]], None],
) -> None:
    may_load = asyncio.Event()

    class SlowProcess(ProcessStub):
        async def read_events(self, ready: asyncio.Event) -> None:
            await may_load.wait()
            await super().read_events(ready)

    use_process(SlowProcess)
    backend = make_backend(keep_alive=0.05)
    request = asyncio.ensure_future(backend.keep_model(None))
    await wait_until(lambda: backend.process is not None)
    request.cancel()
    await asyncio.wait([request])
    may_load.set()
    await wait_until(lambda: backend.report_model().loaded)
    assert backend.last_used > 0
    await wait_until(lambda: not backend.report_model().loaded)
    await backend.aclose()


@pytest.mark.parametrize(("keep_alive", "expires_in"), [(None, 60), (3600, 3600), (-1, None)])
@pytest.mark.usefixtures("use_process")
async def test_idle_time_counts_anew_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, keep_alive: float | None, expires_in: int | None
) -> None:
    """The process that replaces another keeps the model for as long as the last request said."""
    monkeypatch.setattr("backends.torch.backend._RESTART_DELAY", 0.01)
    backend = make_backend()
    await backend.keep_model(keep_alive)
    first: Any = backend.process
    used_before = backend.last_used
    first.end.set()
    await wait_until(lambda: backend.process is not first and backend.report_model().loaded)
    await asyncio.sleep(0)
    assert backend.report_model().expires_in == expires_in
    assert backend.last_used > used_before
    await backend.aclose()


@pytest.mark.parametrize(("task", "is_refused"), [("generate", True), ("embedding", False)])
@pytest.mark.usefixtures("use_process")
async def test_only_models_that_generate_text_need_a_kv_cache(
    task: str, *, is_refused: bool
) -> None:
    backend = make_backend(ModelMemory(1 << 30), task=task, kv_cache_memory=1 << 30)
    if is_refused:
        with pytest.raises(WorkerUnreachable, match=r"limits\.model_memory"):
            await backend.keep_model(None)
    else:
        assert await backend.keep_model(None)
    await backend.aclose()


async def test_waiting_for_the_model_to_be_loaded_is_time_in_the_queue(
    use_process: Callable[[type[ProcessStub]], None],
) -> None:
    """Given a load of 20 s and 0.5 s in the engine's queue, clients learn of 20.5 s."""
    seconds = [100.0]

    class SlowProcess(ProcessStub):
        async def read_events(self, ready: asyncio.Event) -> None:
            seconds[0] += 20
            await super().read_events(ready)

        def open_request(self) -> tuple[int, EngineEventQueue]:
            inbox: EngineEventQueue = asyncio.Queue()
            inbox.put_nowait([RequestFinishedEvent(1, 2, 3, 0.5, 1.0, 2.0, 1)])
            return 1, inbox

        def send(self, command: RequestCommand) -> None:
            assert command.request_id == 1

        def close_request(self, job: int, *, cancel: bool) -> None:
            assert job == 1

    use_process(SlowProcess)
    backend = make_backend(clock=lambda: seconds[0])
    request = GenerationRequest(model="m", kind="completion", prompts=("Hello",))
    context = RequestContext("x", Deadline(time.monotonic, 200.0), time.monotonic, ignore_memory)
    batches = [batch async for _, batch in backend.send(PreparedRequest(request), context)]
    assert Timing(20.5, 1.0, 2.0, 1) in batches[-1]
    await backend.aclose()


@pytest.mark.parametrize(
    ("dtype", "estimate"), [("quantized", 1.1), ("int8", 1.6), ("bfloat16", 3.2), ("auto", 6.4)]
)
async def test_estimate_of_a_gguf_file_follows_its_format(
    tmp_path: Path, dtype: str, estimate: float
) -> None:
    """``quantized`` keeps the weights as they are in the file; the others convert them."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    os.truncate(file, 1 << 30)
    assert estimate_memory(str(file), dtype, "cpu") / (1 << 30) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "device", "estimate"),
    [
        ("auto", "cpu", 2.0),
        ("auto", "auto", 2.0),
        ("auto", "cuda:0", 1.0),
        ("float32", "cuda:0", 2.0),
        ("bfloat16", "cuda:0", 1.0),
        ("int8", "cpu", 0.5),
    ],
)
async def test_estimate_of_a_bfloat16_folder_follows_its_device(
    tmp_path: Path, dtype: str, device: str, estimate: float
) -> None:
    """With ``auto`` an accelerator keeps the saved format, and a CPU converts it to float32."""
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 1 << 30)
    assert estimate_memory(str(tmp_path), dtype, device) == estimate * (1 << 30)


@pytest.mark.usefixtures("use_process")
async def test_quantized_file_is_loaded_within_a_limit_that_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    os.truncate(file, 1 << 30)
    backend = make_backend(ModelMemory(2 << 30), path=str(file), dtype="quantized")
    assert await backend.keep_model(None)
    assert backend.report_model().loaded
    await backend.aclose()


class ClockStub:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class NoMemoryProcess(ProcessStub):
    """Could not get the memory for its model."""

    async def read_events(self, ready: asyncio.Event) -> None:
        self.load_error = "0 MB are free"


async def test_model_that_could_not_be_loaded_is_tried_again_after_a_pause(
    use_process: Callable[[type[ProcessStub]], None],
) -> None:
    use_process(NoMemoryProcess)
    clock = ClockStub()
    backend = make_backend(clock=clock)
    with pytest.raises(WorkerUnreachable, match="0 MB are free"):
        await backend.keep_model(None)

    use_process(ProcessStub)
    clock.now += 29
    with pytest.raises(WorkerUnreachable, match="0 MB are free"):
        await backend.keep_model(None)
    assert (backend.ready, backend.failure) == (False, "0 MB are free")

    clock.now += 1
    assert (backend.ready, backend.failure) == (True, None)
    assert await backend.keep_model(None)
    assert backend.report_model().loaded
    await backend.aclose()


async def test_closed_backend_is_not_tried_again(
    use_process: Callable[[type[ProcessStub]], None],
) -> None:
    use_process(NoMemoryProcess)
    clock = ClockStub()
    backend = make_backend(clock=clock)
    with pytest.raises(WorkerUnreachable):
        await backend.keep_model(None)
    await backend.aclose()
    clock.now += 1000
    assert not backend.ready
    with pytest.raises(WorkerUnreachable):
        await backend.keep_model(None)


@pytest.mark.parametrize("keep_alive", [60, None])
async def test_memory_on_an_accelerator_is_that_of_the_weights_and_the_cache(
    use_process: Callable[[type[ProcessStub]], None], tmp_path: Path, keep_alive: float | None
) -> None:
    """The memory of the process, which is the host's, says nothing about the accelerator's."""

    class AcceleratorProcess(ProcessStub):
        device = "cuda:0"

    use_process(AcceleratorProcess)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    os.truncate(file, 10 << 30)
    settings: dict[str, Any] = {"path": str(file), "dtype": "bfloat16", "keep_alive": keep_alive}
    backend = make_backend(kv_cache_memory=4 << 30, **settings)
    await backend.start()
    await backend.keep_model(None)
    await backend.warm_up()
    assert 36 << 30 <= backend.report_model().memory_bytes < 37 << 30
    await backend.aclose()


@pytest.mark.usefixtures("use_process")
async def test_weights_are_known_before_the_first_load(tiny_folder: Path) -> None:
    backend = make_backend(path=str(tiny_folder))
    await backend.start()
    state = backend.report_model()
    assert not state.loaded
    assert state.known_weights == summarize_weights(str(tiny_folder))
    assert state.known_weights is not None
    await backend.aclose()
