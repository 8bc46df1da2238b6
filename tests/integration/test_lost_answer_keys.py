"""What a worker's answer says beyond the client's protocol is reported with its path."""

from typing import Any

import msgspec
import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker

FRONT = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic, ollama]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool:
    protocol: {protocol}
    options: {options}
    workers: ["{worker}"]
    health: {{interval: 1h}}
models:
  chat: {{backend: pool, model: claude}}
"""
REQUEST_OPTIONS: dict[str, Any] = {
    "model": "chat",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}
SOURCE = {"type": "web_search_result_location", "url": "http://a", "cited_text": "c"}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": []}


def respond(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def join_events(events: list[dict[str, Any]]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (one["type"].encode(), msgspec.json.encode(one))
        for one in events
    )


async def ask(
    serve: Serve, answer: bytes, path: str, body: dict[str, Any], protocol: str = "anthropic"
) -> list[str]:
    """The losses that the header of the client's response reports."""
    options = "{worker_api: responses}" if protocol == "openai" else "{}"
    protocol = protocol.removesuffix(" chat")
    async with ScriptedWorker([answer]) as worker:
        front = FRONT.format(protocol=protocol, options=options, worker=worker.url)
        gateway = await serve(front)
        response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    reported: str = response.headers.get("x-interlingua-loss", "")
    return reported.split(",")


@pytest.mark.parametrize(
    ("path", "body", "has_signature"),
    [
        ("/v1/chat/completions", REQUEST_OPTIONS, False),
        ("/v1/responses", {"model": "chat", "input": "hi", "max_output_tokens": 9}, True),
        (
            "/v1/responses",
            {"model": "chat", "input": "hi", "max_output_tokens": 9, "store": False},
            True,
        ),
    ],
)
async def test_blocks_that_a_client_does_not_get_are_reported_by_their_place(
    serve: Serve, path: str, body: dict[str, Any], *, has_signature: bool
) -> None:
    content = [
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "text", "text": "Yes", "citations": [SOURCE]},
    ]
    answer = {**MESSAGE, "content": content, "stop_reason": "end_turn"}

    lost = await ask(serve, respond(msgspec.json.encode(answer)), path, body)

    assert lost == [
        "response.content[0].redacted_thinking=dropped",
        *([] if has_signature else ["response.content[1].signature=dropped"]),
        "response.content[2].server_tool_use=dropped",
        "response.content[3].citations=dropped",
    ]


async def test_blocks_and_keys_of_events_are_reported_by_their_place(serve: Serve) -> None:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": MESSAGE, "a": 1},
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "redacted_thinking", "data": "abc"}, "b": 1},
        {"type": "content_block_stop", "index": 0, "c": 1},
        {"type": "content_block_start", "index": 1,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 1,
         "delta": {"type": "thinking_delta", "thinking": "hm"}, "d": None},
        {"type": "content_block_delta", "index": 1,
         "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "citations_delta", "citation": SOURCE}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "text_delta", "text": "Yes"}, "e": 1},
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop", "f": 1},
    ]  # fmt: skip
    answer = respond(join_events(events), "text/event-stream")

    lost = await ask(serve, answer, "/v1/chat/completions", {**REQUEST_OPTIONS, "stream": True})

    assert lost == [
        "response.events.message_start.a=dropped",
        "response.events.content_block_start.b=dropped",
        "response.content[0].redacted_thinking=dropped",
        "response.events.content_block_stop.c=dropped",
        "response.content[1].signature=dropped",
        "response.content[2].citations=dropped",
        "response.events.content_block_delta.e=dropped",
        "response.events.message_stop.f=dropped",
    ]


async def test_keys_of_events_of_the_responses_api_are_reported(serve: Serve) -> None:
    response = {"id": "r1", "object": "response", "status": "in_progress", "output": []}
    place = {"output_index": 0, "content_index": 0, "item_id": "msg_1", "obfuscation": "x"}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "sequence_number": 0, "response": response, "a": 1},
        {"type": "response.output_text.delta", **place, "delta": "Hi", "b": 1, "c": None},
        {"type": "response.output_text.done", **place, "text": "Hi", "d": 1},
        {"type": "response.completed", "response": {**response, "status": "completed"}},
    ]
    answer = respond(join_events(events), "text/event-stream")

    lost = await ask(
        serve, answer, "/v1/chat/completions", {**REQUEST_OPTIONS, "stream": True}, "openai"
    )

    assert lost == [
        "response.events.response.created.a=dropped",
        "response.events.response.output_text.delta.b=dropped",
    ]


@pytest.mark.parametrize("content", ["The answer is", [{"type": "text", "text": "The answer is"}]])
async def test_beginning_of_an_answer_that_may_not_be_continued_is_named(
    serve: Serve, content: Any
) -> None:
    messages = [*REQUEST_OPTIONS["messages"], {"role": "assistant", "content": content}]
    answer = respond(
        b'{"id":"r","status":"completed","output":[{"type":"message","id":"m","content":'
        b'[{"type":"output_text","text":"42"}]}]}'
    )

    lost = await ask(
        serve, answer, "/v1/messages", {**REQUEST_OPTIONS, "messages": messages}, "openai"
    )

    assert lost == ["messages[1]=approximated"]


async def test_results_of_tools_of_the_service_are_shown_or_reported(serve: Serve) -> None:
    results = [
        {"type": "web_search_result", "title": "t", "url": "u", "encrypted_content": "E"},
        {"type": "later", "title": "a", "url": "b"},
        {"type": "later", "x": 1},
    ]
    blocks = [
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": results},
        {"type": "code_execution_tool_result", "tool_use_id": "s2", "content": {"stdout": "42"}},
        {"type": "web_search_tool_result", "content": {"error_code": "unavailable", "x": 1}},
    ]
    messages = [
        *REQUEST_OPTIONS["messages"],
        {"role": "assistant", "content": blocks},
        *REQUEST_OPTIONS["messages"],
    ]
    answer = respond(
        b'{"id":"r","status":"completed","output":[{"type":"message","id":"m","content":'
        b'[{"type":"output_text","text":"42"}]}]}'
    )

    lost = await ask(
        serve, answer, "/v1/messages", {**REQUEST_OPTIONS, "messages": messages}, "openai"
    )

    assert lost == [
        "messages[1].content[0].content[0].encrypted_content=dropped",
        "messages[1].content[0].content[1].type=dropped",
        "messages[1].content[0].content[2]=dropped",
        "messages[1].content[1].content=dropped",
        "messages[1].content[2].content.x=dropped",
    ]


STOPPED = {**MESSAGE, "content": [{"type": "text", "text": "Yes"}],
           "stop_reason": "stop_sequence", "stop_sequence": "END"}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_that_matched_is_reported_to_clients_of_other_protocols(
    serve: Serve, *, stream: bool
) -> None:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": MESSAGE},
        {"type": "message_delta",
         "delta": {"stop_reason": "stop_sequence", "stop_sequence": "END"}},
        {"type": "message_stop"},
    ]  # fmt: skip
    data = join_events(events) if stream else msgspec.json.encode(STOPPED)
    answer = respond(data, "text/event-stream" if stream else "application/json")

    path = "/api/chat" if stream else "/v1/chat/completions"
    lost = await ask(serve, answer, path, {**REQUEST_OPTIONS, "stream": stream})

    assert [one for one in lost if "stop" in one] == ["response.stop_sequence=dropped"]


@pytest.mark.parametrize("key", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize("value", ["END", 7])
async def test_reason_of_a_chat_worker_s_stop_is_reported_unless_the_client_has_a_place(
    serve: Serve, key: str, value: str | int
) -> None:
    message = {"role": "assistant", "content": "Yes"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", key: value}
    answer = respond(msgspec.json.encode({"choices": [choice]}))
    body = {"model": "chat", "messages": REQUEST_OPTIONS["messages"], "stream": False}

    lost = await ask(serve, answer, "/api/chat", body, "openai chat")
    shown = await ask(serve, answer, "/v1/messages", REQUEST_OPTIONS, "openai chat")

    path = f"response.choices[0].{key}=dropped"
    assert lost == [path]
    assert shown == ["" if isinstance(value, str) else path]


@pytest.mark.parametrize("asks", [False, True])
async def test_reasoning_that_an_anthropic_client_does_not_get_is_reported(
    serve: Serve, *, asks: bool
) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = respond(msgspec.json.encode({"choices": [choice]}))
    body = {**REQUEST_OPTIONS, "max_tokens": 2000}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}} if asks else {}

    lost = await ask(serve, answer, "/v1/messages", body, "openai chat")

    path = "response.choices[0].message.reasoning_content=dropped"
    assert (path in lost) is not asks


CALLS = [
    {
        "index": i,
        "id": f"call_{i}",
        "type": "function",
        "function": {"name": "f", "arguments": one},
    }
    for i, one in enumerate(('{"city": "Rome"}', '{"city": "Pa'))
]


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_cut_call_and_refusal_are_reported(serve: Serve, path: str) -> None:
    message = {"role": "assistant", "content": "", "refusal": "No.", "tool_calls": CALLS}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    answer = respond(msgspec.json.encode({"id": "a", "model": "w", "choices": [choice]}))
    body = {"model": "chat", "messages": REQUEST_OPTIONS["messages"], "stream": False}
    body |= {"max_tokens": 9} if path == "/v1/messages" else {}

    lost = await ask(serve, answer, path, body, "openai chat")

    refusal = [] if path == "/v1/messages" else ["response.choices[0].message.refusal=approximated"]
    assert lost == [*refusal, "response.choices[0].message.tool_calls[1]=dropped"]


async def test_cut_call_of_a_stream_is_reported(serve: Serve) -> None:
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"tool_calls": CALLS}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    ]
    data = b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in chunks)
    answer = respond(data + b"data: [DONE]\n\n", "text/event-stream")

    body = {"model": "chat", "messages": REQUEST_OPTIONS["messages"]}
    lost = await ask(serve, answer, "/api/chat", body, "openai chat")

    assert lost == ["response.choices[0].message.tool_calls[1]=dropped"]


UNKNOWN_CALL = {"id": "c1", "type": "mcp", "mcp": {"name": "f", "input": {"x": 1}}}


@pytest.mark.parametrize("protocol", ["openai chat", "databricks"])
@pytest.mark.parametrize("stream", [False, True])
async def test_call_of_an_unknown_type_is_passed_through_or_reported(
    serve: Serve, protocol: str, *, stream: bool
) -> None:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls"}
    message = {"role": "assistant", "content": None, "tool_calls": [UNKNOWN_CALL]}
    if stream:
        delta = {**message, "tool_calls": [{"index": 0, **UNKNOWN_CALL}]}
        first = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        chunks = [first, {"choices": [{**choice, "delta": {}}]}]
        data = b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in chunks)
        answer = respond(data + b"data: [DONE]\n\n", "text/event-stream")
    else:
        answer = respond(msgspec.json.encode({"choices": [{**choice, "message": message}]}))
    async with ScriptedWorker([answer]) as worker:
        name = protocol.partition(" ")[0]
        gateway = await serve(FRONT.format(protocol=name, options="{}", worker=worker.url))
        body = {**REQUEST_OPTIONS, "stream": stream}
        response = await gateway.http.post("/v1/chat/completions", json=body)

    assert (response.status_code, gateway.records[0].outcome) == (200, "ok")
    if name == "openai":
        assert msgspec.json.encode(UNKNOWN_CALL)[1:-1].decode() in response.text
        assert "x-interlingua-loss" not in response.headers
    else:
        path = "response.choices[0].message.tool_calls[0]"
        assert f"{path}.type=dropped" in response.headers["x-interlingua-loss"]


CHAT_ANSWER: dict[str, Any] = {
    "id": "c",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "stop"}
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
    "system_fingerprint": "fp",
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", [""]),
        ("/v1/messages", ["response.system_fingerprint=dropped"]),
        (
            "/api/chat",
            [
                "response.usage.prompt_tokens_details.cached_tokens=dropped",
                "response.usage.prompt_tokens_details.cache_write_tokens=dropped",
                "response.usage.completion_tokens_details.reasoning_tokens=dropped",
                "response.system_fingerprint=dropped",
            ],
        ),
    ],
)
async def test_details_of_usage_and_fingerprints_reach_clients_or_are_reported(
    serve: Serve, path: str, expected: list[str]
) -> None:
    answer = respond(msgspec.json.encode(CHAT_ANSWER))
    body = {"model": "chat", "messages": REQUEST_OPTIONS["messages"], "stream": False}
    if path == "/v1/messages":
        body["max_tokens"] = 9

    lost = await ask(serve, answer, path, body, "openai chat")

    assert sorted(lost) == sorted(expected)
