"""What is answered."""

from typing import Any

from gateway.conformance.cases import EVENTS, Answer, Case, expect
from gateway.conformance.ovms.words import (
    HANDSHAKE,
    PIECES,
    STREAM,
    STREAMED,
    TEXT_STREAM,
    WITH_USAGE,
    answer,
    chat,
    chunk,
    delta,
    embed,
    error,
    message,
    text,
    token,
    used,
    written,
)


def broken_off(answer: Answer) -> None:
    """What was said, and then a bare object: no event, no end."""
    said, _, rest = answer.text.rpartition("\n\n")
    expect('"content":" world"' in said, f"before the error: {said[-200:]}")
    expect(rest.startswith('{"error":"Mediapipe execution failed.'), f"at the end: {rest[:200]}")
    expect("[DONE]" not in answer.text, "an end was made up")
    expect('"finish_reason":"' not in answer.text, "a reason was made up")


def listed(answer: Answer) -> None:
    """Models have four keys, and so do they when asked for one by one."""
    for one in answer.json["data"]:
        expect(list(one) == ["id", "object", "created", "owned_by"], f"keys: {list(one)}")
        expect((one["object"], one["owned_by"]) == ("model", "OVMS"), f"another's: {one}")
    expect({"mock", "org/m1"} <= {one["id"] for one in answer.json["data"]}, "models are missing")


USAGE_ASKED = STREAMED | {"stream_options": {"include_usage": True}}
BLANK = [{"role": "user"}]
SHORT = used(2, 1)
LOGPROBS = {
    "tokens": list(PIECES),
    "token_logprobs": [-0.5, -0.5, -0.5],
    "top_logprobs": [{piece: -0.5} for piece in PIECES],
    "text_offset": [0, 5, 11],
}


def vectors(*embeddings: Any, tokens: int) -> dict[str, Any]:
    """The answer to a request for embeddings; it names no model."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "embedding": one, "index": i}
            for i, one in enumerate(embeddings)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


ANSWERS = (
    chat("OV-01", {}, body_is=answer(message())),
    chat("OV-02", {"stop": "zzz"}, body_has={"choices": [message()]}),
    chat(
        "OV-02 tools",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        body_has={
            "choices": [
                {
                    "finish_reason": "tool_calls",
                    "message": {
                        "content": "",
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": str,
                                "type": "function",
                                "function": {"name": "f", "arguments": '{"x":1}'},
                            }
                        ],
                    },
                }
            ]
        },
    ),
    text("OV-03", {}, body_is=answer(written(), kind="text_completion")),
    chat("OV-04", STREAMED, events=[HANDSHAKE, *[...] * 5]),
    chat("OV-05", STREAMED, events=STREAM),
    text("OV-06", STREAMED, events=TEXT_STREAM),
    chat("OV-07", USAGE_ASKED, events=WITH_USAGE),
    chat("OV-08", STREAMED, events=STREAM, answer_headers={"cache-control": "no-cache"}),
    chat("OV-10 {}", STREAMED | {"stream_options": {}}, events=STREAM),
    chat(
        "OV-19 without content",
        {"messages": BLANK},
        body_is=answer(message(), usage=used(0, 3)),
    ),
    chat(
        "OV-26",
        {"max_completion_tokens": 1, "max_tokens": 3},
        body_is=answer(message("Hello", "length"), usage=SHORT),
    ),
    text(
        "OV-27",
        {"max_tokens": 0, "echo": True},
        body_is=answer(written("a b", "length"), kind="text_completion", usage=used(2, 0)),
    ),
    text("OV-27 echo", {"echo": True}, body_has={"choices": [written("a bHello world!")]}),
    chat("OV-28 2.0", {"temperature": 2.0}, body_is=answer(message())),
    chat("OV-30 -1", {"top_k": -1}, body_is=answer(message())),
    chat(
        "OV-36",
        {"stop": " world"},
        body_is=answer(message("Hello"), usage=used(2, 2)),
    ),
    chat(
        "OV-37",
        STREAMED | {"stop": " world"},
        events=[
            HANDSHAKE,
            chunk(delta("Hello")),
            chunk(delta(" world")),
            chunk(delta(None, "stop")),
            "[DONE]",
        ],
    ),
    chat(
        "OV-39 with best_of",
        {"n": 2, "best_of": 2},
        body_is=answer(message(), message(index=1), usage=used(2, 6)),
    ),
    chat("OV-40 19", {"best_of": 19}, body_is=answer(message())),
    chat(
        "OV-42",
        {"logprobs": True},
        body_is=answer(message(logprobs={"content": [token(said) for said in PIECES]})),
    ),
    text(
        "OV-43 1",
        {"logprobs": 1},
        body_is=answer(written(logprobs=LOGPROBS), kind="text_completion"),
    ),
    chat("OV-44", {"max_tokens": 1}, body_is=answer(message("Hello", "length"), usage=SHORT)),
    chat(
        "OV-44 stream",
        STREAMED | {"max_tokens": 1},
        events=[HANDSHAKE, chunk(delta("Hello")), chunk(delta(None, "length")), "[DONE]"],
    ),
    Case("OV-46", "GET", "/v3/models", body_is={"data": list, "object": "list"}, check=listed),
    Case("OV-46 without a key", "GET", "/v3/models", headers={"authorization": None}, check=listed),
    *(
        Case(
            f"OV-46 {path}",
            "GET",
            f"/v3/models/{path}",
            body_is={"id": name, "object": "model", "created": int, "owned_by": "OVMS"},
        )
        for path, name in (("mock", "mock"), ("org%2Fm1", "org/m1"), ("org/m1", "org/m1"))
    ),
    Case("OV-46 nope", "GET", "/v3/models/nope", **error(500, "Model not found")),
    embed("OV-49", {"input": "a b"}, body_is=vectors([3, 2, 0.5, -0.25], tokens=2)),
    embed(
        "OV-49 list",
        {"input": ["a b", "c"]},
        body_is=vectors([3, 2, 0.5, -0.25], [1, 1, 0.5, -0.25], tokens=3),
    ),
    embed(
        "OV-49 base64",
        {"input": "a b", "encoding_format": "base64"},
        body_is=vectors("AABAQAAAAEAAAAA/AACAvg==", tokens=2),
    ),
    embed(
        "OV-49 500 inputs",
        {"input": ["a"] * 500},
        body_has={"object": "list", "data": lambda data: len(data) == 500},  # noqa: PLR2004 - the limit
    ),
    *(
        chat(
            f"OV-50 {model}",
            STREAMED | {"model": model},
            content_type=EVENTS,
            check=broken_off,
        )
        for model in ("mock-midfail", "mock-cut")
    ),
)
