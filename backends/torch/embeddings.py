"""Embeddings: an encoder with the pooling configuration of its sentence-transformers files.

The inputs of all requests are batched by length up to a token budget, which wastes little on
padding and keeps each forward pass short. Between passes, other requests and cancellations are
handled.
"""

import bisect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer

from backends.torch.detokenizer import TokenBytes, split_texts
from backends.torch.ipc import (
    ClassifyCommand,
    DetokenizeCommand,
    DetokenizedEvent,
    EmbedCommand,
    EmbeddingsEvent,
    EngineEvent,
    EngineStats,
    FailureKind,
    RequestFailedEvent,
    RequestFinishedEvent,
    RerankCommand,
    ScoresEvent,
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
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.settings import TorchSettings
from backends.torch.tokenization import (
    BackgroundTokenizer,
    detokenize_ids,
    is_surely_too_long,
    measure_longest_token,
)
from protocols.core.json_text import decode_json

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
        return decode_json(file.read_bytes(), kind=kind)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} can't be read: {error}") from error


_log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 2048
"""Maximum tokens in one forward pass, padding included."""


class EncoderInput(NamedTuple):
    """One tokenized input of an encoder."""

    ids: list[int]
    skip: int = 0
    """Tokens at its start that are not pooled: those of the prompt."""
    type_ids: list[int] | None = None
    """Which of two texts each token is of, for models that tell them apart."""


EncoderCommand = EmbedCommand | RerankCommand | ClassifyCommand
"""What an encoder may be asked for."""


class TextEncoder(Protocol):
    """A loaded model that computes one row of numbers for each input."""

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_length(self) -> int:
        """Maximum tokens of one input."""

    @property
    def dimensions(self) -> int | None:
        """The dimensions of its embeddings, if it makes any."""

    @property
    def output(self) -> str:
        """What the model generates, for errors."""

    @property
    def commands(self) -> tuple[type, ...]:
        """The commands that it takes."""

    def tokenize(self, command: Any) -> list[EncoderInput]:
        """The inputs of a command. Raises RequestRejectedError."""

    def compute(self, batch: Sequence[EncoderInput]) -> Tensor:
        """A row for each input of one forward pass."""

    def finish(self, command: Any, rows: Tensor) -> EngineEvent:
        """The result of a command, from the rows of its inputs, in their order."""


def pad_inputs(
    batch: Sequence[EncoderInput], encoder: TextEncoder
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and type ids, each of shape (inputs, longest input)."""
    longest = max(len(one.ids) for one in batch)
    padding = encoder.tokenizer.pad_token_id or 0

    def pad(rows: Iterable[list[int]], fill: int) -> Tensor:
        padded = [row + [fill] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, device=encoder.model.device)

    return (
        pad((one.ids for one in batch), padding),
        pad(([1] * len(one.ids) for one in batch), 0),
        pad((one.type_ids or [0] * len(one.ids) for one in batch), 0),
    )


_QUERY_PROMPTS: Final = ("query",)
_TEXT_PROMPTS: Final = ("document", "passage")
"""Names of prompts of sentence-transformers models that search."""


class EmbeddingModel(NamedTuple):
    """A loaded embedding model with its tokenizer and pooling configuration."""

    model: Any
    tokenizer: Any
    pooling: PoolingConfig
    max_length: int
    """Maximum tokens of one input."""
    dense_layers: tuple[DenseLayer, ...] = ()

    @property
    def output(self) -> str:
        """See ``TextEncoder``."""
        return "embeddings"

    @property
    def commands(self) -> tuple[type, ...]:
        """See ``TextEncoder``."""
        return EmbedCommand, RerankCommand

    @property
    def dimensions(self) -> int:
        """The dimensions of an embedding that is not shortened."""
        if self.dense_layers:
            return self.dense_layers[-1].output_size
        size: int = self.model.config.hidden_size
        return size * len(self.pooling.modes)

    def tokenize(self, command: EmbedCommand | RerankCommand) -> list[EncoderInput]:
        """See ``TextEncoder``. To rerank, the queries come first, then the documents."""
        if isinstance(command, EmbedCommand):
            self._check_dimensions(command.dimensions)
            prompt = self.pooling.get_prompt(command.instruction)
            skip = self._count_prompt_tokens(prompt, command)
            return [
                EncoderInput(self._tokenize_input(command, prompt, text), skip)
                for text in command.inputs
            ]
        inputs = []
        for texts, names in ((command.queries, _QUERY_PROMPTS), (command.documents, _TEXT_PROMPTS)):
            name = next((name for name in names if name in self.pooling.prompts), None)
            part = EmbedCommand(command.request_id, texts, name, max_tokens=command.max_tokens)
            prompt = self.pooling.get_prompt(name)
            skip = self._count_prompt_tokens(prompt, part)
            inputs += [
                EncoderInput(self._tokenize_input(part, prompt, text), skip) for text in texts
            ]
        return inputs

    def compute(self, batch: Sequence[EncoderInput]) -> Tensor:
        """See ``TextEncoder``: one vector for each input, not normalized."""
        ids, mask, _ = pad_inputs(batch, self)
        sizes = mask.sum(1, keepdim=True)
        skipped = torch.tensor([one.skip for one in batch], device=ids.device)[:, None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with torch.inference_mode():
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            # At least the last token of each input is pooled.
            counts = mask * (positions >= torch.minimum(sizes - 1, skipped))
            vectors = torch.cat(
                [pool_states(states, counts, mode) for mode in self.pooling.modes], dim=1
            )
            for layer in self.dense_layers:
                vectors = layer(vectors)
            return vectors

    def finish(self, command: EmbedCommand | RerankCommand, rows: Tensor) -> EngineEvent:
        """See ``TextEncoder``."""
        if isinstance(command, EmbedCommand):
            vectors = rows[:, : command.dimensions]
            normalize = self.pooling.normalize if command.normalize is None else command.normalize
            if normalize:
                vectors = torch.nn.functional.normalize(vectors)
            data = vectors.cpu().numpy().astype("<f4").tobytes()
            return EmbeddingsEvent(command.request_id, 0, vectors.shape[1], data)
        count = len(command.queries)
        scores = torch.nn.functional.cosine_similarity(rows[:count], rows[count:])
        return ScoresEvent(command.request_id, tuple(scores.tolist()))

    def _check_dimensions(self, size: int | None) -> None:
        """Reject unsupported dimensions: only matryoshka embeddings may be shortened."""
        full, sizes = self.dimensions, self.pooling.matryoshka_sizes
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
        if self.pooling.includes_prompt or not prompt or not _has_only_texts(command):
            return 0
        tokenizer = self.tokenizer
        ids = tokenizer.encode(prompt)
        return len(ids) - int(ids[-1] in tokenizer.all_special_ids)

    def _tokenize_input(
        self, command: EmbedCommand, prompt: str, text: str | tuple[int, ...]
    ) -> list[int]:
        limit, max_tokens = self.max_length, command.max_tokens
        max_length = (
            None if max_tokens is None else limit if max_tokens < 0 else min(max_tokens, limit)
        )
        if isinstance(text, str):
            full = prompt + text
            ids = self._tokenize_text(full.lower() if self.pooling.lowercase else full, max_length)
        else:
            if command.instruction is not None:
                message = "instruction is only supported with texts; token ids must include it"
                raise RequestRejectedError("invalid", message, param="instruction")
            vocabulary_size: int = self.model.config.vocab_size
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
        tokenizer = self.tokenizer
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


def load_encoder(location: ModelLocation, settings: TorchSettings) -> EmbeddingModel:
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
        count_positions(model),
        tokenizer.model_max_length,
    )
    length = min(limit for limit in limits if limit)
    layers = tuple(DenseLayer(dense, device) for dense in pooling.dense)
    return EmbeddingModel(model, tokenizer, pooling, int(length), layers)


def count_positions(model: Any) -> int | None:
    """The number of positions; the RoBERTa family numbers them from ``padding_idx + 1``."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return limit


class _QueuedRequest:
    """One request and the rows that have been computed for it."""

    def __init__(
        self,
        command: EncoderCommand,
        inputs: Sequence[EncoderInput],
        arrived_at: float,
    ) -> None:
        self.command = command
        self.inputs = inputs
        self.arrived_at = arrived_at
        self.started_at: float | None = None
        self.rows: dict[int, Tensor] = {}
        self.pending = sorted(range(len(inputs)), key=lambda i: len(inputs[i].ids))
        """The inputs that are not computed yet, the longest one last."""
        self.max_batch = 0

    @property
    def deadline(self) -> float:
        return (
            float("inf") if self.command.timeout is None else self.arrived_at + self.command.timeout
        )


def select_batch(requests: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The next batch: pairs of a request and a position in its list of lengths.

    Each list has the lengths of a request's inputs that are not computed yet, in ascending order.
    The batch has the longest input of the first request, and as many others as fit into
    ``MAX_BATCH_TOKENS`` when all are padded to its length: of the first request, then of the
    others, the longest ones first.
    """
    longest = requests[0][-1]
    most = max(MAX_BATCH_TOKENS // longest, 1)
    batch: list[tuple[int, int]] = []
    for number, lengths in enumerate(requests):
        end = bisect.bisect_right(lengths, longest)
        batch += [(number, i) for i in range(end - 1, max(end - 1 - most + len(batch), -1), -1)]
        if len(batch) >= most:
            break
    return batch


class EmbeddingEngine:
    """Computes embeddings, scores and classes: one batch per step, of inputs of all requests."""

    def __init__(
        self,
        encoder: TextEncoder,
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
        self._queue: deque[_QueuedRequest] = deque()

    @property
    def output(self) -> str:
        """What the model generates, for errors."""
        return self._model.output

    @property
    def commands(self) -> tuple[type, ...]:
        """The commands that ``submit`` takes."""
        return self._model.commands

    @property
    def active_count(self) -> int:
        """Requests being computed."""
        return sum(1 for request in self._queue if request.started_at is not None)

    @property
    def waiting_count(self) -> int:
        """Waiting requests, including those being tokenized."""
        return len(self._queue) - self.active_count + len(self._background_tokenizer)

    @property
    def stats(self) -> EngineStats:
        """Empty: embeddings have no KV cache and no token statistics."""
        return EngineStats()

    def submit(self, command: EncoderCommand) -> None:
        """Add a request; an invalid one gets an error event."""
        texts = _list_texts(command)
        try:
            if len(self._queue) + len(self._background_tokenizer) > self._max_waiting:
                raise RequestRejectedError("overloaded", "the queue of the local model is full")
            self._check_lengths(command, texts)
        except RequestRejectedError as rejection:
            self._emit(rejection.make_failed_event(command.request_id))
            return
        arrived_at = self._clock()
        self._background_tokenizer.run(
            command.request_id,
            sum(map(len, texts)),
            lambda: self._model.tokenize(command),
            lambda inputs: self._add_request(command, inputs, arrived_at),
        )

    def _check_lengths(self, command: EncoderCommand, texts: Sequence[str]) -> None:
        """Reject texts that are surely too long, before tokenization."""
        limit = self._model.max_length
        if command.max_tokens is None:
            for text in texts:
                if is_surely_too_long(text, limit, self._longest_token):
                    raise make_too_long_error(None, limit, "input")

    def _add_request(
        self,
        command: EncoderCommand,
        inputs: Sequence[EncoderInput],
        arrived_at: float,
    ) -> None:
        if not inputs:
            raise RequestRejectedError("invalid", "input is empty", param="input")
        self._queue.append(_QueuedRequest(command, inputs, arrived_at))

    def tokenize(self, command: TokenizeCommand) -> None:
        """Tokenize a text."""
        text = next(iter(command.input.prompts), None)
        limit = self._model.max_length
        if isinstance(text, str) and is_surely_too_long(text, limit, self._longest_token):
            rejection = make_too_long_error(None, limit, "prompt")
            self._emit(rejection.make_failed_event(command.request_id))
            return
        self._background_tokenizer.run(
            command.request_id,
            0 if text is None else len(text),
            lambda: self._tokenize_text(text, command.input.special_tokens),
            lambda tokens: self._emit(TokensEvent(command.request_id, *tokens)),
        )

    def _tokenize_text(
        self,
        text: Any,
        special_tokens: bool | None,  # noqa: FBT001 - as the client sent it
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        if text is None:
            message = "this model has no chat template; it takes prompts"
            raise RequestRejectedError("unsupported", message, param="messages")
        special = special_tokens is not False
        ids = self._model.tokenizer.encode(text, add_special_tokens=special)
        return split_texts(self._token_bytes, ids)

    def detokenize(self, command: DetokenizeCommand) -> None:
        """Detokenize."""
        tokenizer = self._model.tokenizer
        self._background_tokenizer.run(
            command.request_id,
            len(command.ids),
            lambda: detokenize_ids(tokenizer, command.ids, len(tokenizer)),
            lambda text: self._emit(DetokenizedEvent(command.request_id, text)),
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
        now = self._clock()
        for request in [one for one in self._queue if now >= one.deadline]:
            self._fail(request, "deadline", "the request's time is up")
        if not self._queue:
            return False
        self._compute_batch(self._take_batch(now))
        for request in [one for one in self._queue if len(one.rows) == len(one.inputs)]:
            self._queue.remove(request)
            self._finish_request(request)
        return True

    def _compute_batch(self, batch: Sequence[tuple[_QueuedRequest, int]]) -> None:
        """Compute a batch. If that fails, each request in it is tried alone."""
        try:
            rows = self._model.compute([request.inputs[i] for request, i in batch])
        except (RuntimeError, MemoryError) as error:  # out of memory, or a failing kernel
            _log.exception("a forward pass failed")
            parts: dict[int, list[tuple[_QueuedRequest, int]]] = {}
            for one in batch:
                parts.setdefault(one[0].command.request_id, []).append(one)
            if len(parts) > 1:
                for part in parts.values():
                    self._compute_batch(part)
            else:
                text = f"the local model failed: {type(error).__name__}"
                self._fail(batch[0][0], "failed", text)
            return
        for (request, i), row in zip(batch, rows, strict=True):
            request.rows[i] = row
            request.max_batch = max(request.max_batch, len(batch))

    def _take_batch(self, now: float) -> list[tuple[_QueuedRequest, int]]:
        """The inputs of the next forward pass, which are no longer pending."""
        queued = list(self._queue)
        lengths = [[len(one.inputs[i].ids) for i in one.pending] for one in queued]
        batch = []
        for number, position in select_batch(lengths):  # positions of a request descend
            request = queued[number]
            if request.started_at is None:
                request.started_at = now
            batch.append((request, request.pending.pop(position)))
        return batch

    def _fail(self, request: _QueuedRequest, kind: FailureKind, message: str) -> None:
        self._queue.remove(request)
        self._emit(RequestFailedEvent(request.command.request_id, kind, message))

    def _finish_request(self, request: _QueuedRequest) -> None:
        rows = torch.stack([request.rows[i] for i in range(len(request.inputs))])
        self._emit(self._model.finish(request.command, rows))
        started_at = request.arrived_at if request.started_at is None else request.started_at
        self._emit(
            RequestFinishedEvent(
                request.command.request_id,
                sum(len(one.ids) for one in request.inputs),
                0,
                started_at - request.arrived_at,
                self._clock() - started_at,
                0.0,
                max_batch=request.max_batch,
            )
        )


def _list_texts(command: EncoderCommand) -> list[str]:
    """The texts that are to be tokenized."""
    if isinstance(command, RerankCommand):
        return [*command.queries, *command.documents]
    return [text for text in command.inputs if isinstance(text, str)]


def _has_only_texts(command: EmbedCommand) -> bool:
    return all(isinstance(text, str) for text in command.inputs)
