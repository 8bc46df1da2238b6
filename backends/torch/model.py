"""A packed forward pass of a transformers model over many rows, with fused and 8-bit layers.

The tokens of all rows are concatenated in a batch of one, so that each linear layer processes them
together, whether a row has one new token or a chunk of its prompt. Only attention is computed per
row, over its own keys and values. Works for every model family whose attention uses transformers'
attention interface.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from backends.torch.attention import AttentionParams, BatchSegment, PackedBatch, RotaryFactors
from backends.torch.kv_cache import BlockPool, SequenceCache
from backends.torch.loader import (
    ModelError,
    ModelLocation,
    find_model_class,
    load_weights,
    pick_device,
    pick_dtype,
)

# Fused layers: parts of transformers' models as fewer, larger operations.
#
# With one row an engine spends most of its time between operations. Layers with the same input are
# therefore fused: the query, key and value projections of an attention, both halves of a gated MLP.
# transformers' own code stays the reference: a fused layer replaces the original only if both give
# the same output, which is checked at load.

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


# Linear layers whose rows do not depend on how many there are.
#
# A plain matrix product is cut up by its shape: the same row comes out a little different beside
# others. oneDNN's product over weights that it has laid out beforehand does not do that, and is two
# to three times as fast for four rows and more. The weights as they were loaded are let go: they
# would only double the memory.

LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""Makes a layer of weights (outputs, inputs) and perhaps a bias."""
_LAYOUT_ROWS = 16
"""The number of rows that the layout is made for."""
_ROW_STEPS = ((16, 1), (128, 8), (float("inf"), 32))
"""Up to so many rows, numbers of them are rounded up to a multiple of this."""


class PrepackedLinear(nn.Module):
    """A linear layer over weights in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` is (outputs, inputs)."""
        super().__init__()
        operations: Any = torch.ops.mkldnn
        # What torch.compile itself uses for a linear layer with frozen weights.
        self._weight = operations._reorder_linear_weight(weight.contiguous(), _LAYOUT_ROWS)  # noqa: SLF001
        self.weight = weight.new_empty(0)
        """Nothing: some families look at a layer's dtype."""
        self._bias = bias
        self._operator = operations._linear_pointwise  # noqa: SLF001

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(…, inputs) to (…, outputs)."""
        flat = rows.reshape(-1, rows.shape[-1])
        count = flat.shape[0]
        if more := _round_rows(count) - count:
            flat = pad(flat, (0, 0, 0, more))
        flat = flat.contiguous()
        out: torch.Tensor = self._operator(flat, self._weight, self._bias, "none", [], "")
        return out[:count].view(*rows.shape[:-1], -1)


def _round_rows(rows: int) -> int:
    """How many rows are computed for so many.

    For each number of rows oneDNN makes a kernel, and keeps it: half a megabyte for every layer's
    shape. One row alone takes another way than several.
    """
    step = next(step for most, step in _ROW_STEPS if rows <= most)
    return max(-(-rows // step) * step, 2)


def prepack_linears(model: nn.Module, made: LinearFactory | None = None) -> None:
    """All linear layers in float32 on a processor made anew, one after another.

    ``made`` is what they become; left out, what oneDNN lays out, where it is there.
    Nothing of the model remains where it was loaded to: that may be one file, mapped as a whole.
    """
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if made is None and not there:
        return
    kind, changed = made or PrepackedLinear, False
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            weight = _get_linear_weight(child)
            if weight is not None and _can_prepack(weight):
                setattr(parent, name, _make_linear(kind, weight, child.bias))
                changed = True
    for part in (*model.parameters(), *model.buffers()) if changed else ():
        part.data = part.data.clone()


def _get_linear_weight(child: Any) -> torch.Tensor | None:
    """Of a linear layer: (outputs, inputs)."""
    if type(child) is nn.Linear:
        return child.weight
    return child.weight.t() if type(child) is Conv1D else None


def _can_prepack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _make_linear(made: LinearFactory, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    with torch.inference_mode():
        return made(weight.detach(), None if bias is None else bias.detach().clone())


# 8-bit linear layers: one scale for each output of the weights and one for each row.
#
# A quarter of the memory and of its traffic, at the cost of a rounding that changes outputs (see
# docs/performance-engine.md). Each row is rounded by its own largest magnitude, never by that of
# its neighbours, and sums of integers are exact: a row's result does not depend on the batch.
# (torch's own dynamic quantisation has one scale for the batch: there, it does.)

_MAX_INT8 = 127
"""The largest magnitude of 8 bits."""
_MAX_EXACT_WEIGHT = 64
"""The largest of which two, each times the largest of a row, are within 16 bits."""
_ZERO_POINT = 128
"""What the fused operator takes for zero in a row: its rows are unsigned."""
_MIN_SCALE = 1e-12
"""A row or an output of zeros has a scale all the same."""


def get_fused_operator() -> Any:
    """The operator of torch that rounds rows by a given scale, multiplies and scales back, if any.

    Only x86's engine has it, and torch means to remove what its packing is built on.
    """
    operations: Any = torch.ops.quantized
    name = "linear_with_input_q_dq_qweight_dq_output_fp32"
    x86 = torch.backends.quantized.engine == "x86"
    return getattr(operations, name, None) if x86 else None


@functools.cache
def get_max_exact_weight() -> int:
    """The largest magnitude of a weight whose products ``fused`` adds exactly on this processor.

    One without VNNI adds two of them in 16 bits, which cuts off what is larger.
    """
    return _MAX_INT8 if is_exact(get_fused_operator(), _MAX_INT8) else _MAX_EXACT_WEIGHT


def is_exact(operator: Any, most: int) -> bool:
    """Whether the largest products of such weights are added without being cut off."""
    operations: Any = torch.ops.quantized
    weight = operations.linear_prepack(_pack_weight(torch.ones(16, 64), most), None)
    sums = operator(torch.ones(1, 64), 1 / _MAX_INT8, _ZERO_POINT, weight)
    return torch.allclose(sums, torch.full_like(sums, 64.0), rtol=1e-3)


def quantize_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """A linear layer over these weights (outputs, inputs), in 8 bits as this machine does it."""
    return (
        IntMatmulLinear(weight, bias)
        if get_fused_operator() is None
        else FusedInt8Linear(weight, bias)
    )


class _RowQuantizedLinear(nn.Module):
    """A linear layer of which each row is scaled by itself."""

    def __init__(self, outputs: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._outputs = outputs
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(…, inputs) to (…, outputs)."""
        flat = rows.reshape(-1, rows.shape[-1])
        size = flat.abs().amax(-1, keepdim=True).clamp_min_(_MIN_SCALE)
        out = self._multiply(flat, size).mul_(size)
        if self._bias is not None:
            out += self._bias
        return out.view(*rows.shape[:-1], self._outputs)

    def _multiply(self, rows: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """With the weights, of rows divided by their size."""
        raise NotImplementedError


class FusedInt8Linear(_RowQuantizedLinear):
    """With the operator that torch has for x86."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` is (outputs, inputs)."""
        super().__init__(weight.shape[0], bias)
        operations: Any = torch.ops.quantized
        self._weight = operations.linear_prepack(_pack_weight(weight, get_max_exact_weight()), None)
        self._operator = get_fused_operator()

    def _multiply(self, rows: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._operator(rows / size, 1 / _MAX_INT8, _ZERO_POINT, self._weight)
        return out


class IntMatmulLinear(_RowQuantizedLinear):
    """With torch's product of integers, which every processor has."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` is (outputs, inputs)."""
        super().__init__(weight.shape[0], bias)
        scales = _compute_scales(weight, _MAX_INT8)
        self._weight = _quantize_weight(weight, scales).t()
        self._scales = scales / _MAX_INT8

    def _multiply(self, rows: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        whole = (rows * (_MAX_INT8 / size)).round_().to(torch.int8)
        return torch._int_mm(whole, self._weight).float().mul_(self._scales)  # noqa: SLF001


def _compute_scales(weight: torch.Tensor, most: int) -> torch.Tensor:
    """What one step of each output's weights is worth, of which the largest has ``most``."""
    return weight.float().abs().amax(1).clamp_min_(_MIN_SCALE) / most


def _quantize_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales[:, None]).round_().to(torch.int8).contiguous()


def _pack_weight(weight: torch.Tensor, most: int) -> torch.Tensor:
    """The weights as the fused operator's packing wants them, with their scales."""
    scales = _compute_scales(weight, most)
    zeros = torch.zeros(weight.shape[0], dtype=torch.long)
    with warnings.catch_warnings():
        # torch says that this kind of tensor will be removed; ``fused`` knows what to do then.
        warnings.simplefilter("ignore", UserWarning)
        return torch._make_per_channel_quantized_tensor(  # noqa: SLF001
            _quantize_weight(weight, scales), scales.double(), zeros, 0
        )


ATTENTION_NAME = "interlingua_rows"


def _attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; the pass's segments come through its keywords."""
    packed: PackedBatch | None = options.get("packed")
    if packed is None:
        raise ModelError("this model family does not pass keyword arguments to its attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    manner = AttentionParams(
        options.get("scaling"),
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )
    return packed.attend(layer, query[0], key[0], value[0], manner)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend_packed)


class ModelRunner:
    """A model that takes segments and gives logits."""

    def __init__(
        self, model: Any, context: int | None = None, made: LinearFactory | None = None
    ) -> None:
        """``made`` is what becomes of linear layers, once ``join`` is done; see ``lay_out``."""
        self._model = model.eval()
        fuse_layers(model)
        prepack_linears(model, made)
        self.device: torch.device = model.device
        self.config = config = model.config.get_text_config()
        self.generation_config: Any = model.generation_config
        limit = getattr(config, "max_position_embeddings", None) or 2048
        self.context_length = min(limit, context or limit)
        self.vocabulary_size: int = config.vocab_size
        self.cache_bytes_per_token = self._check_first_pass(config.num_hidden_layers)
        """What the past of one token takes."""

    def _check_first_pass(self, layers: int) -> int:
        """A first pass: it warms up, and shows whether the model keeps all its past in our rows."""
        pool = BlockPool(1)
        try:
            self([BatchSegment(SequenceCache(pool, 2), (0, 0))])
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
            raise ModelError(f"this model family is not supported: {error}") from error
        if pool.layer_count != layers:
            raise ModelError(
                "this model family has a cache that is not keys and values; it is not supported"
            )
        return pool.size_bytes // pool.tokens

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        """The wanted logits in float32, one row a token, in the order of the segments."""
        with torch.inference_mode():
            packed = PackedBatch(segments, self.device)
            out = self._model(
                input_ids=torch.tensor([packed.tokens], device=self.device),
                position_ids=torch.tensor([packed.positions], device=self.device),
                use_cache=False,
                # Of a pass that wants none, the least.
                logits_to_keep=torch.tensor(packed.logit_indices or [0], device=self.device),
                packed=packed,
            )
            packed.finish_pass()
            logits: torch.Tensor = out.logits[0].float()
        return logits if packed.logit_indices else logits[:0]


def load_forward(found: ModelLocation, device: str, dtype: str, context: int | None) -> ModelRunner:
    """The model of a folder, ready for segments. Raises ModelError."""
    if not find_model_class(AutoModelForCausalLM, found)._supports_attention_backend:  # noqa: SLF001
        raise ModelError(
            f"{found.source} is of a family whose attention or past can't be kept in our rows; "
            "it is not served here"
        )
    place = pick_device(device)
    made = quantize_linear if dtype == "int8" else None
    if made is not None and place.type != "cpu":
        raise ModelError(f"dtype int8 needs a CPU; for {place} choose auto or bfloat16")
    wanted = pick_dtype("float32" if made else dtype, place)
    model = load_weights(
        AutoModelForCausalLM, found, place, wanted, attn_implementation=ATTENTION_NAME
    )
    return ModelRunner(model, context, made)
