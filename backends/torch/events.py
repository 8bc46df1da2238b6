"""Events of the engine to core events and errors."""

import array
import sys

from backends.torch.ipc import (
    ChoiceEndEvent,
    ClassesEvent,
    EmbeddingsEvent,
    EngineEvent,
    EngineToken,
    PrefillDoneEvent,
    PromptEchoEvent,
    ReasoningEvent,
    RequestFailedEvent,
    ScoresEvent,
    TextEvent,
    ToolArgumentsEvent,
    ToolCallEvent,
)
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    Overloaded,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Classification,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    RelevanceScore,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
)


def map_engine_event(event: EngineEvent) -> list[Event]:
    """Map an engine event to core events. The backend maps the end of a request itself."""
    match event:
        case PrefillDoneEvent(_, prompt_tokens):
            return [StreamStart(prompt_tokens)]
        case TextEvent(_, choice, text, count, ids, tokens):
            return [TextDelta(text, choice, count, ids, tuple(map(_build_token_logprob, tokens)))]
        case PromptEchoEvent(_, choice, text, tokens):
            return [PromptEcho(choice, text, tuple(map(_build_token_logprob, tokens)))]
        case ToolCallEvent(_, choice, call, number, name):
            return [ToolCallStart(choice, call, number, name)]
        case ToolArgumentsEvent(_, choice, call, text):
            return [ToolCallDelta(choice, call, text)]
        case ReasoningEvent(_, choice, text):
            return [ReasoningDelta(text, choice)]
        case ChoiceEndEvent(_, choice, reason, stop):
            return [ChoiceEnd(reason, choice, stop)]
        case EmbeddingsEvent(_, first, dimensions, data):
            return list(_decode_vectors(first, dimensions, data))
        case ScoresEvent(_, scores):
            return [RelevanceScore(index, score) for index, score in enumerate(scores)]
        case ClassesEvent(_, labels, numbers):
            return [
                Classification(index, *one)
                for index, one in enumerate(zip(labels, numbers, strict=True))
            ]
        case _:
            return []


def _decode_vectors(first_index: int, dimensions: int, data: bytes) -> list[Embedding]:
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    offsets = range(0, len(values), dimensions)
    return [
        Embedding(first_index + number, tuple(values[at : at + dimensions]))
        for number, at in enumerate(offsets)
    ]


def _build_token_logprob(token: EngineToken) -> TokenLogprob:
    text, data = _decode_token(token.data)
    top = tuple(
        TopLogprob(
            *_decode_token(item.data)[:1], item.logprob, item.id, _decode_token(item.data)[1]
        )
        for item in token.top
    )
    return TokenLogprob(text, token.logprob, top, token.id, data)


def _decode_token(data: bytes) -> tuple[str, bytes | None]:
    """The text of a token, and its bytes if they are not the text in UTF-8."""
    text = data.decode(errors="replace")
    return text, None if text.encode() == data else data


def build_engine_error(event: RequestFailedEvent) -> GatewayError:
    """The error of a failed request."""
    match event.kind:
        case "invalid":
            return InvalidParameter(event.message, param=event.param or "")
        case "unsupported":
            return UnsupportedFeature(event.message, param=event.param)
        case "too_long":
            return ContextTooLong(
                event.message, param=event.param, tokens=event.tokens, limit=event.limit
            )
        case "overloaded":
            return Overloaded(event.message)
        case "deadline":
            return DeadlineExceeded(event.message)
        case "failed":
            return WorkerFailed(event.message)
