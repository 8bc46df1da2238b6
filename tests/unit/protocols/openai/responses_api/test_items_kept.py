"""Items of a Responses API worker reach a client of that API unchanged."""

from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import aggregate
from protocols.core.events import ResponseExtra
from protocols.core.interfaces import ClientRequest, PassthroughRequest, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.openai import OpenAI
from protocols.openai.responses_api.decoder import ResponsesDecoder
from tests.support.path_routers import get_path_router

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
    match = get_path_router(OpenAI()).find_endpoint("POST", "/v1/responses")
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


CITATION = {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 2}


def make_message(text: str, *annotations: dict[str, Any], **keys: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": list(annotations)}]
    item = {name: one for name, one in MESSAGE.items() if name != "phase"}
    return {**item, "id": f"msg_{text}", "content": content, **keys}


def list_texts(output: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    return [(part["text"], part["annotations"]) for one in output for part in one["content"]]


@pytest.mark.parametrize("stream", [True, False])
def test_annotations_of_a_text_are_kept(*, stream: bool) -> None:
    passed = pass_through("both", stream=stream)
    items = [make_message("one", CITATION, phase="commentary"), make_message("two", CITATION)]

    output = read_output(passed, write_answer(items, stream=stream, summarizes=False))

    assert list_texts(output) == [("one", [CITATION]), ("two", [CITATION])]
    assert [one.get("phase") for one in output] == ["commentary", None]


def test_annotations_of_a_stream_have_events() -> None:
    passed = pass_through("both", stream=True)
    data = write_answer([make_message("hi", CITATION, CITATION)], stream=True, summarizes=False)
    reader = passed.create_reader()
    events = [*reader.feed([data])[1], *reader.close()[1]]
    assert passed.create_encoder is not None

    written = passed.create_encoder().encode_events(events)

    assert written.count(b'"type":"response.output_text.annotation.added"') == 2
    assert b'"annotation_index":1' in written


TWO_PARTS = {
    **make_message("4"),
    "content": [*make_message("4", CITATION)["content"], *make_message("5", CITATION)["content"]],
}


@pytest.mark.parametrize("stream", [True, False])
def test_messages_and_their_parts_stay_apart_with_their_annotations(*, stream: bool) -> None:
    passed = pass_through("both", stream=stream)
    items = [make_message("one"), make_message("two", CITATION), CALL, TWO_PARTS]
    data = write_answer(items, stream=stream, summarizes=False)

    output = read_output(passed, data)

    assert [one["type"] for one in output] == ["message", "message", "function_call", "message"]
    assert list_texts([one for one in output if "content" in one]) == [
        ("one", []), ("two", [CITATION]), ("4", [CITATION]), ("5", [CITATION])
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
def test_annotations_of_a_text_that_continues_another_are_reported_to_other_clients(
    *, stream: bool
) -> None:
    """They count characters of their own text, which is a part of the whole there."""
    items = [make_message("one"), make_message("two", CITATION), CALL, TWO_PARTS]
    data = write_answer(items, stream=stream, summarizes=False)
    decoder = ResponsesDecoder(GenerationRequest(model="m", kind="chat", source="anthropic"))

    lost = [
        one for one in (*decoder.feed(data), *decoder.close()) if isinstance(one, ResponseExtra)
    ]

    assert [path for one in lost for path, _ in one.values if path != ("x",)] == [
        ("output[1].content[0]", "annotations"),
        ("output[3].content[0]", "annotations"),
        ("output[3].content[1]", "annotations"),
    ]
