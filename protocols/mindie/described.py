"""What the dialect tells of itself: generate, conversations and completions, and its state.

The endpoints after other servers (``/generate``, ``/infer`` and their kin) are not told of.
"""

from collections.abc import Mapping
from typing import Final

from protocols.core.errors import (
    ClientError,
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
    RateLimitExceeded,
    RequestNotFound,
    RequestTooLarge,
    Unauthorized,
    UnsupportedFeature,
    WorkerUnreachable,
)
from protocols.core.interfaces import OpenApiFragment
from protocols.mindie.profiles import MindieConfig, MindieProfile
from protocols.mindie.shapes import INFO_OPERATIONS, build_response_schemas
from protocols.mindie.tables import INT32_MAX, MAX_STOP_STRINGS
from protocols.params import Param
from protocols.schema import (
    BOOLEAN,
    INTEGER,
    JSON_CONTENT_TYPE,
    NONEMPTY_STRING,
    STRING,
    Schema,
    array_of,
    build_error_responses,
    build_event_data,
    build_properties,
    build_request_body,
    build_response,
    enum_of,
    nullable,
    object_of,
    ref,
)

TablesByOperation = Mapping[str, tuple[Param, ...]]

_OBJECT_SCHEMA: Final[Schema] = {"type": "object"}
_REQUEST_ID_SCHEMA: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,256}$"}
_FUNCTION_NAME_SCHEMA: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_MODEL_SCHEMA: Final[Schema] = {
    **NONEMPTY_STRING,
    "description": "A model's name; the list of models has all.",
}
_STOP_SCHEMA: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRINGS // 2}
"""Lengths are counted in UTF-16 units, of which a character has at most two."""
_ERROR_STATUSES: Final[tuple[tuple[type[GatewayError], int], ...]] = (
    (MalformedRequest, 422),
    (InvalidParameter, 422),
    (UnsupportedFeature, 422),
    (ContextTooLong, 424),
    (ContentFiltered, 400),
    (ClientError, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (RequestTooLarge, 413),
    (RateLimitExceeded, 429),
    (QuotaExceeded, 429),
    (Overloaded, 503),
    (WorkerUnreachable, 503),
    (DeadlineExceeded, 500),
    (GatewayError, 500),
)


def describe_api(setup: MindieConfig, tables: TablesByOperation) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``; ``tables`` as the dialect shows them."""
    return OpenApiFragment(
        {
            **_describe_generate(setup.profile, tables["text"]),
            **_describe_openai_endpoints(setup, tables),
            **_describe_stop_and_tokenizer(setup),
            **{variant: _describe_info_operation(*one) for variant, one in INFO_OPERATIONS.items()},
        },
        {
            "Error": object_of({"error": STRING, "error_type": STRING}, "error", "error_type"),
            **build_response_schemas(early=setup.profile.early),
        },
    )


def _describe_errors(*more: tuple[type[GatewayError], int]) -> dict[str, Schema]:
    """The refusals of an operation. Where the path names the model, 404 may have no body."""
    found = build_error_responses((*_ERROR_STATUSES, *more), ref("Error"))
    if "404" in found:
        found["404"] = {"description": found["404"]["description"]}
    found["413"]["content"][JSON_CONTENT_TYPE]["schema"] = object_of({"message": STRING}, "message")
    found["429"]["content"][JSON_CONTENT_TYPE]["schema"] = object_of(
        {"error": {"type": ["string", "object"]}}
    )
    return found


# --- generate -------------------------------------------------------------------------------------


def _describe_generate(profile: MindieProfile, table: tuple[Param, ...]) -> dict[str, Schema]:
    said = {**NONEMPTY_STRING, "maxLength": profile.max_text_length // 2}
    parts = array_of(
        {"anyOf": [_PART_SCHEMAS["text"], *_MEDIA_PART_SCHEMAS]}, minItems=1, maxItems=20
    )
    asked = object_of(
        {
            "id": nullable(NONEMPTY_STRING if profile.early else _REQUEST_ID_SCHEMA),
            "text_input": said if profile.early else {"anyOf": [said, parts]},
            "parameters": nullable(
                object_of({**build_properties(table), "perf_stat": nullable(BOOLEAN)})
            ),
        },
        "text_input",
    )
    refused = _describe_errors((ModelNotFound, 404))
    return {
        "text": {
            "summary": "Go on from the prompt.",
            "requestBody": build_request_body(asked),
            "responses": {"200": build_response(ref("Generated")), **refused},
        },
        "text_stream": {
            "summary": "Go on from the prompt, event by event.",
            "requestBody": build_request_body(asked),
            "responses": {
                "200": build_response(None, build_event_data(ref("GeneratedPiece"))),
                **refused,
            },
        },
    }


_PART_SCHEMAS: Final[Mapping[str, Schema]] = {
    "text": object_of({"type": {"const": "text"}, "text": STRING}, "type", "text"),
    **{
        kind: object_of({"type": {"const": kind}, kind: NONEMPTY_STRING}, "type", kind)
        for kind in ("image_url", "video_url", "audio_url")
    },
}
_MEDIA_PART_SCHEMAS: Final = [part for kind, part in _PART_SCHEMAS.items() if kind != "text"]


# --- conversations and completions ----------------------------------------------------------------


def _describe_openai_endpoints(setup: MindieConfig, tables: TablesByOperation) -> dict[str, Schema]:
    operations: dict[str, Schema] = {}
    for variant, asked, kind, summary in (
        ("chat", _build_chat_schema(setup, tables["chat"]), "Chat", "Answer a conversation."),
        (
            "completion",
            _build_completion_schema(setup, tables["completion"]),
            "Text",
            "Go on from the prompt.",
        ),
    ):
        found = build_response(
            ref(f"{kind}Answer"), build_event_data(ref(f"{kind}Chunk"), "[DONE]")
        )
        operations[variant] = {
            "summary": summary,
            "requestBody": build_request_body(asked),
            "responses": {"200": found, **_describe_errors((ModelNotFound, 422))},
        }
    return operations


def _build_chat_schema(setup: MindieConfig, table: tuple[Param, ...]) -> Schema:
    early = setup.profile.early
    properties = {
        "model": _MODEL_SCHEMA,
        "messages": array_of(
            {"anyOf": _EARLY_MESSAGE_SCHEMAS if early else _MESSAGE_SCHEMAS}, minItems=1
        ),
        **build_properties(table),
        **({} if early else _EXTRA_CHAT_SCHEMAS),
    }
    return object_of({**properties, **_select_checked_schemas(table)}, "model", "messages")


def _build_completion_schema(setup: MindieConfig, table: tuple[Param, ...]) -> Schema:
    said = {**NONEMPTY_STRING, "maxLength": setup.profile.max_text_length // 2}
    ids = array_of({"type": "integer", "minimum": 0}, minItems=1)
    properties = {
        "model": _MODEL_SCHEMA,
        "prompt": {"anyOf": [said, ids]},
        **build_properties(table),
        "response_format": _RESPONSE_FORMAT_SCHEMA,
    }
    return object_of({**properties, **_select_checked_schemas(table)}, "model", "prompt")


def _select_checked_schemas(table: tuple[Param, ...]) -> dict[str, Schema]:
    """What a check reads, and not a row."""
    known = {param.wire for param in table}
    return {name: schema for name, schema in _CHECKED_FIELD_SCHEMAS.items() if name in known}


_CHECKED_FIELD_SCHEMAS: Final[Mapping[str, Schema]] = {
    "stop": nullable({"anyOf": [_STOP_SCHEMA, array_of(_STOP_SCHEMA, maxItems=16)]}),
    "n": {
        **nullable({"type": "integer", "minimum": 1, "maximum": 8192}),
        "description": "More than one needs a temperature.",
    },
    "best_of": {
        **nullable({"type": "integer", "minimum": 1, "maximum": 128}),
        "description": "At least n; in a stream, n.",
    },
}


def _build_message_schema(role: str, content: Schema, **others: Schema) -> Schema:
    return object_of({"role": {"const": role}, "content": content, **others}, "role", "content")


_CONTENT_SCHEMA: Final[Schema] = {
    "anyOf": [
        STRING,
        array_of({"anyOf": [_PART_SCHEMAS["text"], *_MEDIA_PART_SCHEMAS]}, maxItems=20),
    ]
}
_TOOL_CALL_SCHEMA: Final[Schema] = object_of(
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of(
            {"name": _FUNCTION_NAME_SCHEMA, "arguments": STRING}, "name", "arguments"
        ),
    },
    *("id", "type", "function"),
)
_TOOL_CALLS_MESSAGE_SCHEMA: Final[Schema] = object_of(
    {
        "role": {"const": "assistant"},
        "content": nullable(STRING),
        "tool_calls": array_of(_TOOL_CALL_SCHEMA, minItems=1),
    },
    *("role", "tool_calls"),
)
_MESSAGE_SCHEMAS: Final[list[Schema]] = [
    _build_message_schema("system", _CONTENT_SCHEMA, name=nullable(STRING)),
    _build_message_schema("user", _CONTENT_SCHEMA, name=nullable(STRING)),
    _build_message_schema("assistant", NONEMPTY_STRING),
    _TOOL_CALLS_MESSAGE_SCHEMA,
    object_of(
        {"role": {"const": "tool"}, "content": _CONTENT_SCHEMA, "tool_call_id": NONEMPTY_STRING},
        *("role", "content", "tool_call_id"),
    ),
]
_EARLY_MESSAGE_SCHEMAS: Final = [
    _build_message_schema(role, NONEMPTY_STRING) for role in ("system", "user", "assistant")
]
_FUNCTION_SCHEMA: Final[Schema] = object_of(
    {
        "name": _FUNCTION_NAME_SCHEMA,
        "description": nullable(STRING),
        "parameters": nullable(_OBJECT_SCHEMA),
        "strict": nullable(BOOLEAN),
    },
    "name",
)
_TOOL_SCHEMA: Final[Schema] = object_of(
    {"type": {"const": "function"}, "function": _FUNCTION_SCHEMA}, "type", "function"
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
                            "name": _FUNCTION_NAME_SCHEMA,
                            "schema": _OBJECT_SCHEMA,
                            "strict": nullable(BOOLEAN),
                        },
                        "name",
                        "schema",
                    ),
                },
                *("type", "json_schema"),
            ),
        ]
    }
)
_EXTRA_CHAT_SCHEMAS: Final[Mapping[str, Schema]] = {
    "tools": nullable(array_of(_TOOL_SCHEMA)),
    "tool_choice": nullable(enum_of("none", "auto", "required")),
    "response_format": _RESPONSE_FORMAT_SCHEMA,
    "chat_template": nullable(NONEMPTY_STRING),
    "chat_template_kwargs": object_of(
        {
            "enable_thinking": BOOLEAN,
            "thinking_budget": nullable({"type": "integer", "minimum": 1, "maximum": INT32_MAX}),
        }
    ),
}


# --- what is asked beside, and the state ----------------------------------------------------------


def _describe_stop_and_tokenizer(setup: MindieConfig) -> dict[str, Schema]:
    text = {**NONEMPTY_STRING, "maxLength": setup.profile.max_text_length // 2}
    asked = {"inputs": text, "do_decode": nullable(BOOLEAN), "model": _MODEL_SCHEMA}
    needed = ("inputs",) if setup.default_model else ("inputs", "model")
    tokens = object_of(
        {"token_number": INTEGER, "tokens": array_of(STRING)}, "token_number", "tokens"
    )
    gone = _describe_errors((ModelNotFound, 404), (RequestNotFound, 404))
    return {
        "stop": {
            "summary": "End a running request; the answer says the body back.",
            "requestBody": build_request_body(object_of({"id": _REQUEST_ID_SCHEMA}, "id")),
            "responses": {"200": build_response(_OBJECT_SCHEMA), **gone},
        },
        "tokenizer": {
            "summary": "Cut a text into tokens.",
            "requestBody": build_request_body(object_of(asked, *needed)),
            "responses": {"200": build_response(tokens), **_describe_errors((ModelNotFound, 404))},
        },
    }


def _describe_info_operation(summary: str, schema: Schema | None) -> Schema:
    found = {"description": "It is so."} if schema is None else build_response(schema)
    refused = _describe_errors((ModelNotFound, 404))
    if schema is None:
        refused["503"] = {"description": refused["503"]["description"]}
    return {"summary": summary, "responses": {"200": found, **refused}}
