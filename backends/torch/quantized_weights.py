"""Linear layers and embeddings whose weights stay quantized, for CPUs.

A 4-bit weight is a code from 0 to 15 with a scale and an offset for each 32 to 256 weights of a
row, which holds what GGUF's Q4_0, Q4_1 and Q4_K, GPTQ, AWQ and compressed-tensors hold: 5 bits a
weight in groups of 32, scales included, and 4.25 in groups of 128. An 8-bit weight is a
signed code with one scale for each row; finer kinds (Q5, Q6_K, Q8_0) are rounded to it.

While a model is loaded its layers are in the exchange format, which is exact, slow, and can be
concatenated. ``pack`` changes one layer after another into the layout of torch's kernels. These
multiply bfloat16 activations and add up in float32; the result of a row does not depend on other
rows. The output layer has finer activations: its result decides between tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

GROUP_SIZE: Final = 32
"""Weights of a row with one scale and offset, in GGUF files."""
ROW_MULTIPLE: Final = 16
"""The kernel for 4 bits takes a multiple of this number of outputs."""
_MAX_CODE: Final = 127
_CENTER: Final = 8
"""The 4-bit code that stands for the offset alone."""
_BLOCK_WEIGHTS: Final = 1 << 18
"""How many weights are converted to float32 at a time."""
_PACKED_ROWS: Final = 256
"""How many rows are packed at a time; the kernels' layout is one of blocks of at most 64 rows."""
_OUTPUT_ROWS: Final = 16
"""How many rows the output layer multiplies at a time, which bounds its memory."""
_FLOAT_ROWS: Final = 4
"""How many rows it multiplies at a time where activations are float32."""
_FINE_STEPS: Final = 2 * _MAX_CODE
"""How many steps of the second code of an activation are one step of the first."""
_MIN_SCALE: Final = 1e-12


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes (outputs, inputs), and the scale of each row in bfloat16."""
    scales = (weight.abs().amax(1).clamp_min(_MIN_SCALE) / _MAX_CODE).bfloat16()
    codes = (weight / scales.float()[:, None]).round_().clamp_(-_MAX_CODE, _MAX_CODE)
    return codes.to(torch.int8), scales


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _unpack_nibbles(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], -1).flatten(1)


class QuantizedLinear(nn.Module):
    """A linear layer in the exchange format. ``scales``: see the subclasses."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.codes, self.scales, self.bias = codes, scales, bias
        self.weight = torch.empty(0)
        """Empty; it exists because some model families read a layer's dtype."""
        self.out_features = codes.shape[0]

    @property
    def in_features(self) -> int:
        """The size of a row of inputs."""
        return self.codes.shape[1]

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The weights of these outputs in float32."""
        raise NotImplementedError

    def pack(self) -> nn.Module:
        """The layer in the layout of torch's kernels."""
        raise NotImplementedError

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs), with float32 weights."""
        step = max(_BLOCK_WEIGHTS // self.in_features, 1)
        # One result for all blocks: small ones that stay would take the places of freed blocks.
        out = rows.new_empty((*rows.shape[:-1], self.out_features))
        for at in range(0, self.out_features, step):
            out[..., at : at + step] = self.multiply(rows, self.dequantize(at, at + step))
        return out if self.bias is None else out.add_(self.bias)

    def multiply(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply rows with weights in float32."""
        return linear(rows, weights)


class FourBitLinear(QuantizedLinear):
    """Codes (outputs, inputs / 2) of two nibbles a byte; scales (groups of inputs, outputs, 2)."""

    @property
    def in_features(self) -> int:
        """The size of a row of inputs."""
        return self.codes.shape[1] * 2

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """See QuantizedLinear."""
        codes = _unpack_nibbles(self.codes[start:stop]).float().sub_(_CENTER)
        scales, offsets = self.scales[:, start:stop].float().permute(2, 1, 0)
        groups = codes.view(codes.shape[0], self.scales.shape[0], -1)
        weights: Tensor = groups * scales[..., None] + offsets[..., None]
        return weights.flatten(1)

    def pack(self) -> nn.Module:
        """See QuantizedLinear."""
        operations: Any = torch.ops.aten
        convert = operations._convert_weight_to_int4pack_for_cpu  # noqa: SLF001
        packed = torch.empty_like(self.codes)
        for at in range(0, self.out_features, _PACKED_ROWS):
            rows = slice(at, at + _PACKED_ROWS)
            packed[rows] = convert(_unpack_nibbles(self.codes[rows]).int(), 1)
        return PackedFourBitLinear(packed, self.scales, self.bias)


class EightBitLinear(QuantizedLinear):
    """Codes (outputs, inputs); scales (outputs)."""

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """See QuantizedLinear."""
        scales: Tensor = self.scales[start:stop].float()
        weights: Tensor = self.codes[start:stop] * scales[:, None]
        return weights

    def pack(self) -> nn.Module:
        """See QuantizedLinear."""
        return PackedEightBitLinear(self.codes, self.scales, self.bias)


class OutputLinear(EightBitLinear):
    """The output layer, with finer activations, so that the most likely tokens stay apart.

    An activation is the sum of two 8-bit codes, of which the second has a scale 254 times smaller:
    each is off by at most 1/64,516 of the largest of its row. Where the integer product is not
    exact, activations are float32.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """See QuantizedLinear."""
        if not is_integer_product_exact():
            return super().forward(rows)
        flat = rows.reshape(-1, rows.shape[-1])
        out = flat.new_empty((len(flat), self.out_features))
        for at in range(0, len(flat), _OUTPUT_ROWS):
            part = slice(at, at + _OUTPUT_ROWS)
            out[part] = self._multiply_rows(flat[part])
        out *= self.scales.float()
        if self.bias is not None:
            out += self.bias
        return out.view(*rows.shape[:-1], -1)

    def _multiply_rows(self, rows: Tensor) -> Tensor:
        steps = rows.abs().amax(-1, keepdim=True).clamp_min_(_MIN_SCALE) / _MAX_CODE
        codes = rows / steps
        coarse = codes.round()
        fine = codes.sub_(coarse).mul_(_FINE_STEPS).round_()
        both = torch.cat([coarse, fine]).to(torch.int8)
        products, rests = multiply_codes(both, self.codes.t()).float().chunk(2)
        return products.add_(rests, alpha=1 / _FINE_STEPS).mul_(steps)

    def multiply(self, rows: Tensor, weights: Tensor) -> Tensor:
        """See QuantizedLinear. Always as many rows: the shape of a product changes its result."""
        flat = rows.reshape(-1, rows.shape[-1])
        padded = pad(flat, (0, 0, 0, -len(flat) % _FLOAT_ROWS))
        products = [linear(part, weights) for part in torch.split(padded, _FLOAT_ROWS)]
        return torch.cat(products)[: len(flat)].view(*rows.shape[:-1], -1)

    def pack(self) -> nn.Module:
        """See QuantizedLinear."""
        return self


@functools.cache
def is_integer_product_exact() -> bool:
    """Whether torch multiplies 8-bit codes on this CPU without saturation of 16-bit sums."""
    codes = torch.full((16, 64), _MAX_CODE, dtype=torch.int8)
    return bool((multiply_codes(codes, codes.t()) == 64 * _MAX_CODE**2).all())


def multiply_codes(rows: Tensor, weights: Tensor) -> Tensor:
    """The product of 8-bit codes, in 32-bit integers."""
    return torch._int_mm(rows, weights)  # noqa: SLF001


class _PackedLinear(nn.Module):
    """A layer with bfloat16 activations."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._codes, self._scales, self._bias = weight, scales, bias
        self.weight = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        flat = rows.reshape(-1, rows.shape[-1]).bfloat16()
        out = self._multiply(flat).float()
        if self._bias is not None:
            out += self._bias
        return out.view(*rows.shape[:-1], -1)

    def _multiply(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


class PackedFourBitLinear(_PackedLinear):
    """4-bit weights in the kernel's layout, which depends on the CPU."""

    def _multiply(self, rows: Tensor) -> Tensor:
        operations: Any = torch.ops.aten
        group_size = rows.shape[1] // self._scales.shape[0]
        out: Tensor = operations._weight_int4pack_mm_for_cpu(  # noqa: SLF001
            rows, self._codes, group_size, self._scales
        )
        return out


class PackedEightBitLinear(_PackedLinear):
    """8-bit weights."""

    def _multiply(self, rows: Tensor) -> Tensor:
        operations: Any = torch.ops.aten
        out: Tensor = operations._weight_int8pack_mm(rows, self._codes, self._scales)  # noqa: SLF001
        return out


class QuantizedEmbedding(nn.Module):
    """An embedding with 8-bit rows. A tied output layer has the same codes."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.codes, self.scales = codes, scales
        self.weight = torch.empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these tokens in float32."""
        return self.codes[ids] * self.scales[ids].float()[..., None]


def concatenate(layers: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """One layer whose output is the concatenation of all outputs; they are of the same kind."""
    kind = type(layers[0])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    axis = 1 if kind is FourBitLinear else 0
    return kind(
        torch.cat([layer.codes for layer in layers]),
        torch.cat([layer.scales for layer in layers], axis),
        torch.cat(biases) if biases else None,
    )
