"""Parallel tool calls stay separate, whatever their ids and indices are."""

import json
from typing import Any

import pytest

from protocols.anthropic.decoder import MessageDecoder
from protocols.chat.decoder import GenerationDecoder
from protocols.core.aggregate import aggregate
from protocols.core.errors import StreamBroken
from protocols.core.interfaces import ResponseDecoder
from protocols.core.request import GenerationRequest
from protocols.openai.responses_api.decoder import ResponsesDecoder

REQUEST = GenerationRequest(model="m", kind="chat")


def read_calls(decoder: ResponseDecoder, data: bytes) -> list[tuple[str, str, str]]:
    events = [*decoder.feed(data), *decoder.close()]
    [choice] = aggregate(events).choices
    return [(call.id, call.name, call.arguments) for call in choice.tool_calls]


def build_call(arguments: str | None, *, name: str | None = "f", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {k: v for k, v in function.items() if v is not None}}


def decode_message(calls: Any) -> list[tuple[str, str, str]]:
    choice = {"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}
    return read_calls(GenerationDecoder(REQUEST), json.dumps({"choices": [choice]}).encode())


def decode_deltas(*deltas: Any) -> list[tuple[str, str, str]]:
    choices: list[Any] = [{"delta": {"tool_calls": calls}} for calls in deltas]
    choices.append({"delta": {}, "finish_reason": "tool_calls"})
    chunks = [b"data: %b\n\n" % json.dumps({"choices": [one]}).encode() for one in choices]
    return read_calls(GenerationDecoder(REQUEST), b"".join([*chunks, b"data: [DONE]\n\n"]))


TWO = [("call_a", "f", '{"x":1}'), ("call_0_1", "f", '{"x":2}')]


@pytest.mark.parametrize(
    "place", [{}, {"index": 0}, {"index": 1}, {"index": None}], ids=["none", "0", "1", "null"]
)
def test_calls_of_a_message_with_one_id_and_one_index_are_two(place: dict[str, Any]) -> None:
    calls = [build_call(f'{{"x":{x}}}', id="call_a", **place) for x in (1, 2)]

    assert decode_message(calls) == TWO


def test_calls_without_any_id_are_two() -> None:
    calls = [build_call(f'{{"x":{x}}}') for x in (1, 2)]

    assert decode_message(calls) == [("call_0_0", "f", '{"x":1}'), ("call_0_1", "f", '{"x":2}')]


def test_made_up_id_that_a_worker_uses_becomes_another() -> None:
    calls = [build_call("{}", id=one) for one in ("call_0_1", "call_0_1", "call_0_1")]

    assert [one[0] for one in decode_message(calls)] == ["call_0_1", "call_0_1_2", "call_0_2"]


@pytest.mark.parametrize("place", [{}, {"index": 0}], ids=["none", "0"])
@pytest.mark.parametrize("are_together", [True, False])
def test_complete_calls_of_a_stream_with_one_id_are_two(
    place: dict[str, Any], *, are_together: bool
) -> None:
    calls = [build_call(f'{{"x":{x}}}', id="call_a", **place) for x in (1, 2)]

    assert decode_deltas(*([calls] if are_together else [[one] for one in calls])) == TWO


def test_calls_of_a_stream_with_one_index_and_two_ids_are_two() -> None:
    deltas = [
        [build_call('{"x"', id="a", index=0)],
        [build_call(":1}", name=None, index=0)],
        [build_call('{"x"', id="b", index=0)],
        [build_call(":2}", name=None, index=0)],
    ]

    assert decode_deltas(*deltas) == [("a", "f", '{"x":1}'), ("b", "f", '{"x":2}')]


def test_name_and_id_that_each_fragment_repeats_are_one_call() -> None:
    deltas = [
        [build_call(piece, id="a", index=0)]
        for piece in ('{"x":{"y":1}', ',"z":"}', '"}', "", None)
    ]

    assert decode_deltas(*deltas) == [("a", "f", '{"x":{"y":1},"z":"}"}')]


def test_single_call_that_is_no_list() -> None:
    """TGI 2.x and 3.0 send the call itself in a delta."""
    call = build_call('{"x":1}', id="a", index=0)

    assert decode_message(call) == [("a", "f", '{"x":1}')]
    assert decode_deltas(call) == [("a", "f", '{"x":1}')]


def test_nameless_call_that_another_replaces_is_an_error() -> None:
    nameless = build_call('{"x":1}', name=None, id="a", index=0)

    with pytest.raises(StreamBroken):
        decode_deltas([nameless], [build_call("{}", id="b", index=0)])


def test_anthropic_blocks_with_one_id_and_one_index_are_two() -> None:
    events = [
        {"type": "message_start", "message": {"id": "m"}},
        *(
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {
                    "type": "tool_use",
                    "id": "call_a",
                    "name": "f",
                    "input": {"x": x},
                },
            }
            for x in (1, 2)
        ),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]
    data = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)

    assert read_calls(MessageDecoder(REQUEST), data) == TWO


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_a_response_with_one_id_are_two(*, stream: bool) -> None:
    items = [
        {"type": "function_call", "id": "fc_1", "call_id": "call_a", "name": "f", "arguments": text}
        for text in ('{"x":1}', '{"x":2}')
    ]
    response = {"id": "r", "status": "completed", "output": items}
    data = json.dumps(response).encode()
    if stream:
        events = [
            {"type": f"response.output_item.{kind}", "output_index": index, "item": item}
            for index, item in enumerate(items)
            for kind in ("added", "done")
        ]
        events.append({"type": "response.completed", "response": response})
        data = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)

    assert read_calls(ResponsesDecoder(REQUEST), data) == TWO


def test_blank_fragment_with_the_name_of_a_complete_call_begins_no_other() -> None:
    assert decode_deltas(
        [build_call('{"x":1}', id="a", index=0)], [build_call("\n", id="a", index=0)]
    ) == [("a", "f", '{"x":1}\n')]
