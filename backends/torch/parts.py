"""Parts of transformers' models made of fewer, larger operations.

At one row an engine spends most of its time between operations. Layers that see the same rows are
therefore made one: the queries, keys and values of an attention, the two halves of a gated layer.
transformers' own code stays what a model is: a part of ours takes a place only where it gives what
the one before it gave, held against it at load.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from backends.torch.capped import AttentionParams

_CHECK_TOKENS = 3
"""So many are tried."""
_CHECK_POSITION = 1000
"""The place of the first: what depends on places otherwise than by turns must show."""
_CHECK_TOLERANCE = 0.01
"""What is the same: off by at most so much of the largest magnitude."""
_ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED_LAYERS = ("gate_proj", "up_proj", "down_proj")


def fuse_layers(model: nn.Module) -> None:
    """All attentions and gated layers that are of the usual kind made anew, one after another."""
    makers: dict[tuple[str, ...], Callable[[Any], nn.Module | None]]
    makers = {_ATTENTION_LAYERS: _fuse_attention, _GATED_LAYERS: _fuse_gated_mlp}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            layers = {n: part for n, part in child.named_children() if type(part) is nn.Linear}
            made = makers.get(tuple(layers))
            biases = {layer.bias is None for layer in list(layers.values())[:-1]}
            part = made(child) if made is not None and len(biases) == 1 else None
            if part is not None:
                setattr(parent, name, part)


class FusedGatedMlp(nn.Module):
    """What opens by the activation of one half, and closes."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self._up = _concatenate_linears([theirs.gate_proj, theirs.up_proj])
        self._down = theirs.down_proj
        self._activation = theirs.act_fn

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(…, size) to (…, size)."""
        gate, up = self._up(rows).chunk(2, -1)
        out: torch.Tensor = self._down(self._activation(gate) * up)
        return out


class FusedAttention(nn.Module):
    """Queries, keys and values at once, turned by their places, and attended as the pass does."""

    def __init__(self, theirs: Any, manner: AttentionParams) -> None:
        super().__init__()
        self._qkv = _concatenate_linears([theirs.q_proj, theirs.k_proj, theirs.v_proj])
        self._output = theirs.o_proj
        self._layer: int = theirs.layer_idx
        self._params = manner
        self._head_size: int = theirs.head_dim
        self._query_size = theirs.q_proj.out_features // self._head_size
        self._rotary_size = self._query_size + theirs.k_proj.out_features // self._head_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: Any,
        packed: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, None]:
        """(1, tokens, size) to (1, tokens, size), as transformers' attentions."""
        heads = self._qkv(hidden_states)[0].view(hidden_states.shape[1], -1, self._head_size)
        cos, sin = packed.get_factors(position_embeddings)
        turned = heads[:, : self._rotary_size]
        turned = turned * cos + turned.roll(self._head_size // 2, -1) * sin
        out = packed.attend(
            self._layer,
            turned[:, : self._query_size].transpose(0, 1),
            turned[:, self._query_size :].transpose(0, 1),
            heads[:, self._rotary_size :].transpose(0, 1),
            self._params,
        )
        return self._output(out.reshape(*hidden_states.shape[:-1], -1)), None


class RotaryFactors:
    """A pass's places as they turn queries and keys: a rotation of halves."""

    def __init__(self) -> None:
        self._position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor]

    def get_factors(
        self, given: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors (tokens, 1, size) of values, and of values rolled by half, from cos and sin."""
        if self._position_embeddings is not given:
            cos, sin = given[0][0, :, None], given[1][0, :, None]
            half = sin.shape[-1] // 2
            self._position_embeddings, self._factors = (
                given,
                (cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)),
            )
        return self._factors


class _AttentionRecorder(RotaryFactors):
    """Stands for a pass: it sees what would be attended, and in what manner."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.params: AttentionParams | None = None

    def attend(
        self,
        _layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        manner: AttentionParams,
    ) -> torch.Tensor:
        self.tensors, self.params = [query, key, value], manner
        return query.transpose(0, 1)


def _fuse_gated_mlp(theirs: Any) -> nn.Module | None:
    rows = _make_test_input(theirs.gate_proj.weight, theirs.gate_proj.in_features)
    with torch.inference_mode():
        ours = FusedGatedMlp(theirs)
        return ours if _is_close([theirs(rows)], [ours(rows)]) else None


def _fuse_attention(theirs: Any) -> nn.Module | None:
    weight = theirs.q_proj.weight
    before, after = _AttentionRecorder(), _AttentionRecorder()
    with torch.inference_mode():
        try:
            told = {
                "hidden_states": _make_test_input(weight, theirs.q_proj.in_features),
                "position_embeddings": tuple(
                    _make_test_input(weight, theirs.head_dim, n) for n in (2, 3)
                ),
                "attention_mask": None,
                "position_ids": torch.arange(
                    _CHECK_POSITION, _CHECK_POSITION + _CHECK_TOKENS, device=weight.device
                )[None],
            }
            expected, _ = theirs(**told, packed=before)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            return None  # of another kind altogether
        if before.params is None:
            return None
        ours = FusedAttention(theirs, before.params)
        found, _ = ours(**told, packed=after)
    return ours if _is_close([expected, *before.tensors], [found, *after.tensors]) else None


def _make_test_input(weight: torch.Tensor, size: int, pace: int = 1) -> torch.Tensor:
    """Some numbers (1, tokens, size) of no pattern, as such a layer takes them."""
    found = torch.arange(_CHECK_TOKENS * size, device=weight.device).mul(pace).sin()
    return found.view(1, _CHECK_TOKENS, size).to(weight.dtype)


def _is_close(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    return all(
        one.shape == other.shape
        and bool((one - other).abs().max() <= _CHECK_TOLERANCE * one.abs().max())
        for one, other in zip(expected, found, strict=True)
    )


def _concatenate_linears(layers: Sequence[Any]) -> nn.Linear:
    """One layer of the outputs of all."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers]
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=biases[0] is not None, device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    if biases[0] is not None:
        joint.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]))
    return joint
