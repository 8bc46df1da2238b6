"""Conversations in OpenAI's manner."""

from typing import Any

from gateway.conformance.cases import Case
from gateway.conformance.mindie.words import CHAT, CLOSES, NAME, PIECES, STAMPS, refused, talk

USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


def answer(message: dict[str, Any], reason: str, *, early: bool = False) -> dict[str, Any]:
    """A whole answer."""
    choice = {"index": 0, "message": {"role": "assistant", **message}}
    choice |= {"finish_reason": reason} if early else {"logprobs": None, "finish_reason": reason}
    return {
        "id": NAME,
        "object": "chat.completion",
        "created": int,
        "model": "mock",
        "choices": [choice],
        "usage": USAGE,
    }


def chunk(
    delta: dict[str, Any], reason: str | None = None, *, early: bool = False, **told: Any
) -> dict[str, Any]:
    """An event of a stream."""
    choice = {"index": 0, "delta": delta}
    choice |= {"finish_reason": reason} if early else {"logprobs": None, "finish_reason": reason}
    return {
        "id": NAME,
        "object": "chat.completion.chunk",
        "created": int,
        "model": "mock",
        **told,
        "choices": [choice],
    }


def said(content: str) -> dict[str, Any]:
    """A delta: the role stands in every one."""
    return {"role": "assistant", "content": content}


NO_MODEL = refused("Request contains not model or model null")
NO_MESSAGES = refused("Request param messages not arr or arr is empty")
EARLY_CHUNKS = [chunk(said(piece), early=True) for piece in PIECES]

TALKS = (
    Case("MI-41", "POST", CHAT, body={"messages": [{"role": "user", "content": "hi"}]}, **NO_MODEL),
    talk("MI-41 null", {"model": None}, **NO_MODEL),
    talk("MI-41 5", {"model": 5}, **refused("Request param model must be string")),
    talk("MI-41 empty", {"model": ""}, **refused("Request param model must be not empty")),
    talk("MI-42", {"model": "nope"}, **refused("Got model nope, but not found in server")),
    talk("MI-43", {"messages": []}, **NO_MESSAGES),
    talk("MI-43 an object", {"messages": {}}, **NO_MESSAGES),
    talk(
        "MI-43 null",
        {"messages": None},
        **refused("Request param contains not messages or messages null"),
    ),
    talk(
        "MI-44",
        {},
        body_is=answer({"content": "Hello world!", "tool_calls": []}, "stop"),
        answer_headers=CLOSES,
    ),
    talk(
        "MI-44 rc1",
        {},
        profile="rc1",
        body_is=answer({"content": "Hello world!"}, "eos_token", early=True),
    ),
    talk(
        "MI-45",
        {"stream": True},
        answer_headers=STAMPS,
        events=[
            *(chunk(said(piece)) for piece in ("", *PIECES)),
            chunk(said(""), "stop", usage=USAGE),
            "[DONE]",
        ],
    ),
    talk(
        "MI-45 no chunk of usage alone",
        {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1},
        events=[
            *(chunk(said(piece)) for piece in ("", "Hello")),
            chunk(
                said(""),
                "length",
                usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            ),
            "[DONE]",
        ],
    ),
    talk(
        "MI-46",
        {"stream": True, "max_tokens": 2},
        profile="rc1",
        events=[*EARLY_CHUNKS[:2], chunk({}, "length", early=True), "[DONE]"],
    ),
    talk(
        "MI-46 to its end",
        {"stream": True},
        profile="rc1",
        events=[*EARLY_CHUNKS, chunk({}, "eos_token", early=True), "[DONE]"],
    ),
    talk("MI-47", {"max_tokens": "5"}, **refused("Parameter max_tokens not number_integer")),
    talk(
        "MI-47 0",
        {"max_tokens": 0},
        **refused("Parameter max_tokens must be (0,2147483647], got 0"),
    ),
    talk(
        "MI-48",
        {"presence_penalty": 2.5},
        **refused("Parameter presence_penalty not in [-2.0, 2.0], but got 2.5."),
    ),
    talk(
        "MI-48 frequency_penalty",
        {"frequency_penalty": 2.5},
        **refused("Parameter frequency_penalty should be in [-2.0, 2.0], got 2.5."),
    ),
)
