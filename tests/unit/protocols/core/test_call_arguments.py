"""Half-written arguments of earlier tool calls become an object, and are reported."""

from pathlib import Path
from typing import Any

import pytest

from backends.chat_template import ChatTemplate
from protocols.anthropic.endpoints import Anthropic
from protocols.core.call_arguments import find_half_written_calls, read_arguments
from protocols.core.request import GenerationRequest, Message, TextPart, ToolCall
from protocols.triton.endpoints import Triton

CUT = '{"city": "Par'
ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}"
    "{% endfor %}{% endfor %}"
)


def make_request(arguments: str, kind: Any = "function") -> GenerationRequest:
    call = ToolCall("c1", "f", arguments, kind)
    messages = (
        Message("user", (TextPart("hi"),)),
        Message("assistant", (), tool_calls=(call,)),
        Message("tool", (TextPart("x"),), tool_call_id="c1"),
    )
    return GenerationRequest(model="m", kind="chat", messages=messages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1}', {"a": 1}),
        ("", {}),
        (" ", {}),
        (CUT, {"arguments": CUT}),
        ("[1]", {"arguments": "[1]"}),
        ("null", {"arguments": "null"}),
    ],
)
def test_arguments_are_an_object(text: str, expected: dict[str, Any]) -> None:
    assert read_arguments(text) == expected


def test_only_half_written_calls_are_reported() -> None:
    [loss] = find_half_written_calls(make_request(CUT))

    assert (loss.field, loss.reason) == (
        "messages[1].tool_calls[0].function.arguments",
        "approximated",
    )
    assert not list(find_half_written_calls(make_request('{"a":1}')))
    assert not list(find_half_written_calls(make_request('{"arguments":"x"}')))
    assert not list(find_half_written_calls(make_request("")))
    assert not list(find_half_written_calls(make_request("any text", "custom")))


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    """A template that formats the arguments itself, and fails for a text."""
    (tmp_path / "items.jinja").write_text(ITEMS, "utf-8")
    return ChatTemplate(str(tmp_path / "items.jinja"))


def test_chat_template_gets_an_object(template: ChatTemplate) -> None:
    assert template.render_prompt(make_request(CUT)) == f"arguments={CUT};"
    assert template.render_prompt(make_request('{"a":1}')) == "a=1;"


@pytest.mark.parametrize("protocol", ["anthropic", "triton"])
def test_workers_whose_arguments_are_objects_report_the_loss(
    protocol: str, template: ChatTemplate
) -> None:
    adapter = Anthropic() if protocol == "anthropic" else Triton("vllm", renderer=template)
    lost = [one.field for one in adapter.unsupported_parameters(make_request(CUT), {})]
    sent = [one.field for one in adapter.unsupported_parameters(make_request('{"a":1}'), {})]

    assert "messages[1].tool_calls[0].function.arguments" in lost
    assert "messages[1].tool_calls[0].function.arguments" not in sent
