"""How a model's vectors are made of its last layer, as its sentence-transformers files say.

``modules.json`` names the steps: Transformer, Pooling, Normalize, and Dense layers between them.
``1_Pooling/config.json`` says how tokens are pooled, ``sentence_bert_config.json`` how long a text
may be, and ``config_sentence_transformers.json`` which prompts there are. Without these files an
encoder's vectors are the mean of its tokens, a decoder's that of its last token, both normalised.
(Source: sentence-transformers 5, ``models/Pooling.py`` and ``SentenceTransformer.py``.)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from backends.torch.models import ModelError, read_model_config

PoolingMode = Literal["mean", "cls", "max", "last", "root", "weighted"]

_POOLING_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "root",
    "pooling_mode_weightedmean_tokens": "weighted",
    "pooling_mode_lasttoken": "last",
}
"""In the order in which the vectors of several are joined."""
_POOLING_NAMES: Mapping[str, PoolingMode] = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "root",
    "weightedmean": "weighted", "lasttoken": "last",
}  # fmt: skip
_SUPPORTED_MODULES = {"Transformer", "Pooling", "Dense", "Normalize"}


class DenseConfig(Struct, frozen=True):
    """A layer between pooling and normalisation: its weights' file and its activation's name."""

    file: Path
    activation: str
    bias: bool


class PoolingConfig(Struct, frozen=True):
    """How a model's vectors are made."""

    pooling: tuple[PoolingMode, ...] = ("mean",)
    normalize: bool = True
    max_length: int | None = None
    """The most tokens of one text."""
    lowercase: bool = False
    prompts: Mapping[str, str] = {}
    """What stands before a text, by the name of what it is for."""
    default_prompt: str | None = None
    includes_prompt: bool = True
    """Whether the prompt's own tokens are pooled with the text's."""
    dense: tuple[DenseConfig, ...] = ()
    matryoshka_sizes: tuple[int, ...] | None = None
    """The shorter vectors that the model was made for; empty: all; None: none."""

    def get_prompt(self, instruction: str | None) -> str:
        """What stands before a text: the prompt of this name, or else the words themselves."""
        if instruction is None:
            return self.prompts.get(self.default_prompt or "", "")
        return self.prompts.get(instruction, instruction)


def read_pooling_config(folder: Path) -> PoolingConfig:
    """What the files beside a model say. Raises ModelError for what is not served here."""
    config = read_model_config(folder)
    told = _read_json_file(folder / "config_sentence_transformers.json", dict[str, Any]) or {}
    bert = _read_json_file(folder / "sentence_bert_config.json", dict[str, Any]) or {}
    recipe = PoolingConfig(
        pooling=("last",) if _is_generative(config) else ("mean",),
        max_length=bert.get("max_seq_length"),
        lowercase=bool(bert.get("do_lower_case")),
        prompts={name: text for name, text in (told.get("prompts") or {}).items() if text},
        default_prompt=told.get("default_prompt_name"),
        matryoshka_sizes=_read_matryoshka_sizes(config),
    )
    modules = _read_json_file(folder / "modules.json", list[dict[str, Any]])
    return _apply_modules(recipe, modules, folder) if modules else recipe


def _is_generative(config: Mapping[str, Any]) -> bool:
    return any("CausalLM" in name for name in config.get("architectures") or ())


def _read_matryoshka_sizes(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes to which vectors may be cut, by the names that vLLM 0.32 reads them from."""
    if sizes := config.get("matryoshka_dimensions"):
        return tuple(sizes)
    return () if config.get("is_matryoshka") else None


def _apply_modules(
    recipe: PoolingConfig, modules: Sequence[Mapping[str, Any]], folder: Path
) -> PoolingConfig:
    named = [(str(one.get("type", "")).rpartition(".")[2], one) for one in modules]
    if unknown := {name for name, _ in named} - _SUPPORTED_MODULES:
        steps = ", ".join(sorted(unknown))
        raise ModelError(f"{folder} has steps that are not served here: {steps}")
    places = {name: folder / str(one.get("path", "")) for name, one in named}
    pooling: dict[str, Any] = {}
    if "Pooling" in places:
        pooling = _read_json_file(places["Pooling"] / "config.json", dict[str, Any]) or {}
    return msgspec.structs.replace(
        recipe,
        pooling=_read_pooling_modes(pooling, folder) if pooling else recipe.pooling,
        normalize="Normalize" in places,
        includes_prompt=pooling.get("include_prompt", True),
        dense=tuple(
            _read_dense_config(folder / str(one["path"])) for name, one in named if name == "Dense"
        ),
    )


def _read_pooling_modes(said: Mapping[str, Any], folder: Path) -> tuple[PoolingMode, ...]:
    name = said.get("pooling_mode")
    chosen = [name] if isinstance(name, str) else name
    if chosen is None:
        chosen = [flag for flag in said if flag.startswith("pooling_mode_") and said[flag]]
    known = _POOLING_FLAGS if name is None else _POOLING_NAMES
    if not chosen or not all(one in known for one in chosen):
        names = ", ".join(map(str, chosen)) or "nothing"
        raise ModelError(f"{folder} pools in a way that is not served here: {names}")
    return tuple(known[one] for one in known if one in chosen)


def _read_dense_config(folder: Path) -> DenseConfig:
    said = _read_json_file(folder / "config.json", dict[str, Any]) or {}
    name = str(said.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rpartition(".")[2]
    file = folder / "model.safetensors"
    if kind not in _ACTIVATIONS or not file.is_file():
        raise ModelError(f"{folder}: a layer with {kind} and safetensors weights is wanted here")
    return DenseConfig(file, kind, bool(said.get("bias", True)))


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "GELU": torch.nn.functional.gelu,
    "Identity": lambda values: values,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}


class DenseLayer:
    """A Dense step, with its weights."""

    def __init__(self, dense: DenseConfig, device: torch.device) -> None:
        from safetensors.torch import load_file  # noqa: PLC0415 - few models have one

        weights = load_file(dense.file)
        self._weight = weights["linear.weight"].float().to(device)
        self._bias = weights["linear.bias"].float().to(device) if dense.bias else None
        self._activation = _ACTIVATIONS[dense.activation]

    @property
    def output_size(self) -> int:
        """Of the vectors it gives."""
        return self._weight.shape[0]

    def __call__(self, vectors: Tensor) -> Tensor:
        return self._activation(torch.nn.functional.linear(vectors, self._weight, self._bias))


def pool_states(states: Tensor, mask: Tensor, how: PoolingMode) -> Tensor:
    """One vector for each row of ``states`` (rows, tokens, size); ``mask`` is 1 on its tokens."""
    states = states.float()
    weight = mask[..., None].to(states.dtype)
    rows = torch.arange(len(states), device=states.device)
    match how:
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
            return states[rows, mask.cumsum(1).argmax(1)]
        case "cls":
            return states[rows, mask.argmax(1)]


def _read_json_file(file: Path, kind: Any) -> Any:
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
