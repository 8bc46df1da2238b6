"""Responses of servers are decoded: unary, streams, and errors."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    RequestTooLarge,
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
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Request,
    SamplingParams,
)
from protocols.ovms import errors
from protocols.ovms.endpoints import OVMS

CHAT = GenerationRequest(model="llama3", kind="chat", stream=True)
PROMPT = GenerationRequest(model="llama3", kind="completion", prompts=("a b",))
EMBED = EmbeddingRequest(model="llama3", inputs=("a", "b"))
SERVED = ResponseMetadata("llama3", created=1716825108, source="ovms")
DONE = "data: [DONE]\n\n"


def make_chunk(
    choice: dict[str, Any] | None, *, kind: str = "chat.completion", **fields: Any
) -> str:
    chunk = {
        "choices": [] if choice is None else [choice],
        "created": 1716825108,
        "model": "llama3",
        "object": f"{kind}.chunk",
        **fields,
    }
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def build_choice(text: str | None, reason: str | None = None) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"index": 0, "logprobs": None, "delta": delta, "finish_reason": reason}


HANDSHAKE = make_chunk(
    {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
STREAM = (
    HANDSHAKE
    + make_chunk(build_choice("Hé"), usage=None)
    + make_chunk(build_choice("llo", "stop"), usage=None)
    + make_chunk(None, usage=USAGE)
    + DONE
)
TEXT_STREAM = (
    make_chunk({"index": 0, "text": "", "finish_reason": None}, kind="text_completion")
    + make_chunk({"index": 0, "logprobs": None, "text": "c", "finish_reason": None},
            kind="text_completion")
    + make_chunk({"index": 0, "logprobs": None, "text": "d", "finish_reason": "length"},
            kind="text_completion")
    + DONE
)  # fmt: skip
EARLY_STREAM = (
    'data: {"choices":[{"finish_reason":null,"index":0,"logprobs":null,"delta":'
    '{"content":"He"}}],"created":1716825108,"model":"llama3","object":"chat.completion.chunk"}\n\n'
    'data: {"choices":[{"finish_reason":"stop","index":0,"logprobs":null,"delta":'
    '{"content":"y"}}],"created":1716825108,"model":"llama3","object":"chat.completion.chunk"}\n\n'
) + DONE
CALLED = (
    HANDSHAKE
    + make_chunk(
        {"index": 0, "logprobs": None, "finish_reason": None, "delta": {"tool_calls": [
            {"id": "c1", "type": "function", "index": 0, "function": {"name": "f"}}]}}
    )
    + make_chunk(
        {"index": 0, "logprobs": None, "finish_reason": None, "delta": {"tool_calls": [
            {"index": 0, "function": {"arguments": "{}"}}]}}
    )
    + make_chunk(build_choice(None, "tool_calls"))
    + DONE
)  # fmt: skip


def make_response(choice: dict[str, Any], **fields: Any) -> str:
    return json.dumps(
        {
            "choices": [{"finish_reason": "stop", "index": 0, "logprobs": None, **choice}],
            "created": 1716825108,
            "model": "llama3",
            "object": "chat.completion",
            **fields,
        }
    )


HELLO = {"message": {"content": "Hello", "role": "assistant", "tool_calls": []}}
VECTORS = (
    '{"object":"list","data":[{"object":"embedding","embedding":[1.0,2.0],"index":0},'
    '{"object":"embedding","embedding":"AACAPwAAAEA=","index":1}],'
    '"usage":{"prompt_tokens":4,"total_tokens":4}}'
)
ANSWERS: list[tuple[str, str, Request, str, list[Event]]] = [
    (
        "stream",
        STREAM,
        CHAT,
        "2026",
        [SERVED, TextDelta("Hé"), TextDelta("llo"), ChoiceEnd("eos"), Usage(2, 3), StreamEnd()],
    ),
    (
        "completion",
        TEXT_STREAM,
        PROMPT,
        "2026",
        [SERVED, TextDelta("c"), TextDelta("d"), ChoiceEnd("length"), StreamEnd()],
    ),
    (
        "early",
        EARLY_STREAM,
        CHAT,
        "2024",
        [SERVED, TextDelta("He"), TextDelta("y"), ChoiceEnd("eos"), StreamEnd()],
    ),
    (
        "calls",
        CALLED,
        CHAT,
        "2026",
        [
            SERVED,
            ToolCallStart(0, 0, "c1", "f"),
            ToolCallDelta(0, 0, "{}"),
            ChoiceEnd("tool_calls"),
            StreamEnd(),
        ],
    ),
    (
        "no reason that is known",
        HANDSHAKE + make_chunk(build_choice("a", "unknown")) + DONE,
        CHAT,
        "2026",
        [SERVED, TextDelta("a"), ChoiceEnd("unknown", own_word="unknown"), StreamEnd()],
    ),
    (
        "whole",
        make_response(HELLO, usage=USAGE),
        CHAT,
        "2026",
        [SERVED, TextDelta("Hello", tokens=3), ChoiceEnd("eos"), Usage(2, 3), StreamEnd()],
    ),
    (
        "early, whole",
        make_response(HELLO),
        CHAT,
        "2024",
        [SERVED, TextDelta("Hello"), ChoiceEnd("eos"), StreamEnd()],
    ),
    (
        "thoughts",
        make_response({"message": {"content": "b", "reasoning_content": "a"}}),
        CHAT,
        "2026",
        [SERVED, ReasoningDelta("a"), TextDelta("b"), ChoiceEnd("eos"), StreamEnd()],
    ),
    (
        "logprobs",
        make_response(
            {
                "text": "c",
                "logprobs": {
                    "tokens": ["c"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{"c": -0.5}],
                    "text_offset": [0],
                },
            }
        ),
        GenerationRequest(model="m", kind="completion", prompts=("a",), logprobs=LogprobsOptions()),
        "2026",
        [
            SERVED,
            TextDelta("c", logprobs=(TokenLogprob("c", -0.5, (TopLogprob("c", -0.5),)),)),
            ChoiceEnd("eos"),
            StreamEnd(),
        ],
    ),
    (
        "an echo",
        make_response({"text": "a bc"}),
        GenerationRequest(model="m", kind="completion", prompts=("a b",), echo=True),
        "2026",
        [SERVED, PromptEcho(0, "a b"), TextDelta("c"), ChoiceEnd("eos"), StreamEnd()],
    ),
    (
        "embeddings",
        VECTORS,
        EMBED,
        "2026",
        [
            ResponseMetadata(source="ovms"),
            Embedding(0, (1.0, 2.0)),
            Embedding(1, (1.0, 2.0)),
            Usage(4),
            StreamEnd(),
        ],
    ),
]


def decode_response(
    wire: str | bytes, request: Request = CHAT, profile: str = "2026", size: int = 1 << 20
) -> list[Event]:
    data = wire if isinstance(wire, bytes) else wire.encode()
    decoder = OVMS(profile).create_decoder(request)
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    return [*events, *decoder.close()]


@pytest.mark.parametrize(("name", "wire", "request_", "profile", "events"), ANSWERS)
def test_response_is_decoded_in_any_framing_and_packet_size(
    name: str, wire: str, request_: Request, profile: str, events: list[Event]
) -> None:
    unspaced, marked = wire.replace("data: ", "data:"), "\ufeff" + wire
    for form in (wire, marked, wire.replace("\n", "\r\n"), unspaced):
        for size in (1, 7, 1 << 20):
            assert decode_response(form, request_, profile, size) == events, name


def test_stream_without_last_newline_or_done_is_complete() -> None:
    events = decode_response(STREAM)
    assert decode_response(STREAM.rstrip("\n")) == events
    assert decode_response(STREAM.removesuffix(DONE)) == events


def test_n_choices_are_expected_only_with_beam_search() -> None:
    """Without it, the worker is asked for one choice, which completes its response."""
    request = GenerationRequest(model="m", kind="chat", n=2, stream=True)
    assert decode_response(STREAM.removesuffix(DONE), request)[-1] == StreamEnd()

    beams = GenerationRequest(model="m", kind="chat", n=2, sampling=SamplingParams(beam_width=2))
    with pytest.raises(StreamBroken):
        decode_response(STREAM.removesuffix(DONE), beams)


def test_stream_without_finish_reason_raises_stream_broken() -> None:
    for wire in (HANDSHAKE, HANDSHAKE + make_chunk(build_choice("a")), HANDSHAKE + DONE, ""):
        with pytest.raises(StreamBroken):
            decode_response(wire)


# --- errors ---------------------------------------------------------------------------------------


def make_error(inner: str) -> bytes:
    return errors.encode_error_body(errors.build_graph_error_text(inner))


LONG = "Number of prompt tokens: 20 exceeds model max length: 8"
FAILURES: list[tuple[int, bytes, type[GatewayError], str]] = [
    (
        400,
        make_error("temperature out of range(0.0, 2.0)"),
        UnsupportedFeature,
        "^temperature out of range",
    ),
    (400, make_error(LONG), ContextTooLong, f"^{LONG}$"),
    (
        400,
        make_error("Number of prompt tokens: 5 + max tokens value: 9 exceeds model max length: 8"),
        ContextTooLong,
        "^Number",
    ),
    (
        400,
        make_error("Input length exceeds pipeline capabilities: 9 > 8"),
        ContextTooLong,
        "^Input",
    ),
    (400, make_error("Input length exceeds the maximum allowed length"), ContextTooLong, "^Input"),
    (
        400,
        errors.encode_error_body(
            errors.build_graph_error_text(
                "Input length 9 longer than allowed 8", errors.EMBEDDING_NODE
            )
        ),
        ContextTooLong,
        "^Input",
    ),
    (400, make_error("Wrong endpoint. Allowed endpoints: /v3/x"), WorkerFailed, "gateway's path"),
    (400, b'{"error":"Invalid request URL"}', WorkerFailed, "gateway's path"),
    (
        400,
        b'{"error":"Mediapipe execution failed. MP status - UNAVAILABLE: busy"}',
        Overloaded,
        "busy",
    ),
    (
        400,
        b'{"error":"Mediapipe execution failed. MP status - INTERNAL: secret"}',
        WorkerFailed,
        "500",
    ),
    (
        412,
        b'{"error":"The file is not valid json - JSON body exceeds maximum nesting depth"}',
        UnsupportedFeature,
        "^JSON body exceeds",
    ),
    (
        404,
        b'{"error":"Mediapipe graph definition with requested name is not found"}',
        WorkerModelNotFound,
        "know the model",
    ),
    (406, b'{"error":"Unsupported method"}', WorkerFailed, "406"),
    (
        500,
        b'{"error":"Unauthorized request due to invalid or missing api-key"}',
        WorkerFailed,
        "gateway's key",
    ),
    (503, b'{"error":"Server is not ready"}', Overloaded, "busy"),
    (429, b"", RateLimitExceeded, "no more"),
    (401, b"", WorkerFailed, "gateway's key"),
    (413, b"<html>", RequestTooLarge, "larger than a worker"),
    (500, b"\xff", WorkerFailed, "500"),
]


@pytest.mark.parametrize(("status", "body", "kind", "text"), FAILURES)
def test_worker_status_and_body_map_to_error_type(
    status: int, body: bytes, kind: type[GatewayError], text: str
) -> None:
    error = OVMS().read_error(status, {}, body)
    assert type(error) is kind
    assert re.search(text, error.message)
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("inner", "tokens", "limit"),
    [
        (LONG, 20, 8),
        ("Number of prompt tokens: 5 + max tokens value: 9 exceeds model max length: 8", 14, 8),
        ("Input length exceeds pipeline capabilities: 9 > 8", 9, 8),
        ("Input length 9 longer than allowed 8", 9, 8),
        ("Input length exceeds the maximum allowed length", None, None),
    ],
)
def test_context_too_long_reports_tokens_and_limit(
    inner: str, tokens: int | None, limit: int | None
) -> None:
    error = OVMS().read_error(400, {}, make_error(inner))
    assert isinstance(error, ContextTooLong)
    assert (error.tokens, error.limit) == (tokens, limit)


def test_worker_error_text_about_the_path_is_for_operators() -> None:
    error = OVMS().read_error(400, {}, b'{"error":"Invalid request URL"}')
    assert error.worker_text == "Invalid request URL"


@pytest.mark.parametrize(
    ("seconds", "headers"), [(3.0, {"retry-after": "3"}), (1.0, {}), (1.0, {"retry-after": "x"})]
)
def test_retry_after_of_503_defaults_to_one_second(
    seconds: float, headers: Mapping[str, str]
) -> None:
    assert OVMS().read_error(503, headers, b"").retry_after == seconds


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (STREAM.partition("data: [")[0][:-200] + "\n\n" + make_error("out of memory").decode(),
         WorkerFailed),
        (HANDSHAKE + make_error("out of memory").decode(), WorkerFailed),
        (HANDSHAKE + make_error("out of memory").decode() + "\n", WorkerFailed),
        (HANDSHAKE + make_error(LONG).decode(), ContextTooLong),
        (make_error(LONG).decode(), ContextTooLong),
        (make_error("out of memory").decode(), WorkerFailed),
        (HANDSHAKE + f"data: {make_error('out of memory').decode()}\n\n", WorkerFailed),
        (HANDSHAKE + '{"error":"Server is not ready"}', WorkerFailed),
        (HANDSHAKE + '{"error":{"message":"x","code":503}}', Overloaded),
    ],
)  # fmt: skip
def test_error_in_a_response_raises_its_error(
    wire: str, kind: type[GatewayError], size: int
) -> None:
    with pytest.raises(kind) as excinfo:
        decode_response(wire, size=size)
    assert type(excinfo.value) is kind
    assert "Mediapipe" not in excinfo.value.message
    assert "memory" not in excinfo.value.message


def test_error_instead_of_embeddings_is_raised() -> None:
    with pytest.raises(ContextTooLong):
        decode_response(make_error("Input length 9 longer than allowed 8"), EMBED)


@given(
    data=st.binary(max_size=200) | st.text(max_size=60).map(lambda s: STREAM.encode() + s.encode()),
    request=st.sampled_from([CHAT, PROMPT, EMBED]),
    status=st.sampled_from([400, 404, 412, 429, 500, 503]),
)
def test_arbitrary_bytes_raise_only_gateway_errors(
    data: bytes, request: Request, status: int
) -> None:
    assert isinstance(OVMS().read_error(status, {}, data), GatewayError)
    try:
        events = decode_response(data, request)
    except GatewayError:
        return
    assert events[-1] == StreamEnd()
