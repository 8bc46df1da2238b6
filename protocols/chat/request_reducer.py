"""Removes what a worker does not support from a request, and reports it."""

from collections.abc import Mapping
from typing import Any, Generic

from msgspec.structs import replace

from protocols.chat.upstream import RequestT
from protocols.core.extra import list_paths
from protocols.core.loss import LossReason, UnsupportedParameter, find_unseen_content
from protocols.core.request import ContentPart, GenerationRequest


class RequestReducer(Generic[RequestT]):
    """The remaining request, and the losses so far.

    ``names`` maps paths to the client's wire names, as of ``ClientAdapter.field_names``.
    """

    def __init__(self, request: RequestT, names: Mapping[str, str]) -> None:
        self.request: RequestT = request
        self.unsupported_parameters: list[UnsupportedParameter] = []
        self._field_names = names

    def set_field(self, path: str, value: Any) -> None:
        """Set a value at a path, without a loss."""
        section, _, name = path.rpartition(".")
        if section:
            name, value = section, replace(getattr(self.request, section), **{name: value})
        self.request = replace(self.request, **{name: value})

    def report(self, path: str, reason: LossReason, detail: str = "", *, wire: str = "") -> None:
        """Report a loss at a path; ``wire`` is its name if the client has none."""
        field_name = self._field_names.get(path, wire or path.rpartition(".")[2])
        self.unsupported_parameters.append(UnsupportedParameter(field_name, reason, detail, path))

    def drop_fields(self, *paths: str, detail: str = "") -> None:
        """Drop the values set at these paths."""
        for path in paths:
            value = self._get_field(path)
            if value is not None and value != ():
                self.set_field(path, () if isinstance(value, tuple) else None)
                self.report(path, "dropped", detail)

    def _get_field(self, path: str) -> Any:
        """The value set at a path; None if a section is absent."""
        section, _, name = path.rpartition(".")
        section_value = getattr(self.request, section) if section else self.request
        return getattr(section_value, name, None)

    def drop_foreign_extra(self, source: str) -> None:
        """Drop unknown fields unless they are from clients of ``source``."""
        if self.request.source != source:
            self.unsupported_parameters += [
                UnsupportedParameter(name, "dropped") for name in self.request.extra
            ]
            self.request = replace(self.request, extra={})

    def drop_field_extra(self, name: str) -> None:
        """Drop the unknown keys of a field that workers do not get."""
        request: Any = self.request
        for extra in request.field_extra:
            if extra.at == name:
                paths = list_paths(extra.at, extra.values.items())
                self.unsupported_parameters += [UnsupportedParameter(p, "dropped") for p in paths]
        kept = tuple([one for one in request.field_extra if one.at != name])
        self.request = replace(request, field_extra=kept)


def keep_first_prompt(reducer: RequestReducer[GenerationRequest]) -> None:
    """Keep only the first prompt."""
    if len(reducer.request.prompts) > 1:
        reducer.report("prompts", "dropped", "one at a time", wire="prompt")
        reducer.set_field("prompts", reducer.request.prompts[:1])


def remove_parts(
    reducer: RequestReducer[GenerationRequest], kinds: Mapping[type[ContentPart], str]
) -> None:
    """Drop content parts of these kinds; the values are their names in reports."""
    if losses := find_unseen_content(reducer.request.messages, kinds):
        reducer.unsupported_parameters += losses
        messages = tuple(
            replace(m, parts=tuple(part for part in m.parts if type(part) not in kinds))
            for m in reducer.request.messages
        )
        reducer.set_field("messages", messages)


def remove_logprobs(reducer: RequestReducer[GenerationRequest], detail: str = "") -> None:
    """Drop log probabilities."""
    if reducer.request.logprobs is not None:
        reducer.set_field("logprobs", None)
        reducer.report("logprobs.top", "dropped", detail)
