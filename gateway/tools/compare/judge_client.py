"""Requests to the model that judges, behind a URL of OpenAI's API."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import httpx
import msgspec
from msgspec import Raw, Struct

from gateway.evidence.judge import FeedbackValues, JudgeError, JudgeReply, Judging, judge_pairs
from gateway.evidence.observation import Pair
from protocols.core.json_text import decode_json

_TIMEOUT: Final = 120.0
"""In seconds, for one request."""
_MAX_ERROR: Final = 300
_RETRIED: Final = (408, 409, 425, 429)
"""And all from 500 on."""
_OF_PROMPT: Final = (400, 413, 422)


class JudgeOptions(Struct, frozen=True):
    """Who judges, by what, and how much it may take."""

    model: str
    url: str
    key: str | None
    rubric: str
    max_requests: int


class _Part(Struct):
    text: str = ""


class _Message(Struct):
    content: str | list[_Part] | None = None


class _Choice(Struct):
    message: _Message


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(Struct):
    choices: list[_Choice] = []
    usage: Raw = Raw()
    """An odd one must not cost the verdict."""


def run_judge(
    pairs: Sequence[Pair],
    options: JudgeOptions,
    feedback: tuple[str, FeedbackValues] | None = None,
) -> Judging:
    """Judge the pairs. Raises JudgeError if all requests fail."""
    judging = asyncio.run(_judge(pairs, options, feedback))
    if judging.requests and judging.requests == judging.failed_requests:
        raise JudgeError(judging.error)
    return judging


async def _judge(
    pairs: Sequence[Pair], options: JudgeOptions, feedback: tuple[str, FeedbackValues] | None
) -> Judging:
    url = f"{options.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    headers = {} if options.key is None else {"Authorization": f"Bearer {options.key}"}
    async with httpx.AsyncClient(headers=headers, timeout=_TIMEOUT) as client:

        async def complete(body: dict[str, Any]) -> JudgeReply:
            try:
                response = await client.post(url, json=body)
            except httpx.TransportError as error:
                text = f"{url}: {str(error) or type(error).__name__}"
                raise JudgeError(text, scope="try") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise JudgeError(f"{url}: {str(error) or type(error).__name__}") from None
            if response.status_code != httpx.codes.OK:
                raise _build_error(url, response)
            return read_reply(response.content)

        return await judge_pairs(
            pairs,
            complete,
            model=options.model,
            rubric=options.rubric,
            max_requests=options.max_requests,
            feedback=feedback,
        )


def _build_error(url: str, response: httpx.Response) -> JudgeError:
    """What a status means: a wrong key or model fails all requests, a bad prompt only its own."""
    text = f"{url}: {response.status_code} {response.text[:_MAX_ERROR]}"
    status = response.status_code
    if status in _RETRIED or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        wait = response.headers.get("retry-after", "")
        return JudgeError(text, scope="try", wait=float(wait) if wait.isdecimal() else 0.0)
    return JudgeError(text, scope="pair" if status in _OF_PROMPT else "judge")


def read_reply(content: bytes) -> JudgeReply:
    """A reply that is no chat completion has no text, and so no verdict."""
    try:
        completion = decode_json(content, kind=_Completion)
    except msgspec.DecodeError:
        return JudgeReply("")
    content_or_parts = completion.choices[0].message.content if completion.choices else None
    text = content_or_parts or ""
    if not isinstance(text, str):
        text = "".join(part.text for part in text)
    try:
        usage = decode_json(completion.usage, kind=_Usage)
    except msgspec.DecodeError:
        usage = _Usage()
    return JudgeReply(text, usage.prompt_tokens, usage.completion_tokens)
