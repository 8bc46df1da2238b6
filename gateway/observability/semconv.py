"""Names of OpenTelemetry's conventions for generative AI, one table per version.

The conventions are still in development. The default is the last released set; the word
``gen_ai_latest_experimental`` in OTEL_SEMCONV_STABILITY_OPT_IN selects the newest
(github.com/open-telemetry/semantic-conventions-genai: docs/gen-ai, changelog.d).
``gen_ai.original.model`` is Envoy AI Gateway's, so that dashboards for its metrics work.
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
    "rerank": "rerank",
    "classify": "classify",
    "tokenize": "tokenize",
    "detokenize": "detokenize",
}
"""By ``RequestRecord.operation``; the last four are no names of the conventions."""
FINISH_REASON_NAMES: Final = {
    "eos": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "stop": "stop",
}
"""Finish reasons that the conventions define."""

TokenDirection = Literal["input", "output"]
AttributeValue = str | int | float | bool | tuple[str, ...]
"""The value of an attribute."""


class TokenMetric(Struct, frozen=True):
    """A token metric. With ``has_type_attribute`` it has both directions."""

    name: str
    has_type_attribute: bool


class SemanticConventions(Struct, frozen=True):
    """The names of one version of the conventions."""

    attributes: Mapping[str, str]
    """Attribute names by the gateway's names."""
    duration: str
    """Metric: duration of a request at the gateway."""
    ttft: str
    """Metric: time to first token."""
    tpot: str
    """Metric: time per token after the first."""
    durations: Mapping[str, str]
    tokens: Mapping[tuple[str, TokenDirection], TokenMetric]

    def rename_attributes(
        self, attributes: Mapping[str, AttributeValue | None]
    ) -> dict[str, AttributeValue | None]:
        """Rename attributes from the gateway's names to these."""
        return {self.attributes[name]: value for name, value in attributes.items()}


_TOKEN_USAGE: Final = TokenMetric("gen_ai.client.token.usage", has_type_attribute=True)
_OPERATION_DURATION: Final = "gen_ai.client.operation.duration"
STABLE_CONVENTIONS: Final = SemanticConventions(
    attributes={
        "operation": "gen_ai.operation.name",
        "backend": "gen_ai.provider.name",
        "model": "gen_ai.request.model",
        "requested_model": "gen_ai.original.model",
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
        "finish_reasons": "gen_ai.response.finish_reasons",
        "first_token": "gen_ai.response.time_to_first_chunk",
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    },
    duration="gen_ai.server.request.duration",
    ttft="gen_ai.server.time_to_first_token",
    tpot="gen_ai.server.time_per_output_token",
    durations={
        "chat": _OPERATION_DURATION,
        "text_completion": _OPERATION_DURATION,
        "embeddings": _OPERATION_DURATION,
        "rerank": _OPERATION_DURATION,
        "classify": _OPERATION_DURATION,
        "tokenize": _OPERATION_DURATION,
        "detokenize": _OPERATION_DURATION,
    },
    tokens={
        ("chat", "input"): _TOKEN_USAGE,
        ("chat", "output"): _TOKEN_USAGE,
        ("text_completion", "input"): _TOKEN_USAGE,
        ("text_completion", "output"): _TOKEN_USAGE,
        ("embeddings", "input"): _TOKEN_USAGE,
        ("rerank", "input"): _TOKEN_USAGE,
        ("classify", "input"): _TOKEN_USAGE,
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
        ("rerank", "input"): _INPUT_TOKENS,
        ("classify", "input"): _INPUT_TOKENS,
    },
    durations={**STABLE_CONVENTIONS.durations, "embeddings": "gen_ai.client.embeddings.duration"},
)


def select_conventions(environment: Mapping[str, str]) -> SemanticConventions:
    """The version that the environment selects."""
    opted_in = {opt_in.strip() for opt_in in environment.get(STABILITY_VARIABLE, "").split(",")}
    return EXPERIMENTAL_CONVENTIONS if _EXPERIMENTAL_OPT_IN in opted_in else STABLE_CONVENTIONS
