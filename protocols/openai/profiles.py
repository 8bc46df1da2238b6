"""What the workers that speak this dialect take, by profile.

Sources: OpenAI's specification 2.3.0; vLLM 0.32's and SGLang's protocol modules; llama.cpp's
server (tools/server); for our own workers, ``own``. A worker's row gives the range that the worker
takes: what lies outside is clamped, and reported.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from gateway.core.types import Grammar, OutputFormat, Part, Regex
from protocols.openai.guides import write_structured_outputs
from protocols.openai.messages import Writing
from protocols.openai.own import OWN, UNSEEN, written
from protocols.openai.requests import READING, Reading
from protocols.openai.tables import CHAT_EXTENSIONS, EFFORTS, EMBEDDING, EXTENSIONS, SHARED, row
from protocols.openai.tools import write_response_format
from protocols.params import Param


class Profile(Struct, frozen=True, kw_only=True):
    """One kind of worker."""

    chat: tuple[Param, ...]
    completion: tuple[Param, ...]
    embedding: tuple[Param, ...] = (row(EMBEDDING, "dimensions"),)
    labels: tuple[str, ...] = ("user",)
    message_style: Writing = Writing()
    max_stop_strings: int | None = None
    """The most stop strings it takes."""
    max_chat_logprobs: int | None = None
    max_completion_logprobs: int | None = None
    """The most alternatives beside a token, in conversations and in completions."""
    template_arguments: bool = True
    allowed_tools: bool = False
    """It knows ``allowed_tools``; others are given only those."""
    custom_tools: bool = False
    write_output_format: Callable[[OutputFormat], dict[str, Any] | None] = write_response_format
    """``response_format``, or None for what it can't say."""
    write_guide: Callable[[OutputFormat], Mapping[str, Any]] = lambda _: {}
    """The fields for outputs that ``response_format`` can't say."""
    completion_response_format: bool = True
    """It takes ``response_format`` with completions, too."""
    beam_search: bool = False
    token_ids: bool = False
    """It can say an answer's token ids."""
    privileged_params: tuple[Param, ...] = ()
    """Rows that are only written where the operator lets clients have them."""
    ignored_parts: Mapping[type[Part], str] = {}
    """Parts of messages that its workers pass over, and what they are called."""
    request_rules: Reading = READING
    """What a listener of this profile reads from its clients."""


SEED = Param(wire="seed", field="sampling.seed", type="int", low=0, high=2**64 - 1)
STOP = Param(wire="stop", field="stopping.stop", type="strings")
MAX_TOKENS = Param(wire="max_tokens", field="stopping.max_tokens", type="int")

_BASE = (
    MAX_TOKENS,
    *(row(SHARED, name) for name in ("temperature", "top_p", "n")),
    *(row(SHARED, name) for name in ("presence_penalty", "frequency_penalty")),
    SEED,
    STOP,
)
_EFFORT = Param(wire="reasoning_effort", field="reasoning.effort", type="str", choices=EFFORTS)
_PARALLEL = Param(wire="parallel_tool_calls", field="parallel_tools", type="bool")
_ECHO = Param(wire="echo", field="echo", type="bool")
_BEST_OF = Param(wire="best_of", field="best_of", type="int", low=1, high=20)
_SUFFIX = Param(wire="suffix", field="insert_before", type="str")


def _rows(*names: str) -> tuple[Param, ...]:
    return tuple(row(CHAT_EXTENSIONS, name) for name in names)


def _positive_top_p(table: tuple[Param, ...]) -> tuple[Param, ...]:
    """VLLM and SGLang refuse 0; the smallest nucleus is the same one token."""
    low = Param(wire="top_p", field="sampling.top_p", type="float", low=1e-6, high=1)
    return tuple(low if param.wire == "top_p" else param for param in table)


def _sglang_guide(output: OutputFormat) -> Mapping[str, Any]:
    match output:
        case Regex(pattern):
            return {"regex": pattern}
        case Grammar(text):
            return {"ebnf": text}
        case _:
            return {}


def _llamacpp_guide(output: OutputFormat) -> Mapping[str, Any]:
    return {"grammar": output.text} if isinstance(output, Grammar) else {}


def _vllm_guide(output: OutputFormat) -> Mapping[str, Any]:
    return {"structured_outputs": write_structured_outputs(output)}


_VLLM_BOTH = (
    *_positive_top_p(_BASE),
    *(param for param in EXTENSIONS if param.wire not in
      {"typical_p", "use_beam_search", "priority", "request_id", "session_id", "return_token_ids"}),
)  # fmt: skip
_SGLANG_BOTH = (
    *_positive_top_p(_BASE),
    *_rows("top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *_rows("skip_special_tokens"),
    Param(wire="no_stop_trim", field="stopping.include_stop", type="bool"),
)
_LLAMACPP_BOTH = (
    *_BASE,
    *_rows("top_k", "min_p", "typical_p", "ignore_eos"),
    Param(wire="repeat_penalty", field="sampling.repetition_penalty", type="float"),
)
_PRIORITY = row(EXTENSIONS, "priority")

PROFILES: Mapping[str, Profile] = {
    "openai": Profile(
        chat=(*_BASE, _EFFORT, _PARALLEL),
        completion=(*_BASE, _ECHO, _BEST_OF, _SUFFIX),
        labels=("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        max_stop_strings=4,
        max_chat_logprobs=20,
        max_completion_logprobs=5,
        template_arguments=False,
        allowed_tools=True,
        custom_tools=True,
        completion_response_format=False,
    ),
    "vllm": Profile(
        chat=(
            *_VLLM_BOTH,
            *_rows("add_generation_prompt", "continue_final_message", "include_reasoning"),
            *_rows("thinking_token_budget"),
            _EFFORT,
            _PARALLEL,
        ),
        completion=(*_VLLM_BOTH, _ECHO),
        embedding=(
            row(EMBEDDING, "dimensions"),
            Param(wire="truncate_prompt_tokens", field="truncate", type="int"),
        ),
        message_style=Writing(includes_reasoning=True),
        write_guide=_vllm_guide,
        beam_search=True,
        token_ids=True,
        privileged_params=(_PRIORITY, *_rows("chat_template")),
    ),
    "sglang": Profile(
        chat=(*_SGLANG_BOTH, *_rows("continue_final_message"), _EFFORT, _PARALLEL),
        completion=(*_SGLANG_BOTH, _ECHO, _SUFFIX),
        message_style=Writing(includes_reasoning=True),
        write_guide=_sglang_guide,
        token_ids=True,
        privileged_params=(_PRIORITY,),
    ),
    "llamacpp": Profile(
        chat=(
            *_LLAMACPP_BOTH,
            *_rows("add_generation_prompt"),
            Param(wire="reasoning_budget_tokens", field="reasoning.budget", type="int"),
            _PARALLEL,
        ),
        completion=_LLAMACPP_BOTH,
        message_style=Writing(includes_reasoning=True),
        write_guide=_llamacpp_guide,
    ),
    "interlingua": Profile(
        chat=(SEED, *written(OWN.chat)),
        completion=(SEED, *written(OWN.completion)),
        embedding=written(OWN.embedding),
        ignored_parts=UNSEEN,
        write_guide=_vllm_guide,
        token_ids=True,
        privileged_params=(_PRIORITY, *_rows("chat_template")),
        request_rules=OWN,
    ),
}
