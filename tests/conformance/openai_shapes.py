"""What the requests and the answers are made of.

C is a conversation with the model ``mock``, P a completion, E a request for embeddings.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.conformance.cases import EVENTS, Answer, Case, expect

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
MODELS = "/v1/models"

HI = {"role": "user", "content": "say hi"}
HELLO = "Hello world!"
PIECES = ("Hello", " world", "!")
ARGUMENTS = '{"x":1}'
ID = re.compile(r"chatcmpl-.+")
TEXT_ID = re.compile(r"cmpl-.+")
CALL_ID = re.compile(r"call_.+")


# --- requests -------------------------------------------------------------------------------------


def chat(id: str, *, given: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """C, with what is given beside its fields or in their place."""
    return Case(id, "POST", CHAT, body={"model": "mock", "messages": [HI]} | (given or {}), **rest)


def talk(id: str, *messages: Mapping[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """C with other messages."""
    return chat(id, given={"messages": messages}, **rest)


def stream(id: str, *, given: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """C, streamed."""
    rest = {"content_type": EVENTS, "check": one_answer} | rest
    return chat(id, given={"stream": True} | (given or {}), **rest)


def text(id: str, *, given: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """P, with what is given beside its fields or in their place."""
    return Case(id, "POST", TEXT, body={"model": "mock", "prompt": "a b"} | (given or {}), **rest)


def embed(id: str, *, given: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """E, with what is given beside its fields or in their place."""
    return Case(id, "POST", EMBED, body={"model": "mock", "input": "a b"} | (given or {}), **rest)


def functions(*names: str) -> list[dict[str, Any]]:
    """Functions without parameters of note."""
    return [{"name": name, "parameters": {"type": "object"}} for name in names]


def tools(*names: str) -> list[dict[str, Any]]:
    """The same as tools."""
    return [{"type": "function", "function": one} for one in functions(*names)]


def called(*ids: str) -> dict[str, Any]:
    """An assistant's message that calls f once for each id, and says nothing."""
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


# --- refusals -------------------------------------------------------------------------------------


def error(type: str, code: str | None, param: str | None, message: Any = str) -> dict[str, Any]:  # noqa: A002 - the wire's word
    """The body of a refusal, or an event of a stream: all four keys are always there."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def refused(
    status: int, code: str | None, param: str | None = None, message: Any = str
) -> dict[str, Any]:
    """A refusal for which the request is to blame."""
    return {"status": status, "body_is": error("invalid_request_error", code, param, message)}


def invalid(code: str | None, param: str | None, message: Any = str) -> dict[str, Any]:
    """A parameter that is wrong."""
    return refused(400, code, param, message)


def failed(status: int, code: str, kind: str = "server_error", message: Any = str) -> Any:
    """A refusal for which the request is not to blame."""
    return {"status": status, "body_is": error(kind, code, None, message)}


# --- answers --------------------------------------------------------------------------------------


def usage(prompt: Any = 2, completion: Any = 3) -> dict[str, Any]:
    """What was counted; a type stands for any number."""
    both = isinstance(prompt, int) and isinstance(completion, int)
    total = prompt + completion if both else int
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def answer(
    *messages: Mapping[str, Any], reason: str = "stop", logprobs: Any = None, **counted: Any
) -> dict[str, Any]:
    """The answer to C: a choice for each message."""
    return {
        "id": ID,
        "object": "chat.completion",
        "created": int,
        "model": str,
        "choices": [
            {"index": i, "message": one, "logprobs": logprobs, "finish_reason": reason}
            for i, one in enumerate(messages)
        ],
        "usage": usage(**counted),
    }


def whole(*texts: str, **rest: Any) -> dict[str, Any]:
    """The answer to C: a choice for each text, by default one of all that the mock says."""
    said = texts or (HELLO,)
    return answer(*({"role": "assistant", "content": t, "refusal": None} for t in said), **rest)


def token(text: str, top: int) -> dict[str, Any]:
    """A token of a conversation's answer with its logprob, and so many that might have come."""
    names = (text, *(f"alt{i}" for i in range(1, top)))
    return {
        "token": text,
        "logprob": -0.5,
        "bytes": list(text.encode()),
        "top_logprobs": [
            {"token": name, "logprob": -0.5 - i, "bytes": list(name.encode())}
            for i, name in enumerate(names[:top])
        ],
    }


def logprobs(*texts: str, top: int = 0) -> dict[str, Any]:
    """The logprobs of these tokens; both keys are required."""
    return {"content": [token(one, top) for one in texts], "refusal": None}


def chunk(
    delta: Mapping[str, Any],
    reason: str | None = None,
    *,
    index: int = 0,
    logprobs: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """One chunk of C's stream."""
    piece = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return {
        "id": ID,
        "object": "chat.completion.chunk",
        "created": int,
        "model": str,
        "choices": [piece],
        **more,
    }


def said(*pieces: str, index: int = 0, **more: Any) -> list[dict[str, Any]]:
    """The opening chunk of C's stream, and one for each piece."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": one} for one in pieces)]
    return [chunk(delta, index=index, **more) for delta in deltas]


def texts(*choices: tuple[str, str], logprobs: Any = None, **counted: Any) -> dict[str, Any]:
    """The answer to P: text and reason of each choice."""
    return {
        "id": TEXT_ID,
        "object": "text_completion",
        "created": int,
        "model": str,
        "choices": [
            {"text": one, "index": i, "logprobs": logprobs, "finish_reason": reason}
            for i, (one, reason) in enumerate(choices or [(HELLO, "stop")])
        ],
        "usage": usage(**counted),
    }


def vectors(*embeddings: Any, tokens: int = 2) -> dict[str, Any]:
    """The answer to E; its usage has no completion tokens."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": one}
            for i, one in enumerate(embeddings)
        ],
        "model": "mock",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


# --- checks ---------------------------------------------------------------------------------------


def one_answer(got: Answer) -> None:
    """All chunks are of one answer: they have one id, one time, one model and one object."""
    chunks = [one for one in got.chunks if "error" not in one]
    for key in ("id", "created", "model", "object"):
        found = {one[key] for one in chunks}
        expect(len(found) == 1, f"the chunks have more than one {key}: {found}")


def choices_in(got: Answer) -> Mapping[int, Sequence[Any]]:
    """The pieces of each choice in their order, since choices may take turns."""
    choices: dict[int, list[Any]] = {}
    for one in got.chunks:
        for piece in one["choices"]:
            choices.setdefault(piece["index"], []).append(piece)
    return choices
