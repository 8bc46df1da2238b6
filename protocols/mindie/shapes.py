"""What answers look like, as JSON Schema: as their writers have them, key by key."""

from collections.abc import Mapping
from typing import Final

from protocols.schema import (
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array_of,
    enum_of,
    nullable,
    object_of,
    ref,
)


def build_response_schemas(*, early: bool) -> dict[str, Schema]:
    """Every answer, by the name under which operations refer to it."""
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
    told = dict.fromkeys(times, nullable(INTEGER))
    return object_of(
        {**_GENERATE_HEAD_FIELDS, "details": _build_details_schema(INTEGER), **told},
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
"""Of what asks about the server: a summary, and what is told; None is an answer without a body."""
