"""What a server takes of a gateway's request, by release.

Source: openvinotoolkit/model_server, src/llm/apis (2026) and its documentation of 2024,
model_server_rest_api_chat.md; for what is refused only when the text is made:
openvinotoolkit/openvino.genai, src/cpp/src/generation_config.cpp.
"""

from collections.abc import Mapping

from protocols.openai.messages import Writing
from protocols.openai.profiles import Profile
from protocols.ovms import tables
from protocols.params import Param

SEEDS = 2**32
"""How many seeds there are."""
MOST_BEAMS = 19
"""A graph's ``best_of_limit`` is 20 unless it says otherwise, and is itself refused."""

_TOP_P = Param(wire="top_p", field="sampling.top_p", type="float", low=1e-6, high=1)
_MIN_P = Param(wire="min_p", field="sampling.min_p", type="float", low=0, high=0.999999)
_SEED = Param(wire="seed", field="sampling.seed", type="int")
_BEST_OF = Param(wire="best_of", field="sampling.beam_width", type="int", low=1, high=MOST_BEAMS)
_N = Param(wire="n", field="n", type="int", low=1)
_MAX_TOKENS = Param(
    wire="max_tokens", field="stopping.max_tokens", type="int", low=1, high=tables.UINT32[1]
)
_ECHO = Param(wire="echo", field="echo", type="bool")


def _rows(*names: str) -> tuple[Param, ...]:
    rows = {row.param.wire: row.param for row in tables.ALL}
    return tuple(rows[name] for name in names)


_EARLY = (
    _MAX_TOKENS,
    *_rows("ignore_eos", "repetition_penalty", "diversity_penalty", "length_penalty"),
    *_rows("temperature", "top_k"),
    _TOP_P,
    _SEED,
    _BEST_OF,
    _N,
)
_BOTH = (
    *(param for param in _EARLY if param.wire != "diversity_penalty"),
    *_rows("frequency_penalty", "presence_penalty", "stop", "include_stop_str_in_output"),
    *_rows("skip_special_tokens"),
    _MIN_P,
)

PROFILES: Mapping[str, Profile] = {
    "2026": Profile(
        chat=_BOTH,
        completion=(*_BOTH, _ECHO),
        embedding=(),
        labels=(),
        message_style=Writing(includes_reasoning=True),
        max_stop_strings=tables.MOST_STOPS,
        max_chat_logprobs=0,
        max_completion_logprobs=1,
        completion_response_format=False,
    ),
    "2024": Profile(
        chat=_EARLY,
        completion=_EARLY,
        embedding=(),
        labels=(),
        message_style=Writing(
            part_format="joined", empty_content="", role_mapping=(("developer", "system"),)
        ),
        template_arguments=False,
        completion_response_format=False,
    ),
}
