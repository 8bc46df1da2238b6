"""A client's request into the internal one.

One path takes three tasks and knows them by their fields: ``messages``, ``prompt`` or ``input``. It
is strict, and names the first field that it does not know. The paths of OpenAI's clients take what
those send.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.core.errors import InvalidParameter, UnknownParameter
from gateway.core.types import (
    EmbedRequest,
    GenerateRequest,
    Prompt,
    Reasoning,
    Request,
    Tool,
)
from protocols import params
from protocols.body import value
from protocols.databricks import roles, tables
from protocols.openai.messages import MEDIA, Rules
from protocols.openai.reading import as_object, given, missing, wrong_type
from protocols.openai.requests import Reading, read_chat, read_completion, read_embedding
from protocols.params import Param, Table

Task = Literal["chat", "completion", "embedding"]
Fields = dict[str, Raw]

_TASKS: Mapping[str, Task] = {"messages": "chat", "prompt": "completion", "input": "embedding"}
STRICT: Mapping[Task, set[str]] = {
    "chat": tables.STRICT_CHAT,
    "completion": tables.STRICT_COMPLETION,
    "embedding": tables.STRICT_EMBEDDING,
}
READING = Reading(
    chat=Table(*tables.LENIENT_CHAT),
    completion=Table(*tables.LENIENT_COMPLETION),
    embedding=Table(*tables.EMBEDDING),
    message_rules=Rules(
        roles=("system", "developer", "user", "assistant", "tool"),
        user_parts=MEDIA,
        assistant_parts=("text", "refusal", "reasoning"),
        requires_tool_results=False,
        accepts_argument_objects=True,
    ),
    max_tools=tables.MOST_TOOLS,
    default_completion_tokens=None,
)

_RAW_PROMPT = Table(tables.USE_RAW_PROMPT)


def task_of(fields: Fields) -> Task:
    """The task that the fields name. Raises UnknownParameter, InvalidParameter."""
    for name, task in _TASKS.items():
        if name in fields:
            return task
    for name in fields:
        if not any(name in known for known in STRICT.values()):
            raise UnknownParameter(f"unknown field {name[:64]!r}", param=name[:64])
    text = "one of messages, prompt and input is required"
    raise InvalidParameter(text, param="messages", problem="missing")


def check_known(fields: Fields, task: Task) -> None:
    """Every field must be one of the task's. Raises UnknownParameter."""
    for name in fields:
        if name not in STRICT[task]:
            raise UnknownParameter(f"unknown field {name[:64]!r}", param=name[:64])


def read(
    fields: Fields, task: Task, model: str, *, order: roles.RoleRules, wrapped: bool
) -> Request:
    """The request. ``wrapped``: prompts go through the server's template unless they say otherwise.

    Raises ClientError.
    """
    fields = dict(fields)
    labels = _usage_context(fields.pop("usage_context", None))
    _merge(fields, fields.pop("extra_params", None), task)
    request: Request
    match task:
        case "chat":
            request = _chat(fields, model, order)
        case "completion":
            request = _completion(fields, model, wrapped=wrapped)
        case _:
            request = _embedding(fields, model)
    return replace(request, labels={**labels, **request.labels}) if labels else request


def check_model(request: Request, *, pay_per_token: bool) -> None:
    """The rules that are the endpoint's. Raises InvalidParameter."""
    if pay_per_token and isinstance(request, GenerateRequest) and (request.n or 1) > 1:
        text = f"n must be 1 on a pay-per-token endpoint, got {request.n}"
        raise InvalidParameter(text, param="n", problem="above", got=request.n)
    if not pay_per_token and "error_behavior" in request.given:
        text = "error_behavior is accepted by pay-per-token endpoints only"
        raise InvalidParameter(text, param="error_behavior", problem="conflict")


# --- the tasks ------------------------------------------------------------------------------------


def _chat(fields: Fields, model: str, order: roles.RoleRules) -> GenerateRequest:
    thinking = given(fields.pop("thinking", None))
    if bytes(fields.get("tools", b"")) == b"[]":
        del fields["tools"]
    request = read_chat(fields, READING, model=model)
    if b"tool_call_id" in bytes(fields["messages"]):
        roles.check_ids(value(fields["messages"]))
    messages = roles.modern(request.messages)
    if order == "strict":
        roles.check_order(messages)
    for i, tool in enumerate(request.tools):
        _check_tool(tool, f"tools[{i}]")
    if thinking is not None:
        reasoning = replace(request.reasoning or Reasoning(), **_thinking(thinking))
        request = replace(request, reasoning=reasoning)
    return _with_usage(replace(request, messages=messages))


def _completion(fields: Fields, model: str, *, wrapped: bool) -> GenerateRequest:
    raw = params.read(_RAW_PROMPT, fields).get("asked.raw_prompt", not wrapped)
    request = read_completion(fields, READING, model=model)
    _check_texts(request.prompts, "prompt")
    mode: Literal["raw", "server"] = "raw" if raw else "server"
    templating = replace(request.templating, mode=mode)
    suffix = request.suffix or None
    return _with_usage(replace(request, templating=templating, suffix=suffix))


def _embedding(fields: Fields, model: str) -> EmbedRequest:
    request = read_embedding(fields, READING, model=model)
    _check_texts(request.inputs, "input")
    return request


def _with_usage(request: GenerateRequest) -> GenerateRequest:
    """A stream tells usage in its last chunk unless the client says how it wants it."""
    if request.stream and "stream_options" not in request.given:
        return replace(request, want=replace(request.want, usage="final"))
    return request


def _check_texts(prompts: Iterable[Prompt], at: str) -> None:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong_type(at, "a string or an array of strings", [])


def _check_tool(tool: Tool, at: str) -> None:
    if tool.kind != "function":
        raise InvalidParameter(f"{at}.type must be function", param=f"{at}.type")
    if tool.parameters is None:
        return
    properties = value(tool.parameters).get("properties")
    if isinstance(properties, dict) and len(properties) > tables.MOST_PROPERTIES:
        raise InvalidParameter(
            f"the parameters of {tool.name!r} have {len(properties)} properties; "
            f"at most {tables.MOST_PROPERTIES} are allowed",
            param=f"{at}.function.parameters",
            problem="too_long",
        )


def _thinking(raw: Raw) -> dict[str, Any]:
    match value(raw):
        case {"type": "disabled"}:
            return {"include": False}
        case {"type": "enabled", "budget_tokens": int(budget)} if budget > 0:
            return {"include": True, "budget": budget}
        case {"type": "enabled", "budget_tokens": _}:
            at = "thinking.budget_tokens"
            raise InvalidParameter(f"{at} must be an integer above 0", param=at)
        case {"type": "enabled"}:
            raise missing("thinking.budget_tokens")
        case dict():
            text = "thinking.type must be enabled or disabled"
            raise InvalidParameter(text, param="thinking.type")
        case got:
            raise wrong_type("thinking", "an object", got)


# --- what comes beside ----------------------------------------------------------------------------


def _usage_context(raw: Raw | None) -> dict[str, str]:
    raw = given(raw)
    if raw is None:
        return {}
    got = value(raw)
    if not isinstance(got, dict) or not all(isinstance(one, str) for one in got.values()):
        raise wrong_type("usage_context", "an object of strings", got)
    return {f"usage_context.{name}": one for name, one in got.items()}


def _merge(fields: Fields, raw: Raw | None, task: Task) -> None:
    """Put ``extra_params`` among the fields. A field of the request's own wins."""
    raw = given(raw)
    if raw is None:
        return
    for name, extra in as_object(raw, "extra_params").items():
        if name not in fields:
            fields[name] = _typed(extra, _ROWS[task].get(name))


def _typed(raw: Raw, row: Param | None) -> Raw:
    """A value that came as a string, as the type that its parameter wants."""
    got = value(raw)
    if not isinstance(got, str) or (row is not None and row.type == "str"):
        return raw
    try:
        meant = msgspec.json.decode(got)
    except msgspec.DecodeError:
        return raw
    wanted = list if row is not None and row.type in _LISTS else bool | int | float
    return Raw(got.encode()) if isinstance(meant, wanted) else raw


_LISTS = ("strings", "string list", "ints")
_ROWS: Mapping[Task, Mapping[str, Param]] = {
    "chat": {row.wire: row for row in tables.LENIENT_CHAT},
    "completion": {row.wire: row for row in tables.LENIENT_COMPLETION},
    "embedding": {row.wire: row for row in tables.EMBEDDING},
}
NAMES: Mapping[str, str] = {
    "tools": "tools",
    "tool_choice": "tool_choice",
    "output": "response_format",
    **params.names((*tables.LENIENT_CHAT, *tables.EMBEDDING, *tables.LENIENT_COMPLETION)),
}
"""The wire name of each field path: the tasks do not contradict each other."""
