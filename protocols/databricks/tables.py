"""The scalar parameters of each task.

Source: the reference of the Foundation Model REST API, for the ranges; what its page does not name
and OpenAI's clients send is taken too, so that they can move.
"""

from collections.abc import Mapping
from typing import Any

from protocols.openai import tables
from protocols.openai.tables import changed, without
from protocols.params import Param

MOST_TOOLS = 32
MOST_PROPERTIES = 15

_TOP_K = Param(
    wire="top_k",
    field="sampling.top_k",
    type="int",
    low=1,
    note="null is no limit; 0 is refused",
)
_REQUEST_ID = Param(wire="client_request_id", field="client_id", type="str")
_EXTENSIONS = without(tables.EXTENSIONS, "top_k", "request_id", "use_beam_search")

_SHARED_CHANGES: dict[str, dict[str, Any]] = {
    "top_p": {"above_low": True},
    "n": {"high": None},
    "stop": {"max_items": None},
}

_CHAT = changed(
    without(tables.CHAT, "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    reasoning_effort={"choices": ("low", "medium", "high")},
    **_SHARED_CHANGES,
)
CHAT: tuple[Param, ...] = (*_CHAT, _TOP_K, _REQUEST_ID)
"""What a chat request may name on the strict path."""

USE_RAW_PROMPT = Param(
    wire="use_raw_prompt",
    field="asked.raw_prompt",
    type="bool",
    default=False,
    note="false: the server may wrap the prompt as its template wants",
)
COMPLETION: tuple[Param, ...] = (
    *changed(
        without(tables.COMPLETION, "best_of", "logprobs"),
        max_tokens={"low": 1, "default": None},
        suffix={"field": "suffix", "default": "", "note": "appended to each completion"},
        **_SHARED_CHANGES,
    ),
    _TOP_K,
    Param(
        wire="error_behavior",
        field="stopping.overflow",
        type="str",
        choices=("truncate", "error"),
        default="error",
    ),
    USE_RAW_PROMPT,
    _REQUEST_ID,
)
"""What a completion request may name on the strict path."""

EMBEDDING: tuple[Param, ...] = (
    *tables.EMBEDDING,
    Param(wire="instruction", field="instruction", type="str"),
    _REQUEST_ID,
)

LENIENT_CHAT = (*CHAT, *_EXTENSIONS, *tables.CHAT_EXTENSIONS[len(tables.EXTENSIONS) :])
LENIENT_COMPLETION = (
    *COMPLETION,
    tables.row(tables.COMPLETION, "best_of"),
    tables.row(tables.COMPLETION, "logprobs"),
    *_EXTENSIONS,
)
"""What may also come in ``extra_params``, and on the paths of OpenAI's clients."""

TABLES: Mapping[str, tuple[Param, ...]] = {
    "invocations, of a conversation": CHAT,
    "invocations, of a completion": COMPLETION,
    "invocations, of embeddings": EMBEDDING,
    "chat": LENIENT_CHAT,
    "completion": LENIENT_COMPLETION,
    "embedding": EMBEDDING,
}
"""See ``protocols.params.Tabled``."""

_ASIDE = {"model", "extra_params", "usage_context"}
STRICT_CHAT = _ASIDE | {param.wire for param in CHAT} | {
    "messages", "tools", "tool_choice", "response_format", "stream_options", "metadata", "thinking",
}  # fmt: skip
STRICT_COMPLETION = _ASIDE | {param.wire for param in COMPLETION} | {"prompt", "stream_options"}
STRICT_EMBEDDING = _ASIDE | {param.wire for param in EMBEDDING} | {"input"}
"""Every field that the strict path knows."""
