"""Weights, configurations and tokenizers, loaded; what does not fit is told before it is tried."""

import re
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors import SafetensorError

from backends.torch.models import ModelError, ModelLocation, read_model_config

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
            f"{folder} has no {_format_names(missing)}; weights are read from safetensors files only"
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
