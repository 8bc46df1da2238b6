"""What our own workers take: all that the internal request holds of how a text is made.

``interlingua worker`` reads with ``OWN`` in the place of what OpenAI's clients send. The names are
vLLM 0.32's where it has them, the ranges those of the internal request, and so a gateway before
such a worker clamps nothing, and loses only what the engine itself would not heed.
"""

from collections.abc import Mapping
from typing import Any, Final

from gateway.core.types import AudioPart, FilePart, ImagePart, Part, RefusalPart, VideoPart
from protocols.openai.requests import READING, Reading
from protocols.openai.tables import changed
from protocols.params import Param, Table

_MORE: Final = (
    Param(wire="watermark", field="sampling.watermark", type="bool"),
    Param(wire="beam_width", field="sampling.beam_width", type="int", low=1),
    Param(wire="diversity_penalty", field="sampling.diversity_penalty", type="float"),
)
_ANY: Final[dict[str, Any]] = {"low": None, "high": None}
_WIDER: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"high": None},
    "presence_penalty": _ANY,
    "frequency_penalty": _ANY,
    "n": {"high": None},
    "stop": {"max_items": None},
}
_BEST_OF: Final = Param(wire="best_of", field="best_of", type="int", low=1)

OWN: Final[Reading] = Reading(
    chat=Table(
        *changed(READING.chat, **_WIDER, top_logprobs={"low": -1, "high": None}),
        *_MORE,
        _BEST_OF,
    ),
    completion=Table(
        *changed(READING.completion, **_WIDER, logprobs={"low": -1, "high": None}, best_of=_ANY),
        *_MORE,
    ),
    embedding=Table(
        *READING.embedding,
        Param(wire="instruction", field="instruction", type="str"),
        Param(wire="normalize", field="normalize", type="bool"),
        Param(wire="overflow", field="overflow", type="str", choices=("error", "truncate")),
    ),
)

_WRITTEN_OTHERWISE: Final = frozenset(
    {"stream", "logprobs", "top_logprobs", "max_completion_tokens", "use_beam_search", "request_id",
     "session_id", "return_token_ids", "user", "encoding_format", "priority", "chat_template",
     "suffix", "reasoning_effort", "include_reasoning", "thinking_token_budget", "seed",
     "spaces_between_special_tokens"}
)  # fmt: skip
"""Rows that the writer of requests has code for, that only the operator may open to clients, or
that no engine of ours heeds."""


UNSEEN: Final[Mapping[type[Part], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
    RefusalPart: "refusals",
}
"""Parts of messages that our engine passes over."""


def written(table: tuple[Param, ...]) -> tuple[Param, ...]:
    """The rows that are written to our own workers as they are read there."""
    return tuple(
        param
        for param in table
        if param.wire not in _WRITTEN_OTHERWISE and not param.field.startswith("labels.")
    )
