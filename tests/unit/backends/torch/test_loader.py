"""Models that do not fit or are incomplete are rejected before they are loaded."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig

from backends.torch import device_memory, loader
from backends.torch.device_memory import get_free_memory
from backends.torch.loader import ModelLocation, load_weights, pick_device, pick_dtype
from backends.torch.model_files import EngineTask, ModelError, compute_weight_bytes
from tests.support.tiny_model import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def load_model_weights(
    folder: Path, kind: Any = AutoModelForCausalLM, task: EngineTask = "generate"
) -> Any:
    return load_weights(kind, ModelLocation(str(folder), task), CPU, torch.float32)


def get_load_error(folder: Path, **how: Any) -> str:
    with pytest.raises(ModelError) as excinfo:
        load_model_weights(folder, **how)
    return str(excinfo.value)


def update_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**config, **fields}))


def test_devices_and_dtypes_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == CPU
    assert pick_dtype("auto", CPU) is torch.float32
    assert pick_dtype("auto", torch.device("meta")) == "auto"
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(ModelError, match="choose"):
        pick_dtype("int8", CPU)
    with pytest.raises(ModelError, match="device nonsense"):
        pick_device("nonsense")

    for there, picked in ((False, "cpu"), (True, "meta")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        assert pick_device("auto").type == picked


def test_sharded_model_equals_the_unsharded_model(folder: Path, tmp_path_factory: Any) -> None:
    shards = tmp_path_factory.mktemp("shards")
    tiny_llama().save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert compute_weight_bytes(shards, 4) == compute_weight_bytes(folder, 4)

    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(
            load_model_weights(shards)(ids).logits, load_model_weights(folder)(ids).logits
        )

    next(shards.glob("*-00002-of-*")).unlink()
    assert "has no model-00002-of" in get_load_error(shards)

    (shards / "model.safetensors.index.json").write_text("{}")
    assert "index.json can't be read" in get_load_error(shards)


def test_weights_in_another_format_are_rejected(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors weights" in get_load_error(folder)


def test_missing_weights_are_reported(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in list(weights):
        if "layers.1.mlp" in name:
            del weights[name]
    save_file(weights, file, metadata={"format": "pt"})

    assert (
        f"3 weights are missing from {folder}: model.layers.1.mlp.down_proj.weight"
        in get_load_error(folder)
    )

    update_config(folder, num_hidden_layers=3)
    assert get_load_error(folder).endswith(", …")
    assert load_weights(
        AutoModelForCausalLM,
        ModelLocation(str(folder), "generate"),
        CPU,
        "auto",
        optional_prefix="model.layers.",
    )


def test_weights_of_wrong_shape_are_reported(folder: Path) -> None:
    update_config(folder, intermediate_size=64)
    assert "can't be loaded" in get_load_error(folder)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is truncated"),
        (b"\xff" * 100, "is not a safetensors file"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "is not a safetensors file"),
    ],
)
def test_invalid_safetensors_file_is_reported(folder: Path, data: bytes, says: str) -> None:
    (folder / "model.safetensors").write_bytes(data)
    assert says in get_load_error(folder)


def test_truncated_safetensors_file_is_reported(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "still being copied" in get_load_error(folder)


def test_unsupported_model_family_is_reported(folder: Path) -> None:
    update_config(folder, model_type="next-year")
    assert "does not support model type 'next-year'" in get_load_error(folder)

    BertConfig().save_pretrained(folder)
    update_config(folder, model_type="vit")
    assert "does not support generation; try task: embedding" in get_load_error(folder)


def test_family_without_embeddings_is_reported(folder: Path) -> None:
    class Nothing:
        _model_mapping: dict[Any, Any] = {}  # noqa: RUF012 - as transformers has it

    assert "does not support embeddings; try task: generate" in get_load_error(
        folder, kind=Nothing, task="embed"
    )


def test_insufficient_memory_is_reported_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(weight.numel() for weight in tiny_llama().parameters())
    assert compute_weight_bytes(folder, 4) == parameters * 4
    assert compute_weight_bytes(folder, 2) == parameters * 2
    assert compute_weight_bytes(folder, None) == parameters * 4

    save_file({"ids": torch.arange(3)}, folder / "model.safetensors")
    assert compute_weight_bytes(folder, 2) == 24

    tiny_llama().save_pretrained(folder)
    monkeypatch.setattr(loader, "get_free_memory", lambda _: 100_000)
    assert "need 0 MB on cpu, and 0 MB are free" in get_load_error(folder)

    monkeypatch.setattr(loader, "get_free_memory", lambda _: parameters * 4)
    assert load_model_weights(folder)

    monkeypatch.setattr(loader, "get_free_memory", lambda _: None)
    assert load_model_weights(folder)


def test_free_memory_is_read_from_the_device_and_cgroup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = get_free_memory(CPU)
    assert free is None or free > 1 << 20
    assert get_free_memory(torch.device("meta")) is None

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    assert get_free_memory(torch.device("cuda")) == 5
    assert device_memory._read_cgroup_memory(tmp_path) is None

    (tmp_path / "memory.current").write_text("30\n")
    for most, left in (("max\n", None), ("100\n", 70), ("20\n", 0)):
        (tmp_path / "memory.max").write_text(most)
        assert device_memory._read_cgroup_memory(tmp_path) == left
    table = tmp_path / "meminfo"

    assert device_memory._read_available_memory(table) is None

    table.write_text("MemFree: 1 kB\nMemAvailable:    7 kB\n")
    assert device_memory._read_available_memory(table) == 7168


def test_progress_of_a_download_in_several_threads_is_reported_one_line_at_a_time() -> None:
    lines: list[str] = []
    reporting = threading.Lock()

    def report(text: str) -> None:
        assert reporting.acquire(blocking=False), "two reports at once"
        time.sleep(0.001)
        lines.append(text)
        reporting.release()

    bar = loader._make_download_progress("org/tiny", report)(total=16_000_000, unit="B")
    with ThreadPoolExecutor(max_workers=4) as threads:
        assert all(threads.map(lambda _: bar.update(1_000_000) or True, range(16)))

    done = (1, *range(2, 17, 2))
    assert lines == [f"downloading org/tiny: {megabytes} of 16 MB" for megabytes in done]
