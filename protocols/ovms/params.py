"""The scalar parameters in the order of the server's checks, with its error texts.

Source: openvinotoolkit/model_server, src/llm/apis (2026) and src/llm/http_llm_calculator.cc (2024);
its documentation, model_server_rest_api_chat.md, for the ranges of the first release.
"""

from collections.abc import Iterable, Mapping

from msgspec import Raw, Struct

from protocols.core.errors import InvalidParameter
from protocols.json_body import decode_value
from protocols.params import Param, ParsedParams, read_param

INT32_RANGE = (-(2**31), 2**31 - 1)
UINT32_RANGE = (0, 2**32 - 1)
JSON_INTEGER_RANGE = (-(2**63), 2**64 - 1)
MAX_STOP_STRINGS = 16


class OvmsParam(Struct, frozen=True):
    """A parameter and its error texts.

    ``integer_range`` is the range that the server's JSON library accepts as an integer of this
    kind; a value outside it is a type error, not a range error.
    """

    param: Param
    type_error: str
    range_error: str = ""
    integer_range: tuple[int, int] = INT32_RANGE


def _build_float_param(
    wire: str,
    field: str,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    text: str = "",
) -> OvmsParam:
    param = Param(wire, field, "float", minimum=minimum, maximum=maximum)
    range_error = text or f"{wire} out of range({minimum}, {maximum})"
    return OvmsParam(param, f"{wire} is not a valid number", range_error)


def _build_bool_param(wire: str, field: str, wrong_type: str) -> OvmsParam:
    return OvmsParam(Param(wire, field, "bool", default=False), wrong_type)


def _build_count_param(wire: str, field: str, disabled_values: tuple[float, ...] = ()) -> OvmsParam:
    return OvmsParam(
        Param(wire, field, "strict int", minimum=1, disabled_values=disabled_values, default=1),
        f"{wire} is not an unsigned integer",
        f"{wire} value should be greater than 0",
        UINT32_RANGE,
    )


class _MaxTokensParam(Param, frozen=True):
    def format_range_error(self, value: object) -> str:
        """See ``protocols.params.Param``."""
        del value
        if self.maximum != UINT32_RANGE[1]:
            return f"{self.wire} exceeds limit provided in graph config: {self.maximum}"
        return f"{self.wire} value can't be greater than {self.maximum}"

    def exceeds_limit(self, value: float, limit: float) -> bool:
        """See ``protocols.params.Param``: the server takes less than the limit of its graph."""
        return value >= limit


def _build_max_tokens_param(wire: str, *, null: bool) -> OvmsParam:
    row = _MaxTokensParam(
        wire,
        "stopping.max_tokens",
        "strict int",
        minimum=0,
        maximum=UINT32_RANGE[1],
        nullable=null,
        description="0 is judged after everything else: with echo it scores the prompt",
    )
    return OvmsParam(
        row,
        f"{wire} is not an unsigned integer",
        row.format_range_error(None),
        (0, JSON_INTEGER_RANGE[1]),
    )


IGNORE_EOS = _build_bool_param(
    "ignore_eos", "stopping.ignore_eos", "ignore_eos accepts values true or false"
)
MAX_TOKENS = _build_max_tokens_param("max_tokens", null=False)
MAX_COMPLETION_TOKENS = _build_max_tokens_param("max_completion_tokens", null=True)
_REPETITION_PENALTY = _build_float_param("repetition_penalty", "sampling.repetition_penalty")
_LENGTH_PENALTY = _build_float_param("length_penalty", "sampling.length_penalty")
_TEMPERATURE = _build_float_param("temperature", "sampling.temperature", 0.0, 2.0)
_BEST_OF = _build_count_param("best_of", "sampling.beam_width", disabled_values=(1,))
_N = _build_count_param("n", "n")

PARAMS_BEFORE_STOP = (
    IGNORE_EOS,
    MAX_TOKENS,
    _build_float_param("frequency_penalty", "sampling.frequency_penalty", -2.0, 2.0),
    _build_float_param("presence_penalty", "sampling.presence_penalty", -2.0, 2.0),
    _REPETITION_PENALTY,
    _LENGTH_PENALTY,
    _TEMPERATURE,
    _build_float_param("top_p", "sampling.top_p", 0.0, 1.0),
    OvmsParam(
        Param("min_p", "sampling.min_p", "float", minimum=0, maximum=1, exclusive_maximum=True),
        "min_p is not a valid number",
        "min_p out of range [0.0, 1.0)",
    ),
    OvmsParam(
        Param("top_k", "sampling.top_k", "strict int", minimum=1, disabled_values=(-1,)),
        "top_k is not an integer",
        "top_k must be -1 (all tokens) or a positive integer",
    ),
    OvmsParam(
        Param("seed", "sampling.seed", "strict int", minimum=0, maximum=UINT32_RANGE[1]),
        "seed is not an integer",
        f"seed out of range [0, {UINT32_RANGE[1]}]",
        JSON_INTEGER_RANGE,
    ),
)
"""The parameters before ``stop``, which is read separately."""

INCLUDE_STOP = _build_bool_param(
    "include_stop_str_in_output",
    "stopping.include_stop",
    "include_stop_str_in_output accepts values true or false",
)
BEST_OF_PARAMS = (_BEST_OF,)
PARAMS_AFTER_BEST_OF = (
    _N,
    _build_bool_param(
        "skip_special_tokens", "stopping.skip_special_tokens", "skip_special_tokens is not a bool"
    ),
)

EARLY_PARAMS = (
    IGNORE_EOS,
    MAX_TOKENS,
    _REPETITION_PENALTY,
    _build_float_param("diversity_penalty", "sampling.diversity_penalty"),
    _LENGTH_PENALTY,
    _TEMPERATURE,
    OvmsParam(
        Param("top_p", "sampling.top_p", "float", minimum=0, maximum=1, exclusive_minimum=True),
        "top_p is not a valid number",
        "top_p out of range(0.0, 1.0)",
    ),
    OvmsParam(
        Param("top_k", "sampling.top_k", "strict int", minimum=1, disabled_values=(0,), default=0),
        "top_k is not an integer",
        "top_k must be 0 (all tokens) or a positive integer",
    ),
    OvmsParam(
        Param("seed", "sampling.seed", "strict int", minimum=0, maximum=UINT32_RANGE[1]),
        "seed is not an unsigned integer",
        "seed is not an unsigned integer",
        UINT32_RANGE,
    ),
    _BEST_OF,
    _N,
)
"""The parameters of the first release, which ignores all later ones."""

_STOP = OvmsParam(Param("stop", "stopping.stop", "strings", max_items=MAX_STOP_STRINGS), "")
_COMMON_PARAMS = (*PARAMS_BEFORE_STOP, _STOP, INCLUDE_STOP, *BEST_OF_PARAMS, *PARAMS_AFTER_BEST_OF)
_CHAT_PARAMS = (
    *_COMMON_PARAMS,
    _build_bool_param("logprobs", "logprobs.top", "logprobs accepts values true or false"),
    MAX_COMPLETION_TOKENS,
)
_COMPLETION_PARAMS = (
    *_COMMON_PARAMS,
    OvmsParam(Param("logprobs", "logprobs.top", "strict int", minimum=1, maximum=1), ""),
    _build_bool_param("echo", "echo", "echo accepts values true or false"),
)

ALL_PARAMS = (
    *_COMPLETION_PARAMS,
    *_CHAT_PARAMS[-2:],
    *(row for row in EARLY_PARAMS if row.param.wire == "diversity_penalty"),
)
"""Parameter tables for documentation and loss reports."""


def _list_params(rows: Iterable[OvmsParam]) -> tuple[Param, ...]:
    return tuple(row.param for row in rows)


PARAM_TABLES: Mapping[str, tuple[Param, ...]] = {
    "chat": _list_params(_CHAT_PARAMS),
    "completion": _list_params(_COMPLETION_PARAMS),
}
EARLY_PARAM_TABLES: Mapping[str, tuple[Param, ...]] = dict.fromkeys(
    PARAM_TABLES, _list_params(EARLY_PARAMS)
)
"""See ``protocols.params.ParamTableProvider``."""


def read_params(rows: Iterable[OvmsParam], fields: Mapping[str, Raw], into: ParsedParams) -> None:
    """Read these parameters. Raises InvalidParameter with the server's text for the first error."""
    for row in rows:
        raw = fields.get(row.param.wire)
        if raw is None:
            continue
        value = decode_value(raw)
        low, high = row.integer_range
        if type(value) is int and not low <= value <= high:
            raise _build_value_error(row, row.type_error, value)
        try:
            read_param(row.param, raw, into)
        except InvalidParameter as error:
            wrong_type = error.problem == "type"
            raise _build_value_error(
                row, row.type_error if wrong_type else row.range_error, value
            ) from None


def _build_value_error(row: OvmsParam, text: str, value: object) -> InvalidParameter:
    return InvalidParameter(text, param=row.param.wire, expected=row.param, got=value)
