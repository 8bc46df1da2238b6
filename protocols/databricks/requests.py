"""Client requests to internal requests.

One path takes three tasks, identified by a field: ``messages``, ``prompt`` or ``input``. It is
strict and rejects unknown fields. The paths for OpenAI's clients accept what those send.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols import params
from protocols.chat.messages import USER_PART_TYPES, MessageRules
from protocols.chat.params import as_object, invalid_type_error, missing_error, null_to_none
from protocols.chat.requests import FIELD_NAMES as CHAT_FIELD_NAMES
from protocols.chat.requests import RequestRules, read_chat, read_completion, read_embedding
from protocols.core.errors import InvalidParameter, UnknownParameter
from protocols.core.json_text import decode_json
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Prompt,
    ReasoningOptions,
    Request,
    TextPart,
    Tool,
)
from protocols.databricks import params as databricks_params
from protocols.json_body import decode_value
from protocols.params import Param, ParamTable

# --- order of roles -------------------------------------------------------------------------------
#
# Source: the reference of the Foundation Model REST API. After an optional system message, user and
# assistant alternate, and the user is last; newer editions of the page no longer say so. Hence
# contradictions are always rejected, and a wrong order only if the configuration says so. Tool
# messages belong to the assistant's turn, and may be last.

RoleRules = Literal["strict", "lenient"]

_NEXT_ROLES: Mapping[str, tuple[str, ...]] = {
    "": ("user",),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calling": ("tool",),
    "tool": ("tool", "assistant", "user"),
}
"""The roles that may follow each role; ``calling``: an assistant with tool calls, "": the start."""


def normalize_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages, with ``developer`` as ``system`` and without blank text beside tool calls."""
    return tuple(_normalize_message(message) for message in messages)


def _normalize_message(message: Message) -> Message:
    if message.role == "developer":
        return replace(message, role="system")
    if message.tool_calls and not message.text.strip():
        parts = tuple(part for part in message.parts if not isinstance(part, TextPart))
        return replace(message, parts=parts)
    return message


def check_tool_call_ids(wire: Sequence[Any]) -> None:
    """Check ``tool_call_id``; ``wire`` are the messages as the client sent them."""
    for i, message in enumerate(wire):
        if message.get("role") != "tool" and message.get("tool_call_id"):
            at = f"messages[{i}].tool_call_id"
            raise _build_role_error(at, f"{at} must be empty unless the role is tool")


def check_role_order(messages: Sequence[Message]) -> None:
    """Check the strict order of roles. Raises InvalidParameter."""
    before = ""
    for i, message in enumerate(messages):
        at = f"messages[{i}].role"
        role = message.role
        if role == "system":
            if i > 0:
                raise _build_role_error(
                    at, "the system role can be used once only, as the first message"
                )
        elif role not in _NEXT_ROLES[before]:
            allowed = " or ".join(_NEXT_ROLES[before])
            raise _build_role_error(at, f"{at} must be {allowed}, got {role}")
        if message.tool_calls and message.text.strip():
            path = f"messages[{i}].content"
            raise _build_role_error(path, f"{path} must not be set beside tool_calls")
        before = "calling" if message.tool_calls else role
    if before not in ("user", "tool"):
        raise _build_role_error("messages", "messages must end with a message of the role user")


def _build_role_error(param: str, text: str) -> InvalidParameter:
    return InvalidParameter(text, param=param, problem="conflict")


RequestTask = Literal["chat", "completion", "embedding"]
RawFields = dict[str, Raw]

_TASK_BY_FIELD: Mapping[str, RequestTask] = {
    "messages": "chat",
    "prompt": "completion",
    "input": "embedding",
}
STRICT_FIELDS: Mapping[RequestTask, set[str]] = {
    "chat": databricks_params.STRICT_CHAT_FIELDS,
    "completion": databricks_params.STRICT_COMPLETION_FIELDS,
    "embedding": databricks_params.STRICT_EMBEDDING_FIELDS,
}
REQUEST_RULES = RequestRules(
    chat=ParamTable(*databricks_params.LENIENT_CHAT_PARAMS),
    completion=ParamTable(*databricks_params.LENIENT_COMPLETION_PARAMS),
    embedding=ParamTable(*databricks_params.EMBEDDING_PARAMS),
    message_rules=MessageRules(
        roles=("system", "developer", "user", "assistant", "tool"),
        user_parts=USER_PART_TYPES,
        assistant_parts=("text", "refusal", "reasoning"),
        requires_tool_results=False,
        accepts_argument_objects=True,
    ),
    max_tools=databricks_params.MAX_TOOLS,
    default_completion_tokens=None,
)

_RAW_PROMPT_TABLE = ParamTable(databricks_params.USE_RAW_PROMPT)


def find_task(fields: RawFields) -> RequestTask:
    """The task that the fields identify. Raises UnknownParameter, InvalidParameter."""
    for name, task in _TASK_BY_FIELD.items():
        if name in fields:
            return task
    for name in fields:
        if not any(name in names for names in STRICT_FIELDS.values()):
            raise UnknownParameter(f"unknown field {name[:64]!r}", param=name[:64])
    text = "one of messages, prompt and input is required"
    raise InvalidParameter(text, param="messages", problem="missing")


def check_known_fields(fields: RawFields, task: RequestTask) -> None:
    """Check that every field belongs to the task. Raises UnknownParameter."""
    for name in fields:
        if name not in STRICT_FIELDS[task]:
            raise UnknownParameter(f"unknown field {name[:64]!r}", param=name[:64])


def read_request(
    fields: RawFields, task: RequestTask, model: str, *, order: RoleRules, wrapped: bool
) -> Request:
    """Decode the request. ``wrapped``: prompts use the server's template unless they say otherwise.

    Raises ClientError.
    """
    fields = dict(fields)
    labels = _read_usage_context(fields.pop("usage_context", None))
    _merge_extra_params(fields, fields.pop("extra_params", None), task)
    request: Request
    match task:
        case "chat":
            request = _read_chat(fields, model, order)
        case "completion":
            request = _read_completion(fields, model, wrapped=wrapped)
        case _:
            request = _read_embedding(fields, model)
    return replace(request, labels={**labels, **request.labels}) if labels else request


def check_endpoint_rules(request: Request, *, pay_per_token: bool) -> None:
    """Check the rules of the endpoint. Raises InvalidParameter."""
    if pay_per_token and isinstance(request, GenerationRequest) and (request.n or 1) > 1:
        text = f"n must be 1 on a pay-per-token endpoint, got {request.n}"
        raise InvalidParameter(text, param="n", problem="above", got=request.n)
    if not pay_per_token and "error_behavior" in request.provided_fields:
        text = "error_behavior is accepted by pay-per-token endpoints only"
        raise InvalidParameter(text, param="error_behavior", problem="conflict")


# --- the tasks ------------------------------------------------------------------------------------


def _read_chat(fields: RawFields, model: str, order: RoleRules) -> GenerationRequest:
    thinking = null_to_none(fields.pop("thinking", None))
    if bytes(fields.get("tools", b"")) == b"[]":
        del fields["tools"]
    request = read_chat(fields, REQUEST_RULES, model=model)
    if b"tool_call_id" in bytes(fields["messages"]):
        check_tool_call_ids(decode_value(fields["messages"]))
    messages = normalize_messages(request.messages)
    if order == "strict":
        check_role_order(messages)
    for i, tool in enumerate(request.tools):
        _check_tool(tool, f"tools[{i}]")
    if thinking is not None:
        reasoning = replace(request.reasoning or ReasoningOptions(), **_read_thinking(thinking))
        request = replace(request, reasoning=reasoning)
    return _enable_usage(replace(request, messages=messages))


def _read_completion(fields: RawFields, model: str, *, wrapped: bool) -> GenerationRequest:
    raw = params.read_params(_RAW_PROMPT_TABLE, fields).get("request.raw_prompt", not wrapped)
    request = read_completion(fields, REQUEST_RULES, model=model)
    _check_texts(request.prompts, "prompt")
    mode: Literal["raw", "server"] = "raw" if raw else "server"
    templating = replace(request.templating, mode=mode)
    suffix = request.suffix or None
    return _enable_usage(replace(request, templating=templating, suffix=suffix))


def _read_embedding(fields: RawFields, model: str) -> EmbeddingRequest:
    request = read_embedding(fields, REQUEST_RULES, model=model)
    _check_texts(request.inputs, "input")
    return request


def _enable_usage(request: GenerationRequest) -> GenerationRequest:
    """A stream has usage in its last chunk, unless the client requests another position."""
    if request.stream and "stream_options" not in request.provided_fields:
        return replace(request, response_options=replace(request.response_options, usage="final"))
    return request


def _check_texts(prompts: Iterable[Prompt], at: str) -> None:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid_type_error(at, "a string or an array of strings", [])


def _check_tool(tool: Tool, at: str) -> None:
    if tool.kind != "function":
        raise InvalidParameter(f"{at}.type must be function", param=f"{at}.type")
    if tool.parameters is None:
        return
    properties = decode_value(tool.parameters).get("properties")
    if isinstance(properties, dict) and len(properties) > databricks_params.MAX_TOOL_PROPERTIES:
        raise InvalidParameter(
            f"the parameters of {tool.name!r} have {len(properties)} properties; "
            f"at most {databricks_params.MAX_TOOL_PROPERTIES} are allowed",
            param=f"{at}.function.parameters",
            problem="too_long",
        )


def _read_thinking(raw: Raw) -> dict[str, Any]:
    match decode_value(raw):
        case {"type": "disabled"}:
            return {"include": False}
        case {"type": "enabled", "budget_tokens": int(budget)} if budget > 0:
            return {"include": True, "budget": budget}
        case {"type": "enabled", "budget_tokens": _}:
            at = "thinking.budget_tokens"
            raise InvalidParameter(f"{at} must be an integer above 0", param=at)
        case {"type": "enabled"}:
            raise missing_error("thinking.budget_tokens")
        case dict():
            text = "thinking.type must be enabled or disabled"
            raise InvalidParameter(text, param="thinking.type")
        case value:
            raise invalid_type_error("thinking", "an object", value)


# --- usage_context and extra_params ---------------------------------------------------------------


def _read_usage_context(raw: Raw | None) -> dict[str, str]:
    raw = null_to_none(raw)
    if raw is None:
        return {}
    value = decode_value(raw)
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise invalid_type_error("usage_context", "an object of strings", value)
    return {f"usage_context.{name}": one for name, one in value.items()}


def _merge_extra_params(fields: RawFields, raw: Raw | None, task: RequestTask) -> None:
    """Merge ``extra_params`` into the fields. A field of the request itself wins."""
    raw = null_to_none(raw)
    if raw is None:
        return
    for name, extra in as_object(raw, "extra_params").items():
        if name not in fields:
            fields[name] = _convert_string(extra, _PARAMS_BY_NAME[task].get(name))


def _convert_string(raw: Raw, row: Param | None) -> Raw:
    """A value sent as a string, with the type of its parameter."""
    value = decode_value(raw)
    if not isinstance(value, str) or (row is not None and row.type == "str"):
        return raw
    try:
        parsed = decode_json(value)
    except msgspec.DecodeError:
        return raw
    types = list if row is not None and row.type in _LIST_TYPES else bool | int | float
    return Raw(value.encode()) if isinstance(parsed, types) else raw


_LIST_TYPES = ("strings", "string list", "ints")
_PARAMS_BY_NAME: Mapping[RequestTask, Mapping[str, Param]] = {
    "chat": {row.wire: row for row in databricks_params.LENIENT_CHAT_PARAMS},
    "completion": {row.wire: row for row in databricks_params.LENIENT_COMPLETION_PARAMS},
    "embedding": {row.wire: row for row in databricks_params.EMBEDDING_PARAMS},
}
FIELD_NAMES: Mapping[str, str] = {
    **CHAT_FIELD_NAMES,
    **params.map_field_names(
        (
            *databricks_params.LENIENT_CHAT_PARAMS,
            *databricks_params.EMBEDDING_PARAMS,
            *databricks_params.LENIENT_COMPLETION_PARAMS,
        )
    ),
}
"""The wire name of each field path: the tasks do not contradict each other."""
