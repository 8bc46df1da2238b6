"""Parameter tables of OpenAI-like requests, as rows of ``protocols.params``.

Each protocol takes the rows, changes some, and decodes with ``protocols.params.read_params``::

    rows = replace_params(CHAT_PARAMS, temperature={"maximum": 1.0})
    rows = remove_params(rows, "store", "seed")
    TABLE = ParamTable(*rows, Param("details", "response_options.details", ...))

Rows under ``request.`` have no field in the internal request; a reader combines them
(``values.get("request.logprobs")``). Rows under ``labels.`` become labels of the request.

Ranges and defaults: OpenAI's published specification 2.3.0; the extensions: vLLM 0.32.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from protocols.core.errors import InvalidParameter
from protocols.core.json_text import JsonDecoder
from protocols.json_body import decode_value
from protocols.params import Param

INT64_LIMIT = 2**63

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_USER = Param("user", "labels.user", "str")

SHARED_PARAMS: tuple[Param, ...] = (
    Param("temperature", "sampling.temperature", "float", minimum=0, maximum=2, default=1.0),
    Param("top_p", "sampling.top_p", "float", minimum=0, maximum=1, default=1.0),
    Param("n", "n", "int", minimum=1, maximum=128, default=1),
    Param("stream", "stream", "bool", default=False),
    Param("stop", "stopping.stop", "strings"),
    *(
        Param(wire, f"sampling.{wire}", "float", minimum=-2, maximum=2, default=0.0)
        for wire in ("presence_penalty", "frequency_penalty")
    ),
    Param(
        "seed",
        "sampling.seed",
        "int",
        minimum=-INT64_LIMIT,
        maximum=INT64_LIMIT - 1,
    ),
    _USER,
)
"""Parameters of conversations and of completions."""

CHAT_PARAMS: tuple[Param, ...] = (
    Param("max_tokens", "stopping.max_tokens", "int", minimum=1),
    Param(
        "max_completion_tokens",
        "stopping.max_tokens",
        "int",
        minimum=1,
        description="wins over max_tokens",
    ),
    *SHARED_PARAMS,
    Param("logprobs", "request.logprobs", "bool", default=False),
    Param("top_logprobs", "request.top_logprobs", "int", minimum=0, maximum=20),
    Param("parallel_tool_calls", "parallel_tools", "bool", default=True),
    Param("reasoning_effort", "reasoning.effort", "str", choices=REASONING_EFFORTS),
    Param("safety_identifier", "labels.safety_identifier", "str"),
    Param("prompt_cache_key", "labels.prompt_cache_key", "str"),
    Param(
        "prompt_cache_retention",
        "labels.prompt_cache_retention",
        "str",
        choices=("in_memory", "in-memory", "24h"),
    ),
)
"""``POST chat/completions``. Not here, since no scalars: messages, tools, tool_choice, functions,
function_call, response_format, logit_bias, stream_options, metadata."""

COMPLETION_PARAMS: tuple[Param, ...] = (
    Param("max_tokens", "stopping.max_tokens", "int", minimum=0, default=16),
    *SHARED_PARAMS,
    Param("best_of", "best_of", "int", minimum=0, maximum=20, disabled_values=(0,), default=1),
    Param("echo", "echo", "bool", default=False),
    Param("logprobs", "logprobs.top", "int", minimum=0, maximum=5),
    Param("suffix", "insert_before", "str"),
)
"""``POST completions``. Not here: prompt, logit_bias, stream_options."""

EMBEDDING_PARAMS: tuple[Param, ...] = (
    Param("encoding_format", "encoding", "str", choices=("float", "base64"), default="float"),
    Param("dimensions", "dimensions", "int", minimum=1),
    _USER,
)
"""``POST embeddings``. Not here: input."""

EXTENSION_PARAMS: tuple[Param, ...] = (
    Param("top_k", "sampling.top_k", "int", minimum=1, disabled_values=(0, -1)),
    Param("min_p", "sampling.min_p", "float", minimum=0, maximum=1),
    Param("typical_p", "sampling.typical_p", "float", minimum=0, maximum=1),
    Param(
        "repetition_penalty",
        "sampling.repetition_penalty",
        "float",
        minimum=0,
        exclusive_minimum=True,
    ),
    Param("length_penalty", "sampling.length_penalty", "float"),
    Param("use_beam_search", "request.beam_search", "bool", default=False),
    Param("allowed_token_ids", "sampling.allowed_token_ids", "ints"),
    Param("bad_words", "sampling.bad_words", "string list"),
    Param("stop_token_ids", "stopping.stop_token_ids", "ints"),
    Param("include_stop_str_in_output", "stopping.include_stop", "bool"),
    Param("ignore_eos", "stopping.ignore_eos", "bool"),
    Param("min_tokens", "stopping.min_tokens", "int", minimum=0),
    Param("skip_special_tokens", "stopping.skip_special_tokens", "bool"),
    Param("spaces_between_special_tokens", "stopping.spaces_between_special_tokens", "bool"),
    Param("truncate_prompt_tokens", "stopping.truncate_prompt", "int", minimum=-1),
    Param("add_special_tokens", "templating.add_special_tokens", "bool"),
    Param("priority", "priority", "int", minimum=0, maximum=255),
    Param("request_id", "client_id", "str"),
    Param("session_id", "labels.session_id", "str"),
    Param("return_token_ids", "response_options.token_ids", "bool"),
)
"""Additional parameters of vLLM for conversations and completions."""

CHAT_EXTENSION_PARAMS: tuple[Param, ...] = (
    *EXTENSION_PARAMS,
    Param("add_generation_prompt", "templating.add_generation_prompt", "bool"),
    Param("continue_final_message", "templating.continue_final", "bool"),
    Param("chat_template", "templating.template", "str"),
    Param("include_reasoning", "reasoning.include", "bool"),
    Param("thinking_token_budget", "reasoning.budget", "int", minimum=0),
)
"""Additional parameters of vLLM for conversations. Not here: chat_template_kwargs,
structured_outputs."""

EMBEDDING_EXTENSION_PARAMS: tuple[Param, ...] = (
    Param("truncate_prompt_tokens", "truncate", "int", minimum=-1),
    Param("priority", "priority", "int", minimum=0, maximum=255),
    Param("request_id", "client_id", "str"),
)
"""Further parameters of vLLM for embeddings."""


def find_param(table: tuple[Param, ...], wire: str) -> Param:
    """The row of this wire name. Raises KeyError."""
    for param in table:
        if param.wire == wire:
            return param
    raise KeyError(wire)


def replace_params(table: tuple[Param, ...], **changes: dict[str, Any]) -> tuple[Param, ...]:
    """The table with some rows changed, by wire name. Raises KeyError for an unknown name."""
    for wire in changes:
        find_param(table, wire)
    return tuple(msgspec.structs.replace(p, **changes.get(p.wire, {})) for p in table)


def remove_params(table: tuple[Param, ...], *wires: str) -> tuple[Param, ...]:
    """The table without these rows. Raises KeyError for an unknown name."""
    for wire in wires:
        find_param(table, wire)
    return tuple(p for p in table if p.wire not in wires)


# --- objects and arrays ---------------------------------------------------------------------------
#
# Errors carry the wire path of the value (``messages[0].content``), the problem and the value, so
# that each protocol can build its own error text.

_decode_object = JsonDecoder(dict[str, Raw]).decode
_decode_array = JsonDecoder(list[Raw]).decode

NULL = Raw(b"null")

_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def describe_type(value: Any) -> str:
    """A JSON value's type, for error texts."""
    return _TYPE_NAMES.get(type(value), "a value")


def missing_error(at: str) -> InvalidParameter:
    """The error of a required value that is missing or null."""
    return InvalidParameter(f"Missing required parameter: '{at}'.", param=at, problem="missing")


def invalid_type_error(at: str, expected: str, value: Any) -> InvalidParameter:
    """The error of a wrong type; ``expected`` is a phrase such as ``an object``."""
    text = f"Invalid type for '{at}': expected {expected}, but got {describe_type(value)} instead."
    return InvalidParameter(text, param=at, problem="type", expected=expected, got=value)


def invalid_value_error(at: str, value: Any, allowed: tuple[str, ...]) -> InvalidParameter:
    """The error of a value that is not allowed."""
    excerpt = str(value)[:64]
    names = ", ".join(f"'{name}'" for name in allowed)
    text = f"Invalid value: '{excerpt}'. Supported values are: {names}."
    return InvalidParameter(text, param=at, problem="value", expected=allowed, got=value)


def empty_value_error(at: str, value: Any = ()) -> InvalidParameter:
    """The error of an empty array or string."""
    kind = "string" if isinstance(value, str) else "array"
    article = "an" if kind == "array" else "a"
    text = (
        f"Invalid '{at}': empty {kind}. Expected {article} {kind} with minimum length 1, "
        f"but got an empty {kind} instead."
    )
    return InvalidParameter(text, param=at, problem="empty", got=value)


def too_long_error(at: str, limit: int, value: Any) -> InvalidParameter:
    """The error of a string or array over its limit."""
    kind = "string" if isinstance(value, str) else "array"
    article = "an" if kind == "array" else "a"
    text = (
        f"Invalid '{at}': {kind} too long. Expected {article} {kind} with maximum length {limit}, "
        f"but got {article} {kind} with length {len(value)} instead."
    )
    return InvalidParameter(text, param=at, problem="too_long", expected=limit, got=value)


def conflict_error(at: str, text: str) -> InvalidParameter:
    """The error of two fields that exclude each other."""
    return InvalidParameter(text, param=at, problem="conflict")


def null_to_none(raw: Raw | None) -> Raw | None:
    """The value, or None if it is ``null``."""
    return None if raw is None or raw == NULL else raw


def as_object(raw: Raw | bytes, at: str) -> dict[str, Raw]:
    """The fields of an object. Raises InvalidParameter or MalformedRequest."""
    value = decode_value(raw)
    if not isinstance(value, dict):
        raise invalid_type_error(at, "an object", value)
    return _decode_object(raw)


def as_object_field(fields: Mapping[str, Raw], name: str, at: str) -> dict[str, Raw]:
    """The fields of a required object of the object at ``at``. Raises InvalidParameter."""
    raw, path = null_to_none(fields.get(name)), f"{at}.{name}"
    if raw is None:
        raise missing_error(path)
    return as_object(raw, path)


def as_array(raw: Raw, at: str) -> list[Raw]:
    """The items of an array. Raises InvalidParameter or MalformedRequest."""
    value = decode_value(raw)
    if not isinstance(value, list):
        raise invalid_type_error(at, "an array", value)
    return _decode_array(raw)


def as_text(fields: Mapping[str, Raw], name: str, at: str) -> str:
    """A required string of the object at ``at``. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    path = f"{at}.{name}" if at else name
    if raw is None:
        raise missing_error(path)
    value = decode_value(raw)
    if not isinstance(value, str):
        raise invalid_type_error(path, "a string", value)
    return value


def as_optional_text(fields: Mapping[str, Raw], name: str, at: str) -> str | None:
    """A string of the object at ``at``, or None. Raises InvalidParameter."""
    return None if null_to_none(fields.get(name)) is None else as_text(fields, name, at)


def as_optional_bool(fields: Mapping[str, Raw], name: str, at: str) -> bool | None:
    """A boolean of the object at ``at``, or None. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    if raw is None:
        return None
    value = decode_value(raw)
    if not isinstance(value, bool):
        raise invalid_type_error(f"{at}.{name}", "a boolean", value)
    return value
