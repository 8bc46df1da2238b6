"""How the states of a model become one vector, read from its sentence-transformers files.

``modules.json`` lists the modules: Transformer, Pooling, Dense, Normalize.
``1_Pooling/config.json`` holds the pooling mode, ``sentence_bert_config.json`` the maximum length
and ``config_sentence_transformers.json`` the prompts. Without these files, an encoder uses mean
pooling and a decoder last-token pooling; both embeddings are normalized.
(Source: sentence-transformers 5, ``models/Pooling.py`` and ``SentenceTransformer.py``.)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from backends.torch.model_files import ModelError, read_model_config
from protocols.core.json_text import decode_json

PoolingMode = Literal["mean", "cls", "max", "last", "root", "weighted"]

_POOLING_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "root",
    "pooling_mode_weightedmean_tokens": "weighted",
    "pooling_mode_lasttoken": "last",
}
"""In the order in which the vectors of several modes are concatenated."""
_POOLING_NAMES: Mapping[str, PoolingMode] = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "root",
    "weightedmean": "weighted", "lasttoken": "last",
}  # fmt: skip
_SUPPORTED_MODULES = {"Transformer", "Pooling", "Dense", "Normalize"}


class DenseConfig(Struct, frozen=True):
    """A dense layer between pooling and normalization: its weights and activation function."""

    file: Path
    activation: str
    bias: bool


class PoolingConfig(Struct, frozen=True):
    """How a model's hidden states become embeddings."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    normalize: bool = True
    max_length: int | None = None
    """Maximum tokens of one input."""
    lowercase: bool = False
    prompts: Mapping[str, str] = {}
    """Prompts that are prepended to a text, by name."""
    default_prompt: str | None = None
    includes_prompt: bool = True
    """Whether the prompt's tokens are pooled, too."""
    dense: tuple[DenseConfig, ...] = ()
    matryoshka_sizes: tuple[int, ...] | None = None
    """Dimensions to which embeddings may be shortened; empty: any; None: not supported."""

    def get_prompt(self, instruction: str | None) -> str:
        """The text to prepend: the prompt of this name, or else the instruction itself."""
        if instruction is None:
            return self.prompts.get(self.default_prompt or "", "")
        return self.prompts.get(instruction, instruction)


def read_pooling_config(folder: Path) -> PoolingConfig:
    """Read a model's sentence-transformers files. Raises ModelError for unsupported modules."""
    model_config = read_model_config(folder)
    prompt_config = (
        _read_json_file(folder / "config_sentence_transformers.json", dict[str, Any]) or {}
    )
    transformer_config = _read_json_file(folder / "sentence_bert_config.json", dict[str, Any]) or {}
    config = PoolingConfig(
        modes=("last",) if _is_generative(model_config) else ("mean",),
        max_length=transformer_config.get("max_seq_length"),
        lowercase=bool(transformer_config.get("do_lower_case")),
        prompts={name: text for name, text in (prompt_config.get("prompts") or {}).items() if text},
        default_prompt=prompt_config.get("default_prompt_name"),
        matryoshka_sizes=_read_matryoshka_sizes(model_config),
    )
    modules = _read_json_file(folder / "modules.json", list[dict[str, Any]])
    return _apply_modules(config, modules, folder) if modules else config


def _is_generative(config: Mapping[str, Any]) -> bool:
    return any("CausalLM" in name for name in config.get("architectures") or ())


def _read_matryoshka_sizes(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The matryoshka dimensions, from the configuration keys that vLLM 0.32 reads."""
    if sizes := config.get("matryoshka_dimensions"):
        return tuple(sizes)
    return () if config.get("is_matryoshka") else None


def _apply_modules(
    config: PoolingConfig, modules: Sequence[Mapping[str, Any]], folder: Path
) -> PoolingConfig:
    named = [(str(module.get("type", "")).rpartition(".")[2], module) for module in modules]
    if unknown := {name for name, _ in named} - _SUPPORTED_MODULES:
        listed = ", ".join(sorted(unknown))
        raise ModelError(f"{folder} has unsupported modules: {listed}")
    paths = {name: folder / str(module.get("path", "")) for name, module in named}
    pooling: dict[str, Any] = {}
    if "Pooling" in paths:
        pooling = _read_json_file(paths["Pooling"] / "config.json", dict[str, Any]) or {}
    return msgspec.structs.replace(
        config,
        modes=_read_pooling_modes(pooling, folder) if pooling else config.modes,
        normalize="Normalize" in paths,
        includes_prompt=pooling.get("include_prompt", True),
        dense=tuple(
            _read_dense_config(folder / str(module["path"]))
            for name, module in named
            if name == "Dense"
        ),
    )


def _read_pooling_modes(value: Mapping[str, Any], folder: Path) -> tuple[PoolingMode, ...]:
    configured = value.get("pooling_mode")
    names = [configured] if isinstance(configured, str) else configured
    if names is None:
        names = [flag for flag in value if flag.startswith("pooling_mode_") and value[flag]]
    supported = _POOLING_FLAGS if configured is None else _POOLING_NAMES
    if not names or not all(name in supported for name in names):
        listed = ", ".join(map(str, names)) or "none"
        raise ModelError(f"{folder} has unsupported pooling modes: {listed}")
    return tuple(mode for name, mode in supported.items() if name in names)


def _read_dense_config(folder: Path) -> DenseConfig:
    value = _read_json_file(folder / "config.json", dict[str, Any]) or {}
    name = str(value.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rpartition(".")[2]
    file = folder / "model.safetensors"
    if kind not in _ACTIVATIONS or not file.is_file():
        raise ModelError(
            f"{folder}: a dense layer needs safetensors weights and a supported activation "
            f"({', '.join(_ACTIVATIONS)}); this one has {kind}"
        )
    return DenseConfig(file, kind, bool(value.get("bias", True)))


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "GELU": torch.nn.functional.gelu,
    "Identity": lambda values: values,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}


class DenseLayer:
    """A loaded dense layer."""

    def __init__(self, dense: DenseConfig, device: torch.device) -> None:
        from safetensors.torch import load_file  # noqa: PLC0415 - rarely used

        weights = load_file(dense.file)
        self._weight = weights["linear.weight"].float().to(device)
        self._bias = weights["linear.bias"].float().to(device) if dense.bias else None
        self._activation = _ACTIVATIONS[dense.activation]

    @property
    def output_size(self) -> int:
        """The dimensions of its output."""
        return self._weight.shape[0]

    def __call__(self, vectors: Tensor) -> Tensor:
        return self._activation(torch.nn.functional.linear(vectors, self._weight, self._bias))


def pool_states(states: Tensor, mask: Tensor, mode: PoolingMode) -> Tensor:
    """Pool hidden states (inputs, tokens, size) into vectors (inputs, size).

    ``mask`` (inputs, tokens) is 1 for the tokens that are pooled.
    """
    states = states.float()
    weight = mask[..., None].to(states.dtype)
    indices = torch.arange(len(states), device=states.device)
    match mode:
        case "mean":
            return (states * weight).sum(1) / weight.sum(1)
        case "root":
            return (states * weight).sum(1) / weight.sum(1).sqrt()
        case "weighted":
            weight = weight * torch.arange(1, states.shape[1] + 1, device=states.device)[:, None]
            return (states * weight).sum(1) / weight.sum(1)
        case "max":
            return states.masked_fill(weight == 0, float("-inf")).amax(1)
        case "last":
            return states[indices, mask.cumsum(1).argmax(1)]
        case "cls":
            return states[indices, mask.argmax(1)]


def _read_json_file(file: Path, kind: Any) -> Any:
    if not file.is_file():
        return None
    try:
        return decode_json(file.read_bytes(), kind=kind)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
