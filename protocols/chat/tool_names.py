"""Names of tools that are too long for a worker: shortened in requests, restored in responses.

OpenAI allows 64 characters, Anthropic 128, and open workers any number.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from protocols.core.events import Event, ToolCallStart
from protocols.core.interfaces import ResponseDecoder
from protocols.core.request import AllowedTools, GenerationRequest, Message, NamedTool, ToolChoice

MAX_NAME_LENGTH: Final = 64
_DIGEST_LENGTH: Final = 8


def shorten_name(name: str, salt: str = "") -> str:
    """A name of at most 64 characters, with a digest of the whole name and of ``salt``."""
    digest = hashlib.sha256((name + salt).encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{name[: MAX_NAME_LENGTH - _DIGEST_LENGTH - 1]}_{digest}"


def limit_name(name: str) -> str:
    """The name as a worker gets it: shortened only if it is too long."""
    return name if len(name) <= MAX_NAME_LENGTH else shorten_name(name)


def find_long_names(request: GenerationRequest) -> Mapping[str, str]:
    """The names of the request's tools that are too long, by their short forms."""
    return {
        limit_name(tool.name): tool.name
        for tool in request.tools
        if len(tool.name) > MAX_NAME_LENGTH
    }


def shorten_tool_names(request: GenerationRequest) -> GenerationRequest:
    """The request with no name of a tool that is too long, in its tools and its messages."""
    calls = (call for message in request.messages for call in message.tool_calls)
    names = (one.name for ones in (request.tools, calls) for one in ones)
    if all(len(name) <= MAX_NAME_LENGTH for name in names):
        return request
    return replace(
        request,
        tools=tuple(replace(tool, name=limit_name(tool.name)) for tool in request.tools),
        tool_choice=_limit_choice(request.tool_choice),
        messages=tuple(map(_limit_message, request.messages)),
    )


def _limit_choice(choice: ToolChoice | None) -> ToolChoice | None:
    match choice:
        case NamedTool(name):
            return NamedTool(limit_name(name))
        case AllowedTools(mode, names):
            return AllowedTools(mode, tuple(map(limit_name, names)))
        case _:
            return choice


def _limit_message(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = tuple(replace(call, name=limit_name(call.name)) for call in message.tool_calls)
    return replace(message, tool_calls=calls)


class ToolNameDecoder:
    """A decoder whose tool calls have the client's own names. See ``find_long_names``."""

    def __init__(self, decoder: ResponseDecoder, names: Mapping[str, str]) -> None:
        self._decoder = decoder
        self._names = names

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._restore_names(self._decoder.feed(data))

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        return self._restore_names(self._decoder.close())

    def _restore_names(self, events: Sequence[Event]) -> Sequence[Event]:
        return [
            replace(event, name=self._names.get(event.name, event.name))
            if isinstance(event, ToolCallStart)
            else event
            for event in events
        ]
