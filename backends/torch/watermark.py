"""A watermark that transformers' detector finds: a bias towards tokens that a key picks.

What came before seeds a shuffle of the vocabulary, and the first part of it is "green". The shuffle
is torch's own on a CPU, whatever the model runs on: a detector must be told ``device="cpu"``.

Source: transformers 5.23, ``WatermarkLogitsProcessor``; A Watermark for Large Language Models
(Kirchenbauer et al.), algorithms 2 (lefthash) and 3 (selfhash). Text Generation Inference marks
alike, with the same defaults.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from backends.torch.wishes import WatermarkSettings

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
        if (_build_green_list(seed, how, scores.shape[0]) == token).has_values():
            found.append(token)
    return torch.tensor(found, dtype=torch.long)


@functools.lru_cache(maxsize=2)
def _build_hash_table(key: int) -> Tensor:
    return torch.randperm(_TABLE_SIZE, generator=torch.Generator().manual_seed(key))
