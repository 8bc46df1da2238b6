"""Sampling: the next token of each row by its own parameters; watermarks.

The order is that of transformers: logit_bias, repetition penalty, presence and frequency penalties,
forbidden tokens; then temperature, top_k, top_p, min_p, typical_p; the watermark; then the draw.
Repetition counts the prompt, presence and frequency count only what was generated. Log
probabilities, by contrast, are of the model's own distribution, before any of this.

A draw lays the tokens' probabilities end to end and takes the token on which a number falls. The
number is a hash of (seed, position), with no state: a row's tokens depend neither on its neighbours
nor on how the work was cut up.

What is left out is left out by value, and so is whatever is as likely as the last that is kept. For
that a row's values must be sorted, but its tokens need not be: sorting bare numbers is cheap, and
numpy does it many times faster than torch.
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
# The preceding tokens seed a shuffle of the vocabulary, and the first part of it is "green". The
# shuffle is always torch's own on the CPU: a detector needs ``device="cpu"``.
#
# Source: transformers 5.23, ``WatermarkLogitsProcessor``; A Watermark for Large Language Models
# (Kirchenbauer et al.), algorithms 2 (lefthash) and 3 (selfhash). Text Generation Inference uses
# the same scheme and defaults.

_TABLE_SIZE = 1_000_003
_CANDIDATES = 40
"""Of the likeliest tokens, so many are asked whether they are green for themselves."""
_MAX_SEED = 2**64 - 1


def apply_watermark(scores: Tensor, how: WatermarkSettings, past: Sequence[int]) -> None:
    """Favour the green tokens that may follow ``past``, in place on one row's scores."""
    if len(past) < how.width:
        return
    if how.scheme == "lefthash":
        green = _build_green_list(how.key * past[-1], how, scores.shape[0])
    else:
        green = _find_self_hash_green(scores, how, past)
    scores[green.to(scores.device)] += how.bias


def _build_green_list(seed: int, how: WatermarkSettings, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % _MAX_SEED)
    return torch.randperm(vocabulary, generator=generator)[: int(vocabulary * how.ratio)]


def _find_self_hash_green(scores: Tensor, how: WatermarkSettings, past: Sequence[int]) -> Tensor:
    """Those of the likeliest tokens that are green in a list which they help to seed."""
    table = _build_hash_table(how.key)
    before = torch.tensor(past[len(past) - how.width + 1 :], dtype=torch.long)
    found = []
    for token in scores.topk(min(_CANDIDATES, scores.shape[0])).indices.tolist():
        seen = table[torch.cat([before, torch.tensor([token])]) % _TABLE_SIZE] + 1
        # The product is meant to wrap around: so it does there.
        seed = int((how.key * seen * seen[-1]).min())
        if (_build_green_list(seed, how, scores.shape[0]) == token).any():
            found.append(token)
    return torch.tensor(found, dtype=torch.long)


@functools.lru_cache(maxsize=2)
def _build_hash_table(key: int) -> Tensor:
    return torch.randperm(_TABLE_SIZE, generator=torch.Generator().manual_seed(key))


GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow."""

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
_LOG_ZERO = float("-inf")


class SamplingRules(Struct, frozen=True):
    """How a row's tokens are picked, with every default resolved. The neutral values do nothing."""

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
    """Sequences of token ids that must not come about."""
    watermark: WatermarkSettings | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW or (self.top_k == 1 and self.watermark is None)

    @property
    def truncates(self) -> bool:
        """Whether the unlikely tokens are left out of the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class TokenHistory(NamedTuple):
    """What a row has behind it; ``held`` are ids that may not come yet."""

    prompt: Sequence[int]
    output: Sequence[int]
    forbidden: Sequence[int] = ()

    def tail(self, count: int) -> list[int]:
        """The last ``count`` tokens, or all where there are fewer."""
        found = list(self.output[-count:]) if count else []
        missing = count - len(found)
        return [*self.prompt[-missing:], *found] if missing else found


class SamplingInput(NamedTuple):
    """One row's part in a step."""

    rules: SamplingRules
    seed: int
    history: TokenHistory


# --- chance -------------------------------------------------------------------------------------


def _mix_bits(value: int) -> int:
    """A finaliser of 64 bits: every bit that comes in changes half of those that go out."""
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & _MASK_64
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK_64
    return value ^ (value >> 33)


def draw_uniform(seed: int, position: int) -> float:
    """A number between 0 and 1, neither included, for a sample's seed and a token's place in it."""
    bits = _mix_bits((_mix_bits(seed & _MASK_64) + position * _GOLDEN_RATIO_64) & _MASK_64)
    # With fewer bits than a float has, no product with a sum can be rounded up to that sum.
    return ((bits >> 16) + 0.5) * 2.0**-48


def derive_seed(seed: int, choice: int) -> int:
    """The seed of a request's ``choice``-th sample: its own for the first."""
    return (seed + choice * _GOLDEN_RATIO_64) & _MASK_64


# --- what changes logits ------------------------------------------------------------------------


def apply_penalties(logits: Tensor, drawn: SamplingInput) -> None:
    """Bias, penalties and forbidden tokens, in place on one row's logits."""
    rules, past = drawn.rules, drawn.history
    if rules.bias:
        ids = torch.tensor(list(rules.bias), device=logits.device)
        logits[ids] += torch.tensor(list(rules.bias.values()), device=logits.device)
    if rules.repetition_penalty != 1:
        seen = torch.tensor(list({*past.prompt, *past.output}), device=logits.device)
        values = logits[seen]
        penalty = rules.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if past.output and (rules.presence_penalty or rules.frequency_penalty):
        counted = Counter(past.output)
        ids = torch.tensor(list(counted), device=logits.device)
        counts = torch.tensor(list(counted.values()), device=logits.device)
        logits[ids] -= rules.presence_penalty + rules.frequency_penalty * counts
    if rules.allowed_tokens is not None:
        kept = torch.full_like(logits, _LOG_ZERO)
        ids = torch.tensor(rules.allowed_tokens, device=logits.device)
        kept[ids] = logits[ids]
        logits.copy_(kept)
    forbidden = [*past.forbidden, *_find_completing_tokens(rules.bad_sequences, past)]
    if forbidden:
        rest = logits.index_fill(0, torch.tensor(forbidden, device=logits.device), _LOG_ZERO)
        # Where nothing would be left they give way: some token must come.
        if rest.max() > _LOG_ZERO:
            logits.copy_(rest)


def _find_completing_tokens(bad: Sequence[tuple[int, ...]], past: TokenHistory) -> list[int]:
    """The ids that would complete a bad sequence."""
    tail = past.tail(max((len(ids) for ids in bad), default=1) - 1)
    return [ids[-1] for ids in bad if len(ids) == 1 or tuple(tail[1 - len(ids) :]) == ids[:-1]]


# --- what leaves tokens out ---------------------------------------------------------------------


def _make_column(
    values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _sort_ascending(values: Tensor) -> Tensor:
    return torch.from_numpy(np.sort(values.cpu().numpy(), axis=-1)).to(values.device)


def _compute_min_logits(logits: Tensor, rules: Sequence[SamplingRules]) -> Tensor:
    """The least logit that top_k, top_p and min_p leave, for each row (rows, 1)."""
    size = logits.shape[1]
    counts = [rule.top_k if 0 < rule.top_k < size else size for rule in rules]
    falling = _sort_ascending(-logits).neg_()[:, : max(counts)]
    most = _make_column(counts, logits, torch.long)
    rank = torch.arange(falling.shape[1], device=logits.device)[None]
    probs = falling.masked_fill(rank >= most, _LOG_ZERO).softmax(-1)
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    top_p = _make_column([r.top_p if r.top_p < 1 else 2.0 for r in rules], logits)
    least = _make_column([r.min_p for r in rules], logits) * probs[:, :1]
    # What is kept is always the beginning of the row, and the first always stays.
    kept = ((before < top_p) & (probs >= least)).sum(-1, keepdim=True)
    return falling.gather(1, torch.minimum(kept, most).clamp_(min=1) - 1)


def _apply_typical_p(logits: Tensor, masses: Sequence[float]) -> Tensor:
    """Keeps the tokens whose surprise is nearest to the expected one, up to this mass."""
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    order = torch.from_numpy(np.argsort(distance.cpu().numpy(), axis=-1)).to(logits.device)
    mass = probs.gather(-1, order).cumsum(-1)
    last = (mass < _make_column(masses, logits)).sum(-1, keepdim=True).clamp_(max=mass.shape[1] - 1)
    edge = distance.gather(-1, order.gather(-1, last))
    return logits.masked_fill(distance > edge, _LOG_ZERO)


def apply_truncation(logits: Tensor, rules: Sequence[SamplingRules]) -> None:
    """Makes -inf of what is left out, in place; the logits are divided by temperature already."""
    cut = [i for i, rule in enumerate(rules) if rule.truncates and not rule.is_greedy]
    if cut:
        floor = torch.full((len(rules), 1), _LOG_ZERO, device=logits.device)
        floor[cut] = _compute_min_logits(logits[cut], [rules[i] for i in cut])
        logits.masked_fill_(logits < floor, _LOG_ZERO)
    odd = [i for i, rule in enumerate(rules) if rule.typical_p < 1 and not rule.is_greedy]
    if odd:
        logits[odd] = _apply_typical_p(logits[odd], [rules[i].typical_p for i in odd])


# --- the draw -----------------------------------------------------------------------------------


def sample_tokens(logits: Tensor, rows: Sequence[SamplingInput]) -> list[int]:
    """The next token of each row. ``logits`` (rows, vocabulary) is changed on the way."""
    for line, drawn in zip(logits, rows, strict=True):
        apply_penalties(line, drawn)
    hot = [i for i, drawn in enumerate(rows) if not drawn.rules.is_greedy]
    if hot:
        rules = [drawn.rules for drawn in rows]
        logits /= _make_column(
            [1.0 if rule.is_greedy else rule.temperature for rule in rules], logits
        )
        apply_truncation(logits, rules)
    for line, drawn in zip(logits, rows, strict=True):
        if drawn.rules.watermark is not None:
            apply_watermark(
                line, drawn.rules.watermark, drawn.history.tail(drawn.rules.watermark.width)
            )
    chosen: list[int] = logits.argmax(-1).tolist()
    if hot:
        for i, token in zip(hot, _draw_tokens(logits[hot], [rows[i] for i in hot]), strict=True):
            chosen[i] = token
    return chosen


def _draw_tokens(logits: Tensor, rows: Sequence[SamplingInput]) -> list[int]:
    ends = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    chances = [draw_uniform(drawn.seed, len(drawn.history.output)) for drawn in rows]
    marks = _make_column(chances, logits, torch.float64) * ends[:, -1:]
    found = torch.searchsorted(ends, marks, right=True)[:, 0]
    # A model that has gone mad gives no numbers, and they have no order.
    tokens: list[int] = found.clamp_(max=ends.shape[1] - 1).tolist()
    return tokens


# --- log probabilities --------------------------------------------------------------------------


class SampledLogprob(NamedTuple):
    """A chosen token's log probability, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


def get_logprobs(
    log_probs: Tensor, chosen: Sequence[int], tops: Sequence[int]
) -> list[SampledLogprob]:
    """The log probabilities of ``chosen`` and of ``tops`` alternatives; -1 is all of them."""
    ids = torch.tensor(chosen, device=log_probs.device)[:, None]
    own = log_probs.gather(1, ids)[:, 0].tolist()
    found = []
    for line, logprob, top in zip(log_probs, own, tops, strict=True):
        width = line.shape[0] if top < 0 else min(top, line.shape[0])
        values, indices = line.topk(width)
        found.append(
            SampledLogprob(logprob, list(zip(indices.tolist(), values.tolist(), strict=True)))
        )
    return found
