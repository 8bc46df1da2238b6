"""What is measured of one recorded request, in whichever protocol it came."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gateway.observability.recording import RecordedChoice, RecordedRequest
from protocols.core.json_text import JsonDecoder

_decode = JsonDecoder().decode

_STOP_FIELDS: Final = ("stop", "stop_sequences", "stop_words", "stop_strings")
_LIMIT_FIELDS: Final = (
    "max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "num_predict",
)  # fmt: skip
_SECTIONS: Final = ("parameters", "options", "generation_config", "text")
"""The fields of a body in which protocols nest parameters."""
_INCLUDES_STOP: Final = "include_stop_str_in_output"
_REFUSAL: Final = re.compile(
    r"\s*(?:i['\u2019]?m (?:very )?sorry|sorry|i apologi[sz]e|unfortunately)?[,.]?\s*(?:but )?"
    r"(?:as an ai\b|i (?:can(?:no|['\u2019])t|am (?:not able|unable)|won['\u2019]t|will not)"
    r"(?: be able)? (?:to )?(?:help|assist|provide|comply|do that|answer|fulfil|create|write))",
    re.IGNORECASE,
)
"""The beginning of a text that declines, in English."""
_CLIENT_ERROR: Final = range(400, 500)
_MAX_SCHEMA_DEPTH: Final = 32


class Observation(Struct):
    """One request and its response. None: the measure does not apply."""

    recorded: RecordedRequest
    text: str
    is_refused: bool
    """The request itself was not accepted."""
    is_failed: bool
    """There is no complete response, for another reason."""
    losses: frozenset[str]
    finish_reasons: tuple[str, ...]
    calls_tools: bool | None
    """Whether the model called one of its tools."""
    has_valid_arguments: bool | None
    """Whether the arguments of all calls fit the tools' schemas."""
    is_json: bool | None
    """Whether the text is JSON, where that was required."""
    ignores_stop: bool | None
    """Whether a stop string is in the text."""
    exceeds_limit: bool | None
    """Whether there are more tokens than the request allows."""
    is_empty: bool | None
    declines: bool | None
    """Whether the text begins as a refusal, or the response is marked as one."""
    completion_tokens: int | None
    duration: float | None
    first_token: float | None

    @property
    def duration_per_token(self) -> float | None:
        """The duration, divided by the tokens of the response."""
        if self.duration is None or not self.completion_tokens:
            return None
        return self.duration / self.completion_tokens

    @property
    def is_answered(self) -> bool:
        """Whether there is a complete response."""
        return not (self.is_refused or self.is_failed)


Pair = tuple[Observation, Observation]
"""Two observations of the same request."""


def observe(recorded: RecordedRequest) -> Observation:
    """Measure a request."""
    choices = recorded.answer.choices if recorded.answer is not None else []
    is_refused = recorded.status in _CLIENT_ERROR
    is_failed = not is_refused and recorded.outcome != "ok"
    is_text = not is_refused and not is_failed and bool(choices)
    text = "\n".join(choice.text for choice in choices)
    calls = [call for choice in choices for call in choice.tool_calls]
    tools = find_tools(recorded.request)
    schemas_known = [call for call in calls if tools.get(call.name) is not None]
    stops = find_stop_strings(recorded.request)
    limit = find_token_limit(recorded.request)
    tokens = recorded.usage.completion_tokens if recorded.usage is not None and is_text else None
    return Observation(
        recorded=recorded,
        text=text,
        is_refused=is_refused,
        is_failed=is_failed,
        losses=frozenset(loss.parameter for loss in recorded.losses),
        finish_reasons=tuple(sorted(choice.finish_reason or "none" for choice in choices))
        if is_text
        else (),
        calls_tools=bool(calls) if is_text and tools else None,
        has_valid_arguments=all(
            fits_schema(call.arguments, tools[call.name]) for call in schemas_known
        )
        if is_text and schemas_known
        else None,
        is_json=all(map(_is_json, choices))
        if is_text and requires_json(recorded.request)
        else None,
        ignores_stop=any(stop in text for stop in stops) if is_text and stops else None,
        exceeds_limit=tokens > limit * len(choices)
        if tokens is not None and limit is not None
        else None,
        is_empty=not (text.strip() or calls) if is_text else None,
        declines=any(choice.refusal or _REFUSAL.match(choice.text) for choice in choices)
        if is_text
        else None,
        completion_tokens=tokens,
        duration=(recorded.timing.duration or None) if is_text else None,
        first_token=recorded.timing.first_token if is_text and recorded.stream else None,
    )


def _is_json(choice: RecordedChoice) -> bool:
    if choice.tool_calls and not choice.text.strip():
        return True
    try:
        _decode(choice.text)
    except ValueError:  # DecodeError is one
        return False
    return True


# Parameters, by the names that they have in the protocols.


def _iter_sections(body: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(body, dict):
        yield body
        for name in _SECTIONS:
            if isinstance(body.get(name), dict):
                yield body[name]


def find_stop_strings(body: Any) -> Sequence[str]:
    """The request's stop strings; none if the response is to contain them."""
    found = list[str]()
    for section in _iter_sections(body):
        if section.get(_INCLUDES_STOP):
            return ()
        for name in _STOP_FIELDS:
            value = section.get(name)
            values = value if isinstance(value, list) else [value]
            found += [one for one in values if isinstance(one, str) and one]
    return found


def find_token_limit(body: Any) -> int | None:
    """The most tokens of each choice."""
    for section in _iter_sections(body):
        for name in _LIMIT_FIELDS:
            value = section.get(name)
            if type(value) is int and value > 0:
                return value
    return None


def requires_json(body: Any) -> bool:
    """Whether the response must be JSON."""
    for section in _iter_sections(body):
        for name in ("response_format", "format", "guided_json", "grammar"):
            value = section.get(name)
            if isinstance(value, dict):
                kind = value.get("type")
                if (
                    kind in ("json_object", "json_schema", "json", "object")
                    or name == "guided_json"
                ):
                    return True
            elif value == "json":
                return True
    return False


def find_tools(body: Any) -> Mapping[str, Any]:
    """The schema of the arguments of each tool, by its name.

    A function without one takes any JSON, and another kind of tool, with None, any text.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    found = dict[str, Any]()
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        name = function.get("name")
        if isinstance(name, str):
            schema = function.get("parameters", function.get("input_schema"))
            is_function = tool.get("type", "function") == "function"
            found[name] = {} if schema is None and is_function else schema
    return found


# JSON schemas, as far as tools use them. What is not known here fits.

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float),
    "integer": (int,), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def fits_schema(arguments: str, schema: Any) -> bool:
    """Whether the arguments of a call are JSON that the schema allows."""
    try:
        value = _decode(arguments or "{}")
    except ValueError:
        return False
    return _fits(value, schema, 0)


def _fits(value: Any, schema: Any, depth: int) -> bool:
    if schema is False:
        return False
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if not _has_type(value, schema.get("type")):
        return False
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and not any(_fits(value, one, depth + 1) for one in options):
            return False
    if isinstance(value, dict):
        return _fits_object(value, schema, depth)
    if isinstance(value, list) and "items" in schema:
        return all(_fits(one, schema["items"], depth + 1) for one in value)
    return True


def _has_type(value: Any, names: Any) -> bool:
    allowed = names if isinstance(names, list) else [names]
    types = [_TYPES[name] for name in allowed if isinstance(name, str) and name in _TYPES]
    if not types:
        return True
    if isinstance(value, bool):
        return (bool,) in types
    if isinstance(value, float) and value.is_integer() and (int,) in types:
        return True  # JSON Schema: 1.0 is an integer
    return any(isinstance(value, one) for one in types)


def _fits_object(value: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    if isinstance(required, list) and not all(name in value for name in required):
        return False
    if schema.get("additionalProperties") is False and not value.keys() <= known.keys():
        return False
    return all(_fits(one, known[name], depth + 1) for name, one in value.items() if name in known)


# Prompts, for examples.

_PROMPT_FIELDS: Final = ("messages", "input", "prompt", "text_input", "inputs", "instances")


def describe_prompt(body: Any) -> str:
    """The last text of a request, as an example shows it."""
    for name in _PROMPT_FIELDS:
        if isinstance(body, dict) and name in body:
            texts = [*_iter_texts(body[name])]
            return texts[-1] if texts else ""
    return ""


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _iter_texts(one)
    elif isinstance(value, dict):
        for name in ("content", "text", "input", "output"):
            if name in value:
                yield from _iter_texts(value[name])
