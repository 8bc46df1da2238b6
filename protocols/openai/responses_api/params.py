"""The scalar parameters of ``POST /v1/responses``.

Rows under ``request.`` have no field in the internal request: ``requests`` reads them. The sampling
parameters that OpenAI's API lacks are those of vLLM's.
"""

from typing import Final

from protocols.chat.params import EXTENSION_PARAMS, SHARED_PARAMS, find_param
from protocols.core.stateful import StatefulField
from protocols.params import Param, ParamTable

REASONING_SUMMARIES: Final = ("auto", "concise", "detailed")
SERVICE_TIERS: Final = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
_MAX_TOP_LOGPROBS: Final = 20
_FOREIGN_EXTENSIONS: Final = frozenset({"use_beam_search", "return_token_ids", "length_penalty"})
"""vLLM's parameters that change what a response holds, or that only completions have."""

RESPONSES_PARAMS: Final = ParamTable(
    Param("max_output_tokens", "stopping.max_tokens", "int", minimum=1),
    *(
        find_param(SHARED_PARAMS, name)
        for name in ("temperature", "top_p", "stream", "stop", "seed")
    ),
    *(find_param(SHARED_PARAMS, name) for name in ("presence_penalty", "frequency_penalty")),
    Param("top_logprobs", "request.top_logprobs", "int", minimum=0, maximum=_MAX_TOP_LOGPROBS),
    Param("parallel_tool_calls", "parallel_tools", "bool", default=True),
    Param("max_tool_calls", "request.max_tool_calls", "int", minimum=1),
    Param("instructions", "request.instructions", "str"),
    Param("store", "request.store", "bool", default=True),
    Param("background", "request.background", "bool", default=False),
    Param("previous_response_id", "request.previous_response_id", "str"),
    Param(
        "truncation",
        "request.truncation",
        "str",
        choices=("auto", "disabled"),
        default="disabled",
    ),
    Param("service_tier", "request.service_tier", "str", choices=SERVICE_TIERS, default="auto"),
    find_param(SHARED_PARAMS, "user"),
    Param("safety_identifier", "labels.safety_identifier", "str"),
    Param("prompt_cache_key", "labels.prompt_cache_key", "str"),
    Param("prompt_cache_retention", "labels.prompt_cache_retention", "str"),
    *(param for param in EXTENSION_PARAMS if param.wire not in _FOREIGN_EXTENSIONS),
)
"""Not here, since no scalars: input, tools, tool_choice, text, reasoning, include, metadata,
stream_options, client_metadata."""

RESPONSES_STATEFUL_FIELDS: Final = (
    StatefulField(
        "previous_response_id",
        "stored",
        "`stored_responses` keeps the items; an unknown id gets `previous_response_not_found`",
    ),
    StatefulField(
        "input[].id",
        "stored",
        "an `item_reference` names a stored item; an unknown id gets 404",
    ),
    StatefulField(
        "store",
        "stored",
        "with `stored_responses` the response is kept, else its `store` is false",
    ),
    StatefulField(
        "conversation",
        "refused",
        "the gateway keeps no conversations",
        "Conversations are not supported: use 'previous_response_id'.",
    ),
    StatefulField(
        "prompt",
        "refused",
        "a template by its id, kept by another service",
        "Prompt templates are not supported: send 'input'.",
    ),
    StatefulField(
        "background",
        "refused",
        "the response would be fetched by later requests",
        "Background responses are not supported: use 'stream'.",
    ),
    StatefulField(
        "background_options",
        "reported",
        "it says how long a background response may take, and those are refused",
    ),
    StatefulField(
        "input[].content[].file_id",
        "refused",
        "a file of another service",
        "Files are not stored here: send the data itself.",
    ),
    StatefulField(
        "context_management",
        "reported",
        "the request has the whole history, which is only longer without it",
    ),
)
"""The fields that refer to what a server keeps, beside those of every OpenAI-like request."""

INCLUDES: Final = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)
INCLUDE_REASONING: Final = INCLUDES[-2]
INCLUDE_LOGPROBS: Final = INCLUDES[-1]
