"""What the files of a model say of its weights: architecture, number and type. Imports no torch.

Only headers are read. A file that can't be read has no summary: loading the model says why.
"""

import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backends.torch.model_files import (
    ModelError,
    find_local_path,
    get_quantization,
    get_text_config,
    is_weight_of_text,
    list_weight_files,
    read_model_config,
    read_safetensors_header,
)
from protocols.core.catalog import ModelWeights

_GGUF_NUMBERS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""The types of values in GGUF files, as formats of ``struct``."""
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_FILE_TYPES: Final[Mapping[Any, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 32: "BF16",
}  # fmt: skip
"""``general.file_type``. (Source: llama.cpp, ``llama_ftype``; Ollama shows the same names.)"""
_PACKED_KINDS: Final = ("qweight", "weight_packed")
"""The names of tensors of 32-bit integers that hold several codes each."""
_WITHOUT_WEIGHTS: Final = ("scales", "qzeros", "g_idx", "weight_scale", "weight_zero_point",
                           "weight_shape", "weight_g_idx")  # fmt: skip
"""The names of tensors that belong to quantized ones."""


def summarize_weights(path: str, folder: Path | None = None) -> ModelWeights | None:
    """The weights of a model; None if they are unknown. ``folder``: where one of the hub is."""
    try:
        source = find_local_path(path) or folder
        if source is None:
            return None
        return _read_gguf(source) if source.suffix == ".gguf" else _read_folder(source)
    except (ModelError, OSError, ValueError, LookupError, OverflowError, TypeError, struct.error):
        return None


def _read_folder(folder: Path) -> ModelWeights:
    """Those of safetensors, without the weights for images of a model whose text half is served."""
    config, files = read_model_config(folder), list_weight_files(folder)
    quantization, count, kinds = get_quantization(config), 0, Counter[str]()
    bits = 32 if quantization is None else _find_bits(quantization)
    for file in files:
        for name, tensor in read_safetensors_header(file).items():
            kind = name.rpartition(".")[2]
            if "shape" not in tensor or not is_weight_of_text(name) or kind in _WITHOUT_WEIGHTS:
                continue
            size = math.prod(tensor["shape"]) * (32 // bits if kind in _PACKED_KINDS else 1)
            kinds[tensor["dtype"]] += size
            count += size
    method = None if quantization is None else f"{quantization['quant_method']} {bits}-bit"
    return ModelWeights(
        "safetensors",
        str(get_text_config(config)["model_type"]),
        count,
        method or kinds.most_common(1)[0][0],
        sum(file.stat().st_size for file in files),
    )


def _find_bits(quantization: Mapping[str, Any]) -> int:
    groups = quantization.get("config_groups")
    weights = quantization if groups is None else next(iter(groups.values()))["weights"]
    return int(next(weights[name] for name in ("bits", "w_bit", "num_bits") if name in weights))


def _read_gguf(file: Path) -> ModelWeights:
    """Those of a GGUF file.

    Source: ggml, docs/gguf.md.
    """
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _GgufReader(data)
        tensors, fields = reader.read("Q"), reader.read("Q")
        values = {reader.read_text(): reader.read_value(reader.read("I")) for _ in range(fields)}
        count = 0
        for _ in range(tensors):
            reader.skip_text()
            count += math.prod(reader.read("Q") for _ in range(reader.read("I")))
            reader.position += 12  # its type, a 32-bit integer, and its offset
    kind = _GGUF_FILE_TYPES.get(values.get("general.file_type"), "unknown")
    family = str(values["general.architecture"])
    return ModelWeights("gguf", family, count, kind, file.stat().st_size)


class _GgufReader:
    """Reads the header of a GGUF file, in the order of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 8  # after the magic number and the version

    def read(self, kind: str) -> Any:
        """A number. Raises struct.error at the end of the file."""
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.position)
        self.position += struct.calcsize(f"<{kind}")
        return value

    def read_text(self) -> str:
        size = self.read("Q")
        text = self._data[self.position : self.position + size]
        self.position += size
        return text.decode(errors="replace")

    def skip_text(self) -> None:
        size = self.read("Q")  # which moves on
        self.position += size

    def read_value(self, kind: int) -> Any:
        """A value of this type; None for a list."""
        if kind == _GGUF_STRING:
            return self.read_text()
        if kind != _GGUF_ARRAY:
            return self.read(_GGUF_NUMBERS[kind])
        kind, count = self.read("I"), self.read("Q")
        if kind == _GGUF_STRING:
            for _ in range(count):
                self.skip_text()
        else:
            self.position += count * struct.calcsize(f"<{_GGUF_NUMBERS[kind]}")
        return None
