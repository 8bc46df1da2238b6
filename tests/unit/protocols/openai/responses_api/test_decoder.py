"""Responses of workers are decoded to events."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.aggregate import UnaryResponse, aggregate
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    RateLimitExceeded,
    StreamBroken,
    WorkerError,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Event,
    HostedToolCall,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import list_paths
from protocols.core.request import GenerationRequest, LogprobsOptions
from protocols.openai.responses_api.decoder import ResponsesDecoder
from protocols.openai.responses_api.requests import SOURCE
from tests.conformance.cases import Response
from tests.conformance.openai_responses import check_order, read_events
from tests.unit.protocols.openai.responses_api.test_responses import TOKEN, F, create_encoder, end

REQUEST = GenerationRequest(model="m", kind="chat", stream=True)
SEARCH = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "q"}}
TEXT = {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "ab"}]}
CALL = {
    "type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"x":1}',
}  # fmt: skip
USAGE = {
    "input_tokens": 2,
    "input_tokens_details": {"cached_tokens": 1},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 1},
    "total_tokens": 5,
}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **fields}


def finish(*items: Any, kind: str = "completed", **fields: Any) -> dict[str, Any]:
    response = {"id": "r", "model": "w", "created_at": 1.0, "status": kind, "output": items}
    return event("completed", response=response | {"usage": USAGE} | fields)


def write(*events: Any) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in events)


def decode(*events: Any) -> list[Event]:
    decoder = ResponsesDecoder(REQUEST)
    decoded = list(decoder.feed(write(*events)))
    return [*decoded, *decoder.close()]


def contents(events: Sequence[Event]) -> list[Event]:
    """Return the events without the metadata and the end."""
    ends = (ResponseMetadata, ChoiceEnd, Usage, StreamEnd)
    return [one for one in events if not isinstance(one, ends)]


def summarize(response: UnaryResponse) -> Any:
    [choice] = response.choices
    calls = [(one.name, one.arguments, one.kind) for one in choice.tool_calls]
    fields = (choice.text, choice.reasoning, choice.refusal, choice.logprobs)
    return *fields, calls, choice.finish_reason, response.usage


@pytest.mark.parametrize(("source", "arguments"), [("", 'a"b'), ("ollama", '{"input":"a\\"b"}')])
def test_call_of_a_custom_tool_is_one_of_a_function_for_clients_without_such_tools(
    source: str, arguments: str
) -> None:
    item = {"type": "custom_tool_call", "id": "ct", "call_id": "c", "name": "f", "input": 'a"b'}
    begun = {**item, "input": ""}
    decoder = ResponsesDecoder(msgspec.structs.replace(REQUEST, source=source))

    events = decoder.feed(
        write(
            event("output_item.added", output_index=0, item=begun),
            event("custom_tool_call_input.delta", output_index=0, item_id="ct", delta="a"),
            event("custom_tool_call_input.delta", output_index=0, item_id="ct", delta='"b'),
            event("output_item.done", output_index=0, item=item),
            event("output_item.done", output_index=0, item=item),  # a worker may repeat it
            finish(item),
        )
    )

    [start] = [one for one in events if isinstance(one, ToolCallStart)]
    assert start.kind == ("function" if source else "custom")
    assert "".join(one.text for one in events if isinstance(one, ToolCallDelta)) == arguments


def test_stream_with_all_kinds_of_items_is_read_back() -> None:
    events: list[Event] = [
        ReasoningDelta("hm"),
        TextDelta("a", logprobs=(TOKEN,)),
        TextDelta("b"),
        RefusalDelta("no"),
        ToolCallStart(0, 0, "c0", "f"),
        ToolCallDelta(0, 0, '{"x"'),
        ToolCallDelta(0, 0, ":1}"),
        ToolCallStart(0, 1, "c1", "n__g"),
        ToolCallDelta(0, 1, "{}"),
        ToolCallStart(0, 2, "c2", "p", "custom"),
        ToolCallDelta(0, 2, "text"),
        ToolCallStart(0, 3, "c3", "tool_search"),
        ToolCallDelta(0, 3, '{"query":"q"}'),
        *end("tool_calls"),
    ]
    fields: Any = {
        "include": ["message.output_text.logprobs"],
        "tools": [
            {"type": "function", "name": "f"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            {"type": "custom", "name": "p"},
            {"type": "tool_search", "execution": "client"},
        ],
    }
    wire = create_encoder(**fields).encode_events(events)
    unary = create_encoder(**fields).encode_unary(aggregate(events)).body
    request = msgspec.structs.replace(REQUEST, logprobs=LogprobsOptions(1))

    for body in (wire, unary):
        for size in (7, len(body)):
            decoder = ResponsesDecoder(request)
            decoded: list[Event] = []
            for start in range(0, len(body), size):
                decoded += decoder.feed(body[start : start + size])
            decoded += decoder.close()
            assert summarize(aggregate(decoded)) == summarize(aggregate(events))


def test_metadata_is_emitted_once() -> None:
    created = event("created", response={"id": "r", "model": "w", "created_at": 7})

    events = decode(created, event("in_progress"), finish(TEXT))

    assert events[0] == ResponseMetadata("w", None, "r", 7, SOURCE)
    assert sum(isinstance(one, ResponseMetadata) for one in events) == 1
    assert events[-2:] == [Usage(2, 3, 1, 1), StreamEnd()]


@pytest.mark.parametrize(
    "events",
    [
        [event("output_text.delta", delta="ab"), finish()],
        [event("output_item.done", item=TEXT, output_index=0), finish(TEXT)],
        [finish(TEXT)],
        [event("output_item.added", item=TEXT, output_index=0),
         event("output_text.delta", item_id="other", output_index=0, delta="ab"),
         event("output_item.done", item=TEXT, output_index=0), finish(TEXT)],
    ],
)  # fmt: skip
def test_events_may_be_missing(events: list[Any]) -> None:
    assert aggregate(decode(*events)).choices[0].text == "ab"


@pytest.mark.parametrize(
    "events",
    [
        [event("output_item.added", item=CALL | {"arguments": ""}, output_index=0),
         event("function_call_arguments.delta", item_id="fc_1", delta='{"x"'),
         event("function_call_arguments.delta", item_id="fc_1", delta=""),
         event("output_item.done", item=CALL, output_index=0)],
        [event("output_item.added", item={"type": "function_call"}, output_index=0),
         event("function_call_arguments.delta", output_index=0, delta='{"x"'),
         event("output_item.done", item=CALL, output_index=0)],
        [event("output_item.done", item=CALL)],
        [event("output_item.done", item=CALL | {"arguments": {"x": 1}})],
        [],
    ],
)  # fmt: skip
def test_calls_are_complete(events: list[Any]) -> None:
    [choice] = aggregate(decode(*events, finish(CALL))).choices

    [call] = choice.tool_calls
    assert (call.id, call.name, call.arguments) == ("c", "f", '{"x":1}')
    assert choice.finish_reason == "tool_calls"


def test_deltas_win_over_other_final_arguments() -> None:
    events = decode(
        event("output_item.added", item=CALL, output_index=0),
        event("function_call_arguments.delta", output_index=0, delta="[]"),
        finish(CALL),
    )

    assert aggregate(events).choices[0].tool_calls[0].arguments == "[]"


def test_call_without_id_gets_one() -> None:
    events = decode(finish({"type": "function_call", "name": "f"}))

    assert events[1] == ToolCallStart(0, 0, "call_0_0", "f")


def test_call_without_name_is_an_error() -> None:
    with pytest.raises(StreamBroken):
        decode(finish({"type": "function_call"}))


@pytest.mark.parametrize("key", ["content", "summary"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_parts_of_reasoning_stay_apart(key: str, *, stream: bool) -> None:
    """Codex shows each part below its own heading."""
    kind = "reasoning_text" if key == "content" else "summary_text"
    texts = ("**A**", "**B**")
    item = {"type": "reasoning", key: [{"type": kind, "text": text} for text in texts]}
    name = f"reasoning_{'summary_' if key == 'summary' else ''}text.delta"
    deltas = [
        event(name, output_index=0, delta=text, **{f"{key}_index": i})
        for i, text in enumerate(texts)
    ]

    events = decode(*(deltas if stream else ()), finish(item))

    thoughts = [one for one in events if isinstance(one, ReasoningDelta)]
    assert [one.text for one in thoughts] == ["**A**", "\n\n**B**"]
    assert [one.is_new_part for one in thoughts] == [False, True]


def test_reasoning_from_content_or_summary() -> None:
    content = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    summary = {"type": "reasoning", "summary": [{"text": "b"}, {"text": ""}], "content": None}
    deltas = [
        event("reasoning_text.delta", output_index=2, delta="c"),
        event("reasoning_summary_text.delta", output_index=3, delta="d"),
    ]

    events = decode(*deltas, finish(content, summary))

    assert [one.text for one in contents(events) if isinstance(one, ReasoningDelta)] == list("cdab")


def report(*path: str, value: Any) -> ResponseExtra:
    """Return the event of a lost value."""
    return ResponseExtra("", "response", ((path, value),))


def test_unknown_parts_and_keys_of_parts_are_those_of_their_item() -> None:
    parts = [{"type": "refusal", "refusal": "no", "x": 1}, {"type": "audio"}, 5]

    assert contents(decode(finish({"type": "message", "content": parts}))) == [
        RefusalDelta("no"),
        ResponseExtra(
            SOURCE,
            "item",
            (
                (("content[1]",), {"type": "audio"}),
                (("content[2]",), 5),
                (("content[0]", "x"), 1),
            ),
            0,
            -1,
        ),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("texts", [[], TEXT["content"]])
def test_unknown_parts_of_a_message_reach_clients_of_the_api(
    texts: list[Any], *, stream: bool
) -> None:
    before = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "E"}
    message = {**TEXT, "content": [*texts, {"type": "output_audio", "data": "D"}]}
    added = event("output_item.added", output_index=1, item={**message, "content": []})
    done = event("output_item.done", output_index=1, item=message)
    steps = [added, done] if stream else []
    first = event("output_item.done", output_index=0, item=before)

    events = decode(first, *steps, finish(before, message))
    encoder = create_encoder()
    written = read_events(Response(200, {}, encoder.encode_events(events)))

    check_order(written)
    reasoning, item = written[-1]["response"]["output"]
    assert (reasoning["encrypted_content"], "content" in reasoning) == ("E", False)
    assert [one["type"] for one in item["content"]] == [
        *(one["type"] for one in texts), "output_audio"
    ]  # fmt: skip
    assert item["content"][-1]["data"] == "D"


def test_unknown_words_and_keys_of_a_response_are_reported() -> None:
    message = {**TEXT, "role": "model", "status": "later"}
    response = {"status": "completed", "later": {"a": 1}, "store": False, "output": [message]}

    assert contents(decode(event("completed", response=response))) == [
        ResponseExtra(SOURCE, "response", ((("later",), {"a": 1}),)),
        TextDelta("ab"),
        ResponseExtra(SOURCE, "item", ((("role",), "model"), (("status",), "later")), 0, -1),
    ]


def pass_on(kind: str, fields: Any, call: int = -1) -> ResponseExtra:
    return ResponseExtra(SOURCE, "event", (((f"response.{kind}",), fields),), call_index=call)


STRANGE: list[Any] = [
    event("rate_limits.updated", limits=[1], sequence_number=7),
    event("ping"),
    event("output_item.added", output_index=0, item={**TEXT, "id": "w"}),
    event("output_text.odd", output_index=0, item_id="w", x=1),
    event("output_text.even", output_index=0, item_id="w", content_index=0),
    {"x": 1},
]


def test_events_that_nobody_knows_are_passed_on() -> None:
    events = decode(*STRANGE, finish(TEXT))

    assert contents(events) == [
        pass_on("rate_limits.updated", {"limits": [1]}),
        pass_on("ping", fields=True),
        pass_on("output_text.odd", {"output_index": None, "item_id": None, "x": 1}),
        pass_on("output_text.even", {"output_index": None, "item_id": None, "content_index": 0}),
        report("events", "type", value=True),
        TextDelta("ab"),
    ]


def test_events_that_nobody_knows_are_reported_to_other_clients_if_they_say_anything() -> None:
    decoder = ResponsesDecoder(replace(REQUEST, source="anthropic"))

    events = decoder.feed(write(*STRANGE, finish(TEXT)))

    extra = [one for one in events if isinstance(one, ResponseExtra)]
    assert [path for one in extra for path in list_paths(one.path, one.values)] == [
        "response.events.response.rate_limits.updated",
        "response.events.response.ping",
        "response.events.response.output_text.odd",
        "response.events.type",
    ]


def test_event_about_an_open_item_has_its_place_in_what_the_client_gets() -> None:
    call = {**CALL, "id": "w"}
    encoder = create_encoder(tools=[F])

    written = encoder.encode_events(
        decode(
            event("ping"),
            event("output_item.added", output_index=0, item={**call, "arguments": ""}),
            event("call.odd", output_index=0, item_id="w", x=1),
            event("output_item.done", output_index=0, item=call),
            finish(call),
        )
    )

    events = read_events(Response(200, {}, written))
    check_order(events)
    [added] = [one for one in events if one["type"] == "response.output_item.added"]
    [odd] = [one for one in events if one["type"] == "response.call.odd"]
    assert (odd["output_index"], odd["item_id"], odd["x"]) == (0, added["item"]["id"], 1)
    [ping] = [one for one in events if one["type"] == "response.ping"]
    assert [*ping] == ["type", "sequence_number"]


def test_events_about_a_tool_of_the_worker_are_between_its_first_and_its_last() -> None:
    item = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "R"}
    kind = "image_generation_call.partial_image"
    partial = {"partial_image_index": 0, "partial_image_b64": "P"}
    written = create_encoder().encode_events(
        decode(
            event("output_item.done", output_index=0, item={**TEXT, "id": "w"}),
            event("output_item.added", output_index=1, item={**item, "status": "in_progress"}),
            event(kind, output_index=1, item_id="ig_1", **partial),
            event("output_item.done", output_index=1, item=item),
            event("image_generation_call.late", output_index=1, item_id="ig_1"),
            finish(TEXT, item),
        )
    )

    events = [
        one
        for one in read_events(Response(200, {}, written))
        if one.get("output_index") == 1 or one["type"].endswith("late")
    ]
    assert [one["type"].removeprefix("response.") for one in events] == [
        "output_item.added", kind, "output_item.done", "image_generation_call.late"
    ]  # fmt: skip
    assert events[1].items() >= {**partial, "item_id": "ig_1"}.items()


def test_unknown_keys_of_events_that_are_read_come_before_them() -> None:
    events = decode(
        event("output_text.delta", delta="a", x=1, y=None),
        event("output_text.done", item_id="m", text="a", z=1),
        finish(),
    )

    assert contents(events) == [
        ResponseExtra(SOURCE, "event", ((("response.output_text.delta", "x"), 1),), call_index=-1),
        TextDelta("a"),
    ]


def test_unknown_keys_of_events_are_in_the_client_s_events_of_the_same_type() -> None:
    encoder = create_encoder()
    written = encoder.encode_events(
        decode(
            event("created", response={}, a=1),
            event("output_item.added", output_index=0, item={**TEXT, "content": []}, b=2),
            event("output_text.delta", output_index=0, delta="ab", c=3),
            event("output_item.done", output_index=0, item=TEXT, d=4),
            event("refusal.delta", output_index=0, delta="", f=6),
            finish(TEXT) | {"e": 5},
        )
    )

    events = {one["type"]: one for one in read_events(Response(200, {}, written))}
    places = {
        "created": "a", "output_item.added": "b", "output_text.delta": "c",
        "output_item.done": "d", "completed": "e",
    }  # fmt: skip
    assert [events[f"response.{kind}"].get(key) for kind, key in places.items()] == [1, 2, 3, 4, 5]
    assert [loss.field for loss in encoder.losses] == ["response.events.response.refusal.delta.f"]


def test_signatures_are_in_the_store_or_in_reasoning_that_is_packed() -> None:
    signed = ReasoningDelta("", signature="s")
    storing, packed = create_encoder(), create_encoder(store=False)

    assert storing.writes_signature(signed)
    assert packed.writes_signature(signed)
    assert not packed.writes_signature(ReasoningDelta("", redacted="R"))


def test_items_of_hosted_tools_are_kept_as_they_are() -> None:
    events = decode(
        event("output_item.done", output_index=0, item=SEARCH),
        event("output_item.done", output_index=0, item=SEARCH),
        finish(SEARCH, TEXT),
    )

    assert contents(events) == [
        HostedToolCall("web_search_call", Raw(msgspec.json.encode(SEARCH))),
        TextDelta("ab"),
    ]


def test_items_without_a_type_are_reported() -> None:
    lost = report("output[0]", value={"id": "x"})

    assert contents(decode(finish({"id": "x"}, TEXT))) == [lost, TextDelta("ab")]


@pytest.mark.parametrize("item", [SEARCH, {"type": "mcp_list_tools", "tools": []}])
@pytest.mark.parametrize("is_stream", [True, False])
def test_items_of_hosted_tools_reach_clients_of_the_same_api(
    item: dict[str, Any], is_stream: bool
) -> None:
    events = decode(finish(item, TEXT))
    encoder = create_encoder()
    if is_stream:
        written = encoder.encode_events(events).decode()
        payloads = [line[6:] for line in written.splitlines() if line.startswith("data: ")]
        sent = [msgspec.json.decode(one) for one in payloads]
        [added, done] = [one for one in sent if one.get("output_index") == 0]
        assert (added["type"], done["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        first, second = sent[-1]["response"]["output"]
        assert first == done["item"]
        assert added["item"].get("status", "in_progress") == "in_progress"
    else:
        response = encoder.encode_unary(aggregate(events))
        first, second = msgspec.json.decode(response.body)["output"]

    assert isinstance(first["id"], str)
    assert first == {"id": first["id"], **item}
    assert second["content"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"reason": "max_output_tokens"}, "length"),
        ({"reason": "content_filter"}, "content_filter"),
        ({"reason": "other"}, "unknown"),
    ],
)
def test_incomplete_response(details: Any, reason: str) -> None:
    events = decode(finish(TEXT, kind="incomplete", incomplete_details=details))

    assert aggregate(events).choices[0].finish_reason == reason


WITHOUT_REASON = [
    {"output": [TEXT]},
    {"output": [TEXT], "status": None},
    {"output": [TEXT], "status": "incomplete"},
    {"output": [TEXT], "status": "incomplete", "incomplete_details": None},
]


def decode_whole(response: Any, source: str) -> list[Event]:
    decoder = ResponsesDecoder(msgspec.structs.replace(REQUEST, source=source))
    decoder.feed(msgspec.json.encode(response))
    return list(decoder.close())


@pytest.mark.parametrize("response", WITHOUT_REASON)
def test_response_without_the_reason_of_its_end_is_an_error_for_others(response: Any) -> None:
    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decode_whole(response, "anthropic")


@pytest.mark.parametrize("source", ["", "openai responses"])
@pytest.mark.parametrize("response", WITHOUT_REASON)
def test_clients_of_the_protocol_need_no_reason_of_the_end(response: Any, source: str) -> None:
    [end] = [one for one in decode_whole(response, source) if isinstance(one, ChoiceEnd)]

    word = "incomplete: " if response.get("status") else None
    assert end == ChoiceEnd("unknown", own_word=word)


def test_a_stream_that_is_incomplete_without_a_reason_is_an_error_for_others() -> None:
    decoder = ResponsesDecoder(msgspec.structs.replace(REQUEST, source="anthropic"))
    decoder.feed(write(finish(TEXT, kind="incomplete", incomplete_details=None)))

    with pytest.raises(WorkerFailed, match="has no finish reason"):
        decoder.close()


def test_last_event_may_lack_its_blank_line() -> None:
    decoder = ResponsesDecoder(REQUEST)

    assert decoder.feed(write(finish(TEXT)).removesuffix(b"\n\n")) == []
    assert decoder.close() == decode(finish(TEXT))


def test_events_after_the_end_and_markers_are_ignored() -> None:
    decoder = ResponsesDecoder(REQUEST)
    queued = event("queued", response={})

    decoder.feed(write(queued) + b"data:  \n\n" + write(finish(TEXT)) + b"data: [DONE]\n\n")

    assert decoder.feed(write(finish(TEXT))) == []
    assert decoder.close() == ()


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([event("failed", response={"status": "failed", "error": {"message": "m"}})], WorkerFailed),
        ([event("failed", response={"status": "failed", "error": None})], WorkerFailed),
        ([event("failed", response={"status": "failed", "error": {
            "code": "context_length_exceeded", "message": "maximum context length is 8 tokens"}})],
         ContextTooLong),
        ([{"type": "error", "code": "rate_limit_exceeded", "message": "m"}], RateLimitExceeded),
        ([{"error": {"message": "m", "code": 500}}], WorkerFailed),
        ([finish(kind="cancelled")], WorkerFailed),
    ],
)  # fmt: skip
def test_errors_in_a_stream(events: list[Any], kind: type[GatewayError]) -> None:
    with pytest.raises(kind):
        decode(*events)


@pytest.mark.parametrize("logprobs", [5, [{}]])
def test_log_probabilities_of_another_type_are_lost_and_the_text_is_kept(logprobs: Any) -> None:
    events = decode(event("output_text.delta", delta="a", logprobs=logprobs), finish())

    assert ResponseExtra("", "response", ((("logprobs",), logprobs),)) in events
    assert TextDelta("a") in events


def test_error_after_text_follows_the_text() -> None:
    decoder = ResponsesDecoder(REQUEST)

    events = decoder.feed(write(event("output_text.delta", delta="a")) + b"data: {\n\n")

    assert contents(events) == [TextDelta("a")]
    with pytest.raises(WorkerFailed):
        decoder.feed(b"")
    with pytest.raises(WorkerFailed):
        decoder.close()


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        write(event("created", response={})),
        b'{"error":{"message":"m"}}',
        b'{"object":"list"}',
        b"{",
        b'data: {"type":"x"}\n\n{"error":{"message":"m"}}',
        b'data: {"type":"x"}\n\nno event',
    ],
)
def test_incomplete_answers_are_errors(wire: bytes) -> None:
    decoder = ResponsesDecoder(REQUEST)

    with pytest.raises(WorkerError):
        [*decoder.feed(wire), *decoder.close()]


def test_text_of_another_type_is_lost() -> None:
    parts = [{"type": "output_text", "text": text} for text in (5, "a")]
    item = {"type": "message", "content": parts}
    events = decode(
        event("output_text.delta", delta=5),
        event("output_item.done", output_index=1, item=item),
        finish(),
    )

    lost = [one.values for one in events if isinstance(one, ResponseExtra) and one.values]
    assert lost == [((("delta",), 5),), ((("output", "text"), 5),)]


@pytest.mark.parametrize("content", [[], [{"type": "output_text", "text": "", "x": 1}]])
def test_messages_without_text_are_kept_as_they_are(content: list[Any]) -> None:
    item = {"type": "message", "id": "m", "content": content, "phase": "commentary"}

    [call, *_] = contents(decode(finish(item)))

    assert isinstance(call, HostedToolCall)
    assert msgspec.json.decode(call.item) == item


@pytest.mark.parametrize("details", [{"reason": "max_output_tokens", "x": 1}])
@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_reason_of_an_incomplete_response_counts_with_every_status(
    status: str, details: dict[str, Any]
) -> None:
    events = decode(event("completed", response={"status": status, "incomplete_details": details}))

    assert [one.finish_reason for one in events if isinstance(one, ChoiceEnd)] == ["length"]
    assert ResponseExtra(SOURCE, "response", ((("incomplete_details", "x"), 1),)) in events


def test_error_in_a_completed_response_is_an_error() -> None:
    with pytest.raises(WorkerError):
        decode(event("completed", response={"status": "completed", "error": {"message": "m"}}))


def test_output_of_a_response_in_progress_reaches_its_clients() -> None:
    body = {"status": "in_progress", "output": [TEXT]}
    decoder, encoder = ResponsesDecoder(REQUEST), create_encoder()
    events = [*decoder.feed(msgspec.json.encode(body)), *decoder.close()]

    answer = msgspec.json.decode(encoder.encode_unary(aggregate(events)).body)

    assert answer["status"] == "in_progress"
    assert [one["type"] for one in answer["output"]] == ["message"]
