"""The small shapes inside answers: usage, tool calls, log probabilities, keys in their order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from protocols.core.events import FinishReason, TokenLogprob, Usage
from protocols.core.request import ToolCall

encode_json = msgspec.json.Encoder().encode

MIN_LOGPROB = -9999.0
"""Stands for a log probability that JSON can't say (minus infinity), as in OpenAI's own answers."""


def format_object(keys: tuple[str, ...], values: Mapping[str, bytes]) -> bytes:
    """A JSON object of those ``keys`` that have a value, in their order; values are JSON."""
    form, present = _build_object_template(keys, tuple(values))
    return form % tuple(map(values.__getitem__, present))


@lru_cache(maxsize=256)
def _build_object_template(keys: tuple[str, ...], said: tuple[str, ...]) -> tuple[bytes, list[str]]:
    """What the object of a style's keys is filled into, and the keys that it has."""
    present = [key for key in keys if key in said]
    members = [b'"%b":%%b' % key.encode().replace(b"%", b"%%") for key in present]
    return b"{%b}" % b",".join(members), present


ObjectFactory = Callable[..., Struct]
"""Makes an object, to be encoded, of values that are named by key."""
MappingFactory = Callable[[Mapping[str, Any]], Struct]
"""The same of values by key. What the style has no key for is left out."""


@lru_cache(maxsize=256)
def create_object_factory(keys: tuple[str, ...], *known: tuple[str, bytes]) -> ObjectFactory:
    """For objects of a style's keys, in their order; ``known`` are values that some have, as JSON.

    It is the same for all styles that are alike in this.
    """
    values = dict(known)
    fields = [(key, Any, Raw(values[key]) if key in values else UNSET) for key in keys]
    return msgspec.defstruct("Shaped", fields)


@lru_cache(maxsize=256)
def create_mapping_factory(keys: tuple[str, ...], *known: tuple[str, bytes]) -> MappingFactory:
    """For the same objects, where there may be values of other keys."""
    names, made = frozenset(keys), create_object_factory(keys, *known)

    def shaped(values: Mapping[str, Any]) -> Struct:
        if not names.issuperset(values):
            values = {key: value for key, value in values.items() if key in names}
        return made(**values)

    return shaped


# --- usage ----------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the answer's tokens."""

    reasoning_tokens: int


class GenerationUsage(Struct):
    """The usage of a conversation or completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class EmbeddingUsage(Struct):
    """The usage of embeddings, which have no completion tokens."""

    prompt_tokens: int
    total_tokens: int


def build_usage(usage: Usage) -> GenerationUsage:
    """Usage as it is written; details only where the worker told them."""
    cached, thought = usage.cached_tokens, usage.reasoning_tokens
    return GenerationUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        UNSET if cached is None else PromptTokensDetails(cached),
        UNSET if thought is None else CompletionTokensDetails(thought),
    )


# --- tool calls -----------------------------------------------------------------------------------


class FunctionCallItem(Struct, omit_defaults=True):
    """A call's name and arguments; a later piece of a stream has arguments only."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallItem(Struct):
    """A tool call; in a stream with its ``index``, in later pieces without id and type."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallItem | UnsetType = UNSET


def build_tool_calls(calls: Sequence[ToolCall]) -> list[ToolCallItem]:
    """A whole answer's calls."""
    return [
        ToolCallItem(
            id=call.id, type="function", function=FunctionCallItem(call.name, call.arguments)
        )
        for call in calls
    ]


def map_finish_reason(
    reasons: Mapping[FinishReason, str], reason: FinishReason, *, called: bool, legacy: bool
) -> str:
    """The finish reason's wire name: an end after a tool call is ``tool_calls``."""
    if called and reason in ("eos", "stop", "tool_calls"):
        return "function_call" if legacy else reasons["tool_calls"]
    return reasons[reason]


# --- log probabilities ----------------------------------------------------------------------------


class TopLogprobItem(Struct):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """A token of a conversation's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobItem]


class ChatLogprobs(Struct):
    """Both keys are required."""

    content: list[ChatTokenLogprob] | None
    refusal: list[ChatTokenLogprob] | None = None


def build_chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The form of conversations."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                t.token,
                _clip_logprob(t.logprob),
                list(t.data if t.data is not None else t.token.encode()),
                [
                    TopLogprobItem(
                        top.token,
                        _clip_logprob(top.logprob),
                        list(top.data if top.data is not None else top.token.encode()),
                    )
                    for top in t.top
                ],
            )
            for t in tokens
        ]
    )


class CompletionLogprobs(Struct):
    """The older form, of completions: columns, and the offset of each token in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def build_completion_logprobs(
    tokens: Sequence[TokenLogprob], offset: int = 0
) -> CompletionLogprobs:
    """The form of completions; ``offset`` is where the first token stands in the choice's text."""
    offsets = []
    for t in tokens:
        offsets.append(offset)
        offset += len(t.token)
    return CompletionLogprobs(
        [_format_token(t.token, t.data) for t in tokens],
        [None if t.logprob is None else _clip_logprob(t.logprob) for t in tokens],
        [
            {_format_token(top.token, top.data): _clip_logprob(top.logprob) for top in t.top}
            or None
            for t in tokens
        ]
        if any(t.top for t in tokens)
        else None,
        offsets,
    )


def _format_token(token: str, data: bytes | None) -> str:
    """A token that is no text is shown by its bytes, as in OpenAI's own answers."""
    return token if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _clip_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None or not logprob > MIN_LOGPROB else logprob
