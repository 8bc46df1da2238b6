"""The request that is told by a body which is passed on."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET

from protocols.core.request import EmbeddingRequest, GenerationRequest, Message, Request, TextPart

RequestKind = Literal["chat", "completion", "embedding"]


def request_of(
    kind: RequestKind, body: Any, model: str, *, stream: bool, timeout: float | None
) -> Request:
    """The request, as far as choosing a worker, counting, and reading the answer need it.

    ``body`` was found right by its shape; the others it does not tell.
    """
    user, n = getattr(body, "user", UNSET), getattr(body, "n", UNSET)
    labels = {} if user is UNSET else {"user": user}
    if kind == "embedding":
        inputs = _as_tuple(body.input)
        return EmbeddingRequest(model=model, inputs=inputs, timeout=timeout, labels=labels)
    return GenerationRequest(
        model=model,
        kind=kind,
        messages=_read_messages(body.messages) if kind == "chat" else (),
        prompts=_as_tuple(body.prompt) if kind == "completion" else (),
        n=None if n is UNSET else n,
        stream=stream,
        timeout=timeout,
        labels=labels,
    )


def _as_tuple(texts: str | list[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(
        [
            Message(
                one.role,
                (
                    TextPart(
                        one.content
                        if isinstance(one.content, str)
                        else _join_text_parts(one.content)
                    ),
                ),
            )
            for one in messages
        ]
    )


def _join_text_parts(parts: Sequence[Any]) -> str:
    return "".join([part.text for part in parts])
