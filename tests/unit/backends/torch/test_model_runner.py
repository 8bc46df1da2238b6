"""The packed forward pass equals transformers' own."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from backends.torch.attention import BatchSegment
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.model import ATTENTION_NAME, ModelRunner
from backends.torch.model_files import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def build_model(config: Any, attention: str) -> Any:
    torch.manual_seed(1)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize(
    "config",
    [MistralConfig(**SIZES, sliding_window=16), Qwen3Config(**SIZES, head_dim=8)],
    ids=["sliding window", "query norms"],
)
def test_packed_forward_pass_matches_eager_attention_for_any_chunks(config: Any) -> None:
    """The reference is eager attention over the entire text, without a cache."""
    text = torch.randint(0, 100, (1, 50), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        truth = build_model(config, "eager")(text).logits[0]
    forward = ModelRunner(build_model(config, ATTENTION_NAME))
    tokens = text[0].tolist()
    for cuts in ([50], [20, 30], [1] * 50, [7, 1, 30, 1, 11]):
        pool = BlockPool(64)
        kv, outputs = SequenceCache(pool, 50), []
        start = 0
        for cut in cuts:
            # A second row makes this a packed pass.
            other = BatchSegment(SequenceCache(pool, 5), tokens[:5])
            logits = forward([BatchSegment(kv, tokens[start : start + cut], cut), other])
            outputs.append(logits[:-1])
            start += cut
        assert torch.allclose(torch.cat(outputs), truth, atol=1e-3)


def test_forked_sequence_shares_the_past_and_diverges(tiny: Any) -> None:
    pool = BlockPool(9)
    one = SequenceCache(pool, 3)
    tiny.runner([BatchSegment(one, [1, 2, 3], 0)])
    other = one.fork()

    assert pool.used_blocks == 1

    tiny.runner([BatchSegment(other, [9] * 100, 0)])
    expected = tiny.runner([BatchSegment(SequenceCache(pool, 3), [1, 2, 3, 4])])
    assert torch.equal(tiny.runner([BatchSegment(one, [4])]), expected)
    assert (one.length, other.length, pool.layer_count) == (4, 103, 2)


def test_forward_pass_without_requested_logits_returns_none(tiny: Any) -> None:
    assert tiny.runner([BatchSegment(SequenceCache(BlockPool(1)), [1, 2, 3], 0)]).shape == (0, 259)


class Recurrent(torch.nn.Module):
    """A model family whose state is not keys and values."""

    device = torch.device("cpu")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.generation_config = None

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        class Out:
            logits = torch.zeros(1, 1, 100)

        return Out()


def test_unsupported_model_family_is_rejected() -> None:
    with pytest.raises(ModelError, match="not supported"):
        ModelRunner(Recurrent(MistralConfig(**SIZES)))
