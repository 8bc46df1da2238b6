"""What the dialect tells of itself: generate, conversations and completions, and its state.

The endpoints after other servers (``/generate``, ``/infer`` and their kin) are not told of.
"""

from collections.abc import Mapping
from typing import Final

from gateway.core.errors import (
    ClientError,
    ContentRefused,
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    InvalidParameter,
    Malformed,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
    RateLimited,
    RequestNotFound,
    TooLarge,
    Unauthorized,
    Unsupported,
    WorkerUnreachable,
)
from gateway.core.ports import Description
from protocols.mindie.profiles import Profile, Setup
from protocols.mindie.shapes import STATE, answers
from protocols.mindie.tables import INT32, MOST_STOPS
from protocols.params import Param
from protocols.schema import (
    FLAG,
    JSON,
    NONEMPTY,
    TEXT,
    WHOLE,
    Schema,
    answer,
    array,
    body,
    data,
    one_of,
    optional,
    record,
    ref,
    refusals,
    rows,
)

Tables = Mapping[str, tuple[Param, ...]]

_ANY: Final[Schema] = {"type": "object"}
_ID: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,256}$"}
_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_MODEL: Final[Schema] = {**NONEMPTY, "description": "A model's name; the list of models has all."}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MOST_STOPS // 2}
"""Lengths are counted in UTF-16 units, of which a character has at most two."""
_STATUSES: Final[tuple[tuple[type[GatewayError], int], ...]] = (
    (Malformed, 422),
    (InvalidParameter, 422),
    (Unsupported, 422),
    (ContextTooLong, 424),
    (ContentRefused, 400),
    (ClientError, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (TooLarge, 413),
    (RateLimited, 429),
    (QuotaExceeded, 429),
    (Overloaded, 503),
    (WorkerUnreachable, 503),
    (DeadlineExceeded, 500),
    (GatewayError, 500),
)


def describe(setup: Setup, tables: Tables) -> Description:
    """See ``gateway.core.ports.Described``; ``tables`` as the dialect shows them."""
    return Description(
        {
            **_texts(setup.profile, tables["text"]),
            **_openai(setup, tables),
            **_others(setup),
            **{variant: _told(*one) for variant, one in STATE.items()},
        },
        {
            "Error": record({"error": TEXT, "error_type": TEXT}, "error", "error_type"),
            **answers(early=setup.profile.early),
        },
    )


def _refused(*more: tuple[type[GatewayError], int]) -> dict[str, Schema]:
    """The refusals of an operation. Where the path names the model, 404 may have no body."""
    found = refusals((*_STATUSES, *more), ref("Error"))
    if "404" in found:
        found["404"] = {"description": found["404"]["description"]}
    found["413"]["content"][JSON]["schema"] = record({"message": TEXT}, "message")
    found["429"]["content"][JSON]["schema"] = record({"error": {"type": ["string", "object"]}})
    return found


# --- generate -------------------------------------------------------------------------------------


def _texts(profile: Profile, table: tuple[Param, ...]) -> dict[str, Schema]:
    said = {**NONEMPTY, "maxLength": profile.max_text_length // 2}
    parts = array({"anyOf": [_PARTS["text"], *_MEDIA]}, minItems=1, maxItems=20)
    asked = record(
        {
            "id": optional(NONEMPTY if profile.early else _ID),
            "text_input": said if profile.early else {"anyOf": [said, parts]},
            "parameters": optional(record({**rows(table), "perf_stat": optional(FLAG)})),
        },
        "text_input",
    )
    refused = _refused((ModelNotFound, 404))
    return {
        "text": {
            "summary": "Go on from the prompt.",
            "requestBody": body(asked),
            "responses": {"200": answer(ref("Generated")), **refused},
        },
        "text_stream": {
            "summary": "Go on from the prompt, event by event.",
            "requestBody": body(asked),
            "responses": {"200": answer(None, data(ref("GeneratedPiece"))), **refused},
        },
    }


_PARTS: Final[Mapping[str, Schema]] = {
    "text": record({"type": {"const": "text"}, "text": TEXT}, "type", "text"),
    **{
        kind: record({"type": {"const": kind}, kind: NONEMPTY}, "type", kind)
        for kind in ("image_url", "video_url", "audio_url")
    },
}
_MEDIA: Final = [part for kind, part in _PARTS.items() if kind != "text"]


# --- conversations and completions ----------------------------------------------------------------


def _openai(setup: Setup, tables: Tables) -> dict[str, Schema]:
    operations: dict[str, Schema] = {}
    for variant, asked, kind, summary in (
        ("chat", _chat(setup, tables["chat"]), "Chat", "Answer a conversation."),
        ("completion", _completion(setup, tables["completion"]), "Text", "Go on from the prompt."),
    ):
        found = answer(ref(f"{kind}Answer"), data(ref(f"{kind}Chunk"), "[DONE]"))
        operations[variant] = {
            "summary": summary,
            "requestBody": body(asked),
            "responses": {"200": found, **_refused((ModelNotFound, 422))},
        }
    return operations


def _chat(setup: Setup, table: tuple[Param, ...]) -> Schema:
    early = setup.profile.early
    properties = {
        "model": _MODEL,
        "messages": array({"anyOf": _EARLY_TURNS if early else _TURNS}, minItems=1),
        **rows(table),
        **({} if early else _BESIDE),
    }
    return record({**properties, **_own(table)}, "model", "messages")


def _completion(setup: Setup, table: tuple[Param, ...]) -> Schema:
    said = {**NONEMPTY, "maxLength": setup.profile.max_text_length // 2}
    ids = array({"type": "integer", "minimum": 0}, minItems=1)
    properties = {
        "model": _MODEL,
        "prompt": {"anyOf": [said, ids]},
        **rows(table),
        "response_format": _FORMAT,
    }
    return record({**properties, **_own(table)}, "model", "prompt")


def _own(table: tuple[Param, ...]) -> dict[str, Schema]:
    """What a check reads, and not a row."""
    known = {param.wire for param in table}
    return {name: schema for name, schema in _CHECKED.items() if name in known}


_CHECKED: Final[Mapping[str, Schema]] = {
    "stop": optional({"anyOf": [_STOP, array(_STOP, maxItems=16)]}),
    "n": {
        **optional({"type": "integer", "minimum": 1, "maximum": 8192}),
        "description": "More than one needs a temperature.",
    },
    "best_of": {
        **optional({"type": "integer", "minimum": 1, "maximum": 128}),
        "description": "At least n; in a stream, n.",
    },
}


def _turn(role: str, content: Schema, **others: Schema) -> Schema:
    return record({"role": {"const": role}, "content": content, **others}, "role", "content")


_PARTED: Final[Schema] = {"anyOf": [TEXT, array({"anyOf": [_PARTS["text"], *_MEDIA]}, maxItems=20)]}
_CALL: Final[Schema] = record(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": record({"name": _NAME, "arguments": TEXT}, "name", "arguments"),
    },
    *("id", "type", "function"),
)
_CALLING: Final[Schema] = record(
    {
        "role": {"const": "assistant"},
        "content": optional(TEXT),
        "tool_calls": array(_CALL, minItems=1),
    },
    *("role", "tool_calls"),
)
_TURNS: Final[list[Schema]] = [
    _turn("system", _PARTED, name=optional(TEXT)),
    _turn("user", _PARTED, name=optional(TEXT)),
    _turn("assistant", NONEMPTY),
    _CALLING,
    record(
        {"role": {"const": "tool"}, "content": _PARTED, "tool_call_id": NONEMPTY},
        *("role", "content", "tool_call_id"),
    ),
]
_EARLY_TURNS: Final = [_turn(role, NONEMPTY) for role in ("system", "user", "assistant")]
_FUNCTION: Final[Schema] = record(
    {
        "name": _NAME,
        "description": optional(TEXT),
        "parameters": optional(_ANY),
        "strict": optional(FLAG),
    },
    "name",
)
_TOOL: Final[Schema] = record(
    {"type": {"const": "function"}, "function": _FUNCTION}, "type", "function"
)
_FORMAT: Final[Schema] = optional(
    {
        "anyOf": [
            record({"type": one_of("text", "json_object")}, "type"),
            record(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": record(
                        {"name": _NAME, "schema": _ANY, "strict": optional(FLAG)}, "name", "schema"
                    ),
                },
                *("type", "json_schema"),
            ),
        ]
    }
)
_BESIDE: Final[Mapping[str, Schema]] = {
    "tools": optional(array(_TOOL)),
    "tool_choice": optional(one_of("none", "auto", "required")),
    "response_format": _FORMAT,
    "chat_template": optional(NONEMPTY),
    "chat_template_kwargs": record(
        {
            "enable_thinking": FLAG,
            "thinking_budget": optional({"type": "integer", "minimum": 1, "maximum": INT32}),
        }
    ),
}


# --- what is asked beside, and the state ----------------------------------------------------------


def _others(setup: Setup) -> dict[str, Schema]:
    text = {**NONEMPTY, "maxLength": setup.profile.max_text_length // 2}
    asked = {"inputs": text, "do_decode": optional(FLAG), "model": _MODEL}
    needed = ("inputs",) if setup.default_model else ("inputs", "model")
    tokens = record({"token_number": WHOLE, "tokens": array(TEXT)}, "token_number", "tokens")
    gone = _refused((ModelNotFound, 404), (RequestNotFound, 404))
    return {
        "stop": {
            "summary": "End a running request; the answer says the body back.",
            "requestBody": body(record({"id": _ID}, "id")),
            "responses": {"200": answer(_ANY), **gone},
        },
        "tokenizer": {
            "summary": "Cut a text into tokens.",
            "requestBody": body(record(asked, *needed)),
            "responses": {"200": answer(tokens), **_refused((ModelNotFound, 404))},
        },
    }


def _told(summary: str, schema: Schema | None) -> Schema:
    found = {"description": "It is so."} if schema is None else answer(schema)
    refused = _refused((ModelNotFound, 404))
    if schema is None:
        refused["503"] = {"description": refused["503"]["description"]}
    return {"summary": summary, "responses": {"200": found, **refused}}
