"""Probes: structured output, tool calls, log probabilities, reasoning."""

from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.tools.probe.basic import COUNT
from gateway.tools.probe.client import (
    Inconclusive,
    Probe,
    UnexpectedResponse,
    WorkerClient,
    WorkerRefused,
    expect,
)
from protocols.core.aggregate import UnaryChoice
from protocols.core.json_text import decode_json
from protocols.core.request import (
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    OutputFormat,
    ReasoningOptions,
    RegexFormat,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
)

_STOPPING: Final = StopConditions(max_tokens=128)
_JSON: Final = '{"city":"Paris"}'
_WEATHER: Final = "What is the weather in Paris? Use the tool."
_NAME: Final = "get_weather"
_SCHEMA: Final = Raw(
    b'{"type":"object","properties":{"city":{"type":"string"}},"required":["city"],'
    b'"additionalProperties":false}'
)
_TOOL: Final = Tool(_NAME, "The weather of a city.", _SCHEMA)
_TOLERANCE: Final = 1e-6


# --- structured output ----------------------------------------------------------------------------


async def _json_object(worker: WorkerClient, output: OutputFormat, *, stream: bool) -> str:
    request = worker.text_request(_JSON, output=output, stopping=_STOPPING, stream=stream)
    choice = (await worker.send(request)).choice
    document = _decode_json(choice)
    expect(isinstance(document, dict), f"expected an object, got {choice.text!r}")
    if isinstance(output, JsonSchemaFormat):
        matches = list(document) == ["city"] and isinstance(document["city"], str)
        expect(matches, f"it does not match the schema: {choice.text!r}")
    return choice.text[:60]


def _decode_json(choice: UnaryChoice) -> Any:
    if choice.finish_reason == "length":
        raise Inconclusive("the response reached its token limit")
    try:
        return decode_json(choice.text)
    except msgspec.DecodeError:
        raise UnexpectedResponse(f"not JSON: {choice.text!r}") from None


async def _regex(worker: WorkerClient) -> str:
    request = worker.text_request("yes", output=RegexFormat("(yes|no)"), stopping=_STOPPING)
    try:
        text = (await worker.send(request)).choice.text
    except WorkerRefused as error:
        worker.quirks.append("expressions are rejected")
        return f"rejected: {error}"
    expect(text in {"yes", "no"}, f"expected yes or no, got {text!r}")
    return text


# --- tools ----------------------------------------------------------------------------------------


async def _tool_calls(worker: WorkerClient, *, stream: bool, **options: Any) -> str:
    message = Message("user", (TextPart(_WEATHER),))
    request = worker.chat_request(
        message, tools=(_TOOL,), stopping=_STOPPING, stream=stream, **options
    )
    choice = (await worker.send(request)).choice
    if not choice.tool_calls and "tool_choice" not in options:
        return "the model calls no tool"
    expect(choice.tool_calls, f"no tool is called: {choice.text!r}")
    for call in choice.tool_calls:
        _check_call(call)
    expected = {"tool_calls", "unknown"} | ({"eos", "stop"} if "tool_choice" in options else set())
    expect(choice.finish_reason in expected, f"the reason is {choice.finish_reason}")
    first = choice.tool_calls[0]
    return f"{len(choice.tool_calls)} call(s): {first.name}({first.arguments})"[:80]


def _check_call(call: ToolCall) -> None:
    expect(call.name == _NAME, f"an unknown tool is called: {call.name!r}")
    expect(call.id, "a call has no id")
    try:
        arguments = decode_json(call.arguments)
    except msgspec.DecodeError:
        raise UnexpectedResponse(f"arguments are not JSON: {call.arguments!r}") from None
    expect(isinstance(arguments, dict), f"arguments are not an object: {call.arguments!r}")


async def _no_tool_call(worker: WorkerClient) -> str:
    message = Message("user", (TextPart(_WEATHER),))
    request = worker.chat_request(message, tools=(_TOOL,), tool_choice="none")
    choice = (await worker.send(request)).choice
    expect(not choice.tool_calls, f"{len(choice.tool_calls)} tool calls where none was allowed")
    return "none is called"


async def _single_tool_call(worker: WorkerClient) -> str:
    message = Message("user", (TextPart(f"{_WEATHER} And in Rome? Use it twice."),))
    request = worker.chat_request(message, tools=(_TOOL,), parallel_tools=False, stopping=_STOPPING)
    choice = (await worker.send(request)).choice
    expect(
        len(choice.tool_calls) <= 1, f"{len(choice.tool_calls)} tool calls where one was allowed"
    )
    return f"{len(choice.tool_calls)} call(s)"


async def _tool_result(worker: WorkerClient) -> str:
    messages = (
        Message("user", (TextPart("What is the weather in Paris?"),)),
        Message("assistant", tool_calls=(ToolCall("call_abc123456", _NAME, _JSON),)),
        Message("tool", (TextPart("sunny"),), tool_call_id="call_abc123456"),
    )
    choice = (await worker.send(worker.chat_request(*messages, tools=(_TOOL,)))).choice
    expect(choice.text or choice.reasoning or choice.tool_calls, "no response to a tool result")
    return repr(choice.text[:40])


# --- log probabilities ----------------------------------------------------------------------------


async def _token_logprobs(worker: WorkerClient, top: int, *, stream: bool) -> str:
    request = worker.text_request(
        COUNT, logprobs=LogprobsOptions(top), stream=stream, stopping=StopConditions(max_tokens=8)
    )
    choice = (await worker.send(request)).choice
    tokens = choice.logprobs
    expect(tokens, "no log probabilities")
    values = [value.logprob for value in tokens if value.logprob is not None]
    values += [value.logprob for token in tokens for value in token.top]
    expect(all(value <= _TOLERANCE for value in values), f"one is above 0: {max(values)}")
    if top:
        counts = {len(token.top) for token in tokens}
        expect(max(counts) <= top + 1, f"{max(counts)} alternatives where {top} were requested")
        expect(max(counts) >= 1, "no alternatives")
    joined = "".join(token.token for token in tokens)
    if choice.text not in joined:
        worker.quirks.append("the tokens with log probabilities do not concatenate to the text")
    return f"{len(tokens)} tokens"


async def _logprob_text(worker: WorkerClient) -> str:
    request = worker.text_request(
        COUNT, logprobs=LogprobsOptions(), stopping=StopConditions(max_tokens=8)
    )
    choice = (await worker.send(request)).choice
    joined = "".join(token.token for token in choice.logprobs)
    expect(choice.text.strip() in joined, f"{joined!r} is not {choice.text!r}")
    return repr(joined)


# --- reasoning ------------------------------------------------------------------------------------


async def _separate_reasoning(worker: WorkerClient) -> str:
    request = worker.text_request(
        "What is 2 + 2?", reasoning=ReasoningOptions(effort="low"), stopping=_STOPPING
    )
    choice = (await worker.send(request)).choice
    expect("<think>" not in choice.text, "the reasoning is part of the text")
    return f"{len(choice.reasoning)} characters of it"


_LOGPROBS: Final = ("logprobs",)
_TOOLS: Final = ("tools",)

PROBES: Final = (
    Probe(
        "json",
        "A JSON object is returned if requested.",
        partial(_json_object, output=JsonObjectFormat(), stream=False),
        ("output",),
    ),
    Probe(
        "json-schema",
        "The text follows a JSON Schema.",
        partial(_json_object, output=JsonSchemaFormat(_SCHEMA), stream=False),
        ("output",),
    ),
    Probe(
        "json-stream",
        "The same in a stream.",
        partial(_json_object, output=JsonSchemaFormat(_SCHEMA), stream=True),
        ("output",),
    ),
    Probe(
        "regex",
        "The text matches a regular expression, or the expression is rejected.",
        _regex,
        needs=("output",),
    ),
    Probe(
        "tool",
        "A tool call has an object as its arguments.",
        partial(_tool_calls, stream=False),
        needs=_TOOLS,
    ),
    Probe(
        "tool-required",
        "A required tool is called.",
        partial(_tool_calls, stream=False, tool_choice="required"),
        _TOOLS,
    ),
    Probe(
        "tool-named",
        "A tool required by name is called.",
        partial(_tool_calls, stream=False, tool_choice=NamedTool(_NAME)),
        needs=_TOOLS,
    ),
    Probe(
        "tool-stream",
        "A tool call can be streamed.",
        partial(_tool_calls, stream=True, tool_choice="required"),
        needs=_TOOLS,
    ),
    Probe("tool-none", "No tool is called if none is allowed.", _no_tool_call, needs=_TOOLS),
    Probe(
        "tool-one",
        "Without parallel calls, at most one tool is called.",
        _single_tool_call,
        ("parallel_tools",),
        _TOOLS,
    ),
    Probe("tool-result", "A tool result is accepted.", _tool_result, needs=_TOOLS),
    Probe(
        "logprobs",
        "Each token has a log probability.",
        partial(_token_logprobs, top=0, stream=False),
        _LOGPROBS,
        ("logprobs.top",),
    ),
    Probe(
        "logprobs-top",
        "Tokens have the requested number of alternatives.",
        partial(_token_logprobs, top=2, stream=False),
        ("logprobs.top",),
        _LOGPROBS,
    ),
    Probe(
        "logprobs-stream",
        "The same in a stream.",
        partial(_token_logprobs, top=2, stream=True),
        ("logprobs.top",),
        _LOGPROBS,
    ),
    Probe(
        "logprobs-text",
        "The tokens concatenate to the text.",
        _logprob_text,
        needs=("logprobs.top",),
    ),
    Probe(
        "reasoning",
        "Reasoning is separate from the text.",
        _separate_reasoning,
        ("reasoning.effort",),
    ),
)
