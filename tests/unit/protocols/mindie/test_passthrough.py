"""Requests and responses are passed through between servers of one release."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from protocols.core.errors import ClientDisconnected, StreamBroken, WorkerFailed
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import PassthroughRequest, ResponseEncoder
from protocols.core.request import GenerationRequest
from protocols.mindie.endpoints import MindIE
from protocols.mindie.requests import PRIORITY_STEP
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.mindie.conftest import MindIETestBench

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "llama_65b", "messages": HI}
COMPLETION: dict[str, Any] = {"model": "llama_65b", "prompt": "a b"}
DETAILED_REQUEST: dict[str, Any] = {"text_input": "a b", "parameters": {"details": True}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = "/v2/models/llama_65b/generate"
NAME = "r1-65c2f6b8-0"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def prepare_passthrough(
    path: str,
    body: Any,
    profile: str = "2x",
    *,
    worker: MindIE | None = None,
    headers: Mapping[str, str] | None = None,
    **client: Any,
) -> PassthroughRequest | None:
    bench = MindIETestBench(profile, **client)
    call = bench.call(path, body, headers=headers)
    return (worker or MindIE(profile)).prepare_passthrough(
        bench.adapter, call, bench.build_response_context("llama_65b")
    )


def require_passthrough(path: str, body: Any, profile: str = "2x") -> PassthroughRequest:
    relay = prepare_passthrough(path, body, profile)
    assert relay is not None
    return relay


def build_generate_body(**parameters: Any) -> dict[str, Any]:
    return {"text_input": "a b", "parameters": {"details": True, **parameters}}


# --- OpenAI's endpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        (CHATS, CHAT | {"temperature": 0, "top_k": 3, "top_p": 0.5, "stop": ["a"], "seed": 7}),
        (CHATS, CHAT | {"stream": True, "tools": [TOOL], "tool_choice": "auto"}),
        (CHATS, CHAT | {"logprobs": True, "top_logprobs": 3, "never_heard_of": [1.5]}),
        (COMPLETIONS, COMPLETION | {"logprobs": 5, "stop": "a", "max_tokens": 4}),
        (COMPLETIONS, COMPLETION | {"stream": True}),
    ],
)
def test_valid_request_is_passed_through_with_a_gateway_request_id(
    path: str, body: dict[str, Any]
) -> None:
    relay = require_passthrough(path, body)
    assert relay.upstream_request.path == path
    assert relay.upstream_request.headers == (
        ("Content-Type", "application/json"),
        ("req-id", NAME),
    )
    assert json.loads(relay.upstream_request.body) == body | {"model": "served"}
    assert isinstance(relay.request, GenerationRequest)
    assert relay.request.client_id == NAME
    assert relay.request.stream is body.get("stream", False)
    assert relay.request.kind == ("chat" if path == CHATS else "completion")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, b"{"),
        (CHATS, CHAT | {"messages": [{"role": "user", "content": ""}]}),
        (CHATS, CHAT | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (CHATS, CHAT | {"temperature": 1e39}),
        (CHATS, CHAT | {"max_tokens": 4.0}),
        (CHATS, CHAT | {"stop": "a" * 513}),
        (CHATS, CHAT | {"stop": ["a"] * 33}),
        (CHATS, CHAT | {"stop_token_ids": [1]}),
        (CHATS, CHAT | {"n": 1}),
        (CHATS, CHAT | {"use_beam_search": True}),
        (CHATS, CHAT | {"top_logprobs": 3}),
        (CHATS, CHAT | {"chat_template": "x"}),
        (CHATS, CHAT | {"chat_template_kwargs": {"enable_thinking": True}}),
        (CHATS, CHAT | {"response_format": {"type": "text"}}),
        (COMPLETIONS, COMPLETION | {"prompt": [1, 2]}),
        (COMPLETIONS, COMPLETION | {"logprobs": 6}),
        (COMPLETIONS, COMPLETION | {"best_of": 2}),
    ],
)
def test_chat_or_completion_outside_the_fast_path_is_translated(path: str, body: Any) -> None:
    assert prepare_passthrough(path, body) is None


def test_profiles_differ_in_fields_that_pass_through() -> None:
    assert prepare_passthrough(COMPLETIONS, COMPLETION, "1x") is None
    assert prepare_passthrough(CHATS, CHAT | {"stop": "a"}, "1x") is not None
    assert (
        prepare_passthrough(CHATS, CHAT | {"temperature": 0.5, "stream": True}, "rc1") is not None
    )
    for fields in ({"stop": "a"}, {"tools": [TOOL]}, {"logprobs": True}, {"temperature": 0}):
        assert prepare_passthrough(CHATS, CHAT | fields, "rc1") is None


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (MindIE("1x"), {}),
        (MindIE(max_iter_times=9), {}),
        (MindIE(), {"max_iter_times": 9}),
        (MindIE(), {"vllm_validator": False}),
    ],
)
def test_pass_through_needs_same_profile_and_options(
    worker: MindIE, client: dict[str, Any]
) -> None:
    assert prepare_passthrough(CHATS, CHAT, worker=worker, **client) is None
    assert prepare_passthrough(TEXTS, DETAILED_REQUEST, worker=worker, **client) is None


def test_client_of_another_protocol_is_translated() -> None:
    bench = MindIETestBench()
    call = bench.call(CHATS, CHAT)
    assert (
        bench.adapter.prepare_passthrough(OpenAI(), call, bench.build_response_context("m")) is None
    )


def test_chat_is_translated_for_workers_with_text_chats() -> None:
    worker = MindIE(chats="text")
    assert prepare_passthrough(CHATS, CHAT, worker=worker) is None
    assert prepare_passthrough(COMPLETIONS, COMPLETION, worker=worker) is not None


def test_request_with_a_client_id_is_translated() -> None:
    assert prepare_passthrough(CHATS, CHAT, headers={"req-id": "mine"}) is None
    assert prepare_passthrough(TEXTS, DETAILED_REQUEST, headers={"req-id": "mine"}) is None
    assert prepare_passthrough(TEXTS, DETAILED_REQUEST | {"id": "mine"}) is None


def test_every_passthrough_request_has_a_unique_id() -> None:
    bench = MindIETestBench()
    call = bench.call(CHATS, CHAT)
    response_context = bench.build_response_context("m")
    relays = [
        bench.adapter.prepare_passthrough(bench.adapter, call, response_context) for _ in range(2)
    ]
    names = {relay.request.client_id for relay in relays if relay is not None}

    assert names == {"r1-65c2f6b8-0", "r1-65c2f6b8-1"}


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_generate_with_details_is_passed_through(endpoint: str) -> None:
    body = build_generate_body(
        temperature=0.5, top_k=0, do_sample=True, perf_stat=True, max_new_tokens=4
    )
    relay = require_passthrough(f"/v2/models/llama_65b/{endpoint}", body)

    assert relay.upstream_request.path == f"/v2/models/served/{endpoint}"
    assert json.loads(relay.upstream_request.body) == body | {"id": NAME}
    assert relay.upstream_request.headers == (("Content-Type", "application/json"),)
    assert isinstance(relay.request, GenerationRequest)
    assert relay.request.prompts == ("a b",)
    assert relay.request.stream is (endpoint == "generate_stream")
    assert (relay.request.priority, relay.request.timeout) == (None, None)


def test_numbers_keep_their_spelling_and_last_duplicate_key_wins() -> None:
    body = b'{"text_input":"\\u00e9","parameters":{"details":true,"seed":1,"top_p":0.50,"seed":2}}'
    assert require_passthrough(TEXTS, body).upstream_request.body == (
        b'{"text_input":"\\u00e9","parameters":{"details":true,"seed":2,"top_p":0.50},"id":"%b"}'
        % NAME.encode()
    )


def test_priority_and_timeout_of_passthrough_request_are_read() -> None:
    request = require_passthrough(
        TEXTS, build_generate_body(priority=3, timeout=7, batch_size=2)
    ).request
    assert isinstance(request, GenerationRequest)
    assert (request.priority, request.timeout) == (2 * PRIORITY_STEP, 7.0)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        {"text_input": "a"},
        {"text_input": "a", "parameters": {}},
        {"text_input": "a", "parameters": {"details": False}},
        {"text_input": "a", "parameters": None},
        build_generate_body() | {"text_input": ""},
        build_generate_body() | {"text_input": [{"type": "text", "text": "a"}]},
        build_generate_body() | {"never_heard_of": 1},
        build_generate_body(temperature=0),
        build_generate_body(watermark=True),
        build_generate_body(priority=6),
        build_generate_body(timeout=0),
        build_generate_body(batch_size="1"),
        build_generate_body(max_new_tokens=0),
    ],
)
def test_generate_request_outside_the_fast_path_is_translated(body: Any) -> None:
    assert prepare_passthrough(TEXTS, body) is None


def test_generate_is_translated_if_prompts_become_messages() -> None:
    assert prepare_passthrough(TEXTS, DETAILED_REQUEST, prompts="chat") is None
    assert prepare_passthrough(CHATS, CHAT, prompts="chat") is not None


def test_text_over_the_profile_length_limit_is_translated() -> None:
    long = build_generate_body() | {"text_input": "a" * (512 << 10)}
    assert prepare_passthrough(TEXTS, long, "rc1") is None
    assert prepare_passthrough(TEXTS, long, "1x") is not None


def test_vllm_style_endpoint_is_translated() -> None:
    assert prepare_passthrough("/generate", {"prompt": "a", "model": "llama_65b"}) is None


# --- responses ------------------------------------------------------------------------------------

PIECES = [
    (
        b'data:{"id":"r1-65c2f6b8-0","model_name":"served","model_version":null,"text_output":"Hel"'
        b',"details":{"generated_tokens":1,"batch_size":1},"prefill_time":3,"decode_time":null}\n\n'
    ),
    (
        b'data:{"id":"r1-65c2f6b8-0","model_name":"served","model_version":null,"text_output":"lo",'
        b'"details":{"finish_reason":"length","generated_tokens":2,"batch_size":1},'
        b'"prefill_time":null,"decode_time":2}\n\n'
    ),
]
STREAM = b"".join(PIECES)
SHOWN = STREAM.replace(b"served", b"llama_65b")
UNARY_RESPONSE = (
    b'{"id":"r1-65c2f6b8-0","model_name":"served","model_version":null,"text_output":"Hello",'
    b'"details":{"finish_reason":"eos_token","generated_tokens":2,"batch_size":[1,1]}}'
)


def list_text_deltas(events: Sequence[Event]) -> list[tuple[str, int]]:
    return [(one.text, one.tokens) for one in events if isinstance(one, TextDelta)]


def test_unary_response_shows_the_public_model_name() -> None:
    reader = require_passthrough(TEXTS, DETAILED_REQUEST).create_reader()
    reader.feed([UNARY_RESPONSE])

    data, events = reader.close()

    assert data == UNARY_RESPONSE.replace(b"served", b"llama_65b")
    assert list_text_deltas(events) == [("Hello", 2)]
    assert events[-2:] == [ChoiceEnd("eos"), StreamEnd()]


def test_passthrough_stream_ends_with_the_finish_reason_event() -> None:
    reader = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST).create_reader()
    first, events = reader.feed([STREAM[:250]])

    rest, more_events = reader.feed([STREAM[250:]])

    assert (first or b"") + (rest or b"") == SHOWN
    assert list_text_deltas([*events, *more_events]) == [("Hel", 1), ("lo", 1)]
    assert list(more_events[-2:]) == [ChoiceEnd("length"), StreamEnd()]


@pytest.mark.parametrize("claim", [b"-1", b"3000000000000", b'"2"', b"2.5", b"[2]", b"{}"])
def test_implausible_token_counts_of_a_stream_do_not_reach_the_client(claim: bytes) -> None:
    reader = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST).create_reader()
    count = b'"generated_tokens":%b'

    data, events = reader.feed([STREAM.replace(count % b"2", count % claim)])

    assert data == SHOWN
    assert list_text_deltas(events) == [("Hel", 1), ("lo", 1)]
    assert events[-1] == StreamEnd(has_ignored_usage=True)


def test_stream_without_final_newlines_is_complete() -> None:
    for lacking in (b"\n", b"\n\n"):
        reader = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST).create_reader()
        first, _ = reader.feed([STREAM.removesuffix(lacking)])
        rest, events = reader.close()
        assert (first or b"") + (rest or b"") == SHOWN
        assert isinstance(events[-1], StreamEnd)


def test_worker_model_name_and_request_id_are_replaced() -> None:
    reader = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST).create_reader()
    other = STREAM.replace(b"served", b"/models/x").replace(NAME.encode(), b"endpoint_common_4")
    assert reader.feed([other])[0] == SHOWN


def test_truncated_passthrough_stream_raises_stream_broken() -> None:
    reader = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST).create_reader()
    assert reader.feed([PIECES[0]])[0] == PIECES[0].replace(b"served", b"llama_65b")
    with pytest.raises(StreamBroken):
        reader.close()


@pytest.mark.parametrize(
    "last",
    [
        b"Engine callback timeout: server tokenTimeout",
        PIECES[1].replace(b"length", b"stop_sequence"),
    ],
)
def test_error_event_in_a_stream_is_raised_and_not_passed_through(last: bytes) -> None:
    reader = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST).create_reader()
    data, _ = reader.feed([PIECES[0] + last])

    assert data == PIECES[0].replace(b"served", b"llama_65b")
    with pytest.raises(WorkerFailed):
        reader.close()


def format_chat_chunk(content: str, finish: str = "null") -> bytes:
    return (
        b'data: {"id":"%b","object":"chat.completion.chunk","created":1,"model":"served","choices":'
        b'[{"index":0,"delta":{"role":"assistant","content":"%b"},"finish_reason":%b}]}\n\n'
        % (NAME.encode(), content.encode(), finish.encode())
    )


END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(("profile", "finish"), [("2x", '"stop"'), ("rc1", '"eos_token"')])
def test_chat_stream_is_passed_through_with_public_model_name(profile: str, finish: str) -> None:
    reader = require_passthrough(CHATS, CHAT | {"stream": True}, profile).create_reader()
    sent = format_chat_chunk("Hi") + format_chat_chunk(" you") + format_chat_chunk("", finish) + END
    data, events = reader.feed([sent])

    assert data is not None
    assert format_chat_chunk(" you").replace(b"served", b"llama_65b") in data

    shown = [json.loads(one[6:]) for one in data.split(b"\n\n")[:-2]]
    assert {(one["id"], one["model"], one["created"]) for one in shown} == {(NAME, "llama_65b", 1)}

    choices = [one["choices"][0] for one in shown]
    assert "".join(one["delta"].get("content", "") for one in choices) == "Hi you"
    assert [one["finish_reason"] for one in choices[-2:]] == [None, json.loads(finish)]
    assert data.endswith(END)
    assert list_text_deltas(events) == [("Hi", 1), (" you", 1)]
    assert isinstance(events[-1], StreamEnd)


def test_rc1_stop_sequence_in_a_chat_stream_is_raised() -> None:
    reader = require_passthrough(CHATS, CHAT | {"stream": True}, "rc1").create_reader()
    data, _ = reader.feed(
        [format_chat_chunk("Hi") + format_chat_chunk("x", '"stop_sequence"') + END]
    )
    assert data is not None

    first, second = data.split(b"\n\n")[:-1]
    for event, text in ((first, "Hi"), (second, "x")):
        assert json.loads(event[6:]) == json.loads(
            format_chat_chunk(text).replace(b"served", b"llama_65b")[6:]
        )
    with pytest.raises(WorkerFailed):
        reader.close()


def test_completion_is_passed_through_with_public_name_and_id() -> None:
    reader = require_passthrough(COMPLETIONS, COMPLETION).create_reader()
    response = (
        b'{"id":"x","object":"text_completion","created":1,"model":"served","choices":[{"index":0,'
        b'"text":"Hi","finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
    )
    reader.feed([response])

    data, events = reader.close()

    assert data == response.replace(b"served", b"llama_65b").replace(b'"x"', b'"r1-65c2f6b8-0"')
    assert [e.completion_tokens for e in events if isinstance(e, Usage)] == [1]


# --- further fields -------------------------------------------------------------------------------


def test_passthrough_response_headers_equal_translated_ones() -> None:
    own = (("RequestUUID", "r1"), ("startTime", "1707275960000000000"))
    close = ("Connection", "close")

    for path, body in ((CHATS, CHAT), (TEXTS, DETAILED_REQUEST)):
        assert require_passthrough(path, body).build_headers() == (
            ("Content-Type", "application/json"),
            close,
            *own,
        )
    for path, body in ((CHATS, CHAT | {"stream": True}), (TEXTS + "_stream", DETAILED_REQUEST)):
        assert require_passthrough(path, body).build_headers() == (
            ("Content-Type", "text/event-stream"),
            *own,
        )


def test_passed_through_response_keeps_the_connection_only_if_configured() -> None:
    passthrough = prepare_passthrough(CHATS, CHAT, keep_alive=True)
    assert passthrough is not None

    headers = require_passthrough(CHATS, CHAT).build_headers()
    assert passthrough.build_headers() == tuple(one for one in headers if one[0] != "Connection")
    assert len(passthrough.build_headers()) == len(headers) - 1
    assert prepare_passthrough(CHATS, CHAT | {"temperature": "warm"}, keep_alive=True) is None


def create_stream_encoder(relay: PassthroughRequest) -> ResponseEncoder:
    assert relay.create_encoder is not None
    return relay.create_encoder()


def test_cancelled_generate_stream_counts_the_tokens_passed_through() -> None:
    relay = require_passthrough(TEXTS + "_stream", DETAILED_REQUEST)
    relay.create_reader().feed([STREAM])
    relay.create_reader().feed([PIECES[0]])
    end = create_stream_encoder(relay).encode_error_event(ClientDisconnected("stopped"))
    last_event = json.loads(end.removeprefix(b"data:"))

    assert (last_event["id"], last_event["model_name"], last_event["text_output"]) == (
        NAME,
        "llama_65b",
        "",
    )
    assert last_event["details"]["finish_reason"] == "stop_sequence"
    assert last_event["details"]["generated_tokens"] == 1


def test_stream_error_is_plain_text() -> None:
    for path, body in ((CHATS, CHAT | {"stream": True}), (TEXTS + "_stream", DETAILED_REQUEST)):
        last_event = create_stream_encoder(require_passthrough(path, body)).encode_error_event(
            StreamBroken("cut")
        )
        assert last_event == b"Failed to get engine response"


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
def test_cancelled_chat_stream_ends_with_the_same_id_and_model(
    path: str, body: dict[str, Any]
) -> None:
    end = create_stream_encoder(
        require_passthrough(path, body | {"stream": True})
    ).encode_error_event(ClientDisconnected("stopped"))
    *chunks, done = end.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"

    last_event = json.loads(chunks[-1].removeprefix(b"data: "))
    assert (last_event["id"], last_event["model"]) == (NAME, "llama_65b")
    assert last_event["object"] == ("chat.completion.chunk" if path == CHATS else "text_completion")
    assert last_event["choices"][0]["finish_reason"] == "stop"
