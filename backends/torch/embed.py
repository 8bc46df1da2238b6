"""Vectors of texts, by an encoder and the pooling that its sentence-transformers files name.

Texts are sorted by length and taken together up to a budget of tokens: that wastes little on
padding and keeps each pass short. Between two passes other requests and cancellations are seen.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from backends.torch.models import Found, ModelError, load, pick_device, pick_dtype
from backends.torch.reading import Refused, too_long
from backends.torch.spec import Embed, Failed, Finished, News, Tokenize, Tokens, Vectors
from backends.torch.text import TokenBytes, cut

BUDGET = 2048
"""Tokens in one pass, padding included."""


class Recipe(Struct, frozen=True):
    """How a model's vectors are made of its last layer."""

    pooling: str = "mean"
    normalize: bool = True
    length: int | None = None


class Encoder(NamedTuple):
    """A model that gives vectors, with all that belongs to it."""

    model: Any
    tokenizer: Any
    recipe: Recipe
    length: int
    """The most tokens of one text."""

    @property
    def dimensions(self) -> int:
        """Of a whole vector."""
        size: int = self.model.config.hidden_size
        return size


def load_encoder(found: Found, device: str, dtype: str, context: int | None) -> Encoder:
    """The encoder of a folder."""
    place = pick_device(device)
    model = load(AutoModel, found, dtype=pick_dtype(dtype, place)).to(place).eval()
    tokenizer = load(AutoTokenizer, found)
    recipe = read_recipe(Path(found.source))
    limits = (recipe.length, context, getattr(model.config, "max_position_embeddings", None))
    length = min(limit for limit in (*limits, tokenizer.model_max_length) if limit)
    return Encoder(model, tokenizer, recipe, int(length))


def read_recipe(folder: Path) -> Recipe:
    """What the sentence-transformers files beside a model say. Without them: mean, normalised."""
    modules = _read(folder / "modules.json") or []
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise ModelError(f"{folder} has steps that are not served here: {', '.join(unknown)}")
    pooling = "mean"
    if "Pooling" in kinds:
        flags = _read(folder / str(kinds["Pooling"]["path"]) / "config.json") or {}
        pooling = _pooling(flags, folder)
    length = (_read(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return Recipe(pooling, not modules or "Normalize" in kinds, length)


def _pooling(flags: dict[str, Any], folder: Path) -> str:
    named = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_lasttoken": "last",
    }
    chosen = [key for key, value in flags.items() if key.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in named:
        raise ModelError(f"{folder} pools in a way that is not served here: {', '.join(chosen)}")
    return named[chosen[0]]


def _read(file: Path) -> Any:
    return msgspec.json.decode(file.read_bytes()) if file.is_file() else None


def pooled(states: Tensor, mask: Tensor, how: str) -> Tensor:
    """One vector for each row of ``states`` (rows, tokens, size); ``mask`` is 1 on its tokens."""
    states = states.float()
    weight = mask[..., None].to(states.dtype)
    if how == "mean":
        return (states * weight).sum(1) / weight.sum(1)
    if how == "max":
        return states.masked_fill(weight == 0, float("-inf")).amax(1)
    if how == "last":
        return states[torch.arange(len(states)), mask.sum(1) - 1]
    return states[:, 0]


class _Work:
    """One request: its texts in batches, longest first."""

    def __init__(self, spec: Embed, texts: list[list[int]], arrived: float) -> None:
        self.spec = spec
        self.texts = texts
        self.arrived = arrived
        self.begun: float | None = None
        self.tokens = sum(map(len, texts))
        self.vectors: dict[int, Tensor] = {}
        self.batches = deque(batched([len(ids) for ids in texts]))
        self.largest = 0

    @property
    def deadline(self) -> float:
        return float("inf") if self.spec.timeout is None else self.arrived + self.spec.timeout


def batched(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of texts of these lengths, in batches within the budget, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        # The first of a batch is its longest, and all are padded to it.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= BUDGET:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class Embedder:
    """Answers requests for vectors, a batch at a time, each request in its turn."""

    def __init__(
        self,
        encoder: Encoder,
        waiting: int,
        tell: Callable[[News], None],
        clock: Callable[[], float],
    ) -> None:
        self._encoder = encoder
        self._limit = waiting
        self._tell = tell
        self._clock = clock
        self._bytes = TokenBytes(encoder.tokenizer)
        self._queue: deque[_Work] = deque()

    @property
    def rows(self) -> int:
        """Requests in work."""
        return min(len(self._queue), 1)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return max(len(self._queue) - 1, 0)

    def submit(self, spec: Embed) -> None:
        """A new request; it is told if it can't be done."""
        try:
            if len(self._queue) > self._limit:
                raise Refused("overloaded", "the queue of the local model is full")
            whole = self._encoder.dimensions
            if spec.dimensions is not None and not 1 <= spec.dimensions <= whole:
                raise Refused("invalid", f"dimensions is 1 to {whole}", param="dimensions")
            texts = [self._ids(spec, text) for text in spec.inputs]
            if not texts:
                raise Refused("invalid", "there is nothing to embed", param="input")
        except Refused as refused:
            self._tell(refused.told(spec.job))
        else:
            self._queue.append(_Work(spec, texts, self._clock()))

    def _ids(self, spec: Embed, text: str | tuple[int, ...]) -> list[int]:
        if isinstance(text, str):
            ids: list[int] = self._encoder.tokenizer.encode((spec.instruction or "") + text)
        else:
            ids = list(text)
            known: int = self._encoder.model.config.vocab_size
            if not ids or not all(0 <= token < known for token in ids):
                raise Refused("invalid", f"token ids are 0 to {known - 1}", param="input")
        limit = self._encoder.length
        if spec.keep is not None:
            most = limit if spec.keep < 0 else min(spec.keep, limit)
            if len(ids) > most:
                # A tokenizer's closing token stays.
                ids = [
                    *ids[: most - 1],
                    *(ids[-1:] if isinstance(text, str) else ids[most - 1 : most]),
                ]
        if len(ids) > limit:
            raise too_long(len(ids), limit, "input")
        return ids

    def tokenize(self, order: Tokenize) -> None:
        """Cut a text, at once."""
        self._tell(Tokens(order.job, *cut(self._encoder.tokenizer, self._bytes, order.text)))

    def cancel(self, number: int) -> None:
        """Nobody waits for this request any more."""
        self._queue = deque(work for work in self._queue if work.spec.job != number)

    def credit(self, number: int, tokens: int) -> None:
        """Vectors come all at once; there is nothing to hold back."""

    def step(self) -> bool:
        """One batch. False: there was nothing to do."""
        while self._queue and self._clock() >= self._queue[0].deadline:
            number = self._queue.popleft().spec.job
            self._tell(Failed(number, "deadline", "the request's time is up"))
        if not self._queue:
            return False
        work = self._queue[0]
        if work.begun is None:
            work.begun = self._clock()
        batch = work.batches.popleft()
        try:
            vectors = self._vectors([work.texts[i] for i in batch], work.spec)
        except RuntimeError as error:
            self._queue.popleft()
            message = f"the local model failed: {type(error).__name__}"
            self._tell(Failed(work.spec.job, "failed", message))
            return True
        work.vectors.update(zip(batch, vectors, strict=True))
        work.largest = max(work.largest, len(batch))
        if not work.batches:
            self._queue.popleft()
            self._finish(work, work.begun)
        return True

    def _vectors(self, texts: list[list[int]], spec: Embed) -> Tensor:
        encoder = self._encoder
        longest = max(map(len, texts))
        padding = encoder.tokenizer.pad_token_id or 0
        device = encoder.model.device
        ids = torch.tensor([t + [padding] * (longest - len(t)) for t in texts], device=device)
        sizes = torch.tensor([len(t) for t in texts], device=device)
        mask = (torch.arange(longest, device=device)[None] < sizes[:, None]).long()
        with torch.inference_mode():
            states = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors = pooled(states, mask, encoder.recipe.pooling)
            if spec.dimensions is not None:
                vectors = vectors[:, : spec.dimensions]
            wanted = encoder.recipe.normalize if spec.normalize is None else spec.normalize
            return torch.nn.functional.normalize(vectors) if wanted else vectors

    def _finish(self, work: _Work, begun: float) -> None:
        whole = torch.stack([work.vectors[i] for i in range(len(work.texts))]).cpu()
        data = whole.numpy().astype("<f4").tobytes()
        self._tell(Vectors(work.spec.job, 0, whole.shape[1], data))
        queue, compute = begun - work.arrived, self._clock() - begun
        self._tell(Finished(work.spec.job, work.tokens, 0, queue, compute, 0.0, batch=work.largest))
