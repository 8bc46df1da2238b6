"""A GGUF file made a folder that loads in well under a second, once for each content.

The folder is named after the file's content. It is made under another name and renamed when it is
whole, so that a crash leaves nothing that is taken for a model; what it did leave is removed by the
next who converts. Of several processes that want the same, one converts and the others wait.
"""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from backends.torch.loading import get_free_memory
from backends.torch.models import ModelError, ProgressReport

CONVERSION_FORMAT = 1
"""Of a converted folder; a change of it converts anew."""

_PROGRESS_REPORTS = 8
"""How often the reading of a large file is told of."""
_READ_BYTES = 16 << 20
_BYTES_PER_WEIGHT = 10
"""Bytes of memory that a weight takes on its way: two and a half times what is written of it."""


def convert_gguf(file: Path, cache: Path, report: ProgressReport) -> Path:
    """The folder of a GGUF file's content, made now if there is none. Raises ModelError."""
    report(f"looking for {file.name} in the cache")
    name = f"{_hash_file(file, report)[:32]}-{CONVERSION_FORMAT}"
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock_file(cache / f".{name}.lock", report):
            if not folder.is_dir():
                _make_folder(file, folder, report)
    except OSError as error:
        raise ModelError(f"{file.name} can't be converted into {cache}: {error}") from error
    return folder


def _hash_file(file: Path, report: ProgressReport) -> str:
    digest, size, done, told = hashlib.sha256(), file.stat().st_size, 0, 1
    with file.open("rb") as source:
        while piece := source.read(_READ_BYTES):
            digest.update(piece)
            done += len(piece)
            if done < size and done * _PROGRESS_REPORTS >= told * size:
                report(f"looking for {file.name} in the cache: {done * 100 // size} % read")
                told = done * _PROGRESS_REPORTS // size + 1
    return digest.hexdigest()


@contextlib.contextmanager
def _lock_file(lock: Path, report: ProgressReport) -> Iterator[None]:
    """Nobody else on this machine is within, with the same lock; a crash lets it go."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process converts it: waiting")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make_folder(file: Path, folder: Path, report: ProgressReport) -> None:
    work = folder.with_name(f".making-{folder.name}")
    shutil.rmtree(work, ignore_errors=True)  # of one that crashed: nobody else is here
    work.mkdir()
    try:
        _convert_file(file, work, report)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"{file.name} is converted: {folder}")


def _convert_file(file: Path, folder: Path, report: ProgressReport) -> None:
    from gguf import GGUFReader  # noqa: PLC0415 - only this needs it
    from transformers import AutoModelForCausalLM, AutoTokenizer

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


def _check_conversion_memory(file: Path, weights: int) -> None:
    need, free = weights * _BYTES_PER_WEIGHT, get_free_memory(torch.device("cpu"))
    if free is not None and need > free:
        raise ModelError(
            f"to convert {file.name} takes {need / 1e6:,.0f} MB of memory, and "
            f"{free / 1e6:,.0f} MB are free; do it on a larger machine, or take safetensors"
        )


def _write_model(model: Any, tokenizer: Any, folder: Path, report: ProgressReport) -> None:
    """Writes what was read; tells beforehand where there is too little room for it."""
    from safetensors import SafetensorError  # noqa: PLC0415 - half a second that only this needs
    from safetensors.torch import save_model  # noqa: PLC0415

    need = sum(weight.nbytes for weight in model.parameters())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise ModelError(
            f"the disk is too full to convert into {folder.parent}: {need / 1e6:,.0f} MB are "
            f"needed, and {free / 1e6:,.0f} MB are free"
        )
    report(f"converting, once: writing {need / 1e6:,.0f} MB")
    try:
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"the converted weights can't be written: {error}") from error
    vars(model.config).pop("quantization_config", None)  # it is no more
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
