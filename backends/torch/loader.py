"""Find a model, download or convert it, and load its weights.

A model is a folder, a GGUF file or a name on the hub (``model_files``). ``find_model`` turns each
into a folder that transformers can load: a model of the hub is downloaded once and then loaded from
the hub's cache, a GGUF file is converted once (``gguf_conversion``). Float weights are loaded by
transformers. Weights that stay quantized, or become int8, are read one after another into a model
that was created without weights, so that no second copy of the model is in memory.

What must never happen:

- A model that is served with weights missing, of another shape, or that are no numbers.
- A load that the system ends for lack of memory: what it needs is compared with what is free.
"""

import contextlib
import ctypes
import io
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from backends.torch.device_memory import get_free_memory
from backends.torch.gguf_conversion import convert_gguf
from backends.torch.gguf_file import CODES_SUFFIX, SCALES_SUFFIX
from backends.torch.linear_layers import get_linear_weight, prepack_linear, quantize_linear
from backends.torch.model_files import (
    HUB_NAME_PATTERN,
    TEXT_NAMES,
    EngineTask,
    ModelError,
    ProgressReport,
    check_quantized_use,
    check_supported,
    compute_weight_bytes,
    detect_task,
    find_local_path,
    format_names,
    get_quantization,
    get_text_config,
    list_weight_files,
    read_model_config,
    read_safetensors_header,
)
from backends.torch.packed_checkpoint import read_packed_tensors
from backends.torch.packed_formats import read_packed_format
from backends.torch.quantized_weights import (
    EightBitLinear,
    FourBitLinear,
    OutputLinear,
    QuantizedEmbedding,
)

_DOWNLOAD_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
_IGNORE_PATTERNS = ["onnx/*", "openvino/*", "original/*", "coreml/*", "*.onnx_data"]
_PROGRESS_REPORTS = 8
"""Progress reports while a large file is downloaded."""


class ModelLocation(Struct, frozen=True):
    """A folder that transformers can load, and the model's task."""

    source: str
    task: EngineTask
    is_quantized: bool = False
    """Whether its weights stay quantized: see ``gguf_file`` and ``packed_checkpoint``."""


def get_cache_root() -> Path:
    """The folder for converted models."""
    configured = os.environ.get("INTERLINGUA_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "interlingua"


def find_model(
    path: str,
    report: ProgressReport,
    task: EngineTask | None = None,
    *,
    keep_quantized: bool = False,
) -> ModelLocation:
    """Find a model; download or convert it if necessary. ``task``: overrides the detected one.

    ``keep_quantized``: the quantized weights of a GGUF file are not converted to float32.
    """
    source = find_local_path(path)
    if source is None:
        source = _download_model(path, report)
    is_quantized = keep_quantized and source.suffix == ".gguf"
    if source.suffix == ".gguf":
        cache = get_cache_root() / "models"
        source = convert_gguf(source, cache, report, keep_quantized=keep_quantized)
    check_supported(source)
    task = task or detect_task(source)
    if get_quantization(read_model_config(source)):
        check_quantized_use(source, task, "auto")
        is_quantized = True
    return ModelLocation(str(source), task, is_quantized)


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


def _make_download_progress(path: str, report: ProgressReport) -> type:
    """The class of the hub's progress bars, which reports bytes instead of drawing.

    The hub draws one bar of received bytes, and one of written bytes; the faster one is reported.
    It downloads files in threads: one report ends before the next begins, and none goes back.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - only used here

    lock = threading.Lock()
    reported = (0, 0)
    """The total, which grows as the sizes of files become known, and the eighths of it."""

    class DownloadProgress(tqdm):  # type: ignore[misc]
        """One of the bars."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            """See tqdm."""
            nonlocal reported
            with lock:
                is_drawn: bool | None = super().update(n)
                if self.unit == "B" and self.total:
                    state = (self.total, int(self.n * _PROGRESS_REPORTS // self.total))
                    if state > reported:
                        reported = state
                        done = f"{self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
                        report(f"downloading {path}: {done}")
            return is_drawn

    return DownloadProgress


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
    float_bytes = None if dtype == "auto" else dtype.itemsize
    required = compute_weight_bytes(Path(location.source), float_bytes)
    _check_model_memory(location, device, required)
    model = _load_model(auto_class, location, dtype, optional_prefix, **options)
    return model.to(device).eval()


def _load_model(
    auto_class: Any, location: ModelLocation, dtype: Any, optional_prefix: str = "", **options: Any
) -> Any:
    """See load_weights. On the CPU, weights that have this dtype in the file are views of it."""
    config = read_model_config(Path(location.source))
    if "quantization_config" in config:  # transformers refuses {}
        options["config"] = load_pretrained(AutoConfig, location, quantization_config=None)
    if get_text_config(config) is not config:
        options = {"config": _load_config(location), "key_mapping": dict(TEXT_NAMES), **options}
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
            f"{len(missing)} weights are missing from {location.source}: {format_names(missing)}"
        )
    return model


def find_model_class(auto_class: Any, location: ModelLocation) -> Any:
    """The class that ``auto_class`` selects for a model. Raises ModelError if there is none."""
    folder = Path(location.source)
    name = str(get_text_config(read_model_config(folder)).get("model_type"))
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


def _check_model_memory(location: ModelLocation, device: torch.device, required: int) -> None:
    """Raise ModelError if ``required`` bytes of weights are more than the free memory."""
    free = get_free_memory(device)
    if free is not None and required > free:
        raise ModelError(
            f"the weights of {location.source} need {required / 1e6:,.0f} MB on {device}, and "
            f"{free / 1e6:,.0f} MB are free; choose a smaller model or dtype"
        )


def load_quantized_model(location: ModelLocation) -> Any:
    """A model for generation whose layers are in the exchange format of ``quantized_weights``.

    Its weights are read one file after another. Raises ModelError.
    """
    folder = Path(location.source)
    is_packed = get_quantization(read_model_config(folder)) is not None
    required = compute_weight_bytes(folder, torch.float32.itemsize if is_packed else None)
    _check_model_memory(location, torch.device("cpu"), required)
    model = _create_model(load_pretrained(AutoConfig, location))
    if (folder / "generation_config.json").is_file():
        model.generation_config = load_pretrained(GenerationConfig, location)
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _read_quantized_folder(folder, model):
        layer, _, kind = name.rpartition(".")
        if f".{kind}" in _QUANTIZED_SUFFIXES:
            if is_packed and not layers:
                _prepack_output_layer(model)
            layers.setdefault(layer, {})[f".{kind}"] = tensor
            if f".{kind}" == SCALES_SUFFIX:
                _check_scales(layer, tensor)
        else:
            _set_parameter(model, name, tensor)
    _replace_layers(model, layers)
    missing = [name for name, one in model.named_parameters() if one.is_meta]
    if missing:
        raise ModelError(f"{len(missing)} weights are missing: {format_names(missing)}")
    return model.eval()


def _prepack_output_layer(model: Any) -> None:
    """Prepack a float32 output layer, which takes its memory twice, before the others are read."""
    output = model.get_output_embeddings()
    if not any(one.is_meta for one in output.parameters()) and (packed := prepack_linear(output)):
        model.set_output_embeddings(packed)
        release_free_memory()


def _load_config(location: ModelLocation) -> Any:
    """The model's configuration; of a model of images, that of its text half."""
    folder, config = Path(location.source), load_pretrained(AutoConfig, location)
    raw = read_model_config(folder)
    if get_text_config(raw) is raw:
        return config
    text = config.get_text_config()
    names = [name for file in list_weight_files(folder) for name in read_safetensors_header(file)]
    # Both halves say whether weights are shared, and not always the same.
    text.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in names)
    return text


def _create_model(config: Any) -> Any:
    """A float32 model for generation, whose buffers are there and whose parameters are not."""
    with no_init_weights(), _parameters_on_meta():
        return cast("Any", AutoModelForCausalLM).from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )


def load_int8_model(location: ModelLocation) -> Any:
    """A model for generation whose linear layers are int8; its other weights become float32.

    transformers maps the weights from the file; they are quantized or copied one after another.
    Raises ModelError.
    """
    model = _create_model(_load_config(location))
    linears = [one for one in model.modules() if get_linear_weight(one) is not None]
    float_bytes = sum(one.nbytes for one in model.parameters())
    spared_bytes = sum(one.weight.nbytes - one.weight.numel() for one in linears)
    _check_model_memory(location, torch.device("cpu"), float_bytes - spared_bytes)
    dtype = _find_saved_dtype(Path(location.source))
    source = _load_model(AutoModelForCausalLM, location, dtype, attn_implementation="eager")
    model.generation_config = source.generation_config
    saved = source.state_dict().keys()
    for name, module in list(model.named_modules()):
        original = source.get_submodule(name)
        weight = get_linear_weight(original)
        if weight is not None:
            bias = None if original.bias is None else _copy_float(original.bias)
            layer = quantize_linear(weight.detach(), bias)
            _check_scales(name, layer.scales)
            model.set_submodule(name, layer)
        for kind, parameter in list(original.named_parameters(recurse=False)):
            if weight is None:
                setattr(module, kind, nn.Parameter(_copy_float(parameter), requires_grad=False))
            setattr(original, kind, None)  # what transformers has converted is no view: free it
        for kind, buffer in original.named_buffers(recurse=False):
            if f"{name}.{kind}" in saved:
                setattr(module, kind, buffer.to(getattr(module, kind).dtype, copy=True))
        release_free_memory()
    return model.eval()


def _check_scales(layer: str, scales: torch.Tensor) -> None:
    """Raise ModelError if scales, or the weights that they were computed from, are no numbers."""
    if not scales.isfinite().all():
        raise ModelError(
            f"{layer} has weights or scales that are infinite or no numbers: the file is damaged"
        )


def _copy_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32, copy=True)


def _find_saved_dtype(folder: Path) -> torch.dtype:
    """The type of all floats in a folder's files; float32 if they have several."""
    tensors = [
        one for file in list_weight_files(folder) for one in read_safetensors_header(file).values()
    ]
    names = {str(one.get("dtype")) for one in tensors} & _SAVED_DTYPES.keys()
    return _SAVED_DTYPES[names.pop()] if len(names) == 1 else torch.float32


_SAVED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _read_quantized_folder(folder: Path, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a converted GGUF file or of a checkpoint, one after another."""
    files = list_weight_files(folder)
    if quantization := get_quantization(read_model_config(folder)):
        places = {name: file for file in files for name in read_safetensors_header(file)}
        for name in ("__metadata__", *_list_ignored_names(model, places)):
            places.pop(name, None)
        for item in read_packed_tensors(places, read_packed_format(quantization), model):
            yield item
            release_free_memory()  # what repacking a layer took would stay between the layers
        return
    for file in files:
        with safe_open(file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118 - it is no mapping
                yield name, source.get_tensor(name).clone()


_IGNORED_PATTERNS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Names of former tensors that transformers ignores for every model class."""


def _list_ignored_names(model: Any, names: Iterable[str]) -> list[str]:
    """Those of these tensors that ``model`` has not and that its class ignores when it loads."""
    patterns = (*_IGNORED_PATTERNS, *(model._keys_to_ignore_on_load_unexpected or ()))  # noqa: SLF001
    expected = model.state_dict()
    return [n for n in names if n not in expected and any(re.search(one, n) for one in patterns)]


def _set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter that the model has, or a bias that it has not. Raises ModelError."""
    layer, _, kind = name.rpartition(".")
    try:
        module: Any = model.get_submodule(layer)
        current: torch.Tensor | None = getattr(module, kind)
        shape = module.weight.shape[:1] if current is None else current.shape
        if tensor.shape != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
        setattr(module, kind, nn.Parameter(tensor, requires_grad=False))
    except (AttributeError, KeyError) as error:
        raise ModelError(f"the weights have {name}, and the model has no such part") from error


_QUANTIZED_SUFFIXES = (*CODES_SUFFIX.values(), SCALES_SUFFIX)


def _replace_layers(model: Any, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Put quantized layers in the place of those without weights.

    An output layer without weights is tied to the embeddings if the configuration says so.
    """
    output = model.get_output_embeddings()
    for name, tensors in layers.items():
        original, scales = model.get_submodule(name), tensors[SCALES_SUFFIX]
        if CODES_SUFFIX[4] in tensors:
            layer: nn.Module = FourBitLinear(tensors[CODES_SUFFIX[4]], scales, original.bias)
        elif isinstance(original, nn.Embedding):
            layer = QuantizedEmbedding(tensors[CODES_SUFFIX[8]], scales)
        else:
            kind = OutputLinear if original is output else EightBitLinear
            layer = kind(tensors[CODES_SUFFIX[8]], scales, original.bias)
        model.set_submodule(name, layer)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    has_own_output = not isinstance(output, nn.Linear) or not output.weight.is_meta
    if has_own_output or not model.config.tie_word_embeddings:
        return
    if isinstance(embedding, QuantizedEmbedding):
        model.set_output_embeddings(OutputLinear(embedding.codes, embedding.scales))
    else:
        output.weight = embedding.weight


def release_free_memory() -> None:
    """Return to the system what the checks of a model took; only glibc has to be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules are created with parameters that take no memory, and with their buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
