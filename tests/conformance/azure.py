"""Azure OpenAI, a profile of OpenAI's API: cases AZ-01 to AZ-20.

AZ-11 to AZ-14 need other listeners or workers; they are in test_azure.py.
"""

import base64
import struct
from collections.abc import Mapping
from typing import Any

from tests.conformance.cases import EVENTS, Case, Response, expect

PROFILE = "azure"
VERSION = "api-version=2024-10-21"
MESSAGES = [{"role": "user", "content": "say hi"}]
PIECES = ("Hello", " world", "!")


def call(
    number: str,
    body: Mapping[str, Any] | None = None,
    *,
    deployment: str = "mock",
    what: str = "chat/completions",
    query: str = f"?{VERSION}",
    **row: Any,
) -> Case:
    """Build a request to a deployment: a user message and the fields of ``body``."""
    path = f"/openai/deployments/{deployment}/{what}{query}"
    sent = {**({"messages": MESSAGES} if what == "chat/completions" else {}), **(body or {})}
    headers = {"authorization": None, "api-key": "sk-test", **row.pop("headers", {})}
    return Case(number, "POST", path, body=sent, headers=headers, profile=PROFILE, **row)


def error(status: int, code: str) -> dict[str, Any]:
    """Expect this error."""
    return {"status": status, "body_is": {"error": {"code": code, "message": str}}}


ANSWER = {"object": "chat.completion", "choices": [{"message": {"content": "".join(PIECES)}}]}


def check_stream(answer: Response) -> None:
    """The stream has a role, the pieces, a finish reason and [DONE]."""
    chunks = answer.chunks
    expect(answer.events[-1] == "[DONE]", f"no end: {answer.text[-100:]}")
    deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
    expect(deltas[0]["role"] == "assistant", f"the first delta is {deltas[0]}")
    texts = [one["content"] for one in deltas if one.get("content")]
    expect(texts == [*PIECES], f"pieces: {texts}")
    expect("prompt_filter_results" not in answer.text, "there are filter results")


def check_no_filter(answer: Response) -> None:
    """The response has no filter results if none are configured."""
    expect("filter" not in answer.text, f"filter results: {answer.text}")


def check_vector(answer: Response) -> None:
    """The vector has four floats in base64."""
    data = base64.b64decode(answer.json["data"][0]["embedding"])
    expect(struct.unpack("<4f", data) == (3.0, 2.0, 0.5, -0.25), f"vector: {data!r}")


CASES = (
    call("AZ-01", body_has=ANSWER, check=check_no_filter, answer_headers={"apim-request-id": str}),
    call("AZ-02", {"model": "other"}, body_has={**ANSWER, "model": "mock"}),
    call("AZ-03", query="", **error(404, "404")),
    call("AZ-04", query="?api-version=banana", **error(400, "BadRequest")),
    call("AZ-05", query="?api-version=2031-01-01-preview", body_has=ANSWER),
    call("AZ-06", deployment="nope", **error(404, "DeploymentNotFound")),
    call("AZ-07", deployment="org%2Fm1", body_has=ANSWER),
    call("AZ-08", headers={"api-key": None, "authorization": "Bearer sk-test"}, body_has=ANSWER),
    call("AZ-09 none", headers={"api-key": None}, **error(401, "401")),
    call("AZ-09 wrong", headers={"api-key": "sk-wrong"}, **error(401, "401")),
    call("AZ-10", {"stream": True}, content_type=EVENTS, check=check_stream),
    call("AZ-15", {"temperature": 3}, status=400,
         body_has={"error": {"param": "temperature", "type": "invalid_request_error"}}),
    call("AZ-16", {"input": "a b", "encoding_format": "base64"}, deployment="mock-emb",
         what="embeddings", check=check_vector),
    Case("AZ-17", "GET", f"/openai/models?{VERSION}", profile=PROFILE,
         body_has={"object": "list", "data": list}),
    Case("AZ-18", "POST", "/openai/v1/chat/completions", profile=PROFILE,
         body={"model": "mock", "messages": MESSAGES}, body_has=ANSWER),
    Case("AZ-18 error", "POST", "/openai/v1/chat/completions", profile=PROFILE,
         body={"model": "nope", "messages": MESSAGES}, status=404,
         body_is={"error": {"message": str, "type": str, "param": "model",
                            "code": "model_not_found"}}),
    Case("AZ-19", "POST", "/openai/v1/deployments/mock/chat/completions?api-version=preview",
         profile=PROFILE, body={"messages": MESSAGES}, body_has=ANSWER),
    call("AZ-20", deployment="mock-429", **error(429, "429"),
         answer_headers={"Retry-After": "2"}),
)  # fmt: skip
NUMBERS = {f"AZ-{n:02}" for n in range(1, 21)} - {"AZ-11", "AZ-12", "AZ-13", "AZ-14"}
