"""OpenAPI of the parameters and responses."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from protocols.chat import openapi
from protocols.core.interfaces import OpenApiFragment
from protocols.openapi import (
    BOOLEAN,
    INTEGER,
    NONEMPTY_STRING,
    NULL,
    NUMBER,
    SSE_CONTENT_TYPE,
    STRING,
    Schema,
    array_of,
    build_error_responses,
    build_event_data,
    build_param_schema,
    build_request_body,
    build_response,
    build_struct_schemas,
    enum_of,
    nullable,
    object_of,
    ref,
)
from protocols.ovms import errors, params, requests
from protocols.ovms.responses import ResponseVariant, UsageBody
from protocols.params import Param

TablesByOperation = Mapping[str, tuple[Param, ...]]

_MODEL_SCHEMA: Final[Schema] = {
    **NONEMPTY_STRING,
    "description": "A model's name; the list of models has all.",
}
_STREAM_SCHEMA: Final[Schema] = {**BOOLEAN, "default": False}

# --- requests -------------------------------------------------------------------------------------

_INTEGER_RANGES: Final = {row.param.wire: row.integer_range for row in params.ALL_PARAMS}


def _build_param_schemas(table: tuple[Param, ...]) -> dict[str, Schema]:
    """The rows' schemas, limited to what the server's JSON library accepts."""
    found = {}
    for param in table:
        if param.type in ("strict int", "float"):
            low, high = _INTEGER_RANGES[param.wire]
            within = {
                "minimum": low if param.minimum is None else param.minimum,
                "maximum": high if param.maximum is None else param.maximum,
            }
            found[param.wire] = build_param_schema(replace(param, **within))
        else:
            found[param.wire] = build_param_schema(param)
    return found


def _build_common_schemas(table: tuple[Param, ...]) -> dict[str, Schema]:
    """The fields that chat and completions share."""
    wide = nullable({**INTEGER, "minimum": 1, "maximum": requests.BEST_OF_LIMIT - 1})
    return {
        "model": _MODEL_SCHEMA,
        "stream": _STREAM_SCHEMA,
        **_build_param_schemas(table),
        "best_of": {**wide, "description": "Beams; not in a stream."},
        "n": {**wide, "description": "Not more than best_of."},
    }


def _build_chat_schema(*, early: bool) -> Schema:
    properties = {
        **_build_common_schemas(_select_tables(early=early)["chat"]),
        "messages": array_of(_MESSAGE_SCHEMA, minItems=1),
    }
    if not early:
        properties |= {
            **_CURRENT_RELEASE_SCHEMAS,
            "tools": nullable(array_of(_TOOL_SCHEMA)),
            "tool_choice": _TOOL_CHOICE_SCHEMA,
            "response_format": _RESPONSE_FORMAT_SCHEMA,
            "chat_template_kwargs": openapi.TEMPLATE_ARGUMENTS,
        }
    return object_of(properties, "model", "messages")


def _build_completion_schema(*, early: bool) -> Schema:
    properties = {
        **_build_common_schemas(_select_tables(early=early)["completion"]),
        "prompt": NONEMPTY_STRING,
    }
    return object_of(
        {**properties, **({} if early else _CURRENT_RELEASE_SCHEMAS)}, "model", "prompt"
    )


def _select_tables(*, early: bool) -> TablesByOperation:
    return params.EARLY_PARAM_TABLES if early else params.PARAM_TABLES


_OBJECT_SCHEMA: Final[Schema] = {"type": "object"}
_PART_SCHEMA: Final[Schema] = {
    "anyOf": [
        object_of({"type": {"const": "text"}, "text": STRING}, "type", "text"),
        object_of(
            {"type": {"const": "image_url"}, "image_url": object_of({"url": STRING}, "url")},
            "type",
            "image_url",
        ),
        object_of(
            {
                "type": {"const": "input_audio"},
                "input_audio": object_of({"data": STRING, "format": STRING}, "data"),
            },
            "type",
            "input_audio",
        ),
    ]
}
_TOOL_CALL_SCHEMA: Final[Schema] = object_of(
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of({"name": STRING, "arguments": {"anyOf": [STRING, _OBJECT_SCHEMA]}}),
    },
    "function",
)
_MESSAGE_SCHEMA: Final[Schema] = object_of(
    {
        "role": enum_of("system", "developer", "user", "assistant", "tool", "function"),
        "content": nullable({"anyOf": [STRING, array_of(_PART_SCHEMA)]}),
        "name": nullable(STRING),
        "tool_calls": nullable(array_of(_TOOL_CALL_SCHEMA)),
        "tool_call_id": nullable(STRING),
        "reasoning_content": nullable(STRING),
    },
    "role",
)
_FUNCTION_FIELDS: Final = {
    "name": STRING,
    "description": nullable(STRING),
    "parameters": _OBJECT_SCHEMA,
    "strict": nullable(BOOLEAN),
}
_TOOL_SCHEMA: Final[Schema] = {
    "anyOf": [
        object_of(
            {"type": {"const": "function"}, "function": object_of(_FUNCTION_FIELDS, "name")},
            "function",
        ),
        object_of({"type": {"const": "function"}, **_FUNCTION_FIELDS}, "type", "name"),
    ]
}
_TOOL_CHOICE_SCHEMA: Final[Schema] = nullable(
    {
        "anyOf": [
            enum_of("none", "auto", "required"),
            object_of({"function": object_of({"name": STRING}, "name")}, "function"),
            object_of({"type": {"const": "function"}, "name": STRING}, "type", "name"),
        ]
    }
)
_RESPONSE_FORMAT_SCHEMA: Final[Schema] = nullable(
    {
        "anyOf": [
            object_of({"type": enum_of("text", "json_object")}, "type"),
            object_of(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": object_of(
                        {
                            "schema": _OBJECT_SCHEMA,
                            "name": nullable(STRING),
                            "description": nullable(STRING),
                            "strict": nullable(BOOLEAN),
                        },
                        "schema",
                    ),
                },
                "type",
                "json_schema",
            ),
        ]
    }
)
_CURRENT_RELEASE_SCHEMAS: Final[Mapping[str, Schema]] = {
    "stream_options": {
        **nullable(object_of({"include_usage": BOOLEAN}, more=False)),
        "description": "Of a stream only.",
    },
    "user": nullable(STRING),
}
"""Fields that the first release ignores."""
_TOKEN_IDS_SCHEMA: Final[Schema] = array_of(INTEGER, minItems=1)
_EMBEDDING_REQUEST_SCHEMA: Final[Schema] = object_of(
    {
        "model": _MODEL_SCHEMA,
        "input": {
            "anyOf": [
                STRING,
                _TOKEN_IDS_SCHEMA,
                array_of(STRING, minItems=1, maxItems=requests.MAX_INPUTS),
                array_of(_TOKEN_IDS_SCHEMA, minItems=1, maxItems=requests.MAX_INPUTS),
            ]
        },
        "encoding_format": enum_of("float", "base64"),
        "user": nullable(STRING),
    },
    "model",
    "input",
)

# --- responses ------------------------------------------------------------------------------------


def _build_response_schemas(form: ResponseVariant) -> Iterator[tuple[str, Schema]]:
    """The unary response and the chunk of a variant."""
    kind = "Chat" if form.is_chat else "Text"
    reason = {"const": "stop"} if form.early else enum_of("stop", "length", "tool_calls", "unknown")
    used: dict[str, Schema] = {} if form.early else {"usage": ref("UsageBody")}
    choice: dict[str, Schema] = {"finish_reason": reason, "index": INTEGER}
    choice["logprobs"] = NULL if form.early else nullable(_LOGPROBS_SCHEMAS[form.is_chat])
    said = {"message": _build_message_schema(form)} if form.is_chat else {"text": STRING}
    yield (
        f"{kind}Answer",
        _build_completion_object_schema(
            form.unary_object, {**choice, **said}, used, *choice, *said
        ),
    )

    piece = {**choice, "finish_reason": nullable(reason), "logprobs": NULL}
    said = {"delta": _build_delta_schema(form)} if form.is_chat else {"text": STRING}
    used = {} if form.early else {"usage": nullable(ref("UsageBody"))}
    needed = ("index", "finish_reason", *(said if form.is_chat else ()))
    yield (
        f"{kind}Chunk",
        _build_completion_object_schema(form.chunk_object, {**piece, **said}, used, *needed),
    )


def _build_completion_object_schema(
    name: str, choice: Mapping[str, Schema], used: Mapping[str, Schema], *needed: str
) -> Schema:
    always = {
        "choices": array_of(object_of(choice, *needed)),
        "created": INTEGER,
        "model": STRING,
        "object": {"const": name},
    }
    return object_of({**always, **used}, *always)


def _build_message_schema(form: ResponseVariant) -> Schema:
    message: dict[str, Schema] = {"content": STRING, "role": {"const": "assistant"}}
    if form.early:
        return object_of(message, *message)
    called = object_of({"name": STRING, "arguments": STRING}, "name", "arguments")
    call = object_of({"id": STRING, "type": {"const": "function"}, "function": called})
    more = {"reasoning_content": STRING, "tool_calls": array_of(call)}
    return object_of({**message, **more}, *message, "tool_calls")


def _build_delta_schema(form: ResponseVariant) -> Schema:
    if form.early:
        return object_of({"content": STRING})
    call = {
        "index": INTEGER,
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of({"name": STRING, "arguments": STRING}),
    }
    return object_of(
        {
            "role": {"const": "assistant"},
            "content": nullable(STRING),
            "reasoning_content": STRING,
            "tool_calls": array_of(object_of(call, "index", "function")),
        }
    )


_TOKEN_LOGPROB_SCHEMA: Final[Schema] = object_of(
    {
        "token": STRING,
        "logprob": nullable(NUMBER),
        "bytes": array_of(INTEGER),
        "top_logprobs": array_of(_OBJECT_SCHEMA, maxItems=0),
    }
)
_LOGPROBS_SCHEMAS: Final[Mapping[bool, Schema]] = {
    True: object_of({"content": array_of(_TOKEN_LOGPROB_SCHEMA)}, "content"),
    False: object_of(
        {
            "tokens": array_of(STRING),
            "token_logprobs": array_of(nullable(NUMBER)),
            "top_logprobs": array_of({"type": "object", "additionalProperties": nullable(NUMBER)}),
            "text_offset": array_of(INTEGER),
        }
    ),
}
_EMBEDDING_RESPONSE_SCHEMA: Final[Schema] = object_of(
    {
        "object": {"const": "list"},
        "data": array_of(
            object_of(
                {
                    "object": {"const": "embedding"},
                    "embedding": {"anyOf": [array_of(NUMBER), STRING]},
                    "index": INTEGER,
                },
                *("object", "embedding", "index"),
            )
        ),
        "usage": object_of({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
    },
    "object",
    "data",
)
_MODEL_CARD_SCHEMA: Final[Schema] = object_of(
    {"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING},
    *("id", "object", "created", "owned_by"),
)

# --- operations -----------------------------------------------------------------------------------


def describe_api(variants: Collection[str], *, early: bool) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``. ``variants``: the mounted ones."""
    refused = build_error_responses(errors.ERROR_STATUSES, ref("ErrorBody"))
    broken = refused["400"]
    told = {
        **refused,
        "400": {
            **broken,
            "content": {**broken["content"], SSE_CONTENT_TYPE: _UNFRAMED_ERROR_SCHEMA},
        },
    }
    operations: dict[str, Schema] = {
        "chat": {
            "summary": "Answer a conversation.",
            "requestBody": build_request_body(_build_chat_schema(early=early)),
            "responses": {
                "200": build_response(ref("ChatAnswer"), _build_chunk_schema("ChatChunk")),
                **told,
            },
        },
        "completion": {
            "summary": "Go on from the prompt.",
            "requestBody": build_request_body(_build_completion_schema(early=early)),
            "responses": {
                "200": build_response(ref("TextAnswer"), _build_chunk_schema("TextChunk")),
                **told,
            },
        },
        "embedding": {
            "summary": "Give the vector of each input.",
            "requestBody": build_request_body(_EMBEDDING_REQUEST_SCHEMA),
            "responses": {"200": build_response(ref("Vectors")), **refused},
        },
    }
    for variant in filter(variants.__contains__, _INFO_OPERATIONS):
        summary, schema = _INFO_OPERATIONS[variant]
        found = build_response(schema) if schema else {"description": "It is so."}
        operations[variant] = {"summary": summary, "responses": {"200": found, **refused}}
    return OpenApiFragment(
        operations,
        {
            **build_struct_schemas(UsageBody, errors.ErrorBody),
            **dict(_build_response_schemas(ResponseVariant(is_chat=True, early=early))),
            **dict(_build_response_schemas(ResponseVariant(is_chat=False, early=early))),
            "Vectors": _EMBEDDING_RESPONSE_SCHEMA,
            "Card": _MODEL_CARD_SCHEMA,
        },
    )


_UNFRAMED_ERROR_SCHEMA: Final[Schema] = {
    "schema": {"description": "An error alone, which is not framed."}
}


def _build_chunk_schema(name: str) -> Schema:
    return build_event_data(ref(name), "[DONE]")


_INFO_OPERATIONS: Final[Mapping[str, tuple[str, Schema | None]]] = {
    "models": (
        "List the models that can answer.",
        object_of({"data": array_of(ref("Card")), "object": {"const": "list"}}, "data", "object"),
    ),
    "model": ("Tell of one model.", ref("Card")),
    "server": (
        "Tell the server's name.",
        object_of({"name": STRING, "version": STRING}, "name", "version"),
    ),
    "live": ("Whether the server listens.", None),
    "ready": ("Whether the server can answer.", None),
    "model ready": ("Whether a model can answer.", None),
}
