"""A request made narrower, step by step, for a worker that takes less; each step's loss is told."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from protocols.core.loss import LossReason, UnsupportedParameter
from protocols.core.request import ContentPart, EmbeddingRequest, GenerationRequest

RequestT = TypeVar("RequestT", GenerationRequest, EmbeddingRequest)


class RequestReducer(Generic[RequestT]):
    """What is left of a request, and what was lost on the way.

    ``names`` gives the client's wire name of a path, as from ``Dialect.names``.
    """

    def __init__(self, request: RequestT, names: Mapping[str, str]) -> None:
        self.request: RequestT = request
        self.unsupported_parameters: list[UnsupportedParameter] = []
        self._field_names = names

    def set_field(self, path: str, value: Any) -> None:
        """Put a value at a path, of which nothing is told."""
        section, _, name = path.rpartition(".")
        if section:
            name, value = section, replace(getattr(self.request, section), **{name: value})
        self.request = replace(self.request, **{name: value})

    def report(self, path: str, reason: LossReason, detail: str = "", *, wire: str = "") -> None:
        """What becomes of the field at a path; ``wire`` is its name if the client has none."""
        shown = self._field_names.get(path, wire or path.rpartition(".")[2])
        self.unsupported_parameters.append(UnsupportedParameter(shown, reason, detail, path))

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
            self.unsupported_parameters += [
                UnsupportedParameter(name, "dropped") for name in self.request.extra
            ]
            self.request = replace(self.request, extra={})


def keep_first_prompt(narrow: RequestReducer[GenerationRequest]) -> None:
    """One prompt: the first."""
    if len(narrow.request.prompts) > 1:
        narrow.report("prompts", "dropped", "one at a time", wire="prompt")
        narrow.set_field("prompts", narrow.request.prompts[:1])


def remove_parts(
    narrow: RequestReducer[GenerationRequest], kinds: Mapping[type[ContentPart], str]
) -> None:
    """Messages without parts of these kinds; the values say what they are, in reports."""
    found = {type(part) for message in narrow.request.messages for part in message.parts}
    if lost := sorted(shown for kind, shown in kinds.items() if kind in found):
        narrow.report("messages", "dropped", ", ".join(lost))
        kept = tuple(
            replace(m, parts=tuple(part for part in m.parts if type(part) not in kinds))
            for m in narrow.request.messages
        )
        narrow.set_field("messages", kept)


def remove_logprobs(narrow: RequestReducer[GenerationRequest], detail: str = "") -> None:
    """No log probabilities."""
    if narrow.request.logprobs is not None:
        narrow.set_field("logprobs", None)
        narrow.report("logprobs.top", "dropped", detail)
