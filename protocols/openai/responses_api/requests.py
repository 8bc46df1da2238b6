"""Client JSON of ``POST /v1/responses`` to the internal request."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from protocols import params
from protocols.chat.params import (
    NULL,
    REASONING_EFFORTS,
    as_object,
    as_optional_bool,
    as_optional_text,
    as_text,
    conflict_error,
    empty_value_error,
    invalid_type_error,
    invalid_value_error,
    missing_error,
    null_to_none,
    too_long_error,
)
from protocols.chat.requests import read_metadata
from protocols.chat.tools import FORMAT_NAME
from protocols.core.errors import StoredObjectNotFound, UnknownParameter, UnsupportedFeature
from protocols.core.extra import add_unknown_keys
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    OutputFormat,
    TextPart,
)
from protocols.json_body import decode_value, read_fields
from protocols.openai.responses_api.items import ConversationReader, Item
from protocols.openai.responses_api.params import (
    INCLUDE_LOGPROBS,
    INCLUDES,
    REASONING_SUMMARIES,
    RESPONSES_PARAMS,
    RESPONSES_STATEFUL_FIELDS,
)
from protocols.openai.responses_api.tools import ToolCatalog
from protocols.params import ParsedParams

_encode = msgspec.json.Encoder().encode

SOURCE: Final = "openai responses"
"""``GenerationRequest.source`` of these requests: ``extra`` holds fields of this API."""

_OBJECT_FIELDS: Final = frozenset(
    {
        "model",
        "input",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
        "metadata",
        "stream_options",
        "client_metadata",
        "conversation",
        "prompt",
    }
)
"""Fields that have their own function instead of a table row."""
_REFUSED_FIELDS: Final = tuple(
    one for one in RESPONSES_STATEFUL_FIELDS if one.decision == "refused"
)
_MAX_ITEMS: Final = 16_384
_MAX_CLIENT_METADATA: Final = 64

FIELD_NAMES: Final[Mapping[str, str]] = {
    **params.map_field_names(RESPONSES_PARAMS),
    "messages": "input",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "output": "text.format",
    "reasoning.effort": "reasoning.effort",
    "logprobs.top": "top_logprobs",
    "stopping.overflow": "truncation",
    "labels.metadata": "",
    "labels.client_metadata": "",
}
"""``metadata`` is stored and returned with the response; ``client_metadata`` names the client."""


class References(Struct, frozen=True):
    """The stored items that a request refers to.

    ``history`` are those of the previous response, ``None`` if it is not stored; ``items`` are
    single items by their ids. ``enabled``: responses are stored.
    """

    history: Sequence[Item] | None = None
    items: Mapping[str, Item] = {}
    enabled: bool = False


NO_REFERENCES: Final = References()


COMPACTION_REFUSAL: Final = (
    "Compaction of responses is not supported: its result is encrypted by one vendor. "
    "Ask for a summary with 'POST /responses'."
)


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """A decoded request, and what its response needs beside the internal request."""

    request: GenerationRequest
    fields: Mapping[str, Raw]
    """The fields that the client sent with a value, which the response repeats."""
    tools: ToolCatalog
    include: frozenset[str]
    uses_summaries: bool
    """Reasoning is returned as its summary, because the client asked for one."""
    stores: bool
    """The response is to be stored."""
    history: Sequence[Item] = ()
    """The items before those of this request."""
    input: Sequence[Item] = ()
    """The request's own items, with references resolved."""


def read_request(
    fields: Mapping[str, Raw],
    references: References = NO_REFERENCES,
    *,
    unknown: Literal["forward", "ignore", "reject"] = "forward",
    allows_hosted: bool = False,
    timeout: float | None = None,
) -> ResponsesRequest:
    """Decode a request.

    ``allows_hosted``: the worker gets the client's own tools. Raises ClientError.
    """
    sent = {name: raw for name, raw in fields.items() if raw != NULL}
    values = _read_scalars(sent, timeout)
    items = _read_input(sent, has_previous="previous_response_id" in sent)
    include = _read_include(sent)
    extra: dict[str, Raw] = {}
    uses_summaries = _read_reasoning(values, sent, extra)
    output = _read_text_options(sent, extra)
    if INCLUDE_LOGPROBS in include:
        values["logprobs.top"] = values.get("request.top_logprobs") or 0
    labels = _read_labels(values, sent)
    history = _find_history(values.get("request.previous_response_id"), references)
    tools = _read_tools(sent, (*history, *items), allows_hosted=allows_hosted)
    choice = tools.read_choice(sent.get("tool_choice"))
    conversation = ConversationReader(tools, lambda name: _find_item(name, references))
    if instructions := values.get("request.instructions"):
        conversation.add_message(Message("system", (TextPart(instructions),)))
    conversation.read_items(history, "previous_response_id")
    own_items = conversation.read_items(items)
    _collect_extra(values, sent, extra, unknown)
    extra |= tools.dropped_tools
    extra |= conversation.unknown
    request = GenerationRequest(
        model=as_text(sent, "model", ""),
        kind="chat",
        messages=conversation.build_messages(),
        tools=tools.tools,
        tool_choice=choice,
        output=output,
        labels=labels,
        extra=extra,
        source=SOURCE,
        **values.build_request_arguments(),
    )
    return ResponsesRequest(
        request=request,
        fields=sent,
        tools=tools,
        include=include,
        uses_summaries=uses_summaries,
        stores=references.enabled and values.get("request.store") is not False,
        history=history,
        input=own_items,
    )


_COUNTED_FIELDS: Final = frozenset(
    {"instructions", "previous_response_id", "parallel_tool_calls", "truncation", "store"}
)
"""The scalar parameters of a request for a token count, and the one that names no stored object."""


def find_uncounted_fields(call: ClientRequest) -> dict[str, Raw]:
    """The fields of a request for a token count that only one for a response has."""
    rows = RESPONSES_PARAMS.by_wire
    return {
        name: raw
        for name, raw in read_fields(call).items()
        if name in rows and name not in _COUNTED_FIELDS and raw != NULL
    }


def _read_scalars(fields: Mapping[str, Raw], timeout: float | None) -> ParsedParams:
    """Read the scalar parameters. Raises UnsupportedFeature for what is refused by name."""
    if not as_text(fields, "model", ""):
        raise missing_error("model")
    values = params.read_params(RESPONSES_PARAMS, fields)
    values.provided_fields = set(fields)
    values["response_options.has_items"] = True
    for one in _REFUSED_FIELDS:
        if one.field in fields and values.get(f"request.{one.field}") is not False:
            raise UnsupportedFeature(one.refusal, param=one.field)
    _check_stream_options(fields, stream=bool(values.get("stream")))
    if values.get("request.truncation") == "auto":
        values["stopping.overflow"] = "truncate"
    if timeout is not None:
        values["timeout"] = timeout
    return values


# --- input ----------------------------------------------------------------------------------------


def _read_input(fields: Mapping[str, Raw], *, has_previous: bool) -> list[Any]:
    """The input's items, decoded; a text is one message."""
    raw = fields.get("input")
    if raw is None:
        if "messages" in fields:
            text = "Unsupported parameter: 'messages'. Use 'input' in this API."
            raise UnsupportedFeature(text, param="messages")
        if has_previous:
            return []
        raise missing_error("input")
    value = decode_value(raw)
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"type": "message", "role": "user", "content": content}]
    if not isinstance(value, list):
        raise invalid_type_error("input", "one of a string or array of objects", value)
    if not value and not has_previous:
        raise empty_value_error("input", value)
    if len(value) > _MAX_ITEMS:
        raise too_long_error("input", _MAX_ITEMS, value)
    return value


def _find_history(name: str | None, references: References) -> Sequence[Item]:
    if name is None:
        return ()
    if references.history is None:
        text = f"Previous response with id '{name[:128]}' not found."
        if not references.enabled:
            text += " This gateway stores no responses."
        raise StoredObjectNotFound(text, id=name, param="previous_response_id")
    return references.history


def _find_item(name: str, references: References) -> Item:
    item = references.items.get(name)
    if item is None:
        text = f"Item with id '{name[:128]}' not found."
        raise StoredObjectNotFound(text, id=name, param="input")
    return item


def _read_tools(
    fields: Mapping[str, Raw], items: Sequence[Any], *, allows_hosted: bool
) -> ToolCatalog:
    """The tools of the request, and those that its items add."""
    catalog = ToolCatalog(allows_hosted=allows_hosted)
    if "tools" in fields:
        catalog.read_tools(fields["tools"], "tools")
    for item in items:
        if isinstance(item, dict) and item.get("type") in (
            "additional_tools",
            "tool_search_output",
        ):
            added = item.get("tools")
            if isinstance(added, list):
                catalog.read_tools(Raw(_encode(added)), "input.tools", replaces=True)
    return catalog


# --- objects --------------------------------------------------------------------------------------


def _check_stream_options(fields: Mapping[str, Raw], *, stream: bool) -> None:
    raw = fields.get("stream_options")
    if raw is None:
        return
    if not stream:
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise conflict_error("stream_options", text)
    as_optional_bool(as_object(raw, "stream_options"), "include_obfuscation", "stream_options")


def _read_include(fields: Mapping[str, Raw]) -> frozenset[str]:
    raw = fields.get("include")
    if raw is None:
        return frozenset()
    value = decode_value(raw)
    if not isinstance(value, list):
        raise invalid_type_error("include", "an array of strings", value)
    for i, name in enumerate(value):
        if name not in INCLUDES:
            raise invalid_value_error(f"include[{i}]", name, INCLUDES)
    return frozenset(value)


def _read_choice(
    fields: Mapping[str, Raw], name: str, at: str, allowed: tuple[str, ...]
) -> str | None:
    value = as_optional_text(fields, name, at)
    if value is not None and value not in allowed:
        raise invalid_value_error(f"{at}.{name}", value, allowed)
    return value


_REASONING_KEYS: Final = dict.fromkeys(("effort", "summary", "generate_summary", "context", "mode"))
_TEXT_KEYS: Final = dict.fromkeys(("verbosity", "format"))
_FORMAT_KEYS: Final = dict.fromkeys(("type", "name", "description", "schema", "strict"))


def _read_reasoning(values: ParsedParams, fields: Mapping[str, Raw], extra: dict[str, Raw]) -> bool:
    """Read ``reasoning``; returns whether the client wants summaries."""
    raw = fields.get("reasoning")
    if raw is None:
        return False
    options = as_object(raw, "reasoning")
    effort = _read_choice(options, "effort", "reasoning", REASONING_EFFORTS)
    if effort is not None:
        values["reasoning.effort"] = effort
    summaries = [
        _read_choice(options, name, "reasoning", REASONING_SUMMARIES)
        for name in ("summary", "generate_summary")
    ]
    for name, default in (("context", "auto"), ("mode", "standard")):
        value = null_to_none(options.get(name))
        if value is not None and decode_value(value) != default:
            extra[f"reasoning.{name}"] = value
    add_unknown_keys(extra, options, "reasoning", _REASONING_KEYS)
    return any(summaries)


def _read_text_options(fields: Mapping[str, Raw], extra: dict[str, Raw]) -> OutputFormat | None:
    raw = fields.get("text")
    if raw is None:
        return None
    options = as_object(raw, "text")
    verbosity = _read_choice(options, "verbosity", "text", ("low", "medium", "high"))
    if verbosity not in (None, "medium"):
        extra["text.verbosity"] = options["verbosity"]
    add_unknown_keys(extra, options, "text", _TEXT_KEYS)
    form = null_to_none(options.get("format"))
    if form is None:
        return None
    fields_of_format = as_object(form, "text.format")
    add_unknown_keys(extra, fields_of_format, "text.format", _FORMAT_KEYS)
    return _read_output_format(fields_of_format)


def _read_output_format(form: Mapping[str, Raw]) -> OutputFormat | None:
    at = "text.format"
    kind = as_text(form, "type", at)
    match kind:
        case "text":
            return None
        case "json_object":
            return JsonObjectFormat()
        case "json_schema":
            name = as_text(form, "name", at)
            if not FORMAT_NAME.fullmatch(name):
                text = f"Invalid '{at}.name': string does not match '^[a-zA-Z0-9_-]{{1,64}}$'."
                error = conflict_error(f"{at}.name", text)
                error.problem = "value"
                raise error
            schema = null_to_none(form.get("schema"))
            if schema is None:
                raise missing_error(f"{at}.schema")
            as_object(schema, f"{at}.schema")
            description = as_optional_text(form, "description", at)
            return JsonSchemaFormat(schema, name, description, as_optional_bool(form, "strict", at))
        case _:
            kinds = ("json_object", "json_schema", "text")
            raise invalid_value_error(f"{at}.type", kind, kinds)


def _read_labels(values: ParsedParams, fields: Mapping[str, Raw]) -> dict[str, str]:
    """The client's own data: for routing and logs, and for workers that take it."""
    labels = values.get_section("labels")
    if "metadata" in fields:
        labels |= read_metadata(fields["metadata"])
    if "client_metadata" in fields:  # of Codex
        own = as_object(fields["client_metadata"], "client_metadata")
        for name, raw in list(own.items())[:_MAX_CLIENT_METADATA]:
            value = decode_value(raw)
            if isinstance(value, str):
                labels[f"client_metadata.{name}"] = value
    return labels


def _collect_extra(
    values: ParsedParams, fields: Mapping[str, Raw], extra: dict[str, Raw], unknown: str
) -> None:
    """Add the fields that only workers of this API can use."""
    if values.get("request.service_tier") not in (None, "auto", "default"):
        extra["service_tier"] = fields["service_tier"]
    if "max_tool_calls" in fields:
        extra["max_tool_calls"] = fields["max_tool_calls"]
    known = RESPONSES_PARAMS.by_wire
    for name, raw in fields.items():
        if name not in known and name not in _OBJECT_FIELDS:
            if unknown == "reject":
                text = f"Unknown parameter: '{name[:64]}'."
                raise UnknownParameter(text, param=name[:64])
            if unknown == "forward":
                extra[name] = raw
