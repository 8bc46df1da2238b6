"""Answers to requests for embeddings, as they are written for clients and read from workers."""

import base64
import struct
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.core import sse
from gateway.core.aggregate import Answer
from gateway.core.errors import GatewayError, StreamBroken, WorkerFailed
from gateway.core.ports import About, Headers, Reply
from gateway.core.types import Done, EmbedRequest, Event, Served, Vector
from protocols.openai.chunks import heading
from protocols.openai.faults import complain
from protocols.openai.incoming import read_vectors, text_in, usage_in, vector_in
from protocols.openai.pieces import EmbeddingUsage, encode
from protocols.openai.style import Style

_BOM: Final = b"\xef\xbb\xbf"


class VectorItem(Struct):
    """One input's vector: numbers, or base64 of little-endian float32."""

    object: str
    index: int
    embedding: tuple[float, ...] | str


class VectorList(Struct):
    """The whole answer; some of the family add an id."""

    object: str
    data: list[VectorItem]
    model: str
    usage: EmbeddingUsage | UnsetType = UNSET
    id: str | UnsetType = UNSET


class VectorEncoder:
    """Writes the answer to a request for embeddings, which is never a stream.

    ``id`` is added where given; ``model`` replaces the name that was asked for.
    """

    content_type: str = "application/json"

    def __init__(
        self,
        style: Style,
        request: EmbedRequest,
        about: About,
        *,
        id: str | None = None,  # noqa: A002 - the wire's word
        model: str | None = None,
        headers: Headers = (),
    ) -> None:
        self._response_style, self._request = style, request
        self._id = UNSET if id is None else id
        self._model = about.model if model is None else model
        self._build_headers = heading(style, about, headers)

    def headers(self) -> Headers:
        """See ``gateway.core.ports.Encoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``gateway.core.ports.Encoder``; there is nothing to stream."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``gateway.core.ports.Encoder``."""
        return self._response_style.encode_error_event(error)

    def encode_unary(self, answer: Answer) -> Reply:
        """See ``gateway.core.ports.Encoder``."""
        packed = self._request.encoding == "base64"
        data = [
            VectorItem("embedding", i, _packed(values) if packed else values)
            for i, values in enumerate(answer.embeddings)
        ]
        body = VectorList("list", data, self._model, id=self._id)
        if answer.usage is not None:
            tokens = answer.usage.prompt_tokens
            body.usage = EmbeddingUsage(tokens, tokens)
        return Reply(200, encode(body))


def _packed(values: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


# --- workers' -------------------------------------------------------------------------------------


class VectorDecoder:
    """Reads the answer to an EmbedRequest."""

    def __init__(
        self, request: EmbedRequest, *, complaint: Callable[[bytes], None] = complain
    ) -> None:
        self._input_count = len(request.inputs)
        self._raise_if_error = complaint
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        self._body += data
        if len(self._body) > sse.LARGEST:
            raise WorkerFailed("The worker's answer is too large.")
        return ()

    def close(self) -> Sequence[Event]:
        """See ``gateway.core.ports.Decoder``."""
        body = bytes(self._body).removeprefix(_BOM)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        try:
            wire = read_vectors(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer can't be read.") from e
        events: list[Event] = [Served(text_in(wire.model), id=text_in(wire.id))]
        for position, item in enumerate(wire.data):
            index = position if item.index is None else item.index
            events.append(Vector(index, vector_in(item.embedding)))
        if {e.index for e in events if isinstance(e, Vector)} != set(range(self._input_count)):
            raise WorkerFailed("The worker did not answer each input with one vector.")
        usage = None if wire.usage is None else usage_in(wire.usage, embeds=True)
        return [*events, *([] if usage is None else [usage]), Done()]
