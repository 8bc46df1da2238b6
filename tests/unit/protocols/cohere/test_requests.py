"""Conversations of Cohere's clients become the internal request."""

from typing import Any

import pytest
from msgspec import Raw

from protocols.core.errors import InvalidParameter
from protocols.core.extra import remove_extra_fields
from protocols.core.request import (
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
)
from tests.unit.protocols.cohere.conftest import COHERE, TURNS, MakeCall, decode_request

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RESULT = {"role": "tool", "tool_call_id": "a", "content": "5"}
TOOL_TURNS = [*TURNS, {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [CALL]}]


def test_conversation_has_its_parts_in_order(make: MakeCall) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/a.png", "detail": "low"}}
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, image]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
        TOOL_TURNS[1],
        RESULT,
    ]

    request = decode_request(make({"messages": turns}))

    assert request.messages == (
        Message("system", (TextPart("s"),)),
        Message("user", (TextPart("hi"), ImagePart("https://x/a.png", "low"))),
        Message("assistant", (ReasoningPart("hm"),)),
        Message("assistant", (TextPart("I ask."),), tool_calls=(ToolCall("a", "f", "{}"),)),
        Message("tool", (TextPart("5"),), tool_call_id="a"),
    )


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"data": '{"t": 5}'}, '{"t": 5}'),
        ({"data": {"t": 5}}, '{"t":5}'),
        ({"id": "d", "data": {"t": 5}}, '{"id":"d","data":{"t":5}}'),
    ],
)
def test_document_of_a_tool_is_text_with_all_that_it_has(
    make: MakeCall, document: Any, text: str
) -> None:
    parts = [{"type": "document", "document": document}]

    request = decode_request(make({"messages": [*TOOL_TURNS, {**RESULT, "content": parts}]}))

    assert request.messages[-1].parts == (TextPart(text),)


def test_documents_stand_before_the_users_last_text(make: MakeCall) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "so"}, *TURNS]
    sent = ["a", {"data": {"t": "b"}}]

    request = decode_request(make({"messages": turns, "documents": sent}))

    text = '<document>\na\n</document>\n<document>\n{"t":"b"}\n</document>\n'
    assert [one.text for one in request.messages] == ["hi", "so", f"{text}hi"]

    [lost] = remove_extra_fields(request)[1]
    assert (lost.field, lost.reason) == ("documents.citations", "dropped")


def test_documents_without_citations_are_no_loss(make: MakeCall) -> None:
    options = {"documents": ["a"], "citation_options": {"mode": "OFF"}}

    request = decode_request(make(options))

    assert remove_extra_fields(request)[1] == ()
    assert request.extra == {}


def test_documents_without_a_message_of_the_user_are_one(make: MakeCall) -> None:
    turns = [{"role": "system", "content": "s"}]

    request = decode_request(make({"messages": turns, "documents": ["a"]}))

    assert [one.role for one in request.messages] == ["system", "user"]


def test_parameters(make: MakeCall) -> None:
    request = decode_request(
        make(
            {
                "temperature": 0.5,
                "p": 0.9,
                "k": 0,
                "seed": 7,
                "frequency_penalty": 0.1,
                "presence_penalty": 0.2,
                "max_tokens": 5,
                "stop_sequences": ["x"],
                "stream": True,
                "priority": 3,
                "logprobs": True,
                "thinking": {"type": "enabled", "token_budget": 9},
            }
        )
    )

    assert dict(request.set_fields) | {"messages": (), "provided_fields": ()} == {
        "model": "m",
        "kind": "chat",
        "messages": (),
        "provided_fields": (),
        "sampling.temperature": 0.5,
        "sampling.top_p": 0.9,
        "sampling.seed": 7,
        "sampling.frequency_penalty": 0.1,
        "sampling.presence_penalty": 0.2,
        "stopping.max_tokens": 5,
        "stopping.stop": ("x",),
        "stream": True,
        "priority": 3,
        "logprobs.top": 0,
        "reasoning.include": True,
        "reasoning.budget": 9,
        "response_options.matched_stop": True,
    }


def test_priority_above_the_lowest_is_clamped(make: MakeCall) -> None:
    request = decode_request(make({"priority": 999}))

    assert request.priority == 255
    assert request.clamped_fields == {"priority": "999 to 255"}


def test_disabled_thinking_is_no_effort_and_is_hidden(make: MakeCall) -> None:
    request = decode_request(make({"thinking": {"type": "disabled"}}))

    assert request.reasoning is not None
    assert request.reasoning.effort == "none"
    assert request.response_options.hides_reasoning


@pytest.mark.parametrize("strict", [True, False])
def test_strict_tools_make_each_tool_strict(make: MakeCall, *, strict: bool) -> None:
    request = decode_request(make({"tools": TOOLS, "strict_tools": strict}))

    assert [tool.strict for tool in request.tools] == [True if strict else None]


@pytest.mark.parametrize(("word", "choice"), [("REQUIRED", "required"), ("NONE", "none")])
def test_tool_choice(make: MakeCall, word: str, choice: str) -> None:
    assert decode_request(make({"tools": TOOLS, "tool_choice": word})).tool_choice == choice


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonObjectFormat()),
        ({"type": "json_object", "json_schema": {"a": 1}}, JsonSchemaFormat(Raw(b'{"a":1}'))),
    ],
)
def test_response_format(make: MakeCall, form: Any, output: Any) -> None:
    assert decode_request(make({"response_format": form})).output == output


def test_fields_of_cohere_alone_are_extra_fields(make: MakeCall) -> None:
    request = decode_request(
        make(
            {
                "safety_mode": "STRICT",
                "citation_options": {"mode": "FAST"},
                "response_format": {"type": "json_object", "schema": {}},
                "thinking": {"type": "enabled", "depth": 3},
                "raw_prompting": False,
                "k": None,
            }
        )
    )

    assert {name: bytes(raw) for name, raw in request.extra.items()} == {
        "safety_mode": b'"STRICT"',
        "citation_options": b'{"mode":"FAST"}',
        "response_format.schema": b"{}",
        "thinking.depth": b"3",
        "raw_prompting": b"false",
    }


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "custom", "custom": {"name": "f", "input": ""}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].type",
        ),
        ({"documents": "x"}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": [{}]}, "documents[0].data"),
        ({"documents": [{"data": 5}]}, "documents[0].data"),
        ({"documents": ["x"] * 10_001}, "documents"),
        ({"citation_options": {"mode": "BOLD"}}, "citation_options.mode"),
        ({"citation_options": []}, "citation_options"),
        ({"safety_mode": 5}, "safety_mode"),
        ({"safety_mode": "SOFT"}, "safety_mode"),
        ({"response_format": {}}, "response_format.type"),
        (
            {"response_format": {"type": "text", "json_schema": {}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": 5}},
            "response_format.json_schema",
        ),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "token_budget": "5"}}, "thinking.token_budget"),
        ({"thinking": {"type": "enabled", "token_budget": 0}}, "thinking.token_budget"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "AUTO"}, "tool_choice"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"model": ""}, "model"),
    ],
)
def test_error_names_the_field(make: MakeCall, changed: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        COHERE.decode_request(make(changed))

    assert caught.value.param == param


def test_unknown_keys_of_the_conversation_stand_beside_their_objects(make: MakeCall) -> None:
    turns = [
        {**TURNS[0], "mood": "x"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "depth": 1}],
            "citations": [{"start": 0}],
        },
    ]

    request = decode_request(make({"messages": turns}))

    lost = {one.field for one in remove_extra_fields(request)[1]}
    assert lost == {
        "messages[0].mood",
        "messages[1].citations",
        "messages[1].content[0].depth",
    }
    assert request.extra == {}
