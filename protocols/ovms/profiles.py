"""What a server takes of a gateway's request, by release.

Source: openvinotoolkit/model_server, src/llm/apis (2026) and its documentation of 2024,
model_server_rest_api_chat.md; for what is refused only when the text is made:
openvinotoolkit/openvino.genai, src/cpp/src/generation_config.cpp.
"""

from collections.abc import Mapping

from protocols.openai.messages import MessageStyle
from protocols.openai.profiles import WorkerProfile
from protocols.ovms import tables
from protocols.params import Param

SEED_COUNT = 2**32
"""How many seeds there are."""
MAX_BEAM_WIDTH = 19
"""A graph's ``best_of_limit`` is 20 unless it says otherwise, and is itself refused."""

_TOP_P = Param(wire="top_p", field="sampling.top_p", type="float", low=1e-6, high=1)
_MIN_P = Param(wire="min_p", field="sampling.min_p", type="float", low=0, high=0.999999)
_SEED = Param(wire="seed", field="sampling.seed", type="int")
_BEST_OF = Param(
    wire="best_of", field="sampling.beam_width", type="int", low=1, high=MAX_BEAM_WIDTH
)
_N = Param(wire="n", field="n", type="int", low=1)
_MAX_TOKENS = Param(
    wire="max_tokens", field="stopping.max_tokens", type="int", low=1, high=tables.UINT32_RANGE[1]
)
_ECHO = Param(wire="echo", field="echo", type="bool")


def _select_params(*names: str) -> tuple[Param, ...]:
    rows = {row.param.wire: row.param for row in tables.ALL_PARAMS}
    return tuple(rows[name] for name in names)


_EARLY_PARAMS = (
    _MAX_TOKENS,
    *_select_params("ignore_eos", "repetition_penalty", "diversity_penalty", "length_penalty"),
    *_select_params("temperature", "top_k"),
    _TOP_P,
    _SEED,
    _BEST_OF,
    _N,
)
_CURRENT_PARAMS = (
    *(param for param in _EARLY_PARAMS if param.wire != "diversity_penalty"),
    *_select_params("frequency_penalty", "presence_penalty", "stop", "include_stop_str_in_output"),
    *_select_params("skip_special_tokens"),
    _MIN_P,
)

WORKER_PROFILES: Mapping[str, WorkerProfile] = {
    "2026": WorkerProfile(
        chat=_CURRENT_PARAMS,
        completion=(*_CURRENT_PARAMS, _ECHO),
        embedding=(),
        labels=(),
        message_style=MessageStyle(includes_reasoning=True),
        max_stop_strings=tables.MAX_STOP_STRINGS,
        max_chat_logprobs=0,
        max_completion_logprobs=1,
        completion_response_format=False,
    ),
    "2024": WorkerProfile(
        chat=_EARLY_PARAMS,
        completion=_EARLY_PARAMS,
        embedding=(),
        labels=(),
        message_style=MessageStyle(
            part_format="joined", empty_content="", role_mapping=(("developer", "system"),)
        ),
        template_arguments=False,
        completion_response_format=False,
    ),
}
