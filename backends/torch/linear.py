"""Linear layers whose rows do not depend on how many there are.

A plain matrix product is cut up by its shape: the same row comes out a little different beside
others. oneDNN's product over weights that it has laid out beforehand does not do that, and is two
to three times as fast for four rows and more. The weights as they were loaded are let go: they
would only double the memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

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
