"""All that a worker's answer holds reaches the client as what it is, or is reported.

Each worker protocol's answer gets each kind of content, and tool calls of which one is cut, for a
client of each protocol, unary and streamed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tests.property.test_unknown_response_keys import (
    CLIENTS,
    MESSAGE_USAGE,
    PROMPT_CLIENTS,
    WORKERS,
    join_events,
    make_chunk,
    translate_response,
)

Block = tuple[str, str]
"""Its kind, which is that of the internal event, and its text."""
MARK, TEXT = "Mark-1", "Text-2"
COHERE_USAGE = {"tokens": {"input_tokens": 1, "output_tokens": 2}}
NAMES = ("first_tool", "second_tool")
CHATS = ("openai", "databricks", "ovms", "tgi", "mindie")
KINDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(CHATS, ("reasoning", "refusal")),
    "anthropic": ("reasoning",),
    "responses": ("reasoning", "refusal"),
    "cohere": ("reasoning",),
}
"""The kinds of content beside text that a worker sends."""
LENGTH: Mapping[str, str] = {"anthropic": "max_tokens", "cohere": "MAX_TOKENS"}
ENDED: Mapping[str, str] = {"anthropic": "end_turn", "cohere": "COMPLETE"}
CALLED: Mapping[str, str] = {"anthropic": "tool_use", "cohere": "TOOL_CALL"}
QUESTION = [{"role": "user", "content": "hi"}]
TOOL = {"name": NAMES[0], "parameters": {"type": "object"}}
READERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **CLIENTS,
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 2000,
            "messages": QUESTION,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
}
"""Clients that want to see reasoning."""
CALLERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": QUESTION, "functions": [TOOL]}),
    "responses": ("/v1/responses", {"input": "hi", "parallel_tool_calls": False}),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": QUESTION,
            "tools": [{"name": NAMES[0], "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ),
}
"""Clients that take one call."""


def build_chat(
    blocks: Sequence[Block], calls: Sequence[str], reason: str, *, stream: bool
) -> list[dict[str, Any]]:
    keys = {"text": "content", "reasoning": "reasoning_content", "refusal": "refusal"}
    items: list[dict[str, Any]] = [
        {
            "index": i,
            "id": f"call_{i}a",
            "type": "function",
            "function": {"name": name, "arguments": one},
        }
        for i, (name, one) in enumerate(zip(NAMES, calls, strict=False))
    ]
    if stream:
        deltas: list[dict[str, Any]] = [{keys[kind]: text} for kind, text in blocks]
        deltas += [{"tool_calls": [item]} for item in items]
        return [*(make_chunk(delta) for delta in deltas), make_chunk({}, reason)]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for kind, text in blocks:
        message[keys[kind]] = message.get(keys[kind], "") + text
    if items:
        message["tool_calls"] = items
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return [{"id": "a", "model": "w", "choices": [choice]}]


def build_message(
    blocks: Sequence[Block], calls: Sequence[str], reason: str, *, stream: bool
) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": text, "signature": "s"}
        if kind == "reasoning"
        else {"type": "text", "text": text}
        for kind, text in blocks
    ]
    uses = [{"type": "tool_use", "id": f"toolu_{n}", "name": n, "input": {}} for n in NAMES]
    if not stream:
        inputs = [
            use | {"input": msgspec.json.decode(one)} for use, one in zip(uses, calls, strict=False)
        ]
        whole = {"id": "m", "content": content + inputs, "stop_reason": reason}
        return [whole | {"usage": MESSAGE_USAGE}]
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "content": [], "usage": {}}}
    ]
    for i, block in enumerate([*content, *uses[: len(calls)]]):
        events.append({"type": "content_block_start", "index": i, "content_block": block})
        if i >= len(content):
            delta = {"type": "input_json_delta", "partial_json": calls[i - len(content)]}
            events.append({"type": "content_block_delta", "index": i, "delta": delta})
        events.append({"type": "content_block_stop", "index": i})
    stop = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": MESSAGE_USAGE}
    return [*events, stop, {"type": "message_stop"}]


def build_items(
    blocks: Sequence[Block], calls: Sequence[str], reason: str, *, stream: bool
) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    for kind, text in blocks:
        part: dict[str, Any]
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            output.append({"type": "reasoning", "id": "rs", "summary": [], "content": [part]})
        else:
            part = {"type": "refusal", "refusal": text}
            if kind == "text":
                part = {"type": "output_text", "text": text, "annotations": []}
            output.append({"type": "message", "role": "assistant", "content": [part]})
    for name, one in zip(NAMES, calls, strict=False):
        output.append({"type": "function_call", "call_id": name, "name": name, "arguments": one})
    is_cut = reason == "length"
    details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
    status = "incomplete" if is_cut else "completed"
    response = {"id": "r", "status": status, "output": output, **details}
    if not stream:
        return [response]
    states = ("added", "done")
    return [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
        *(
            {"type": f"response.output_item.{state}", "output_index": i, "item": item}
            for i, item in enumerate(output)
            for state in states
        ),
        {"type": f"response.{status}", "response": response},
    ]


def build_cohere(
    blocks: Sequence[Block], calls: Sequence[str], reason: str, *, stream: bool
) -> list[dict[str, Any]]:
    keys = {"text": "text", "reasoning": "thinking"}
    items = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": one}}
        for name, one in zip(NAMES, calls, strict=False)
    ]
    if not stream:
        content = [{"type": keys[kind], keys[kind]: text} for kind, text in blocks]
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": items}
        return [{"id": "c", "message": message, "finish_reason": reason, "usage": COHERE_USAGE}]
    events: list[dict[str, Any]] = [{"type": "message-start", "id": "c"}]
    for i, (kind, text) in enumerate(blocks):
        for event, block in (("start", {"type": keys[kind]}), ("delta", {keys[kind]: text})):
            delta: dict[str, Any] = {"message": {"content": block}}
            events.append({"type": f"content-{event}", "index": i, "delta": delta})
        events.append({"type": "content-end", "index": i})
    for i, item in enumerate(items):
        delta = {"message": {"tool_calls": item}}
        events.append({"type": "tool-call-start", "index": i, "delta": delta})
        events.append({"type": "tool-call-end", "index": i})
    return [*events, {"type": "message-end", "delta": {"finish_reason": reason}}]


BUILDERS: Mapping[str, Any] = {
    **dict.fromkeys(CHATS, build_chat),
    "anthropic": build_message,
    "responses": build_items,
    "cohere": build_cohere,
}
PROMPT_ANSWERERS = frozenset({"openai", "databricks", "ovms", "anthropic", "cohere"})
"""Workers that answer a prompt in the form of a conversation, or may do so."""


def list_pairs(clients: Mapping[str, Any]) -> Iterator[Any]:
    """Each worker with each of these clients, and those of prompts."""
    for worker in BUILDERS:
        for client in clients:
            name = f"{worker}-{client}" + ("-one" if clients is CALLERS else "")
            yield pytest.param(worker, client, clients, id=name)
        takes_prompts = worker in PROMPT_ANSWERERS and clients is not CALLERS
        for client in PROMPT_CLIENTS if takes_prompts else ():
            yield pytest.param(worker, client, PROMPT_CLIENTS, id=f"{worker}-{client}-prompt")


def encode_answer(
    worker: str, blocks: Sequence[Block], calls: Sequence[str], reason: str, *, stream: bool
) -> bytes:
    events = BUILDERS[worker](blocks, calls, reason, stream=stream)
    return join_events(worker, events) if stream else msgspec.json.encode(events[0])


def hide_random(written: bytes) -> bytes:
    """What a client gets, without ids and times."""
    return re.sub(
        rb'"(?:item_)?(?:id|signature|call_id)":"[^"]*"|"\w+_at":"?[\w:.+-]*"?', b"", written
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("worker", "client", "clients"), list(list_pairs(READERS)))
@pytest.mark.parametrize("kind", ["reasoning", "refusal"])
def test_content_reaches_the_client_as_its_kind_or_is_reported(
    kind: str, worker: str, client: str, clients: Any, *, stream: bool
) -> None:
    """If the client can't tell it from text, it is reported."""
    if kind not in KINDS[worker]:
        return
    mark, text = ("text", MARK), ("text", TEXT)
    seen = []
    for blocks in ([(kind, MARK), text], [mark, text], [text, mark]):
        data = encode_answer(worker, blocks, (), ENDED.get(worker, "stop"), stream=stream)
        seen.append(
            translate_response(client, WORKERS[worker], data, stream=stream, clients=clients)
        )
    (written, lost), *plain = seen

    is_text = any(hide_random(written) == hide_random(one) for one, _ in plain)
    is_kept = MARK.encode() in written and not is_text
    assert is_kept != any(kind in path for path in set(lost) - set(plain[0][1]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("reason", ["length", "tool_calls"])
@pytest.mark.parametrize("second", ['{"city": "Pa', "{}"], ids=["cut", "complete"])
@pytest.mark.parametrize(
    ("worker", "client", "clients"), list(list_pairs(CALLERS)) + list(list_pairs(CLIENTS))
)
def test_each_tool_call_reaches_the_client_or_is_reported(
    client: str, clients: Any, worker: str, second: str, reason: str, *, stream: bool
) -> None:
    if worker == "anthropic" and not stream and second != "{}":
        return  # half an object has no form in a whole message
    words = LENGTH if reason == "length" else CALLED
    calls = ('{"city": "Rome"}', second)
    data = encode_answer(worker, [("text", TEXT)], calls, words.get(worker, reason), stream=stream)

    written, lost = translate_response(
        client, WORKERS[worker], data, stream=stream, clients=clients
    )

    is_written = [f'"{name}"'.encode() in written for name in NAMES]
    for number, one in enumerate(is_written):
        assert one != (f"response.choices[0].message.tool_calls[{number}]" in lost)
    path = "response.choices[0].message.tool_calls[1].function.arguments"
    takes_objects = client.partition("-")[0] in ("anthropic", "ollama")
    is_damaged = takes_objects and is_written[1] and second != "{}" and reason != "length"
    assert (path in lost) is is_damaged


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_each_block_of_reasoning_keeps_its_own_signature(*, stream: bool) -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "first", "signature": "S1"},
        {"type": "text", "text": "a"},
        {"type": "thinking", "thinking": "second", "signature": "S2"},
        {"type": "redacted_thinking", "data": "R"},
        {"type": "text", "text": "b"},
    ]
    answer = {"id": "m", "content": blocks, "stop_reason": "end_turn", "usage": MESSAGE_USAGE}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "content": [], "usage": {}}},
        *(
            {"type": f"content_block_{step}", "index": i, "content_block": block}
            for i, block in enumerate(blocks)
            for step in ("start", "stop")
        ),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE_USAGE},
        {"type": "message_stop"},
    ]
    data = join_events("anthropic", events) if stream else msgspec.json.encode(answer)

    written, _ = translate_response(
        "anthropic", WORKERS["anthropic"], data, stream=stream, clients=READERS
    )

    places = [written.index(one) for one in (b"first", b"S1", b"second", b"S2", b'"R"', b'"b"')]
    assert places == sorted(places)
