"""A key that nobody listed, at any level of a worker's response, is kept or reported.

Each object of a response of each worker protocol gets such a key in turn, in whole responses and in
streams, for a client of each protocol.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from gateway.routing.paths import AdapterMount, PathRouter
from gateway.runtime.build import build_adapter
from protocols.core.aggregate import aggregate
from protocols.core.events import Event, ResponseExtra
from protocols.core.extra import list_paths
from protocols.core.interfaces import ClientRequest, ResponseContext
from tests.property.test_unknown_keys import HEADERS, KEY, VALUE, add_key, clock, list_places

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT_USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 1},
}
CHAT_ANSWER: dict[str, Any] = {
    "id": "a",
    "object": "chat.completion",
    "created": 7,
    "model": "w",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "tool_calls": [CALL]},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": CHAT_USAGE,
}


def make_chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "a", "object": "chat.completion.chunk", "model": "w", "choices": [choice]}


CHAT_STREAM: list[dict[str, Any]] = [
    make_chunk({"role": "assistant", "content": ""}),
    make_chunk({"content": "h"}),
    make_chunk({"content": "i"}),
    make_chunk({"tool_calls": [{"index": 0, **CALL}]}),
    make_chunk({"tool_calls": [{"index": 0, "function": {"arguments": " "}}]}),
    make_chunk({}, "tool_calls"),
    {"id": "a", "model": "w", "choices": [], "usage": CHAT_USAGE},
]
MESSAGE_USAGE = {"input_tokens": 1, "output_tokens": 2}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "w",
    "content": [
        {"type": "thinking", "thinking": "so", "signature": "s"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": MESSAGE_USAGE,
}
MESSAGE_STREAM: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE_USAGE},
    {"type": "message_stop"},
]
EVENT_LEVEL = frozenset(
    {"message_start", "content_block_start", "content_block_delta", "content_block_stop",
     "message_stop"}
)  # fmt: skip
"""Events that only carry an object: their own keys are framing."""
ITEMS: dict[str, Any] = {
    "id": "resp_1",
    "model": "w",
    "status": "completed",
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "E"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hi", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
    ],
}
CLIENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
    "databricks": (
        "/serving-endpoints/m/invocations",
        {"messages": [{"role": "user", "content": "hi"}]},
    ),
    "ovms": ("/v3/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}
WORKERS: Mapping[str, Any] = {
    "openai": build_adapter("openai", "vllm", {}),
    "ovms": build_adapter("ovms", None, {}),
    "databricks": build_adapter("databricks", None, {}),
    "tgi": build_adapter("tgi", None, {}),
    "anthropic": build_adapter("anthropic", None, {}),
    "responses": build_adapter("openai", "openai", {"worker_api": "responses"}),
}
WHOLE: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("openai", "ovms", "databricks", "tgi"), CHAT_ANSWER),
    "anthropic": MESSAGE,
    "responses": ITEMS,
}
STREAMS: Mapping[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("openai", "ovms", "databricks", "tgi"), CHAT_STREAM),
    "anthropic": MESSAGE_STREAM,
}
NO_ROOM = {"responses": (("output", 1, "content", 0), ())}
"""The objects whose keys are not looked at: parts of messages, and the response of items."""


def list_whole_cases() -> Iterator[Any]:
    for name, body in WHOLE.items():
        for place in list_places(body):
            if place not in NO_ROOM.get(name, ()):
                yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


def list_stream_cases() -> Iterator[Any]:
    for name, events in STREAMS.items():
        for place in list_places(events):
            event = events[place[0]]
            if len(place) > 1 or event.get("type") not in EVENT_LEVEL:
                yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


def play(client_name: str, worker_name: str, data: bytes, *, stream: bool) -> tuple[bytes, bool]:
    """What the client gets, and whether the key is to be reported."""
    client = build_adapter("openai" if client_name == "responses" else client_name, None, {})
    path, fields = CLIENTS[client_name]
    more = {"stream_options": {"include_usage": True}} if stream and client_name == "openai" else {}
    body = msgspec.json.encode({"model": "m", "stream": stream, **fields, **more})
    endpoint = PathRouter([AdapterMount(client)]).find_endpoint("POST", path)
    call = ClientRequest(endpoint.endpoint, endpoint.params, HEADERS, "", body, path, "r")
    request: Any = client.decode_request(call)
    decoder = WORKERS[worker_name].create_decoder(request)
    events: list[Event] = [*decoder.feed(data), *decoder.close()]
    encoder = client.create_encoder(call, request, ResponseContext("r", 1, "m", "1", "w", clock))
    source = getattr(encoder, "extra_source", None)
    lost = [one for one in events if isinstance(one, ResponseExtra) and one.source != source]
    paths = [path for one in lost for path in list_paths(one.path, dict(one.values))]
    if stream:
        written = encoder.encode_events(events)
    else:
        written = encoder.encode_unary(aggregate(events)).body
    return written, any(KEY in path for path in paths)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_whole_cases()))
def test_an_unknown_key_of_a_whole_response_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    data = msgspec.json.encode(add_key(WHOLE[worker], place))
    written, is_reported = play(client, worker, data, stream=False)

    assert (VALUE.encode() in written) != is_reported


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("worker", "place"), list(list_stream_cases()))
def test_an_unknown_key_of_a_stream_is_kept_or_reported(
    worker: str, place: tuple[Any, ...], client: str
) -> None:
    events = list(STREAMS[worker])
    events[place[0]] = add_key(events[place[0]], place[1:])
    data = b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in events)
    if worker != "anthropic":
        data += b"data: [DONE]\n\n"
    written, is_reported = play(client, worker, data, stream=True)

    assert (VALUE.encode() in written) != is_reported
