"""Calls that are passed on between servers of one release, and their answers."""

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
from tests.unit.protocols.mindie.conftest import Desk

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "llama_65b", "messages": HI}
COMPLETION: dict[str, Any] = {"model": "llama_65b", "prompt": "a b"}
TOLD: dict[str, Any] = {"text_input": "a b", "parameters": {"details": True}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = "/v2/models/llama_65b/generate"
NAME = "r1-65c2f6b8-0"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def relayed(
    path: str,
    body: Any,
    profile: str = "2x",
    *,
    worker: MindIE | None = None,
    headers: Mapping[str, str] | None = None,
    **client: Any,
) -> PassthroughRequest | None:
    desk = Desk(profile, **client)
    call = desk.call(path, body, headers=headers)
    return (worker or MindIE(profile)).prepare_passthrough(
        desk.dialect, call, desk.about("llama_65b")
    )


def taken(path: str, body: Any, profile: str = "2x") -> PassthroughRequest:
    relay = relayed(path, body, profile)
    assert relay is not None
    return relay


def told(**parameters: Any) -> dict[str, Any]:
    return {"text_input": "a b", "parameters": {"details": True, **parameters}}


# --- in OpenAI's manner ---------------------------------------------------------------------------


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
def test_what_is_plainly_right_is_passed_on_under_a_name_of_the_gateways(
    path: str, body: dict[str, Any]
) -> None:
    relay = taken(path, body)
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
def test_whatever_else_there_is_goes_the_long_way(path: str, body: Any) -> None:
    assert relayed(path, body) is None


def test_releases_differ_in_what_is_plainly_right() -> None:
    assert relayed(COMPLETIONS, COMPLETION, "1x") is None
    assert relayed(CHATS, CHAT | {"stop": "a"}, "1x") is not None
    assert relayed(CHATS, CHAT | {"temperature": 0.5, "stream": True}, "rc1") is not None
    for more in ({"stop": "a"}, {"tools": [TOOL]}, {"logprobs": True}, {"temperature": 0}):
        assert relayed(CHATS, CHAT | more, "rc1") is None


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (MindIE("1x"), {}),
        (MindIE(max_iter_times=9), {}),
        (MindIE(), {"max_iter_times": 9}),
        (MindIE(), {"vllm_validator": False}),
    ],
)
def test_only_servers_that_are_alike_are_passed_anything(
    worker: MindIE, client: dict[str, Any]
) -> None:
    assert relayed(CHATS, CHAT, worker=worker, **client) is None
    assert relayed(TEXTS, TOLD, worker=worker, **client) is None


def test_another_dialects_client_is_translated() -> None:
    desk = Desk()
    call = desk.call(CHATS, CHAT)
    assert desk.dialect.prepare_passthrough(OpenAI(), call, desk.about("m")) is None


def test_conversations_that_workers_take_as_text_are_translated() -> None:
    worker = MindIE(chats="text")
    assert relayed(CHATS, CHAT, worker=worker) is None
    assert relayed(COMPLETIONS, COMPLETION, worker=worker) is not None


def test_a_request_that_its_client_named_is_translated() -> None:
    assert relayed(CHATS, CHAT, headers={"req-id": "mine"}) is None
    assert relayed(TEXTS, TOLD, headers={"req-id": "mine"}) is None
    assert relayed(TEXTS, TOLD | {"id": "mine"}) is None


def test_every_request_has_a_name_of_its_own() -> None:
    desk = Desk()
    call = desk.call(CHATS, CHAT)
    about = desk.about("m")
    relays = [desk.dialect.prepare_passthrough(desk.dialect, call, about) for _ in range(2)]
    names = {relay.request.client_id for relay in relays if relay is not None}
    assert names == {"r1-65c2f6b8-0", "r1-65c2f6b8-1"}


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["generate", "generate_stream"])
def test_what_asks_for_details_is_passed_on(way: str) -> None:
    body = told(temperature=0.5, top_k=0, do_sample=True, perf_stat=True, max_new_tokens=4)
    relay = taken(f"/v2/models/llama_65b/{way}", body)
    assert relay.upstream_request.path == f"/v2/models/served/{way}"
    assert json.loads(relay.upstream_request.body) == body | {"id": NAME}
    assert relay.upstream_request.headers == (("Content-Type", "application/json"),)
    assert isinstance(relay.request, GenerationRequest)
    assert relay.request.prompts == ("a b",)
    assert relay.request.stream is (way == "generate_stream")
    assert (relay.request.priority, relay.request.timeout) == (None, None)


def test_numbers_keep_their_form_and_the_last_of_a_name_counts() -> None:
    body = b'{"text_input":"\\u00e9","parameters":{"details":true,"seed":1,"top_p":0.50,"seed":2}}'
    assert taken(TEXTS, body).upstream_request.body == (
        b'{"text_input":"\\u00e9","parameters":{"details":true,"seed":2,"top_p":0.50},"id":"%b"}'
        % NAME.encode()
    )


def test_what_the_gateway_minds_too_is_read() -> None:
    request = taken(TEXTS, told(priority=3, timeout=7, batch_size=2)).request
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
        told() | {"text_input": ""},
        told() | {"text_input": [{"type": "text", "text": "a"}]},
        told() | {"never_heard_of": 1},
        told(temperature=0),
        told(watermark=True),
        told(priority=6),
        told(timeout=0),
        told(batch_size="1"),
        told(max_new_tokens=0),
    ],
)
def test_whatever_else_there_is_at_generate_goes_the_long_way(body: Any) -> None:
    assert relayed(TEXTS, body) is None


def test_texts_that_are_to_be_messages_are_translated() -> None:
    assert relayed(TEXTS, TOLD, prompts="chat") is None
    assert relayed(CHATS, CHAT, prompts="chat") is not None


def test_what_is_too_long_for_the_release_is_translated() -> None:
    long = told() | {"text_input": "a" * (512 << 10)}
    assert relayed(TEXTS, long, "rc1") is None
    assert relayed(TEXTS, long, "1x") is not None


def test_other_endpoints_are_translated() -> None:
    assert relayed("/generate", {"prompt": "a", "model": "llama_65b"}) is None


# --- the way back ---------------------------------------------------------------------------------

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
WHOLE = (
    b'{"id":"r1-65c2f6b8-0","model_name":"served","model_version":null,"text_output":"Hello",'
    b'"details":{"finish_reason":"eos_token","generated_tokens":2,"batch_size":[1,1]}}'
)


def texts(events: Sequence[Event]) -> list[tuple[str, int]]:
    return [(one.text, one.tokens) for one in events if isinstance(one, TextDelta)]


def test_a_whole_answer_comes_back_under_the_models_public_name() -> None:
    passage = taken(TEXTS, TOLD).create_reader()
    passage.feed([WHOLE])
    data, events = passage.close()
    assert data == WHOLE.replace(b"served", b"llama_65b")
    assert texts(events) == [("Hello", 2)]
    assert events[-2:] == [ChoiceEnd("eos"), StreamEnd()]


def test_a_stream_ends_with_the_event_that_says_so() -> None:
    passage = taken(TEXTS + "_stream", TOLD).create_reader()
    first, events = passage.feed([STREAM[:250]])
    rest, more = passage.feed([STREAM[250:]])
    assert (first or b"") + (rest or b"") == SHOWN
    assert texts([*events, *more]) == [("Hel", 1), ("lo", 1)]
    assert list(more[-2:]) == [ChoiceEnd("length"), StreamEnd()]


def test_the_last_newlines_may_be_missing() -> None:
    for lacking in (b"\n", b"\n\n"):
        passage = taken(TEXTS + "_stream", TOLD).create_reader()
        first, _ = passage.feed([STREAM.removesuffix(lacking)])
        rest, events = passage.close()
        assert (first or b"") + (rest or b"") == SHOWN
        assert isinstance(events[-1], StreamEnd)


def test_a_name_that_the_worker_gave_itself_is_not_shown() -> None:
    passage = taken(TEXTS + "_stream", TOLD).create_reader()
    other = STREAM.replace(b"served", b"/models/x").replace(NAME.encode(), b"endpoint_common_4")
    assert passage.feed([other])[0] == SHOWN


def test_a_stream_without_its_end_is_told() -> None:
    passage = taken(TEXTS + "_stream", TOLD).create_reader()
    assert passage.feed([PIECES[0]])[0] == PIECES[0].replace(b"served", b"llama_65b")
    with pytest.raises(StreamBroken):
        passage.close()


@pytest.mark.parametrize(
    "last",
    [
        b"Engine callback timeout: server tokenTimeout",
        PIECES[1].replace(b"length", b"stop_sequence"),
    ],
)
def test_a_stream_that_broke_off_is_told_and_not_passed_on(last: bytes) -> None:
    passage = taken(TEXTS + "_stream", TOLD).create_reader()
    data, _ = passage.feed([PIECES[0] + last])
    assert data == PIECES[0].replace(b"served", b"llama_65b")
    with pytest.raises(WorkerFailed):
        passage.close()


def chunk(content: str, finish: str = "null") -> bytes:
    return (
        b'data: {"id":"%b","object":"chat.completion.chunk","created":1,"model":"served","choices":'
        b'[{"index":0,"delta":{"role":"assistant","content":"%b"},"finish_reason":%b}]}\n\n'
        % (NAME.encode(), content.encode(), finish.encode())
    )


END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(("profile", "finish"), [("2x", '"stop"'), ("rc1", '"eos_token"')])
def test_a_conversations_stream_comes_back(profile: str, finish: str) -> None:
    passage = taken(CHATS, CHAT | {"stream": True}, profile).create_reader()
    sent = chunk("Hi") + chunk(" you") + chunk("", finish) + END
    data, events = passage.feed([sent])
    assert data is not None
    assert chunk(" you").replace(b"served", b"llama_65b") in data
    shown = [json.loads(one[6:]) for one in data.split(b"\n\n")[:-2]]
    assert {(one["id"], one["model"], one["created"]) for one in shown} == {(NAME, "llama_65b", 1)}
    choices = [one["choices"][0] for one in shown]
    assert "".join(one["delta"].get("content", "") for one in choices) == "Hi you"
    assert [one["finish_reason"] for one in choices[-2:]] == [None, json.loads(finish)]
    assert data.endswith(END)
    assert texts(events) == [("Hi", 1), (" you", 1)]
    assert isinstance(events[-1], StreamEnd)


def test_an_early_conversation_that_broke_off_is_told_and_not_passed_on() -> None:
    passage = taken(CHATS, CHAT | {"stream": True}, "rc1").create_reader()
    data, _ = passage.feed([chunk("Hi") + chunk("x", '"stop_sequence"') + END])
    assert data is not None
    assert json.loads(data[6:]) == json.loads(chunk("Hi").replace(b"served", b"llama_65b")[6:])
    with pytest.raises(WorkerFailed):
        passage.close()


def test_a_completion_comes_back() -> None:
    passage = taken(COMPLETIONS, COMPLETION).create_reader()
    answer = (
        b'{"id":"x","object":"text_completion","created":1,"model":"served","choices":[{"index":0,'
        b'"text":"Hi","finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
    )
    passage.feed([answer])
    data, events = passage.close()
    assert data == answer.replace(b"served", b"llama_65b").replace(b'"x"', b'"r1-65c2f6b8-0"')
    assert [e.completion_tokens for e in events if isinstance(e, Usage)] == [1]


# --- what is said beside --------------------------------------------------------------------------


def test_the_headers_are_those_of_any_answer() -> None:
    own = (("RequestUUID", "r1"), ("startTime", "1707275960000000000"))
    close = ("Connection", "close")
    for path, body in ((CHATS, CHAT), (TEXTS, TOLD)):
        assert taken(path, body).build_headers() == (
            ("Content-Type", "application/json"),
            close,
            *own,
        )
    for path, body in ((CHATS, CHAT | {"stream": True}), (TEXTS + "_stream", TOLD)):
        assert taken(path, body).build_headers() == (("Content-Type", "text/event-stream"), *own)


def encoder(relay: PassthroughRequest) -> ResponseEncoder:
    assert relay.create_encoder is not None
    return relay.create_encoder()


def test_what_its_client_stopped_ends_with_the_tokens_that_were_passed_on() -> None:
    relay = taken(TEXTS + "_stream", TOLD)
    relay.create_reader().feed([STREAM])
    relay.create_reader().feed([PIECES[0]])
    end = encoder(relay).encode_error_event(ClientDisconnected("stopped"))
    told = json.loads(end.removeprefix(b"data:"))
    assert (told["id"], told["model_name"], told["text_output"]) == (NAME, "llama_65b", "")
    assert told["details"]["finish_reason"] == "stop_sequence"
    assert told["details"]["generated_tokens"] == 1


def test_an_error_in_a_stream_is_bare_text() -> None:
    for path, body in ((CHATS, CHAT | {"stream": True}), (TEXTS + "_stream", TOLD)):
        told = encoder(taken(path, body)).encode_error_event(StreamBroken("cut"))
        assert told == b"Failed to get engine response"


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
def test_a_conversation_that_its_client_stopped_ends_under_the_same_name(
    path: str, body: dict[str, Any]
) -> None:
    end = encoder(taken(path, body | {"stream": True})).encode_error_event(
        ClientDisconnected("stopped")
    )
    *chunks, done = end.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    told = json.loads(chunks[-1].removeprefix(b"data: "))
    assert (told["id"], told["model"]) == (NAME, "llama_65b")
    assert told["object"] == ("chat.completion.chunk" if path == CHATS else "text_completion")
    assert told["choices"][0]["finish_reason"] == "stop"
