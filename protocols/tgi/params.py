"""Parameters of ``/generate``, towards workers and for clients.

Source: text-generation-inference 3.3, ``router/src/lib.rs`` and ``validation.rs``. A worker's row
gives the accepted range, outside of which values are clamped and reported; for clients they are
errors.
"""

from functools import lru_cache
from typing import Final

from msgspec import Struct

from protocols.chat.params import replace_params
from protocols.core.request_headers import RequestHeaders
from protocols.params import Param, ParamTable

REQUEST_HEADERS: Final = RequestHeaders(("x-hf-",), {"x-use-cache": "reported"})
"""Those of the vendor's endpoints: who pays, and whether an earlier answer will do."""
_MIN_POSITIVE: Final = 1e-6
"""The smallest value of a parameter that must be above 0."""
MAX_TOP_TOKENS: Final = 5
"""The maximum number of alternatives for a token: the launcher's default; not reported."""


class TgiLimits(Struct, frozen=True):
    """Limits that the server's operator sets; the defaults are the launcher's."""

    max_stop_strings: int = 4
    max_best_of: int = 2
    max_prompt_tokens: int | None = None
    """The maximum prompt length in tokens, if reported."""


STOP: Final = Param(
    wire="stop",
    field="stopping.stop",
    type="strings",
    loss_reason="approximated",
    description="stays in the text, and is seen only where a token ends with it",
)
SEED: Final = Param("seed", "sampling.seed", "int", 0, 2**64 - 1)
TOP_P: Final = Param("top_p", "sampling.top_p", "float", _MIN_POSITIVE, 1)
FREQUENCY_PENALTY: Final = Param("frequency_penalty", "sampling.frequency_penalty", "float", -2, 2)

_GENERATE_PARAMS: Final[tuple[Param, ...]] = (
    Param("best_of", "best_of", "int", 1),
    Param("temperature", "sampling.temperature", "float", _MIN_POSITIVE),
    Param("repetition_penalty", "sampling.repetition_penalty", "float", _MIN_POSITIVE),
    FREQUENCY_PENALTY,
    Param("top_k", "sampling.top_k", "int", 1, 2**31 - 1),
    TOP_P,
    Param("typical_p", "sampling.typical_p", "float", _MIN_POSITIVE, 1),
    Param("do_sample", "sampling.do_sample", "bool"),
    Param("max_new_tokens", "stopping.max_tokens", "int", 1),
    STOP,
    Param("truncate", "stopping.truncate_prompt", "int", 1),
    Param("watermark", "sampling.watermark", "bool"),
    SEED,
    Param("adapter_id", "adapter", "str"),
)


@lru_cache(maxsize=64)
def build_generate_table(limits: TgiLimits) -> ParamTable:
    """The ``parameters`` of ``/generate``."""
    rows = replace_params(
        _GENERATE_PARAMS,
        best_of={"maximum": limits.max_best_of},
        truncate={"maximum": limits.max_prompt_tokens},
    )
    return ParamTable(*rows)


def build_client_table(limits: TgiLimits) -> ParamTable:
    """The ``parameters`` of ``/generate`` that clients may send."""
    positive = {"minimum": 0, "exclusive_minimum": True}
    fraction = {**positive, "maximum": 1, "exclusive_maximum": True}
    rows = replace_params(
        _GENERATE_PARAMS,
        best_of={"field": "request.best_of", "maximum": limits.max_best_of},
        temperature=positive,
        repetition_penalty=positive,
        top_p=fraction,
        typical_p=fraction,
        stop={"type": "string list", "max_items": limits.max_stop_strings, "loss_reason": None},
        truncate={"maximum": limits.max_prompt_tokens},
    )
    return ParamTable(
        *rows,
        Param("details", "response_options.details", "bool", default=False),
        Param("decoder_input_details", "request.decoder_input_details", "bool", default=False),
        Param("return_full_text", "request.return_full_text", "bool", default=False),
        Param("top_n_tokens", "request.top_n_tokens", "int", 0, MAX_TOP_TOKENS),
    )
