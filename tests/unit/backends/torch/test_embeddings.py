"""Embeddings: batches, pooling and requests."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
)

from backends.torch.embedding_engine import EmbeddingEngine, select_batch
from backends.torch.embeddings import MAX_BATCH_TOKENS, EmbeddingModel, load_encoder
from backends.torch.ipc import (
    EmbedCommand,
    EmbeddingsEvent,
    EngineEvent,
    PromptInput,
    RequestFailedEvent,
    RequestFinishedEvent,
    TokenizeCommand,
    TokensEvent,
)
from backends.torch.loader import ModelLocation
from backends.torch.pooling import PoolingConfig
from backends.torch.settings import TorchSettings
from backends.torch.tokenization import BackgroundTokenizer
from tests.support.tiny_model import byte_tokenizer


def list_batches(requests: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return the batches of requests with inputs of these lengths, as (request, length)."""
    pending = [(number, sorted(lengths)) for number, lengths in enumerate(requests) if lengths]
    batches = []
    while pending:
        batch = []
        for request, position in select_batch([lengths for _, lengths in pending]):
            number, lengths = pending[request]
            batch.append((number, lengths.pop(position)))
        batches.append(batch)
        pending = [one for one in pending if one[1]]
    return batches


@given(st.lists(st.lists(st.integers(1, MAX_BATCH_TOKENS), max_size=20), max_size=5))
def test_batches_contain_every_text_once_within_the_token_limit(
    requests: list[list[int]],
) -> None:
    batches = list_batches(requests)
    assert sorted(one for batch in batches for one in batch) == sorted(
        (number, length) for number, lengths in enumerate(requests) for length in lengths
    )
    assert all(max(length for _, length in b) * len(b) <= MAX_BATCH_TOKENS for b in batches)


def test_batch_has_the_first_request_and_what_fits_beside_it() -> None:
    batches = list_batches([[900, 30], [1000, 20, 20], [30]])

    assert batches == [
        [(0, 900), (0, 30)],
        [(1, 1000), (1, 20)],
        [(1, 20)],
        [(2, 30)],
    ]


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> EmbeddingModel:
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
    return EmbeddingModel(model.eval(), tokenizer, PoolingConfig(matryoshka_sizes=()), 64)


def run_embed_command(
    encoder: EmbeddingModel, spec: EmbedCommand, now: float = 0.0
) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    clock = [0.0]
    embedder = EmbeddingEngine(encoder, 4, events.append, lambda: clock[0])
    embedder.submit(spec)
    clock[0] = now
    while embedder.step():
        pass
    assert (embedder.active_count, embedder.waiting_count) == (0, 0)
    return events


def compute_vectors(encoder: EmbeddingModel, spec: EmbedCommand) -> Any:
    first, finished = run_embed_command(encoder, spec)
    assert isinstance(first, EmbeddingsEvent)
    assert isinstance(finished, RequestFinishedEvent)
    return np.frombuffer(first.data, "<f4").reshape(-1, first.dimensions)


TEXTS = ("a", "a longer text", "b", "a text of middle size", "é")


def test_embeddings_are_ordered_and_independent_of_the_batch(encoder: EmbeddingModel) -> None:
    together = compute_vectors(encoder, EmbedCommand(1, TEXTS))
    alone = np.concatenate([compute_vectors(encoder, EmbedCommand(1, (text,))) for text in TEXTS])

    assert np.allclose(together, alone, atol=1e-5)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_large_embedding_request_is_split_into_batches(encoder: EmbeddingModel) -> None:
    texts = tuple(chr(97 + n % 26) * n for n in range(1, 65))
    assert len(list_batches([[len(text) for text in texts]])) > 1

    together = compute_vectors(encoder, EmbedCommand(1, texts))
    for n in (0, 1, 31, 63):
        assert np.allclose(
            together[n], compute_vectors(encoder, EmbedCommand(1, (texts[n],)))[0], atol=1e-5
        )


def test_reduced_dimensions_are_renormalized(encoder: EmbeddingModel) -> None:
    whole = compute_vectors(encoder, EmbedCommand(1, TEXTS, normalize=False))
    cut = compute_vectors(encoder, EmbedCommand(1, TEXTS, dimensions=8))

    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)

    assert np.allclose(cut, expected, atol=1e-5)


def test_instruction_is_prepended_and_token_ids_are_accepted(encoder: EmbeddingModel) -> None:
    plain = compute_vectors(encoder, EmbedCommand(1, ("query: cat",)))
    assert np.allclose(
        plain, compute_vectors(encoder, EmbedCommand(1, ("cat",), instruction="query: "))
    )
    assert np.allclose(plain, compute_vectors(encoder, EmbedCommand(1, (tuple(b"query: cat"),))))


def test_embedding_model_tokenizes_text(encoder: EmbeddingModel) -> None:
    events: list[EngineEvent] = []
    EmbeddingEngine(encoder, 4, events.append, float).tokenize(
        TokenizeCommand(1, PromptInput(prompts=("aé",)))
    )
    assert events == [TokensEvent(1, (ord("a"), 0xC3, 0xA9), ("a", "", "é"))]


def test_long_text_is_tokenized_in_the_background(
    encoder: EmbeddingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundTokenizer, "LONG_INPUT", 8)
    events: list[EngineEvent] = []
    is_ready = threading.Event()
    embedder = EmbeddingEngine(encoder, 4, events.append, lambda: 0.0, is_ready.set)
    embedder.submit(EmbedCommand(1, ("x" * 100_000,), max_tokens=-1))
    embedder.tokenize(TokenizeCommand(2, PromptInput(prompts=("y" * 9,))))
    embedder.submit(EmbedCommand(3, ("y" * 100_000,), max_tokens=-1))
    embedder.cancel(3)

    while len(events) < 3:
        if not embedder.step() and len(events) < 3:
            assert is_ready.wait(30)
            is_ready.clear()

    assert {type(event) for event in events} == {
        EmbeddingsEvent,
        RequestFinishedEvent,
        TokensEvent,
    }
    assert embedder.waiting_count == 0


def test_oversized_text_is_rejected_without_tokenization(
    encoder: EmbeddingModel,
) -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            if name == "get_vocab":
                return lambda: {"x": 0}
            raise AssertionError(name)

    blind = encoder._replace(tokenizer=Untouched())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backends.torch.embedding_engine.TokenBytes", lambda _: None)
        (failed,) = run_embed_command(blind, EmbedCommand(1, ("x" * 4_000_000,)))
        events: list[EngineEvent] = []
        engine = EmbeddingEngine(blind, 4, events.append, float)
        engine.tokenize(TokenizeCommand(2, PromptInput(prompts=("x" * 4_000_000,))))

    for event in (failed, *events):
        assert isinstance(event, RequestFailedEvent)
        assert (event.kind, event.limit) == ("too_long", 64)
    assert len(events) == 1


def test_text_over_the_context_is_rejected_or_truncated(encoder: EmbeddingModel) -> None:
    (failed,) = run_embed_command(encoder, EmbedCommand(1, ("x" * 65,)))
    assert isinstance(failed, RequestFailedEvent)
    assert (failed.kind, failed.tokens, failed.limit) == ("too_long", 65, 64)

    compute_vectors(encoder, EmbedCommand(1, ("x" * 65,), max_tokens=-1))
    ids = tuple(range(100))
    assert np.allclose(
        compute_vectors(encoder, EmbedCommand(1, (ids,), max_tokens=5)),
        compute_vectors(encoder, EmbedCommand(1, (ids[:5],))),
    )


@pytest.mark.parametrize(
    "spec",
    [
        EmbedCommand(1, ()),
        EmbedCommand(1, ((),)),
        EmbedCommand(1, ((999,),)),
        EmbedCommand(1, ("a",), dimensions=0),
        EmbedCommand(1, ("a",), dimensions=33),
        EmbedCommand(1, ((1, 2),), instruction="query: "),
    ],
)
def test_invalid_embedding_request_is_rejected(encoder: EmbeddingModel, spec: EmbedCommand) -> None:
    (failed,) = run_embed_command(encoder, spec)
    assert isinstance(failed, RequestFailedEvent)
    assert failed.kind == "invalid"


def test_embedding_deadline_cancellation_and_queue_limit(encoder: EmbeddingModel) -> None:
    (failed,) = run_embed_command(encoder, EmbedCommand(1, ("a",), timeout=1.0), now=2.0)
    assert isinstance(failed, RequestFailedEvent)
    assert failed.kind == "deadline"

    events: list[EngineEvent] = []
    embedder = EmbeddingEngine(encoder, 1, events.append, lambda: 0.0)
    for job in (1, 2, 3):
        embedder.submit(EmbedCommand(job, ("a",)))

    assert [one.kind for one in events if isinstance(one, RequestFailedEvent)] == ["overloaded"]

    embedder.cancel(1)
    while embedder.step():
        pass
    assert [one.request_id for one in events if isinstance(one, RequestFinishedEvent)] == [2]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_failed_batch_fails_only_its_request(encoder: EmbeddingModel, error: Exception) -> None:
    class Failing:
        def __init__(self) -> None:
            self.config, self.device = encoder.model.config, torch.device("cpu")

        def __call__(self, **tensors: Any) -> Any:
            if (tensors["input_ids"] == ord("!")).any():
                raise error
            return encoder.model(**tensors)

    events: list[EngineEvent] = []
    embedder = EmbeddingEngine(encoder._replace(model=Failing()), 4, events.append, lambda: 0.0)
    embedder.submit(EmbedCommand(1, ("fail!",)))
    embedder.submit(EmbedCommand(2, TEXTS))
    while embedder.step():
        pass
    first, *rest = events

    assert isinstance(first, RequestFailedEvent)
    assert (first.request_id, first.kind) == (1, "failed")
    assert [type(one) for one in rest] == [EmbeddingsEvent, RequestFinishedEvent]


# --- compared with transformers -------------------------------------------------------------------


def make_closing_tokenizer() -> Any:
    """Make a tokenizer that adds a token before and after a text."""
    one = byte_tokenizer()
    one.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", one.bos_token_id), ("<eos>", one.eos_token_id)],
    )
    return one


def save_model(folder: Path, model: Any, **files: Any) -> Path:
    model.save_pretrained(folder)
    make_closing_tokenizer().save_pretrained(folder)
    for name, content in files.items():
        place = folder / f"{name.replace('__', '/')}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(msgspec.json.encode(content))
    return folder


def make_bert() -> Any:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model: Any = BertModel(config, add_pooling_layer=False)
    return model.eval()


STEPS = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def load_embedding_model(folder: Path, **settings: Any) -> EmbeddingModel:
    torch_settings = TorchSettings(str(folder), device="cpu", **settings)
    return load_encoder(ModelLocation(str(folder), "embed"), torch_settings)


def compute_hidden_states(model: Any, text: str, skip: int = 0) -> Any:
    """Return the hidden states of a text's tokens, alone and without padding."""
    ids = make_closing_tokenizer().encode(text)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0, skip:].numpy()


def normalize(vector: Any) -> Any:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", lambda states: states.mean(0)),
        ("lasttoken", lambda states: states[-1]),
        ("cls", lambda states: states[0]),
        (["cls", "max"], lambda states: np.concatenate([states[0], states.max(0)])),
    ],
)
def test_pooling_is_read_from_the_model_folder(
    tmp_path: Path, pooling: Any, expected: Callable[[Any], Any]
) -> None:
    model = make_bert()
    config = {"pooling_mode": pooling}
    encoder = load_embedding_model(
        save_model(tmp_path, model, modules=STEPS, **{"1_Pooling__config": config})
    )
    vectors = compute_vectors(encoder, EmbedCommand(1, TEXTS))

    assert np.allclose(
        vectors,
        [normalize(expected(compute_hidden_states(model, text))) for text in TEXTS],
        atol=1e-5,
    )

    plain = compute_vectors(encoder, EmbedCommand(1, TEXTS, normalize=False))
    assert np.allclose(
        plain, [expected(compute_hidden_states(model, text)) for text in TEXTS], atol=1e-5
    )
    assert encoder.dimensions == plain.shape[1]


def test_prompts_are_prepended_and_optionally_excluded_from_pooling(tmp_path: Path) -> None:
    model = make_bert()
    config = {"prompts": {"query": "find: ", "text": "t: "}, "default_prompt_name": "text"}
    counts = {"pooling_mode": "mean"}
    folder = save_model(
        tmp_path,
        model,
        modules=STEPS,
        config_sentence_transformers=config,
        **{"1_Pooling__config": counts},
    )
    for instruction, prompt in ((None, "t: "), ("query", "find: "), ("q: ", "q: ")):
        whole = compute_hidden_states(model, f"{prompt}cat")
        vectors = compute_vectors(
            load_embedding_model(folder), EmbedCommand(1, ("cat",), instruction=instruction)
        )
        assert np.allclose(vectors, normalize(whole.mean(0)), atol=1e-5)
    ids = (1, 2, 3)
    plain = compute_vectors(load_embedding_model(folder), EmbedCommand(1, (ids,)))

    save_model(folder, model, **{"1_Pooling__config": {**counts, "include_prompt": False}})
    encoder = load_embedding_model(folder)
    # Without the token before the text and the seven of the prompt.
    part = compute_hidden_states(model, "find: cat", 7)
    vectors = compute_vectors(encoder, EmbedCommand(1, ("cat",), instruction="query"))

    assert np.allclose(vectors, normalize(part.mean(0)), atol=1e-5)

    nothing = compute_hidden_states(model, "find: ", 7)
    vectors = compute_vectors(encoder, EmbedCommand(1, ("",), instruction="query"))
    assert np.allclose(vectors, normalize(nothing.mean(0)), atol=1e-5)

    cut_off = compute_vectors(encoder, EmbedCommand(1, ("cat",), instruction="query", max_tokens=4))
    states = compute_hidden_states(model, "fi")[-1]
    assert np.allclose(cut_off, normalize(states), atol=1e-5)
    assert np.array_equal(compute_vectors(encoder, EmbedCommand(1, (ids,))), plain)


def test_truncated_text_keeps_its_closing_token(tmp_path: Path) -> None:
    model = make_bert()
    encoder = load_embedding_model(save_model(tmp_path, model), context=10)
    expected = normalize(compute_hidden_states(model, "x" * 8).mean(0))

    assert np.allclose(
        compute_vectors(encoder, EmbedCommand(1, ("x" * 50,), max_tokens=-1)), expected, atol=1e-5
    )
    assert np.allclose(
        compute_vectors(encoder, EmbedCommand(1, ("x" * 50,), max_tokens=99)), expected, atol=1e-5
    )

    (failed,) = run_embed_command(encoder, EmbedCommand(1, ("x" * 9,)))
    assert isinstance(failed, RequestFailedEvent)
    assert (failed.kind, failed.tokens, failed.limit) == ("too_long", 11, 10)

    (failed,) = run_embed_command(encoder, EmbedCommand(1, ("xxx",), max_tokens=2))
    assert isinstance(failed, RequestFailedEvent)
    assert failed.message == "texts can't be truncated to fewer than 3 tokens"


def test_do_lower_case_setting_lowercases_texts(tmp_path: Path) -> None:
    model = make_bert()
    encoder = load_embedding_model(
        save_model(tmp_path, model, sentence_bert_config={"do_lower_case": True})
    )

    vectors = compute_vectors(encoder, EmbedCommand(1, ("A Cat",), instruction="FIND "))

    assert np.allclose(
        vectors, normalize(compute_hidden_states(model, "find a cat").mean(0)), atol=1e-5
    )


@pytest.mark.parametrize(
    ("matryoshka", "size", "says"),
    [
        (None, 8, "only supports 32 dimensions"),
        ((8, 16), 9, "one of 8, 16, 32"),
        ((), 33, "between 1 and 32"),
        ((64,), 64, "between 1 and 32"),
        (None, 32, None),
        ((), 9, None),
        ((8, 16), 8, None),
    ],
)
def test_allowed_embedding_dimensions(
    tmp_path: Path, matryoshka: Any, size: int, says: str | None
) -> None:
    model = make_bert()
    encoder = load_embedding_model(save_model(tmp_path, model), matryoshka=matryoshka)
    command = EmbedCommand(1, ("cat",), dimensions=size)
    if says is None:
        expected = normalize(compute_hidden_states(model, "cat").mean(0)[:size])
        assert np.allclose(compute_vectors(encoder, command), expected, atol=1e-5)
    else:
        (failed,) = run_embed_command(encoder, command)
        assert isinstance(failed, RequestFailedEvent)
        assert (failed.kind, failed.param) == ("invalid", "dimensions")
        assert says in failed.message


def test_dense_layer_is_applied(tmp_path: Path) -> None:
    model, weight = make_bert(), torch.randn(5, 32)
    dense = {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    config = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    folder = save_model(
        tmp_path,
        model,
        modules=[STEPS[0], STEPS[1], dense, STEPS[2]],
        **{"1_Pooling__config": {"pooling_mode": "mean"}, "3_Dense__config": config},
    )
    save_file({"linear.weight": weight}, folder / "3_Dense" / "model.safetensors")
    encoder = load_embedding_model(folder)

    expected = normalize(weight.numpy() @ compute_hidden_states(model, "cat").mean(0))

    assert np.allclose(compute_vectors(encoder, EmbedCommand(1, ("cat",))), expected, atol=1e-5)
    assert encoder.dimensions == 5


def test_embeddings_of_llama_t5_and_roberta(tmp_path: Path) -> None:
    """Llama pools its last token, T5 has only its encoder, RoBERTa has two positions less."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    llama: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    encoder = load_embedding_model(save_model(tmp_path / "llama", llama.eval()))
    expected = [normalize(compute_hidden_states(llama.model, text)[-1]) for text in TEXTS]

    assert np.allclose(compute_vectors(encoder, EmbedCommand(1, TEXTS)), expected, atol=1e-5)

    t5: Any = T5Model(
        T5Config(vocab_size=259, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    encoder = load_embedding_model(save_model(tmp_path / "t5", t5.eval()), context=50)
    expected = [normalize(compute_hidden_states(t5.encoder, text).mean(0)) for text in TEXTS]

    assert np.allclose(compute_vectors(encoder, EmbedCommand(1, TEXTS)), expected, atol=1e-5)

    roberta: Any = RobertaModel(RobertaConfig(**sizes, pad_token_id=1))
    encoder = load_embedding_model(save_model(tmp_path / "roberta", roberta.eval()))
    assert encoder.max_length == 62

    compute_vectors(encoder, EmbedCommand(1, ("x" * 60,)))
    assert isinstance(
        run_embed_command(encoder, EmbedCommand(1, ("x" * 61,)))[0], RequestFailedEvent
    )
