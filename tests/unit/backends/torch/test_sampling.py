"""Sampling equals transformers' processors, and its random numbers are well distributed."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from backends.torch.sampling import (
    SamplingInput,
    SamplingRules,
    TokenHistory,
    apply_penalties,
    apply_truncation,
    derive_seed,
    draw_uniform,
    get_logprobs,
    sample_tokens,
)

V = 300


def make_logits(rows: int = 1, size: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def make_input(
    rules: SamplingRules, seed: int = 0, output: Any = (), prompt: Any = (1,)
) -> SamplingInput:
    return SamplingInput(rules, seed, TokenHistory(list(prompt), list(output)))


def compute_chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


# --- randomness -----------------------------------------------------------------------------------

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
DRAWS = 100_000
LIMIT = 21.1  # chi-square, 3 degrees of freedom: exceeded by chance once in 10,000


def map_to_outcomes(chances: list[float]) -> torch.Tensor:
    """Map each draw to one of four outcomes with these PROBABILITIES."""
    return torch.bucketize(torch.tensor(chances, dtype=torch.float64), PROBABILITIES.cumsum(0)[:3])


@pytest.mark.parametrize("by", ["seed", "position"])
def test_random_numbers_are_uniform(by: str) -> None:
    many = range(DRAWS)
    chances = (
        [draw_uniform(i, 42) for i in many] if by == "seed" else [draw_uniform(42, i) for i in many]
    )
    counts = map_to_outcomes(chances).bincount(minlength=4).float()

    assert compute_chi_square(counts, PROBABILITIES * DRAWS) < LIMIT

    cells = torch.tensor([int(c * 100) for c in chances]).bincount(minlength=100).float()
    assert compute_chi_square(cells, torch.full((100,), DRAWS / 100)) < 161.3  # 99 degrees, as rare


@pytest.mark.parametrize("other", ["position", "seed", "choice"])
def test_consecutive_random_numbers_are_independent(other: str) -> None:
    def after(seed: int) -> float:
        return {
            "position": draw_uniform(seed, 1),
            "seed": draw_uniform(seed + 1, 0),
            "choice": draw_uniform(derive_seed(seed, 1), 0),
        }[other]

    first = map_to_outcomes([draw_uniform(seed, 0) for seed in range(DRAWS)])
    pairs = (first * 4 + map_to_outcomes([after(seed) for seed in range(DRAWS)])).bincount(
        minlength=16
    )

    expected = (PROBABILITIES[:, None] * PROBABILITIES[None]).flatten() * DRAWS

    assert (
        compute_chi_square(pairs.float(), expected) < 44.3
    )  # 15 degrees of freedom, once in 10,000


def test_random_numbers_are_between_zero_and_one_for_any_seed() -> None:
    uniforms = {draw_uniform(seed, at) for seed in (0, 1, 2**63, 2**64 - 1) for at in range(1000)}
    assert len(uniforms) == 4000
    assert 0 < min(uniforms) < max(uniforms) < 1
    assert draw_uniform(2**64 + 5, 3) == draw_uniform(5, 3)


def test_first_choice_uses_the_seed_unchanged() -> None:
    assert derive_seed(7, 0) == 7
    assert len({derive_seed(7, i) for i in range(100)}) == 100


def test_sampling_follows_the_probabilities() -> None:
    line = torch.full((V,), float("-inf"))
    line[[7, 3, 250, 0]] = PROBABILITIES.log()
    rows = 20_000
    for rules in (
        SamplingRules(),
        SamplingRules(top_k=50),
        SamplingRules(top_p=0.9999),
        SamplingRules(min_p=0.01),
        SamplingRules(typical_p=0.9999),
    ):
        chosen = sample_tokens(
            line.repeat(rows, 1), [make_input(rules, seed) for seed in range(rows)]
        )
        counts = torch.tensor(chosen).bincount(minlength=V)[[7, 3, 250, 0]].float()
        assert compute_chi_square(counts, PROBABILITIES * rows) < LIMIT
        assert counts.sum() == rows


def test_nan_logits_still_give_a_token() -> None:
    for rules in (
        SamplingRules(),
        SamplingRules(top_p=0.5),
        SamplingRules(typical_p=0.5),
        SamplingRules(temperature=0),
    ):
        (token,) = sample_tokens(torch.full((1, V), float("nan")), [make_input(rules)])
        assert 0 <= token < V


# --- compared with transformers -------------------------------------------------------------------


def compute_reference_distribution(
    rules: SamplingRules, line: torch.Tensor, drawn: SamplingInput | None = None
) -> torch.Tensor:
    """Return the distribution of a row by transformers' processors."""
    past = drawn.history if drawn is not None else TokenHistory([1], [])
    parts: list[Any] = []
    if rules.bias:
        parts.append(SequenceBiasLogitsProcessor([[[i], bias] for i, bias in rules.bias.items()]))
    if rules.repetition_penalty != 1:
        parts.append(RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    if rules.bad_sequences:
        parts.append(NoBadWordsLogitsProcessor([list(ids) for ids in rules.bad_sequences]))
    if past.forbidden:
        parts.append(SuppressTokensLogitsProcessor(list(past.forbidden)))
    if rules.temperature != 1:
        parts.append(TemperatureLogitsWarper(rules.temperature))
    if rules.top_k:
        parts.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1:
        parts.append(TopPLogitsWarper(rules.top_p))
    if rules.min_p:
        parts.append(MinPLogitsWarper(rules.min_p))
    if rules.typical_p < 1:
        parts.append(TypicalLogitsWarper(rules.typical_p))
    all_of_them: Any = LogitsProcessorList(parts)
    scores: torch.Tensor = all_of_them(torch.tensor([[*past.prompt, *past.output]]), line[None])
    return scores.softmax(-1)[0]


def compute_distribution(rules: SamplingRules, line: torch.Tensor) -> torch.Tensor:
    scaled = line[None] / rules.temperature
    apply_truncation(scaled, [rules])
    return scaled.softmax(-1)[0]


GRID = [
    SamplingRules(temperature=t, top_k=k, top_p=p, min_p=m, typical_p=y)
    for t, k, p, m, y in itertools.product(
        (0.7, 1.5), (0, 2, 40), (0.3, 0.95, 1.0), (0.0, 0.1), (0.4, 0.9, 1.0)
    )
]


@pytest.mark.parametrize("seed", range(3))
def test_truncation_matches_transformers(seed: int) -> None:
    line = make_logits(seed=seed)[0]
    for rules in GRID:
        assert torch.allclose(
            compute_distribution(rules, line),
            compute_reference_distribution(rules, line),
            atol=1e-5,
        ), rules


TOKEN = st.integers(0, 11)
TOKENS = st.lists(TOKEN, max_size=8)
RULES = st.builds(
    SamplingRules,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 8, 100]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    typical_p=st.sampled_from([0.2, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    bias=st.dictionaries(TOKEN, st.floats(-3, 3), max_size=3),
    bad_sequences=st.lists(
        st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=2, unique=True
    ).map(tuple),
)
ROWS = st.lists(
    st.builds(
        lambda rules, prompt, output, held: SamplingInput(
            rules, 0, TokenHistory(prompt, output, held)
        ),
        RULES,
        st.lists(TOKEN, min_size=1, max_size=8),
        TOKENS,
        st.lists(TOKEN, max_size=2, unique=True),
    ),
    min_size=1,
    max_size=6,
)


@given(ROWS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_mixed_batch_matches_transformers(rows: list[SamplingInput], seed: int) -> None:
    lines = make_logits(len(rows), size=24, seed=seed)
    expected = [
        compute_reference_distribution(row.rules, line, row)
        for row, line in zip(rows, lines, strict=True)
    ]
    mine = lines.clone()

    sample_tokens(mine, rows)

    for row, line, wanted in zip(rows, mine, expected, strict=True):
        if not row.rules.is_greedy:
            assert torch.allclose(line.softmax(-1), wanted, atol=1e-5), row


def test_sampled_row_is_independent_of_the_batch() -> None:
    rules = [SamplingRules(temperature=0), SamplingRules(), *GRID[::7]]
    rows = [make_input(rule, seed=i, output=range(i)) for i, rule in enumerate(rules)]
    lines = make_logits(len(rows))
    together = sample_tokens(lines.clone(), rows)

    alone = [sample_tokens(lines[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]

    assert together == alone


def test_repetition_penalty_includes_the_prompt() -> None:
    line, prompt, output = make_logits()[0], [3, 4, 4], [5, 3]
    mine = line.clone()
    apply_penalties(
        mine, make_input(SamplingRules(repetition_penalty=1.7), output=output, prompt=prompt)
    )

    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), line[None])

    assert torch.allclose(mine, expected[0])


def test_presence_and_frequency_penalty_ignore_the_prompt() -> None:
    line, mine = make_logits()[0], make_logits()[0]
    rules = SamplingRules(presence_penalty=0.5, frequency_penalty=0.25)
    apply_penalties(mine, make_input(rules, output=[5, 5, 6], prompt=[7]))
    change = torch.zeros(V)
    change[5], change[6] = 1.0, 0.75

    assert torch.allclose(line - mine, change, atol=1e-6)


def test_logit_bias_matches_transformers() -> None:
    line, mine = make_logits()[0], make_logits()[0]
    apply_penalties(mine, make_input(SamplingRules(bias={3: 2.5, 9: -1.0})))

    expected = SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -1.0]])(
        torch.tensor([[1]]), line[None]
    )

    assert torch.allclose(mine, expected[0])


@pytest.mark.parametrize(
    ("prompt", "output"),
    [([1], []), ([1], [5]), ([5], []), ([4], [5]), ([4, 5], []), ([1], [4, 5])],
)
def test_bad_words_match_transformers(prompt: list[int], output: list[int]) -> None:
    bad = ((8,), (5, 6), (4, 5, 7))
    line, mine = make_logits()[0], make_logits()[0]
    apply_penalties(
        mine, make_input(SamplingRules(bad_sequences=bad), output=output, prompt=prompt)
    )

    expected = NoBadWordsLogitsProcessor([list(ids) for ids in bad])(
        torch.tensor([prompt + output]), line[None]
    )

    assert torch.equal(mine.isinf(), expected[0].isinf())


def test_allowed_and_forbidden_tokens_are_masked() -> None:
    mine = make_logits()[0]
    apply_penalties(
        mine,
        SamplingInput(
            SamplingRules(allowed_tokens=(1, 2, 3)), 0, TokenHistory([1], [], forbidden=(2,))
        ),
    )

    assert mine.isfinite().nonzero().flatten().tolist() == [1, 3]


def test_forbidden_token_is_allowed_if_no_other_is_left() -> None:
    mine = make_logits()[0]
    apply_penalties(
        mine,
        SamplingInput(
            SamplingRules(allowed_tokens=(5,), bad_sequences=((5,),)),
            0,
            TokenHistory([1], [], forbidden=(5,)),
        ),
    )

    assert mine.isfinite().nonzero().flatten().tolist() == [5]


def test_greedy_picks_the_most_likely_token() -> None:
    lines = make_logits(4)
    for rules in (
        SamplingRules(temperature=0),
        SamplingRules(temperature=1e-9),
        SamplingRules(top_k=1),
        SamplingRules(top_p=0.0),
    ):
        rows = [make_input(rules, i) for i in range(4)]
        assert sample_tokens(lines.clone(), rows) == lines.argmax(-1).tolist()


def test_logprobs_contain_the_token_and_top_alternatives() -> None:
    log_probs = make_logits(2).log_softmax(-1)
    one, two = get_logprobs(log_probs, [5, 6], [2, -1])

    assert one.logprob == float(log_probs[0, 5])
    assert [i for i, _ in one.top] == log_probs[0].topk(2).indices.tolist()
    assert len(two.top) == V
