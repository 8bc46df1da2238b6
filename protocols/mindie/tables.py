"""The scalar parameters of each endpoint, in the order in which the server checks them.

Paths under ``asked.`` stand for no field of the internal request: a reader combines them. Those
under ``kept.`` are checked and then stay in ``extra``, as they were sent.

Source: MindIE-LLM 0695772, SetupInferParams of src/server/endpoint/single_req_infer_interface/*;
for 1.0.RC1 the published pages.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from protocols.mindie.checks import Check, Kind, Row, Table, get, shown, units, wrong
from protocols.params import Param, Values

INT32 = 2147483647
FLOAT = 3.4028234663852886e38
"""The largest single-precision number; printed as 3.40282e+38."""
DEFAULT_NEW_TOKENS = 20
MOST_STOPS = 1024
STOP_TOTAL = 32768


def _number(wire: str, field: str, said: str, **more: Any) -> Row:
    return Row(Param(wire=wire, field=field, type="float", **more), "float", said)


def _integer(wire: str, field: str, said: str, *, kind: Kind = "integer", **more: Any) -> Row:
    return Row(Param(wire=wire, field=field, type="strict int", **more), kind, said)


def _flag(wire: str, field: str) -> Row:
    return Row(Param(wire=wire, field=field, type="bool"), "boolean")


def _temperature(most: str = "3.40282e+38", **limits: Any) -> Row:
    said = f"Parameter temperature must be in (0.0,{most}], got {{got}}."
    return _number("temperature", "sampling.temperature", said, **limits)


def _top_k(**limits: Any) -> Row:
    said = f"Parameter top_k must be in -1 || (0,{INT32}], got {{got}}"
    return _integer("top_k", "sampling.top_k", said, high=INT32, **limits)


def _share(wire: str, **limits: Any) -> Row:
    said = f"Parameter {wire} must be in (0.0,1.0], got {{got}}."
    return _number(wire, f"sampling.{wire}", said, low=0, above_low=True, high=1, **limits)


def _repetition(most: str, high: float) -> Row:
    said = f"Parameter 'repetition_penalty' must be in (0.0, {most}], got {{got}}."
    path = "sampling.repetition_penalty"
    return _number("repetition_penalty", path, said, low=0, above_low=True, high=high)


def _seed(low: int, high: int, interval: str) -> Row:
    said = f"Parameter seed must be in {interval}, got {{got}}."
    return _integer("seed", "sampling.seed", said, kind="unsigned", low=low, high=high)


_TEMPERATURE = _temperature(low=0, above_low=True, high=FLOAT)
_TEMPERATURE_OR_0 = _temperature(low=0, high=FLOAT)
_TOP_K_OR_0 = _top_k(low=0, off=(0,))
_TOP_K = _top_k(low=1)
_TOP_K_OR_ALL = _top_k(low=1, off=(-1,))
_TOP_P = _share("top_p")
_TOP_P_BELOW_1 = _share("top_p", below_high=True)
_TYPICAL_P = _share("typical_p")
_DO_SAMPLE = _flag("do_sample", "sampling.do_sample")
_SEED = _seed(0, 2**63 - 1, f"[0, {2**63 - 1}]")
_SEED_RC1 = _seed(1, 2**64 - 1, f"(0, {2**64 - 1}]")
_REPETITION = _repetition("3.40282e+38", FLOAT)
_REPETITION_2 = _repetition("2", 2)
_WATERMARK = _flag("watermark", "sampling.watermark")
_DETAILS = _flag("details", "asked.details")
_STREAM = _flag("stream", "stream")
_PRIORITY = _integer(
    "priority",
    "priority",
    "Parameter priority must be in [1,5], got {got}.",
    kind="unsigned",
    low=1,
    high=5,
    default=5,
)
_TIMEOUT = _integer(
    "timeout",
    "timeout",
    "Parameter timeout must be strictly positive and small than 65535 seconds, got {got}.",
    kind="unsigned",
    low=1,
    high=65535,
    default=65535,
)
_MAX_NEW_TOKENS = _integer(
    "max_new_tokens",
    "stopping.max_tokens",
    f"Parameter max_new_tokens must be in (0,{INT32}], got {{got}}.",
    low=1,
    high=INT32,
    default=DEFAULT_NEW_TOKENS,
)
_BATCH_SIZE = _integer(
    "batch_size",
    "kept.batch_size",
    f"Parameter batch_size must be in (0,{INT32}], got {{got}}.",
    low=1,
    high=INT32,
)

# --- what only some endpoints know ----------------------------------------------------------------

_IGNORE_EOS = _flag("ignore_eos", "stopping.ignore_eos")
_SKIP_SPECIAL = _flag("skip_special_tokens", "stopping.skip_special_tokens")
_FREQUENCY = _number(
    "frequency_penalty",
    "sampling.frequency_penalty",
    "Parameter frequency_penalty should be in [-2.0, 2.0], got {got}.",
    low=-2,
    high=2,
)
_PRESENCE = _number(
    "presence_penalty",
    "sampling.presence_penalty",
    "Parameter presence_penalty not in [-2.0, 2.0], but got {got}.",
    low=-2,
    high=2,
)
_BEST_OF = _integer(
    "best_of",
    "best_of",
    "Parameter [best_of] should be in [1, 128], got {got}.",
    kind="unsigned",
    low=1,
    high=128,
)
_N = _integer(
    "n", "n", "Parameter [n] should be in [1, 8192], got {got}. ", kind="unsigned", low=1, high=8192
)
_BEAMS = _flag("use_beam_search", "asked.beams")
_LOGPROBS = _flag("logprobs", "asked.logprobs")
_TOP_LOGPROBS = _integer(
    "top_logprobs",
    "asked.top_logprobs",
    "Parameter top logprobs must be in [0, 20], got {got}.",
    kind="unsigned",
    low=0,
    high=20,
)
_COMPLETION_LOGPROBS = _integer(
    "logprobs",
    "asked.top_logprobs",
    "logprobs should be in range [0, 5], got {got}.",
    kind="unsigned",
    low=0,
    high=5,
)
_MAX_TOKENS = Row(
    Param(wire="max_tokens", field="stopping.max_tokens", type="strict int", low=1, high=INT32),
    "integer",
    f"Parameter max_tokens must be (0,{INT32}], got {{got}}",
    "Parameter max_tokens not number_integer",
)
_TRUNCATE = _integer(
    "truncate",
    "stopping.truncate_prompt",
    f"truncate must be in (0,{INT32}], got {{got}}.",
    low=1,
    high=INT32,
)


def _stop(most: int) -> Check:
    """Stop strings; a single one may have ``most`` UTF-16 units."""

    def run(fields: Mapping[str, Raw], values: Values) -> None:
        got = get(fields, "stop")
        if got is None:
            return
        if isinstance(got, str):
            if not 1 <= units(got) <= most:
                raise wrong(
                    f"Input validation error: length of `stop` must be in [1, {most}], "
                    f"but got {units(got)}",
                    "stop",
                )
            got = [got]
        elif not isinstance(got, list):
            raise wrong(
                "Input validation error: param stop must be string or list[string]", "stop", "type"
            )
        elif not _fit(got):
            raise wrong(
                "Input validation error: `stop` must be list[string] if list, and item length in "
                f"[1, {MOST_STOPS}] with total <= {STOP_TOTAL}",
                "stop",
            )
        values.given.add("stop")
        values["stopping.stop"] = tuple(got)

    return Check("stop", "stopping.stop", run, "strings")


def _fit(stops: list[Any]) -> bool:
    if not all(isinstance(stop, str) and 1 <= units(stop) <= MOST_STOPS for stop in stops):
        return False
    return len(stops) <= MOST_STOPS and sum(map(units, stops)) <= STOP_TOTAL


def _stop_token_ids(fields: Mapping[str, Raw], values: Values) -> None:
    """Ids that no token can have are passed over, as the server does."""
    got = get(fields, "stop_token_ids")
    if got is None:
        return
    if not isinstance(got, list):
        raise wrong("Parameter stop_token_ids not array", "stop_token_ids", "type")
    if not all(type(token) is int for token in got):
        raise wrong("Parameter stop_token_ids not list[int]", "stop_token_ids", "type")
    values.given.add("stop_token_ids")
    ids = sorted({token for token in got if 0 <= token <= INT32})
    values["stopping.stop_token_ids"] = tuple(ids)


def _include_stop(fields: Mapping[str, Raw], values: Values) -> None:
    """Looked at only where there is something to include."""
    if "stop" not in fields and "stop_token_ids" not in fields:
        return
    name = "include_stop_str_in_output"
    got = get(fields, name)
    if got is None:
        return
    if not isinstance(got, bool):
        raise wrong(f"{name} must be boolean type.", name, "type")
    values.given.add(name)
    values["stopping.include_stop"] = got


def _logprobs_agree(fields: Mapping[str, Raw], values: Values) -> None:
    del fields
    if values.get("asked.logprobs") is False and values.get("asked.top_logprobs") is not None:
        raise wrong(
            "Value error, when using top_logprobs, logprobs must be true or null in chat "
            "completions",
            "top_logprobs",
            "conflict",
        )


def _thinking(fields: Mapping[str, Raw], values: Values) -> None:
    """Whether to think is read with the template's arguments; here, for how long."""
    kwargs = get(fields, "chat_template_kwargs")
    budget = kwargs.get("thinking_budget") if isinstance(kwargs, dict) else None
    if budget is None:
        return
    if type(budget) is not int:
        raise wrong("thinking_budget must be integer type.", "thinking_budget", "type")
    if not 0 < budget <= INT32:
        raise wrong(
            f"Parameter thinking_budget must be in [1,{INT32}], got {shown(budget)}",
            "thinking_budget",
        )
    if kwargs.get("enable_thinking"):
        values.given.add("chat_template_kwargs")
        values["reasoning.budget"] = budget


_STOP_TOKEN_IDS = Check("stop_token_ids", "stopping.stop_token_ids", _stop_token_ids, "ints")
_INCLUDE_STOP = Check("include_stop_str_in_output", "stopping.include_stop", _include_stop, "bool")
_LOGPROBS_AGREE = Check("top_logprobs", "logprobs.top", _logprobs_agree)
_THINKING = Check("chat_template_kwargs", "reasoning.budget", _thinking)

# --- the tables -----------------------------------------------------------------------------------

TEXT: Table = (
    _TEMPERATURE,
    _TOP_K_OR_0,
    _TOP_P,
    _TYPICAL_P,
    _DO_SAMPLE,
    _SEED,
    _REPETITION,
    _WATERMARK,
    _PRIORITY,
    _MAX_NEW_TOKENS,
    _DETAILS,
    _BATCH_SIZE,
    _TIMEOUT,
)
TEXT_RC1: Table = tuple(_SEED_RC1 if row is _SEED else row for row in TEXT)
TOKENS: Table = (
    *(_TEMPERATURE, _TOP_K_OR_0, _TOP_P, _DO_SAMPLE, _SEED, _REPETITION, _WATERMARK, _PRIORITY),
    *(_MAX_NEW_TOKENS, _TIMEOUT, _DETAILS, _BATCH_SIZE),
)
NATIVE: Table = (
    *(_TEMPERATURE, _TOP_K, _TOP_P_BELOW_1, _TYPICAL_P, _DO_SAMPLE, _SEED, _REPETITION),
    *(_WATERMARK, _PRIORITY, _MAX_NEW_TOKENS, _TIMEOUT, _DETAILS),
)
INPUTS: Table = (
    *(_stop(MOST_STOPS), _TEMPERATURE, _TOP_K, _TOP_P_BELOW_1, _TYPICAL_P, _DO_SAMPLE, _SEED),
    *(_REPETITION, _WATERMARK, _MAX_NEW_TOKENS, _DETAILS),
    _flag("decoder_input_details", "asked.prefill"),
    _flag("return_full_text", "kept.return_full_text"),
    _TRUNCATE,
)
"""Of the endpoints in the manner of TGI."""
PROMPT: Table = (
    *(_IGNORE_EOS, _stop(STOP_TOTAL), _STOP_TOKEN_IDS, _INCLUDE_STOP, _TEMPERATURE_OR_0),
    *(_TOP_K_OR_ALL, _TOP_P, _SEED, _REPETITION, _FREQUENCY, _PRESENCE, _SKIP_SPECIAL),
    *(_BEST_OF, _N, _MAX_TOKENS, _STREAM),
)
"""Of the endpoint in the manner of vLLM."""
CHAT: Table = (
    *(_IGNORE_EOS, _stop(STOP_TOTAL), _STOP_TOKEN_IDS, _INCLUDE_STOP, _TEMPERATURE_OR_0),
    *(_TOP_K_OR_ALL, _TOP_P, _SEED, _THINKING, _REPETITION_2, _FREQUENCY, _PRESENCE),
    *(_SKIP_SPECIAL, _BEST_OF, _N, _BEAMS, _LOGPROBS, _TOP_LOGPROBS, _LOGPROBS_AGREE),
    *(_MAX_TOKENS, _STREAM),
)
_TIGHTER: Mapping[Row | Check, Row | Check] = {
    CHAT[1]: _stop(MOST_STOPS),
    _TEMPERATURE_OR_0: _temperature("2", low=0, high=2),
    _TOP_K_OR_ALL: _TOP_K_OR_0,
}
CHAT_PLAIN: Table = tuple(_TIGHTER.get(row, row) for row in CHAT if row is not _THINKING)
"""The server's own validator, in place of the one that follows vLLM."""
CHAT_RC1: Table = (
    *(_temperature("2", low=0, above_low=True, high=2), _TOP_P, _SEED_RC1, _FREQUENCY, _PRESENCE),
    *(_MAX_TOKENS, _STREAM),
)
COMPLETION: Table = (
    *(_IGNORE_EOS, _stop(STOP_TOTAL), _INCLUDE_STOP, _STOP_TOKEN_IDS, _TEMPERATURE_OR_0),
    *(_TOP_K_OR_ALL, _TOP_P, _SEED, _REPETITION_2, _FREQUENCY, _PRESENCE, _SKIP_SPECIAL),
    *(_BEST_OF, _N, _BEAMS, _COMPLETION_LOGPROBS, _MAX_TOKENS, _STREAM),
)
