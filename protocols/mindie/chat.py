"""Conversations and completions: requests in OpenAI's manner and the server's words.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp, its neighbours for the
server's own validator and for completions, and infer_param.cpp for ``response_format``; in 1.0.RC1
the published page, whose few fields are all that is read: others are passed over.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from gateway.core.ports import Call
from gateway.core.types import GenerateRequest, Tool, ToolChoice
from protocols.mindie import tables
from protocols.mindie.checks import body, fields_of, get, read, wrong
from protocols.mindie.errors import unknown_model
from protocols.mindie.messages import check_name, read_messages
from protocols.mindie.profiles import RAW, Setup
from protocols.mindie.requests import (
    CHAT_COUNTING,
    COMPLETION_COUNTING,
    build,
    count,
    too_long,
)
from protocols.mindie.tokens import MOST_TOKENS
from protocols.openai.tools import read_response_format, read_tool_choice, read_tools
from protocols.params import Values

_CHAT_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs"),
)
_EARLY_MODEL = re.compile(r"(?![._-])[A-Za-z0-9._-]{1,256}(?<![._-])")


def read_model(fields: Mapping[str, Raw], setup: Setup) -> str:
    """The model that a body names. Raises InvalidParameter."""
    got = get(fields, "model")
    if got is None:
        raise wrong("Request contains not model or model null", "model", "missing")
    if not isinstance(got, str):
        raise wrong("Request param model must be string", "model", "type")
    if not got:
        raise wrong("Request param model must be not empty", "model", "empty")
    if setup.profile.early and not _EARLY_MODEL.fullmatch(got):
        raise wrong(unknown_model(got), "model")
    return got


def read_chat(call: Call, setup: Setup) -> GenerateRequest:
    """/v1/chat/completions."""
    fields = body(call)
    model = read_model(fields, setup)
    early = setup.profile.early
    known = ("model", "messages") if early else _CHAT_FIELDS
    form = {} if early else _tools(fields)
    template = {} if early else _template(fields)
    offered = bool(form.get("tools"))
    messages = read_messages(get(fields, "messages"), full=early or offered, tools=offered)
    _check_length(fields["messages"], setup.profile.max_text_length, tools=offered)
    values = read(setup.chat_params, fields)
    if not early:
        _chat_logprobs(values)
        for path, got in template.items():
            values[path] = got
        if setup.vllm_validator:  # the server's own passes it over
            form["output"] = _output(fields)
            known = (*known, "response_format")
        count(values, CHAT_COUNTING)
    return build(
        values,
        setup,
        setup.chat_params,
        fields,
        known=known,
        model=model,
        kind="chat",
        messages=messages,
        client_id=setup.get_request_id(call),
        **form,
    )


def _chat_logprobs(values: Values) -> None:
    top = values.get("asked.top_logprobs")
    if values.get("asked.logprobs") or top is not None:
        values["logprobs.top"] = top or 0


def _check_length(raw: Raw, limit: int, *, tools: bool) -> None:
    if (length := too_long(raw, limit)) is not None:
        end = "]" if tools else ""  # the server closes its bracket only here
        raise wrong(
            f"Messages len not in (0, {limit}{end}, but the length of inputs is {length}",
            "messages",
            "too_long",
        )


# --- tools, templates, output ---------------------------------------------------------------------


def _tools(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """The tools offered and the choice among them, which is looked at first."""
    _check_choice(get(fields, "tool_choice"))
    items = get(fields, "tools")
    if not items:
        return {}
    if not isinstance(items, list):
        raise wrong("Tools not array", "tools", "type")
    for i, item in enumerate(items):
        _check_tool(item if isinstance(item, dict) else {}, f"tools[{i}]")
    tools: tuple[Tool, ...] = read_tools(fields, most=len(items), kinds=("function",))
    choice: ToolChoice | None = read_tool_choice(fields, tools)
    return {"tools": tools, "tool_choice": choice}


def _check_choice(got: Any) -> None:
    match got:
        case None | "none" | "auto" | "required":
            pass
        case str():
            text = "Parameter tool_choice string not in [none, auto, required]"
            raise wrong(text, "tool_choice")
        case dict():
            _check_tool(got, "tool_choice")
        case _:
            raise wrong("Parameter tool_choice not string or object", "tool_choice", "type")


def _check_tool(got: Mapping[str, Any], at: str) -> None:
    if "type" not in got:
        raise wrong("Tool param invalid, tool type not exist", f"{at}.type", "missing")
    match got["type"]:
        case None:
            raise wrong("Tool param invalid tool type", f"{at}.type", "missing")
        case "function":
            pass
        case str():
            raise wrong("Tool param not function type", f"{at}.type")
        case _:
            raise wrong("Tool param invalid tool string type", f"{at}.type", "type")
    at = f"{at}.function"
    if "function" not in got:
        raise wrong("Tool param invalid, tool function not exist", at, "missing")
    function = got["function"]
    if not isinstance(function, dict):
        raise wrong("Tool param invalid function object", at, "type")
    if "name" not in function:
        raise wrong("Function object invalid, function name not exist", f"{at}.name", "missing")
    if not isinstance(function["name"], str):
        raise wrong("Function object invalid name type", f"{at}.name", "type")
    check_name(function["name"], f"{at}.name")


def _template(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """The template and its arguments, by their paths in the internal request."""
    found: dict[str, Any] = {}
    at = "chat_template_kwargs"
    if at in fields:
        kwargs = get(fields, at)
        if not isinstance(kwargs, dict):
            raise wrong(f"{at} must be a JSON object", at, "type")
        thinking = kwargs.get("enable_thinking", False)
        if not isinstance(thinking, bool):
            text = f"enable_thinking must be boolean, got {_json_type(thinking)}"
            raise wrong(text, f"{at}.enable_thinking", "type")
        found["templating.arguments"] = fields_of(fields[at])
    template = get(fields, "chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise wrong("Parameter chat_template not string", "chat_template", "type")
        if not template:
            raise wrong("Parameter chat_template is not valid", "chat_template", "empty")
        found["templating.template"] = template
    return found


def _json_type(got: Any) -> str:
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(got), "number")


def _output(fields: Mapping[str, Raw]) -> Any:
    at = "response_format"
    got = get(fields, at)
    if got is None:
        return None
    if not isinstance(got, dict):
        raise wrong(f"Parameter {at} must be an object", at, "type")
    kind = got.get("type")
    if kind is None:
        raise wrong(f"Parameter {at} must contain 'type' field", f"{at}.type", "missing")
    if not isinstance(kind, str):
        raise wrong(f"Parameter {at}.type must be a string", f"{at}.type", "type")
    if kind not in ("json_object", "json_schema", "text"):
        raise wrong(
            f"Parameter {at}.type must be 'json_object', 'json_schema' or 'text', got "
            f"'{kind[:300]}'",
            f"{at}.type",
        )
    if kind == "json_schema":
        _check_schema(got.get("json_schema"), f"{at}.json_schema")
    return read_response_format(fields)


def _check_schema(got: Any, at: str) -> None:
    if got is None:
        text = f"Parameter {at} is required when type is 'json_schema'"
        raise wrong(text, at, "missing")
    if not isinstance(got, dict):
        raise wrong(f"Parameter {at} must be an object", at, "type")
    name = got.get("name")
    if name is None:
        raise wrong(f"Parameter {at}.name is required", f"{at}.name", "missing")
    if not isinstance(name, str):
        raise wrong(f"Parameter {at}.name must be a string", f"{at}.name", "type")
    if not 0 < len(name.encode()) <= 64:  # noqa: PLR2004 - the server's number
        raise wrong(f"Parameter {at}.name must be 1-64 characters", f"{at}.name", "too_long")
    schema = got.get("schema")
    if schema is None:
        text = f"Parameter {at}.schema is required when type is 'json_schema'"
        raise wrong(text, f"{at}.schema", "missing")
    if not isinstance(schema, dict):
        raise wrong(f"Parameter {at}.schema must be an object", f"{at}.schema", "type")


# --- completions ----------------------------------------------------------------------------------


def read_completion(call: Call, setup: Setup) -> GenerateRequest:
    """/v1/completions: one prompt, of text or of token ids."""
    fields = body(call)
    model = read_model(fields, setup)
    prompt = _prompt(get(fields, "prompt"), setup.profile.max_text_length)
    values = read(tables.COMPLETION, fields)
    if (top := values.get("asked.top_logprobs")) is not None:
        values["logprobs.top"] = top
    output = _output(fields)
    count(values, COMPLETION_COUNTING)
    return build(
        values,
        setup,
        tables.COMPLETION,
        fields,
        known=("model", "prompt", "response_format"),
        model=model,
        kind="completion",
        prompts=(prompt,),
        templating=RAW,
        output=output,
        client_id=setup.get_request_id(call),
    )


def _prompt(got: Any, limit: int) -> str | tuple[int, ...]:
    said = "Length of Prompt {kind} should be greater than 0 and less than or equal to {most}, "
    match got:
        case None:
            raise wrong("Contains not prompt or prompt null", "prompt", "missing")
        case str():
            if (length := too_long(got, limit)) is not None:
                text = said.format(kind="text", most=limit) + f"but got {length}"
                raise wrong(text, "prompt", "too_long" if length else "empty")
            return got
        case []:
            raise wrong("Prompt array cannot be empty.", "prompt", "empty")
        case list():
            if not all(type(one) is int and one >= 0 for one in got):
                text = "All elements of the prompt array must be integers."
                raise wrong(text, "prompt", "type")
            if len(got) > MOST_TOKENS:
                text = said.format(kind="token", most=MOST_TOKENS) + f"but got {len(got)}"
                raise wrong(text, "prompt", "too_long")
            return tuple(got)
        case _:
            text = "The type of prompt is abnormal,prompt must be str or integer list."
            raise wrong(text, "prompt", "type")
