"""Embeddings: an encoder with the pooling recipe of its sentence-transformers files.

Texts are sorted by length and batched up to a token budget, which wastes little on padding and
keeps each pass short. Between passes, other requests and cancellations are handled.
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
    ModelError,
    ModelLocation,
    load_pretrained,
    load_weights,
    pick_device,
    pick_dtype,
    read_model_config,
)
from backends.torch.model import prepack_linears
from backends.torch.settings import EngineSettings
from backends.torch.tokenization import (
    BackgroundTokenizer,
    RequestRejectedError,
    is_surely_too_long,
    make_too_long_error,
    measure_longest_token,
)

# The pooling recipe of a model, read from its sentence-transformers files.
#
# ``modules.json`` lists the steps: Transformer, Pooling, Dense, Normalize.
# ``1_Pooling/config.json`` holds the pooling mode, ``sentence_bert_config.json`` the maximum length
# and ``config_sentence_transformers.json`` the prompts. Without these files, an encoder's vector is
# the mean of its tokens, a decoder's is its last token; both are normalised.
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
    settings = _read_json_file(folder / "config_sentence_transformers.json", dict[str, Any]) or {}
    bert = _read_json_file(folder / "sentence_bert_config.json", dict[str, Any]) or {}
    recipe = PoolingConfig(
        pooling=("last",) if _is_generative(config) else ("mean",),
        max_length=bert.get("max_seq_length"),
        lowercase=bool(bert.get("do_lower_case")),
        prompts={name: text for name, text in (settings.get("prompts") or {}).items() if text},
        default_prompt=settings.get("default_prompt_name"),
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


def _read_pooling_modes(value: Mapping[str, Any], folder: Path) -> tuple[PoolingMode, ...]:
    name = value.get("pooling_mode")
    chosen = [name] if isinstance(name, str) else name
    if chosen is None:
        chosen = [flag for flag in value if flag.startswith("pooling_mode_") and value[flag]]
    allowed = _POOLING_FLAGS if name is None else _POOLING_NAMES
    if not chosen or not all(one in allowed for one in chosen):
        names = ", ".join(map(str, chosen)) or "nothing"
        raise ModelError(f"{folder} pools in a way that is not served here: {names}")
    return tuple(allowed[one] for one in allowed if one in chosen)


def _read_dense_config(folder: Path) -> DenseConfig:
    value = _read_json_file(folder / "config.json", dict[str, Any]) or {}
    name = str(value.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rpartition(".")[2]
    file = folder / "model.safetensors"
    if kind not in _ACTIVATIONS or not file.is_file():
        raise ModelError(f"{folder}: a layer with {kind} and safetensors weights is wanted here")
    return DenseConfig(file, kind, bool(value.get("bias", True)))


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


def pool_states(states: Tensor, mask: Tensor, mode: PoolingMode) -> Tensor:
    """One vector for each row of ``states`` (rows, tokens, size); ``mask`` is 1 on its tokens."""
    states = states.float()
    weight = mask[..., None].to(states.dtype)
    rows = torch.arange(len(states), device=states.device)
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


_log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 2048
"""Tokens in one pass, padding included."""


class EmbeddingModel(NamedTuple):
    """A model that gives vectors, with all that belongs to it."""

    model: Any
    tokenizer: Any
    pooling: PoolingConfig
    max_length: int
    """The most tokens of one text."""
    dense_layers: tuple[DenseLayer, ...] = ()

    @property
    def dimensions(self) -> int:
        """Of a whole vector."""
        if self.dense_layers:
            return self.dense_layers[-1].output_size
        size: int = self.model.config.hidden_size
        return size * len(self.pooling.pooling)


def load_encoder(location: ModelLocation, settings: EngineSettings) -> EmbeddingModel:
    """The encoder of a folder. Raises ModelError."""
    device, folder = pick_device(settings.device), Path(location.source)
    recipe = read_pooling_config(folder)
    if settings.matryoshka is not None:
        recipe = msgspec.structs.replace(recipe, matryoshka_sizes=settings.matryoshka)
    # Of a model with two halves the first is wanted; a pooler of its own is not.
    halves = read_model_config(folder).get("is_encoder_decoder")
    kind = AutoModelForTextEncoding if halves else AutoModel
    model = load_weights(
        kind, location, device, pick_dtype(settings.dtype, device), spare="pooler."
    )
    prepack_linears(model)
    tokenizer = load_pretrained(AutoTokenizer, location)
    limits = (
        recipe.max_length,
        settings.context,
        _count_positions(model),
        tokenizer.model_max_length,
    )
    length = min(limit for limit in limits if limit)
    layers = tuple(DenseLayer(dense, device) for dense in recipe.dense)
    return EmbeddingModel(model, tokenizer, recipe, int(length), layers)


def _count_positions(model: Any) -> int | None:
    """How many tokens have a position; RoBERTa's family begins to count behind the padding."""
    most: int | None = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return most


class _QueuedEmbedding:
    """One request: its texts in batches, longest first."""

    def __init__(
        self, spec: EmbedCommand, texts: list[list[int]], skip: int, arrived: float
    ) -> None:
        self.command = spec
        self.texts = texts
        self.prompt_tokens = skip
        """So many of the first tokens are not pooled: an instruction's."""
        self.arrived_at = arrived
        self.started_at: float | None = None
        self.tokens = sum(map(len, texts))
        self.vectors: dict[int, Tensor] = {}
        self.batches = deque(split_batches([len(ids) for ids in texts]))
        self.largest = 0

    @property
    def deadline(self) -> float:
        return (
            float("inf") if self.command.timeout is None else self.arrived_at + self.command.timeout
        )


def split_batches(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of texts of these lengths, in batches within the budget, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        # The first of a batch is its longest, and all are padded to it.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= MAX_BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class EmbeddingEngine:
    """Answers requests for vectors, a batch at a time, each request in its turn."""

    def __init__(
        self,
        encoder: EmbeddingModel,
        waiting: int,
        emit: Callable[[EngineEvent], None],
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` is called from another thread when a long input is ready."""
        self._model = encoder
        self._longest_token = measure_longest_token(encoder.tokenizer)
        self._background_tokenizer = BackgroundTokenizer(emit, wake)
        self._max_waiting = waiting
        self._emit = emit
        self._clock = clock
        self._token_bytes = TokenBytes(encoder.tokenizer)
        self._queue: deque[_QueuedEmbedding] = deque()

    @property
    def active_count(self) -> int:
        """Requests in work."""
        return min(len(self._queue), 1)

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return max(len(self._queue) - 1, 0) + len(self._background_tokenizer)

    @property
    def stats(self) -> EngineStats:
        """Nothing is kept from one request to the next."""
        return EngineStats()

    def submit(self, spec: EmbedCommand) -> None:
        """Add a request; an invalid one gets an error event."""
        try:
            if len(self._queue) + len(self._background_tokenizer) > self._max_waiting:
                raise RequestRejectedError("overloaded", "the queue of the local model is full")
            self._check_dimensions(spec.dimensions)
            self._check_lengths(spec)
        except RequestRejectedError as rejection:
            self._emit(rejection.make_failed_event(spec.request_id))
            return
        arrived_at = self._clock()
        self._background_tokenizer.run(
            spec.request_id,
            sum(len(text) for text in spec.inputs if isinstance(text, str)),
            lambda: self._tokenize_inputs(spec),
            lambda tokens: self._queue.append(_QueuedEmbedding(spec, *tokens, arrived_at)),
        )

    def _check_lengths(self, spec: EmbedCommand) -> None:
        """Reject texts that are surely too long before they are tokenized."""
        limit = self._model.max_length
        if spec.max_tokens is None:
            for text in spec.inputs:
                if isinstance(text, str) and is_surely_too_long(text, limit, self._longest_token):
                    raise make_too_long_error(None, limit, "input")

    def _tokenize_inputs(self, spec: EmbedCommand) -> tuple[list[list[int]], int]:
        """The tokens of each input, and how many first tokens of each are not pooled."""
        prompt = self._model.pooling.get_prompt(spec.instruction)
        texts = [self._tokenize_input(spec, prompt, text) for text in spec.inputs]
        if not texts:
            raise RequestRejectedError("invalid", "there is nothing to embed", param="input")
        return texts, self._count_prompt_tokens(prompt, spec)

    def _check_dimensions(self, size: int | None) -> None:
        """Only vectors that were made for it may be cut: of others a part means nothing."""
        full, sizes = self._model.dimensions, self._model.pooling.matryoshka_sizes
        if size is None or size == full:
            return
        if sizes is None:
            text = f"this model's vectors have {full} dimensions and were not made to be cut"
            raise RequestRejectedError("invalid", text, param="dimensions")
        if sizes and size not in sizes:
            allowed = ", ".join(str(one) for one in sorted({*sizes, full}))
            raise RequestRejectedError(
                "invalid", f"dimensions is one of {allowed}", param="dimensions"
            )
        if not 1 <= size <= full:
            raise RequestRejectedError("invalid", f"dimensions is 1 to {full}", param="dimensions")

    def _count_prompt_tokens(self, prompt: str, spec: EmbedCommand) -> int:
        """How many tokens of a prompt stand before each text, where they are not to count."""
        if self._model.pooling.includes_prompt or not prompt or not _has_only_texts(spec):
            return 0
        tokenizer = self._model.tokenizer
        ids = tokenizer.encode(prompt)
        return len(ids) - int(ids[-1] in tokenizer.all_special_ids)

    def _tokenize_input(
        self, spec: EmbedCommand, prompt: str, text: str | tuple[int, ...]
    ) -> list[int]:
        limit, max_tokens = self._model.max_length, spec.max_tokens
        most = None if max_tokens is None else limit if max_tokens < 0 else min(max_tokens, limit)
        if isinstance(text, str):
            full = prompt + text
            ids = self._tokenize_text(full.lower() if self._model.pooling.lowercase else full, most)
        else:
            if spec.instruction is not None:
                message = "an instruction stands before texts; token ids have it in them"
                raise RequestRejectedError("invalid", message, param="instruction")
            allowed: int = self._model.model.config.vocab_size
            if not text or not all(0 <= token < allowed for token in text):
                raise RequestRejectedError(
                    "invalid", f"token ids are 0 to {allowed - 1}", param="input"
                )
            ids = list(text[:most])
        if len(ids) > limit:
            raise make_too_long_error(len(ids), limit, "input")
        return ids

    def _tokenize_text(self, text: str, most: int | None) -> list[int]:
        """The tokens of a text, with those that the model wants around it, ``most`` in all."""
        tokenizer = self._model.tokenizer
        ids: list[int] = tokenizer.encode(text)
        if most is None or len(ids) <= most:
            return ids
        around: int = tokenizer.num_special_tokens_to_add()
        if most <= around:
            raise RequestRejectedError(
                "invalid", f"of a text at least {around + 1} tokens stay", param="input"
            )
        shorter: list[int] = tokenizer.encode(text, truncation=True, max_length=most)
        return shorter

    def tokenize(self, order: TokenizeCommand) -> None:
        """Tokenize a text."""
        self._background_tokenizer.run(
            order.request_id,
            len(order.text),
            lambda: tokenize_text(self._model.tokenizer, self._token_bytes, order.text),
            lambda tokens: self._emit(TokensEvent(order.request_id, *tokens)),
        )

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        self._background_tokenizer.cancel(number)
        self._queue = deque(work for work in self._queue if work.command.request_id != number)

    def credit(self, number: int, tokens: int) -> None:
        """Vectors come all at once; there is nothing to hold back."""

    def step(self) -> bool:
        """One batch. False: there was nothing to do."""
        self._background_tokenizer.finish_pending()
        while self._queue and self._clock() >= self._queue[0].deadline:
            number = self._queue.popleft().command.request_id
            self._emit(RequestFailedEvent(number, "deadline", "the request's time is up"))
        if not self._queue:
            return False
        work = self._queue[0]
        if work.started_at is None:
            work.started_at = self._clock()
        batch = work.batches.popleft()
        try:
            vectors = self._compute_vectors([work.texts[i] for i in batch], work)
        except (RuntimeError, MemoryError) as error:  # out of memory, or a kernel that fails
            _log.exception("a pass of the model failed")
            self._queue.popleft()
            message = f"the local model failed: {type(error).__name__}"
            self._emit(RequestFailedEvent(work.command.request_id, "failed", message))
            return True
        work.vectors.update(zip(batch, vectors, strict=True))
        work.largest = max(work.largest, len(batch))
        if not work.batches:
            self._queue.popleft()
            self._finish_request(work, work.started_at)
        return True

    def _compute_vectors(self, texts: list[list[int]], work: _QueuedEmbedding) -> Tensor:
        encoder, recipe, spec = self._model, self._model.pooling, work.command
        longest = max(map(len, texts))
        padding = encoder.tokenizer.pad_token_id or 0
        device = encoder.model.device
        ids = torch.tensor([t + [padding] * (longest - len(t)) for t in texts], device=device)
        sizes = torch.tensor([len(t) for t in texts], device=device)
        at = torch.arange(longest, device=device)[None]
        mask = (at < sizes[:, None]).long()
        with torch.inference_mode():
            states = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state
            # At least its last token stays of each text.
            counts = mask * (at >= (sizes[:, None] - 1).clamp(max=work.prompt_tokens))
            vectors = torch.cat(
                [pool_states(states, counts, mode) for mode in recipe.pooling], dim=1
            )
            for layer in encoder.dense_layers:
                vectors = layer(vectors)
            vectors = vectors[:, : spec.dimensions]
            normalize = recipe.normalize if spec.normalize is None else spec.normalize
            return torch.nn.functional.normalize(vectors) if normalize else vectors

    def _finish_request(self, work: _QueuedEmbedding, started_at: float) -> None:
        full = torch.stack([work.vectors[i] for i in range(len(work.texts))]).cpu()
        data = full.numpy().astype("<f4").tobytes()
        self._emit(EmbeddingsEvent(work.command.request_id, 0, full.shape[1], data))
        queue, compute = started_at - work.arrived_at, self._clock() - started_at
        self._emit(
            RequestFinishedEvent(
                work.command.request_id, work.tokens, 0, queue, compute, 0.0, max_batch=work.largest
            )
        )


def _has_only_texts(spec: EmbedCommand) -> bool:
    return all(isinstance(text, str) for text in spec.inputs)
