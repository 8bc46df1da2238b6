"""Parameter tables of OpenAI-like requests, as rows of ``protocols.params``.

Each protocol takes the rows, changes some, and decodes with ``protocols.params.read_params``::

    rows = replace_params(CHAT_PARAMS, temperature={"maximum": 1.0})
    rows = remove_params(rows, "store", "seed")
    TABLE = ParamTable(*rows, Param(wire="details", field="response_options.details", ...))

Rows under ``request.`` have no field in the internal request; a reader combines them
(``values.get("request.logprobs")``). Rows under ``labels.`` become labels of the request.

Ranges and defaults: OpenAI's published specification 2.3.0; the extensions: vLLM 0.32.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from protocols.core.errors import InvalidParameter
from protocols.json_body import decode_value
from protocols.params import Param

INT64_LIMIT = 2**63

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_TEMPERATURE = Param(
    wire="temperature",
    field="sampling.temperature",
    type="float",
    minimum=0,
    maximum=2,
    default=1.0,
)
_TOP_P = Param(
    wire="top_p", field="sampling.top_p", type="float", minimum=0, maximum=1, default=1.0
)
_PRESENCE = Param(
    wire="presence_penalty",
    field="sampling.presence_penalty",
    type="float",
    minimum=-2,
    maximum=2,
    default=0.0,
)
_FREQUENCY = Param(
    wire="frequency_penalty",
    field="sampling.frequency_penalty",
    type="float",
    minimum=-2,
    maximum=2,
    default=0.0,
)
_SEED = Param(
    wire="seed",
    field="sampling.seed",
    type="int",
    minimum=-INT64_LIMIT,
    maximum=INT64_LIMIT - 1,
    description="a negative seed is kept as its two's complement",
)
_N = Param(wire="n", field="n", type="int", minimum=1, maximum=128, default=1)
_STOP = Param(wire="stop", field="stopping.stop", type="strings", max_items=4)
_STREAM = Param(wire="stream", field="stream", type="bool", default=False)
_USER = Param(wire="user", field="labels.user", type="str")

SHARED_PARAMS: tuple[Param, ...] = (
    _TEMPERATURE,
    _TOP_P,
    _N,
    _STREAM,
    _STOP,
    _PRESENCE,
    _FREQUENCY,
    _SEED,
    _USER,
)
"""What conversations and completions have in common."""

CHAT_PARAMS: tuple[Param, ...] = (
    Param(wire="max_tokens", field="stopping.max_tokens", type="int", minimum=1),
    Param(
        wire="max_completion_tokens",
        field="stopping.max_tokens",
        type="int",
        minimum=1,
        description="wins over max_tokens",
    ),
    *SHARED_PARAMS,
    Param(wire="logprobs", field="request.logprobs", type="bool", default=False),
    Param(wire="top_logprobs", field="request.top_logprobs", type="int", minimum=0, maximum=20),
    Param(wire="parallel_tool_calls", field="parallel_tools", type="bool", default=True),
    Param(wire="reasoning_effort", field="reasoning.effort", type="str", choices=REASONING_EFFORTS),
    Param(wire="safety_identifier", field="labels.safety_identifier", type="str"),
    Param(wire="prompt_cache_key", field="labels.prompt_cache_key", type="str"),
    Param(
        wire="prompt_cache_retention",
        field="labels.prompt_cache_retention",
        type="str",
        choices=("in_memory", "in-memory", "24h"),
    ),
)
"""``POST chat/completions``. Not here, since no scalars: messages, tools, tool_choice, functions,
function_call, response_format, logit_bias, stream_options, metadata."""

COMPLETION_PARAMS: tuple[Param, ...] = (
    Param(wire="max_tokens", field="stopping.max_tokens", type="int", minimum=0, default=16),
    *SHARED_PARAMS,
    Param(
        wire="best_of",
        field="best_of",
        type="int",
        minimum=0,
        maximum=20,
        disabled_values=(0,),
        default=1,
    ),
    Param(wire="echo", field="echo", type="bool", default=False),
    Param(wire="logprobs", field="logprobs.top", type="int", minimum=0, maximum=5),
    Param(wire="suffix", field="insert_before", type="str"),
)
"""``POST completions``. Not here: prompt, logit_bias, stream_options."""

EMBEDDING_PARAMS: tuple[Param, ...] = (
    Param(
        wire="encoding_format",
        field="encoding",
        type="str",
        choices=("float", "base64"),
        default="float",
    ),
    Param(wire="dimensions", field="dimensions", type="int", minimum=1),
    _USER,
)
"""``POST embeddings``. Not here: input."""

EXTENSION_PARAMS: tuple[Param, ...] = (
    Param(wire="top_k", field="sampling.top_k", type="int", minimum=1, disabled_values=(0, -1)),
    Param(wire="min_p", field="sampling.min_p", type="float", minimum=0, maximum=1),
    Param(wire="typical_p", field="sampling.typical_p", type="float", minimum=0, maximum=1),
    Param(
        wire="repetition_penalty",
        field="sampling.repetition_penalty",
        type="float",
        minimum=0,
        exclusive_minimum=True,
    ),
    Param(wire="length_penalty", field="sampling.length_penalty", type="float"),
    Param(wire="use_beam_search", field="request.beam_search", type="bool", default=False),
    Param(wire="allowed_token_ids", field="sampling.allowed_token_ids", type="ints"),
    Param(wire="bad_words", field="sampling.bad_words", type="string list"),
    Param(wire="stop_token_ids", field="stopping.stop_token_ids", type="ints"),
    Param(wire="include_stop_str_in_output", field="stopping.include_stop", type="bool"),
    Param(wire="ignore_eos", field="stopping.ignore_eos", type="bool"),
    Param(wire="min_tokens", field="stopping.min_tokens", type="int", minimum=0),
    Param(wire="skip_special_tokens", field="stopping.skip_special_tokens", type="bool"),
    Param(
        wire="spaces_between_special_tokens",
        field="stopping.spaces_between_special_tokens",
        type="bool",
    ),
    Param(wire="truncate_prompt_tokens", field="stopping.truncate_prompt", type="int", minimum=-1),
    Param(wire="add_special_tokens", field="templating.add_special_tokens", type="bool"),
    Param(wire="priority", field="priority", type="int", minimum=0, maximum=255),
    Param(wire="request_id", field="client_id", type="str"),
    Param(wire="session_id", field="labels.session_id", type="str"),
    Param(wire="return_token_ids", field="response_options.token_ids", type="bool"),
)
"""What vLLM takes beside, for conversations and completions alike."""

CHAT_EXTENSION_PARAMS: tuple[Param, ...] = (
    *EXTENSION_PARAMS,
    Param(wire="add_generation_prompt", field="templating.add_generation_prompt", type="bool"),
    Param(wire="continue_final_message", field="templating.continue_final", type="bool"),
    Param(wire="chat_template", field="templating.template", type="str"),
    Param(wire="include_reasoning", field="reasoning.include", type="bool"),
    Param(wire="thinking_token_budget", field="reasoning.budget", type="int", minimum=0),
)
"""What vLLM takes beside for conversations. Not here: chat_template_kwargs, structured_outputs."""

EMBEDDING_EXTENSION_PARAMS: tuple[Param, ...] = (
    Param(wire="truncate_prompt_tokens", field="truncate", type="int", minimum=-1),
    Param(wire="priority", field="priority", type="int", minimum=0, maximum=255),
    Param(wire="request_id", field="client_id", type="str"),
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

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_array = msgspec.json.Decoder(list[Raw]).decode

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


def describe_type(got: Any) -> str:
    """A JSON value's type, for error texts."""
    return _TYPE_NAMES.get(type(got), "a value")


def missing_error(at: str) -> InvalidParameter:
    """The error of a required value that is missing or null."""
    return InvalidParameter(f"Missing required parameter: '{at}'.", param=at, problem="missing")


def invalid_type_error(at: str, expected: str, got: Any) -> InvalidParameter:
    """The error of a wrong type; ``expected`` is a phrase such as ``an object``."""
    text = f"Invalid type for '{at}': expected {expected}, but got {describe_type(got)} instead."
    return InvalidParameter(text, param=at, problem="type", expected=expected, got=got)


def invalid_value_error(at: str, got: Any, allowed: tuple[str, ...]) -> InvalidParameter:
    """The error of a value that is not allowed."""
    shown = str(got)[:64]
    names = ", ".join(f"'{name}'" for name in allowed)
    text = f"Invalid value: '{shown}'. Supported values are: {names}."
    return InvalidParameter(text, param=at, problem="value", expected=allowed, got=got)


def empty_value_error(at: str, got: Any = ()) -> InvalidParameter:
    """The error of an empty array or string."""
    what = "string" if isinstance(got, str) else "array"
    article = "an" if what == "array" else "a"
    text = (
        f"Invalid '{at}': empty {what}. Expected {article} {what} with minimum length 1, "
        f"but got an empty {what} instead."
    )
    return InvalidParameter(text, param=at, problem="empty", got=got)


def too_long_error(at: str, limit: int, got: Any) -> InvalidParameter:
    """The error of a string or array over its limit."""
    what = "string" if isinstance(got, str) else "array"
    article = "an" if what == "array" else "a"
    text = (
        f"Invalid '{at}': {what} too long. Expected {article} {what} with maximum length {limit}, "
        f"but got {article} {what} with length {len(got)} instead."
    )
    return InvalidParameter(text, param=at, problem="too_long", expected=limit, got=got)


def conflict_error(at: str, text: str) -> InvalidParameter:
    """The error of two fields that exclude each other."""
    return InvalidParameter(text, param=at, problem="conflict")


def null_to_none(raw: Raw | None) -> Raw | None:
    """The value, or None if it is ``null``."""
    return None if raw is None or raw == NULL else raw


def as_object(raw: Raw, at: str) -> dict[str, Raw]:
    """The fields of an object. Raises InvalidParameter or MalformedRequest."""
    got = decode_value(raw)
    if not isinstance(got, dict):
        raise invalid_type_error(at, "an object", got)
    return _decode_object(raw)


def as_array(raw: Raw, at: str) -> list[Raw]:
    """The items of an array. Raises InvalidParameter or MalformedRequest."""
    got = decode_value(raw)
    if not isinstance(got, list):
        raise invalid_type_error(at, "an array", got)
    return _decode_array(raw)


def as_text(fields: Mapping[str, Raw], name: str, at: str) -> str:
    """A required string of the object at ``at``. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    where = f"{at}.{name}" if at else name
    if raw is None:
        raise missing_error(where)
    got = decode_value(raw)
    if not isinstance(got, str):
        raise invalid_type_error(where, "a string", got)
    return got


def as_optional_text(fields: Mapping[str, Raw], name: str, at: str) -> str | None:
    """A string of the object at ``at``, or None. Raises InvalidParameter."""
    return None if null_to_none(fields.get(name)) is None else as_text(fields, name, at)


def as_optional_bool(fields: Mapping[str, Raw], name: str, at: str) -> bool | None:
    """A boolean of the object at ``at``, or None. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    if raw is None:
        return None
    got = decode_value(raw)
    if not isinstance(got, bool):
        raise invalid_type_error(f"{at}.{name}", "a boolean", got)
    return got
