"""Decodes conversations of clients.

What has no place in the internal request is kept in ``extra``, or beside the object that it belongs
to, and so is reported as lost unless the worker speaks this protocol, too.

- The plan of an assistant's message (``tool_plan``) is its text before the calls.
- Clients tell a stop sequence from the model's own end, so the worker must, or the gateway does.
- Documents are text before the user's last message, for models of any kind. ``ExtraFields`` of that
  text hold them as they were sent: only Cohere's workers can cite them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols.chat.content_parts import (
    read_object_field,
    read_optional_string,
    read_part,
    read_string,
)
from protocols.chat.messages import check_tool_results, read_content, read_tool_calls
from protocols.chat.params import (
    as_object,
    as_text,
    conflict_error,
    empty_value_error,
    invalid_type_error,
    invalid_value_error,
    missing_error,
    null_to_none,
    too_long_error,
)
from protocols.chat.requests import collect_extra, read_model, set_request_info
from protocols.chat.tools import read_tools
from protocols.cohere.params import (
    CHAT_PARAMS,
    CITATION_MODES,
    FORMAT_TYPES,
    MAX_DOCUMENTS,
    MAX_PRIORITY,
    NO_CITATIONS,
    SAFETY_MODES,
    THINKING_TYPES,
    TOOL_CHOICES,
)
from protocols.core.errors import InvalidParameter
from protocols.core.extra import KeyTree, add_unknown_keys, read_extra_fields
from protocols.core.request import (
    ContentPart,
    ExtraFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    OutputFormat,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from protocols.json_body import decode_value
from protocols.params import ParsedParams, read_params

Fields = Mapping[str, Raw]
_encode = msgspec.json.Encoder().encode

DOCUMENTS: Final = "documents"
CITATIONS: Final = "citations"
CITATION_OPTIONS: Final = "citation_options"
_KNOWN_FIELDS: Final = frozenset(
    {"model", "messages", "tools", "tool_choice", DOCUMENTS, "response_format", "thinking"}
)
"""The fields beside the scalar parameters that the internal request has."""
_OBJECT_KEYS: Final[Mapping[str, KeyTree]] = {
    "response_format": dict.fromkeys(("type", "json_schema")),
    "thinking": dict.fromkeys(("type", "token_budget")),
}

# --- the request ----------------------------------------------------------------------------------


def read_chat(fields: Fields) -> GenerationRequest:
    """Decode a request of ``/v2/chat``. Raises ClientError."""
    model = read_model(fields)
    values = read_params(CHAT_PARAMS, fields)
    set_request_info(values, fields, None, None)
    for i, stop in enumerate(values.get("stopping.stop", ())):
        if not stop:
            raise empty_value_error(f"stop_sequences[{i}]", stop)
    values["response_options.matched_stop"] = bool(values.get("stopping.stop"))
    cites = _read_citation_mode(fields) not in NO_CITATIONS
    messages = _add_documents(_read_messages(fields), _read_documents(fields), cites=cites)
    tools = read_tools(fields, kinds=("function",))
    if values.get("request.strict_tools"):
        tools = tuple([replace(tool, strict=True) for tool in tools])
    if values.get("request.logprobs"):
        values["logprobs.top"] = 0
    _read_thinking(fields, values)
    return GenerationRequest(
        model=model,
        kind="chat",
        messages=messages,
        tools=tools,
        tool_choice=_read_tool_choice(fields, tools),
        output=_read_output(fields),
        extra=_collect_extra(fields, values),
        clamped_fields=_clamp_priority(values),
        **values.build_request_arguments(),
    )


def _collect_extra(fields: Fields, values: ParsedParams) -> dict[str, Raw]:
    """What only Cohere's workers understand."""
    _read_word(fields, "safety_mode", SAFETY_MODES)
    extra = collect_extra(values, fields, CHAT_PARAMS, _KNOWN_FIELDS, "forward")
    if CITATION_OPTIONS in extra and decode_value(extra[CITATION_OPTIONS]) in _WITHOUT_CITATIONS:
        del extra[CITATION_OPTIONS]  # every worker does that; see ``is_without_citations``
    for name, known in _OBJECT_KEYS.items():
        if (raw := null_to_none(fields.get(name))) is not None:
            add_unknown_keys(extra, decode_value(raw), name, known)
    return extra


_WITHOUT_CITATIONS: Final = tuple({"mode": mode} for mode in sorted(NO_CITATIONS))


def is_without_citations(request: GenerationRequest) -> bool:
    """Whether a client of this protocol wants no citations, which is no loss for other workers."""
    return CITATION_OPTIONS in request.provided_fields and CITATION_OPTIONS not in request.extra


def _clamp_priority(values: ParsedParams) -> dict[str, str]:
    priority = values.get("priority", 0)
    if priority <= MAX_PRIORITY:
        return {}
    values["priority"] = MAX_PRIORITY
    return {"priority": f"{priority} to {MAX_PRIORITY}"}


def _read_word(fields: Fields, name: str, words: tuple[str, ...], at: str = "") -> str | None:
    """A string that is one of ``words``, or None. Raises InvalidParameter."""
    if null_to_none(fields.get(name)) is None:
        return None
    word = as_text(fields, name, at)
    if word not in words:
        raise invalid_value_error(f"{at}.{name}" if at else name, word, words)
    return word


def _read_citation_mode(fields: Fields) -> str | None:
    raw = null_to_none(fields.get(CITATION_OPTIONS))
    if raw is None:
        return None
    return _read_word(as_object(raw, CITATION_OPTIONS), "mode", CITATION_MODES, CITATION_OPTIONS)


def _read_thinking(fields: Fields, values: ParsedParams) -> None:
    """Reasoning is on by default, where a model can."""
    raw = null_to_none(fields.get("thinking"))
    if raw is None:
        return
    inner = as_object(raw, "thinking")
    kind = _read_word(inner, "type", THINKING_TYPES, "thinking")
    if kind is None:
        raise missing_error("thinking.type")
    budget = decode_value(inner["token_budget"]) if "token_budget" in inner else None
    if budget is not None and type(budget) is not int:
        raise invalid_type_error("thinking.token_budget", "an integer", budget)
    if budget is not None and budget < 1:
        text = "'thinking.token_budget' must be at least 1."
        raise InvalidParameter(text, param="thinking.token_budget", problem="value", got=budget)
    if kind == "disabled":
        values["reasoning.effort"] = "none"
        values["response_options.hides_reasoning"] = True
        return
    values["reasoning.include"] = True
    if budget is not None:
        values["reasoning.budget"] = budget


def _read_output(fields: Fields) -> OutputFormat | None:
    raw = null_to_none(fields.get("response_format"))
    if raw is None:
        return None
    inner = as_object(raw, "response_format")
    kind = _read_word(inner, "type", FORMAT_TYPES, "response_format")
    if kind is None:
        raise missing_error("response_format.type")
    schema = null_to_none(inner.get("json_schema"))
    if schema is None:
        return JsonObjectFormat() if kind == "json_object" else None
    if kind == "text":
        text = "'response_format.json_schema' must not be given with the type 'text'."
        raise conflict_error("response_format.json_schema", text)
    as_object(schema, "response_format.json_schema")
    return JsonSchemaFormat(schema)


def _read_tool_choice(fields: Fields, tools: Sequence[Tool]) -> ToolChoice | None:
    word = _read_word(fields, "tool_choice", tuple(TOOL_CHOICES))
    if word is None:
        return None
    if TOOL_CHOICES[word] == "required" and not tools:
        raise conflict_error("tool_choice", "'tools' are required with the tool choice 'REQUIRED'.")
    return TOOL_CHOICES[word]


# --- conversations --------------------------------------------------------------------------------

_ROLE_KEYS: Final[Mapping[str, KeyTree]] = {
    **dict.fromkeys(("system", "user"), dict.fromkeys(("role", "content"))),
    "assistant": dict.fromkeys(("role", "content", "tool_plan", "tool_calls")),
    "tool": dict.fromkeys(("role", "content", "tool_call_id")),
}
_PART_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("text",),
    "user": ("text", "image_url"),
    "assistant": ("text", "thinking"),
    "tool": ("text", "document"),
}


def _read_messages(fields: Fields) -> tuple[Message, ...]:
    raw = null_to_none(fields.get("messages"))
    if raw is None:
        raise missing_error("messages")
    values = decode_value(raw)
    if not isinstance(values, list):
        raise invalid_type_error("messages", "an array of objects", values)
    if not values:
        raise empty_value_error("messages", values)
    messages = tuple([_read_message(value, f"messages[{i}]") for i, value in enumerate(values)])
    check_tool_results(messages)
    return messages


def _read_message(value: Any, at: str) -> Message:
    if not isinstance(value, dict):
        raise invalid_type_error(at, "an object", value)
    role: Any = read_string(value, "role", at)
    if role not in _ROLE_KEYS:
        raise invalid_value_error(f"{at}.role", role, tuple(_ROLE_KEYS))
    plan = read_optional_string(value, "tool_plan", at) if role == "assistant" else None
    calls = _read_calls(value, at) if role == "assistant" else ()
    parts: tuple[ContentPart, ...] = (TextPart(plan, at=f"{at}.tool_plan"),) if plan else ()
    parts += read_content(
        value, at, partial(_read_part, allowed=_PART_TYPES[role]), optional=bool(calls or plan)
    )
    return Message(
        role,
        parts,
        tool_calls=calls,
        tool_call_id=read_string(value, "tool_call_id", at) if role == "tool" else None,
        extra=read_extra_fields(value, at, _ROLE_KEYS[role]),
    )


def _read_calls(value: Mapping[str, Any], at: str) -> tuple[ToolCall, ...]:
    calls = read_tool_calls(value, at)
    for k, call in enumerate(calls):
        if call.kind != "function":
            raise invalid_value_error(f"{at}.tool_calls[{k}].type", call.kind, ("function",))
    return calls


def _read_part(value: Any, at: str, allowed: tuple[str, ...]) -> tuple[ContentPart, ...]:
    """The part of one item of a content array. Raises InvalidParameter."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "thinking" and kind in allowed:
        extra = read_extra_fields(value, at, dict.fromkeys(("type", "thinking")))
        return (ReasoningPart(read_string(value, "thinking", at), extra=extra, at=at),)
    if kind == "document" and kind in allowed:
        document = read_object_field(value, "document", at)
        extra = read_extra_fields(value, at, dict.fromkeys(("type", "document")))
        return (TextPart(_format_document(document, f"{at}.document"), extra, at=at),)
    return read_part(value, at, allowed)


# --- documents ------------------------------------------------------------------------------------


def _read_documents(fields: Fields) -> list[Any]:
    raw = null_to_none(fields.get(DOCUMENTS))
    documents = [] if raw is None else decode_value(raw)
    if not isinstance(documents, list):
        raise invalid_type_error(DOCUMENTS, "an array of strings or objects", documents)
    if len(documents) > MAX_DOCUMENTS:
        raise too_long_error(DOCUMENTS, MAX_DOCUMENTS, documents)
    return documents


def _format_document(document: Any, at: str) -> str:
    """A document as text: its data, or all of it if it has more than data."""
    if isinstance(document, str):
        return document
    if not isinstance(document, dict):
        raise invalid_type_error(at, "a string or an object", document)
    read_optional_string(document, "id", at)
    data = document.get("data")
    if data is None:
        raise missing_error(f"{at}.data")
    if not isinstance(data, str | dict):
        raise invalid_type_error(f"{at}.data", "an object", data)
    if len(document) > 1:
        return _encode(document).decode()
    return data if isinstance(data, str) else _encode(data).decode()


def _add_documents(
    messages: tuple[Message, ...], documents: list[Any], *, cites: bool
) -> tuple[Message, ...]:
    """The messages with the documents before the user's last text.

    ``cites``: the answer is to cite them, which only Cohere's workers can.
    """
    if not documents:
        return messages
    texts = [_format_document(one, f"{DOCUMENTS}[{i}]") for i, one in enumerate(documents)]
    blocks = [f"<document>\n{text}\n</document>\n" for text in texts]
    extra = ExtraFields(DOCUMENTS, {(CITATIONS,): documents}) if cites else None
    part = TextPart("".join(blocks), extra)
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].role == "user":
            changed = replace(messages[i], parts=(part, *messages[i].parts))
            return (*messages[:i], changed, *messages[i + 1 :])
    return (*messages, Message("user", (part,)))


def take_documents(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """The messages without the documents that are to be cited, and these."""
    kept: list[Message] = []
    documents: list[Any] = []
    for message in messages:
        parts = []
        for part in message.parts:
            if part.extra is not None and part.extra.at == DOCUMENTS:
                documents += part.extra.values[CITATIONS,]
            else:
                parts.append(part)
        kept.append(replace(message, parts=tuple(parts)))
    return kept, documents
