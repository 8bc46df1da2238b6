"""Prepacked linear layers are batch-invariant, and the original weights are freed."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from backends.torch.fused_layers import prepack_linears
from backends.torch.linear_layers import HalfEmbedding, PrepackedLinear, _pad_row_count

SIZES = [(64, 48), (128, 64), (259, 64), (96, 1536), (576, 1536)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear_row_is_independent_of_the_batch_size(size: tuple[int, int]) -> None:
    torch.manual_seed(5)
    weight, bias, rows = torch.randn(size), torch.randn(size[0]), torch.randn(300, size[1])
    layer = PrepackedLinear(weight, bias)

    whole = layer(rows)

    assert torch.allclose(whole, rows @ weight.t() + bias, atol=1e-3)
    for count in (1, 2, 3, 7, 16, 17, 33, 64, 100, 256):
        for start in (0, 3, 44):
            assert torch.equal(layer(rows[start : start + count]), whole[start : start + count])
    assert torch.equal(layer(rows.view(2, 3, 50, -1)).view(300, -1), whole)


@pytest.mark.parametrize(("difference", "computed"), [(0, 1), (1e-6, 2)])
def test_one_row_is_computed_alone_only_where_the_result_is_the_same(
    monkeypatch: pytest.MonkeyPatch, difference: float, computed: int
) -> None:
    """Given a product whose single rows are computed differently, a row is computed twice."""
    torch.manual_seed(5)
    weight, row, counts = torch.randn(128, 64), torch.randn(1, 64), []

    def multiply(_layer: PrepackedLinear, rows: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        results = torch.stack([weight @ one for one in rows])
        return results + (difference if len(rows) == 1 else 0)

    monkeypatch.setattr(PrepackedLinear, "_multiply", multiply)
    PrepackedLinear(weight, None)(row)

    assert counts[-1] == computed


def test_prepacking_replaces_all_layers_and_frees_their_weights() -> None:
    torch.manual_seed(6)
    conv1d: Any = Conv1D
    first, norm = nn.Linear(32, 16), nn.LayerNorm(24)
    model = nn.Sequential(first, nn.Sequential(conv1d(24, 16), norm))
    rows = torch.randn(5, 32)
    with torch.inference_mode():
        before = model(rows)
    old = weakref.ref(first.weight)
    del first
    prepack_linears(model)

    gc.collect()

    assert old() is None
    assert torch.allclose(model(rows), before, atol=1e-5)
    assert {name for name, _ in model.named_parameters()} == {"1.1.weight", "1.1.bias"}


def test_unsupported_layers_are_not_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
    weight, model = narrow.weight.data_ptr(), nn.Sequential(narrow)
    prepack_linears(model)

    assert model[0] is narrow
    assert narrow.weight.data_ptr() == weight

    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    plain = nn.Sequential(nn.Linear(4, 4))
    prepack_linears(plain)

    assert type(plain[0]) is nn.Linear


@pytest.mark.parametrize(
    ("rows", "computed"),
    [(2, 2), (3, 3), (16, 16), (17, 24), (24, 24), (128, 128), (129, 160), (2048, 2048)],
)
def test_row_counts_are_rounded_to_few_sizes(rows: int, computed: int) -> None:
    assert _pad_row_count(rows) == computed


def test_prepacked_layer_has_a_weight_dtype() -> None:
    assert PrepackedLinear(torch.randn(8, 16), None).weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_embedding_shared_with_the_output_layer_is_not_held_twice(dtype: torch.dtype) -> None:
    """Given weights that 16 bits hold, equal rows come from these, and no float32 ones remain."""
    torch.manual_seed(7)
    table, output = nn.Embedding(600, 64), nn.Linear(64, 600, bias=False)
    output.weight = table.weight = nn.Parameter(table.weight.detach().to(dtype).float())
    expected, old = table.weight.detach().clone(), weakref.ref(table.weight)
    model = nn.ModuleDict({"table": table, "output": output})
    prepack_linears(model)
    del table, output
    gc.collect()
    assert old() is None
    embedding: Any = model["table"]
    assert isinstance(embedding, HalfEmbedding)
    assert embedding._rows.dtype == dtype
    ids = torch.tensor([[5, 0, 599]])
    assert torch.equal(embedding(ids), expected[ids])
    assert isinstance(model["output"], PrepackedLinear)


class ScaledEmbedding(nn.Embedding):
    """Computes something else than rows."""


@pytest.mark.parametrize(
    "module",
    [nn.Embedding(9, 64), ScaledEmbedding(9, 64), nn.Embedding(9, 64, max_norm=1.0)],
    ids=["needs 32 bits", "scales", "norms"],
)
def test_other_embeddings_stay(module: nn.Embedding) -> None:
    module.weight.data.copy_(torch.arange(9 * 64).view(9, 64))
    if type(module) is nn.Embedding and module.max_norm is None:
        module.weight.data[8, 63] = 1 / 3
    model = nn.ModuleList([module])
    prepack_linears(model)
    assert model[0] is module


def test_embedding_stays_where_the_output_layer_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.ModuleList([nn.Embedding(9, 64, _weight=torch.ones(9, 64))])
    prepack_linears(model)
    assert type(model[0]) is nn.Embedding
