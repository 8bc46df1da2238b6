"""Classification of texts with a model that has a head for its labels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.torch.embeddings import EncoderInput
from backends.torch.ipc import ClassesEvent, ClassifyCommand
from backends.torch.loader import ModelLocation
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.rerank import compute_logits, load_classification_model
from backends.torch.settings import TorchSettings


class TextClassifier(NamedTuple):
    """A loaded classifier."""

    model: Any
    tokenizer: Any
    max_length: int
    """Maximum tokens of one input."""

    @property
    def dimensions(self) -> None:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return

    @property
    def output(self) -> str:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return "classes"

    @property
    def commands(self) -> tuple[type, ...]:
        """See ``backends.torch.embeddings.TextEncoder``."""
        return (ClassifyCommand,)

    def tokenize(self, command: ClassifyCommand) -> list[EncoderInput]:
        """See ``backends.torch.embeddings.TextEncoder``. Raises RequestRejectedError."""
        return [EncoderInput(self._tokenize_input(command, one)) for one in command.inputs]

    def _tokenize_input(self, command: ClassifyCommand, one: str | tuple[int, ...]) -> list[int]:
        if isinstance(one, str):
            ids: list[int] = self.tokenizer.encode(one, add_special_tokens=command.special_tokens)
        else:
            ids = list(one)
            if any(token >= len(self.tokenizer) for token in ids):
                text = f"a token id is below {len(self.tokenizer)}"
                raise RequestRejectedError("invalid", text, param="input")
        wanted, limit = command.max_tokens, self.max_length
        if wanted is not None:
            ids = ids[: limit if wanted < 0 else wanted]
        if not ids:
            raise RequestRejectedError("invalid", "an input has no tokens", param="input")
        if len(ids) > limit:
            raise make_too_long_error(len(ids), limit, "input")
        return ids

    def compute(self, batch: Sequence[EncoderInput]) -> Tensor:
        """See ``backends.torch.embeddings.TextEncoder``: the logits of each input."""
        return compute_logits(self, batch)

    def finish(self, command: ClassifyCommand, rows: Tensor) -> ClassesEvent:
        """See ``backends.torch.embeddings.TextEncoder``."""
        numbers = rows if command.activation is False else self._apply_activation(rows)
        names = self.model.config.id2label
        labels = tuple(str(names[i]) for i in rows.argmax(1).tolist())
        return ClassesEvent(command.request_id, labels, tuple(map(tuple, numbers.tolist())))

    def _apply_activation(self, logits: Tensor) -> Tensor:
        """As transformers' pipeline does: classes that exclude each other have shares of 1."""
        match self.model.config.problem_type:
            case "regression":
                return logits
            case "multi_label_classification":
                return logits.sigmoid()
            case _:
                return logits.sigmoid() if logits.shape[1] == 1 else torch.softmax(logits, 1)


def load_classifier(location: ModelLocation, settings: TorchSettings) -> TextClassifier:
    """Load a classifier. Raises ModelError."""
    return TextClassifier(*load_classification_model(location, settings))
