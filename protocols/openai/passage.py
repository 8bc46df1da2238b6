"""The way back of a relayed call: a worker's own bytes, as far as they are what was asked for."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from protocols.core import sse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Event, ResponseMetadata, StreamEnd
from protocols.core.interfaces import PassthroughReader, ResponseDecoder
from protocols.core.request import EmbeddingRequest, Request
from protocols.openai.decoder import GenerationDecoder
from protocols.openai.faults import raise_worker_error
from protocols.openai.incoming import WireUsage, read_usage

NameReplacements = Mapping[str, str]
"""What the client is to read in an answer, by its key: ``id``, or a key of the model's name."""

_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode

_EVENT_BOUNDARY: Final = re.compile(rb"\n\r?\n")
_STRAY_LINE: Final = re.compile(
    rb"^(?!(?:\xef\xbb\xbf)?data:|:|event|id|retry|\r?$).*\n", re.MULTILINE
)
"""A line that is no field of an event: some workers say so what went wrong."""
_MAX_EVENT_BYTES: Final = 1 << 20
"""Bytes of one event."""
_FRAME: Final = len(sse.format_event(b""))


def create_passthrough_decoder(
    request: Request, complaint: Callable[[bytes], None] = raise_worker_error
) -> ResponseDecoder:
    """What reads an answer beside its being passed on: of vectors, only that they are there."""
    if isinstance(request, EmbeddingRequest):
        return _EmbeddingCounter(len(request.inputs), complaint)
    return GenerationDecoder(request, complaint=complaint)


def create_passthrough_reader(
    request: Request, decoder: ResponseDecoder, names: NameReplacements, end: bytes = sse.DONE_EVENT
) -> PassthroughReader:
    """What passes on the answer to ``request``, which ``decoder`` reads.

    ``end`` is as for ``StreamPassage``.
    """
    if request.stream:
        return StreamPassthroughReader(decoder, names, request.model, end)
    return UnaryPassthroughReader(decoder, names)


def _find_metadata(events: Sequence[Event]) -> ResponseMetadata | None:
    """What the worker calls itself, where these tell it."""
    for event in events:
        if type(event) is ResponseMetadata:
            return event
    return None


def _find_replacements(
    names: NameReplacements, served: ResponseMetadata
) -> dict[str, tuple[str, str]]:
    """The names that a worker gives itself and the client is not to read, with those it is."""
    renamed = {}
    for key, name in names.items():
        old = served.id if key == "id" else served.model
        if old is not None and old != name:
            renamed[key] = old, name
    return renamed


class UnaryPassthroughReader(Struct, eq=False):
    """An answer in one piece; a stream that comes in its place is for the encoder."""

    _decoder: ResponseDecoder
    _replacements: NameReplacements
    _chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._chunks += pieces
        return b"", self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        body = b"".join(self._chunks).strip()
        events = self._decoder.close()
        if not body.startswith(b"{"):
            return None, events
        served = _find_metadata(events)
        if served is not None and (renamed := _find_replacements(self._replacements, served)):
            fields = _decode_fields(body)
            body = _encode(fields | {key: new for key, (_, new) in renamed.items()})
        return body, events


class StreamPassthroughReader:
    """A stream, by whole events. An event that tells of an error is never passed on."""

    def __init__(
        self,
        decoder: ResponseDecoder,
        names: NameReplacements,
        model: str,
        end: bytes = sse.DONE_EVENT,
    ) -> None:
        """``model`` is what the worker was asked for, and is likely to call itself.

        ``end`` is what the stream ends with; empty where its last event says so.
        """
        self._decoder = decoder
        self._read_event = (
            decoder.read_event if isinstance(decoder, GenerationDecoder) else self._feed_payload
        )
        self._replacements = names
        self._end_marker = end
        self._byte_replacements: dict[bytes, bytes] = {}
        self._add_replacements(ResponseMetadata(model))
        self._pending = b""
        self._started = False
        self._is_translated = False
        self._pending_error: GatewayError | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        held = b"".join(pieces)
        if self._pending:
            held = self._pending + held
        if self._is_translated or (not self._started and held.lstrip()[:1] == b"{"):
            self._is_translated, self._pending = True, b""
            return None, self._decoder.feed(held)
        events: list[Event] = []
        return self._read_events(held, events), events

    def _read_events(self, held: bytes, events: list[Event]) -> bytes:
        """Read each whole event; gives what may be passed on."""
        end, clean, over = 0, True, False
        try:
            for payload in sse.split_plain_events(held) or ():
                self._read_event(payload, events)
                end += len(payload) + _FRAME
                if over := bool(events) and type(events[-1]) is StreamEnd:
                    break
            while end < len(held) and not over:
                found = sse.match_plain_event(held, end)
                if found is not None:
                    self._read_event(found[1], events)
                elif (found := _EVENT_BOUNDARY.search(held, end)) is not None:
                    clean = False
                    self._feed_event(held[end : found.end()], events)
                else:
                    break
                end = found.end()
                if events and type(events[-1]) is StreamEnd:
                    over = True
                    break
        except GatewayError as error:
            if not events:
                raise
            self._pending_error = error  # told when what came before it is passed on
        self._started = self._started or end > 0
        self._pending = b"" if over else held[end:]
        if len(self._pending) > _MAX_EVENT_BYTES:
            raise WorkerFailed(f"The worker sent an event of more than {_MAX_EVENT_BYTES} bytes.")
        self._add_replacements(_find_metadata(events))
        passed = self._replace_names(held[:end])
        return passed if clean else _STRAY_LINE.sub(b"", passed)

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        rest = self._decoder.feed(self._pending)
        events = [*rest, *self._decoder.close()]
        self._add_replacements(_find_metadata(events))
        if self._is_translated:
            return None, events
        if self._end_marker:
            return self._end_marker, events
        return _STRAY_LINE.sub(b"", self._replace_names(self._pending.strip() + b"\n\n")), events

    def _feed_payload(self, payload: bytes, events: list[Event]) -> None:
        """What ``AnswerDecoder.event`` does, by any decoder."""
        self._feed_event(sse.format_event(payload), events)

    def _feed_event(self, block: bytes, events: list[Event]) -> None:
        """Read an event as it stands. Raises also what its decoder would have told only later."""
        said = self._decoder.feed(block)
        self._decoder.feed(b"")
        events += said

    def _add_replacements(self, served: ResponseMetadata | None) -> None:
        if served is not None and (renamed := _find_replacements(self._replacements, served)):
            self._byte_replacements |= _encode_replacements(renamed)

    def _replace_names(self, data: bytes) -> bytes:
        """Whole events as the client may have them."""
        for old, new in self._byte_replacements.items():
            data = data.replace(old, new)
        return data


def _encode_replacements(renamed: Mapping[str, tuple[str, str]]) -> dict[bytes, bytes]:
    """What the pairs of a key and its name become. Within a JSON text the quotes are escaped."""
    return {
        b'"%b":%b%b' % (key.encode(), blank, _encode(old)): b'"%b":%b%b'
        % (key.encode(), blank, _encode(new))
        for key, (old, new) in renamed.items()
        for blank in (b"", b" ")
    }


class _EmbeddingItem(Struct):
    index: int | None = None


class _EmbeddingSummary(Struct):
    data: list[_EmbeddingItem]
    model: Any = None
    usage: WireUsage | None = None


_decode_embedding_summary = msgspec.json.Decoder(_EmbeddingSummary).decode


class _EmbeddingCounter:
    """Reads of vectors only how many there are, whose they are, and the usage."""

    def __init__(self, count: int, complaint: Callable[[bytes], None]) -> None:
        self._input_count = count
        self._raise_if_error = complaint
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._body += data
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = bytes(self._body)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        try:
            wire = _decode_embedding_summary(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if len(wire.data) != self._input_count:
            raise WorkerFailed("The worker did not answer each input with one vector.")
        served = ResponseMetadata(wire.model if isinstance(wire.model, str) else None)
        usage = None if wire.usage is None else read_usage(wire.usage, embeds=True)
        return [served, *([] if usage is None else [usage]), StreamEnd()]
