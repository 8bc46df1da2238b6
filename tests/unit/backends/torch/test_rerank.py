"""Reranking with a cross-encoder and with embeddings equals transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

from backends.torch.embedding_engine import EmbeddingEngine
from backends.torch.embeddings import EmbeddingModel
from backends.torch.ipc import (
    ClassifyCommand,
    DetokenizeCommand,
    DetokenizedEvent,
    EngineEvent,
    PromptInput,
    RequestFailedEvent,
    RequestFinishedEvent,
    RerankCommand,
    ScoresEvent,
    TokenizeCommand,
)
from backends.torch.loader import ModelLocation, find_model
from backends.torch.model_files import ModelError
from backends.torch.pooling import PoolingConfig
from backends.torch.rerank import load_cross_encoder, read_activation
from backends.torch.settings import TorchSettings
from tests.support.tiny_model import byte_tokenizer

DOCUMENTS = ("green pear", "red apple", "a longer text on red cars")


def make_tokenizer() -> Any:
    """Make a tokenizer that marks the texts of a pair by type ids and closes each with <eos>."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 257)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    tokenizer.model_max_length = 48
    return tokenizer


def save_model(folder: Path, labels: int = 1, **config: Any) -> ModelLocation:
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(
        BertConfig(
            vocab_size=259,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            initializer_range=0.5,
            **{"num_labels": labels, **config},
        )
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return ModelLocation(str(folder), "rerank")


def run(encoder: Any, *commands: RerankCommand | ClassifyCommand) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    engine = EmbeddingEngine(encoder, 8, events.append, lambda: 0.0)
    for command in commands:
        engine.submit(command)
    while engine.step():
        pass
    return events


def get_scores(encoder: Any, command: RerankCommand) -> tuple[float, ...]:
    scores, finished = run(encoder, command)
    assert isinstance(scores, ScoresEvent)
    assert isinstance(finished, RequestFinishedEvent)
    return scores.scores


def compute_reference(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Return the sigmoid of transformers' logit for each pair alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = make_tokenizer()
    with torch.inference_mode():
        return [
            float(torch.sigmoid(model(**tokenizer(*pair, return_tensors="pt")).logits))
            for pair in pairs
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cross_encoder")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def cross_encoder(folder: Path) -> Any:
    return load_cross_encoder(ModelLocation(str(folder), "rerank"), TorchSettings(path=""))


def test_classifier_with_one_label_is_found_to_rerank(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path, labels=3)

    assert find_model(str(folder), print).task == "rerank"
    assert find_model(str(tmp_path), print).task == "embed"


def test_scores_are_those_of_transformers(folder: Path, cross_encoder: Any) -> None:
    scores = get_scores(cross_encoder, RerankCommand(1, ("red apple",), DOCUMENTS))

    expected = compute_reference(folder, [("red apple", text) for text in DOCUMENTS])
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 3


def test_pairs_are_scored_one_by_one(folder: Path, cross_encoder: Any) -> None:
    queries = ("a", "b", "c")
    scores = get_scores(cross_encoder, RerankCommand(1, queries, DOCUMENTS))

    expected = compute_reference(folder, list(zip(queries, DOCUMENTS, strict=True)))
    assert scores == pytest.approx(expected, abs=1e-5)


def test_requests_are_batched_with_each_other(cross_encoder: Any) -> None:
    alone = get_scores(cross_encoder, RerankCommand(1, ("red",), DOCUMENTS))
    events = run(cross_encoder, *(RerankCommand(i, ("red",), DOCUMENTS) for i in range(4)))

    finished = [event for event in events if isinstance(event, RequestFinishedEvent)]
    assert [event.max_batch for event in finished] == [12] * 4
    for event in events:
        if isinstance(event, ScoresEvent):
            assert event.scores == pytest.approx(alone, abs=1e-5)


def test_pair_that_is_too_long_is_rejected_or_truncated(folder: Path, cross_encoder: Any) -> None:
    command = RerankCommand(1, ("q",), ("x" * 60,))
    [failed] = run(cross_encoder, command)
    assert isinstance(failed, RequestFailedEvent)
    assert (failed.kind, failed.tokens, failed.limit) == ("too_long", 63, 48)

    cut = get_scores(cross_encoder, RerankCommand(1, ("q",), ("x" * 60,), max_tokens=-1))
    assert cut == pytest.approx(compute_reference(folder, [("q", "x" * 45)]), abs=1e-5)

    shorter = get_scores(cross_encoder, RerankCommand(1, ("q",), ("x" * 60,), max_tokens=10))
    assert shorter == pytest.approx(compute_reference(folder, [("q", "x" * 7)]), abs=1e-5)


def test_query_that_leaves_no_room_for_a_document_is_rejected(cross_encoder: Any) -> None:
    [failed] = run(cross_encoder, RerankCommand(1, ("q" * 50,), ("d",), max_tokens=-1))

    assert isinstance(failed, RequestFailedEvent)
    assert failed.kind in ("too_long", "invalid")


def test_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    location = save_model(tmp_path, labels=3)

    with pytest.raises(ModelError, match="one label, and this one has 3"):
        load_cross_encoder(location, TorchSettings(path=""))


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({}, 0.5),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 0.0),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 0.0),
        ({"sentence_transformers": {"version": "5"}}, 0.5),
    ],
)
def test_activation_is_that_of_sentence_transformers(config: dict[str, Any], value: float) -> None:
    assert float(read_activation(config)(torch.zeros(1))) == value


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"torch\.nn\.Tanh .* known: Identity, Sigmoid"):
        read_activation({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}})


# --- by embeddings --------------------------------------------------------------------------------


def make_encoder(**pooling: Any) -> EmbeddingModel:
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
    return EmbeddingModel(model.eval(), byte_tokenizer(), PoolingConfig(**pooling), 64)


def test_embedding_model_reranks_by_cosine_similarity() -> None:
    encoder = make_encoder()
    scores = get_scores(encoder, RerankCommand(1, ("red apple",), DOCUMENTS))

    assert max(scores) == scores[1] == pytest.approx(1.0, abs=1e-5)

    pairs = get_scores(encoder, RerankCommand(1, DOCUMENTS, DOCUMENTS))
    assert pairs == pytest.approx([1.0] * 3, abs=1e-5)


def test_prompts_of_queries_and_documents_are_prepended() -> None:
    prompts = {"query": "q: ", "passage": "p: "}
    prompted = get_scores(make_encoder(prompts=prompts), RerankCommand(1, ("a",), ("b",)))

    plain = get_scores(make_encoder(), RerankCommand(1, ("q: a",), ("p: b",)))

    assert prompted == pytest.approx(plain, abs=1e-6)
    assert prompted != pytest.approx(
        get_scores(make_encoder(), RerankCommand(1, ("a",), ("b",))), abs=1e-6
    )


def test_encoder_detokenizes_and_rejects_conversations() -> None:
    events: list[EngineEvent] = []
    engine = EmbeddingEngine(make_encoder(), 4, events.append, lambda: 0.0)

    engine.detokenize(DetokenizeCommand(1, (104, 105)))
    engine.tokenize(TokenizeCommand(2, PromptInput()))

    assert events[0] == DetokenizedEvent(1, "hi")
    assert isinstance(events[1], RequestFailedEvent)
    assert (events[1].kind, events[1].param) == ("unsupported", "messages")
