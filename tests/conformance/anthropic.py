"""The cases of Anthropic's Messages API that need only a scripted model.

The cases about what a worker receives are in ``test_anthropic_worker``.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from tests.conformance.cases import EVENTS, Case, Response, expect

HEADERS: Final[Mapping[str, str | None]] = {
    "x-api-key": "sk-test",
    "anthropic-version": "2023-06-01",
    "authorization": None,
}
HI: Final = {"role": "user", "content": "hi there"}
MESSAGE: Final[Mapping[str, Any]] = {"model": "mock", "max_tokens": 100, "messages": [HI]}
TOOLS: Final = [
    {
        "name": "f",
        "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }
]
STREAM: Final = {"stream": True}
HELLO: Final = [{"type": "text", "text": "Hello world!"}]
REQUEST_ID: Final = re.compile("req_.+")


def messages(id: str, changed: Mapping[str, Any], **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build the smallest request with these fields replaced; None removes a field."""
    body = {name: value for name, value in {**MESSAGE, **changed}.items() if value is not None}
    return send(id, body, **rest)


def send(id: str, body: Any, path: str = "/v1/messages", **rest: Any) -> Case:  # noqa: A002 - see above
    headers = {**HEADERS, **rest.pop("headers", {})}
    return Case(id, "POST", path, headers=headers, body=body, **rest)


def error(status: int, kind: str, text: str = ".*") -> dict[str, Any]:
    """Expect this error; ``text`` is a pattern of its message."""
    detail = {"type": kind, "message": re.compile(text, re.DOTALL)}
    return {
        "status": status,
        "body_is": {"type": "error", "error": detail, "request_id": REQUEST_ID},
        "answer_headers": {"request-id": REQUEST_ID},
    }


def invalid(text: str) -> dict[str, Any]:
    """Expect an error that the request is invalid."""
    return error(400, "invalid_request_error", text)


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    """Expect these token counts."""
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def message(
    content: Any,
    reason: str = "end_turn",
    stop: str | None = None,
    tokens: Any = dict,
) -> dict[str, Any]:
    """Expect the body of a message."""
    return {
        "id": re.compile("msg_[A-Za-z0-9]+"),
        "type": "message",
        "role": "assistant",
        "model": str,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": tokens,
    }


def read_events(response: Response) -> Iterator[dict[str, Any]]:
    """Return the data of each event, whose name must be its type. Raises Mismatch."""
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        expect(len(lines) == 2, f"an event of {len(lines)} lines: {block[:200]}")
        name, data = lines
        expect(name.startswith("event: "), f"an event without a name: {block[:200]}")
        expect(data.startswith("data: "), f"an event without data: {block[:200]}")
        event = msgspec.json.decode(data.removeprefix("data: "))
        expect(event["type"] == name.removeprefix("event: "), f"another type: {block[:200]}")
        yield event


def events(*wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Expect a stream with these events, each with these fields, and pings between them."""

    def check(response: Response) -> None:
        received = [event for event in read_events(response) if event["type"] != "ping"]
        kinds = [event["type"] for event in received]
        expect(kinds == [event["type"] for event in wanted], f"events: {kinds}")
        for event, fields in zip(received, wanted, strict=True):
            same = all(event.get(name) == value for name, value in fields.items())
            expect(same, f"wanted {fields}, got {event}")

    return {"content_type": EVENTS, "check": check}


def start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def text(index: int, *pieces: str) -> list[dict[str, Any]]:
    """Expect a block of text."""
    return [
        start(index, type="text", text=""),
        *(delta(index, "text_delta", text=piece) for piece in pieces),
        stop(index),
    ]


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def end(reason: str, tokens: Any, sequence: str | None = None) -> list[dict[str, Any]]:
    """Expect the last two events."""
    final = {"stop_reason": reason, "stop_sequence": sequence}
    return [{"type": "message_delta", "delta": final, "usage": tokens}, {"type": "message_stop"}]


START: Final = {"type": "message_start"}


def check_wire(response: Response) -> None:
    """Each event has a name and one line of data, and nothing from other protocols."""
    expect("[DONE]" not in response.text, "there is a [DONE]")
    expect("\nid:" not in response.text, "there is an id:")
    expect(response.headers["content-type"].startswith(EVENTS), "the content type is another")
    first = next(read_events(response))
    counts = first["message"]["usage"]
    expect(isinstance(counts["input_tokens"], int), f"usage at the start: {counts}")
    expect(isinstance(counts["output_tokens"], int), f"usage at the start: {counts}")


def check_broken(response: Response) -> None:
    """The stream has the text so far and then an error, without an end."""
    received = list(read_events(response))
    expect(received[-1]["type"] == "error", f"the last event: {received[-1]}")
    expect(received[-1]["error"]["type"] == "api_error", f"the last event: {received[-1]}")
    expect(all(one["type"] != "message_stop" for one in received), "an end was made up")


CALL: Final = {"type": "tool_use", "id": str, "name": "f", "input": {"x": 1}}


def check_call(response: Response) -> None:
    """A tool's input arrives in pieces."""
    received = [event for event in read_events(response) if event["type"] != "ping"]
    block = received[1]["content_block"]
    expect((block["type"], block["name"], block["input"]) == ("tool_use", "f", {}), f"{block}")
    pieces = [
        one["delta"]["partial_json"] for one in received if one["type"] == "content_block_delta"
    ]
    expect("".join(pieces) == '{"x":1}', f"the pieces {pieces}")
    expect(received[-2]["delta"]["stop_reason"] == "tool_use", f"the end {received[-2]}")


def result(identifier: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identifier, **fields}


USE: Final = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
}
WORDS: Final = {"model": "mock-ctx", "messages": [{"role": "user", "content": "word " * 20}]}
COUNT: Final = "/v1/messages/count_tokens"
PDF: Final = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
}
MODEL: Final = {
    "type": "model",
    "id": "org/m1",
    "display_name": "org/m1",
    "created_at": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
    "lifecycle": "active",
}
THINKING: Final = {"type": "enabled", "budget_tokens": 2000}

CASES: Final = (
    messages(
        "AN-01",
        {},
        body_is=message(HELLO, tokens=usage(2, 3)),
        answer_headers={"request-id": REQUEST_ID},
    ),
    messages(
        "AN-02",
        STREAM,
        **events(START, *text(0, "Hello", " world", "!"), *end("end_turn", usage(2, 3))),
    ),
    messages("AN-03", STREAM, content_type=EVENTS, check=check_wire),
    messages("AN-05", {"max_tokens": 2}, body_is=message(
        [{"type": "text", "text": "Hello world"}], "max_tokens", tokens=usage(2, 2))),
    messages("AN-06", {"max_tokens": None}, **invalid("max_tokens: Field required")),
    *(
        messages(f"AN-07 {value}", {"max_tokens": value}, **invalid("max_tokens: .*"))
        for value in ("5", -1, 1.5, True)
    ),
    messages("AN-08", {"max_tokens": 0}, body_is=message([], "max_tokens", tokens=usage(2, 0))),
    messages(
        "AN-08 stream",
        {"max_tokens": 0, **STREAM},
        **events(START, *end("max_tokens", usage(2, 0))),
    ),
    messages("AN-09", {"model": None}, **invalid("model: Field required")),
    messages("AN-09 unknown", {"model": "none"}, **error(404, "not_found_error", "model: none")),
    messages("AN-10", {"messages": []}, **invalid("messages: at least one message is required")),
    messages(
        "AN-11",
        {"messages": [{"role": "bot", "content": "x"}]},
        **invalid("messages.0.role: Input should be 'user', 'assistant' or 'system'"),
    ),
    messages(
        "AN-12",
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": " b c"}]}]},
        body_has={"usage": {"input_tokens": 3}},
    ),
    messages("AN-13", {"system": "be kind"}, body_has={"usage": {"input_tokens": 4}}),
    messages(
        "AN-17",
        {"stop_sequences": [" world"]},
        body_has={"content": [{"type": "text", "text": "Hello"}], "stop_reason": "stop_sequence",
                  "stop_sequence": " world"},
    ),
    messages(
        "AN-18",
        {"stop_sequences": [" world"], **STREAM},
        **events(START, *text(0, "Hello"), *end("stop_sequence", usage(2, 2), " world")),
    ),
    messages("AN-19", {"stop_sequences": [""]}, **invalid("stop_sequences.*")),
    messages("AN-20", {"temperature": 1.5},
             **invalid("temperature: Input should be less than or equal to 1")),
    messages("AN-20 0", {"temperature": 0}, body_has={"content": HELLO}),
    messages("AN-20 1", {"temperature": 1}, body_has={"content": HELLO}),
    *(
        messages(
            f"AN-21 {field}",
            {field: value},
            headers={"anthropic-version": "2026-10-21"},
            needs={"strict_version": True},
            **invalid(f"{field}: Extra inputs are not permitted"),
        )
        for field, value in (("temperature", 0.5), ("top_p", 0.5), ("top_k", 5))
    ),
    messages("AN-21 accepted", {"temperature": 0.5}, headers={"anthropic-version": "2026-10-21"},
             body_has={"content": HELLO}),
    messages("AN-21 older", {"temperature": 0.5}, needs={"strict_version": True},
             body_has={"content": HELLO}),
    messages("AN-21 no version", {}, headers={"anthropic-version": None},
             body_has={"content": HELLO}),
    messages("AN-21 no date", {}, headers={"anthropic-version": "latest"},
             **invalid("anthropic-version: .*")),
    messages("AN-23", {"tools": TOOLS, "tool_choice": {"type": "any"}},
             body_has={"content": [CALL], "stop_reason": "tool_use"}),
    messages("AN-24", {"tools": TOOLS, "tool_choice": {"type": "any"}, **STREAM},
             content_type=EVENTS, check=check_call),
    messages("AN-25", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
             body_has={"content": [CALL]}),
    messages("AN-26", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "zz"}},
             **invalid("tool_choice.*zz.*")),
    messages("AN-28", {"tools": TOOLS, "tool_choice": {"type": "none"},
                       "messages": [{"role": "user", "content": "tool"}]},
             body_has={"content": HELLO}),
    messages("AN-35", {"messages": [HI, USE, HI]}, **invalid("messages.2: .*: a. .*")),
    messages("AN-35 last", {"messages": [HI, USE]}, **invalid("messages.2: .*: a. .*")),
    messages("AN-36", {"messages": [HI, USE, {"role": "user", "content": [result("b")]}]},
             **invalid("messages.2.content.0: .*: b. .*")),
    messages("AN-37", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"},
             {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]}]},
             **invalid("messages.0.content.1.*")),
    messages("AN-40", {"messages": [{"role": "user", "content": [PDF]}]},
             **invalid("messages.0.content.*")),
    messages("AN-44", {"max_tokens": 4000, "thinking": {**THINKING, "budget_tokens": 1023}},
             **invalid("thinking.enabled.budget_tokens: .*1024")),
    messages("AN-44 more", {"max_tokens": 2000, "thinking": THINKING},
             **invalid(".*max_tokens.*budget_tokens.*")),
    messages("AN-48", {"foo": 1}, body_has={"content": HELLO}),
    messages("AN-48 rejected", {"foo": 1}, needs={"unknown": "reject"},
             **invalid("foo: Extra inputs are not permitted")),
    messages("AN-49", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
             **invalid("tools.0: server tool web_search_20250305 is not available.*")),
    messages("AN-50", {}, headers={"x-api-key": None}, **error(401, "authentication_error")),
    messages("AN-50 wrong", {}, headers={"x-api-key": "no"}, **error(401, "authentication_error")),
    messages("AN-50 bearer", {}, headers={"x-api-key": None, "authorization": "Bearer sk-test"},
             body_has={"content": HELLO}),
    messages("AN-50 one wrong", {}, headers={"x-api-key": "no", "authorization": "Bearer sk-test"},
             body_has={"content": HELLO}),
    messages("AN-50 other wrong", {}, headers={"authorization": "Bearer no"},
             body_has={"content": HELLO}),
    send("AN-51", b"{", **invalid(".*JSON.*")),
    send("AN-51 array", [], **invalid(".*JSON.*")),
    messages("AN-51 no type", {}, headers={"content-type": None}, body_has={"content": HELLO}),
    *(
        messages(f"AN-52 {model}{mode}", {"model": model, **fields},
                 **{**error(status, kind), "answer_headers": headers})
        for mode, fields in (("", {}), (" stream", STREAM))
        for model, status, kind, headers in (
            ("mock-down", 529, "overloaded_error", {"retry-after": re.compile("[1-9].*")}),
            ("mock-500", 502, "api_error", {}),
            ("mock-429", 429, "rate_limit_error", {"retry-after": "2"}),
        )
    ),
    messages("AN-53", WORDS, **invalid("prompt is too long: 20 tokens > 8 maximum")),
    messages("AN-54", {"model": "mock-ctx"}, body_has={"content": HELLO},
             answer_headers={"x-interlingua-loss": "max_tokens=clamped"}),
    messages("AN-54 error", {"model": "mock-ctx"}, needs={"over_limit": "error"},
             **invalid("input length and `max_tokens` exceed context limit: 3 \\+ 100 > 8, .*")),
    *(
        messages(f"AN-55 {model}", {"model": model, **STREAM}, content_type=EVENTS,
                 check=check_broken)
        for model in ("mock-midfail", "mock-cut")
    ),
    send("AN-57", {"model": "mock", "messages": [HI], "system": "x"}, COUNT,
         body_is={"input_tokens": 3}),
    send("AN-57 tools", {"model": "mock", "messages": [HI], "tools": TOOLS}, COUNT,
         body_is={"input_tokens": lambda count: count >= 2}),
    send("AN-57 unknown", {"model": "none", "messages": [HI]}, COUNT,
         **error(404, "not_found_error")),
    send("AN-57 empty", {"model": "mock", "messages": []}, COUNT, **invalid("messages: .*")),
    Case("AN-58", "GET", "/v1/models?limit=1000", headers=HEADERS, body_is={
        "data": list, "has_more": False, "first_id": "mock", "last_id": str}),
    Case("AN-58 page", "GET", "/v1/models?limit=1&after_id=mock", headers=HEADERS, body_is={
        "data": [MODEL], "has_more": True, "first_id": "org/m1", "last_id": "org/m1"}),
    Case("AN-58 page before", "GET", "/v1/models?limit=1&before_id=org/m1", headers=HEADERS,
         body_has={"first_id": "mock", "has_more": False}),
    Case("AN-58 one", "GET", "/v1/models/org%2Fm1", headers=HEADERS, body_is=MODEL),
    Case("AN-58 no such model", "GET", "/v1/models/none", headers=HEADERS,
         **error(404, "not_found_error", "model: none")),
    Case("AN-58 limit", "GET", "/v1/models?limit=0", headers=HEADERS, **invalid("limit: .*")),
    Case("AN-58 without version", "GET", "/v1/models", headers={"x-api-key": "sk-test"},
         body_has={"object": "list"}, why="the list of another protocol of the listener"),
    Case("AN-59", "HEAD", "/", headers=HEADERS, body_is=b""),
    Case("AN-59 GET", "GET", "/v1/messages", headers=HEADERS,
         **{**error(405, "invalid_request_error"), "answer_headers": {"allow": "POST"}}),
    send("AN-59 nope", {}, "/v1/nope", **error(404, "not_found_error")),
    send("AN-59 batches", {}, "/v1/messages/batches", **error(404, "not_found_error")),
)  # fmt: skip
