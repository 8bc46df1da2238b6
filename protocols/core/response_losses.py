"""What a client does not get of a worker's answer, or gets as something else.

An encoder declares what it writes. What it does not declare is reported as dropped, so that a new
kind of content, or a new encoder, loses nothing in silence.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Raw

from protocols.core.call_arguments import make_function_call, read_object, wrap_text
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FieldValues,
    HostedToolCall,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import list_paths
from protocols.core.interfaces import ResponseEncoder, SupportsHostedTools
from protocols.core.loss import LossReason, UnsupportedParameter, list_names
from protocols.core.request import ToolCall

LossyEvent = (
    HostedToolCall
    | ResponseExtra
    | ReasoningDelta
    | RefusalDelta
    | ToolCallStart
    | ChoiceEnd
    | Usage
    | ResponseMetadata
)
"""The events of which an encoder may lose something."""
ALL_WRITTEN: Final[Mapping[type[Event], LossReason]] = {}
"""What is lost by an encoder that writes each kind of content as what it is."""
WITHOUT_REASONING: Final[Mapping[type[Event], LossReason]] = {ReasoningDelta: "dropped"}
"""What is lost where only clients that ask for reasoning get it."""
AS_TEXT: Final[Mapping[type[Event], LossReason]] = {RefusalDelta: "approximated"}
"""What is lost where a refusal is text like any other."""
ONE_TEXT: Final[Mapping[type[Event], LossReason]] = {
    ReasoningDelta: "approximated",
    RefusalDelta: "approximated",
    ToolCallStart: "dropped",
}
"""What is lost where an answer is nothing but text."""
TEXT_AND_REFUSAL: Final[Mapping[type[Event], LossReason]] = {
    **ONE_TEXT,
    ReasoningDelta: "dropped",
}
"""What is lost where reasoning is left out, too."""
NOTHING_WRITTEN: Final[Mapping[type[Event], LossReason]] = dict.fromkeys(ONE_TEXT, "dropped")
"""What is lost where an encoder says nothing about it."""


_MATCHED_STOPS: Final = frozenset({"stop_reason", "matched_stop", "stop_sequence"})
"""What workers call the stop string that matched."""
FINGERPRINT: Final = "system_fingerprint"
NO_DETAILS: Final[frozenset[str]] = frozenset()
_DETAIL_PATHS: Final[Mapping[str, str]] = {
    "cached_tokens": "response.usage.prompt_tokens_details.cached_tokens",
    "cache_write_tokens": "response.usage.prompt_tokens_details.cache_write_tokens",
    "reasoning_tokens": "response.usage.completion_tokens_details.reasoning_tokens",
}
USAGE_DETAILS: Final = frozenset(_DETAIL_PATHS)
"""All counts of an answer's usage that are part of another."""


def find_losses(
    event: LossyEvent, encoder: ResponseEncoder | None
) -> Iterable[UnsupportedParameter]:
    """What the client does not get of an event. None as encoder: it is not written at all."""
    choice = f"response.choices[{getattr(event, 'index', 0)}]"
    match event:
        case Usage():
            return _find_lost_counts(event, get_written_details(encoder))
        case ResponseMetadata():
            if event.fingerprint is None:
                return ()
            is_own = event.source and getattr(encoder, "extra_source", None) == event.source
            is_written = is_own or FINGERPRINT in get_written_details(encoder)
            return () if is_written else list_names((f"response.{FINGERPRINT}",))
        case HostedToolCall():
            is_written = isinstance(encoder, SupportsHostedTools)
            path = f"response.output[{event.place}].{event.kind}"
            return () if is_written else list_names((path,))
        case ResponseExtra():
            return list_names(list_paths(event.path, _select_unwritten(event, encoder)))
        case ChoiceEnd():
            hidden = getattr(encoder, "hidden_reasons", ())
            is_written = event.lost_word is None and event.finish_reason not in hidden
            return () if is_written else list_names((f"{choice}.finish_reason",), "approximated")
        case ReasoningDelta():
            return _find_lost_reasoning(event, encoder, f"{choice}.message.reasoning_content")
        case RefusalDelta():
            return _find_lost_content(event, encoder, f"{choice}.message.refusal")
        case _:
            path = _locate_call(event.call_index, event.index)
            return _find_lost_content(event, encoder, path)


def _select_unwritten(event: ResponseExtra, encoder: ResponseEncoder | None) -> FieldValues:
    """The keys that the encoder does not write."""
    if getattr(encoder, "extra_source", None) != event.source:
        if not getattr(encoder, "writes_matched_stop", False):
            return event.values
        return tuple([one for one in event.values if not _is_matched_stop(*one)])
    writes_key = getattr(encoder, "writes_key", None)
    if writes_key is None:
        return ()
    return tuple([one for one in event.values if not writes_key(event, one[0])])


def _is_matched_stop(path: tuple[str, ...], value: object) -> bool:
    return path[-1] in _MATCHED_STOPS and isinstance(value, str)


def _find_lost_counts(usage: Usage, written: frozenset[str]) -> Iterable[UnsupportedParameter]:
    """Nobody misses a count of 0, nor one that the gateway made."""
    if usage.source != "worker":
        return ()
    counts = [name for name in USAGE_DETAILS - written if getattr(usage, name)]
    return list_names([path for name, path in _DETAIL_PATHS.items() if name in counts])


def get_written_details(encoder: ResponseEncoder | None) -> frozenset[str]:
    """The details of the usage that an encoder writes, and whether it writes a fingerprint."""
    details: frozenset[str] = getattr(encoder, "written_details", NO_DETAILS)
    return details


def get_content_losses(encoder: ResponseEncoder | None) -> Mapping[type[Event], LossReason]:
    """What becomes of each kind of content; see ``WritesContentKinds``."""
    losses: Mapping[type[Event], LossReason] = getattr(encoder, "content_losses", NOTHING_WRITTEN)
    return losses


def get_single_losses(encoder: ResponseEncoder | None) -> Sequence[UnsupportedParameter]:
    """What an encoder has left out so far of what it can write; see ``ReportsLosses``."""
    losses: Sequence[UnsupportedParameter] = getattr(encoder, "losses", ())
    return losses


class CallLosses(list[UnsupportedParameter]):
    """The tool calls that an encoder leaves out, or whose arguments it writes as something else."""

    def add(self, call: int, choice: int = 0) -> None:
        """Add a call."""
        self.append(UnsupportedParameter(_locate_call(call, choice), "dropped"))

    def add_damaged(self, call: int) -> None:
        """Add the arguments of a call, which are no object."""
        path = f"{_locate_call(call, 0)}.function.arguments"
        self.append(UnsupportedParameter(path, "approximated", "no JSON object"))

    def read_object(self, call: ToolCall, index: int, *, is_cut: bool) -> Raw | None:
        """The arguments of a call, for a protocol in which they are an object.

        Others become one argument. A call that was cut is None, and is to be left out.
        """
        text = make_function_call(call).arguments
        arguments = read_object(text)
        if arguments is None and is_cut:
            self.add(index)
        elif arguments is None:
            self.add_damaged(index)
            return wrap_text(text)
        return arguments

    def add_arguments(self, call: int, values: FieldValues) -> None:
        """Add arguments of a call of a custom tool, which has its input alone."""
        extra = ResponseExtra("", "tool_call", values, 0, call)
        self += list_names(list_paths(extra.path, extra.values))


def _locate_call(call: int, choice: int) -> str:
    """The path of a tool call in an answer."""
    return f"response.choices[{choice}].message.tool_calls[{call}]"


def _find_lost_content(
    event: LossyEvent, encoder: ResponseEncoder | None, path: str
) -> Iterable[UnsupportedParameter]:
    reason = get_content_losses(encoder).get(type(event))
    return () if reason is None else list_names((path,), reason)


def _find_lost_reasoning(
    event: ReasoningDelta, encoder: ResponseEncoder | None, path: str
) -> Iterator[UnsupportedParameter]:
    if event.text:
        yield from _find_lost_content(event, encoder, path)
    if event.at:
        writes_signature = getattr(encoder, "writes_signature", None)
        if writes_signature is None or not writes_signature(event):
            yield from list_names((event.at,))
