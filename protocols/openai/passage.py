"""The way back of a relayed call: a worker's own bytes, as far as they are what was asked for."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from gateway.core import sse
from gateway.core.errors import GatewayError, StreamBroken, WorkerFailed
from gateway.core.ports import Decoder, Passage
from gateway.core.types import Done, EmbedRequest, Event, Request, Served
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.faults import complain
from protocols.openai.incoming import WireUsage, usage_in

Names = Mapping[str, str]
"""What the client is to read in an answer, by its key: ``id``, or a key of the model's name."""

_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode

_BOUNDARY: Final = re.compile(rb"\n\r?\n")
_STRAY: Final = re.compile(rb"^(?!(?:\xef\xbb\xbf)?data:|:|event|id|retry|\r?$).*\n", re.MULTILINE)
"""A line that is no field of an event: some workers say so what went wrong."""
_LARGEST: Final = 1 << 20
"""Bytes of one event."""
_FRAME: Final = len(sse.event(b""))


def reader(request: Request, complaint: Callable[[bytes], None] = complain) -> Decoder:
    """What reads an answer beside its being passed on: of vectors, only that they are there."""
    if isinstance(request, EmbedRequest):
        return _VectorCounter(len(request.inputs), complaint)
    return AnswerDecoder(request, complaint=complaint)


def passage(request: Request, decoder: Decoder, names: Names, end: bytes = sse.DONE) -> Passage:
    """What passes on the answer to ``request``, which ``decoder`` reads.

    ``end`` is as for ``StreamPassage``.
    """
    if request.stream:
        return StreamPassage(decoder, names, request.model, end)
    return WholePassage(decoder, names)


def _served(events: Sequence[Event]) -> Served | None:
    """What the worker calls itself, where these tell it."""
    for event in events:
        if type(event) is Served:
            return event
    return None


def _renamed(names: Names, served: Served) -> dict[str, tuple[str, str]]:
    """The names that a worker gives itself and the client is not to read, with those it is."""
    renamed = {}
    for key, name in names.items():
        old = served.id if key == "id" else served.model
        if old is not None and old != name:
            renamed[key] = old, name
    return renamed


class WholePassage(Struct, eq=False):
    """An answer in one piece; a stream that comes in its place is for the encoder."""

    _decoder: Decoder
    _replacements: Names
    _chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        self._chunks += pieces
        return b"", self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        body = b"".join(self._chunks).strip()
        events = self._decoder.close()
        if not body.startswith(b"{"):
            return None, events
        served = _served(events)
        if served is not None and (renamed := _renamed(self._replacements, served)):
            fields = _fields(body)
            body = _encode(fields | {key: new for key, (_, new) in renamed.items()})
        return body, events


class StreamPassage:
    """A stream, by whole events. An event that tells of an error is never passed on."""

    def __init__(self, decoder: Decoder, names: Names, model: str, end: bytes = sse.DONE) -> None:
        """``model`` is what the worker was asked for, and is likely to call itself.

        ``end`` is what the stream ends with; empty where its last event says so.
        """
        self._decoder = decoder
        self._read_event = (
            decoder.read_event if isinstance(decoder, AnswerDecoder) else self._feed_payload
        )
        self._replacements = names
        self._end_marker = end
        self._byte_replacements: dict[bytes, bytes] = {}
        self._add_replacements(Served(model))
        self._pending = b""
        self._started = False
        self._is_translated = False
        self._pending_error: GatewayError | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
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
            for payload in sse.plain(held) or ():
                self._read_event(payload, events)
                end += len(payload) + _FRAME
                if over := bool(events) and type(events[-1]) is Done:
                    break
            while end < len(held) and not over:
                found = sse.plain_at(held, end)
                if found is not None:
                    self._read_event(found[1], events)
                elif (found := _BOUNDARY.search(held, end)) is not None:
                    clean = False
                    self._feed_event(held[end : found.end()], events)
                else:
                    break
                end = found.end()
                if events and type(events[-1]) is Done:
                    over = True
                    break
        except GatewayError as error:
            if not events:
                raise
            self._pending_error = error  # told when what came before it is passed on
        self._started = self._started or end > 0
        self._pending = b"" if over else held[end:]
        if len(self._pending) > _LARGEST:
            raise WorkerFailed(f"The worker sent an event of more than {_LARGEST} bytes.")
        self._add_replacements(_served(events))
        passed = self._replace_names(held[:end])
        return passed if clean else _STRAY.sub(b"", passed)

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._pending_error is not None:
            raise self._pending_error
        rest = self._decoder.feed(self._pending)
        events = [*rest, *self._decoder.close()]
        self._add_replacements(_served(events))
        if self._is_translated:
            return None, events
        if self._end_marker:
            return self._end_marker, events
        return _STRAY.sub(b"", self._replace_names(self._pending.strip() + b"\n\n")), events

    def _feed_payload(self, payload: bytes, events: list[Event]) -> None:
        """What ``AnswerDecoder.event`` does, by any decoder."""
        self._feed_event(sse.event(payload), events)

    def _feed_event(self, block: bytes, events: list[Event]) -> None:
        """Read an event as it stands. Raises also what its decoder would have told only later."""
        said = self._decoder.feed(block)
        self._decoder.feed(b"")
        events += said

    def _add_replacements(self, served: Served | None) -> None:
        if served is not None and (renamed := _renamed(self._replacements, served)):
            self._byte_replacements |= _pairs(renamed)

    def _replace_names(self, data: bytes) -> bytes:
        """Whole events as the client may have them."""
        for old, new in self._byte_replacements.items():
            data = data.replace(old, new)
        return data


def _pairs(renamed: Mapping[str, tuple[str, str]]) -> dict[bytes, bytes]:
    """What the pairs of a key and its name become. Within a JSON text the quotes are escaped."""
    return {
        b'"%b":%b%b' % (key.encode(), blank, _encode(old)): b'"%b":%b%b'
        % (key.encode(), blank, _encode(new))
        for key, (old, new) in renamed.items()
        for blank in (b"", b" ")
    }


class _Item(Struct):
    index: int | None = None


class _Vectors(Struct):
    data: list[_Item]
    model: Any = None
    usage: WireUsage | None = None


_read_vectors = msgspec.json.Decoder(_Vectors).decode


class _VectorCounter:
    """Reads of vectors only how many there are, whose they are, and the usage."""

    def __init__(self, count: int, complaint: Callable[[bytes], None]) -> None:
        self._input_count = count
        self._raise_if_error = complaint
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        self._body += data
        return ()

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        body = bytes(self._body)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        try:
            wire = _read_vectors(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if len(wire.data) != self._input_count:
            raise WorkerFailed("The worker did not answer each input with one vector.")
        served = Served(wire.model if isinstance(wire.model, str) else None)
        usage = None if wire.usage is None else usage_in(wire.usage, embeds=True)
        return [served, *([] if usage is None else [usage]), Done()]
