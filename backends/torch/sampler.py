"""Which token comes next, for each row by its own rules.

The order is that of transformers: logit_bias, repetition penalty, presence and frequency penalties,
forbidden tokens; then temperature, top_k, top_p, min_p, typical_p; then the draw. Repetition counts
the prompt, presence and frequency count only what was generated. Log probabilities, by contrast,
are of the model's own distribution, before any of this.

A draw adds Gumbel noise to the log probabilities and takes the largest. The noise is a hash of
(seed, position, token id), with no state: a row's tokens depend neither on its neighbours nor on
how the work was cut up.

Sorting a whole vocabulary costs as much as a pass of a small model, so the truncations look at the
``CANDIDATES`` likeliest tokens first, and at all of them only where those did not suffice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

CANDIDATES = 1024
GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow."""

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_MIX_1 = -49064778989728563
_MIX_2 = -4265267296055464877
_TOP_31 = 0x7FFFFFFF
_TOP_53 = (1 << 53) - 1
_NEVER = float("-inf")


class Rules(Struct, frozen=True):
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
    allowed: tuple[int, ...] | None = None
    bad: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not come about."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether any token is left out of the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1


class Past(NamedTuple):
    """What a row has behind it; ``held`` are ids that may not come yet."""

    prompt: Sequence[int]
    output: Sequence[int]
    held: Sequence[int] = ()


class Drawn(NamedTuple):
    """One row's part in a step."""

    rules: Rules
    seed: int
    past: Past


# --- noise --------------------------------------------------------------------------------------


def _mixed(value: Tensor) -> Tensor:
    """A 64-bit finaliser. int64 shifts are arithmetic, so the sign's copies are masked away."""
    value = (value ^ ((value >> 33) & _TOP_31)) * _MIX_1
    value = (value ^ ((value >> 33) & _TOP_31)) * _MIX_2
    return value ^ ((value >> 33) & _TOP_31)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise for each token of ``ids`` (rows, tokens); seeds and positions are by row."""
    base = _mixed(seeds * _GOLDEN + positions)[:, None]
    bits = _mixed(base + ids * _GOLDEN)
    uniform = ((bits >> 11) & _TOP_53).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def signed(seed: int) -> int:
    """A seed of 64 bits as torch's int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def seed_of(seed: int, choice: int) -> int:
    """The seed of a request's ``choice``-th sample: its own for the first."""
    return signed(seed + choice * 0x9E3779B97F4A7C15)


# --- what changes logits ------------------------------------------------------------------------


def adjust(logits: Tensor, drawn: Drawn) -> None:
    """Bias, penalties and forbidden tokens, in place on one row's logits."""
    rules, past = drawn.rules, drawn.past
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
    if rules.allowed is not None:
        kept = torch.full_like(logits, _NEVER)
        ids = torch.tensor(rules.allowed, device=logits.device)
        kept[ids] = logits[ids]
        logits.copy_(kept)
    forbidden = [*past.held, *_completing(rules.bad, past)]
    if forbidden:
        logits[torch.tensor(forbidden, device=logits.device)] = _NEVER


def _completing(bad: Sequence[tuple[int, ...]], past: Past) -> list[int]:
    """The ids that would complete a bad sequence."""
    if not bad:
        return []
    longest = max(len(ids) for ids in bad) - 1
    tail = list(past.output[-longest:]) if longest else []
    if longest > len(tail):
        tail = [*past.prompt[len(tail) - longest :], *tail]
    return [
        ids[-1] for ids in bad if len(ids) == 1 or tuple(tail[1 - len(ids) :]) == tuple(ids[:-1])
    ]


# --- what leaves tokens out ---------------------------------------------------------------------


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _cut(sorted_logits: Tensor, total: Tensor, rules: Sequence[Rules]) -> Tensor:
    """Log probabilities of sorted candidates, -inf where top_k, top_p or min_p leaves them out.

    ``total`` is the logsumexp over the whole vocabulary, for rows without top_k.
    """
    width = sorted_logits.shape[1]
    top_k = _column([r.top_k if 0 < r.top_k < width else width for r in rules], total, torch.long)
    rank = torch.arange(width, device=total.device)[None]
    logits = sorted_logits.masked_fill(rank >= top_k, _NEVER)
    limited = _column([0 < r.top_k <= width for r in rules], total, torch.bool)
    log_probs = logits - torch.where(limited, logits.logsumexp(-1, keepdim=True), total)
    probs = log_probs.exp()
    before = probs.cumsum(-1) - probs
    top_p = _column([r.top_p if r.top_p < 1 else 2.0 for r in rules], total)
    least = _column([r.min_p for r in rules], total) * probs[:, :1]
    # The first always stays, whatever top_p is.
    dropped = ((before >= top_p) & (rank > 0)) | (probs < least)
    return log_probs.masked_fill(dropped, _NEVER)


def _typical(log_probs: Tensor, rules: Sequence[Rules]) -> Tensor:
    """Keeps the tokens whose surprise is nearest to the expected one, up to a mass of typical_p."""
    rows = [i for i, rule in enumerate(rules) if rule.typical_p < 1]
    if not rows:
        return log_probs
    part = log_probs[rows].log_softmax(-1)
    probs = part.exp()
    entropy = -(part * probs).nansum(-1, keepdim=True)
    distance = (-part - entropy).abs()
    order = distance.argsort(-1)
    mass = probs.gather(-1, order).cumsum(-1)
    limit = _column([rules[i].typical_p for i in rows], log_probs)
    keep = (mass < limit).sum(-1, keepdim=True).clamp_(max=part.shape[1] - 1)
    edge = distance.gather(-1, order).gather(-1, keep)
    log_probs = log_probs.clone()
    log_probs[rows] = part.masked_fill(distance > edge, _NEVER)
    return log_probs


def _covered(sorted_logits: Tensor, total: Tensor, rules: Sequence[Rules]) -> list[bool]:
    """Whether the candidates hold all that the truncations would keep."""
    width = sorted_logits.shape[1]
    log_probs = sorted_logits - total
    mass = log_probs.exp().sum(-1).tolist()
    ratio = (log_probs[:, -1] - log_probs[:, 0]).exp().tolist()
    return [
        0 < rule.top_k <= width
        or (rule.top_k == 0 and rule.typical_p >= 1 and rule.top_p < 1 and held >= rule.top_p)
        or (rule.typical_p >= 1 and last < rule.min_p)
        for rule, held, last in zip(rules, mass, ratio, strict=True)
    ]


# --- the draw -----------------------------------------------------------------------------------


def pick(logits: Tensor, rows: Sequence[Drawn]) -> list[int]:
    """The next token of each row. ``logits`` (rows, vocabulary) is changed on the way."""
    for line, drawn in zip(logits, rows, strict=True):
        adjust(line, drawn)
    chosen: list[int] = logits.argmax(-1).tolist()
    hot = [i for i, drawn in enumerate(rows) if not drawn.rules.greedy]
    if hot:
        part = [rows[i] for i in hot]
        scaled = logits[hot] / _column([d.rules.temperature for d in part], logits)
        for i, token in zip(hot, _draw(scaled, part), strict=True):
            chosen[i] = token
    return chosen


def _draw(logits: Tensor, rows: Sequence[Drawn]) -> list[int]:
    chosen = [-1] * len(rows)
    whole = [i for i, drawn in enumerate(rows) if not drawn.rules.truncates]
    cut = [i for i, drawn in enumerate(rows) if drawn.rules.truncates]
    width = min(CANDIDATES, logits.shape[1])
    while cut:
        part = logits[cut]
        rules = [rows[i].rules for i in cut]
        values, ids = part.topk(width)
        total = part.logsumexp(-1, keepdim=True)
        complete = width == logits.shape[1]
        fits = [True] * len(cut) if complete else _covered(values, total, rules)
        kept = _typical(_cut(values, total, rules), rules)
        drawn = _largest(kept, ids, [rows[i] for i in cut])
        for i, token, good in zip(cut, drawn, fits, strict=True):
            if good:
                chosen[i] = token
        cut = [i for i, good in zip(cut, fits, strict=True) if not good]
        width = logits.shape[1]
    if whole:
        every = torch.arange(logits.shape[1], device=logits.device)[None]
        for i, token in zip(
            whole, _largest(logits[whole], every, [rows[i] for i in whole]), strict=True
        ):
            chosen[i] = token
    return chosen


def _largest(log_probs: Tensor, ids: Tensor, rows: Sequence[Drawn]) -> list[int]:
    """The token id whose log probability and noise together are largest, for each row."""
    seeds = torch.tensor([signed(d.seed) for d in rows], device=ids.device)
    positions = torch.tensor([len(d.past.output) for d in rows], device=ids.device)
    best = (log_probs + gumbel(seeds, positions, ids)).argmax(-1, keepdim=True)
    found: list[int] = ids.expand(len(rows), -1).gather(1, best)[:, 0].tolist()
    return found


# --- log probabilities --------------------------------------------------------------------------


class Likely(NamedTuple):
    """A chosen token's log probability, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


def likelihoods(log_probs: Tensor, chosen: Sequence[int], tops: Sequence[int]) -> list[Likely]:
    """The log probabilities of ``chosen`` and of ``tops`` alternatives; -1 is all of them."""
    ids = torch.tensor(chosen, device=log_probs.device)[:, None]
    own = log_probs.gather(1, ids)[:, 0].tolist()
    found = []
    for line, logprob, top in zip(log_probs, own, tops, strict=True):
        width = line.shape[0] if top < 0 else min(top, line.shape[0])
        values, indices = line.topk(width)
        found.append(Likely(logprob, list(zip(indices.tolist(), values.tolist(), strict=True))))
    return found
