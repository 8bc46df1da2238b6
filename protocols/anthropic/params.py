"""Scalar parameters of the Messages API, limits, and the errors of invalid fields.

Source: the types of anthropic (Python) 2.12; error texts are those of the service where known. A
path in an error is joined by dots: ``messages.0.content.1.type``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Raw

from protocols.chat.params import NULL
from protocols.core.errors import InvalidParameter, ParameterProblem
from protocols.core.request_headers import RequestHeaders
from protocols.core.response_headers import ResponseHeaders
from protocols.core.stateful import StatefulField
from protocols.json_body import decode_value
from protocols.params import Param, ParamTable

MAX_MODEL_LENGTH: Final = 256
MAX_MESSAGES: Final = 100_000
MAX_TOOL_NAME_LENGTH: Final = 128
MAX_USER_ID_LENGTH: Final = 1024
MIN_THINKING_BUDGET: Final = 1024
DEFAULT_MAX_TOKENS: Final = 4096
"""Of a worker's request whose client did not say how long the answer may be."""

MESSAGE_PARAMS: Final = ParamTable(
    Param(
        "max_tokens",
        "stopping.max_tokens",
        "strict int",
        0,
        2**31 - 1,
        nullable=False,
        description="0 only fills the worker's prompt cache.",
    ),
    Param("stop_sequences", "stopping.stop", "string list"),
    Param("stream", "stream", "bool", default=False),
    Param("temperature", "sampling.temperature", "float", 0, 1),
    Param("top_p", "sampling.top_p", "float", 0, 1),
    Param("top_k", "sampling.top_k", "strict int", 0, 2**31 - 1, disabled_values=(0,)),
)
SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k")
"""Fields that version 2026-10-21 of the API no longer has."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
SERVICE_TIERS: Final = ("auto", "standard_only")

FIELD_NAMES: Final[Mapping[str, str]] = {
    **{param.field: param.wire for param in MESSAGE_PARAMS},
    "tools": "tools",
    "tool_choice": "tool_choice",
    "parallel_tools": "tool_choice.disable_parallel_tool_use",
    "output": "output_config.format",
    "reasoning.effort": "output_config.effort",
    "reasoning.budget": "thinking.budget_tokens",
    "reasoning.include": "thinking",
    "templating.continue_final": "messages",
    "templating.add_generation_prompt": "messages",
}
"""The wire name of each field of the internal request."""
THINKING_FIELD_NAMES: Final[Mapping[str, str]] = {**FIELD_NAMES, "reasoning.effort": "thinking"}
"""Those of a request without an effort, which is then that of its ``thinking``."""

TYPE_TEXTS: Final[Mapping[str, str]] = {
    "int": "a valid integer",
    "strict int": "a valid integer",
    "float": "a valid number",
    "bool": "a valid boolean",
    "str": "a valid string",
    "strings": "a valid list of strings",
    "string list": "a valid list of strings",
    "ints": "a valid list of integers",
}

BETA_HEADER: Final = "anthropic-beta"
VERSION_HEADER: Final = "anthropic-version"
REQUEST_HEADERS: Final = RequestHeaders(
    ("anthropic-",),
    {
        BETA_HEADER: "forwarded",
        VERSION_HEADER: "handled",
        "anthropic-dangerous-direct-browser-access": "handled",
        "idempotency-key": "reported",
    },
)
RESPONSE_HEADERS: Final = ResponseHeaders(
    ("anthropic-",), ("request-id",), ("anthropic-organization-id", "anthropic-ratelimit-*")
)
"""Sources: the vendor's documentation of rate limits and errors. Claude Code reads
``anthropic-ratelimit-unified-status`` of a 429, and tries again for ever without it."""
STATEFUL_FIELDS: Final = (
    StatefulField(
        "thread",
        "forwarded",
        "a thread that only the worker can keep; without it `create` is reported as a loss, and "
        "`continue` gets 404 `thread_not_found`, upon which clients send the whole history",
        "No thread continues from this message: the model's workers keep none. "
        "Send the whole conversation.",
        starts=({"type": "create"},),
        missing_id="previous_message_id",
    ),
    StatefulField(
        "container",
        "forwarded",
        "a container of earlier code execution",
        "code execution is not available here",
    ),
    StatefulField(
        "compaction",
        "forwarded",
        "asks for a summary that replaces the history of later requests",
        "the model's workers do not compact conversations",
    ),
    StatefulField(
        "messages[].content[].source.file_id",
        "refused",
        "a file of another service",
        "file sources are not supported",
    ),
    StatefulField(
        "context_management",
        "reported",
        "the request has the whole history, which is only longer without it",
    ),
    StatefulField("cache_control", "reported", "a hint for the prompt cache: same answer"),
    StatefulField(
        "diagnostics",
        "reported",
        "names an earlier message only to explain a cache miss: same answer",
    ),
    StatefulField("fallback_credit_token", "reported", "the price of a retry: same answer"),
    StatefulField("user_profile_id", "reported", "names who is billed: same answer"),
)
"""The fields that refer to what a server keeps."""


def field_error(
    at: str, text: str, problem: ParameterProblem = "value", got: Any = None
) -> InvalidParameter:
    """The error of one field, named by its path."""
    path = format_path(at)
    return InvalidParameter(f"{path}: {text}", param=path, problem=problem, got=got)


_INDEX: Final = re.compile(r"\[(\d+)\]")


def format_path(at: str) -> str:
    """A path as errors name it: ``messages.0.content`` for ``messages[0].content``."""
    return _INDEX.sub(r".\1", at)


def missing_error(at: str) -> InvalidParameter:
    """The error of a required field that is absent or null."""
    return field_error(at, "Field required", "missing")


def invalid_type_error(at: str, expected: str, got: Any) -> InvalidParameter:
    """The error of a field of another type; ``expected`` is such as ``a valid string``."""
    return field_error(at, f"Input should be {expected}", "type", got)


def invalid_choice_error(at: str, choices: Sequence[str], got: Any) -> InvalidParameter:
    """The error of a value that is none of ``choices``."""
    return field_error(at, f"Input should be {join_choices(choices)}", "value", got)


def join_choices(choices: Sequence[str]) -> str:
    """``'a', 'b' or 'c'``."""
    *first, last = (f"'{choice}'" for choice in choices)
    return f"{', '.join(first)} or {last}" if first else last


def select_present_fields(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """The fields with a value; null counts as absent."""
    return {name: raw for name, raw in fields.items() if raw != NULL}


def as_object(value: Any, at: str) -> dict[str, Any]:
    """An object as it was sent. Raises InvalidParameter."""
    if not isinstance(value, dict):
        raise invalid_type_error(at, "a valid dictionary", value)
    return value


def as_fields(value: Any, at: str) -> Mapping[str, Any]:
    """The fields of an object that are not null. Raises InvalidParameter."""
    return {name: one for name, one in as_object(value, at).items() if one is not None}


def decode_fields(fields: Mapping[str, Raw], name: str) -> Mapping[str, Any]:
    """The fields of a top-level object; none if it is absent. Raises InvalidParameter."""
    return as_fields(decode_value(fields[name]), name) if name in fields else {}


def read_string(value: Mapping[str, Any], name: str, at: str) -> str:
    """A required string. Raises InvalidParameter."""
    path = f"{at}.{name}" if at else name
    if (text := value.get(name)) is None:
        raise missing_error(path)
    if not isinstance(text, str):
        raise invalid_type_error(path, "a valid string", text)
    return text


def read_optional_string(value: Mapping[str, Any], name: str, at: str) -> str | None:
    """A string, or None. Raises InvalidParameter."""
    return None if value.get(name) is None else read_string(value, name, at)


def read_optional_bool(value: Mapping[str, Any], name: str, at: str) -> bool | None:
    """A boolean, or None. Raises InvalidParameter."""
    flag = value.get(name)
    if flag is None or isinstance(flag, bool):
        return flag
    raise invalid_type_error(f"{at}.{name}" if at else name, "a valid boolean", flag)


def read_choice(value: Mapping[str, Any], name: str, at: str, choices: Sequence[str]) -> str:
    """A required string that is one of ``choices``. Raises InvalidParameter."""
    text = read_string(value, name, at)
    if text not in choices:
        raise invalid_choice_error(f"{at}.{name}" if at else name, choices, text)
    return text
