"""The request that is told by a body which is passed on, for who has to know more of it."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct

from gateway.core.types import EmbedRequest, GenerateRequest, Message, Request, TextPart

Kind = Literal["chat", "completion", "embedding"]


class Relayed(Struct, frozen=True):
    """A body that was found right by its shape, and what it does not tell."""

    kind: Kind
    body: Any
    model: str
    stream: bool
    timeout: float | None

    def request(self) -> Request:
        """The request, as far as choosing a worker, and counting what it has, need it."""
        body, kind = self.body, self.kind
        user, n = getattr(body, "user", UNSET), getattr(body, "n", UNSET)
        labels = {} if user is UNSET else {"user": user}
        if kind == "embedding":
            return EmbedRequest(
                model=self.model,
                inputs=_several(body.input),
                timeout=self.timeout,
                labels=labels,
            )
        return GenerateRequest(
            model=self.model,
            kind=kind,
            messages=_turns(body.messages) if kind == "chat" else (),
            prompts=_several(body.prompt) if kind == "completion" else (),
            n=None if n is UNSET else n,
            stream=self.stream,
            timeout=self.timeout,
            labels=labels,
        )

    def bare(self) -> Request:
        """The same, only as far as reading the answer needs it."""
        body, kind = self.body, self.kind
        if kind == "embedding":
            return EmbedRequest(model=self.model, inputs=_several(body.input))
        n = getattr(body, "n", UNSET)
        return GenerateRequest(
            model=self.model,
            kind=kind,
            prompts=_several(body.prompt) if kind == "completion" else (),
            n=None if n is UNSET else n,
            stream=self.stream,
        )


def _several(texts: str | list[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _turns(messages: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(
        [
            Message(
                one.role,
                (TextPart(one.content if isinstance(one.content, str) else _joined(one.content)),),
            )
            for one in messages
        ]
    )


def _joined(parts: Sequence[Any]) -> str:
    return "".join([part.text for part in parts])
