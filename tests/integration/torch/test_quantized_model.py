"""A GGUF file whose weights stay quantized: the same model as its float32 conversion, nearly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from backends.torch.attention import BatchSegment
from backends.torch.fused_layers import FusedAttention, FusedGatedMlp
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.loaded_model import LoadedModel, load_model
from backends.torch.loader import find_model
from backends.torch.quantized_weights import OutputLinear, PackedFourBitLinear, QuantizedEmbedding
from tests.integration.torch.tiny_gguf import write_gguf

Q4, Q8 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
PROMPT = list(range(40, 90))


def load(file: Path, dtype: str) -> LoadedModel:
    location = find_model(str(file), lambda text: None, keep_quantized=dtype == "quantized")
    assert location.is_quantized == (dtype == "quantized")
    return load_model(location, "cpu", dtype, None)


def compute_logits(model: LoadedModel) -> torch.Tensor:
    cache = SequenceCache(BlockPool(16), len(PROMPT))
    return model.runner([BatchSegment(cache, PROMPT, len(PROMPT))])


def find_modules(model: LoadedModel, kind: type) -> list[Any]:
    return [one for one in model.runner._model.modules() if isinstance(one, kind)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLINGUA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("mixed", [False, True])
def test_model_computes_nearly_the_same(tmp_path: Path, *, mixed: bool) -> None:
    """In a file of mixed kinds, layers with the same input can't be fused."""
    file = write_gguf(tmp_path / "x.gguf", lambda name: Q8 if mixed and "attn_v" in name else Q4)
    quantized, exact = load(file, "quantized"), load(file, "float32")
    actual, expected = compute_logits(quantized), compute_logits(exact)
    assert torch.cosine_similarity(actual, expected).min() > 0.99
    layers = quantized.runner.config.num_hidden_layers
    assert len(find_modules(quantized, FusedGatedMlp)) == layers
    assert len(find_modules(quantized, FusedAttention)) == (0 if mixed else layers)
    assert find_modules(quantized, PackedFourBitLinear)
    assert quantized.runner.is_batch_invariant


def test_tied_output_layer_shares_the_embedding(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", lambda name: Q4)
    model = load(file, "quantized")
    (embedding,) = find_modules(model, QuantizedEmbedding)
    (output,) = find_modules(model, OutputLinear)
    tied = model.runner.config.tie_word_embeddings
    assert (output.codes.data_ptr() == embedding.codes.data_ptr()) == tied
