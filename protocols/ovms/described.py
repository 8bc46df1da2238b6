"""What the dialect tells of itself: the tables' rows, and answers as its writers have them."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from gateway.core.ports import Description
from protocols.openai import shapes
from protocols.ovms import errors, requests, tables
from protocols.ovms.answers import Form, Usage
from protocols.params import Param
from protocols.schema import (
    EVENTS,
    FLAG,
    NONEMPTY,
    NULL,
    NUMBER,
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
    row,
    structs,
)

Tables = Mapping[str, tuple[Param, ...]]

_MODEL: Final[Schema] = {**NONEMPTY, "description": "A model's name; the list of models has all."}
_STREAM: Final[Schema] = {**FLAG, "default": False}

# --- requests -------------------------------------------------------------------------------------

_WIDTHS: Final = {row.param.wire: row.integer_range for row in tables.ALL}


def _rows(table: tuple[Param, ...]) -> dict[str, Schema]:
    """The rows, within what the server's JSON library can hold."""
    found = {}
    for param in table:
        if param.type in ("strict int", "float"):
            low, high = _WIDTHS[param.wire]
            within = {
                "low": low if param.low is None else param.low,
                "high": high if param.high is None else param.high,
            }
            found[param.wire] = row(replace(param, **within))
        else:
            found[param.wire] = row(param)
    return found


def _both(table: tuple[Param, ...]) -> dict[str, Schema]:
    """What a conversation and a completion have in common."""
    wide = optional({**WHOLE, "minimum": 1, "maximum": requests.BEST_OF_LIMIT - 1})
    return {
        "model": _MODEL,
        "stream": _STREAM,
        **_rows(table),
        "best_of": {**wide, "description": "Beams; not in a stream."},
        "n": {**wide, "description": "Not more than best_of."},
    }


def _chat(*, early: bool) -> Schema:
    properties = {**_both(_tables(early=early)["chat"]), "messages": array(_MESSAGE, minItems=1)}
    if not early:
        properties |= {
            **_LATER,
            "tools": optional(array(_TOOL)),
            "tool_choice": _CHOICE,
            "response_format": _FORMAT,
            "chat_template_kwargs": shapes.TEMPLATE_ARGUMENTS,
        }
    return record(properties, "model", "messages")


def _completion(*, early: bool) -> Schema:
    properties = {**_both(_tables(early=early)["completion"]), "prompt": NONEMPTY}
    return record({**properties, **({} if early else _LATER)}, "model", "prompt")


def _tables(*, early: bool) -> Tables:
    return tables.EARLY_TABLES if early else tables.TABLES


_ANY: Final[Schema] = {"type": "object"}
_PART: Final[Schema] = {
    "anyOf": [
        record({"type": {"const": "text"}, "text": TEXT}, "type", "text"),
        record(
            {"type": {"const": "image_url"}, "image_url": record({"url": TEXT}, "url")},
            "type",
            "image_url",
        ),
        record(
            {
                "type": {"const": "input_audio"},
                "input_audio": record({"data": TEXT, "format": TEXT}, "data"),
            },
            "type",
            "input_audio",
        ),
    ]
}
_CALL: Final[Schema] = record(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": record({"name": TEXT, "arguments": {"anyOf": [TEXT, _ANY]}}),
    },
    "function",
)
_MESSAGE: Final[Schema] = record(
    {
        "role": one_of("system", "developer", "user", "assistant", "tool", "function"),
        "content": optional({"anyOf": [TEXT, array(_PART)]}),
        "name": optional(TEXT),
        "tool_calls": optional(array(_CALL)),
        "tool_call_id": optional(TEXT),
        "reasoning_content": optional(TEXT),
    },
    "role",
)
_FUNCTION: Final = {
    "name": TEXT,
    "description": optional(TEXT),
    "parameters": _ANY,
    "strict": optional(FLAG),
}
_TOOL: Final[Schema] = {
    "anyOf": [
        record({"type": {"const": "function"}, "function": record(_FUNCTION, "name")}, "function"),
        record({"type": {"const": "function"}, **_FUNCTION}, "type", "name"),
    ]
}
_CHOICE: Final[Schema] = optional(
    {
        "anyOf": [
            one_of("none", "auto", "required"),
            record({"function": record({"name": TEXT}, "name")}, "function"),
            record({"type": {"const": "function"}, "name": TEXT}, "type", "name"),
        ]
    }
)
_FORMAT: Final[Schema] = optional(
    {
        "anyOf": [
            record({"type": one_of("text", "json_object")}, "type"),
            record(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": record(
                        {
                            "schema": _ANY,
                            "name": optional(TEXT),
                            "description": optional(TEXT),
                            "strict": optional(FLAG),
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
_LATER: Final[Mapping[str, Schema]] = {
    "stream_options": {
        **optional(record({"include_usage": FLAG}, more=False)),
        "description": "Of a stream only.",
    },
    "user": optional(TEXT),
}
"""What the early release passes over."""
_IDS: Final[Schema] = array(WHOLE, minItems=1)
_EMBEDDING: Final[Schema] = record(
    {
        "model": _MODEL,
        "input": {
            "anyOf": [
                TEXT,
                _IDS,
                array(TEXT, minItems=1, maxItems=requests.MOST_INPUTS),
                array(_IDS, minItems=1, maxItems=requests.MOST_INPUTS),
            ]
        },
        "encoding_format": one_of("float", "base64"),
        "user": optional(TEXT),
    },
    "model",
    "input",
)

# --- answers --------------------------------------------------------------------------------------


def _answers(form: Form) -> Iterator[tuple[str, Schema]]:
    """The whole answer of this form, and its chunk."""
    kind = "Chat" if form.is_chat else "Text"
    reason = {"const": "stop"} if form.early else one_of("stop", "length", "tool_calls", "unknown")
    used: dict[str, Schema] = {} if form.early else {"usage": ref("Usage")}
    choice: dict[str, Schema] = {"finish_reason": reason, "index": WHOLE}
    choice["logprobs"] = NULL if form.early else optional(_LOGPROBS[form.is_chat])
    said = {"message": _message(form)} if form.is_chat else {"text": TEXT}
    yield f"{kind}Answer", _told(form.unary_object, {**choice, **said}, used, *choice, *said)

    piece = {**choice, "finish_reason": optional(reason), "logprobs": NULL}
    said = {"delta": _delta(form)} if form.is_chat else {"text": TEXT}
    used = {} if form.early else {"usage": optional(ref("Usage"))}
    needed = ("index", "finish_reason", *(said if form.is_chat else ()))
    yield f"{kind}Chunk", _told(form.chunk_object, {**piece, **said}, used, *needed)


def _told(
    name: str, choice: Mapping[str, Schema], used: Mapping[str, Schema], *needed: str
) -> Schema:
    always = {
        "choices": array(record(choice, *needed)),
        "created": WHOLE,
        "model": TEXT,
        "object": {"const": name},
    }
    return record({**always, **used}, *always)


def _message(form: Form) -> Schema:
    message: dict[str, Schema] = {"content": TEXT, "role": {"const": "assistant"}}
    if form.early:
        return record(message, *message)
    called = record({"name": TEXT, "arguments": TEXT}, "name", "arguments")
    call = record({"id": TEXT, "type": {"const": "function"}, "function": called})
    more = {"reasoning_content": TEXT, "tool_calls": array(call)}
    return record({**message, **more}, *message, "tool_calls")


def _delta(form: Form) -> Schema:
    if form.early:
        return record({"content": TEXT})
    call = {
        "index": WHOLE,
        "id": TEXT,
        "type": {"const": "function"},
        "function": record({"name": TEXT, "arguments": TEXT}),
    }
    return record(
        {
            "role": {"const": "assistant"},
            "content": optional(TEXT),
            "reasoning_content": TEXT,
            "tool_calls": array(record(call, "index", "function")),
        }
    )


_TOKEN: Final[Schema] = record(
    {
        "token": TEXT,
        "logprob": optional(NUMBER),
        "bytes": array(WHOLE),
        "top_logprobs": array(_ANY, maxItems=0),
    }
)
_LOGPROBS: Final[Mapping[bool, Schema]] = {
    True: record({"content": array(_TOKEN)}, "content"),
    False: record(
        {
            "tokens": array(TEXT),
            "token_logprobs": array(optional(NUMBER)),
            "top_logprobs": array({"type": "object", "additionalProperties": optional(NUMBER)}),
            "text_offset": array(WHOLE),
        }
    ),
}
_VECTORS: Final[Schema] = record(
    {
        "object": {"const": "list"},
        "data": array(
            record(
                {
                    "object": {"const": "embedding"},
                    "embedding": {"anyOf": [array(NUMBER), TEXT]},
                    "index": WHOLE,
                },
                *("object", "embedding", "index"),
            )
        ),
        "usage": record({"prompt_tokens": WHOLE, "total_tokens": WHOLE}),
    },
    "object",
    "data",
)
_CARD: Final[Schema] = record(
    {"id": TEXT, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT},
    *("id", "object", "created", "owned_by"),
)

# --- operations -----------------------------------------------------------------------------------


def describe(variants: Collection[str], *, early: bool) -> Description:
    """See ``gateway.core.ports.Described``; ``variants`` are those that are mounted."""
    refused = refusals(errors.STATUSES, ref("Body"))
    broken = refused["400"]
    told = {**refused, "400": {**broken, "content": {**broken["content"], EVENTS: _BARE}}}
    operations: dict[str, Schema] = {
        "chat": {
            "summary": "Answer a conversation.",
            "requestBody": body(_chat(early=early)),
            "responses": {"200": answer(ref("ChatAnswer"), _chunk("ChatChunk")), **told},
        },
        "completion": {
            "summary": "Go on from the prompt.",
            "requestBody": body(_completion(early=early)),
            "responses": {"200": answer(ref("TextAnswer"), _chunk("TextChunk")), **told},
        },
        "embedding": {
            "summary": "Give the vector of each input.",
            "requestBody": body(_EMBEDDING),
            "responses": {"200": answer(ref("Vectors")), **refused},
        },
    }
    for variant in filter(variants.__contains__, _TOLD):
        summary, schema = _TOLD[variant]
        found = answer(schema) if schema else {"description": "It is so."}
        operations[variant] = {"summary": summary, "responses": {"200": found, **refused}}
    return Description(
        operations,
        {
            **structs(Usage, errors.Body),
            **dict(_answers(Form(is_chat=True, early=early))),
            **dict(_answers(Form(is_chat=False, early=early))),
            "Vectors": _VECTORS,
            "Card": _CARD,
        },
    )


_BARE: Final[Schema] = {"schema": {"description": "An error alone, which is not framed."}}


def _chunk(name: str) -> Schema:
    return data(ref(name), "[DONE]")


_TOLD: Final[Mapping[str, tuple[str, Schema | None]]] = {
    "models": (
        "List the models that can answer.",
        record({"data": array(ref("Card")), "object": {"const": "list"}}, "data", "object"),
    ),
    "model": ("Tell of one model.", ref("Card")),
    "server": (
        "Tell the server's name.",
        record({"name": TEXT, "version": TEXT}, "name", "version"),
    ),
    "live": ("Whether the server listens.", None),
    "ready": ("Whether the server can answer.", None),
    "model ready": ("Whether a model can answer.", None),
}
