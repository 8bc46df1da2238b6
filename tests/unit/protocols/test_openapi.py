"""Parameter tables and structs as JSON Schema: the schema accepts what the decoder does."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Struct, UnsetType

from protocols import params
from protocols.chat.content_parts import _PART_READERS
from protocols.chat.messages import DEFAULT_MESSAGE_RULES, MessageRules
from protocols.chat.openapi import PART_SCHEMAS, build_messages
from protocols.chat.params import (
    CHAT_EXTENSION_PARAMS,
    CHAT_PARAMS,
    COMPLETION_PARAMS,
    EMBEDDING_PARAMS,
)
from protocols.core.errors import (
    ClientDisconnected,
    InvalidParameter,
    QuotaExceeded,
    RateLimitExceeded,
)
from protocols.openapi import (
    build_error_responses,
    build_event_data,
    build_operation,
    build_param_schema,
    build_properties,
    build_response,
    build_struct_schemas,
    object_of,
    parse_type,
    parse_types,
)
from protocols.params import Param

PARAMS = (
    *(*CHAT_PARAMS, *CHAT_EXTENSION_PARAMS, *COMPLETION_PARAMS, *EMBEDDING_PARAMS),
    Param("a", "a", "float", minimum=0, maximum=1, exclusive_minimum=True, exclusive_maximum=True),
    Param("b", "b", "ints", min_items=1, max_items=2),
    Param("c", "c", "str", nullable=False),
)

NUMBERS = st.sampled_from([-2.5, -2, -1, 0, 0.5, 1, 1.0, 2, 4, 5, 20, 21, 128, 129, 255, 2**70])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "x", "low", "float", "24h"])
VALUES = SCALARS | st.lists(SCALARS, max_size=6) | st.dictionaries(st.just("k"), SCALARS)


def is_accepted(param: Param, value: Any) -> bool:
    if value is None:
        return param.nullable
    try:
        params.check_param(param, value)
    except InvalidParameter:
        return False
    return True


@given(st.sampled_from(PARAMS), VALUES)
def test_param_schema_accepts_what_check_param_accepts(param: Param, value: Any) -> None:
    assert jsonschema_rs.is_valid(build_param_schema(param), value) is is_accepted(param, value)


def test_param_schema_has_default_and_description() -> None:
    schema = build_properties(
        [Param("n", "n", "int", minimum=1, default=1, description="why", nullable=False)]
    )

    assert schema == {"n": {"type": "integer", "minimum": 1, "default": 1, "description": "why"}}


class Inner(Struct):
    a: int
    b: str | None = None
    c: str | UnsetType = UNSET


class Outer(Struct):
    inner: Inner


def test_struct_fields_that_are_always_written_are_required() -> None:
    schema = build_struct_schemas(Outer)

    assert schema["Inner"]["required"] == ["a", "b"]
    assert schema["Outer"]["properties"] == {"inner": {"$ref": "#/components/schemas/Inner"}}


def test_error_responses_are_listed_by_status_without_499() -> None:
    pairs = [(ClientDisconnected, 499), (QuotaExceeded, 403), (RateLimitExceeded, 429)]
    schema = build_error_responses(pairs, {"type": "object"})

    assert list(schema) == ["403", "429"]
    assert schema["403"]["description"] == "The quota is used up; a retry will not help soon."


def test_response_schema_is_json_or_event_stream() -> None:
    event = build_event_data({"type": "object"})

    assert list(build_response({"type": "object"})["content"]) == ["application/json"]
    assert build_response(None, event)["content"] == {
        "text/event-stream": {"schema": object_of({"data": event}, "data")}
    }
    assert build_event_data({}, "[DONE]")["anyOf"][0] == {"const": "[DONE]"}


def test_every_content_part_has_a_schema() -> None:
    assert PART_SCHEMAS.keys() == _PART_READERS.keys()


ARGUMENTS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
CONVERSATIONS: list[tuple[Any, bool]] = [
    ([{"role": "user", "content": "a"}], True),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], True),
    ([{"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}], False),
    ([{"role": "user"}], False),
    ([], False),
    ([{"role": "assistant"}], False),
    ([{"role": "assistant", "refusal": "no"}], True),
    ([{"role": "assistant", "tool_calls": []}], False),
    ([{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}], True),
    ([{"role": "assistant", "tool_calls": ARGUMENTS}], False),
    ([{"role": "tool", "content": "a"}], False),
    ([{"role": "function", "name": "f", "content": None}], True),
]


@pytest.mark.parametrize(("conversation", "allowed"), CONVERSATIONS)
def test_messages_schema_accepts_valid_messages(conversation: Any, allowed: bool) -> None:
    assert jsonschema_rs.is_valid(build_messages(DEFAULT_MESSAGE_RULES), conversation) is allowed


def test_messages_schema_accepts_argument_objects_if_allowed() -> None:
    conversation = [{"role": "assistant", "tool_calls": ARGUMENTS}]

    assert jsonschema_rs.is_valid(
        build_messages(MessageRules(accepts_argument_objects=True)), conversation
    )


def test_type_notation_is_json_schema() -> None:
    types = parse_types(
        """
        Head = {id: string, created?: integer}
        Item = {...Head, role: "user" | "tool" | null, kind: "item", text: (Name | null)[1..]}
        Items = Item[..20] | "auto"
        Roles = "user" | "tool"
        """,
        Name={"type": "string", "minLength": 1},
    )

    assert types["Head"] == {
        "type": "object",
        "properties": {"id": {"type": "string"}, "created": {"type": "integer"}},
        "required": ["id"],
    }

    name = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}
    assert types["Item"] == {
        "type": "object",
        "properties": {
            **types["Head"]["properties"],
            "role": {"anyOf": [{"enum": ["user", "tool"]}, {"type": "null"}]},
            "kind": {"const": "item"},
            "text": {"type": "array", "items": name, "minItems": 1},
        },
        "required": ["id", "role", "kind", "text"],
    }
    assert types["Items"] == {
        "anyOf": [{"enum": ["auto"]}, {"type": "array", "items": types["Item"], "maxItems": 20}]
    }
    assert types["Roles"] == {"enum": ["user", "tool"]}


def test_later_property_replaces_one_of_the_same_name() -> None:
    types = parse_types('A = {x: string, y?: any} B = {...A, x: integer, y: "z"}')

    assert types["B"]["properties"] == {"x": {"type": "integer"}, "y": {"const": "z"}}
    assert types["B"]["required"] == ["x", "y"]


def test_unknown_type_is_a_component_reference() -> None:
    assert parse_type("Usage[] | null") == {
        "anyOf": [
            {"type": "array", "items": {"$ref": "#/components/schemas/Usage"}},
            {"type": "null"},
        ]
    }


def test_operation_without_a_request_schema_has_no_request_body() -> None:
    response, failures = build_response({}), {"400": {"description": "."}}

    assert build_operation("Ask.", response, failures) == {
        "summary": "Ask.",
        "responses": {"200": response, "400": {"description": "."}},
    }

    body = build_operation("Ask.", response, failures, request={"type": "object"})["requestBody"]
    assert body == {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }


def test_tool_message_needs_no_name() -> None:
    conversation = [{"role": "tool", "content": "a", "tool_call_id": "c"}]

    assert jsonschema_rs.is_valid(build_messages(DEFAULT_MESSAGE_RULES), conversation)
