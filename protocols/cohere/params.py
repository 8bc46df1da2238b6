"""Scalar parameters of chat, the values of enumerations, and how fields are called in reports."""

from collections.abc import Mapping
from typing import Final, Literal

from protocols.params import Param, ParamTable

_MAX_SEED: Final = 2**64 - 1
MAX_STOP_SEQUENCES: Final = 5
MAX_DOCUMENTS: Final = 10_000
MAX_PRIORITY: Final = 255
"""The lowest priority that the gateway knows; Cohere's go to 999."""

_SHARED_PARAMS: Final = (
    Param("max_tokens", "stopping.max_tokens", "int", 1, 2**31 - 1),
    Param("temperature", "sampling.temperature", "float", 0, 1, default=0.3),
    Param("p", "sampling.top_p", "float", 0.01, 0.99, default=0.75),
    Param("k", "sampling.top_k", "int", 0, 500, disabled_values=(0,), default=0),
    Param("seed", "sampling.seed", "int", 0, _MAX_SEED),
    Param("frequency_penalty", "sampling.frequency_penalty", "float", 0, 1, default=0.0),
    Param("presence_penalty", "sampling.presence_penalty", "float", 0, 1, default=0.0),
    Param(
        "priority",
        "priority",
        "int",
        0,
        999,
        default=0,
        description=f"A number above {MAX_PRIORITY} counts as {MAX_PRIORITY}.",
    ),
)
CHAT_PARAMS: Final = ParamTable(
    Param("stream", "stream", "bool", default=False),
    Param("stop_sequences", "stopping.stop", "string list", max_items=MAX_STOP_SEQUENCES),
    *_SHARED_PARAMS,
    Param("logprobs", "request.logprobs", "bool", default=False),
    Param(
        "strict_tools",
        "request.strict_tools",
        "bool",
        default=False,
        description="Each tool is a strict one.",
    ),
)
"""``POST /v2/chat``. Not here, since no scalars: messages, tools, tool_choice, documents,
citation_options, response_format, safety_mode, thinking."""
STREAM_PARAM: Final = ParamTable(*CHAT_PARAMS.by_wire.select_params(("stream",)))
"""The parameter that routing needs."""
WORKER_PARAMS: Final = ParamTable(
    Param("stop_sequences", "stopping.stop", "strings"), *_SHARED_PARAMS
)

TOOL_CHOICES: Final[Mapping[str, Literal["required", "none"]]] = {
    "REQUIRED": "required",
    "NONE": "none",
}
"""Without one of these words the model decides."""
SAFETY_MODES: Final = ("CONTEXTUAL", "STRICT", "OFF")
CITATION_MODES: Final = ("ENABLED", "DISABLED", "FAST", "ACCURATE", "OFF")
NO_CITATIONS: Final = frozenset({"DISABLED", "OFF"})
THINKING_TYPES: Final = ("enabled", "disabled")
FORMAT_TYPES: Final = ("text", "json_object")

FIELD_NAMES: Final[Mapping[str, str]] = {
    **{param.field: param.wire for param in CHAT_PARAMS},
    "messages": "messages",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "output": "response_format",
    "logprobs.top": "logprobs",
    "reasoning.effort": "thinking",
    "reasoning.include": "thinking",
    "reasoning.budget": "thinking.token_budget",
    "truncate": "truncate_prompt_tokens",
}
"""The wire name of each field of the internal request."""
