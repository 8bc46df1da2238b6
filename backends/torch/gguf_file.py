"""GGUF files: their tensors as quantized or float weights of a transformers model, one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from backends.torch.quantized_weights import (
    GROUP_SIZE,
    ROW_MULTIPLE,
    pack_nibbles,
    quantize_rows,
)

CODES_SUFFIX: Final = {4: ".codes4", 8: ".codes8"}
"""The names of quantized weights: that of the layer, and the bits of a code."""
SCALES_SUFFIX: Final = ".scales"
_CENTER: Final = 8
_SUPER_BLOCK: Final = 256


def read_quantized_tensors(file: Path, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a GGUF file for ``model``, which is on the meta device, by name.

    Layers with quantized weights have tensors with ``CODES_SUFFIX`` and ``SCALES_SUFFIX``.
    """
    from gguf import GGUFReader, dequantize  # noqa: PLC0415 - only used here
    from transformers import modeling_gguf_pytorch_utils as gguf_utils  # noqa: PLC0415

    reader, utils = GGUFReader(file), cast("Any", gguf_utils)
    config: Any = model.config
    architecture = utils.read_field(reader, "general.architecture")[0]
    processor_class = utils.TENSOR_PROCESSORS.get(architecture, utils.TensorProcessor)
    processor: Any = processor_class(config=config.to_dict())
    names = utils.get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name is None:
            continue
        layer, _, kind = name.rpartition(".")
        order = _find_row_order(processor, tensor, names)
        is_layer = kind == "weight" and type(model.get_submodule(layer)) in _LAYER_CLASSES
        if is_layer and order is not None and tensor.tensor_type.name not in _FLOAT_TYPES:
            is_linear = type(model.get_submodule(layer)) is nn.Linear and layer != "lm_head"
            yield from quantize_tensor(layer, tensor, order, four_bits=is_linear)
        else:
            weights = dequantize(tensor.data, tensor.tensor_type)
            weights = processor.process(weights=weights, name=tensor.name).weights
            yield name, torch.from_numpy(np.array(weights, dtype=np.float32))


_LAYER_CLASSES: Final = (nn.Linear, nn.Embedding)
_FLOAT_TYPES: Final = ("F32", "F16", "BF16", "F64")


def _find_row_order(processor: Any, tensor: Any, names: Any) -> Tensor | None:
    """The order in which the model has the tensor's rows; None if it differs in other ways."""
    if len(tensor.shape) != 2:  # noqa: PLR2004 - a matrix
        return None
    rows = int(tensor.shape[1])
    probe = np.arange(rows * 2, dtype=np.int64).reshape(rows, 2)
    try:
        result = processor.process(weights=probe, name=tensor.name, tensor_key_mapping=names)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    shown = result.weights
    if result.name != tensor.name or shown.shape != probe.shape:
        return None
    order = shown[:, 0] // 2
    return torch.from_numpy(order) if np.array_equal(probe[order], shown) else None


def quantize_tensor(
    layer: str, tensor: Any, order: Tensor, *, four_bits: bool
) -> Iterator[tuple[str, Tensor]]:
    """The codes and scales of a layer, with 4 bits if the file has 4-bit weights."""
    from gguf import dequantize  # noqa: PLC0415 - only used here

    read = _FOUR_BIT_READERS.get(tensor.tensor_type.name)
    inputs, outputs = (int(size) for size in tensor.shape)
    if four_bits and read is not None and not (inputs % GROUP_SIZE or outputs % ROW_MULTIPLE):
        codes, scales, offsets = read(np.asarray(tensor.data).reshape(outputs, -1))
        pair = np.stack([scales, offsets + _CENTER * scales], -1)
        yield layer + CODES_SUFFIX[4], pack_nibbles(torch.from_numpy(codes)[order])
        pairs = torch.from_numpy(pair)[order].transpose(0, 1).contiguous()
        yield layer + SCALES_SUFFIX, pairs.bfloat16()
        return
    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))[order]
    codes8, scales8 = quantize_rows(weight)
    yield layer + CODES_SUFFIX[8], codes8
    yield layer + SCALES_SUFFIX, scales8


def _read_half(data: Any) -> Any:
    """Two bytes of each block as a number."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)[..., 0]


def _read_nibbles(data: Any) -> Any:
    """The codes of blocks: the low nibbles of all bytes, then the high ones."""
    return np.concatenate([data & 15, data >> 4], -1)


def _read_q4_0(data: Any) -> tuple[Any, Any, Any]:
    """Codes (rows, columns), scales and offsets (rows, groups)."""
    blocks = data.reshape(len(data), -1, 18)
    scales = _read_half(blocks[..., :2])
    codes = _read_nibbles(blocks[..., 2:]).reshape(len(data), -1)
    return codes, scales, -_CENTER * scales


def _read_q4_1(data: Any) -> tuple[Any, Any, Any]:
    blocks = data.reshape(len(data), -1, 20)
    codes = _read_nibbles(blocks[..., 4:]).reshape(len(data), -1)
    return codes, _read_half(blocks[..., :2]), _read_half(blocks[..., 2:4])


def _read_q4_k(data: Any) -> tuple[Any, Any, Any]:
    from gguf.quants import Q4_K  # noqa: PLC0415 - only used here

    rows = len(data)
    blocks = data.reshape(-1, 144)
    scale, offset = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scales = _read_half(blocks[:, :2])[:, None] * scale
    offsets = -_read_half(blocks[:, 2:4])[:, None] * offset
    codes = _read_nibbles(blocks[:, 16:].reshape(len(blocks), 4, GROUP_SIZE))
    shape = (rows, -1)
    return codes.reshape(shape), scales.reshape(shape), offsets.reshape(shape)


_FOUR_BIT_READERS: Final = {"Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q4_K": _read_q4_k}
