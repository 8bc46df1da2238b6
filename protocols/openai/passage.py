"""The way back of a relayed call: a worker's own bytes, as far as they are what was asked for."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from gateway.core import sse
from gateway.core.errors import GatewayError, StreamBroken, WorkerFailed
from gateway.core.ports import Decoder, Passage
from gateway.core.types import Done, EmbedRequest, Event, Request
from protocols.body import read_object
from protocols.openai.decoder import AnswerDecoder
from protocols.openai.faults import complain
from protocols.openai.incoming import WireUsage, usage_in

_encode = msgspec.json.Encoder().encode

_BOUNDARY: Final = re.compile(rb"\r?\n\r?\n")
_LARGEST: Final = 1 << 20
"""Bytes of one event."""


def passage(request: Request, rename: tuple[Raw, Raw] | None) -> Passage:
    """What reads the answer to ``request``; ``rename``: a model's name and the one in its place."""
    if isinstance(request, EmbedRequest):
        return WholePassage(_VectorCounter(len(request.inputs)), rename)
    decoder = AnswerDecoder(request)
    return StreamPassage(decoder, rename) if request.stream else WholePassage(decoder, rename)


class WholePassage:
    """An answer in one piece; a stream that comes in its place is for the encoder."""

    def __init__(self, decoder: Decoder, rename: tuple[Raw, Raw] | None) -> None:
        self._decoder = decoder
        self._name = None if rename is None else rename[1]
        self._body = bytearray()
        self._before: list[Event] = []

    def feed(self, data: bytes) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        self._body += data
        return b"", self._decoder.feed(data)

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        events = self._decoder.close()
        body = bytes(self._body).strip()
        if not body.startswith(b"{"):
            return None, events
        if self._name is not None:
            fields = read_object(body)
            if "model" in fields:
                fields["model"] = self._name
                body = _encode(fields)
        return body, events


class StreamPassage:
    """A stream, by whole events. An event that tells of an error is never passed on."""

    def __init__(self, decoder: Decoder, rename: tuple[Raw, Raw] | None) -> None:
        self._decoder = decoder
        self._names = () if rename is None else [_pairs(*rename, blank) for blank in (b"", b" ")]
        self._held = b""
        self._strange = False
        self._failed: GatewayError | None = None

    def feed(self, data: bytes) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._failed is not None:
            raise self._failed
        held = self._held + data
        if self._strange or held.lstrip()[:1] == b"{":
            self._strange, self._held = True, b""
            return None, self._decoder.feed(held)
        end, events = 0, list[Event]()
        while boundary := _BOUNDARY.search(held, end):
            try:
                events += self._decoder.feed(held[end : boundary.end()])
            except GatewayError as error:
                if not events:
                    raise
                self._failed = error  # told when what came before it is passed on
                break
            end = boundary.end()
            if events and type(events[-1]) is Done:
                self._held = b""
                return self._named(held[:end]), events
        self._held = held[end:]
        if len(self._held) > _LARGEST:
            raise WorkerFailed(f"The worker sent an event of more than {_LARGEST} bytes.")
        return self._named(held[:end]), events

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``gateway.core.ports.Passage``."""
        if self._failed is not None:
            raise self._failed
        rest = self._decoder.feed(self._held)
        events = [*rest, *self._decoder.close()]
        return (None, events) if self._strange else (sse.DONE, events)

    def _named(self, data: bytes) -> bytes:
        for old, new in self._names:
            data = data.replace(old, new)
        return data


def _pairs(old: Raw, new: Raw, blank: bytes) -> tuple[bytes, bytes]:
    """What a model's name is replaced by. Within a JSON text its quotes would be escaped."""
    return b'"model":%b%b' % (blank, bytes(old)), b'"model":%b%b' % (blank, bytes(new))


class _Item(Struct):
    index: int | None = None


class _Vectors(Struct):
    data: list[_Item]
    usage: WireUsage | None = None


_read_vectors = msgspec.json.Decoder(_Vectors).decode


class _VectorCounter:
    """Reads of vectors only how many there are, and the usage."""

    def __init__(self, count: int) -> None:
        self._count = count
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
            complain(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        if len(wire.data) != self._count:
            raise WorkerFailed("The worker did not answer each input with one vector.")
        usage = None if wire.usage is None else usage_in(wire.usage, embeds=True)
        return [*([] if usage is None else [usage]), Done()]
