# ruff: noqa: RUF001, ISC004 - the marks of DeepSeek have letters like these
"""Reasoning and tool calls of each model family, from scripted outputs in every chunking."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.torch.call_formats import CALL_FORMATS, HERMES_FORMAT, CallFormat, detect_by_sign
from backends.torch.commands import (
    build_generate_command,
)
from backends.torch.detokenizer import OutputToken, ReadyText
from backends.torch.ipc import (
    ChatTurn,
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
from backends.torch.output_formats import (
    MAX_CLOSINGS,
    REASONING_MARKS,
    OutputRules,
    ReasoningMark,
    detect_reasoning_mark,
)
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedReasoning,
)
from protocols.core.request import GenerationRequest, Message, PromptOptions, ReasoningOptions

Drive = Callable[..., Any]
READ_FORMATS = [one for one in CALL_FORMATS if not one.constrains_free_choice]
"""Formats that are only parsed unless the request has an option for its calls."""
Output = tuple[str, str, list[tuple[str, Any]]]
"""The reasoning, the text and the calls."""

SCHEMAS = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {"type": "object", "properties": {}},
}
ARGUMENTS = {"a": "1 } ]", "n": 2}
JSON = msgspec.json.encode(ARGUMENTS).decode()
F: tuple[str, Any] = ("f", ARGUMENTS)
G: tuple[str, Any] = ("g", {})
_LIST = f'[{{"name": "f", "arguments": {JSON}}}, {{"name": "g", "arguments": {{}}}}]'
_TAGS = (
    "<function=f>\n<parameter=a>\n1 } ]\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>"
)
_DSML = (
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">1 } ]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
_PYTHON = '[f(a="1 } ]", n=2), g()]'

CALLS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "gpt-oss": (
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{JSON}<|call|>", [F],
    ),
    "DeepSeek V3, R1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" + JSON
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [F, G],
    ),
    "DeepSeek V3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [F, G],
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>", [F, G],
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1 } ]</parameter>\n'
        '<parameter name="n">2</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
        "</minimax:tool_call>", [F, G],
    ),
    "MiniMax M1": (
        f'<tool_calls>\n{{"name": "f", "arguments": {JSON}}}\n{{"name": "g", "arguments": {{}}}}\n'
        "</tool_calls>", [F, G],
    ),
    "Seed-OSS": (f"<seed:tool_call>\n{_TAGS}\n</seed:tool_call>", [F]),
    "Qwen3-Coder": (
        f"<tool_call>\n{_TAGS}\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [F, G],
    ),
    "GLM-4.5": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1 } ]</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>", [F, G],
    ),
    "Nemotron": (f"<TOOLCALL>{_LIST}</TOOLCALL>", [F, G]),
    "LFM2": (f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>", [F, G]),
    "InternLM 2.5": (
        f'<|action_start|><|plugin|>\n{{"name": "f", "parameters": {JSON}}}<|action_end|>', [F],
    ),
    "Command A, R7B": (
        f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "f", "parameters": {JSON}}}\n]'
        "<|END_ACTION|>", [F],
    ),
    "Command R": (
        f'Action: ```json\n[{{"tool_name": "f", "parameters": {JSON}}}]\n```', [F],
    ),
    "FunctionGemma": (
        "<start_function_call>call:f{a:<escape>1 } ]<escape>,n:2}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call>", [F, G],
    ),
    "Gemma 3": ('```tool_code\nprint(f(a="1 } ]", n=2))\n```', [F]),
    "Phi-4-mini": (f"<|tool_call|>{_LIST}<|/tool_call|>", [F, G]),
    "Phi-4": (f"functools{_LIST}", [F, G]),
    "Granite 3": (f"<|tool_call|>{_LIST}", [F, G]),
    "Llama 4": (_PYTHON, [F, G]),
    "Mistral Small 3.2": (
        f"[TOOL_CALLS]f[CALL_ID]a1b2c3d40[ARGS]{JSON}[TOOL_CALLS]g[CALL_ID]a1b2c3d41[ARGS]{{}}",
        [F, G],
    ),
    "DeepSeek V3.2": (
        "<｜DSML｜function_calls>\n" + _DSML + '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>", [F, G],
    ),
    "DeepSeek V4": (
        "<｜DSML｜tool_calls>\n" + _DSML + '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>", [F, G],
    ),
    "Kimi K3": (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="string"<|sep|>1 } ]<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', [F, G],
    ),
    "MiniMax M3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1 } ]'
        "]<]minimax[>[</a>]<]minimax[>[<n>2]<]minimax[>[</n>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="g">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>', [F, G],
    ),
    "Apriel": (f"<tool_calls>{_LIST}</tool_calls>", [F, G]),
    "Functionary 3.1": (f"<function=f>{JSON}</function><function=g>{{}}</function>", [F, G]),
    "Hunyuan 3": (
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n"
        "<arg_key:opensource>a</arg_key:opensource>\n"
        "<arg_value:opensource>1 } ]</arg_value:opensource>\n"
        "<arg_key:opensource>n</arg_key:opensource>\n"
        "<arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>", [F, G],
    ),
    "GLM 4.7": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1 } ]</arg_value><arg_key>n</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>g</tool_call>", [F, G],
    ),
    "Gemma 4": (
        '<|tool_call>call:f{n:2,a:<|"|>1 } ]<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>',
        [F, G],
    ),
    "Apertus": (f'<|tools_prefix|>[{{"f": {JSON}}}, {{"g": {{}}}}]<|tools_suffix|>', [F, G]),
    "MiniCPM5": (
        '<function name="f"><param name="a">1 } ]</param><param name="n">2</param></function>\n'
        '<function name="g"></function>', [F, G],
    ),
    "GigaChat 3.1": (f'<|function_call|>{{"name": "f", "arguments": {JSON}}}', [F]),
    "GigaChat 3": (
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "f", "arguments": {JSON}}}', [F],
    ),
    "Solar Open": (
        f"<|tool_calls|><|tool_call:begin|>a1b2c3d40<|tool_call:name|>f<|tool_call:args|>{JSON}"
        "<|tool_call:end|><|tool_call:begin|>a1b2c3d41<|tool_call:name|>g<|tool_call:args|>{}"
        "<|tool_call:end|><|calls|>", [F, G],
    ),
}  # fmt: skip
"""Two calls, or one if the template takes one, as the families' own templates write them."""


def parse(
    pieces: Sequence[str],
    calls: CallFormat | None = None,
    reasoning: ReasoningMark | None = None,
    *,
    is_open: bool = False,
) -> Output:
    """Parse these pieces, each with one token."""
    parser = OutputRules(reasoning, calls, SCHEMAS, is_open, frozenset()).make_parser()
    items: list[Any] = []
    for at, piece in enumerate(pieces):
        items += parser.feed(ReadyText(piece, [OutputToken(at, None)]))
    items += parser.close()
    counts = [len(one.tokens) if isinstance(one, ReadyText) else one.tokens for one in items]
    assert sum(counts) == len(pieces)
    starts = [one for one in items if isinstance(one, ParsedCallStart)]
    assert [one.call for one in starts] == list(range(parser.calls))
    rows = [
        (start.name, msgspec.json.decode("".join(
            one.text for one in items
            if isinstance(one, ParsedCallArguments) and one.call == start.call
        )))
        for start in starts
    ]  # fmt: skip
    thoughts = "".join(one.text for one in items if isinstance(one, ParsedReasoning))
    return thoughts, "".join(one.text for one in items if isinstance(one, ReadyText)), rows


def split(text: str) -> list[list[str]]:
    """Split the text into pieces of every size, and into two at every position."""
    pieces = [[text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 3, 5, 7, 11)]
    return [*pieces, *([text[:at], text[at:]] for at in range(len(text)))]


@pytest.mark.parametrize("mark", READ_FORMATS, ids=lambda mark: mark.family)
def test_tool_calls_of_each_family(mark: CallFormat) -> None:
    script, calls = CALLS[mark.family]
    for pieces in split(script):
        assert parse(pieces, mark) == ("", "", calls)
    if not mark.at_start:
        for pieces in split(f"Let me see.\n{script}"):
            assert parse(pieces, mark) == ("", "Let me see.", calls)


@pytest.mark.parametrize("mark", READ_FORMATS, ids=lambda mark: mark.family)
def test_malformed_and_unfinished_calls_stay_text(mark: CallFormat) -> None:
    broken = f"{mark.opening} x {{ {mark.closing}"
    for text in (f"{broken} so", mark.opening, mark.opening[:-1] or "x", f"{broken}\n"):
        for pieces in split(text):
            assert parse(pieces, mark) == ("", text, [])


@pytest.mark.parametrize("mark", READ_FORMATS, ids=lambda mark: mark.family)
def test_call_of_an_unknown_function_stays_text(mark: CallFormat) -> None:
    script, _ = CALLS[mark.family]
    rules = OutputRules(None, mark, {}, is_open=False, marker_tokens=frozenset())
    parser = rules.make_parser()

    outputs = [*parser.feed(ReadyText(script, [])), *parser.close()]

    assert "".join(one.text for one in outputs if isinstance(one, ReadyText)) == script
    assert parser.calls == 0


@pytest.mark.parametrize("mark", REASONING_MARKS, ids=lambda mark: mark.family)
def test_reasoning_of_each_family(mark: ReasoningMark) -> None:
    answers = mark.answer_marks or ("", "")
    response = f"{answers[0]}Yes, \n it is.{answers[1]}"
    if mark.family == "gpt-oss":
        response = "<|start|>assistant<|channel|>final<|message|>Yes, \n it is.<|return|>"

    for pieces in split(f"{mark.opening}\nI  think.\n{mark.closing}\n\n{response}"):
        assert parse(pieces, None, mark) == ("I  think.", "Yes, \n it is.", [])
    for pieces in split(f"I think.{mark.closing}{response}"):
        assert parse(pieces, None, mark, is_open=True) == ("I think.", "Yes, \n it is.", [])
    for pieces in split(f"{mark.opening}\n\n{mark.closing}\n\nNo."):
        assert parse(pieces, None, mark) == ("", "No.", [])
    for pieces in split(f"{mark.opening}hm{mark.closing[:-1]}"):
        assert parse(pieces, None, mark) == (f"hm{mark.closing[:-1]}", "", [])
    for text in (mark.opening[:-1], f"\n x {mark.closing[:-1]}", "\n\nNo. \n"):
        for pieces in split(text):
            assert parse(pieces, None, mark) == ("", text, [])


@pytest.mark.parametrize("family", ["gpt-oss", "DeepSeek V3.1", "GLM-4.5", "Granite 3", "Nemotron"])
def test_reasoning_before_tool_calls(family: str) -> None:
    calls = next(one for one in READ_FORMATS if one.family == family)
    index = 0 if family == "gpt-oss" else -1
    mark = REASONING_MARKS[index]
    start = "<|start|>assistant" if family == "gpt-oss" else "\n"
    script, expected = CALLS[family]

    for pieces in split(f"{mark.opening}I see.{mark.closing}{start}{script}"):
        assert parse(pieces, calls, mark) == ("I see.", "", expected)


def test_a_string_may_contain_the_closing_mark() -> None:
    mark = next(one for one in READ_FORMATS if one.family == "Nemotron")
    script = '<TOOLCALL>[{"name": "f", "arguments": {"a": "</TOOLCALL>"}}]</TOOLCALL>'
    for pieces in split(script):
        assert parse(pieces, mark) == ("", "", [("f", {"a": "</TOOLCALL>"})])

    text = f"<TOOLCALL>{'</TOOLCALL>' * MAX_CLOSINGS} and on"
    rules = OutputRules(None, mark, SCHEMAS, is_open=False, marker_tokens=frozenset())
    parser = rules.make_parser()
    outputs = list(parser.feed(ReadyText(text, [])))

    assert "".join(one.text for one in outputs if isinstance(one, ReadyText)) == text


def test_marks_identify_the_model_family() -> None:
    for mark in READ_FORMATS:
        assert detect_by_sign(f"{mark.template_sign} {mark.opening}") == mark
    for reasoning in REASONING_MARKS:
        assert detect_reasoning_mark(f"{reasoning.template_sign}") == reasoning
    assert detect_by_sign("```json <tool_call>{{ tools }}") == HERMES_FORMAT
    assert detect_reasoning_mark("{{ messages }}") is None
    assert set(CALLS) == {mark.family for mark in READ_FORMATS}


@pytest.mark.parametrize(
    "text",
    [
        "<TOOLCALL>[1]</TOOLCALL>",
        '<TOOLCALL>[{"name": ["f"]}]</TOOLCALL>',
        '<TOOLCALL>{"name": "f", "arguments": [1]}</TOOLCALL>',
        "<TOOLCALL></TOOLCALL>",
        "<|tool_call_start|>[f(a=1j)]<|tool_call_end|>",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "<|tool_call_start|>a = f()<|tool_call_end|>",
        "<|tool_call_start|>f(a=__import__('os'))<|tool_call_end|>",
        "<|tool_call_start|>" + "(" * 9000 + "<|tool_call_end|>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    mark = next(one for one in READ_FORMATS if text.startswith(one.opening))
    assert parse([text, " so"], mark) == ("", f"{text} so", [])


def test_documentation_lists_the_families() -> None:
    page = Path(__file__).parents[4] / "docs" / "model-families.md"
    rows = [
        f"| {one.family} | `{one.opening.strip()}` | `{one.closing}` |" for one in REASONING_MARKS
    ]
    assert "\n".join(["| --- | --- | --- |", *rows, ""]) in page.read_text()

    starts = [(one.opening.replace("```", ""), one.family) for one in READ_FORMATS]
    rows = [f"| {family} | `{opening}` |".replace("\n", "\\n") for opening, family in starts]
    assert "\n".join(["| --- | --- |", *rows, "", ""]) in page.read_text()


# --- in the engine --------------------------------------------------------------------------------


def run_chat(scripted: Drive, script: str, template: str, *functions: FunctionDefinition) -> Any:
    """Run a conversation whose prompt has one token, as scripts expect."""
    driver, runner = scripted(script)
    manager = driver.engine._grammar_manager
    tokenizer = copy.deepcopy(manager._tokenizer)
    tokenizer.chat_template = template
    manager._tokenizer = manager._input_processor._tokenizer = tokenizer
    prompt_input = PromptInput(turns=(ChatTurn("user", "x"),), functions=functions)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    runner.prompt = runner._prompt = len(text)
    calling = FunctionChoice(tuple(one.name for one in functions)) if functions else None
    greedy, ending = EngineSamplingParams(temperature=0), StopParams(max_tokens=300)
    return driver.run(GenerateCommand(1, prompt_input, greedy, ending, function_choice=calling))


def get_reasoning(driver: Any) -> str:
    return "".join(one.text for one in driver.select(ReasoningEvent))


F_FUNCTION = FunctionDefinition("f", None, msgspec.json.encode(SCHEMAS["f"]))


def test_engine_returns_reasoning_without_tools(scripted: Drive) -> None:
    driver = run_chat(scripted, "<think>\nhm</think>\n\nYes.", "x{# </think> #}")
    assert (get_reasoning(driver), driver.text()) == ("hm", "Yes.")

    opened = run_chat(scripted, "hm</think>Yes.", "x<think>\n{# </think> #}")
    assert (get_reasoning(opened), opened.text()) == ("hm", "Yes.")

    closed = run_chat(scripted, "Yes.", "<think>\n\n</think>\n\n")
    assert (get_reasoning(closed), closed.text()) == ("", "Yes.")


def test_engine_returns_reasoning_before_calls_that_a_grammar_enforces(scripted: Drive) -> None:
    arguments = '{"a": "1 } ]", "n": 2}'
    script = (
        f'<think>hm</think>\n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    )

    driver = run_chat(scripted, script, "x{# </think> tools <tool_call> #}", F_FUNCTION)

    assert (get_reasoning(driver), driver.text()) == ("hm", "")
    assert [one.name for one in driver.select(ToolCallEvent)] == ["f"]
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "tool_calls")}


def test_engine_returns_calls_in_the_format_of_the_family(scripted: Drive) -> None:
    script = "<think>hm</think>\n" + CALLS["GLM-4.5"][0].split("</tool_call>")[0] + "</tool_call>"
    driver = run_chat(scripted, script, "x{# </think> tools <arg_key> #}", F_FUNCTION)

    assert (get_reasoning(driver), driver.text()) == ("hm", "")
    assert "".join(one.text for one in driver.select(ToolArgumentsEvent)) == JSON
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "tool_calls")}


@pytest.mark.parametrize(
    ("effort", "arguments", "expected"),
    [
        (None, None, {}),
        ("none", None, {"enable_thinking": False, "thinking": False}),
        ("low", None, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        (
            "low",
            {"enable_thinking": msgspec.Raw(b"false")},
            {"enable_thinking": False, "thinking": True, "reasoning_effort": "low"},
        ),
    ],
)
def test_reasoning_effort_reaches_the_chat_template(
    effort: str | None, arguments: dict[str, msgspec.Raw] | None, expected: dict[str, Any]
) -> None:
    request = GenerationRequest(
        model="m",
        kind="chat",
        messages=(Message("user", ()),),
        reasoning=None if effort is None else ReasoningOptions(effort=effort),
        templating=PromptOptions(arguments=arguments),
    )
    command = build_generate_command(request, 1, 1.0, templates=False)

    assert msgspec.json.decode(command.input.template_arguments) == expected
