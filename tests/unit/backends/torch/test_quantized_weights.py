"""Quantized weights: those of a GGUF file, in about its size, and the kernels' products."""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor, nn

from backends.torch import quantized_weights
from backends.torch.gguf_file import CODES_SUFFIX, SCALES_SUFFIX, quantize_tensor
from backends.torch.quantized_weights import (
    EightBitLinear,
    FourBitLinear,
    OutputLinear,
    QuantizedLinear,
    concatenate,
    is_integer_product_exact,
)

OUTPUTS, INPUTS = 96, 512
ERROR = 1 / 128
"""The error of a product, as a share of the sum of the products' magnitudes."""
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
EIGHT_BITS = ("Q5_0", "Q5_K", "Q6_K", "Q8_0")
HALVES = {"Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where the blocks have 16-bit numbers; the others have one at the start."""


def make_tensor(kind: str, seed: int = 0) -> Any:
    """A tensor with random blocks of this kind, as the reader of GGUF files has it."""
    quantization = GGMLQuantizationType[kind]
    weights, size = GGML_QUANT_SIZES[quantization]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (OUTPUTS * INPUTS // weights, size), dtype=np.uint8)
    for at in HALVES.get(kind, [0]):
        scales = dice.uniform(0.001, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    data = blocks.reshape(OUTPUTS, -1)
    return SimpleNamespace(data=data, tensor_type=quantization, shape=np.array([INPUTS, OUTPUTS]))


def read_layer(tensor: Any, bias: Tensor | None = None) -> QuantizedLinear:
    tensors = dict(quantize_tensor("layer", tensor, torch.arange(OUTPUTS), four_bits=True))
    scales = tensors["layer" + SCALES_SUFFIX]
    if (codes := tensors.get("layer" + CODES_SUFFIX[4])) is not None:
        return FourBitLinear(codes, scales, bias)
    return EightBitLinear(tensors["layer" + CODES_SUFFIX[8]], scales, bias)


def read_weights(tensor: Any) -> Tensor:
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))


def count_bytes(layer: nn.Module) -> int:
    return sum(value.nbytes for value in vars(layer).values() if isinstance(value, Tensor))


@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS])
def test_weights_are_those_of_the_file(kind: str) -> None:
    tensor = make_tensor(kind)
    expected, layer = read_weights(tensor), read_layer(tensor)
    assert isinstance(layer, FourBitLinear) == (kind in FOUR_BITS)
    largest = expected.abs().amax(1, keepdim=True)
    assert ((layer.dequantize() - expected).abs() <= largest / 128).all()
    assert torch.equal(layer.dequantize(32, 48), layer.dequantize()[32:48])


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kind", [*FOUR_BITS, "Q6_K", "Q8_0"])
def test_products_are_those_of_the_dequantized_weights(kind: str, rows: int) -> None:
    tensor, bias = make_tensor(kind), torch.linspace(-1, 1, OUTPUTS)
    layer, weights = read_layer(tensor, bias), read_weights(tensor)
    inputs = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))
    bound = ERROR * (inputs.abs() @ weights.abs().t() + bias.abs())
    expected = inputs @ weights.t() + bias
    for module in (layer, layer.pack()):
        actual = module(inputs[None])
        assert actual.shape == (1, rows, OUTPUTS)
        assert ((actual[0] - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "output", "output, float32"])
def test_result_of_a_row_does_not_depend_on_other_rows(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "output, float32":
        monkeypatch.setattr(quantized_weights, "is_integer_product_exact", lambda: False)
    is_output = kind.startswith("output")
    layer = read_layer(make_tensor("Q8_0" if is_output else kind))
    module = (OutputLinear(layer.codes, layer.scales) if is_output else layer).pack()
    inputs = torch.randn(40, INPUTS, generator=torch.Generator().manual_seed(2))
    together = module(inputs)
    for count in (1, 2, 3, 5, 16, 33):
        assert torch.equal(module(inputs[:count]), together[:count])


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [("Q4_0", 1.15), ("Q4_1", 1.15), ("Q4_K", 1.15), ("Q8_0", 1.15), ("Q5_K", 1.6), ("Q6_K", 1.6)],
)
def test_layer_is_about_as_large_as_in_the_file(kind: str, ratio: float) -> None:
    tensor = make_tensor(kind)
    layer = read_layer(tensor)
    assert count_bytes(layer) <= ratio * tensor.data.nbytes
    assert count_bytes(layer.pack()) <= ratio * tensor.data.nbytes


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_concatenated_layers_compute_the_same(kind: str) -> None:
    layers = [read_layer(make_tensor(kind, seed), torch.full((OUTPUTS,), seed)) for seed in (1, 2)]
    inputs = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(3))
    expected = torch.cat([layer.pack()(inputs) for layer in layers], -1)
    assert torch.equal(concatenate(layers).pack()(inputs), expected)


@pytest.mark.parametrize(("is_exact", "bound"), [(True, 1 / 64_516), (False, 1e-6)])
def test_output_layer_has_finer_activations(
    monkeypatch: pytest.MonkeyPatch, bound: float, *, is_exact: bool
) -> None:
    """They are off by at most 1/64,516 of the largest of a row; 17 rows are more than one part."""
    monkeypatch.setattr(quantized_weights, "is_integer_product_exact", lambda: is_exact)
    layer, bias = read_layer(make_tensor("Q8_0")), torch.linspace(-1, 1, OUTPUTS)
    output = OutputLinear(layer.codes, layer.scales, bias)
    inputs = torch.randn(17, INPUTS, generator=torch.Generator().manual_seed(4)).double()
    weights = layer.dequantize().double()
    allowed = inputs.abs().amax(-1, keepdim=True) * weights.abs().sum(-1) * bound
    expected = inputs @ weights.t() + bias
    actual = output.pack()(inputs.float()[None])
    assert actual.shape == (1, 17, OUTPUTS)
    assert ((actual[0] - expected).abs() <= allowed + 1e-6).all()


def test_output_layer_multiplies_integers_where_their_sums_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU that saturates has other sums than 64 times 127 times 127."""
    for sums, is_exact in ((64 * 127**2, True), (64 * 127**2 - 1, False)):
        product = functools.partial(torch.full, (16, 16), sums)
        monkeypatch.setattr(quantized_weights, "multiply_codes", lambda *_, of=product: of())
        is_integer_product_exact.cache_clear()
        assert is_integer_product_exact() == is_exact
    is_integer_product_exact.cache_clear()


def test_outputs_that_the_kernel_does_not_take_have_eight_bits() -> None:
    kind = GGMLQuantizationType.Q4_0
    data = np.zeros((90, 2 * GGML_QUANT_SIZES[kind][1]), np.uint8)
    tensor = SimpleNamespace(data=data, tensor_type=kind, shape=np.array([64, 90]))
    tensors = dict(quantize_tensor("layer", tensor, torch.arange(90), four_bits=True))
    assert tensors.keys() == {"layer" + CODES_SUFFIX[8], "layer" + SCALES_SUFFIX}
