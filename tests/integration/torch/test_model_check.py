"""The check of a model at load accepts a correct one and names what is wrong with another."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Glm4MoeConfig,
    Llama4TextConfig,
    Ministral3Config,
    MistralConfig,
    Phi3Config,
)

from backends.torch import model_check
from backends.torch.attention import BatchSegment
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.loader import ModelLocation
from backends.torch.model import ATTENTION_NAME, ModelRunner, load_model_runner
from backends.torch.model_check import (
    SHORT_LENGTH,
    check_model,
    compute_reference,
    find_layers,
    freeze_rotary_factors,
)
from backends.torch.model_files import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}
"""The head size is 8, so there are four frequencies."""


def build_model(config: Any, attention: str = "eager") -> Any:
    torch.manual_seed(4)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(copy.deepcopy(config), attn_implementation=attention).eval()


def load(folder: Path, config: Any, context: int | None = None) -> ModelRunner:
    build_model(config).save_pretrained(folder)
    return load_model_runner(ModelLocation(str(folder), "generate"), "cpu", "auto", context)


def compute_logits(runner: ModelRunner, *prompts: list[int]) -> list[torch.Tensor]:
    """Return the logits of all tokens of each prompt, packed into one forward pass."""
    pool = BlockPool(64)
    segments = [
        BatchSegment(SequenceCache(pool, len(prompt)), prompt, len(prompt)) for prompt in prompts
    ]
    return list(torch.split(runner(segments), [len(prompt) for prompt in prompts]))


PROMPT = [(7 * i) % 250 for i in range(20)]
NEIGHBOUR = [(11 * i) % 250 for i in range(150)]


# --- rejected models ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (DiffLlamaConfig(**SIZES), r"layer 0 \(DiffLlamaDecoderLayer\)"),
        (
            Llama4TextConfig(
                **{**SIZES, "num_hidden_layers": 4},
                head_dim=8,
                intermediate_size_mlp=64,
                num_local_experts=2,
                attention_chunk_size=8192,
            ),
            r"layer \d \(Llama4TextDecoderLayer\)",
        ),
    ],
    ids=["difference of attentions", "attention chunks"],
)
def test_family_that_computes_something_else_is_refused_with_its_layer(
    tmp_path: Path, config: Any, layer: str
) -> None:
    with pytest.raises(ModelError, match=f"not supported: {layer} computes something else"):
        load(tmp_path, config)


def test_rotary_factors_that_change_with_the_batch_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without frozen factors, a longer prompt in the batch changes a short one's logits."""
    monkeypatch.setattr("backends.torch.model.freeze_rotary_factors", lambda *_: None)

    with pytest.raises(ModelError, match=r"layer 0 \(Phi3DecoderLayer\)"):
        load(tmp_path, Phi3Config(**SIZES, **LONG_ROPE))


def test_window_that_is_ignored_is_caught() -> None:
    model = build_model(MistralConfig(**SIZES, sliding_window=4096))
    reference = compute_reference(model, 256)
    model.set_attn_implementation(ATTENTION_NAME)
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = None

    with pytest.raises(ModelError, match=r"layer 0 \(MistralDecoderLayer\)"):
        ModelRunner(model, reference=reference)


def test_output_layer_that_computes_something_else_is_caught() -> None:
    model = build_model(MistralConfig(**SIZES))
    reference = compute_reference(model, 256)
    model.set_attn_implementation(ATTENTION_NAME)

    with torch.no_grad():
        model.lm_head.weight.mul_(2)

    with pytest.raises(ModelError, match="its output layer computes something else"):
        ModelRunner(model, reference=reference)


def test_logits_of_early_tokens_are_compared() -> None:
    """An output layer that is wrong for the first tokens of a sequence alone."""
    model = build_model(MistralConfig(**SIZES))
    reference = compute_reference(model, 256)
    model.set_attn_implementation(ATTENTION_NAME)
    original = model.forward

    def forward(**options: Any) -> Any:
        out = original(**options)
        if "packed" in options:
            positions = options["position_ids"][0, options["logits_to_keep"]]
            out.logits[:, positions < 100] *= 2
        return out

    model.forward = forward
    with pytest.raises(ModelError, match="its output layer computes something else"):
        ModelRunner(model, reference=reference)


@pytest.mark.parametrize("slice_logits", [1, 40 * 259, 1 << 22])
def test_logits_are_compared_in_slices(monkeypatch: pytest.MonkeyPatch, slice_logits: int) -> None:
    monkeypatch.setattr(model_check, "_SLICE_LOGITS", slice_logits)
    model = build_model(MistralConfig(**SIZES))
    reference = compute_reference(model, 256)
    assert [len(one) for one in reference.logits] == [128, 32]
    model.set_attn_implementation(ATTENTION_NAME)
    ModelRunner(model, reference=reference)


def test_family_whose_own_pass_fails_is_refused() -> None:
    model = build_model(MistralConfig(**SIZES))
    del model.model.norm

    with pytest.raises(ModelError, match=r"not supported: .*norm"):
        compute_reference(model, 256)


def test_failure_inside_the_packed_pass_is_refused() -> None:
    model = build_model(MistralConfig(**SIZES))
    reference = compute_reference(model, 256)
    model.set_attn_implementation(ATTENTION_NAME)
    del model.model.norm

    with pytest.raises(ModelError, match=r"not supported: .*norm"):
        ModelRunner(model, reference=reference)


# --- accepted models ------------------------------------------------------------------------------


def test_family_with_partly_rotated_heads_loads(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        **SIZES,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }
    config = Glm4MoeConfig(**sizes)

    assert load(tmp_path, config).context_length == 256


def test_lengths_are_restored_after_the_check() -> None:
    model = build_model(MistralConfig(**SIZES, sliding_window=4096))
    reference = compute_reference(model, 256)
    model.set_attn_implementation(ATTENTION_NAME)
    runner = ModelRunner(model, reference=reference)

    assert model.config.sliding_window == 4096
    assert {layer.self_attn._params.window for layer in model.model.layers} == {4096}
    assert len(reference.sequences[0]) > 3 * SHORT_LENGTH
    check_model(model, runner, reference)


def test_short_context_has_short_sequences() -> None:
    reference = compute_reference(build_model(MistralConfig(**SIZES)), 12)

    assert [len(one) for one in reference.sequences] == [12, 12]


def test_model_without_a_list_of_layers_has_none() -> None:
    model = build_model(MistralConfig(**SIZES))
    model.config.num_hidden_layers = 7

    assert find_layers(model) == ()


@pytest.mark.parametrize("context", [None, 256, 64, 32])
def test_neighbour_does_not_change_a_prompt_of_a_long_rope_model(
    tmp_path: Path, context: int | None
) -> None:
    runner = load(tmp_path, Phi3Config(**SIZES, **LONG_ROPE), context)
    neighbour = NEIGHBOUR[: (context or 256) - 1]

    [alone] = compute_logits(runner, PROMPT)
    together, _ = compute_logits(runner, PROMPT, neighbour)

    assert torch.equal(alone, together)


@pytest.mark.parametrize(("context", "position"), [(256, 255), (65, 64), (64, 63), (32, 31)])
def test_long_rope_factors_are_those_of_the_served_context(context: int, position: int) -> None:
    """Transformers chooses the same factors for a text that fills the context."""
    config = Phi3Config(**SIZES, **LONG_ROPE)
    frozen, original = build_model(config), build_model(config)
    freeze_rotary_factors(frozen, context)

    hidden, first = torch.zeros(1, 1, 32), torch.tensor([[3]])
    reference = frozen.model.rotary_emb(hidden, first)

    expected = original.model.rotary_emb(hidden, torch.tensor([[3, position]]))

    assert torch.equal(reference[0], expected[0][:, :1])
    assert torch.equal(reference[1], expected[1][:, :1])


def test_factors_can_be_chosen_again_for_a_shorter_context() -> None:
    model = build_model(Phi3Config(**SIZES, **LONG_ROPE))
    factors = []

    for context in (256, 64, 256):
        freeze_rotary_factors(model, context)
        factors.append(model.model.rotary_emb(torch.zeros(1, 1, 32), torch.tensor([[3]]))[0])

    assert torch.equal(factors[0], factors[2])
    assert not torch.equal(factors[0], factors[1])


def test_family_that_scales_queries_by_position_is_not_fused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        **SIZES,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.5,
        },
    }
    runner = load(tmp_path, Ministral3Config(**sizes))

    names = {type(module).__name__ for module in runner._model.modules()}
    assert "Ministral3Attention" in names
    assert "FusedAttention" not in names


# --- memory ---------------------------------------------------------------------------------------


def test_context_is_what_the_cache_holds(tmp_path: Path) -> None:
    runner = load(tmp_path, Phi3Config(**SIZES, **LONG_ROPE))
    size = runner.cache_bytes_per_token

    runner.limit_context(1000 * size)
    assert runner.context_length == 256

    runner.limit_context(130 * size)
    assert runner.context_length == 128

    runner.limit_context(64 * size)
    assert runner.context_length == 64

    [short] = compute_logits(runner, PROMPT)
    expected = load(tmp_path, Phi3Config(**SIZES, **LONG_ROPE), 64)
    assert torch.equal(short, compute_logits(expected, PROMPT)[0])
    with pytest.raises(ModelError, match=r"kv_cache_memory of .* holds 32 tokens; 64 tokens need"):
        runner.limit_context(63 * size)


def test_model_without_a_cache_has_no_limit(tmp_path: Path) -> None:
    runner = load(tmp_path, MistralConfig(**SIZES))
    runner.cache_bytes_per_token = 0

    runner.limit_context(0)
    assert runner.context_length == 256


def test_factors_by_layer_type_are_frozen() -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope_type = {"full": "longrope", "sliding": "default"}
            self.register_buffer("inv_freq", torch.zeros(1))
            self.calls: list[tuple[int, str]] = []

        def forward(self, _hidden: Any, positions: Any, layer_type: str) -> None:
            self.calls.append((int(positions), layer_type))

    module = Rotary()
    freeze_rotary_factors(module, 100)

    assert module.calls == [(99, "full")]
    assert module.rope_type == {"full": "default", "sliding": "default"}


def test_difference_of_a_few_tokens_is_a_rounding_of_the_experts() -> None:
    """A mixture of experts may choose another expert for a token whose scores nearly tie."""
    one = torch.ones(100, 4)
    few, many, broken = one.clone(), one.clone(), one.clone()
    few[:4] = 2
    many[:6] = 2

    broken[:50] = float("nan")

    def is_close(other: torch.Tensor) -> bool:
        return model_check._are_small([model_check._measure_errors(one, other)], 0.01)

    assert is_close(few)
    assert not is_close(many)
    assert not is_close(broken)


@pytest.mark.parametrize("vocabulary", [259, 50_000])
@pytest.mark.parametrize("error", [0.005, 0.02])
def test_sketches_of_logits_differ_as_much_as_the_logits(vocabulary: int, error: float) -> None:
    dice = torch.Generator().manual_seed(7)
    logits = torch.randn(50, vocabulary, generator=dice)
    noise = torch.randn(50, vocabulary, generator=dice).mul_(error)
    sketches = [model_check._sketch_logits(one) for one in (logits, logits + noise)]
    errors = model_check._measure_errors(*sketches)
    assert errors.mean() == pytest.approx(error, rel=0.1)
    assert errors.max() < 1.5 * error
