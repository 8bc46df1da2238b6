"""Embeddings responses, encoded for clients and decoded from workers."""

import base64
import struct
from collections.abc import Callable, Sequence

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
from protocols.chat.responses import EmbeddingUsage, ResponseStyle, encode_json
from protocols.chat.unary import UnaryBodyDecoder, UnaryEncoder
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import WorkerFailed
from protocols.core.events import Embedding, Event, ResponseMetadata
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import EmbeddingRequest
from protocols.core.token_counts import UsageReader


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


class EmbeddingDecoder(UnaryBodyDecoder):
    """Decodes the response to an EmbeddingRequest."""

    unary_choices: Sequence[WireChoice] = ()

    def __init__(
        self, request: EmbeddingRequest, complaint: Callable[[bytes], None] = raise_worker_error
    ) -> None:
        super().__init__(complaint)
        self._request = request

    def read_body(self, body: bytes) -> Sequence[Event]:
        """See ``UnaryBodyDecoder``."""
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
