"""Conversations, streamed: W55 to W63."""

import re

from gateway.conformance.cases import Answer, expect, match
from gateway.conformance.openai.shapes import (
    CALL_ID,
    HI,
    PIECES,
    chat,
    choices_in,
    chunk,
    error,
    failed,
    functions,
    invalid,
    logprobs,
    one_answer,
    said,
    stream,
    tools,
    usage,
)

END = chunk({}, "stop")
DONE = "[DONE]"
USAGE = {"stream_options": {"include_usage": True}}
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "content-length": None,
    "x-request-id": re.compile(".+"),
    "openai-version": "2020-10-01",
    "openai-processing-ms": re.compile(r"\d+"),
}
TOTAL = {
    "id": str,
    "object": "chat.completion.chunk",
    "created": int,
    "model": "mock",
    "choices": [],
    "usage": usage(),
}
CALLED = chunk({"role": "assistant", "content": None})
OPENED = {
    "index": 0,
    "id": CALL_ID,
    "type": "function",
    "function": {"name": "f", "arguments": ""},
}
FIRST, SECOND = ({"index": 0, "function": {"arguments": one}} for one in ('{"x"', ":1}"))
BROKEN = error("server_error", "bad_gateway", None)


def two_choices(got: Answer) -> None:
    """Each choice has its opening, its pieces and its finish."""
    one_answer(got)
    choices = choices_in(got)
    expect(set(choices) == {0, 1}, f"indexes: {list(choices)}")
    for index, pieces in choices.items():
        wanted = [*said(*PIECES, index=index), chunk({}, "stop", index=index)]
        match([one["choices"][0] for one in wanted], pieces, f"choice {index}")
    expect(got.events[-1] == DONE, "there is no [DONE]")


def nothing_past_hel(got: Answer) -> None:
    """What belongs to a stop string is never sent."""
    one_answer(got)
    pieces = choices_in(got)[0]
    text = "".join(one["delta"].get("content") or "" for one in pieces)
    expect(text == "Hel", f"the text: {text!r}")
    expect(pieces[-1]["finish_reason"] == "stop", f"the end: {pieces[-1]}")


CASES = (
    stream("W17 stream", given={"stop": "lo wor"}, check=nothing_past_hel),
    stream("W55", events=[*said(*PIECES), END, DONE], answer_headers=HEADERS),
    stream(
        "W55 accepts JSON",
        headers={"accept": "application/json"},
        events=[*said(*PIECES), END, DONE],
    ),
    stream(
        "W55 length",
        given={"max_tokens": 1},
        events=[*said("Hello"), chunk({}, "length"), DONE],
    ),
    stream(
        "W56",
        given=USAGE,
        events=[*said(*PIECES, usage=None), chunk({}, "stop", usage=None), TOTAL, DONE],
    ),
    stream(
        "W56 not wanted",
        given={"stream_options": {"include_usage": False}},
        events=[*said(*PIECES), END, DONE],
    ),
    chat("W57", given=USAGE, **invalid(None, "stream_options")),
    stream("W58", given={"n": 2}, check=two_choices),
    stream(
        "W59",
        given={"tools": tools("f"), "tool_choice": "required"},
        events=[
            CALLED,
            *(chunk({"tool_calls": [one]}) for one in (OPENED, FIRST, SECOND)),
            chunk({}, "tool_calls"),
            DONE,
        ],
    ),
    stream(
        "W59 functions",
        given={"functions": functions("f"), "function_call": {"name": "f"}},
        events=[
            CALLED,
            chunk({"function_call": {"name": "f", "arguments": ""}}),
            chunk({"function_call": {"arguments": '{"x"'}}),
            chunk({"function_call": {"arguments": ":1}"}}),
            chunk({}, "function_call"),
            DONE,
        ],
    ),
    chat(
        "W60",
        given={"stream": True, "temperature": 9},
        **invalid("decimal_above_max_value", "temperature"),
    ),
    stream("W61", given={"model": "mock-midfail"}, events=[*said(*PIECES[:2]), BROKEN]),
    stream("W61 cut", given={"model": "mock-cut"}, events=[*said(*PIECES[:2]), BROKEN]),
    chat(
        "W62",
        given={"stream": True, "model": "mock-down"},
        answer_headers={"retry-after": re.compile(r"[1-9]\d*")},
        **failed(503, "service_unavailable"),
    ),
    chat("W62 500", given={"stream": True, "model": "mock-500"}, **failed(502, "bad_gateway")),
    stream(
        "W63",
        given={"logprobs": True},
        events=[
            *said(),
            *(chunk({"content": one}, logprobs=logprobs(one)) for one in PIECES),
            END,
            DONE,
        ],
    ),
    stream(
        "W63 alternatives",
        given={"logprobs": True, "top_logprobs": 2, "messages": [HI]},
        events=[
            *said(),
            *(chunk({"content": one}, logprobs=logprobs(one, top=2)) for one in PIECES),
            END,
            DONE,
        ],
    ),
)
