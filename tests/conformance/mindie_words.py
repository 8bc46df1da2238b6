"""What the cases have in common: bodies, answers, and the server's complaints."""

import re
from collections.abc import Mapping
from typing import Any

from gateway.conformance.cases import Case

PIECES = ("Hello", " world", "!")
NAME = re.compile(r"endpoint_common_\d+")
"""A request's name where its client gave none."""
STAMPS = {"RequestUUID": re.compile("[!-~]+"), "startTime": re.compile(r"\d{19}")}
"""The headers of every answer."""
CLOSES = {**STAMPS, "Connection": "close"}
"""Those of an answer in one piece."""
CHAT = "/v1/chat/completions"
_TYPES = {
    400: "Bad Request",
    404: "NotFoundError",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}


def path(what: str, model: str = "mock") -> str:
    """A path of a model."""
    return f"/v2/models/{model}/{what}"


def asked(**parameters: Any) -> dict[str, Any]:
    """A body for generate, named a123."""
    return {"id": "a123", "text_input": "hi", "parameters": parameters}


def text(number: str, body: Any, *, model: str = "mock", **row: Any) -> Case:
    """A case of generate."""
    return Case(number, "POST", path("generate", model), body=body, **row)


def stream(number: str, body: Any, *, model: str = "mock", **row: Any) -> Case:
    """A case of generate_stream."""
    return Case(number, "POST", path("generate_stream", model), body=body, **row)


def talk(number: str, body: Mapping[str, Any], **row: Any) -> Case:
    """A case of chat/completions: ``body`` beside or instead of a model and a word from a user."""
    usual = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
    return Case(number, "POST", CHAT, body={**usual, **body}, **row)


def refused(said: Any, status: int = 422) -> dict[str, Any]:
    """The row's part that expects an error."""
    return {"status": status, "body_is": {"error": said, "error_type": _TYPES[status]}}


def whole(said: str = "".join(PIECES), *, name: Any = "a123", **details: Any) -> dict[str, Any]:
    """An answer of generate, with details where there are any."""
    head = {"id": name, "model_name": "mock", "model_version": None, "text_output": said}
    return {**head, "details": _details(**details)} if details else head


def event(said: str, tokens: int, reason: str | None = None) -> dict[str, Any]:
    """An event of generate_stream with details, less its times."""
    details: dict[str, Any] = {} if reason is None else {"finish_reason": reason}
    details |= {"generated_tokens": tokens, "batch_size": int, "queue_wait_time": int}
    return whole(said, **details)


def timed(said: str, tokens: int, reason: str | None = None) -> dict[str, Any]:
    """The same with its times, of which the first event has the one and later ones the other."""
    first = tokens == 1
    times = {"prefill_time": int if first else None, "decode_time": None if first else int}
    return {**event(said, tokens, reason), **times}


def _details(**told: Any) -> dict[str, Any]:
    order = ("finish_reason", "generated_tokens", "first_token_cost", "decode_cost")
    told |= {"first_token_cost": None, "decode_cost": None}
    return {key: told[key] for key in (*order, "batch_size", "queue_wait_time") if key in told}
