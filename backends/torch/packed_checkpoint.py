"""Checkpoints with 4- and 8-bit weights (GPTQ, AWQ, compressed-tensors) that stay quantized.

A weight of the file is ``scale * (code - zero)``. With 4 bits it becomes ``(code - 8) * scale +
offset`` of ``FourBitLinear``, whose scale and offset are in bfloat16: it differs by at most 1/16 of
the scale. With 8 bits and one scale for each row the codes are those of ``EightBitLinear``; groups
are rounded to one scale for the row, as those of GGUF files are. Each layer is read and repacked on
its own; embeddings, norms and layers that are not quantized become float32.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from backends.torch.gguf_file import CODES_SUFFIX, SCALES_SUFFIX
from backends.torch.model_files import ModelError
from backends.torch.packed_formats import FOUR_BITS, GROUP_SIZES, WHOLE_ROW, PackedFormat
from backends.torch.quantized_weights import ROW_MULTIPLE, pack_nibbles, quantize_rows

_WORD_CODES: Final = 8
"""Codes of 4 bits in an int32."""
_AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs the lowest four bits of an AWQ word hold, the next four, and so on."""
_PACKED_NAMES: Final = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_NAMES: Final = {
    "gptq": ("qweight", ("qzeros", "scales", "g_idx")),
    "awq": ("qweight", ("qzeros", "scales")),
    "pack-quantized": ("weight_packed", _PACKED_NAMES),
    "int-quantized": ("weight", ("weight_scale", "weight_zero_point", "weight_g_idx")),
}
"""The name of a layer's codes, and those of its further tensors."""


def read_packed_tensors(
    files: Mapping[str, Path], layout: PackedFormat, model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint for ``model``, which is on the meta device, by name.

    ``files``: where each tensor is. Layers with quantized weights have tensors with
    ``CODES_SUFFIX`` and ``SCALES_SUFFIX``; they follow the other layers. Raises ModelError.
    """
    codes_name, further = _NAMES[layout.method]
    marks = further if codes_name == "weight" else (codes_name, *further)
    layers = {name.rpartition(".")[0] for name in files if name.rpartition(".")[2] in marks}
    parts = {f"{one}.{kind}" for one in layers for kind in (codes_name, *further)} & files.keys()
    for name, file in files.items():
        if name not in parts:
            yield name, _read_float(file, name)
    for layer in sorted(layers):
        tensors = {
            kind: _read_tensor(files[name], name)
            for kind in (codes_name, *further)
            if (name := f"{layer}.{kind}") in parts
        }
        try:
            module = model.get_submodule(layer)
            if type(module) is not nn.Linear:
                raise ModelError(f"{layer} is quantized and no linear layer")
            if codes_name != "weight" and f"{layer}.weight" in files:
                raise ModelError(
                    f"{layer} has both weight and {codes_name}: one of them is too many"
                )
            codes, scales = repack_layer(tensors, layout, module.weight.shape)
        except KeyError as error:
            raise ModelError(f"{layer}.{error.args[0]} is missing") from error
        except (AttributeError, RuntimeError, ValueError) as error:
            raise ModelError(f"the quantized weights of {layer} can't be read: {error}") from error
        yield layer + CODES_SUFFIX[layout.bits], codes
        yield layer + SCALES_SUFFIX, scales


def _read_tensor(file: Path, name: str) -> Tensor:
    """A copy; the file is mapped only meanwhile, so that the read ones take no memory."""
    with safe_open(file, framework="pt") as source:
        tensor: Tensor = source.get_tensor(name)
        return tensor.clone()


def _read_float(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as source:
        tensor: Tensor = source.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{name} has the unknown type {tensor.dtype}")
        return tensor.to(torch.float32, copy=True)


def repack_layer(
    tensors: Mapping[str, Tensor], layout: PackedFormat, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """The codes and the scales of a layer of this shape: (outputs, inputs).

    It is a FourBitLinear or an EightBitLinear. Raises ValueError if the tensors do not fit, and
    KeyError with the name of one that is missing.
    """
    outputs, inputs = shape
    size = inputs if layout.group_size == WHOLE_ROW else layout.group_size
    if inputs % size or (layout.bits == FOUR_BITS and outputs % ROW_MULTIPLE):
        raise ValueError(f"a layer of shape {outputs} x {inputs} is not supported")
    codes, scales, zeros = _READERS[layout.method](tensors, layout)
    groups = inputs // size
    _check_shape("codes", codes, (outputs, inputs))
    _check_shape("scales", scales, (outputs, groups))
    _check_shape("zero points", zeros, (outputs, groups))
    for name in ("g_idx", "weight_g_idx"):
        if name in tensors and not torch.equal(tensors[name].long(), torch.arange(inputs) // size):
            raise ValueError("its inputs are in another order (desc_act, actorder)")
    if layout.bits != FOUR_BITS:
        return _join_groups(codes.int() - layout.center, scales, zeros - layout.center)
    pairs = torch.stack([scales, scales * (layout.center - zeros.float())], -1).transpose(0, 1)
    if size not in GROUP_SIZES:
        size = next((one for one in reversed(GROUP_SIZES) if inputs % one == 0), 0)
        if not size:
            raise ValueError(f"{inputs} inputs are no multiple of {GROUP_SIZES[0]}")
        pairs = pairs.repeat_interleave(inputs // size // groups, 0)
    return pack_nibbles(codes.contiguous()), pairs.contiguous().bfloat16()


def _join_groups(codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Signed codes and one scale for each row; exact if the row is one group around zero."""
    if scales.shape[1] == 1 and not zeros.any():
        return codes.to(torch.int8), scales[:, 0].bfloat16()
    groups = codes.view(*scales.shape, -1)
    weight: Tensor = (groups - zeros[..., None]) * scales[..., None]
    return quantize_rows(weight.flatten(1))


Parts = tuple[Tensor, Tensor, Tensor]
"""Unsigned codes (outputs, inputs), scales and zero points (outputs, groups)."""


def _read_gptq(tensors: Mapping[str, Tensor], layout: PackedFormat) -> Parts:
    codes = _unpack_words(tensors["qweight"].t(), layout.bits)
    zeros = _unpack_words(tensors["qzeros"], layout.bits).t().int() + layout.zero_offset
    # The sum is stored in as many bits by some versions and not by others: 16 may be 0.
    if layout.zero_offset and bool((zeros >= 1 << layout.bits).any()):
        raise ValueError(f"a zero point of {1 << layout.bits} is ambiguous")
    return codes, tensors["scales"].float().t(), zeros


def _read_awq(tensors: Mapping[str, Tensor], _layout: PackedFormat) -> Parts:
    order = torch.tensor(_AWQ_COLUMNS).argsort()
    codes, zeros = (
        _unpack_words(tensors[name])
        .view(-1, _WORD_CODES)[:, order]
        .view(len(tensors[name]), -1)
        .t()
        for name in ("qweight", "qzeros")
    )
    return codes, tensors["scales"].float().t(), zeros


def _read_words(tensors: Mapping[str, Tensor], layout: PackedFormat) -> Parts:
    outputs, inputs = tensors["weight_shape"].tolist()
    codes = _unpack_words(tensors["weight_packed"], layout.bits)[:, :inputs]
    scales = tensors["weight_scale"].float()
    if not layout.has_zero_points:
        return codes, scales, torch.full(scales.shape, layout.center)
    zeros = _unpack_words(tensors["weight_zero_point"].t(), layout.bits).t()[:outputs]
    return codes, scales, zeros.int()


def _read_signed_bytes(tensors: Mapping[str, Tensor], layout: PackedFormat) -> Parts:
    codes, scales = tensors["weight"], tensors["weight_scale"].float()
    if codes.dtype != torch.int8:
        raise ValueError(f"codes are {codes.dtype}, not int8")
    zeros = tensors["weight_zero_point"] if layout.has_zero_points else torch.zeros(scales.shape)
    return codes.int() + layout.center, scales, zeros.int() + layout.center


_READERS: Final[Any] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "pack-quantized": _read_words,
    "int-quantized": _read_signed_bytes,
}


def _unpack_words(words: Tensor, bits: int = FOUR_BITS) -> Tensor:
    """The codes in the rows of int32 words, lowest bits first, as bytes."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed codes are {words.dtype}, not int32")
    data = words.contiguous().view(torch.uint8)  # little-endian, as safetensors files are
    return torch.stack([data & 15, data >> 4], -1).flatten(1) if bits == FOUR_BITS else data


def _check_shape(subject: str, tensor: Tensor, expected: tuple[int, int]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{subject} have shape {tuple(tensor.shape)} instead of {expected}")
