"""Requests' fields that are no scalars, as JSON Schema: what their readers take.

Rules between fields and between messages (a tool's message answers a call) have no place here: a
request that breaks one is refused.
"""

from collections.abc import Mapping

from protocols.openai.messages import Rules
from protocols.schema import (
    FLAG,
    NONEMPTY,
    NULL,
    NUMBER,
    TEXT,
    Schema,
    array,
    mapping,
    one_of,
    optional,
    record,
)

_ANY: Schema = {"type": "object"}
_TOKEN: Schema = {"type": "integer", "minimum": 0}

PROMPT: Schema = {
    "anyOf": [
        TEXT,
        array(_TOKEN, minItems=1),
        array(TEXT, minItems=1),
        array(array(_TOKEN, minItems=1), minItems=1),
    ]
}


def inputs(most: int) -> Schema:
    """What is to be embedded; ``most`` is how many there may be, and how many tokens in each."""
    tokens = array(_TOKEN, minItems=1, maxItems=most)
    several = [array(one, minItems=1, maxItems=most) for one in (NONEMPTY, tokens)]
    return {"anyOf": [NONEMPTY, tokens, *several]}


# --- conversations --------------------------------------------------------------------------------


def _part(kind: str, inner: Schema) -> Schema:
    return record({"type": {"const": kind}, kind: inner}, "type", kind)


def _record(required: Mapping[str, Schema], **others: Schema) -> Schema:
    return record({**required, **others}, *required)


_IMAGE = _record({"url": TEXT}, detail=optional(one_of("auto", "low", "high")))
_FILE: Schema = {
    **_record({}, file_id=optional(TEXT), file_data=optional(TEXT), filename=optional(TEXT)),
    "anyOf": [_record({"file_id": TEXT}), _record({"file_data": TEXT})],
}
_THOUGHT = _record({"text": TEXT}, signature=optional(TEXT))

PARTS: Mapping[str, Schema] = {
    "text": _part("text", TEXT),
    "image_url": _part("image_url", _IMAGE),
    "input_audio": _part("input_audio", _record({"data": TEXT, "format": TEXT})),
    "file": _part("file", _FILE),
    "audio_url": _part("audio_url", _record({"url": TEXT})),
    "video_url": _part("video_url", _record({"url": TEXT})),
    "refusal": _part("refusal", TEXT),
    "reasoning": _record({"type": {"const": "reasoning"}, "summary": array(_THOUGHT)}),
}


def messages(rules: Rules) -> Schema:
    """A conversation read after these rules."""
    return array({"anyOf": [_message(role, rules) for role in rules.roles]}, minItems=1)


def _message(role: str, rules: Rules) -> Schema:
    shared = {"role": {"const": role}, "name": optional(TEXT)}
    match role:
        case "assistant":
            return _assistant(shared, rules)
        case "tool":
            return _record({**shared, "content": _content("text"), "tool_call_id": TEXT})
        case "function":
            return _record({"role": shared["role"], "name": TEXT, "content": optional(TEXT)})
        case "user":
            content = _content(*rules.user_parts)
        case _:
            content = _content("text")
    return _record({"role": shared["role"], "content": content}, name=shared["name"])


def _content(*kinds: str) -> Schema:
    return {"anyOf": [TEXT, array({"anyOf": [PARTS[kind] for kind in kinds]}, minItems=1)]}


def _assistant(shared: Mapping[str, Schema], rules: Rules) -> Schema:
    content = _content(*rules.assistant_parts)
    calls = array({"anyOf": [_call("function", "arguments", rules), _call("custom", "input")]})
    properties = {
        **shared,
        "content": optional(content),
        "refusal": optional(TEXT),
        "reasoning_content": optional(TEXT),
        "reasoning": optional(TEXT),
        "tool_calls": optional(calls),
        "function_call": optional(_record({"name": TEXT, "arguments": TEXT})),
        "audio": NULL,
    }
    said: list[Schema] = [
        _record({"content": content}),
        _record({"refusal": NONEMPTY}),
        _record({"tool_calls": {**calls, "minItems": 1}}),
        _record({"function_call": _ANY}),
    ]
    return {**record(properties, "role"), "anyOf": said}


def _call(kind: str, text: str, rules: Rules | None = None) -> Schema:
    said: Schema = {"anyOf": [TEXT, _ANY]} if rules and rules.accepts_argument_objects else TEXT
    called = _record({"name": TEXT, text: said})
    return _record({"id": TEXT, "type": {"const": kind}, kind: called})


# --- what binds the answer ------------------------------------------------------------------------

_FUNCTION = _record(
    {"name": NONEMPTY},
    description=optional(TEXT),
    parameters=optional(_ANY),
    strict=optional(FLAG),
)
_CUSTOM = _record({"name": NONEMPTY}, description=optional(TEXT), format=optional(_ANY))
_NAMED = _record({"name": TEXT})
_CHOICES: list[Schema] = [_part(kind, _NAMED) for kind in ("function", "custom")]
_ALLOWED = _record({"mode": one_of("auto", "required"), "tools": array({"anyOf": _CHOICES})})
_SCHEMA = _record(
    {"name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}},
    description=optional(TEXT),
    schema=optional(_ANY),
    strict=optional(FLAG),
)


def tools(most: int, *kinds: str) -> Schema:
    """The tools offered."""
    bodies = {"function": _FUNCTION, "custom": _CUSTOM}
    offered: list[Schema] = [_part(kind, bodies[kind]) for kind in kinds]
    return optional(array({"anyOf": offered}, minItems=1, maxItems=most))


TOOL_CHOICE: Schema = optional(
    {"anyOf": [one_of("none", "auto", "required"), *_CHOICES, _part("allowed_tools", _ALLOWED)]}
)
FUNCTIONS: Schema = optional(array(_FUNCTION, minItems=1, maxItems=128))
FUNCTION_CALL: Schema = optional({"anyOf": [one_of("none", "auto"), _NAMED]})
RESPONSE_FORMAT: Schema = optional(
    {
        "anyOf": [
            _record({"type": one_of("text", "json_object")}),
            _part("json_schema", _SCHEMA),
        ]
    }
)
_GUIDE: Mapping[str, Schema] = {
    "json": {"type": ["object", "string"]},
    "regex": TEXT,
    "choice": array(TEXT, minItems=1),
    "grammar": TEXT,
}
GUIDES: Mapping[str, Schema] = {
    "structured_outputs": optional(
        record(
            {**{name: optional(one) for name, one in _GUIDE.items()}, "json_object": optional(FLAG)}
        )
    ),
    **{f"guided_{name}": optional(one) for name, one in _GUIDE.items()},
}

# --- what comes beside ----------------------------------------------------------------------------

LOGIT_BIAS: Schema = optional(
    mapping({**NUMBER, "minimum": -100, "maximum": 100}, propertyNames={"pattern": "^[0-9]{1,10}$"})
)
STREAM_OPTIONS: Schema = optional(
    record(
        {
            name: optional(FLAG)
            for name in ("include_usage", "continuous_usage_stats", "include_obfuscation")
        }
    )
)
MODALITIES: Schema = optional(array({"const": "text"}))
TEMPLATE_ARGUMENTS: Schema = optional(_ANY)


def metadata(items: int, key: int, longest: int) -> Schema:
    """Labels: how many there may be, and how long a name and a text."""
    text = {"type": "string", "maxLength": longest}
    return optional(mapping(text, maxProperties=items, propertyNames={"maxLength": key}))
