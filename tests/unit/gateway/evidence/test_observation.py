"""The properties of a recorded request that a comparison uses."""

from typing import Any

import pytest

from gateway.evidence.observation import describe_prompt, observe
from gateway.evidence.request_options import fits_schema
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedLoss,
    RecordedRequest,
    RecordedTiming,
    RecordedToolCall,
    RecordedUsage,
)

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def record(
    body: Any = None, choice: RecordedChoice | None = None, **fields: Any
) -> RecordedRequest:
    response = RecordedAnswer([choice or RecordedChoice(text="Hello", finish_reason="eos")])
    values: dict[str, Any] = {"status": 200, "outcome": "ok", "request": body, "answer": response}
    return RecordedRequest(id="r", at=1.0, **(values | fields))


def test_response_is_measured() -> None:
    one = observe(
        record(
            {"max_tokens": 3},
            usage=RecordedUsage(5, 4, "worker"),
            losses=[RecordedLoss("seed", "dropped")],
            timing=RecordedTiming(first_token=0.2, duration=2.0),
            stream=True,
        )
    )

    assert one.is_answered
    assert (one.text, one.completion_tokens, one.exceeds_limit) == ("Hello", 4, True)
    assert (one.duration, one.first_token) == (2.0, 0.2)
    assert one.losses == {"seed"}
    assert one.finish_reasons == ("eos",)
    assert (one.is_empty, one.declines) == (False, False)
    assert (one.calls_tools, one.is_json, one.ignores_stop) == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": 400, "outcome": "client_error"}, (True, False)),
        ({"status": 502, "outcome": "worker_error"}, (False, True)),
        ({"status": 200, "outcome": "truncated"}, (False, True)),
    ],
)
def test_refused_and_failed_requests_have_no_measures_of_a_response(
    fields: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    one = observe(record({"stop": "H", "tools": [{"name": "f"}]}, **fields))
    assert (one.is_refused, one.is_failed) == expected
    assert (one.is_empty, one.ignores_stop, one.calls_tools, one.duration) == (None,) * 4


@pytest.mark.parametrize(
    "body",
    [
        {"stop": "lo"},
        {"stop": ["x", "lo"]},
        {"stop_sequences": ["lo"]},
        {"parameters": {"stop": ["lo"]}},
        {"options": {"stop": ["lo"]}},
    ],
)
def test_stop_string_in_the_text_is_found_in_every_protocol(body: dict[str, Any]) -> None:
    assert observe(record(body)).ignores_stop is True
    assert observe(record(body, RecordedChoice(text="Hel"))).ignores_stop is False
    assert observe(record(body | {"include_stop_str_in_output": True})).ignores_stop is None


@pytest.mark.parametrize(
    "body",
    [
        {"max_completion_tokens": 2},
        {"max_output_tokens": 2},
        {"parameters": {"max_new_tokens": 2}},
        {"options": {"num_predict": 2}},
    ],
)
def test_limit_is_found_in_every_protocol(body: dict[str, Any]) -> None:
    usage = RecordedUsage(1, 3, "worker")
    assert observe(record(body, usage=usage)).exceeds_limit is True
    assert observe(record(body, usage=RecordedUsage(1, 2, "worker"))).exceeds_limit is False


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"format": "json"},
        {"text": {"format": {"type": "json_schema"}}},
    ],
)
def test_json_is_checked_where_it_is_required(body: dict[str, Any]) -> None:
    assert observe(record(body)).is_json is False
    assert observe(record(body, RecordedChoice(text='{"a": 1}'))).is_json is True
    assert observe(record({"response_format": {"type": "text"}})).is_json is None


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
        {"type": "function", "name": "weather", "parameters": SCHEMA},
        {"name": "weather", "input_schema": SCHEMA},
    ],
)
def test_tool_calls_are_checked_against_their_schema(tool: dict[str, Any]) -> None:
    def call(arguments: str, name: str = "weather") -> RecordedChoice:
        return RecordedChoice(tool_calls=[RecordedToolCall(name, arguments)])

    body = {"tools": [tool]}
    assert observe(record(body)).calls_tools is False

    valid = observe(record(body, call('{"city": "Rome"}')))
    assert (valid.calls_tools, valid.has_valid_arguments, valid.is_empty) == (True, True, False)
    assert observe(record(body, call('{"days": 1}'))).has_valid_arguments is False
    assert observe(record(body, call("{broken"))).has_valid_arguments is False
    assert observe(record(body, call("{}", "other"))).has_valid_arguments is None


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        ('{"city": "a", "days": 2}', SCHEMA, True),
        ('{"city": "a", "days": 2.0}', SCHEMA, True),
        ('{"city": "a", "days": 2.5}', SCHEMA, False),
        ('{"city": "a", "days": true}', SCHEMA, False),
        ('{"city": 1}', SCHEMA, False),
        ('{"city": "a", "more": 1}', SCHEMA, False),
        ("[]", SCHEMA, False),
        ("", {"type": "object"}, True),
        ('"a"', {"enum": ["a", "b"]}, True),
        ('"c"', {"enum": ["a", "b"]}, False),
        ("1", {"const": 2}, False),
        ("null", {"type": ["string", "null"]}, True),
        ("1", {"anyOf": [{"type": "string"}, {"type": "null"}]}, False),
        ("1", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, True),
        ('[1, "a"]', {"type": "array", "items": {"type": "integer"}}, False),
        ("1", False, False),
        ("1", None, True),
        ("1", {"type": "unheard of"}, True),
        ("[" * 5000, {}, False),
    ],
)
def test_schema_check(value: str, schema: Any, *, fits: bool) -> None:
    assert fits_schema(value, schema) is fits


@pytest.mark.parametrize(
    ("text", "declines"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist you", True),
        ("As an AI model", True),
        ("I\u2019m unable to do this.", False),
        ("Sorry, I am unable to provide that.", True),
        ("I can help with that.", False),
        ("The word is: I can't help.", False),
    ],
)
def test_declining_text_is_found_by_its_beginning(text: str, *, declines: bool) -> None:
    assert observe(record({}, RecordedChoice(text=text))).declines is declines
    assert observe(record({}, RecordedChoice(refusal="no"))).declines is True


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": [{"content": "a"}, {"content": [{"type": "text", "text": "b"}]}]}, "b"),
        ({"prompt": ["c", "d"]}, "d"),
        ({"input": [{"role": "user", "content": "e"}]}, "e"),
        ({"text_input": "f"}, "f"),
        ({"messages": []}, ""),
        (None, ""),
    ],
)
def test_example_shows_the_last_text_of_the_prompt(body: Any, prompt: str) -> None:
    assert describe_prompt(body) == prompt


@pytest.mark.parametrize(
    ("tool", "is_valid"),
    [
        ({"type": "function", "function": {"name": "f"}}, False),
        ({"name": "f"}, False),
        ({"type": "custom", "name": "f"}, None),
    ],
)
def test_arguments_of_a_function_without_a_schema_must_be_json(
    tool: dict[str, Any], *, is_valid: bool | None
) -> None:
    """Those of a custom tool may be any text."""
    choice = RecordedChoice(tool_calls=[RecordedToolCall("f", "{")])
    one = observe(record({"tools": [tool]}, choice))
    assert (one.calls_tools, one.has_valid_arguments) == (True, is_valid)
