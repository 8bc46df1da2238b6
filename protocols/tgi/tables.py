"""What TGI's servers take: scalar parameters, and the forms that an answer may be bound to.

Source: text-generation-inference 3.3, ``router/src/lib.rs`` and ``validation.rs``. A row gives the
range that is taken: what lies outside is clamped, and reported.
"""

import re
from functools import lru_cache
from typing import Any

from msgspec import Struct

from protocols.core.request import ChoiceFormat, JsonSchemaFormat, OutputFormat, RegexFormat
from protocols.openai.profiles import WorkerProfile
from protocols.openai.tables import replace_params
from protocols.params import Param, ParamTable

MIN_POSITIVE = 1e-6
"""The least of what must be above 0."""
MAX_TOP_TOKENS = 5
"""The most alternatives beside a token; it is not told, so this is the launcher's default."""


class TgiLimits(Struct, frozen=True):
    """What the operator of a server allows; the defaults are its launcher's."""

    max_stop_strings: int = 4
    max_best_of: int = 2
    max_prompt_tokens: int | None = None
    """The longest prompt in tokens, where it was told."""


_STOP = Param(
    wire="stop",
    field="stopping.stop",
    type="strings",
    reason="approximated",
    note="stays in the text, and is seen only where a token ends with it",
)
_SEED = Param(wire="seed", field="sampling.seed", type="int", low=0, high=2**64 - 1)
_TOP_P = Param(wire="top_p", field="sampling.top_p", type="float", low=MIN_POSITIVE, high=1)
_FREQUENCY_PENALTY = Param(
    wire="frequency_penalty", field="sampling.frequency_penalty", type="float", low=-2, high=2
)

_GENERATE_PARAMS: tuple[Param, ...] = (
    Param(wire="best_of", field="best_of", type="int", low=1),
    Param(wire="temperature", field="sampling.temperature", type="float", low=MIN_POSITIVE),
    Param(
        wire="repetition_penalty",
        field="sampling.repetition_penalty",
        type="float",
        low=MIN_POSITIVE,
    ),
    _FREQUENCY_PENALTY,
    Param(wire="top_k", field="sampling.top_k", type="int", low=1, high=2**31 - 1),
    _TOP_P,
    Param(wire="typical_p", field="sampling.typical_p", type="float", low=MIN_POSITIVE, high=1),
    Param(wire="do_sample", field="sampling.do_sample", type="bool"),
    Param(wire="max_new_tokens", field="stopping.max_tokens", type="int", low=1),
    _STOP,
    Param(wire="truncate", field="stopping.truncate_prompt", type="int", low=1),
    Param(wire="watermark", field="sampling.watermark", type="bool"),
    _SEED,
    Param(wire="adapter_id", field="adapter", type="str"),
)


@lru_cache(maxsize=64)
def build_generate_table(limits: TgiLimits) -> ParamTable:
    """The ``parameters`` of ``/generate``."""
    highest: dict[str, Any] = {"high": limits.max_best_of}
    longest: dict[str, Any] = {"high": limits.max_prompt_tokens}
    return ParamTable(*replace_params(_GENERATE_PARAMS, best_of=highest, truncate=longest))


def write_output_format(output: OutputFormat) -> dict[str, Any] | None:
    """A ``grammar`` of ``/generate``, and a ``response_format`` of conversations; None for others.

    A schema without ``properties`` is refused by the server.
    """
    match output:
        case JsonSchemaFormat(schema):
            return {"type": "json", "value": schema}
        case RegexFormat(pattern):
            return {"type": "regex", "value": pattern}
        case ChoiceFormat(options):
            return {"type": "regex", "value": f"({'|'.join(map(re.escape, options))})"}
        case _:
            return None


CHAT_PROFILE = WorkerProfile(
    chat=(
        Param(wire="model", field="adapter", type="str"),
        Param(wire="max_tokens", field="stopping.max_tokens", type="int", low=1),
        Param(wire="temperature", field="sampling.temperature", type="float", low=0),
        _TOP_P,
        _FREQUENCY_PENALTY,
        _SEED,
        _STOP,
    ),
    completion=(),
    labels=(),
    max_chat_logprobs=MAX_TOP_TOKENS,
    template_arguments=False,
    write_output_format=write_output_format,
)
"""Conversations. ``n``, ``logit_bias`` and whatever it does not know are read and not heeded;
``presence_penalty`` becomes a repetition penalty of two more."""
