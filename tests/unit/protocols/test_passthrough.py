"""Requests and responses that are passed through unchanged."""

import itertools
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols.chat.field_types import (
    OPTIONAL_STRING,
    PROMPTS,
)
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    Embedding,
    Event,
    ReasoningDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import (
    ClientRequest,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    ResponseOptions,
    TextPart,
)
from protocols.core.sse import MAX_EVENT_BYTES
from protocols.json_body import read_object
from protocols.openai.endpoints import OpenAI
from protocols.params import Param
from protocols.passthrough import (
    PassthroughResponse,
    PassthroughRule,
    PassthroughRules,
    build_body_decoder,
)
from tests.unit.protocols.conftest import MakeCall, endpoint

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "chat", "messages": HI}
TEXT: dict[str, Any] = {"model": "chat", "prompt": "a b", "max_tokens": 5}
EMBED: dict[str, Any] = {"model": "chat", "input": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7"}
PICTURE = {"type": "image_url", "image_url": {"url": "https://x.test/a.png", "detail": "low"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
VLLM = OpenAI("vllm")


def make_request(variant: str, body: Any) -> ClientRequest:
    row = endpoint(variant)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ClientRequest(row, {}, {}, "", data, row.path)


def prepare_passthrough(
    variant: str, body: Any, worker: OpenAI = VLLM, shown: str = "chat"
) -> PassthroughRequest | None:
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0, ignore_memory)
    response_context = ResponseContext("r1", 1, shown, "v1", "llama", context.clock)
    return worker.prepare_passthrough(OpenAI(), make_request(variant, body), response_context)


def require_passthrough(
    variant: str, body: Any, worker: OpenAI = VLLM, shown: str = "chat"
) -> PassthroughRequest:
    relay = prepare_passthrough(variant, body, worker, shown)
    assert relay is not None
    return relay


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "body"),
    [
        ("chat", CHAT),
        ("chat", CHAT | {"temperature": 0.5, "top_k": 3, "stop": ["a"], "seed": 7, "n": 2}),
        ("chat", CHAT | {"stop": [*"abcdefgh"], "tools": [TOOL] * 200}),
        ("chat", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
        ("chat", CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
        ("chat", CHAT | {"logprobs": True, "top_logprobs": 3, "user": "u"}),
        ("chat", CHAT | {"max_completion_tokens": 9}),
        ("chat", CHAT | {"messages": [*HI, {"role": "assistant", "content": [
            {"type": "text", "text": "x"}]}]}),
        ("chat", CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {
            "name": "f"}}}),
        ("chat", CHAT | {"tools": [TOOL], "messages": [*HI, CALL, RESULT, *HI]}),
        ("chat", CHAT | {"messages": [*HI, CALL | {"content": None, "refusal": None}, RESULT]}),
        ("chat", CHAT | {"messages": [{"role": "system", "content": "x"}, {"role": "user",
            "content": [{"type": "text", "text": "x"}, PICTURE, SOUND]}]}),
        ("chat", CHAT | {"response_format": {"type": "text"}}),
        ("chat", CHAT | {"response_format": {"type": "json_object"}}),
        ("chat", CHAT | {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object"}, "strict": True}}}),
        ("chat", CHAT | {"logit_bias": {"17": -100, "4": 1.5}}),
        ("chat", CHAT | {"metadata": {"team": "a"}}),
        ("chat", CHAT | {"never_heard_of": {"deep": [1.50]}}),
        ("completion", TEXT | {"logit_bias": {"17": -100}}),
        ("completion", TEXT | {"logprobs": 2, "prompt": ["a", "b"]}),
        ("embedding", EMBED | {"encoding_format": "base64", "dimensions": 4}),
    ],
)  # fmt: skip
def test_valid_request_is_passed_through_with_the_backend_model(
    variant: str, body: dict[str, Any]
) -> None:
    wire = require_passthrough(variant, body).upstream_request
    assert json.loads(wire.body) == body | {"model": "llama"}
    assert list(json.loads(wire.body)) == list(body)
    assert wire.path == endpoint(variant).path


def test_numbers_and_strings_keep_their_spelling() -> None:
    body = b'{"model":"chat","messages":[{"role":"user","content":"\\u00e9"}],"x":1.50e0}'
    wire = require_passthrough("chat", body).upstream_request
    assert wire.body == (
        b'{"model":"llama","messages":[{"role":"user","content":"\\u00e9"}],"x":1.50e0}'
    )


@pytest.mark.parametrize(
    ("variant", "body"),
    [
        ("chat", b"{"),
        ("chat", b'{"model":"chat","messages":[{"role":"user","content":"\\ud83d"}]}'),
        ("chat", {"model": "chat"}),
        ("chat", CHAT | {"messages": []}),
        ("chat", CHAT | {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}),
        ("chat", CHAT | {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "https://x.test/a.png", "detail": 1}}]}]}),
        ("chat", CHAT | {"messages": [{"role": "user", "content": []}]}),
        ("chat", CHAT | {"messages": [{"role": "assistant", "content": [PICTURE]}]}),
        ("chat", CHAT | {"messages": [{"role": "assistant"}]}),
        ("chat", CHAT | {"messages": [*HI, CALL]}),
        ("chat", CHAT | {"messages": [*HI, CALL, *HI]}),
        ("chat", CHAT | {"messages": [*HI, CALL, RESULT | {"tool_call_id": "c2"}]}),
        ("chat", CHAT | {"metadata": {"team": 1}}),
        ("chat", CHAT | {"metadata": {"k" * 65: "a"}}),
        ("chat", CHAT | {"metadata": {str(i): "a" for i in range(17)}}),
        ("chat", CHAT | {"logit_bias": {"17": 101}}),
        ("chat", CHAT | {"logit_bias": {"a": 1}}),
        ("chat", CHAT | {"response_format": {"type": "json_schema"}}),
        ("chat", CHAT | {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x y"}}}),
        ("chat", CHAT | {"response_format": {"type": "xml"}}),
        ("chat", CHAT | {"messages": [{"role": "user", "content": "x", "prefix": True}]}),
        ("chat", CHAT | {"temperature": 3}),
        ("chat", CHAT | {"temperature": "1"}),
        ("chat", CHAT | {"top_k": 0}),
        ("chat", CHAT | {"repetition_penalty": 0}),
        ("chat", CHAT | {"stop": ""}),
        ("chat", CHAT | {"stream": "yes"}),
        ("chat", CHAT | {"stream_options": {"include_usage": True}}),
        ("chat", CHAT | {"top_logprobs": 3}),
        ("chat", CHAT | {"max_completion_tokens": 9, "max_tokens": 8}),
        ("chat", CHAT | {"logprobs": True, "top_logprobs": 21}),
        ("chat", CHAT | {"tool_choice": "auto"}),
        ("chat", CHAT | {"parallel_tool_calls": True}),
        ("chat", CHAT | {"tools": []}),
        ("chat", CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {
            "name": "g"}}}),
        ("chat", CHAT | {"functions": [{"name": "f"}]}),
        ("chat", CHAT | {"modalities": ["audio"]}),
        ("chat", CHAT | {"priority": 1}),
        ("chat", CHAT | {"chat_template": "{{ x }}"}),
        ("chat", CHAT | {"kv_transfer_params": {}}),
        ("chat", CHAT | {"prompt_logprobs": 1}),
        ("chat", CHAT | {"max_tokens": None}),
        ("completion", {"model": "chat", "prompt": "a"}),
        ("completion", TEXT | {"echo": True}),
        ("completion", TEXT | {"best_of": 2}),
        ("completion", TEXT | {"prompt": [1, 2]}),
        ("completion", TEXT | {"stream_options": {}}),
        ("embedding", EMBED | {"input": ""}),
        ("embedding", EMBED | {"dimensions": 0}),
    ],
)  # fmt: skip
def test_request_outside_the_fast_path_is_translated(variant: str, body: Any) -> None:
    assert prepare_passthrough(variant, body) is None


def test_field_that_the_worker_does_not_support_is_translated() -> None:
    assert prepare_passthrough("chat", CHAT | {"top_k": 3}, OpenAI("openai")) is None
    assert (
        prepare_passthrough("chat", CHAT | {"repetition_penalty": 1.1}, OpenAI("llamacpp")) is None
    )


def test_powers_fields_are_passed_through_if_enabled() -> None:
    body = CHAT | {"kv_transfer_params": {}}
    assert prepare_passthrough("chat", body, OpenAI("vllm", powers=True)) is not None


WRITER = PassthroughResponse(tuple, cast("Any", None), {})
"""For a response that is not read."""


def build_param(**row: Any) -> Param:
    return Param(wire="x", field="sampling.x", **row)


@pytest.mark.parametrize(
    ("worker", "client", "right", "wrong"),
    [
        (build_param(type="int", maximum=2**64), build_param(type="int", minimum=1), "9", "0"),
        (
            build_param(type="float", maximum=1),
            build_param(type="float", maximum=1, exclusive_maximum=True),
            "0.5",
            "1",
        ),
        (
            build_param(type="float", maximum=0.5),
            build_param(type="float", maximum=1, exclusive_maximum=True),
            "0.5",
            "0.6",
        ),
        (
            build_param(type="float", minimum=0, exclusive_minimum=True),
            build_param(type="float", minimum=0),
            "1",
            "0",
        ),
        (
            build_param(type="strings", max_items=1),
            build_param(type="strings"),
            '["a"]',
            '["a","b"]',
        ),
        (
            build_param(type="strings"),
            build_param(type="strings", max_items=1),
            '["a"]',
            '["a","b"]',
        ),
    ],
)
def test_passthrough_value_is_limited_by_both_ranges(
    worker: Param, client: Param, right: str, wrong: str
) -> None:
    read_body = build_body_decoder(
        PassthroughRule(path="", field_types={}, worker_params=(worker,), client_params=(client,))
    ).decode
    assert read_body(f'{{"x":{right}}}').x == json.loads(right)
    with pytest.raises(msgspec.ValidationError):
        read_body(f'{{"x":{wrong}}}')


def test_params_with_different_fields_are_not_shared() -> None:
    worker = Param(wire="x", field="sampling.y", type="int")
    form = PassthroughRule(
        path="", field_types={}, worker_params=(worker,), client_params=(build_param(type="int"),)
    )
    assert build_body_decoder(form).decode(b'{"x":1}').__struct_fields__ == ()


STRANGE = [b"\xff", b"\\ud83d", b"\\u00e9", "é".encode(), b"\xc3", b"\\", b'"', b"0", b" ", b"x"]
BODIES: list[tuple[str, Any]] = [
    ("chat", CHAT | {"tools": [TOOL], "user": "ann", "stop": ["."], "new": {"deep": ["x"]}}),
    ("chat", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ("completion", TEXT | {"prompt": ["a", "b"], "user": "ann"}),
    ("embedding", EMBED | {"user": "ann", "encoding_format": "float"}),
]


@given(which=st.sampled_from(BODIES), strange=st.sampled_from(STRANGE), data=st.data())
def test_passthrough_body_equals_its_decoded_fields(
    which: tuple[str, Any], strange: bytes, data: st.DataObject
) -> None:
    variant, whole = which
    body = json.dumps(whole, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(body)))
    body = body[:at] + strange + body[at:]

    relay = prepare_passthrough(variant, body)

    if relay is not None:
        fields = read_object(body)
        assert relay.upstream_request.body == msgspec.json.encode({**fields, "model": "llama"})


@pytest.mark.parametrize("text", [b"\xff", b"\\ud83d"])
@pytest.mark.parametrize("field", ["model", "prompt", "user", "x"])
def test_invalid_unicode_is_not_passed_through(
    response_context: ResponseContext, field: str, text: bytes
) -> None:
    shapes = {"prompt": PROMPTS, "user": OPTIONAL_STRING}
    form = PassthroughRule(
        path="/{model}",
        field_types=shapes,
        worker_params=(),
        client_params=(),
        forwards_field=lambda _: True,
    )
    row = endpoint("completion")
    for text_bytes in (b"a", text):
        fields = {"model": b"m", "prompt": b"a"} | {field: text_bytes}
        body = b",".join(b'"%b":"%b"' % (key.encode(), one) for key, one in fields.items())
        call = ClientRequest(row, {}, {}, "", b"{%b}" % body, row.path)
        assert (
            PassthroughRules({"text": form}).prepare_passthrough(
                "text", call, response_context, WRITER
            )
            is None
        ) == (text_bytes is text)


def test_model_in_path_is_removed_from_the_body(response_context: ResponseContext) -> None:
    form = PassthroughRule(
        path="/of/{model}/x", field_types={"prompt": PROMPTS}, worker_params=(), client_params=()
    )
    relays = PassthroughRules({"text": form})
    assert ("text" in relays, "chat" in relays) == (True, False)

    row = endpoint("completion")
    call = ClientRequest(row, {}, {}, "", b'{"prompt":"a","model":"chat"}', row.path)
    relay = relays.prepare_passthrough(
        "text", call, replace(response_context, backend_model="a/b c"), WRITER
    )

    assert relay is not None
    assert (relay.upstream_request.path, relay.upstream_request.body) == (
        "/of/a%2Fb%20c/x",
        b'{"prompt":"a"}',
    )


def test_reject_unknown_option_disables_pass_through(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    call = make_call("chat", CHAT)
    assert VLLM.prepare_passthrough(OpenAI(unknown="reject"), call, response_context) is None


def test_passthrough_request_fields_for_load_balancing_are_read() -> None:
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    chat = require_passthrough("chat", CHAT | {"messages": messages, "user": "ann", "n": 2}).request
    assert isinstance(chat, GenerationRequest)
    assert [message.text for message in chat.messages] == ["hi", "x"]
    assert [message.role for message in chat.messages] == ["user", "assistant"]

    turns = [*HI, CALL, RESULT, {"role": "user", "content": [PICTURE, SOUND]}]
    turn = require_passthrough("chat", CHAT | {"messages": turns, "tools": [TOOL]}).request
    assert isinstance(turn, GenerationRequest)

    decoded = VLLM.decode_request(make_request("chat", CHAT | {"messages": turns}))
    assert isinstance(decoded, GenerationRequest)
    assert turn.messages == decoded.messages
    assert (chat.n, chat.labels, chat.model) == (2, {"user": "ann"}, "llama")

    text = require_passthrough("completion", TEXT | {"stream": True}).request
    assert isinstance(text, GenerationRequest)
    assert (text.prompts, text.stream) == (("a b",), True)

    vectors = require_passthrough("embedding", EMBED | {"input": "a"}).request
    assert isinstance(vectors, EmbeddingRequest)
    assert vectors.inputs == ("a",)


PARTS = {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]}


def test_chat_request_is_built_from_a_passthrough_body() -> None:
    body = CHAT | {"messages": [*HI, PARTS], "user": "ann", "n": 2, "stream": True}
    assert require_passthrough("chat", body).request == GenerationRequest(
        model="llama",
        kind="chat",
        messages=(
            Message("user", (TextPart("hi"),)),
            Message("assistant", (TextPart("a"), TextPart("b"))),
        ),
        n=2,
        stream=True,
        labels={"user": "ann"},
        response_options=ResponseOptions(usage="none"),
    )


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_completion_request_is_built_from_a_passthrough_body(prompt: Any) -> None:
    assert require_passthrough(
        "completion", TEXT | {"prompt": prompt}
    ).request == GenerationRequest(model="llama", kind="completion", prompts=tuple(prompt))


@pytest.mark.parametrize("texts", ["a", ["a", "b"]])
def test_embedding_request_is_built_from_a_passthrough_body(texts: Any) -> None:
    request = require_passthrough("embedding", EMBED | {"input": texts, "user": "ann"}).request
    assert request == EmbeddingRequest(model="llama", inputs=tuple(texts), labels={"user": "ann"})


def test_client_read_timeout_is_the_request_timeout() -> None:
    row = endpoint("chat")
    call = ClientRequest(
        row, {}, {"x-stainless-read-timeout": "7"}, "", json.dumps(CHAT).encode(), row.path
    )
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0, ignore_memory)

    relay = VLLM.prepare_passthrough(
        OpenAI(), call, ResponseContext("r1", 1, "chat", "v1", "llama", context.clock)
    )

    assert relay is not None
    assert relay.request.timeout == 7


@pytest.mark.parametrize("stream", [True, False])
def test_passthrough_response_headers(*, stream: bool) -> None:
    headers = dict(require_passthrough("chat", CHAT | {"stream": stream}).build_headers())
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"

    assert headers["Content-Type"] == kind
    assert headers["openai-version"] == "2020-10-01"
    assert headers["x-served-model"] == "v1"


# --- unary responses ------------------------------------------------------------------------------

ANSWER = (
    b'{"id":"c1","object":"chat.completion","created":1,"model":"llama","odd":1.50,"choices":['
    b'{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)


def read_passthrough(
    passage: PassthroughReader, *pieces: bytes
) -> tuple[list[bytes | None], list[Event]]:
    out, events = [], list[Event]()
    for piece in pieces:
        data, next_events = passage.feed([piece])
        out.append(data)
        events += next_events
        if events and isinstance(events[-1], StreamEnd):
            return out, events
    data, next_events = passage.close()
    return [*out, data], [*events, *next_events]


def test_unary_response_shows_the_public_model_name() -> None:
    out, events = read_passthrough(
        require_passthrough("chat", CHAT).create_reader(), ANSWER[:40], ANSWER[40:] + b"\n"
    )
    assert out == [b"", b"", ANSWER.replace(b"llama", b"chat")]
    assert [e.completion_tokens for e in events if isinstance(e, Usage)] == [1]
    assert isinstance(events[-1], StreamEnd)


def test_response_with_same_or_no_model_name_is_unchanged() -> None:
    out, _ = read_passthrough(
        require_passthrough("chat", CHAT, shown="llama").create_reader(), ANSWER
    )
    assert out[-1] == ANSWER

    nameless = ANSWER.replace(b'"model":"llama",', b"")
    out, _ = read_passthrough(require_passthrough("chat", CHAT).create_reader(), nameless)
    assert out[-1] == nameless


@pytest.mark.parametrize("nested", [b'"other"', b'"llama"'])
def test_another_name_beside_the_public_one_is_replaced(nested: bytes) -> None:
    both = ANSWER.replace(b'"choices"', b'"draft":{"model":%b},"choices"' % nested)

    reader = require_passthrough("chat", CHAT, shown="llama").create_reader()
    out, _ = read_passthrough(reader, both)

    assert out[-1] == both.replace(b"other", b"llama")


def test_any_worker_model_name_is_replaced_by_the_public_name() -> None:
    other = ANSWER.replace(b'"llama"', b'"org/llama \\"x\\""')
    for shown in ("chat", "llama"):
        out, _ = read_passthrough(
            require_passthrough("chat", CHAT, shown=shown).create_reader(), other
        )
        assert out[-1] == ANSWER.replace(b"llama", shown.encode())
        events = b"".join(STREAM).replace(b'"llama"', b'"org/llama \\"x\\""')
        out, _ = read_passthrough(
            require_passthrough("chat", STREAM_REQUEST, shown=shown).create_reader(),
            events[:150],
            events[150:],
        )
        assert join_output(out) == SHOWN.replace(b'"chat"', b'"%b"' % shown.encode())


@pytest.mark.parametrize("length", [4, 3], ids=["to its end", "complete without it"])
def test_stream_response_to_a_unary_request_is_encoded(length: int) -> None:
    out, events = read_passthrough(
        require_passthrough("chat", CHAT).create_reader(), *STREAM[:length]
    )
    assert not any(out)
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Hello"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (ANSWER[:60], StreamBroken),
        (b'{"error":{"message":"boom"}}', WorkerFailed),
        (b"", StreamBroken),
    ],
)
def test_malformed_unary_response_raises_an_error(body: bytes, error: type[Exception]) -> None:
    passage = require_passthrough("chat", CHAT).create_reader()
    with pytest.raises((error, WorkerFailed)):
        read_passthrough(passage, body)


VECTORS = (
    b'{"object":"list","data":[{"index":0,"embedding":[1,2]},{"index":1,"embedding":"AAAA"}],'
    b'"model":"llama","usage":{"prompt_tokens":2,"total_tokens":2}}'
)


def test_embeddings_response_is_passed_through() -> None:
    out, events = read_passthrough(require_passthrough("embedding", EMBED).create_reader(), VECTORS)
    assert out[-1] == VECTORS.replace(b"llama", b"chat")
    assert events == [ResponseMetadata("llama"), Usage(2), StreamEnd()]

    bare = VECTORS.replace(b',"usage":{"prompt_tokens":2,"total_tokens":2}', b"")
    bare = bare.replace(b'"llama"', b"null")
    out, events = read_passthrough(require_passthrough("embedding", EMBED).create_reader(), bare)

    assert (out[-1], events) == (bare, [ResponseMetadata(), StreamEnd()])


def test_embeddings_response_with_one_index_for_all_vectors_is_not_passed_through() -> None:
    body = VECTORS.replace(b'"index":1', b'"index":0').replace(b'"AAAA"', b"[3]")
    out, events = read_passthrough(require_passthrough("embedding", EMBED).create_reader(), body)

    assert out[-1] is None
    assert [one.index for one in events if isinstance(one, Embedding)] == [0, 1]


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"", StreamBroken), (VECTORS[:50], WorkerFailed), (b'{"data":[]}', WorkerFailed)],
)
def test_incomplete_embeddings_response_raises_an_error(
    body: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        read_passthrough(require_passthrough("embedding", EMBED).create_reader(), body)


# --- streams --------------------------------------------------------------------------------------


def format_chunk(delta: str, finish: str = "null") -> bytes:
    return (
        b'data: {"id":"c","model":"llama","choices":[{"index":0,"delta":{"content":"%b"},'
        b'"finish_reason":%b}]}\n\n' % (delta.encode(), finish.encode())
    )


def format_encoded_chunk(delta: str, finish: str = "null") -> bytes:
    """Format a chunk like the encoder."""
    return (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"chat","choices":['
        b'{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        % (delta.encode(), finish.encode())
    )


STREAM = (format_chunk("Hel"), format_chunk("lo"), format_chunk("", '"stop"'), b"data: [DONE]\n\n")
FIRST = format_encoded_chunk('{"role":"assistant","content":""}') + format_encoded_chunk(
    '{"content":"Hel"}'
)
FORWARDED = STREAM[1].replace(b"llama", b"chat")
LAST = format_encoded_chunk("{}", '"stop"') + b"data: [DONE]\n\n"
SHOWN = FIRST + FORWARDED + LAST
STREAM_REQUEST = CHAT | {"stream": True}


def join_output(out: Sequence[bytes | None]) -> bytes:
    assert None not in out
    return b"".join(data for data in out if data is not None)


@given(cuts=st.lists(st.integers(0, len(b"".join(STREAM))), max_size=8))
def test_stream_is_passed_through_in_any_packet_size(cuts: list[int]) -> None:
    data, edges = b"".join(STREAM), [0, *sorted(cuts), len(b"".join(STREAM))]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]

    out, events = read_passthrough(
        require_passthrough("chat", STREAM_REQUEST).create_reader(), *pieces
    )

    assert join_output(out) == SHOWN
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Hello"


def test_calls_are_translated_for_a_worker_that_takes_only_ids_of_its_own_form() -> None:
    worker = OpenAI("mistral")
    history = CHAT | {"messages": [*HI, CALL, RESULT]}

    assert prepare_passthrough("chat", history, worker) is None
    assert prepare_passthrough("chat", CHAT, worker) is not None
    assert prepare_passthrough("chat", history, OpenAI("openai")) is not None


def test_only_complete_events_are_passed_through() -> None:
    passage = require_passthrough("chat", STREAM_REQUEST).create_reader()
    assert passage.feed([STREAM[0][:-1]])[0] == b""
    assert passage.feed([b"\ndata: {"])[0] == FIRST


def test_crlf_line_ends_and_blanks_in_chunks_are_accepted() -> None:
    data = b"".join(STREAM).replace(b'"model":', b'"model" : ')
    crlf = data.replace(b"\n", b"\r\n")
    for pieces in ([data], [crlf], [bytes([one]) for one in crlf]):
        out, _ = read_passthrough(
            require_passthrough("chat", STREAM_REQUEST).create_reader(), *pieces
        )
        assert join_output(out) == SHOWN.replace(
            FORWARDED, FORWARDED.replace(b'"model":', b'"model" : ')
        )


@pytest.mark.parametrize("end", [b"data: [DONE]\n", b""], ids=["one newline", "no end at all"])
def test_missing_done_is_added_to_a_complete_stream(end: bytes) -> None:
    out, events = read_passthrough(
        require_passthrough("chat", STREAM_REQUEST, shown="llama").create_reader(), *STREAM[:3], end
    )
    assert join_output(out) == SHOWN.replace(b'"chat"', b'"llama"')
    assert isinstance(events[-1], StreamEnd)


def test_truncated_stream_raises_stream_broken() -> None:
    passage = require_passthrough("chat", STREAM_REQUEST).create_reader()
    passage.feed([STREAM[0] + STREAM[1][:30]])
    with pytest.raises(StreamBroken):
        passage.close()


BROKEN = b'data: {"error":{"message":"secret","code":500}}\n\n'


def test_error_event_is_raised_and_not_passed_through() -> None:
    with pytest.raises(WorkerFailed):
        require_passthrough("chat", STREAM_REQUEST).create_reader().feed([BROKEN])
    for ending in ("feed", "close"):
        passage = require_passthrough("chat", STREAM_REQUEST).create_reader()
        data, events = passage.feed([STREAM[0] + BROKEN + STREAM[1]])
        assert data == FIRST
        assert events
        with pytest.raises(WorkerFailed):
            passage.feed([STREAM[1]]) if ending == "feed" else passage.close()


@pytest.mark.parametrize("word", ["invalid flag", "abort", "error"])
def test_failure_finish_reason_is_raised_after_the_text(word: str) -> None:
    passage = require_passthrough("chat", STREAM_REQUEST).create_reader()
    failing = format_chunk("x", f'"{word}"')

    data, _ = passage.feed([STREAM[0] + failing])

    assert data is not None
    assert data.startswith(FIRST)
    assert b'"content":"x"' in data
    assert word.encode() not in data
    with pytest.raises(WorkerFailed):
        passage.feed([b""])


def test_stray_error_line_is_raised_and_not_passed_through() -> None:
    passage = require_passthrough("chat", STREAM_REQUEST).create_reader()
    data, _ = passage.feed([STREAM[0] + b'{"error":"secret"}\n\n' + b": still\n\n" + STREAM[1]])

    assert data is not None
    assert b"secret" not in data
    assert FORWARDED in data
    assert b"still" not in data
    with pytest.raises(WorkerFailed) as excinfo:
        passage.close()
    assert excinfo.value.worker_text == "secret"


def test_stray_line_in_a_stream_is_dropped() -> None:
    out, _ = read_passthrough(
        require_passthrough("chat", STREAM_REQUEST).create_reader(),
        STREAM[0],
        b'{"odd":1}\n\n',
        *STREAM[1:],
    )
    assert join_output(out) == SHOWN


def test_unterminated_event_over_the_limit_raises_worker_failed() -> None:
    passage = require_passthrough("chat", STREAM_REQUEST).create_reader()
    passage.feed([b"data: " + b"x" * (MAX_EVENT_BYTES - 100)])
    with pytest.raises(WorkerFailed):
        passage.feed([b"x" * 100])


def test_unary_response_to_a_streaming_request_is_encoded() -> None:
    out, events = read_passthrough(
        require_passthrough("chat", STREAM_REQUEST).create_reader(), b" ", ANSWER
    )
    assert out[1:] == [None, None]
    assert any(isinstance(event, TextDelta) for event in events)


# --- the client's contract ------------------------------------------------------------------------


def pass_through(*pieces: bytes, body: Any = STREAM_REQUEST) -> bytes:
    return join_output(
        read_passthrough(require_passthrough("chat", body).create_reader(), *pieces)[0]
    )


@pytest.mark.parametrize("blanks", [False, True], ids=["compact", "json.dumps"])
@pytest.mark.parametrize("many", [1, 3, 32, 100])
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_text_chunks_are_forwarded_unchanged(*, blanks: bool, many: int, at_once: bool) -> None:
    texts = [format_chunk(f" {i} \\n\\u00e9") for i in range(many)]
    for i, text in enumerate(texts):  # fields of single chunks
        texts[i] = text.replace(b'"choices"', b'"created":%d,"obfuscation":"%b","choices"' % (
            i, b"x" * (i % 5)))  # fmt: skip
    pieces = [STREAM[0], *texts, *STREAM[2:]]
    if blanks:
        pieces = [one.replace(b'":', b'": ').replace(b',"', b', "') for one in pieces]
        texts = pieces[1:-2]

    out, events = read_passthrough(
        require_passthrough("chat", STREAM_REQUEST).create_reader(),
        *([b"".join(pieces)] if at_once else pieces),
    )

    assert join_output(out) == FIRST + b"".join(texts).replace(b"llama", b"chat") + LAST
    assert sum(e.tokens for e in events if isinstance(e, TextDelta)) == many + 1
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Hel" + "".join(
        f" {i} \n\u00e9" for i in range(many)
    )


@pytest.mark.parametrize(
    "event",
    [
        b"id: 7\n" + STREAM[1],
        b"retry: 9\n" + STREAM[1],
        b": still\n" + STREAM[1],
        b"event: x\n" + STREAM[1],
        STREAM[1].replace(b"data: ", b"data:"),
        STREAM[1].replace(b'"choices"', b'\ndata: "choices"'),
        STREAM[1].replace(b'"choices"', b'"usage":{"prompt_tokens":1},"choices"'),
        STREAM[1].replace(b'"choices"', b'"\\u0075sage":{"prompt_tokens":1},"choices"'),
        STREAM[1].replace(b'"llama"', b'"ll\\u0061ma"'),
        STREAM[1].replace(b'"model":"llama"', b'"model" : "llama"'),
        STREAM[1].replace(b'"llama"', b'"other"'),
        STREAM[1].replace(b'"id":"c"', b'"id":"d"'),
        STREAM[1].replace(b'"choices"', b'\rdata: "choices"'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_chunks_with_more_than_text_are_encoded_again(event: bytes, *, at_once: bool) -> None:
    pieces = [STREAM[0], STREAM[1], event, *STREAM[2:]]
    assert pass_through(*([b"".join(pieces)] if at_once else pieces)) == SHOWN.replace(
        FORWARDED, FORWARDED + format_encoded_chunk('{"content":"lo"}')
    )


@pytest.mark.parametrize("pairs", [1, 100])
def test_each_event_of_a_batch_has_the_name_once_or_is_encoded_again(pairs: int) -> None:
    """One name too many in one event does not make up for one that the next event spells otherwise.

    Given a batch in which events with two names and events with another spelling take turns, so
    that there are as many names as events, when it is passed through, then each is encoded.
    """
    twice = STREAM[1].replace(b'"choices"', b'"model":"llama","choices"')
    otherwise = STREAM[1].replace(b'"model":', b'"model" :')

    shown = pass_through(STREAM[0], b"".join([twice, otherwise, STREAM[1]] * pairs), *STREAM[2:])

    encoded = format_encoded_chunk('{"content":"lo"}')
    assert shown == SHOWN.replace(FORWARDED, (encoded + encoded + FORWARDED) * pairs)
    assert b"llama" not in shown


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_event_nested_too_deep_is_an_error_of_the_worker(*, at_once: bool) -> None:
    deep = b'"x":%b%b,"choices"' % (b"[" * 100_000, b"]" * 100_000)
    pieces = [*STREAM[:2], STREAM[1].replace(b'"choices"', deep), *STREAM[2:]]

    with pytest.raises(WorkerFailed, match="nested too deep"):
        pass_through(*([b"".join(pieces)] if at_once else pieces))


def test_comments_between_events_are_removed() -> None:
    for pieces in ([*STREAM[:1], b": still\n\n", *STREAM[1:]], [b": still\n\n".join(STREAM)]):
        assert pass_through(*pieces) == SHOWN


def test_nonstandard_and_repeated_finish_reasons_are_removed() -> None:
    end = format_chunk("", '"eos_token"')
    assert pass_through(STREAM[0], STREAM[1], end, end, STREAM[3]) == SHOWN


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_text_after_the_finish_reason_raises_stream_broken(*, at_once: bool) -> None:
    end = format_chunk("", '"stop"').replace(b'"choices"', b'"usage":{"prompt_tokens":1},"choices"')
    pieces = [*STREAM[:2], end, STREAM[1]]

    with pytest.raises(StreamBroken):
        read_passthrough(
            require_passthrough("chat", STREAM_REQUEST).create_reader(),
            *([b"".join(pieces)] if at_once else pieces),
        )


def test_stream_usage_is_sent_only_if_requested() -> None:
    usage = b'"usage":{"prompt_tokens":2,"completion_tokens":%d,"total_tokens":%d},"choices"'
    pieces = [one.replace(b'"choices"', usage % (i, i + 2)) for i, one in enumerate(STREAM[:3])]
    request_body = STREAM_REQUEST | {"stream_options": {"include_usage": True}}
    for body, times in ((STREAM_REQUEST, 0), (request_body, 1)):
        output = pass_through(*pieces, STREAM[3], body=body)
        assert output.count(b'"usage":{') == times
        assert b'"content":"lo"' in output


def test_tool_call_argument_object_is_encoded_as_a_string() -> None:
    call = b'"delta":{"tool_calls":[{"function":{"name":"f","arguments":{"x":1}}}]}'
    event = STREAM[1].replace(b'"delta":{"content":"lo"}', call)

    output = pass_through(STREAM[0], event, format_chunk("", '"stop"'), STREAM[3])

    assert b'"arguments":"{\\"x\\":1}"' in output
    assert b'"finish_reason":"tool_calls"' in output
    assert b'"id":"call_0_0","type":"function"' in output


def test_text_before_between_and_after_tool_calls_is_written_in_order() -> None:
    calls = [
        STREAM[1].replace(b'"delta":{"content":"lo"}', b'"delta":{"tool_calls":[%b]}' % call)
        for call in (
            b'{"index":0,"id":"c","function":{"name":"f","arguments":"{"}}',
            b'{"index":0,"function":{"arguments":"}"}}',
        )
    ]
    text = STREAM[1]
    output = pass_through(
        STREAM[0], text, text, calls[0], text, calls[1], text, format_chunk("", '"stop"'), STREAM[3]
    )
    marks = re.findall(rb'"content":"lo"|"arguments":"."', output)
    lo, opening, closing = b'"content":"lo"', b'"arguments":"{"', b'"arguments":"}"'

    assert marks == [lo, lo, opening, lo, closing, lo]
    assert output.count(b'"finish_reason":"tool_calls"') == 1


def format_call_chunk(call: bytes, delta: bytes = b"") -> bytes:
    """A chunk with a fragment of a tool call and further fields of its delta."""
    return STREAM[1].replace(b'"content":"lo"', b'"tool_calls":[%b]%b' % (call, delta))


def format_arguments(text: bytes, index: int = 0) -> bytes:
    """A chunk with a piece of a call's arguments."""
    return format_call_chunk(b'{"index":%d,"function":{"arguments":"%b"}}' % (index, text))


FIRST_CALL = format_call_chunk(
    b'{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{"}}'
)


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_arguments_of_a_call_are_forwarded_unchanged(*, at_once: bool) -> None:
    # given a call whose later chunks have a key that no encoder would write
    pieces = [format_arguments(text) for text in (b"1", b"2", b"3", b"", b"}")]
    odd = [one.replace(b'"choices"', b'"odd":1.50,"choices"') for one in pieces]
    events = [STREAM[0], FIRST_CALL, pieces[0], *odd[1:], format_chunk("", '"tool_calls"')]

    # when it is passed through
    reader = require_passthrough("chat", STREAM_REQUEST).create_reader()
    chunks = [b"".join(events)] if at_once else events
    out, read = read_passthrough(reader, *chunks, STREAM[3])

    # then they are as the worker wrote them, but for the model's name, and all were read
    assert b"".join(odd[1:]).replace(b"llama", b"chat") in join_output(out)
    assert "".join(one.text for one in read if isinstance(one, ToolCallDelta)) == "{123}"
    assert join_output(out).count(b'"finish_reason":"tool_calls"') == 1


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_calls_that_a_worker_counts_from_one_are_counted_from_zero(*, at_once: bool) -> None:
    first = FIRST_CALL.replace(b'"index":0,"id"', b'"index":1,"id"')
    pieces = [format_arguments(text, index=1) for text in (b"1", b"2", b"}")]
    events = [STREAM[0], first, *pieces, format_chunk("", '"tool_calls"')]

    output = pass_through(*([b"".join(events)] if at_once else events), STREAM[3])

    assert output.count(b'"tool_calls":[{"index":0') == 5
    assert b'"tool_calls":[{"index":1' not in output


def test_another_call_in_a_last_event_without_blank_line_is_another_call() -> None:
    pieces = [format_arguments(text) for text in (b'\\"a\\":', b"1", b"}")]
    second = format_call_chunk(b'{"index":0,"function":{"name":"g","arguments":"{}"}}')
    last = second.replace(b'"finish_reason":null', b'"finish_reason":"tool_calls"').strip()

    output = pass_through(STREAM[0], FIRST_CALL, *pieces, last)

    assert b'"index":1,"id":"call_0_1"' in output


HALVES = {
    "no second": ("\\ud83d",),
    "second in the next event": ("\\ud83d", "\\ude00"),
    "events between": ("\\ud83d", "", "", "\\ude00"),
    "no first": ("\\ude00",),
}
"""The texts with half a character, and what stands for them in the answer."""


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
def test_nothing_overtakes_a_text_with_half_a_character(
    halves: Sequence[str], position: int, *, at_once: bool
) -> None:
    # given a stream of 6 texts, before one of which a worker splits a character
    texts = [f"{i}," for i in range(6)]
    shown = "\U0001f600" if len(halves) > 1 else "\ufffd"
    sent = [*texts[:position], *halves, *texts[position:]]
    pieces = [*map(format_chunk, sent), *STREAM[2:]]

    # when it is passed through
    reader = require_passthrough("chat", STREAM_REQUEST).create_reader()
    out, events = read_passthrough(reader, *([b"".join(pieces)] if at_once else pieces))

    # then the client and the record have all texts in their order, and the end behind them
    expected = "".join([*texts[:position], shown, *texts[position:]])
    written = [one[6:] for one in join_output(out).split(b"\n\n")[:-1]]
    chunks = [json.loads(one)["choices"][0] for one in written[:-1]]
    assert "".join(one["delta"].get("content", "") for one in chunks) == expected
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == expected
    assert (chunks[-1]["finish_reason"], written[-1]) == ("stop", b"[DONE]")


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
def test_nothing_overtakes_an_argument_with_half_a_character(
    halves: Sequence[str], position: int, *, at_once: bool
) -> None:
    # given a call whose arguments have a character that a worker splits
    parts = ['\\"a', '\\":\\"', "b", "c", '\\"}']
    shown = "\U0001f600" if len(halves) > 1 else "\ufffd"
    sent = [format_arguments(one.encode()) for one in [*parts[:position], *halves]]
    sent += [format_arguments(one.encode()) for one in parts[position:]]
    pieces = [STREAM[0], FIRST_CALL, *sent, format_chunk("", '"tool_calls"'), STREAM[3]]

    # when it is passed through
    reader = require_passthrough("chat", STREAM_REQUEST).create_reader()
    out, events = read_passthrough(reader, *([b"".join(pieces)] if at_once else pieces))

    # then they are whole and in their order, for the client and for the record
    texts = [one.replace("\\", "") for one in parts]
    expected = "{" + "".join([*texts[:position], shown, *texts[position:]])
    written = [one[6:] for one in join_output(out).split(b"\n\n")[:-1]]
    deltas = [json.loads(one)["choices"][0]["delta"] for one in written[:-1]]
    calls = [call for one in deltas for call in one.get("tool_calls", [])]
    assert "".join(one["function"].get("arguments", "") for one in calls) == expected
    assert "".join(e.text for e in events if isinstance(e, ToolCallDelta)) == expected


def test_reader_of_a_stream_shows_whether_it_forwards() -> None:
    reader = require_passthrough("chat", STREAM_REQUEST).create_reader()
    assert repr(reader) == "<StreamPassthroughReader decoding, 0 bytes pending>"
    reader.feed([STREAM[0], STREAM[1][:5]])
    assert repr(reader) == "<StreamPassthroughReader forwarding, 5 bytes pending>"


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_call_without_id_after_complete_forwarded_arguments_is_another_call(
    *, at_once: bool
) -> None:
    # given a worker that begins a second call at the index of the first, whose arguments are whole
    pieces = [format_arguments(text) for text in (b'\\"a\\":', b"1", b"}")]
    second = format_call_chunk(b'{"index":0,"function":{"name":"g","arguments":"{}"}}')
    events = [STREAM[0], FIRST_CALL, *pieces, second, format_chunk("", '"tool_calls"')]

    output = pass_through(*([b"".join(events)] if at_once else events), STREAM[3])

    assert b'"index":1,"id":"call_0_1"' in output


@pytest.mark.parametrize(
    "other",
    [
        format_arguments(b"2", index=1),
        format_call_chunk(b'{"index":0,"function":{"arguments":"2"},"id":null}'),
        format_call_chunk(b'{"index":0,"function":{"arguments":"2"}}', b',"content":"x"'),
        format_arguments(b"2").replace(b'"id":"c"', b'"id":"d"'),
        format_arguments(b"2").replace(b'"choices"', b'"model":"llama","choices"'),
    ],
    ids=["another call", "null id", "text", "another chunk id", "two names"],
)
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_chunks_with_more_than_arguments_are_encoded_again(other: bytes, *, at_once: bool) -> None:
    begin = [FIRST_CALL, FIRST_CALL.replace(b'"index":0,"id":"c1"', b'"index":1,"id":"c2"')]
    marked = other.replace(b'"choices"', b'"odd":1.50,"choices"')
    events = [STREAM[0], *begin, format_arguments(b"1"), format_arguments(b"1"), marked]
    events.append(format_chunk("", '"tool_calls"'))

    output = pass_through(*([b"".join(events)] if at_once else events), STREAM[3])

    assert marked.replace(b"llama", b"chat") not in output
    assert b'"arguments":"2"' in output


def test_reasoning_chunks_are_forwarded_unchanged() -> None:
    reasoning = STREAM[1].replace(b'"content"', b'"reasoning_content"')
    out, events = read_passthrough(
        require_passthrough("chat", STREAM_REQUEST).create_reader(), reasoning, reasoning, *STREAM
    )

    assert reasoning.replace(b"llama", b"chat") in join_output(out)
    assert [e.text for e in events if isinstance(e, ReasoningDelta)] == ["lo", "lo"]
    assert FORWARDED in join_output(out)


def test_completion_chunks_in_one_read_are_forwarded_as_one_event() -> None:
    def format_text(text: str, finish: str = "null") -> bytes:
        choice = f'{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{finish}}}'
        head = '"id":"c","object":"text_completion","created":7,"model":"llama"'
        return f'data: {{{head},"choices":[{choice}]}}\n\n'.encode()

    forwarded = format_text("a") + format_text("") + format_text("b")
    out, events = read_passthrough(
        require_passthrough("completion", TEXT | {"stream": True}).create_reader(),
        format_text("s"),
        forwarded + format_text("", '"stop"') + STREAM[3],
    )

    assert forwarded.replace(b"llama", b"chat") in join_output(out)
    assert TextDelta("ab", tokens=2) in events


@pytest.mark.parametrize("lacking", [b'"id":"c",', b'"model":"llama",'])
def test_all_chunks_of_a_stream_have_the_same_id_and_model(lacking: bytes) -> None:
    output = pass_through(*[one.replace(lacking, b"") for one in STREAM])
    assert [b'"model":"chat"' in one for one in output.split(b"\n\n")[:-2]] == [True] * 4
    assert len({one.partition(b",")[0] for one in output.split(b"\n\n")[:-2]}) == 1


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_another_model_name_is_replaced_if_the_first_is_the_public_name(*, at_once: bool) -> None:
    other = STREAM[1].replace(b'"llama"', b'"other"')
    pieces = [*STREAM[:2], other, *STREAM[2:]]
    reader = require_passthrough("chat", STREAM_REQUEST, shown="llama").create_reader()

    out, _ = read_passthrough(reader, *([b"".join(pieces)] if at_once else pieces))

    assert b"other" not in join_output(out)
    assert join_output(out).count(b'"model":"llama"') == 5


def test_encoded_chunks_keep_the_time_of_the_worker() -> None:
    timed = [one.replace(b'"id":"c",', b'"id":"c","created":5,') for one in STREAM]
    chunks = pass_through(*timed).split(b"\n\n")[:-2]
    assert [b'"created":5' in chunk for chunk in chunks] == [True] * 4


def test_id_in_a_nested_object_is_not_the_chunk_id() -> None:
    inner = [one.replace(b'"delta":{', b'"delta":{"id":"x",') for one in STREAM]
    outer = [one.replace(b'{"id":"c",', b"{").replace(b"]}\n", b'],"id":"c"}\n') for one in inner]
    expected = SHOWN.replace(FORWARDED, format_encoded_chunk('{"content":"lo"}'))
    chunks = [msgspec.json.decode(one[6:]) for one in expected.split(b"\n\n")[:-2]]
    for chunk in chunks[1:]:
        chunk["choices"][0]["delta"]["id"] = "x"

    output = pass_through(*outer).split(b"\n\n")[:-2]

    assert [msgspec.json.decode(one[6:]) for one in output] == chunks


def test_empty_response_id_is_replaced_by_a_gateway_id() -> None:
    output = pass_through(*[one.replace(b'"id":"c"', b'"id":""') for one in STREAM])
    assert output == SHOWN.replace(b'"id":"c"', b'"id":"chatcmpl-r1"')


def test_choice_without_finish_reason_raises_stream_broken() -> None:
    body = STREAM_REQUEST | {"n": 2}
    other = STREAM[1].replace(b'"index":0', b'"index":1')
    with pytest.raises(StreamBroken):
        pass_through(STREAM[0], STREAM[1], other, *STREAM[2:], body=body)


def test_completion_stream_logprobs_have_cumulative_offsets() -> None:
    piece = (
        b'data: {"id":"c","model":"llama","choices":[{"index":0,"text":"ab","logprobs":{"tokens":'
        b'["ab"],"token_logprobs":[-1],"top_logprobs":null,"text_offset":[9]},"finish_reason":'
    )
    pieces = [piece + b"null}]}\n\n", piece + b"null}]}\n\n", piece + b'"stop"}]}\n\n', STREAM[3]]
    relay = require_passthrough("completion", TEXT | {"logprobs": 1, "stream": True})
    output = join_output(read_passthrough(relay.create_reader(), *pieces)[0])

    offsets = [output.index(b'"text_offset":[%d]' % place) for place in (0, 2, 4)]

    assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"stop"', b'"eos_token"'),
        (b'"finish_reason":"stop"', b'"finish_r\\u0065ason":"eos_token"'),
        (b'"content":"Hi"', b'"tool_calls":[{"function":{"name":"f","arguments":{}}}]'),
        (b'"content":"Hi"', b'"function_call": {"name":"f","arguments":"{}"}'),
        (b'"index":0', b'"index":-1'),
        (b'"choices":[', b'"choices":[{"index":1,"message":{},"finish_reason":"stop"},'),
    ],
)  # fmt: skip
def test_nonstandard_unary_response_is_encoded_again(old: bytes, new: bytes) -> None:
    out, events = read_passthrough(
        require_passthrough("chat", CHAT).create_reader(), ANSWER.replace(old, new)
    )
    assert out[-1] is None
    assert isinstance(events[-1], StreamEnd)


def test_unary_response_without_finish_reason_is_an_error() -> None:
    reader = require_passthrough("chat", CHAT).create_reader()

    with pytest.raises(WorkerFailed, match="has no finish reason"):
        read_passthrough(reader, ANSWER.replace(b'"stop"', b"null"))


STANDARD_CALL = (
    b'"content":null,"tool_calls":[{"id":"call-1","type":"function","function":'
    b'{"name":"f","arguments":"{}"}}]'
)


def build_tool_answer(old: bytes = b"", new: bytes = b"") -> bytes:
    """An answer with a tool call as the protocol has it, and ``new`` in the place of ``old``."""
    response = ANSWER.replace(b'"content":"Hi"', STANDARD_CALL).replace(b'"stop"', b'"tool_calls"')
    assert old in response
    return response.replace(old, new)


@pytest.mark.parametrize("old_and_new", [(), (b"null,", b'"Let me see.",'), (b'"{}"', b'""')])
def test_unary_response_with_standard_tool_calls_is_passed_through(
    old_and_new: tuple[bytes, ...],
) -> None:
    response = build_tool_answer(*old_and_new)
    out, events = read_passthrough(require_passthrough("chat", CHAT).create_reader(), response)
    assert out[-1] == response.replace(b"llama", b"chat")
    assert ToolCallStart in map(type, events)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b':"tool_calls"', b':"stop"'),
        (b':"tool_calls"', b':"function_call"'),
        (b'"content":null', b'"content":""'),
        (b'"id":"call-1",', b""),
        (b'"type":"function",', b""),
        (b'"type":"function"', b'"type":"custom"'),
        (b'"{}"', b"{}"),
        (b',"arguments":"{}"', b""),
        (b'"}}]', b'"}},{"id":"call-1","type":"function","function":{"name":"g","arguments":""}}]'),
    ],
)  # fmt: skip
def test_unary_response_with_other_tool_calls_is_encoded_again(old: bytes, new: bytes) -> None:
    response = build_tool_answer(old, new)
    out, events = read_passthrough(require_passthrough("chat", CHAT).create_reader(), response)
    assert out[-1] is None
    assert ToolCallStart in map(type, events)


def test_unary_response_with_empty_tool_calls_is_passed_through() -> None:
    response = ANSWER.replace(
        b'"content":"Hi"', b'"content":"Hi","tool_calls": [ ],"function_call":null'
    )
    out, _ = read_passthrough(require_passthrough("chat", CHAT).create_reader(), response)
    assert out[-1] == response.replace(b"llama", b"chat")


def test_model_name_in_nested_objects_is_replaced() -> None:
    response = ANSWER.replace(b'"odd":1.50', b'"routed":{"model":"llama"}')
    out, _ = read_passthrough(require_passthrough("chat", CHAT).create_reader(), response)
    assert out[-1] == response.replace(b"llama", b"chat")


@pytest.mark.parametrize("spelling", [b'"model" : "llama"', b'"model":"ll\\u0061ma"'])
def test_model_name_with_blanks_or_escapes_is_replaced(spelling: bytes) -> None:
    response = ANSWER.replace(b'"model":"llama"', spelling)
    out, _ = read_passthrough(require_passthrough("chat", CHAT).create_reader(), response)
    assert out[-1] is None or json.loads(out[-1])["model"] == "chat"


def count_reader_calls(pieces: Sequence[bytes]) -> int:
    """Return the number of Python and C functions called to read these pieces."""
    reader, calls = require_passthrough("chat", STREAM_REQUEST).create_reader(), 0

    def count(frame: object, event: str, value: object) -> None:
        nonlocal calls
        del frame, value
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for piece in pieces:
            reader.feed([piece])
    finally:
        sys.setprofile(None)
    return calls


def add_chunk_field(field: bytes) -> bytes:
    return STREAM[1].replace(b'"choices"', field + b',"choices"')


FORMS = {
    "text": lambda _: STREAM[1],
    "created": lambda i: add_chunk_field(b'"created":%d' % i),
    "obfuscation": lambda i: STREAM[1].replace(
        b"]}\n", b'],"obfuscation":"%b"}\n' % (b"x" * (i % 7))
    ),
    "usage": lambda i: add_chunk_field(b'"usage":{"prompt_tokens":1,"completion_tokens":%d}' % i),
    "comments": lambda i: b": %d\n\n" % i + STREAM[1],
}


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_passthrough_cost_grows_linearly_with_the_events(form: Any, *, at_once: bool) -> None:
    def cost(many: int) -> int:
        pieces = [form(i) for i in range(many)]
        return count_reader_calls([b"".join(pieces)] if at_once else pieces)

    cost(10)
    few, many = cost(200), cost(2_000)

    assert many < 10.5 * few


def test_passthrough_cost_grows_linearly_with_the_packets_of_an_event() -> None:
    few = count_reader_calls([STREAM[0], b"data: ", *[b"x"] * 1_000])
    assert count_reader_calls([STREAM[0], b"data: ", *[b"x"] * 10_000]) < 10.5 * few


@pytest.mark.parametrize("blank", [b"data: \n\n", b"data:  \n\n"])
def test_events_without_data_are_removed_from_a_batch(blank: bytes) -> None:
    texts = [format_chunk(f" {i}") for i in range(20)]
    pieces = [*STREAM[:2], *texts[:9], blank, *texts[9:], *STREAM[2:]]
    assert pass_through(b"".join(pieces)) == pass_through(
        b"".join([*STREAM[:2], *texts, *STREAM[2:]])
    )


def test_tokens_of_a_unary_response_without_usage_are_counted_by_its_log_probabilities() -> None:
    tokens = b",".join([b'{"token":"H","logprob":-0.5}'] * 3)
    response = ANSWER.replace(
        b'"finish_reason"', b'"logprobs":{"content":[%b]},"finish_reason"' % tokens
    )
    bare = response.partition(b',"usage"')[0] + b"}"
    for body, count in ((response, 1), (bare, 3)):
        out, events = read_passthrough(require_passthrough("chat", CHAT).create_reader(), body)
        assert out[-1] == body.replace(b"llama", b"chat")
        assert sum(e.tokens for e in events if isinstance(e, TextDelta)) == count


def test_embeddings_with_implausible_usage_are_decoded() -> None:
    response = VECTORS.replace(b'"prompt_tokens":2', b'"prompt_tokens":-2')
    response = response.replace(b'"AAAA"', b'"AAAAAA=="')

    out, events = read_passthrough(
        require_passthrough("embedding", EMBED).create_reader(), response
    )

    assert out[-1] is None
    assert [type(event) for event in events] == [
        ResponseMetadata, Embedding, Embedding, StreamEnd
    ]  # fmt: skip
    assert StreamEnd(has_ignored_usage=True) in events
