"""Errors raise the client's own exceptions, and are retried where that is safe."""

import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

Ask = Callable[[OpenAI], object]


def make_chat_call(model: str = "chat", **fields: Any) -> Ask:
    messages: Any = fields.pop("messages", [{"role": "user", "content": "say hi"}])
    return lambda client: client.chat.completions.create(model=model, messages=messages, **fields)


LONG = [{"role": "user", "content": "one two three four five six seven eight nine"}]
ROWS: dict[str, tuple[Ask, type[openai.APIStatusError], int, str | None, str | None]] = {
    # the request, the exception, the status, code, param
    "a range": (
        make_chat_call(temperature=3),
        openai.BadRequestError,
        400,
        "decimal_above_max_value",
        "temperature",
    ),
    "a type": (
        make_chat_call(extra_body={"n": "x"}),
        openai.BadRequestError,
        400,
        "invalid_type",
        "n",
    ),
    "nothing said": (
        make_chat_call(messages=[]),
        openai.BadRequestError,
        400,
        "empty_array",
        "messages",
    ),
    "too long": (
        make_chat_call("short", messages=LONG),
        openai.BadRequestError,
        400,
        "context_length_exceeded",
        "messages",
    ),
    "a wrong key": (
        lambda client: make_chat_call()(client.with_options(api_key="wrong")),
        openai.AuthenticationError,
        401,
        "invalid_api_key",
        None,
    ),
    "another's model": (
        lambda client: make_chat_call()(client.with_options(api_key="sk-narrow")),
        openai.NotFoundError,
        404,
        "model_not_found",
        "model",
    ),
    "no such model": (
        make_chat_call("nope"),
        openai.NotFoundError,
        404,
        "model_not_found",
        "model",
    ),
    "no such model, by name": (
        lambda client: client.models.retrieve("nope"),
        openai.NotFoundError,
        404,
        "model_not_found",
        "model",
    ),
    "no such path": (
        lambda client: client.fine_tuning.jobs.list(),
        openai.NotFoundError,
        404,
        "unknown_url",
        None,
    ),
    "a limit": (
        make_chat_call("limited"),
        openai.RateLimitError,
        429,
        "rate_limit_exceeded",
        None,
    ),
    "a worker's failure": (
        make_chat_call("failing"),
        openai.InternalServerError,
        502,
        "bad_gateway",
        None,
    ),
    "a failure before the first byte of a stream": (
        make_chat_call("failing", stream=True),
        openai.InternalServerError,
        502,
        "bad_gateway",
        None,
    ),
    "no worker": (
        make_chat_call("down"),
        openai.InternalServerError,
        503,
        "service_unavailable",
        None,
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_error_response_raises_the_matching_sdk_exception(
    client: OpenAI,
    row: tuple[Ask, type[openai.APIStatusError], int, str | None, str | None],
) -> None:
    ask, exception, status, code, param = row

    with pytest.raises(openai.APIStatusError) as excinfo:
        ask(client)

    error = excinfo.value
    assert type(error) is exception
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.request_id
    assert isinstance(error.body, dict)
    assert error.body["message"]


@pytest.mark.parametrize(("model", "status"), [("limited", 429), ("down", 503)])
def test_sdk_retries_after_the_retry_after_time(client: OpenAI, model: str, status: int) -> None:
    began = time.monotonic()

    with pytest.raises(openai.APIStatusError) as excinfo:
        make_chat_call(model)(client.with_options(max_retries=1))

    assert excinfo.value.status_code == status
    assert excinfo.value.response.headers["retry-after"] == "1"
    assert excinfo.value.response.request.headers["x-stainless-retry-count"] == "1"
    assert 1.0 <= time.monotonic() - began < 5.0


def read_stream(client: OpenAI, model: str) -> tuple[str, set[str | None], bool]:
    """Return a stream's text, its finish reasons, and whether it raised."""
    text = ""
    reasons: set[str | None] = set()
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "say hi"}], stream=True
    )
    try:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reasons.add(chunk.choices[0].finish_reason)
    except openai.APIError:
        return text, reasons, True
    return text, reasons, False


@pytest.mark.parametrize("base", ["/v1", "/serving-endpoints"])
@pytest.mark.parametrize("model", ["broken", "cut"])
def test_broken_stream_raises_an_sdk_error(
    gateway: str, client: OpenAI, model: str, base: str
) -> None:
    received = read_stream(client.with_options(base_url=gateway + base), model)

    assert received == ("Hello world", {None}, True)


@pytest.mark.parametrize("base", ["/v3", "/mindie/v1"])
@pytest.mark.parametrize("model", ["broken", "cut"])
def test_broken_stream_of_other_protocols_has_no_finish_reason(
    gateway: str, client: OpenAI, model: str, base: str
) -> None:
    """These servers send an error outside any event, which this client ignores."""
    received = read_stream(client.with_options(base_url=gateway + base), model)

    assert received == ("Hello world", {None}, False)


def test_broken_completion_stream_raises_an_sdk_error(client: OpenAI) -> None:
    stream = client.completions.create(model="broken", prompt="say hi", stream=True)

    with pytest.raises(openai.APIError):
        list(stream)
