"""Calls that are passed on as they are, and their answers."""

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext
from protocols.chat.field_types import (
    OPTIONAL_STRING,
    PROMPTS,
)
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    Event,
    ReasoningDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
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


def call_of(variant: str, body: Any) -> ClientRequest:
    row = endpoint(variant)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ClientRequest(row, {}, {}, "", data, row.path)


def relayed(
    variant: str, body: Any, worker: OpenAI = VLLM, shown: str = "chat"
) -> PassthroughRequest | None:
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0)
    about = ResponseContext("r1", 1, shown, "v1", "llama", context.clock)
    return worker.prepare_passthrough(OpenAI(), call_of(variant, body), about)


def taken(
    variant: str, body: Any, worker: OpenAI = VLLM, shown: str = "chat"
) -> PassthroughRequest:
    relay = relayed(variant, body, worker, shown)
    assert relay is not None
    return relay


# --- the way there --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "body"),
    [
        ("chat", CHAT),
        ("chat", CHAT | {"temperature": 0.5, "top_k": 3, "stop": ["a"], "seed": 7, "n": 2}),
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
def test_what_is_plainly_right_is_passed_on_with_the_model_renamed(
    variant: str, body: dict[str, Any]
) -> None:
    wire = taken(variant, body).upstream_request
    assert json.loads(wire.body) == body | {"model": "llama"}
    assert list(json.loads(wire.body)) == list(body)
    assert wire.path == endpoint(variant).path


def test_numbers_and_texts_keep_their_form() -> None:
    body = b'{"model":"chat","messages":[{"role":"user","content":"\\u00e9"}],"x":1.50e0}'
    wire = taken("chat", body).upstream_request
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
        ("chat", CHAT | {"stop": ["a", "b", "c", "d", "e"]}),
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
def test_whatever_else_there_is_goes_the_long_way(variant: str, body: Any) -> None:
    assert relayed(variant, body) is None


def test_a_field_that_the_worker_does_not_take_goes_the_long_way() -> None:
    assert relayed("chat", CHAT | {"top_k": 3}, OpenAI("openai")) is None
    assert relayed("chat", CHAT | {"repetition_penalty": 1.1}, OpenAI("llamacpp")) is None


def test_powers_are_passed_on_where_the_operator_lets_clients_have_them() -> None:
    body = CHAT | {"kv_transfer_params": {}}
    assert relayed("chat", body, OpenAI("vllm", powers=True)) is not None


WRITER = PassthroughResponse(tuple, cast("Any", None), {})
"""For a response that nobody reads."""


def _one(**row: Any) -> Param:
    return Param(wire="x", field="sampling.x", **row)


@pytest.mark.parametrize(
    ("worker", "client", "right", "wrong"),
    [
        (_one(type="int", maximum=2**64), _one(type="int", minimum=1), "9", "0"),
        (
            _one(type="float", maximum=1),
            _one(type="float", maximum=1, exclusive_maximum=True),
            "0.5",
            "1",
        ),
        (
            _one(type="float", maximum=0.5),
            _one(type="float", maximum=1, exclusive_maximum=True),
            "0.5",
            "0.6",
        ),
        (
            _one(type="float", minimum=0, exclusive_minimum=True),
            _one(type="float", minimum=0),
            "1",
            "0",
        ),
        (_one(type="strings", max_items=1), _one(type="strings"), '["a"]', '["a","b"]'),
        (_one(type="strings"), _one(type="strings", max_items=1), '["a"]', '["a","b"]'),
    ],
)
def test_a_value_is_within_the_ranges_of_both(
    worker: Param, client: Param, right: str, wrong: str
) -> None:
    read_body = build_body_decoder(
        PassthroughRule(path="", field_types={}, worker_params=(worker,), client_params=(client,))
    ).decode
    assert read_body(f'{{"x":{right}}}').x == json.loads(right)
    with pytest.raises(msgspec.ValidationError):
        read_body(f'{{"x":{wrong}}}')


def test_rows_that_differ_in_meaning_are_none_that_both_have() -> None:
    worker = Param(wire="x", field="sampling.y", type="int")
    form = PassthroughRule(
        path="", field_types={}, worker_params=(worker,), client_params=(_one(type="int"),)
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
def test_a_body_is_passed_on_as_its_fields_are_read(
    which: tuple[str, Any], strange: bytes, data: st.DataObject
) -> None:
    variant, whole = which
    body = json.dumps(whole, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(body)))
    body = body[:at] + strange + body[at:]

    relay = relayed(variant, body)

    if relay is not None:
        fields = read_object(body)
        assert relay.upstream_request.body == msgspec.json.encode({**fields, "model": "llama"})


@pytest.mark.parametrize("text", [b"\xff", b"\\ud83d"])
@pytest.mark.parametrize("field", ["model", "prompt", "user", "x"])
def test_a_text_that_is_none_is_not_passed_on(
    about: ResponseContext, field: str, text: bytes
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
    for said in (b"a", text):
        fields = {"model": b"m", "prompt": b"a"} | {field: said}
        body = b",".join(b'"%b":"%b"' % (key.encode(), one) for key, one in fields.items())
        call = ClientRequest(row, {}, {}, "", b"{%b}" % body, row.path)
        assert (
            PassthroughRules({"text": form}).prepare_passthrough("text", call, about, WRITER)
            is None
        ) == (said is text)


def test_where_the_path_names_the_model_the_body_does_not(about: ResponseContext) -> None:
    form = PassthroughRule(
        path="/of/{model}/x", field_types={"prompt": PROMPTS}, worker_params=(), client_params=()
    )
    relays = PassthroughRules({"text": form})
    assert ("text" in relays, "chat" in relays) == (True, False)
    row = endpoint("completion")
    call = ClientRequest(row, {}, {}, "", b'{"prompt":"a","model":"chat"}', row.path)
    relay = relays.prepare_passthrough("text", call, replace(about, backend_model="a/b c"), WRITER)
    assert relay is not None
    assert (relay.upstream_request.path, relay.upstream_request.body) == (
        "/of/a%2Fb%20c/x",
        b'{"prompt":"a"}',
    )


def test_a_stricter_listener_reads_every_body(make_call: MakeCall, about: ResponseContext) -> None:
    call = make_call("chat", CHAT)
    assert VLLM.prepare_passthrough(OpenAI(unknown="reject"), call, about) is None


def test_what_choosing_a_worker_needs_is_read() -> None:
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    chat = taken("chat", CHAT | {"messages": messages, "user": "ann", "n": 2}).request
    assert isinstance(chat, GenerationRequest)
    assert [message.text for message in chat.messages] == ["hi", "x"]
    assert [message.role for message in chat.messages] == ["user", "assistant"]
    told = [*HI, CALL, RESULT, {"role": "user", "content": [PICTURE, SOUND]}]
    turn = taken("chat", CHAT | {"messages": told, "tools": [TOOL]}).request
    assert isinstance(turn, GenerationRequest)
    assert turn.messages == VLLM.decode_request(call_of("chat", CHAT | {"messages": told})).messages  # type: ignore[union-attr]
    assert (chat.n, chat.labels, chat.model) == (2, {"user": "ann"}, "llama")
    text = taken("completion", TEXT | {"stream": True}).request
    assert isinstance(text, GenerationRequest)
    assert (text.prompts, text.stream) == (("a b",), True)
    vectors = taken("embedding", EMBED | {"input": "a"}).request
    assert isinstance(vectors, EmbeddingRequest)
    assert vectors.inputs == ("a",)


PARTS = {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]}


def test_the_request_behind_a_conversation() -> None:
    body = CHAT | {"messages": [*HI, PARTS], "user": "ann", "n": 2, "stream": True}
    assert taken("chat", body).request == GenerationRequest(
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
def test_the_request_behind_prompts(prompt: Any) -> None:
    assert taken("completion", TEXT | {"prompt": prompt}).request == GenerationRequest(
        model="llama", kind="completion", prompts=tuple(prompt)
    )


@pytest.mark.parametrize("texts", ["a", ["a", "b"]])
def test_the_request_behind_inputs(texts: Any) -> None:
    request = taken("embedding", EMBED | {"input": texts, "user": "ann"}).request
    assert request == EmbeddingRequest(model="llama", inputs=tuple(texts), labels={"user": "ann"})


def test_how_long_the_client_waits_is_known() -> None:
    row = endpoint("chat")
    call = ClientRequest(
        row, {}, {"x-stainless-read-timeout": "7"}, "", json.dumps(CHAT).encode(), row.path
    )
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0)
    relay = VLLM.prepare_passthrough(
        OpenAI(), call, ResponseContext("r1", 1, "chat", "v1", "llama", context.clock)
    )
    assert relay is not None
    assert relay.request.timeout == 7


@pytest.mark.parametrize("stream", [True, False])
def test_the_headers_are_those_of_any_answer(*, stream: bool) -> None:
    headers = dict(taken("chat", CHAT | {"stream": stream}).build_headers())
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    assert headers["Content-Type"] == kind
    assert headers["openai-version"] == "2020-10-01"
    assert headers["x-served-model"] == "v1"


# --- the way back: whole --------------------------------------------------------------------------

ANSWER = (
    b'{"id":"c1","object":"chat.completion","created":1,"model":"llama","odd":1.50,"choices":['
    b'{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)


def read(passage: PassthroughReader, *pieces: bytes) -> tuple[list[bytes | None], list[Event]]:
    out, events = [], list[Event]()
    for piece in pieces:
        data, more = passage.feed([piece])
        out.append(data)
        events += more
        if events and isinstance(events[-1], StreamEnd):
            return out, events
    data, more = passage.close()
    return [*out, data], [*events, *more]


def test_a_whole_answer_comes_back_unread_under_the_clients_name() -> None:
    out, events = read(taken("chat", CHAT).create_reader(), ANSWER[:40], ANSWER[40:] + b"\n")
    assert out == [b"", b"", ANSWER.replace(b"llama", b"chat")]
    assert [e.completion_tokens for e in events if isinstance(e, Usage)] == [1]
    assert isinstance(events[-1], StreamEnd)


def test_under_one_name_nothing_is_touched() -> None:
    out, _ = read(taken("chat", CHAT, shown="llama").create_reader(), ANSWER)
    assert out[-1] == ANSWER
    nameless = ANSWER.replace(b'"model":"llama",', b"")
    out, _ = read(taken("chat", CHAT).create_reader(), nameless)
    assert out[-1] == nameless


def test_the_client_reads_its_own_name_whatever_the_worker_calls_itself() -> None:
    other = ANSWER.replace(b'"llama"', b'"org/llama \\"x\\""')
    for shown in ("chat", "llama"):
        out, _ = read(taken("chat", CHAT, shown=shown).create_reader(), other)
        assert out[-1] == ANSWER.replace(b"llama", shown.encode())
        events = b"".join(STREAM).replace(b'"llama"', b'"org/llama \\"x\\""')
        out, _ = read(taken("chat", ASKED, shown=shown).create_reader(), events[:150], events[150:])
        assert joined(out) == SHOWN.replace(b'"chat"', b'"%b"' % shown.encode())


@pytest.mark.parametrize("length", [4, 3], ids=["to its end", "complete without it"])
def test_a_stream_in_place_of_a_whole_answer_is_for_the_encoder(length: int) -> None:
    out, events = read(taken("chat", CHAT).create_reader(), *STREAM[:length])
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
def test_what_is_no_answer_is_an_error(body: bytes, error: type[Exception]) -> None:
    passage = taken("chat", CHAT).create_reader()
    with pytest.raises((error, WorkerFailed)):
        read(passage, body)


VECTORS = (
    b'{"object":"list","data":[{"index":0,"embedding":[1,2]},{"index":1,"embedding":"AAAA"}],'
    b'"model":"llama","usage":{"prompt_tokens":2,"total_tokens":2}}'
)


def test_vectors_come_back_unread() -> None:
    out, events = read(taken("embedding", EMBED).create_reader(), VECTORS)
    assert out[-1] == VECTORS.replace(b"llama", b"chat")
    assert events == [ResponseMetadata("llama"), Usage(2), StreamEnd()]
    bare = VECTORS.replace(b',"usage":{"prompt_tokens":2,"total_tokens":2}', b"")
    bare = bare.replace(b'"llama"', b"null")
    out, events = read(taken("embedding", EMBED).create_reader(), bare)
    assert (out[-1], events) == (bare, [ResponseMetadata(), StreamEnd()])


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"", StreamBroken), (VECTORS[:50], WorkerFailed), (b'{"data":[]}', WorkerFailed)],
)
def test_vectors_that_are_not_all_there(body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(taken("embedding", EMBED).create_reader(), body)


# --- the way back: a stream -----------------------------------------------------------------------


def chunk(delta: str, finish: str = "null") -> bytes:
    return (
        b'data: {"id":"c","model":"llama","choices":[{"index":0,"delta":{"content":"%b"},'
        b'"finish_reason":%b}]}\n\n' % (delta.encode(), finish.encode())
    )


def written(delta: str, finish: str = "null") -> bytes:
    """A chunk as the encoder writes it."""
    return (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"chat","choices":['
        b'{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        % (delta.encode(), finish.encode())
    )


STREAM = (chunk("Hel"), chunk("lo"), chunk("", '"stop"'), b"data: [DONE]\n\n")
FIRST = written('{"role":"assistant","content":""}') + written('{"content":"Hel"}')
FORWARDED = STREAM[1].replace(b"llama", b"chat")
LAST = written("{}", '"stop"') + b"data: [DONE]\n\n"
SHOWN = FIRST + FORWARDED + LAST
ASKED = CHAT | {"stream": True}


def joined(out: Sequence[bytes | None]) -> bytes:
    assert None not in out
    return b"".join(data for data in out if data is not None)


@given(cuts=st.lists(st.integers(0, len(b"".join(STREAM))), max_size=8))
def test_a_stream_comes_back_whatever_the_packets(cuts: list[int]) -> None:
    data, edges = b"".join(STREAM), [0, *sorted(cuts), len(b"".join(STREAM))]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]

    out, events = read(taken("chat", ASKED).create_reader(), *pieces)

    assert joined(out) == SHOWN
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Hello"


def test_only_whole_events_are_passed_on() -> None:
    passage = taken("chat", ASKED).create_reader()
    assert passage.feed([STREAM[0][:-1]])[0] == b""
    assert passage.feed([b"\ndata: {"])[0] == FIRST


def test_other_line_ends_and_blanks_pass_too() -> None:
    data = b"".join(STREAM).replace(b'"model":', b'"model" : ')
    crlf = data.replace(b"\n", b"\r\n")
    for pieces in ([data], [crlf], [bytes([one]) for one in crlf]):
        out, _ = read(taken("chat", ASKED).create_reader(), *pieces)
        assert joined(out) == SHOWN.replace(
            FORWARDED, FORWARDED.replace(b'"model":', b'"model" : ')
        )


@pytest.mark.parametrize("end", [b"data: [DONE]\n", b""], ids=["one newline", "no end at all"])
def test_a_stream_that_is_complete_gets_its_end(end: bytes) -> None:
    out, events = read(taken("chat", ASKED, shown="llama").create_reader(), *STREAM[:3], end)
    assert joined(out) == SHOWN.replace(b'"chat"', b'"llama"')
    assert isinstance(events[-1], StreamEnd)


def test_a_stream_that_is_cut_is_told() -> None:
    passage = taken("chat", ASKED).create_reader()
    passage.feed([STREAM[0] + STREAM[1][:30]])
    with pytest.raises(StreamBroken):
        passage.close()


BROKEN = b'data: {"error":{"message":"secret","code":500}}\n\n'


def test_an_event_of_an_error_is_never_passed_on() -> None:
    with pytest.raises(WorkerFailed):
        taken("chat", ASKED).create_reader().feed([BROKEN])
    for ending in ("feed", "close"):
        passage = taken("chat", ASKED).create_reader()
        data, events = passage.feed([STREAM[0] + BROKEN + STREAM[1]])
        assert data == FIRST
        assert events
        with pytest.raises(WorkerFailed):
            passage.feed([STREAM[1]]) if ending == "feed" else passage.close()


def test_an_event_that_breaks_off_what_it_says_is_not_passed_on() -> None:
    passage = taken("chat", ASKED).create_reader()
    failing = chunk("x", '"invalid flag"')
    data, _ = passage.feed([STREAM[0] + failing])
    assert data == FIRST
    with pytest.raises(WorkerFailed):
        passage.feed([b""])
    with pytest.raises(WorkerFailed):
        taken("chat", ASKED).create_reader().feed([failing])


def test_a_line_that_is_no_field_is_for_the_gateway_alone() -> None:
    passage = taken("chat", ASKED).create_reader()
    data, _ = passage.feed([STREAM[0] + b'{"error":"secret"}\n\n' + b": still\n\n" + STREAM[1]])
    assert data is not None
    assert b"secret" not in data
    assert FORWARDED in data
    assert b"still" not in data
    with pytest.raises(WorkerFailed) as caught:
        passage.close()
    assert caught.value.__notes__ == ["the worker said: secret"]


def test_a_stray_line_does_not_make_another_answer_of_a_stream() -> None:
    out, _ = read(taken("chat", ASKED).create_reader(), STREAM[0], b'{"odd":1}\n\n', *STREAM[1:])
    assert joined(out) == SHOWN


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    passage = taken("chat", ASKED).create_reader()
    passage.feed([b"data: " + b"x" * 1_000_000])
    with pytest.raises(WorkerFailed):
        passage.feed([b"x" * 100_000])


def test_a_whole_answer_in_place_of_a_stream_is_for_the_encoder() -> None:
    out, events = read(taken("chat", ASKED).create_reader(), b" ", ANSWER)
    assert out[1:] == [None, None]
    assert any(isinstance(event, TextDelta) for event in events)


# --- the client's contract ------------------------------------------------------------------------


def passed(*pieces: bytes, body: Any = ASKED) -> bytes:
    return joined(read(taken("chat", body).create_reader(), *pieces)[0])


@pytest.mark.parametrize("blanks", [False, True], ids=["compact", "json.dumps"])
@pytest.mark.parametrize("many", [1, 3, 32, 100])
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_text_is_forwarded_as_it_is(*, blanks: bool, many: int, at_once: bool) -> None:
    texts = [chunk(f" {i} \\n\\u00e9") for i in range(many)]
    for i, text in enumerate(texts):  # fields of a chunk's own
        texts[i] = text.replace(b'"choices"', b'"created":%d,"obfuscation":"%b","choices"' % (
            i, b"x" * (i % 5)))  # fmt: skip
    pieces = [STREAM[0], *texts, *STREAM[2:]]
    if blanks:
        pieces = [one.replace(b'":', b'": ').replace(b',"', b', "') for one in pieces]
        texts = pieces[1:-2]

    out, events = read(
        taken("chat", ASKED).create_reader(), *([b"".join(pieces)] if at_once else pieces)
    )

    assert joined(out) == FIRST + b"".join(texts).replace(b"llama", b"chat") + LAST
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
        STREAM[1].replace(b'"choices"', b'\r"choices"'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_what_is_more_than_text_is_written_by_the_encoder(event: bytes, *, at_once: bool) -> None:
    pieces = [STREAM[0], STREAM[1], event, *STREAM[2:]]
    assert passed(*([b"".join(pieces)] if at_once else pieces)) == SHOWN.replace(
        FORWARDED, FORWARDED + written('{"content":"lo"}')
    )


def test_a_comment_between_events_is_not_shown() -> None:
    for pieces in ([*STREAM[:1], b": still\n\n", *STREAM[1:]], [b": still\n\n".join(STREAM)]):
        assert passed(*pieces) == SHOWN


def test_a_foreign_finish_reason_and_a_second_end_are_not_shown() -> None:
    end = chunk("", '"eos_token"')
    assert passed(STREAM[0], STREAM[1], end, end, STREAM[3]) == SHOWN


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_text_after_the_end_is_an_error(*, at_once: bool) -> None:
    end = chunk("", '"stop"').replace(b'"choices"', b'"usage":{"prompt_tokens":1},"choices"')
    pieces = [*STREAM[:2], end, STREAM[1]]
    with pytest.raises(StreamBroken):
        read(taken("chat", ASKED).create_reader(), *([b"".join(pieces)] if at_once else pieces))


def test_usage_is_shown_to_who_asked_for_it() -> None:
    usage = b'"usage":{"prompt_tokens":2,"completion_tokens":%d,"total_tokens":%d},"choices"'
    pieces = [one.replace(b'"choices"', usage % (i, i + 2)) for i, one in enumerate(STREAM[:3])]
    asked = ASKED | {"stream_options": {"include_usage": True}}
    for body, times in ((ASKED, 0), (asked, 1)):
        found = passed(*pieces, STREAM[3], body=body)
        assert found.count(b'"usage":{') == times
        assert b'"content":"lo"' in found


def test_arguments_of_a_tool_call_are_a_text() -> None:
    call = b'"delta":{"tool_calls":[{"function":{"name":"f","arguments":{"x":1}}}]}'
    event = STREAM[1].replace(b'"delta":{"content":"lo"}', call)
    found = passed(STREAM[0], event, chunk("", '"stop"'), STREAM[3])
    assert b'"arguments":"{\\"x\\":1}"' in found
    assert b'"finish_reason":"tool_calls"' in found
    assert b'"id":"call_0_0","type":"function"' in found


def test_a_thought_is_forwarded_too() -> None:
    thought = STREAM[1].replace(b'"content"', b'"reasoning_content"')
    out, events = read(taken("chat", ASKED).create_reader(), thought, thought, *STREAM)
    assert thought.replace(b"llama", b"chat") in joined(out)
    assert [e.text for e in events if isinstance(e, ReasoningDelta)] == ["lo", "lo"]
    assert FORWARDED in joined(out)


@pytest.mark.parametrize("lacking", [b'"id":"c",', b'"model":"llama",'])
def test_all_chunks_of_a_stream_have_the_same_names(lacking: bytes) -> None:
    found = passed(*[one.replace(lacking, b"") for one in STREAM])
    assert [b'"model":"chat"' in one for one in found.split(b"\n\n")[:-2]] == [True] * 4
    assert len({one.partition(b",")[0] for one in found.split(b"\n\n")[:-2]}) == 1


def test_a_name_inside_another_object_is_not_that_of_the_chunk() -> None:
    inner = [one.replace(b'"delta":{', b'"delta":{"id":"x",') for one in STREAM]
    outer = [one.replace(b'{"id":"c",', b"{").replace(b"]}\n", b'],"id":"c"}\n') for one in inner]
    assert passed(*outer) == SHOWN.replace(FORWARDED, written('{"content":"lo"}'))


def test_an_id_that_says_nothing_becomes_the_gateways() -> None:
    found = passed(*[one.replace(b'"id":"c"', b'"id":""') for one in STREAM])
    assert found == SHOWN.replace(b'"id":"c"', b'"id":"chatcmpl-r1"')


def test_choices_that_never_end_are_seen() -> None:
    body = ASKED | {"n": 2}
    other = STREAM[1].replace(b'"index":0', b'"index":1')
    with pytest.raises(StreamBroken):
        passed(STREAM[0], STREAM[1], other, *STREAM[2:], body=body)


def test_log_probabilities_of_a_text_keep_their_offsets() -> None:
    piece = (
        b'data: {"id":"c","model":"llama","choices":[{"index":0,"text":"ab","logprobs":{"tokens":'
        b'["ab"],"token_logprobs":[-1],"top_logprobs":null,"text_offset":[9]},"finish_reason":'
    )
    pieces = [piece + b"null}]}\n\n", piece + b"null}]}\n\n", piece + b'"stop"}]}\n\n', STREAM[3]]
    relay = taken("completion", TEXT | {"logprobs": 1, "stream": True})
    found = joined(read(relay.create_reader(), *pieces)[0])
    offsets = [found.index(b'"text_offset":[%d]' % place) for place in (0, 2, 4)]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"stop"', b'"eos_token"'),
        (b'"stop"', b"null"),
        (b'"finish_reason":"stop"', b'"finish_r\\u0065ason":"eos_token"'),
        (b'"content":"Hi"', b'"tool_calls":[{"function":{"name":"f","arguments":{}}}]'),
        (b'"content":"Hi"', b'"function_call": {"name":"f","arguments":"{}"}'),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_as_promised_is_for_the_encoder(old: bytes, new: bytes) -> None:
    out, events = read(taken("chat", CHAT).create_reader(), ANSWER.replace(old, new))
    assert out[-1] is None
    assert isinstance(events[-1], StreamEnd)


def test_an_answer_without_tool_calls_is_passed_on() -> None:
    answer = ANSWER.replace(
        b'"content":"Hi"', b'"content":"Hi","tool_calls": [ ],"function_call":null'
    )
    out, _ = read(taken("chat", CHAT).create_reader(), answer)
    assert out[-1] == answer.replace(b"llama", b"chat")


def test_a_name_is_replaced_wherever_it_stands() -> None:
    answer = ANSWER.replace(b'"odd":1.50', b'"routed":{"model":"llama"}')
    out, _ = read(taken("chat", CHAT).create_reader(), answer)
    assert out[-1] == answer.replace(b"llama", b"chat")


@pytest.mark.parametrize("spelling", [b'"model" : "llama"', b'"model":"ll\\u0061ma"'])
def test_a_name_is_replaced_however_it_is_spelt(spelling: bytes) -> None:
    answer = ANSWER.replace(b'"model":"llama"', spelling)
    out, _ = read(taken("chat", CHAT).create_reader(), answer)
    assert out[-1] is None or json.loads(out[-1])["model"] == "chat"


def count_calls(pieces: Sequence[bytes]) -> int:
    """How many functions run, Python's and C's, to read these pieces."""
    reader, calls = taken("chat", ASKED).create_reader(), 0

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


def with_field(field: bytes) -> bytes:
    return STREAM[1].replace(b'"choices"', field + b',"choices"')


FORMS = {
    "text": lambda _: STREAM[1],
    "created": lambda i: with_field(b'"created":%d' % i),
    "obfuscation": lambda i: STREAM[1].replace(
        b"]}\n", b'],"obfuscation":"%b"}\n' % (b"x" * (i % 7))
    ),
    "usage": lambda i: with_field(b'"usage":{"prompt_tokens":1,"completion_tokens":%d}' % i),
    "comments": lambda i: b": %d\n\n" % i + STREAM[1],
}


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ten_times_the_events_cost_ten_times_as_much(form: Any, *, at_once: bool) -> None:
    def cost(many: int) -> int:
        pieces = [form(i) for i in range(many)]
        return count_calls([b"".join(pieces)] if at_once else pieces)

    cost(10)
    few, many = cost(200), cost(2_000)
    assert many < 10.5 * few


def test_an_event_in_small_pieces_costs_as_many_calls_as_pieces() -> None:
    few = count_calls([STREAM[0], b"data: ", *[b"x"] * 1_000])
    assert count_calls([STREAM[0], b"data: ", *[b"x"] * 10_000]) < 10.5 * few
