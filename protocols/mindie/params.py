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

import msgspec
from msgspec import Raw, Struct, field

from protocols import params
from protocols.core.errors import InvalidParameter, MalformedRequest, ParameterProblem
from protocols.core.interfaces import ClientRequest
from protocols.core.request import PromptOptions
from protocols.json_body import decode_value, read_object
from protocols.params import Param, ParamType, ParsedParams

# Checks of a request's fields in the server's order; the first failure is reported.
#
# A null field counts as absent. Numbers in error texts have the format of the server's JSON
# library. Source: MindIE-LLM 0695772, src/server/endpoint/utils/infer_param.cpp and
# parameters_checker.cpp.

ParamKind = Literal["float", "integer", "unsigned", "boolean"]

decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
"""Decode the fields of a JSON object; the values stay raw."""
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_INT64_LIMIT = 2**63
_EXPONENT_THRESHOLD = 10**15
_REPR_EXPONENT_THRESHOLD = 10**16


class MindieParam(Struct, frozen=True):
    """A scalar parameter and its error texts; ``{got}`` stands for the received value."""

    param: Param
    kind: ParamKind
    range_error: str = ""
    """The text for a value outside the range."""
    type_error: str = ""
    """The text for a value of another type; by default ``NAME must be KIND type.``"""


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
    text: str, param: str, problem: ParameterProblem = "value", got: Any = None
) -> InvalidParameter:
    """Build an error with the server's text."""
    return InvalidParameter(text, param=param, problem=problem, got=got)


def read_body_fields(call: ClientRequest) -> Mapping[str, Raw]:
    """Decode the body's fields; empty for JSON that is not an object, as in the server.

    Raises MalformedRequest.
    """
    try:
        return read_object(call.body)
    except MalformedRequest as error:
        if error.problem != "object":
            raise
        decode_value(Raw(call.body))  # only the first byte was checked: it may be invalid JSON
        return {}


def get_field(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a field's value; None if it is absent. Raises MalformedRequest."""
    raw = fields.get(name)
    return None if raw is None else decode_value(raw)


def read_object_field(fields: Mapping[str, Raw], name: str) -> Mapping[str, Raw]:
    """Decode a nested object. Raises InvalidParameter or MalformedRequest."""
    got = get_field(fields, name)
    if got is None:
        return {}
    if not isinstance(got, dict):
        raise build_param_error(f"{name} must be object type.", name, "type")
    return decode_fields(fields[name])


def read_first_object(raw: Raw) -> Mapping[str, Raw]:
    """Decode the first object of a non-empty list of objects."""
    return decode_fields(_decode_items(raw)[0])


def read_params(table: MindieParamTable, fields: Mapping[str, Raw]) -> ParsedParams:
    """Read the values of ``table`` in order. Raises InvalidParameter or MalformedRequest."""
    values = ParsedParams()
    for step in table:
        if isinstance(step, ParamCheck):
            step.run(fields, values)
            continue
        param = step.param
        if param.wire not in fields:
            continue
        try:
            params.read_param(param, fields[param.wire], values)
        except InvalidParameter as error:
            got = get_field(fields, param.wire)  # keep the JSON as it was sent: 0, not 0.0
            raise _reword_error(step, error, got) from None
    return values


def collect_extra_fields(
    table: MindieParamTable, fields: Mapping[str, Raw], known: Iterable[str] = ()
) -> dict[str, Raw]:
    """Return the raw fields that are not part of the internal request."""
    read_names = {step.wire if isinstance(step, ParamCheck) else step.param.wire for step in table}
    kept = {
        s.param.wire
        for s in table
        if isinstance(s, MindieParam) and s.param.field.startswith("extra.")
    }
    dropped = (read_names - kept) | set(known)
    return {name: raw for name, raw in fields.items() if name not in dropped}


def map_field_names(table: MindieParamTable) -> dict[str, str]:
    """Return the wire name of each path of the internal request."""
    found = {}
    for step in table:
        path, wire = (
            (step.field, step.wire)
            if isinstance(step, ParamCheck)
            else (step.param.field, step.param.wire)
        )
        if not path.startswith(("request.", "extra.")):
            found[path] = wire
    return found


def list_params(table: MindieParamTable) -> tuple[Param, ...]:
    """List the parameters of a table, including those that a check reads."""
    found = []
    for step in table:
        if isinstance(step, MindieParam):
            found.append(step.param)
        elif step.type is not None:
            found.append(Param(wire=step.wire, field=step.field, type=step.type))
    return tuple(found)


def format_json_number(got: Any) -> str:
    """Format a number as nlohmann::json does: exponents from 1e+15 on, and below 1e-4."""
    if isinstance(got, int) and not -_INT64_LIMIT <= got < 2 * _INT64_LIMIT:
        got = float(got)
    text = repr(got)
    if (
        isinstance(got, float)
        and _EXPONENT_THRESHOLD <= abs(got) < _REPR_EXPONENT_THRESHOLD
        and "e" not in text
    ):
        sign = "-" if got < 0 else ""
        digits = text.lstrip("-").replace(".", "").rstrip("0")
        return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e+15"
    return text


def count_utf16_units(text: str) -> int:
    """The length in UTF-16 units, which the server uses."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def _reword_error(row: MindieParam, error: InvalidParameter, got: Any) -> InvalidParameter:
    param = row.param
    mistyped = error.problem == "type"
    if row.kind in ("integer", "unsigned") and type(got) is int:
        low = (
            0 if row.kind == "unsigned" else -_INT64_LIMIT
        )  # integers outside this range are of another JSON type
        mistyped = not low <= got < 2 * _INT64_LIMIT
    if mistyped:
        text = row.type_error or f"{param.wire} must be {row.kind} type."
        return InvalidParameter(text, param=param.wire, problem="type", expected=param, got=got)
    text = row.range_error.format(got=format_json_number(got))
    return InvalidParameter(text, param=param.wire, problem=error.problem, expected=param, got=got)


INT32_MAX = 2147483647
FLOAT32_MAX = 3.4028234663852886e38
"""The largest single-precision number; formatted as 3.40282e+38."""
DEFAULT_MAX_NEW_TOKENS = 20
MAX_STOP_STRINGS = 1024
MAX_TOTAL_STOP_LENGTH = 32768


def _build_float_param(wire: str, field: str, range_error: str, **more: Any) -> MindieParam:
    return MindieParam(Param(wire=wire, field=field, type="float", **more), "float", range_error)


def _build_int_param(
    wire: str, field: str, range_error: str, *, kind: ParamKind = "integer", **more: Any
) -> MindieParam:
    return MindieParam(Param(wire=wire, field=field, type="strict int", **more), kind, range_error)


def _build_bool_param(wire: str, field: str) -> MindieParam:
    return MindieParam(Param(wire=wire, field=field, type="bool"), "boolean")


def _build_temperature(most: str = "3.40282e+38", **limits: Any) -> MindieParam:
    range_error = f"Parameter temperature must be in (0.0,{most}], got {{got}}."
    return _build_float_param("temperature", "sampling.temperature", range_error, **limits)


def _build_top_k(**limits: Any) -> MindieParam:
    range_error = f"Parameter top_k must be in -1 || (0,{INT32_MAX}], got {{got}}"
    return _build_int_param("top_k", "sampling.top_k", range_error, maximum=INT32_MAX, **limits)


def _build_probability(wire: str, **limits: Any) -> MindieParam:
    range_error = f"Parameter {wire} must be in (0.0,1.0], got {{got}}."
    return _build_float_param(
        wire,
        f"sampling.{wire}",
        range_error,
        minimum=0,
        exclusive_minimum=True,
        maximum=1,
        **limits,
    )


def _build_repetition_penalty(most: str, maximum: float) -> MindieParam:
    range_error = f"Parameter 'repetition_penalty' must be in (0.0, {most}], got {{got}}."
    path = "sampling.repetition_penalty"
    return _build_float_param(
        "repetition_penalty", path, range_error, minimum=0, exclusive_minimum=True, maximum=maximum
    )


def _build_seed(minimum: int, maximum: int, interval: str) -> MindieParam:
    range_error = f"Parameter seed must be in {interval}, got {{got}}."
    return _build_int_param(
        "seed", "sampling.seed", range_error, kind="unsigned", minimum=minimum, maximum=maximum
    )


_TEMPERATURE = _build_temperature(minimum=0, exclusive_minimum=True, maximum=FLOAT32_MAX)
_TEMPERATURE_OR_0 = _build_temperature(minimum=0, maximum=FLOAT32_MAX)
_TOP_K_OR_0 = _build_top_k(minimum=0, disabled_values=(0,))
_TOP_K = _build_top_k(minimum=1)
_TOP_K_OR_ALL = _build_top_k(minimum=1, disabled_values=(-1,))
_TOP_P = _build_probability("top_p")
_TOP_P_BELOW_1 = _build_probability("top_p", exclusive_maximum=True)
_TYPICAL_P = _build_probability("typical_p")
_DO_SAMPLE = _build_bool_param("do_sample", "sampling.do_sample")
_SEED = _build_seed(0, 2**63 - 1, f"[0, {2**63 - 1}]")
_SEED_RC1 = _build_seed(1, 2**64 - 1, f"(0, {2**64 - 1}]")
_REPETITION_PENALTY = _build_repetition_penalty("3.40282e+38", FLOAT32_MAX)
_REPETITION_PENALTY_MAX_2 = _build_repetition_penalty("2", 2)
_WATERMARK = _build_bool_param("watermark", "sampling.watermark")
_DETAILS = _build_bool_param("details", "request.details")
_STREAM = _build_bool_param("stream", "stream")
_PRIORITY = _build_int_param(
    "priority",
    "priority",
    "Parameter priority must be in [1,5], got {got}.",
    kind="unsigned",
    minimum=1,
    maximum=5,
    default=5,
)
_TIMEOUT = _build_int_param(
    "timeout",
    "timeout",
    "Parameter timeout must be strictly positive and small than 65535 seconds, got {got}.",
    kind="unsigned",
    minimum=1,
    maximum=65535,
    default=65535,
)
_MAX_NEW_TOKENS = _build_int_param(
    "max_new_tokens",
    "stopping.max_tokens",
    f"Parameter max_new_tokens must be in (0,{INT32_MAX}], got {{got}}.",
    minimum=1,
    maximum=INT32_MAX,
    default=DEFAULT_MAX_NEW_TOKENS,
)
_BATCH_SIZE = _build_int_param(
    "batch_size",
    "extra.batch_size",
    f"Parameter batch_size must be in (0,{INT32_MAX}], got {{got}}.",
    minimum=1,
    maximum=INT32_MAX,
)

# --- parameters of some endpoints only ------------------------------------------------------------

_IGNORE_EOS = _build_bool_param("ignore_eos", "stopping.ignore_eos")
_SKIP_SPECIAL_TOKENS = _build_bool_param("skip_special_tokens", "stopping.skip_special_tokens")
_FREQUENCY_PENALTY = _build_float_param(
    "frequency_penalty",
    "sampling.frequency_penalty",
    "Parameter frequency_penalty should be in [-2.0, 2.0], got {got}.",
    minimum=-2,
    maximum=2,
)
_PRESENCE_PENALTY = _build_float_param(
    "presence_penalty",
    "sampling.presence_penalty",
    "Parameter presence_penalty not in [-2.0, 2.0], but got {got}.",
    minimum=-2,
    maximum=2,
)
_BEST_OF = _build_int_param(
    "best_of",
    "best_of",
    "Parameter [best_of] should be in [1, 128], got {got}.",
    kind="unsigned",
    minimum=1,
    maximum=128,
    description="at least n; in a stream of chat or completions, n",
)
_N = _build_int_param(
    "n",
    "n",
    "Parameter [n] should be in [1, 8192], got {got}. ",
    kind="unsigned",
    minimum=1,
    maximum=8192,
    description="more than one needs a temperature",
)
_USE_BEAM_SEARCH = _build_bool_param("use_beam_search", "request.beams")
_LOGPROBS = _build_bool_param("logprobs", "request.logprobs")
_TOP_LOGPROBS = _build_int_param(
    "top_logprobs",
    "request.top_logprobs",
    "Parameter top logprobs must be in [0, 20], got {got}.",
    kind="unsigned",
    minimum=0,
    maximum=20,
)
_COMPLETION_LOGPROBS = _build_int_param(
    "logprobs",
    "request.top_logprobs",
    "logprobs should be in range [0, 5], got {got}.",
    kind="unsigned",
    minimum=0,
    maximum=5,
)
_MAX_TOKENS = MindieParam(
    Param(
        wire="max_tokens",
        field="stopping.max_tokens",
        type="strict int",
        minimum=1,
        maximum=INT32_MAX,
    ),
    "integer",
    f"Parameter max_tokens must be (0,{INT32_MAX}], got {{got}}",
    "Parameter max_tokens not number_integer",
)
_TRUNCATE = _build_int_param(
    "truncate",
    "stopping.truncate_prompt",
    f"truncate must be in (0,{INT32_MAX}], got {{got}}.",
    minimum=1,
    maximum=INT32_MAX,
)


def _build_stop_check(most: int) -> ParamCheck:
    """Build the check of stop strings; a single one has at most ``most`` UTF-16 units."""

    def run(fields: Mapping[str, Raw], values: ParsedParams) -> None:
        got = get_field(fields, "stop")
        if got is None:
            return
        if isinstance(got, str):
            if not 1 <= count_utf16_units(got) <= most:
                raise build_param_error(
                    f"Input validation error: length of `stop` must be in [1, {most}], "
                    f"but got {count_utf16_units(got)}",
                    "stop",
                )
            got = [got]
        elif not isinstance(got, list):
            raise build_param_error(
                "Input validation error: param stop must be string or list[string]", "stop", "type"
            )
        elif not _are_valid_stops(got):
            raise build_param_error(
                "Input validation error: `stop` must be list[string] if list, and item length in "
                f"[1, {MAX_STOP_STRINGS}] with total <= {MAX_TOTAL_STOP_LENGTH}",
                "stop",
            )
        values.provided_fields.add("stop")
        values["stopping.stop"] = tuple(got)

    return ParamCheck("stop", "stopping.stop", run, "strings")


def _are_valid_stops(stops: list[Any]) -> bool:
    if not all(
        isinstance(stop, str) and 1 <= count_utf16_units(stop) <= MAX_STOP_STRINGS for stop in stops
    ):
        return False
    return (
        len(stops) <= MAX_STOP_STRINGS
        and sum(map(count_utf16_units, stops)) <= MAX_TOTAL_STOP_LENGTH
    )


def _check_stop_token_ids(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    """Read ``stop_token_ids``; ignore ids out of range, as the server does."""
    got = get_field(fields, "stop_token_ids")
    if got is None:
        return
    if not isinstance(got, list):
        raise build_param_error("Parameter stop_token_ids not array", "stop_token_ids", "type")
    if not all(type(token) is int for token in got):
        raise build_param_error("Parameter stop_token_ids not list[int]", "stop_token_ids", "type")
    values.provided_fields.add("stop_token_ids")
    ids = sorted({token for token in got if 0 <= token <= INT32_MAX})
    values["stopping.stop_token_ids"] = tuple(ids)


def _check_include_stop(fields: Mapping[str, Raw], values: ParsedParams) -> None:
    """Read the flag only if there are stop strings or stop token ids."""
    if "stop" not in fields and "stop_token_ids" not in fields:
        return
    name = "include_stop_str_in_output"
    got = get_field(fields, name)
    if got is None:
        return
    if not isinstance(got, bool):
        raise build_param_error(f"{name} must be boolean type.", name, "type")
    values.provided_fields.add(name)
    values["stopping.include_stop"] = got


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
        received = format_json_number(budget)
        raise build_param_error(
            f"Parameter thinking_budget must be in [1,{INT32_MAX}], got {received}",
            "thinking_budget",
        )
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

TEXT_PARAMS: MindieParamTable = (
    _TEMPERATURE,
    _TOP_K_OR_0,
    _TOP_P,
    _TYPICAL_P,
    _DO_SAMPLE,
    _SEED,
    _REPETITION_PENALTY,
    _WATERMARK,
    _PRIORITY,
    _MAX_NEW_TOKENS,
    _DETAILS,
    _BATCH_SIZE,
    _TIMEOUT,
)
TEXT_PARAMS_RC1: MindieParamTable = tuple(_SEED_RC1 if row is _SEED else row for row in TEXT_PARAMS)
TOKENS_PARAMS: MindieParamTable = (
    *(
        _TEMPERATURE,
        _TOP_K_OR_0,
        _TOP_P,
        _DO_SAMPLE,
        _SEED,
        _REPETITION_PENALTY,
        _WATERMARK,
        _PRIORITY,
    ),
    *(_MAX_NEW_TOKENS, _TIMEOUT, _DETAILS, _BATCH_SIZE),
)
NATIVE_PARAMS: MindieParamTable = (
    *(_TEMPERATURE, _TOP_K, _TOP_P_BELOW_1, _TYPICAL_P, _DO_SAMPLE, _SEED, _REPETITION_PENALTY),
    *(_WATERMARK, _PRIORITY, _MAX_NEW_TOKENS, _TIMEOUT, _DETAILS),
)
TGI_STYLE_PARAMS: MindieParamTable = (
    *(
        _build_stop_check(MAX_STOP_STRINGS),
        _TEMPERATURE,
        _TOP_K,
        _TOP_P_BELOW_1,
        _TYPICAL_P,
        _DO_SAMPLE,
        _SEED,
    ),
    *(_REPETITION_PENALTY, _WATERMARK, _MAX_NEW_TOKENS, _DETAILS),
    _build_bool_param("decoder_input_details", "request.prefill"),
    _build_bool_param("return_full_text", "extra.return_full_text"),
    _TRUNCATE,
)
"""The TGI-style endpoints."""
VLLM_STYLE_PARAMS: MindieParamTable = (
    *(
        _IGNORE_EOS,
        _build_stop_check(MAX_TOTAL_STOP_LENGTH),
        _STOP_TOKEN_IDS,
        _INCLUDE_STOP,
        _TEMPERATURE_OR_0,
    ),
    *(
        _TOP_K_OR_ALL,
        _TOP_P,
        _SEED,
        _REPETITION_PENALTY,
        _FREQUENCY_PENALTY,
        _PRESENCE_PENALTY,
        _SKIP_SPECIAL_TOKENS,
    ),
    *(_BEST_OF, _N, _MAX_TOKENS, _STREAM),
)
"""The vLLM-style endpoint."""
CHAT_PARAMS: MindieParamTable = (
    *(
        _IGNORE_EOS,
        _build_stop_check(MAX_TOTAL_STOP_LENGTH),
        _STOP_TOKEN_IDS,
        _INCLUDE_STOP,
        _TEMPERATURE_OR_0,
    ),
    *(
        _TOP_K_OR_ALL,
        _TOP_P,
        _SEED,
        _THINKING_BUDGET,
        _REPETITION_PENALTY_MAX_2,
        _FREQUENCY_PENALTY,
        _PRESENCE_PENALTY,
    ),
    *(
        _SKIP_SPECIAL_TOKENS,
        _BEST_OF,
        _N,
        _USE_BEAM_SEARCH,
        _LOGPROBS,
        _TOP_LOGPROBS,
        _LOGPROBS_CHECK,
    ),
    *(_MAX_TOKENS, _STREAM),
)
_SERVER_VALIDATOR_REPLACEMENTS: Mapping[MindieParam | ParamCheck, MindieParam | ParamCheck] = {
    CHAT_PARAMS[1]: _build_stop_check(MAX_STOP_STRINGS),
    _TEMPERATURE_OR_0: _build_temperature("2", minimum=0, maximum=2),
    _TOP_K_OR_ALL: _TOP_K_OR_0,
}
CHAT_PARAMS_SERVER_VALIDATOR: MindieParamTable = tuple(
    _SERVER_VALIDATOR_REPLACEMENTS.get(row, row)
    for row in CHAT_PARAMS
    if row is not _THINKING_BUDGET
)
"""The server's own validator, used instead of the vLLM-compatible one."""
CHAT_PARAMS_RC1: MindieParamTable = (
    *(
        _build_temperature("2", minimum=0, exclusive_minimum=True, maximum=2),
        _TOP_P,
        _SEED_RC1,
        _FREQUENCY_PENALTY,
        _PRESENCE_PENALTY,
    ),
    *(_MAX_TOKENS, _STREAM),
)
COMPLETION_PARAMS: MindieParamTable = (
    *(
        _IGNORE_EOS,
        _build_stop_check(MAX_TOTAL_STOP_LENGTH),
        _INCLUDE_STOP,
        _STOP_TOKEN_IDS,
        _TEMPERATURE_OR_0,
    ),
    *(
        _TOP_K_OR_ALL,
        _TOP_P,
        _SEED,
        _REPETITION_PENALTY_MAX_2,
        _FREQUENCY_PENALTY,
        _PRESENCE_PENALTY,
        _SKIP_SPECIAL_TOKENS,
    ),
    *(_BEST_OF, _N, _USE_BEAM_SEARCH, _COMPLETION_LOGPROBS, _MAX_TOKENS, _STREAM),
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
    request_counter: Iterator[int] = field(default_factory=itertools.count)

    @property
    def chat_params(self) -> MindieParamTable:
        """The chat parameters."""
        later = not self.profile.early
        return (
            CHAT_PARAMS_SERVER_VALIDATOR
            if later and not self.vllm_validator
            else self.profile.chat_params
        )

    def get_request_id(self, call: ClientRequest) -> str:
        """The client's request id from the header, or the next generated one."""
        return call.headers.get("req-id") or f"endpoint_common_{next(self.request_counter)}"
