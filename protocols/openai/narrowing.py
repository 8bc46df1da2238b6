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
        self.unsupported_parameters: list[Loss] = []
        self._field_names = names

    def set_field(self, path: str, value: Any) -> None:
        """Put a value at a path, of which nothing is told."""
        section, _, name = path.rpartition(".")
        if section:
            name, value = section, replace(getattr(self.request, section), **{name: value})
        self.request = replace(self.request, **{name: value})

    def report(self, path: str, reason: Reason, detail: str = "", *, wire: str = "") -> None:
        """What becomes of the field at a path; ``wire`` is its name if the client has none."""
        shown = self._field_names.get(path, wire or path.rpartition(".")[2])
        self.unsupported_parameters.append(Loss(shown, reason, detail, path))

    def drop_fields(self, *paths: str, detail: str = "") -> None:
        """Leave out what is set at these paths."""
        for path in paths:
            got = self._get_field(path)
            if got is not None and got != ():
                self.set_field(path, () if isinstance(got, tuple) else None)
                self.report(path, "dropped", detail)

    def _get_field(self, path: str) -> Any:
        """What is set there; None where a section is absent."""
        section, _, name = path.rpartition(".")
        holder = getattr(self.request, section) if section else self.request
        return getattr(holder, name, None)

    def drop_foreign_extra(self, source: str) -> None:
        """Leave out unknown fields unless they are those of ``source``'s own clients."""
        if self.request.source != source:
            self.unsupported_parameters += [Loss(name, "dropped") for name in self.request.extra]
            self.request = replace(self.request, extra={})


def alone(narrow: Narrowing[GenerateRequest]) -> None:
    """One prompt: the first."""
    if len(narrow.request.prompts) > 1:
        narrow.report("prompts", "dropped", "one at a time", wire="prompt")
        narrow.set_field("prompts", narrow.request.prompts[:1])


def only_parts(narrow: Narrowing[GenerateRequest], kinds: Mapping[type[Part], str]) -> None:
    """Messages without parts of these kinds; the values say what they are, in reports."""
    found = {type(part) for message in narrow.request.messages for part in message.parts}
    if lost := sorted(shown for kind, shown in kinds.items() if kind in found):
        narrow.report("messages", "dropped", ", ".join(lost))
        kept = tuple(
            replace(m, parts=tuple(part for part in m.parts if type(part) not in kinds))
            for m in narrow.request.messages
        )
        narrow.set_field("messages", kept)


def without_logprobs(narrow: Narrowing[GenerateRequest], detail: str = "") -> None:
    """No log probabilities."""
    if narrow.request.logprobs is not None:
        narrow.set_field("logprobs", None)
        narrow.report("logprobs.top", "dropped", detail)
