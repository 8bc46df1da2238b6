"""Annotations of a text, such as the citations of a web search, between both of OpenAI's APIs.

A citation of a URL has the same facts in both: where in the text it stands, the URL and the title.
The Responses API has them in the annotation, the chat API in an object in it. Annotations of other
types (files, containers) are those of the Responses API alone, and are reported as lost.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from protocols.core.events import (
    ChoiceEnd,
    Event,
    RefusalDelta,
    ResponseExtra,
    TextDelta,
    ToolCallStart,
)
from protocols.core.interfaces import ResponseDecoder
from protocols.openai.responses_api.decoder import ONLY_PART
from protocols.openai.responses_api.requests import SOURCE

_KIND: Final = "url_citation"
_ANNOTATIONS: Final = "annotations"
_TIER: Final = ("service_tier",)
"""A key that chat responses and those of the Responses API share."""
_PLACES: Final = ("start_index", "end_index")


def write_chat_annotation(annotation: Any, offset: int) -> dict[str, Any] | None:
    """An annotation of the Responses API for chat; None if that has no such type.

    ``offset``: so many characters stand before the text of the annotation.
    """
    match annotation:
        case {"type": "url_citation", "url": str(), **fields}:
            places: dict[str, Any] = {key: fields[key] for key in _PLACES if key in fields}
            moved = {key: at + offset for key, at in places.items() if isinstance(at, int)}
            return {"type": _KIND, _KIND: {"url": annotation["url"], **fields, **moved}}
        case _:
            return None


def write_responses_annotation(annotation: Any) -> dict[str, Any] | None:
    """An annotation of chat for the Responses API; None if it has another type."""
    match annotation:
        case {"type": "url_citation", "url_citation": {"url": str()} as fields, **more}:
            return {"type": _KIND, **fields, **more}
        case _:
            return None


class _AnnotationDecoder(ABC):
    """A decoder whose annotations are those of the client's API."""

    def __init__(self, decoder: ResponseDecoder, source: str) -> None:
        """``source`` is the protocol of chat completions."""
        self._decoder, self._source = decoder, source

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._map_events(self._decoder.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._map_events(self._decoder.close())

    def _map_events(self, events: Sequence[Event]) -> Sequence[Event]:
        return [one for event in events for one in self._map_event(event)]

    @abstractmethod
    def _map_event(self, event: Event) -> Sequence[Event]:
        """The events in the place of one."""


class ChatAnnotationDecoder(_AnnotationDecoder):
    """Of a Responses API worker, for chat clients."""

    def __init__(self, decoder: ResponseDecoder, source: str) -> None:
        super().__init__(decoder, source)
        self._length = 0
        """The characters of the text so far."""
        self._message_start = 0
        """Those before the last message: annotations count from its beginning."""
        self._written: list[Any] = []

    def _map_event(self, event: Event) -> Sequence[Event]:
        match event:
            case TextDelta(text):
                self._length += len(text)
            case ResponseExtra(scope="item"):
                offset, self._message_start = self._message_start, self._length
                return self._map_keys(event, offset)
            case ChoiceEnd() if self._written:
                values = (((_ANNOTATIONS,), self._written),)
                return (ResponseExtra(self._source, "message", values), event)
            case _:
                pass
        return (event,)

    def _map_keys(self, event: ResponseExtra, offset: int) -> Sequence[Event]:
        """The keys that are left of an item."""
        values = dict(event.values)
        listed = values.pop((ONLY_PART, _ANNOTATIONS), None)
        if not isinstance(listed, list):
            return (event,)
        found = [write_chat_annotation(one, offset) for one in listed]
        self._written += [one for one in found if one is not None]
        if lost := [one for one, citation in zip(listed, found, strict=True) if citation is None]:
            values[ONLY_PART, _ANNOTATIONS] = lost
        return (replace(event, values=tuple(values.items())),) if values else ()


class ResponsesAnnotationDecoder(_AnnotationDecoder):
    """Of a chat worker, for clients of the Responses API: they follow the text.

    The service tier, which both APIs name alike, becomes that of the response, too.
    """

    def __init__(self, decoder: ResponseDecoder, source: str) -> None:
        super().__init__(decoder, source)
        self._pending: list[Any] = []
        self._has_text = False

    def _map_event(self, event: Event) -> Sequence[Event]:
        match event:
            case TextDelta() | RefusalDelta():
                self._has_text = True
            case ResponseExtra(scope="message"):
                values = dict(event.values)
                listed = values.pop((_ANNOTATIONS,), None)
                if not isinstance(listed, list):
                    return (event,)
                self._pending += listed
                return (replace(event, values=tuple(values.items())),) if values else ()
            case ResponseExtra(scope="response", values=found):
                tier = tuple([one for one in found if one[0] == _TIER])
                rest = tuple([one for one in found if one[0] != _TIER])
                own = replace(event, source=SOURCE, values=tier)
                return [one for one in (own, replace(event, values=rest)) if one.values]
            case ChoiceEnd() | ToolCallStart():
                before, self._has_text = self._take_pending(), False
                return (*before, event)
            case _:
                pass
        return (event,)

    def _take_pending(self) -> list[Event]:
        """The annotations of the text before; those without one are reported as lost."""
        listed, self._pending = self._pending, []
        written = [write_responses_annotation(one) if self._has_text else None for one in listed]
        lost = [one for one, found in zip(listed, written, strict=True) if found is None]
        found = [one for one in written if one is not None]
        path = (ONLY_PART, _ANNOTATIONS)
        events: list[Event] = []
        if lost:
            values = (((_ANNOTATIONS,), lost),)
            events.append(ResponseExtra(self._source, "message", values))
        if found:
            events.append(ResponseExtra(SOURCE, "item", ((path, found),), call_index=-1))
        return events
