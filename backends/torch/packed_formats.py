"""How the weights of a checkpoint are quantized, by its config.json; needs no torch.

Formats: GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ's "gemm" layout), and compressed-tensors'
"pack-quantized" and "int-quantized" (llm-compressor), with codes of 4 or 8 bits. They state what a
weight is: a scale times a code less a zero point, for each group of weights of a row. Whatever
would make that statement wrong, or is not known, is refused, never guessed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

FOUR_BITS: Final = 4
GROUP_SIZES: Final = (32, 64, 128, 256)
"""Those that torch's kernel for 4-bit weights takes."""
WHOLE_ROW: Final = -1
"""The group size of a checkpoint with one scale for each row."""


class UnknownQuantizationError(Exception):
    """The weights can't be read; the message says why, as a clause."""


class PackedFormat(Struct, frozen=True):
    """How codes are stored."""

    method: Literal["gptq", "awq", "pack-quantized", "int-quantized"]
    group_size: int
    """Weights of a row with one scale; ``WHOLE_ROW``: all."""
    zero_offset: int = 0
    """Added to the stored zero points."""
    has_zero_points: bool = True
    """Whether zero points are stored; otherwise each is the middle of the codes."""
    bits: Literal[4, 8] = 4
    """The size of a code."""

    @property
    def center(self) -> int:
        """The code in the middle."""
        return 1 << (self.bits - 1)


def read_packed_format(quantization: Any) -> PackedFormat:
    """The format that a ``quantization_config`` states. Raises UnknownQuantizationError."""
    if not isinstance(quantization, dict):
        raise UnknownQuantizationError("quantization_config is no object")
    method = quantization.get("quant_method")
    reader = _READERS.get(str(method))
    if reader is None:
        raise UnknownQuantizationError(f"quant_method is {method or 'missing'}")
    return reader(quantization)


def _read_gptq(quantization: Mapping[str, Any]) -> PackedFormat:
    bits = _check_value(quantization, "bits", (4, 8))
    _check_value(quantization, "desc_act", (False, None))
    _check_value(quantization, "dynamic", (None, {}))
    _check_value(quantization, "pack_dtype", ("int32", None))
    _check_value(quantization, "is_marlin_format", (False, None))
    _check_value(quantization, "format", ("gptq", "gptq_v2", None))
    kind = _check_value(quantization, "checkpoint_format", ("gptq", "gptq_v2", None))
    kind = kind or quantization.get("format")
    size = _read_group_size(quantization)
    # Version 1 stores zero points less one.
    return PackedFormat("gptq", size, zero_offset=0 if kind == "gptq_v2" else 1, bits=bits)


def _read_awq(quantization: Mapping[str, Any]) -> PackedFormat:
    _check_value(quantization, "w_bit" if "w_bit" in quantization else "bits", (4,))
    _check_value(quantization, "version", ("gemm", "GEMM"))
    _check_value(quantization, "zero_point", (True,))
    name = "q_group_size" if "q_group_size" in quantization else "group_size"
    return PackedFormat("awq", _read_group_size(quantization, name))


def _read_compressed_tensors(quantization: Mapping[str, Any]) -> PackedFormat:
    kind = _check_value(quantization, "format", ("pack-quantized", "int-quantized"))
    _check_value(quantization, "kv_cache_scheme", (None,))
    _check_value(quantization, "transform_config", (None, {}))
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnknownQuantizationError("config_groups is not one group")
    (group,) = groups.values()
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        raise UnknownQuantizationError("config_groups has no weights")
    _check_value(group, "format", (kind, None))
    _check_activations(group.get("input_activations"))
    _check_value(group, "output_activations", (None,))
    bits = _check_value(weights, "num_bits", (4, 8) if kind == "pack-quantized" else (8,))
    _check_value(weights, "type", ("int",))
    _check_value(weights, "actorder", (None, "static", "weight", False))
    strategy = _check_value(weights, "strategy", ("group", "channel"))
    is_symmetric = _check_value(weights, "symmetric", (True, False))
    size = _read_group_size(weights) if strategy == "group" else WHOLE_ROW
    return PackedFormat(kind, size, has_zero_points=not is_symmetric, bits=bits)


def _check_activations(activations: Any) -> None:
    """Activations that are quantized while they are computed need no tensors of the file."""
    if activations is None:
        return
    if not isinstance(activations, dict):
        raise UnknownQuantizationError("input_activations is no object")
    _check_value(activations, "dynamic", (True,))
    _check_value(activations, "type", ("int",))
    _check_value(activations, "num_bits", (8,))


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], PackedFormat]]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
}


def _check_value(section: Mapping[str, Any], name: str, accepted: tuple[Any, ...]) -> Any:
    value = section.get(name)
    if any(type(value) is type(one) and value == one for one in accepted):
        return value
    raise UnknownQuantizationError(f"{name} is {'missing' if value is None else value}")


def _read_group_size(section: Mapping[str, Any], name: str = "group_size") -> int:
    size: int = _check_value(section, name, (*GROUP_SIZES, WHOLE_ROW))
    return size
