"""A request made narrower, step by step, for a worker that takes less; each step's loss is told."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from gateway.core.loss import Loss, Reason
from gateway.core.types import EmbedRequest, GenerateRequest, Part

RequestT = TypeVar("RequestT", GenerateRequest, EmbedRequest)


class Narrowing(Generic[RequestT]):
    """What is left of a request, and what was lost on the way.

    ``names`` gives the client's wire name of a path, as from ``Dialect.names``.
    """

    def __init__(self, request: RequestT, names: Mapping[str, str]) -> None:
        self.request: RequestT = request
        self.losses: list[Loss] = []
        self._names = names

    def set(self, path: str, value: Any) -> None:
        """Put a value at a path, of which nothing is told."""
        section, _, name = path.rpartition(".")
        if section:
            name, value = section, replace(getattr(self.request, section), **{name: value})
        self.request = replace(self.request, **{name: value})

    def tell(self, path: str, reason: Reason, detail: str = "", *, wire: str = "") -> None:
        """What becomes of the field at a path; ``wire`` is its name if the client has none."""
        shown = self._names.get(path, wire or path.rpartition(".")[2])
        self.losses.append(Loss(shown, reason, detail, path))

    def drop(self, *paths: str, detail: str = "") -> None:
        """Leave out what is set at these paths."""
        for path in paths:
            got = self._at(path)
            if got is not None and got != ():
                self.set(path, () if isinstance(got, tuple) else None)
                self.tell(path, "dropped", detail)

    def _at(self, path: str) -> Any:
        """What is set there; None where a section is absent."""
        section, _, name = path.rpartition(".")
        holder = getattr(self.request, section) if section else self.request
        return getattr(holder, name, None)

    def own_extra(self, source: str) -> None:
        """Leave out unknown fields unless they are those of ``source``'s own clients."""
        if self.request.source != source:
            self.losses += [Loss(name, "dropped") for name in self.request.extra]
            self.request = replace(self.request, extra={})


def alone(narrow: Narrowing[GenerateRequest]) -> None:
    """One prompt: the first."""
    if len(narrow.request.prompts) > 1:
        narrow.tell("prompts", "dropped", "one at a time", wire="prompt")
        narrow.set("prompts", narrow.request.prompts[:1])


def only_parts(narrow: Narrowing[GenerateRequest], kinds: Mapping[type[Part], str]) -> None:
    """Messages without parts of these kinds; the values say what they are, in reports."""
    found = {type(part) for message in narrow.request.messages for part in message.parts}
    if lost := sorted(shown for kind, shown in kinds.items() if kind in found):
        narrow.tell("messages", "dropped", ", ".join(lost))
        kept = tuple(
            replace(m, parts=tuple(part for part in m.parts if type(part) not in kinds))
            for m in narrow.request.messages
        )
        narrow.set("messages", kept)


def without_logprobs(narrow: Narrowing[GenerateRequest], detail: str = "") -> None:
    """No log probabilities."""
    if narrow.request.logprobs is not None:
        narrow.set("logprobs", None)
        narrow.tell("logprobs.top", "dropped", detail)
