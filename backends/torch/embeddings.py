"""An encoder of texts, with the pooling configuration of its sentence-transformers files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer

from backends.torch.fused_layers import prepack_linears
from backends.torch.ipc import (
    ClassifyCommand,
    EmbedCommand,
    EmbeddingsEvent,
    EngineEvent,
    RerankCommand,
    ScoresEvent,
)
from backends.torch.loader import (
    ModelLocation,
    load_pretrained,
    load_weights,
    pick_device,
    pick_dtype,
)
from backends.torch.model_files import read_model_config
from backends.torch.pooling import DenseLayer, PoolingConfig, pool_states, read_pooling_config
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.settings import TorchSettings

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


def _has_only_texts(command: EmbedCommand) -> bool:
    return all(isinstance(text, str) for text in command.inputs)
