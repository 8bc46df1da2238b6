"""Messages for clients, unary and as a stream of events."""

import json
from typing import Any

import msgspec
import pytest

from protocols.anthropic.endpoints import Anthropic
from protocols.anthropic.responses import PING_EVENT, MessageEncoder
from protocols.core.aggregate import aggregate
from protocols.core.errors import WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import ResponseContext, SupportsHeartbeat
from protocols.core.request import ToolCall
from tests.unit.protocols.anthropic.conftest import MakeCall

THINKING = {"type": "adaptive"}
END = (Usage(5, 3), StreamEnd())


def create(
    make: MakeCall, response_context: ResponseContext, changed: dict[str, Any] | None = None
) -> MessageEncoder:
    adapter, call = Anthropic(), make(changed or {})
    encoder = adapter.create_encoder(call, adapter.decode_request(call), response_context)
    assert isinstance(encoder, MessageEncoder)
    return encoder


def read(wire: bytes) -> list[dict[str, Any]]:
    """Return the data of the events, without pings."""
    data = [line[6:] for line in wire.split(b"\n") if line.startswith(b"data: ")]
    return [one for one in map(msgspec.json.decode, data) if one["type"] != "ping"]


def stream(encoder: MessageEncoder, *events: Event) -> list[dict[str, Any]]:
    return read(b"".join(encoder.encode_events([event]) for event in events))


def describe(events: list[dict[str, Any]]) -> list[str]:
    """Return a short description of each event."""
    words = []
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                words.append(f"start {index} {block['type']}")
            case {"type": "content_block_delta", "delta": {"type": kind, **fields}}:
                words.append(f"{kind} {next(iter(fields.values()))}")
            case {"type": "content_block_stop", "index": index}:
                words.append(f"stop {index}")
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                words.append(str(reason))
            case _:
                words.append(event["type"])
    return words


def unary(encoder: MessageEncoder, *events: Event) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(encoder.encode_unary(aggregate(events)).body)
    return body


def call(number: int, name: str = "f", identifier: str = "toolu_12345") -> ToolCallStart:
    return ToolCallStart(0, number, f"{identifier}{number}", name)


# --- streams --------------------------------------------------------------------------------------


def test_stream_starts_with_the_first_content(
    make: MakeCall, response_context: ResponseContext
) -> None:
    encoder = create(make, response_context)

    assert encoder.encode_events([StreamStart(4), ResponseMetadata("x")]) == b""

    wire = encoder.encode_events([TextDelta(""), TextDelta("a"), TextDelta(""), TextDelta("b")])

    start = read(wire)[0]
    assert start["message"]["usage"]["input_tokens"] == 4
    assert start["message"]["id"] == "msg_7f"
    assert wire.startswith(b"event: message_start\n")
    assert describe(read(wire)) == ["message_start", "start 0 text", "text_delta a", "text_delta b"]
    assert encoder.encode_events([]) == b""


def test_stream_that_comes_at_once_starts_with_the_message(
    make: MakeCall, response_context: ResponseContext
) -> None:
    keys = ResponseExtra("anthropic", "response", ((("x",), 1),))
    last = ResponseExtra("anthropic", "response", ((("delta", "y"), 2),))
    events: list[Event] = [keys, TextDelta("a"), last, ChoiceEnd("eos"), *END]

    [start, *others] = stream(create(make, response_context), *events)

    assert start["message"]["x"] == 1
    assert describe(others)[-2:] == ["end_turn", "message_stop"]
    assert others[-2]["delta"]["y"] == 2


def test_empty_stream_has_no_block(make: MakeCall, response_context: ResponseContext) -> None:
    events = stream(create(make, response_context), ChoiceEnd("eos"), *END)

    assert describe(events) == ["message_start", "end_turn", "message_stop"]


def test_stream_without_choice_end_or_usage(
    make: MakeCall, response_context: ResponseContext
) -> None:
    events = stream(create(make, response_context), StreamStart(None), StreamEnd())

    assert events[1]["usage"]["output_tokens"] == 0
    assert describe(events) == ["message_start", "end_turn", "message_stop"]


def test_blocks_follow_each_other(make: MakeCall, response_context: ResponseContext) -> None:
    events = stream(
        create(make, response_context, {"thinking": THINKING}),
        ReasoningDelta("T"),
        ReasoningDelta("", signature="S"),
        ReasoningDelta("U"),
        ReasoningDelta("", redacted="R"),
        TextDelta("a"),
        RefusalDelta(""),
        call(0),
        ToolCallDelta(0, 0, ""),
        ToolCallDelta(0, 0, "{}"),
        TextDelta("b"),
        ChoiceEnd("tool_calls"),
        *END,
    )

    assert describe(events) == [
        "message_start",
        "start 0 thinking",
        "thinking_delta T",
        "signature_delta S",
        "stop 0",
        "start 1 thinking",
        "thinking_delta U",
        "signature_delta gw1.7f",
        "stop 1",
        "start 2 redacted_thinking",
        "stop 2",
        "start 3 text",
        "text_delta a",
        "stop 3",
        "start 4 tool_use",
        "input_json_delta {}",
        "stop 4",
        "start 5 text",
        "text_delta b",
        "stop 5",
        "tool_use",
        "message_stop",
    ]


def test_signature_alone_is_a_block(make: MakeCall, response_context: ResponseContext) -> None:
    encoder = create(make, response_context, {"thinking": {**THINKING, "display": "omitted"}})

    events = stream(
        encoder, ReasoningDelta("T"), ReasoningDelta("T"), ReasoningDelta("", signature="S"),
        ChoiceEnd("eos"), *END,
    )  # fmt: skip

    assert describe(events)[1:-2] == ["start 0 thinking", "signature_delta S", "stop 0"]


def test_clients_get_signatures(make: MakeCall, response_context: ResponseContext) -> None:
    encoder = create(make, response_context)

    assert encoder.writes_signature(ReasoningDelta("", redacted="R"))


def test_interleaved_calls_wait_for_the_one_before(
    make: MakeCall, response_context: ResponseContext
) -> None:
    events = stream(
        create(make, response_context),
        call(0),
        call(1, "g"),
        ToolCallDelta(0, 1, "{"),
        ToolCallDelta(0, 0, '{"x"'),
        ToolCallDelta(0, 0, ":1}"),
        ToolCallDelta(0, 1, "}"),
        ToolCallDelta(0, 0, " "),
        ChoiceEnd("tool_calls"),
        *END,
    )

    assert describe(events)[1:-2] == [
        "start 0 tool_use",
        'input_json_delta {"x"',
        "input_json_delta :1}",
        "stop 0",
        "start 1 tool_use",
        "input_json_delta {",
        "input_json_delta }",
        "stop 1",
    ]


def test_calls_without_arguments_are_written_at_the_end(
    make: MakeCall, response_context: ResponseContext
) -> None:
    events = stream(create(make, response_context), call(0), call(1), ChoiceEnd("eos"), *END)

    assert describe(events)[1:-1] == [
        "start 0 tool_use", "stop 0", "start 1 tool_use", "stop 1", "tool_use",
    ]  # fmt: skip


def test_client_without_parallel_calls_gets_only_the_first(
    make: MakeCall, response_context: ResponseContext
) -> None:
    tools = [{"name": "f", "input_schema": {}}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    events = (
        call(0), call(1), ToolCallDelta(0, 0, "{}"), ToolCallDelta(0, 1, "{}"),
        ChoiceEnd("tool_calls"), *END,
    )  # fmt: skip
    changed = {"tools": tools, "tool_choice": choice}

    assert "start 1 tool_use" not in describe(
        stream(create(make, response_context, changed), *events)
    )
    assert len(unary(create(make, response_context, changed), *events)["content"]) == 1


def test_silence_is_filled_with_pings_and_empty_deltas(
    make: MakeCall, response_context: ResponseContext
) -> None:
    encoder = create(make, response_context)
    assert isinstance(encoder, SupportsHeartbeat)
    assert encoder.heartbeat_interval == 15.0

    assert encoder.encode_heartbeat(15.0) == b""
    assert describe(read(encoder.encode_heartbeat(30.0))) == ["message_start"]
    assert encoder.encode_heartbeat(45.0) == PING_EVENT
    assert describe(read(encoder.encode_heartbeat(60.0))) == ["start 0 text"]
    assert encoder.encode_heartbeat(75.0) == PING_EVENT
    assert describe(read(encoder.encode_heartbeat(120.0))) == ["text_delta "]
    assert describe(read(encoder.encode_events([TextDelta("a")]))) == ["text_delta a"]
    assert encoder.encode_heartbeat(15.0) == PING_EVENT


def test_silence_is_filled_in_the_expected_block(
    make: MakeCall, response_context: ResponseContext
) -> None:
    encoder = create(make, response_context, {"thinking": THINKING})

    assert describe(read(encoder.encode_heartbeat(60.0))) == ["message_start", "start 0 thinking"]

    stream(encoder, ReasoningDelta("", redacted="R"))
    assert encoder.encode_heartbeat(60.0) == b""  # tool use blocks have no pings


def test_interval_is_configurable(make: MakeCall, response_context: ResponseContext) -> None:
    adapter, call = Anthropic(heartbeat_interval=2), make()

    encoder = adapter.create_encoder(call, adapter.decode_request(call), response_context)

    assert isinstance(encoder, SupportsHeartbeat)
    assert encoder.heartbeat_interval == 2
    assert describe(read(encoder.encode_heartbeat(4.0))) == ["message_start"]
    with pytest.raises(ValueError, match=r"at least 0\.1"):
        Anthropic(heartbeat_interval=0)


def test_error_ends_the_stream(make: MakeCall, response_context: ResponseContext) -> None:
    wire = create(make, response_context).encode_error_event(WorkerFailed("no"))

    assert wire == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no"}}\n\n'
    )


def test_nothing_is_written_for_max_tokens_zero(
    make: MakeCall, response_context: ResponseContext
) -> None:
    events = (TextDelta("a"), ChoiceEnd("length"), *END)

    streamed = stream(create(make, response_context, {"max_tokens": 0}), *events)
    body = unary(create(make, response_context, {"max_tokens": 0}), *events)

    assert describe(streamed) == ["message_start", "max_tokens", "message_stop"]
    assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
    assert body["usage"]["output_tokens"] == 0
    assert unary(create(make, response_context, {"max_tokens": 1}), *events)["content"]


def test_headers_name_the_request_and_the_version(
    make: MakeCall, response_context: ResponseContext
) -> None:
    assert create(make, response_context).headers() == (
        ("request-id", "req_7f"),
        ("x-served-model", "v1"),
    )


# --- unary responses ------------------------------------------------------------------------------


def test_content_is_thinking_text_and_calls(
    make: MakeCall, response_context: ResponseContext
) -> None:
    body = unary(
        create(make, response_context, {"thinking": THINKING}),
        TextDelta("a"),
        ReasoningDelta("T", signature="S"),
        ReasoningDelta("", redacted="R"),
        call(0),
        ToolCallDelta(0, 0, '{"x": 1}'),
        ChoiceEnd("eos"),
        *END,
    )

    assert body["content"] == [
        {"type": "thinking", "thinking": "T", "signature": "S"},
        {"type": "redacted_thinking", "data": "R"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "toolu_123450", "name": "f", "input": {"x": 1}},
    ]
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("changed", "content"),
    [
        ({}, []),
        ({"thinking": {"type": "disabled"}}, []),
        ({"thinking": THINKING}, [{"type": "thinking", "thinking": "T", "signature": "gw1.7f"}]),
        (
            {"thinking": {**THINKING, "display": "omitted"}},
            [{"type": "thinking", "thinking": "", "signature": "gw1.7f"}],
        ),
    ],
)
def test_thinking_is_sent_as_requested(
    make: MakeCall, response_context: ResponseContext, changed: dict[str, Any], content: Any
) -> None:
    events = (ReasoningDelta("T"), ChoiceEnd("eos"), *END)

    assert unary(create(make, response_context, changed), *events)["content"] == content

    deltas = [
        word
        for word in describe(stream(create(make, response_context, changed), *events))
        if "_delta" in word
    ]
    thinking_deltas = [
        f"thinking_delta {block['thinking']}" for block in content if block["thinking"]
    ]
    assert deltas == [*thinking_deltas, *("signature_delta gw1.7f" for _ in content)]


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (ChoiceEnd("eos"), "end_turn", None),
        (ChoiceEnd("stop", 0, "END"), "stop_sequence", "END"),
        (ChoiceEnd("stop", 0, 5), "end_turn", None),
        (ChoiceEnd("length"), "max_tokens", None),
        (ChoiceEnd("content_filter"), "refusal", None),
        (ChoiceEnd("unknown"), "end_turn", None),
        (ChoiceEnd("tool_calls"), "end_turn", None),
        (ChoiceEnd("unknown", own_word="later"), "later", None),
    ],
)
def test_stop_reasons(
    make: MakeCall,
    response_context: ResponseContext,
    end: ChoiceEnd,
    reason: str,
    sequence: str | None,
) -> None:
    body = unary(create(make, response_context), TextDelta("a"), end, *END)

    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_refusal_is_a_text(make: MakeCall, response_context: ResponseContext) -> None:
    events = (RefusalDelta("no"), ChoiceEnd("eos"), *END)

    assert unary(create(make, response_context), *events)["stop_reason"] == "refusal"
    assert describe(stream(create(make, response_context), *events))[2:5] == [
        "text_delta no", "stop 0", "refusal",
    ]  # fmt: skip


def test_usage_has_cache_and_thinking(make: MakeCall, response_context: ResponseContext) -> None:
    usage = Usage(10, 4, cached_tokens=3, reasoning_tokens=2, cache_write_tokens=5)

    body = unary(create(make, response_context), ChoiceEnd("eos"), usage, StreamEnd())

    assert body["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 5,
        "cache_read_input_tokens": 3,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_thinking_model_that_did_not_think(
    make: MakeCall, response_context: ResponseContext
) -> None:
    body = unary(
        create(make, response_context, {"thinking": THINKING}),
        TextDelta("a"),
        ChoiceEnd("eos"),
        *END,
    )

    assert [block["type"] for block in body["content"]] == ["text"]


def test_response_without_a_choice(make: MakeCall, response_context: ResponseContext) -> None:
    assert unary(create(make, response_context), *END)["content"] == []


def finish(make: MakeCall, response_context: ResponseContext, call: ToolCall, reason: Any) -> Any:
    start = ToolCallStart(0, 0, call.id, call.name, call.kind)
    events = (start, ToolCallDelta(0, 0, call.arguments), ChoiceEnd(reason), *END)
    return unary(create(make, response_context), *events)


@pytest.mark.parametrize(
    ("arguments", "kind", "wanted"),
    [
        ("", "function", {}),
        ('"{\\"x\\":1}"', "function", {"x": 1}),
        ("raw", "custom", {"input": "raw"}),
    ],
)
def test_arguments_become_an_object(
    make: MakeCall, response_context: ResponseContext, arguments: str, kind: str, wanted: Any
) -> None:
    body = finish(make, response_context, ToolCall("x", "f", arguments, kind), "tool_calls")

    assert body["content"][0]["input"] == wanted


@pytest.mark.parametrize("text", ['{"x":', "[1]", '"a"'])
@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_no_object_are_reported_and_cost_no_answer(
    make: MakeCall, response_context: ResponseContext, text: str, *, stream: bool
) -> None:
    encoder = create(make, response_context)
    pieces: list[Event] = [TextDelta("a"), call(0), ToolCallDelta(0, 0, text)]
    events: list[Event] = [*pieces, ChoiceEnd("tool_calls"), *END]

    if stream:
        written = encoder.encode_events(events).decode()
        assert json.dumps(text) in written
        assert '"stop_reason":"tool_use"' in written
    else:
        first, second = unary(encoder, *events)["content"]
        assert (first["text"], second["input"]) == ("a", {"arguments": text})

    path = "response.choices[0].message.tool_calls[0].function.arguments"
    assert [(loss.field, loss.reason) for loss in encoder.losses] == [(path, "approximated")]


@pytest.mark.parametrize(
    "end",
    [
        ChoiceEnd("length"),
        ChoiceEnd("content_filter"),
        ChoiceEnd("stop", matched_stop="x"),
    ],
)
def test_call_that_was_cut_is_left_out_of_a_whole_answer(
    make: MakeCall, response_context: ResponseContext, end: ChoiceEnd
) -> None:
    encoder = create(make, response_context)

    body = unary(encoder, call(0), ToolCallDelta(0, 0, '{"x":'), end, *END)

    assert body["content"] == []
    assert [loss.field for loss in encoder.losses] == ["response.choices[0].message.tool_calls[0]"]


@pytest.mark.parametrize(
    ("identifier", "keeps"),
    [
        ("toolu_01abc", True),
        ("call_ab12cd", True),
        ("call_0123456", False),
        ("short", False),
        ("", False),
        ("functions.f:0", False),
        ("history_id", False),
    ],
)
def test_ids_that_confuse_clients_are_replaced(
    make: MakeCall, response_context: ResponseContext, identifier: str, *, keeps: bool
) -> None:
    before = {"type": "tool_use", "id": "history_id", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "history_id"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [before]},
        {"role": "user", "content": [result]},
    ]
    events = [ToolCallStart(0, k, identifier, "f") for k in range(2)]

    body = unary(
        create(make, response_context, {"messages": messages}), *events, ChoiceEnd("eos"), *END
    )

    first, second = (block["id"] for block in body["content"])
    assert (first == identifier) is keeps
    assert second.startswith("toolu_")
    assert first != second


def test_each_signature_stays_with_its_block(
    make: MakeCall, response_context: ResponseContext
) -> None:
    encoder = create(make, response_context, {"thinking": THINKING})
    events: list[Event] = [
        ReasoningDelta("a"),
        ReasoningDelta("b", signature="s1"),
        ReasoningDelta("", redacted="sealed"),
        TextDelta("x"),
        TextDelta("y"),
        ReasoningDelta("c"),
        ReasoningDelta("", signature="s2"),
        ChoiceEnd("eos"),
    ]

    content = unary(encoder, *events, *END)["content"]

    assert [(one["type"], one.get("signature") or one.get("data")) for one in content] == [
        ("thinking", "s1"),
        ("redacted_thinking", "sealed"),
        ("text", None),
        ("thinking", "s2"),
    ]
    assert content[2]["text"] == "xy"


def test_call_that_the_token_limit_cut_is_left_out_and_reported(
    make: MakeCall, response_context: ResponseContext
) -> None:
    encoder = create(make, response_context)
    pieces: list[Event] = [call(0), ToolCallDelta(0, 0, "{}"), call(1), ToolCallDelta(0, 1, '{"a')]

    content = unary(encoder, *pieces, ChoiceEnd("length"), *END)["content"]

    assert [one["type"] for one in content] == ["tool_use"]
    assert [loss.field for loss in encoder.losses] == ["response.choices[0].message.tool_calls[1]"]


def test_further_call_for_a_client_without_parallel_calls_is_reported(
    make: MakeCall, response_context: ResponseContext
) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    encoder = create(make, response_context, {"tool_choice": choice, "tools": tools})
    pieces: list[Event] = [call(0), ToolCallDelta(0, 0, "{}"), call(1), ToolCallDelta(0, 1, "{}")]

    content = unary(encoder, *pieces, ChoiceEnd("tool_calls"), *END)["content"]

    assert len(content) == 1
    assert [loss.field for loss in encoder.losses] == ["response.choices[0].message.tool_calls[1]"]


def test_keys_of_an_anthropic_worker_are_written_and_those_of_others_are_not(
    make: MakeCall, response_context: ResponseContext
) -> None:
    own = ResponseExtra("anthropic", "response", ((("new",), 1),))
    other = ResponseExtra("openai", "response", ((("foreign",), 2),))

    body = unary(create(make, response_context), own, other, TextDelta("x"), ChoiceEnd("eos"), *END)

    assert body["new"] == 1
    assert "foreign" not in body
