"""Vectors: batches, pooling, the recipe beside a model."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from backends.torch.embed import (
    BUDGET,
    Embedder,
    Encoder,
    Recipe,
    batched,
    pooled,
    read_recipe,
)
from backends.torch.models import ModelError
from backends.torch.spec import Embed, Failed, Finished, News, Tokenize, Tokens, Vectors


@given(st.lists(st.integers(1, BUDGET), max_size=50))
def test_batches_hold_every_text_once_and_keep_the_budget(lengths: list[int]) -> None:
    batches = batched(lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(max(lengths[i] for i in b) * len(b) <= BUDGET for b in batches)


STATES = torch.tensor([[[1.0, 4.0], [3.0, 2.0], [9.0, 9.0]]])
MASK = torch.tensor([[1, 1, 0]])


@pytest.mark.parametrize(
    ("how", "vector"),
    [("mean", [2.0, 3.0]), ("cls", [1.0, 4.0]), ("max", [3.0, 4.0]), ("last", [3.0, 2.0])],
)
def test_pooling(how: str, vector: list[float]) -> None:
    assert pooled(STATES, MASK, how).tolist() == [vector]


def folder_with(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(exist_ok=True)
        place.with_suffix(".json").write_bytes(msgspec.json.encode(content))
    return folder


def module(kind: str, path: str = "") -> dict[str, Any]:
    return {"path": path, "type": f"sentence_transformers.models.{kind}"}


def test_recipe_of_the_files(tmp_path: Path) -> None:
    assert read_recipe(tmp_path) == Recipe()
    folder_with(
        tmp_path,
        modules=[module("Transformer"), module("Pooling", "1_Pooling")],
        sentence_bert_config={"max_seq_length": 256},
        **{"1_Pooling__config": {"pooling_mode_cls_token": True, "word_embedding_dimension": 4}},
    )
    assert read_recipe(tmp_path) == Recipe("cls", normalize=False, length=256)


def test_recipes_that_are_not_served(tmp_path: Path) -> None:
    folder_with(tmp_path, modules=[module("Transformer"), module("Dense", "2_Dense")])
    with pytest.raises(ModelError, match="Dense"):
        read_recipe(tmp_path)
    folder_with(
        tmp_path,
        modules=[module("Pooling", "1_Pooling")],
        **{"1_Pooling__config": {"pooling_mode_weightedmean_tokens": True}},
    )
    with pytest.raises(ModelError, match="weightedmean"):
        read_recipe(tmp_path)


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> Encoder:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model: Any = BertModel(config)
    return Encoder(model.eval(), tokenizer, Recipe(), 64)


def ask(encoder: Encoder, spec: Embed, now: float = 0.0) -> list[News]:
    told: list[News] = []
    clock = [0.0]
    embedder = Embedder(encoder, 4, told.append, lambda: clock[0])
    embedder.submit(spec)
    clock[0] = now
    while embedder.step():
        pass
    assert (embedder.rows, embedder.waiting) == (0, 0)
    return told


def vectors(encoder: Encoder, spec: Embed) -> Any:
    first, finished = ask(encoder, spec)
    assert isinstance(first, Vectors)
    assert isinstance(finished, Finished)
    return np.frombuffer(first.data, "<f4").reshape(-1, first.dimensions)


TEXTS = ("a", "a longer text", "b", "a text of middle size", "é")


def test_vectors_come_in_order_and_do_not_depend_on_neighbours(encoder: Encoder) -> None:
    together = vectors(encoder, Embed(1, TEXTS))
    alone = np.concatenate([vectors(encoder, Embed(1, (text,))) for text in TEXTS])
    assert np.allclose(together, alone, atol=1e-5)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_dimensions_are_cut_and_normalised_again(encoder: Encoder) -> None:
    whole = vectors(encoder, Embed(1, TEXTS, normalize=False))
    cut = vectors(encoder, Embed(1, TEXTS, dimensions=8))
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert np.allclose(cut, expected, atol=1e-5)


def test_instruction_and_token_ids(encoder: Encoder) -> None:
    plain = vectors(encoder, Embed(1, ("query: cat",)))
    assert np.allclose(plain, vectors(encoder, Embed(1, ("cat",), instruction="query: ")))
    assert np.allclose(plain, vectors(encoder, Embed(1, (tuple(b"query: cat"),))))


def test_the_tokens_of_a_text(encoder: Encoder) -> None:
    told: list[News] = []
    Embedder(encoder, 4, told.append, float).tokenize(Tokenize(1, "aé"))
    assert told == [Tokens(1, (ord("a"), 0xC3, 0xA9), ("a", "", "é"))]


def test_too_long_fails_or_is_cut(encoder: Encoder) -> None:
    (failed,) = ask(encoder, Embed(1, ("x" * 65,)))
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.tokens, failed.limit) == ("too_long", 65, 64)
    vectors(encoder, Embed(1, ("x" * 65,), keep=-1))
    ids = tuple(range(100))
    assert np.allclose(
        vectors(encoder, Embed(1, (ids,), keep=5)), vectors(encoder, Embed(1, (ids[:5],)))
    )


@pytest.mark.parametrize(
    "spec",
    [
        Embed(1, ()),
        Embed(1, ((),)),
        Embed(1, ((999,),)),
        Embed(1, ("a",), dimensions=0),
        Embed(1, ("a",), dimensions=33),
    ],
)
def test_what_is_wrong_is_told(encoder: Encoder, spec: Embed) -> None:
    (failed,) = ask(encoder, spec)
    assert isinstance(failed, Failed)
    assert failed.kind == "invalid"


def test_deadline_cancel_and_queue(encoder: Encoder) -> None:
    (failed,) = ask(encoder, Embed(1, ("a",), timeout=1.0), now=2.0)
    assert isinstance(failed, Failed)
    assert failed.kind == "deadline"
    told: list[News] = []
    embedder = Embedder(encoder, 1, told.append, lambda: 0.0)
    for job in (1, 2, 3):
        embedder.submit(Embed(job, ("a",)))
    assert [one.kind for one in told if isinstance(one, Failed)] == ["overloaded"]
    embedder.cancel(1)
    while embedder.step():
        pass
    assert [one.job for one in told if isinstance(one, Finished)] == [2]
