"""Modules of transformers' models as fewer, larger operations.

With one sequence an engine spends most of its time between operations. Layers with the same input
are therefore fused: the query, key and value projections of an attention layer, the gate and up
projections of a gated MLP. transformers' own code stays the reference: a fused module replaces
the original only if both give the same output, which is checked when the model is loaded.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from backends.torch.attention import AttentionParams, RotaryFactors
from backends.torch.linear_layers import prepack_linear, shrink_embedding
from backends.torch.loader import release_free_memory
from backends.torch.model_check import shorten_lengths
from backends.torch.quantized_weights import QuantizedLinear, concatenate

_CHECK_TOKENS = 3
"""Tokens in the check."""
_CHECK_POSITION = 1000
"""Position of the first token, so that position-dependent scaling shows up in the check."""
_CHECK_TOLERANCE = 0.01
"""Allowed difference, as a fraction of the largest magnitude."""
_ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED_LAYERS = ("gate_proj", "up_proj", "down_proj")


def fuse_layers(model: nn.Module) -> None:
    """Replace attention layers and gated MLPs by fused ones where the output stays the same."""
    rotary_size = _find_rotary_size(model)
    fusers: dict[tuple[str, ...], Callable[[Any], nn.Module | None]]
    fusers = {
        _ATTENTION_LAYERS: functools.partial(_fuse_attention, model=model, rotary_size=rotary_size),
        _GATED_LAYERS: _fuse_gated_mlp,
    }

    def fuse(module: nn.Module) -> nn.Module | None:
        linears = {n: layer for n, layer in module.named_children() if _is_linear(layer)}
        fuser = fusers.get(tuple(linears))
        kinds = {(type(one), one.bias is None) for one in list(linears.values())[:-1]}
        return fuser(module) if fuser is not None and len(kinds) == 1 else None

    replace_modules(model, fuse)


def replace_modules(parent: nn.Module, replace: Callable[[Any], nn.Module | None]) -> int:
    """Replace modules inside ``parent`` where ``replace`` returns one; returns how many.

    A module is freed before the next one is replaced, so nothing may hold a list of them.
    """
    count = 0
    for name in [name for name, _ in parent.named_children()]:
        replaced = replace(parent.get_submodule(name))
        if replaced is None:
            count += replace_modules(parent.get_submodule(name), replace)
        else:
            setattr(parent, name, replaced)
            release_free_memory()
            count += 1
    return count


def _is_linear(layer: nn.Module) -> TypeGuard[nn.Linear | QuantizedLinear]:
    return type(layer) is nn.Linear or isinstance(layer, QuantizedLinear)


def _find_rotary_size(model: nn.Module) -> int | None:
    """How many elements of a head are rotated; None if unknown: all of them."""
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor):
            return 2 * frequencies.shape[-1]
    return None


class FusedGatedMlp(nn.Module):
    """A gated MLP whose gate and up projections are one linear layer."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._up = _concatenate_linears([original.gate_proj, original.up_proj])
        self._down = original.down_proj
        self._activation = original.act_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map (…, size) to (…, size)."""
        gate, up = self._up(hidden_states).chunk(2, -1)
        output: torch.Tensor = self._down(self._activation(gate) * up)
        return output


class FusedAttention(nn.Module):
    """An attention layer whose query, key and value projections are one linear layer."""

    def __init__(self, original: Any, params: AttentionParams) -> None:
        super().__init__()
        self._qkv = _concatenate_linears([original.q_proj, original.k_proj, original.v_proj])
        self._output = original.o_proj
        self._layer: int = original.layer_idx
        self._params = params
        self._head_size: int = original.head_dim
        self._query_size = original.q_proj.out_features // self._head_size
        self._rotary_size = self._query_size + original.k_proj.out_features // self._head_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: Any,
        packed: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map (1, tokens, size) to (1, tokens, size), as transformers' attention layers do."""
        heads = self._qkv(hidden_states)[0].view(hidden_states.shape[1], -1, self._head_size)
        cos, sin = packed.get_factors(position_embeddings)
        rotated = heads[:, : self._rotary_size]
        rotated = rotated * cos + rotated.roll(self._head_size // 2, -1) * sin
        output = packed.attend(
            self._layer,
            rotated[:, : self._query_size].transpose(0, 1),
            rotated[:, self._query_size :].transpose(0, 1),
            heads[:, self._rotary_size :].transpose(0, 1),
            self._params,
        )
        return self._output(output.reshape(*hidden_states.shape[:-1], -1)), None


class _AttentionRecorder(RotaryFactors):
    """Takes the place of a PackedBatch and records what would be attended, and how."""

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
        params: AttentionParams,
    ) -> torch.Tensor:
        self.tensors, self.params = [query, key, value], params
        return query.transpose(0, 1)


def _fuse_gated_mlp(original: Any) -> nn.Module | None:
    if not hasattr(original, "act_fn"):
        return None  # the layer has another interface
    inputs = _make_test_input(original.gate_proj.weight, original.gate_proj.in_features)
    with torch.inference_mode():
        fused = FusedGatedMlp(original)
        return fused if _is_close([original(inputs)], [fused(inputs)]) else None


def _fuse_attention(
    original: Any, model: nn.Module, rotary_size: int | None = None
) -> nn.Module | None:
    if rotary_size not in (None, getattr(original, "head_dim", None)):
        return None  # a fused layer rotates whole heads
    weight, recorder = original.q_proj.weight, _AttentionRecorder()
    with torch.inference_mode():
        try:
            arguments = {
                "hidden_states": _make_test_input(weight, original.q_proj.in_features),
                "position_embeddings": tuple(
                    _make_test_input(weight, original.head_dim, n) for n in (2, 3)
                ),
                "attention_mask": None,
                "position_ids": torch.arange(
                    _CHECK_POSITION, _CHECK_POSITION + _CHECK_TOKENS, device=weight.device
                )[None],
            }
            expected = _record_attention(original, arguments, recorder)
            with shorten_lengths(model):  # some families scale queries from a position on
                expected += _record_attention(original, arguments, _AttentionRecorder())
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            return None  # the layer has another interface
        if recorder.params is None:
            return None
        fused = FusedAttention(original, recorder.params)
        actual = _record_attention(fused, arguments, _AttentionRecorder())
    return fused if _is_close(expected, actual + actual) else None


def _record_attention(
    layer: Any, arguments: Mapping[str, Any], recorder: _AttentionRecorder
) -> list[torch.Tensor]:
    """The output of an attention layer, and the queries, keys and values that it made."""
    output, _ = layer(**arguments, packed=recorder)
    return [output, *recorder.tensors]


def _make_test_input(weight: torch.Tensor, size: int, step: int = 1) -> torch.Tensor:
    """Irregular values of shape (1, tokens, size) in the layer's dtype."""
    values = torch.arange(_CHECK_TOKENS * size, device=weight.device).mul(step).sin()
    return values.view(1, _CHECK_TOKENS, size).to(weight.dtype)


def _is_close(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= _CHECK_TOLERANCE * a.abs().max())
        for a, b in zip(expected, actual, strict=True)
    )


def _concatenate_linears(layers: Sequence[Any]) -> nn.Module:
    """One linear layer, of the same kind, whose output is the concatenation of all outputs."""
    if isinstance(layers[0], QuantizedLinear):
        return concatenate(layers)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers]
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=biases[0] is not None, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if biases[0] is not None:
        fused.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]))
    return fused


def prepack_linears(model: nn.Module, *, owns_weights: bool = False) -> None:
    """Replace all quantized and float32 layers on the CPU, and embeddings, one after another.

    float32 layers need oneDNN. Unless ``owns_weights``, the other parameters are copied, since all
    may be views of one mapped file, whose pages stay in memory until nothing refers to it.
    """

    def prepack(module: Any) -> nn.Module | None:
        if isinstance(module, QuantizedLinear):
            return module.pack()
        return prepack_linear(module) or shrink_embedding(module)

    if replace_modules(model, prepack) and not owns_weights:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
