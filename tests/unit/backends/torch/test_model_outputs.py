# ruff: noqa: E501, ISC004, RUF001 - outputs stay as models write them
"""Outputs that deviate from the canonical form of their format are parsed as well."""

from typing import Any

import msgspec
import pytest

from backends.torch.call_formats import CALL_FORMATS, CallFormat
from backends.torch.detokenizer import ReadyText
from backends.torch.output_formats import REASONING_MARKS, OutputRules, ReasoningMark
from backends.torch.parsed_output import ParsedCallArguments, ParsedCallStart, ParsedReasoning

SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "s": {"type": ["string", "null"]},
            "t": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "u": {"$ref": "#/$defs/text"},
            "l": {"type": "array", "items": {"type": "string"}},
            "b": {"type": "boolean"},
        },
        "$defs": {"text": {"type": ["null", "string"]}},
    },
    "g": {"type": "object", "properties": {}},
}
FORMATS = {one.family: one for one in CALL_FORMATS}
HARMONY = REASONING_MARKS[0]
THINK = REASONING_MARKS[-1]
GOOD = ("f", {"a": "x"})
Output = tuple[str, str, list[tuple[str, Any]]]


def parse(
    text: str,
    family: str,
    mark: ReasoningMark | None = None,
    *,
    is_open: bool = False,
    size: int | None = None,
) -> Output:
    """Return the reasoning, the text and the tool calls of an output."""
    call_format: CallFormat = FORMATS[family]
    rules = OutputRules(mark, call_format, SCHEMAS, is_open, frozenset())
    parser = rules.make_parser()
    outputs: list[Any] = []
    for at in range(0, len(text), size or len(text)):
        outputs += parser.feed(ReadyText(text[at : at + (size or len(text))], []))
    outputs += parser.close()
    arguments = [one.text for one in outputs if isinstance(one, ParsedCallArguments)]
    names = [one.name for one in outputs if isinstance(one, ParsedCallStart)]
    return (
        "".join(one.text for one in outputs if isinstance(one, ParsedReasoning)),
        "".join(one.text for one in outputs if isinstance(one, ReadyText)),
        list(zip(names, map(msgspec.json.decode, arguments), strict=True)),
    )


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>analysis",
        "<|channel|>analysis to=functions.f",
        " to=functions.f<|channel|>analysis <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>analysis",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=f",
    ],
)
def test_recipient_of_a_gpt_oss_call_is_in_the_role_or_in_the_channel(
    header: str, size: int | None
) -> None:
    for end in ("<|call|>", ""):
        script = f'{header}<|message|>{{"a": "x"}}{end}'
        reasoning = "hm" if "hm" in header else ""
        assert parse(script, "gpt-oss", HARMONY, size=size) == (reasoning, "", [GOOD])


def test_gpt_oss_calls_that_end_with_their_message_are_separate() -> None:
    script = (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": "x"}<|end|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
    )
    assert parse(script, "gpt-oss", HARMONY) == ("", "", [GOOD, ("g", {})])


@pytest.mark.parametrize("key", ["s", "t", "u"])
@pytest.mark.parametrize("text", ["12345", "1e5", "true", "[1]", "x", "007"])
def test_nullable_text_stays_text(key: str, text: str) -> None:
    for family, script in (
        ("Qwen3-Coder", "<tool_call>\n<function=f>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("GLM-4.5", "<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("MiniMax M2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="{}">{}</parameter>\n</invoke>\n</minimax:tool_call>'),
    ):  # fmt: skip
        assert parse(script.format(key, text), family)[2] == [("f", {key: text})]
        assert parse(script.format(key, "null"), family)[2] == [("f", {key: None})]
        assert parse(script.format(key, "None"), family)[2] == [("f", {key: None})]
        assert parse(script.format("a", "None"), family)[2] == [("f", {"a": "None"})]
        assert parse(script.format("l", "['a', 'b']"), family)[2] == [("f", {"l": ["a", "b"]})]
        assert parse(script.format("b", "True"), family)[2] == [("f", {"b": True})]


@pytest.mark.parametrize(
    ("family", "script", "rest"),
    [
        ("Granite 3", '<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]\nDone.', "Done."),
        ("Phi-4", 'functools[{"name": "f", "arguments": {"a": "x"}}] Done.', "Done."),
        ("GigaChat 3.1", '<|function_call|>{"name": "f", "arguments": {"a": "x"}}\nSo.', "So."),
    ],
)
def test_text_may_follow_a_section_without_an_end(family: str, script: str, rest: str) -> None:
    for size in (None, 1, 4):
        assert parse(script, family, size=size) == ("", rest, [GOOD])


@pytest.mark.parametrize(
    ("family", "script"),
    [
        ("Nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"a": "x"}}, {"name": "h"}]</TOOLCALL>'),
        ("Nemotron", '<TOOLCALL>[{"name": f}, {"name": "f", "arguments": {"a": "x"}}]</TOOLCALL>'),
        ("LFM2", '<|tool_call_start|>[h(1), f(a="x")]<|tool_call_end|>'),
        (
            "MiniMax M2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n'
            '<invoke name="h">\n</invoke>\n</minimax:tool_call>',
        ),
        (
            "DeepSeek V3.1",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{oops<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ],
)  # fmt: skip
def test_a_bad_call_does_not_drop_the_good_ones(family: str, script: str) -> None:
    _, text, calls = parse(script, family)
    assert calls == [GOOD]
    assert text.strip()


def test_qwen_coder_may_omit_the_mark_around_a_call() -> None:
    script = "Sure.\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    for size in (None, 1, 7):
        reasoning, text, calls = parse(script, "Qwen3-Coder", size=size)
        assert (reasoning, calls) == ("", [GOOD])
        assert text.startswith("Sure.")


@pytest.mark.parametrize(
    ("family", "script"),
    [
        ("Qwen3-Coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
        (
            "Kimi K2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ],
)
def test_a_call_ends_reasoning_that_is_not_closed(family: str, script: str) -> None:
    expected: Output = ("I look it up.", "", [("g", {})])
    for size in (None, 1, 6):
        assert parse(f"I look it up.\n{script}", family, THINK, is_open=True, size=size) == expected
        assert parse(f"<think>I look it up.\n{script}", family, THINK, size=size) == expected


def test_reasoning_may_be_closed_before_it_was_opened() -> None:
    for size in (None, 1):
        assert parse("</think>\nYes.", "Hermes", THINK, size=size) == ("", "Yes.", [])


def test_text_in_a_character_data_section_is_unwrapped() -> None:
    script = '<function name="f"><param name="a"><![CDATA[<b> & c]]></param></function>'
    assert parse(script, "MiniCPM5")[2] == [("f", {"a": "<b> & c"})]
