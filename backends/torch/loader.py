"""Find a model, download or convert it, and load its configuration, tokenizer and weights."""

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from msgspec import Struct
from safetensors import SafetensorError

from backends.torch.model_files import (
    HUB_NAME_PATTERN,
    EngineTask,
    ModelError,
    check_supported,
    detect_task,
    find_local_path,
    read_model_config,
)

# Locating a model: see ``model_files`` for how it is given.
#
# A GGUF file is converted once into a folder named after its content hash, which contains
# safetensors and loads in under a second. A model of the hub is downloaded once and then loaded
# from the hub's cache.


ProgressReport = Callable[[str], None]


class ModelLocation(Struct, frozen=True):
    """A folder that transformers can load, and the model's task."""

    source: str
    task: EngineTask


_DOWNLOAD_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
_IGNORE_PATTERNS = ["onnx/*", "openvino/*", "original/*", "coreml/*", "*.onnx_data"]


def get_cache_root() -> Path:
    """The folder for converted models."""
    configured = os.environ.get("INTERLINGUA_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "interlingua"


def find_model(path: str, report: ProgressReport, task: EngineTask | None = None) -> ModelLocation:
    """Find a model; download or convert it if necessary. ``task``: overrides the detected one."""
    source = find_local_path(path)
    if source is None:
        source = _download_model(path, report)
    if source.suffix == ".gguf":
        source = convert_gguf(source, get_cache_root() / "models", report)
    check_supported(source)
    return ModelLocation(str(source), task or detect_task(source))


def _download_model(path: str, report: ProgressReport) -> Path:
    """The folder of a hub model: downloaded, or from the hub's cache."""
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - only used here

    match = HUB_NAME_PATTERN.fullmatch(path)
    parts = match.groupdict() if match else {"name": path, "revision": None}
    options: dict[str, Any] = {
        "repo_id": parts["name"],
        "revision": parts["revision"],
        "allow_patterns": _DOWNLOAD_PATTERNS,
        "ignore_patterns": _IGNORE_PATTERNS,
    }
    report(f"{path} is not a local folder: looking on the Hugging Face Hub")
    try:
        folder = Path(
            snapshot_download(**options, tqdm_class=_make_download_progress(path, report))
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelError(
            f"{path} is not on the Hugging Face Hub, or access to it is restricted: "
            "check the name, or set HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no")
        raise ModelError(f"the Hugging Face Hub refused {path} with status {code}") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a local folder and not in the hub's cache, and the Hugging Face Hub "
            f"can't be reached ({type(error).__name__}); download it elsewhere "
            f"(hf download {parts['name']}) and configure the folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{path} on the Hugging Face Hub is not a transformers model: it has no config.json"
        )
    return folder


_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 << 20
_HEADER_LENGTH_BYTES = 8
"""Size of the field that holds the header's length."""


def pick_device(name: str) -> torch.device:
    """The torch device; ``auto`` is the accelerator if there is one, else the CPU."""
    if name == "auto":
        # The accelerator that torch was built for may be missing.
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        name = "cpu" if accelerator is None else accelerator.type
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"device {name}: {reason}") from error


def pick_dtype(name: str, device: torch.device) -> Any:
    """The torch dtype; ``auto`` is float32 on the CPU, elsewhere the dtype of the saved weights."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype {name}: choose auto, float32, bfloat16 or float16")
    return dtype


def load_pretrained(auto_class: Any, location: ModelLocation, **options: Any) -> Any:
    """Call ``auto_class.from_pretrained`` and raise ModelError for its errors."""
    try:
        return auto_class.from_pretrained(location.source, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{location.source} can't be loaded: {error}") from error


def load_weights(
    auto_class: Any,
    location: ModelLocation,
    device: torch.device,
    dtype: Any,
    *,
    optional_prefix: str = "",
    **options: Any,
) -> Any:
    """Load a model to ``device``. Weights with the name prefix ``optional_prefix`` may be missing.

    Raises ModelError if ``auto_class`` does not support the model, if weights are missing or their
    shapes differ from the configuration, or if there is too little memory.
    """
    find_model_class(auto_class, location)
    _check_model_memory(location, device, dtype)
    model, loading_info = load_pretrained(
        auto_class, location, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    missing = sorted(
        n
        for n in loading_info["missing_keys"]
        if not optional_prefix or not n.startswith(optional_prefix)
    )
    if missing:
        raise ModelError(
            f"{len(missing)} weights are missing from {location.source}: {_format_names(missing)}"
        )
    return model.to(device).eval()


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")  # noqa: PLR2004


def find_model_class(auto_class: Any, location: ModelLocation) -> Any:
    """The class that ``auto_class`` selects for a model. Raises ModelError if there is none."""
    folder = Path(location.source)
    name = str(read_model_config(folder).get("model_type"))
    if name not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise ModelError(
            f"{folder / 'config.json'}: transformers {version} does not support model type {name!r}"
        )
    classes = auto_class._model_mapping  # noqa: SLF001
    if transformers.CONFIG_MAPPING[name] not in classes:
        task = "generation" if location.task == "generate" else "embeddings"
        other_task = "embedding" if location.task == "generate" else "generate"
        raise ModelError(
            f"{folder}: model type {name!r} does not support {task}; try task: {other_task}"
        )
    return classes[transformers.CONFIG_MAPPING[name]]


def _check_model_memory(location: ModelLocation, device: torch.device, dtype: Any) -> None:
    """Raise ModelError if the weights need more than the free memory, before memory runs out."""
    required = compute_weight_bytes(Path(location.source), None if dtype == "auto" else dtype)
    free = get_free_memory(device)
    if free is not None and required > free:
        raise ModelError(
            f"the weights of {location.source} need {required / 1e6:,.0f} MB on {device}, and "
            f"{free / 1e6:,.0f} MB are free; choose a smaller model or dtype"
        )


def compute_weight_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """The memory of a folder's weights once loaded, in ``dtype``, or as saved if it is None."""
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
            names = msgspec.json.decode(index.read_bytes())["weight_map"].values()
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} can't be read: {error}") from error
        files = [folder / name for name in sorted(set(names))]
    else:
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} has no {_format_names(missing)}; only safetensors weights are supported"
        )
    return files


def _read_safetensors_header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors header. Raises ModelError if the file is truncated."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(_HEADER_LENGTH_BYTES), "little")
        text = source.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        tensors: dict[str, Any] = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} is not a safetensors file, or is truncated") from error
    end_offsets = [
        tensor["data_offsets"][1] for tensor in tensors.values() if "data_offsets" in tensor
    ]
    if _HEADER_LENGTH_BYTES + size + max(end_offsets, default=0) > file.stat().st_size:
        raise ModelError(f"{file} is truncated, or still being copied")
    return tensors


def get_free_memory(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    sizes = [_read_available_memory(), _read_cgroup_memory()]
    return min((size for size in sizes if size is not None), default=None)


def _read_available_memory(table: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that Linux can provide without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.exists() else None
    return None if match is None else int(match[1]) * 1024


def _read_cgroup_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that a container may still allocate (cgroup v2)."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdecimal() else None


# Conversion of a GGUF file into a folder that loads in under a second, once per content.
#
# The folder is named after the file's content hash. It is written under a temporary name and
# renamed when complete, so that a crash never leaves a broken model; the next conversion removes
# leftovers.
# If several processes need the same model, one converts it and the others wait.

CONVERSION_FORMAT = 1
"""Version of the converted folders; changing it converts all files again."""

_PROGRESS_REPORTS = 8
"""Progress reports while a large file is downloaded or hashed."""
_READ_BYTES = 16 << 20
_BYTES_PER_WEIGHT = 10
"""Peak memory per weight during conversion: 2.5 times the float32 weight that is written."""


def _make_download_progress(path: str, report: ProgressReport) -> type:
    """The class of the hub's progress bars, which reports bytes instead of drawing.

    The hub draws one bar of received bytes, and one of written bytes; the faster one is reported.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - only used here

    reported = (0, 0)
    """The total, which grows as the sizes of files become known, and the eighths of it."""

    class DownloadProgress(tqdm):  # type: ignore[misc]
        """One of the bars."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            """See tqdm."""
            nonlocal reported
            is_drawn: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                state = (self.total, int(self.n * _PROGRESS_REPORTS // self.total))
                if state > reported:
                    reported = state
                    done = f"{self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
                    report(f"downloading {path}: {done}")
            return is_drawn

    return DownloadProgress


def convert_gguf(file: Path, cache: Path, report: ProgressReport) -> Path:
    """The converted folder of a GGUF file; converts it if necessary. Raises ModelError."""
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


def _make_folder(file: Path, folder: Path, report: ProgressReport) -> None:
    temporary = folder.with_name(f".converting-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a crash: the caller holds the lock
    temporary.mkdir()
    try:
        _convert_file(file, temporary, report)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report(f"converted {file.name} into {folder}")


def _convert_file(file: Path, folder: Path, report: ProgressReport) -> None:
    from gguf import GGUFReader  # noqa: PLC0415 - only used here
    from transformers import (  # noqa: PLC0415 - only used here
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
    required, free = weights * _BYTES_PER_WEIGHT, get_free_memory(torch.device("cpu"))
    if free is not None and required > free:
        raise ModelError(
            f"converting {file.name} needs {required / 1e6:,.0f} MB of memory, and "
            f"{free / 1e6:,.0f} MB are free; use a larger machine, or safetensors weights"
        )


def _write_model(model: Any, tokenizer: Any, folder: Path, report: ProgressReport) -> None:
    """Write the converted model. Raises ModelError, before writing, if the disk is too full."""
    from safetensors import SafetensorError  # noqa: PLC0415 - takes half a second, only used here
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


# A configured chat template that replaces the model's.


def load_template(path: str) -> str | dict[str, str]:
    """The chat template in a file or a tokenizer folder; a dict by name if it has several.

    Raises ModelError if there is none.
    """
    location = Path(path)
    try:
        if location.is_file():
            return location.read_text("utf-8")
        jinja_file = location / "chat_template.jinja"
        if jinja_file.is_file():
            return jinja_file.read_text("utf-8")
        tokenizer_config = msgspec.json.decode((location / "tokenizer_config.json").read_bytes())
        return _read_templates(tokenizer_config["chat_template"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"there is no chat template in {path}: {error}") from error


def _read_templates(templates: Any) -> str | dict[str, str]:
    """The ``chat_template`` of tokenizer_config.json: a string, or a list of named templates."""
    if isinstance(templates, list):
        return {str(template["name"]): str(template["template"]) for template in templates}
    return str(templates)
