"""Tool calls: optional, required and streamed, without their marks in the text."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from backends.torch.call_formats import CALL_FORMATS, HERMES_FORMAT, CallFormat
from backends.torch.detokenizer import OutputToken, ReadyText
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
    TextEvent,
    ToolArgumentsEvent,
    ToolCallEvent,
)
from backends.torch.output_formats import OutputParser, OutputRules
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
)
from backends.torch.template_features import TemplateFeatures, inspect_template
from backends.torch.tool_calls import build_function_schema
from tests.support.tiny_model import TEMPLATE, byte_tokenizer

Drive = Callable[..., Any]
ENFORCED = [one for one in CALL_FORMATS if one.constrains_free_choice]
"""Formats that a grammar always enforces."""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "note": {"enum": ['}"]', "{", "</tool_call>"]},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "weather": WEATHER,
    "weather_now": {"type": "object", "properties": {}, "additionalProperties": False},
}
FUNCTIONS = tuple(
    FunctionDefinition(name, f"tells the {name}", msgspec.json.encode(schema))
    for name, schema in SCHEMAS.items()
)
BOTH = tuple(SCHEMAS)
CALLS = [
    FunctionCall("", "weather", '{"city": "}\\"]", "days": [3, {}]}'),
    FunctionCall("", "weather_now", "{}"),
]
SPECIAL = {family: family.trigger if family.trigger.startswith("[") else "" for family in ENFORCED}


def make_template(family: CallFormat) -> str:
    """Make a chat template that renders tools, and calls in its family's format."""
    prefix, head, separator, suffix = (
        "{{ " + msgspec.json.encode(text).decode() + " }}"
        for text in (
            family.section_prefix, family.call_prefix, family.name_separator, family.call_suffix
        )
    )  # fmt: skip
    return (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}:"
        f"{prefix}{head}{{{{ c.function.name }}}}{separator}"
        "{{ c.function.arguments | tojson }}"
        + suffix
        + "{% endfor %}{{ m.tool_call_id or '' }}{% endfor %}{% for t in tools or [] %}"
        "{{ t | tojson }}{% endfor %}{# " + family.template_sign + " #}"
    )


def detect(template: str) -> CallFormat | None:
    """Return the format detected in a template."""
    return inspect(template).call_format


def inspect(template: str) -> TemplateFeatures:
    """Return what a template is found to support."""

    def render(messages: Any, tools: Any, **variables: Any) -> str:
        arguments = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
        tokenizer = byte_tokenizer()
        text: str = tokenizer.apply_chat_template(
            messages, chat_template=template, **arguments, **variables
        )
        return text

    return inspect_template(template, render)


@pytest.mark.parametrize(
    ("shown", "needed"),
    [
        ('{{ "// " + t.function.description }}', True),  # as gpt-oss's template has it
        ('{{ t.function["description"] + "" }}', True),
        ("{{ t.function | tojson }}", False),
        ("{{ t.function.description }}", False),
    ],
)
def test_template_that_fails_without_a_description_gets_an_empty_one(
    shown: str, needed: bool
) -> None:
    template = "{% for t in tools %}{{ t.function.name }}" + shown + "{% endfor %}"
    assert inspect(template).needs_descriptions is needed


PHI_4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] "
    "+ '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{{ '<|assistant|>' }}"
)
"""The template of Phi-4-mini-instruct, which looks for tools only in the system message."""


def test_functions_that_a_template_never_shows_are_in_the_system_message(noisy: Drive) -> None:
    features = inspect(PHI_4_MINI)
    assert not features.shows_functions
    assert features.call_format is not None
    assert features.call_format.family == "Phi-4-mini"
    driver = noisy(special="<|tool_call|>", template=PHI_4_MINI)
    shown = PromptInput(turns=(ChatTurn("user", "hi"),), functions=FUNCTIONS)
    (ids,) = driver.engine._input_processor.tokenize_prompts(shown, StopParams())
    prompt = driver.engine._tokenizer.decode(ids)
    system, _, user = prompt.partition("<|user|>")
    assert system.startswith("<|system|>")
    assert all(f'"{name}"' in system for name in BOTH)
    assert user.startswith("hi")


def test_missing_description_is_left_out_or_empty() -> None:
    function = FunctionDefinition("f")
    assert "description" not in build_function_schema(function)
    assert build_function_schema(function, needs_description=True)["description"] == ""


def make_command(
    calling: FunctionChoice | None = None, *, seed: int = 1, **fields: Any
) -> GenerateCommand:
    turns = fields.pop("turns", (ChatTurn("user", "hi"),))
    ending = fields.pop("ending", None) or StopParams(max_tokens=2000)
    picking = fields.pop("picking", None) or EngineSamplingParams(temperature=1, seed=seed)
    prompt_input = PromptInput(turns=turns, functions=FUNCTIONS)
    return GenerateCommand(
        1, prompt_input, picking, ending, function_choice=calling or FunctionChoice(BOTH), **fields
    )


def collect_calls(driver: Any, choice: int = 0) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls; each starts once, and in order."""
    begun = [one for one in driver.select(ToolCallEvent) if one.choice == choice]
    assert [one.call for one in begun] == list(range(len(begun)))
    assert all(re.fullmatch("call_[0-9a-f]{24}", one.id) for one in begun)
    pieces = [one for one in driver.select(ToolArgumentsEvent) if one.choice == choice]
    texts = ["".join(one.text for one in pieces if one.call == i) for i in range(len(begun))]
    calls = [(one.name, msgspec.json.decode(text)) for one, text in zip(begun, texts, strict=True)]
    assert all(jsonschema_rs.is_valid(SCHEMAS[name], value) for name, value in calls)
    return calls


# --- required calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENFORCED, ids=lambda family: family.template_sign)
def test_required_tool_call_is_valid_for_any_model(noisy: Drive, family: CallFormat) -> None:
    several = 0
    for seed in range(8):
        driver = noisy(special=SPECIAL[family], template=make_template(family))
        driver.run(make_command(FunctionChoice(BOTH, required=True), seed=seed))
        calls = collect_calls(driver)
        several = max(several, len(calls))
        assert driver.ended() == {0: ChoiceEndEvent(1, 0, "tool_calls")}
        assert driver.text() == ""
        assert driver.finished().completion_tokens > len(calls) * 20

    assert 1 < several <= 16


@pytest.mark.parametrize("family", ENFORCED, ids=lambda family: family.template_sign)
def test_named_function_is_called_once(noisy: Drive, family: CallFormat) -> None:
    for name in BOTH:
        driver = noisy(special=SPECIAL[family], template=make_template(family))
        driver.run(make_command(FunctionChoice((name,), required=True, parallel=False)))
        assert [call[0] for call in collect_calls(driver)] == [name]
        assert driver.ended()[0].reason == "tool_calls"


def test_tool_call_arguments_are_streamed(noisy: Drive) -> None:
    driver = noisy().run(make_command(FunctionChoice(("weather",), required=True, parallel=False)))
    assert len(driver.select(ToolArgumentsEvent)) > 30
    assert "".join(one.text for one in driver.select(ToolArgumentsEvent)).startswith('{"city": "')


def test_held_back_tool_call_tokens_use_no_credit(noisy: Drive) -> None:
    """Sixteen choices start tool calls whose output is withheld, without any credit."""
    choice = FunctionChoice(("weather",), required=True, parallel=False)
    spec = make_command(choice, n=16, best_of=16, initial_credit=20)
    driver = noisy().run(spec)

    assert sum(one.token_count for one in driver.select(ToolCallEvent)) > 200

    driver.engine.credit(1, 10_000)
    assert len(driver.run().ended()) == 16


def test_each_choice_has_its_own_tool_calls(noisy: Drive) -> None:
    spec = make_command(FunctionChoice(("weather",), required=True, parallel=False), n=3, best_of=3)
    driver = noisy().run(spec)
    assert len({msgspec.json.encode(collect_calls(driver, choice)) for choice in range(3)}) == 3

    best = noisy().run(msgspec.structs.replace(spec, n=1, best_of=3))
    assert collect_calls(best)[0][0] == "weather"


def test_truncated_tool_call_ends_with_length(noisy: Drive) -> None:
    calling = FunctionChoice(("weather",), required=True)
    driver = noisy().run(make_command(calling, ending=StopParams(max_tokens=60)))
    assert driver.ended()[0].reason == "length"
    assert "".join(one.text for one in driver.select(ToolArgumentsEvent)).startswith('{"city"')

    early = noisy().run(make_command(calling, ending=StopParams(max_tokens=20)))
    assert (early.text(), early.select(ToolCallEvent), early.ended()[0].reason) == (
        "",
        [],
        "length",
    )


def test_unsupported_schema_is_rejected_only_for_strict_functions(noisy: Drive) -> None:
    odd = (
        b'{"properties":{"a":{"enum":[1]}},"required":["a"],"additionalProperties":false,"not":{}}'
    )
    for strict in (False, True):
        prompt_input = PromptInput(
            turns=(ChatTurn("user", "hi"),), functions=(FunctionDefinition("f", None, odd, strict),)
        )
        calling = FunctionChoice(("f",), required=True, parallel=False)
        driver = noisy().run(
            GenerateCommand(1, prompt_input, EngineSamplingParams(seed=1), function_choice=calling)
        )
        if strict:
            assert (driver.failed().kind, driver.failed().param) == ("unsupported", "tools")
            assert "unsupported keys: not" in driver.failed().message
        else:
            assert "".join(one.text for one in driver.select(ToolArgumentsEvent)) == '{"a": 1}'


@pytest.mark.parametrize(
    ("parameters", "message"),
    [(b'{"type":"string"}', "must have type object"), (b"[1]", "must be a JSON Schema")],
)
def test_invalid_function_parameters_are_rejected(
    noisy: Drive, parameters: bytes, message: str
) -> None:
    prompt_input = PromptInput(
        turns=(ChatTurn("user", "hi"),), functions=(FunctionDefinition("f", None, parameters),)
    )
    failed = (
        noisy()
        .run(GenerateCommand(1, prompt_input, function_choice=FunctionChoice(("f",))))
        .failed()
    )

    assert (failed.kind, failed.param) == ("invalid", "tools")
    assert message in failed.message


# --- optional calls -------------------------------------------------------------------------------


def run_script(
    scripted: Drive, script: str, calling: FunctionChoice | None = None, **fields: Any
) -> Any:
    driver, _ = scripted(script)
    prompt_input = PromptInput(prompts=("x",), functions=FUNCTIONS)
    ending = fields.pop("ending", None) or StopParams(max_tokens=400)
    greedy = EngineSamplingParams(temperature=0)
    calling = calling or FunctionChoice(BOTH)
    return driver.run(
        GenerateCommand(
            1, prompt_input, greedy, ending, function_choice=calling, token_ids=True, **fields
        )
    )


def test_text_without_a_tool_call_stays_text(scripted: Drive) -> None:
    for text in ("I can't say.", "a < b", "see <tool_cal", "\n\nhm\n", "<tool_call"):
        driver = run_script(scripted, text)
        assert (driver.text(), driver.ended()[0].reason) == (text, "eos")
        assert bytes(driver.ids()[: len(text)]) == text.encode()


@pytest.mark.parametrize(
    ("call", "stop", "reason"),
    [(CALLS[0], "city", "stop"), (CALLS[1], "</tool_call>", "tool_calls")],
)
def test_stop_string_in_the_arguments_ends_a_choice_with_stop(
    scripted: Drive, call: FunctionCall, stop: str, reason: Any
) -> None:
    """Given a stop string in the arguments, or behind complete ones."""
    script = HERMES_FORMAT.format_calls([call])
    driver = run_script(scripted, script, ending=StopParams(max_tokens=400, stop=(stop,)))

    assert [one.name for one in driver.select(ToolCallEvent)] == [call.name]
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, reason, stop)}


@pytest.mark.parametrize(
    ("stop", "reason"), [('"weather"', "stop"), ("city", "stop"), ("</tool_call>", "tool_calls")]
)
def test_stop_string_in_a_further_call_ends_a_choice_with_stop(
    scripted: Drive, stop: str, reason: Any
) -> None:
    """Given a complete call, and a stop string in the head or the arguments of the second."""
    script = HERMES_FORMAT.format_calls([CALLS[1], CALLS[0]])
    ending = StopParams(max_tokens=400, stop=(stop,))
    driver = run_script(scripted, script, ending=ending)

    assert driver.select(ToolCallEvent)[0].name == CALLS[1].name
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, reason, stop)}


def test_text_followed_by_tool_calls(scripted: Drive) -> None:
    script = "Let me see. \n" + HERMES_FORMAT.format_calls([CALLS[1], CALLS[1]])
    driver = run_script(scripted, script)
    assert driver.text() == "Let me see."
    assert [name for name, _ in collect_calls(driver)] == ["weather_now", "weather_now"]
    assert driver.ended() == {0: ChoiceEndEvent(1, 0, "tool_calls")}

    token_counts = [
        one.token_count
        for one in driver.events
        if isinstance(one, TextEvent | ToolCallEvent | ToolArgumentsEvent)
    ]
    assert len(script) - 40 < sum(token_counts) <= len(script)


def test_tool_call_is_enforced_after_the_trigger(scripted: Drive) -> None:
    driver = run_script(scripted, "<tool_call> never mind")
    assert driver.text() == ""
    assert collect_calls(driver)[0][0] in BOTH


def test_parallel_false_allows_one_tool_call(scripted: Drive) -> None:
    script = HERMES_FORMAT.format_calls([CALLS[1], CALLS[1]])
    driver = run_script(scripted, script, FunctionChoice(BOTH, parallel=False))
    assert len(collect_calls(driver)) == 1


def test_truncated_tool_call_is_not_returned_as_text(scripted: Drive) -> None:
    driver = run_script(
        scripted, 'Hm. <tool_call>\n{"name": "weather_now"', ending=StopParams(max_tokens=30)
    )
    assert (driver.text(), driver.select(ToolCallEvent), driver.ended()[0].reason) == (
        "Hm.",
        [],
        "length",
    )


def test_output_format_or_tool_calls(scripted: Drive) -> None:
    form = OutputRule("json", '{"type":"object","properties":{"a":{"const":"<tool_call>"}},'
                '"required":["a"],"additionalProperties":false}')  # fmt: skip
    plain = run_script(scripted, '{"a": "<tool_call>"}', output_format=form)
    assert plain.text() == '{"a": "<tool_call>"}'
    assert plain.ended()[0].reason == "eos"

    other = run_script(scripted, "no form", output_format=form)
    assert collect_calls(other)

    calls = run_script(scripted, HERMES_FORMAT.format_calls([CALLS[1]]), output_format=form)
    assert collect_calls(calls) == [("weather_now", {})]


def test_llama_tool_calls_begin_with_a_brace(noisy: Drive) -> None:
    llama = ENFORCED[-2]
    kinds = set()

    for seed in range(12):
        bias = {123: 5.0}
        picking = EngineSamplingParams(temperature=1, seed=seed, logit_bias=bias)
        driver = noisy(template=make_template(llama)).run(make_command(seed=seed, picking=picking))
        kinds.add(bool(collect_calls(driver)))
        assert bool(driver.text()) != bool(driver.select(ToolCallEvent)) or not driver.select(
            ToolCallEvent
        )
        assert not driver.text().lstrip().startswith("{")

    assert kinds == {True, False}


def test_tool_call_trigger_can_be_a_special_token(noisy: Drive) -> None:
    for family in ENFORCED[:3]:
        picking = EngineSamplingParams(temperature=1, seed=4, logit_bias={259: 4.0})
        driver = noisy(special=family.trigger, template=make_template(family))
        driver.run(make_command(FunctionChoice(BOTH, parallel=False), picking=picking))
        assert collect_calls(driver)
        assert family.trigger not in driver.text()
        assert driver.ended()[0].reason == "tool_calls"


def test_other_special_tokens_are_not_shown_as_text(noisy: Drive) -> None:
    """Only the mark that must be visible is shown."""
    family = ENFORCED[0]
    driver = noisy(special=family.trigger, template=make_template(family))
    picking = EngineSamplingParams(temperature=0, logit_bias={257: 1000.0})

    driver.run(make_command(ending=StopParams(max_tokens=9, include_stop=True), picking=picking))

    assert (driver.text(), driver.ended()[0].reason) == ("", "eos")


# --- parsing --------------------------------------------------------------------------------------


def make_parser(family: CallFormat, *, is_enforced: bool = True) -> OutputParser:
    schemas: dict[str, Any] = {name: {} for name in BOTH}
    rules = OutputRules(
        None, family, schemas, is_open=False, marker_tokens=frozenset(), is_enforced=is_enforced
    )
    return rules.make_parser()


def test_parser_knows_whether_a_further_call_is_complete() -> None:
    """Calls that are only parsed come with their section; a part of one stays text."""
    script = HERMES_FORMAT.format_calls(CALLS)
    for size, is_cut in ((script.index("weather_now"), True), (len(script), False)):
        parser = make_parser(HERMES_FORMAT, is_enforced=False)
        list(parser.feed(ReadyText(script[:size], [])))
        list(parser.close())
        assert (parser.calls, parser.is_in_call) == (1 if is_cut else 2, is_cut)


@pytest.mark.parametrize("family", ENFORCED, ids=lambda family: family.template_sign)
@pytest.mark.parametrize("lead", ["", "Well: ", "[TOOL_", "<tool <tool_call"])
def test_tool_calls_are_parsed_for_any_chunking(family: CallFormat, lead: str) -> None:
    anywhere = bool(family.trigger)
    text = (lead if anywhere else "") + family.format_calls(CALLS)
    chance = random.Random(0)
    for _ in range(50):
        speech = make_parser(family)
        outputs: list[ParsedOutput] = []
        at = 0
        while at < len(text):
            size = chance.choice((1, 2, 5, 40))
            tokens = [OutputToken(at, None)]
            outputs += speech.feed(ReadyText(text[at : at + size], tokens))
            at += size
        outputs += speech.close()
        assert "".join(one.text for one in outputs if isinstance(one, ReadyText)) == (
            lead.rstrip() if anywhere else ""
        )
        assert [one.name for one in outputs if isinstance(one, ParsedCallStart)] == [
            "weather",
            "weather_now",
        ]
        for number, call in enumerate(CALLS):
            pieces = [
                one
                for one in outputs
                if isinstance(one, ParsedCallArguments) and one.call == number
            ]
            assert "".join(one.text for one in pieces) == call.arguments
        assert speech.calls == 2


def test_format_without_trigger_needs_the_full_text_to_be_calls() -> None:
    llama = ENFORCED[-2]
    for text in ('{"name": "Bob"}', 'x {"name": "weather", "parameters": {}}'):
        speech = make_parser(llama)
        outputs = [*speech.feed(ReadyText(text, [])), *speech.close()]
        assert all(isinstance(one, ReadyText) for one in outputs)
        assert "".join(one.text for one in outputs if isinstance(one, ReadyText)) == text


# --- conversations ------------------------------------------------------------------------------

TALK = (
    ChatTurn("system", "be brief"),
    ChatTurn("user", "and now?", "Ann"),
    ChatTurn("assistant", "", None, (FunctionCall("call_abcdefghijkl", "weather", '{"days": 1}'),)),
    ChatTurn("tool", "sunny", call_id="call_abcdefghijkl"),
)


def render_prompt(
    driver: Any, turns: Sequence[ChatTurn], functions: Sequence[FunctionDefinition] = FUNCTIONS
) -> str:
    reader = driver.engine._input_processor
    (ids,) = reader.tokenize_prompts(
        PromptInput(turns=tuple(turns), functions=tuple(functions)), StopParams()
    )
    text: str = driver.engine._tokenizer.decode(ids)
    return text


def test_template_with_functions_gets_all_functions_and_calls(noisy: Drive) -> None:
    text = render_prompt(noisy(template=make_template(HERMES_FORMAT)), TALK)
    assert "<system>be brief<user>and now?<assistant>call_abcdefghijkl:" in text
    assert '"arguments": {"days": 1}' in text
    assert "<tool>sunnycall_abcdefghijkl" in text
    assert text.count('"type": "function"') == 2
    assert "tells the weather_now" in text


def test_mistral_template_gets_short_call_ids(noisy: Drive) -> None:
    text = render_prompt(noisy(template=make_template(ENFORCED[0])), TALK)
    assert "defghijkl:" in text
    assert "sunnydefghijkl" in text
    assert "call_" not in text


def test_invalid_json_arguments_are_rendered_as_text(noisy: Drive) -> None:
    odd = ChatTurn("assistant", "", None, (FunctionCall("c", "f", "{oops"),))
    assert '"{oops"' in render_prompt(noisy(template=make_template(HERMES_FORMAT)), (odd,))


def test_template_without_functions_gets_functions_in_the_system_message(noisy: Drive) -> None:
    text = render_prompt(noisy(), TALK)
    system, _, rest = text.partition("<user>")

    assert system.startswith("<system>be brief\n\nYou can call these functions:\n{")
    assert '"name":"weather_now"' in system
    assert HERMES_FORMAT.describe_call() in system
    assert "<assistant>" + HERMES_FORMAT.format_calls(TALK[2].calls) in rest
    assert "<user><tool_response>\nsunny\n</tool_response>" in rest
    assert "You can call" not in render_prompt(noisy(), TALK, ())
    assert render_prompt(noisy(), TALK[1:2]).startswith("<system>You can call")


def test_assistant_text_before_tool_calls_is_rendered(noisy: Drive) -> None:
    turn = ChatTurn("assistant", "Let me see.", None, TALK[2].calls)
    assert "<assistant>Let me see.\n<tool_call>\n{" in render_prompt(noisy(), (turn,))


def test_tool_call_format_is_detected_from_the_template() -> None:
    assert [detect(make_template(one)) for one in ENFORCED] == ENFORCED
    assert detect(TEMPLATE) == HERMES_FORMAT
    assert detect("{{ tools }}" + TEMPLATE) is None
    assert detect("{{ messages }}") is None
