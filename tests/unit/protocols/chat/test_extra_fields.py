"""Unknown keys inside messages and tools are kept or reported."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.chat.content_parts import read_part
from protocols.chat.requests import read_chat
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import build_kept_keys_reader
from protocols.core.loss import MAX_REPORTED, limit_losses
from protocols.core.request import (
    DetokenizeRequest,
    GenerationRequest,
    KeptKeys,
    Message,
    ReasoningPart,
    TextPart,
)
from protocols.databricks.endpoints import Databricks
from protocols.mindie.endpoints import MindIE
from protocols.openai.endpoints import OpenAI
from protocols.ovms.endpoints import OVMS
from protocols.tgi.endpoints import TGI
from protocols.triton.endpoints import Triton

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}", "inside": 1},
    "extra_content": {"google": {"thought_signature": "abc"}},
}
CONVERSATION: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "t", "uuid": "u"},
                {"type": "image_url", "image_url": {"url": "data:x", "max": 2}, "min_pixels": 3},
            ],
            "name": "n",
            "weight": 1,
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "partial": True},
        {"role": "assistant", "content": "so", "prefix": True},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "defer": True}, "cache_control": {"b": 1}},
        {"type": "custom", "custom": {"name": "g", "x": 1}},
    ],
}
PATHS = {
    "messages[0].content[0].cache_control",
    "messages[1].content[0].uuid",
    "messages[1].content[1].image_url.max",
    "messages[1].content[1].min_pixels",
    "messages[1].weight",
    "messages[2].tool_calls[0].function.inside",
    "messages[2].tool_calls[0].extra_content",
    "messages[3].partial",
    "messages[4].prefix",
    "tools[0].function.defer",
    "tools[0].cache_control",
    "tools[1].custom.x",
}


def read(body: Mapping[str, Any], source: str = "openai") -> GenerationRequest:
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in body.items()}
    return replace(read_chat(fields), source=source)


def test_a_worker_of_the_same_protocol_gets_every_key() -> None:
    request, losses = remove_extra_fields(
        read(CONVERSATION), build_kept_keys_reader(OpenAI())(read(CONVERSATION))
    )

    body = msgspec.json.decode(OpenAI().encode_request(request).body)
    assert losses == ()
    assert body["messages"] == CONVERSATION["messages"]
    assert body["tools"] == CONVERSATION["tools"]


@pytest.mark.parametrize("worker", [Triton(), OpenAI(worker_api="responses")])
def test_for_a_worker_of_another_protocol_the_path_of_each_key_is_reported(worker: Any) -> None:
    request = read(CONVERSATION)
    stripped, losses = remove_extra_fields(request, build_kept_keys_reader(worker)(request))

    assert {(one.field, one.reason) for one in losses} == {(path, "dropped") for path in PATHS}
    assert remove_extra_fields(stripped) == (stripped, ())


@pytest.mark.parametrize("worker", [Databricks(), OVMS(), TGI(), MindIE()])
def test_workers_of_similar_protocols_get_the_keys_of_their_own_clients(worker: Any) -> None:
    assert build_kept_keys_reader(worker)(read(CONVERSATION, worker.name)) is None
    assert build_kept_keys_reader(worker)(read(CONVERSATION)) == {}


@pytest.mark.parametrize("profile", ["sglang", "vllm"])
def test_reasoning_that_only_another_worker_can_read_is_reported(profile: str) -> None:
    parts = (ReasoningPart("", redacted="E"),)
    messages = (Message("user", (TextPart("a"),)), Message("assistant", parts))
    request = GenerationRequest(model="m", kind="chat", messages=messages)

    losses = OpenAI(profile).unsupported_parameters(request, {})
    assert [one.field for one in losses] == ["messages[1].reasoning_content"]


def test_a_client_of_another_protocol_has_no_keys_for_an_openai_worker() -> None:
    request = read(CONVERSATION, "ovms")

    assert build_kept_keys_reader(OpenAI())(request) == {}


def test_keys_that_the_target_has_are_kept() -> None:
    keys: KeptKeys = {TextPart: frozenset({"cache_control"})}

    stripped, losses = remove_extra_fields(read(CONVERSATION), keys)

    of_texts = {p for p in PATHS if p.endswith("cache_control") and "content" in p}
    assert {one.field for one in losses} == {*PATHS} - of_texts
    assert remove_extra_fields(stripped, keys) == (stripped, ())


def test_null_and_an_empty_list_are_no_loss() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "annotations": [],
        "audio": None,
        "x": None,
    }
    _, losses = remove_extra_fields(read({"model": "m", "messages": [message]}))

    assert losses == ()


def test_a_request_with_thousands_of_keys_has_a_short_report() -> None:
    messages = [{"role": "user", "content": "a", "x": 1}] * (MAX_REPORTED + 7)
    _, losses = remove_extra_fields(read({"model": "m", "messages": messages}))

    reported = limit_losses(losses)

    assert len(reported) == MAX_REPORTED + 1
    assert reported[-1].detail == "names after the first 100"


def test_legacy_functions_keep_their_keys() -> None:
    function = {"name": "f", "x": 1}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    ]
    request = read({"model": "m", "messages": messages, "functions": [function]})

    body = msgspec.json.decode(OpenAI().encode_request(request).body)
    assert body["tools"] == [{"type": "function", "function": function}]


def test_a_reasoning_part_without_summary_keeps_its_keys() -> None:
    part = {"type": "reasoning", "summary": [], "x": 1}
    (read_back,) = read_part(part, "messages[0].content[0]", ("reasoning",))

    assert read_back.extra is not None
    assert read_back.extra.values == {("x",): 1}


def test_requests_without_messages_have_no_such_keys() -> None:
    request = DetokenizeRequest(model="m", token_ids=(1,))

    assert remove_extra_fields(request) == (request, ())


def test_earlier_reasoning_reaches_the_worker() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ]
    request = read({"model": "m", "messages": messages})

    assert msgspec.json.decode(OpenAI().encode_request(request).body)["messages"] == messages
    assert OpenAI().unsupported_parameters(request, {}) == ()


def test_an_older_function_call_next_to_tool_calls_is_an_unknown_key() -> None:
    older = {"name": "g", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "t"},
        {"role": "assistant", "tool_calls": [CALL], "function_call": older},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    fields = {"model": Raw(b'"m"'), "messages": Raw(msgspec.json.encode(messages))}

    message = read_chat(fields).messages[1]

    assert [call.name for call in message.tool_calls] == ["f"]
    assert message.extra is not None
    assert message.extra.values == {("function_call",): older}


def test_a_refusal_with_unknown_keys_stays_a_part() -> None:
    part = {"type": "refusal", "refusal": "no", "x": 1}
    refused = {"role": "assistant", "content": [part]}
    request = read({"model": "m", "messages": [{"role": "user", "content": "hi"}, refused]})

    body = msgspec.json.decode(OpenAI("vllm").encode_request(request).body)

    assert body["messages"][1] == {"role": "assistant", "content": [part]}
