"""Client bodies to the internal request.

The graph reports these errors within its own text; JSON, ``model`` and ``stream`` are checked
before the graph (``read_routing_fields``). The order of the checks is the server's.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec import Raw

from protocols.chat.content_parts import PART_KEYS
from protocols.chat.field_keys import read_field_extra
from protocols.chat.messages import CALL_KEYS
from protocols.chat.tools import FUNCTION_TOOL_KEYS
from protocols.core.errors import InvalidParameter
from protocols.core.extra import KeyTree, read_extra_fields
from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import decode_json
from protocols.core.request import (
    AudioPart,
    ContentPart,
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    OutputFormat,
    Prompt,
    ReasoningPart,
    RerankRequest,
    ResponseOptions,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from protocols.json_body import decode_value, read_object
from protocols.ovms import params
from protocols.params import ParsedParams

# Messages, tools and output formats, with the server's order of checks and error texts.
#
# Source: openvinotoolkit/model_server, src/llm/apis/openai_completions.cpp and
# openai_api_handler.cpp (parseMessages, parseTools, parseResponseFormat).

_ROLES = frozenset(get_args(Role))
_encode = msgspec.json.Encoder().encode


def build_param_error(text: str, param: str) -> InvalidParameter:
    """Build an error with a complete text."""
    return InvalidParameter(text, param=param)


def read_messages(raw: Raw | None) -> tuple[Message, ...]:
    """Read the messages. Raises InvalidParameter."""
    if raw is None:
        raise build_param_error("Messages missing in request", "messages")
    value = decode_value(raw)
    if not isinstance(value, list):
        raise build_param_error("Messages are not an array", "messages")
    if not value:
        raise build_param_error("Messages array cannot be empty", "messages")
    return tuple(_read_message(item, f"messages[{i}]") for i, item in enumerate(value))


_MESSAGE_KEYS: Final[KeyTree] = dict.fromkeys(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
)


def _read_message(item: Any, at: str) -> Message:
    """Read one message. Ignore a field of an unexpected type, as the server does."""
    if not isinstance(item, dict):
        raise build_param_error("Message is not a JSON object", "messages")
    parts = _read_content(item.get("content", ""), f"{at}.content")
    role = item.get("role")
    if not isinstance(role, str):
        raise build_param_error("Every message must have 'role' field", "messages")
    calls = item.get("tool_calls")
    tool_calls = _read_tool_calls(calls, at) if isinstance(calls, list) else ()
    if role not in _ROLES:
        raise build_param_error("Invalid message structure - unknown role", "messages")
    thought = item.get("reasoning_content")
    if isinstance(thought, str) and thought:
        parts = (ReasoningPart(thought), *parts)
    return Message(
        cast("Role", role),
        parts,
        name=_get_string(item.get("name")),
        tool_calls=tool_calls,
        tool_call_id=_get_string(item.get("tool_call_id")),
        extra=read_extra_fields(item, at, _MESSAGE_KEYS),
    )


def _get_string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_content(content: Any, at: str) -> tuple[ContentPart, ...]:
    match content:
        case str():
            return (TextPart(content),)
        case list():
            return tuple(_read_part(entry, f"{at}[{k}]") for k, entry in enumerate(content))
        case _:
            return ()


def _read_part(entry: Any, at: str) -> ContentPart:
    if not isinstance(entry, dict):
        raise _build_message_error("content array should contain objects")
    part = _read_known_part(entry)
    extra = read_extra_fields(entry, at, PART_KEYS[entry["type"]])
    return part if extra is None else msgspec.structs.replace(part, extra=extra)


def _read_known_part(entry: dict[str, Any]) -> ContentPart:
    match entry.get("type"):
        case "text":
            return TextPart(_read_string_member(entry, "text", "content text missing"))
        case "image_url":
            image = _read_object_member(entry, "image_url", "content image_url missing")
            url = _read_string_member(image, "url", "image_url does not have url field")
            return ImagePart(url, _get_string(image.get("detail")))
        case "input_audio":
            audio = _read_object_member(entry, "input_audio", "input_audio object missing")
            data = _read_string_member(
                audio, "data", "input_audio does not have a valid data field"
            )
            return AudioPart(data, _get_string(audio.get("format")))
        case str():
            raise build_param_error("Unsupported content type", "messages")
        case _:
            raise _build_message_error("content object type missing")


def _build_message_error(text: str) -> InvalidParameter:
    return build_param_error(f"Invalid message structure - {text}", "messages")


def _read_string_member(container: dict[str, Any], name: str, text: str) -> str:
    value = container.get(name)
    if not isinstance(value, str):
        raise _build_message_error(text)
    return value


def _read_object_member(container: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    value = container.get(name)
    if not isinstance(value, dict):
        raise _build_message_error(text)
    return value


def _read_tool_calls(calls: list[Any], at: str) -> tuple[ToolCall, ...]:
    return tuple(_read_tool_call(call, f"{at}.tool_calls[{k}]") for k, call in enumerate(calls))


def _read_tool_call(call: Any, at: str) -> ToolCall:
    if not isinstance(call, dict):
        raise build_param_error("Each tool_call must be an object", "messages")
    function = call.get("function")
    if not isinstance(function, dict):
        raise build_param_error("Each tool_call must have a 'function' object", "messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    extra = read_extra_fields(call, at, CALL_KEYS["function"])
    identifier, name = str(call.get("id") or ""), str(function.get("name") or "")
    return ToolCall(identifier, name, arguments, extra=extra)


# --- tools ----------------------------------------------------------------------------------------


def read_tools(fields: Mapping[str, Raw]) -> tuple[tuple[Tool, ...], ToolChoice | None]:
    """Read the tools and the tool choice. Raises InvalidParameter.

    The choice ``none`` removes the tools, and a named choice removes all others.
    """
    name, choice = _read_tool_choice(
        decode_value(fields["tool_choice"]) if "tool_choice" in fields else None
    )
    if choice == "none":
        return (), None
    value = decode_value(fields["tools"]) if "tools" in fields else None
    if value is None:
        return (), None
    if not isinstance(value, list):
        raise build_param_error("Tools are not an array", "tools")
    raws = decode_json(fields["tools"], kind=list[Raw])
    tools = tuple(
        _read_tool(item, raw, f"tools[{i}]")
        for i, (item, raw) in enumerate(zip(value, raws, strict=True))
    )
    if name is not None:
        tools = tuple(tool for tool in tools if tool.name == name)
    return tools, choice if tools else None


def _read_tool_choice(value: Any) -> tuple[str | None, ToolChoice | None]:
    """Return the name of the tool to keep, if one is named, and the choice."""
    match value:
        case None:
            return None, None
        case "none" | "auto" | "required":
            return None, cast('Literal["none", "auto", "required"]', value)
        case str():
            text = "tool_choice should be either 'none' or 'auto' or 'required'"
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name, NamedTool(name)
        case {"function": dict()}:
            text = "tool_choice.function.name is not a valid string"
        case {"type": "function"}:
            text = "tool_choice.name is not a valid string"
        case dict():
            text = "tool_choice.function is not a valid JSON object"
        case _:
            text = "tool_choice is not a valid JSON object or string"
    raise build_param_error(text, "tool_choice")


_TOOL_KEYS: Final[KeyTree] = {**FUNCTION_TOOL_KEYS, "type": frozenset({"function"})}
"""With a function, the server reads no type."""


def _read_tool(item: Any, raw: Raw, at: str) -> Tool:
    if not isinstance(item, dict):
        raise build_param_error("Tool is not a JSON object", "tools")
    function, inside = item, decode_json(raw, kind=dict[str, Raw])
    if "function" in item:
        function = item["function"]
        if not isinstance(function, dict):
            raise build_param_error("Function is not a valid JSON object", "tools")
        inside = decode_json(inside["function"], kind=dict[str, Raw])
    elif not isinstance(item.get("type"), str):
        raise build_param_error("Tool type is missing or invalid", "tools")
    elif item["type"] != "function":
        raise build_param_error("Only function tools are supported", "tools")
    name = function.get("name")
    if not isinstance(name, str):
        raise build_param_error("Function object does not contain a valid name field", "tools")
    if "parameters" in function and not isinstance(function["parameters"], dict):
        raise build_param_error("Function parameters are not a valid JSON object", "tools")
    strict = function.get("strict")
    return Tool(
        name,
        _get_string(function.get("description")),
        inside.get("parameters"),
        strict if isinstance(strict, bool) else None,
        extra=read_extra_fields({"function": function, **item}, at, _TOOL_KEYS)
        if "function" in item
        else None,
    )


# --- output ---------------------------------------------------------------------------------------


def read_response_format(raw: Raw | None) -> OutputFormat | None:
    """Read ``response_format``. Raises InvalidParameter."""
    value = None if raw is None else decode_value(raw)
    if raw is None or value is None:
        return None
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonObjectFormat()
        case {"type": "json_schema", "json_schema": {"schema": dict()} as schema}:
            schema_object = decode_json(raw, kind=dict[str, Raw])
            inside = decode_json(schema_object["json_schema"], kind=dict[str, Raw])
            strict = schema.get("strict")
            return JsonSchemaFormat(
                inside["schema"],
                _get_string(schema.get("name")) or "schema",
                _get_string(schema.get("description")),
                strict if isinstance(strict, bool) else None,
            )
        case dict():
            raise build_param_error("response_format type is not supported", "response_format")
        case _:
            raise build_param_error("response_format is not an object", "response_format")


BEST_OF_LIMIT = 20
MAX_INPUTS = 500
"""The documented default; the sources have no such check, and so no error text."""
MAX_IGNORE_EOS_TOKENS = 4000
"""The first release generates at most this many tokens with ``ignore_eos``."""

_EMBEDDING_FIELDS = frozenset({"model", "input", "encoding_format", "user"})
_SEPARATE_FIELDS: Mapping[bool, Mapping[str, tuple[str, ...]]] = {
    False: {
        "chat": ("stream_options", "stop", "logprobs", "messages", "tools", "tool_choice",
                 "response_format", "chat_template_kwargs"),
        "completion": ("stream_options", "stop", "logprobs", "prompt"),
    },
    True: {"chat": ("messages",), "completion": ("prompt",)},
}  # fmt: skip
"""The fields that are not read by a table, for the early release or not."""
_KNOWN_FIELDS = {
    (early, kind): {"model", "stream", "user", *names, *(row.wire for row in tables[kind])}
    for early, tables in ((False, params.PARAM_TABLES), (True, params.EARLY_PARAM_TABLES))
    for kind, names in _SEPARATE_FIELDS[early].items()
}
"""All fields that an endpoint reads."""


def has_json_body(call: ClientRequest) -> bool:
    """Whether the body is read at all: otherwise the path names the model."""
    return "application/json" in call.headers.get("content-type", "")


def read_routing_fields(
    call: ClientRequest, *, generates: bool
) -> tuple[dict[str, Raw], str, bool]:
    """Read fields, model (may be empty) and ``stream``. Raises MalformedRequest, InvalidParameter.

    ``stream`` is checked only for generation endpoints.
    """
    fields = read_object(call.body)
    if "model" not in fields:
        raise build_param_error("model field is missing in JSON body", "model")
    model = decode_value(fields["model"])
    if not isinstance(model, str):
        raise build_param_error("model field is not a string", "model")
    stream = decode_value(fields["stream"]) if generates and "stream" in fields else False
    if not isinstance(stream, bool):
        raise build_param_error("stream field is not a boolean", "stream")
    return fields, model, stream


def read_generation_request(call: ClientRequest, *, chat: bool, early: bool) -> GenerationRequest:
    """Read a chat or completions request. Raises ClientError."""
    fields, model, stream = read_routing_fields(call, generates=True)
    values = ParsedParams()
    usage = False
    if early:
        _read_early_params(fields, values)
    else:
        usage = _read_include_usage(fields, stream=stream)
        _read_common_params(fields, values, stream=stream)
    if chat:
        _read_chat_fields(fields, values, stream=stream, early=early)
    else:
        _read_completion_fields(fields, values, stream=stream, early=early)
    kind: Literal["chat", "completion"] = "chat" if chat else "completion"
    known = _KNOWN_FIELDS[early, kind]
    values.provided_fields = {name for name, raw in fields.items() if bytes(raw) != b"null"}
    final: Literal["none", "final"] = "none" if early or (stream and not usage) else "final"
    return GenerationRequest(
        model=model,
        kind=kind,
        stream=stream,
        response_options=ResponseOptions(usage=final),
        labels=_read_labels(fields),
        extra={name: raw for name, raw in fields.items() if name not in known},
        field_extra=() if early else read_field_extra(fields),
        **values.build_request_arguments(),
    )


def read_embedding_request(call: ClientRequest) -> EmbeddingRequest:
    """Read an embeddings request. Raises ClientError."""
    fields, model, _ = read_routing_fields(call, generates=False)
    inputs = _read_inputs(fields.get("input"))
    if len(inputs) > MAX_INPUTS:
        text = f"The number of input documents exceeds allowed configured value: {MAX_INPUTS}"
        raise build_param_error(text, "input")
    encoding: Literal["float", "base64"] = "float"
    if "encoding_format" in fields:
        match decode_value(fields["encoding_format"]):
            case "float":
                pass
            case "base64":
                encoding = "base64"
            case str():
                text = "encoding_format should either base64 or float"
                raise build_param_error(text, "encoding_format")
            case _:
                raise build_param_error("encoding_format should be string", "encoding_format")
    return EmbeddingRequest(
        model=model,
        inputs=inputs,
        encoding=encoding,
        labels=_read_labels(fields),
        provided_fields=frozenset(fields) & {"encoding_format"},
        extra={name: raw for name, raw in fields.items() if name not in _EMBEDDING_FIELDS},
    )


_RERANK_FIELDS = frozenset(
    {"model", "query", "documents", "top_n", "rank_fields", "return_documents"}
)


def read_rerank_request(call: ClientRequest) -> RerankRequest:
    """Read a rerank request. Raises ClientError.

    Documents are texts; the server reads objects with a title and a text, and rejects them when it
    returns documents. Source: src/rerank/rerank_utils.cpp.
    """
    fields, model, _ = read_routing_fields(call, generates=False)
    values = {name: decode_value(fields[name]) for name in _RERANK_FIELDS if name in fields}
    if "query" not in values:
        raise build_param_error("query field is missing in request", "query")
    if not isinstance(values["query"], str):
        raise build_param_error("query is not a string", "query")
    top_n, return_documents = values.get("top_n"), values.get("return_documents")
    documents = _read_documents(values)
    if top_n is not None and type(top_n) is not int:
        raise build_param_error("top_n accepts integer values", "top_n")
    rank_fields = values.get("rank_fields")
    if rank_fields is not None and not isinstance(rank_fields, list):
        raise build_param_error("rank_fields is not an array", "rank_fields")
    if not all(isinstance(name, str) for name in rank_fields or ()):
        raise build_param_error("rank_fields array element is not a string", "rank_fields")
    if return_documents is not None and not isinstance(return_documents, bool):
        raise build_param_error("return_documents accepts boolean values", "return_documents")
    return RerankRequest(
        model=model,
        queries=(values["query"],),
        documents=documents,
        top_n=top_n,
        return_documents=return_documents,
        provided_fields=frozenset(values),
        extra={name: raw for name, raw in fields.items() if name not in _RERANK_FIELDS},
    )


def _read_documents(values: Mapping[str, Any]) -> tuple[str, ...]:
    if "documents" not in values:
        raise build_param_error("documents field is missing in request", "documents")
    documents = values["documents"]
    if not isinstance(documents, list):
        raise build_param_error("documents is not an array", "documents")
    for document in documents:
        if not isinstance(document, str | dict):
            text = "documents array element is neither string nor object"
            raise build_param_error(text, "documents")
    if len({type(document) for document in documents}) > 1:
        text = "all documents have to be the same type (string or objects)"
        raise build_param_error(text, "documents")
    if documents and isinstance(documents[0], dict):
        for document in documents:
            for name in ("title", "text"):
                if name not in document:
                    text = f"document {name} field is missing"
                    raise build_param_error(text, "documents")
                if not isinstance(document[name], str):
                    text = f"document {name} field have to be string"
                    raise build_param_error(text, "documents")
        raise build_param_error("document map not supported", "documents")
    if not documents:
        raise build_param_error("documents array is empty", "documents")
    return tuple(documents)


def _read_labels(fields: Mapping[str, Raw]) -> dict[str, str]:
    user = decode_value(fields["user"]) if "user" in fields else None
    return {"user": user} if isinstance(user, str) else {}


# --- shared by both kinds -------------------------------------------------------------------------


def _read_include_usage(fields: Mapping[str, Raw], *, stream: bool) -> bool:
    """Whether the stream ends with usage."""
    options = decode_value(fields["stream_options"]) if "stream_options" in fields else None
    if options is None:
        return False
    if not stream:
        text = "stream_options provided, but stream not set to true"
        raise build_param_error(text, "stream_options")
    if not isinstance(options, dict):
        raise build_param_error("stream_options is not an object", "stream_options")
    include = options.pop("include_usage", False)
    if not isinstance(include, bool):
        raise build_param_error("stream_options.include_usage is not a boolean", "stream_options")
    if options:
        raise build_param_error(
            "Found unexpected stream options. Properties accepted in stream_options: include_usage",
            "stream_options",
        )
    return include


def _read_common_params(fields: Mapping[str, Raw], values: ParsedParams, *, stream: bool) -> None:
    params.read_params(params.PARAMS_BEFORE_STOP, fields, values)
    stop = _read_stop_strings(fields.get("stop"))
    if stop:
        values["stopping.stop"] = stop
        if stream:  # the first release supports fewer parameters in a stream
            values["stopping.include_stop"] = stream
    params.read_params((params.INCLUDE_STOP,), fields, values)
    if stream and values.get("stopping.include_stop") is False:
        raise build_param_error(
            "include_stop_str_in_output cannot be set to false if streaming is used",
            "include_stop_str_in_output",
        )
    params.read_params(params.BEST_OF_PARAMS, fields, values)
    if "best_of" in values.provided_fields:
        if values.get("sampling.beam_width", 1) >= BEST_OF_LIMIT:
            text = f"best_of exceeds limit provided in graph config: {BEST_OF_LIMIT}"
            raise build_param_error(text, "best_of")
        if stream:
            raise build_param_error("best_of cannot be used in streaming mode", "best_of")
    params.read_params(params.PARAMS_AFTER_BEST_OF[:1], fields, values)
    _check_n(values)
    params.read_params(params.PARAMS_AFTER_BEST_OF[1:], fields, values)


def _read_early_params(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    params.read_params(params.EARLY_PARAMS, fields, values)
    if "temperature" not in values.provided_fields:
        values["sampling.temperature"] = 0.0  # the first release is greedy by default
    if values.get("stopping.ignore_eos"):
        if values.get("stopping.max_tokens", 0) > MAX_IGNORE_EOS_TOKENS:
            raise build_param_error(
                "when ignore_eos is true max_tokens can not be greater than "
                f"{MAX_IGNORE_EOS_TOKENS}",
                "max_tokens",
            )
        if "max_tokens" not in values.provided_fields:
            values["stopping.max_tokens"] = MAX_IGNORE_EOS_TOKENS
    _check_n(values)


def _check_n(values: ParsedParams) -> None:
    if values.get("n", 1) > values.get("sampling.beam_width", 1):
        raise build_param_error("n value cannot be greater than best_of", "n")


def _read_stop_strings(raw: Raw | None) -> tuple[str, ...]:
    value = None if raw is None else decode_value(raw)
    match value:
        case None:
            return ()
        case str():
            return (value,)
        case list() if len(value) > params.MAX_STOP_STRINGS:
            raise build_param_error(
                f"stop array must have no more than {params.MAX_STOP_STRINGS} strings", "stop"
            )
        case list() if all(isinstance(one, str) for one in value):
            return tuple(value)
        case list():
            raise build_param_error("stop array contains non string element", "stop")
        case _:
            raise build_param_error("stop is not a string or array of strings", "stop")


# --- chat or completions only ---------------------------------------------------------------------


def _read_chat_fields(
    fields: Mapping[str, Raw], values: ParsedParams, *, stream: bool, early: bool
) -> None:
    values["messages"] = read_messages(fields.get("messages"))
    if not early:
        tools, choice = read_tools(fields)
        values["tools"] = tools
        values["tool_choice"] = choice
        logprobs = _read_flag(fields, "logprobs")
        if logprobs and stream:
            raise build_param_error("logprobs are not supported in streaming mode.", "logprobs")
        if logprobs:
            values["logprobs.top"] = 0
        params.read_params((params.MAX_COMPLETION_TOKENS,), fields, values)
    if values.get("stopping.max_tokens") == 0:
        raise build_param_error("max_tokens value should be greater than 0", "max_tokens")
    if not early:
        values["output"] = read_response_format(fields.get("response_format"))
        _read_template_arguments(fields, values)


def _read_completion_fields(
    fields: Mapping[str, Raw], values: ParsedParams, *, stream: bool, early: bool
) -> None:
    prompt = decode_value(fields["prompt"]) if "prompt" in fields else ""
    if not isinstance(prompt, str):
        raise build_param_error("prompt is not a string", "prompt")
    if not prompt:
        raise build_param_error("prompt is missing", "prompt")
    values["prompts"] = (prompt,)
    values["templating.mode"] = "raw"
    echo = False
    if not early:
        if _read_completion_logprobs(fields, stream=stream):
            values["logprobs.top"] = 0
        echo = _read_flag(fields, "echo")
        if echo:
            values["echo"] = echo
    if values.get("stopping.max_tokens") == 0 and not echo:
        text = "max_tokens value should be greater than 0"
        raise build_param_error(text if early else f"{text} unless echo is set", "max_tokens")


def _read_completion_logprobs(fields: Mapping[str, Raw], *, stream: bool) -> bool:
    match decode_value(fields["logprobs"]) if "logprobs" in fields else None:
        case None:
            return False
        case bool():
            raise build_param_error("logprobs accepts integer values", "logprobs")
        case 1 as value if type(value) is int:
            if stream:
                raise build_param_error("logprobs are not supported in streaming mode.", "logprobs")
            return True
        case int():
            raise build_param_error("accepted logprobs value is currently 1 only", "logprobs")
        case _:
            raise build_param_error("logprobs accepts integer values", "logprobs")


def _read_flag(fields: Mapping[str, Raw], name: str) -> bool:
    value = decode_value(fields[name]) if name in fields else None
    if value is None:
        return False
    if not isinstance(value, bool):
        raise build_param_error(f"{name} accepts values true or false", name)
    return value


def _read_template_arguments(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    raw = fields.get("chat_template_kwargs")
    value = None if raw is None else decode_value(raw)
    if raw is None or value is None:
        return
    if not isinstance(value, dict):
        raise build_param_error("chat_template_kwargs must be an object", "chat_template_kwargs")
    values["templating.arguments"] = decode_json(raw, kind=dict[str, Raw])


def _read_inputs(raw: Raw | None) -> tuple[Prompt, ...]:
    """Read texts or lists of token ids. Source: src/tokenize/tokenize_parser.cpp, parseInput."""
    if raw is None:
        raise build_param_error("input field is required", "input")
    match decode_value(raw):
        case str() as text:
            return (text,)
        case []:
            raise build_param_error("input array should not be empty", "input")
        case list() as items:
            return _read_input_items(items)
        case _:
            text = "input should be string, array of strings or array of integers"
            raise build_param_error(text, "input")


def _read_input_items(items: list[object]) -> tuple[Prompt, ...]:
    if all(isinstance(item, str) for item in items):
        return tuple(item for item in items if isinstance(item, str))
    if all(type(item) is int for item in items):
        return (tuple(item for item in items if isinstance(item, int)),)
    if all(isinstance(item, list) for item in items):
        return tuple(_read_token_ids(item) for item in items if isinstance(item, list))
    if all(isinstance(item, str | list) or type(item) is int for item in items):
        raise build_param_error("input must be homogeneous", "input")
    raise build_param_error("every element in input array should be either string or int", "input")


def _read_token_ids(item: list[object]) -> tuple[int, ...]:
    if not item:
        raise build_param_error("inner arrays in input should not be empty", "input")
    if not all(type(token) is int for token in item):
        text = "input must be either array of strings or array of array of integers"
        strings = all(isinstance(token, str) for token in item)
        raise build_param_error(text if strings else "input must be homogeneous", "input")
    return tuple(token for token in item if isinstance(token, int))
