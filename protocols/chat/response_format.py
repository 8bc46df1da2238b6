"""Structured outputs of vLLM: formats that ``response_format`` lacks."""

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from protocols.chat.params import (
    as_object,
    as_optional_bool,
    conflict_error,
    invalid_type_error,
    null_to_none,
)
from protocols.core.errors import MalformedRequest
from protocols.core.request import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutputFormat,
    RegexFormat,
)
from protocols.json_body import decode_value


def read_structured_outputs(fields: Mapping[str, Raw]) -> OutputFormat | None:
    """Read ``structured_outputs``, or one of the older ``guided_`` fields."""
    raw = null_to_none(fields.get("structured_outputs"))
    if raw is None:
        old = {
            kind: fields[f"guided_{kind}"] for kind in _GUIDE_KINDS if f"guided_{kind}" in fields
        }
        return _read_guide(old, "guided_") if old else None
    return _read_guide(as_object(raw, "structured_outputs"), "structured_outputs.")


_GUIDE_KINDS = ("json", "regex", "choice", "grammar")


def _read_guide(fields: Mapping[str, Raw], at: str) -> OutputFormat | None:
    requested = [kind for kind in _GUIDE_KINDS if null_to_none(fields.get(kind)) is not None]
    if len(requested) > 1:
        raise conflict_error(
            at.rstrip("._"), "Only one kind of structured output can be asked for."
        )
    if not requested:
        return JsonObjectFormat() if as_optional_bool(fields, "json_object", at[:-1]) else None
    kind = requested[0]
    value = decode_value(fields[kind])
    match kind, value:
        case "json", str():
            return JsonSchemaFormat(_parse_schema_text(value, at + kind))
        case "json", dict():
            return JsonSchemaFormat(fields[kind])
        case "regex", str():
            return RegexFormat(value)
        case "grammar", str():
            return GrammarFormat(value)
        case "choice", [_, *_] if all(isinstance(option, str) for option in value):
            return ChoiceFormat(tuple(value))
        case _:
            raise invalid_type_error(at + kind, _GUIDE_TYPES[kind], value)


def _parse_schema_text(text: str, at: str) -> Raw:
    """A schema sent as text, which must be a JSON object."""
    schema = text.encode()
    try:
        as_object(schema, at)
    except MalformedRequest:
        raise invalid_type_error(at, "a JSON Schema", text) from None
    return Raw(schema)


_GUIDE_TYPES = {
    "json": "one of a string or object",
    "regex": "a string",
    "choice": "an array of strings",
    "grammar": "a string",
}


def write_json_object_format(output: OutputFormat | None) -> dict[str, Any] | None:
    """``response_format`` of a worker that knows no schemas; None if that can't express it."""
    return {"type": "json_object"} if isinstance(output, JsonObjectFormat) else None


def write_structured_outputs(output: OutputFormat | None) -> dict[str, Any] | None:
    """``structured_outputs`` for a format that ``response_format`` lacks."""
    match output:
        case RegexFormat(pattern):
            return {"regex": pattern}
        case ChoiceFormat(options):
            return {"choice": list(options)}
        case GrammarFormat(text):
            return {"grammar": text}
        case _:
            return None
