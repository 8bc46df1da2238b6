"""The response style: the model is the one that served, as is the header with the version.

A stream only has ``data:`` lines, because some clients fail on others. Usage is in the chunk that
ends the last choice, or in a chunk of its own if the client requests it with ``stream_options``.
"""

from msgspec.structs import replace

from protocols.chat.embeddings import EmbeddingEncoder
from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.core.interfaces import ResponseContext, ResponseEncoder
from protocols.core.request import EmbeddingRequest, GenerationRequest

RESPONSE_STYLE = ResponseStyle(
    unary_keys=("id", "object", "created", "model", "choices", "usage"),
    chat_choice_keys=("index", "message", "finish_reason", "logprobs"),
    message_keys=("role", "content", "reasoning_content", "refusal", "tool_calls", "function_call"),
    text_choice_keys=("index", "text", "finish_reason", "logprobs"),
    chunk_keys=("id", "object", "created", "model", "choices", "usage"),
    chat_chunk_keys=("index", "delta", "finish_reason", "logprobs"),
    text_chunk_keys=("index", "text", "finish_reason", "logprobs"),
    default_values={},
    version_header="served-model-name",
    source="databricks",
)
_DEFAULT_USAGE_STYLE = replace(RESPONSE_STYLE, usage_position="finish")


def create_generation_encoder(
    request: GenerationRequest,
    context: ResponseContext,
    *,
    by_prompt: bool,
) -> ResponseEncoder:
    """The encoder of a chat or completion response; ``by_prompt``: an index per prompt."""
    style = RESPONSE_STYLE if "stream_options" in request.provided_fields else _DEFAULT_USAGE_STYLE
    if request.kind == "chat":
        return ChatEncoder(style, request, context, model=context.backend_model)
    if by_prompt:
        style = replace(style, index_scope="prompt")
    return CompletionEncoder(style, request, context, model=context.backend_model)


def create_embedding_encoder(
    request: EmbeddingRequest, context: ResponseContext
) -> ResponseEncoder:
    """The encoder of an embeddings response."""
    name = f"embd-{context.id}"
    return EmbeddingEncoder(RESPONSE_STYLE, request, context, id=name, model=context.backend_model)
