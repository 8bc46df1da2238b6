"""What serving endpoints take of a gateway's request.

Source: the reference of the Foundation Model REST API. The service refuses a field that it does not
name, ``stream_options`` among them; what else a client sends has its place in ``extra_params``.
"""

from protocols.databricks import tables
from protocols.openai.messages import MessageStyle
from protocols.openai.profiles import WorkerProfile
from protocols.openai.tables import CHAT_PARAMS, EXTENSION_PARAMS, find_param
from protocols.params import Param

EFFORT_MAPPING = {"minimal": "low", "xhigh": "high", "max": "high"}
"""The nearest of those that are known, for the others."""

_MAX_TOKENS = Param(wire="max_tokens", field="stopping.max_tokens", type="int", low=1)
_TOP_P = Param(wire="top_p", field="sampling.top_p", type="float", low=1e-6, high=1)
_STOP = Param(wire="stop", field="stopping.stop", type="strings")
_N = Param(wire="n", field="n", type="int", low=1)
_EFFORT = Param(wire="reasoning_effort", field="reasoning.effort", type="str")
_ERROR_BEHAVIOR = find_param(tables.COMPLETION_PARAMS, "error_behavior")

_SHARED_PARAMS = (
    _MAX_TOKENS,
    find_param(CHAT_PARAMS, "temperature"),
    _TOP_P,
    find_param(tables.CHAT_PARAMS, "top_k"),
    _STOP,
)
_CHAT_PARAMS = (*_SHARED_PARAMS, _N, _EFFORT)
_COMPLETION_PARAMS = (
    *_SHARED_PARAMS,
    *(find_param(tables.COMPLETION_PARAMS, name) for name in ("echo", "suffix")),
)

_PENALTY_PARAMS = tuple(
    find_param(CHAT_PARAMS, name) for name in ("presence_penalty", "frequency_penalty")
)
_SEED = Param(wire="seed", field="sampling.seed", type="int")
_EXTRA_COMPLETION_PARAMS = (
    *_PENALTY_PARAMS,
    _SEED,
    *(
        find_param(EXTENSION_PARAMS, name)
        for name in (
            "min_p", "typical_p", "repetition_penalty", "length_penalty", "allowed_token_ids",
            "bad_words", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
            "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        )
    ),
)  # fmt: skip
_EXTRA_CHAT_PARAMS = (*_EXTRA_COMPLETION_PARAMS, find_param(CHAT_PARAMS, "parallel_tool_calls"))

EXTRA_PARAM_NAMES = frozenset(param.wire for param in _EXTRA_CHAT_PARAMS)
"""The rows that go into ``extra_params``."""


def build_profile(*, pay_per_token: bool, extra: bool) -> WorkerProfile:
    """What an endpoint takes; ``extra``: with the rows that go into ``extra_params``."""
    behavior = (_ERROR_BEHAVIOR,) if pay_per_token else ()
    chat, completion = (_EXTRA_CHAT_PARAMS, _EXTRA_COMPLETION_PARAMS) if extra else ((), ())
    return WorkerProfile(
        chat=(*_CHAT_PARAMS, *chat),
        completion=(*_COMPLETION_PARAMS, *behavior, *completion),
        embedding=(find_param(tables.EMBEDDING_PARAMS, "instruction"),),
        labels=(),
        message_style=MessageStyle(part_format="joined", role_mapping=(("developer", "system"),)),
        max_chat_logprobs=20,
        template_arguments=False,
        completion_response_format=False,
    )
