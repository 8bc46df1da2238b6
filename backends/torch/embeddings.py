"""Embeddings: an encoder with the pooling configuration of its sentence-transformers files.

Inputs are sorted by length and batched up to a token budget, which wastes little on padding and
keeps each forward pass short. Between passes, other requests and cancellations are handled.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer

from backends.torch.detokenizer import TokenBytes, tokenize_text
from backends.torch.ipc import (
    EmbedCommand,
    EmbeddingsEvent,
    EngineEvent,
    EngineStats,
    RequestFailedEvent,
    RequestFinishedEvent,
    TokenizeCommand,
    TokensEvent,
)
from backends.torch.loader import (
    ModelLocation,
    load_pretrained,
    load_weights,
    pick_device,
    pick_dtype,
)
from backends.torch.model import prepack_linears
from backends.torch.model_files import ModelError, read_model_config
from backends.torch.settings import EngineSettings
from backends.torch.tokenization import (
    BackgroundTokenizer,
    RequestRejectedError,
    is_surely_too_long,
    make_too_long_error,
    measure_longest_token,
)

# The pooling configuration of a model, read from its sentence-transformers files.
#
# ``modules.json`` lists the modules: Transformer, Pooling, Dense, Normalize.
# ``1_Pooling/config.json`` holds the pooling mode, ``sentence_bert_config.json`` the maximum length
# and ``config_sentence_transformers.json`` the prompts. Without these files, an encoder uses mean
# pooling and a decoder last-token pooling; both embeddings are normalized.
# (Source: sentence-transformers 5, ``models/Pooling.py`` and ``SentenceTransformer.py``.)

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
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} can't be read: {error}") from error


_log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 2048
"""Maximum tokens in one forward pass, padding included."""


class EmbeddingModel(NamedTuple):
    """A loaded embedding model with its tokenizer and pooling configuration."""

    model: Any
    tokenizer: Any
    pooling: PoolingConfig
    max_length: int
    """Maximum tokens of one input."""
    dense_layers: tuple[DenseLayer, ...] = ()

    @property
    def dimensions(self) -> int:
        """The dimensions of an embedding that is not shortened."""
        if self.dense_layers:
            return self.dense_layers[-1].output_size
        size: int = self.model.config.hidden_size
        return size * len(self.pooling.modes)


def load_encoder(location: ModelLocation, settings: EngineSettings) -> EmbeddingModel:
    """Load an embedding model. Raises ModelError."""
    device, folder = pick_device(settings.device), Path(location.source)
    pooling = read_pooling_config(folder)
    if settings.matryoshka is not None:
        pooling = msgspec.structs.replace(pooling, matryoshka_sizes=settings.matryoshka)
    # Of an encoder-decoder model only the encoder is loaded. The model's own pooler is not used.
    is_encoder_decoder = read_model_config(folder).get("is_encoder_decoder")
    model_class = AutoModelForTextEncoding if is_encoder_decoder else AutoModel
    model = load_weights(
        model_class, location, device, pick_dtype(settings.dtype, device), optional_prefix="pooler."
    )
    prepack_linears(model)
    tokenizer = load_pretrained(AutoTokenizer, location)
    limits = (
        pooling.max_length,
        settings.context,
        _count_positions(model),
        tokenizer.model_max_length,
    )
    length = min(limit for limit in limits if limit)
    layers = tuple(DenseLayer(dense, device) for dense in pooling.dense)
    return EmbeddingModel(model, tokenizer, pooling, int(length), layers)


def _count_positions(model: Any) -> int | None:
    """The number of positions; the RoBERTa family numbers them from ``padding_idx + 1``."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return limit


class _QueuedEmbedding:
    """One request: its tokenized inputs in batches, longest first."""

    def __init__(
        self, command: EmbedCommand, texts: list[list[int]], prompt_tokens: int, arrived_at: float
    ) -> None:
        self.command = command
        self.texts = texts
        self.prompt_tokens = prompt_tokens
        """Tokens at the start of each input that are not pooled: those of the prompt."""
        self.arrived_at = arrived_at
        self.started_at: float | None = None
        self.tokens = sum(map(len, texts))
        self.vectors: dict[int, Tensor] = {}
        self.batches = deque(split_batches([len(ids) for ids in texts]))
        self.max_batch = 0

    @property
    def deadline(self) -> float:
        return (
            float("inf") if self.command.timeout is None else self.arrived_at + self.command.timeout
        )


def split_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of input indices within the token budget, longest inputs first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        # The first input of a batch is the longest, and the others are padded to its length.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= MAX_BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class EmbeddingEngine:
    """Computes embeddings, one batch per step and one request after another."""

    def __init__(
        self,
        encoder: EmbeddingModel,
        max_waiting: int,
        emit: Callable[[EngineEvent], None],
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` is called from another thread when a long input is ready."""
        self._model = encoder
        self._longest_token = measure_longest_token(encoder.tokenizer)
        self._background_tokenizer = BackgroundTokenizer(emit, wake)
        self._max_waiting = max_waiting
        self._emit = emit
        self._clock = clock
        self._token_bytes = TokenBytes(encoder.tokenizer)
        self._queue: deque[_QueuedEmbedding] = deque()

    @property
    def active_count(self) -> int:
        """Requests being computed."""
        return min(len(self._queue), 1)

    @property
    def waiting_count(self) -> int:
        """Waiting requests, including those being tokenized."""
        return max(len(self._queue) - 1, 0) + len(self._background_tokenizer)

    @property
    def stats(self) -> EngineStats:
        """Empty: embeddings have no KV cache and no token statistics."""
        return EngineStats()

    def submit(self, command: EmbedCommand) -> None:
        """Add a request; an invalid one gets an error event."""
        try:
            if len(self._queue) + len(self._background_tokenizer) > self._max_waiting:
                raise RequestRejectedError("overloaded", "the queue of the local model is full")
            self._check_dimensions(command.dimensions)
            self._check_lengths(command)
        except RequestRejectedError as rejection:
            self._emit(rejection.make_failed_event(command.request_id))
            return
        arrived_at = self._clock()
        self._background_tokenizer.run(
            command.request_id,
            sum(len(text) for text in command.inputs if isinstance(text, str)),
            lambda: self._tokenize_inputs(command),
            lambda tokens: self._queue.append(_QueuedEmbedding(command, *tokens, arrived_at)),
        )

    def _check_lengths(self, command: EmbedCommand) -> None:
        """Reject texts that are surely too long, before tokenization."""
        limit = self._model.max_length
        if command.max_tokens is None:
            for text in command.inputs:
                if isinstance(text, str) and is_surely_too_long(text, limit, self._longest_token):
                    raise make_too_long_error(None, limit, "input")

    def _tokenize_inputs(self, command: EmbedCommand) -> tuple[list[list[int]], int]:
        """The tokens of each input, and the number of prompt tokens that are not pooled."""
        prompt = self._model.pooling.get_prompt(command.instruction)
        texts = [self._tokenize_input(command, prompt, text) for text in command.inputs]
        if not texts:
            raise RequestRejectedError("invalid", "input is empty", param="input")
        return texts, self._count_prompt_tokens(prompt, command)

    def _check_dimensions(self, size: int | None) -> None:
        """Reject unsupported dimensions: only matryoshka embeddings may be shortened."""
        full, sizes = self._model.dimensions, self._model.pooling.matryoshka_sizes
        if size is None or size == full:
            return
        if sizes is None:
            text = f"this model only supports {full} dimensions"
            raise RequestRejectedError("invalid", text, param="dimensions")
        if sizes and size not in sizes:
            allowed = ", ".join(map(str, sorted({*sizes, full})))
            raise RequestRejectedError(
                "invalid", f"dimensions must be one of {allowed}", param="dimensions"
            )
        if not 1 <= size <= full:
            raise RequestRejectedError(
                "invalid", f"dimensions must be between 1 and {full}", param="dimensions"
            )

    def _count_prompt_tokens(self, prompt: str, command: EmbedCommand) -> int:
        """The number of prompt tokens that are not pooled; 0 if they are pooled."""
        if self._model.pooling.includes_prompt or not prompt or not _has_only_texts(command):
            return 0
        tokenizer = self._model.tokenizer
        ids = tokenizer.encode(prompt)
        return len(ids) - int(ids[-1] in tokenizer.all_special_ids)

    def _tokenize_input(
        self, command: EmbedCommand, prompt: str, text: str | tuple[int, ...]
    ) -> list[int]:
        limit, max_tokens = self._model.max_length, command.max_tokens
        max_length = (
            None if max_tokens is None else limit if max_tokens < 0 else min(max_tokens, limit)
        )
        if isinstance(text, str):
            full = prompt + text
            ids = self._tokenize_text(
                full.lower() if self._model.pooling.lowercase else full, max_length
            )
        else:
            if command.instruction is not None:
                message = "instruction is only supported with texts; token ids must include it"
                raise RequestRejectedError("invalid", message, param="instruction")
            vocabulary_size: int = self._model.model.config.vocab_size
            if not text or not all(0 <= token < vocabulary_size for token in text):
                raise RequestRejectedError(
                    "invalid",
                    f"token ids must be between 0 and {vocabulary_size - 1}",
                    param="input",
                )
            ids = list(text[:max_length])
        if len(ids) > limit:
            raise make_too_long_error(len(ids), limit, "input")
        return ids

    def _tokenize_text(self, text: str, max_length: int | None) -> list[int]:
        """The tokens of a text with special tokens, truncated to ``max_length`` in total."""
        tokenizer = self._model.tokenizer
        ids: list[int] = tokenizer.encode(text)
        if max_length is None or len(ids) <= max_length:
            return ids
        special_count: int = tokenizer.num_special_tokens_to_add()
        if max_length <= special_count:
            raise RequestRejectedError(
                "invalid",
                f"texts can't be truncated to fewer than {special_count + 1} tokens",
                param="input",
            )
        truncated: list[int] = tokenizer.encode(text, truncation=True, max_length=max_length)
        return truncated

    def tokenize(self, command: TokenizeCommand) -> None:
        """Tokenize a text."""
        self._background_tokenizer.run(
            command.request_id,
            len(command.text),
            lambda: tokenize_text(self._model.tokenizer, self._token_bytes, command.text),
            lambda tokens: self._emit(TokensEvent(command.request_id, *tokens)),
        )

    def cancel(self, request_id: int) -> None:
        """Cancel a request."""
        self._background_tokenizer.cancel(request_id)
        self._queue = deque(
            queued for queued in self._queue if queued.command.request_id != request_id
        )

    def credit(self, number: int, tokens: int) -> None:
        """Do nothing: embeddings are sent at once, without flow control."""

    def step(self) -> bool:
        """Compute one batch; False if there was nothing to do."""
        self._background_tokenizer.finish_pending()
        while self._queue and self._clock() >= self._queue[0].deadline:
            request_id = self._queue.popleft().command.request_id
            self._emit(RequestFailedEvent(request_id, "deadline", "the request's time is up"))
        if not self._queue:
            return False
        request = self._queue[0]
        if request.started_at is None:
            request.started_at = self._clock()
        batch = request.batches.popleft()
        try:
            vectors = self._compute_vectors([request.texts[i] for i in batch], request)
        except (RuntimeError, MemoryError) as error:  # out of memory, or a failing kernel
            _log.exception("a forward pass failed")
            self._queue.popleft()
            message = f"the local model failed: {type(error).__name__}"
            self._emit(RequestFailedEvent(request.command.request_id, "failed", message))
            return True
        request.vectors.update(zip(batch, vectors, strict=True))
        request.max_batch = max(request.max_batch, len(batch))
        if not request.batches:
            self._queue.popleft()
            self._finish_request(request, request.started_at)
        return True

    def _compute_vectors(self, texts: list[list[int]], request: _QueuedEmbedding) -> Tensor:
        encoder, pooling, command = self._model, self._model.pooling, request.command
        longest = max(map(len, texts))
        padding = encoder.tokenizer.pad_token_id or 0
        device = encoder.model.device
        ids = torch.tensor([t + [padding] * (longest - len(t)) for t in texts], device=device)
        sizes = torch.tensor([len(t) for t in texts], device=device)
        positions = torch.arange(longest, device=device)[None]
        mask = (positions < sizes[:, None]).long()
        with torch.inference_mode():
            states = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state
            # At least the last token of each input is pooled.
            counts = mask * (positions >= (sizes[:, None] - 1).clamp(max=request.prompt_tokens))
            vectors = torch.cat(
                [pool_states(states, counts, mode) for mode in pooling.modes], dim=1
            )
            for layer in encoder.dense_layers:
                vectors = layer(vectors)
            vectors = vectors[:, : command.dimensions]
            normalize = pooling.normalize if command.normalize is None else command.normalize
            return torch.nn.functional.normalize(vectors) if normalize else vectors

    def _finish_request(self, request: _QueuedEmbedding, started_at: float) -> None:
        matrix = torch.stack([request.vectors[i] for i in range(len(request.texts))]).cpu()
        data = matrix.numpy().astype("<f4").tobytes()
        self._emit(EmbeddingsEvent(request.command.request_id, 0, matrix.shape[1], data))
        queue, compute = started_at - request.arrived_at, self._clock() - started_at
        self._emit(
            RequestFinishedEvent(
                request.command.request_id,
                request.tokens,
                0,
                queue,
                compute,
                0.0,
                max_batch=request.max_batch,
            )
        )


def _has_only_texts(command: EmbedCommand) -> bool:
    return all(isinstance(text, str) for text in command.inputs)
