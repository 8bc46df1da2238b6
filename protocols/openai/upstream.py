"""Pass-through rules for workers of OpenAI's API. See ``protocols.passthrough``."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta, UnsetType

from protocols.chat.field_types import (
    DESCRIBED_TOOLS,
    ENCODINGS,
    INPUTS,
    LOGIT_BIAS,
    MESSAGES,
    METADATA,
    OPTIONAL_BOOL,
    OPTIONAL_STRING,
    PROMPTS,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    TEXT_MESSAGES,
    TOOL_FIELDS,
    build_count_type,
)
from protocols.chat.requests import DEFAULT_REQUEST_RULES
from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.chat.tools import is_valid_chat, write_response_format
from protocols.chat.upstream import WorkerProfile
from protocols.core.interfaces import Headers, ResponseContext, ResponseEncoder
from protocols.core.request import GenerationRequest
from protocols.passthrough import (
    PassthroughRule,
    PassthroughRules,
    create_passthrough_decoder,
)

_COMMON_FIELD_TYPES: Final[Mapping[str, Any]] = {
    "stream": OPTIONAL_BOOL,
    "stream_options": STREAM_OPTIONS,
    "user": OPTIONAL_STRING,
    "logit_bias": LOGIT_BIAS,
}
_CHAT_FIELD_TYPES: Final[Mapping[str, Any]] = {
    **_COMMON_FIELD_TYPES,
    **TOOL_FIELDS,
    "max_tokens": Annotated[int, Meta(ge=1)] | UnsetType,
    "max_completion_tokens": Annotated[int, Meta(ge=1)] | UnsetType,
    "messages": MESSAGES,
    "logprobs": OPTIONAL_BOOL,
    "response_format": RESPONSE_FORMAT,
    "metadata": METADATA,
}
_COMPLETION_FIELD_TYPES: Final[Mapping[str, Any]] = {**_COMMON_FIELD_TYPES, "prompt": PROMPTS}
_EMBEDDING_FIELD_TYPES: Final[Mapping[str, Any]] = {
    "input": INPUTS,
    "encoding_format": ENCODINGS,
    "user": OPTIONAL_STRING,
}


def build_passthrough_rules(
    profile: WorkerProfile,
    prefix: str,
    forwards_field: Callable[[str], bool],
    source: str,
    *,
    build_path: Callable[[str], str] | None = None,
) -> PassthroughRules:
    """The rules for workers of one profile, under one path prefix.

    ``build_path`` changes the paths; ``{model}`` in one stands for the model's name.
    ``forwards_field`` decides whether workers may get an unknown field. ``source`` is the protocol.
    """
    place = build_path or f"{prefix}/{{}}".format
    rule = partial(PassthroughRule, forwards_field=forwards_field)
    chat_types = {
        **_CHAT_FIELD_TYPES,
        "top_logprobs": _build_logprobs_type(profile.max_chat_logprobs, 20),
    }
    if profile.ignored_parts or profile.message_style.write_call_id is not str:
        chat_types["messages"] = TEXT_MESSAGES
    if profile.requires_descriptions:
        chat_types["tools"] = DESCRIBED_TOOLS
    if profile.write_output_format is not write_response_format:
        chat_types.pop("response_format")
    chat_types = {name: one for name, one in chat_types.items() if name not in profile.lacks}
    rules = {
        "chat": rule(
            path=place("chat/completions"),
            field_types=chat_types,
            worker_params=profile.chat,
            client_params=DEFAULT_REQUEST_RULES.chat,
            is_valid_body=is_valid_chat,
        ),
        "completion": rule(
            path=place("completions"),
            field_types=_build_completion_types(profile),
            worker_params=profile.completion,
            client_params=DEFAULT_REQUEST_RULES.completion,
            # Workers differ in their default of ``max_tokens``, so it must be set.
            is_valid_body=lambda _, fields: "max_tokens" in fields,
        ),
        "embedding": rule(
            path=place("embeddings"),
            field_types={
                name: one
                for name, one in _EMBEDDING_FIELD_TYPES.items()
                if name not in profile.lacks
            },
            worker_params=profile.embedding,
            client_params=DEFAULT_REQUEST_RULES.embedding,
        ),
    }
    return PassthroughRules(
        {kind: one for kind, one in rules.items() if kind in profile.request_kinds},
        create_decoder=partial(create_passthrough_decoder, source=source),
    )


def _build_completion_types(profile: WorkerProfile) -> Mapping[str, Any]:
    types = {
        **_COMPLETION_FIELD_TYPES,
        "logprobs": _build_logprobs_type(profile.max_completion_logprobs, 5),
    }
    return {name: one for name, one in types.items() if name not in profile.lacks}


def _build_logprobs_type(worker_limit: int | None, client_limit: int) -> Any:
    return build_count_type(
        client_limit if worker_limit is None else min(worker_limit, client_limit)
    )


def create_encoder(
    style: ResponseStyle,
    request: GenerationRequest,
    about: ResponseContext,
    headers: Headers = (),
) -> ResponseEncoder:
    """The encoder of a response to a conversation or a prompt."""
    encoder = ChatEncoder if request.kind == "chat" else CompletionEncoder
    return encoder(style, request, about, headers=headers)
