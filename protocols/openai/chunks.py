"""What the answers to conversations and to completions share: framing, and where usage goes."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Protocol

from msgspec import Struct

from gateway.core.aggregate import Answer, ChoiceAnswer
from gateway.core.ports import About, Headers, Reply
from gateway.core.types import GenerateRequest, Served, Usage
from protocols.openai.pieces import encode, ordered, usage_of
from protocols.openai.style import Shapes, Style

_HOLE: Final = b"\0"
"""JSON never holds this byte, so a template can be cut at it."""


def shared_values(
    prefix: str, about: About, name: str | None, model: str | None
) -> dict[str, str | int]:
    """The keys that are alike in every chunk and in the whole answer."""
    return {
        "id": prefix + about.id if name is None else name,
        "created": about.created,
        "model": about.model if model is None else model,
    }


class Heading(Protocol):
    """Gives the headers of an answer."""

    def __call__(self, first: Headers = (), /) -> Headers:
        """All of them, behind the first ones."""


def heading(style: Style, about: About, headers: Headers) -> Heading:
    """The headers of an answer, to be asked for when it begins: one may tell the time until then.

    ``headers`` are added to those of the style.
    """
    began = 0.0 if style.elapsed_header is None else about.clock()
    return partial(_told, style, about, headers, began)


def _told(
    style: Style, about: About, headers: Headers, began: float, first: Headers = ()
) -> Headers:
    told = first + style.headers
    if style.served_header is not None:
        told += ((style.served_header, about.served),)
    if headers:
        told += headers
    if style.elapsed_header is not None:
        elapsed = about.clock() - began
        told += ((style.elapsed_header, str(int(elapsed * 1000))),)
    return told


def choices_per_index(style: Style, request: GenerateRequest) -> int:
    """How many choices share an index."""
    return (request.n or 1) if style.index == "prompt" else 1


def choice_values(style: Style, request: GenerateRequest, choice: ChoiceAnswer) -> dict[str, Any]:
    """What a whole choice holds in either kind of answer."""
    values: dict[str, Any] = {"index": choice.index // choices_per_index(style, request)}
    if choice.token_ids and request.want.token_ids:
        values["token_ids"] = choice.token_ids
    return values


def whole(
    shapes: Shapes, answer: Answer, choices: list[Struct], shared: Mapping[str, str | int]
) -> Reply:
    """The answer in one piece."""
    values: dict[str, Any] = {**shared, "choices": choices}
    if answer.usage is not None:
        values["usage"] = usage_of(answer.usage)
    if answer.served.fingerprint is not None:
        values["system_fingerprint"] = answer.served.fingerprint
    return Reply(200, encode(shapes.answer(values)))


class Chunks:
    """Frames choices into chunks: what all chunks of an answer share, and where usage goes."""

    def __init__(
        self, style: Style, request: GenerateRequest, shared: Mapping[str, str | int], *, chat: bool
    ) -> None:
        self._style = style
        self._shared = {key: encode(value) for key, value in shared.items()}
        self._keys = style.chat_piece if chat else style.text_piece
        self._hole = "delta" if chat else "text"
        wanted = request.want.usage
        self._mode = style.usage if wanted == "final" else wanted
        self._per_index = choices_per_index(style, request)
        self._total = self._mode in ("each", "separate")
        self._usage: Usage | None = None
        self._held: tuple[int, bytes, dict[str, bytes]] | None = None
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def template(self, index: int) -> tuple[bytes, bytes]:
        """An ordinary chunk of this choice, cut where its delta or text belongs."""
        if index not in self._templates:
            head, _, tail = self.chunk(index, _HOLE).partition(_HOLE)
            self._templates[index] = head, tail
        return self._templates[index]

    def chunk(self, index: int, body: bytes, **more: bytes) -> bytes:
        """One chunk; ``more`` are a piece's further keys."""
        piece = {"finish_reason": b"null", **self._style.absent, **more}
        piece["index"] = self._number(index)
        piece[self._hole] = body
        return self._frame(b"[" + ordered(self._keys, piece) + b"]", self._ordinary_usage())

    def finish(self, index: int, body: bytes, more: dict[str, bytes]) -> bytes:
        """A choice's last chunk, held back if usage will go into it."""
        if self._mode not in ("finish", "each"):
            return self.chunk(index, body, **more)
        before = self._release()
        self._held = index, body, more
        return before

    def usage(self, usage: Usage) -> None:
        """Usage has come."""
        self._usage = usage
        if self._mode == "each":
            self._templates.clear()

    def served(self, served: Served) -> None:
        """The worker has told its fingerprint."""
        if served.fingerprint is not None:
            self._shared["system_fingerprint"] = encode(served.fingerprint)
            self._templates.clear()

    def end(self) -> bytes:
        """The rest: a finish chunk held back, the usage chunk, the dialect's end."""
        last = self._release(final=True)
        if self._total and self._usage is not None:
            last += self._frame(b"[]", encode(usage_of(self._usage)))
        return last + self._style.done

    def _release(self, *, final: bool = False) -> bytes:
        if self._held is None:
            return b""
        (index, body, more), self._held = self._held, None
        if final and self._mode == "finish" and self._usage is not None:
            piece = {**self._style.absent, **more, "index": self._number(index), self._hole: body}
            usage = encode(usage_of(self._usage))
            return self._frame(b"[" + ordered(self._keys, piece) + b"]", usage)
        return self.chunk(index, body, **more)

    def _number(self, index: int) -> bytes:
        return b"%d" % (index // self._per_index)

    def _ordinary_usage(self) -> bytes | None:
        if self._mode == "each":
            return b"null" if self._usage is None else encode(usage_of(self._usage))
        return b"null" if self._mode == "separate" else None

    def _frame(self, choices: bytes, usage: bytes | None) -> bytes:
        values = {**self._shared, "choices": choices}
        if usage is not None:
            values["usage"] = usage
        return self._style.prefix + ordered(self._style.chunk, values) + b"\n\n"
