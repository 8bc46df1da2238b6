"""Tool calls in unusual forms of workers are decoded."""

import json
from typing import Any

import pytest

from protocols.chat.tool_call_assembler import ToolCallAssembler
from protocols.chat.wire_responses import WireDelta, decode_response
from protocols.core.errors import StreamBroken
from protocols.core.events import Event, ResponseExtra, ToolCallDelta, ToolCallStart


def decode_deltas(*deltas: dict[str, Any]) -> list[Event]:
    calls = ToolCallAssembler(0)
    events: list[Event] = []
    for delta in deltas:
        events += calls.read_delta(read_delta(delta))
    return [*events, *calls.close()]


def read_delta(delta: dict[str, Any]) -> WireDelta:
    """The delta, with its unknown keys put aside as in a worker's chunk."""
    chunk = json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()
    choices = decode_response(chunk).choices
    assert choices is not None
    assert choices[0].delta is not None
    return choices[0].delta


def make_delta(**fields: Any) -> dict[str, Any]:
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {"tool_calls": [{**fields, "function": function}]}


ONE = [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, "1"), ToolCallDelta(0, 0, "2")]


@pytest.mark.parametrize(
    "deltas",
    [
        [make_delta(id="a", name="f", arguments="1"), make_delta(id="a", arguments="2")],
        [make_delta(id="a", name="f", arguments="1"), make_delta(arguments="2")],
        [make_delta(id="a", name="f", arguments="1"), make_delta(id="a", name="f", arguments="2")],
        [make_delta(id="a", name="f", arguments="1"), {"tool_calls": [{"index": 0}]},
         make_delta(index=0, arguments="2")],
    ],
)  # fmt: skip
def test_deltas_of_one_tool_call_are_joined(deltas: list[dict[str, Any]]) -> None:
    assert decode_deltas(*deltas) == ONE


def test_tool_calls_without_index_and_id_are_distinguished_by_name() -> None:
    events = decode_deltas(make_delta(name="f", arguments="1"), make_delta(name="g", arguments="2"))
    assert events == [
        ToolCallStart(0, 0, "call_0_0", "f"),
        ToolCallDelta(0, 0, "1"),
        ToolCallStart(0, 1, "call_0_1", "g"),
        ToolCallDelta(0, 1, "2"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [([1], "[1]"), (5, "5"), (0, "0"), (False, "false"), ({"x": 1}, '{"x":1}'), ([], "[]")],
    ids=str,
)
def test_arguments_of_another_type_are_written_as_json(value: Any, text: str) -> None:
    """A client would run a call without its arguments otherwise."""
    called = [ToolCallStart(0, 0, "a", "f"), ToolCallDelta(0, 0, text)]

    assert decode_deltas(make_delta(id="a", name="f", arguments=value)) == called
    custom = {"tool_calls": [{"id": "a", "custom": {"name": "f", "input": value}}]}
    wrapped = json.dumps({"input": text}, separators=(",", ":"))
    assert decode_deltas(custom) == [called[0], ToolCallDelta(0, 0, wrapped)]


def test_a_piece_of_arguments_that_is_a_number_keeps_its_place() -> None:
    events = decode_deltas(
        make_delta(index=0, id="a", name="f", arguments='{"x": '),
        make_delta(index=0, arguments=5),
        make_delta(index=0, arguments="}"),
    )

    pieces = [one.text for one in events if isinstance(one, ToolCallDelta)]
    assert "".join(pieces) == '{"x": 5}'


def test_legacy_function_call_is_decoded() -> None:
    events = decode_deltas({"function_call": {"name": "f"}}, {"function_call": {"arguments": "{}"}})
    assert events == [ToolCallStart(0, 0, "call_0_0", "f"), ToolCallDelta(0, 0, "{}")]


def test_custom_tool_call_becomes_that_of_a_function_with_json_arguments() -> None:
    """Clients that know of no custom tools read the arguments of every call as JSON."""
    events = decode_deltas(
        {"tool_calls": [{"index": 0, "id": "a", "custom": {"name": "f", "input": 'g"'}}]},
        {"tool_calls": [{"index": 0, "custom": {"input": "o"}}]},
        {"tool_calls": [{"index": 0, "id": "b", "custom": {"name": "g", "input": "x"}}]},
    )
    assert events == [
        ToolCallStart(0, 0, "a", "f"),
        ToolCallDelta(0, 0, '{"input":"g\\"o"}'),
        ToolCallStart(0, 1, "b", "g"),
        ToolCallDelta(0, 1, '{"input":"x"}'),
    ]


def make_unknown(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"type": "mcp", **fields}]}


def read_unknown(*deltas: dict[str, Any]) -> list[dict[tuple[str, ...], Any]]:
    """The keys of each call of an unknown type, in their order."""
    events = decode_deltas(*deltas)
    assert [one.call_index for one in events if isinstance(one, ResponseExtra)] == [
        *range(len(events))
    ]
    return [dict(one.values) for one in events if isinstance(one, ResponseExtra)]


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ({"a": "x"}, {"a": "y"}, {"a": "xy"}),
        ({"name": "x"}, {"name": "x"}, {"name": "x"}),
        ({"a": [1]}, {"a": [2]}, {"a": [1, 2]}),
        ({"a": 1}, {"a": None}, {"a": 1}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, {"a": {"b": "xy"}}),
    ],
    ids=str,
)
def test_pieces_of_a_call_of_an_unknown_type_are_joined(
    first: dict[str, Any], second: dict[str, Any], wanted: dict[str, Any]
) -> None:
    pieces = {"index": 0, "id": "c", "mcp": first}, {"index": 0, "mcp": second}

    [call] = read_unknown(make_unknown(**pieces[0]), {"tool_calls": [pieces[1]]})

    assert call == {("id",): "c", ("type",): "mcp", ("mcp",): wanted}


def test_calls_of_an_unknown_type_with_one_index_stay_apart() -> None:
    calls = read_unknown(
        make_unknown(index=0, id="a", mcp={"x": "1"}), make_unknown(index=0, id="b", mcp={"x": "2"})
    )

    assert [(one["id",], one["mcp",]) for one in calls] == [("a", {"x": "1"}), ("b", {"x": "2"})]


def test_a_call_of_an_unknown_type_keeps_its_arguments() -> None:
    [call] = read_unknown(make_unknown(function={"arguments": "{}"}))

    assert call == {("type",): "mcp", ("function", "arguments"): "{}"}


def test_a_call_of_an_unknown_type_does_not_hide_one_without_a_name() -> None:
    with pytest.raises(StreamBroken):
        decode_deltas(make_unknown(index=0), make_delta(index=1, arguments="{}"))
