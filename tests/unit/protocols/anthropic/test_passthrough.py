"""A client's message request is passed through to a worker of the same protocol."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.anthropic.endpoints import Anthropic
from protocols.core.errors import Overloaded, UnsupportedFeature, WorkerFailed
from protocols.core.events import StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ModelSettings, PassthroughRequest, ResponseContext
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.anthropic.conftest import MakeCall

STREAM = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_w","model":"w",'
    b'"usage":{"input_tokens":1}}}\n\n'
    b': comment\n\nevent: ping\ndata: {"type":"ping"}\n\n'
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":1}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def prepare(
    call: Any, response_context: ResponseContext, client: Any = None
) -> PassthroughRequest | None:
    return Anthropic().prepare_passthrough(client or Anthropic(), call, response_context)


def test_request_is_forwarded_with_the_workers_model(
    make: MakeCall, response_context: ResponseContext
) -> None:
    call = make({"later": [1], "top_k": 3}, anthropic_version="2026-10-21")

    passed = prepare(call, response_context)

    assert passed is not None

    body = msgspec.json.decode(passed.upstream_request.body)
    assert (body["model"], body["later"], body["top_k"]) == ("backend-m", [1], 3)
    assert passed.upstream_request.headers == (
        ("Content-Type", "application/json"),
        ("anthropic-version", "2026-10-21"),
    )
    assert passed.request.model == "backend-m"
    assert ("request-id", "req_7f") in passed.build_headers()
    assert ("Content-Type", "application/json") in passed.build_headers()


def test_what_only_the_worker_may_support_is_forwarded(
    make: MakeCall, response_context: ResponseContext
) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]

    passed = prepare(make({"tools": tools, "stream": True}), response_context)

    assert passed is not None
    assert passed.request.stream
    assert msgspec.json.decode(passed.upstream_request.body)["tools"] == tools


HI = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "B"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}, "x": 1}


@pytest.mark.parametrize(
    "client",
    [
        Anthropic(mid_system="fold"),
        Anthropic(server_tools="drop"),
        Anthropic(mid_system="fold", server_tools="drop"),
    ],
)
@pytest.mark.parametrize("tools", [{}, {"tools": [OWN_TOOL, {**OWN_TOOL, "name": "g"}]}])
def test_a_listener_that_has_nothing_to_change_passes_requests_on(
    make: MakeCall, response_context: ResponseContext, client: Any, tools: dict[str, Any]
) -> None:
    call = make({"later": [1], **tools})
    passed, plain = prepare(call, response_context, client), prepare(call, response_context)

    assert passed is not None
    assert plain is not None
    assert passed.upstream_request == plain.upstream_request


@pytest.mark.parametrize(
    ("changed", "client"),
    [
        ({"max_tokens": -1}, Anthropic()),
        (b"{", Anthropic()),
        ({"later": 1}, Anthropic(unknown="reject")),
        ({"messages": [HI, SYSTEM]}, Anthropic(mid_system="fold")),
        ({"tools": [SEARCH]}, Anthropic(server_tools="drop")),
        ({"mcp_servers": [{"type": "url"}]}, Anthropic(server_tools="drop")),
        ({}, OpenAI()),
    ],
)
def test_other_requests_are_translated(
    make: MakeCall, response_context: ResponseContext, changed: Any, client: Any
) -> None:
    assert prepare(make(changed), response_context, client) is None


def test_stream_is_forwarded_with_the_clients_model(
    make: MakeCall, response_context: ResponseContext
) -> None:
    passed = prepare(make({"stream": True}), response_context)
    assert passed is not None

    reader = passed.create_reader()

    data, events = reader.feed([STREAM])
    rest, last = reader.close()

    assert data == STREAM.replace(b'"model":"w"', b'"model":"m"').replace(b": comment\n\n", b"")
    assert rest == b""
    assert TextDelta("a") in events
    assert Usage(1, 1) in [*events, *last]


@pytest.mark.parametrize("claim", [-1, 2**62, 2.5, "2", [2]])
def test_implausible_usage_of_a_stream_does_not_reach_the_client(
    make: MakeCall, response_context: ResponseContext, claim: Any
) -> None:
    passed = prepare(make({"stream": True}), response_context)
    assert passed is not None

    reader = passed.create_reader()
    count = b'_tokens":%b'

    data, events = reader.feed([STREAM.replace(count % b"1", count % msgspec.json.encode(claim))])

    assert data is not None

    sent = [msgspec.json.decode(line[6:]) for line in data.splitlines() if line[:5] == b"data:"]
    assert sent[0]["message"]["usage"] == {"input_tokens": 0, "output_tokens": 0}
    assert sent[0]["message"]["model"] == "m"
    assert sent[3]["usage"] == {"input_tokens": 0, "output_tokens": 1}
    assert StreamEnd(has_ignored_usage=True) in [*events, *reader.close()[1]]


def test_broken_usage_of_a_stream_ends_in_an_error(
    make: MakeCall, response_context: ResponseContext
) -> None:
    passed = prepare(make({"stream": True}), response_context)
    assert passed is not None
    with pytest.raises(WorkerFailed):
        passed.create_reader().feed([b'event: message_delta\ndata: {"usage": {"output\n\n', STREAM])


def test_implausible_usage_of_a_message_does_not_reach_the_client(
    make: MakeCall, response_context: ResponseContext
) -> None:
    passed = prepare(make(), response_context)
    assert passed is not None

    reader = passed.create_reader()
    usage = {"input_tokens": 3, "output_tokens": -7, "cache": {"read_tokens": 1}}
    sent = {"content": [{"type": "text", "text": "a" * 9}], "stop_reason": "end_turn"}

    reader.feed([msgspec.json.encode(sent | {"usage": usage})])
    body, events = reader.close()

    assert body is not None
    assert msgspec.json.decode(body)["usage"] == {"input_tokens": 0, "output_tokens": 3}
    assert events[-1] == StreamEnd(has_ignored_usage=True)


def test_error_event_is_not_forwarded(make: MakeCall, response_context: ResponseContext) -> None:
    passed = prepare(make({"stream": True}), response_context)
    assert passed is not None
    assert passed.create_encoder is not None

    reader = passed.create_reader()

    with pytest.raises(Overloaded) as excinfo:
        reader.feed(
            [b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n']
        )

    assert b"overloaded_error" in passed.create_encoder().encode_error_event(excinfo.value)


def test_message_is_forwarded_with_the_clients_model(
    make: MakeCall, response_context: ResponseContext
) -> None:
    passed = prepare(make(), response_context)
    assert passed is not None

    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"model": "w"}}
    sent = {"model": "w", "content": [block], "stop_reason": "tool_use", "later": 1}
    reader = passed.create_reader()

    assert reader.feed([msgspec.json.encode(sent)]) == (b"", [])

    body, events = reader.close()

    assert body is not None
    assert msgspec.json.decode(body) == {**sent, "model": "m"}
    assert events


def test_stream_instead_of_a_message_is_encoded_again(
    make: MakeCall, response_context: ResponseContext
) -> None:
    passed = prepare(make(), response_context)
    assert passed is not None

    reader = passed.create_reader()

    _, events = reader.feed([STREAM])
    body, _ = reader.close()

    assert body is None
    assert TextDelta("a") in events


def test_token_count_is_passed_through(make: MakeCall, response_context: ResponseContext) -> None:
    passed = prepare(make(path="/v1/messages/count_tokens"), response_context)
    assert passed is not None
    assert passed.upstream_request.path == "/v1/messages/count_tokens"
    assert msgspec.json.decode(passed.upstream_request.body)["model"] == "backend-m"
    assert passed.build_headers() == (("Content-Type", "application/json"),)

    reader = passed.create_reader()

    assert reader.feed([b'{"input_', b'tokens":3}']) == (b"", ())
    assert reader.close() == (b'{"input_tokens":3}', (StreamEnd(),))
    with pytest.raises(WorkerFailed):
        passed.create_reader().close()


@pytest.mark.parametrize(("limit", "budget"), [(3000, 2999), (1025, 1024)])
def test_budget_of_thinking_stays_below_the_limit_of_a_model(
    make: MakeCall, response_context: ResponseContext, limit: int, budget: int
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5000}
    call = make({"max_tokens": 9000, "thinking": thinking})
    limited = replace(response_context, settings=ModelSettings(limit))

    passed = prepare(call, limited, Anthropic(over_limit="clamp"))

    assert passed is not None
    body = msgspec.json.decode(passed.upstream_request.body)
    assert (body["max_tokens"], body["thinking"]["budget_tokens"]) == (limit, budget)
    assert [loss.field for loss in passed.unsupported_parameters] == [
        "max_tokens",
        "thinking.budget_tokens",
    ]


def test_limit_of_a_model_without_room_for_thinking_is_an_error(
    make: MakeCall, response_context: ResponseContext
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5000}
    call = make({"max_tokens": 9000, "thinking": thinking})
    limited = replace(response_context, settings=ModelSettings(1024))

    with pytest.raises(UnsupportedFeature, match="limited to 1024") as refused:
        prepare(call, limited, Anthropic(over_limit="clamp"))

    assert refused.value.param == "thinking.budget_tokens"
