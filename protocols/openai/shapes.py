"""Requests' fields that are no scalars, as JSON Schema: what their readers take.

Rules between fields and between messages (a tool's message answers a call) have no place here: a
request that breaks one is refused.
"""

from collections.abc import Mapping

from protocols.openai.messages import MessageRules
from protocols.schema import (
    BOOLEAN,
    NONEMPTY_STRING,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array_of,
    enum_of,
    map_of,
    nullable,
    object_of,
)

_ANY_OBJECT: Schema = {"type": "object"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}

PROMPT_SCHEMA: Schema = {
    "anyOf": [
        STRING,
        array_of(_TOKEN_ID, minItems=1),
        array_of(STRING, minItems=1),
        array_of(array_of(_TOKEN_ID, minItems=1), minItems=1),
    ]
}


def build_inputs(most: int) -> Schema:
    """What is to be embedded; ``most`` is how many there may be, and how many tokens in each."""
    tokens = array_of(_TOKEN_ID, minItems=1, maxItems=most)
    several = [array_of(one, minItems=1, maxItems=most) for one in (NONEMPTY_STRING, tokens)]
    return {"anyOf": [NONEMPTY_STRING, tokens, *several]}


# --- conversations --------------------------------------------------------------------------------


def _build_part(kind: str, inner: Schema) -> Schema:
    return object_of({"type": {"const": kind}, kind: inner}, "type", kind)


def _build_object(required: Mapping[str, Schema], **others: Schema) -> Schema:
    return object_of({**required, **others}, *required)


_IMAGE_URL = _build_object({"url": STRING}, detail=nullable(enum_of("auto", "low", "high")))
_FILE_OBJECT: Schema = {
    **_build_object(
        {}, file_id=nullable(STRING), file_data=nullable(STRING), filename=nullable(STRING)
    ),
    "anyOf": [_build_object({"file_id": STRING}), _build_object({"file_data": STRING})],
}
_REASONING_ITEM = _build_object({"text": STRING}, signature=nullable(STRING))

PART_SCHEMAS: Mapping[str, Schema] = {
    "text": _build_part("text", STRING),
    "image_url": _build_part("image_url", _IMAGE_URL),
    "input_audio": _build_part("input_audio", _build_object({"data": STRING, "format": STRING})),
    "file": _build_part("file", _FILE_OBJECT),
    "audio_url": _build_part("audio_url", _build_object({"url": STRING})),
    "video_url": _build_part("video_url", _build_object({"url": STRING})),
    "refusal": _build_part("refusal", STRING),
    "reasoning": _build_object(
        {"type": {"const": "reasoning"}, "summary": array_of(_REASONING_ITEM)}
    ),
}


def build_messages(rules: MessageRules) -> Schema:
    """A conversation read after these rules."""
    return array_of({"anyOf": [_build_message(role, rules) for role in rules.roles]}, minItems=1)


def _build_message(role: str, rules: MessageRules) -> Schema:
    shared = {"role": {"const": role}, "name": nullable(STRING)}
    match role:
        case "assistant":
            return _build_assistant_message(shared, rules)
        case "tool":
            return _build_object(
                {**shared, "content": _build_content("text"), "tool_call_id": STRING}
            )
        case "function":
            return _build_object(
                {"role": shared["role"], "name": STRING, "content": nullable(STRING)}
            )
        case "user":
            content = _build_content(*rules.user_parts)
        case _:
            content = _build_content("text")
    return _build_object({"role": shared["role"], "content": content}, name=shared["name"])


def _build_content(*kinds: str) -> Schema:
    return {
        "anyOf": [STRING, array_of({"anyOf": [PART_SCHEMAS[kind] for kind in kinds]}, minItems=1)]
    }


def _build_assistant_message(shared: Mapping[str, Schema], rules: MessageRules) -> Schema:
    content = _build_content(*rules.assistant_parts)
    calls = array_of(
        {
            "anyOf": [
                _build_tool_call("function", "arguments", rules),
                _build_tool_call("custom", "input"),
            ]
        }
    )
    properties = {
        **shared,
        "content": nullable(content),
        "refusal": nullable(STRING),
        "reasoning_content": nullable(STRING),
        "reasoning": nullable(STRING),
        "tool_calls": nullable(calls),
        "function_call": nullable(_build_object({"name": STRING, "arguments": STRING})),
        "audio": NULL,
    }
    said: list[Schema] = [
        _build_object({"content": content}),
        _build_object({"refusal": NONEMPTY_STRING}),
        _build_object({"tool_calls": {**calls, "minItems": 1}}),
        _build_object({"function_call": _ANY_OBJECT}),
    ]
    return {**object_of(properties, "role"), "anyOf": said}


def _build_tool_call(kind: str, text: str, rules: MessageRules | None = None) -> Schema:
    said: Schema = (
        {"anyOf": [STRING, _ANY_OBJECT]} if rules and rules.accepts_argument_objects else STRING
    )
    called = _build_object({"name": STRING, text: said})
    return _build_object({"id": STRING, "type": {"const": kind}, kind: called})


# --- what binds the answer ------------------------------------------------------------------------

_FUNCTION_TOOL = _build_object(
    {"name": NONEMPTY_STRING},
    description=nullable(STRING),
    parameters=nullable(_ANY_OBJECT),
    strict=nullable(BOOLEAN),
)
_CUSTOM_TOOL = _build_object(
    {"name": NONEMPTY_STRING}, description=nullable(STRING), format=nullable(_ANY_OBJECT)
)
_NAMED_TOOL = _build_object({"name": STRING})
_TOOL_CHOICES: list[Schema] = [_build_part(kind, _NAMED_TOOL) for kind in ("function", "custom")]
_ALLOWED_TOOLS = _build_object(
    {"mode": enum_of("auto", "required"), "tools": array_of({"anyOf": _TOOL_CHOICES})}
)
_JSON_SCHEMA = _build_object(
    {"name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}},
    description=nullable(STRING),
    schema=nullable(_ANY_OBJECT),
    strict=nullable(BOOLEAN),
)


def build_tools(most: int, *kinds: str) -> Schema:
    """The tools offered."""
    bodies = {"function": _FUNCTION_TOOL, "custom": _CUSTOM_TOOL}
    offered: list[Schema] = [_build_part(kind, bodies[kind]) for kind in kinds]
    return nullable(array_of({"anyOf": offered}, minItems=1, maxItems=most))


TOOL_CHOICE: Schema = nullable(
    {
        "anyOf": [
            enum_of("none", "auto", "required"),
            *_TOOL_CHOICES,
            _build_part("allowed_tools", _ALLOWED_TOOLS),
        ]
    }
)
FUNCTIONS: Schema = nullable(array_of(_FUNCTION_TOOL, minItems=1, maxItems=128))
FUNCTION_CALL: Schema = nullable({"anyOf": [enum_of("none", "auto"), _NAMED_TOOL]})
RESPONSE_FORMAT: Schema = nullable(
    {
        "anyOf": [
            _build_object({"type": enum_of("text", "json_object")}),
            _build_part("json_schema", _JSON_SCHEMA),
        ]
    }
)
_STRUCTURED_OUTPUT_SCHEMAS: Mapping[str, Schema] = {
    "json": {"type": ["object", "string"]},
    "regex": STRING,
    "choice": array_of(STRING, minItems=1),
    "grammar": STRING,
}
STRUCTURED_OUTPUT_PROPERTIES: Mapping[str, Schema] = {
    "structured_outputs": nullable(
        object_of(
            {
                **{name: nullable(one) for name, one in _STRUCTURED_OUTPUT_SCHEMAS.items()},
                "json_object": nullable(BOOLEAN),
            }
        )
    ),
    **{f"guided_{name}": nullable(one) for name, one in _STRUCTURED_OUTPUT_SCHEMAS.items()},
}

# --- what comes beside ----------------------------------------------------------------------------

LOGIT_BIAS: Schema = nullable(
    map_of({**NUMBER, "minimum": -100, "maximum": 100}, propertyNames={"pattern": "^[0-9]{1,10}$"})
)
STREAM_OPTIONS: Schema = nullable(
    object_of(
        {
            name: nullable(BOOLEAN)
            for name in ("include_usage", "continuous_usage_stats", "include_obfuscation")
        }
    )
)
MODALITIES: Schema = nullable(array_of({"const": "text"}))
TEMPLATE_ARGUMENTS: Schema = nullable(_ANY_OBJECT)


def build_metadata(items: int, key: int, longest: int) -> Schema:
    """Labels: how many there may be, and how long a name and a text."""
    text = {"type": "string", "maxLength": longest}
    return nullable(map_of(text, maxProperties=items, propertyNames={"maxLength": key}))
