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
    _names: Names
    _pieces: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        self._pieces += pieces
        return b"", self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        body = b"".join(self._pieces).strip()
        events = self._decoder.close()
        if not body.startswith(b"{"):
            return None, events
        served = _served(events)
        if served is not None and (renamed := _renamed(self._names, served)):
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
        self._event = decoder.event if isinstance(decoder, AnswerDecoder) else self._fed
        self._names = names
        self._end = end
        self._pairs: dict[bytes, bytes] = {}
        self._rename(Served(model))
        self._held = b""
        self._begun = False
        self._strange = False
        self._failed: GatewayError | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._failed is not None:
            raise self._failed
        held = b"".join(pieces)
        if self._held:
            held = self._held + held
        if self._strange or (not self._begun and held.lstrip()[:1] == b"{"):
            self._strange, self._held = True, b""
            return None, self._decoder.feed(held)
        events: list[Event] = []
        return self._read(held, events), events

    def _read(self, held: bytes, events: list[Event]) -> bytes:
        """Read each whole event; gives what may be passed on."""
        end, clean, over = 0, True, False
        try:
            for payload in sse.plain(held) or ():
                self._event(payload, events)
                end += len(payload) + _FRAME
                if over := bool(events) and type(events[-1]) is Done:
                    break
            while end < len(held) and not over:
                found = sse.plain_at(held, end)
                if found is not None:
                    self._event(found[1], events)
                elif (found := _BOUNDARY.search(held, end)) is not None:
                    clean = False
                    self._block(held[end : found.end()], events)
                else:
                    break
                end = found.end()
                if events and type(events[-1]) is Done:
                    over = True
                    break
        except GatewayError as error:
            if not events:
                raise
            self._failed = error  # told when what came before it is passed on
        self._begun = self._begun or end > 0
        self._held = b"" if over else held[end:]
        if len(self._held) > _LARGEST:
            raise WorkerFailed(f"The worker sent an event of more than {_LARGEST} bytes.")
        self._rename(_served(events))
        passed = self._passed(held[:end])
        return passed if clean else _STRAY.sub(b"", passed)

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._failed is not None:
            raise self._failed
        rest = self._decoder.feed(self._held)
        events = [*rest, *self._decoder.close()]
        self._rename(_served(events))
        if self._strange:
            return None, events
        if self._end:
            return self._end, events
        return _STRAY.sub(b"", self._passed(self._held.strip() + b"\n\n")), events

    def _fed(self, payload: bytes, events: list[Event]) -> None:
        """What ``AnswerDecoder.event`` does, by any decoder."""
        self._block(sse.event(payload), events)

    def _block(self, block: bytes, events: list[Event]) -> None:
        """Read an event as it stands. Raises also what its decoder would have told only later."""
        said = self._decoder.feed(block)
        self._decoder.feed(b"")
        events += said

    def _rename(self, served: Served | None) -> None:
        if served is not None and (renamed := _renamed(self._names, served)):
            self._pairs |= _pairs(renamed)

    def _passed(self, data: bytes) -> bytes:
        """Whole events as the client may have them."""
        for old, new in self._pairs.items():
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
        self._count = count
        self._complain = complaint
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
            self._complain(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if len(wire.data) != self._count:
            raise WorkerFailed("The worker did not answer each input with one vector.")
        served = Served(wire.model if isinstance(wire.model, str) else None)
        usage = None if wire.usage is None else usage_in(wire.usage, embeds=True)
        return [served, *([] if usage is None else [usage]), Done()]
