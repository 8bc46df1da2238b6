"""Our answers, read by the types of OpenAI's own client, strictly."""

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
def test_chat_response_matches_openai_types(about: ResponseContext, name: str) -> None:
    reply = ChatEncoder(ResponseStyle(), CHAT, about).encode_unary(
        accumulate_events(TURNS[name]).result()
    )
    assert ChatCompletion.model_validate_json(reply.body, strict=True).choices[0].index == 0


@pytest.mark.parametrize("name", TURNS)
def test_chat_stream_matches_openai_types(about: ResponseContext, name: str) -> None:
    encoder = ChatEncoder(ResponseStyle(), replace(CHAT, stream=True), about)
    lines = encoder.encode_events(TURNS[name]).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)


@pytest.mark.parametrize("name", TURNS)
def test_encoded_stream_is_decoded_to_the_same_response(about: ResponseContext, name: str) -> None:
    """The stream of one gateway is the worker of the next."""
    request = replace(CHAT, stream=True)
    wire = ChatEncoder(ResponseStyle(), request, about).encode_events(TURNS[name])
    decoder = OpenAI().create_decoder(request)
    again = accumulate_events([*decoder.feed(wire), *decoder.close()]).result()
    first = accumulate_events(TURNS[name]).result()
    for answer in (first, again):
        answer.metadata = first.metadata
        for choice in answer.choices:
            choice.matched_stop = None
            choice.finish_reason = (
                "eos" if choice.finish_reason in ("stop", "tool_calls") else choice.finish_reason
            )
    assert again == first


def test_completion_response_matches_openai_types(about: ResponseContext) -> None:
    reply = CompletionEncoder(ResponseStyle(), TEXT, about).encode_unary(
        accumulate_events(TURNS["text"]).result()
    )
    assert Completion.model_validate_json(reply.body, strict=True).choices[0].text == "ab"


def test_embeddings_response_matches_openai_types(about: ResponseContext) -> None:
    encoder = EmbeddingEncoder(ResponseStyle(), EmbeddingRequest(model="m", inputs=("a",)), about)
    reply = encoder.encode_unary(
        accumulate_events([Embedding(0, (0.5,)), Usage(1), StreamEnd()]).result()
    )
    response = CreateEmbeddingResponse.model_validate_json(reply.body, strict=True)
    assert response.data[0].embedding == [0.5]
