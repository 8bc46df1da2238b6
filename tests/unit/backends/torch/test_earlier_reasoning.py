"""Earlier reasoning is given to templates that render it, and its tokens are counted."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from backends.torch.backend import _ResponseStream
from backends.torch.commands import (
    build_generate_command,
    find_unsupported_params,
)
from backends.torch.ipc import (
    ChatTurn,
    EngineSamplingParams,
    FunctionCall,
    FunctionDefinition,
    GenerateCommand,
    PromptInput,
    ReasoningEvent,
    RequestFinishedEvent,
    StopParams,
)
from backends.torch.template_features import summarize_features
from protocols.core.catalog import ModelFeatures
from protocols.core.events import ReasoningDelta
from protocols.core.request import (
    GenerationRequest,
    Message,
    ReasoningOptions,
    ReasoningPart,
    TextPart,
    ToolCall,
)

Drive = Callable[..., Any]
KEYS = ("reasoning_content", "reasoning", "thinking")
TALK = (
    ChatTurn("user", "and now?"),
    ChatTurn("assistant", "", None, (FunctionCall("c", "f", "{}"),), reasoning="I look it up."),
    ChatTurn("tool", "sunny", call_id="c"),
)


def make_template(key: str) -> str:
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>"
        f"{{% if m.{key} %}}<think>{{{{ m.{key} }}}}</think>{{% endif %}}{{{{ m.content }}}}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
        "</tool_call>{% endfor %}{% endfor %}"
    )


def render(driver: Any, template: str) -> tuple[str, ModelFeatures]:
    reader = driver.engine._input_processor
    reader._tokenizer = copy.deepcopy(reader._tokenizer)
    reader._tokenizer.chat_template = template
    prompt_input = PromptInput(turns=TALK, functions=(FunctionDefinition("f"),))
    (ids,) = reader.tokenize_prompts(prompt_input, StopParams())
    text: str = reader._tokenizer.decode(ids)
    return text, summarize_features(reader.get_model_features())


@pytest.mark.parametrize("key", KEYS)
def test_reasoning_is_in_the_field_that_the_template_reads(noisy: Drive, key: str) -> None:
    text, features = render(noisy(), make_template(key))
    assert "<think>I look it up.</think>" in text
    assert features.keeps_reasoning


def test_a_template_that_shows_no_reasoning_gets_none(noisy: Drive) -> None:
    text, features = render(noisy(), make_template("nothing"))
    assert "I look it up." not in text
    assert not features.keeps_reasoning


def test_reasoning_of_a_message_is_reported_unless_the_model_gets_it() -> None:
    call = ToolCall("c", "f", "{}")
    message = Message(
        "assistant", (ReasoningPart("I look it up."), TextPart("")), tool_calls=(call,)
    )
    request = GenerationRequest(model="m", kind="chat", messages=(message,))

    [turn] = build_generate_command(request, 1, 9.0, templates=False).input.turns

    assert turn.reasoning == "I look it up."

    for features, is_reported in (
        (None, True),
        (ModelFeatures(chat=True), True),
        (ModelFeatures(chat=True, keeps_reasoning=True), False),
    ):
        unsupported = find_unsupported_params(request, {}, templates=False, features=features)
        assert bool([one for one in unsupported if "reasoning" in one.detail]) == is_reported


def test_tokens_of_reasoning_are_counted(scripted: Drive) -> None:
    for template, script, expected in (
        ("x{# </think> #}", "<think>hm, hm</think>Yes.", len("<think>hm, hm")),
        ("x{# </think> #}", "Yes.", 0),
        ("x", "Yes.", None),
    ):
        driver, runner = scripted(script)
        manager = driver.engine._grammar_manager
        tokenizer = copy.deepcopy(manager._tokenizer)
        tokenizer.chat_template = template
        manager._tokenizer = manager._input_processor._tokenizer = tokenizer
        runner.prompt = runner._prompt = 1
        prompt_input = PromptInput(turns=(ChatTurn("user", "x"),))
        greedy, ending = EngineSamplingParams(temperature=0), StopParams(max_tokens=60)
        driver.run(GenerateCommand(1, prompt_input, greedy, ending))
        [finished] = driver.select(RequestFinishedEvent)
        assert finished.reasoning_tokens == expected


def test_hiding_reasoning_is_supported_and_a_budget_is_reported() -> None:
    request = GenerationRequest(
        model="m",
        kind="chat",
        messages=(Message("user", (TextPart("x"),)),),
        reasoning=ReasoningOptions(include=False, budget=100),
    )
    unsupported = find_unsupported_params(request, {}, templates=False)

    assert [one.path for one in unsupported] == ["reasoning.budget"]


def test_hidden_reasoning_is_not_returned_but_counted() -> None:
    nothing: Any = None
    for include, expected in ((False, []), (None, [ReasoningDelta("hm", 0)])):
        request = GenerationRequest(
            model="m", kind="chat", reasoning=ReasoningOptions(include=include)
        )
        stream = _ResponseStream(request, nothing, asyncio.Queue(), None, 0.0)
        assert stream._map_event(ReasoningEvent(1, 0, "hm", 200)) == expected
        assert stream.take_credit() == 200


def list_effort_losses(features: ModelFeatures | None, effort: str) -> list[tuple[str, str]]:
    request = GenerationRequest(
        model="m",
        kind="chat",
        messages=(Message("user", ()),),
        reasoning=ReasoningOptions(effort=effort),
    )
    names = {"reasoning.effort": "output_config.effort"}
    losses = find_unsupported_params(request, names, templates=True, features=features)
    return [(one.field, one.reason) for one in losses]


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking", "reasoning_effort"])
def test_effort_is_approximated_if_the_template_reads_it(noisy: Drive, variable: str) -> None:
    _, features = render(noisy(), make_template("thinking") + f"{{{{ {variable} }}}}")
    assert features.follows_effort
    expected = [("output_config.effort", "approximated")]
    assert list_effort_losses(features, "low") == expected
    assert list_effort_losses(None, "low") == expected


def test_effort_without_effect_is_dropped(noisy: Drive) -> None:
    """Given a template that reads no effort, and reasons in any case or never."""
    _, features = render(noisy(), make_template("thinking") + "{# <think> </think> #}")
    expected = [("output_config.effort", "dropped")]
    assert features.reasoning
    assert not features.follows_effort
    assert list_effort_losses(features, "low") == expected
    assert list_effort_losses(features, "none") == expected
    assert list_effort_losses(ModelFeatures(), "low") == expected
    assert list_effort_losses(ModelFeatures(), "none") == []
