"""What a model takes while it is loaded: little more than when it is served.

The bytes of all live tensors are counted after every operation, so that no allocator and no other
process changes the result. Pages of the mapped file do not count: the system can drop them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from backends.torch import loader
from backends.torch.linear_layers import Int8Linear
from backends.torch.loader import ModelLocation, load_int8_model
from backends.torch.model import ATTENTION_NAME, FusedGatedMlp, fuse_layers, prepack_linears
from backends.torch.model_files import ModelError

ALLOWED_PEAK = 1.15
"""The most that loading may take, as a multiple of what the model takes then."""
LAYERS = 32
PAGE = 4096
"""Tensors smaller than a page count as memory, mapped or not."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations take and return, while they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: dict[int, tuple[Any, int]] = {}
        self._bytes = 0  # of these storages, of which some may be gone

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        if self._bytes > self.peak:
            self._drop_expired()
            self.peak = max(self.peak, self._bytes)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if reference.cdata not in self._storages:
            size = storage.nbytes()
            if size >= PAGE and is_mapped(storage.data_ptr()):
                size = 0
            self._storages[reference.cdata] = (reference, size)
            self._bytes += size

    def _drop_expired(self) -> None:
        self._storages = {
            key: entry for key, entry in self._storages.items() if not entry[0].expired()
        }
        self._bytes = sum(size for _, size in self._storages.values())


def is_mapped(address: int) -> bool:
    """Whether memory is that of a file of weights."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            begin, end = (int(one, 16) for one in line.split(maxsplit=1)[0].split("-"))
            if begin <= address < end:
                return True
    return False


def list_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, Int8Linear):
            yield from (module.codes, module.scales)


def count_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in list_tensors(model))


@pytest.fixture(params=["float32", "bfloat16"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model with many small layers, in a file with floats of this type."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    llama: Any = LlamaForCausalLM
    llama(config).to(getattr(torch, request.param)).save_pretrained(tmp_path)
    return tmp_path


def test_int8_model_is_loaded_in_little_more_than_its_size(folder: Path) -> None:
    with LiveBytes() as live:
        model = load_int8_model(ModelLocation(str(folder), "generate"))
        assert live.peak <= ALLOWED_PEAK * count_bytes(model)

    model.set_attn_implementation(ATTENTION_NAME)
    taken = count_bytes(model)
    with LiveBytes() as live:
        fuse_layers(model)
        assert sum(isinstance(one, FusedGatedMlp) for one in model.modules()) == LAYERS
        own_addresses = {tensor.data_ptr() for tensor in model.parameters()}
        prepack_linears(model, owns_weights=True)
    assert live.peak <= ALLOWED_PEAK * taken
    assert {tensor.data_ptr() for tensor in model.parameters()} == own_addresses


def test_memory_of_an_int8_model_is_checked_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers count a byte for each weight, the others four, whatever the file has."""
    location = ModelLocation(str(folder), "generate")
    parts = [one for one in list_tensors(load_int8_model(location)) if one.ndim > 1]
    required = sum(one.nbytes for one in parts) + 4 * 128 * (2 * LAYERS + 1)

    monkeypatch.setattr(loader, "get_free_memory", lambda _: required - 1)
    with pytest.raises(ModelError, match="MB are free"):
        load_int8_model(location)
    monkeypatch.setattr(loader, "get_free_memory", lambda _: required)
    load_int8_model(location)


def test_weights_that_are_no_numbers_are_refused(folder: Path) -> None:
    """Given a weight that is no number, the layer is named instead of served in int8."""
    file, name = folder / "model.safetensors", "model.layers.3.mlp.up_proj"
    tensors = load_file(file)
    tensors[f"{name}.weight"][5, 7] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} has weights or scales that are infinite or no"):
        load_int8_model(ModelLocation(str(folder), "generate"))
