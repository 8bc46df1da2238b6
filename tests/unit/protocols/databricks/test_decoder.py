"""What serving endpoints answer: whole, in a stream, and when they fail."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    Usage,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    PromptOptions,
    Request,
)
from protocols.databricks.endpoints import Databricks

CHAT = GenerationRequest(model="ep", kind="chat", stream=True)
PROMPTS = GenerationRequest(model="ep", kind="completion", prompts=("a", "b"))
EMBED = EmbeddingRequest(model="ep", inputs=("a", "b"))
SERVED = ResponseMetadata("llama-3-8b", id="c1", created=5)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
USED = Usage(2, 3)
DONE = "data: [DONE]\n\n"


def frame(delta: dict[str, Any] | None, reason: str | None = None, **more: Any) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    chunk = {
        "id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "llama-3-8b",
        "choices": choices, **more,
    }  # fmt: skip
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def whole(*choices: dict[str, Any], **more: Any) -> str:
    return json.dumps(
        {"id": "c1", "created": 5, "model": "llama-3-8b", "choices": choices, "usage": USAGE} | more
    )


BEGUN = frame({"role": "assistant", "content": "Hé"})
STREAM = BEGUN + frame({"content": "llo"}) + frame({}, "stop", usage=USAGE) + DONE
SAID: list[Event] = [SERVED, TextDelta("Hé"), TextDelta("llo"), ChoiceEnd("eos"), USED, StreamEnd()]
THOUGHT = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a", "signature": "s"}]},
    {"type": "text", "text": "b"},
]
VECTORS = json.dumps(
    {
        "id": "c1", "object": "list", "model": "gte",
        "data": [{"object": "embedding", "index": i, "embedding": [i, 1.5]} for i in (1, 0)],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
)  # fmt: skip
ANSWERS: list[tuple[str, str, Request, list[Event]]] = [
    ("usage in the last choice", STREAM, CHAT, SAID),
    ("no [DONE]", STREAM.removesuffix(DONE), CHAT, SAID),
    ("usage in every chunk",
     STREAM.replace('"choices"', f'"usage": {json.dumps(USAGE)}, "choices"'), CHAT, SAID),
    ("usage in a chunk of its own", BEGUN + frame({"content": "llo"}) + frame({}, "stop")
     + frame(None, usage=USAGE) + DONE, CHAT, SAID),
    ("no usage", BEGUN + frame({"content": "llo"}, "length") + DONE, CHAT,
     [*SAID[:3], ChoiceEnd("length"), StreamEnd()]),
    ("thoughts in a list", frame({"role": "assistant", "content": THOUGHT}) + frame({}, "stop")
     + DONE, CHAT,
     [SERVED, ReasoningDelta("a", signature="s"), TextDelta("b"), ChoiceEnd("eos"), StreamEnd()]),
    ("whole", whole({"index": 0, "message": {"role": "assistant", "content": "Hi"},
                     "finish_reason": "stop"}),
     CHAT, [SERVED, TextDelta("Hi", tokens=3), ChoiceEnd("eos"), USED, StreamEnd()]),
    ("two prompts", whole({"index": 0, "text": "x", "finish_reason": "stop"},
                          {"index": 1, "text": "y", "finish_reason": "length"}),
     PROMPTS,
     [SERVED, TextDelta("x"), ChoiceEnd("eos"), TextDelta("y", 1, 2), ChoiceEnd("length", 1), USED,
      StreamEnd()]),
    ("embeddings", VECTORS, EMBED,
     [ResponseMetadata("gte", id="c1"), Embedding(1, (1.0, 1.5)), Embedding(0, (0.0, 1.5)),
      Usage(4), StreamEnd()]),
    (
        "an echo",
        whole({"index": 0, "text": "ab", "finish_reason": "stop"}),
        GenerationRequest(
            model="ep", kind="completion", prompts=("a",), echo=True, logprobs=LogprobsOptions(),
            templating=PromptOptions(mode="server"),
        ),
        [SERVED, PromptEcho(0, "a"), TextDelta("b", tokens=3), ChoiceEnd("eos"), USED, StreamEnd()],
    ),
]  # fmt: skip


def read(wire: str | bytes, request: Request = CHAT, size: int = 1 << 20) -> list[Event]:
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = Databricks().create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    return [*events, *decoder.close()]


@pytest.mark.parametrize(("name", "wire", "request_", "events"), ANSWERS)
def test_answers(name: str, wire: str, request_: Request, events: list[Event]) -> None:
    unspaced, marked = wire.replace("data: ", "data:"), "\ufeff" + wire
    for form in (wire, marked, wire.replace("\n", "\r\n"), unspaced):
        for size in (1, 7, 1 << 20):
            assert read(form, request_, size) == events, name


def test_the_last_newline_may_be_missing() -> None:
    assert read(STREAM.rstrip("\n")) == SAID


def test_a_stream_without_an_end_is_broken() -> None:
    for wire in (BEGUN, BEGUN + DONE, DONE, "", "\ufeff"):
        with pytest.raises(StreamBroken):
            read(wire)


def test_several_answers_to_a_prompt_are_not_waited_for() -> None:
    """They were not asked for: each comes by a request of its own."""
    request = GenerationRequest(model="ep", kind="completion", prompts=("a",), n=2)
    wire = whole({"index": 0, "text": "x", "finish_reason": "stop"})
    assert read(wire, request)[-1] == StreamEnd()
    stream = 'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\n'
    assert read(stream, request)[-1] == StreamEnd()


# --- errors ---------------------------------------------------------------------------------------


def told(code: str, message: str = "the text") -> bytes:
    return json.dumps({"error_code": code, "message": message}).encode()


FAILURES: list[tuple[int, bytes, type[GatewayError], str]] = [
    (400, told("BAD_REQUEST", 'Bad request: json: unknown field "x"'), UnsupportedFeature,
     "unknown"),
    (400, told("INVALID_PARAMETER_VALUE"), UnsupportedFeature, "the text"),
    (400, told("MALFORMED_REQUEST"), UnsupportedFeature, "the text"),
    (400, told("BAD_REQUEST", "Bad request: the prompt has 20 tokens, the model's limit is 8"),
     ContextTooLong, "20 tokens"),
    (400, told("BAD_REQUEST", "20 is more than the maximum context length of 8"), ContextTooLong,
     "maximum context length"),
    (401, told("UNAUTHENTICATED"), WorkerFailed, "gateway's key"),
    (401, told("CUSTOMER_UNAUTHORIZED"), WorkerFailed, "gateway's key"),
    (403, told("PERMISSION_DENIED"), WorkerFailed, "gateway's key"),
    (404, told("RESOURCE_DOES_NOT_EXIST"), WorkerFailed, "know the model"),
    (404, told("ENDPOINT_NOT_FOUND"), WorkerFailed, "know the model"),
    (404, told("NOT_FOUND"), WorkerFailed, "know the model"),
    (429, told("REQUEST_LIMIT_EXCEEDED"), RateLimitExceeded, "no more"),
    (429, told("RESOURCE_EXHAUSTED"), RateLimitExceeded, "no more"),
    (499, told("CANCELLED"), WorkerFailed, "499"),
    (500, told("INTERNAL_ERROR"), WorkerFailed, "500"),
    (501, told("NOT_IMPLEMENTED"), WorkerFailed, "501"),
    (503, told("TEMPORARILY_UNAVAILABLE"), Overloaded, "busy"),
    (504, told("DEADLINE_EXCEEDED"), WorkerFailed, "504"),
    # the code says more than the status
    (400, told("REQUEST_LIMIT_EXCEEDED"), RateLimitExceeded, "no more"),
    (500, told("TEMPORARILY_UNAVAILABLE"), Overloaded, "busy"),
    (409, told("ABORTED"), WorkerFailed, "409"),
    (404, b"No API found", WorkerFailed, "know the model"),
    (400, b"Bad request: rpc error: secret", UnsupportedFeature, "refused"),
    (503, b"", Overloaded, "busy"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "kind", "text"), FAILURES)
def test_statuses(status: int, body: bytes, kind: type[GatewayError], text: str) -> None:
    found = Databricks().read_error(status, {}, body)
    assert type(found) is kind
    assert re.search(text, found.message)
    assert "secret" not in found.message


def test_lengths_are_read() -> None:
    body = told("BAD_REQUEST", "Bad request: the prompt has 20 tokens, the model's limit is 8")
    found = Databricks().read_error(400, {}, body)
    assert isinstance(found, ContextTooLong)
    assert (found.tokens, found.limit) == (20, 8)


def test_an_endpoint_says_when_to_come_back() -> None:
    for status, code in ((429, "REQUEST_LIMIT_EXCEEDED"), (503, "TEMPORARILY_UNAVAILABLE")):
        found = Databricks().read_error(status, {"retry-after": "7"}, told(code))
        assert found.retry_after == 7.0


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("REQUEST_LIMIT_EXCEEDED", RateLimitExceeded),
        ("TEMPORARILY_UNAVAILABLE", Overloaded),
        ("INVALID_PARAMETER_VALUE", UnsupportedFeature),
        ("INTERNAL_ERROR", WorkerFailed),
        ("SOMETHING_NEW", WorkerFailed),
    ],
)
def test_an_error_in_an_answer(code: str, kind: type[GatewayError], size: int) -> None:
    body = told(code).decode()
    openai = json.dumps({"error": {"message": "x", "code": code}})
    for wire in (
        body,
        BEGUN + f"data: {body}\n\n",
        BEGUN + body,
        BEGUN + body + "\n",
        BEGUN + f"data: {openai}\n\n",
    ):
        with pytest.raises(GatewayError) as caught:
            read(wire, size=size)
        assert type(caught.value) is kind
    with pytest.raises(kind):
        read(body, EMBED, size)


@given(
    data=st.binary(max_size=200) | st.text(max_size=60).map(lambda s: STREAM.encode() + s.encode()),
    request=st.sampled_from([CHAT, PROMPTS, EMBED]),
    status=st.sampled_from([400, 403, 404, 429, 500, 503]),
)
def test_no_bytes_make_anything_but_errors_of_ours(
    data: bytes, request: Request, status: int
) -> None:
    assert isinstance(Databricks().read_error(status, {}, data), GatewayError)
    try:
        events = read(data, request)
    except GatewayError:
        return
    assert events[-1] == StreamEnd()
