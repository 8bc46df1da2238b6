"""Items of a Responses API worker reach a client of that API unchanged."""

from typing import Any

import msgspec
import pytest

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.aggregate import aggregate
from protocols.core.events import ResponseExtra
from protocols.core.interfaces import ClientRequest, PassthroughRequest, ResponseContext
from protocols.openai import OpenAI

REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "E"}
SUMMARY = REASONING | {"summary": [{"type": "summary_text", "text": "so"}]}
TWO_PARTS = REASONING | {
    "summary": [{"type": "summary_text", "text": text} for text in ("**A**", "**B**")]
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "f",
    "arguments": "{}",
    "status": "completed",
    "x": 1,
}
MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "phase": "final",
    "content": [{"type": "output_text", "text": "hi", "annotations": []}],
}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
BODY: dict[str, Any] = {
    "model": "m",
    "input": "hi",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "tools": [TOOL],
}


def pass_through(api: Any, profile: str | None = None, **fields: Any) -> PassthroughRequest:
    worker = OpenAI(profile, worker_api=api)
    match = PathRouter([AdapterMount(OpenAI())]).find_endpoint("POST", "/v1/responses")
    body = msgspec.json.encode(BODY | fields)
    call = ClientRequest(match.endpoint, match.params, {}, "", body, "/v1/responses")
    response_context = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)
    passed = worker.prepare_passthrough(OpenAI(), call, response_context)
    assert passed is not None
    return passed


def write_answer(items: list[dict[str, Any]], *, stream: bool, summarizes: bool) -> bytes:
    """Build a worker's response with these items; ``summarizes`` adds deltas of summaries."""
    response = {"id": "resp_w", "model": "w", "status": "completed", "output": items}
    if not stream:
        return msgspec.json.encode(response)
    events: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = {"output_index": index}
        events.append({"type": "response.output_item.added", **place, "item": item})
        for i, part in enumerate(item.get("summary", ()) if summarizes else ()):
            delta = {"type": "response.reasoning_summary_text.delta", "delta": part["text"]}
            events.append({**delta, **place, "item_id": item["id"], "summary_index": i})
        events.append({"type": "response.output_item.done", **place, "item": item})
    events.append({"type": "response.completed", "response": response})
    return b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in events)


def read_output(passed: PassthroughRequest, data: bytes) -> list[dict[str, Any]]:
    """Return the items of the client's final response, and of a stream's events."""
    reader = passed.create_reader()
    events = [*reader.feed([data])[1], *reader.close()[1]]
    assert passed.create_encoder is not None
    encoder = passed.create_encoder()
    if not passed.request.stream:
        output = msgspec.json.decode(encoder.encode_unary(aggregate(events)).body)["output"]
        return list(output)
    blocks = encoder.encode_events(events).split(b"\n\n")[:-1]
    sent = [msgspec.json.decode(one.partition(b"data: ")[2]) for one in blocks]
    done = [one["item"] for one in sent if one["type"] == "response.output_item.done"]
    assert sent[-1]["response"]["output"] == done
    return done


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("item", [REASONING, SUMMARY, TWO_PARTS])
@pytest.mark.parametrize("api", ["both", "responses"])
@pytest.mark.parametrize("summarizes", [True, False])
def test_encrypted_reasoning_is_kept_with_its_id(
    api: str, item: dict[str, Any], *, stream: bool, summarizes: bool
) -> None:
    passed = pass_through(api, stream=stream, reasoning={"summary": "auto"})
    data = write_answer([item, MESSAGE], stream=stream, summarizes=summarizes)

    reasoning, message = read_output(passed, data)
    assert {name: reasoning[name] for name in item} == item
    assert message["phase"] == "final"


@pytest.mark.parametrize("stream", [True, False])
def test_items_keep_their_order_and_their_keys(*, stream: bool) -> None:
    """Each reasoning item precedes the call that it led to."""
    second = REASONING | {"id": "rs_2", "encrypted_content": "F"}
    other = CALL | {"id": "fc_2", "call_id": "c2", "x": 2}
    passed = pass_through("both", stream=stream)
    data = write_answer([REASONING, CALL, second, other], stream=stream, summarizes=False)

    output = read_output(passed, data)
    kinds = [one["type"] for one in output]

    assert kinds == ["reasoning", "function_call", "reasoning", "function_call"]
    assert [one.get("encrypted_content") for one in output] == ["E", None, "F", None]
    assert [one.get("x") for one in output] == [None, 1, None, 2]


def test_keys_of_items_are_reported_by_the_item_s_place() -> None:
    reader = pass_through("both").create_reader()
    data = write_answer([MESSAGE, REASONING], stream=False, summarizes=False)
    events = [*reader.feed([data])[1], *reader.close()[1]]

    paths = [one.path for one in events if isinstance(one, ResponseExtra)]
    assert paths == ["response.output[0]", "response.output[1]"]


@pytest.mark.parametrize("profile", [None, "vllm"])
def test_encrypted_reasoning_returns_to_the_worker(profile: str | None) -> None:
    history = [{"role": "user", "content": "hi"}, REASONING, {"role": "user", "content": "so?"}]
    passed = pass_through("both", profile, input=history)

    body = msgspec.json.decode(passed.upstream_request.body)
    assert body["input"][1] == REASONING
