"""Attention written out, for families whose scores are capped or whose heads have sinks.

No kernel does that for rows of our kind. The products keep the shapes that a token's place in its
row gives them, so that here, too, a result does not depend on what is beside it.
(Source: the eager attention of transformers 5's Gemma 2 and gpt-oss.)
"""

from typing import NamedTuple

import torch


class AttentionParams(NamedTuple):
    """How a layer attends, as its family has it."""

    scale: float | None
    window: int | None = None
    """So many of the last tokens are seen, a token itself among them."""
    logit_cap: float | None = None
    """Scores stay within this, by a hyperbolic tangent."""
    sinks: torch.Tensor | None = None
    """A score of each head to which no value belongs."""

    @property
    def is_standard(self) -> bool:
        """Whether kernels do it."""
        return self.logit_cap is None and self.sinks is None


def attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    manner: AttentionParams,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last tokens (heads, tokens, size) of these keys and values.

    ``mask`` says which each of them sees; None is all up to itself.
    """
    heads, tokens, size = query.shape
    # All queries of a key's group see the same keys: they become one head's queries.
    grouped = query.reshape(keys.shape[0], -1, size)
    scale = manner.scale or size**-0.5
    scores = (grouped @ keys.transpose(1, 2) * scale).view(heads, tokens, -1)
    if manner.logit_cap is not None:
        scores = torch.tanh(scores / manner.logit_cap) * manner.logit_cap
    if mask is None:
        mask = scores.new_ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - tokens)
    scores = scores.masked_fill(~mask, float("-inf"))
    if manner.sinks is not None:
        sinks = manner.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[1]]
    out = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values
    return out.view(heads, tokens, values.shape[-1])
