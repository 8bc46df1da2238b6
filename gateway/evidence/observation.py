"""What is measured of one recorded request, in whichever protocol it came."""

import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from gateway.evidence.request_options import (
    find_stop_strings,
    find_token_limit,
    find_tools,
    fits_schema,
    requires_json,
)
from gateway.observability.recording import RecordedChoice, RecordedRequest
from protocols.core.json_text import JsonDecoder

_decode = JsonDecoder().decode

_REFUSAL: Final = re.compile(
    r"\s*(?:i['\u2019]?m (?:very )?sorry|sorry|i apologi[sz]e|unfortunately)?[,.]?\s*(?:but )?"
    r"(?:as an ai\b|i (?:can(?:no|['\u2019])t|am (?:not able|unable)|won['\u2019]t|will not)"
    r"(?: be able)? (?:to )?(?:help|assist|provide|comply|do that|answer|fulfil|create|write))",
    re.IGNORECASE,
)
"""The beginning of a text that declines, in English."""
_CLIENT_ERROR: Final = range(400, 500)


class Observation(Struct):
    """One request and its response. None: the measure does not apply."""

    recorded: RecordedRequest
    text: str
    is_refused: bool
    """The request itself was not accepted."""
    is_failed: bool
    """There is no complete response, for another reason."""
    losses: frozenset[str]
    finish_reasons: tuple[str, ...]
    calls_tools: bool | None
    """Whether the model called one of its tools."""
    has_valid_arguments: bool | None
    """Whether the arguments of all calls fit the tools' schemas."""
    is_json: bool | None
    """Whether the text is JSON, where that was required."""
    ignores_stop: bool | None
    """Whether a stop string is in the text."""
    exceeds_limit: bool | None
    """Whether there are more tokens than the request allows."""
    is_empty: bool | None
    declines: bool | None
    """Whether the text begins as a refusal, or the response is marked as one."""
    completion_tokens: int | None
    duration: float | None
    first_token: float | None

    @property
    def duration_per_token(self) -> float | None:
        """The duration, divided by the tokens of the response."""
        if self.duration is None or not self.completion_tokens:
            return None
        return self.duration / self.completion_tokens

    @property
    def is_answered(self) -> bool:
        """Whether there is a complete response."""
        return not (self.is_refused or self.is_failed)


Pair = tuple[Observation, Observation]
"""Two observations of the same request."""


def observe(recorded: RecordedRequest) -> Observation:
    """Measure a request."""
    choices = recorded.answer.choices if recorded.answer is not None else []
    is_refused = recorded.status in _CLIENT_ERROR
    is_failed = not is_refused and recorded.outcome != "ok"
    is_text = not is_refused and not is_failed and bool(choices)
    text = "\n".join(choice.text for choice in choices)
    calls = [call for choice in choices for call in choice.tool_calls]
    tools = find_tools(recorded.request)
    schemas_known = [call for call in calls if tools.get(call.name) is not None]
    stops = find_stop_strings(recorded.request)
    limit = find_token_limit(recorded.request)
    tokens = recorded.usage.completion_tokens if recorded.usage is not None and is_text else None
    return Observation(
        recorded=recorded,
        text=text,
        is_refused=is_refused,
        is_failed=is_failed,
        losses=frozenset(loss.parameter for loss in recorded.losses),
        finish_reasons=tuple(sorted(choice.finish_reason or "none" for choice in choices))
        if is_text
        else (),
        calls_tools=bool(calls) if is_text and tools else None,
        has_valid_arguments=all(
            fits_schema(call.arguments, tools[call.name]) for call in schemas_known
        )
        if is_text and schemas_known
        else None,
        is_json=all(map(_is_json, choices))
        if is_text and requires_json(recorded.request)
        else None,
        ignores_stop=any(stop in text for stop in stops) if is_text and stops else None,
        exceeds_limit=tokens > limit * len(choices)
        if tokens is not None and limit is not None
        else None,
        is_empty=not (text.strip() or calls) if is_text else None,
        declines=any(choice.refusal or _REFUSAL.match(choice.text) for choice in choices)
        if is_text
        else None,
        completion_tokens=tokens,
        duration=(recorded.timing.duration or None) if is_text else None,
        first_token=recorded.timing.first_token if is_text and recorded.stream else None,
    )


def _is_json(choice: RecordedChoice) -> bool:
    if choice.tool_calls and not choice.text.strip():
        return True
    try:
        _decode(choice.text)
    except ValueError:  # DecodeError is one
        return False
    return True


_PROMPT_FIELDS: Final = ("messages", "input", "prompt", "text_input", "inputs", "instances")


def describe_prompt(body: Any) -> str:
    """The last text of a request, as an example shows it."""
    for name in _PROMPT_FIELDS:
        if isinstance(body, dict) and name in body:
            texts = [*_iter_texts(body[name])]
            return texts[-1] if texts else ""
    return ""


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _iter_texts(one)
    elif isinstance(value, dict):
        for name in ("content", "text", "input", "output"):
            if name in value:
                yield from _iter_texts(value[name])
