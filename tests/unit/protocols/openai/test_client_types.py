"""Our answers, read by the types of OpenAI's own client, strictly."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.core.aggregate import Fold
from gateway.core.ports import About
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    EmbedRequest,
    End,
    Event,
    GenerateRequest,
    Refusal,
    Text,
    Thought,
    TokenLogprob,
    TopLogprob,
    Usage,
    Vector,
)
from protocols.openai import OpenAI
from protocols.openai.answers import ChatEncoder, Style, TextEncoder
from protocols.openai.vectors import VectorEncoder

CHAT = GenerateRequest(model="m", kind="chat")
TEXT = GenerateRequest(model="m", kind="completion", prompts=("a",))
TOKEN = TokenLogprob("a", -0.5, (TopLogprob("b", -1.0),))
USAGE = Usage(2, 3, cached_tokens=1, reasoning_tokens=1)
TURNS: dict[str, tuple[Event, ...]] = {
    "text": (Text("a", logprobs=(TOKEN,)), Text("b"), End("stop", matched_stop="x"), USAGE, Done()),
    "call": (CallStart(0, 0, "c", "f"), CallArguments(0, 0, "{}"), End("eos"), USAGE, Done()),
    "aside": (Thought("hm"), Refusal("no"), End("content_filter"), Done()),
}


def folded(events: Sequence[Event]) -> Fold:
    fold = Fold()
    fold.add(events)
    return fold


@pytest.mark.parametrize("name", TURNS)
def test_a_chat(about: About, name: str) -> None:
    reply = ChatEncoder(Style(), CHAT, about).encode_unary(folded(TURNS[name]).result())
    assert ChatCompletion.model_validate_json(reply.body, strict=True).choices[0].index == 0


@pytest.mark.parametrize("name", TURNS)
def test_a_stream(about: About, name: str) -> None:
    encoder = ChatEncoder(Style(), replace(CHAT, stream=True), about)
    lines = encoder.encode_events(TURNS[name]).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)


@pytest.mark.parametrize("name", TURNS)
def test_what_we_write_for_clients_we_read_from_workers(about: About, name: str) -> None:
    """The stream of one gateway is the worker of the next."""
    request = replace(CHAT, stream=True)
    wire = ChatEncoder(Style(), request, about).encode_events(TURNS[name])
    decoder = OpenAI().create_decoder(request)
    again = folded([*decoder.feed(wire), *decoder.close()]).result()
    first = folded(TURNS[name]).result()
    for answer in (first, again):
        answer.metadata = first.metadata
        for choice in answer.choices:
            choice.matched_stop = None
            choice.finish_reason = (
                "eos" if choice.finish_reason in ("stop", "tool_calls") else choice.finish_reason
            )
    assert again == first


def test_a_completion(about: About) -> None:
    reply = TextEncoder(Style(), TEXT, about).encode_unary(folded(TURNS["text"]).result())
    assert Completion.model_validate_json(reply.body, strict=True).choices[0].text == "ab"


def test_embeddings(about: About) -> None:
    encoder = VectorEncoder(Style(), EmbedRequest(model="m", inputs=("a",)), about)
    reply = encoder.encode_unary(folded([Vector(0, (0.5,)), Usage(1), Done()]).result())
    found = CreateEmbeddingResponse.model_validate_json(reply.body, strict=True)
    assert found.data[0].embedding == [0.5]
