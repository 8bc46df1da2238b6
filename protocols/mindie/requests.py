"""What all requests share: media and lengths, how many answers, and the way into the internal one.

Sources: MindIE-LLM 0695772, src/server/endpoint/single_req_infer_interface/*.cpp; where these and
the published pages differ on what a request without a temperature means, see ``sampling``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw, Struct

from protocols.core.request import (
    AudioPart,
    ContentPart,
    GenerationRequest,
    ImagePart,
    ResponseOptions,
    TextPart,
    VideoPart,
)
from protocols.mindie.checks import (
    MindieParamTable,
    build_param_error,
    collect_extra_fields,
    count_utf16_units,
)
from protocols.mindie.profiles import MindieConfig
from protocols.params import ParsedParams

_MAX_MEDIA_PARTS = 20
MAX_BEAM_TOKENS = 128
PRIORITY_STEP = 51
"""1 to 5 as 0 to 204: here as there, lower goes first."""
_MEDIA_KEYS = ("image_url", "audio_url", "video_url")


# --- text and media -------------------------------------------------------------------------------


def get_invalid_length(text: str | Raw, limit: int) -> int | None:
    """The length in UTF-16 units of what is empty, or longer than ``limit``."""
    found = text if isinstance(text, str) else bytes(text).decode()
    if found and len(found) * 2 <= limit:
        return None
    length = count_utf16_units(found)
    return None if 0 < length <= limit else length


def has_media(items: Sequence[Any]) -> bool:
    """Whether a list of parts holds more than text."""
    return any(isinstance(item, dict) and any(key in item for key in _MEDIA_KEYS) for item in items)


def check_media(items: Sequence[Any]) -> None:
    """Raises InvalidParameter for a list of parts that the server would not take."""
    found = 0
    for item in items:
        if not isinstance(item, dict):
            continue
        if not isinstance(item.get("text", ""), str):
            raise build_param_error("Request param text must be string", "text", "type")
        media = [key for key in _MEDIA_KEYS if key in item]
        for key in media:
            if item[key] is None:
                raise build_param_error(f"Request param {key} null", key, "missing")
        found += bool(media)
        if found > _MAX_MEDIA_PARTS:
            text = f"The number of multimodal url should be no more than {_MAX_MEDIA_PARTS}"
            raise build_param_error(text, media[0], "too_long")


def read_parts(items: Sequence[Any]) -> tuple[ContentPart, ...]:
    """The parts of a list that ``check_media`` let pass; what is no part is passed over."""
    parts: list[ContentPart] = []
    for item in items:
        match item:
            case {"image_url": got}:
                parts.append(ImagePart(_read_media_url(got)))
            case {"video_url": got}:
                parts.append(VideoPart(_read_media_url(got)))
            case {"audio_url": got}:
                parts.append(AudioPart(_read_media_url(got)))
            case {"text": str(text)}:
                parts.append(TextPart(text))
            case _:
                pass
    return tuple(parts)


def _read_media_url(got: Any) -> str:
    match got:
        case str(url) | {"url": str(url)}:
            return url
        case _:
            raise build_param_error("The type of inputs is abnormal", "inputs", "type")


# --- how many answers -----------------------------------------------------------------------------


class ChoiceCountErrors(Struct, frozen=True):
    """What is said of ``best_of`` (b) and ``n`` that do not go together."""

    best_of_below_n: str
    best_of_not_n: str
    """In a stream; empty where a stream may have more candidates than answers."""
    no_temperature: str
    """More than one answer, and no temperature by which they could differ."""
    null_text: str = "None"


CHAT_COUNT_ERRORS = ChoiceCountErrors(
    "best_of must be greater than or equal to n, but best_of is {b}, n is {n}.",
    "best_of must be equal to n in stream mode, but best_of is {b}, n is {n}.",
    "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, "
    "but best_of is {b}, n is {n}.",
)
COMPLETION_COUNT_ERRORS = ChoiceCountErrors(
    "Best_of must be greater than or equal to n, but best_of is {b} and n is {n}.",
    "best_of must be equal to n, but best_of is {b} and n is {n}.",
    "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is {b} and "
    "n is {n}.",
    "null",
)
VLLM_STYLE_COUNT_ERRORS = ChoiceCountErrors(
    "best_of should greater than or equal to n, but best_of is {b}, n is {n}.",
    "",
    "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is {b}, "
    "n is {n}.",
)


def resolve_choice_count(values: ParsedParams, said: ChoiceCountErrors) -> None:
    """Settles how many answers there are: as many as candidates. Raises InvalidParameter."""
    n, best = values.get("n"), values.get("best_of")
    if values.get("asked.beams"):
        _resolve_beam_width(values)
        return
    b, shown = best or said.null_text, n or said.null_text
    if best is not None and values.get("stream") and said.best_of_not_n and best != n:
        text = CHAT_COUNT_ERRORS.best_of_not_n if n is None else said.best_of_not_n
        raise build_param_error(text.format(b=b, n=n), "best_of", "conflict")
    if best is not None and n is not None and best < n:
        raise build_param_error(said.best_of_below_n.format(b=b, n=n), "best_of", "conflict")
    answers = best or n or 1
    if answers > 1 and not values.get("sampling.temperature"):
        raise build_param_error(said.no_temperature.format(b=b, n=shown), "n", "conflict")
    values["best_of"] = None
    values["n"] = answers if best or n else None


def _resolve_beam_width(values: ParsedParams) -> None:
    most = values.get("stopping.max_tokens")
    if most is None or most > MAX_BEAM_TOKENS:
        raise build_param_error(
            f"Please set the max_tokens to be not larger than {MAX_BEAM_TOKENS} when the "
            "use_beam_search is on.",
            "max_tokens",
            "conflict",
        )
    n = values.get("n") or 1
    values["sampling.beam_width"] = max(values.get("best_of") or 1, n)
    values["best_of"] = None


# --- the way into the internal request ------------------------------------------------------------


def build_request(
    values: ParsedParams,
    setup: MindieConfig,
    table: MindieParamTable,
    fields: Mapping[str, Raw],
    **more: Any,
) -> GenerationRequest:
    """The request that was read with ``table`` from ``fields``.

    ``more`` are fields of the request; ``known`` among them names wire fields read elsewhere.
    """
    if (priority := values.get("priority")) is not None:
        values["priority"] = (priority - 1) * PRIORITY_STEP
    if (seconds := values.get("timeout")) is not None:
        values["timeout"] = float(seconds)
    if setup.max_iter_times is not None:
        asked = values.get("stopping.max_tokens") or setup.max_iter_times
        values["stopping.max_tokens"] = min(asked, setup.max_iter_times)
    known = more.pop("known", ())
    return GenerationRequest(
        **{
            **values.build_request_arguments(),
            "extra": collect_extra_fields(table, fields, known),
            **more,
        }
    )


def apply_sampling_defaults(
    values: ParsedParams, setup: MindieConfig, *, tokens: int | None
) -> None:
    """What parameters leave unsaid on the endpoints that are not OpenAI's.

    ``tokens`` is the promised length. Who asks for no sampling wants the likeliest token; in the
    early releases that is everyone who names neither sampling nor a temperature (inferred from the
    published default of ``do_sample``, not measured).
    """
    if tokens is not None and values.get("stopping.max_tokens") is None:
        values["stopping.max_tokens"] = tokens
    asked = values.get("sampling.do_sample")
    silent = setup.profile.early and values.get("sampling.temperature") is None
    if asked is False or (asked is None and silent):
        values["sampling.temperature"] = 0.0


def build_response_options(
    values: ParsedParams, *, token_ids: bool = False, timing: bool = False
) -> ResponseOptions:
    """What is to be told besides the text."""
    details = bool(values.get("asked.details") or values.get("asked.prefill"))
    return ResponseOptions(details=details, timing=details or timing, token_ids=token_ids)
