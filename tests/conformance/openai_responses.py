"""OpenAI's Responses API: cases RS-01 to RS-60 that need only one request.

R is a request for the model ``mock`` with the input ``say hi``; RST is R with streaming. Requests
to workers, and cases of several requests, are in ``tests/integration/test_responses_api.py``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.conformance.cases import EVENTS, Case, Response, expect, match

PATH = "/v1/responses"
HELLO = "Hello world!"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
    },
}
OTHER_TOOL = TOOL | {"name": "g"}
CUSTOM_TOOL = {"type": "custom", "name": "p"}
SUMMARY = {"reasoning": {"summary": "auto"}}


def create(id: str, *, fields: Mapping[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build R with fields added or replaced."""
    body = {"model": "mock", "input": "say hi"} | dict(fields or {})
    return Case(id, "POST", PATH, body=body, **rest)


def stream(id: str, check: Any, *, fields: Mapping[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build RST; ``check`` gets its events."""

    def check_events(answer: Response) -> None:
        events = read_events(answer)
        check_order(events)
        check(events)

    options = {"content_type": EVENTS, "check": check_events} | rest
    return create(id, fields={"stream": True} | dict(fields or {}), **options)


def refused(
    id: str,  # noqa: A002 - as above
    code: str | None,
    param: str | None,
    status: int = 400,
    fields: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Case:
    """Build R with an expected error."""
    error = {"message": str, "type": "invalid_request_error", "param": param, "code": code}
    return create(id, fields=fields, status=status, body_is={"error": error}, **rest)


def read_events(answer: Response) -> list[dict[str, Any]]:
    """Return the events of a stream. Each ``event:`` line repeats the event's type."""
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        expect(data.startswith("data: "), f"a block without data: {block[:80]!r}")
        event = msgspec.json.decode(data.removeprefix("data: "))
        expect(name == f"event: {event['type']}", f"{name!r} before {event['type']!r}")
        events.append(event)
    return events


def check_order(events: Sequence[Mapping[str, Any]]) -> None:
    """Every stream has increasing numbers, stable ids, and items that do not overlap."""
    numbers = [event["sequence_number"] for event in events]
    expect(numbers == list(range(len(events))), f"the numbers are {numbers}")
    expect(events[0]["type"] == "response.created", "the first event is another")
    ids = {event["response"]["id"] for event in events if "response" in event}
    expect(len(ids) == 1, f"the response has the ids {ids}")
    final = events[-1]["response"]
    open_id, items = None, list[Any]()
    for event in events:
        if event["type"] == "response.output_item.added":
            expect(open_id is None, "an item began within another")
            open_id = event["item"]["id"]
            expect(event["output_index"] == len(items), "an index is out of order")
        elif event["type"] == "response.output_item.done":
            expect(event["item"]["id"] == open_id, "an item has two ids")
            items.append(event["item"])
            open_id = None
        elif "item_id" in event:
            expect(event["item_id"] == open_id, "an event names another item")
    expect(final["output"] == items, "the output differs from the items of the stream")


def names(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the types of the events."""
    return [event["type"].removeprefix("response.") for event in events]


def joined(events: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return the joined deltas of one type."""
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


TEXT_EVENTS = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.delta",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "completed",
]


def check_text_events(events: Sequence[Mapping[str, Any]]) -> None:
    expect(names(events) == TEXT_EVENTS, f"the events are {names(events)}")
    expect(all("usage" not in e or e["response"]["usage"] is None for e in events[:-1]), "usage")


def check_text(events: Sequence[Mapping[str, Any]]) -> None:
    by_name = {event["type"].removeprefix("response."): event for event in events}
    texts = [
        joined(events, "output_text"),
        by_name["output_text.done"]["text"],
        by_name["content_part.done"]["part"]["text"],
        by_name["output_item.done"]["item"]["content"][0]["text"],
        events[-1]["response"]["output"][0]["content"][0]["text"],
    ]
    expect(texts == [HELLO] * 5, f"the texts are {texts}")
    match(USAGE, events[-1]["response"]["usage"], "usage")


def check_reasoning(events: Sequence[Mapping[str, Any]]) -> None:
    expect(joined(events, "reasoning_text") == "hmm", "the reasoning is another")
    kinds = [event["item"]["type"] for event in events if event["type"].endswith("item.added")]
    expect(kinds == ["reasoning", "message"], f"the items are {kinds}")


def check_summary(events: Sequence[Mapping[str, Any]]) -> None:
    wanted = [
        f"reasoning_summary_{one}" for one in ("part.added", "text.delta", "text.done", "part.done")
    ]
    reasoning_events = [name for name in names(events) if name.startswith("reasoning")]
    expect(reasoning_events == wanted, f"the events are {reasoning_events}")
    indexes = {e["summary_index"] for e in events if "summary_index" in e}
    expect(indexes == {0}, f"the indexes are {indexes}")


def check_call(events: Sequence[Mapping[str, Any]]) -> None:
    expect(
        names(events)[2:]
        == [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ],
        f"the events are {names(events)}",
    )
    match({"arguments": ""}, events[2]["item"], "added", exact=False)
    match({"name": "f", "arguments": '{"x":1}'}, events[5], "done", exact=False)
    match({"status": "completed", "arguments": '{"x":1}'}, events[6]["item"], "item", exact=False)


def check_custom_call(events: Sequence[Mapping[str, Any]]) -> None:
    expect(joined(events, "custom_tool_call_input") == "a\nb", "the input is another")
    deltas = [event["delta"] for event in events if "delta" in event]
    expect(not any('{"input"' in one or one == "\\" for one in deltas), f"deltas: {deltas}")


def check_refusal(events: Sequence[Mapping[str, Any]]) -> None:
    expect(joined(events, "refusal") == "I cannot help.", "the refusal is another")
    expect(names(events)[-1] == "completed", "the end is another")


def check_cut(events: Sequence[Mapping[str, Any]]) -> None:
    expect(names(events)[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "incomplete"
    ], f"the events are {names(events)}")  # fmt: skip
    expect(events[-2]["item"]["status"] == "incomplete", "the item's status is another")


def check_failure(events: Sequence[Mapping[str, Any]]) -> None:
    expect(joined(events, "output_text") == "Hello world", "the deltas are others")
    last = events[-1]["response"]
    expect(names(events)[-1] == "failed", f"the end is {names(events)[-1]}")
    match({"code": "server_error", "message": str}, last["error"], "error")
    expect("error" not in names(events), "there is an error event")


def check_two_calls(events: Sequence[Mapping[str, Any]]) -> None:
    called = [item["name"] for item in events[-1]["response"]["output"]]
    expect(called == ["f", "g"], f"called: {called}")


USAGE = {
    "input_tokens": 2,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 5,
}
TEXT_PART = {"type": "output_text", "text": HELLO, "annotations": [], "logprobs": []}
MESSAGE = {
    "id": re.compile(r"msg_\w{24,}"),
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [TEXT_PART],
}
CALL = {
    "id": re.compile(r"fc_\w{24,}"),
    "type": "function_call",
    "call_id": re.compile(r"call_\w+"),
    "name": "f",
    "status": "completed",
    "arguments": '{"x":1}',
}
CUSTOM_CALL = {
    "type": "custom_tool_call",
    "call_id": str,
    "name": "p",
    "status": "completed",
    "input": "a\nb",
}
DONE = {"status": "completed", "output": [MESSAGE]}
CALLED = {"status": "completed", "output": [CALL]}
ALL_NULL = dict.fromkeys(
    [
        "temperature", "top_p", "store", "tools", "tool_choice", "text", "reasoning", "include",
        "metadata", "instructions", "stream", "max_output_tokens", "top_logprobs", "truncation",
        "parallel_tool_calls", "previous_response_id", "conversation", "background", "user",
        "service_tier", "stream_options", "prompt", "client_metadata",
    ]
)  # fmt: skip
HISTORY = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
]


def check_logprobs(answer: Response) -> None:
    tokens = answer.json["output"][0]["content"][0]["logprobs"]
    expect(len(tokens) == 3, f"{len(tokens)} log probabilities")
    expect(all(len(one["top_logprobs"]) == 2 and one["bytes"] for one in tokens), f"{tokens}")


def check_sealed(answer: Response) -> None:
    sealed = answer.json["output"][0]["encrypted_content"]
    expect(sealed.startswith("gw1:") and "hmm" not in sealed, f"the content is {sealed!r}")


def check_echoed_tools(answer: Response) -> None:
    expect(len(answer.json["tools"]) == 2, "the tools are not repeated")


def calls(*wanted: Mapping[str, Any]) -> Any:
    """The output has these calls, with different ids."""

    def check(answer: Response) -> None:
        output = answer.json["output"]
        match(list(wanted), output, "output", exact=False)
        ids = {item["call_id"] for item in output} | {item["id"] for item in output}
        expect(len(ids) == 2 * len(output), f"the ids are {ids}")

    return check


FORCED = {"tools": [TOOL], "tool_choice": "required"}
USES = {"tools": [TOOL], "input": "use the tool"}
TWO = {"model": "mock-two", "tools": [TOOL, OTHER_TOOL], "tool_choice": "required"}
THINKS = {"model": "mock-think"}
SCHEMA_FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
SEALED = {"store": False, "include": ["reasoning.encrypted_content"]}
CUSTOM = {"model": "mock-custom", "tools": [CUSTOM_TOOL], "tool_choice": "required"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "g"}],
}

RESPONSES_CASES: tuple[Case, ...] = (
    create("RS-01", body_has={
        "object": "response", "id": re.compile(r"resp_[a-z0-9]{24,}"), "status": "completed",
        "error": None, "incomplete_details": None, "created_at": int, "completed_at": int,
    }, answer_headers={"x-request-id": str}),
    create("RS-02", body_has={"output": [MESSAGE]}),
    create("RS-03", body_has={"usage": USAGE}),
    create("RS-04", body_has={
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "metadata": {},
        "instructions": None, "store": True,
    }),
    create("RS-05", fields={"input": [{"role": "user", "content": "say hi"}]}, body_has=DONE),
    create("RS-06", fields={"input": [{"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "say"}, {"type": "input_text", "text": " hi"},
    ]}]}, body_has=DONE | {"usage": USAGE}),
    create("RS-07", fields={"instructions": "be brief"}, body_has={
        "instructions": "be brief", "usage": USAGE | {"input_tokens": 4, "total_tokens": 7},
    }),
    create("RS-08", fields=ALL_NULL, body_has=DONE),
    create("RS-09", fields={"max_output_tokens": 2}, body_has={
        "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
        "completed_at": None, "max_output_tokens": 2,
        "output": [{"status": "incomplete", "content": [{"text": "Hello world"}]}],
        "usage": {"output_tokens": 2},
    }),
    create("RS-10", fields={"model": "mock-filter"}, body_has={
        "status": "incomplete", "incomplete_details": {"reason": "content_filter"},
        "output": [{"content": [{"text": "Hello"}]}],
    }),
    create("RS-11", fields={"model": "mock-refuse"}, body_has={
        "status": "completed",
        "output": [MESSAGE | {"content": [{"type": "refusal", "refusal": "I cannot help."}]}],
    }),
    create("RS-12", fields=THINKS, body_has={
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hmm"}],
             "summary": []},
            MESSAGE,
        ],
        "usage": {"output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 1}},
    }),
    create("RS-13", fields=THINKS | SUMMARY, body_has={"output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hmm"}]}, MESSAGE,
    ]}),
    create("RS-14", fields=THINKS | SEALED, body_has={"store": False}, check=check_sealed),
    create("RS-15", fields=LOGPROBS | {"top_logprobs": 2}, check=check_logprobs),
    create("RS-15 without include", fields={"top_logprobs": 2}, body_has=DONE),
    create(
        "RS-16",
        fields={"metadata": {"a": "b"}, "user": "u1", "prompt_cache_key": "k",
               "safety_identifier": "s"},
        body_has={"metadata": {"a": "b"}, "user": "u1", "prompt_cache_key": "k",
                  "safety_identifier": "s"},
    ),
    create("RS-17", fields={
        "client_metadata": {"x": "y"},
        "input": [{"role": "user", "content": "say hi", "id": "msg_nope"}],
    }, body_has=DONE, answer_headers={"x-interlingua-loss": None}),
    create("RS-18", fields=FORCED, body_has=CALLED, check=calls(CALL)),
    create("RS-19", fields=USES, body_has=CALLED),
    create("RS-20", fields=USES | {"tool_choice": "none"}, body_has=DONE),
    refused("RS-21", "invalid_value", "tool_choice",
            fields={"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}),
    create("RS-22", fields={"tools": [TOOL], "input": [
        *HISTORY, {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]}, body_has=DONE),
    create("RS-23", fields={"input": [
        *HISTORY,
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]}, body_has=DONE),
    refused("RS-24", None, "input", fields={"input": [
        {"type": "function_call_output", "call_id": "c7", "output": "42"},
    ]}),
    create("RS-25", fields={"input": [*HISTORY, {
        "type": "function_call_output", "call_id": "c1",
        "output": [{"type": "input_text", "text": "42"}],
    }]}, body_has=DONE),
    create("RS-26", fields=CUSTOM, check=calls(CUSTOM_CALL)),
    create("RS-27", fields=CUSTOM | {"tools": [CUSTOM_TOOL | {"format": GRAMMAR}]},
           check=calls(CUSTOM_CALL)),
    create("RS-28", fields={"tools": [CUSTOM_TOOL], "input": [
        {"type": "custom_tool_call", "call_id": "c9", "name": "p", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c9", "output": "ok"},
        {"role": "user", "content": "say hi"},
    ]}, body_has=DONE),
    create("RS-29", fields={"tool_choice": "required", "tools": [
        {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]},
    ]}, check=calls({"type": "function_call", "name": "f", "namespace": "n"})),
    create("RS-30", fields={"input": [
        {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
        {"role": "user", "content": "use the tool"},
    ]}, body_has=CALLED),
    create("RS-31", fields=USES | {"tools": [TOOL, {"type": "web_search"}]}, body_has=CALLED,
           answer_headers={"x-interlingua-loss": re.compile(".*web_search=dropped.*")},
           check=check_echoed_tools),
    refused("RS-32", "unsupported_value", "tools[0].type",
            fields={"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}),
    create("RS-33 one", fields=TWO | {"parallel_tool_calls": False},
           check=calls({"name": "f"})),
    create("RS-33 two", fields=TWO | {"parallel_tool_calls": True},
           check=calls({"name": "f"}, {"name": "g"})),
    create("RS-34", fields={"tools": [TOOL, OTHER_TOOL], "tool_choice": ALLOWED},
           check=calls({"name": "g"})),
    create("RS-35", fields={"text": {"format": SCHEMA_FORMAT}},
           body_has={"text": {"format": SCHEMA_FORMAT}}),
    refused("RS-36 name", "missing_required_parameter", "text.format.name",
            fields={"text": {"format": {"type": "json_schema", "schema": {}}}}),
    refused("RS-36 schema", "missing_required_parameter", "text.format.schema",
            fields={"text": {"format": {"type": "json_schema", "name": "n"}}}),
    create("RS-37", fields={"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
           body_has={"text": {"format": {"type": "json_object"}, "verbosity": "low"}}),
    refused("RS-38", "invalid_value", "text.format.type",
            fields={"text": {"format": {"type": "xml"}}}),
    stream("RS-39", check_text_events),
    stream("RS-40", check_text),
    stream("RS-42", check_reasoning, fields=THINKS),
    stream("RS-43", check_summary, fields=THINKS | SUMMARY),
    stream("RS-44", check_call, fields=FORCED),
    stream("RS-45", check_custom_call, fields=CUSTOM),
    stream("RS-46", check_refusal, fields={"model": "mock-refuse"}),
    stream("RS-47", check_cut, fields={"max_output_tokens": 2}),
    stream("RS-48", check_failure, fields={"model": "mock-midfail"}),
    create("RS-49 down", fields={"model": "mock-down", "stream": True}, status=503,
           body_has={"error": {"code": "service_unavailable"}},
           answer_headers={"retry-after": str}),
    create("RS-49 limit", fields={"model": "mock-429", "stream": True}, status=429,
           body_has={"error": {"code": "rate_limit_exceeded"}},
           answer_headers={"retry-after": "2"}),
    create("RS-49 codex", fields={"model": "mock-down", "stream": True}, status=503,
           headers={"user-agent": "codex_exec/0.169.0"},
           body_has={"error": {"code": "server_is_overloaded"}}),
    refused("RS-50", "decimal_above_max_value", "temperature",
            fields={"stream": True, "temperature": 9}),
    stream("RS-51", check_two_calls, fields=TWO),
    refused("RS-54 unknown", "previous_response_not_found", "previous_response_id",
            fields={"previous_response_id": "resp_x"}),
    Case("RS-54 get", "GET", f"{PATH}/resp_x", status=404,
         body_has={"error": {"code": None, "param": None}}),
    Case("RS-54 delete", "DELETE", f"{PATH}/resp_x", status=404),
    refused("RS-55 unknown", None, "input", 404,
            fields={"input": [{"type": "item_reference", "id": "rs_x"}]}),
    refused("RS-57 background", "unsupported_parameter", "background", fields={"background": True}),
    refused("RS-57 conversation", "unsupported_parameter", "conversation",
            fields={"conversation": "conv_1"}),
    Case("RS-58 no JSON", "POST", PATH, body=b"{", status=400, body_has={"error": {"param": None}}),
    Case("RS-58 no object", "POST", PATH, body=b"[]", status=400,
         body_has={"error": {"param": None}}),
    Case("RS-58 no input", "POST", PATH, body={"model": "mock"}, status=400,
         body_has={"error": {"param": "input", "code": "missing_required_parameter"}}),
    refused("RS-58 number", "invalid_type", "input", fields={"input": 5}),
    refused("RS-58 empty", "empty_array", "input", fields={"input": []}),
    refused("RS-58 no item", "invalid_type", "input[0]", fields={"input": [5]}),
    refused("RS-58 type", "invalid_value", "input[0].type", fields={"input": [{"type": "nope"}]}),
    refused("RS-58 no type", "invalid_value", "input[0]", fields={"input": [{}]}),
    refused("RS-59 context", "context_length_exceeded", "input",
            fields={"model": "mock-ctx", "input": "w " * 20}),
    refused("RS-59 model", "model_not_found", "model", 404, fields={"model": "nope"}),
    refused("RS-60 temperature", "invalid_type", "temperature", fields={"temperature": "1"}),
    refused("RS-60 top_p", "decimal_above_max_value", "top_p", fields={"top_p": 1.5}),
    refused("RS-60 max_output_tokens", "integer_below_min_value", "max_output_tokens",
            fields={"max_output_tokens": 0}),
    refused("RS-60 top_logprobs", "integer_above_max_value", "top_logprobs",
            fields={"top_logprobs": 21}),
    refused("RS-60 include", "invalid_value", "include[0]", fields={"include": ["x"]}),
    refused("RS-60 tool_choice", "invalid_value", "tool_choice", fields={"tool_choice": "maybe"}),
    refused("RS-60 effort", "invalid_value", "reasoning.effort",
            fields={"reasoning": {"effort": "huge"}}),
    refused("RS-60 metadata", "invalid_value", "metadata",
            fields={"metadata": {f"k{i}": "v" for i in range(17)}}),
)  # fmt: skip
