"""Conversations, answered whole: W1 to W40."""

import re
from typing import Any

from gateway.conformance.cases import Answer, expect
from gateway.conformance.openai.shapes import (
    ARGUMENTS,
    CALL_ID,
    HELLO,
    HI,
    PIECES,
    answer,
    called,
    chat,
    functions,
    invalid,
    logprobs,
    talk,
    tools,
    whole,
)

HEADERS = {
    "x-request-id": re.compile(".+"),
    "openai-version": "2020-10-01",
    "openai-processing-ms": re.compile(r"\d+"),
    "cache-control": None,
}
NULLS = dict.fromkeys(("max_tokens", "temperature", "stop", "n", "seed", "tools", "stream"))
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "42"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALLS = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
LEGACY = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "function_call": {"name": "f", "arguments": ARGUMENTS},
}


def named(kind: str, name: str) -> dict[str, Any]:
    """A tool_choice of one."""
    return {"type": kind, kind: {"name": name}}


def model_is_mock(got: Answer) -> None:
    """The answer shows the name that was asked for."""
    expect(got.json["model"] == "mock", f"model: {got.json['model']!r}")


SCALARS = (
    chat("W1", body_is=whole(), answer_headers=HEADERS, check=model_is_mock),
    chat(
        "W2", given={"max_tokens": 2}, body_is=whole("Hello world", reason="length", completion=2)
    ),
    chat(
        "W3",
        given={"max_completion_tokens": 1, "max_tokens": 3},
        body_is=whole("Hello", reason="length", completion=1),
    ),
    chat(
        "W4",
        given={"max_tokens": 0},
        **invalid(
            "integer_below_min_value",
            "max_tokens",
            "Invalid 'max_tokens': integer below minimum value. "
            "Expected a value >= 1, but got 0 instead.",
        ),
    ),
    chat(
        "W4 max_completion_tokens",
        given={"max_completion_tokens": 0},
        **invalid("integer_below_min_value", "max_completion_tokens"),
    ),
    chat("W5", given=NULLS, body_is=whole()),
    chat(
        "W6",
        given={"temperature": 2.1},
        **invalid(
            "decimal_above_max_value",
            "temperature",
            "Invalid 'temperature': decimal above maximum value. "
            "Expected a value <= 2, but got 2.1 instead.",
        ),
    ),
    chat("W7", given={"temperature": -0.1}, **invalid("decimal_below_min_value", "temperature")),
    chat(
        "W8",
        given={"temperature": "1"},
        **invalid(
            "invalid_type",
            "temperature",
            "Invalid type for 'temperature': expected a decimal, but got a string instead.",
        ),
    ),
    chat("W8 boolean", given={"temperature": True}, **invalid("invalid_type", "temperature")),
    chat("W8 integer", given={"max_tokens": 2.5}, **invalid("invalid_type", "max_tokens")),
    chat(
        "W8 integral",
        given={"max_tokens": 1.0},
        body_is=whole("Hello", reason="length", completion=1),
    ),
    chat("W9", given={"temperature": 0}, body_is=whole()),
    chat("W10", given={"top_p": 1.5}, **invalid("decimal_above_max_value", "top_p")),
    chat("W10 zero", given={"top_p": 0}, body_is=whole()),
    chat("W11", given={"n": 2}, body_is=whole(HELLO, HELLO, completion=6)),
    chat("W12", given={"n": 0}, **invalid("integer_below_min_value", "n")),
    chat("W13", given={"n": 129}, **invalid("integer_above_max_value", "n")),
    chat("W14", given={"stop": " world"}, body_is=whole("Hello", completion=int)),
    chat("W15", given={"stop": ["x", "!"]}, body_is=whole("Hello world", completion=int)),
    chat(
        "W16",
        given={"stop": ["1", "2", "3", "4", "5"]},
        **invalid(
            "array_above_max_length",
            "stop",
            "Invalid 'stop': array too long. Expected an array with maximum length 4, "
            "but got an array with length 5 instead.",
        ),
    ),
    chat("W16 empty string", given={"stop": [""]}, **invalid("empty_string", "stop")),
    chat("W17", given={"stop": "lo wor"}, body_is=whole("Hel", completion=int)),
    chat(
        "W18",
        given={"logprobs": True, "top_logprobs": 2},
        body_is=whole(logprobs=logprobs(*PIECES, top=2)),
    ),
    chat(
        "W18 no alternatives",
        given={"logprobs": True},
        body_is=whole(logprobs=logprobs(*PIECES)),
    ),
    chat("W19", given={"top_logprobs": 2}, **invalid(None, "top_logprobs")),
    chat(
        "W20",
        given={"top_logprobs": 21, "logprobs": True},
        **invalid("integer_above_max_value", "top_logprobs"),
    ),
    chat(
        "W21",
        given={"presence_penalty": -2.5},
        **invalid("decimal_below_min_value", "presence_penalty"),
    ),
    chat("W22", given={"seed": 2**63}, **invalid("integer_above_max_value", "seed")),
    chat("W22 negative", given={"seed": -(2**63)}, body_is=whole()),
)

MESSAGES = (
    chat("W23", given={"messages": None}, **invalid("missing_required_parameter", "messages")),
    talk("W24", **invalid("empty_array", "messages")),
    talk("W25", {"role": "bot", "content": "hi"}, **invalid("invalid_value", "messages[0].role")),
    talk("W26", {"role": "user"}, **invalid("missing_required_parameter", "messages[0].content")),
    talk(
        "W26 a number",
        {"role": "user", "content": 5},
        **invalid("invalid_type", "messages[0].content"),
    ),
    talk(
        "W27",
        {
            "role": "user",
            "content": [{"type": "text", "text": "say"}, {"type": "text", "text": " hi"}],
        },
        body_is=whole(),
    ),
    talk(
        "W28",
        {"role": "user", "content": [IMAGE]},
        **invalid("unsupported_value", "messages[0].content[0].type"),
    ),
    talk(
        "W29",
        HI,
        TOOL,
        **invalid(
            None,
            "messages.[1].role",
            "Invalid parameter: messages with role 'tool' must be a response to a preceding "
            "message with 'tool_calls'.",
        ),
    ),
    talk("W30", HI, called("c1"), HI, **invalid(None, "messages.[2].role", re.compile(".*: c1"))),
    talk(
        "W30 one of two",
        HI,
        called("c1", "c2"),
        TOOL,
        **invalid(None, "messages.[2].role", re.compile(".*: c2")),
    ),
    talk("W31", HI, called("c1"), TOOL, body_is=whole(prompt=3)),
    talk("W32", {"role": "developer", "content": "be brief"}, HI, body_is=whole(prompt=4)),
    talk(
        "W32 system later",
        HI,
        {"role": "system", "content": "be brief"},
        HI,
        body_is=whole(prompt=6),
    ),
)

TOOLS = (
    chat("W33", given={"tools": []}, **invalid("empty_array", "tools")),
    chat(
        "W34",
        given={"tools": tools("f", "g"), "tool_choice": "required"},
        body_is=answer(CALLS, reason="tool_calls", completion=int),
    ),
    chat(
        "W34 named",
        given={"tools": tools("g", "f"), "tool_choice": named("function", "f")},
        body_is=answer(CALLS, reason="tool_calls", completion=int),
    ),
    chat("W35", given={"tools": tools("f"), "tool_choice": "auto"}, body_is=whole()),
    chat(
        "W35 asked for",
        given={
            "tools": tools("f"),
            "messages": [{"role": "user", "content": "use the tool"}],
        },
        body_is=answer(CALLS, reason="tool_calls", prompt=3, completion=int),
    ),
    chat(
        "W36",
        given={"tools": tools("f"), "tool_choice": named("function", "nope")},
        **invalid("invalid_value", "tool_choice", re.compile(".*'nope'.*")),
    ),
    chat("W37", given={"tool_choice": "auto"}, **invalid("invalid_value", "tool_choice")),
    chat("W37 none", given={"tool_choice": "none"}, body_is=whole()),
    chat(
        "W38",
        given={"functions": functions("f"), "function_call": {"name": "f"}},
        body_is=answer(LEGACY, reason="function_call", completion=int),
    ),
    chat(
        "W39",
        given={"response_format": {"type": "json_schema"}},
        **invalid("missing_required_parameter", "response_format.json_schema"),
    ),
    chat(
        "W40",
        given={"response_format": {"type": "xml"}},
        **invalid("invalid_value", "response_format.type"),
    ),
)

CASES = (*SCALARS, *MESSAGES, *TOOLS)
