"""A local model without torch fails at once, and is not restarted again and again."""

from pathlib import Path

import pytest

from backends.torch.backend import TorchBackend
from protocols.core.errors import WorkerUnreachable

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
