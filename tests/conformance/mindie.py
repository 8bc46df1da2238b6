"""MindIE: cases MI-01 to MI-50. Its paths are its own, below one prefix or none.

Besides the models of all protocols, the server has ``mock-long``, which answers more than 20
tokens. Cases of the profile rc1 run where that profile is mounted, all others against 2x. Where an
endpoint names no model, the body does, which MindIE would ignore.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.conformance.cases import EVENTS, Case, Response, expect, match

PIECES = ("Hello", " world", "!")
NAME = re.compile(r"endpoint_common_\d+")
"""The name of a request whose client gave none."""
STAMPS = {"RequestUUID": re.compile("[!-~]+"), "startTime": re.compile(r"\d{19}")}
"""The headers of every response."""
CLOSES = {**STAMPS, "Connection": "close"}
"""The headers of a unary response."""
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
    """Return a path of a model."""
    return f"/v2/models/{model}/{what}"


def generate_body(**parameters: Any) -> dict[str, Any]:
    """Build a body for generate, named a123."""
    return {"id": "a123", "text_input": "hi", "parameters": parameters}


def generate(number: str, body: Any, *, model: str = "mock", **row: Any) -> Case:
    """Build a case of generate."""
    return Case(number, "POST", path("generate", model), body=body, **row)


def generate_stream(number: str, body: Any, *, model: str = "mock", **row: Any) -> Case:
    """Build a case of generate_stream."""
    return Case(number, "POST", path("generate_stream", model), body=body, **row)


def chat(number: str, body: Mapping[str, Any], **row: Any) -> Case:
    """Build a case of chat/completions; ``body`` adds to or replaces a user message and a model."""
    default = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
    return Case(number, "POST", CHAT, body={**default, **body}, **row)


def error(message: Any, status: int = 422) -> dict[str, Any]:
    """Expect this error."""
    return {"status": status, "body_is": {"error": message, "error_type": _TYPES[status]}}


def response(text: str = "".join(PIECES), *, name: Any = "a123", **details: Any) -> dict[str, Any]:
    """Expect a response of generate, with the given details."""
    head = {"id": name, "model_name": "mock", "model_version": None, "text_output": text}
    return {**head, "details": _details(**details)} if details else head


def event(text: str, tokens: int, reason: str | None = None) -> dict[str, Any]:
    """Expect an event of generate_stream with details, without times."""
    details: dict[str, Any] = {} if reason is None else {"finish_reason": reason}
    details |= {"generated_tokens": tokens, "batch_size": int, "queue_wait_time": int}
    return response(text, **details)


def timed_event(text: str, tokens: int, reason: str | None = None) -> dict[str, Any]:
    """Expect an event with its times: the first has the prefill's, later ones the decode's."""
    first = tokens == 1
    times = {"prefill_time": int if first else None, "decode_time": None if first else int}
    return {**event(text, tokens, reason), **times}


def _details(**values: Any) -> dict[str, Any]:
    order = ("finish_reason", "generated_tokens", "first_token_cost", "decode_cost")
    values |= {"first_token_cost": None, "decode_cost": None}
    return {key: values[key] for key in (*order, "batch_size", "queue_wait_time") if key in values}


# --- generate, generate_stream, stopInfer and what the server reports -----------------------------


def check_framing(answer: Response) -> None:
    """Every event starts the same: no blank after the colon, and keys in order."""
    head = 'data:{"id":"a123","model_name":"mock","model_version":null,"text_output":"'
    blocks = answer.text.split("\n\n")
    expect(blocks.pop() == "", f"no blank line at the end: {answer.text[-100:]}")
    for block in blocks:
        expect(block.startswith(head), f"an event begins otherwise: {block[:100]}")


def check_names_increase(answers: Any) -> None:
    """The server numbers the names that it generates."""
    numbers = [int(answer.json["id"].rpartition("_")[2]) for answer in answers]
    expect(numbers == sorted(set(numbers)), f"the names do not count up: {numbers}")


def check_stopped_with_details(answer: Response) -> None:
    """A stopped stream with details has a finish reason in its last event."""
    *events, last = answer.chunks
    expect(len(events) + 1 == len(answer.events), f"not all are events: {answer.events}")
    expect(len(events) < len("abcdefghi"), "nothing was stopped")
    reasons = [one["details"].get("finish_reason") for one in (*events, last)]
    expect(reasons == [*[None] * len(events), "stop_sequence"], f"finish reasons: {reasons}")


def check_stopped(answer: Response) -> None:
    """A stopped stream without details has some of the events."""
    texts = [one["text_output"] for one in answer.chunks]
    expect(len(texts) == len(answer.events), f"not all are events: {answer.events}")
    expect("a" in texts and "j" not in texts, f"nothing was stopped: {texts}")


def check_chat_stopped(answer: Response) -> None:
    """A stopped chat stream ends normally."""
    *_, last, done = answer.events
    expect(done == "[DONE]", f"the stream ends with {done}")
    match({"finish_reason": "stop"}, last["choices"][0], "the last choice", exact=False)
    expect('"content":"j"' not in answer.text, "nothing was stopped")


def check_timeout(answer: Response) -> None:
    """The stream has some events and then a plain text."""
    *events, last = answer.events
    expect(events and events == answer.chunks, f"before the text: {events}")
    expect(last == "Engine callback timeout: client timeout", f"at the end: {last}")


def stop_infer(number: str, name: str) -> Case:
    """Build a case of stopInfer, which echoes the request."""
    body = {"id": name, "why": "enough"}
    return Case(number, "POST", path("stopInfer"), body=body, body_is=body, answer_headers=CLOSES)


def details(key: str) -> Callable[[Response], list[Any]]:
    """Return one detail of every event."""
    return lambda answer: [one["details"].get(key) for one in answer.chunks]


def check_token_counts(answer: Response) -> None:
    """Token counts increase, and only the last event has a finish reason."""
    match([1, 2, 3], details("generated_tokens")(answer), "generated_tokens")
    match([None, None, "eos_token"], details("finish_reason")(answer), "finish_reason")
    for key in ("first_token_cost", "decode_cost"):
        expect(all(key in one["details"] for one in answer.chunks), f"an event has no {key}")
        match([None] * 3, details(key)(answer), key)


def check_scalar_details(answer: Response) -> None:
    """Events have numbers where unary responses have lists."""
    for key in ("batch_size", "queue_wait_time"):
        match([int] * 3, details(key)(answer), key)


SSE = {"content_type": EVENTS}
TOKENIZER = "/v1/tokenizer"
DETAILED = generate_body(details=True, max_new_tokens=3)
STEPS = tuple(zip(PIECES, (1, 2, 3), (None, None, "eos_token"), strict=True))
PLAIN = [response(piece) for piece in PIECES]
LISTS: dict[str, Any] = {"batch_size": [int] * 3, "queue_wait_time": [int] * 3}
DETAILED_RESPONSE = response(finish_reason="eos_token", generated_tokens=3, **LISTS)
AT_LIMIT = {"details": {"finish_reason": "length", "generated_tokens": 20}}
NO_ID = {"text_input": "hi"}
SLOW = {"model": "mock-slow", "stream": True}

GENERATE = (
    generate_stream(
        "MI-01", DETAILED, events=[timed_event(*o) for o in STEPS], check=check_framing
    ),
    generate_stream("MI-02", DETAILED, check=check_token_counts, **SSE),
    generate_stream("MI-03", DETAILED, check=check_scalar_details, **SSE),
    generate_stream(
        "MI-04", DETAILED, events=[timed_event(*o) for o in STEPS], answer_headers=STAMPS
    ),
    generate_stream("MI-04 rc1", DETAILED, profile="rc1", events=[event(*o) for o in STEPS]),
    generate_stream("MI-05 false", generate_body(details=False), events=PLAIN),
    generate_stream("MI-05 absent", generate_body(), events=PLAIN),
    generate_stream("MI-05 no parameters", {"id": "a123", "text_input": "hi"}, events=PLAIN),
    generate("MI-06", DETAILED, body_is=DETAILED_RESPONSE, answer_headers=CLOSES),
    generate("MI-06 without details", generate_body(), body_is=response(), answer_headers=CLOSES),
    generate("MI-07", NO_ID, body_is=response(name=NAME), times=3, across=check_names_increase),
    generate(
        "MI-07 named in a header", NO_ID, headers={"req-id": "b77"}, body_is=response(name="b77")
    ),
    generate("MI-09 null", {**NO_ID, "id": None}, body_is=response(name=NAME)),
    generate("MI-10 256", {**NO_ID, "id": "a" * 256}, body_is=response(name="a" * 256)),
    generate("MI-16 null", {**NO_ID, "id": "a123", "parameters": None}, body_is=response()),
    generate("MI-17", generate_body(details=True), model="mock-long", body_has=AT_LIMIT),
    generate_stream(
        "MI-38", generate_body(timeout=1), model="mock-slow", check=check_timeout, **SSE
    ),
    generate(
        "MI-39",
        generate_body(timeout=1),
        model="mock-slow",
        **error("Engine callback timeout: client timeout", 500),
    ),
    generate_stream(
        "MI-40",
        generate_body(details=True),
        model="mock-slow",
        meanwhile=stop_infer("MI-40 its stop", "a123"),
        check=check_stopped_with_details,
        **SSE,
    ),
    generate_stream(
        "MI-40 without details",
        generate_body(),
        model="mock-slow",
        meanwhile=stop_infer("MI-40 its stop", "a123"),
        check=check_stopped,
        **SSE,
    ),
    chat(
        "MI-40 a conversation",
        SLOW,
        headers={"req-id": "b77"},
        meanwhile=stop_infer("MI-40 its stop", "b77"),
        check=check_chat_stopped,
        **SSE,
    ),
    Case(
        "MI-40 unknown",
        "POST",
        path("stopInfer"),
        body={"id": "c99"},
        answer_headers=CLOSES,
        **error("RequestId is c99 not found.", 404),
    ),
    Case("MI-40 no id", "POST", path("stopInfer"), body={}, **error("Not found id.")),
    Case(
        "MI-40 of an unknown model",
        "POST",
        path("stopInfer", "nope"),
        body={"id": "a123"},
        **error("Model nope not found.", 404),
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
            **error("Inputs in request body is invalid."),
        )
        for word, body in (("5", {"inputs": 5}), ("null", {"inputs": None}), ("none", {}))
    ),
)


# --- invalid requests: names, texts, JSON, models and paths ---------------------------------------


_ID = error(
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)
_LENGTH = error(
    re.compile(
        r"text_input must be necessary and data type must be string and length in \(0, \d+\], but "
        "the length of inputs is 0"
    )
)
_ABNORMAL = error(
    re.compile(r"The type of text_input is abnormal\. The requestId is endpoint_common_\d+")
)
_NO_JSON = error("Failed to parse request context to json")
_BODY = {"text_input": "hi"}
_UNREADABLE = {
    "cut": b'{"text_input":"hi"',
    "empty": b"",
    "a word": b"hello",
    "not UTF-8": b'{"text_input":"\xff\xfe"}',
    "too deep": b"[" * 100_000,
}

INVALID_REQUESTS = (
    generate("MI-08", {**_BODY, "id": "a b"}, answer_headers=CLOSES, **_ID),
    generate("MI-08 empty", {**_BODY, "id": ""}, **_ID),
    generate("MI-08 not ASCII", {**_BODY, "id": "é"}, **_ID),
    generate("MI-09 5", {**_BODY, "id": 5}, **error("id must be string type.")),
    generate("MI-10", {**_BODY, "id": "a" * 257}, **_ID),
    generate("MI-11 absent", {"id": "a123"}, **error("The text_input not found")),
    generate("MI-11 null", {"text_input": None}, **error("The text_input not found")),
    generate("MI-12", {"text_input": 5}, **_ABNORMAL),
    generate("MI-12 an object", {"text_input": {}}, **_ABNORMAL),
    generate("MI-13", {"text_input": ""}, **_LENGTH),
    generate("MI-14", {"text_input": []}, **error("Parameter text_input arr is empty")),
    *(generate(f"MI-15 {word}", body, **_NO_JSON) for word, body in _UNREADABLE.items()),
    generate("MI-16", {**_BODY, "parameters": []}, **error("parameters must be object type.")),
    generate(
        "MI-33", {**generate_body(x=[{}], top_q=None), "y": {"z": 1}}, body_has={"id": "a123"}
    ),
    generate("MI-34", generate_body(), model="nope", **error("Model nope not found.", 404)),
    generate("MI-34 before the body", b"{", model="nope", **error("Model nope not found.", 404)),
    generate_stream(
        "MI-34 streamed", generate_body(), model="nope", **error("Model nope not found.", 404)
    ),
    generate("MI-34 no name for a model", generate_body(), model="a%20b", status=404, body_is=b""),
    Case(
        "MI-35", "POST", path("versions/1/generate"), body=generate_body(), status=404, body_is=b""
    ),
    Case("MI-35 GET", "GET", path("versions/1/generate"), status=404, body_is=b""),
    generate_stream(
        "MI-36", {"id": "a123"}, answer_headers=CLOSES, **error("The text_input not found")
    ),
    generate_stream("MI-36 no JSON", b"{", **_NO_JSON),
    generate_stream(
        "MI-36 parameters", generate_body(details="x"), **error("details must be boolean type.")
    ),
    generate(
        "MI-37",
        b" " * (33 << 20),
        status=413,
        body_is={
            "message": re.compile(
                r"Request body too large\. Maximum allowed size is \d+(\.\d+)?MB\."
            )
        },
    ),
)


# --- the parameters of generate: accepted and rejected values -------------------------------------


_INT = "2147483647"
_SEED = "seed must be unsigned type."
_REPETITION = "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got {}."
_TIMEOUT = "Parameter timeout must be strictly positive and small than 65535 seconds, got {}."
_NEW_TOKENS = f"Parameter max_new_tokens must be in (0,{_INT}], got {{}}."
_TOP_K = f"Parameter top_k must be in -1 || (0,{_INT}], got {{}}"
_BATCH = f"Parameter batch_size must be in (0,{_INT}], got {{}}."
_TEMPERATURE = "Parameter temperature must be in (0.0,3.40282e+38], got {}."
_TOP_P = "Parameter top_p must be in (0.0,1.0], got {}."
_TYPICAL_P = "Parameter typical_p must be in (0.0,1.0], got {}."
_PRIORITY = "Parameter priority must be in [1,5], got {}."

_REJECTED: Mapping[str, tuple[str, Any, str]] = {
    "MI-18 0": ("max_new_tokens", 0, _NEW_TOKENS.format(0)),
    "MI-18 -1": ("max_new_tokens", -1, _NEW_TOKENS.format(-1)),
    "MI-18 2147483648": ("max_new_tokens", 2**31, _NEW_TOKENS.format(2**31)),
    "MI-19 2.5": ("max_new_tokens", 2.5, "max_new_tokens must be integer type."),
    "MI-19 a string": ("max_new_tokens", "5", "max_new_tokens must be integer type."),
    "MI-20 0": ("temperature", 0, _TEMPERATURE.format(0)),
    "MI-20 0.0": ("temperature", 0.0, _TEMPERATURE.format(0.0)),
    "MI-21 a string": ("temperature", "1", "temperature must be float type."),
    "MI-21 true": ("temperature", True, "temperature must be float type."),
    "MI-22 0": ("top_p", 0, _TOP_P.format(0)),
    "MI-22 1.01": ("top_p", 1.01, _TOP_P.format(1.01)),
    "MI-24 -1": ("top_k", -1, _TOP_K.format(-1)),
    "MI-25": ("typical_p", -1.0, _TYPICAL_P.format(-1.0)),
    "MI-26 -1": ("seed", -1, _SEED),
    "MI-26 0.5": ("seed", 0.5, _SEED),
    "MI-27": ("repetition_penalty", 0, _REPETITION.format(0)),
    "MI-28": ("details", "true", "details must be boolean type."),
    "MI-28 1": ("details", 1, "details must be boolean type."),
    "MI-28 do_sample": ("do_sample", "true", "do_sample must be boolean type."),
    "MI-28 watermark": ("watermark", 0, "watermark must be boolean type."),
    "MI-29 0": ("batch_size", 0, _BATCH.format(0)),
    "MI-30": ("priority", 6, _PRIORITY.format(6)),
    "MI-30 0": ("priority", 0, _PRIORITY.format(0)),
    "MI-31 0": ("timeout", 0, _TIMEOUT.format(0)),
    "MI-31 65536": ("timeout", 65536, _TIMEOUT.format(65536)),
}
_ACCEPTED: Mapping[str, dict[str, Any]] = {
    "MI-21": {"temperature": 1},
    "MI-22": {"top_p": 1.0},
    "MI-24": {"top_k": 0},
    "MI-26": {"seed": 0},
    "MI-26 null": {"seed": None},
    "MI-29": {"batch_size": 100},
    "MI-30 1": {"priority": 1},
    "MI-31": {"timeout": 65535},
    "MI-32": {"perf_stat": "x"},
}


def _rejected_values() -> Iterator[Case]:
    for number, (name, value, message) in _REJECTED.items():
        yield generate(number, generate_body(**{name: value}), **error(message))


def _accepted_values() -> Iterator[Case]:
    for number, parameters in _ACCEPTED.items():
        yield generate(number, generate_body(**parameters), body_is=response())


_NATIVE = {"inputs": "hi", "model": "mock"}
_LENGTH_DETAILS = {"details": {"finish_reason": "length", "generated_tokens": 20}}

PARAMETERS = (
    *_rejected_values(),
    *_accepted_values(),
    generate(
        "MI-18 the first in the server's order is told",
        generate_body(max_new_tokens=0, top_p=2, temperature=-1),
        **error(_TEMPERATURE.format(-1)),
    ),
    generate(
        "MI-19 null",
        generate_body(max_new_tokens=None, details=True),
        model="mock-long",
        body_has=_LENGTH_DETAILS,
    ),
    chat("MI-20 in a conversation", {"temperature": 0}, body_has={"model": "mock"}),
    Case(
        "MI-23",
        "POST",
        "/infer",
        body={**_NATIVE, "parameters": {"top_p": 1.0}},
        **error(_TOP_P.format(1.0)),
    ),
    Case(
        "MI-23 0.99",
        "POST",
        "/infer",
        body={**_NATIVE, "parameters": {"top_p": 0.99}},
        body_is={"generated_text": "Hello world!"},
    ),
)


# --- chat completions -----------------------------------------------------------------------------


USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


def chat_response(message: dict[str, Any], reason: str, *, early: bool = False) -> dict[str, Any]:
    """Expect a unary chat response."""
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


def chat_chunk(
    delta: dict[str, Any], reason: str | None = None, *, early: bool = False, **extra: Any
) -> dict[str, Any]:
    """Expect an event of a chat stream."""
    choice = {"index": 0, "delta": delta}
    choice |= {"finish_reason": reason} if early else {"logprobs": None, "finish_reason": reason}
    return {
        "id": NAME,
        "object": "chat.completion.chunk",
        "created": int,
        "model": "mock",
        **extra,
        "choices": [choice],
    }


def delta(content: str) -> dict[str, Any]:
    """Expect a delta; each has the role."""
    return {"role": "assistant", "content": content}


NO_MODEL = error("Request contains not model or model null")
NO_MESSAGES = error("Request param messages not arr or arr is empty")
EARLY_CHUNKS = [chat_chunk(delta(piece), early=True) for piece in PIECES]

CHAT_COMPLETIONS = (
    Case("MI-41", "POST", CHAT, body={"messages": [{"role": "user", "content": "hi"}]}, **NO_MODEL),
    chat("MI-41 null", {"model": None}, **NO_MODEL),
    chat("MI-41 5", {"model": 5}, **error("Request param model must be string")),
    chat("MI-41 empty", {"model": ""}, **error("Request param model must be not empty")),
    chat("MI-42", {"model": "nope"}, **error("Got model nope, but not found in server")),
    chat("MI-43", {"messages": []}, **NO_MESSAGES),
    chat("MI-43 an object", {"messages": {}}, **NO_MESSAGES),
    chat(
        "MI-43 null",
        {"messages": None},
        **error("Request param contains not messages or messages null"),
    ),
    chat(
        "MI-44",
        {},
        body_is=chat_response({"content": "Hello world!", "tool_calls": []}, "stop"),
        answer_headers=CLOSES,
    ),
    chat(
        "MI-44 rc1",
        {},
        profile="rc1",
        body_is=chat_response({"content": "Hello world!"}, "eos_token", early=True),
    ),
    chat(
        "MI-45",
        {"stream": True},
        answer_headers=STAMPS,
        events=[
            *(chat_chunk(delta(piece)) for piece in ("", *PIECES)),
            chat_chunk(delta(""), "stop", usage=USAGE),
            "[DONE]",
        ],
    ),
    chat(
        "MI-45 no chunk of usage alone",
        {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1},
        events=[
            *(chat_chunk(delta(piece)) for piece in ("", "Hello")),
            chat_chunk(
                delta(""),
                "length",
                usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            ),
            "[DONE]",
        ],
    ),
    chat(
        "MI-46",
        {"stream": True, "max_tokens": 2},
        profile="rc1",
        events=[*EARLY_CHUNKS[:2], chat_chunk({}, "length", early=True), "[DONE]"],
    ),
    chat(
        "MI-46 to its end",
        {"stream": True},
        profile="rc1",
        events=[*EARLY_CHUNKS, chat_chunk({}, "eos_token", early=True), "[DONE]"],
    ),
    chat("MI-47", {"max_tokens": "5"}, **error("Parameter max_tokens not number_integer")),
    chat(
        "MI-47 0",
        {"max_tokens": 0},
        **error("Parameter max_tokens must be (0,2147483647], got 0"),
    ),
    chat(
        "MI-48",
        {"presence_penalty": 2.5},
        **error("Parameter presence_penalty not in [-2.0, 2.0], but got 2.5."),
    ),
    chat(
        "MI-48 frequency_penalty",
        {"frequency_penalty": 2.5},
        **error("Parameter frequency_penalty should be in [-2.0, 2.0], got 2.5."),
    ),
)

CASES = (*GENERATE, *INVALID_REQUESTS, *PARAMETERS, *CHAT_COMPLETIONS)
