"""The way back of a relayed call: a worker's own bytes, and what they tell of tokens and ends.

What is passed on is not held against anything: a model may answer what it likes. Only errors are
told anew, short and clean, in the shape that they have here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from gateway.core import sse
from gateway.core.errors import (
    GatewayError,
    Malformed,
    StreamBroken,
    Told,
    Unsupported,
    WorkerFailed,
)
from gateway.core.types import Done, End, Event, Start, Text, Usage
from protocols.openai import faults
from protocols.openai.faults import Fault
from protocols.triton import document, failures
from protocols.triton.incoming import REASONS
from protocols.triton.tensors import flat
from protocols.triton.vocabulary import TEXT
from protocols.triton.wire import encode

_BOUNDARY: Final = re.compile(rb"\r?\n\r?\n")
_MARGIN: Final = 3
"""Bytes of a boundary that may have come before its end does."""
_LARGEST: Final = 1 << 24
"""Bytes of one event."""
_CAREFULLY_READ: Final = 1 << 20
"""Bytes of an answer that are worth a second look for what JSON does not have."""
_ABOUT: Final = frozenset(
    {"id", "model_name", "model_version", "finish_reason", "stop_reason", "num_input_tokens",
     "num_output_tokens", "cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}
)  # fmt: skip
"""What is no text, whatever the outputs of a model are called."""
_UNTOLD: Final = "None"

_ASKED_WRONGLY: Final = re.compile(
    r"\[request id: |has invalid type\. It should|The schema can not convert"
    r"|already exists in request|Converting keyword|Expected JSON object"
    r"|generate expects model|exceeds the maximum allowed input size"
)
"""What the server itself complains of was the client's doing, as nobody else touched its call."""
_UNREADABLE: Final = re.compile(r"failed to parse the request JSON buffer|\battempt to \w+ ")
"""Its JSON layer's complaints, which it calls errors of its own."""
_OURS_ALONE: Final = frozenset({401, 403, 407, 429})
"""What a worker says to the gateway: of its key, and of how often it comes."""


class Names:
    """A model's name at the worker, and the one that the client knows."""

    def __init__(self, worker: str, client: str) -> None:
        self._is_renamed = worker != client
        self._client_name = client
        # An instance's name is its model's, and its device's and its own number.
        self._quoted_pattern = re.compile(rf"'{re.escape(worker)}(?=(?:_\d+_\d+)?')")
        self._replacements = [(_pair(worker, blank), _pair(client, blank)) for blank in (b"", b" ")]

    def rename_in_body(self, data: bytes) -> bytes:
        """Whole events or a whole body. Within a JSON text the quotes would be escaped."""
        if self._is_renamed:
            for old, new in self._replacements:
                data = data.replace(old, new)
        return data

    def rename_in_text(self, text: str) -> str:
        """A sentence of the server's."""
        return self._quoted_pattern.sub(lambda _: f"'{self._client_name}", text)


def _pair(name: str, blank: bytes) -> bytes:
    return b'"model_name":%b%b' % (blank, encode(name))


# --- errors ---------------------------------------------------------------------------------------


def refused(names: Names, status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """What an answer of this status means, which the client is to hear as the worker said it."""
    framed = body.startswith(b"data:")
    if framed:
        body = body.removeprefix(b"data:").partition(b"\n\n")[0]
    return faults.read_error(status, headers, body.strip(), partial(_retold, names, framed))


def _retold(
    names: Names,
    framed: bool,  # noqa: FBT001 - given once, for all
    status: int,
    fault: Fault,
    retry_after: float | None = None,
) -> GatewayError:
    inside = status == 200  # noqa: PLR2004 - told in an answer that looked good
    error = failures.judge(0 if inside else status, fault, retry_after)
    match error:
        case WorkerFailed(status=400) if _ASKED_WRONGLY.search(fault.text):
            error = Unsupported(fault.text)
        case WorkerFailed(status=500) if _UNREADABLE.search(fault.text):
            error = Malformed(fault.text)
    if fault.text and status not in _OURS_ALONE:
        error.upstream_error = Told(status, names.rename_in_text(fault.text), framed)
    return error


def _complain(got: Mapping[str, Any], names: Names, status: int, *, framed: bool) -> None:
    """Raises what an answer tells of; returns if it tells of nothing."""
    if got.get("error") is not None:
        raise _retold(names, framed, status, faults.fault_in(got) or Fault())


# --- what is told ---------------------------------------------------------------------------------


class _Account:
    """What an answer tells, as far as the gateway keeps books of it."""

    def __init__(self, *, in_pieces: bool) -> None:
        self._token_per_event = in_pieces
        self._prompt_tokens: int | None = None
        self._token_count: int | None = None
        self._finish_reason: str | None = None

    def add(self, got: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        counts = _numbers(got, "num_output_tokens")
        if counts:
            self._token_count = (self._token_count or 0) + sum(counts)
        if self._prompt_tokens is None and (told := _numbers(got, "num_input_tokens")):
            self._prompt_tokens = told[0]
            events.append(Start(told[0]))
        for one in _values(got, "finish_reason"):
            if isinstance(one, str) and (self._finish_reason is None or one != _UNTOLD):
                self._finish_reason = one
        texts = _values(got, TEXT) if TEXT in got else _others(got)
        text = "".join([str(one) for one in texts if one is not None])
        if text:
            alone = 1 if self._token_per_event else math.ceil(len(text) / 4)
            events.append(Text(text, tokens=sum(counts) if counts else alone))
        return events

    def close(self) -> list[Event]:
        """Raises StreamBroken where the model tells how it ends, and did not."""
        if self._token_per_event and self._finish_reason == _UNTOLD:
            raise StreamBroken("The worker's stream stopped before its end.")
        events: list[Event] = [End(REASONS.get(self._finish_reason or "") or "unknown")]
        if self._prompt_tokens is not None and self._token_count is not None:
            events.append(Usage(self._prompt_tokens, self._token_count))
        return [*events, Done()]


def _values(got: Mapping[str, Any], name: str) -> list[Any]:
    return flat(got[name]) if name in got else []


def _numbers(got: Mapping[str, Any], name: str) -> list[int]:
    return [one for one in _values(got, name) if type(one) is int and one >= 0]


def _others(got: Mapping[str, Any]) -> list[Any]:
    return [one for name in got if name not in _ABOUT for one in flat(got[name])]


def _read(body: bytes) -> Mapping[str, Any]:
    """The object that an answer or an event is. Raises WorkerFailed."""
    text = body.decode(errors="replace").encode()
    try:
        got = msgspec.json.decode(text) if len(text) > _CAREFULLY_READ else document.value(text)
    except (Malformed, msgspec.DecodeError, RecursionError) as e:
        raise WorkerFailed("The worker's answer can't be read.") from e
    if not isinstance(got, dict):
        raise WorkerFailed("The worker's answer is not in its dialect.")
    return got


# --- passages -------------------------------------------------------------------------------------


class WholePassage:
    """An answer in one piece."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._body = bytearray()

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        self._body += b"".join(pieces)
        return b"", ()

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        body = bytes(self._body)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        got = _read(body)
        _complain(got, self._names, 200, framed=False)
        account = _Account(in_pieces=False)
        events = account.add(got)
        return self._names.rename_in_body(body), [*events, *account.close()]


class StreamPassage:
    """A stream, by whole events; its end is the end of the body, which is one without events, too.

    An event that tells of an error ends it.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._tracker = _Account(in_pieces=True)
        self._sse_parser = sse.Splitter(limit=_LARGEST)
        self._pending = bytearray()
        self._pending_error: GatewayError | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._pending_error is not None:
            raise self._pending_error
        held, end = self._pending, 0
        events: list[Event] = []
        at = max(0, len(held) - _MARGIN)
        held += b"".join(pieces)
        while boundary := _BOUNDARY.search(held, at):
            try:
                events += self._read_event(bytes(held[end : boundary.end()]))
            except GatewayError as error:
                if not end:
                    raise
                self._pending_error = error  # told when what came before it is passed on
                break
            at = end = boundary.end()
        whole = bytes(held[:end])
        del held[:end]
        if len(held) > _LARGEST:
            raise WorkerFailed(f"The worker sent an event of more than {_LARGEST} bytes.")
        return self._names.rename_in_body(whole), events

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._pending_error is not None:
            raise self._pending_error
        if self._pending.strip():
            raise StreamBroken("The worker's stream stopped inside an event.")
        return b"", self._tracker.close()

    def _read_event(self, block: bytes) -> list[Event]:
        """What a block of lines tells."""
        events: list[Event] = []
        for payload in self._sse_parser.feed(block):
            got = _read(payload)
            _complain(got, self._names, 400, framed=True)
            events += self._tracker.add(got)
        if self._sse_parser.stray_line is not None:
            _complain(_read(self._sse_parser.stray_line), self._names, 400, framed=True)
            raise WorkerFailed("The worker's answer is not in its dialect.")
        return events
