"""What answers look like, as JSON Schema: as their writers have them, key by key."""

from collections.abc import Mapping
from typing import Final

from protocols.schema import (
    NULL,
    NUMBER,
    TEXT,
    WHOLE,
    Schema,
    array,
    one_of,
    optional,
    record,
    ref,
)


def answers(*, early: bool) -> dict[str, Schema]:
    """Every answer, by the name under which operations refer to it."""
    chunk = "chat.completion.chunk"
    return {
        "Generated": _GENERATED,
        "GeneratedPiece": _generated_piece(early=early),
        "Usage": _USAGE,
        "ChatAnswer": _answer("chat.completion", _message(early=early), usage=True),
        "ChatChunk": _answer(chunk, _delta(early=early), usage=not early),
        "TextAnswer": _answer("text_completion", _text(), usage=True),
        "TextChunk": _answer("text_completion", _text(last=False), usage=True),
        "Card": _CARD,
    }


# --- generate -------------------------------------------------------------------------------------

_HEAD: Final[Mapping[str, Schema]] = {
    "id": TEXT,
    "model_name": TEXT,
    "model_version": NULL,
    "text_output": TEXT,
}


def _details(figure: Schema) -> Schema:
    return record(
        {
            "finish_reason": TEXT,
            "generated_tokens": WHOLE,
            "first_token_cost": NULL,
            "decode_cost": NULL,
            "batch_size": figure,
            "queue_wait_time": figure,
        },
        *("generated_tokens", "first_token_cost", "decode_cost", "batch_size", "queue_wait_time"),
    )


_GENERATED: Final[Schema] = record({**_HEAD, "details": _details(array(WHOLE))}, *_HEAD)


def _generated_piece(*, early: bool) -> Schema:
    times = () if early else ("prefill_time", "decode_time")
    told = dict.fromkeys(times, optional(WHOLE))
    return record({**_HEAD, "details": _details(WHOLE), **told}, *_HEAD)


# --- conversations and completions ----------------------------------------------------------------


def _answer(name: str, choice: Schema, *, usage: bool) -> Schema:
    always = {
        "id": TEXT,
        "object": {"const": name},
        "created": WHOLE,
        "model": TEXT,
        "choices": array(choice),
    }
    return record({**always, **({"usage": ref("Usage")} if usage else {})}, *always)


def _choice(reason: Schema, **said: Schema) -> Schema:
    always = {"index": WHOLE, **said, "finish_reason": reason}
    return record(always, *always)


_REASON: Final[Schema] = one_of("stop", "length", "tool_calls")
_EARLY_REASON: Final[Schema] = one_of("eos_token", "length", "stop_sequence", "invalid flag")
_ROLE: Final[Schema] = {"const": "assistant"}
_TOKEN: Final[Mapping[str, Schema]] = {
    "token": TEXT,
    "logprob": optional(NUMBER),
    "bytes": array(WHOLE),
}
_LOGPROBS: Final[Schema] = optional(
    record({"content": array(record({**_TOKEN, "top_logprobs": array(record(_TOKEN))}))})
)
_COLUMNS: Final[Schema] = optional(
    record(
        {
            "text_offset": array(WHOLE),
            "token_logprobs": array(optional(NUMBER)),
            "tokens": array(TEXT),
            "top_logprobs": array({"type": "object", "additionalProperties": optional(NUMBER)}),
        }
    )
)
_CALLED: Final[Schema] = record(
    {
        "index": WHOLE,
        "id": TEXT,
        "type": {"const": "function"},
        "function": record({"name": TEXT, "arguments": TEXT}),
    }
)


def _message(*, early: bool) -> Schema:
    said = {"role": _ROLE, "content": TEXT}
    if early:
        return _choice(_EARLY_REASON, message=record(said, *said))
    more = {"reasoning_content": TEXT, "tool_calls": array(_CALLED)}
    message = record({**said, **more}, *said, "tool_calls")
    return _choice(_REASON, message=message, logprobs=_LOGPROBS)


def _delta(*, early: bool) -> Schema:
    said = {"role": _ROLE, "content": TEXT}
    if early:
        return _choice(optional(_EARLY_REASON), delta=record(said))
    delta = record({**said, "reasoning_content": TEXT, "tool_calls": array(_CALLED)}, "role")
    return _choice(optional(_REASON), delta=delta, logprobs=_LOGPROBS)


def _text(*, last: bool = True) -> Schema:
    reason = _REASON if last else optional(_REASON)
    return _choice(reason, text=TEXT, logprobs=_COLUMNS, stop_reason=NULL)


_USAGE: Final[Schema] = record(
    {
        "prompt_tokens": WHOLE,
        "prompt_tokens_details": record({"cached_tokens": WHOLE}),
        "completion_tokens": WHOLE,
        "completion_tokens_details": record({"reasoning_tokens": WHOLE}),
        "total_tokens": WHOLE,
    },
    *("prompt_tokens", "completion_tokens", "total_tokens"),
)

# --- the state ------------------------------------------------------------------------------------


def _whole(**properties: Schema) -> Schema:
    return record(properties, *properties)


_TENSORS: Final[Schema] = array(_whole(name=TEXT, shape=array(WHOLE), datatype=TEXT))
_UNKNOWN: Final[Mapping[str, Schema]] = dict.fromkeys(
    ("docker_label", "max_stop_sequences", "max_waiting_tokens", "sha", "validation_workers",
     "waiting_served_ratio"),
    NULL,
)  # fmt: skip
_CARD: Final[Schema] = _whole(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT)
STATE: Final[Mapping[str, tuple[str, Schema | None]]] = {
    "server": (
        "Tell of the server.",
        _whole(
            name=TEXT,
            version=TEXT,
            extensions=_whole(
                max_iter_times=WHOLE,
                prefill_policy_type=WHOLE,
                decode_policy_type=WHOLE,
                max_prefill_batch_size=WHOLE,
                max_prefill_tokens=WHOLE,
            ),
        ),
    ),
    "metadata": (
        "Tell what a model takes and gives.",
        _whole(name=TEXT, platform=TEXT, inputs=_TENSORS, outputs=_TENSORS),
    ),
    "config": (
        "Tell how a model is set up.",
        _whole(
            model_name=TEXT,
            input_datatype=TEXT,
            output_datatype=TEXT,
            max_seq_len=WHOLE,
            npu_mem_size=WHOLE,
            cpu_mem_size=WHOLE,
            world_size=WHOLE,
            model_weight_path=TEXT,
            model_instance_type=TEXT,
        ),
    ),
    "slots": (
        "Tell how many requests a model can take now.",
        _whole(total_slots=WHOLE, free_slots=WHOLE, available_tokens_length=WHOLE),
    ),
    "info": (
        "Tell of the server and its models.",
        _whole(
            **_UNKNOWN,
            max_batch_total_tokens=WHOLE,
            max_best_of=WHOLE,
            max_concurrent_requests=WHOLE,
            max_input_length=WHOLE,
            version=TEXT,
            models=array(
                _whole(
                    model_device_type=TEXT,
                    model_dtype=TEXT,
                    model_id=TEXT,
                    model_pipeline_tag=TEXT,
                    model_sha=NULL,
                    max_total_tokens=WHOLE,
                )
            ),
        ),
    ),
    "models": (
        "List the models.",
        _whole(object={"const": "list"}, data=array(ref("Card"))),
    ),
    "model": ("Tell of one model.", ref("Card")),
    "live": ("Whether the server lives.", None),
    "ready": ("Whether some model can answer.", None),
    "model_ready": ("Whether a model can answer.", None),
}
"""Of what asks about the server: a summary, and what is told; None is an answer without a body."""
