"""Conversations from other protocols are adapted to Anthropic's rules."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.anthropic.endpoints import Anthropic
from protocols.chat.requests import read_chat
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import build_kept_keys_reader
from protocols.core.request import GenerationRequest
from tests.unit.protocols.anthropic.conftest import MakeCall

WORKER = Anthropic()
MARK = {"type": "ephemeral"}


def translate(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the worker's body for an OpenAI client's, and the reported fields."""
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in body.items()}
    request = replace(read_chat(fields), source="openai")
    request, removed = remove_extra_fields(request, build_kept_keys_reader(WORKER)(request))
    losses = (*WORKER.unsupported_parameters(request, {}), *removed)
    encoded: dict[str, Any] = msgspec.json.decode(WORKER.encode_request(request).body)
    return encoded, [f"{one.field}={one.reason}" for one in losses if one.field != "max_tokens"]


def make_loop(call_id: str, arguments: str = "{}", **call: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    sent = {"id": call_id, "type": "function", "function": function, **call}
    return {
        "model": "m",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [sent]},
            {"role": "tool", "content": "1", "tool_call_id": call_id},
        ],
    }


def test_mark_of_the_whole_request_reaches_the_worker() -> None:
    messages = [{"role": "user", "content": "hi"}]

    body, reported = translate({"model": "m", "messages": messages, "cache_control": MARK, "x": 1})

    assert body["cache_control"] == MARK
    assert reported == ["x=dropped"]


def test_marks_for_the_cache_reach_the_worker() -> None:
    body, reported = translate(
        {
            "model": "m",
            "messages": [
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "text", "text": "b", "cache_control": MARK},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": MARK}],
                },
                {"role": "user", "content": "so?", "cache_control": MARK},
            ],
            "tools": [
                {"type": "function", "function": {"name": "f"}, "cache_control": MARK},
                {"type": "function", "function": {"name": "g", "cache_control": MARK}},
            ],
        }
    )

    assert body["system"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b", "cache_control": MARK},
    ]
    assert [turn["content"] for turn in body["messages"]] == [
        [{"type": "text", "text": "hi", "cache_control": MARK}],
        [{"cache_control": MARK, "type": "text", "text": "so?"}],
    ]
    assert [tool["cache_control"] for tool in body["tools"]] == [MARK, MARK]
    assert reported == []


def test_only_the_mark_of_an_object_s_keys_is_written() -> None:
    message = {"role": "user", "content": "hi", "weight": 1, "cache_control": MARK}
    fields = {"model": Raw(b'"m"'), "messages": Raw(msgspec.json.encode([message]))}

    body = msgspec.json.decode(WORKER.encode_request(read_chat(fields)).body)

    assert body["messages"][0]["content"] == [{"cache_control": MARK, "type": "text", "text": "hi"}]


def test_unknown_keys_of_blocks_are_reported_where_the_listener_changes_messages(
    make: MakeCall,
) -> None:
    """Such a request is not passed through, so its blocks are encoded again."""
    block = {"type": "text", "text": "hi", "x": 1, "y": None}
    system = {"role": "system", "content": "B"}
    call = make({"messages": [{"role": "user", "content": [block]}, system], "later": 2})
    request = Anthropic(mid_system="fold").decode_request(call)

    assert isinstance(request, GenerationRequest)

    request = replace(request, source="anthropic")

    losses = WORKER.unsupported_parameters(request, {})
    assert [one.field for one in losses] == ["messages[0].content[0].x"]

    body = msgspec.json.decode(WORKER.encode_request(request).body)
    assert body["later"] == 2
    assert not [name for name in body if "." in name]


def test_marks_of_calls_and_results_reach_the_worker() -> None:
    loop = make_loop("c1", cache_control=MARK)
    loop["messages"][2]["content"] = [{"type": "text", "text": "1", "cache_control": MARK}]

    body, reported = translate(loop)

    assert [turn["content"][0]["cache_control"] for turn in body["messages"][1:]] == [MARK, MARK]
    assert reported == []


@pytest.mark.parametrize(
    ("call_id", "sent"),
    [
        ("toolu_01-A", "toolu_01-A"),
        ("functions.get:0", "functions_get_0_"),
        ("x" * 80, "x" * 48 + "_"),
    ],
)
def test_ids_of_calls_have_only_the_service_s_characters(call_id: str, sent: str) -> None:
    body, _ = translate(make_loop(call_id))

    [call], [result] = (turn["content"] for turn in body["messages"][1:])
    assert call["id"] == result["tool_use_id"]
    assert call["id"].startswith(sent)
    assert len(call["id"]) <= 64


@pytest.mark.parametrize("call_id", ["call_a", "functions.get:0"])
def test_calls_with_the_same_id_get_ids_of_their_own(call_id: str) -> None:
    """In one turn, and in a later one."""
    loop = make_loop(call_id)
    user, turn, result = loop["messages"]
    turn["tool_calls"] *= 2
    loop["messages"] = [user, turn, result, result, turn, result, result]

    body, _ = translate(loop)

    blocks = [block for one in body["messages"][1:] for block in one["content"]]
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(calls)) == 4
    assert [one["tool_use_id"] for one in blocks if one["type"] == "tool_result"] == calls


def test_different_ids_stay_different() -> None:
    first, second = (
        translate(make_loop(name))[0]["messages"][1]["content"][0]["id"] for name in ("a.b", "a:b")
    )
    assert first != second


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {"a": {}}}, {"type": None}])
def test_a_tool_s_schema_is_of_type_object(parameters: Any) -> None:
    function = {"name": "f", "parameters": parameters}
    body, _ = translate(make_loop("c") | {"tools": [{"type": "function", "function": function}]})

    schema = body["tools"][0]["input_schema"]
    assert schema["type"] == "object"
    assert schema.items() >= {k: v for k, v in (parameters or {}).items() if v}.items()


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "1"])
def test_half_written_arguments_become_an_object(arguments: str) -> None:
    body, reported = translate(make_loop("c1", arguments))

    assert body["messages"][1]["content"][0]["input"] == {"arguments": arguments}
    assert reported == ["messages[1].tool_calls[0].function.arguments=approximated"]
