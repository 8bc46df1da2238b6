"""Writes recordings: redacts, encodes, rotates, compresses and removes, on a background thread.

Requests wait in a queue that is bounded in number and bytes. If it is full, or the disk is,
requests are dropped and counted; responses never wait. Each line is written whole, so that a
process that is killed leaves a readable file. Each process writes files of its own, which it holds
locked: the others compress and remove only what nobody writes to.
"""

import fcntl
import gzip
import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from gateway.config.schema import RecordConfig
from gateway.observability.background_writer import BackgroundWriter
from gateway.observability.record import RequestRecord
from gateway.observability.recording import (
    COMPRESSED_SUFFIX,
    PLAIN_SUFFIX,
    RecordedAnswer,
    RecordedChoice,
    RecordedLoss,
    RecordedRequest,
    RecordedTiming,
    RecordedToolCall,
    RecordedUsage,
    encode_recorded_request,
)
from gateway.observability.redaction import Redactor
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    ReasoningDelta,
    RefusalDelta,
    RelevanceScore,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)

log = logging.getLogger("interlingua")

MAX_BODY: Final = 4 << 20
"""The largest body that is recorded, in bytes, and the largest stream."""
_MAX_WAITING: Final = 10_000
_MAX_WAITING_BYTES: Final = 128 << 20
_MAX_FILE_SIZE: Final = 64 << 20
_FILES_PER_FOLDER: Final = 8
"""A file is at most this part of the folder's limit."""
_MAX_FILE_AGE: Final = 3600.0
_MAX_WRITE: Final = 256 << 10
"""Bytes of lines that are encoded before they are written."""
_CLEANUP_INTERVAL: Final = 60.0
_ABANDONED_AFTER: Final = 60.0
"""Seconds after the last write from which on an unlocked file belongs to no process."""
_COMPRESSION_LEVEL: Final = 1
_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_FILE_NAME: Final = re.compile(r"interlingua-\d{8}T\d{6}Z-[\d-]+\.jsonl(?:\.gz(?:\.part)?)?")


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


# From a captured request to a line.


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
            return redactor.redact(part, msgspec.json.decode(body), places), ""
        _check_json(body)
    except (ValueError, RecursionError):  # msgspec's error is one
        if redactor is not None:
            return None, f"[redacted:{len(body)} bytes]"
        return None, body.decode("utf-8", "replace")
    if b"\n" in body or b"\r" in body:  # only between tokens: strings have them escaped
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    return Raw(body), ""


_check_json: Final = msgspec.json.Decoder(Raw).decode
"""Raises DecodeError unless it is JSON."""


def fold_answer(events: Sequence[Event]) -> RecordedAnswer:
    """The answer that these events make, also if they stop early."""
    answer, choices = RecordedAnswer(), dict[int, RecordedChoice]()
    texts = dict[int, list[str]]()
    for event in events:
        if type(event) is TextDelta:
            pieces = texts.get(event.index)
            if pieces is None:
                pieces = texts[event.index] = []
                choices.setdefault(event.index, RecordedChoice())
            pieces.append(event.text)
        elif type(event) is ChoiceEnd:
            choice = choices.get(event.index) or choices.setdefault(event.index, RecordedChoice())
            choice.finish_reason = event.finish_reason
        elif type(event) not in _UNRECORDED_EVENTS:
            _add_rare_event(event, answer, choices)
    for index, pieces in texts.items():
        choices[index].text = "".join(pieces)
    answer.choices = [choices[index] for index in sorted(choices)]
    return answer


_UNRECORDED_EVENTS: Final = frozenset(
    {StreamStart, StreamEnd, Usage, ResponseMetadata, ResponseExtra, Timing}
)


def _add_rare_event(
    event: Event, answer: RecordedAnswer, choices: dict[int, RecordedChoice]
) -> None:
    match event:
        case Embedding():
            answer.embeddings.append([*event.values])
        case RelevanceScore():
            answer.scores.append(event.score)
        case ReasoningDelta() | RefusalDelta() | ToolCallStart() | ToolCallDelta():
            choice = choices.setdefault(event.index, RecordedChoice())
            match event:
                case ReasoningDelta(text):
                    choice.reasoning += text
                case RefusalDelta(text):
                    choice.refusal += text
                case ToolCallStart():
                    choice.tool_calls.append(RecordedToolCall(event.name))
                case ToolCallDelta():
                    if event.call_index < len(choice.tool_calls):
                        choice.tool_calls[event.call_index].arguments += event.text
        case _:
            pass


def _redact_labels(recorded: RecordedRequest, redactor: Redactor) -> None:
    """Redact what else a client wrote."""
    places = recorded.redacted
    recorded.headers = redactor.redact("headers", recorded.headers, places)
    recorded.path = redactor.redact("path", recorded.path, places)
    recorded.model = redactor.redact("model", recorded.model, places)
    for loss in recorded.losses:
        loss.parameter = redactor.redact("losses", loss.parameter, places)
        loss.detail = redactor.redact("losses", loss.detail, places)


# Files.


class RecordingFolder:
    """The files of one folder, of which this process writes one. For the writer's thread."""

    def __init__(self, path: str, now: Callable[[], float]) -> None:
        """``now`` gives Unix seconds."""
        self.is_failing = False
        """Whether the last write failed."""
        self._path = Path(path)
        self._now = now
        self._file: _LockedFile | None = None
        self._retention = float("inf")
        self._max_size = 0
        self._cleaned_at = float("-inf")

    def configure(self, config: RecordConfig) -> None:
        """Use these limits from now on."""
        self._retention, self._max_size = config.retention, config.size

    def write_lines(self, data: bytes) -> None:
        """Append whole lines. Raises OSError; nothing of them is in the file then."""
        if self._file is not None and self._file.is_removed:
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
            self._file = _LockedFile.create(self._path, self._now())
        try:
            self._file.append(data)
        except OSError:
            self._file.close()
            self._file = None
            raise
        limit = min(_MAX_FILE_SIZE, self._max_size // _FILES_PER_FOLDER)
        if self._file.size >= limit:
            self._rotate()

    def clean_up(self) -> None:
        """Rotate a file that is old, and remove what is too old or too much. Never raises."""
        now = self._now()
        if abs(now - self._cleaned_at) < _CLEANUP_INTERVAL:
            return
        if self._file is not None and now - self._file.created_at >= _MAX_FILE_AGE:
            self._rotate()
        else:
            self._remove_files()

    def close(self) -> None:
        """Close the file. It stays as it is: the next process compresses it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it stays as it is
                _compress_file(file.path)
            file.close()
        self._remove_files()

    def _remove_files(self) -> None:
        self._cleaned_at = self._now()
        with suppress(OSError):
            for path in sorted(self._list_files()):
                self._remove_if_old(path)
            sizes = {path: path.stat().st_size for path in sorted(self._list_files())}
            total = sum(sizes.values())
            for path, size in sizes.items():
                if total <= self._max_size:
                    break
                if _remove_file(path):
                    total -= size

    def _list_files(self) -> Iterator[Path]:
        for path in self._path.iterdir():
            if _FILE_NAME.fullmatch(path.name) and (self._file is None or path != self._file.path):
                yield path

    def _remove_if_old(self, path: Path) -> None:
        """Remove a file after its time; compress what a process left behind."""
        try:
            age = self._now() - path.stat().st_mtime
        except FileNotFoundError:  # another process was faster
            return
        if age >= self._retention:
            _remove_file(path)
        elif age >= _ABANDONED_AFTER and not path.name.endswith(COMPRESSED_SUFFIX):
            if path.name.endswith(PLAIN_SUFFIX):
                with _lock_file(path) as is_locked:
                    if is_locked:
                        _compress_file(path)
            else:
                path.unlink(missing_ok=True)


class _LockedFile:
    """A new file that this process writes to."""

    def __init__(self, path: Path, descriptor: int, now: float) -> None:
        self.path = path
        self.size = 0
        self.created_at = now
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: Path, now: float) -> "_LockedFile":
        """Create a file with a name that no other has. Raises OSError."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        for number in itertools.count():
            name = f"interlingua-{stamp}-{os.getpid()}{f'-{number}' if number else ''}"
            path = folder / f"{name}{PLAIN_SUFFIX}"
            if path.exists() or (folder / f"{name}{COMPRESSED_SUFFIX}").exists():
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(path, descriptor, now)
        raise AssertionError  # it counts without end

    @property
    def is_removed(self) -> bool:
        """Whether somebody removed the file."""
        return os.fstat(self._descriptor).st_nlink == 0

    def append(self, data: bytes) -> None:
        """Append all of it, or nothing and raise OSError."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        """Close and unlock it."""
        with suppress(OSError):
            os.close(self._descriptor)


@contextmanager
def _lock_file(path: Path) -> Iterator[bool]:
    """Lock a file meanwhile; False if a process writes to it, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_file(path: Path) -> bool:
    """Remove a file unless a process writes to it. Returns whether it is gone. Raises OSError."""
    if path.name.endswith(PLAIN_SUFFIX):
        with _lock_file(path) as is_locked:
            if not is_locked:
                return False
            path.unlink(missing_ok=True)
    else:
        path.unlink(missing_ok=True)
    return True


def _compress_file(path: Path) -> None:
    """Replace a file by its compressed form, which appears whole. Raises OSError.

    An empty file is removed. The caller has locked it.
    """
    if not path.stat().st_size:
        path.unlink()
        return
    target = path.with_name(path.name + ".gz")
    part = path.with_name(path.name + ".gz.part")
    times = path.stat()
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
        with (
            path.open("rb") as source,
            os.fdopen(descriptor, "wb") as raw,
            gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, raw) as compressed,
        ):
            shutil.copyfileobj(source, compressed, 1 << 20)
        os.utime(part, (times.st_atime, times.st_mtime))
        part.rename(target)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    path.unlink()


# The writer.


class RequestRecorder:
    """Writes captured requests from a background thread, which starts with the first one."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` gives Unix seconds."""
        self._now = now
        self._folders: dict[str, RecordingFolder] = {}
        self._writer = BackgroundWriter(
            "recording", _MAX_WAITING, self._write_batch, max_idle=_CLEANUP_INTERVAL
        )
        self._is_started = False
        self._rejected = 0
        self._enqueued_bytes = 0
        """Changed by the event loop's thread only, as ``_rejected``; the next by the writer's."""
        self._handled_bytes = 0
        self._written = 0
        self._logged_dropped = 0

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
        if self._enqueued_bytes - self._handled_bytes + size > _MAX_WAITING_BYTES:
            self._rejected += 1
            return
        dropped = self._writer.dropped
        self._writer.enqueue(captured)
        if self._writer.dropped == dropped:
            self._enqueued_bytes += size
        self.start()

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
        if self.count_dropped() == self._logged_dropped:
            return dropped
        if not any(folder.is_failing for folder in self._folders.values()):
            self._log_dropped()
        return dropped

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
            if not folder.is_failing:
                reason = error.strerror or type(error).__name__
                log.warning("requests are not recorded in %s for now: %s", path, reason)
            folder.is_failing = True
            return len(lines)
        if folder.is_failing:
            log.warning("requests are recorded in %s again", path)
        folder.is_failing = False
        self._written += len(lines)
        return 0

    def _log_dropped(self) -> None:
        dropped = self.count_dropped()
        if more := dropped - self._logged_dropped:
            self._logged_dropped = dropped
            log.warning("recording: %d requests were dropped", more)
