"""Writes recordings: redacts and encodes finished requests, on a background thread.

Requests wait in a queue that is bounded in number and bytes. If it is full, or the disk is,
requests are dropped and counted; responses never wait. ``recording_folder`` keeps the files.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from gateway.config.schema import RecordConfig
from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.log_rate import WARNING_INTERVAL
from gateway.observability.record import RequestRecord
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedLoss,
    RecordedRequest,
    RecordedTiming,
    RecordedToolCall,
    RecordedUsage,
    encode_recorded_request,
)
from gateway.observability.recording_folder import CLEANUP_INTERVAL, RecordingFolder
from gateway.observability.redaction import Redactor
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import StreamBroken
from protocols.core.events import Event
from protocols.core.json_text import JsonDecoder, decode_json

log = logging.getLogger("interlingua")

MAX_BODY: Final = 4 << 20
"""The largest body that is recorded, in bytes, and the largest stream."""
_MAX_WAITING: Final = 10_000
_MAX_WAITING_BYTES: Final = 128 << 20
_MAX_WRITE: Final = 256 << 10
"""Bytes of lines that are encoded before they are written."""


class RecordingPolicy(Struct, frozen=True, eq=False):
    """How the requests of a model or route are recorded."""

    config: RecordConfig
    redactor: Redactor | None
    """None if bodies are not redacted."""


class CapturedRequest(Struct, eq=False, kw_only=True):
    """A finished request, as the pipeline captured it. Nothing of it changes any more."""

    policy: RecordingPolicy
    record: RequestRecord
    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str]
    body: bytes | None = None
    """None if bodies are not recorded."""
    body_size: int = 0
    response: bytes | None = None
    """The body of a response that was not streamed."""
    response_size: int = 0
    chunks: Sequence[tuple[float, bytes]] = ()
    """The pieces of a stream."""
    is_truncated: bool = False
    events: Sequence[Event] = ()

    @property
    def memory_size(self) -> int:
        """About how many bytes it takes while it waits."""
        body = 0 if self.body is None else len(self.body)
        return 2000 + body + self.response_size + 300 * (len(self.chunks) + len(self.events))


def build_recorded_request(captured: CapturedRequest) -> RecordedRequest:
    """The record to write, redacted as its policy says."""
    record, usage = captured.record, captured.record.usage
    recorded = RecordedRequest(
        id=record.id,
        at=record.started_at,
        protocol=record.protocol,
        method=captured.method,
        path=captured.path,
        query=captured.query,
        operation=record.operation,
        headers={**captured.headers},
        model=record.model,
        version=record.version,
        backend=record.backend,
        worker=record.worker,
        key=record.key,
        rule=record.rule,
        split=record.split,
        sticky=record.sticky,
        fallback_from=record.fallback_from,
        stream=record.stream,
        request_size=captured.body_size,
        response_size=captured.response_size,
        events_truncated=captured.is_truncated,
        status=record.status,
        outcome=record.outcome,
        error=record.error,
        timing=RecordedTiming(
            record.first_byte, record.first_token, record.duration, record.overhead
        ),
        usage=None
        if usage is None
        else RecordedUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.source,
            usage.cached_tokens,
            usage.reasoning_tokens,
        ),
        losses=[
            RecordedLoss(loss.field, loss.reason, loss.detail)
            for loss in record.unsupported_parameters
        ],
    )
    redactor = captured.policy.redactor
    if captured.policy.config.bodies != "none":
        _add_bodies(recorded, captured)
    if redactor is not None:
        _redact_labels(recorded, redactor)
    return recorded


def _add_bodies(recorded: RecordedRequest, captured: CapturedRequest) -> None:
    """Add request, response, events and answer."""
    redactor, places = captured.policy.redactor, recorded.redacted
    if captured.body:
        body = _read_body("request", captured.body, redactor, places)
        recorded.request, recorded.request_text = body
    if captured.response:
        body = _read_body("response", captured.response, redactor, places)
        recorded.response, recorded.response_text = body
    if redactor is not None:
        recorded.events = [(round(at, 6), len(data)) for at, data in captured.chunks]
    elif captured.chunks:
        recorded.events = [
            (round(at, 6), data.decode("utf-8", "replace")) for at, data in captured.chunks
        ]
    if captured.events:
        answer = recorded.answer = fold_answer(captured.events)
        if redactor is not None and not redactor.is_clean(msgspec.json.encode(answer)):
            redacted = redactor.redact_answer(msgspec.to_builtins(answer), places)
            try:
                recorded.answer = msgspec.convert(redacted, RecordedAnswer)
            except msgspec.ValidationError:  # a field that is no string, such as all choices
                recorded.answer = None


def _read_body(
    part: str, body: bytes, redactor: Redactor | None, places: list[str]
) -> tuple[Any, str]:
    """A body as JSON, or as text. Text that is no JSON has no fields to redact: its size remains.

    JSON in which nothing is redacted is written as it is, but on one line.
    """
    if len(body) > MAX_BODY:
        return None, ""
    try:
        if not body.isascii():
            body.decode()
        if redactor is not None and not redactor.is_clean(body):
            return redactor.redact(part, decode_json(body), places), ""
        _check_json(body)
    except ValueError:  # msgspec's error is one
        if redactor is not None:
            return None, f"[redacted:{len(body)} bytes]"
        return None, body.decode("utf-8", "replace")
    if b"\n" in body or b"\r" in body:  # only between tokens: strings have them escaped
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    return Raw(body), ""


_check_json: Final = JsonDecoder(Raw).decode
"""Raises DecodeError unless it is JSON."""


def fold_answer(events: Sequence[Event]) -> RecordedAnswer:
    """The answer that these events make, also if they stop early. It has no echo of the prompt."""
    fold, remaining = ResponseAccumulator(), iter(events)
    while True:
        try:
            fold.add(remaining)
        except StreamBroken:
            continue  # without the event that does not fit
        break
    response = fold.build_partial()
    choices = [
        RecordedChoice(
            text=choice.text[choice.echo_length :],
            reasoning=choice.reasoning,
            refusal=choice.refusal,
            tool_calls=[RecordedToolCall(call.name, call.arguments) for call in choice.tool_calls],
            finish_reason=None if choice.index in fold.open_choices else choice.finish_reason,
        )
        for choice in response.choices
    ]
    return RecordedAnswer(choices, [[*one] for one in response.embeddings], response.scores)


def _redact_labels(recorded: RecordedRequest, redactor: Redactor) -> None:
    """Redact what else a client wrote."""
    places = recorded.redacted
    recorded.id = redactor.redact("id", recorded.id, places)  # it may be the client's
    recorded.headers = redactor.redact("headers", recorded.headers, places)
    recorded.path = redactor.redact("path", recorded.path, places)
    recorded.model = redactor.redact("model", recorded.model, places)
    for loss in recorded.losses:
        loss.parameter = redactor.redact("losses", loss.parameter, places)
        loss.detail = redactor.redact("losses", loss.detail, places)


class RequestRecorder:
    """Writes captured requests from a background thread, which starts with the first one."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` gives Unix seconds."""
        self._now = now
        self._folders: dict[str, RecordingFolder] = {}
        self._writer = BackgroundWriter(
            "recording", _MAX_WAITING, self._write_batch, max_idle=CLEANUP_INTERVAL
        )
        self._is_started = False
        self._rejected = 0
        self._enqueued_bytes = 0
        """Changed by the event loop's thread only, as ``_rejected``; the next by the writer's."""
        self._handled_bytes = 0
        self._written = 0
        self._logged_dropped = 0
        self._logged_at = float("-inf")
        """When dropped requests were logged last."""

    def create_policy(self, config: RecordConfig) -> RecordingPolicy:
        """The policy of a model or route; folders keep the limits of the last one."""
        folder = self._folders.get(config.to)
        if folder is None:
            folder = RecordingFolder(config.to, self._now)
            self._folders = {**self._folders, config.to: folder}  # the writer's thread reads it
        folder.configure(config)
        redactor = Redactor(config.redact) if config.bodies == "redacted" else None
        return RecordingPolicy(config, redactor)

    def start(self) -> None:
        """Start the thread, unless it runs or nothing is to be recorded."""
        if not self._is_started and self._folders:
            self._is_started = True
            self._writer.start()

    def record_request(self, captured: CapturedRequest) -> None:
        """Queue a request, unless the queue is full."""
        size = captured.memory_size
        if self.measure_waiting() + size > _MAX_WAITING_BYTES:
            self._rejected += 1
            return
        dropped = self._writer.dropped
        self._writer.enqueue(captured)
        if self._writer.dropped == dropped:
            self._enqueued_bytes += size
        self.start()

    def measure_waiting(self) -> int:
        """About how many bytes of requests wait to be written."""
        return self._enqueued_bytes - self._handled_bytes

    def count_written(self) -> int:
        """The number of requests that were written."""
        return self._written

    def count_dropped(self) -> int:
        """The number of requests that were drawn but not written."""
        return self._rejected + self._writer.dropped

    def close(self, within: float) -> None:
        """Write the queued requests within ``within`` seconds, and close the files."""
        if not self._writer.close(within):
            log.warning("recording: the last requests were not written")
            return
        for folder in self._folders.values():
            folder.close()
        self._log_dropped()

    def _write_batch(self, batch: Sequence[CapturedRequest]) -> int:
        """Write a batch; returns how many requests were dropped."""
        dropped = 0
        by_folder = dict[str, list[CapturedRequest]]()
        for captured in batch:
            by_folder.setdefault(captured.policy.config.to, []).append(captured)
        for path, requests in by_folder.items():
            dropped += self._write_requests(path, requests)
        for folder in self._folders.values():
            folder.clean_up()
        is_failing = any(folder.failed_at is not None for folder in self._folders.values())
        if not is_failing and self._is_long_ago(self._logged_at):
            self._log_dropped()
        return dropped

    def _is_long_ago(self, time: float) -> bool:
        """Whether it may be logged again: a file that can't grow takes short lines now and then."""
        return abs(self._now() - time) >= WARNING_INTERVAL

    def _write_requests(self, path: str, requests: Sequence[CapturedRequest]) -> int:
        """Write requests to a folder; returns how many were dropped."""
        dropped = size = 0
        lines = list[bytes]()
        for number, captured in enumerate(requests, 1):
            self._handled_bytes += captured.memory_size
            try:
                line = encode_recorded_request(build_recorded_request(captured))
            except Exception:
                log.exception("request %s can't be recorded", captured.record.id)
                dropped += 1
            else:
                lines.append(line)
                size += len(line)
            if lines and (size >= _MAX_WRITE or number == len(requests)):
                dropped += self._write_lines(path, lines)
                lines, size = [], 0
        return dropped

    def _write_lines(self, path: str, lines: Sequence[bytes]) -> int:
        folder = self._folders[path]
        try:
            folder.write_lines(b"".join(lines))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            folder.warnings.add("requests are not recorded in %s for now: %s", path, reason)
            folder.failed_at = self._now()
            return len(lines)
        if folder.failed_at is not None and self._is_long_ago(folder.failed_at):
            log.warning("requests are recorded in %s again", path)
            folder.failed_at = None
        self._written += len(lines)
        return 0

    def _log_dropped(self) -> None:
        dropped = self.count_dropped()
        if more := dropped - self._logged_dropped:
            self._logged_dropped, self._logged_at = dropped, self._now()
            log.warning("recording: %d requests were dropped", more)
