"""Output formats, by the parameters of each model family."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocols.core.json_text import decode_json
from protocols.core.request import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutputFormat,
    RegexFormat,
)
from protocols.json_body import JSON_ERRORS
from protocols.triton import errors
from protocols.triton.params import GUIDE_OBJECT_PARAMS, GUIDE_PARAM_NAMES, GUIDE_TEXT, GUIDE_TYPE


def read_output_format(parameters: Mapping[str, Any], guide: str) -> OutputFormat | None:
    """Read the output format. Raises InvalidParameter."""
    values = {name: parameters[name] for name in GUIDE_PARAM_NAMES[guide] if name in parameters}
    if guide == "pair" and GUIDE_TYPE in values:
        return _parse_guide_pair(values[GUIDE_TYPE], values.get(GUIDE_TEXT))
    for name in GUIDE_OBJECT_PARAMS:
        if name in values:
            return _parse_guide_object(name, str(values[name]))
    return None


def _parse_guide_object(name: str, text: str) -> OutputFormat:
    try:
        guide = decode_json(text, kind=dict[str, Raw])
        for kind, raw in guide.items():
            value = decode_json(raw)
            if value is not None and value is not False:
                return _build_output_format(kind, value)
    except (*JSON_ERRORS, TypeError):
        pass
    raise errors.build_model_error(
        name, f"'{name}' must be the JSON text of an object with a guide"
    )


def _parse_guide_pair(kind: str, text: str | None) -> OutputFormat:
    try:
        if kind == "json":
            return JsonObjectFormat()
        if text is not None:
            guide = {"json_schema": "json", "ebnf_grammar": "grammar"}.get(kind, kind)
            return _build_output_format(guide, text)
    except (msgspec.DecodeError, TypeError):
        pass
    raise errors.build_model_error(
        GUIDE_TYPE, f"'{GUIDE_TYPE}' and '{GUIDE_TEXT}' do not make a guide"
    )


def _build_output_format(kind: str, value: Any) -> OutputFormat:
    match kind, value:
        case "json_object", True:
            return JsonObjectFormat()
        case "json", str():
            decode_json(value, kind=dict[str, Raw])
            return JsonSchemaFormat(Raw(value))
        case "json", dict():
            return JsonSchemaFormat(Raw(msgspec.json.encode(value)))
        case "regex", str():
            return RegexFormat(value)
        case "grammar", str():
            return GrammarFormat(value)
        case "choice", [str(), *_] if all(isinstance(option, str) for option in value):
            return ChoiceFormat(tuple(value))
        case _:
            raise TypeError(kind)


_PAIR_TYPES: Final[Mapping[str, str]] = {
    "json_object": "json",
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf_grammar",
}
"""The guide types of ``pair``, by the names of ``object``."""


def write_output_format(output: OutputFormat, guide: str) -> dict[str, str]:
    """Return the parameters for this format; empty if the family supports none."""
    kind, value = _get_guide(output)
    if guide == "object":
        return {GUIDE_OBJECT_PARAMS[0]: msgspec.json.encode({kind: value}).decode()}
    if guide == "none" or kind not in _PAIR_TYPES:
        return {}
    text = {} if value is True else {GUIDE_TEXT: value}
    if isinstance(value, Raw):
        text = {GUIDE_TEXT: bytes(value).decode()}
    return {GUIDE_TYPE: _PAIR_TYPES[kind], **text}


def _get_guide(output: OutputFormat) -> tuple[str, Any]:
    match output:
        case JsonObjectFormat():
            return "json_object", True
        case JsonSchemaFormat(schema):
            return "json", schema
        case RegexFormat(pattern):
            return "regex", pattern
        case ChoiceFormat(options):
            return "choice", options
        case _:
            return "grammar", output.text
