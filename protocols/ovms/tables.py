"""The scalar parameters, in the order in which the server checks them, with its words for each.

Source: openvinotoolkit/model_server, src/llm/apis (2026) and src/llm/http_llm_calculator.cc (2024);
its documentation, model_server_rest_api_chat.md, for the ranges that the early release promised.
"""

from collections.abc import Iterable, Mapping

from msgspec import Raw, Struct

from gateway.core.errors import InvalidParameter
from protocols.body import value
from protocols.params import Param, Values, take

INT32 = (-(2**31), 2**31 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (-(2**63), 2**64 - 1)
MOST_STOPS = 16


class Row(Struct, frozen=True):
    """A parameter, and what the server says of a wrong one.

    ``takes`` is the range of integers that its JSON library calls a number of the wanted kind; one
    beyond it is of a wrong type, and not out of range.
    """

    param: Param
    type_error: str
    range_error: str = ""
    integer_range: tuple[int, int] = INT32


def _number(
    wire: str, field: str, low: float | None = None, high: float | None = None, *, text: str = ""
) -> Row:
    param = Param(wire=wire, field=field, type="float", low=low, high=high)
    shown = text or f"{wire} out of range({low}, {high})"
    return Row(param, f"{wire} is not a valid number", shown)


def _flag(wire: str, field: str, wrong_type: str) -> Row:
    return Row(Param(wire=wire, field=field, type="bool", default=False), wrong_type)


def _count(wire: str, field: str, off: tuple[float, ...] = ()) -> Row:
    return Row(
        Param(wire=wire, field=field, type="strict int", low=1, off=off, default=1),
        f"{wire} is not an unsigned integer",
        f"{wire} value should be greater than 0",
        UINT32,
    )


def _tokens(wire: str, *, null: bool) -> Row:
    return Row(
        Param(
            wire=wire,
            field="stopping.max_tokens",
            type="strict int",
            low=0,
            high=UINT32[1],
            null=null,
            note="0 is judged after everything else: with echo it scores the prompt",
        ),
        f"{wire} is not an unsigned integer",
        f"{wire} value can't be greater than {UINT32[1]}",
        (0, UINT64[1]),
    )


IGNORE_EOS = _flag("ignore_eos", "stopping.ignore_eos", "ignore_eos accepts values true or false")
MAX_TOKENS = _tokens("max_tokens", null=False)
MAX_COMPLETION_TOKENS = _tokens("max_completion_tokens", null=True)
_REPETITION = _number("repetition_penalty", "sampling.repetition_penalty")
_LENGTH = _number("length_penalty", "sampling.length_penalty")
_TEMPERATURE = _number("temperature", "sampling.temperature", 0.0, 2.0)
_BEST_OF = _count("best_of", "sampling.beam_width", off=(1,))
_N = _count("n", "n")

BEFORE_STOP = (
    IGNORE_EOS,
    MAX_TOKENS,
    _number("frequency_penalty", "sampling.frequency_penalty", -2.0, 2.0),
    _number("presence_penalty", "sampling.presence_penalty", -2.0, 2.0),
    _REPETITION,
    _LENGTH,
    _TEMPERATURE,
    _number("top_p", "sampling.top_p", 0.0, 1.0),
    Row(
        Param(wire="min_p", field="sampling.min_p", type="float", low=0, high=1, below_high=True),
        "min_p is not a valid number",
        "min_p out of range [0.0, 1.0)",
    ),
    Row(
        Param(wire="top_k", field="sampling.top_k", type="strict int", low=1, off=(-1,)),
        "top_k is not an integer",
        "top_k must be -1 (all tokens) or a positive integer",
    ),
    Row(
        Param(wire="seed", field="sampling.seed", type="strict int", low=0, high=UINT32[1]),
        "seed is not an integer",
        f"seed out of range [0, {UINT32[1]}]",
        UINT64,
    ),
)
"""Those before ``stop``, which has a reading of its own."""

INCLUDE_STOP = _flag(
    "include_stop_str_in_output",
    "stopping.include_stop",
    "include_stop_str_in_output accepts values true or false",
)
BEST_OF = (_BEST_OF,)
AFTER_BEST_OF = (
    _N,
    _flag(
        "skip_special_tokens", "stopping.skip_special_tokens", "skip_special_tokens is not a bool"
    ),
)

EARLY = (
    IGNORE_EOS,
    MAX_TOKENS,
    _REPETITION,
    _number("diversity_penalty", "sampling.diversity_penalty"),
    _LENGTH,
    _TEMPERATURE,
    Row(
        Param(wire="top_p", field="sampling.top_p", type="float", low=0, high=1, above_low=True),
        "top_p is not a valid number",
        "top_p out of range(0.0, 1.0)",
    ),
    Row(
        Param(wire="top_k", field="sampling.top_k", type="strict int", low=1, off=(0,), default=0),
        "top_k is not an integer",
        "top_k must be 0 (all tokens) or a positive integer",
    ),
    Row(
        Param(wire="seed", field="sampling.seed", type="strict int", low=0, high=UINT32[1]),
        "seed is not an unsigned integer",
        "seed is not an unsigned integer",
        UINT32,
    ),
    _BEST_OF,
    _N,
)
"""All that the early release knew; the rest of today's it ignored."""

_STOP = Row(Param(wire="stop", field="stopping.stop", type="strings", max_items=MOST_STOPS), "")
_COMMON = (*BEFORE_STOP, _STOP, INCLUDE_STOP, *BEST_OF, *AFTER_BEST_OF)
_CHAT = (
    *_COMMON,
    _flag("logprobs", "logprobs.top", "logprobs accepts values true or false"),
    MAX_COMPLETION_TOKENS,
)
_COMPLETION = (
    *_COMMON,
    Row(Param(wire="logprobs", field="logprobs.top", type="strict int", low=1, high=1), ""),
    _flag("echo", "echo", "echo accepts values true or false"),
)

ALL = (
    *_COMPLETION,
    *_CHAT[-2:],
    *(row for row in EARLY if row.param.wire == "diversity_penalty"),
)
"""For reports."""


def _rows(rows: Iterable[Row]) -> tuple[Param, ...]:
    return tuple(row.param for row in rows)


TABLES: Mapping[str, tuple[Param, ...]] = {"chat": _rows(_CHAT), "completion": _rows(_COMPLETION)}
EARLY_TABLES: Mapping[str, tuple[Param, ...]] = dict.fromkeys(TABLES, _rows(EARLY))
"""See ``protocols.params.Tabled``."""


def read(rows: Iterable[Row], fields: Mapping[str, Raw], into: Values) -> None:
    """Read these parameters. Raises InvalidParameter in the server's words for the first wrong."""
    for row in rows:
        raw = fields.get(row.param.wire)
        if raw is None:
            continue
        got = value(raw)
        low, high = row.integer_range
        if type(got) is int and not low <= got <= high:
            raise _complaint(row, row.type_error, got)
        try:
            take(row.param, raw, into)
        except InvalidParameter as error:
            wrong_type = error.problem == "type"
            raise _complaint(row, row.type_error if wrong_type else row.range_error, got) from None


def _complaint(row: Row, text: str, got: object) -> InvalidParameter:
    return InvalidParameter(text, param=row.param.wire, expected=row.param, got=got)
