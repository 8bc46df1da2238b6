"""Hosted APIs in the manner of OpenAI's chat completions, as data: what each does differently.

A row says only what a public page says; everything else is sent as to OpenAI. ``build_profile``
makes the worker profile of a row, from that of OpenAI.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from protocols.chat.messages import MessageStyle, shorten_call_id
from protocols.chat.params import CHAT_EXTENSION_PARAMS, find_param
from protocols.chat.response_format import write_json_object_format
from protocols.chat.tools import write_response_format
from protocols.chat.upstream import MAX_TOKENS_PARAM, PROFILES, WorkerProfile
from protocols.core.interfaces import BASIC_KINDS
from protocols.core.request import CACHE_KEY, RequestKind, TextPart, Tool
from protocols.params import Param


class HostedApi(Struct, frozen=True, kw_only=True):
    """What one hosted API does differently from OpenAI's."""

    url: str
    """The URL of a worker in a configuration; capital letters stand for the reader's own names."""
    sources: tuple[str, ...]
    read: str
    """The day on which the sources were read."""
    lacks: frozenset[str] = frozenset()
    """Fields of OpenAI's chat completions that it refuses or ignores. They are not sent."""
    lacks_partly: Mapping[str, float] = {}
    """Parameters that it takes, and does not always follow; with what it does in any case."""
    replaced_efforts: Mapping[str, str] = {}
    """Reasoning efforts that it refuses, each with the nearest one that it takes."""
    adds: tuple[str, ...] = ()
    """Further parameters that it takes, by vLLM's names."""
    forwards: tuple[str, ...] = ()
    """Fields of its own, which only clients of OpenAI's API can send."""
    renames: Mapping[str, str] = {}
    """Its name of a parameter, by OpenAI's."""
    marked_for_cache: tuple[type[Struct], ...] = ()
    """Objects in which it takes a mark for the prompt cache, and so it does for the whole request;
    clients of other protocols send such marks, too."""
    labels: tuple[str, ...] = ()
    """Further fields that name a user or a session."""
    max_stop_strings: int | None = None
    max_top_logprobs: int | None = None
    earlier_reasoning: Literal["reasoning_content", "reasoning", "refused"] = "reasoning_content"
    """The key with which it takes the reasoning of earlier turns."""
    short_call_ids: bool = False
    """Whether ids of tool calls have nine letters and digits."""
    developer_role: bool = True
    json_schema: bool = True
    limits_tool_names: bool = True
    """Whether names of tools may have at most 64 characters."""
    request_kinds: frozenset[RequestKind] = BASIC_KINDS


_OPENAI: Final = PROFILES["openai"]
_NEW_LIMIT: Final = "max_completion_tokens"
_OPENAI_ONLY: Final = frozenset(
    {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"}
)

HOSTED_APIS: Final[Mapping[str, HostedApi]] = {
    "openrouter": HostedApi(
        url="https://openrouter.ai/api",
        sources=(
            "https://openrouter.ai/docs/api_reference/parameters",
            "https://pypi.org/project/openrouter/1.3.84/ (ChatRequest, ChatAssistantMessage)",
            "https://pypi.org/project/openrouter/1.3.84/ (ChatContentText, ChatFunctionTool)",
        ),
        read="2026-11-30",
        lacks=frozenset({"safety_identifier", "prompt_cache_retention"}),
        adds=("top_k", "min_p", "repetition_penalty"),
        forwards=("models", "provider", "plugins", "reasoning", "top_a", "cache_control"),
        marked_for_cache=(TextPart, Tool),
        labels=("session_id",),
        max_stop_strings=4,
        max_top_logprobs=20,
        earlier_reasoning="reasoning",
    ),
    "gemini": HostedApi(
        url="https://generativelanguage.googleapis.com/v1beta/openai",
        sources=(
            "https://ai.google.dev/gemini-api/docs/openai",
            "https://github.com/Vali-98/ChatterUI/issues/227",
            "https://github.com/sleepydeer666/RPGBox/issues/2",
        ),
        read="2026-11-28",
        lacks=frozenset({"frequency_penalty", "seed"}),
        forwards=("extra_body",),
    ),
    "deepseek": HostedApi(
        url="https://api.deepseek.com",
        sources=(
            "https://api-docs.deepseek.com/guides/thinking_mode",
            "https://docs.camel-ai.org/reference/camel.configs.deepseek_config",
        ),
        read="2026-11-28",
        lacks=frozenset({"max_completion_tokens"}),
        lacks_partly={"temperature": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        forwards=("thinking",),
        max_stop_strings=16,
        max_top_logprobs=20,
        json_schema=False,
    ),
    "mistral": HostedApi(
        url="https://api.mistral.ai",
        sources=(
            "https://pypi.org/project/mistralai/3.7.0/ (ChatCompletionRequest, EmbeddingRequest)",
            "https://github.com/editor-code-assistant/eca/issues/231",
            "https://github.com/charmbracelet/crush/issues/1590",
            "https://github.com/mistralai/mistral-common (protocol/instruct/validator.py)",
        ),
        read="2026-11-28",
        lacks=frozenset(
            {"max_completion_tokens", "logit_bias", "user", "stream_options", "safety_identifier",
             "prompt_cache_retention", "store", "verbosity", "modalities"}
        ),
        adds=("top_k", "min_tokens", "repetition_penalty"),
        forwards=("safe_prompt", "prompt_mode", "guardrails", "random_seed"),
        renames={"seed": "random_seed", "dimensions": "output_dimension"},
        earlier_reasoning="refused",
        short_call_ids=True,
        developer_role=False,
        limits_tool_names=False,
        request_kinds=BASIC_KINDS - {"completion"},
    ),
    "groq": HostedApi(
        url="https://api.groq.com/openai",
        sources=(
            "https://console.groq.com/docs/openai",
            "https://pypi.org/project/groq/1.7.0/ (CompletionCreateParams)",
        ),
        read="2026-11-28",
        lacks=_OPENAI_ONLY
        | {"frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "n",
           "store"},
        adds=("include_reasoning",),
        forwards=("reasoning_format", "search_settings", "documents", "citation_options"),
        max_stop_strings=4,
        earlier_reasoning="reasoning",
        request_kinds=BASIC_KINDS - {"completion"},
    ),
    "xai": HostedApi(
        url="https://api.x.ai",
        sources=(
            "https://docs.x.ai/docs/guides/reasoning",
            "https://github.com/anomalyco/opencode/issues/39448 (efforts of grok-4.5)",
            "https://pypi.org/project/xai-sdk/1.21.0/ (chat.create)",
        ),
        read="2026-11-28",
        lacks=frozenset({"stop", "presence_penalty", "frequency_penalty"}),
        replaced_efforts={"minimal": "low", "xhigh": "high", "max": "high"},
        forwards=("search_parameters", "deferred"),
        max_top_logprobs=8,
        limits_tool_names=False,
    ),
    "bedrock": HostedApi(
        url="https://bedrock-runtime.REGION.amazonaws.com/openai",
        sources=(
            "https://docs.aws.amazon.com/bedrock/latest/userguide/inference-chat-completions.html",
            "https://docs.aws.amazon.com/bedrock/latest/userguide/model-parameters-openai.html",
        ),
        read="2026-11-28",
        limits_tool_names=False,
        request_kinds=frozenset({"chat"}),
    ),
    "vertex": HostedApi(
        url="https://LOCATION-aiplatform.googleapis.com"
        "/v1/projects/PROJECT/locations/LOCATION/endpoints/openapi",
        sources=(
            "https://docs.cloud.google.com/vertex-ai/generative-ai/docs/migrate/openai/overview",
        ),
        read="2026-11-28",
        lacks=_OPENAI_ONLY
        | {"logprobs", "top_logprobs", "logit_bias", "user", "parallel_tool_calls", "store",
           "verbosity", "prediction", "service_tier"},
        forwards=("extra_body", "web_search_options"),
        limits_tool_names=False,
        request_kinds=frozenset({"chat"}),
    ),
    "ollama": HostedApi(
        url="https://ollama.com",
        sources=(
            "https://docs.ollama.com/api/openai-compatibility",
            "https://github.com/ollama/ollama/issues/8421",
            "https://github.com/ollama/ollama-python/issues/453",
        ),
        read="2026-11-28",
        lacks=_OPENAI_ONLY
        | {"max_completion_tokens", "logit_bias", "user", "n", "tool_choice", "parallel_tool_calls",
           "store", "verbosity", "prediction", "service_tier", "modalities"},
        earlier_reasoning="reasoning",
        developer_role=False,
        limits_tool_names=False,
    ),
}  # fmt: skip


def build_profile(api: HostedApi) -> WorkerProfile:
    """The profile of the workers of a hosted API."""
    chat = (*_OPENAI.chat, *(find_param(CHAT_EXTENSION_PARAMS, name) for name in api.adds))
    labels = (*_OPENAI.labels, *api.labels)
    return replace(
        _OPENAI,
        chat=_adapt_params(chat, api),
        embedding=_adapt_params(_OPENAI.embedding, api),
        labels=tuple(name for name in labels if name not in api.lacks),
        lacks=api.lacks,
        kept_keys=dict.fromkeys(api.marked_for_cache, frozenset({CACHE_KEY})),
        max_stop_strings=api.max_stop_strings,
        max_chat_logprobs=api.max_top_logprobs,
        allowed_tools=False,
        custom_tools=False,
        limits_tool_names=api.limits_tool_names,
        write_output_format=write_response_format if api.json_schema else write_json_object_format,
        request_kinds=api.request_kinds,
        message_style=MessageStyle(
            includes_reasoning=api.earlier_reasoning != "refused",
            reasoning_key="reasoning"
            if api.earlier_reasoning == "reasoning"
            else "reasoning_content",
            write_call_id=shorten_call_id if api.short_call_ids else str,
            role_mapping=() if api.developer_role else (("developer", "system"),),
        ),
    )


def _adapt_params(table: tuple[Param, ...], api: HostedApi) -> tuple[Param, ...]:
    """OpenAI's rows that the API takes, with its names for them."""
    if _NEW_LIMIT in api.lacks:
        table = tuple(MAX_TOKENS_PARAM if row.wire == _NEW_LIMIT else row for row in table)
    return tuple(
        replace(
            row,
            wire=api.renames.get(row.wire, row.wire),
            loss_reason="approximated" if row.wire in api.lacks_partly else row.loss_reason,
            default=api.lacks_partly.get(row.wire, row.default),
            replaced_words=tuple(api.replaced_efforts.items())
            if row.field == "reasoning.effort"
            else (),
        )
        for row in table
        if row.wire not in api.lacks
    )


HOSTED_PROFILES: Final[Mapping[str, WorkerProfile]] = {
    name: build_profile(api) for name, api in HOSTED_APIS.items()
}
