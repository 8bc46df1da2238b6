"""Runs the requests of an encoder: embeddings, reranking, classification.

The inputs of all requests are batched by length up to a token budget, which wastes little on
padding and keeps each forward pass short. Between passes, other requests and cancellations are
handled.
"""

import bisect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backends.torch.detokenizer import TokenBytes, split_texts
from backends.torch.embeddings import MAX_BATCH_TOKENS, EncoderCommand, EncoderInput, TextEncoder
from backends.torch.ipc import (
    DetokenizeCommand,
    DetokenizedEvent,
    EngineEvent,
    EngineStats,
    FailureKind,
    RequestFailedEvent,
    RequestFinishedEvent,
    RerankCommand,
    TokenizeCommand,
    TokensEvent,
)
from backends.torch.rejection import RequestRejectedError, make_too_long_error
from backends.torch.tokenization import (
    BackgroundTokenizer,
    detokenize_ids,
    is_surely_too_long,
    measure_longest_token,
)

_log = logging.getLogger(__name__)


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
