"""Linear layers in 8 bits: a scale for each output of the weights, and one for each row.

A quarter of the memory and of its traffic, at the price of a rounding that answers show: see
docs/performance-engine.md for how much. Each row is rounded by its own largest magnitude, never by
that of its neighbours, and sums of integers are exact: a row comes out the same, whatever is beside
it. (torch's own dynamic quantisation has one scale for a whole batch: there, it does not.)
"""

import functools
import warnings
from typing import Any

import torch
from torch import nn

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
