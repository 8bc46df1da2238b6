"""Conversations and completions: requests in OpenAI's manner and the server's words.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp, its neighbours for the
server's own validator and for completions, and infer_param.cpp for ``response_format``; in 1.0.RC1
the published page, whose few fields are all that is read: others are passed over.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from protocols.core.interfaces import ClientRequest
from protocols.core.request import GenerationRequest, Tool, ToolChoice
from protocols.mindie import tables
from protocols.mindie.checks import (
    build_param_error,
    decode_fields,
    get_field,
    read_body_fields,
    read_params,
)
from protocols.mindie.errors import describe_unknown_model
from protocols.mindie.messages import check_function_name, read_messages
from protocols.mindie.profiles import RAW_PROMPT_OPTIONS, MindieConfig
from protocols.mindie.requests import (
    CHAT_COUNT_ERRORS,
    COMPLETION_COUNT_ERRORS,
    build_request,
    get_invalid_length,
    resolve_choice_count,
)
from protocols.mindie.tokens import MAX_INPUT_TOKENS
from protocols.openai.tools import read_response_format, read_tool_choice, read_tools
from protocols.params import ParsedParams

_KNOWN_CHAT_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs"),
)
_EARLY_MODEL_NAME_PATTERN = re.compile(r"(?![._-])[A-Za-z0-9._-]{1,256}(?<![._-])")


def read_model_name(fields: Mapping[str, Raw], setup: MindieConfig) -> str:
    """The model that a body names. Raises InvalidParameter."""
    got = get_field(fields, "model")
    if got is None:
        raise build_param_error("Request contains not model or model null", "model", "missing")
    if not isinstance(got, str):
        raise build_param_error("Request param model must be string", "model", "type")
    if not got:
        raise build_param_error("Request param model must be not empty", "model", "empty")
    if setup.profile.early and not _EARLY_MODEL_NAME_PATTERN.fullmatch(got):
        raise build_param_error(describe_unknown_model(got), "model")
    return got


def read_chat_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """/v1/chat/completions."""
    fields = read_body_fields(call)
    model = read_model_name(fields, setup)
    early = setup.profile.early
    known = ("model", "messages") if early else _KNOWN_CHAT_FIELDS
    form = {} if early else _read_tool_fields(fields)
    template = {} if early else _read_template(fields)
    offered = bool(form.get("tools"))
    messages = read_messages(get_field(fields, "messages"), full=early or offered, tools=offered)
    _check_messages_length(fields["messages"], setup.profile.max_text_length, tools=offered)
    values = read_params(setup.chat_params, fields)
    if not early:
        _set_chat_logprobs(values)
        for path, got in template.items():
            values[path] = got
        if setup.vllm_validator:  # the server's own passes it over
            form["output"] = _read_output_format(fields)
            known = (*known, "response_format")
        resolve_choice_count(values, CHAT_COUNT_ERRORS)
    return build_request(
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


def _set_chat_logprobs(values: ParsedParams) -> None:
    top = values.get("asked.top_logprobs")
    if values.get("asked.logprobs") or top is not None:
        values["logprobs.top"] = top or 0


def _check_messages_length(raw: Raw, limit: int, *, tools: bool) -> None:
    if (length := get_invalid_length(raw, limit)) is not None:
        end = "]" if tools else ""  # the server closes its bracket only here
        raise build_param_error(
            f"Messages len not in (0, {limit}{end}, but the length of inputs is {length}",
            "messages",
            "too_long",
        )


# --- tools, templates, output ---------------------------------------------------------------------


def _read_tool_fields(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """The tools offered and the choice among them, which is looked at first."""
    _check_tool_choice(get_field(fields, "tool_choice"))
    items = get_field(fields, "tools")
    if not items:
        return {}
    if not isinstance(items, list):
        raise build_param_error("Tools not array", "tools", "type")
    for i, item in enumerate(items):
        _check_tool(item if isinstance(item, dict) else {}, f"tools[{i}]")
    tools: tuple[Tool, ...] = read_tools(fields, most=len(items), kinds=("function",))
    choice: ToolChoice | None = read_tool_choice(fields, tools)
    return {"tools": tools, "tool_choice": choice}


def _check_tool_choice(got: Any) -> None:
    match got:
        case None | "none" | "auto" | "required":
            pass
        case str():
            text = "Parameter tool_choice string not in [none, auto, required]"
            raise build_param_error(text, "tool_choice")
        case dict():
            _check_tool(got, "tool_choice")
        case _:
            raise build_param_error(
                "Parameter tool_choice not string or object", "tool_choice", "type"
            )


def _check_tool(got: Mapping[str, Any], at: str) -> None:
    if "type" not in got:
        raise build_param_error("Tool param invalid, tool type not exist", f"{at}.type", "missing")
    match got["type"]:
        case None:
            raise build_param_error("Tool param invalid tool type", f"{at}.type", "missing")
        case "function":
            pass
        case str():
            raise build_param_error("Tool param not function type", f"{at}.type")
        case _:
            raise build_param_error("Tool param invalid tool string type", f"{at}.type", "type")
    at = f"{at}.function"
    if "function" not in got:
        raise build_param_error("Tool param invalid, tool function not exist", at, "missing")
    function = got["function"]
    if not isinstance(function, dict):
        raise build_param_error("Tool param invalid function object", at, "type")
    if "name" not in function:
        raise build_param_error(
            "Function object invalid, function name not exist", f"{at}.name", "missing"
        )
    if not isinstance(function["name"], str):
        raise build_param_error("Function object invalid name type", f"{at}.name", "type")
    check_function_name(function["name"], f"{at}.name")


def _read_template(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """The template and its arguments, by their paths in the internal request."""
    found: dict[str, Any] = {}
    at = "chat_template_kwargs"
    if at in fields:
        kwargs = get_field(fields, at)
        if not isinstance(kwargs, dict):
            raise build_param_error(f"{at} must be a JSON object", at, "type")
        thinking = kwargs.get("enable_thinking", False)
        if not isinstance(thinking, bool):
            text = f"enable_thinking must be boolean, got {_get_json_type(thinking)}"
            raise build_param_error(text, f"{at}.enable_thinking", "type")
        found["templating.arguments"] = decode_fields(fields[at])
    template = get_field(fields, "chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise build_param_error("Parameter chat_template not string", "chat_template", "type")
        if not template:
            raise build_param_error(
                "Parameter chat_template is not valid", "chat_template", "empty"
            )
        found["templating.template"] = template
    return found


def _get_json_type(got: Any) -> str:
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(got), "number")


def _read_output_format(fields: Mapping[str, Raw]) -> Any:
    at = "response_format"
    got = get_field(fields, at)
    if got is None:
        return None
    if not isinstance(got, dict):
        raise build_param_error(f"Parameter {at} must be an object", at, "type")
    kind = got.get("type")
    if kind is None:
        raise build_param_error(
            f"Parameter {at} must contain 'type' field", f"{at}.type", "missing"
        )
    if not isinstance(kind, str):
        raise build_param_error(f"Parameter {at}.type must be a string", f"{at}.type", "type")
    if kind not in ("json_object", "json_schema", "text"):
        raise build_param_error(
            f"Parameter {at}.type must be 'json_object', 'json_schema' or 'text', got "
            f"'{kind[:300]}'",
            f"{at}.type",
        )
    if kind == "json_schema":
        _check_json_schema(got.get("json_schema"), f"{at}.json_schema")
    return read_response_format(fields)


def _check_json_schema(got: Any, at: str) -> None:
    if got is None:
        text = f"Parameter {at} is required when type is 'json_schema'"
        raise build_param_error(text, at, "missing")
    if not isinstance(got, dict):
        raise build_param_error(f"Parameter {at} must be an object", at, "type")
    name = got.get("name")
    if name is None:
        raise build_param_error(f"Parameter {at}.name is required", f"{at}.name", "missing")
    if not isinstance(name, str):
        raise build_param_error(f"Parameter {at}.name must be a string", f"{at}.name", "type")
    if not 0 < len(name.encode()) <= 64:  # noqa: PLR2004 - the server's number
        raise build_param_error(
            f"Parameter {at}.name must be 1-64 characters", f"{at}.name", "too_long"
        )
    schema = got.get("schema")
    if schema is None:
        text = f"Parameter {at}.schema is required when type is 'json_schema'"
        raise build_param_error(text, f"{at}.schema", "missing")
    if not isinstance(schema, dict):
        raise build_param_error(f"Parameter {at}.schema must be an object", f"{at}.schema", "type")


# --- completions ----------------------------------------------------------------------------------


def read_completion_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """/v1/completions: one prompt, of text or of token ids."""
    fields = read_body_fields(call)
    model = read_model_name(fields, setup)
    prompt = _read_completion_prompt(get_field(fields, "prompt"), setup.profile.max_text_length)
    values = read_params(tables.COMPLETION_PARAMS, fields)
    if (top := values.get("asked.top_logprobs")) is not None:
        values["logprobs.top"] = top
    output = _read_output_format(fields)
    resolve_choice_count(values, COMPLETION_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        tables.COMPLETION_PARAMS,
        fields,
        known=("model", "prompt", "response_format"),
        model=model,
        kind="completion",
        prompts=(prompt,),
        templating=RAW_PROMPT_OPTIONS,
        output=output,
        client_id=setup.get_request_id(call),
    )


def _read_completion_prompt(got: Any, limit: int) -> str | tuple[int, ...]:
    said = "Length of Prompt {kind} should be greater than 0 and less than or equal to {most}, "
    match got:
        case None:
            raise build_param_error("Contains not prompt or prompt null", "prompt", "missing")
        case str():
            if (length := get_invalid_length(got, limit)) is not None:
                text = said.format(kind="text", most=limit) + f"but got {length}"
                raise build_param_error(text, "prompt", "too_long" if length else "empty")
            return got
        case []:
            raise build_param_error("Prompt array cannot be empty.", "prompt", "empty")
        case list():
            if not all(type(one) is int and one >= 0 for one in got):
                text = "All elements of the prompt array must be integers."
                raise build_param_error(text, "prompt", "type")
            if len(got) > MAX_INPUT_TOKENS:
                text = said.format(kind="token", most=MAX_INPUT_TOKENS) + f"but got {len(got)}"
                raise build_param_error(text, "prompt", "too_long")
            return tuple(got)
        case _:
            text = "The type of prompt is abnormal,prompt must be str or integer list."
            raise build_param_error(text, "prompt", "type")
