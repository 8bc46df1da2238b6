"""Output in a model's own format is parsed with the tokenizer's response template."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from backends.torch.detokenizer import OutputToken, ReadyText
from backends.torch.ipc import (
    ChoiceEndEvent,
    EngineSamplingParams,
    FunctionChoice,
    FunctionDefinition,
    GenerateCommand,
    PromptInput,
    ReasoningEvent,
    StopParams,
    ToolArgumentsEvent,
    ToolCallEvent,
)
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
)
from backends.torch.response_template import ResponseTemplateRules, get_response_template

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
ADD = FunctionDefinition("add", None, b'{"type":"object","properties":{"a":{"type":"integer"}}}')
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
ANSWER = "<think> I add. </think>\nLet me  see.\n\n<function=add><a>7</a><b>x</b></function>"


class TokenizerWithTemplate:
    """A tokenizer with a response template."""

    def __init__(self, template: Any) -> None:
        self.response_template = template


def parse_chunks(
    template: Any, text: str, size: int, prompt: str = "<assistant>"
) -> list[ParsedOutput]:
    speech = ResponseTemplateRules(
        get_response_template(TokenizerWithTemplate(template)), prompt, TOOLS, frozenset()
    ).make_parser()
    outputs: list[ParsedOutput] = []
    for at in range(0, len(text), size):
        outputs += speech.feed(ReadyText(text[at : at + size], [OutputToken(at, None)]))
    outputs += speech.close()
    assert speech.calls == sum(isinstance(one, ParsedCallStart) for one in outputs)
    return outputs


def join_texts(outputs: Sequence[ParsedOutput], kind: type) -> str:
    return "".join(cast("Any", one).text for one in outputs if isinstance(one, kind))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_tool_calls_are_parsed(size: int) -> None:
    outputs = parse_chunks(TEMPLATE, ANSWER, size)
    assert join_texts(outputs, ParsedReasoning) == "I add."
    assert join_texts(outputs, ReadyText) == "Let me  see."
    assert [one.name for one in outputs if isinstance(one, ParsedCallStart)] == ["add"]
    assert join_texts(outputs, ParsedCallArguments) == '{"a":7,"b":"x"}'


def test_list_of_tool_calls_is_parsed() -> None:
    text = 'Yes.[TOOLS][{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": "{}"}]'
    outputs = parse_chunks(LISTED, text, 5)

    assert [one.name for one in outputs if isinstance(one, ParsedCallStart)] == ["add", "f"]
    assert [one.text for one in outputs if isinstance(one, ParsedCallArguments)] == [
        '{"a":1}',
        "{}",
    ]
    assert join_texts(outputs, ReadyText) == "Yes."


@pytest.mark.parametrize("end", ["", "[END]", "[END] so"])
def test_malformed_tool_calls_are_returned_as_text(end: str) -> None:
    outputs = parse_chunks(LISTED, f'Yes.[TOOLS][{{"name": "add"{end}', 4)
    assert join_texts(outputs, ReadyText).startswith('Yes.[{"name": "add"')
    assert join_texts(outputs, ReadyText).endswith("so" if "so" in end else "")
    assert not any(isinstance(one, ParsedCallStart) for one in outputs)


@pytest.mark.parametrize("is_cut", [False, True])
def test_call_that_is_cut_off_is_text(is_cut: bool) -> None:
    """Given a further call without its end, it is one only if the model has ended its output."""
    template = get_response_template(TokenizerWithTemplate(TEMPLATE))
    parser = ResponseTemplateRules(template, "<assistant>", TOOLS, frozenset()).make_parser()
    text = "<function=add><a>7</a></function><function=add><a>8</a>"
    outputs = [*parser.feed(ReadyText(text, [])), *parser.close(is_cut=is_cut)]

    assert (parser.calls, parser.is_in_call) == ((1, True) if is_cut else (2, False))
    assert ("<a>8</a>" in join_texts(outputs, ReadyText)) == is_cut


def test_reasoning_may_start_in_the_prompt() -> None:
    outputs = parse_chunks(TEMPLATE, "hm</think>Yes.", 2, prompt="<user>x<assistant><think>")
    assert (join_texts(outputs, ParsedReasoning), join_texts(outputs, ReadyText)) == ("hm", "Yes.")


def test_invalid_response_template_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert get_response_template(TokenizerWithTemplate({"fields": {}})) is None
    assert "can't be used" in caplog.text
    assert get_response_template(TokenizerWithTemplate(None)) is None


# --- in the engine ------------------------------------------------------------------------------


def run_script(scripted: Drive, calling: FunctionChoice, *functions: FunctionDefinition) -> Any:
    driver, _ = scripted(ANSWER)
    driver.engine._grammar_manager._response_template = get_response_template(
        TokenizerWithTemplate(TEMPLATE)
    )
    prompt_input = PromptInput(prompts=("x",), functions=functions)
    ending = StopParams(max_tokens=200)
    return driver.run(
        GenerateCommand(
            1, prompt_input, EngineSamplingParams(temperature=0), ending, function_choice=calling
        )
    )


def test_engine_parses_the_response_template(scripted: Drive) -> None:
    driver = run_script(scripted, FunctionChoice(("add",)), ADD)
    assert driver.text() == "Let me  see."
    assert "".join(one.text for one in driver.select(ReasoningEvent)) == "I add."
    assert [one.name for one in driver.select(ToolCallEvent)] == ["add"]
    assert "".join(one.text for one in driver.select(ToolArgumentsEvent)) == '{"a":7,"b":"x"}'
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "tool_calls")}


@pytest.mark.parametrize(
    ("calling", "functions"),
    [
        (FunctionChoice(("add",), required=True), (ADD,)),
        (FunctionChoice(("add",), parallel=False), (ADD,)),
        (FunctionChoice(("add",)), (ADD, FunctionDefinition("f"))),
        (FunctionChoice(("add",)), (FunctionDefinition("add", strict=True),)),
    ],
)
def test_response_template_is_not_used_for_enforced_tool_calls(
    scripted: Drive, calling: FunctionChoice, functions: Sequence[FunctionDefinition]
) -> None:
    assert not run_script(scripted, calling, *functions).select(ReasoningEvent)
