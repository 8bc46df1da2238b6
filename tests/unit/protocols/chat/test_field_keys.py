"""Unknown keys of fields that are objects, such as ``tool_choice``."""

from typing import Any

import msgspec
from msgspec import Raw

from protocols.chat.field_keys import read_field_extra, write_field_extra
from protocols.chat.requests import read_chat
from protocols.core.extra import remove_extra_fields
from protocols.core.request import ExtraFields
from protocols.databricks.endpoints import Databricks
from protocols.openai.endpoints import OpenAI

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHOICE = {
    "mode": "auto",
    "x": 1,
    "tools": [{"type": "function", "function": {"name": "f"}, "y": 2}],
}


def to_fields(**values: Any) -> dict[str, Raw]:
    return {name: Raw(msgspec.json.encode(one)) for name, one in values.items()}


def read(**values: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    fields = to_fields(model="m", messages=messages, **values)
    return read_chat(fields).bind_target("m", "openai")


def test_known_keys_and_null_are_no_extra() -> None:
    assert read_field_extra({}) == ()
    options = {"include_usage": True, "x": None}
    assert read_field_extra(to_fields(stream_options=options, tool_choice="auto")) == ()


def test_keys_at_every_level_are_found_by_their_path() -> None:
    fields = to_fields(tool_choice={"type": "allowed_tools", "allowed_tools": CHOICE})

    [extra] = read_field_extra(fields)

    assert extra.at == "tool_choice"
    assert extra.values == {
        ("allowed_tools", "x"): 1,
        ("allowed_tools", "tools[0]", "y"): 2,
    }


def test_unknown_words_are_found_and_replace_what_is_written() -> None:
    fields = to_fields(tool_choice={"type": "later", "function": {"name": "f"}})

    [extra] = read_field_extra(fields)
    body = {"tool_choice": {"type": "function"}}

    assert extra.values == {("type",): "later"}
    assert list(write_field_extra(body, extra)) == []
    assert body == {"tool_choice": {"type": "later"}}


def test_keys_are_written_where_the_worker_has_the_object() -> None:
    values = {("allowed_tools", "x"): 1, ("allowed_tools", "tools[0]", "y"): 2}
    extra = ExtraFields("tool_choice", values, ("tool_choice",))
    body: dict[str, Any] = {"tool_choice": {"allowed_tools": {"tools": [{}]}}}

    assert list(write_field_extra(body, extra)) == []
    assert body == {"tool_choice": {"allowed_tools": {"x": 1, "tools": [{"y": 2}]}}}


def test_keys_without_an_object_are_returned_by_their_path() -> None:
    values: dict[tuple[str, ...], Any] = {("allowed_tools", "tools[3]", "y"): 2}
    choices: list[Any] = ["auto", {"allowed_tools": {"tools": [{}]}}, {"allowed_tools": {}}]
    extra = ExtraFields("tool_choice", values, ("tool_choice",))

    for choice in choices:
        lost = list(write_field_extra({"tool_choice": choice}, extra))
        assert lost == ["tool_choice.allowed_tools.tools[3].y"]


def test_workers_of_the_protocol_get_them_and_others_report_them() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": CHOICE}
    request = read(tools=TOOLS, tool_choice=choice)
    openai, vllm = OpenAI("openai"), OpenAI("vllm")

    assert b'"x":1' in openai.encode_request(request).body
    assert openai.unsupported_parameters(request, {}) == ()
    lost = [one.field for one in vllm.unsupported_parameters(request, {})]
    assert lost == ["tool_choice.allowed_tools.x", "tool_choice.allowed_tools.tools[0].y"]
    stripped, losses = remove_extra_fields(request)
    assert stripped.field_extra == ()
    assert [one.field for one in losses] == lost


def test_databricks_workers_get_no_options_of_streams() -> None:
    form = {"type": "json_object", "y": 2}
    request = read(stream=True, stream_options={"x": 1}, response_format=form)
    request = request.bind_target("m", "databricks")
    worker = Databricks()

    lost = {one.field for one in worker.unsupported_parameters(request, {})}

    assert "stream_options.x" in lost


def test_keys_of_functions_and_of_their_calls_go_into_the_tool_that_workers_get() -> None:
    fields = to_fields(
        model="m",
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}", "z": 3},
            },
            {"role": "function", "name": "f", "content": "1"},
        ],
        functions=[{"name": "f", "y": 2}],
        function_call={"name": "f", "x": 1},
    )
    request = read_chat(fields).bind_target("m", "openai")
    worker = OpenAI("openai")

    body = msgspec.json.decode(worker.encode_request(request).body)

    assert body["tools"][0]["function"]["y"] == 2
    assert body["tool_choice"]["function"]["x"] == 1
    assert body["messages"][1]["tool_calls"][0]["function"]["z"] == 3
    _, losses = remove_extra_fields(request)
    assert {one.field for one in losses} == {
        "messages[1].function_call.z",
        "functions[0].y",
        "function_call.x",
    }
