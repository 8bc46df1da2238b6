"""What shapes the output, in the words of the model families that have it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocols.core.request import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutputFormat,
    RegexFormat,
)
from protocols.triton import document, faults

_GUIDE_OBJECT_PARAMS: Final = ("structured_outputs", "guided_decoding")
"""Parameters whose value is the JSON text of an object with one kind of guide."""
_GUIDE_TYPE: Final = "guided_decoding_guide_type"
_GUIDE_TEXT: Final = "guided_decoding_guide"
GUIDE_PARAM_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "object": _GUIDE_OBJECT_PARAMS,
    "pair": (_GUIDE_TYPE, _GUIDE_TEXT),
}
"""The names that are read here, by ``Profile.guide``."""


def read_output_format(said: Mapping[str, Raw], guide: str) -> OutputFormat | None:
    """The format asked for. Raises InvalidParameter."""
    sent = {
        name: document.parse_value(said[name]) for name in GUIDE_PARAM_NAMES[guide] if name in said
    }
    if guide == "pair":
        return (
            _parse_guide_pair(sent[_GUIDE_TYPE], sent.get(_GUIDE_TEXT))
            if _GUIDE_TYPE in sent
            else None
        )
    for name, text in sent.items():
        return _parse_guide_object(name, str(text))
    return None


def _parse_guide_object(name: str, text: str) -> OutputFormat:
    try:
        guide = msgspec.json.decode(text, type=dict[str, Raw])
        for kind, raw in guide.items():
            what = msgspec.json.decode(raw)
            if what is not None and what is not False:
                return _build_output_format(kind, what)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        pass
    raise faults.build_model_error(
        name, f"'{name}' must be the JSON text of an object with a guide"
    )


def _parse_guide_pair(kind: str, text: str | None) -> OutputFormat:
    try:
        if kind == "json":
            return JsonObjectFormat()
        if text is not None:
            return _build_output_format(
                {"json_schema": "json", "ebnf_grammar": "grammar"}.get(kind, kind), text
            )
    except (msgspec.DecodeError, TypeError):
        pass
    raise faults.build_model_error(
        _GUIDE_TYPE, f"'{_GUIDE_TYPE}' and '{_GUIDE_TEXT}' do not make a guide"
    )


def _build_output_format(kind: str, what: Any) -> OutputFormat:
    match kind, what:
        case "json_object", True:
            return JsonObjectFormat()
        case "json", str():
            msgspec.json.decode(what, type=dict[str, Raw])
            return JsonSchemaFormat(Raw(what))
        case "json", dict():
            return JsonSchemaFormat(Raw(msgspec.json.encode(what)))
        case "regex", str():
            return RegexFormat(what)
        case "grammar", str():
            return GrammarFormat(what)
        case "choice", [str(), *_] if all(isinstance(one, str) for one in what):
            return ChoiceFormat(tuple(what))
        case _:
            raise TypeError(kind)


# --- towards workers ------------------------------------------------------------------------------


def write_output_format(output: OutputFormat, guide: str) -> dict[str, str]:
    """What asks for this format; nothing where the family has no words for it."""
    match guide:
        case "object":
            return {
                _GUIDE_OBJECT_PARAMS[0]: msgspec.json.encode(_build_guide_object(output)).decode()
            }
        case "pair":
            return _build_guide_pair(output)
        case _:
            return {}


def _build_guide_object(output: OutputFormat) -> dict[str, Any]:
    match output:
        case JsonObjectFormat():
            return {"json_object": True}
        case JsonSchemaFormat(schema):
            return {"json": schema}
        case RegexFormat(pattern):
            return {"regex": pattern}
        case ChoiceFormat(options):
            return {"choice": options}
        case _:
            return {"grammar": output.text}


def _build_guide_pair(output: OutputFormat) -> dict[str, str]:
    match output:
        case JsonObjectFormat():
            return {_GUIDE_TYPE: "json"}
        case JsonSchemaFormat(schema):
            return {_GUIDE_TYPE: "json_schema", _GUIDE_TEXT: bytes(schema).decode()}
        case RegexFormat(pattern):
            return {_GUIDE_TYPE: "regex", _GUIDE_TEXT: pattern}
        case GrammarFormat(text):
            return {_GUIDE_TYPE: "ebnf_grammar", _GUIDE_TEXT: text}
        case _:
            return {}
