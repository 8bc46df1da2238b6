"""The names of OpenTelemetry's conventions for generative models, a table for each version.

They are still in development, and what changes is opted into: OTEL_SEMCONV_STABILITY_OPT_IN with
``gen_ai_latest_experimental`` among its words takes the newest
(github.com/open-telemetry/semantic-conventions-genai: docs/gen-ai, changelog.d), and nothing said
the last set that was released. ``gen_ai.original.model`` is Envoy AI Gateway's, so that boards made
for its metrics work.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

STABILITY_VARIABLE: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
_EXPERIMENTAL_OPT_IN: Final = "gen_ai_latest_experimental"

OPERATION_NAMES: Final = {
    "chat": "chat",
    "completion": "text_completion",
    "embedding": "embeddings",
}
"""By ``Record.operation``."""
FINISH_REASON_NAMES: Final = {
    "eos": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "stop": "stop",
}
"""What choices ended with, where the conventions have a word for it."""

TokenDirection = Literal["input", "output"]
AttributeValue = str | int | float | bool | tuple[str, ...]
"""What an attribute may say."""


class TokenMetric(Struct, frozen=True):
    """The metric that tells an operation's tokens; ``typed`` where one tells both directions."""

    name: str
    has_type_attribute: bool


class SemanticConventions(Struct, frozen=True):
    """All of them. A direction's tokens, and durations at workers, go by the operation."""

    attributes: Mapping[str, str]
    """By what the gateway calls them."""
    duration: str
    """Of a request, as the gateway serves it."""
    first_token: str
    """To the first token."""
    per_token: str
    """For each token after it."""
    durations: Mapping[str, str]
    tokens: Mapping[tuple[str, TokenDirection], TokenMetric]

    def rename_attributes(
        self, told: Mapping[str, AttributeValue | None]
    ) -> dict[str, AttributeValue | None]:
        """What is told by the gateway's own words, by these."""
        return {self.attributes[name]: value for name, value in told.items()}


_TOKEN_USAGE: Final = TokenMetric("gen_ai.client.token.usage", has_type_attribute=True)
_OPERATION_DURATION: Final = "gen_ai.client.operation.duration"
STABLE_CONVENTIONS: Final = SemanticConventions(
    attributes={
        "operation": "gen_ai.operation.name",
        "backend": "gen_ai.provider.name",
        "model": "gen_ai.request.model",
        "asked_model": "gen_ai.original.model",
        "direction": "gen_ai.token.type",
        "stream": "gen_ai.request.stream",
        "n": "gen_ai.request.choice.count",
        "max_tokens": "gen_ai.request.max_tokens",
        "temperature": "gen_ai.request.temperature",
        "top_p": "gen_ai.request.top_p",
        "top_k": "gen_ai.request.top_k",
        "seed": "gen_ai.request.seed",
        "frequency_penalty": "gen_ai.request.frequency_penalty",
        "presence_penalty": "gen_ai.request.presence_penalty",
        "dimensions": "gen_ai.embeddings.dimension.count",
        "finishes": "gen_ai.response.finish_reasons",
        "first_token": "gen_ai.response.time_to_first_chunk",
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    },
    duration="gen_ai.server.request.duration",
    first_token="gen_ai.server.time_to_first_token",
    per_token="gen_ai.server.time_per_output_token",
    durations={
        "chat": _OPERATION_DURATION,
        "text_completion": _OPERATION_DURATION,
        "embeddings": _OPERATION_DURATION,
    },
    tokens={
        ("chat", "input"): _TOKEN_USAGE,
        ("chat", "output"): _TOKEN_USAGE,
        ("text_completion", "input"): _TOKEN_USAGE,
        ("text_completion", "output"): _TOKEN_USAGE,
        ("embeddings", "input"): _TOKEN_USAGE,
    },
)
_INPUT_TOKENS: Final = TokenMetric(
    "gen_ai.client.inference.operation.input_tokens", has_type_attribute=False
)
_OUTPUT_TOKENS: Final = TokenMetric(
    "gen_ai.client.inference.operation.output_tokens", has_type_attribute=False
)
EXPERIMENTAL_CONVENTIONS: Final = replace(
    STABLE_CONVENTIONS,
    tokens={
        ("chat", "input"): _INPUT_TOKENS,
        ("chat", "output"): _OUTPUT_TOKENS,
        ("text_completion", "input"): _INPUT_TOKENS,
        ("text_completion", "output"): _OUTPUT_TOKENS,
        ("embeddings", "input"): TokenMetric(
            "gen_ai.client.embeddings.operation.input_tokens", has_type_attribute=False
        ),
    },
    durations={**STABLE_CONVENTIONS.durations, "embeddings": "gen_ai.client.embeddings.duration"},
)


def select_conventions(environment: Mapping[str, str]) -> SemanticConventions:
    """Those that the environment asks for."""
    asked = {word.strip() for word in environment.get(STABILITY_VARIABLE, "").split(",")}
    return EXPERIMENTAL_CONVENTIONS if _EXPERIMENTAL_OPT_IN in asked else STABLE_CONVENTIONS
