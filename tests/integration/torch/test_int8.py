"""Quantized (int8) layers are close to the exact ones and batch-invariant."""

from typing import Any

import pytest
import torch

from backends.torch import linear_layers
from backends.torch.linear_layers import (
    FusedInt8Linear,
    IntMatmulLinear,
    get_fused_operator,
    quantize_linear,
)
from backends.torch.loaded_model import LoadedModel, assemble_model
from backends.torch.loader import ModelLocation, pick_device
from backends.torch.model import load_model_runner
from backends.torch.model_files import ModelError
from tests.integration.torch.test_batch_invariance import (
    check_coverage,
    make_llama,
    make_requests,
    run_alone,
    run_random_schedule,
)

LAYER_TYPES = [IntMatmulLinear, *([FusedInt8Linear] if get_fused_operator() else [])]


def make_layer(
    kind: Any, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.nn.Module:
    quantized = quantize_linear(weight, bias)
    layer: torch.nn.Module = kind(quantized.codes, quantized.scales, quantized.bias)
    return layer


def draw_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_int8_product_is_close_to_the_exact_product(layer_type: Any) -> None:
    weight, bias, rows = draw_tensor(40, 64), draw_tensor(40), draw_tensor(2, 5, 64)
    exact = rows @ weight.t() + bias
    off = make_layer(layer_type, weight, bias)(rows) - exact

    assert off.shape == (2, 5, 40)
    # The largest value has 127 steps; 64 errors of half a step mostly cancel out.
    assert 0 < off.abs().max() < 0.03 * exact.abs().max()

    without = make_layer(layer_type, weight)(rows)
    assert torch.allclose(without + bias, make_layer(layer_type, weight, bias)(rows))


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_largest_int8_products_do_not_saturate(layer_type: Any) -> None:
    weight, rows = torch.ones(40, 64), torch.ones(3, 64)
    assert torch.allclose(
        make_layer(layer_type, weight)(rows), torch.full((3, 40), 64.0), rtol=1e-3
    )
    assert torch.allclose(
        make_layer(layer_type, -weight)(rows), torch.full((3, 40), -64.0), rtol=1e-3
    )


def test_saturating_int8_operator_is_detected() -> None:
    def cutting(rows: torch.Tensor, *packed: Any) -> torch.Tensor:
        del packed
        return torch.full((len(rows), 16), 32.4)

    assert not linear_layers.is_exact(cutting, 127)
    assert linear_layers.is_exact(lambda rows, *packed: torch.full((len(rows), 16), 64.0), 127)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_zero_rows_and_zero_outputs_stay_zero(layer_type: Any) -> None:
    weight, rows = draw_tensor(8, 16), draw_tensor(3, 16)
    weight[2], rows[1] = 0, 0

    out = make_layer(layer_type, weight)(rows)

    assert torch.equal(out[1], torch.zeros(8))
    assert torch.equal(out[:, 2], torch.zeros(3))


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_int8_row_is_independent_of_the_other_rows(layer_type: Any) -> None:
    layer, rows = make_layer(layer_type, draw_tensor(48, 64)), draw_tensor(40, 64)
    rows[7] *= 1000  # with one scale for all rows the others would round to zero

    together = layer(rows)

    for start, end in ((0, 1), (7, 8), (6, 9), (0, 16), (3, 36)):
        assert torch.equal(layer(rows[start:end]), together[start:end])


def test_fused_and_integer_int8_layers_agree() -> None:
    if get_fused_operator() is None:
        pytest.skip("torch has no fused operator here")
    weight, rows = draw_tensor(40, 64), draw_tensor(9, 64)

    one, other = (
        make_layer(FusedInt8Linear, weight)(rows),
        make_layer(IntMatmulLinear, weight)(rows),
    )

    assert torch.allclose(one, other, atol=0.02 * float(one.abs().max()))


def test_integer_layer_is_used_without_the_fused_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "get_fused_operator", lambda: None)
    assert type(quantize_linear(draw_tensor(8, 16)).pack()) is IntMatmulLinear


@pytest.mark.skipif(not get_fused_operator(), reason="torch has no such operator here")
def test_fused_layer_is_used_with_the_fused_operator() -> None:
    assert type(quantize_linear(draw_tensor(8, 16)).pack()) is FusedInt8Linear


def test_fused_operator_is_unavailable_for_other_quantization_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.backends.quantized.engine", "onednn")
    assert get_fused_operator() is None


@pytest.fixture(scope="module")
def model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("int8")
    make_llama(288).save_pretrained(folder)
    location = ModelLocation(str(folder), "generate")
    return assemble_model(load_model_runner(location, "cpu", "int8", None), tokenizer)


def test_int8_output_is_independent_of_the_batch_composition(model: LoadedModel) -> None:
    pool = run_alone(model, make_requests(1, 24, 160))
    check_coverage([run_random_schedule(model, pool, seed) for seed in range(10)])


@pytest.mark.slow
def test_int8_output_is_independent_of_more_batch_compositions(model: LoadedModel) -> None:
    pool = run_alone(model, make_requests(1, 24, 160))
    check_coverage([run_random_schedule(model, pool, seed) for seed in range(10, 30)])


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_int8_layers_are_used_only_with_dtype_int8(dtype: str, tiny_folder: Any) -> None:
    forward = load_model_runner(ModelLocation(str(tiny_folder), "generate"), "cpu", dtype, None)
    kinds = {type(layer) for layer in forward._model.modules()}

    assert bool(kinds & {FusedInt8Linear, IntMatmulLinear}) == (dtype == "int8")
    assert forward._model.dtype is torch.float32  # embeddings and norms keep their type


def test_int8_on_a_non_cpu_device_is_rejected(
    tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = pick_device("meta")
    monkeypatch.setattr("backends.torch.model.pick_device", lambda device: place)
    with pytest.raises(ModelError, match="int8 needs a CPU"):
        load_model_runner(ModelLocation(str(tiny_folder), "generate"), "auto", "int8", None)
