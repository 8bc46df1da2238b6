"""Answers to requests for embeddings."""

import base64
import struct
from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from gateway.core.aggregate import Answer
from gateway.core.errors import GatewayError
from gateway.core.ports import About, Headers, Reply
from gateway.core.types import EmbedRequest, Event
from protocols.openai.chunks import heading
from protocols.openai.pieces import EmbeddingUsage, encode
from protocols.openai.style import Style


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
        self._style, self._request = style, request
        self._id = UNSET if id is None else id
        self._model = about.model if model is None else model
        self._headers = heading(style, about, headers)

    def headers(self) -> Headers:
        """See ``gateway.core.ports.Encoder``."""
        return self._headers()

    def write(self, events: Sequence[Event]) -> bytes:
        """See ``gateway.core.ports.Encoder``; there is nothing to stream."""
        del events
        return b""

    def error(self, error: GatewayError) -> bytes:
        """See ``gateway.core.ports.Encoder``."""
        return self._style.error_event(error)

    def whole(self, answer: Answer) -> Reply:
        """See ``gateway.core.ports.Encoder``."""
        packed = self._request.encoding == "base64"
        data = [
            VectorItem("embedding", i, _packed(values) if packed else values)
            for i, values in enumerate(answer.vectors)
        ]
        body = VectorList("list", data, self._model, id=self._id)
        if answer.usage is not None:
            tokens = answer.usage.prompt_tokens
            body.usage = EmbeddingUsage(tokens, tokens)
        return Reply(200, encode(body))


def _packed(values: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
