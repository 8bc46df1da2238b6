"""What the workers that speak this dialect take, by profile.

Sources: OpenAI's specification 2.3.0; vLLM 0.32's and SGLang's protocol modules; llama.cpp's
server (tools/server); for our own workers, ``own``. A worker's row gives the range that the worker
takes: what lies outside is clamped, and reported.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from protocols.core.request import ContentPart, GrammarFormat, OutputFormat, RegexFormat
from protocols.openai.guides import write_structured_outputs
from protocols.openai.messages import MessageStyle
from protocols.openai.own import IGNORED_PARTS, INTERLINGUA_WORKER_RULES, select_written_params
from protocols.openai.requests import DEFAULT_REQUEST_RULES, RequestRules
from protocols.openai.tables import (
    CHAT_EXTENSION_PARAMS,
    EMBEDDING_PARAMS,
    EXTENSION_PARAMS,
    REASONING_EFFORTS,
    SHARED_PARAMS,
    find_param,
)
from protocols.openai.tools import write_response_format
from protocols.params import Param


class WorkerProfile(Struct, frozen=True, kw_only=True):
    """One kind of worker."""

    chat: tuple[Param, ...]
    completion: tuple[Param, ...]
    embedding: tuple[Param, ...] = (find_param(EMBEDDING_PARAMS, "dimensions"),)
    labels: tuple[str, ...] = ("user",)
    message_style: MessageStyle = MessageStyle()
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
    ignored_parts: Mapping[type[ContentPart], str] = {}
    """Parts of messages that its workers pass over, and what they are called."""
    request_rules: RequestRules = DEFAULT_REQUEST_RULES
    """What a listener of this profile reads from its clients."""


SEED_PARAM = Param(wire="seed", field="sampling.seed", type="int", low=0, high=2**64 - 1)
STOP_PARAM = Param(wire="stop", field="stopping.stop", type="strings")
MAX_TOKENS_PARAM = Param(wire="max_tokens", field="stopping.max_tokens", type="int")

_BASE_PARAMS = (
    MAX_TOKENS_PARAM,
    *(find_param(SHARED_PARAMS, name) for name in ("temperature", "top_p", "n")),
    *(find_param(SHARED_PARAMS, name) for name in ("presence_penalty", "frequency_penalty")),
    SEED_PARAM,
    STOP_PARAM,
)
_EFFORT = Param(
    wire="reasoning_effort", field="reasoning.effort", type="str", choices=REASONING_EFFORTS
)
_PARALLEL = Param(wire="parallel_tool_calls", field="parallel_tools", type="bool")
_ECHO = Param(wire="echo", field="echo", type="bool")
_BEST_OF = Param(wire="best_of", field="best_of", type="int", low=1, high=20)
_SUFFIX = Param(wire="suffix", field="insert_before", type="str")


def _find_params(*names: str) -> tuple[Param, ...]:
    return tuple(find_param(CHAT_EXTENSION_PARAMS, name) for name in names)


def _exclude_zero_top_p(table: tuple[Param, ...]) -> tuple[Param, ...]:
    """VLLM and SGLang refuse 0; the smallest nucleus is the same one token."""
    low = Param(wire="top_p", field="sampling.top_p", type="float", low=1e-6, high=1)
    return tuple(low if param.wire == "top_p" else param for param in table)


def _write_sglang_guide(output: OutputFormat) -> Mapping[str, Any]:
    match output:
        case RegexFormat(pattern):
            return {"regex": pattern}
        case GrammarFormat(text):
            return {"ebnf": text}
        case _:
            return {}


def _write_llamacpp_guide(output: OutputFormat) -> Mapping[str, Any]:
    return {"grammar": output.text} if isinstance(output, GrammarFormat) else {}


def _write_vllm_guide(output: OutputFormat) -> Mapping[str, Any]:
    return {"structured_outputs": write_structured_outputs(output)}


_VLLM_PARAMS = (
    *_exclude_zero_top_p(_BASE_PARAMS),
    *(param for param in EXTENSION_PARAMS if param.wire not in
      {"typical_p", "use_beam_search", "priority", "request_id", "session_id", "return_token_ids"}),
)  # fmt: skip
_SGLANG_PARAMS = (
    *_exclude_zero_top_p(_BASE_PARAMS),
    *_find_params(
        "top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"
    ),
    *_find_params("skip_special_tokens"),
    Param(wire="no_stop_trim", field="stopping.include_stop", type="bool"),
)
_LLAMACPP_PARAMS = (
    *_BASE_PARAMS,
    *_find_params("top_k", "min_p", "typical_p", "ignore_eos"),
    Param(wire="repeat_penalty", field="sampling.repetition_penalty", type="float"),
)
_PRIORITY = find_param(EXTENSION_PARAMS, "priority")

PROFILES: Mapping[str, WorkerProfile] = {
    "openai": WorkerProfile(
        chat=(*_BASE_PARAMS, _EFFORT, _PARALLEL),
        completion=(*_BASE_PARAMS, _ECHO, _BEST_OF, _SUFFIX),
        labels=("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        max_stop_strings=4,
        max_chat_logprobs=20,
        max_completion_logprobs=5,
        template_arguments=False,
        allowed_tools=True,
        custom_tools=True,
        completion_response_format=False,
    ),
    "vllm": WorkerProfile(
        chat=(
            *_VLLM_PARAMS,
            *_find_params("add_generation_prompt", "continue_final_message", "include_reasoning"),
            *_find_params("thinking_token_budget"),
            _EFFORT,
            _PARALLEL,
        ),
        completion=(*_VLLM_PARAMS, _ECHO),
        embedding=(
            find_param(EMBEDDING_PARAMS, "dimensions"),
            Param(wire="truncate_prompt_tokens", field="truncate", type="int"),
        ),
        message_style=MessageStyle(includes_reasoning=True),
        write_guide=_write_vllm_guide,
        beam_search=True,
        token_ids=True,
        privileged_params=(_PRIORITY, *_find_params("chat_template")),
    ),
    "sglang": WorkerProfile(
        chat=(*_SGLANG_PARAMS, *_find_params("continue_final_message"), _EFFORT, _PARALLEL),
        completion=(*_SGLANG_PARAMS, _ECHO, _SUFFIX),
        message_style=MessageStyle(includes_reasoning=True),
        write_guide=_write_sglang_guide,
        token_ids=True,
        privileged_params=(_PRIORITY,),
    ),
    "llamacpp": WorkerProfile(
        chat=(
            *_LLAMACPP_PARAMS,
            *_find_params("add_generation_prompt"),
            Param(wire="reasoning_budget_tokens", field="reasoning.budget", type="int"),
            _PARALLEL,
        ),
        completion=_LLAMACPP_PARAMS,
        message_style=MessageStyle(includes_reasoning=True),
        write_guide=_write_llamacpp_guide,
    ),
    "interlingua": WorkerProfile(
        chat=(SEED_PARAM, *select_written_params(INTERLINGUA_WORKER_RULES.chat)),
        completion=(SEED_PARAM, *select_written_params(INTERLINGUA_WORKER_RULES.completion)),
        embedding=select_written_params(INTERLINGUA_WORKER_RULES.embedding),
        ignored_parts=IGNORED_PARTS,
        write_guide=_write_vllm_guide,
        token_ids=True,
        privileged_params=(_PRIORITY, *_find_params("chat_template")),
        request_rules=INTERLINGUA_WORKER_RULES,
    ),
}
