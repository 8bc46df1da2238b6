"""The table of tool call formats: each format that is parsed can be enforced, and vice versa."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from backends.torch.argument_syntax import TagArguments, write_json
from backends.torch.call_formats import CALL_FORMATS, CallFormat, ParsedCall
from backends.torch.detokenizer import ReadyText
from backends.torch.grammar_compiler import _build_grammar_entry
from backends.torch.ipc import (
    ChatTurn,
    ChoiceEndEvent,
    EngineSamplingParams,
    FunctionCall,
    FunctionChoice,
    FunctionDefinition,
    GenerateCommand,
    OutputRule,
    PromptInput,
    StopParams,
    ToolArgumentsEvent,
    ToolCallEvent,
)
from backends.torch.output_formats import REASONING_MARKS, OutputRules, ReasoningMark
from backends.torch.output_grammar import OutputConstraint, build_output_grammar
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedReasoning,
)
from tests.support.tiny_model import EOS, byte_tokenizer

Drive = Callable[..., Any]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "kelvin"]},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
    },
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "weather": SCHEMA,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
FUNCTIONS = tuple(
    FunctionDefinition(name, None, msgspec.json.encode(schema), strict=True)
    for name, schema in SCHEMAS.items()
)
BOTH = tuple(SCHEMAS)
VALUES = [
    {"city": "x", "days": 3, "unit": "kelvin"},
    {"city": "a { ] <", "days": 14, "unit": "celsius", "exact": True, "note": None},
    {"city": "", "days": 1, "unit": "kelvin", "note": "12345", "tags": ["a", "b"]},
    {"city": "é", "days": 2, "unit": "kelvin", "note": "1e5", "place": {"lat": 1}},
]


@functools.cache
def load_table() -> Any:
    return from_tokenizer(byte_tokenizer(), n_vocab=259, eos_token=[EOS])


@functools.lru_cache(maxsize=4)
def make_matcher(constraint: OutputConstraint) -> Any:
    source = build_output_grammar(constraint, {})
    entries = [_build_grammar_entry(LLMatcher, part) for part in source]
    matcher = LLMatcher(load_table(), msgspec.json.encode({"grammars": entries}).decode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def find_refusal(constraint: OutputConstraint, text: str) -> str | None:
    """Return where the grammar rejects a text, or None if it accepts the entire text."""
    matcher = make_matcher(constraint).deep_copy()
    data = text.encode()
    for at, byte in enumerate(data):
        if not matcher.consume_token(byte):
            return f"{data[:at].decode(errors='replace')} | {data[at:].decode(errors='replace')}"
    return None if matcher.is_accepting() else "it is not complete"


def read(call_format: CallFormat, text: str) -> list[Any]:
    return [
        (one.name, msgspec.json.decode(one.arguments)) if isinstance(one, ParsedCall) else one
        for one in call_format.read_calls(text, SCHEMAS)
    ]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_what_a_format_writes_is_enforced_and_read(call_format: CallFormat, value: Any) -> None:
    calls = [FunctionCall("", "weather", write_json(value)), FunctionCall("", "now", "{}")]
    choice = FunctionChoice(BOTH, required=True)
    constraint = OutputConstraint(None, choice, FUNCTIONS, call_format)
    for some in (calls[:1], calls[1:], calls):
        text = call_format.format_calls(some)
        assert find_refusal(constraint, text) is None
        expected = [(one.name, msgspec.json.decode(one.arguments)) for one in some]
        rules = OutputRules(None, call_format, SCHEMAS, is_open=False, marker_tokens=frozenset())
        for is_enforced in (False, True):
            parser = msgspec.structs.replace(rules, is_enforced=is_enforced).make_parser()
            outputs = [*parser.feed(ReadyText(text, [])), *parser.close()]
            starts = [one.name for one in outputs if isinstance(one, ParsedCallStart)]
            pieces = [
                "".join(
                    one.text
                    for one in outputs
                    if isinstance(one, ParsedCallArguments) and one.call == at
                )
                for at in range(len(starts))
            ]
            parsed_calls = list(zip(starts, map(msgspec.json.decode, pieces), strict=True))
            assert parsed_calls == expected
            assert not "".join(one.text for one in outputs if isinstance(one, ReadyText)).strip()


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_grammar_refuses_what_the_schema_forbids(call_format: CallFormat) -> None:
    choice = FunctionChoice(BOTH, required=True, parallel=False)
    constraint = OutputConstraint(None, choice, FUNCTIONS, call_format)
    good = VALUES[0]
    for bad in ({"days": 99}, {"unit": "kilo"}, {"city": "123456789"}, {"tags": ["a", "b", "c"]}):
        text = call_format.format_calls([FunctionCall("", "weather", write_json({**good, **bad}))])
        assert find_refusal(constraint, text) is not None
    two = call_format.format_calls([FunctionCall("", "now", "{}")] * 2)

    assert find_refusal(constraint, two) is not None

    other = call_format.format_calls([FunctionCall("", "other", "{}")])
    assert find_refusal(constraint, other) is not None


OPTIONS = {
    "auto": FunctionChoice(BOTH),
    "strict": FunctionChoice(BOTH),
    "parallel_tool_calls": FunctionChoice(BOTH, parallel=False),
    "required": FunctionChoice(BOTH, required=True),
    "named": FunctionChoice(("weather",), required=True, parallel=False),
    "allowed": FunctionChoice(("weather",)),
}


def run_script(
    scripted: Drive,
    call_format: CallFormat,
    script: str,
    options: Sequence[str],
    *,
    max_tokens: int = 500,
    stop_tokens: tuple[int, ...] = (),
) -> Any:
    """Run a conversation under each option, with requests numbered from 1.

    The model writes this script where the grammar permits it.
    """
    driver, runner = scripted(script)
    manager = driver.engine._grammar_manager
    template = f"x{{# tools {call_format.template_sign} #}}"
    tokenizer = copy.deepcopy(manager._tokenizer)
    tokenizer.chat_template = template
    manager._tokenizer = manager._input_processor._tokenizer = tokenizer
    runner.prompt = runner._prompt = 1
    commands = []
    stopping = StopParams(max_tokens=max_tokens, stop_token_ids=stop_tokens)
    for number, option in enumerate(options, 1):
        functions = tuple(
            msgspec.structs.replace(one, strict=option == "strict") for one in FUNCTIONS
        )
        prompt_input = PromptInput(turns=(ChatTurn("user", "x"),), functions=functions)
        commands.append(
            GenerateCommand(
                number, prompt_input, EngineSamplingParams(temperature=0),
                stopping, function_choice=OPTIONS[option],
            )
        )  # fmt: skip
    return driver.run(*commands)


def collect(driver: Any, request_id: int = 1) -> list[tuple[str, Any]]:
    starts = driver.select(ToolCallEvent, request_id)
    pieces = driver.select(ToolArgumentsEvent, request_id)
    texts = ["".join(one.text for one in pieces if one.call == start.call) for start in starts]
    return [(one.name, msgspec.json.decode(text)) for one, text in zip(starts, texts, strict=True)]


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_calls_are_returned_under_every_option(scripted: Drive, call_format: CallFormat) -> None:
    script = call_format.format_calls([FunctionCall("", "weather", write_json(VALUES[0]))])
    driver = run_script(scripted, call_format, script, [*OPTIONS])

    for number, option in enumerate(OPTIONS, 1):
        assert collect(driver, number) == [("weather", VALUES[0])], option
        assert driver.text(number).strip() == "", option
        assert driver.ended(number) == {0: ChoiceEndEvent(number, 0, "tool_calls")}, option


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_an_option_enforces_the_familys_own_format(
    scripted: Drive, call_format: CallFormat
) -> None:
    """The model starts a call with an invalid argument: the grammar makes it valid."""
    bad = {**VALUES[0], "days": 99}
    script = call_format.format_calls([FunctionCall("", "weather", write_json(bad))])
    options = ("strict", "required", "parallel_tool_calls")
    driver = run_script(scripted, call_format, script, options)

    for number, option in enumerate(options, 1):
        [(name, value)] = collect(driver, number)[:1]
        assert name == "weather", option
        assert jsonschema_rs.is_valid(SCHEMA, value), option


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_text_is_still_free_under_an_option(scripted: Drive, call_format: CallFormat) -> None:
    opening = "<|channel|>final<|message|>" if call_format.family == "gpt-oss" else ""
    driver = run_script(scripted, call_format, f"{opening}No, a < b.", ["strict"])
    assert (driver.text(), collect(driver)) == ("No, a < b.", [])


SCHEMA_FORMAT = OutputRule(
    "json", '{"type":"object","properties":{"a":{"type":"integer","maximum":9,"minimum":0}},'
    '"required":["a"],"additionalProperties":false}',
)  # fmt: skip


@pytest.mark.parametrize("mark", REASONING_MARKS, ids=lambda one: one.family)
def test_reasoning_may_precede_a_response_format_and_a_required_call(mark: ReasoningMark) -> None:
    between = "<|start|>assistant" if mark.answer_opening else ""
    reasoning = f"{mark.opening}I {{ think.{mark.closing}{between}"
    response = mark.answer_opening + '{"a": 1}'
    constraint = OutputConstraint(SCHEMA_FORMAT, reasoning=mark)
    for text in (reasoning + response, response):
        assert find_refusal(constraint, text) is None
        rules = OutputRules(mark, None, {}, is_open=False, marker_tokens=frozenset())
        parser = rules.make_parser()
        outputs = [*parser.feed(ReadyText(text, [])), *parser.close()]
        assert "".join(one.text for one in outputs if isinstance(one, ReadyText)) == '{"a": 1}'

    assert find_refusal(constraint, reasoning + mark.answer_opening + "no") is not None

    [*_, hermes] = CALL_FORMATS
    required = OutputConstraint(None, FunctionChoice(BOTH, required=True), FUNCTIONS, hermes, mark)
    assert (
        find_refusal(required, reasoning + hermes.format_calls([FunctionCall("", "now", "{}")]))
        is None
    )

    if not mark.answer_opening:
        opened = msgspec.structs.replace(constraint, is_open=True)
        assert find_refusal(opened, f"hm{mark.closing}\n\n" + '{"a": 1}') is None
        assert find_refusal(opened, '{"a": 1}') is not None


def parse(pieces: Sequence[str], rules: OutputRules) -> tuple[str, str, list[str]]:
    parser = rules.make_parser()
    outputs = [one for piece in pieces for one in parser.feed(ReadyText(piece, []))]
    outputs += parser.close()
    return (
        "".join(one.text for one in outputs if isinstance(one, ParsedReasoning)),
        "".join(one.text for one in outputs if isinstance(one, ReadyText)),
        [one.name for one in outputs if isinstance(one, ParsedCallStart)],
    )


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_a_call_ends_reasoning_that_was_not_closed(call_format: CallFormat) -> None:
    if call_format.at_start:
        return
    script = "Let me see.\n" + call_format.format_calls([FunctionCall("", "now", "{}")])
    mark = REASONING_MARKS[-1]
    rules = OutputRules(mark, call_format, SCHEMAS, is_open=True, marker_tokens=frozenset())

    assert parse([script], rules) == ("Let me see.", "", ["now"])
    assert parse(list(script), rules) == ("Let me see.", "", ["now"])

    spoken = f"I could write {call_format.opening}.</think>No."
    reasoning = f"I could write {call_format.opening}."
    assert parse(list(spoken), rules) == (reasoning, "No.", [])


# --- arguments in nested tags ---------------------------------------------------------------------

NESTED = TagArguments("<{key}>", "</{key}>", "item")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tags><item>a</item><item>b c</item></tags>", {"tags": ["a", "b c"]}),
        ("<tags>\n<item>1</item>\n</tags>", {"tags": ["1"]}),
        ("<place><lat>5</lat></place>", {"place": {"lat": 5}}),
        ('<tags>["a"]</tags><place>{"lat": 5}</place>', {"tags": ["a"], "place": {"lat": 5}}),
        ("<other><item>1</item><item>x</item></other>", {"other": [1, "x"]}),
        ("<other><one><two>true</two></one></other>", {"other": {"one": {"two": True}}}),
        ("<city>a < b</city><days>3</days>", {"city": "a < b", "days": 3}),
    ],
)
def test_lists_and_objects_are_read_from_nested_tags(text: str, expected: dict[str, Any]) -> None:
    assert NESTED.read(text, SCHEMA) == expected


@pytest.mark.parametrize(
    "text", ["<place>" + "".join(f"<k{i}>" for i in range(5000)), "<place><lat>1</lat>x</place>"]
)
def test_malformed_nested_tags_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text between the arguments"):
        NESTED.read(text, SCHEMA)


def test_deeply_nested_tags_are_refused() -> None:
    names = [f"k{i}" for i in range(3000)]
    text = "".join(f"<{name}>" for name in names) + "".join(f"</{name}>" for name in names[::-1])
    with pytest.raises(ValueError, match="nested too deeply"):
        NESTED.read(text, SCHEMA)


def test_key_of_a_list_entry_may_be_an_argument() -> None:
    schema = {"properties": {"order": {"properties": {"item": {"type": "string"}}}}}
    assert NESTED.read("<order><item>5</item></order>", schema) == {"order": {"item": "5"}}


# --- outputs that end within a section ----------------------------------------------------------


def write_cut_calls(call_format: CallFormat) -> tuple[str, list[range]]:
    """A section with two calls, and where the heads and arguments of each stand."""
    calls = [FunctionCall("", "weather", write_json(value)) for value in VALUES[1:3]]
    text, spans, position = call_format.format_calls(calls), list[range](), 0
    for call in calls:
        start = text.index("weather", position)
        arguments = call_format.arguments.write(call.arguments)
        position = text.index(arguments, start) + len(arguments)
        spans.append(range(start + 1, position))
    return text, spans


@pytest.mark.parametrize("is_enforced", [False, True])
@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_output_that_is_cut_off_in_a_call_keeps_the_finished_ones(
    call_format: CallFormat, is_enforced: bool
) -> None:
    """Given an output that ends anywhere, no call is returned that has less than was written.

    A call that is not finished is not counted as one, and those before it are returned.
    """
    text, spans = write_cut_calls(call_format)
    whole = [span.stop + len(call_format.call_suffix) for span in spans]
    rules = OutputRules(
        None,
        call_format,
        SCHEMAS,
        is_open=False,
        marker_tokens=frozenset(),
        is_enforced=is_enforced,
    )
    for end in sorted({*range(0, len(text), 4), *whole, len(text)}):
        parser = rules.make_parser()
        outputs = [*parser.feed(ReadyText(text[:end], [])), *parser.close(is_cut=True)]
        pieces = [""] * parser.calls
        for one in outputs:
            if isinstance(one, ParsedCallArguments):
                pieces[one.call] += one.text
        complete = pieces[:-1] if parser.is_in_call and call_format.streams_arguments else pieces
        ends_with_calls = parser.calls > 0 and not parser.is_in_call
        assert [*map(msgspec.json.decode, complete)] == VALUES[1 : 1 + len(complete)], text[:end]
        assert len(pieces) >= sum(end >= one for one in whole), text[:end]
        if any(end in span for span in spans):
            assert not ends_with_calls, text[:end]
        if end in (*whole, len(text)):
            assert ends_with_calls, text[:end]


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.family)
def test_stop_token_in_a_call_ends_the_choice_with_stop(
    scripted: Drive, call_format: CallFormat
) -> None:
    """Given a finished call and one with the stop token, the first is returned."""
    calls = [
        FunctionCall("", "weather", write_json({**VALUES[0], "city": city})) for city in ("x", "y@")
    ]
    script, options = call_format.format_calls(calls), ("auto", "required")
    driver = run_script(scripted, call_format, script, options, max_tokens=900, stop_tokens=(64,))

    for number, option in enumerate(options, 1):
        pieces = driver.select(ToolArgumentsEvent, number)
        first = "".join(one.text for one in pieces if one.call == 0)
        assert driver.ended(number) == {0: ChoiceEndEvent(number, 0, "stop", 64)}, option
        assert msgspec.json.decode(first) == VALUES[0], option
