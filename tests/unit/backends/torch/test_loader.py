"""Models that do not fit or are incomplete are rejected before they are loaded."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig

from backends.torch import loader
from backends.torch.loader import (
    EngineTask,
    ModelError,
    ModelLocation,
    compute_weight_bytes,
    get_free_memory,
    load_weights,
    pick_device,
    pick_dtype,
)
from tests.tiny_model import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path, kind: Any = AutoModelForCausalLM, task: EngineTask = "generate") -> Any:
    return load_weights(kind, ModelLocation(str(folder), task), CPU, torch.float32)


def refused(folder: Path, **how: Any) -> str:
    with pytest.raises(ModelError) as told:
        loaded(folder, **how)
    return str(told.value)


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    said = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**said, **fields}))


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_sharded_model_is_the_same(folder: Path, tmp_path_factory: Any) -> None:
    shards = tmp_path_factory.mktemp("shards")
    tiny_llama().save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert compute_weight_bytes(shards, torch.float32) == compute_weight_bytes(
        folder, torch.float32
    )
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(shards)(ids).logits, loaded(folder)(ids).logits)

    next(shards.glob("*-00002-of-*")).unlink()
    assert "has no model-00002-of" in refused(shards)
    (shards / "model.safetensors.index.json").write_text("{}")
    assert "index.json can't be read" in refused(shards)


def test_weights_in_another_form_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors weights" in refused(folder)


def test_missing_weights_are_told_and_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in list(weights):
        if "layers.1.mlp" in name:
            del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    assert f"3 weights are missing from {folder}: model.layers.1.mlp.down_proj.weight" in refused(
        folder
    )
    change(folder, num_hidden_layers=3)
    assert refused(folder).endswith(", …")
    assert load_weights(
        AutoModelForCausalLM,
        ModelLocation(str(folder), "generate"),
        CPU,
        "auto",
        optional_prefix="model.layers.",
    )


def test_weights_of_another_shape_are_told(folder: Path) -> None:
    change(folder, intermediate_size=64)
    assert "can't be loaded" in refused(folder)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is truncated"),
        (b"\xff" * 100, "is not a safetensors file"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "is not a safetensors file"),
    ],
)
def test_a_file_that_is_none_is_told(folder: Path, data: bytes, says: str) -> None:
    (folder / "model.safetensors").write_bytes(data)
    assert says in refused(folder)


def test_a_file_that_was_cut_off_is_told(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "still being copied" in refused(folder)


def test_families(folder: Path) -> None:
    change(folder, model_type="next-year")
    assert "does not support model type 'next-year'" in refused(folder)
    BertConfig().save_pretrained(folder)
    change(folder, model_type="vit")
    assert "does not support generation; try task: embedding" in refused(folder)


def test_a_family_without_vectors_is_told(folder: Path) -> None:
    class Nothing:
        _model_mapping: dict[Any, Any] = {}  # noqa: RUF012 - as transformers has it

    assert "does not support embeddings; try task: generate" in refused(
        folder, kind=Nothing, task="embed"
    )


def test_need_and_room_are_told_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(weight.numel() for weight in tiny_llama().parameters())
    assert compute_weight_bytes(folder, torch.float32) == parameters * 4
    assert compute_weight_bytes(folder, torch.bfloat16) == parameters * 2
    assert compute_weight_bytes(folder, None) == parameters * 4
    save_file({"ids": torch.arange(3)}, folder / "model.safetensors")
    assert compute_weight_bytes(folder, torch.bfloat16) == 24
    tiny_llama().save_pretrained(folder)
    monkeypatch.setattr(loader, "get_free_memory", lambda _: 100_000)
    assert "need 0 MB on cpu, and 0 MB are free" in refused(folder)
    monkeypatch.setattr(loader, "get_free_memory", lambda _: parameters * 4)
    assert loaded(folder)
    monkeypatch.setattr(loader, "get_free_memory", lambda _: None)
    assert loaded(folder)


def test_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = get_free_memory(CPU)
    assert free is None or free > 1 << 20
    assert get_free_memory(torch.device("meta")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    assert get_free_memory(torch.device("cuda")) == 5
    assert loader._read_cgroup_memory(tmp_path) is None
    (tmp_path / "memory.current").write_text("30\n")
    for most, left in (("max\n", None), ("100\n", 70), ("20\n", 0)):
        (tmp_path / "memory.max").write_text(most)
        assert loader._read_cgroup_memory(tmp_path) == left
    table = tmp_path / "meminfo"
    assert loader._read_available_memory(table) is None
    table.write_text("MemFree: 1 kB\nMemAvailable:    7 kB\n")
    assert loader._read_available_memory(table) == 7168
