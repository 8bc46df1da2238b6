"""Embeddings responses, encoded for clients and decoded from workers."""

import base64
import binascii
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec import UNSET, Raw, Struct, UnsetType

from protocols.chat.responses import EmbeddingUsage, ResponseStyle, encode_json
from protocols.chat.unary import (
    UnaryBodyDecoder,
    UnaryEncoder,
    add_extra_keys,
    keep_identity,
)
from protocols.chat.wire_responses import (
    KnownUsage,
    NoObject,
    WireChoice,
    WireUsage,
    read_text,
    read_usage,
)
from protocols.chat.worker_errors import raise_worker_error
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import Embedding, Event, FieldValues, ResponseExtra, ResponseMetadata
from protocols.core.fieldwise import decode_fields, has_lost_element, report_lost_fields
from protocols.core.indices import check_indices
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.json_text import JsonDecoder
from protocols.core.request import EmbeddingRequest
from protocols.core.token_counts import MAX_TIMESTAMP, UsageReader, read_integer
from protocols.core.vectors import encode_array, find_vectors, remove_vectors
from protocols.json_body import JSON_ERRORS, build_answer_error


class EmbeddingItem(Struct):
    """The embedding of one input: numbers, or base64 of little-endian float32."""

    object: str
    index: int
    embedding: tuple[float, ...] | str


class EmbeddingList(Struct):
    """The complete response; some protocols and workers add an id, and some a time."""

    object: str
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage | UnsetType = UNSET
    id: str | UnsetType = UNSET
    created: int | UnsetType = UNSET


class EmbeddingEncoder(UnaryEncoder):
    """Encodes the response to an embeddings request, which is never a stream.

    ``id`` is added if set; ``model`` replaces the requested name.
    """

    def __init__(
        self,
        style: ResponseStyle,
        request: EmbeddingRequest,
        context: ResponseContext,
        *,
        id: str | None = None,  # noqa: A002 - the wire's word
        model: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(style, context, headers)
        self._request = request
        self._id = UNSET if id is None else id
        self._model = context.model if model is None else model
        self.extra_source = style.source

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        packed = self._request.encoding == "base64"
        encode = encode_base64 if packed else encode_array
        data = [
            EmbeddingItem("embedding", i, encode(values))
            for i, values in enumerate(response.embeddings)
        ]
        body = EmbeddingList("list", data, self._model, id=self._id)
        if response.usage is not None:
            tokens = response.usage.prompt_tokens
            body.usage = EmbeddingUsage(tokens, tokens)
        keep_identity(body, response, self.extra_source)
        return HttpResponse(200, add_extra_keys(encode_json(body), response, self.extra_source))


def encode_base64(values: tuple[float, ...]) -> str:
    """The vector as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


# --- workers' -------------------------------------------------------------------------------------


class WireEmbedding(Struct, forbid_unknown_fields=True):
    """One embedding: numbers, or base64 of little-endian float32."""

    embedding: list[float] | str
    index: int | None = None
    object: Any = None


class WireEmbeddingResponse(Struct, forbid_unknown_fields=True):
    """A response to an embeddings request."""

    data: list[WireEmbedding]
    model: Any = None
    id: Any = None
    created: Any = None
    object: Any = None
    usage: KnownUsage | NoObject = None


class WireEmbeddingItem(Struct):
    """One embedding, without its vector."""

    index: int | None = None


class WireEmbeddingSummary(Struct):
    """A response to an embeddings request, without the vectors."""

    data: list[WireEmbeddingItem]
    model: Any = None
    usage: WireUsage | NoObject = None


def _read_indices(
    items: Sequence[WireEmbedding | WireEmbeddingItem], events: list[Event]
) -> list[int]:
    """The index of each item: its position, if the worker sends none, or the same for all.

    The latter (LiteLLM gave each vector of Gemini the index 0) is reported, once for all items.
    """
    sent = [position if item.index is None else item.index for position, item in enumerate(items)]
    positions = [*range(len(items))]
    if sent != positions and len({item.index for item in items}) == 1:
        wrong = next(position for position in positions if sent[position] != position)
        report_lost_fields((((f"data[{wrong}]", "index"), True),), events)
        return positions
    return sent


def decode_embedding(wire: list[float] | str) -> tuple[float, ...]:
    """The numbers of an embedding."""
    if not isinstance(wire, str):
        return tuple(wire)
    try:
        data = base64.b64decode(wire, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (binascii.Error, struct.error) as e:
        raise WorkerFailed("The worker's vector can't be read.") from e


class EmbeddingCounter:
    """Decodes only the number, the model and the usage of embeddings."""

    unary_choices: Sequence[WireChoice] = ()

    def __init__(self, request: EmbeddingRequest, complaint: Callable[[bytes], None]) -> None:
        self._request = request
        self._raise_if_error = complaint
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._chunks.append(data)
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = b"".join(self._chunks)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        vectors = find_vectors(body)
        try:
            wire, _ = decode_fields(remove_vectors(body, vectors), WireEmbeddingSummary)
            for start, end in vectors:
                _check_array(body[start:end])
        except JSON_ERRORS as e:
            self._raise_if_error(body)
            raise build_answer_error(e) from e
        events: list[Event] = [ResponseMetadata(read_text(wire.model))]
        check_indices(_read_indices(wire.data, events), len(self._request.inputs), "vector")
        reader = UsageReader(self._request)
        usage = read_usage(wire.usage, reader, embeds=True)
        return [*events, *reader.build_end(usage)]


_check_array = JsonDecoder(Raw, skims=True).decode
_decode_vector = JsonDecoder(list[float]).decode


def _decode_embeddings(body: bytes) -> tuple[WireEmbeddingResponse, FieldValues]:
    """A response, of which each vector of a large one is decoded by itself.

    Raises one of JSON_ERRORS.
    """
    vectors = find_vectors(body)
    wire, lost = decode_fields(remove_vectors(body, vectors), WireEmbeddingResponse)
    if not vectors:
        return wire, lost
    items = [item for item in wire.data if item.embedding == []]
    if lost or len(items) != len(vectors):  # another value has a key of this name
        return decode_fields(body, WireEmbeddingResponse)
    for item, (start, end) in zip(items, vectors, strict=True):
        item.embedding = _decode_vector(body[start:end])
    return wire, lost


_ITEM: Final = re.compile(r"data\[(\d+)\]")


class EmbeddingDecoder(UnaryBodyDecoder):
    """Decodes the response to an EmbeddingRequest."""

    unary_choices: Sequence[WireChoice] = ()

    def __init__(
        self,
        request: EmbeddingRequest,
        complaint: Callable[[bytes], None] = raise_worker_error,
        source: str = "",
    ) -> None:
        """``source`` is the worker's protocol, of which unknown keys are."""
        super().__init__(complaint)
        self._request, self._source = request, source

    def read_body(self, body: bytes) -> Sequence[Event]:
        """See ``UnaryBodyDecoder``."""
        try:
            wire, lost = _decode_embeddings(body)
        except JSON_ERRORS as e:
            self._raise_if_error(body)
            raise build_answer_error(e) from e
        events: list[Event] = [
            ResponseMetadata(
                read_text(wire.model),
                id=read_text(wire.id),
                created=read_integer(wire.created, MAX_TIMESTAMP),
                source=self._source,
            )
        ]
        if has_lost_element(lost, "data"):
            raise WorkerFailed("The worker's answer has a vector that can't be read.")
        indices = _read_indices(wire.data, events)
        check_indices(indices, len(self._request.inputs), "vector")
        events += self._list_extra(lost, indices)
        events += [
            Embedding(index, decode_embedding(item.embedding))
            for index, item in zip(indices, wire.data, strict=True)
        ]
        reader = UsageReader(self._request)
        usage = read_usage(wire.usage, reader, embeds=True)
        return [*events, *reader.build_end(usage)]

    def _list_extra(self, lost: FieldValues, indices: Sequence[int]) -> Iterator[Event]:
        """What no event represents, by its object."""
        for path, value in lost:
            if (found := _ITEM.fullmatch(path[0])) is None:
                yield ResponseExtra(self._source, "response", ((path, value),))
                continue
            index = indices[int(found[1])]
            yield ResponseExtra(self._source, "data", ((path[1:], value),), index)
