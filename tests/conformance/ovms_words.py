"""What the cases say of a request and of an answer.

``P`` is an error of the graph that a model is, inside the sentence that the server says around it.
"""

from collections.abc import Mapping
from typing import Any

from gateway.conformance.cases import EVENTS, JSON, Case

HI = {"role": "user", "content": "say hi"}
PIECES = ("Hello", " world", "!")


def used(prompt: int, completion: int) -> dict[str, int]:
    """Usage, in its order."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


USAGE = used(2, 3)
STREAMED = {"stream": True}


def chat(id: str, given: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """A conversation, with what is given beside its messages or in their place."""
    body = {"model": "mock", "messages": [HI]} | given
    return Case(id, "POST", "/v3/chat/completions", body=body, **rest)


def text(id: str, given: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """A completion, with what is given beside its prompt or in its place."""
    return Case(
        id, "POST", "/v3/completions", body={"model": "mock", "prompt": "a b"} | given, **rest
    )


def embed(id: str, given: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """A request for embeddings."""
    return Case(id, "POST", "/v3/embeddings", body={"model": "ep-emb"} | given, **rest)


def error(status: int, said: str) -> dict[str, Any]:
    """E: a refusal outside the graph."""
    return {"status": status, "body_is": {"error": said}}


def sentence(inner: str, node: str) -> str:
    """What the server says around an error of a graph's node."""
    return (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "{node}" failed: {inner}'
    )


def P(inner: str, *, node: str = "LLMExecutor", stream: bool = False) -> dict[str, Any]:  # noqa: N802 - the document's
    """An error of the graph; a promised stream has its header already."""
    kind = EVENTS if stream else JSON
    return error(400, sentence(inner, node)) | {"content_type": kind}


def message(
    said: str = "Hello world!", reason: str = "stop", *, index: int = 0, logprobs: Any = None
) -> dict[str, Any]:
    """A choice of a conversation."""
    return {
        "finish_reason": reason,
        "index": index,
        "logprobs": logprobs,
        "message": {"content": said, "role": "assistant", "tool_calls": []},
    }


def written(
    said: str = "Hello world!", reason: str = "stop", *, logprobs: Any = None
) -> dict[str, Any]:
    """A choice of a completion."""
    return {"finish_reason": reason, "index": 0, "logprobs": logprobs, "text": said}


def answer(
    *choices: dict[str, Any], kind: str = "chat.completion", usage: Mapping[str, int] = USAGE
) -> dict[str, Any]:
    """A whole answer: no id, and the keys in this order."""
    return {
        "choices": list(choices),
        "created": int,
        "model": "mock",
        "object": kind,
        "usage": usage,
    }


def chunk(
    *choices: dict[str, Any], kind: str = "chat.completion.chunk", **usage: Any
) -> dict[str, Any]:
    """A chunk of a stream."""
    return {"choices": list(choices), "created": int, "model": "mock", "object": kind, **usage}


def delta(said: str | None, reason: str | None = None) -> dict[str, Any]:
    """A choice in a chunk of a conversation."""
    content = {} if said is None else {"content": said}
    return {"index": 0, "logprobs": None, "delta": content, "finish_reason": reason}


def piece(said: str, reason: str | None = None) -> dict[str, Any]:
    """A choice in a chunk of a completion."""
    return {"index": 0, "logprobs": None, "text": said, "finish_reason": reason}


HANDSHAKE = chunk(
    {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
)
STREAM = [HANDSHAKE, *(chunk(delta(said)) for said in PIECES), chunk(delta(None, "stop")), "[DONE]"]
WITH_USAGE = [
    HANDSHAKE,
    *(chunk(delta(said), usage=None) for said in PIECES),
    chunk(delta(None, "stop"), usage=None),
    chunk(usage=USAGE),
    "[DONE]",
]
TEXT_KIND = "text_completion.chunk"
TEXT_STREAM = [
    chunk({"index": 0, "text": "", "finish_reason": None}, kind=TEXT_KIND),
    *(chunk(piece(said), kind=TEXT_KIND) for said in PIECES),
    chunk(piece("", "stop"), kind=TEXT_KIND),
    "[DONE]",
]


def token(said: str) -> dict[str, Any]:
    """A token of a conversation's answer."""
    return {"token": said, "logprob": -0.5, "bytes": list(said.encode()), "top_logprobs": []}
