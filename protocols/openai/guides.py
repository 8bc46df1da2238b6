"""vLLM's structured outputs: what ``response_format`` can't say."""

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from gateway.core.errors import Malformed
from gateway.core.types import Choice, Grammar, JsonObject, JsonSchema, OutputFormat, Regex
from protocols.body import value
from protocols.openai.reading import as_object, as_optional_bool, conflict, given, wrong_type


def read_structured_outputs(fields: Mapping[str, Raw]) -> OutputFormat | None:
    """``structured_outputs``, or one of the ``guided_`` fields that came before it."""
    raw = given(fields.get("structured_outputs"))
    if raw is None:
        old = {kind: fields[f"guided_{kind}"] for kind in _GUIDES if f"guided_{kind}" in fields}
        return _guide(old, "guided_") if old else None
    return _guide(as_object(raw, "structured_outputs"), "structured_outputs.")


_GUIDES = ("json", "regex", "choice", "grammar")


def _guide(fields: Mapping[str, Raw], at: str) -> OutputFormat | None:
    asked = [kind for kind in _GUIDES if given(fields.get(kind)) is not None]
    if len(asked) > 1:
        raise conflict(at.rstrip("._"), "Only one kind of structured output can be asked for.")
    if not asked:
        return JsonObject() if as_optional_bool(fields, "json_object", at[:-1]) else None
    kind = asked[0]
    got = value(fields[kind])
    match kind, got:
        case "json", str():
            return JsonSchema(_schema(got, at + kind))
        case "json", dict():
            return JsonSchema(fields[kind])
        case "regex", str():
            return Regex(got)
        case "grammar", str():
            return Grammar(got)
        case "choice", [_, *_] if all(isinstance(option, str) for option in got):
            return Choice(tuple(got))
        case _:
            raise wrong_type(at + kind, _GUIDE_TYPES[kind], got)


def _schema(text: str, at: str) -> Raw:
    """A schema that was sent as text, which must be an object's JSON."""
    raw = Raw(text.encode())
    try:
        as_object(raw, at)
    except Malformed:
        raise wrong_type(at, "a JSON Schema", text) from None
    return raw


_GUIDE_TYPES = {
    "json": "one of a string or object",
    "regex": "a string",
    "choice": "an array of strings",
    "grammar": "a string",
}


def write_structured_outputs(output: OutputFormat | None) -> dict[str, Any] | None:
    """``structured_outputs``, for what ``response_format`` can't say."""
    match output:
        case Regex(pattern):
            return {"regex": pattern}
        case Choice(options):
            return {"choice": list(options)}
        case Grammar(text):
            return {"grammar": text}
        case _:
            return None
