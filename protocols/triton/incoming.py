"""What workers answer: an object of the model's outputs, in one piece or one for each event."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protocols.core.errors import MalformedRequest, WorkerFailed
from protocols.core.events import FinishReason, TokenLogprob, TopLogprob
from protocols.core.request import GenerationRequest
from protocols.triton import document
from protocols.triton.failures import raise_response_error
from protocols.triton.tensors import flatten_values
from protocols.triton.vocabulary import TEXT_OUTPUT

_MAX_LENIENT_PARSE_BYTES: Final = 1 << 20
"""Bytes of an answer that are worth a second look for numbers which JSON does not have."""
NO_REASON: Final = "None"
"""How a reason reads that there is none yet."""
FINISH_REASONS: Final[Mapping[str, FinishReason | None]] = {
    "stop": "eos",
    "eos": "eos",
    "length": "length",
    "max_tokens": "length",
    "abort": None,
    "error": None,
    "cancelled": None,
    "timeout": None,
    "not_finished": None,
}
"""vLLM's and TensorRT-LLM's words; None is a failure of the worker."""
_decode_json = msgspec.json.Decoder().decode
_LOGPROB_OUTPUTS: Final = ("logprobs", "output_log_probs")
_READ_OUTPUTS: Final = (
    TEXT_OUTPUT, "finish_reason", "stop_reason", "num_output_tokens", "num_input_tokens", *_LOGPROB_OUTPUTS,
)  # fmt: skip


_DEFAULT_OUTPUT_NAMES: Final[Mapping[str, str]] = {name: name for name in _READ_OUTPUTS}


def map_output_names(wires: Mapping[str, str]) -> Mapping[str, str]:
    """A model's names for the outputs that are read; ``wires`` are those that differ."""
    known = {name: wires.get(name, name) for name in _READ_OUTPUTS}
    return _DEFAULT_OUTPUT_NAMES if known == _DEFAULT_OUTPUT_NAMES else known


_NonNegativeInt = Annotated[int, Meta(ge=0)]


class ParsedResponse(Struct):
    """One answer, or a piece of one: in each list an element for each choice, as far as told."""

    texts: list[str]
    model: str | None
    finish_reasons: Sequence[str] = ()
    stop_reasons: Sequence[str] = ()
    token_counts: Sequence[int] = ()
    prompt_tokens: int | None = None
    logprobs: Sequence[tuple[TokenLogprob, ...]] = ()


class _OneText(Struct, forbid_unknown_fields=True):
    """An answer of one text. The names are those that the families of models have."""

    text_output: str
    model_name: str | None = None
    model_version: str | None = None
    finish_reason: str | UnsetType | None = UNSET
    stop_reason: str | UnsetType | None = UNSET
    num_output_tokens: _NonNegativeInt | UnsetType = UNSET
    num_input_tokens: _NonNegativeInt | None = None
    id: str | None = None
    sequence_id: int = 0
    sequence_start: bool = False
    sequence_end: bool = False


_one_text = msgspec.json.Decoder(_OneText).decode


def _text_of(body: bytes) -> ParsedResponse | None:
    """What an answer of one text holds, as most do; None for any other, and for a wrong one."""
    try:
        got = _one_text(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    said = ParsedResponse([got.text_output], got.model_name, prompt_tokens=got.num_input_tokens)
    if got.finish_reason is not UNSET:
        said.finish_reasons = (_parse_reason(got.finish_reason),)
    if got.stop_reason is not UNSET:
        said.stop_reasons = (_parse_reason(got.stop_reason),)
    if got.num_output_tokens is not UNSET:
        said.token_counts = (got.num_output_tokens,)
    return said


class _LogprobCandidate(Struct):
    logprob: float | None = None
    rank: int | None = None
    decoded_token: str | None = None


_CandidateColumn = list[dict[str, _LogprobCandidate]]


def parse_response(
    body: bytes, request: GenerationRequest, known: Mapping[str, str]
) -> ParsedResponse:
    """What an object holds; ``known`` are the model's ``outputs``.

    Raises what an error in it means, and WorkerFailed for what can't be read.
    """
    if known is _DEFAULT_OUTPUT_NAMES and (told := _text_of(body)) is not None:
        return told
    try:
        got = (
            _decode_json(body)
            if len(body) > _MAX_LENIENT_PARSE_BYTES
            else document.parse_value(body)
        )
    except (MalformedRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise WorkerFailed("The worker's answer can't be read.") from e
    if not isinstance(got, dict) or known[TEXT_OUTPUT] not in got or "error" in got:
        raise_response_error(got, known[TEXT_OUTPUT])
        if not isinstance(got, dict) or not (known[TEXT_OUTPUT] in got or "model_name" in got):
            raise WorkerFailed("The worker's answer is not in its dialect.")
    values = {name: flatten_values(got[wire]) for name, wire in known.items() if wire in got}
    texts = values.pop(TEXT_OUTPUT, [])
    if not {str}.issuperset(map(type, texts)):
        raise WorkerFailed("The worker's answer is no text.")
    name = got.get("model_name")
    said = ParsedResponse(texts, name if isinstance(name, str) else None)
    if values:
        _parse_details(values, said, request)
    return said


def _parse_details(
    told: Mapping[str, list[Any]], said: ParsedResponse, request: GenerationRequest
) -> None:
    """What is told beside the texts."""
    said.finish_reasons = _parse_reasons(told.get("finish_reason", []))
    said.stop_reasons = _parse_reasons(told.get("stop_reason", []))
    said.token_counts = _parse_counts(told.get("num_output_tokens", []))
    prompt = _parse_counts(told.get("num_input_tokens", []))
    said.prompt_tokens = prompt[0] if prompt else None
    if request.logprobs is not None and said.texts:
        columns, numbers = (told.get(name, []) for name in _LOGPROB_OUTPUTS)
        said.logprobs = _parse_logprobs(columns, numbers, said.texts, request.logprobs.top)


def _parse_reasons(values: list[Any]) -> list[str]:
    return [_parse_reason(one) for one in values]


def _parse_reason(told: Any) -> str:
    return told if isinstance(told, str) else NO_REASON


def _parse_counts(values: list[Any]) -> list[int]:
    return [one for one in values if type(one) is int and one >= 0]


def _parse_logprobs(
    columns: list[Any], numbers: list[Any], texts: list[str], top: int
) -> list[tuple[TokenLogprob, ...]]:
    """For each choice, from either family's output: JSON of candidates, or bare numbers."""
    if columns:
        return [_parse_candidates(one, top) for one in columns]
    size = len(numbers) // len(texts)
    return [
        _build_bare_logprobs(numbers[i * size : (i + 1) * size], text if size == 1 else "")
        for i, text in enumerate(texts)
    ]


def _parse_candidates(told: Any, top: int) -> tuple[TokenLogprob, ...]:
    if not isinstance(told, str):
        return ()
    try:
        column = msgspec.convert(document.parse_value(told.encode()), _CandidateColumn | None)
    except (MalformedRequest, msgspec.ValidationError) as e:
        raise WorkerFailed("The worker's log probabilities can't be read.") from e
    return tuple(_build_token_logprob(one, top) for one in column or () if one)


def _build_token_logprob(candidates: Mapping[str, _LogprobCandidate], top: int) -> TokenLogprob:
    """The token that was taken stands first; the likeliest have a rank."""
    found = [
        TopLogprob(
            one.decoded_token or "", _replace_missing_logprob(one.logprob), _parse_token_id(key)
        )
        for key, one in sorted(candidates.items(), key=lambda item: item[1].rank or 0)
        if one.rank is not None and (top < 0 or one.rank <= top)
    ]
    key, taken = next(iter(candidates.items()))
    return TokenLogprob(
        taken.decoded_token or "",
        _drop_non_finite(taken.logprob),
        tuple(found),
        _parse_token_id(key),
    )


def _build_bare_logprobs(numbers: list[Any], text: str) -> tuple[TokenLogprob, ...]:
    """Numbers alone: which token each is of shows only where there is one."""
    values = [one if isinstance(one, float) else None for one in numbers]
    return tuple(TokenLogprob(text, _drop_non_finite(one)) for one in values)


def _parse_token_id(key: str) -> int | None:
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= 20 else None  # noqa: PLR2004 - more is no token


def _drop_non_finite(logprob: float | None) -> float | None:
    return logprob if logprob is not None and math.isfinite(logprob) else None


def _replace_missing_logprob(logprob: float | None) -> float:
    return float("-inf") if logprob is None or math.isnan(logprob) else logprob
