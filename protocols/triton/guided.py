"""What shapes the output, in the words of the model families that have it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core.types import Choice, Grammar, JsonObject, JsonSchema, OutputFormat, Regex
from protocols.triton import document, faults

_OBJECTS: Final = ("structured_outputs", "guided_decoding")
"""Parameters whose value is the JSON text of an object with one kind of guide."""
_KIND: Final = "guided_decoding_guide_type"
_GUIDE: Final = "guided_decoding_guide"
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "object": _OBJECTS,
    "pair": (_KIND, _GUIDE),
}
"""The names that are read here, by ``Profile.guide``."""


def read(said: Mapping[str, Raw], guide: str) -> OutputFormat | None:
    """The format asked for. Raises InvalidParameter."""
    sent = {name: document.value(said[name]) for name in NAMES[guide] if name in said}
    if guide == "pair":
        return _from_pair(sent[_KIND], sent.get(_GUIDE)) if _KIND in sent else None
    for name, text in sent.items():
        return _from_object(name, str(text))
    return None


def _from_object(name: str, text: str) -> OutputFormat:
    try:
        guide = msgspec.json.decode(text, type=dict[str, Raw])
        for kind, raw in guide.items():
            what = msgspec.json.decode(raw)
            if what is not None and what is not False:
                return _guide(kind, what)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        pass
    raise faults.refused_by_model(name, f"'{name}' must be the JSON text of an object with a guide")


def _from_pair(kind: str, text: str | None) -> OutputFormat:
    try:
        if kind == "json":
            return JsonObject()
        if text is not None:
            return _guide({"json_schema": "json", "ebnf_grammar": "grammar"}.get(kind, kind), text)
    except (msgspec.DecodeError, TypeError):
        pass
    raise faults.refused_by_model(_KIND, f"'{_KIND}' and '{_GUIDE}' do not make a guide")


def _guide(kind: str, what: Any) -> OutputFormat:
    match kind, what:
        case "json_object", True:
            return JsonObject()
        case "json", str():
            msgspec.json.decode(what, type=dict[str, Raw])
            return JsonSchema(Raw(what))
        case "json", dict():
            return JsonSchema(Raw(msgspec.json.encode(what)))
        case "regex", str():
            return Regex(what)
        case "grammar", str():
            return Grammar(what)
        case "choice", [str(), *_] if all(isinstance(one, str) for one in what):
            return Choice(tuple(what))
        case _:
            raise TypeError(kind)


# --- towards workers ------------------------------------------------------------------------------


def write(output: OutputFormat, guide: str) -> dict[str, str]:
    """What asks for this format; nothing where the family has no words for it."""
    match guide:
        case "object":
            return {_OBJECTS[0]: msgspec.json.encode(_as_object(output)).decode()}
        case "pair":
            return _as_pair(output)
        case _:
            return {}


def _as_object(output: OutputFormat) -> dict[str, Any]:
    match output:
        case JsonObject():
            return {"json_object": True}
        case JsonSchema(schema):
            return {"json": schema}
        case Regex(pattern):
            return {"regex": pattern}
        case Choice(options):
            return {"choice": options}
        case _:
            return {"grammar": output.text}


def _as_pair(output: OutputFormat) -> dict[str, str]:
    match output:
        case JsonObject():
            return {_KIND: "json"}
        case JsonSchema(schema):
            return {_KIND: "json_schema", _GUIDE: bytes(schema).decode()}
        case Regex(pattern):
            return {_KIND: "regex", _GUIDE: pattern}
        case Grammar(text):
            return {_KIND: "ebnf_grammar", _GUIDE: text}
        case _:
            return {}
