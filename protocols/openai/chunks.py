"""What the answers to conversations and to completions share: framing, and where usage goes."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Protocol

from msgspec import Struct

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.events import ResponseMetadata, Usage
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.openai.pieces import build_usage, encode_json, format_object
from protocols.openai.style import ResponseFactories, ResponseStyle

_PLACEHOLDER: Final = b"\0"
"""JSON never holds this byte, so a template can be cut at it."""


def build_common_fields(
    prefix: str, about: ResponseContext, name: str | None, model: str | None
) -> dict[str, str | int]:
    """The keys that are alike in every chunk and in the whole answer."""
    return {
        "id": prefix + about.id if name is None else name,
        "created": about.created,
        "model": about.model if model is None else model,
    }


class HeaderBuilder(Protocol):
    """Gives the headers of an answer."""

    def __call__(self, first: Headers = (), /) -> Headers:
        """All of them, behind the first ones."""


def create_header_builder(
    style: ResponseStyle, about: ResponseContext, headers: Headers
) -> HeaderBuilder:
    """The headers of an answer, to be asked for when it begins: one may tell the time until then.

    ``headers`` are added to those of the style.
    """
    began = 0.0 if style.elapsed_header is None else about.clock()
    return partial(_build_headers, style, about, headers, began)


def _build_headers(
    style: ResponseStyle,
    about: ResponseContext,
    headers: Headers,
    began: float,
    first: Headers = (),
) -> Headers:
    told = first + style.headers
    if style.version_header is not None:
        told += ((style.version_header, about.version),)
    if headers:
        told += headers
    if style.elapsed_header is not None:
        elapsed = about.clock() - began
        told += ((style.elapsed_header, str(int(elapsed * 1000))),)
    return told


def count_choices_per_index(style: ResponseStyle, request: GenerationRequest) -> int:
    """How many choices share an index."""
    return (request.n or 1) if style.index_scope == "prompt" else 1


def build_choice_fields(
    style: ResponseStyle, request: GenerationRequest, choice: UnaryChoice
) -> dict[str, Any]:
    """What a whole choice holds in either kind of answer."""
    values: dict[str, Any] = {"index": choice.index // count_choices_per_index(style, request)}
    if choice.token_ids and request.want.token_ids:
        values["token_ids"] = choice.token_ids
    return values


def build_unary_response(
    shapes: ResponseFactories,
    answer: UnaryResponse,
    choices: list[Struct],
    shared: Mapping[str, str | int],
) -> HttpResponse:
    """The answer in one piece."""
    values: dict[str, Any] = {**shared, "choices": choices}
    if answer.usage is not None:
        values["usage"] = build_usage(answer.usage)
    if answer.metadata.fingerprint is not None:
        values["system_fingerprint"] = answer.metadata.fingerprint
    return HttpResponse(200, encode_json(shapes.response(values)))


class ChunkWriter:
    """Frames choices into chunks: what all chunks of an answer share, and where usage goes."""

    def __init__(
        self,
        style: ResponseStyle,
        request: GenerationRequest,
        shared: Mapping[str, str | int],
        *,
        chat: bool,
    ) -> None:
        self._response_style = style
        self._common_fields = {key: encode_json(value) for key, value in shared.items()}
        self._choice_keys = style.chat_chunk_keys if chat else style.text_chunk_keys
        self._delta_key = "delta" if chat else "text"
        wanted = request.want.usage
        self._usage_mode = style.usage_position if wanted == "final" else wanted
        self._choices_per_index = count_choices_per_index(style, request)
        self._writes_total_usage = self._usage_mode in ("each", "separate")
        self._usage: Usage | None = None
        self._pending_finish: tuple[int, bytes, dict[str, bytes]] | None = None
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def build_template(self, index: int) -> tuple[bytes, bytes]:
        """An ordinary chunk of this choice, cut where its delta or text belongs."""
        if index not in self._templates:
            head, _, tail = self.write_chunk(index, _PLACEHOLDER).partition(_PLACEHOLDER)
            self._templates[index] = head, tail
        return self._templates[index]

    def write_chunk(self, index: int, body: bytes, **more: bytes) -> bytes:
        """One chunk; ``more`` are a piece's further keys."""
        piece = {"finish_reason": b"null", **self._response_style.default_values, **more}
        piece["index"] = self._format_index(index)
        piece[self._delta_key] = body
        return self._format_chunk(
            b"[" + format_object(self._choice_keys, piece) + b"]", self._format_running_usage()
        )

    def write_finish(self, index: int, body: bytes, more: dict[str, bytes]) -> bytes:
        """A choice's last chunk, held back if usage will go into it."""
        if self._usage_mode not in ("finish", "each"):
            return self.write_chunk(index, body, **more)
        before = self._write_pending_finish()
        self._pending_finish = index, body, more
        return before

    def set_usage(self, usage: Usage) -> None:
        """Usage has come."""
        self._usage = usage
        if self._usage_mode == "each":
            self._templates.clear()

    def set_metadata(self, served: ResponseMetadata) -> None:
        """The worker has told its fingerprint."""
        if served.fingerprint is not None:
            self._common_fields["system_fingerprint"] = encode_json(served.fingerprint)
            self._templates.clear()

    def write_end(self) -> bytes:
        """The rest: a finish chunk held back, the usage chunk, the dialect's end."""
        last = self._write_pending_finish(final=True)
        if self._writes_total_usage and self._usage is not None:
            last += self._format_chunk(b"[]", encode_json(build_usage(self._usage)))
        return last + self._response_style.stream_end

    def _write_pending_finish(self, *, final: bool = False) -> bytes:
        if self._pending_finish is None:
            return b""
        (index, body, more), self._pending_finish = self._pending_finish, None
        if final and self._usage_mode == "finish" and self._usage is not None:
            piece = {
                **self._response_style.default_values,
                **more,
                "index": self._format_index(index),
                self._delta_key: body,
            }
            usage = encode_json(build_usage(self._usage))
            return self._format_chunk(b"[" + format_object(self._choice_keys, piece) + b"]", usage)
        return self.write_chunk(index, body, **more)

    def _format_index(self, index: int) -> bytes:
        return b"%d" % (index // self._choices_per_index)

    def _format_running_usage(self) -> bytes | None:
        if self._usage_mode == "each":
            return b"null" if self._usage is None else encode_json(build_usage(self._usage))
        return b"null" if self._usage_mode == "separate" else None

    def _format_chunk(self, choices: bytes, usage: bytes | None) -> bytes:
        values = {**self._common_fields, "choices": choices}
        if usage is not None:
            values["usage"] = usage
        return (
            self._response_style.event_prefix
            + format_object(self._response_style.chunk_keys, values)
            + b"\n\n"
        )
