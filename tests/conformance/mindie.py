"""What generate and generate_stream answer, how a request is stopped, and what the server tells."""

from collections.abc import Callable
from typing import Any

from gateway.conformance.cases import EVENTS, Answer, Case, expect, match
from gateway.conformance.mindie.words import (
    CLOSES,
    NAME,
    PIECES,
    STAMPS,
    asked,
    event,
    path,
    refused,
    stream,
    talk,
    text,
    timed,
    whole,
)


def framed(answer: Answer) -> None:
    """Every event begins alike: no blank after the colon, keys in their order."""
    head = 'data:{"id":"a123","model_name":"mock","model_version":null,"text_output":"'
    blocks = answer.text.split("\n\n")
    expect(blocks.pop() == "", f"no blank line at the end: {answer.text[-100:]}")
    for block in blocks:
        expect(block.startswith(head), f"an event begins otherwise: {block[:100]}")


def named_anew(answers: Any) -> None:
    """The server counts the names that it gives."""
    numbers = [int(answer.json["id"].rpartition("_")[2]) for answer in answers]
    expect(numbers == sorted(set(numbers)), f"the names do not count up: {numbers}")


def cut_short(answer: Answer) -> None:
    """A stopped stream with details: some events, and the finish reason in the last."""
    *events, last = answer.chunks
    expect(len(events) + 1 == len(answer.events), f"not all are events: {answer.events}")
    expect(len(events) < len("abcdefghi"), "nothing was stopped")
    reasons = [one["details"].get("finish_reason") for one in (*events, last)]
    expect(reasons == [*[None] * len(events), "stop_sequence"], f"finish reasons: {reasons}")


def stopped_silently(answer: Answer) -> None:
    """A stopped stream without details."""
    said = [one["text_output"] for one in answer.chunks]
    expect(len(said) == len(answer.events), f"not all are events: {answer.events}")
    expect("a" in said and "j" not in said, f"nothing was stopped: {said}")


def talk_cut_short(answer: Answer) -> None:
    """A stopped conversation comes to its end all the same."""
    *_, last, done = answer.events
    expect(done == "[DONE]", f"the stream ends with {done}")
    match({"finish_reason": "stop"}, last["choices"][0], "the last choice", whole=False)
    expect('"content":"j"' not in answer.text, "nothing was stopped")


def timed_out(answer: Answer) -> None:
    """Some events, and then a bare text."""
    *events, last = answer.events
    expect(events and events == answer.chunks, f"before the text: {events}")
    expect(last == "Engine callback timeout: client timeout", f"at the end: {last}")


def stop(number: str, name: str) -> Case:
    """A case of stopInfer: what is said comes back."""
    body = {"id": name, "why": "enough"}
    return Case(number, "POST", path("stopInfer"), body=body, body_is=body, answer_headers=CLOSES)


def details(key: str) -> Callable[[Answer], list[Any]]:
    """Reads one of the details of every event."""
    return lambda answer: [one["details"].get(key) for one in answer.chunks]


def counted(answer: Answer) -> None:
    """Tokens are counted up, and only the last event has a reason to be the last."""
    match([1, 2, 3], details("generated_tokens")(answer), "generated_tokens")
    match([None, None, "eos_token"], details("finish_reason")(answer), "finish_reason")
    for key in ("first_token_cost", "decode_cost"):
        expect(all(key in one["details"] for one in answer.chunks), f"an event has no {key}")
        match([None] * 3, details(key)(answer), key)


def scalars(answer: Answer) -> None:
    """Of each event, where a whole answer has lists."""
    for key in ("batch_size", "queue_wait_time"):
        match([int] * 3, details(key)(answer), key)


SSE = {"content_type": EVENTS}
TOKENIZER = "/v1/tokenizer"
DETAILED = asked(details=True, max_new_tokens=3)
STEPS = tuple(zip(PIECES, (1, 2, 3), (None, None, "eos_token"), strict=True))
PLAIN = [whole(piece) for piece in PIECES]
LISTS: dict[str, Any] = {"batch_size": [int] * 3, "queue_wait_time": [int] * 3}
TOLD = whole(finish_reason="eos_token", generated_tokens=3, **LISTS)
AT_LIMIT = {"details": {"finish_reason": "length", "generated_tokens": 20}}
NO_ID = {"text_input": "hi"}
SLOW = {"model": "mock-slow", "stream": True}

ANSWERS = (
    stream("MI-01", DETAILED, events=[timed(*o) for o in STEPS], check=framed),
    stream("MI-02", DETAILED, check=counted, **SSE),
    stream("MI-03", DETAILED, check=scalars, **SSE),
    stream("MI-04", DETAILED, events=[timed(*o) for o in STEPS], answer_headers=STAMPS),
    stream("MI-04 rc1", DETAILED, profile="rc1", events=[event(*o) for o in STEPS]),
    stream("MI-05 false", asked(details=False), events=PLAIN),
    stream("MI-05 absent", asked(), events=PLAIN),
    stream("MI-05 no parameters", {"id": "a123", "text_input": "hi"}, events=PLAIN),
    text("MI-06", DETAILED, body_is=TOLD, answer_headers=CLOSES),
    text("MI-06 without details", asked(), body_is=whole(), answer_headers=CLOSES),
    text("MI-07", NO_ID, body_is=whole(name=NAME), times=3, across=named_anew),
    text("MI-07 named in a header", NO_ID, headers={"req-id": "b77"}, body_is=whole(name="b77")),
    text("MI-09 null", {**NO_ID, "id": None}, body_is=whole(name=NAME)),
    text("MI-10 256", {**NO_ID, "id": "a" * 256}, body_is=whole(name="a" * 256)),
    text("MI-16 null", {**NO_ID, "id": "a123", "parameters": None}, body_is=whole()),
    text("MI-17", asked(details=True), model="mock-long", body_has=AT_LIMIT),
    stream("MI-38", asked(timeout=1), model="mock-slow", check=timed_out, **SSE),
    text(
        "MI-39",
        asked(timeout=1),
        model="mock-slow",
        **refused("Engine callback timeout: client timeout", 500),
    ),
    stream(
        "MI-40",
        asked(details=True),
        model="mock-slow",
        meanwhile=stop("MI-40 its stop", "a123"),
        check=cut_short,
        **SSE,
    ),
    stream(
        "MI-40 without details",
        asked(),
        model="mock-slow",
        meanwhile=stop("MI-40 its stop", "a123"),
        check=stopped_silently,
        **SSE,
    ),
    talk(
        "MI-40 a conversation",
        SLOW,
        headers={"req-id": "b77"},
        meanwhile=stop("MI-40 its stop", "b77"),
        check=talk_cut_short,
        **SSE,
    ),
    Case(
        "MI-40 unknown",
        "POST",
        path("stopInfer"),
        body={"id": "c99"},
        answer_headers=CLOSES,
        **refused("RequestId is c99 not found.", 404),
    ),
    Case("MI-40 no id", "POST", path("stopInfer"), body={}, **refused("Not found id.")),
    Case(
        "MI-40 of an unknown model",
        "POST",
        path("stopInfer", "nope"),
        body={"id": "a123"},
        **refused("Model nope not found.", 404),
    ),
    Case(
        "MI-49",
        "GET",
        path("getSlotCount"),
        body_is={"total_slots": int, "free_slots": int, "available_tokens_length": int},
        answer_headers=CLOSES,
    ),
    Case(
        "MI-50",
        "POST",
        TOKENIZER,
        body={"inputs": "say hi", "model": "mock"},
        body_is={"token_number": 2, "tokens": ["say", " hi"]},
        answer_headers=CLOSES,
    ),
    Case(
        "MI-50 only counted",
        "POST",
        TOKENIZER,
        body={"inputs": "hi", "do_decode": False, "model": "mock"},
        body_is={"token_number": 1, "tokens": []},
    ),
    *(
        Case(
            f"MI-50 {word}",
            "POST",
            TOKENIZER,
            body={**body, "model": "mock"},
            **refused("Inputs in request body is invalid."),
        )
        for word, body in (("5", {"inputs": 5}), ("null", {"inputs": None}), ("none", {}))
    ),
)
