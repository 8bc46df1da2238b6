"""What the family tells of itself: its requests, and its answers in a style.

A member puts its own ``Reading``, ``Style`` and refusals in::

    refused = refusals(errors.statuses(), ref("Error"))
    Description(operations(READING, refused, ref("Error")), {**answers(STYLE), "Error": …})
"""

from collections.abc import Iterable, Mapping

from protocols.openai import shapes
from protocols.openai.pieces import (
    CallPiece,
    ChatLogprobs,
    GenerationUsage,
    TextLogprobs,
)
from protocols.openai.requests import IDENTIFIER, METADATA, Reading
from protocols.openai.style import Style
from protocols.openai.vectors import VectorList
from protocols.params import Param
from protocols.schema import (
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
    rows,
    structs,
)

_MODEL: Schema = {**NONEMPTY, "description": "A model's name or alias; the list of models has all."}

# --- requests -------------------------------------------------------------------------------------


def chat(reading: Reading, *, kinds: tuple[str, ...] = ("function", "custom")) -> Schema:
    """The body of a conversation; ``kinds`` of tools."""
    properties = {
        "model": _MODEL,
        "messages": shapes.messages(reading.message_rules),
        **_rows(reading.chat),
        **_BOTH,
        "tools": shapes.tools(reading.max_tools, *kinds),
        "tool_choice": shapes.TOOL_CHOICE,
        "functions": shapes.FUNCTIONS,
        "function_call": shapes.FUNCTION_CALL,
        "metadata": shapes.metadata(*METADATA),
        "modalities": shapes.MODALITIES,
        "chat_template_kwargs": shapes.TEMPLATE_ARGUMENTS,
    }
    return record(properties, "model", "messages", more=_more(reading))


def completion(reading: Reading) -> Schema:
    """The body of a completion."""
    properties = {
        "model": _MODEL,
        "prompt": shapes.PROMPT,
        **_rows(reading.completion),
        **_BOTH,
    }
    return record(properties, "model", "prompt", more=_more(reading))


def embedding(reading: Reading) -> Schema:
    """The body of a request for vectors."""
    properties = {
        "model": _MODEL,
        "input": shapes.inputs(reading.max_inputs),
        **_rows(reading.embedding),
    }
    return record(properties, "model", "input", more=_more(reading))


_BOTH: Mapping[str, Schema] = {
    "response_format": shapes.RESPONSE_FORMAT,
    **shapes.GUIDES,
    "logit_bias": shapes.LOGIT_BIAS,
    "stream_options": shapes.STREAM_OPTIONS,
}


def _rows(table: tuple[Param, ...]) -> dict[str, Schema]:
    """The rows' properties, with what their reader checks besides."""
    found = rows(table)
    for param in table:
        if param.wire == "stop":
            most = {} if param.max_items is None else {"maxItems": param.max_items}
            found["stop"] = optional({"anyOf": [NONEMPTY, array(NONEMPTY, **most)]})
        elif param.wire == "safety_identifier":
            found[param.wire] = optional({**TEXT, "maxLength": IDENTIFIER})
    return found


def _more(reading: Reading) -> bool:
    return reading.unknown_fields != "reject"


# --- answers --------------------------------------------------------------------------------------


def answers(style: Style) -> dict[str, Schema]:
    """The whole answers and the chunks of this style, and all within them."""
    reasons = tuple(dict.fromkeys(style.finish_reasons.values()))
    chat: dict[str, Schema] = {
        **_CHOICE,
        "logprobs": optional(ref("ChatLogprobs")),
        "finish_reason": one_of(*reasons, "function_call"),
        "message": _message(style),
        "delta": _only(_MESSAGE, style.message_keys),
    }
    text: dict[str, Schema] = {
        **_CHOICE,
        "logprobs": optional(ref("TextLogprobs")),
        "finish_reason": one_of(*reasons),
        "text": TEXT,
    }
    chat_piece, text_piece = (
        {**one, "finish_reason": optional(one["finish_reason"])} for one in (chat, text)
    )
    return {
        **structs(GenerationUsage, CallPiece, ChatLogprobs, TextLogprobs, VectorList),
        "ChatAnswer": _whole(
            style, style.chat_object, _choice(style, style.chat_choice_keys, chat)
        ),
        "TextAnswer": _whole(
            style, style.text_object, _choice(style, style.text_choice_keys, text)
        ),
        "ChatChunk": _chunk(
            style, style.chat_chunk_object, _only(chat_piece, style.chat_chunk_keys)
        ),
        "TextChunk": _chunk(
            style, style.text_chunk_object, _only(text_piece, style.text_chunk_keys)
        ),
    }


_SOMETIMES = ("usage", "system_fingerprint")
_SHARED: Mapping[str, Schema] = {
    "id": TEXT,
    "created": WHOLE,
    "model": TEXT,
    "system_fingerprint": TEXT,
}
_CHOICE: Mapping[str, Schema] = {
    "index": WHOLE,
    "token_ids": array(WHOLE),
    "stop_reason": {"type": ["string", "integer"]},
}
_MESSAGE: Mapping[str, Schema] = {
    "role": {"const": "assistant"},
    "content": optional(TEXT),
    "refusal": optional(TEXT),
    "reasoning_content": TEXT,
    "tool_calls": array(ref("CallPiece")),
    "function_call": ref("Function"),
}
_ALWAYS = frozenset({"index", "finish_reason", "message", "delta", "text"})


def _whole(style: Style, name: str, choice: Schema) -> Schema:
    values = {
        **_SHARED,
        "object": {"const": name},
        "choices": array(choice),
        "usage": ref("GenerationUsage"),
    }
    return _only(
        values, style.unary_keys, [key for key in style.unary_keys if key not in _SOMETIMES]
    )


def _chunk(style: Style, name: str, piece: Schema) -> Schema:
    values = {
        **_SHARED,
        "object": {"const": name},
        "choices": array(piece),
        "usage": optional(ref("GenerationUsage")),
    }
    return _only(
        values, style.chunk_keys, [key for key in style.chunk_keys if key not in _SOMETIMES]
    )


def _choice(style: Style, keys: Iterable[str], values: Mapping[str, Schema]) -> Schema:
    return _only(
        values, keys, [key for key in keys if key in _ALWAYS or key in style.default_values]
    )


def _message(style: Style) -> Schema:
    always = ("role", "content", *style.default_values)
    return _only(_MESSAGE, style.message_keys, [key for key in style.message_keys if key in always])


def _only(
    values: Mapping[str, Schema], keys: Iterable[str], required: Iterable[str] | None = None
) -> Schema:
    """An object of these keys. Unless told otherwise, those are required that every choice has."""
    found = list(keys)
    needed = [key for key in found if key in _ALWAYS] if required is None else required
    return record({key: values[key] for key in found}, *needed)


# --- operations -----------------------------------------------------------------------------------


def operations(reading: Reading, refusals: Schema, error: Schema) -> dict[str, Schema]:
    """What ``chat``, ``completion`` and ``embedding`` take and answer.

    ``refusals`` are the responses that tell of errors; ``error`` is what a stream tells of one.
    """

    def streamed(chunk: str) -> Schema:
        return data({"anyOf": [ref(chunk), error]}, "[DONE]")

    return {
        "chat": {
            "summary": "Answer a conversation.",
            "requestBody": body(chat(reading)),
            "responses": {"200": answer(ref("ChatAnswer"), streamed("ChatChunk")), **refusals},
        },
        "completion": {
            "summary": "Go on from each prompt.",
            "requestBody": body(completion(reading)),
            "responses": {"200": answer(ref("TextAnswer"), streamed("TextChunk")), **refusals},
        },
        "embedding": {
            "summary": "Give the vector of each input.",
            "requestBody": body(embedding(reading)),
            "responses": {"200": answer(ref("VectorList")), **refusals},
        },
    }
