"""What a chat template supports, found out by rendering a probe conversation with it.

The format of calls is the one in which the template writes the probe's call into the prompt; only
a template that writes none is recognised by a sign in its text. A format that is not known is
reported, never guessed: a wrong one would turn calls into text, and text into calls.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from jinja2.exceptions import TemplateError
from msgspec import Struct

from backends.torch.argument_syntax import write_json
from backends.torch.call_formats import (
    CALL_FORMATS,
    HERMES_FORMAT,
    CallFormat,
    ParsedCall,
    detect_by_sign,
)
from backends.torch.commands import build_effort_variables
from backends.torch.output_formats import ReasoningMark, detect_reasoning_mark
from protocols.core.catalog import ModelFeatures

Render = Callable[..., str]
"""Renders ``(messages, tools)`` with the template; further arguments are its variables."""
TemplateEvidence = Literal["rendered", "sign", "system message"]
REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message in which templates look for earlier reasoning."""

_NAME: Final = "probe_weather"
_ARGUMENTS: Final = {"city": "Rome 7", "days": 3}
_THOUGHT: Final = "probe thought"
_QUESTION: Final = "probe question"
_RESULT: Final = "probe result"
_CALL_ID: Final = "a1b2c3d4e"
_RENDER_ERRORS: Final = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError,
                         ValueError, RecursionError, SyntaxError, MemoryError)  # fmt: skip
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city"},
        "days": {"type": "integer", "description": "A number"},
    },
    "required": ["city"],
}
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": _NAME, "description": "Tells the weather", "parameters": _SCHEMA},
}
_TOOL_WITHOUT_DESCRIPTION: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": _NAME, "parameters": _SCHEMA},
}


class TemplateFeatures(Struct, frozen=True):
    """What a chat template supports."""

    call_format: CallFormat | None = None
    """The format of calls; None: it is not known."""
    evidence: TemplateEvidence | None = None
    """How the format of calls was found out."""
    shows_functions: bool = False
    """Whether the functions are in the prompt; otherwise the system message describes them."""
    needs_descriptions: bool = False
    """Whether it fails for a function without a description, as that of gpt-oss does."""
    writes_calls: bool = False
    """Whether earlier calls are in the prompt; otherwise they are written as text."""
    shows_results: bool = False
    """Whether results of calls are in the prompt; otherwise they are written as text."""
    text_arguments: bool = False
    """Earlier calls have their arguments as JSON text, not as an object."""
    reasoning: ReasoningMark | None = None
    reasoning_key: str | None = None
    """The field in which the template looks for reasoning between calls; None: in none."""
    follows_effort: bool = False
    """Whether the variables of a reasoning effort change the prompt."""
    problem: str | None = None
    """Why the format of calls is not known."""


def inspect_template(template: str, render: Render) -> TemplateFeatures:
    """Find out what a template supports; ``render`` may raise any error of a template."""
    plain = _try_render(render, _make_messages(), [_TOOL])
    shows_functions = plain is not None and _NAME in plain
    bare = _try_render(render, _make_messages(), [_TOOL_WITHOUT_DESCRIPTION])
    text_arguments, rendered = False, _render_calls(render, as_text=False)
    if rendered is None and (rendered := _render_calls(render, as_text=True)) is not None:
        text_arguments = True
    answer = None if rendered is None else rendered.rpartition(_QUESTION)[2]
    writes_calls = answer is not None and _NAME in answer
    results = _try_render(render, _make_results(), [_TOOL])
    shows_results = results is not None and _RESULT in results
    call_format, evidence, problem = _find_format(
        template, answer if writes_calls else None, shows_functions=shows_functions
    )
    return TemplateFeatures(
        call_format=call_format,
        evidence=evidence,
        shows_functions=shows_functions,
        needs_descriptions=plain is not None and bare is None,
        writes_calls=writes_calls,
        # A template that knows nothing of tools just writes their role.
        shows_results=shows_results and (shows_functions or writes_calls),
        text_arguments=text_arguments,
        reasoning=detect_reasoning_mark(template),
        reasoning_key=_find_reasoning_key(render, as_text=text_arguments),
        follows_effort=_follows_effort(render),
        problem=problem,
    )


def _find_format(
    template: str, answer: str | None, *, shows_functions: bool
) -> tuple[CallFormat | None, TemplateEvidence | None, str | None]:
    """The format, the evidence, and why there is none."""
    if answer is not None:
        found = _match_format(answer)
        if found is not None:
            return found, "rendered", None
        return None, None, "its template writes tool calls in a format that is not known"
    found = detect_by_sign(template)
    if found is not None and "tool" in template:
        return found, "sign", None
    if shows_functions:
        return None, None, "its template lists functions, but shows no format of tool calls"
    return HERMES_FORMAT, "system message", None


def _match_format(answer: str) -> CallFormat | None:
    """The format in which the probe's call is written: exactly, else in tolerant reading."""
    arguments = write_json(_ARGUMENTS)
    for one in CALL_FORMATS:
        call = f"{one.call_prefix}{_NAME}{one.name_separator}{one.arguments.write(arguments)}"
        exact = f"{call}{one.call_suffix}".strip()
        if exact in answer and one.section_prefix.strip() in answer and one.trigger in answer:
            return one
    return next(filter(lambda one: _reads_probe(one, answer), CALL_FORMATS), None)


def _reads_probe(call_format: CallFormat, answer: str) -> bool:
    expected = ParsedCall(_NAME, msgspec.json.encode(_ARGUMENTS).decode())
    for trigger in filter(None, (call_format.trigger, *call_format.other_triggers)):
        start = answer.find(trigger)
        while start >= 0:
            closing = answer.find(call_format.closing, start + len(trigger))
            end = closing + len(call_format.closing) if call_format.closing else len(answer)
            if closing >= 0 and expected in call_format.read_calls(
                answer[start:end], {_NAME: _SCHEMA}
            ):
                return True
            start = answer.find(trigger, start + 1)
    return False


# --- the probe conversation ---------------------------------------------------------------------


def _make_messages(*further: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _QUESTION}, *map(dict, further)]


def _make_calls(*, as_text: bool, count: int = 2, **fields: Any) -> list[dict[str, Any]]:
    """A call of the probe function, its result, and the same again."""
    arguments = write_json(_ARGUMENTS) if as_text else _ARGUMENTS
    calls = [
        {
            "id": _CALL_ID[:-1] + str(index),
            "type": "function",
            "function": {"name": _NAME, "arguments": arguments},
        }
        for index in range(count)
    ]
    assistant = {"role": "assistant", "content": "", "tool_calls": calls, **fields}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": _NAME, "content": _RESULT}
        for call in calls
    ]
    return _make_messages(assistant, *results)


def _make_results() -> list[dict[str, Any]]:
    """A call that is written as text, and its result."""
    assistant = {"role": "assistant", "content": "a call"}
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT}
    return _make_messages(assistant, result)


def _render_calls(render: Render, *, as_text: bool) -> str | None:
    """A conversation with two calls, or one if the template takes no more."""
    two = _try_render(render, _make_calls(as_text=as_text), [_TOOL])
    if two is not None:
        return two
    return _try_render(render, _make_calls(as_text=as_text, count=1), [_TOOL])


def _find_reasoning_key(render: Render, *, as_text: bool) -> str | None:
    for variables in ({}, {"thinking": True, "enable_thinking": True}):
        for key in REASONING_KEYS:
            messages = _make_calls(as_text=as_text, count=1, **{key: _THOUGHT})
            text = _try_render(functools.partial(render, **variables), messages, [_TOOL])
            if text is not None and _THOUGHT in text:
                return key
    return None


def _follows_effort(render: Render) -> bool:
    prompts = {
        _try_render(
            functools.partial(render, **build_effort_variables(effort)), _make_messages(), []
        )
        for effort in (None, "none", "low", "medium", "high")
    }
    return len(prompts - {None}) > 1


def _try_render(
    render: Render, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    try:
        return render(list(messages), list(tools))
    except _RENDER_ERRORS:
        return None


def summarize_features(
    features: TemplateFeatures | None, *, has_response_template: bool = False
) -> ModelFeatures:
    """What a person or the gateway wants to know; None: the model has no chat template.

    The tokenizer's response template parses calls whose format is not known otherwise.
    """
    if features is None:
        return ModelFeatures(problem="it has no chat template")
    call_format, mark = features.call_format, features.reasoning
    if call_format is None and has_response_template:
        known = summarize_features(features)
        name = "the tokenizer's response template"
        return msgspec.structs.replace(known, tool_calls=name, found_by=name, problem=None)
    enforced = call_format is not None and call_format.constrains_free_choice
    return ModelFeatures(
        chat=True,
        tool_calls=None if call_format is None else call_format.family,
        found_by=features.evidence,
        enforced="never" if call_format is None else "always" if enforced else "with options",
        functions_in="chat template" if features.shows_functions else "system message",
        reasoning=None if mark is None else f"{mark.opening.strip()} … {mark.closing}",
        keeps_reasoning=features.reasoning_key is not None,
        follows_effort=features.follows_effort,
        problem=features.problem,
    )
