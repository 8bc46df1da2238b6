"""The sampler, held against transformers' processors row by row, and its noise against chance."""

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from backends.torch import sampler
from backends.torch.sampler import Drawn, Past, Rules, adjust, gumbel, likelihoods, pick, seed_of

V = 300


def logits(rows: int = 1, size: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(rules: Rules, seed: int = 0, output: Any = (), prompt: Any = (1,)) -> Drawn:
    return Drawn(rules, seed, Past(list(prompt), list(output)))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


# --- noise --------------------------------------------------------------------------------------

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
DRAWS = 100_000
LIMIT = 21.1  # chi-square, 3 degrees of freedom: passed by chance once in 10,000


@pytest.mark.parametrize("by", ["seed", "position"])
def test_noise_draws_by_the_probabilities(by: str) -> None:
    many, one = torch.arange(DRAWS), torch.full((DRAWS,), 42)
    seeds, positions = (many, one) if by == "seed" else (one, many)
    ids = torch.arange(4)[None].expand(DRAWS, 4)
    chosen = (PROBABILITIES.log() + gumbel(seeds, positions, ids)).argmax(-1)
    counts = chosen.bincount(minlength=4).float()
    assert chi_square(counts, PROBABILITIES * DRAWS) < LIMIT


def test_noise_is_independent_between_positions() -> None:
    ids = torch.arange(4)[None].expand(DRAWS, 4)
    seeds = torch.arange(DRAWS)
    draws = [
        (PROBABILITIES.log() + gumbel(seeds, torch.full((DRAWS,), at), ids)).argmax(-1)
        for at in (0, 1)
    ]
    pairs = (draws[0] * 4 + draws[1]).bincount(minlength=16).float()
    expected = (PROBABILITIES[:, None] * PROBABILITIES[None]).flatten() * DRAWS
    assert chi_square(pairs, expected) < 44.3  # 15 degrees of freedom, once in 10,000


def test_noise_is_finite_for_seeds_of_any_size() -> None:
    seeds = torch.tensor([sampler.signed(s) for s in (0, 1, 2**63, 2**64 - 1)])
    noise = gumbel(seeds, torch.zeros(4, dtype=torch.long), torch.arange(V)[None].expand(4, V))
    assert noise.isfinite().all()
    assert len({tuple(line.tolist()) for line in noise}) == 4


def test_the_first_choice_has_the_seed_itself() -> None:
    assert seed_of(7, 0) == 7
    assert len({seed_of(7, i) for i in range(100)}) == 100


def test_pick_draws_by_the_probabilities() -> None:
    line = torch.full((V,), float("-inf"))
    line[:4] = PROBABILITIES.log()
    rows = 20_000
    for rules in (Rules(), Rules(top_k=50), Rules(top_p=0.9999), Rules(min_p=0.01)):
        chosen = pick(line.repeat(rows, 1), [drawn(rules, seed) for seed in range(rows)])
        counts = torch.tensor(chosen).bincount(minlength=4).float()
        assert chi_square(counts, PROBABILITIES * rows) < LIMIT


# --- transformers as the oracle -----------------------------------------------------------------


def theirs(rules: Rules, line: torch.Tensor) -> torch.Tensor:
    parts: list[Any] = [TemperatureLogitsWarper(rules.temperature)]
    if rules.top_k:
        parts.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1:
        parts.append(TopPLogitsWarper(rules.top_p))
    if rules.min_p:
        parts.append(MinPLogitsWarper(rules.min_p))
    if rules.typical_p < 1:
        parts.append(TypicalLogitsWarper(rules.typical_p))
    all_of_them: Any = LogitsProcessorList(parts)
    scores: torch.Tensor = all_of_them(torch.tensor([[1]]), line[None])
    return scores.softmax(-1)[0]


def ours(rules: Rules, line: torch.Tensor) -> torch.Tensor:
    scaled = line[None] / rules.temperature
    values, ids = scaled.topk(line.shape[0])
    total = scaled.logsumexp(-1, keepdim=True)
    kept = sampler._typical(sampler._cut(values, total, [rules]), [rules])
    return torch.zeros_like(line).scatter(0, ids[0], kept[0].softmax(-1))


GRID = [
    Rules(temperature=t, top_k=k, top_p=p, min_p=m, typical_p=y)
    for t, k, p, m, y in itertools.product(
        (0.7, 1.5), (0, 1, 40), (0.3, 0.95, 1.0), (0.0, 0.1), (0.4, 0.9, 1.0)
    )
]


@pytest.mark.parametrize("seed", range(3))
def test_truncations_are_those_of_transformers(seed: int) -> None:
    line = logits(seed=seed)[0]
    for rules in GRID:
        assert torch.allclose(ours(rules, line), theirs(rules, line), atol=1e-5), rules


def test_few_candidates_give_what_all_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [drawn(rules, seed=i) for i, rules in enumerate(GRID)]
    lines = logits(len(rows), seed=9)
    every = pick(lines.clone(), rows)
    for few in (1, 7, 64):
        monkeypatch.setattr(sampler, "CANDIDATES", few)
        assert pick(lines.clone(), rows) == every


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rules = [Rules(temperature=0), Rules(), *GRID[::7]]
    rows = [drawn(rule, seed=i, output=range(i)) for i, rule in enumerate(rules)]
    lines = logits(len(rows))
    together = pick(lines.clone(), rows)
    alone = [pick(lines[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone


def test_repetition_penalty_counts_the_prompt() -> None:
    line, prompt, output = logits()[0], [3, 4, 4], [5, 3]
    mine = line.clone()
    adjust(mine, drawn(Rules(repetition_penalty=1.7), output=output, prompt=prompt))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), line[None])
    assert torch.allclose(mine, expected[0])


def test_presence_and_frequency_count_the_output_only() -> None:
    line, mine = logits()[0], logits()[0]
    rules = Rules(presence_penalty=0.5, frequency_penalty=0.25)
    adjust(mine, drawn(rules, output=[5, 5, 6], prompt=[7]))
    change = torch.zeros(V)
    change[5], change[6] = 1.0, 0.75
    assert torch.allclose(line - mine, change, atol=1e-6)


def test_bias_is_that_of_transformers() -> None:
    line, mine = logits()[0], logits()[0]
    adjust(mine, drawn(Rules(bias={3: 2.5, 9: -1.0})))
    expected = SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -1.0]])(
        torch.tensor([[1]]), line[None]
    )
    assert torch.allclose(mine, expected[0])


@pytest.mark.parametrize(
    ("prompt", "output"),
    [([1], []), ([1], [5]), ([5], []), ([4], [5]), ([4, 5], []), ([1], [4, 5])],
)
def test_bad_words_are_those_of_transformers(prompt: list[int], output: list[int]) -> None:
    bad = ((8,), (5, 6), (4, 5, 7))
    line, mine = logits()[0], logits()[0]
    adjust(mine, drawn(Rules(bad=bad), output=output, prompt=prompt))
    expected = NoBadWordsLogitsProcessor([list(ids) for ids in bad])(
        torch.tensor([prompt + output]), line[None]
    )
    assert torch.equal(mine.isinf(), expected[0].isinf())


def test_allowed_and_held_tokens() -> None:
    mine = logits()[0]
    adjust(mine, Drawn(Rules(allowed=(1, 2, 3)), 0, Past([1], [], held=(2,))))
    assert mine.isfinite().nonzero().flatten().tolist() == [1, 3]


def test_greedy_takes_the_likeliest() -> None:
    lines = logits(4)
    for rules in (Rules(temperature=0), Rules(temperature=1e-9), Rules(top_k=1), Rules(top_p=0.0)):
        rows = [drawn(rules, i) for i in range(4)]
        assert pick(lines.clone(), rows) == lines.argmax(-1).tolist()


def test_likelihoods() -> None:
    log_probs = logits(2).log_softmax(-1)
    one, two = likelihoods(log_probs, [5, 6], [2, -1])
    assert one.logprob == float(log_probs[0, 5])
    assert [i for i, _ in one.top] == log_probs[0].topk(2).indices.tolist()
    assert len(two.top) == V
