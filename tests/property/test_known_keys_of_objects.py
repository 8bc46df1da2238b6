"""Keys that have a meaning in one place are reported in another where they have none."""

from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols.core.errors import ClientError, InvalidParameter, UnsupportedFeature
from protocols.params import ParamTableProvider
from tests.property.test_known_fields import make_value
from tests.property.test_unknown_keys import IMAGE, OPTIONS, list_workers, prepare

HI = {"role": "user", "content": "hi"}
MARK = {"type": "ephemeral"}
FUNCTION_TOOL = {"name": "f", "input_schema": {"type": "object"}}
VLLM = build_adapter("openai", "vllm", {})
ANTHROPIC = build_adapter("anthropic", None, {})
IMAGE_SOURCE = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}


@pytest.mark.parametrize("name", ["tool_choice", "response_format"])
def test_mark_for_the_cache_in_an_object_that_has_none_is_reported(name: str) -> None:
    body = {**OPTIONS, name: {**OPTIONS[name], "cache_control": MARK}}

    sent, reported = prepare(
        build_adapter("openai", None, {}), ANTHROPIC, "/v1/chat/completions", body
    )

    assert b"ephemeral" not in sent
    assert f"{name}.cache_control" in reported


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        (
            {"tools": [FUNCTION_TOOL], "tool_choice": {"type": "auto", "name": "f"}},
            "tool_choice.name",
        ),
        (
            {"thinking": {"type": "adaptive", "budget_tokens": 2000}},
            "thinking.budget_tokens",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {**IMAGE_SOURCE, "content": "x"}},
                            {"type": "text", "text": "hi"},
                        ],
                    }
                ]
            },
            "messages[0].content[0].source.content",
        ),
        (
            {"tools": [{**FUNCTION_TOOL, "cache_control": MARK}]},
            "tools[0].cache_control",
        ),
    ],
)
def test_key_of_another_type_of_an_object_is_reported(changes: dict[str, Any], lost: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [HI], **changes}

    _, reported = prepare(build_adapter("anthropic", None, {}), VLLM, "/v1/messages", body)

    assert lost in reported


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(
    ("name", "operation", "path", "body"),
    [
        ("anthropic", "messages", "/v1/messages/count_tokens", {"messages": [HI]}),
        ("openai", "response", "/v1/responses/input_tokens", {"input": "hi"}),
    ],
)
def test_parameter_of_answers_in_a_request_for_a_token_count_is_reported(
    name: str, operation: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = build_adapter(name, None, {})
    assert isinstance(client, ParamTableProvider)
    prompt_fields = {"instructions", "previous_response_id", "parallel_tool_calls", "truncation"}
    lost = []

    for row in client.param_tables[operation]:
        if row.wire in prompt_fields | {"store", "timeout", "request_id", "max_tokens"}:
            continue
        changed = {"model": "m", **body, row.wire: make_value(row)}
        try:
            sent, reported = prepare(client, worker, path, changed)
        except ClientError:
            continue
        if row.wire not in reported and f'"{row.wire}"'.encode() not in sent:
            lost.append(row.wire)

    assert lost == []


FORMAT = {"name": "s", "schema": {"type": "object"}, "description": "of a city"}


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(
    ("path", "body", "lost"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [HI],
                "response_format": {"type": "json_schema", "json_schema": FORMAT},
            },
            "response_format.json_schema.description",
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", **FORMAT}}},
            "text.format.description",
        ),
    ],
)
def test_description_of_a_schema_reaches_the_worker_or_is_reported(
    path: str, body: dict[str, Any], lost: str, worker: Any
) -> None:
    client = build_adapter("openai", None, {})

    sent, reported = prepare(client, worker, path, {"model": "m", **body})

    whole_format = lost.removesuffix(".description").removesuffix(".json_schema")
    assert b"of a city" in sent or lost in reported or whole_format in reported


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(
    ("refusal", "place"),
    [
        ({"content": None, "refusal": "I won't"}, "messages[1].refusal"),
        ({"content": [{"type": "refusal", "refusal": "I won't"}]}, "messages[1].content[0]"),
    ],
)
def test_refusal_in_the_history_is_one_for_the_worker_or_is_reported(
    refusal: dict[str, Any], place: str, worker: Any
) -> None:
    client = build_adapter("openai", None, {})
    body = {"model": "m", "messages": [HI, {"role": "assistant", **refusal}, HI]}

    sent, reported = prepare(client, worker, "/v1/chat/completions", body)

    assert b'"refusal"' in sent or place in reported or "messages" in reported


@pytest.mark.parametrize("name", ["guided_regex", "structured_outputs"])
def test_output_format_is_reported_by_the_field_that_has_it(name: str) -> None:
    value = "a+" if name == "guided_regex" else {"regex": "a+"}
    body = {"model": "m", "messages": [HI], name: value}

    _, reported = prepare(
        build_adapter("openai", None, {}), ANTHROPIC, "/v1/chat/completions", body
    )

    assert name in reported
    assert "response_format" not in reported


def test_field_of_a_rerank_request_is_reported_by_its_name() -> None:
    body = {"model": "m", "query": "q", "documents": ["a"], "truncate_prompt_tokens": 3}
    worker = build_adapter("openai", "openai", {})

    _, reported = prepare(build_adapter("cohere", None, {}), worker, "/v2/rerank", body)

    assert reported == ["truncate_prompt_tokens"]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}


def test_grammar_of_a_custom_tool_is_reported_where_the_worker_gets_a_function() -> None:
    tools = [{"type": "custom", "name": "f", "format": GRAMMAR}]
    body = {"model": "m", "input": "hi", "tools": tools}

    sent, reported = prepare(build_adapter("openai", None, {}), VLLM, "/v1/responses", body)

    assert b"start: /a/" in sent
    assert "tools[0].format" in reported


def test_custom_tool_and_function_of_one_name_are_refused_where_they_would_become_one() -> None:
    tools = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "custom", "custom": {"name": "f"}},
    ]
    body = {"model": "m", "messages": [HI], "tools": tools}

    with pytest.raises(UnsupportedFeature, match="one is called 'f'") as excinfo:
        prepare(build_adapter("openai", None, {}), VLLM, "/v1/chat/completions", body)

    assert excinfo.value.param == "tools[1].custom.name"


def test_tool_of_another_kind_does_not_replace_one_of_its_name() -> None:
    added = {"type": "additional_tools", "tools": [{"type": "custom", "name": "f"}]}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    body = {"model": "m", "input": [HI, added], "tools": tools}

    with pytest.raises(InvalidParameter, match="Duplicate tool name: 'f'"):
        prepare(build_adapter("openai", None, {}), VLLM, "/v1/responses", body)
