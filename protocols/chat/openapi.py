"""What the family tells of itself: its requests, and its answers in a style.

A member puts its own ``Reading``, ``Style`` and refusals in::

    refused = refusals(errors.statuses(), ref("Error"))
    Description(operations(READING, refused, ref("Error")), {**answers(STYLE), "Error": …})
"""

from collections.abc import Iterable, Mapping

from protocols.chat.embeddings import EmbeddingList
from protocols.chat.messages import MessageRules
from protocols.chat.requests import MAX_IDENTIFIER_LENGTH, METADATA_LIMITS, RequestRules
from protocols.chat.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    GenerationUsage,
    ResponseStyle,
    ToolCallItem,
)
from protocols.openapi import (
    BOOLEAN,
    INTEGER,
    NONEMPTY_STRING,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array_of,
    build_event_data,
    build_properties,
    build_request_body,
    build_response,
    build_struct_schemas,
    enum_of,
    map_of,
    nullable,
    object_of,
    ref,
)
from protocols.params import Param

# Requests' fields that are no scalars, as JSON Schema: what their readers take.
#
# Rules between fields and between messages (a tool's message answers a call) have no place here: a
# request that breaks one is refused.

_ANY_OBJECT: Schema = {"type": "object"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}

PROMPT_SCHEMA: Schema = {
    "anyOf": [
        STRING,
        array_of(_TOKEN_ID, minItems=1),
        array_of(STRING, minItems=1),
        array_of(array_of(_TOKEN_ID, minItems=1), minItems=1),
    ]
}


def build_inputs(most: int) -> Schema:
    """What is to be embedded; ``most`` is how many there may be, and how many tokens in each."""
    tokens = array_of(_TOKEN_ID, minItems=1, maxItems=most)
    several = [array_of(one, minItems=1, maxItems=most) for one in (NONEMPTY_STRING, tokens)]
    return {"anyOf": [NONEMPTY_STRING, tokens, *several]}


# --- conversations --------------------------------------------------------------------------------


def _build_part(kind: str, inner: Schema) -> Schema:
    return object_of({"type": {"const": kind}, kind: inner}, "type", kind)


def _build_object(required: Mapping[str, Schema], **others: Schema) -> Schema:
    return object_of({**required, **others}, *required)


_IMAGE_URL = _build_object({"url": STRING}, detail=nullable(enum_of("auto", "low", "high")))
_FILE_OBJECT: Schema = {
    **_build_object(
        {}, file_id=nullable(STRING), file_data=nullable(STRING), filename=nullable(STRING)
    ),
    "anyOf": [_build_object({"file_id": STRING}), _build_object({"file_data": STRING})],
}
_REASONING_ITEM = _build_object({"text": STRING}, signature=nullable(STRING))

PART_SCHEMAS: Mapping[str, Schema] = {
    "text": _build_part("text", STRING),
    "image_url": _build_part("image_url", _IMAGE_URL),
    "input_audio": _build_part("input_audio", _build_object({"data": STRING, "format": STRING})),
    "file": _build_part("file", _FILE_OBJECT),
    "audio_url": _build_part("audio_url", _build_object({"url": STRING})),
    "video_url": _build_part("video_url", _build_object({"url": STRING})),
    "refusal": _build_part("refusal", STRING),
    "reasoning": _build_object(
        {"type": {"const": "reasoning"}, "summary": array_of(_REASONING_ITEM)}
    ),
}


def build_messages(rules: MessageRules) -> Schema:
    """A conversation read after these rules."""
    return array_of({"anyOf": [_build_message(role, rules) for role in rules.roles]}, minItems=1)


def _build_message(role: str, rules: MessageRules) -> Schema:
    shared = {"role": {"const": role}, "name": nullable(STRING)}
    match role:
        case "assistant":
            return _build_assistant_message(shared, rules)
        case "tool":
            return _build_object(
                {**shared, "content": _build_content("text"), "tool_call_id": STRING}
            )
        case "function":
            return _build_object(
                {"role": shared["role"], "name": STRING, "content": nullable(STRING)}
            )
        case "user":
            content = _build_content(*rules.user_parts)
        case _:
            content = _build_content("text")
    return _build_object({"role": shared["role"], "content": content}, name=shared["name"])


def _build_content(*kinds: str) -> Schema:
    return {
        "anyOf": [STRING, array_of({"anyOf": [PART_SCHEMAS[kind] for kind in kinds]}, minItems=1)]
    }


def _build_assistant_message(shared: Mapping[str, Schema], rules: MessageRules) -> Schema:
    content = _build_content(*rules.assistant_parts)
    calls = array_of(
        {
            "anyOf": [
                _build_tool_call("function", "arguments", rules),
                _build_tool_call("custom", "input"),
            ]
        }
    )
    properties = {
        **shared,
        "content": nullable(content),
        "refusal": nullable(STRING),
        "reasoning_content": nullable(STRING),
        "reasoning": nullable(STRING),
        "tool_calls": nullable(calls),
        "function_call": nullable(_build_object({"name": STRING, "arguments": STRING})),
        "audio": NULL,
    }
    said: list[Schema] = [
        _build_object({"content": content}),
        _build_object({"refusal": NONEMPTY_STRING}),
        _build_object({"tool_calls": {**calls, "minItems": 1}}),
        _build_object({"function_call": _ANY_OBJECT}),
    ]
    return {**object_of(properties, "role"), "anyOf": said}


def _build_tool_call(kind: str, text: str, rules: MessageRules | None = None) -> Schema:
    said: Schema = (
        {"anyOf": [STRING, _ANY_OBJECT]} if rules and rules.accepts_argument_objects else STRING
    )
    called = _build_object({"name": STRING, text: said})
    return _build_object({"id": STRING, "type": {"const": kind}, kind: called})


# --- what binds the answer ------------------------------------------------------------------------

_FUNCTION_TOOL = _build_object(
    {"name": NONEMPTY_STRING},
    description=nullable(STRING),
    parameters=nullable(_ANY_OBJECT),
    strict=nullable(BOOLEAN),
)
_CUSTOM_TOOL = _build_object(
    {"name": NONEMPTY_STRING}, description=nullable(STRING), format=nullable(_ANY_OBJECT)
)
_NAMED_TOOL = _build_object({"name": STRING})
_TOOL_CHOICES: list[Schema] = [_build_part(kind, _NAMED_TOOL) for kind in ("function", "custom")]
_ALLOWED_TOOLS = _build_object(
    {"mode": enum_of("auto", "required"), "tools": array_of({"anyOf": _TOOL_CHOICES})}
)
_JSON_SCHEMA = _build_object(
    {"name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}},
    description=nullable(STRING),
    schema=nullable(_ANY_OBJECT),
    strict=nullable(BOOLEAN),
)


def build_tools(most: int, *kinds: str) -> Schema:
    """The tools offered."""
    bodies = {"function": _FUNCTION_TOOL, "custom": _CUSTOM_TOOL}
    offered: list[Schema] = [_build_part(kind, bodies[kind]) for kind in kinds]
    return nullable(array_of({"anyOf": offered}, minItems=1, maxItems=most))


TOOL_CHOICE: Schema = nullable(
    {
        "anyOf": [
            enum_of("none", "auto", "required"),
            *_TOOL_CHOICES,
            _build_part("allowed_tools", _ALLOWED_TOOLS),
        ]
    }
)
FUNCTIONS: Schema = nullable(array_of(_FUNCTION_TOOL, minItems=1, maxItems=128))
FUNCTION_CALL: Schema = nullable({"anyOf": [enum_of("none", "auto"), _NAMED_TOOL]})
RESPONSE_FORMAT: Schema = nullable(
    {
        "anyOf": [
            _build_object({"type": enum_of("text", "json_object")}),
            _build_part("json_schema", _JSON_SCHEMA),
        ]
    }
)
_STRUCTURED_OUTPUT_SCHEMAS: Mapping[str, Schema] = {
    "json": {"type": ["object", "string"]},
    "regex": STRING,
    "choice": array_of(STRING, minItems=1),
    "grammar": STRING,
}
STRUCTURED_OUTPUT_PROPERTIES: Mapping[str, Schema] = {
    "structured_outputs": nullable(
        object_of(
            {
                **{name: nullable(one) for name, one in _STRUCTURED_OUTPUT_SCHEMAS.items()},
                "json_object": nullable(BOOLEAN),
            }
        )
    ),
    **{f"guided_{name}": nullable(one) for name, one in _STRUCTURED_OUTPUT_SCHEMAS.items()},
}

# --- what comes beside ----------------------------------------------------------------------------

LOGIT_BIAS: Schema = nullable(
    map_of({**NUMBER, "minimum": -100, "maximum": 100}, propertyNames={"pattern": "^[0-9]{1,10}$"})
)
STREAM_OPTIONS: Schema = nullable(
    object_of(
        {
            name: nullable(BOOLEAN)
            for name in ("include_usage", "continuous_usage_stats", "include_obfuscation")
        }
    )
)
MODALITIES: Schema = nullable(array_of({"const": "text"}))
TEMPLATE_ARGUMENTS: Schema = nullable(_ANY_OBJECT)


def build_metadata(items: int, key: int, longest: int) -> Schema:
    """Labels: how many there may be, and how long a name and a text."""
    text = {"type": "string", "maxLength": longest}
    return nullable(map_of(text, maxProperties=items, propertyNames={"maxLength": key}))


_MODEL_SCHEMA: Schema = {
    **NONEMPTY_STRING,
    "description": "A model's name or alias; the list of models has all.",
}

# --- requests -------------------------------------------------------------------------------------


def build_chat_request(
    reading: RequestRules, *, kinds: tuple[str, ...] = ("function", "custom")
) -> Schema:
    """The body of a conversation; ``kinds`` of tools."""
    properties = {
        "model": _MODEL_SCHEMA,
        "messages": build_messages(reading.message_rules),
        **_build_checked_properties(reading.chat),
        **_GENERATION_PROPERTIES,
        "tools": build_tools(reading.max_tools, *kinds),
        "tool_choice": TOOL_CHOICE,
        "functions": FUNCTIONS,
        "function_call": FUNCTION_CALL,
        "metadata": build_metadata(*METADATA_LIMITS),
        "modalities": MODALITIES,
        "chat_template_kwargs": TEMPLATE_ARGUMENTS,
    }
    return object_of(properties, "model", "messages", more=_allows_unknown_fields(reading))


def build_completion_request(reading: RequestRules) -> Schema:
    """The body of a completion."""
    properties = {
        "model": _MODEL_SCHEMA,
        "prompt": PROMPT_SCHEMA,
        **_build_checked_properties(reading.completion),
        **_GENERATION_PROPERTIES,
    }
    return object_of(properties, "model", "prompt", more=_allows_unknown_fields(reading))


def build_embedding_request(reading: RequestRules) -> Schema:
    """The body of a request for vectors."""
    properties = {
        "model": _MODEL_SCHEMA,
        "input": build_inputs(reading.max_inputs),
        **_build_checked_properties(reading.embedding),
    }
    return object_of(properties, "model", "input", more=_allows_unknown_fields(reading))


_GENERATION_PROPERTIES: Mapping[str, Schema] = {
    "response_format": RESPONSE_FORMAT,
    **STRUCTURED_OUTPUT_PROPERTIES,
    "logit_bias": LOGIT_BIAS,
    "stream_options": STREAM_OPTIONS,
}


def _build_checked_properties(table: tuple[Param, ...]) -> dict[str, Schema]:
    """The rows' properties, with what their reader checks besides."""
    found = build_properties(table)
    for param in table:
        if param.wire == "stop":
            most = {} if param.max_items is None else {"maxItems": param.max_items}
            found["stop"] = nullable(
                {"anyOf": [NONEMPTY_STRING, array_of(NONEMPTY_STRING, **most)]}
            )
        elif param.wire == "safety_identifier":
            found[param.wire] = nullable({**STRING, "maxLength": MAX_IDENTIFIER_LENGTH})
    return found


def _allows_unknown_fields(reading: RequestRules) -> bool:
    return reading.unknown_fields != "reject"


# --- answers --------------------------------------------------------------------------------------


def build_response_schemas(style: ResponseStyle) -> dict[str, Schema]:
    """The whole answers and the chunks of this style, and all within them."""
    reasons = tuple(dict.fromkeys(style.finish_reasons.values()))
    chat: dict[str, Schema] = {
        **_CHOICE_PROPERTIES,
        "logprobs": nullable(ref("ChatLogprobs")),
        "finish_reason": enum_of(*reasons, "function_call"),
        "message": _build_response_message(style),
        "delta": _select_properties(_MESSAGE_PROPERTIES, style.message_keys),
    }
    text: dict[str, Schema] = {
        **_CHOICE_PROPERTIES,
        "logprobs": nullable(ref("CompletionLogprobs")),
        "finish_reason": enum_of(*reasons),
        "text": STRING,
    }
    chat_piece, text_piece = (
        {**one, "finish_reason": nullable(one["finish_reason"])} for one in (chat, text)
    )
    return {
        **build_struct_schemas(
            GenerationUsage, ToolCallItem, ChatLogprobs, CompletionLogprobs, EmbeddingList
        ),
        "ChatAnswer": _build_unary_response(
            style, style.chat_object, _build_choice(style, style.chat_choice_keys, chat)
        ),
        "TextAnswer": _build_unary_response(
            style, style.text_object, _build_choice(style, style.text_choice_keys, text)
        ),
        "ChatChunk": _build_chunk(
            style, style.chat_chunk_object, _select_properties(chat_piece, style.chat_chunk_keys)
        ),
        "TextChunk": _build_chunk(
            style, style.text_chunk_object, _select_properties(text_piece, style.text_chunk_keys)
        ),
    }


_OPTIONAL_KEYS = ("usage", "system_fingerprint")
_COMMON_PROPERTIES: Mapping[str, Schema] = {
    "id": STRING,
    "created": INTEGER,
    "model": STRING,
    "system_fingerprint": STRING,
}
_CHOICE_PROPERTIES: Mapping[str, Schema] = {
    "index": INTEGER,
    "token_ids": array_of(INTEGER),
    "stop_reason": {"type": ["string", "integer"]},
}
_MESSAGE_PROPERTIES: Mapping[str, Schema] = {
    "role": {"const": "assistant"},
    "content": nullable(STRING),
    "refusal": nullable(STRING),
    "reasoning_content": STRING,
    "tool_calls": array_of(ref("ToolCallItem")),
    "function_call": ref("FunctionCallItem"),
}
_REQUIRED_KEYS = frozenset({"index", "finish_reason", "message", "delta", "text"})


def _build_unary_response(style: ResponseStyle, name: str, choice: Schema) -> Schema:
    values = {
        **_COMMON_PROPERTIES,
        "object": {"const": name},
        "choices": array_of(choice),
        "usage": ref("GenerationUsage"),
    }
    return _select_properties(
        values, style.unary_keys, [key for key in style.unary_keys if key not in _OPTIONAL_KEYS]
    )


def _build_chunk(style: ResponseStyle, name: str, piece: Schema) -> Schema:
    values = {
        **_COMMON_PROPERTIES,
        "object": {"const": name},
        "choices": array_of(piece),
        "usage": nullable(ref("GenerationUsage")),
    }
    return _select_properties(
        values, style.chunk_keys, [key for key in style.chunk_keys if key not in _OPTIONAL_KEYS]
    )


def _build_choice(
    style: ResponseStyle, keys: Iterable[str], values: Mapping[str, Schema]
) -> Schema:
    return _select_properties(
        values, keys, [key for key in keys if key in _REQUIRED_KEYS or key in style.default_values]
    )


def _build_response_message(style: ResponseStyle) -> Schema:
    always = ("role", "content", *style.default_values)
    return _select_properties(
        _MESSAGE_PROPERTIES,
        style.message_keys,
        [key for key in style.message_keys if key in always],
    )


def _select_properties(
    values: Mapping[str, Schema], keys: Iterable[str], required: Iterable[str] | None = None
) -> Schema:
    """An object of these keys. Unless told otherwise, those are required that every choice has."""
    found = list(keys)
    needed = [key for key in found if key in _REQUIRED_KEYS] if required is None else required
    return object_of({key: values[key] for key in found}, *needed)


# --- operations -----------------------------------------------------------------------------------


def build_operations(reading: RequestRules, refusals: Schema, error: Schema) -> dict[str, Schema]:
    """What ``chat``, ``completion`` and ``embedding`` take and answer.

    ``refusals`` are the responses that tell of errors; ``error`` is what a stream tells of one.
    """

    def streamed(chunk: str) -> Schema:
        return build_event_data({"anyOf": [ref(chunk), error]}, "[DONE]")

    return {
        "chat": {
            "summary": "Answer a conversation.",
            "requestBody": build_request_body(build_chat_request(reading)),
            "responses": {
                "200": build_response(ref("ChatAnswer"), streamed("ChatChunk")),
                **refusals,
            },
        },
        "completion": {
            "summary": "Go on from each prompt.",
            "requestBody": build_request_body(build_completion_request(reading)),
            "responses": {
                "200": build_response(ref("TextAnswer"), streamed("TextChunk")),
                **refusals,
            },
        },
        "embedding": {
            "summary": "Give the vector of each input.",
            "requestBody": build_request_body(build_embedding_request(reading)),
            "responses": {"200": build_response(ref("EmbeddingList")), **refusals},
        },
    }
