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
from backends.torch.fused_layers import FusedGatedMlp, fuse_layers, prepack_linears
from backends.torch.gguf_file import CODES_SUFFIX
from backends.torch.linear_layers import HalfEmbedding, Int8Linear
from backends.torch.loader import ModelLocation, load_int8_model
from backends.torch.model import ATTENTION_NAME
from backends.torch.model_check import compute_reference
from backends.torch.model_files import ModelError
from backends.torch.packed_checkpoint import read_packed_tensors
from backends.torch.packed_formats import read_packed_format
from backends.torch.quantized_weights import EightBitLinear
from tests.unit.backends.torch.test_packed_checkpoint import GPTQ

ALLOWED_PEAK = 1.15
"""The most that loading may take, as a multiple of what the model takes then."""
LAYERS = 32
PAGE = 4096
"""Tensors smaller than a page count as memory, mapped or not."""
STORED = ("cpu", torch.strided)
FROM_STORAGE = {
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
}


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
        self._add((args, kwargs), may_be_mapped=True)
        result = function(*args, **(kwargs or {}))
        # A result has the memory of an argument or its own, unless a storage was read.
        self._add(result, may_be_mapped=function in FROM_STORAGE)
        if self._bytes > self.peak:
            self._drop_expired()
            self.peak = max(self.peak, self._bytes)
        return result

    def _add(self, values: Any, *, may_be_mapped: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and (tensor.device.type, tensor.layout) == STORED:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if reference.cdata in self._storages:
                    continue
                size = storage.nbytes()
                if may_be_mapped and size >= PAGE and is_mapped(storage.data_ptr()):
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
        table = model.get_input_embeddings().weight.data_ptr()
        prepack_linears(model, owns_weights=True)
    assert live.peak <= ALLOWED_PEAK * taken
    shrunk = {table} if isinstance(model.get_input_embeddings(), HalfEmbedding) else set()
    assert {tensor.data_ptr() for tensor in model.parameters()} == own_addresses - shrunk


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


def test_reference_of_a_wide_model_takes_little() -> None:
    """Given outputs of 5.2 MB, less than a fifth of that is kept for the comparison."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        head_dim=16,
    )
    llama: Any = LlamaForCausalLM
    reference = compute_reference(llama(config), 160)
    assert [len(reference.layers), *map(len, reference.layers[0])] == [8, 128, 32]
    stored = sum(one.nbytes for layer in reference.layers for one in layer)
    assert stored < 8 * 160 * 1024 * 4 / 5


def test_product_of_a_quantized_layer_takes_little() -> None:
    """Given 4 million weights, at most 3 MB of them are float32 at a time."""
    layer = EightBitLinear(torch.ones(2048, 2048, dtype=torch.int8), torch.ones(2048))
    rows = torch.ones(1, 2048)
    with LiveBytes() as live, torch.inference_mode():
        layer(rows)
    assert live.peak <= layer.codes.nbytes + 3e6


def test_float_tensors_of_a_packed_checkpoint_are_read_first_and_once(tmp_path: Path) -> None:
    """Given float16 embeddings and a quantized layer, no copy in float16 is made."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    layer, file = "model.layers.0.mlp.up_proj", tmp_path / "model.safetensors"
    tensors = {
        f"{layer}.qweight": torch.ones(16, 128, dtype=torch.int32),
        f"{layer}.qzeros": torch.ones(1, 16, dtype=torch.int32),
        f"{layer}.scales": torch.ones(1, 128, dtype=torch.float16),
        "model.norm.weight": torch.ones(1 << 20, dtype=torch.float16),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    reader = read_packed_tensors(dict.fromkeys(tensors, file), read_packed_format(GPTQ), model)
    with LiveBytes() as live:
        name, tensor = next(reader)
    assert (name, tensor.dtype) == ("model.norm.weight", torch.float32)
    assert live.peak <= tensor.nbytes + 1000
    assert next(reader)[0] == layer + CODES_SUFFIX[4]
