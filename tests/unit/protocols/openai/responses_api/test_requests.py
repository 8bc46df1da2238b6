"""Requests of the Responses API become internal requests."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.core.errors import (
    ClientError,
    StoredObjectNotFound,
    UnknownParameter,
    UnsupportedFeature,
)
from protocols.core.request import JsonObjectFormat, JsonSchemaFormat, LogprobsOptions, TextPart
from protocols.openai.responses_api import requests as module
from protocols.openai.responses_api.requests import References, ResponsesRequest, read_request

F = {"type": "function", "name": "f"}


def read(**fields: Any) -> ResponsesRequest:
    options = {
        name: fields.pop(name)
        for name in ("references", "unknown", "allows_hosted", "timeout")
        if name in fields
    }
    body = {"model": "m", "input": "hi"} | fields
    return read_request({k: Raw(msgspec.json.encode(v)) for k, v in body.items()}, **options)


def test_text_is_one_message() -> None:
    decoded = read()

    request = decoded.request
    assert [(one.role, one.text) for one in request.messages] == [("user", "hi")]
    assert (request.model, request.kind, request.source) == ("m", "chat", module.SOURCE)
    assert request.extra == {}
    assert not decoded.stores

    [item] = decoded.input
    assert item["content"] == [{"type": "input_text", "text": "hi"}]


def test_scalars_have_their_place() -> None:
    request = read(
        max_output_tokens=5, temperature=0.5, top_p=0.5, seed=1, stop="x", top_k=3,
        parallel_tool_calls=False, user="u", safety_identifier="s", prompt_cache_key="k",
        truncation="auto", stream=True, stream_options={"include_obfuscation": False}, timeout=9.0,
    ).request  # fmt: skip

    assert request.set_fields == {
        "model": "m",
        "kind": "chat",
        "messages": request.messages,
        "response_options.has_items": True,
        "stopping.max_tokens": 5,
        "stopping.stop": ("x",),
        "stopping.overflow": "truncate",
        "sampling.temperature": 0.5,
        "sampling.top_p": 0.5,
        "sampling.top_k": 3,
        "sampling.seed": 1,
        "parallel_tools": False,
        "stream": True,
        "timeout": 9.0,
        "labels": {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        "provided_fields": request.provided_fields,
        "source": module.SOURCE,
    }


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(["temperature", "tools", "text", "reasoning", "include", "conversation"])

    assert read(**nulls).request == read().request


def test_instructions_come_first_and_history_before_the_input() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    references = References(history, {}, enabled=True)

    decoded = read(instructions="i", previous_response_id="resp_1", references=references)

    roles = [(one.role, one.text) for one in decoded.request.messages]
    assert roles == [("system", "i"), ("user", "a"), ("assistant", "b"), ("user", "hi")]
    assert decoded.history == history
    assert decoded.stores


def test_previous_response_may_come_without_new_input() -> None:
    references = References([{"role": "user", "content": "a"}], {}, enabled=True)

    assert len(read(input=None, previous_response_id="r", references=references).input) == 0
    assert len(read(input=[], previous_response_id="r", references=references).input) == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_unknown_references_are_not_found(enabled: bool) -> None:
    references = References(enabled=enabled)

    with pytest.raises(StoredObjectNotFound) as excinfo:
        read(previous_response_id="r", references=references)
    assert excinfo.value.param == "previous_response_id"
    assert ("stores no responses" in excinfo.value.message) is not enabled
    with pytest.raises(StoredObjectNotFound) as excinfo:
        read(input=[{"type": "item_reference", "id": "i"}], references=references)
    assert excinfo.value.param == "input"


def test_referenced_items_are_inserted() -> None:
    item = {"id": "i", "role": "user", "content": "a"}

    decoded = read(input=[{"id": "i"}], references=References(None, {"i": item}, enabled=True))

    assert decoded.request.messages[0].parts == (TextPart("a"),)
    assert decoded.input == [item]


def test_client_decides_whether_a_response_is_stored() -> None:
    references = References(enabled=True)

    assert read(references=references).stores
    assert not read(references=references, store=False).stores


def test_tools_in_items_are_added() -> None:
    request = read(
        tools=[F],
        input=[
            {"role": "user", "content": "x"},
            {"type": "additional_tools", "tools": [F | {"name": "g"}]},
            {"type": "tool_search_call", "call_id": "1", "arguments": {}},
            {"type": "tool_search_output", "call_id": "1", "tools": [F | {"name": "h"}]},
            {"type": "additional_tools", "tools": None},
        ],
    ).request

    assert [tool.name for tool in request.tools] == ["f", "g", "h"]


def test_log_probabilities_need_include() -> None:
    include = ["message.output_text.logprobs"]

    assert read(top_logprobs=2).request.logprobs is None
    assert read(top_logprobs=2, include=include).request.logprobs == LogprobsOptions(2)
    assert read(include=include).request.logprobs == LogprobsOptions(0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ({}, None),
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}, "verbosity": "medium"}, JsonObjectFormat()),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
            JsonSchemaFormat(Raw(b"{}"), "n", None, strict=True),
        ),
    ],
)
def test_text_format(text: Any, wanted: Any) -> None:
    assert read(text=text).request.output == wanted


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
def test_reasoning_options(name: str) -> None:
    decoded = read(reasoning={"effort": "low", name: "auto"})

    assert decoded.request.reasoning is not None
    assert decoded.request.reasoning.effort == "low"
    assert decoded.uses_summaries
    assert not read(reasoning={}).uses_summaries


def test_what_only_this_api_has_is_kept_apart() -> None:
    request = read(
        text={"verbosity": "low"},
        reasoning={"context": "all_turns", "mode": "standard"},
        service_tier="flex",
        max_tool_calls=3,
        tools=[F, {"type": "web_search"}],
        input=[{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "x"}],
        vllm_xargs={},
    ).request

    assert sorted(request.extra) == [
        "input[0]",
        "max_tool_calls",
        "reasoning.context",
        "service_tier",
        "text.verbosity",
        "tools.web_search",
        "vllm_xargs",
    ]
    assert "service_tier" not in read(service_tier="auto").request.extra


def test_unknown_fields_follow_the_listener() -> None:
    assert read(foo=1, unknown="ignore").request.extra == {}
    with pytest.raises(UnknownParameter) as excinfo:
        read(foo=1, unknown="reject")
    assert excinfo.value.param == "foo"


def test_metadata_are_labels() -> None:
    labels = read(metadata={"a": "b"}, client_metadata={"c": "d", "e": 5}).request.labels

    assert labels == {"metadata.a": "b", "client_metadata.c": "d"}


@pytest.mark.parametrize("name", ["conversation", "prompt", "background"])
def test_some_features_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeature) as excinfo:
        read(**{name: True})

    assert excinfo.value.param == name


def test_chat_requests_get_a_hint() -> None:
    with pytest.raises(UnsupportedFeature, match="Use 'input'"):
        read(input=None, messages=[])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"stream_options": {}}, "stream_options"),
        ({"include": "x"}, "include"),
        ({"include": ["x"]}, "include[0]"),
        ({"include": [["x"]]}, "include[0]"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "x"}}, "text.verbosity"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_invalid_fields_are_named(fields: Any, param: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        read(**fields)

    assert excinfo.value.param == param


def test_number_of_items_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ITEMS", 1)

    with pytest.raises(ClientError, match="too long"):
        read(input=[{"role": "user", "content": "x"}] * 2)
