"""Messages of workers are decoded, also incomplete ones."""

from typing import Any

import msgspec
import pytest

from protocols.anthropic.decoder import MessageDecoder
from protocols.anthropic.endpoints import Anthropic
from protocols.core.aggregate import UnaryResponse, aggregate
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    WorkerFailed,
)
from protocols.core.events import (
    Event,
    ReasoningDelta,
    ResponseExtra,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from protocols.core.request import GenerationRequest, Message, TextPart, ToolCall

REQUEST = GenerationRequest(
    model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),), stream=True
)
START = {
    "type": "message_start",
    "message": {"id": "msg_1", "model": "w", "usage": {"input_tokens": 2, "output_tokens": 1}},
}
STOP = {"type": "message_stop"}


def end(reason: Any = "end_turn", **usage: Any) -> dict[str, Any]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3, **usage}}


def block(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": fields}


def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def decode(*events: Any) -> list[Event]:
    decoder = Anthropic().create_decoder(REQUEST)
    wire = b"".join(
        one if isinstance(one, bytes) else b"data: " + msgspec.json.encode(one) + b"\n\n"
        for one in events
    )
    return [*decoder.feed(wire), *decoder.feed(b""), *decoder.close()]


def fold(*events: Any) -> UnaryResponse:
    return aggregate(decode(*events))


def decode_unary(**fields: Any) -> UnaryResponse:
    decoder = Anthropic().create_decoder(REQUEST)
    events = decoder.feed(msgspec.json.encode(fields))
    return aggregate([*events, *decoder.close()])


def test_stream_is_decoded() -> None:
    response = fold(
        b"event: message_start\n",
        START,
        {"type": "ping"},
        block(4, type="thinking", thinking="", signature=""),
        delta(4, "thinking_delta", thinking="T"),
        delta(4, "signature_delta", signature="S"),
        stop(4),
        block(5, type="redacted_thinking", data="R"),
        stop(5),
        block(6, type="text", text="a"),
        delta(6, "text_delta", text="b"),
        delta(6, "citations_delta", citation={}),
        stop(6),
        block(7, type="tool_use", id="t", name="f", input={}),
        delta(7, "input_json_delta", partial_json=""),
        delta(7, "input_json_delta", partial_json='{"x":1}'),
        stop(7),
        block(8, type="later"),
        {"type": "later"},
        end("tool_use"),
        STOP,
        {"type": "ping"},
        b"data: [DONE]\n\n",
    )

    [choice] = response.choices
    assert (choice.reasoning, choice.reasoning_signature) == ("T", "S")
    assert choice.redacted_reasoning == ["R"]
    assert choice.text == "ab"
    assert choice.tool_calls == [ToolCall("t", "f", '{"x":1}')]
    assert choice.finish_reason == "tool_calls"
    assert response.metadata.model == "w"
    assert response.metadata.id == "msg_1"
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (2, 3)


def test_last_event_may_lack_its_blank_line() -> None:
    events = (START, block(0, type="text", text=""), delta(0, "text_delta", text="a"), end())

    cut = decode(*events, b'data: {"type":"message_stop"}')

    assert cut == decode(*events, STOP)
    assert type(cut[-1]) is StreamEnd


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("end_turn", "eos"),
        ("pause_turn", "eos"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("tool_use", "tool_calls"),
        ("later", "unknown"),
        (5, "unknown"),
    ],
)
def test_stop_reasons(reason: Any, wanted: str) -> None:
    assert fold(START, end(reason), STOP).choices[0].finish_reason == wanted


def test_message_without_stop_reason_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        fold(START, end(None), STOP)
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_unary(content=[{"type": "text", "text": "a"}])


def test_stop_sequence_is_kept() -> None:
    final = {
        "type": "message_delta",
        "delta": {"stop_reason": "stop_sequence", "stop_sequence": "E"},
    }

    [choice] = fold(START, final, STOP).choices

    assert (choice.finish_reason, choice.matched_stop) == ("stop", "E")


def test_input_in_the_start_of_a_block_counts_without_deltas() -> None:
    response = fold(
        START,
        block(0, type="tool_use", id="t", name="f", input={"x": 1}),
        stop(0),
        block(1, type="tool_use", name="g"),
        end(),
        STOP,
    )

    assert response.choices[0].tool_calls == [
        ToolCall("t", "f", '{"x":1}'),
        ToolCall("call_1", "g", "{}"),
    ]
    assert response.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "broken",
    [
        [START, block(0, type="text", text="a")],
        [START, b"data: {"],
        [START, block(0, type="tool_use", id="t"), STOP],
        [START, delta(0, "input_json_delta", partial_json="{"), STOP],
        [],
    ],
)
def test_incomplete_stream_is_broken(broken: list[Any]) -> None:
    with pytest.raises(StreamBroken):
        decode(*broken)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "overloaded_error", "message": "Overloaded"}, Overloaded),
        ({"type": "rate_limit_error", "message": "slow"}, RateLimitExceeded),
        ({"type": "api_error", "message": "broken"}, WorkerFailed),
        ({"type": 5, "message": "broken"}, WorkerFailed),
        ("broken", WorkerFailed),
        (
            {
                "type": "invalid_request_error",
                "message": "prompt is too long: 3 tokens > 2 maximum",
            },
            ContextTooLong,
        ),
    ],
)
def test_error_event_is_an_error(error: Any, kind: type[GatewayError]) -> None:
    decoder = Anthropic().create_decoder(REQUEST)
    wire = b"".join(
        b"data: %b\n\n" % msgspec.json.encode(one)
        for one in (START, delta(0, "text_delta", text="a"), {"type": "error", "error": error})
    )

    assert TextDelta("a") in decoder.feed(wire)
    with pytest.raises(kind):
        decoder.feed(b"")
    with pytest.raises(kind):
        decoder.close()


def test_bare_error_after_the_stream_is_an_error() -> None:
    with pytest.raises(Overloaded):
        decode(START, b'{"error":{"type":"overloaded_error","message":"x"}}')
    with pytest.raises(StreamBroken):
        decode(START, b"nonsense")


def test_event_that_is_no_json_is_a_failure() -> None:
    with pytest.raises(WorkerFailed):
        decode(START, b"data: {nope\n\n")


# --- unary ----------------------------------------------------------------------------------------


def test_message_is_decoded() -> None:
    response = decode_unary(
        id="msg_1",
        model="w",
        content=[
            {"type": "thinking", "thinking": "T", "signature": "S"},
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}},
            5,
        ],
        stop_reason="tool_use",
        usage={
            "input_tokens": 2,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 4,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 1},
        },
    )

    [choice] = response.choices
    assert (choice.reasoning, choice.text, choice.tokens) == ("T", "ab", 7)
    assert choice.tool_calls == [ToolCall("t", "f", '{"x":1}')]

    usage = response.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 7)
    assert (usage.cached_tokens, usage.cache_write_tokens, usage.reasoning_tokens) == (3, 4, 1)


def test_message_without_usage_has_none() -> None:
    response = decode_unary(content=[{"type": "text", "text": "a"}], stop_reason="end_turn")

    assert response.usage is None
    assert response.choices[0].tokens == 1


@pytest.mark.parametrize("usage", [5, {"input_tokens": -1, "output_tokens": 1}])
def test_implausible_usage_is_ignored(usage: Any) -> None:
    decoder = Anthropic().create_decoder(REQUEST)
    decoder.feed(msgspec.json.encode({"content": [], "usage": usage, "stop_reason": "end_turn"}))

    assert decoder.close()[-1].has_ignored_usage  # type: ignore[union-attr]


@pytest.mark.parametrize("cached", [-1, "5", 2.5])
def test_implausible_cache_counts_are_ignored(cached: Any) -> None:
    usage = {"input_tokens": 1, "output_tokens": 1, "cache_creation_input_tokens": cached}

    response = decode_unary(content=[], stop_reason="end_turn", usage=usage)

    assert response.usage in (None, aggregate(decode_plain()).usage)


def decode_plain() -> list[Event]:
    return decode({**START, "message": {"usage": {"input_tokens": 1}}}, end(output_tokens=1), STOP)


def test_body_without_content_is_a_failure() -> None:
    with pytest.raises(WorkerFailed):
        decode_unary(id="x")
    with pytest.raises(Overloaded):
        decode_unary(type="error", error={"type": "overloaded_error", "message": "x"})


def test_thinking_without_text_is_skipped() -> None:
    response = decode_unary(content=[{"type": "thinking"}], stop_reason="end_turn")

    assert response.choices[0].reasoning == ""


def test_calls_without_a_block_start_are_named() -> None:
    events = decode(
        START, block(0, type="tool_use", id="t", name="f", input=5), stop(0), end(), STOP
    )

    assert ToolCallStart(0, 0, "t", "f") in events


@pytest.mark.parametrize("unary", [True, False])
def test_blocks_of_an_unknown_type_are_reported_whole(*, unary: bool) -> None:
    block = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    decoder = MessageDecoder(GenerationRequest(model="m", kind="chat", stream=not unary))
    message = {"id": "msg_1", "role": "assistant", "content": [block], "stop_reason": "end_turn"}
    sent: list[Any] = [
        {"type": "message_start", "message": {"id": "msg_1", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "x_delta", "x": 1}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]
    stream = b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in sent)
    events = [*decoder.feed(msgspec.json.encode(message) if unary else stream), *decoder.close()]

    extra = [one for one in events if isinstance(one, ResponseExtra)]
    assert [(one.path, [path for path, _ in one.values]) for one in extra] == [
        ("response.content[0]", [("server_tool_use",)]),
        *([] if unary else [("response.content[0]", [("x_delta",)])]),
    ]


@pytest.mark.parametrize("calls_before", [0, 1])
def test_input_of_a_tool_that_the_worker_ran_is_no_argument_of_a_call(calls_before: int) -> None:
    call = [
        block(0, type="tool_use", id="t", name="f", input={}),
        delta(0, "input_json_delta", partial_json='{"a":1}'),
        stop(0),
    ]
    hosted = [
        block(1, type="server_tool_use", id="s", name="web_search", input={}),
        delta(1, "input_json_delta", partial_json='{"query":'),
        delta(1, "input_json_delta", partial_json='"x"}'),
        stop(1),
    ]

    events = decode(START, *call * calls_before, *hosted, end(), STOP)

    arguments = [one.text for one in events if isinstance(one, ToolCallDelta)]
    assert arguments == ['{"a":1}'] * calls_before
    extra = [one for one in events if isinstance(one, ResponseExtra)]
    assert [(one.path, [path for path, _ in one.values]) for one in extra] == [
        ("response.content[1]", [("server_tool_use",)])
    ] * 3


def test_unknown_events_and_words_are_reported() -> None:
    start = {"type": "message_start", "message": {"id": "msg_1", "type": "later", "role": "model"}}
    later = {"type": "usage_update", "x": 1}

    events = decode(start, {"type": "ping"}, later, {"x": 2}, end(), STOP)

    extra = [one for one in events if isinstance(one, ResponseExtra)]
    assert [(one.path, dict(one.values)) for one in extra] == [
        ("response", {("type",): "later", ("role",): "model"}),
        ("response", {("events", "usage_update"): later}),
        ("response", {("events", "type"): {"x": 2}}),
    ]


def test_keys_beside_the_content_of_events_are_reported() -> None:
    start, odd, empty = START | {"a": 1}, stop(0) | {"b": 1}, stop(0) | {"c": None}

    events = decode(start, block(0, type="text", text=""), odd, empty, end(), STOP)

    extra = [one for one in events if isinstance(one, ResponseExtra)]
    assert [(one.path, dict(one.values)) for one in extra] == [
        ("response", {("events", "message_start", "a"): 1}),
        ("response", {("events", "content_block_stop", "b"): 1}),
    ]


def test_signatures_and_encrypted_reasoning_have_a_place() -> None:
    events = decode(
        START,
        block(0, type="thinking", thinking="hm", signature=""),
        delta(0, "signature_delta", signature="s"),
        delta(0, "signature_delta", signature=""),
        stop(0),
        block(1, type="redacted_thinking", data="R"),
        block(2, type="thinking", thinking="", signature="t") | {"index": "x"},
        end(),
        STOP,
    )

    assert [one.at for one in events if isinstance(one, ReasoningDelta)] == [
        "",
        "response.content[0].signature",
        "response.content[1].redacted_thinking",
        "response.content[0].signature",
    ]


def test_index_that_is_no_number_is_that_of_the_last_block() -> None:
    events = decode({**block(0, type="text", text="a"), "index": [1]}, end(), STOP)

    assert TextDelta("a") in events


def test_stop_sequence_that_matched_is_passed_on_to_other_clients() -> None:
    answer = {"content": [], "stop_reason": "stop_sequence", "stop_sequence": "END"}
    decoder = MessageDecoder(GenerationRequest(model="m", kind="chat", source="other"))

    events = [*decoder.feed(msgspec.json.encode(answer)), *decoder.close()]

    values = ((("stop_sequence",), "END"),)
    assert ResponseExtra("anthropic", "response", values) in events
