"""Parameter tables of each endpoint, in the order of the server's checks; profiles and config.

Paths under ``request.`` are no field of the internal request: request readers combine them. Values
under ``extra.`` are checked and stay in ``extra`` unchanged.

Source: MindIE-LLM 0695772, SetupInferParams of src/server/endpoint/single_req_infer_interface/*;
for 1.0.RC1 the published pages.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from protocols import params
from protocols.core.errors import InvalidParameter, MalformedRequest, ParameterProblem
from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import JsonDecoder
from protocols.core.request import PromptOptions
from protocols.json_body import decode_value, read_object
from protocols.params import Param, ParamType, ParsedParams

# Checks of a request's fields in the server's order; the first failure is reported.
#
# A null field counts as absent. Numbers in error texts have the format of the server's JSON
# library. Source: MindIE-LLM 0695772, src/server/endpoint/utils/infer_param.cpp and
# parameters_checker.cpp.

decode_fields = JsonDecoder(dict[str, Raw]).decode
"""Decode the fields of a JSON object; the values stay raw."""
_decode_items = JsonDecoder(list[Raw]).decode
_INT64_LIMIT = 2**63
_EXPONENT_THRESHOLD = 10**15
_REPR_EXPONENT_THRESHOLD = 10**16


class MindieParam(Param, frozen=True):
    """A scalar parameter and its error texts."""

    unsigned: bool = False
    """Whether the server reads an unsigned integer."""
    range_error: str = ""
    """The text for a value outside the range; by default, that of ``_RANGE_ERRORS``."""
    type_error: str = ""
    """The text for a value of another type; by default ``NAME must be KIND type.``"""

    def format_range_error(self, value: Any) -> str:
        """See ``protocols.params.Param``; also for a value below ``minimum``."""
        return (self.range_error or _RANGE_ERRORS[self.wire]).format(
            got=format_json_number(value),
            maximum="3.40282e+38" if self.maximum == FLOAT32_MAX else self.maximum,
        )


class ParamCheck(Struct, frozen=True):
    """A check that a table row cannot express. ``field`` is the path that it sets.

    ``type`` is the parameter's type if it has no row.
    """

    wire: str
    field: str
    run: Callable[[Mapping[str, Raw], ParsedParams], None]
    type: ParamType | None = None


MindieParamTable = tuple[MindieParam | ParamCheck, ...]


def build_param_error(
    text: str, param: str, problem: ParameterProblem = "value"
) -> InvalidParameter:
    """Build an error with the server's text."""
    return InvalidParameter(text, param=param, problem=problem)


def check_value(
    value: Any, kind: type, param: str, wrong_type: str, *, missing: str = "", empty: str = ""
) -> Any:
    """Return the value if it is of this type. Raises InvalidParameter with one of the texts.

    Without ``missing``, null is a wrong type; without ``empty``, an empty value is accepted.
    """
    if value is None and missing:
        raise build_param_error(missing, param, "missing")
    if not isinstance(value, kind):
        raise build_param_error(wrong_type, param, "type")
    if empty and not value:
        raise build_param_error(empty, param, "empty")
    return value


def read_body_fields(call: ClientRequest) -> Mapping[str, Raw]:
    """Decode the body's fields; empty for JSON that is not an object, as in the server.

    Raises MalformedRequest.
    """
    try:
        return read_object(call.body)
    except MalformedRequest as error:
        if error.problem != "object":
            raise
        decode_value(call.body)  # only the first byte was checked: it may be invalid JSON
        return {}


def get_field(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a field's value; None if it is absent. Raises MalformedRequest."""
    raw = fields.get(name)
    return None if raw is None else decode_value(raw)


def read_object_field(fields: Mapping[str, Raw], name: str) -> Mapping[str, Raw]:
    """Decode a nested object. Raises InvalidParameter or MalformedRequest."""
    value = get_field(fields, name)
    if value is None:
        return {}
    check_value(value, dict, name, f"{name} must be object type.")
    return decode_fields(fields[name])


def read_first_object(raw: Raw) -> Mapping[str, Raw]:
    """Decode the first object of a non-empty list of objects."""
    return decode_fields(_decode_items(raw)[0])


def read_params(table: MindieParamTable, fields: Mapping[str, Raw]) -> ParsedParams:
    """Read the values of ``table`` in order. Raises InvalidParameter or MalformedRequest."""
    values = ParsedParams()
    for row in table:
        if isinstance(row, ParamCheck):
            row.run(fields, values)
        elif row.wire in fields:
            _read_param(row, fields, values)
    return values


def _read_param(param: MindieParam, fields: Mapping[str, Raw], values: ParsedParams) -> None:
    try:
        params.read_param(param, fields[param.wire], values)
    except InvalidParameter as error:
        value = get_field(fields, param.wire)  # keep the JSON as it was sent: 0, not 0.0
        raise _reword_error(param, error, value) from None


def collect_extra_fields(
    table: MindieParamTable, fields: Mapping[str, Raw], read_elsewhere: Iterable[str] = ()
) -> dict[str, Raw]:
    """Return the raw fields that are not part of the internal request."""
    dropped = {row.wire for row in table if not row.field.startswith("extra.")} | set(
        read_elsewhere
    )
    return {name: raw for name, raw in fields.items() if name not in dropped}


def map_field_names(table: MindieParamTable) -> dict[str, str]:
    """Return the wire name of each path of the internal request."""
    return {
        row.field: row.wire for row in table if not row.field.startswith(("request.", "extra."))
    }


def list_params(table: MindieParamTable) -> tuple[Param, ...]:
    """List the parameters of a table, including those that a check reads."""
    rows: list[Param] = []
    for row in table:
        if isinstance(row, MindieParam):
            rows.append(row)
        elif row.type is not None:
            rows.append(Param(row.wire, row.field, row.type))
    return tuple(rows)


def format_json_number(number: Any) -> str:
    """Format a number as nlohmann::json does: exponents from 1e+15 on, and below 1e-4."""
    if isinstance(number, int) and not -_INT64_LIMIT <= number < 2 * _INT64_LIMIT:
        number = float(number)
    text = repr(number)
    if (
        isinstance(number, float)
        and _EXPONENT_THRESHOLD <= abs(number) < _REPR_EXPONENT_THRESHOLD
        and "e" not in text
    ):
        sign = "-" if number < 0 else ""
        digits = text.lstrip("-").replace(".", "").rstrip("0")
        return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e+15"
    return text


def count_utf16_units(text: str) -> int:
    """The length in UTF-16 units, which the server uses."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def _reword_error(param: MindieParam, error: InvalidParameter, value: Any) -> InvalidParameter:
    integer = "unsigned" if param.unsigned else "integer"
    mistyped = error.problem == "type"
    if param.type == "strict int" and type(value) is int:
        minimum = 0 if param.unsigned else -_INT64_LIMIT
        mistyped = not minimum <= value < 2 * _INT64_LIMIT  # others are of another JSON type
    if mistyped:
        kind = {"float": "float", "bool": "boolean"}.get(param.type, integer)
        text = param.type_error or f"{param.wire} must be {kind} type."
        problem: ParameterProblem = "type"
    else:
        text = param.format_range_error(value)
        problem = error.problem
    return InvalidParameter(text, param=param.wire, problem=problem, expected=param, got=value)


INT32_MAX = 2147483647
FLOAT32_MAX = 3.4028234663852886e38
"""The largest single-precision number; formatted as 3.40282e+38."""
DEFAULT_MAX_NEW_TOKENS = 20
MAX_STOP_STRINGS = 1024
MAX_TOTAL_STOP_LENGTH = 32768


_RANGE_ERRORS: Final[Mapping[str, str]] = {
    "temperature": "Parameter temperature must be in (0.0,{maximum}], got {got}.",
    "top_k": "Parameter top_k must be in -1 || (0,{maximum}], got {got}",
    "top_p": "Parameter top_p must be in (0.0,1.0], got {got}.",
    "typical_p": "Parameter typical_p must be in (0.0,1.0], got {got}.",
    "repetition_penalty": "Parameter 'repetition_penalty' must be in (0.0, {maximum}], got {got}.",
    "frequency_penalty": "Parameter frequency_penalty should be in [-2.0, 2.0], got {got}.",
    "presence_penalty": "Parameter presence_penalty not in [-2.0, 2.0], but got {got}.",
    "seed": "Parameter seed must be in [0, {maximum}], got {got}.",
    "priority": "Parameter priority must be in [1,5], got {got}.",
    "timeout": (
        "Parameter timeout must be strictly positive and small than 65535 seconds, got {got}."
    ),
    "max_new_tokens": "Parameter max_new_tokens must be in (0,{maximum}], got {got}.",
    "max_tokens": "Parameter max_tokens must be (0,{maximum}], got {got}",
    "batch_size": "Parameter batch_size must be in (0,{maximum}], got {got}.",
    "truncate": "truncate must be in (0,{maximum}], got {got}.",
    "best_of": "Parameter [best_of] should be in [1, 128], got {got}.",
    "n": "Parameter [n] should be in [1, 8192], got {got}. ",
    "top_logprobs": "Parameter top logprobs must be in [0, 20], got {got}.",
    "logprobs": "logprobs should be in range [0, 5], got {got}.",
}
"""Texts for a value outside the range, by wire name."""

_TEMPERATURE_OR_0 = MindieParam("temperature", "sampling.temperature", "float", 0, FLOAT32_MAX)
_TEMPERATURE = replace(_TEMPERATURE_OR_0, exclusive_minimum=True)
_TOP_K = MindieParam("top_k", "sampling.top_k", "strict int", 1, INT32_MAX)
_TOP_K_OR_0 = replace(_TOP_K, minimum=0, disabled_values=(0,))
_TOP_K_OR_ALL = replace(_TOP_K, disabled_values=(-1,))
_TOP_P = MindieParam("top_p", "sampling.top_p", "float", 0, 1, exclusive_minimum=True)
_TOP_P_BELOW_1 = replace(_TOP_P, exclusive_maximum=True)
_TYPICAL_P = replace(_TOP_P, wire="typical_p", field="sampling.typical_p")
_DO_SAMPLE = MindieParam("do_sample", "sampling.do_sample", "bool")
_SEED = MindieParam("seed", "sampling.seed", "strict int", 0, 2**63 - 1, unsigned=True)
_SEED_RC1 = replace(
    _SEED,
    minimum=1,
    maximum=2**64 - 1,
    range_error="Parameter seed must be in (0, {maximum}], got {got}.",
)
_REPETITION_PENALTY = replace(
    _TEMPERATURE, wire="repetition_penalty", field="sampling.repetition_penalty"
)
_REPETITION_PENALTY_MAX_2 = replace(_REPETITION_PENALTY, maximum=2)
_FREQUENCY_PENALTY = MindieParam("frequency_penalty", "sampling.frequency_penalty", "float", -2, 2)
_PRESENCE_PENALTY = MindieParam("presence_penalty", "sampling.presence_penalty", "float", -2, 2)
_WATERMARK = MindieParam("watermark", "sampling.watermark", "bool")
_DETAILS = MindieParam("details", "request.details", "bool")
_STREAM = MindieParam("stream", "stream", "bool")
_PRIORITY = MindieParam("priority", "priority", "strict int", 1, 5, default=5, unsigned=True)
_TIMEOUT = MindieParam("timeout", "timeout", "strict int", 1, 65535, default=65535, unsigned=True)
_MAX_TOKENS = MindieParam(
    "max_tokens",
    "stopping.max_tokens",
    "strict int",
    1,
    INT32_MAX,
    type_error="Parameter max_tokens not number_integer",
)
_MAX_NEW_TOKENS = replace(
    _MAX_TOKENS, wire="max_new_tokens", default=DEFAULT_MAX_NEW_TOKENS, type_error=""
)
_BATCH_SIZE = MindieParam("batch_size", "extra.batch_size", "strict int", 1, INT32_MAX)
_TRUNCATE = MindieParam("truncate", "stopping.truncate_prompt", "strict int", 1, INT32_MAX)
_IGNORE_EOS = MindieParam("ignore_eos", "stopping.ignore_eos", "bool")
_SKIP_SPECIAL_TOKENS = MindieParam("skip_special_tokens", "stopping.skip_special_tokens", "bool")
_BEST_OF = MindieParam(
    "best_of",
    "best_of",
    "strict int",
    1,
    128,
    unsigned=True,
    description="at least n; in a stream of chat or completions, n",
)
_N = MindieParam(
    "n",
    "n",
    "strict int",
    1,
    8192,
    unsigned=True,
    description="more than one needs a temperature",
)
_USE_BEAM_SEARCH = MindieParam("use_beam_search", "request.beams", "bool")
_LOGPROBS = MindieParam("logprobs", "request.logprobs", "bool")
_TOP_LOGPROBS = MindieParam(
    "top_logprobs", "request.top_logprobs", "strict int", 0, 20, unsigned=True
)
_COMPLETION_LOGPROBS = replace(_TOP_LOGPROBS, wire="logprobs", maximum=5)


def _check_stop_length(stop: str, max_length: int) -> None:
    if not 1 <= (length := count_utf16_units(stop)) <= max_length:
        raise build_param_error(
            f"Input validation error: length of `stop` must be in [1, {max_length}], "
            f"but got {length}",
            "stop",
        )


def _check_stop_list(stops: list[Any]) -> None:
    if not _are_valid_stops(stops):
        raise build_param_error(
            "Input validation error: `stop` must be list[string] if list, and item "
            f"length in [1, {MAX_STOP_STRINGS}] with total <= {MAX_TOTAL_STOP_LENGTH}",
            "stop",
        )


def _build_stop_check(max_length: int) -> ParamCheck:
    """Build the check of stop strings; a single one has at most ``max_length`` UTF-16 units."""

    def run(fields: Mapping[str, Raw], values: ParsedParams) -> None:
        match get_field(fields, "stop"):
            case None:
                return
            case str(stop):
                _check_stop_length(stop, max_length)
                stops = [stop]
            case list(stops):
                _check_stop_list(stops)
            case _:
                text = "Input validation error: param stop must be string or list[string]"
                raise build_param_error(text, "stop", "type")
        values.provided_fields.add("stop")
        values["stopping.stop"] = tuple(stops)

    return ParamCheck("stop", "stopping.stop", run, "strings")


def _are_valid_stops(stops: list[Any]) -> bool:
    lengths = [count_utf16_units(stop) for stop in stops if isinstance(stop, str)]
    return (
        len(lengths) == len(stops) <= MAX_STOP_STRINGS
        and all(1 <= length <= MAX_STOP_STRINGS for length in lengths)
        and sum(lengths) <= MAX_TOTAL_STOP_LENGTH
    )


def _check_stop_token_ids(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    """Read ``stop_token_ids``; ignore ids out of range, as the server does."""
    ids = get_field(fields, "stop_token_ids")
    if ids is None:
        return
    if not isinstance(ids, list):
        raise build_param_error("Parameter stop_token_ids not array", "stop_token_ids", "type")
    if not all(type(token) is int for token in ids):
        raise build_param_error("Parameter stop_token_ids not list[int]", "stop_token_ids", "type")
    values.provided_fields.add("stop_token_ids")
    valid_ids = {token for token in ids if 0 <= token <= INT32_MAX}
    values["stopping.stop_token_ids"] = tuple(sorted(valid_ids))


_INCLUDE_STOP_PARAM = MindieParam("include_stop_str_in_output", "stopping.include_stop", "bool")


def _check_include_stop(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    """Read the flag only if there are stop strings or stop token ids."""
    if _INCLUDE_STOP_PARAM.wire in fields and ("stop" in fields or "stop_token_ids" in fields):
        _read_param(_INCLUDE_STOP_PARAM, fields, values)


def _check_logprobs(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    del fields
    if values.get("request.logprobs") is False and values.get("request.top_logprobs") is not None:
        raise build_param_error(
            "Value error, when using top_logprobs, logprobs must be true or null in chat "
            "completions",
            "top_logprobs",
            "conflict",
        )


def _check_thinking_budget(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    """Read the thinking budget; the other template arguments are read elsewhere."""
    kwargs = get_field(fields, "chat_template_kwargs")
    budget = kwargs.get("thinking_budget") if isinstance(kwargs, dict) else None
    if budget is None:
        return
    if type(budget) is not int:
        raise build_param_error("thinking_budget must be integer type.", "thinking_budget", "type")
    if not 0 < budget <= INT32_MAX:
        text = f"Parameter thinking_budget must be in [1,{INT32_MAX}], got "
        raise build_param_error(text + format_json_number(budget), "thinking_budget")
    if kwargs.get("enable_thinking"):
        values.provided_fields.add("chat_template_kwargs")
        values["reasoning.budget"] = budget


_STOP_TOKEN_IDS = ParamCheck(
    "stop_token_ids", "stopping.stop_token_ids", _check_stop_token_ids, "ints"
)
_INCLUDE_STOP = ParamCheck(
    "include_stop_str_in_output", "stopping.include_stop", _check_include_stop, "bool"
)
_LOGPROBS_CHECK = ParamCheck("top_logprobs", "logprobs.top", _check_logprobs)
_THINKING_BUDGET = ParamCheck("chat_template_kwargs", "reasoning.budget", _check_thinking_budget)

# --- the tables -----------------------------------------------------------------------------------

_SHARED_PARAMS = (_DO_SAMPLE, _SEED, _REPETITION_PENALTY, _WATERMARK)
"""The endpoints that are not OpenAI-style have these in a row."""
TEXT_PARAMS: MindieParamTable = (
    _TEMPERATURE,
    _TOP_K_OR_0,
    _TOP_P,
    _TYPICAL_P,
    *_SHARED_PARAMS,
    _PRIORITY,
    _MAX_NEW_TOKENS,
    _DETAILS,
    _BATCH_SIZE,
    _TIMEOUT,
)
TEXT_PARAMS_RC1: MindieParamTable = tuple(_SEED_RC1 if row is _SEED else row for row in TEXT_PARAMS)
TOKENS_PARAMS: MindieParamTable = (
    _TEMPERATURE,
    _TOP_K_OR_0,
    _TOP_P,
    *_SHARED_PARAMS,
    _PRIORITY,
    _MAX_NEW_TOKENS,
    _TIMEOUT,
    _DETAILS,
    _BATCH_SIZE,
)
_NATIVE_SAMPLING_PARAMS = (_TEMPERATURE, _TOP_K, _TOP_P_BELOW_1, _TYPICAL_P, *_SHARED_PARAMS)
NATIVE_PARAMS: MindieParamTable = (
    *_NATIVE_SAMPLING_PARAMS,
    _PRIORITY,
    _MAX_NEW_TOKENS,
    _TIMEOUT,
    _DETAILS,
)
TGI_STYLE_PARAMS: MindieParamTable = (
    _build_stop_check(MAX_STOP_STRINGS),
    *_NATIVE_SAMPLING_PARAMS,
    _MAX_NEW_TOKENS,
    _DETAILS,
    MindieParam("decoder_input_details", "request.prefill", "bool"),
    MindieParam("return_full_text", "extra.return_full_text", "bool"),
    _TRUNCATE,
)
"""The TGI-style endpoints."""
_STOP = _build_stop_check(MAX_TOTAL_STOP_LENGTH)
_OPENAI_SAMPLING_PARAMS = (_TEMPERATURE_OR_0, _TOP_K_OR_ALL, _TOP_P, _SEED)
_OPENAI_PENALTY_PARAMS = (_FREQUENCY_PENALTY, _PRESENCE_PENALTY, _SKIP_SPECIAL_TOKENS, _BEST_OF, _N)
VLLM_STYLE_PARAMS: MindieParamTable = (
    _IGNORE_EOS,
    _STOP,
    _STOP_TOKEN_IDS,
    _INCLUDE_STOP,
    *_OPENAI_SAMPLING_PARAMS,
    _REPETITION_PENALTY,
    *_OPENAI_PENALTY_PARAMS,
    _MAX_TOKENS,
    _STREAM,
)
"""The vLLM-style endpoint."""
CHAT_PARAMS: MindieParamTable = (
    _IGNORE_EOS,
    _STOP,
    _STOP_TOKEN_IDS,
    _INCLUDE_STOP,
    *_OPENAI_SAMPLING_PARAMS,
    _THINKING_BUDGET,
    _REPETITION_PENALTY_MAX_2,
    *_OPENAI_PENALTY_PARAMS,
    _USE_BEAM_SEARCH,
    _LOGPROBS,
    _TOP_LOGPROBS,
    _LOGPROBS_CHECK,
    _MAX_TOKENS,
    _STREAM,
)
_SERVER_VALIDATOR_REPLACEMENTS: Mapping[MindieParam | ParamCheck, MindieParam | ParamCheck] = {
    _STOP: _build_stop_check(MAX_STOP_STRINGS),
    _TEMPERATURE_OR_0: replace(_TEMPERATURE_OR_0, maximum=2),
    _TOP_K_OR_ALL: _TOP_K_OR_0,
}
CHAT_PARAMS_SERVER_VALIDATOR: MindieParamTable = tuple(
    _SERVER_VALIDATOR_REPLACEMENTS.get(row, row)
    for row in CHAT_PARAMS
    if row is not _THINKING_BUDGET
)
"""The server's own validator, used instead of the vLLM-compatible one."""
CHAT_PARAMS_RC1: MindieParamTable = (
    replace(_TEMPERATURE, maximum=2),
    _TOP_P,
    _SEED_RC1,
    _FREQUENCY_PENALTY,
    _PRESENCE_PENALTY,
    _MAX_TOKENS,
    _STREAM,
)
COMPLETION_PARAMS: MindieParamTable = (
    _IGNORE_EOS,
    _STOP,
    _INCLUDE_STOP,
    _STOP_TOKEN_IDS,
    *_OPENAI_SAMPLING_PARAMS,
    _REPETITION_PENALTY_MAX_2,
    *_OPENAI_PENALTY_PARAMS,
    _USE_BEAM_SEARCH,
    _COMPLETION_LOGPROBS,
    _MAX_TOKENS,
    _STREAM,
)


# Profiles (releases), and the configuration of one server.
#
# ``2x``   MindIE-LLM 0695772, May 2026, in source
# ``1x``   the published pages of 1.0.RC3 and 1.0.0
# ``rc1``  the published pages of 1.0.RC1 and 1.0.RC2

MODEL_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_.-]+")
"""Model names allowed in a path; any other path is unknown."""


PromptMode = Literal["raw", "chat"]
PROMPT_OPTIONS_BY_MODE: Final[Mapping[PromptMode, PromptOptions]] = {
    "raw": PromptOptions(mode="raw"),
    "chat": PromptOptions(mode="server"),
}
RAW_PROMPT_OPTIONS: Final = PROMPT_OPTIONS_BY_MODE["raw"]


class MindieProfile(Struct, frozen=True, kw_only=True):
    """A release: its parameters and response format."""

    name: str
    version: str
    """The server version that the release reports."""
    max_text_length: int
    """The maximum length of a text, in UTF-16 units."""
    text_params: MindieParamTable = TEXT_PARAMS
    chat_params: MindieParamTable = CHAT_PARAMS
    early: bool = False
    """The first releases. Chat content is plain text; the last chat delta is empty, and finish
    reasons differ. Text generation is greedy unless sampling is requested. Events have no times,
    and any request id is valid.
    """
    has_completions: bool = False
    """Whether workers of this release have OpenAI's completions."""


PROFILES: Final[Mapping[str, MindieProfile]] = {
    one.name: one
    for one in (
        MindieProfile(name="2x", version="2.0.0", max_text_length=40 << 20, has_completions=True),
        MindieProfile(name="1x", version="1.0.0", max_text_length=4 << 20),
        MindieProfile(
            name="rc1",
            version="1.0.RC1",
            max_text_length=512 << 10,
            text_params=TEXT_PARAMS_RC1,
            chat_params=CHAT_PARAMS_RC1,
            early=True,
        ),
    )
}
"""The first is the default."""


class MindieConfig(Struct, frozen=True, kw_only=True):
    """One server: its profile, its settings and its counter of request ids."""

    profile: MindieProfile
    vllm_validator: bool = True
    """The server's ``openAiSupport``: chat requests are checked by vLLM's rules."""
    default_model: str = ""
    """The model of endpoints without a model name."""
    templating: PromptOptions = RAW_PROMPT_OPTIONS
    """How a text prompt becomes the model's input."""
    max_iter_times: int | None = None
    """The maximum number of tokens of a response; None: no limit."""
    keep_alive: bool = False
    """Whether connections are kept after responses that are not streamed."""
    request_counter: Iterator[int] = field(default_factory=itertools.count)

    @property
    def chat_params(self) -> MindieParamTable:
        """The chat parameters."""
        if self.vllm_validator or self.profile.early:
            return self.profile.chat_params
        return CHAT_PARAMS_SERVER_VALIDATOR

    def get_request_id(self, call: ClientRequest) -> str:
        """The client's request id from the header, or the next generated one."""
        return call.headers.get("req-id") or f"endpoint_common_{next(self.request_counter)}"
