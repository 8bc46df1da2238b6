"""Calls that are passed on as they are, and their answers."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.interfaces import Deadline, RequestContext
from protocols.chat.passthrough import (
    OPTIONAL_STRING,
    PROMPTS,
    PassthroughRule,
    PassthroughRules,
    build_body_decoder,
)
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import Event, ResponseMetadata, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import (
    ClientRequest,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
)
from protocols.core.request import EmbeddingRequest, GenerationRequest
from protocols.json_body import read_object
from protocols.openai.endpoints import OpenAI
from protocols.params import Param
from tests.unit.protocols.conftest import MakeCall, endpoint

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "chat", "messages": HI}
TEXT: dict[str, Any] = {"model": "chat", "prompt": "a b", "max_tokens": 5}
EMBED: dict[str, Any] = {"model": "chat", "input": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VLLM = OpenAI("vllm")


def relayed(
    variant: str, body: Any, worker: OpenAI = VLLM, shown: str = "chat"
) -> PassthroughRequest | None:
    row = endpoint(variant)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0)
    about = ResponseContext("r1", 1, shown, "v1", "llama", context.clock)
    return worker.prepare_passthrough(
        OpenAI(), ClientRequest(row, {}, {}, "", data, row.path), about
    )


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
        ("chat", CHAT | {"never_heard_of": {"deep": [1.50]}}),
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
            {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}]}]}),
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
            "name": "f"}}}),
        ("chat", CHAT | {"functions": [{"name": "f"}]}),
        ("chat", CHAT | {"response_format": {"type": "json_object"}}),
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
            PassthroughRules({"text": form}).prepare_passthrough("text", call, about, tuple) is None
        ) == (said is text)


def test_where_the_path_names_the_model_the_body_does_not(about: ResponseContext) -> None:
    form = PassthroughRule(
        path="/of/{model}/x", field_types={"prompt": PROMPTS}, worker_params=(), client_params=()
    )
    relays = PassthroughRules({"text": form})
    assert ("text" in relays, "chat" in relays) == (True, False)
    row = endpoint("completion")
    call = ClientRequest(row, {}, {}, "", b'{"prompt":"a","model":"chat"}', row.path)
    relay = relays.prepare_passthrough("text", call, replace(about, backend_model="a/b c"), tuple)
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
    assert (chat.n, chat.labels, chat.model) == (2, {"user": "ann"}, "llama")
    text = taken("completion", TEXT | {"stream": True}).request
    assert isinstance(text, GenerationRequest)
    assert (text.prompts, text.stream) == (("a b",), True)
    vectors = taken("embedding", EMBED | {"input": "a"}).request
    assert isinstance(vectors, EmbeddingRequest)
    assert vectors.inputs == ("a",)


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
        assert joined(out) == b"".join(STREAM).replace(b"llama", shown.encode())


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


STREAM = (chunk("Hel"), chunk("lo"), chunk("", '"stop"'), b"data: [DONE]\n\n")
ASKED = CHAT | {"stream": True}


def joined(out: Sequence[bytes | None]) -> bytes:
    assert None not in out
    return b"".join(data for data in out if data is not None)


@given(cuts=st.lists(st.integers(0, len(b"".join(STREAM))), max_size=8))
def test_a_stream_comes_back_whatever_the_packets(cuts: list[int]) -> None:
    data, edges = b"".join(STREAM), [0, *sorted(cuts), len(b"".join(STREAM))]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]

    out, events = read(taken("chat", ASKED).create_reader(), *pieces)

    assert joined(out) == data.replace(b"llama", b"chat")
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Hello"


def test_only_whole_events_are_passed_on() -> None:
    passage = taken("chat", ASKED).create_reader()
    assert passage.feed([STREAM[0][:-1]])[0] == b""
    assert passage.feed([b"\ndata: {"])[0] == STREAM[0].replace(b"llama", b"chat")


def test_other_line_ends_and_blanks_pass_too() -> None:
    data = b"".join(STREAM).replace(b"\n", b"\r\n").replace(b'"model":', b'"model": ')
    out, _ = read(taken("chat", ASKED).create_reader(), data)
    assert joined(out) == data.replace(b"llama", b"chat")


@pytest.mark.parametrize("end", [b"data: [DONE]\n", b""], ids=["one newline", "no end at all"])
def test_a_stream_that_is_complete_gets_its_end(end: bytes) -> None:
    out, events = read(taken("chat", ASKED, shown="llama").create_reader(), *STREAM[:3], end)
    assert joined(out) == b"".join(STREAM)
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
        assert data == STREAM[0].replace(b"llama", b"chat")
        assert events
        with pytest.raises(WorkerFailed):
            passage.feed([STREAM[1]]) if ending == "feed" else passage.close()


def test_an_event_that_breaks_off_what_it_says_is_not_passed_on() -> None:
    passage = taken("chat", ASKED).create_reader()
    failing = chunk("x", '"invalid flag"')
    data, _ = passage.feed([STREAM[0] + failing])
    assert data == STREAM[0].replace(b"llama", b"chat")
    with pytest.raises(WorkerFailed):
        passage.feed([b""])
    with pytest.raises(WorkerFailed):
        taken("chat", ASKED).create_reader().feed([failing])


def test_a_line_that_is_no_field_is_for_the_gateway_alone() -> None:
    passage = taken("chat", ASKED).create_reader()
    data, _ = passage.feed([STREAM[0] + b'{"error":"secret"}\n\n' + b": still\n\n" + STREAM[1]])
    assert data is not None
    assert b"secret" not in data
    assert STREAM[1].replace(b"llama", b"chat") in data
    assert b": still\n\n" in data
    with pytest.raises(WorkerFailed) as caught:
        passage.close()
    assert caught.value.__notes__ == ["the worker said: secret"]


def test_a_stray_line_does_not_make_another_answer_of_a_stream() -> None:
    out, _ = read(taken("chat", ASKED).create_reader(), STREAM[0], b'{"odd":1}\n\n', *STREAM[1:])
    assert joined(out).replace(b"\n", b"") == (
        b"".join(STREAM).replace(b"llama", b"chat").replace(b"\n", b"")
    )


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    passage = taken("chat", ASKED).create_reader()
    passage.feed([b"data: " + b"x" * 1_000_000])
    with pytest.raises(WorkerFailed):
        passage.feed([b"x" * 100_000])


def test_a_whole_answer_in_place_of_a_stream_is_for_the_encoder() -> None:
    out, events = read(taken("chat", ASKED).create_reader(), b" ", ANSWER)
    assert out[1:] == [None, None]
    assert any(isinstance(event, TextDelta) for event in events)
