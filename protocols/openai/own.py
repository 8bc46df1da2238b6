"""What our own workers take: all that the internal request holds of how a text is made.

``interlingua worker`` reads with ``OWN`` in the place of what OpenAI's clients send. The names are
vLLM 0.32's where it has them, the ranges those of the internal request, and so a gateway before
such a worker clamps nothing, and loses only what the engine itself would not heed.
"""

from collections.abc import Mapping
from typing import Any, Final

from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    ImagePart,
    RefusalPart,
    VideoPart,
)
from protocols.openai.requests import DEFAULT_REQUEST_RULES, RequestRules
from protocols.openai.tables import replace_params
from protocols.params import Param, ParamTable

_WORKER_PARAMS: Final = (
    Param(wire="watermark", field="sampling.watermark", type="bool"),
    Param(wire="beam_width", field="sampling.beam_width", type="int", low=1),
    Param(wire="diversity_penalty", field="sampling.diversity_penalty", type="float"),
)
_UNLIMITED: Final[dict[str, Any]] = {"low": None, "high": None}
_WIDENED_RANGES: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"high": None},
    "presence_penalty": _UNLIMITED,
    "frequency_penalty": _UNLIMITED,
    "n": {"high": None},
    "stop": {"max_items": None},
}
_UNLIMITED_BEST_OF: Final = Param(wire="best_of", field="best_of", type="int", low=1)

INTERLINGUA_WORKER_RULES: Final[RequestRules] = RequestRules(
    chat=ParamTable(
        *replace_params(
            DEFAULT_REQUEST_RULES.chat, **_WIDENED_RANGES, top_logprobs={"low": -1, "high": None}
        ),
        *_WORKER_PARAMS,
        _UNLIMITED_BEST_OF,
    ),
    completion=ParamTable(
        *replace_params(
            DEFAULT_REQUEST_RULES.completion,
            **_WIDENED_RANGES,
            logprobs={"low": -1, "high": None},
            best_of=_UNLIMITED,
        ),
        *_WORKER_PARAMS,
    ),
    embedding=ParamTable(
        *DEFAULT_REQUEST_RULES.embedding,
        Param(wire="instruction", field="instruction", type="str"),
        Param(wire="normalize", field="normalize", type="bool"),
        Param(wire="overflow", field="overflow", type="str", choices=("error", "truncate")),
    ),
)

_SPECIAL_PARAMS: Final = frozenset(
    {"stream", "logprobs", "top_logprobs", "max_completion_tokens", "use_beam_search", "request_id",
     "session_id", "return_token_ids", "user", "encoding_format", "priority", "chat_template",
     "suffix", "reasoning_effort", "include_reasoning", "thinking_token_budget", "seed",
     "spaces_between_special_tokens"}
)  # fmt: skip
"""Rows that the writer of requests has code for, that only the operator may open to clients, or
that no engine of ours heeds."""


IGNORED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
    RefusalPart: "refusals",
}
"""Parts of messages that our engine passes over."""


def select_written_params(table: tuple[Param, ...]) -> tuple[Param, ...]:
    """The rows that are written to our own workers as they are read there."""
    return tuple(
        param
        for param in table
        if param.wire not in _SPECIAL_PARAMS and not param.field.startswith("labels.")
    )
