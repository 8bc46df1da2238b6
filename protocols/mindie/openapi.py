"""OpenAPI of generate, chat, completions and the state endpoints.

The endpoints in the style of other servers (``/generate``, ``/infer`` and the like) are left out.
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
from protocols.mindie.params import INT32_MAX, MAX_STOP_STRINGS, MindieConfig, MindieProfile
from protocols.openapi import (
    BOOLEAN,
    INTEGER,
    JSON_CONTENT_TYPE,
    NONEMPTY_STRING,
    NULL,
    NUMBER,
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
from protocols.params import Param

# JSON Schemas of responses, with the keys that the encoders write.


def build_response_schemas(*, early: bool) -> dict[str, Schema]:
    """All response schemas, by component name."""
    chunk = "chat.completion.chunk"
    return {
        "Generated": _GENERATE_RESPONSE_SCHEMA,
        "GeneratedPiece": _build_generate_event_schema(early=early),
        "Usage": _USAGE_SCHEMA,
        "ChatAnswer": _build_completion_object_schema(
            "chat.completion", _build_chat_choice_schema(early=early), usage=True
        ),
        "ChatChunk": _build_completion_object_schema(
            chunk, _build_chat_delta_schema(early=early), usage=not early
        ),
        "TextAnswer": _build_completion_object_schema(
            "text_completion", _build_text_choice_schema(), usage=True
        ),
        "TextChunk": _build_completion_object_schema(
            "text_completion", _build_text_choice_schema(last=False), usage=True
        ),
        "Card": _MODEL_CARD_SCHEMA,
    }


# --- generate -------------------------------------------------------------------------------------

_GENERATE_HEAD_FIELDS: Final[Mapping[str, Schema]] = {
    "id": STRING,
    "model_name": STRING,
    "model_version": NULL,
    "text_output": STRING,
}


def _build_details_schema(figure: Schema) -> Schema:
    return object_of(
        {
            "finish_reason": STRING,
            "generated_tokens": INTEGER,
            "first_token_cost": NULL,
            "decode_cost": NULL,
            "batch_size": figure,
            "queue_wait_time": figure,
        },
        *("generated_tokens", "first_token_cost", "decode_cost", "batch_size", "queue_wait_time"),
    )


_GENERATE_RESPONSE_SCHEMA: Final[Schema] = object_of(
    {**_GENERATE_HEAD_FIELDS, "details": _build_details_schema(array_of(INTEGER))},
    *_GENERATE_HEAD_FIELDS,
)


def _build_generate_event_schema(*, early: bool) -> Schema:
    times = () if early else ("prefill_time", "decode_time")
    timings = dict.fromkeys(times, nullable(INTEGER))
    return object_of(
        {**_GENERATE_HEAD_FIELDS, "details": _build_details_schema(INTEGER), **timings},
        *_GENERATE_HEAD_FIELDS,
    )


# --- conversations and completions ----------------------------------------------------------------


def _build_completion_object_schema(name: str, choice: Schema, *, usage: bool) -> Schema:
    always = {
        "id": STRING,
        "object": {"const": name},
        "created": INTEGER,
        "model": STRING,
        "choices": array_of(choice),
    }
    return object_of({**always, **({"usage": ref("Usage")} if usage else {})}, *always)


def _build_choice_schema(reason: Schema, **said: Schema) -> Schema:
    always = {"index": INTEGER, **said, "finish_reason": reason}
    return object_of(always, *always)


_FINISH_REASON_SCHEMA: Final[Schema] = enum_of("stop", "length", "tool_calls")
_EARLY_FINISH_REASON_SCHEMA: Final[Schema] = enum_of(
    "eos_token", "length", "stop_sequence", "invalid flag"
)
_ASSISTANT_ROLE_SCHEMA: Final[Schema] = {"const": "assistant"}
_TOKEN_LOGPROB_FIELDS: Final[Mapping[str, Schema]] = {
    "token": STRING,
    "logprob": nullable(NUMBER),
    "bytes": array_of(INTEGER),
}
_CHAT_LOGPROBS_SCHEMA: Final[Schema] = nullable(
    object_of(
        {
            "content": array_of(
                object_of(
                    {
                        **_TOKEN_LOGPROB_FIELDS,
                        "top_logprobs": array_of(object_of(_TOKEN_LOGPROB_FIELDS)),
                    }
                )
            )
        }
    )
)
_COMPLETION_LOGPROBS_SCHEMA: Final[Schema] = nullable(
    object_of(
        {
            "text_offset": array_of(INTEGER),
            "token_logprobs": array_of(nullable(NUMBER)),
            "tokens": array_of(STRING),
            "top_logprobs": array_of({"type": "object", "additionalProperties": nullable(NUMBER)}),
        }
    )
)
_RESPONSE_TOOL_CALL_SCHEMA: Final[Schema] = object_of(
    {
        "index": INTEGER,
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of({"name": STRING, "arguments": STRING}),
    }
)


def _build_chat_choice_schema(*, early: bool) -> Schema:
    said = {"role": _ASSISTANT_ROLE_SCHEMA, "content": STRING}
    if early:
        return _build_choice_schema(_EARLY_FINISH_REASON_SCHEMA, message=object_of(said, *said))
    more = {"reasoning_content": STRING, "tool_calls": array_of(_RESPONSE_TOOL_CALL_SCHEMA)}
    message = object_of({**said, **more}, *said, "tool_calls")
    return _build_choice_schema(
        _FINISH_REASON_SCHEMA, message=message, logprobs=_CHAT_LOGPROBS_SCHEMA
    )


def _build_chat_delta_schema(*, early: bool) -> Schema:
    said = {"role": _ASSISTANT_ROLE_SCHEMA, "content": STRING}
    if early:
        return _build_choice_schema(nullable(_EARLY_FINISH_REASON_SCHEMA), delta=object_of(said))
    delta = object_of(
        {**said, "reasoning_content": STRING, "tool_calls": array_of(_RESPONSE_TOOL_CALL_SCHEMA)},
        "role",
    )
    return _build_choice_schema(
        nullable(_FINISH_REASON_SCHEMA), delta=delta, logprobs=_CHAT_LOGPROBS_SCHEMA
    )


def _build_text_choice_schema(*, last: bool = True) -> Schema:
    reason = _FINISH_REASON_SCHEMA if last else nullable(_FINISH_REASON_SCHEMA)
    return _build_choice_schema(
        reason, text=STRING, logprobs=_COMPLETION_LOGPROBS_SCHEMA, stop_reason=NULL
    )


_USAGE_SCHEMA: Final[Schema] = object_of(
    {
        "prompt_tokens": INTEGER,
        "prompt_tokens_details": object_of({"cached_tokens": INTEGER}),
        "completion_tokens": INTEGER,
        "completion_tokens_details": object_of({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    },
    *("prompt_tokens", "completion_tokens", "total_tokens"),
)

# --- the state ------------------------------------------------------------------------------------


def _require_all(**properties: Schema) -> Schema:
    return object_of(properties, *properties)


_TENSORS_SCHEMA: Final[Schema] = array_of(
    _require_all(name=STRING, shape=array_of(INTEGER), datatype=STRING)
)
_NULL_INFO_FIELDS: Final[Mapping[str, Schema]] = dict.fromkeys(
    ("docker_label", "max_stop_sequences", "max_waiting_tokens", "sha", "validation_workers",
     "waiting_served_ratio"),
    NULL,
)  # fmt: skip
_MODEL_CARD_SCHEMA: Final[Schema] = _require_all(
    id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING
)
INFO_OPERATIONS: Final[Mapping[str, tuple[str, Schema | None]]] = {
    "server": (
        "Tell of the server.",
        _require_all(
            name=STRING,
            version=STRING,
            extensions=_require_all(
                max_iter_times=INTEGER,
                prefill_policy_type=INTEGER,
                decode_policy_type=INTEGER,
                max_prefill_batch_size=INTEGER,
                max_prefill_tokens=INTEGER,
            ),
        ),
    ),
    "metadata": (
        "Tell what a model takes and gives.",
        _require_all(name=STRING, platform=STRING, inputs=_TENSORS_SCHEMA, outputs=_TENSORS_SCHEMA),
    ),
    "config": (
        "Tell how a model is set up.",
        _require_all(
            model_name=STRING,
            input_datatype=STRING,
            output_datatype=STRING,
            max_seq_len=INTEGER,
            npu_mem_size=INTEGER,
            cpu_mem_size=INTEGER,
            world_size=INTEGER,
            model_weight_path=STRING,
            model_instance_type=STRING,
        ),
    ),
    "slots": (
        "Tell how many requests a model can take now.",
        _require_all(total_slots=INTEGER, free_slots=INTEGER, available_tokens_length=INTEGER),
    ),
    "info": (
        "Tell of the server and its models.",
        _require_all(
            **_NULL_INFO_FIELDS,
            max_batch_total_tokens=INTEGER,
            max_best_of=INTEGER,
            max_concurrent_requests=INTEGER,
            max_input_length=INTEGER,
            version=STRING,
            models=array_of(
                _require_all(
                    model_device_type=STRING,
                    model_dtype=STRING,
                    model_id=STRING,
                    model_pipeline_tag=STRING,
                    model_sha=NULL,
                    max_total_tokens=INTEGER,
                )
            ),
        ),
    ),
    "models": (
        "List the models.",
        _require_all(object={"const": "list"}, data=array_of(ref("Card"))),
    ),
    "model": ("Tell of one model.", ref("Card")),
    "live": ("Whether the server lives.", None),
    "ready": ("Whether some model can answer.", None),
    "model_ready": ("Whether a model can answer.", None),
}
"""The summary and response schema of each state endpoint; None: no response body."""


TablesByOperation = Mapping[str, tuple[Param, ...]]

_OBJECT_SCHEMA: Final[Schema] = {"type": "object"}
_REQUEST_ID_SCHEMA: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,256}$"}
_FUNCTION_NAME_SCHEMA: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_MODEL_SCHEMA: Final[Schema] = {
    **NONEMPTY_STRING,
    "description": "A model's name; the list of models has all.",
}
_STOP_SCHEMA: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRINGS // 2}
"""Lengths are counted in UTF-16 units; a character has at most two."""
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
    """See ``protocols.core.interfaces.OpenApiProvider``. ``tables``: the adapter's parameters."""
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
    """The error responses of an operation. If the path names the model, 404 may have no body."""
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
    text = {**NONEMPTY_STRING, "maxLength": profile.max_text_length // 2}
    parts = array_of(
        {"anyOf": [_PART_SCHEMAS["text"], *_MEDIA_PART_SCHEMAS]}, minItems=1, maxItems=20
    )
    request_schema = object_of(
        {
            "id": nullable(NONEMPTY_STRING if profile.early else _REQUEST_ID_SCHEMA),
            "text_input": text if profile.early else {"anyOf": [text, parts]},
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
            "requestBody": build_request_body(request_schema),
            "responses": {"200": build_response(ref("Generated")), **refused},
        },
        "text_stream": {
            "summary": "Go on from the prompt, event by event.",
            "requestBody": build_request_body(request_schema),
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
    text = {**NONEMPTY_STRING, "maxLength": setup.profile.max_text_length // 2}
    ids = array_of({"type": "integer", "minimum": 0}, minItems=1)
    properties = {
        "model": _MODEL_SCHEMA,
        "prompt": {"anyOf": [text, ids]},
        **build_properties(table),
        "response_format": _RESPONSE_FORMAT_SCHEMA,
    }
    return object_of({**properties, **_select_checked_schemas(table)}, "model", "prompt")


def _select_checked_schemas(table: tuple[Param, ...]) -> dict[str, Schema]:
    """Parameters that a check reads, without a table row."""
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


# --- tokenizer and state --------------------------------------------------------------------------


def _describe_stop_and_tokenizer(setup: MindieConfig) -> dict[str, Schema]:
    text = {**NONEMPTY_STRING, "maxLength": setup.profile.max_text_length // 2}
    properties = {"inputs": text, "do_decode": nullable(BOOLEAN), "model": _MODEL_SCHEMA}
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
            "requestBody": build_request_body(object_of(properties, *needed)),
            "responses": {"200": build_response(tokens), **_describe_errors((ModelNotFound, 404))},
        },
    }


def _describe_info_operation(summary: str, schema: Schema | None) -> Schema:
    found = {"description": "It is so."} if schema is None else build_response(schema)
    refused = _describe_errors((ModelNotFound, 404))
    if schema is None:
        refused["503"] = {"description": refused["503"]["description"]}
    return {"summary": summary, "responses": {"200": found, **refused}}
