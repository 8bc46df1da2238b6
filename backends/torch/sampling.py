"""Sampling: the next token of each sequence by its own parameters; watermarks.

The order is that of transformers: logit_bias, repetition penalty, presence and frequency penalties,
forbidden tokens; then temperature, top_k, top_p, min_p, typical_p; the watermark; then the draw.
The repetition penalty includes the prompt; presence and frequency penalties count generated tokens
only. Log probabilities are those of the model's own distribution, before any of these steps.

A token is drawn by inverse transform sampling with a number in (0, 1). The number is a hash of
(seed, position) without state, so that a sequence's tokens depend neither on the batch nor on how
the work is divided into steps.

top_k, top_p and min_p remove every token below a minimum logit, so tokens as likely as the last one
kept are kept, too. This needs only the sorted values, not the order of the tokens: sorting plain
values is cheap, and numpy does it many times faster than torch.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from backends.torch.settings import WatermarkSettings

# A watermark that transformers' detector finds: a bias towards tokens selected by a key.
#
# The preceding tokens seed a permutation of the vocabulary, and the first part of it is the "green
# list". The permutation is always computed by torch on the CPU: a detector needs ``device="cpu"``.
#
# Source: transformers 5.23, ``WatermarkLogitsProcessor``; A Watermark for Large Language Models
# (Kirchenbauer et al.), algorithms 2 (lefthash) and 3 (selfhash). Text Generation Inference uses
# the same scheme and defaults.

_TABLE_SIZE = 1_000_003
_SELF_HASH_CANDIDATES = 40
"""The number of likeliest tokens that selfhash tests, as transformers does."""
_MAX_SEED = 2**64 - 1


def apply_watermark(scores: Tensor, settings: WatermarkSettings, tokens: Sequence[int]) -> None:
    """Add the bias to the green tokens after ``tokens``, in place on one sequence's scores."""
    if len(tokens) < settings.width:
        return
    if settings.scheme == "lefthash":
        green_tokens = _build_green_list(settings.key * tokens[-1], settings, scores.shape[0])
    else:
        green_tokens = _find_self_hash_green(scores, settings, tokens)
    scores[green_tokens.to(scores.device)] += settings.bias


def _build_green_list(seed: int, settings: WatermarkSettings, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % _MAX_SEED)
    return torch.randperm(vocabulary, generator=generator)[: int(vocabulary * settings.ratio)]


def _find_self_hash_green(
    scores: Tensor, settings: WatermarkSettings, tokens: Sequence[int]
) -> Tensor:
    """Those of the likeliest tokens that are in the green list seeded with the token itself."""
    table = _build_hash_table(settings.key)
    previous = torch.tensor(tokens[len(tokens) - settings.width + 1 :], dtype=torch.long)
    green_tokens = []
    for token in scores.topk(min(_SELF_HASH_CANDIDATES, scores.shape[0])).indices.tolist():
        hashes = table[torch.cat([previous, torch.tensor([token])]) % _TABLE_SIZE] + 1
        # The product overflows and wraps around, as in transformers.
        seed = int((settings.key * hashes * hashes[-1]).min())
        if (_build_green_list(seed, settings, scores.shape[0]) == token).any():
            green_tokens.append(token)
    return torch.tensor(green_tokens, dtype=torch.long)


@functools.lru_cache(maxsize=2)
def _build_hash_table(key: int) -> Tensor:
    return torch.randperm(_TABLE_SIZE, generator=torch.Generator().manual_seed(key))


GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding: dividing by them would overflow."""

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
_LOG_ZERO = float("-inf")


class SamplingRules(Struct, frozen=True):
    """A sequence's sampling parameters, with defaults resolved. Neutral values have no effect."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = {}
    allowed_tokens: tuple[int, ...] | None = None
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated."""
    watermark: WatermarkSettings | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is selected."""
        return self.temperature < GREEDY_BELOW or (self.top_k == 1 and self.watermark is None)

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p remove unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class TokenHistory(NamedTuple):
    """A sequence's tokens so far; ``forbidden``: tokens not allowed at this step."""

    prompt: Sequence[int]
    output: Sequence[int]
    forbidden: Sequence[int] = ()

    def tail(self, count: int) -> list[int]:
        """The last ``count`` tokens, or all if there are fewer."""
        tokens = list(self.output[-count:]) if count else []
        missing = count - len(tokens)
        return [*self.prompt[-missing:], *tokens] if missing else tokens


class SamplingInput(NamedTuple):
    """One sequence's input of a sampling step."""

    rules: SamplingRules
    seed: int
    history: TokenHistory


# --- random numbers -----------------------------------------------------------------------------


def _mix_bits(value: int) -> int:
    """A 64-bit hash finalizer (MurmurHash3): each input bit changes half of the output bits."""
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & _MASK_64
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK_64
    return value ^ (value >> 33)


def draw_uniform(seed: int, position: int) -> float:
    """A number in (0, 1), both excluded, from a sample's seed and a token's position."""
    bits = _mix_bits((_mix_bits(seed & _MASK_64) + position * _GOLDEN_RATIO_64) & _MASK_64)
    # With fewer bits than a float has, no product with the total can be rounded up to the total.
    return ((bits >> 16) + 0.5) * 2.0**-48


def derive_seed(seed: int, choice: int) -> int:
    """The seed of a request's ``choice``-th sample; the first has the request's own seed."""
    return (seed + choice * _GOLDEN_RATIO_64) & _MASK_64


# --- penalties ----------------------------------------------------------------------------------


def apply_penalties(logits: Tensor, sampling_input: SamplingInput) -> None:
    """Apply bias, penalties and forbidden tokens, in place on one sequence's logits."""
    rules, history = sampling_input.rules, sampling_input.history
    if rules.bias:
        ids = torch.tensor(list(rules.bias), device=logits.device)
        logits[ids] += torch.tensor(list(rules.bias.values()), device=logits.device)
    if rules.repetition_penalty != 1:
        seen = torch.tensor(list({*history.prompt, *history.output}), device=logits.device)
        values = logits[seen]
        penalty = rules.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if history.output and (rules.presence_penalty or rules.frequency_penalty):
        token_counts = Counter(history.output)
        ids = torch.tensor(list(token_counts), device=logits.device)
        counts = torch.tensor(list(token_counts.values()), device=logits.device)
        logits[ids] -= rules.presence_penalty + rules.frequency_penalty * counts
    if rules.allowed_tokens is not None:
        masked = torch.full_like(logits, _LOG_ZERO)
        ids = torch.tensor(rules.allowed_tokens, device=logits.device)
        masked[ids] = logits[ids]
        logits.copy_(masked)
    forbidden = [*history.forbidden, *_find_completing_tokens(rules.bad_sequences, history)]
    if forbidden:
        remaining = logits.index_fill(0, torch.tensor(forbidden, device=logits.device), _LOG_ZERO)
        # If they would leave no token they are ignored: some token must be selected.
        if remaining.max() > _LOG_ZERO:
            logits.copy_(remaining)


def _find_completing_tokens(
    bad_sequences: Sequence[tuple[int, ...]], history: TokenHistory
) -> list[int]:
    """The tokens that would complete a bad sequence."""
    tail = history.tail(max((len(ids) for ids in bad_sequences), default=1) - 1)
    return [
        ids[-1] for ids in bad_sequences if len(ids) == 1 or tuple(tail[1 - len(ids) :]) == ids[:-1]
    ]


# --- truncation ---------------------------------------------------------------------------------


def _make_column(
    values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _sort_ascending(values: Tensor) -> Tensor:
    return torch.from_numpy(np.sort(values.cpu().numpy(), axis=-1)).to(values.device)


def _compute_min_logits(logits: Tensor, rules: Sequence[SamplingRules]) -> Tensor:
    """The lowest logit that top_k, top_p and min_p keep, for each sequence: (sequences, 1)."""
    size = logits.shape[1]
    counts = [rule.top_k if 0 < rule.top_k < size else size for rule in rules]
    descending = _sort_ascending(-logits).neg_()[:, : max(counts)]
    limits = _make_column(counts, logits, torch.long)
    rank = torch.arange(descending.shape[1], device=logits.device)[None]
    probs = descending.masked_fill(rank >= limits, _LOG_ZERO).softmax(-1)
    mass_before = probs.cumsum(-1, dtype=torch.float64) - probs
    top_p = _make_column([r.top_p if r.top_p < 1 else 2.0 for r in rules], logits)
    min_probs = _make_column([r.min_p for r in rules], logits) * probs[:, :1]
    # The kept values are always the first ones, and at least one is kept.
    kept_counts = ((mass_before < top_p) & (probs >= min_probs)).sum(-1, keepdim=True)
    return descending.gather(1, torch.minimum(kept_counts, limits).clamp_(min=1) - 1)


def _apply_typical_p(logits: Tensor, masses: Sequence[float]) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy, up to these probability masses."""
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    order = torch.from_numpy(np.argsort(distance.cpu().numpy(), axis=-1)).to(logits.device)
    mass = probs.gather(-1, order).cumsum(-1)
    last = (mass < _make_column(masses, logits)).sum(-1, keepdim=True).clamp_(max=mass.shape[1] - 1)
    max_distance = distance.gather(-1, order.gather(-1, last))
    return logits.masked_fill(distance > max_distance, _LOG_ZERO)


def apply_truncation(logits: Tensor, rules: Sequence[SamplingRules]) -> None:
    """Set removed tokens to -inf, in place; the logits are already divided by the temperature."""
    truncated = [i for i, rule in enumerate(rules) if rule.truncates and not rule.is_greedy]
    if truncated:
        min_logits = torch.full((len(rules), 1), _LOG_ZERO, device=logits.device)
        min_logits[truncated] = _compute_min_logits(
            logits[truncated], [rules[i] for i in truncated]
        )
        logits.masked_fill_(logits < min_logits, _LOG_ZERO)
    typical = [i for i, rule in enumerate(rules) if rule.typical_p < 1 and not rule.is_greedy]
    if typical:
        logits[typical] = _apply_typical_p(logits[typical], [rules[i].typical_p for i in typical])


# --- the draw -----------------------------------------------------------------------------------


def sample_tokens(logits: Tensor, inputs: Sequence[SamplingInput]) -> list[int]:
    """The next token of each sequence. ``logits`` (sequences, vocabulary) is modified."""
    for row_logits, sampling_input in zip(logits, inputs, strict=True):
        apply_penalties(row_logits, sampling_input)
    sampled = [i for i, sampling_input in enumerate(inputs) if not sampling_input.rules.is_greedy]
    if sampled:
        rules = [sampling_input.rules for sampling_input in inputs]
        logits /= _make_column(
            [1.0 if rule.is_greedy else rule.temperature for rule in rules], logits
        )
        apply_truncation(logits, rules)
    for row_logits, sampling_input in zip(logits, inputs, strict=True):
        if (watermark := sampling_input.rules.watermark) is not None:
            apply_watermark(row_logits, watermark, sampling_input.history.tail(watermark.width))
    chosen: list[int] = logits.argmax(-1).tolist()
    if sampled:
        for i, token in zip(
            sampled, _draw_tokens(logits[sampled], [inputs[i] for i in sampled]), strict=True
        ):
            chosen[i] = token
    return chosen


def _draw_tokens(logits: Tensor, inputs: Sequence[SamplingInput]) -> list[int]:
    cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    draws = [
        draw_uniform(sampling_input.seed, len(sampling_input.history.output))
        for sampling_input in inputs
    ]
    thresholds = _make_column(draws, logits, torch.float64) * cumulative[:, -1:]
    indices = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    # If a model returns NaN the index may be out of range.
    tokens: list[int] = indices.clamp_(max=cumulative.shape[1] - 1).tolist()
    return tokens


# --- log probabilities --------------------------------------------------------------------------


class SampledLogprob(NamedTuple):
    """A selected token's log probability, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


def get_logprobs(
    log_probs: Tensor, chosen: Sequence[int], top_counts: Sequence[int]
) -> list[SampledLogprob]:
    """The log probabilities of ``chosen`` and of ``top_counts`` alternatives; -1: all tokens."""
    ids = torch.tensor(chosen, device=log_probs.device)[:, None]
    chosen_logprobs = log_probs.gather(1, ids)[:, 0].tolist()
    results = []
    for row_logits, logprob, top_count in zip(log_probs, chosen_logprobs, top_counts, strict=True):
        width = row_logits.shape[0] if top_count < 0 else min(top_count, row_logits.shape[0])
        values, indices = row_logits.topk(width)
        results.append(
            SampledLogprob(logprob, list(zip(indices.tolist(), values.tolist(), strict=True)))
        )
    return results
