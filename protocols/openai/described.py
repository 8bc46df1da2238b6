"""What the family tells of itself: its requests, and its answers in a style.

A member puts its own ``Reading``, ``Style`` and refusals in::

    refused = refusals(errors.statuses(), ref("Error"))
    Description(operations(READING, refused, ref("Error")), {**answers(STYLE), "Error": …})
"""

from collections.abc import Iterable, Mapping

from protocols.openai import shapes
from protocols.openai.pieces import ChatLogprobs, CompletionLogprobs, GenerationUsage, ToolCallItem
from protocols.openai.requests import MAX_IDENTIFIER_LENGTH, METADATA_LIMITS, RequestRules
from protocols.openai.style import ResponseStyle
from protocols.openai.vectors import EmbeddingList
from protocols.params import Param
from protocols.schema import (
    INTEGER,
    NONEMPTY_STRING,
    STRING,
    Schema,
    array_of,
    build_event_data,
    build_properties,
    build_request_body,
    build_response,
    build_struct_schemas,
    enum_of,
    nullable,
    object_of,
    ref,
)

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
        "messages": shapes.build_messages(reading.message_rules),
        **_build_checked_properties(reading.chat),
        **_GENERATION_PROPERTIES,
        "tools": shapes.build_tools(reading.max_tools, *kinds),
        "tool_choice": shapes.TOOL_CHOICE,
        "functions": shapes.FUNCTIONS,
        "function_call": shapes.FUNCTION_CALL,
        "metadata": shapes.build_metadata(*METADATA_LIMITS),
        "modalities": shapes.MODALITIES,
        "chat_template_kwargs": shapes.TEMPLATE_ARGUMENTS,
    }
    return object_of(properties, "model", "messages", more=_allows_unknown_fields(reading))


def build_completion_request(reading: RequestRules) -> Schema:
    """The body of a completion."""
    properties = {
        "model": _MODEL_SCHEMA,
        "prompt": shapes.PROMPT_SCHEMA,
        **_build_checked_properties(reading.completion),
        **_GENERATION_PROPERTIES,
    }
    return object_of(properties, "model", "prompt", more=_allows_unknown_fields(reading))


def build_embedding_request(reading: RequestRules) -> Schema:
    """The body of a request for vectors."""
    properties = {
        "model": _MODEL_SCHEMA,
        "input": shapes.build_inputs(reading.max_inputs),
        **_build_checked_properties(reading.embedding),
    }
    return object_of(properties, "model", "input", more=_allows_unknown_fields(reading))


_GENERATION_PROPERTIES: Mapping[str, Schema] = {
    "response_format": shapes.RESPONSE_FORMAT,
    **shapes.STRUCTURED_OUTPUT_PROPERTIES,
    "logit_bias": shapes.LOGIT_BIAS,
    "stream_options": shapes.STREAM_OPTIONS,
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
        "logprobs": nullable(ref("TextLogprobs")),
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
    "tool_calls": array_of(ref("CallPiece")),
    "function_call": ref("Function"),
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
            "responses": {"200": build_response(ref("VectorList")), **refusals},
        },
    }
