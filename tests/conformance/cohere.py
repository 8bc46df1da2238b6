"""The cases of Cohere's API v2 that need only a scripted model."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tests.conformance.cases import EVENTS, Case, Response, expect

HI: Final = {"role": "user", "content": "hi there"}
CHAT: Final[Mapping[str, Any]] = {"model": "mock", "messages": [HI]}
STREAM: Final = {"stream": True}
PARAMETERS: Final = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
CALL: Final = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HELLO: Final = [{"type": "text", "text": "Hello world!"}]
TOOL_TURNS: Final = [HI, {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [CALL]}]
QUERY: Final = {
    "model": "mock",
    "query": "red apple",
    "documents": ["green pear", "red apple", "red car"],
}


def chat(id: str, changed: Mapping[str, Any], **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build the smallest request with these fields replaced; None removes a field."""
    body = {name: value for name, value in {**CHAT, **changed}.items() if value is not None}
    return Case(id, "POST", "/v2/chat", body=body, **rest)


def rerank(id: str, changed: Mapping[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a request to sort documents with these fields replaced."""
    return Case(id, "POST", "/v2/rerank", body={**QUERY, **changed}, **rest)


def error(status: int, text: str) -> dict[str, Any]:
    """Expect this error; ``text`` is a pattern of its message."""
    return {"status": status, "body_is": {"message": re.compile(text, re.DOTALL), "id": str}}


def usage(prompt: int, output: int) -> dict[str, Any]:
    """Expect these token counts."""
    counts = {"input_tokens": prompt, "output_tokens": output}
    return {"billed_units": counts, "tokens": counts}


def answer(message: Any, reason: str = "COMPLETE", tokens: Any = dict) -> dict[str, Any]:
    """Expect the body of a response."""
    return {
        "id": str,
        "finish_reason": reason,
        "message": {"role": "assistant", **message},
        "usage": tokens,
    }


def read_events(response: Response) -> list[dict[str, Any]]:
    """Return the data of each event, whose name must be its type. Raises Mismatch."""
    *blocks, done, rest = response.text.split("\n\n")
    expect((done, rest) == ("data: [DONE]", ""), f"the end: {done[:200]}")
    events = []
    for block in blocks:
        name, _, data = block.partition("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        expect(name == f"event: {event['type']}", f"another name: {block[:200]}")
        events.append(event)
    return events


def events(*wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Expect a stream of exactly these events between its start and [DONE]."""

    def check(response: Response) -> None:
        start, *body = read_events(response)
        expect(start["type"] == "message-start", f"the start: {start}")
        expect(bool(start["id"]), f"the start has no id: {start}")
        expect(start["delta"]["message"]["role"] == "assistant", f"the start: {start}")
        expect(body == list(wanted), f"wanted {wanted}, got {body}")

    return {"content_type": EVENTS, "check": check}


def delta(kind: str, index: int, **message: Any) -> dict[str, Any]:
    return {"type": kind, "index": index, "delta": {"message": message}}


def block(index: int, kind: str, *pieces: str) -> list[dict[str, Any]]:
    """Expect a block of content."""
    return [
        delta("content-start", index, content={"type": kind, kind: ""}),
        *(delta("content-delta", index, content={kind: piece}) for piece in pieces),
        {"type": "content-end", "index": index},
    ]


def end(reason: str, tokens: Any) -> dict[str, Any]:
    return {"type": "message-end", "delta": {"finish_reason": reason, "usage": tokens}}


def check_call(response: Response) -> None:
    """A call has a start, its arguments in pieces, and an end."""
    _, start, *pieces, stop, last = read_events(response)
    call = start["delta"]["message"]["tool_calls"]
    expect(start["type"] == "tool-call-start", f"the start: {start}")
    expect(call["function"] == {"name": "f", "arguments": ""}, f"the call: {call}")
    texts = [one["delta"]["message"]["tool_calls"]["function"]["arguments"] for one in pieces]
    expect("".join(texts) == '{"x":1}', f"the pieces {texts}")
    expect(stop == {"type": "tool-call-end", "index": 0}, f"the end of the call: {stop}")
    expect(last["delta"]["finish_reason"] == "TOOL_CALL", f"the end: {last}")


def check_broken(response: Response) -> None:
    """The stream has the text so far and ends with an error, without [DONE]."""
    last = msgspec.json.decode(response.text.rstrip("\n").rpartition("data: ")[2])
    expect(last["type"] == "message-end", f"the last event: {last}")
    expect(last["delta"]["finish_reason"] == "ERROR", f"the last event: {last}")
    expect(bool(last["delta"]["error"]), f"the last event: {last}")
    expect("[DONE]" not in response.text, "an end was made up")


def documents(*values: Any) -> dict[str, Any]:
    return {"documents": list(values)}


def tool_result(content: Any) -> dict[str, Any]:
    return {"messages": [*TOOL_TURNS, {"role": "tool", "tool_call_id": "a", "content": content}]}


LOSS: Final = "x-interlingua-loss"

CASES: Final = (
    chat("CO-01", {}, body_is=answer({"content": HELLO}, tokens=usage(2, 3))),
    chat("CO-02", STREAM, **events(
        *block(0, "text", "Hello", " world", "!"), end("COMPLETE", usage(2, 3)))),
    chat("CO-03", {"max_tokens": 2}, body_is=answer(
        {"content": [{"type": "text", "text": "Hello world"}]}, "MAX_TOKENS")),
    chat("CO-04", {"stop_sequences": [" world"]}, body_is=answer(
        {"content": [{"type": "text", "text": "Hello"}]}, "STOP_SEQUENCE")),
    chat("CO-04 stream", {"stop_sequences": [" world"], **STREAM}, **events(
        *block(0, "text", "Hello"), end("STOP_SEQUENCE", usage(2, 2)))),
    chat("CO-05", {"model": "mock-think", **STREAM}, **events(
        *block(0, "thinking", "hmm"), *block(1, "text", "Hello", " world", "!"),
        end("COMPLETE", usage(2, 4)))),
    chat("CO-05 unary", {"model": "mock-think"}, body_is=answer(
        {"content": [{"type": "thinking", "thinking": "hmm"}, *HELLO]})),
    chat("CO-05 disabled", {"model": "mock-think", "thinking": {"type": "disabled"}},
         body_is=answer({"content": HELLO})),
    chat("CO-06", {"tools": TOOLS, "tool_choice": "REQUIRED"}, body_is=answer(
        {"tool_calls": [{"id": str, "type": "function",
                         "function": {"name": "f", "arguments": '{"x":1}'}}]}, "TOOL_CALL")),
    chat("CO-06 stream", {"tools": TOOLS, "tool_choice": "REQUIRED", **STREAM},
         content_type=EVENTS, check=check_call),
    chat("CO-07", {"tools": TOOLS, "tool_choice": "NONE"}, body_is=answer({"content": HELLO})),
    chat("CO-08", {"tool_choice": "REQUIRED"}, **error(400, ".*tools.*")),
    chat("CO-08 word", {"tools": TOOLS, "tool_choice": "AUTO"}, **error(400, ".*REQUIRED.*")),
    chat("CO-09", tool_result("5"), body_has={"finish_reason": "COMPLETE"}),
    chat("CO-09 documents", tool_result(
        [{"type": "document", "document": {"data": '{"t": 5}'}},
         {"type": "document", "document": {"id": "d", "data": {"t": 5}}}]),
         body_has={"finish_reason": "COMPLETE"}, answer_headers={LOSS: None}),
    chat("CO-09 unanswered", {"messages": TOOL_TURNS}, **error(400, ".*tool_call_id.*")),
    chat("CO-09 no call", {"messages": [HI, {"role": "tool", "tool_call_id": "b", "content": ""}]},
         **error(400, ".*'tool'.*")),
    chat("CO-10", documents("a b", {"data": {"t": "c"}}),
         body_has={"message": {"content": HELLO}},
         answer_headers={LOSS: "documents.citations=dropped"}),
    chat("CO-10 off", {**documents("a b"), "citation_options": {"mode": "OFF"}},
         body_has={"message": {"content": HELLO}}, answer_headers={LOSS: None}),
    chat("CO-10 data", documents({"id": "a"}), **error(400, ".*documents\\[0\\]\\.data.*")),
    chat("CO-11", {"safety_mode": "STRICT"}, body_has={"finish_reason": "COMPLETE"}),
    chat("CO-11 word", {"safety_mode": "SOFT"}, **error(400, ".*CONTEXTUAL.*")),
    chat("CO-12", {"response_format": {"type": "json_object", "json_schema": PARAMETERS}}),
    chat("CO-12 text", {"response_format": {"type": "text", "json_schema": PARAMETERS}},
         **error(400, ".*json_schema.*")),
    chat("CO-13", {"logprobs": True}, body_has={"logprobs": list}),
    *(
        chat(f"CO-14 {name} {value}", {name: value}, **error(400, f".*{name}.*"))
        for name, value in (
            ("k", 501), ("k", -1), ("p", 0), ("p", 1), ("temperature", 1.5), ("seed", -1),
            ("frequency_penalty", 1.1), ("presence_penalty", -1), ("max_tokens", 0),
            ("stop_sequences", ["a"] * 6), ("stop_sequences", [""]), ("priority", 1000),
            ("logprobs", "yes"), ("strict_tools", 1), ("stream", "yes"),
        )
    ),
    chat("CO-14 accepted", {"k": 500, "p": 0.99, "temperature": 1, "seed": 2**64 - 1,
                            "frequency_penalty": 1, "presence_penalty": 0, "priority": 999},
         body_has={"finish_reason": "COMPLETE"}),
    chat("CO-15", {"thinking": {"type": "enabled", "token_budget": 0}},
         **error(400, ".*token_budget.*")),
    chat("CO-16", {"model": None}, **error(400, ".*'model'.*")),
    chat("CO-16 unknown", {"model": "none"}, **error(404, "model 'none' not found, .*")),
    chat("CO-16 messages", {"messages": []}, **error(400, ".*'messages'.*")),
    chat("CO-16 role", {"messages": [{"role": "bot", "content": "x"}]}, **error(400, ".*'tool'.*")),
    Case("CO-17", "POST", "/v2/chat", body=b"{", **error(400, ".*JSON.*")),
    Case("CO-17 key", "POST", "/v2/chat", body=CHAT, headers={"authorization": None},
         **error(401, "no api key supplied")),
    Case("CO-17 wrong key", "POST", "/v2/chat", body=CHAT,
         headers={"authorization": "Bearer sk-other"}, **error(401, "invalid api token")),
    Case("CO-17 method", "GET", "/v2/chat", **error(405, ".*")),
    chat("CO-18", {"model": "mock-429"}, **error(429, ".*"), answer_headers={"retry-after": "2"}),
    chat("CO-18 down", {"model": "mock-down"}, **error(503, ".*")),
    chat("CO-18 failed", {"model": "mock-500"}, **error(502, ".*")),
    chat("CO-19", {"model": "mock-midfail", **STREAM}, content_type=EVENTS, check=check_broken),
    chat("CO-20", {"model": "mock-uni", **STREAM}, content_type=EVENTS,
         check=lambda response: expect(response.body.isascii(), "the stream is not ASCII")),
    rerank("CO-30", {"max_tokens_per_doc": None}, body_has={
        "results": [{"index": 1, "relevance_score": 1.0}, {"index": 2, "relevance_score": 0.5},
                    {"index": 0, "relevance_score": 0.0}],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}}),
    rerank("CO-31", {"top_n": 1, "return_documents": True},
           body_has={"results": [{"index": 1, "relevance_score": 1.0}]}),
    rerank("CO-32", {"model": "none"}, **error(404, "model 'none' not found, .*")),
    rerank("CO-33", {"documents": []}, **error(400, ".*'documents'.*")),
    Case("CO-40", "GET", "/v1/models", body_has={"models": lambda body: {
        "name": "org/m1", "endpoints": ["chat"], "finetuned": False} in body}),
    Case("CO-41", "GET", "/v1/models?endpoint=embed", body_has={
        "models": lambda body: {one["endpoints"][0] for one in body} == {"embed"}}),
    Case("CO-41 word", "GET", "/v1/models?endpoint=sing", **error(400, ".*rerank.*")),
    Case("CO-42", "GET", "/v1/models/org/m1", body_is={
        "name": "org/m1", "endpoints": ["chat"], "finetuned": False}),
)  # fmt: skip
