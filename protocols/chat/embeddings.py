"""Embeddings responses, encoded for clients and decoded from workers."""

import base64
import struct
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from protocols.chat.decoder import (
    WireChoice,
    decode_embedding,
    decode_embedding_response,
    read_text,
    read_usage,
)
from protocols.chat.errors import raise_worker_error
from protocols.chat.responses import (
    EmbeddingUsage,
    ResponseStyle,
    create_header_builder,
    encode_json,
)
from protocols.core import sse
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import GatewayError, StreamBroken, WorkerFailed
from protocols.core.events import Embedding, Event, ResponseMetadata
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import EmbeddingRequest
from protocols.core.token_counts import UsageReader

_BOM: Final = b"\xef\xbb\xbf"


class EmbeddingItem(Struct):
    """The embedding of one input: numbers, or base64 of little-endian float32."""

    object: str
    index: int
    embedding: tuple[float, ...] | str


class EmbeddingList(Struct):
    """The complete response; some protocols add an id."""

    object: str
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage | UnsetType = UNSET
    id: str | UnsetType = UNSET


class EmbeddingEncoder:
    """Encodes the response to an embeddings request, which is never a stream.

    ``id`` is added if set; ``model`` replaces the requested name.
    """

    content_type: str = "application/json"

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
        self._response_style, self._request = style, request
        self._id = UNSET if id is None else id
        self._model = context.model if model is None else model
        self._build_headers = create_header_builder(style, context, headers)

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``; there is nothing to stream."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._response_style.encode_error_event(error)

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        packed = self._request.encoding == "base64"
        data = [
            EmbeddingItem("embedding", i, encode_base64(values) if packed else values)
            for i, values in enumerate(response.embeddings)
        ]
        body = EmbeddingList("list", data, self._model, id=self._id)
        if response.usage is not None:
            tokens = response.usage.prompt_tokens
            body.usage = EmbeddingUsage(tokens, tokens)
        return HttpResponse(200, encode_json(body))


def encode_base64(values: tuple[float, ...]) -> str:
    """The vector as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


# --- workers' -------------------------------------------------------------------------------------


class EmbeddingDecoder:
    """Decodes the response to an EmbeddingRequest."""

    unary_choices: Sequence[WireChoice] = ()

    def __init__(
        self, request: EmbeddingRequest, complaint: Callable[[bytes], None] = raise_worker_error
    ) -> None:
        self._request = request
        self._raise_if_error = complaint
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._body += data
        if len(self._body) > sse.MAX_UNARY_BYTES:
            raise WorkerFailed("The worker's answer is too large.")
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = bytes(self._body).removeprefix(_BOM)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        try:
            wire = decode_embedding_response(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        events: list[Event] = [ResponseMetadata(read_text(wire.model), id=read_text(wire.id))]
        for position, item in enumerate(wire.data):
            index = position if item.index is None else item.index
            events.append(Embedding(index, decode_embedding(item.embedding)))
        if {e.index for e in events if isinstance(e, Embedding)} != set(
            range(len(self._request.inputs))
        ):
            raise WorkerFailed("The worker did not answer each input with one vector.")
        reader = UsageReader(self._request)
        usage = read_usage(wire.usage, reader, embeds=True)
        return [*events, *reader.build_end(usage)]
