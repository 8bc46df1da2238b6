"""A local model that can't be loaded fails at once and is not restarted repeatedly."""

import time
from pathlib import Path
from typing import Any

import pytest

from backends.interfaces import Deadline, PreparedRequest, RequestContext, ignore_memory
from backends.torch.backend import TorchBackend, _hide_paths
from gateway.admin import get_unready_reason
from gateway.routing.failed_models import list_failures
from protocols.core.errors import WorkerUnreachable
from protocols.core.request import EmbeddingRequest


class _ReadyCatalog:
    ready = True


READY_CATALOG: Any = _ReadyCatalog()
pytestmark = pytest.mark.asyncio


async def test_missing_torch_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    backend = TorchBackend(path=str(tmp_path))

    await backend.start()

    with pytest.raises(WorkerUnreachable, match=r"pip install 'interlingua\[torch\]'"):
        await backend.warm_up()
    assert not backend.ready

    await backend.aclose()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise MemoryError('no room')", "MemoryError: no room"),
        ("import os; os._exit(3)", r"ended while it loaded the model \(exit code 3\)$"),
        (
            "import os; os.kill(os.getpid(), 9)",
            r"ended while it loaded the model \(SIGKILL\); the system may have run out of memory",
        ),
    ],
)
async def test_any_failure_of_loading_is_final_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    (tmp_path / "torch.py").write_text(f"{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    backend = TorchBackend(path=str(tmp_path))
    await backend.start()
    context = RequestContext("x", Deadline(time.monotonic, 60), time.monotonic, ignore_memory)
    request = PreparedRequest(EmbeddingRequest(model="m", inputs=("a",)))

    with pytest.raises(WorkerUnreachable, match=reason):
        await backend.warm_up()
    with pytest.raises(WorkerUnreachable, match=reason):
        await backend.send_unary(request, context)

    assert not backend.ready
    assert backend.failure is not None
    assert backend.read_stats()["restarts"] == 0
    assert get_unready_reason(READY_CATALOG, {"local": backend}) == (
        f"no backend is ready; local: {backend.failure}"
    )
    assert list_failures({"local": backend}) == {"local": backend.failure}

    await backend.aclose()


async def test_process_that_cannot_be_started_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    backend = TorchBackend(path=str(tmp_path))

    await backend.start()

    with pytest.raises(WorkerUnreachable, match="can't be started"):
        await backend.warm_up()

    await backend.aclose()


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("/srv/models/q/model.gguf is truncated", "model.gguf is truncated"),
        ("can't read '/a/b c', or ~/models/q", "can't read 'b c', or q"),
        ("no module (No module named x): pip install 'a[b]'", None),
        ("memory/second, a/b and org/model stay", None),
    ],
)
async def test_clients_see_no_absolute_path(reason: str, shown: str | None) -> None:
    error = _hide_paths(WorkerUnreachable(reason))

    assert error.message == (shown or reason)
    assert error.worker_text == reason
