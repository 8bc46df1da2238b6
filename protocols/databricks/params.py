"""Parameter tables of each task.

Source of the ranges: the reference of the Foundation Model REST API. Parameters of OpenAI's clients
that it lacks are accepted, too, so that these clients work.
"""

from collections.abc import Mapping
from typing import Any

from protocols.chat import params
from protocols.chat.params import remove_params, replace_params
from protocols.core.request_headers import RequestHeaders
from protocols.params import Param

REQUEST_HEADERS = RequestHeaders(
    ("x-databricks-",),
    {
        "x-databricks-azure-sp-management-token": "handled",
        "x-databricks-azure-workspace-resource-id": "handled",
        "x-databricks-endpoints-api-client": "handled",
        "x-databricks-org-id": "handled",
        "x-databricks-workspace-id": "handled",
    },
)
"""The workspace is that of the worker, whatever the client's is; so are the credentials."""
MAX_TOOLS = 32
MAX_TOOL_PROPERTIES = 15

_TOP_K = Param(
    "top_k", "sampling.top_k", "int", minimum=1, description="null is no limit; 0 is refused"
)
_REQUEST_ID = Param("client_request_id", "client_id", "str")
_EXTENSION_PARAMS = remove_params(params.EXTENSION_PARAMS, "top_k", "request_id", "use_beam_search")

_SHARED_CHANGES: dict[str, dict[str, Any]] = {
    "top_p": {"exclusive_minimum": True},
    "n": {"maximum": None},
    "stop": {"max_items": None},
}

_BASE_CHAT_PARAMS = replace_params(
    remove_params(
        params.CHAT_PARAMS, "safety_identifier", "prompt_cache_key", "prompt_cache_retention"
    ),
    reasoning_effort={"choices": ("low", "medium", "high")},
    **_SHARED_CHANGES,
)
CHAT_PARAMS: tuple[Param, ...] = (*_BASE_CHAT_PARAMS, _TOP_K, _REQUEST_ID)
"""Fields of a chat request on the strict path."""

USE_RAW_PROMPT = Param(
    "use_raw_prompt",
    "request.raw_prompt",
    "bool",
    default=False,
    description="false: the server may wrap the prompt as its template wants",
)
COMPLETION_PARAMS: tuple[Param, ...] = (
    *replace_params(
        remove_params(params.COMPLETION_PARAMS, "best_of", "logprobs"),
        max_tokens={"minimum": 1, "default": None},
        suffix={"field": "suffix", "default": "", "description": "appended to each completion"},
        **_SHARED_CHANGES,
    ),
    _TOP_K,
    Param(
        "error_behavior", "stopping.overflow", "str", choices=("truncate", "error"), default="error"
    ),
    USE_RAW_PROMPT,
    _REQUEST_ID,
)
"""Fields of a completion request on the strict path."""

EMBEDDING_PARAMS: tuple[Param, ...] = (
    *params.EMBEDDING_PARAMS,
    Param("instruction", "instruction", "str"),
    _REQUEST_ID,
)

LENIENT_CHAT_PARAMS = (
    *CHAT_PARAMS,
    *_EXTENSION_PARAMS,
    *params.CHAT_EXTENSION_PARAMS[len(params.EXTENSION_PARAMS) :],
)
LENIENT_COMPLETION_PARAMS = (
    *COMPLETION_PARAMS,
    params.find_param(params.COMPLETION_PARAMS, "best_of"),
    params.find_param(params.COMPLETION_PARAMS, "logprobs"),
    *_EXTENSION_PARAMS,
)
"""Fields allowed in ``extra_params`` and on the paths of OpenAI's clients."""

PARAM_TABLES: Mapping[str, tuple[Param, ...]] = {
    "invocations, of a conversation": CHAT_PARAMS,
    "invocations, of a completion": COMPLETION_PARAMS,
    "invocations, of embeddings": EMBEDDING_PARAMS,
    "chat": LENIENT_CHAT_PARAMS,
    "completion": LENIENT_COMPLETION_PARAMS,
    "embedding": EMBEDDING_PARAMS,
}
"""See ``protocols.params.ParamTableProvider``."""

_OTHER_FIELDS = {"model", "extra_params", "usage_context"}
STRICT_CHAT_FIELDS = _OTHER_FIELDS | {param.wire for param in CHAT_PARAMS} | {
    "messages", "tools", "tool_choice", "response_format", "stream_options", "metadata", "thinking",
}  # fmt: skip
STRICT_COMPLETION_FIELDS = (
    _OTHER_FIELDS | {param.wire for param in COMPLETION_PARAMS} | {"prompt", "stream_options"}
)
STRICT_EMBEDDING_FIELDS = _OTHER_FIELDS | {param.wire for param in EMBEDDING_PARAMS} | {"input"}
"""All fields of the strict path."""
