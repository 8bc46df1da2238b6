"""Reranking with a cross-encoder: a classifier with one label, which reads a query and a document.

An embedding model reranks, too: by the cosine similarity of its vectors (``embeddings``).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from backends.torch.embeddings import EncoderInput, TextEncoder, count_positions, pad_inputs
from backends.torch.fused_layers import prepack_linears
from backends.torch.ipc import RerankCommand, ScoresEvent
from backends.torch.loader import (
    ModelLocation,
    load_pretrained,
    load_weights,
    pick_device,
    pick_dtype,
)
from backends.torch.model_files import ModelError, read_model_config
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.settings import TorchSettings

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda values: values,
    "Sigmoid": torch.sigmoid,
}


class CrossEncoder(NamedTuple):
    """A loaded cross-encoder."""

    model: Any
    tokenizer: Any
    max_length: int
    """Maximum tokens of a query and its document together."""
    activation: Callable[[Tensor], Tensor]
    """Applied to the model's logit."""

    @property
    def dimensions(self) -> None:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return

    @property
    def output(self) -> str:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return "scores"

    @property
    def commands(self) -> tuple[type, ...]:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return (RerankCommand,)

    def tokenize(self, command: RerankCommand) -> list[EncoderInput]:
        """One input for each document, with its query. Raises RequestRejectedError."""
        queries = command.queries
        if len(queries) == 1:
            queries *= len(command.documents)
        pairs = zip(queries, command.documents, strict=True)
        return [self._tokenize_pair(command, query, document) for query, document in pairs]

    def _tokenize_pair(self, command: RerankCommand, query: str, document: str) -> EncoderInput:
        wanted, limit = command.max_tokens, self.max_length
        options: dict[str, Any] = {}
        if wanted is not None:
            length = limit if wanted < 0 else min(wanted, limit)
            options = {"truncation": "only_second", "max_length": length}
        try:
            encoded = self.tokenizer(query, document, **options)
        except Exception as error:  # the tokenizers library raises this class itself
            message = "the query leaves no room for a document"
            raise RequestRejectedError("invalid", message, param="query") from error
        ids = encoded["input_ids"]
        if len(ids) > limit or (wanted is not None and len(ids) > options["max_length"]):
            raise make_too_long_error(len(ids), limit, "documents")
        return EncoderInput(ids, type_ids=encoded.get("token_type_ids"))

    def compute(self, batch: Sequence[EncoderInput]) -> Tensor:
        """See ``backends.torch.embeddings.TextEncoder``: one score for each input."""
        return self.activation(compute_logits(self, batch))

    def finish(self, command: RerankCommand, rows: Tensor) -> ScoresEvent:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return ScoresEvent(command.request_id, tuple(rows[:, 0].tolist()))


def load_cross_encoder(location: ModelLocation, settings: TorchSettings) -> CrossEncoder:
    """Load a cross-encoder. Raises ModelError."""
    folder = Path(location.source)
    activation = read_activation(read_model_config(folder))
    model, tokenizer, max_length = load_classification_model(location, settings)
    if model.config.num_labels != 1:
        raise ModelError(
            f"{folder}: a model that reranks has one label, and this one has "
            f"{model.config.num_labels}"
        )
    return CrossEncoder(model, tokenizer, max_length, activation)


def load_classification_model(
    location: ModelLocation, settings: TorchSettings
) -> tuple[Any, Any, int]:
    """A model with a head for labels, its tokenizer and maximum tokens. Raises ModelError."""
    device = pick_device(settings.device)
    model = load_weights(
        AutoModelForSequenceClassification, location, device, pick_dtype(settings.dtype, device)
    )
    prepack_linears(model)
    tokenizer = load_pretrained(AutoTokenizer, location)
    limits = (settings.context, count_positions(model), tokenizer.model_max_length)
    return model, tokenizer, int(min(one for one in limits if one))


def compute_logits(encoder: TextEncoder, batch: Sequence[EncoderInput]) -> Tensor:
    """The logits of each input, of a model with a head for labels."""
    ids, mask, type_ids = pad_inputs(batch, encoder)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in encoder.tokenizer.model_input_names:
        inputs["token_type_ids"] = type_ids
    with torch.inference_mode():
        logits: Tensor = encoder.model(**inputs).logits.float()
    return logits


def read_activation(config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The activation that sentence-transformers applies to the logit: a sigmoid if not named.

    Raises ModelError for another one. Source: sentence-transformers 5, ``CrossEncoder``.
    """
    options = config.get("sentence_transformers")
    name = options.get("activation_fn") if isinstance(options, dict) else None
    name = str(name or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    kind = name.rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"the activation {name} of this model is not supported; known: {known}")
    return _ACTIVATIONS[kind]
