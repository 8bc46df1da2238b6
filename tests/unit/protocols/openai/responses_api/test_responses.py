"""Responses and event streams are valid for the types of OpenAI's client."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from protocols.core.aggregate import aggregate
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    QuotaExceeded,
    RateLimitExceeded,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import ResponseContext
from protocols.openai.responses_api.items import open_reasoning
from protocols.openai.responses_api.requests import SOURCE, References, read_request
from protocols.openai.responses_api.responses import ResponsesEncoder
from tests.conformance.cases import Response
from tests.conformance.openai_responses import check_order, joined, names, read_events

_EVENT = TypeAdapter[Any](ResponseStreamEvent)
TOKEN = TokenLogprob("a", -0.5, (TopLogprob("b", -1.0),))
USAGE = Usage(2, 3, cached_tokens=1, reasoning_tokens=1)
F = {"type": "function", "name": "f"}
P = {"type": "custom", "name": "p"}
SPACE = {"type": "namespace", "name": "n", "tools": [F]}
SEARCH = {"type": "tool_search", "execution": "client"}
REFERENCES = References(None, {}, enabled=True)


def create_encoder(**options: Any) -> ResponsesEncoder:
    body = {"model": "m", "input": "hi"} | options
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in body.items()}
    response_context = ResponseContext("r", 1_700_000_000, "m", "1", "w", lambda: 0.0)
    return ResponsesEncoder(
        read_request(fields, REFERENCES), response_context, lambda _=(): (("x", "y"),)
    )


def end(reason: FinishReason = "eos") -> list[Event]:
    return [ChoiceEnd(reason), USAGE, StreamEnd()]


def call(index: int, name: str, *pieces: str, kind: str = "function") -> list[Event]:
    start = ToolCallStart(0, index, f"call_w{index}", name, kind)
    return [start, *(ToolCallDelta(0, index, piece) for piece in pieces)]


def stream(events: Sequence[Event], **fields: Any) -> list[dict[str, Any]]:
    """Encode a stream; each event is valid, and the last response equals the unary one."""
    encoder = create_encoder(**fields)
    wire = encoder.encode_events(events)
    read = read_events(Response(200, {}, wire))
    check_order(read)
    for event in read:
        _EVENT.validate_python(event)
    whole = msgspec.json.decode(create_encoder(**fields).encode_unary(aggregate(events)).body)
    SdkResponse.model_validate(whole)
    assert simplify(whole) == simplify(read[-1]["response"])
    return read


def simplify(response: dict[str, Any]) -> Any:
    """Return a response without ids."""
    items = [{k: v for k, v in one.items() if k != "id"} for one in response["output"]]
    return {k: v for k, v in response.items() if k != "id"} | {"output": items}


def final_output(events: Sequence[Event], **fields: Any) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = stream(events, **fields)[-1]["response"]["output"]
    return output


def test_text() -> None:
    events = stream([StreamStart(2), ResponseMetadata("w"), TextDelta("a"), TextDelta("b"), *end()])

    assert names(events)[:3] == ["created", "in_progress", "output_item.added"]
    assert joined(events, "output_text") == "ab"
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert events[0]["response"]["usage"] is None


def test_nothing_is_sent_before_the_first_output() -> None:
    encoder = create_encoder()

    assert encoder.encode_events([StreamStart(1), ResponseMetadata("w"), USAGE]) == b""
    assert encoder.headers() == (("x", "y"),)


def test_no_output_is_an_empty_list() -> None:
    assert (
        final_output([TextDelta(""), ReasoningDelta(""), ChoiceEnd("unknown"), StreamEnd()]) == []
    )


def test_usage_may_be_unknown() -> None:
    assert stream([TextDelta("a"), ChoiceEnd("eos"), StreamEnd()])[-1]["response"]["usage"] is None


@pytest.mark.parametrize("included", [True, False])
def test_log_probabilities(included: bool) -> None:
    include = ["message.output_text.logprobs"] if included else []

    events = stream([TextDelta("a", logprobs=(TOKEN,)), TextDelta("b"), *end()], include=include)

    part = events[-1]["response"]["output"][0]["content"][0]
    assert len(part["logprobs"]) == int(included)

    deltas = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert [len(one) for one in deltas] == [int(included), 0]


def test_piece_of_only_log_probabilities_may_be_empty() -> None:
    events = stream([TextDelta("", logprobs=(TOKEN,)), *end()])

    assert "output_text.delta" not in names(events)


@pytest.mark.parametrize("reasoning", [None, {"summary": "auto"}])
def test_reasoning_is_an_item_of_its_own(reasoning: Any) -> None:
    first, message = final_output(
        [ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("a"), *end()], reasoning=reasoning
    )

    key = "summary" if reasoning else "content"
    assert [one["text"] for one in first[key]] == ["hm"]
    assert message["type"] == "message"
    assert "encrypted_content" not in first


@pytest.mark.parametrize("fields", [{"store": False}, {"include": ["reasoning.encrypted_content"]}])
def test_reasoning_is_sealed_with_its_signature(fields: Any) -> None:
    events: list[Event] = [ReasoningDelta("hm"), ReasoningDelta("", signature="s"), *end()]

    [item] = final_output(events, **fields)

    part = open_reasoning(item["encrypted_content"])
    assert part is not None
    assert (part.text, part.signature) == ("hm", "s")


def test_signature_without_text() -> None:
    [item] = final_output([ReasoningDelta("", signature="s"), *end()], store=False)

    assert item["content"] == [{"type": "reasoning_text", "text": ""}]


def test_refusal_after_text_is_a_second_part() -> None:
    [item] = final_output([TextDelta("a"), RefusalDelta(""), RefusalDelta("no"), *end()])

    assert [part["type"] for part in item["content"]] == ["output_text", "refusal"]


def test_text_after_reasoning_in_turns() -> None:
    encoder = create_encoder()
    events = [TextDelta("a"), ReasoningDelta("hm"), TextDelta("b"), *end()]

    read = read_events(Response(200, {}, encoder.encode_events(events)))

    check_order(read)

    kinds = [item["type"] for item in read[-1]["response"]["output"]]
    assert kinds == ["message", "reasoning", "message"]


def test_calls_do_not_overlap() -> None:
    interleaved: list[Event] = [
        TextDelta("a"),
        ToolCallStart(0, 0, "", "f"),
        ToolCallStart(0, 1, "call_0_1", "n__f"),
        ToolCallDelta(0, 0, "{"),
        ToolCallDelta(0, 1, "[1]"),
        ToolCallDelta(0, 0, "}"),
        *call(2, "g"),
        *end("tool_calls"),
    ]
    encoder = create_encoder(tools=[F, SPACE])

    events = read_events(Response(200, {}, encoder.encode_events(interleaved)))

    check_order(events)

    _, first, second, third = events[-1]["response"]["output"]
    assert (first["name"], first["arguments"]) == ("f", "{}")
    assert (second["name"], second["namespace"], second["arguments"]) == ("f", "n", "[1]")
    assert third["arguments"] == "{}"  # the worker sent none

    ids = [first["call_id"], second["call_id"], third["call_id"]]
    assert ids[2] == "call_w2"
    assert all(len(one) == 29 for one in ids[:2])  # generated by the gateway


def test_second_call_is_left_out_without_parallel_calls() -> None:
    events = [*call(0, "f", "{}"), *call(1, "f", "{}"), *end("tool_calls")]

    assert len(final_output(events, parallel_tool_calls=False, tools=[F])) == 1


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_custom_call(kind: str) -> None:
    pieces = ("a\n", "b") if kind == "custom" else ('{"input":"a\\', 'nb"}')

    [item] = final_output([*call(0, "p", *pieces, kind=kind), *end()], tools=[P])

    assert (item["type"], item["input"], item["name"]) == ("custom_tool_call", "a\nb", "p")


def test_further_arguments_of_a_custom_call_are_reported() -> None:
    encoder = create_encoder(tools=[P])

    encoder.encode_events([*call(0, "p", '{"input":"a","why":"b"}'), *end()])

    assert [loss.field for loss in encoder.losses] == [
        "response.choices[0].message.tool_calls[0].function.arguments.why"
    ]


def test_custom_call_that_waits_for_another() -> None:
    events = [*call(0, "f", "{}"), *call(1, "p", '{"input":"x"}'), *end()]

    assert final_output(events, tools=[F, P])[1]["input"] == "x"


@pytest.mark.parametrize(("text", "wanted"), [('{"q":1}', {"q": 1}), ("x", {"query": "x"})])
def test_tool_search_call(text: str, wanted: Any) -> None:
    encoder = create_encoder(tools=[SEARCH])

    events = read_events(
        Response(200, {}, encoder.encode_events([*call(0, "tool_search", text), *end()]))
    )

    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == wanted


@pytest.mark.parametrize(
    ("reason", "wanted"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_cut_response_is_incomplete(reason: FinishReason, wanted: str) -> None:
    events = stream([*call(0, "f", "{}"), *call(1, "f", '{"x'), *end(reason)], tools=[F])

    response = events[-1]["response"]
    assert names(events)[-1] == "incomplete"
    assert response["incomplete_details"] == {"reason": wanted}
    assert [one["status"] for one in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None


@pytest.mark.parametrize(
    ("word", "status", "details"),
    [
        ("paused", "paused", None),
        ("incomplete: ", "incomplete", None),
        ("incomplete: tired", "incomplete", {"reason": "tired"}),
    ],
)
def test_unknown_status_and_reason_are_shown_as_the_worker_wrote_them(
    word: str, status: str, details: Any
) -> None:
    choice_end = ChoiceEnd("unknown", own_word=word)
    events: list[Event] = [TextDelta("a"), choice_end, USAGE, StreamEnd()]

    body = msgspec.json.decode(create_encoder().encode_unary(aggregate(events)).body)
    last = read_events(Response(200, {}, create_encoder().encode_events(events)))[-1]

    assert (body["status"], body["incomplete_details"]) == (status, details)
    assert last["type"] == "response.incomplete"
    assert simplify(last["response"]) == simplify(body)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerFailed("x"), "server_error"),
        (ContextTooLong("x"), "context_length_exceeded"),
        (RateLimitExceeded("x", retry_after=1.5), "rate_limit_exceeded"),
        (QuotaExceeded("x"), "insufficient_quota"),
        (UnsupportedFeature("x"), "invalid_prompt"),
    ],
)
def test_failure_in_a_stream(error: GatewayError, code: str) -> None:
    encoder = create_encoder()

    wire = encoder.encode_events([TextDelta("a")]) + encoder.encode_error_event(error)

    events = read_events(Response(200, {}, wire))
    check_order(events)

    response = events[-1]["response"]
    assert (names(events)[-1], response["error"]["code"]) == ("failed", code)
    assert response["output"][0]["status"] == "incomplete"
    assert ("try again in 1.5s" in response["error"]["message"]) == (code == "rate_limit_exceeded")


def test_failure_leaves_out_an_open_call() -> None:
    encoder = create_encoder(tools=[F])

    wire = encoder.encode_events(call(0, "f", "{}")) + encoder.encode_error_event(WorkerFailed("x"))

    events = read_events(Response(200, {}, wire))
    assert events[-1]["response"]["output"] == []
    assert "output_item.done" not in names(events)


def test_request_is_repeated() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1,
        "instructions": "i", "tools": [F], "tool_choice": "auto", "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "service_tier": "flex",
        "reasoning": {"effort": "low", "generate_summary": "auto"}, "max_tool_calls": 2,
    }  # fmt: skip

    response = stream([TextDelta("a"), *end()], **fields)[-1]["response"]

    wanted = fields | {
        "reasoning": {"effort": "low", "summary": "auto"},
        "service_tier": None,  # the worker named none
    }

    assert {name: response[name] for name in wanted} == wanted


def test_stored_response_has_its_input_with_ids() -> None:
    items = [{"id": "own", "role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    encoder = create_encoder(input=items)
    encoder.encode_events([TextDelta("x"), *end()])

    stored = encoder.stored_response

    assert stored is not None

    body = msgspec.json.decode(stored.body)
    assert body["response"]["id"] == stored.id

    first, second = body["input"]
    assert first == items[0]
    assert second["type"] == "message"
    assert stored.item_ids == (body["response"]["output"][0]["id"], second["id"])


def test_response_that_the_client_does_not_want_stored_is_not() -> None:
    encoder = create_encoder(store=False)
    encoder.encode_events([TextDelta("x"), *end()])

    assert encoder.stored_response is None


def test_heartbeat_sends_the_state_again_and_begins_late() -> None:
    encoder = create_encoder()

    assert encoder.heartbeat_interval == 15.0
    assert encoder.encode_heartbeat(15.0) == b""
    begun = read_events(Response(200, {}, encoder.encode_heartbeat(30.0)))
    again = read_events(Response(200, {}, encoder.encode_heartbeat(45.0)))

    assert [one["type"] for one in begun] == ["response.created", "response.in_progress"]
    assert [one["type"] for one in again] == ["response.in_progress"]
    assert again[0]["sequence_number"] == 2


@pytest.mark.parametrize("stores", [True, False])
def test_failed_response_is_stored_like_any_other(stores: bool) -> None:
    encoder = create_encoder(store=stores)
    encoder.encode_events([TextDelta("a")])
    [*_, last] = read_events(Response(200, {}, encoder.encode_error_event(WorkerFailed("x"))))

    assert last["response"]["status"] == "failed"
    assert (encoder.stored_response is not None) == stores


@pytest.mark.parametrize("stores", [True, False])
def test_worker_s_id_is_shown_unless_the_response_is_stored(stores: bool) -> None:
    """Later requests find what is stored by an id that no worker chose."""
    encoder = create_encoder(store=stores)
    served = ResponseMetadata("w", None, "resp_worker", 7, SOURCE)

    written = encoder.encode_unary(aggregate([served, TextDelta("a"), *end()]))

    answer = msgspec.json.decode(written.body)
    assert (answer["id"] == "resp_worker") != stores
    assert answer["created_at"] == 7


def test_own_clients_get_the_worker_s_settings_and_unknown_keys() -> None:
    values = {("service_tier",): "flex", ("usage", "later"): 1, ("later",): {"a": 1}}
    extra = ResponseExtra(SOURCE, "response", tuple(values.items()))

    written = create_encoder().encode_unary(aggregate([extra, TextDelta("a"), *end()]))

    answer = msgspec.json.decode(written.body)
    assert (answer["service_tier"], answer["later"]) == ("flex", {"a": 1})
    assert answer["usage"]["later"] == 1
    assert answer["usage"]["input_tokens"] == 2


def test_id_and_time_that_come_after_the_first_event_are_not_shown() -> None:
    """A heartbeat may have begun the stream: its id stays."""
    encoder = create_encoder(store=False)
    begun = encoder.encode_heartbeat(60)

    encoder.encode_events([ResponseMetadata("w", None, "resp_worker", 7, SOURCE)])

    assert b"resp_worker" not in begun + encoder.encode_events([TextDelta("a"), *end()])


def test_summary_and_text_of_one_reasoning_are_parts_of_their_own() -> None:
    """Each is what the worker says that it is."""
    pieces = [ReasoningDelta("short", is_summary=True), ReasoningDelta("long", is_summary=False)]

    events = stream([*pieces, TextDelta("hi"), *end()], reasoning={"summary": "auto"})

    [reasoning, _] = events[-1]["response"]["output"]
    assert [part["text"] for part in reasoning["summary"]] == ["short"]
    assert [part["text"] for part in reasoning["content"]] == ["long"]


def test_signature_of_reasoning_is_stored_also_if_the_client_does_not_see_it() -> None:
    encoder = create_encoder(store=True)

    encoder.encode_events([ReasoningDelta("hm", signature="s"), TextDelta("hi"), *end()])

    assert encoder.stored_response is not None
    stored = msgspec.json.decode(encoder.stored_response.body)
    [reasoning, _] = stored["response"]["output"]
    assert "encrypted_content" not in reasoning
    assert open_reasoning(stored["sealed"][reasoning["id"]]) is not None


def test_unary_response_does_not_write_the_events_of_a_stream() -> None:
    """They repeat its text five times."""
    text = "x" * (1 << 20)
    response = aggregate([StreamStart(), TextDelta(text), *end()])
    tracemalloc.start()

    body = create_encoder().encode_unary(response).body

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) < len(body)
    assert peak < 5 * len(text)
