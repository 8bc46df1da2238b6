"""What serving endpoints take of a gateway's request.

Source: the reference of the Foundation Model REST API. The service refuses a field that it does not
name, ``stream_options`` among them; what else a client sends has its place in ``extra_params``.
"""

from protocols.databricks import tables
from protocols.openai.messages import Writing
from protocols.openai.profiles import Profile
from protocols.openai.tables import CHAT, EXTENSIONS, row
from protocols.params import Param

EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""The nearest of those that are known, for the others."""

_MAX_TOKENS = Param(wire="max_tokens", field="stopping.max_tokens", type="int", low=1)
_TOP_P = Param(wire="top_p", field="sampling.top_p", type="float", low=1e-6, high=1)
_STOP = Param(wire="stop", field="stopping.stop", type="strings")
_N = Param(wire="n", field="n", type="int", low=1)
_EFFORT = Param(wire="reasoning_effort", field="reasoning.effort", type="str")
_ERROR_BEHAVIOR = row(tables.COMPLETION, "error_behavior")

_BOTH = (_MAX_TOKENS, row(CHAT, "temperature"), _TOP_P, row(tables.CHAT, "top_k"), _STOP)
_CHAT = (*_BOTH, _N, _EFFORT)
_COMPLETION = (*_BOTH, *(row(tables.COMPLETION, name) for name in ("echo", "suffix")))

_PENALTIES = tuple(row(CHAT, name) for name in ("presence_penalty", "frequency_penalty"))
_SEED = Param(wire="seed", field="sampling.seed", type="int")
_EXTRA = (
    *_PENALTIES,
    _SEED,
    *(
        row(EXTENSIONS, name)
        for name in (
            "min_p", "typical_p", "repetition_penalty", "length_penalty", "allowed_token_ids",
            "bad_words", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
            "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        )
    ),
)  # fmt: skip
_CHAT_EXTRA = (*_EXTRA, row(CHAT, "parallel_tool_calls"))

EXTRA = frozenset(param.wire for param in _CHAT_EXTRA)
"""The rows that go into ``extra_params``."""


def profile(*, pay_per_token: bool, extra: bool) -> Profile:
    """What an endpoint takes; ``extra``: with the rows that go into ``extra_params``."""
    behavior = (_ERROR_BEHAVIOR,) if pay_per_token else ()
    chat, completion = (_CHAT_EXTRA, _EXTRA) if extra else ((), ())
    return Profile(
        chat=(*_CHAT, *chat),
        completion=(*_COMPLETION, *behavior, *completion),
        embedding=(row(tables.EMBEDDING, "instruction"),),
        labels=(),
        message_style=Writing(part_format="joined", role_mapping=(("developer", "system"),)),
        max_chat_logprobs=20,
        template_arguments=False,
        completion_response_format=False,
    )
