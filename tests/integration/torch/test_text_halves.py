"""The text half of models of images: the logits of the entire model without an image."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
)

from backends.torch.attention import BatchSegment
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.loader import find_model
from backends.torch.model import load_model_runner

TEXT: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gemma3": lambda: Gemma3Config(
        text_config={**TEXT, "sliding_window": 16}, vision_config=IMAGES, mm_tokens_per_image=4,
        image_token_index=258,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "tie_word_embeddings": False},
        vision_config={**IMAGES, "model_type": "pixtral"}, image_token_index=258,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Configurations of tiny models."""
PREFIXES = ("language_model.model.", "model.language_model.")
"""Names in files of the hub, and of transformers 5."""
IDS = list(range(5, 60))


def save_model(kind: str, prefix: str, folder: Path) -> Any:
    """Save a model with random weights; return it."""
    torch.manual_seed(2)
    auto: Any = AutoModelForImageTextToText
    model = auto.from_config(CONFIGS[kind]()).eval()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    pattern = re.compile(r"(model\.)?language_model\.(model\.)?(?=embed|layers|norm)")
    tensors = {pattern.sub(prefix, name): one for name, one in load_file(file).items()}
    assert any(name.startswith(prefix) for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 1e-4), ("int8", 0.5)])
def test_text_half_computes_what_the_whole_model_does(
    tmp_path: Path, kind: str, prefix: str, dtype: str, tolerance: float
) -> None:
    model = save_model(kind, prefix, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)

    runner = load_model_runner(find_model(str(tmp_path), print), "cpu", dtype, None)
    cache = SequenceCache(BlockPool(16), len(IDS))
    actual = runner([BatchSegment(cache, IDS, len(IDS))]).log_softmax(-1)

    probabilities = expected.exp()
    assert float((probabilities * (expected - actual)).sum(-1).abs().max()) < tolerance
