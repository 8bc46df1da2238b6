"""The watermark equals transformers' and is detected by its detector."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)

from backends.torch.sampling import (
    SamplingInput,
    SamplingRules,
    TokenHistory,
    apply_watermark,
    sample_tokens,
)
from backends.torch.settings import WatermarkSettings

V = 300
HOWS = [
    WatermarkSettings(),
    WatermarkSettings(key=42, ratio=0.5, bias=3.5, width=3),
    WatermarkSettings(scheme="selfhash"),
    WatermarkSettings(scheme="selfhash", width=4, key=2**31 - 1),
]


def make_transformers_config(how: WatermarkSettings) -> dict[str, Any]:
    """Return transformers' configuration of the watermark."""
    return {
        "greenlist_ratio": how.ratio,
        "bias": how.bias,
        "hashing_key": how.key,
        "seeding_scheme": how.scheme,
        "context_width": how.width,
    }


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("how", HOWS)
def test_watermark_matches_transformers(how: WatermarkSettings) -> None:
    theirs = WatermarkLogitsProcessor(V, "cpu", **make_transformers_config(how))
    for at, line in enumerate(make_logits(8)):
        past = [(at * 37 + i * 11) % V for i in range(at)]
        expected = theirs(torch.tensor([past], dtype=torch.long), line[None])[0]
        mine = line.clone()
        apply_watermark(mine, how, past[-how.width :])
        assert torch.equal(mine, expected)
        assert bool((mine != line).any()) == (at >= how.width)


@pytest.mark.parametrize("how", HOWS)
def test_watermark_is_found_by_the_transformers_detector(how: WatermarkSettings) -> None:
    def text(marked: WatermarkSettings | None, seed: int) -> list[int]:
        output: list[int] = [1, 2, 3, 4]
        rules = SamplingRules(watermark=marked, top_p=0.95)
        for at, line in enumerate(make_logits(120, seed)):
            output += sample_tokens(
                line[None].clone(), [SamplingInput(rules, at, TokenHistory((), output))]
            )
        return output

    detector: Any = WatermarkDetector(
        LlamaConfig(vocab_size=V, bos_token_id=V),
        "cpu",
        WatermarkingConfig(**make_transformers_config(how)),
    )

    def score(output: list[int]) -> float:
        return float(detector(torch.tensor([output]), return_dict=True).z_score[0])

    for seed in range(3):
        assert score(text(how, seed)) > 3 + max(score(text(None, seed)), 0)


def test_watermark_does_not_readmit_truncated_tokens() -> None:
    how = WatermarkSettings(bias=1000.0)
    row = SamplingInput(SamplingRules(watermark=how, top_k=1), 0, TokenHistory([5], []))
    for line in make_logits(20):
        assert sample_tokens(line[None].clone(), [row]) == [int(line.argmax())]

    greedy = SamplingInput(SamplingRules(watermark=how, temperature=0), 0, TokenHistory([5], []))
    chosen = [sample_tokens(line[None].clone(), [greedy])[0] for line in make_logits(20)]
    assert chosen != make_logits(20).argmax(-1).tolist()
