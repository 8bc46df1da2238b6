"""Conversion of a GGUF file into a folder that loads in under a second, once per content.

The folder is named after the file's content hash and holds safetensors: float32 weights, or the
file's own ones if they stay quantized. If several processes need the same model, one converts it
and the others wait.

What must never happen: a broken model in the cache after a crash. The folder is written under a
temporary name and renamed when complete; the next conversion removes leftovers.
"""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from backends.torch.device_memory import get_free_memory
from backends.torch.gguf_file import read_quantized_tensors
from backends.torch.model_files import (
    ModelError,
    ProgressReport,
)

CONVERSION_FORMAT = 1
"""Version of the converted folders; changing it converts all files again."""
QUANTIZED_FORMAT = 1
"""The same of folders with quantized weights."""

_PROGRESS_REPORTS = 8
"""Progress reports while a large file is hashed."""
_READ_BYTES = 16 << 20
_BYTES_PER_WEIGHT = 10
"""Peak memory per weight during conversion: 2.5 times the float32 weight that is written."""
_SHARD_BYTES = 16 << 20
"""The size of a file of quantized weights; one is in memory at a time."""


def convert_gguf(
    file: Path, cache: Path, report: ProgressReport, *, keep_quantized: bool = False
) -> Path:
    """The converted folder of a GGUF file; converts it if necessary. Raises ModelError."""
    report(f"looking for {file.name} in the cache")
    suffix = f"q{QUANTIZED_FORMAT}" if keep_quantized else f"{CONVERSION_FORMAT}"
    name = f"{_hash_file(file, report)[:32]}-{suffix}"
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock_file(cache / f".{name}.lock", report):
            if not folder.is_dir():
                _make_folder(file, folder, report, keep_quantized=keep_quantized)
    except OSError as error:
        raise ModelError(f"{file.name} can't be converted into {cache}: {error}") from error
    return folder


def _hash_file(file: Path, report: ProgressReport) -> str:
    digest, size, bytes_read, next_report = hashlib.sha256(), file.stat().st_size, 0, 1
    with file.open("rb") as source:
        while chunk := source.read(_READ_BYTES):
            digest.update(chunk)
            bytes_read += len(chunk)
            if bytes_read < size and bytes_read * _PROGRESS_REPORTS >= next_report * size:
                report(f"looking for {file.name} in the cache: {bytes_read * 100 // size} % read")
                next_report = bytes_read * _PROGRESS_REPORTS // size + 1
    return digest.hexdigest()


@contextlib.contextmanager
def _lock_file(lock: Path, report: ProgressReport) -> Iterator[None]:
    """Hold a lock among the processes of this machine; a crash releases it."""
    with lock.open("w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is converting it: waiting")
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _make_folder(file: Path, folder: Path, report: ProgressReport, *, keep_quantized: bool) -> None:
    temporary = folder.with_name(f".converting-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a crash: the caller holds the lock
    temporary.mkdir()
    try:
        (_convert_quantized if keep_quantized else _convert_file)(file, temporary, report)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report(f"converted {file.name} into {folder}")


def _convert_file(file: Path, folder: Path, report: ProgressReport) -> None:
    from gguf import GGUFReader  # noqa: PLC0415 - only used here

    try:
        _check_conversion_memory(
            file, sum(int(part.n_elements) for part in GGUFReader(file).tensors)
        )
        report(f"converting {file.name}, once: the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        report(f"converting {file.name}, once: the weights")
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
    except (ValueError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"transformers can't read {file.name}: {error}") from error
    _write_model(model, tokenizer, folder, report)


def _convert_quantized(file: Path, folder: Path, report: ProgressReport) -> None:
    """Write a folder whose layers keep their quantized weights, one file after another."""
    try:
        report(f"converting {file.name}, once: the tokenizer")
        source = str(file.parent)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
        config = AutoConfig.from_pretrained(source, gguf_file=file.name)
        with torch.device("meta"):
            model = cast("Any", AutoModelForCausalLM).from_config(config)
        report(f"converting {file.name}, once: the weights")
        _write_shards(read_quantized_tensors(file, model), folder)
    except (ValueError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"transformers can't read {file.name}: {error}") from error
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write tensors to files of about ``_SHARD_BYTES``, with an index."""
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        if sum(one.nbytes for one in shard.values()) >= _SHARD_BYTES:
            write_shard()
    if shard:
        write_shard()
    index = msgspec.json.encode({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_bytes(index)


def _check_conversion_memory(file: Path, weights: int) -> None:
    required, free = weights * _BYTES_PER_WEIGHT, get_free_memory(torch.device("cpu"))
    if free is not None and required > free:
        raise ModelError(
            f"converting {file.name} needs {required / 1e6:,.0f} MB of memory, and "
            f"{free / 1e6:,.0f} MB are free; use a larger machine, or safetensors weights"
        )


def _write_model(model: Any, tokenizer: Any, folder: Path, report: ProgressReport) -> None:
    """Write the converted model. Raises ModelError, before writing, if the disk is too full."""
    from safetensors.torch import save_model  # noqa: PLC0415

    required = sum(weight.nbytes for weight in model.parameters())
    free = shutil.disk_usage(folder).free
    if required > free:
        raise ModelError(
            f"not enough disk space to convert into {folder.parent}: {required / 1e6:,.0f} MB are "
            f"needed, and {free / 1e6:,.0f} MB are free"
        )
    report(f"converting, once: writing {required / 1e6:,.0f} MB")
    try:
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"the converted weights can't be written: {error}") from error
    vars(model.config).pop("quantization_config", None)  # the weights are no longer quantized
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
