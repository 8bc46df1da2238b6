"""Responses of serving endpoints are decoded: unary, streams, and errors."""

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
    WorkerModelNotFound,
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
SERVED = ResponseMetadata("llama-3-8b", id="c1", created=5, source="databricks")
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
USED = Usage(2, 3)
DONE = "data: [DONE]\n\n"


def make_chunk(delta: dict[str, Any] | None, reason: str | None = None, **fields: Any) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    chunk = {
        "id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "llama-3-8b",
        "choices": choices, **fields,
    }  # fmt: skip
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def make_response(*choices: dict[str, Any], **fields: Any) -> str:
    return json.dumps(
        {"id": "c1", "created": 5, "model": "llama-3-8b", "choices": choices, "usage": USAGE}
        | fields
    )


BEGUN = make_chunk({"role": "assistant", "content": "Hé"})
STREAM = BEGUN + make_chunk({"content": "llo"}) + make_chunk({}, "stop", usage=USAGE) + DONE
HELLO_EVENTS: list[Event] = [
    SERVED,
    TextDelta("Hé"),
    TextDelta("llo"),
    ChoiceEnd("eos"),
    USED,
    StreamEnd(),
]
REASONING_CONTENT = [
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
    ("usage in the last choice", STREAM, CHAT, HELLO_EVENTS),
    ("no [DONE]", STREAM.removesuffix(DONE), CHAT, HELLO_EVENTS),
    (
        "usage in every chunk",
        STREAM.replace('"choices"', f'"usage": {json.dumps(USAGE)}, "choices"'),
        CHAT,
        HELLO_EVENTS,
    ),
    (
        "usage in a chunk of its own",
        BEGUN
        + make_chunk({"content": "llo"})
        + make_chunk({}, "stop")
        + make_chunk(None, usage=USAGE)
        + DONE,
        CHAT,
        HELLO_EVENTS,
    ),
    (
        "no usage",
        BEGUN + make_chunk({"content": "llo"}, "length") + DONE,
        CHAT,
        [*HELLO_EVENTS[:3], ChoiceEnd("length"), StreamEnd()],
    ),
    (
        "thoughts in a list",
        make_chunk({"role": "assistant", "content": REASONING_CONTENT})
        + make_chunk({}, "stop")
        + DONE,
        CHAT,
        [
            SERVED,
            ReasoningDelta(
                "a", signature="s", at="response.choices[0].message.content[0].summary[0].signature"
            ),
            TextDelta("b"),
            ChoiceEnd("eos"),
            StreamEnd(),
        ],
    ),
    (
        "whole",
        make_response(
            {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
        ),
        CHAT,
        [SERVED, TextDelta("Hi", tokens=3), ChoiceEnd("eos"), USED, StreamEnd()],
    ),
    (
        "two prompts",
        make_response(
            {"index": 0, "text": "x", "finish_reason": "stop"},
            {"index": 1, "text": "y", "finish_reason": "length"},
        ),
        PROMPTS,
        [
            SERVED,
            TextDelta("x"),
            ChoiceEnd("eos"),
            TextDelta("y", 1, 2),
            ChoiceEnd("length", 1),
            USED,
            StreamEnd(),
        ],
    ),
    (
        "embeddings",
        VECTORS,
        EMBED,
        [
            ResponseMetadata("gte", id="c1", source="databricks"),
            Embedding(1, (1.0, 1.5)),
            Embedding(0, (0.0, 1.5)),
            Usage(4),
            StreamEnd(),
        ],
    ),
    (
        "an echo",
        make_response({"index": 0, "text": "ab", "finish_reason": "stop"}),
        GenerationRequest(
            model="ep",
            kind="completion",
            prompts=("a",),
            echo=True,
            logprobs=LogprobsOptions(),
            templating=PromptOptions(mode="server"),
        ),
        [SERVED, PromptEcho(0, "a"), TextDelta("b", tokens=3), ChoiceEnd("eos"), USED, StreamEnd()],
    ),
]


def decode_response(wire: str | bytes, request: Request = CHAT, size: int = 1 << 20) -> list[Event]:
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = Databricks().create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    return [*events, *decoder.close()]


@pytest.mark.parametrize(("name", "wire", "request_", "events"), ANSWERS)
def test_response_is_decoded_in_any_framing_and_packet_size(
    name: str, wire: str, request_: Request, events: list[Event]
) -> None:
    unspaced, marked = wire.replace("data: ", "data:"), "\ufeff" + wire
    for form in (wire, marked, wire.replace("\n", "\r\n"), unspaced):
        for size in (1, 7, 1 << 20):
            assert decode_response(form, request_, size) == events, name


def test_stream_without_last_newline_is_complete() -> None:
    assert decode_response(STREAM.rstrip("\n")) == HELLO_EVENTS


def test_stream_without_finish_reason_raises_stream_broken() -> None:
    for wire in (BEGUN, BEGUN + DONE, DONE, "", "\ufeff"):
        with pytest.raises(StreamBroken):
            decode_response(wire)


def test_completion_with_n_is_complete_with_one_choice() -> None:
    """The worker is not sent ``n``: each choice is requested separately."""
    request = GenerationRequest(model="ep", kind="completion", prompts=("a",), n=2)
    wire = make_response({"index": 0, "text": "x", "finish_reason": "stop"})
    assert decode_response(wire, request)[-1] == StreamEnd()

    stream = 'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\n'
    assert decode_response(stream, request)[-1] == StreamEnd()


# --- errors ---------------------------------------------------------------------------------------


def make_error(code: str, message: str = "the text") -> bytes:
    return json.dumps({"error_code": code, "message": message}).encode()


FAILURES: list[tuple[int, bytes, type[GatewayError], str]] = [
    (
        400,
        make_error("BAD_REQUEST", 'Bad request: json: unknown field "x"'),
        UnsupportedFeature,
        "unknown",
    ),
    (400, make_error("INVALID_PARAMETER_VALUE"), UnsupportedFeature, "the text"),
    (400, make_error("MALFORMED_REQUEST"), UnsupportedFeature, "the text"),
    (
        400,
        make_error("BAD_REQUEST", "Bad request: the prompt has 20 tokens, the model's limit is 8"),
        ContextTooLong,
        "20 tokens",
    ),
    (
        400,
        make_error("BAD_REQUEST", "20 is more than the maximum context length of 8"),
        ContextTooLong,
        "maximum context length",
    ),
    (401, make_error("UNAUTHENTICATED"), WorkerFailed, "gateway's key"),
    (401, make_error("CUSTOMER_UNAUTHORIZED"), WorkerFailed, "gateway's key"),
    (403, make_error("PERMISSION_DENIED"), WorkerFailed, "gateway's key"),
    (404, make_error("RESOURCE_DOES_NOT_EXIST"), WorkerModelNotFound, "know the model"),
    (404, make_error("ENDPOINT_NOT_FOUND"), WorkerFailed, "know the gateway"),
    (404, make_error("NOT_FOUND"), WorkerModelNotFound, "know the model"),
    (429, make_error("REQUEST_LIMIT_EXCEEDED"), RateLimitExceeded, "no more"),
    (429, make_error("RESOURCE_EXHAUSTED"), RateLimitExceeded, "no more"),
    (499, make_error("CANCELLED"), WorkerFailed, "499"),
    (500, make_error("INTERNAL_ERROR"), WorkerFailed, "500"),
    (501, make_error("NOT_IMPLEMENTED"), WorkerFailed, "501"),
    (503, make_error("TEMPORARILY_UNAVAILABLE"), Overloaded, "busy"),
    (504, make_error("DEADLINE_EXCEEDED"), WorkerFailed, "504"),
    # the code is more specific than the status
    (400, make_error("REQUEST_LIMIT_EXCEEDED"), RateLimitExceeded, "no more"),
    (500, make_error("TEMPORARILY_UNAVAILABLE"), Overloaded, "busy"),
    (409, make_error("ABORTED"), WorkerFailed, "409"),
    (404, b"No API found", WorkerFailed, "know the gateway"),
    (400, b"Bad request: rpc error: secret", UnsupportedFeature, "refused"),
    (503, b"", Overloaded, "busy"),
]


@pytest.mark.parametrize(("status", "body", "kind", "text"), FAILURES)
def test_worker_status_and_error_code_map_to_error_type(
    status: int, body: bytes, kind: type[GatewayError], text: str
) -> None:
    error = Databricks().read_error(status, {}, body)
    assert type(error) is kind
    assert re.search(text, error.message)
    assert "secret" not in error.message


def test_context_too_long_reports_tokens_and_limit() -> None:
    body = make_error(
        "BAD_REQUEST", "Bad request: the prompt has 20 tokens, the model's limit is 8"
    )
    error = Databricks().read_error(400, {}, body)

    assert isinstance(error, ContextTooLong)
    assert (error.tokens, error.limit) == (20, 8)


def test_retry_after_of_worker_is_kept() -> None:
    for status, code in ((429, "REQUEST_LIMIT_EXCEEDED"), (503, "TEMPORARILY_UNAVAILABLE")):
        error = Databricks().read_error(status, {"retry-after": "7"}, make_error(code))
        assert error.retry_after == 7.0


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
def test_error_in_a_response_is_classified_by_its_code(
    code: str, kind: type[GatewayError], size: int
) -> None:
    body = make_error(code).decode()
    openai = json.dumps({"error": {"message": "x", "code": code}})

    for wire in (
        body,
        BEGUN + f"data: {body}\n\n",
        BEGUN + body,
        BEGUN + body + "\n",
        BEGUN + f"data: {openai}\n\n",
    ):
        with pytest.raises(GatewayError) as excinfo:
            decode_response(wire, size=size)
        assert type(excinfo.value) is kind
    with pytest.raises(kind):
        decode_response(body, EMBED, size)


@given(
    data=st.binary(max_size=200) | st.text(max_size=60).map(lambda s: STREAM.encode() + s.encode()),
    request=st.sampled_from([CHAT, PROMPTS, EMBED]),
    status=st.sampled_from([400, 403, 404, 429, 500, 503]),
)
def test_arbitrary_bytes_raise_only_gateway_errors(
    data: bytes, request: Request, status: int
) -> None:
    assert isinstance(Databricks().read_error(status, {}, data), GatewayError)
    try:
        events = decode_response(data, request)
    except GatewayError:
        return
    assert events[-1] == StreamEnd()
