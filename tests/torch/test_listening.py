"""Calls in a model's own form, read by the template that came with it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from backends.torch.listening import Ear, template_of
from backends.torch.spec import (
    Argued,
    Called,
    Calling,
    Ended,
    Ending,
    Function,
    Generate,
    Input,
    Picking,
    Thinking,
)
from backends.torch.speech import Argument, Begun, Mused, Said
from backends.torch.text import Release, Taken

Drive = Callable[..., Any]

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": "<function=(?P<name>[a-z]+)>",
            "close": "</function>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": "<(?P<key>\\w+)>(?P<value>.*?)</\\1>"},
            "repeats": True,
            "transform": CALL,
        },
        "content": {},
    },
}
LISTED = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "[TOOLS]",
            "close": "[END]",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        "content": {},
    },
}
ADD = Function("add", None, b'{"type":"object","properties":{"a":{"type":"integer"}}}')
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
ANSWER = "<think> I add. </think>\nLet me  see.\n\n<function=add><a>7</a><b>x</b></function>"


class Own:
    """A tokenizer with a template of its own."""

    def __init__(self, template: Any) -> None:
        self.response_template = template


def heard(template: Any, text: str, size: int, prompt: str = "<assistant>") -> list[Said]:
    speech = Ear(template_of(Own(template)), prompt, TOOLS, frozenset()).make_parser()
    told: list[Said] = []
    for at in range(0, len(text), size):
        told += speech.feed(Release(text[at : at + size], [Taken(at, None)]))
    told += speech.close()
    assert speech.calls == sum(isinstance(one, Begun) for one in told)
    return told


def texts(told: Sequence[Said], kind: type) -> str:
    return "".join(cast("Any", one).text for one in told if isinstance(one, kind))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thoughts_text_and_calls(size: int) -> None:
    told = heard(TEMPLATE, ANSWER, size)
    assert texts(told, Mused) == "I add."
    assert texts(told, Release) == "Let me  see."
    assert [one.name for one in told if isinstance(one, Begun)] == ["add"]
    assert texts(told, Argument) == '{"a":7,"b":"x"}'


def test_a_list_of_calls() -> None:
    text = 'Yes.[TOOLS][{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": "{}"}]'
    told = heard(LISTED, text, 5)
    assert [one.name for one in told if isinstance(one, Begun)] == ["add", "f"]
    assert [one.text for one in told if isinstance(one, Argument)] == ['{"a":1}', "{}"]
    assert texts(told, Release) == "Yes."


@pytest.mark.parametrize("end", ["", "[END]", "[END] so"])
def test_what_can_not_be_read_is_told_as_it_is(end: str) -> None:
    told = heard(LISTED, f'Yes.[TOOLS][{{"name": "add"{end}', 4)
    assert texts(told, Release).startswith('Yes.[{"name": "add"')
    assert texts(told, Release).endswith("so" if "so" in end else "")
    assert not any(isinstance(one, Begun) for one in told)


def test_a_prompt_may_have_begun_the_thought() -> None:
    told = heard(TEMPLATE, "hm</think>Yes.", 2, prompt="<user>x<assistant><think>")
    assert (texts(told, Mused), texts(told, Release)) == ("hm", "Yes.")


def test_a_template_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert template_of(Own({"fields": {}})) is None
    assert "of no use" in caplog.text
    assert template_of(Own(None)) is None


# --- in the engine ------------------------------------------------------------------------------


def said(scripted: Drive, calling: Calling, *functions: Function) -> Any:
    got, _ = scripted(ANSWER)
    got.engine._grammar_manager._template = template_of(Own(TEMPLATE))
    given = Input(prompts=("x",), functions=functions)
    ending = Ending(max_tokens=200)
    return got.run(Generate(1, given, Picking(temperature=0), ending, function_choice=calling))


def test_it_is_heard_in_the_engine(scripted: Drive) -> None:
    got = said(scripted, Calling(("add",)), ADD)
    assert got.text() == "Let me  see."
    assert "".join(one.text for one in got.of(Thinking)) == "I add."
    assert [one.name for one in got.of(Called)] == ["add"]
    assert "".join(one.text for one in got.of(Argued)) == '{"a":7,"b":"x"}'
    assert got.ended() == {0: Ended(1, 0, "tool_calls")}


@pytest.mark.parametrize(
    ("calling", "functions"),
    [
        (Calling(("add",), required=True), (ADD,)),
        (Calling(("add",), parallel=False), (ADD,)),
        (Calling(("add",)), (ADD, Function("f"))),
        (Calling(("add",)), (Function("add", strict=True),)),
    ],
)
def test_what_must_be_held_to_is_not_left_to_the_model(
    scripted: Drive, calling: Calling, functions: Sequence[Function]
) -> None:
    assert not said(scripted, calling, *functions).of(Thinking)
