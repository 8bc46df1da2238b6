"""Linear layers for the CPU: of float32 weights, and of int8 weights and activations."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers.pytorch_utils import Conv1D

from backends.torch.quantized_weights import EightBitLinear, multiply_codes


def get_linear_weight(module: Any) -> Tensor | None:
    """The weights (outputs, inputs) of a linear layer; None for other modules."""
    if type(module) is nn.Linear:
        return module.weight
    return module.weight.t() if type(module) is Conv1D else None


# Batch-invariant linear layers: the result of a row (one token) does not depend on other rows.
#
# A plain matrix product is divided by its shape, so that the same row gives slightly different
# results in different batches. oneDNN's product over prepacked weights does not do that, and is two
# to three times as fast from four rows on. The original weights are freed: they would double the
# memory.

_PREPACK_ROWS = 16
"""The number of rows that the prepacked layout is optimized for."""
_COMPARED_OUTPUTS = 64
"""From this many outputs on, equal results of two row counts are no chance."""
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_ROW_STEPS = ((16, 1), (128, 8), (float("inf"), 32))
"""(limit, step): up to ``limit`` rows, their number is rounded up to a multiple of ``step``."""


class PrepackedLinear(nn.Module):
    """A linear layer with weights in oneDNN's prepacked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight`` has shape (outputs, inputs)."""
        super().__init__()
        operations: Any = torch.ops.mkldnn
        # torch.compile uses the same operators for linear layers with frozen weights.
        self._weight = operations._reorder_linear_weight(weight.contiguous(), _PREPACK_ROWS)  # noqa: SLF001
        self.weight = weight.new_empty(0)
        """Empty; it exists because some model families read a layer's dtype."""
        self._bias = bias
        self._operator = operations._linear_pointwise  # noqa: SLF001
        self._takes_one_row = self._compare_row_counts(weight)

    def _compare_row_counts(self, weight: Tensor) -> bool:
        """Whether one row alone has the result that it has beside another.

        For some shapes oneDNN adds up the products of one row in another order. The order does not
        depend on the numbers, and another one would change some of so many outputs.
        """
        rows = torch.rand(2, weight.shape[1], generator=torch.Generator().manual_seed(1)).sub_(0.5)
        alone = torch.cat([self._multiply(row) for row in torch.split(rows, 1)])
        return weight.shape[0] >= _COMPARED_OUTPUTS and torch.equal(self._multiply(rows), alone)

    def _multiply(self, rows: Tensor) -> Tensor:
        result: Tensor = self._operator(rows, self._weight, self._bias, "none", [], "")
        return result

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        flat = rows.reshape(-1, rows.shape[-1])
        count = flat.shape[0]
        if count == 1:
            flat = flat if self._takes_one_row else torch.cat((flat, flat))
        elif padding := _pad_row_count(count) - count:
            flat = pad(flat, (0, 0, 0, padding))
        output = self._multiply(flat.contiguous())
        return output[:count].view(*rows.shape[:-1], -1)


def _has_mkldnn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def prepack_linear(module: Any) -> PrepackedLinear | None:
    """The prepacked form of a linear layer with float32 weights on the CPU, if oneDNN is there."""
    weight = get_linear_weight(module) if _has_mkldnn() else None
    if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    with torch.inference_mode():
        bias = None if module.bias is None else module.bias.detach().clone()
        return PrepackedLinear(weight.detach(), bias)


class HalfEmbedding(nn.Module):
    """An embedding whose weights are numbers of 16 bits, and are stored as such.

    The output layer of most models has the same weights, in a layout of its own: what remains of
    the float32 weights are these rows.
    """

    def __init__(self, rows: Tensor) -> None:
        """``rows`` has shape (tokens, size)."""
        super().__init__()
        self._rows = rows
        self.weight = torch.empty(0)
        """Empty; it exists because some model families read a layer's dtype."""

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these tokens in float32."""
        return embedding(ids, self._rows).float()


def shrink_embedding(module: Any) -> HalfEmbedding | None:
    """The form with 16 bits of an embedding on the CPU, if no float32 weight needs more."""
    if type(module) is not nn.Embedding or module.max_norm is not None or not _has_mkldnn():
        return None  # without oneDNN an output layer shares the float32 weights
    weight = module.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    with torch.inference_mode():
        return next(filter(None, (_try_dtype(weight, one) for one in _HALF_DTYPES)), None)


def _try_dtype(weight: Tensor, dtype: torch.dtype) -> HalfEmbedding | None:
    """The embedding with weights of this type, if all are equal; compared part by part."""
    rows = torch.empty(weight.shape, dtype=dtype)
    step = max(_BLOCK_WEIGHTS // weight.shape[1], 1)
    for source, target in zip(torch.split(weight, step), torch.split(rows, step), strict=True):
        if not torch.equal(target.copy_(source).float(), source):
            return None
    return HalfEmbedding(rows)


def _pad_row_count(rows: int) -> int:
    """The number of rows to compute for this many, padding included.

    oneDNN generates and caches a kernel for each number of rows, which takes half a megabyte for
    every layer shape.
    """
    step = next(step for limit, step in _ROW_STEPS if rows <= limit)
    return -(-rows // step) * step


# int8 linear layers: per-channel scales for weights, per-row (per-token) scales for activations.
#
# They need a quarter of the memory and of its traffic; the rounding changes outputs (see
# docs/performance-engine.md). Each row is scaled by its own largest magnitude, and integer sums are
# exact, so a row's result does not depend on the batch. (torch's own dynamic quantization has one
# scale for the whole batch, so there it does.)

_MAX_INT8 = 127
"""The largest quantized magnitude."""
_MAX_EXACT_WEIGHT = 64
"""The largest weight for which the sum of two products with ``_MAX_INT8`` fits in 16 bits."""
_ZERO_POINT = 128
"""The zero point of activations: the fused operator takes unsigned ones."""
_BLOCK_WEIGHTS = 1 << 20
"""How many weights are quantized at a time."""
_MIN_SCALE = 1e-12
"""Lower limit of scales, for rows and weights that are all zero."""


def get_fused_operator() -> Any:
    """The operator that quantizes activations, multiplies and dequantizes; None if torch has none.

    Only the x86 quantization engine has it, and torch plans to remove what its packing is built on.
    """
    operations: Any = torch.ops.quantized
    name = "linear_with_input_q_dq_qweight_dq_output_fp32"
    x86 = torch.backends.quantized.engine == "x86"
    return getattr(operations, name, None) if x86 else None


@functools.cache
def get_max_exact_weight() -> int:
    """The largest weight magnitude for which the fused operator's sums are exact on this CPU.

    A CPU without VNNI adds two products in 16 bits, with saturation.
    """
    return _MAX_INT8 if is_exact(get_fused_operator(), _MAX_INT8) else _MAX_EXACT_WEIGHT


def is_exact(operator: Any, max_weight: int) -> bool:
    """Whether the operator adds products with weights up to ``max_weight`` without saturation."""
    operations: Any = torch.ops.quantized
    codes = torch.full((16, 64), max_weight, dtype=torch.int8)
    weight = operations.linear_prepack(_join_scales(codes, torch.full((16,), 1 / max_weight)), None)
    sums = operator(torch.ones(1, 64), 1 / _MAX_INT8, _ZERO_POINT, weight)
    return torch.allclose(sums, torch.full_like(sums, 64.0), rtol=1e-3)


class Int8Linear(EightBitLinear):
    """An int8 layer in the exchange format of ``quantized_weights``, with scales in float32."""

    def pack(self) -> nn.Module:
        """See QuantizedLinear."""
        kind = IntMatmulLinear if get_fused_operator() is None else FusedInt8Linear
        return kind(self.codes, self.scales, self.bias)


def quantize_linear(weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    """An int8 layer for weights (outputs, inputs), with codes that are exact on this CPU."""
    largest = _MAX_INT8 if get_fused_operator() is None else get_max_exact_weight()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    step = max(_BLOCK_WEIGHTS // weight.shape[1], 1)
    for at in range(0, len(weight), step):
        rows, block = slice(at, at + step), weight[at : at + step].float()
        scales[rows] = block.abs().amax(1).clamp_min_(_MIN_SCALE) / largest
        codes[rows] = (block / scales[rows, None]).round_().to(torch.int8)
    return Int8Linear(codes, scales, bias)


class _PackedInt8Linear(nn.Module):
    """A linear layer whose activations are quantized with one scale per row."""

    def __init__(self, outputs: int, bias: Tensor | None) -> None:
        super().__init__()
        self._outputs = outputs
        self._bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        flat = rows.reshape(-1, rows.shape[-1])
        magnitudes = flat.abs().amax(-1, keepdim=True).clamp_min_(_MIN_SCALE)
        out = self._multiply(flat, magnitudes).mul_(magnitudes)
        if self._bias is not None:
            out += self._bias
        return out.view(*rows.shape[:-1], self._outputs)

    def _multiply(self, rows: Tensor, magnitudes: Tensor) -> Tensor:
        """Multiply rows, divided by their magnitudes, with the weights."""
        raise NotImplementedError


class FusedInt8Linear(_PackedInt8Linear):
    """An int8 layer that uses torch's fused operator for x86."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """``codes`` has shape (outputs, inputs), ``scales`` (outputs)."""
        super().__init__(codes.shape[0], bias)
        operations: Any = torch.ops.quantized
        self._weight = operations.linear_prepack(_join_scales(codes, scales), None)
        self._operator = get_fused_operator()

    def _multiply(self, rows: Tensor, magnitudes: Tensor) -> Tensor:
        out: Tensor = self._operator(rows / magnitudes, 1 / _MAX_INT8, _ZERO_POINT, self._weight)
        return out


class IntMatmulLinear(_PackedInt8Linear):
    """An int8 layer that uses torch's integer matrix product, which every CPU supports."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """``codes`` has shape (outputs, inputs), ``scales`` (outputs)."""
        super().__init__(codes.shape[0], bias)
        self._weight = codes.t()
        self._scales = scales / _MAX_INT8

    def _multiply(self, rows: Tensor, magnitudes: Tensor) -> Tensor:
        quantized = (rows * (_MAX_INT8 / magnitudes)).round_().to(torch.int8)
        return multiply_codes(quantized, self._weight).float().mul_(self._scales)


def _join_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and their scales as a tensor for the fused operator's packing."""
    zeros = torch.zeros(len(codes), dtype=torch.long)
    with warnings.catch_warnings():
        # torch plans to remove such tensors; then get_fused_operator returns None.
        warnings.simplefilter("ignore", UserWarning)
        return torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)  # noqa: SLF001
