"""Client bodies to the internal request: OpenAI-style chat and completions.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp, the sources of the
server's own validator and of completions next to it, and infer_param.cpp for
``response_format``; in 1.0.RC1 the published page: fields that it does not list are ignored.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from protocols.chat.field_keys import read_field_extra
from protocols.chat.tools import read_response_format, read_tool_choice, read_tools
from protocols.core.interfaces import ClientRequest
from protocols.core.request import GenerationRequest, OutputFormat
from protocols.mindie import params
from protocols.mindie.errors import describe_unknown_model
from protocols.mindie.messages import check_function_name, read_messages
from protocols.mindie.params import (
    RAW_PROMPT_OPTIONS,
    MindieConfig,
    build_param_error,
    check_value,
    decode_fields,
    get_field,
    read_body_fields,
    read_params,
)
from protocols.mindie.requests import (
    CHAT_COUNT_ERRORS,
    COMPLETION_COUNT_ERRORS,
    MAX_INPUT_TOKENS,
    are_unsigned,
    build_request,
    get_invalid_length,
    resolve_choice_count,
)
from protocols.params import ParsedParams

_LATER_CHAT_FIELDS = ("tools", "tool_choice", "chat_template", "chat_template_kwargs")
_EARLY_MODEL_NAME_PATTERN = re.compile(r"(?![._-])[A-Za-z0-9._-]{1,256}(?<![._-])")


def read_model_name(fields: Mapping[str, Raw], setup: MindieConfig) -> str:
    """Read the model name of a body. Raises InvalidParameter."""
    model: str = check_value(
        get_field(fields, "model"),
        str,
        "model",
        "Request param model must be string",
        missing="Request contains not model or model null",
        empty="Request param model must be not empty",
    )
    if setup.profile.early and not _EARLY_MODEL_NAME_PATTERN.fullmatch(model):
        raise build_param_error(describe_unknown_model(model), "model")
    return model


def read_chat_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """Read a /v1/chat/completions request."""
    fields = read_body_fields(call)
    model = read_model_name(fields, setup)
    early = setup.profile.early
    read_elsewhere: tuple[str, ...] = ("model", "messages")
    more: dict[str, Any] = {}
    template: dict[str, Any] = {}
    if not early:
        read_elsewhere += _LATER_CHAT_FIELDS
        more = _read_tool_fields(fields)
        template = _read_template(fields)
    has_tools = bool(more.get("tools"))
    messages = get_field(fields, "messages")
    more["messages"] = read_messages(messages, full=early or has_tools, tools=has_tools)
    _check_messages_length(fields["messages"], setup.profile.max_text_length, tools=has_tools)
    values = read_params(setup.chat_params, fields)
    if not early:
        _set_chat_logprobs(values)
        values.update(template)
        if setup.vllm_validator:  # the server's own validator ignores it
            more["output"] = _read_output_format(fields)
            read_elsewhere += ("response_format",)
        resolve_choice_count(values, CHAT_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        setup.chat_params,
        fields,
        read_elsewhere=read_elsewhere,
        model=model,
        kind="chat",
        field_extra=read_field_extra(fields),
        client_id=setup.get_request_id(call),
        **more,
    )


def _set_chat_logprobs(values: ParsedParams) -> None:
    top = values.get("request.top_logprobs")
    if values.get("request.logprobs") or top is not None:
        values["logprobs.top"] = top or 0


def _check_messages_length(raw: Raw, limit: int, *, tools: bool) -> None:
    if (length := get_invalid_length(raw, limit)) is not None:
        end = "]" if tools else ""  # the server closes the bracket only in this text
        raise build_param_error(
            f"Messages len not in (0, {limit}{end}, but the length of inputs is {length}",
            "messages",
            "too_long",
        )


def _read_tool_fields(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Read the tool choice, then the tools, in the server's order."""
    _check_tool_choice(get_field(fields, "tool_choice"))
    items = get_field(fields, "tools")
    if not items:
        return {}
    check_value(items, list, "tools", "Tools not array")
    for i, item in enumerate(items):
        _check_tool(item if isinstance(item, dict) else {}, f"tools[{i}]")
    tools = read_tools(fields, most=len(items), kinds=("function",))
    return {"tools": tools, "tool_choice": read_tool_choice(fields, tools)}


def _check_tool_choice(choice: Any) -> None:
    match choice:
        case None | "none" | "auto" | "required":
            pass
        case str():
            text = "Parameter tool_choice string not in [none, auto, required]"
            raise build_param_error(text, "tool_choice")
        case dict():
            _check_tool(choice, "tool_choice")
        case _:
            text = "Parameter tool_choice not string or object"
            raise build_param_error(text, "tool_choice", "type")


def _check_tool(tool: Mapping[str, Any], at: str) -> None:
    if "type" not in tool:
        raise build_param_error("Tool param invalid, tool type not exist", f"{at}.type", "missing")
    kind = check_value(
        tool["type"],
        str,
        f"{at}.type",
        "Tool param invalid tool string type",
        missing="Tool param invalid tool type",
    )
    if kind != "function":
        raise build_param_error("Tool param not function type", f"{at}.type")
    at = f"{at}.function"
    if "function" not in tool:
        raise build_param_error("Tool param invalid, tool function not exist", at, "missing")
    function = check_value(tool["function"], dict, at, "Tool param invalid function object")
    at = f"{at}.name"
    if "name" not in function:
        text = "Function object invalid, function name not exist"
        raise build_param_error(text, at, "missing")
    name = check_value(function["name"], str, at, "Function object invalid name type")
    check_function_name(name, at)


def _read_template(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Read the chat template and its arguments, by their paths in the internal request."""
    values: dict[str, Any] = {}
    at = "chat_template_kwargs"
    if at in fields:
        kwargs = check_value(get_field(fields, at), dict, at, f"{at} must be a JSON object")
        thinking = kwargs.get("enable_thinking", False)
        text = f"enable_thinking must be boolean, got {_get_json_type(thinking)}"
        check_value(thinking, bool, f"{at}.enable_thinking", text)
        values["templating.arguments"] = decode_fields(fields[at])
    template = get_field(fields, "chat_template")
    if template is not None:
        values["templating.template"] = check_value(
            template,
            str,
            "chat_template",
            "Parameter chat_template not string",
            empty="Parameter chat_template is not valid",
        )
    return values


def _get_json_type(value: Any) -> str:
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def _read_output_format(fields: Mapping[str, Raw]) -> OutputFormat | None:
    at = "response_format"
    output_format = get_field(fields, at)
    if output_format is None:
        return None
    _check_format_field(output_format, dict, at)
    missing = f"Parameter {at} must contain 'type' field"
    kind = _check_format_field(output_format.get("type"), str, f"{at}.type", missing)
    if kind not in ("json_object", "json_schema", "text"):
        raise build_param_error(
            f"Parameter {at}.type must be 'json_object', 'json_schema' or 'text', got "
            f"'{kind[:300]}'",
            f"{at}.type",
        )
    if kind == "json_schema":
        _check_json_schema(output_format.get("json_schema"), f"{at}.json_schema")
    return read_response_format(fields)


def _check_json_schema(json_schema: Any, at: str) -> None:
    missing = "Parameter {} is required when type is 'json_schema'"
    _check_format_field(json_schema, dict, at, missing.format(at))
    name_at, schema_at = f"{at}.name", f"{at}.schema"
    missing_name = f"Parameter {name_at} is required"
    name = _check_format_field(json_schema.get("name"), str, name_at, missing_name)
    if not 0 < len(name.encode()) <= 64:  # noqa: PLR2004 - the server's number
        text = f"Parameter {name_at} must be 1-64 characters"
        raise build_param_error(text, name_at, "too_long")
    _check_format_field(json_schema.get("schema"), dict, schema_at, missing.format(schema_at))


def _check_format_field(value: Any, kind: type, at: str, missing: str = "") -> Any:
    expected = "a string" if kind is str else "an object"
    return check_value(value, kind, at, f"Parameter {at} must be {expected}", missing=missing)


def read_completion_request(call: ClientRequest, setup: MindieConfig) -> GenerationRequest:
    """Read a /v1/completions request: one prompt of text or token ids."""
    fields = read_body_fields(call)
    model = read_model_name(fields, setup)
    prompt = _read_completion_prompt(get_field(fields, "prompt"), setup.profile.max_text_length)
    values = read_params(params.COMPLETION_PARAMS, fields)
    if (top := values.get("request.top_logprobs")) is not None:
        values["logprobs.top"] = top
    output = _read_output_format(fields)
    resolve_choice_count(values, COMPLETION_COUNT_ERRORS)
    return build_request(
        values,
        setup,
        params.COMPLETION_PARAMS,
        fields,
        read_elsewhere=("model", "prompt", "response_format"),
        model=model,
        kind="completion",
        prompts=(prompt,),
        templating=RAW_PROMPT_OPTIONS,
        output=output,
        field_extra=read_field_extra(fields),
        client_id=setup.get_request_id(call),
    )


def _read_completion_prompt(prompt: Any, limit: int) -> str | tuple[int, ...]:
    wrong_length = (
        "Length of Prompt {} should be greater than 0 and less than or equal to {}, but got {}"
    )
    match prompt:
        case None:
            raise build_param_error("Contains not prompt or prompt null", "prompt", "missing")
        case str():
            if (length := get_invalid_length(prompt, limit)) is not None:
                text = wrong_length.format("text", limit, length)
                raise build_param_error(text, "prompt", "too_long" if length else "empty")
            return prompt
        case []:
            raise build_param_error("Prompt array cannot be empty.", "prompt", "empty")
        case list():
            if not are_unsigned(prompt):
                text = "All elements of the prompt array must be integers."
                raise build_param_error(text, "prompt", "type")
            if len(prompt) > MAX_INPUT_TOKENS:
                text = wrong_length.format("token", MAX_INPUT_TOKENS, len(prompt))
                raise build_param_error(text, "prompt", "too_long")
            return tuple(prompt)
        case _:
            text = "The type of prompt is abnormal,prompt must be str or integer list."
            raise build_param_error(text, "prompt", "type")
