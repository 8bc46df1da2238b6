"""Recordings: requests with their responses, one JSON object a line.

A recording is a folder of files, or one of them. A serving process appends to its ``*.jsonl`` file
and compresses it to ``*.jsonl.gz`` once it is full. Each line is a ``RecordedRequest``. Readers
ignore fields that they don't know, and skip lines that are no record: the last one of a killed
process may be cut off. The same lines are written by replays.
"""

import errno
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.observability.record import RequestOutcome
from protocols.core.events import FinishReason
from protocols.core.json_text import JsonDecoder

FORMAT_VERSION: Final = 1
PLAIN_SUFFIX: Final = ".jsonl"
COMPRESSED_SUFFIX: Final = ".jsonl.gz"
MAX_LINE: Final = 256 << 20
"""Bytes of a line that is read, after decompression; a longer one is skipped."""
MAX_DECOMPRESSED: Final = 256 << 20
"""Bytes of a compressed file after decompression: four times what a gateway writes to a file."""
MAX_LINES: Final = 500_000
"""Lines of a compressed file: a gateway's file has fewer, even if each were of 140 bytes."""
_TOO_LARGE: Final = (
    "it decompresses to more than a gateway writes to a file; decompress it first if it is yours"
)
_SKIPPED_AT_ONCE: Final = 1 << 20


class RecordedToolCall(Struct, omit_defaults=True):
    """A tool call of an answer."""

    name: str
    arguments: str = ""
    """JSON text, as the model wrote it."""


class RecordedChoice(Struct, omit_defaults=True):
    """One choice of an answer, in no protocol's form."""

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    tool_calls: list[RecordedToolCall] = []
    finish_reason: FinishReason | None = None
    """None if the choice did not end."""


class RecordedAnswer(Struct, omit_defaults=True):
    """What the model answered, whichever protocol the client speaks."""

    choices: list[RecordedChoice] = []
    embeddings: list[list[float]] = []
    scores: list[float] = []
    """One for each document of a rerank request, in their order."""


class RecordedTiming(Struct, frozen=True, omit_defaults=True):
    """Seconds since the request came; see ``RequestRecord``."""

    first_byte: float | None = None
    first_token: float | None = None
    duration: float = 0.0
    overhead: float | None = None


class RecordedUsage(Struct, frozen=True, omit_defaults=True):
    """Token counts; see ``protocols.core.events.Usage``."""

    prompt_tokens: int
    completion_tokens: int
    source: str
    """Who counted: ``worker``, ``counted`` or ``estimated``."""
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class RecordedLoss(Struct, omit_defaults=True):
    """A parameter that the target did not get as the client sent it."""

    parameter: str
    reason: str
    detail: str = ""


class RecordedRequest(Struct, omit_defaults=True, kw_only=True):
    """One request and its response: a line of a recording."""

    format: int = msgspec.field(default_factory=lambda: FORMAT_VERSION)
    """The version of this format; written always."""
    id: str
    at: float
    """Unix time in seconds."""
    protocol: str = ""
    """The client's protocol."""
    method: str = ""
    path: str = ""
    """Without the query."""
    query: str = ""
    """The version of the API, if the query has one; nothing else of the query."""
    operation: str = ""
    """The kind of inference: ``chat``, ``completion``, ``embedding`` and so on."""
    headers: dict[str, str] = {}
    """Some of the request's headers, by lower-case name; never credentials."""
    model: str = ""
    version: str = ""
    backend: str = ""
    worker: str = ""
    """The URL of the worker that answered, if a pool did."""
    key: str = ""
    """The name of the API key."""
    rule: str = ""
    split: str = ""
    sticky: str = ""
    fallback_from: str = ""
    stream: bool = False
    request: Any = None
    """The body of the request, if it is JSON and bodies are recorded."""
    request_text: str = ""
    """The body, if it is some other text."""
    request_size: int = 0
    """The bytes of the body."""
    response: Any = None
    """The body of a response that was not streamed, if it is JSON."""
    response_text: str = ""
    response_size: int = 0
    """The bytes that were sent to the client."""
    events: list[tuple[float, str | int]] = []
    """Of a stream: when a piece of it was sent, in seconds since the request came, and its text,
    or its size in bytes if bodies are redacted."""
    events_truncated: bool = False
    """Whether the stream was too long to be recorded to its end."""
    answer: RecordedAnswer | None = None
    status: int = 0
    """The HTTP status; 0 if the client got none."""
    outcome: RequestOutcome = msgspec.field(default_factory=lambda: "ok")
    """Written always, as ``format``."""
    error: str = ""
    timing: RecordedTiming = RecordedTiming()
    usage: RecordedUsage | None = None
    losses: list[RecordedLoss] = []
    redacted: list[str] = []
    """The first places where redaction replaced something, such as ``request.messages[0]``."""
    replay_of: str = ""
    """The id of the request that this is a replay of."""
    replay_target: str = ""
    """Where it was sent to, as ``model@version``."""
    replay_run: str = ""
    """The run that sent it to several targets at the same time."""


_encoder: Final = msgspec.json.Encoder()
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_decoder: Final = JsonDecoder(RecordedRequest)


def encode_recorded_request(recorded: RecordedRequest) -> bytes:
    """The line of a recording, with its newline."""
    return _encoder.encode(recorded) + b"\n"


class RecordingReader:
    """Reads the requests of a recording, file by file; an iterator over them.

    ``path`` is a folder or a file. Raises OSError, also for a compressed file that decompresses to
    more than MAX_DECOMPRESSED bytes or MAX_LINES lines.
    """

    def __init__(self, path: Path) -> None:
        self.skipped_lines = 0
        """Lines that are no record of this format: cut off, or damaged."""
        self.files = list_recording_files(path)

    def __iter__(self) -> Iterator[RecordedRequest]:
        for path in self.files:
            for line in self._read_lines(path):
                try:
                    recorded = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.skipped_lines += 1
                else:
                    if _is_request(recorded):
                        yield recorded
                    else:
                        self.skipped_lines += 1

    def _read_lines(self, path: Path) -> Iterator[bytes]:
        is_compressed = path.name.endswith(".gz")
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            lines = 0

            def read_line(size: int) -> bytes:
                nonlocal lines
                line = file.readline(size)
                lines += 1
                if is_compressed and (file.tell() > MAX_DECOMPRESSED or lines > MAX_LINES):
                    raise OSError(errno.EFBIG, _TOO_LARGE, str(path))
                return line

            try:
                while line := read_line(MAX_LINE + 1):
                    if len(line) > MAX_LINE:
                        self.skipped_lines += 1
                        while line and not line.endswith(b"\n"):
                            line = read_line(_SKIPPED_AT_ONCE)
                    elif line.strip():
                        yield line
            except (EOFError, zlib.error, gzip.BadGzipFile):  # the file is cut off or damaged
                self.skipped_lines += 1


def _is_request(recorded: RecordedRequest) -> bool:
    """Whether a gateway can have got it: others may have written the file.

    A replay sends the id in a header.
    """
    line = f"{recorded.method} {recorded.path}?{recorded.query}"
    return recorded.id.isascii() and recorded.id.isprintable() and not _CONTROL.search(line)


def read_recordings(path: str | Path) -> RecordingReader:
    """The requests of a folder with recordings or of one file. Raises OSError."""
    return RecordingReader(Path(path))


def list_recording_files(path: Path) -> list[Path]:
    """The files of a recording, the oldest first. Raises OSError if there is none."""
    if not path.is_dir():
        path.stat()
        return [path]
    names = {each.name for each in path.iterdir()}
    return [
        path / name
        for name in sorted(names)
        if name.endswith(COMPRESSED_SUFFIX)
        # a process that was killed while it compressed a file may have left both
        or (name.endswith(PLAIN_SUFFIX) and f"{name}.gz" not in names)
    ]
