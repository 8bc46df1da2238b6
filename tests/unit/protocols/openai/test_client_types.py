"""Encoded responses are valid for the types of OpenAI's client, strictly."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from protocols.chat.embeddings import EmbeddingEncoder
from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import ResponseContext
from protocols.core.request import EmbeddingRequest, GenerationRequest
from protocols.openai.endpoints import OpenAI

CHAT = GenerationRequest(model="m", kind="chat")
TEXT = GenerationRequest(model="m", kind="completion", prompts=("a",))
TOKEN = TokenLogprob("a", -0.5, (TopLogprob("b", -1.0),))
USAGE = Usage(2, 3, cached_tokens=1, reasoning_tokens=1)
TURNS: dict[str, tuple[Event, ...]] = {
    "text": (
        TextDelta("a", logprobs=(TOKEN,)),
        TextDelta("b"),
        ChoiceEnd("stop", matched_stop="x"),
        USAGE,
        StreamEnd(),
    ),
    "call": (
        ToolCallStart(0, 0, "c", "f"),
        ToolCallDelta(0, 0, "{}"),
        ChoiceEnd("eos"),
        USAGE,
        StreamEnd(),
    ),
    "aside": (ReasoningDelta("hm"), RefusalDelta("no"), ChoiceEnd("content_filter"), StreamEnd()),
}


def accumulate_events(events: Sequence[Event]) -> ResponseAccumulator:
    fold = ResponseAccumulator()
    fold.add(events)
    return fold


@pytest.mark.parametrize("name", TURNS)
def test_chat_response_matches_openai_types(response_context: ResponseContext, name: str) -> None:
    reply = ChatEncoder(ResponseStyle(), CHAT, response_context).encode_unary(
        accumulate_events(TURNS[name]).result()
    )
    assert ChatCompletion.model_validate_json(reply.body, strict=True).choices[0].index == 0


@pytest.mark.parametrize("name", TURNS)
def test_chat_stream_matches_openai_types(response_context: ResponseContext, name: str) -> None:
    encoder = ChatEncoder(ResponseStyle(), replace(CHAT, stream=True), response_context)
    lines = encoder.encode_events(TURNS[name]).decode().split("\n\n")

    assert lines[-2:] == ["data: [DONE]", ""]

    for line in lines[:-2]:
        ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)


@pytest.mark.parametrize("name", TURNS)
def test_encoded_stream_is_decoded_to_the_same_response(
    response_context: ResponseContext, name: str
) -> None:
    """A gateway's stream may be a worker's stream for another gateway."""
    request = replace(CHAT, stream=True)
    wire = ChatEncoder(ResponseStyle(), request, response_context).encode_events(TURNS[name])
    decoder = OpenAI().create_decoder(request)
    again = accumulate_events([*decoder.feed(wire), *decoder.close()]).result()
    first = accumulate_events(TURNS[name]).result()
    for response in (first, again):
        response.metadata = first.metadata
        for choice in response.choices:
            choice.matched_stop = None
            choice.finish_reason = (
                "eos" if choice.finish_reason in ("stop", "tool_calls") else choice.finish_reason
            )

    assert again == first


def test_completion_response_matches_openai_types(response_context: ResponseContext) -> None:
    reply = CompletionEncoder(ResponseStyle(), TEXT, response_context).encode_unary(
        accumulate_events(TURNS["text"]).result()
    )
    assert Completion.model_validate_json(reply.body, strict=True).choices[0].text == "ab"


def test_embeddings_response_matches_openai_types(response_context: ResponseContext) -> None:
    encoder = EmbeddingEncoder(
        ResponseStyle(), EmbeddingRequest(model="m", inputs=("a",)), response_context
    )
    reply = encoder.encode_unary(
        accumulate_events([Embedding(0, (0.5,)), Usage(1), StreamEnd()]).result()
    )

    response = CreateEmbeddingResponse.model_validate_json(reply.body, strict=True)

    assert response.data[0].embedding == [0.5]
