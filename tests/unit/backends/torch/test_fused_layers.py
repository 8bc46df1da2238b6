"""Fused layers give the same output as transformers' layers, or are not used."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from backends.torch.attention import AttentionParams, BatchSegment
from backends.torch.fused_layers import FusedAttention, FusedGatedMlp, fuse_layers, replace_modules
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.model import ATTENTION_NAME, ModelRunner

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def build_model(config: Any, attention: str) -> Any:
    torch.manual_seed(1)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention).eval()
    for part in model.modules():  # biases are initialized to zero, which would hide errors
        if type(part) is nn.Linear and part.bias is not None:
            nn.init.normal_(part.bias)
    return model


@pytest.mark.parametrize(
    ("config", "attentions"),
    [
        (LlamaConfig(**SIZES), 2),
        (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), 2),
        (Qwen2Config(**SIZES), 2),
        (Gemma2Config(**SIZES, head_dim=8, sliding_window=16, query_pre_attn_scalar=8), 2),
        (Qwen3Config(**SIZES, head_dim=8), 0),
        (CohereConfig(**SIZES), 0),
    ],
    ids=["llama", "all biases", "some biases", "capped", "query norms", "turned in pairs"],
)
def test_fused_layers_give_the_same_output(config: Any, attentions: int) -> None:
    text = torch.randint(0, 100, (1, 50), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        truth = build_model(config, "eager")(text).logits[0]
    forward = ModelRunner(build_model(config, ATTENTION_NAME))
    kinds = [type(part) for part in forward._model.modules()]

    assert (kinds.count(FusedAttention), kinds.count(FusedGatedMlp)) == (attentions, 2)

    tokens, pool = text[0].tolist(), BlockPool(9)
    kv = SequenceCache(pool, 30)
    outputs = [forward([BatchSegment(kv, tokens[:30], 30)])]
    outputs += [forward([BatchSegment(kv, [token])]) for token in tokens[30:]]

    assert torch.allclose(torch.cat(outputs), truth, atol=2e-3)


class UnsupportedAttention(nn.Module):
    """Has an attention's layers, but another computation."""

    head_dim, layer_idx = 8, 0

    def __init__(self, error: Exception | None, *, key_bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=key_bias)
        self.v_proj, self.o_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self._error = error

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        if self._error is not None:
            raise self._error
        return hidden_states, None


class SwappedGateMlp(nn.Module):
    """Applies the gate to the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down_proj, self.act_fn = nn.Linear(16, 8), nn.SiLU()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        opened: torch.Tensor = self.down_proj(
            self.gate_proj(rows) * self.act_fn(self.up_proj(rows))
        )
        return opened


@pytest.mark.parametrize(
    "part",
    [
        UnsupportedAttention(None),
        UnsupportedAttention(TypeError()),
        UnsupportedAttention(KeyError()),
        UnsupportedAttention(None, key_bias=True),
        SwappedGateMlp(),
    ],
    ids=["attends to nothing", "refuses", "lacks something", "biases differ", "crossed"],
)
def test_unsupported_layers_are_not_fused(part: nn.Module) -> None:
    model = nn.Sequential(part)
    fuse_layers(model)
    assert model[0] is part


class ScaledAttention(UnsupportedAttention):
    """Scales its queries by position, as for long texts, or repeats its keys."""

    def __init__(self, far: float, times: int) -> None:
        super().__init__(None)
        self._far = far
        self._times = times

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        cos, sin = (one[:, :, None] for one in options["position_embeddings"])
        parts = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        query, key, value = (one[:, :, None] for one in parts)
        key = key.repeat(1, 1, self._times, 1)
        query, key = (
            one * cos + torch.cat([-one[..., 4:], one[..., :4]], -1) * sin for one in (query, key)
        )
        query = query * (1 + self._far * options["position_ids"][0, :, None, None])
        heads = (one[0].transpose(0, 1) for one in (query, key, value))
        out = options["packed"].attend(0, *heads, AttentionParams(1.0))
        return self.o_proj(out.reshape(hidden_states.shape)), None


@pytest.mark.parametrize(
    ("far", "times", "kind"),
    [(0.0, 1, FusedAttention), (0.001, 1, ScaledAttention), (0.0, 2, ScaledAttention)],
)
def test_attention_with_other_scaling_is_not_fused(far: float, times: int, kind: type) -> None:
    model = nn.Sequential(ScaledAttention(far, times))
    fuse_layers(model)
    assert type(model[0]) is kind


def test_sequences_of_similar_length_share_a_kernel_call(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, shapes = BlockPool(64), []
    rows = [SequenceCache(pool, n) for n in (3, 9, 20, 31, 32, 40)]
    for kv in rows:
        tiny.runner([BatchSegment(kv, [1] * kv.prompt_length, 0)])

    def seen(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shapes.append(query.shape[0])
        return scaled_dot_product_attention(query, *rest, **options)

    monkeypatch.setattr("backends.torch.attention.scaled_dot_product_attention", seen)
    tiny.runner([BatchSegment(kv, [2]) for kv in rows])

    assert shapes == [4, 2] * 2  # one block or two in each of both layers


def test_nan_in_freed_blocks_does_not_affect_other_sequences(tiny: Any) -> None:
    def answer(pool: BlockPool) -> torch.Tensor:
        kv = SequenceCache(pool, 3)
        tiny.runner([BatchSegment(kv, [1, 2, 3], 0)])
        logits: torch.Tensor = tiny.runner([BatchSegment(kv, [4])])
        return logits

    expected, pool = answer(BlockPool(2)), BlockPool(2)
    mad = SequenceCache(pool, 64)
    tiny.runner([BatchSegment(mad, [5] * 64, 0)])
    with torch.inference_mode():
        for part in (part for pair in pool._layers.values() for part in pair):
            part.fill_(float("nan"))

    mad.free()

    assert torch.equal(answer(pool), expected)


def test_replaced_modules_are_freed_before_the_next_one_is_replaced() -> None:
    """Otherwise a model would be in memory twice while its layers are fused or packed."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    alive = [weakref.ref(layer) for layer in model.modules() if type(layer) is nn.Linear]
    counts = []

    def replace(module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.Linear:
            return None
        counts.append(sum(reference() is not None for reference in alive))
        return nn.Identity()

    assert replace_modules(model, replace) == 3
    assert counts == [3, 2, 1]
