"""OpenAI: cases W1 to W83, and those of the Responses API.

In the docstrings C is a chat request for the model ``mock``, P a completion and E an embeddings
request.
"""

import base64
import gzip
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.conformance import azure
from tests.conformance.cases import EVENTS, KEY, Case, Response, expect, match
from tests.conformance.openai_responses import RESPONSES_CASES

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


def chat(id: str, *, fields: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build C with fields added or replaced."""
    return Case(id, "POST", CHAT, body={"model": "mock", "messages": [HI]} | (fields or {}), **rest)


def chat_messages(id: str, *messages: Mapping[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build C with other messages."""
    return chat(id, fields={"messages": messages}, **rest)


def chat_stream(id: str, *, fields: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build C with streaming."""
    rest = {"content_type": EVENTS, "check": check_one_response} | rest
    return chat(id, fields={"stream": True} | (fields or {}), **rest)


def completion(id: str, *, fields: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build P with fields added or replaced."""
    return Case(id, "POST", TEXT, body={"model": "mock", "prompt": "a b"} | (fields or {}), **rest)


def embeddings(id: str, *, fields: dict[str, Any] | None = None, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build E with fields added or replaced."""
    return Case(id, "POST", EMBED, body={"model": "mock", "input": "a b"} | (fields or {}), **rest)


def functions(*names: str) -> list[dict[str, Any]]:
    """Build functions without parameters."""
    return [{"name": name, "parameters": {"type": "object"}} for name in names]


def tools(*names: str) -> list[dict[str, Any]]:
    """Build tools without parameters."""
    return [{"type": "function", "function": one} for one in functions(*names)]


def tool_call_message(*ids: str) -> dict[str, Any]:
    """Build an assistant message without text that calls f once for each id."""
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


# --- errors ---------------------------------------------------------------------------------------


def error_body(
    kind: str, code: str | None, param: str | None, message: Any = str
) -> dict[str, Any]:
    """Expect an error in a body or an event, with all four keys."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def client_error(
    status: int, code: str | None, param: str | None = None, message: Any = str
) -> dict[str, Any]:
    """Expect an error that the request caused."""
    return {"status": status, "body_is": error_body("invalid_request_error", code, param, message)}


def invalid_parameter(code: str | None, param: str | None, message: Any = str) -> dict[str, Any]:
    """Expect an error for an invalid parameter."""
    return client_error(400, code, param, message)


def server_error(status: int, code: str, kind: str = "server_error", message: Any = str) -> Any:
    """Expect an error that the request did not cause."""
    return {"status": status, "body_is": error_body(kind, code, None, message)}


# --- responses ------------------------------------------------------------------------------------


def usage(prompt: Any = 2, completion: Any = 3) -> dict[str, Any]:
    """Expect this usage; a type matches any number."""
    both = isinstance(prompt, int) and isinstance(completion, int)
    total = prompt + completion if both else int
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def chat_response(
    *messages: Mapping[str, Any], reason: str = "stop", logprobs: Any = None, **counts: Any
) -> dict[str, Any]:
    """Expect the response to C with a choice for each message."""
    return {
        "id": ID,
        "object": "chat.completion",
        "created": int,
        "model": str,
        "choices": [
            {"index": i, "message": one, "logprobs": logprobs, "finish_reason": reason}
            for i, one in enumerate(messages)
        ],
        "usage": usage(**counts),
    }


def text_response(*completion_response: str, **rest: Any) -> dict[str, Any]:
    """Expect the response to C with a choice for each text, by default the mock's text."""
    text_chunks = completion_response or (HELLO,)
    return chat_response(
        *({"role": "assistant", "content": t, "refusal": None} for t in text_chunks), **rest
    )


def token_logprobs(completion: str, top: int) -> dict[str, Any]:
    """Expect a token's logprob with this many alternatives."""
    names = (completion, *(f"alt{i}" for i in range(1, top)))
    return {
        "token": completion,
        "logprob": -0.5,
        "bytes": list(completion.encode()),
        "top_logprobs": [
            {"token": name, "logprob": -0.5 - i, "bytes": list(name.encode())}
            for i, name in enumerate(names[:top])
        ],
    }


def logprobs(*completion_response: str, top: int = 0) -> dict[str, Any]:
    """Expect the logprobs of these tokens; both keys are required."""
    return {"content": [token_logprobs(one, top) for one in completion_response], "refusal": None}


def chunk(
    delta: Mapping[str, Any],
    reason: str | None = None,
    *,
    index: int = 0,
    logprobs: Any = None,
    **fields: Any,
) -> dict[str, Any]:
    """Expect one chunk of C's stream."""
    text_chunk = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return {
        "id": ID,
        "object": "chat.completion.chunk",
        "created": int,
        "model": str,
        "choices": [text_chunk],
        **fields,
    }


def text_chunks(*pieces: str, index: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Expect the first chunk of C's stream and one for each piece."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": one} for one in pieces)]
    return [chunk(delta, index=index, **fields) for delta in deltas]


def completion_response(
    *choices: tuple[str, str], logprobs: Any = None, **counts: Any
) -> dict[str, Any]:
    """Expect the response to P: text and reason of each choice."""
    return {
        "id": TEXT_ID,
        "object": "text_completion",
        "created": int,
        "model": str,
        "choices": [
            {"text": one, "index": i, "logprobs": logprobs, "finish_reason": reason}
            for i, (one, reason) in enumerate(choices or [(HELLO, "stop")])
        ],
        "usage": usage(**counts),
    }


def embeddings_response(*embeddings: Any, tokens: int = 2) -> dict[str, Any]:
    """Expect the response to E; its usage has no completion tokens."""
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


def check_one_response(response: Response) -> None:
    """All chunks have the same id, time, model and object."""
    chunks = [one for one in response.chunks if "error" not in one]
    for key in ("id", "created", "model", "object"):
        values = {one[key] for one in chunks}
        expect(len(values) == 1, f"the chunks have more than one {key}: {values}")


def choices_by_index(response: Response) -> Mapping[int, Sequence[Any]]:
    """Return the pieces of each choice in order; choices may be interleaved."""
    choices: dict[int, list[Any]] = {}
    for one in response.chunks:
        for text_chunk in one["choices"]:
            choices.setdefault(text_chunk["index"], []).append(text_chunk)
    return choices


# --- chat completions, not streamed: W1 to W40 ----------------------------------------------------


HEADERS = {
    "x-request-id": re.compile(".+"),
    "openai-version": "2020-10-01",
    "openai-processing-ms": re.compile(r"\d+"),
    "cache-control": None,
}
NULLS = dict.fromkeys(("max_tokens", "temperature", "stop", "n", "seed", "tools", "stream"))
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "42"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALLS = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
LEGACY = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "function_call": {"name": "f", "arguments": ARGUMENTS},
}


def named_choice(kind: str, name: str) -> dict[str, Any]:
    """Build a tool_choice of one function."""
    return {"type": kind, kind: {"name": name}}


def check_model_name(response: Response) -> None:
    """The response has the requested model name."""
    expect(response.json["model"] == "mock", f"model: {response.json['model']!r}")


SCALARS = (
    chat("W1", body_is=text_response(), answer_headers=HEADERS, check=check_model_name),
    chat(
        "W2",
        fields={"max_tokens": 2},
        body_is=text_response("Hello world", reason="length", completion=2),
    ),
    chat(
        "W3",
        fields={"max_completion_tokens": 1, "max_tokens": 3},
        body_is=text_response("Hello", reason="length", completion=1),
    ),
    chat(
        "W4",
        fields={"max_tokens": 0},
        **invalid_parameter(
            "integer_below_min_value",
            "max_tokens",
            "Invalid 'max_tokens': integer below minimum value. "
            "Expected a value >= 1, but got 0 instead.",
        ),
    ),
    chat(
        "W4 max_completion_tokens",
        fields={"max_completion_tokens": 0},
        **invalid_parameter("integer_below_min_value", "max_completion_tokens"),
    ),
    chat("W5", fields=NULLS, body_is=text_response()),
    chat(
        "W6",
        fields={"temperature": 2.1},
        **invalid_parameter(
            "decimal_above_max_value",
            "temperature",
            "Invalid 'temperature': decimal above maximum value. "
            "Expected a value <= 2, but got 2.1 instead.",
        ),
    ),
    chat(
        "W7",
        fields={"temperature": -0.1},
        **invalid_parameter("decimal_below_min_value", "temperature"),
    ),
    chat(
        "W8",
        fields={"temperature": "1"},
        **invalid_parameter(
            "invalid_type",
            "temperature",
            "Invalid type for 'temperature': expected a decimal, but got a string instead.",
        ),
    ),
    chat(
        "W8 boolean",
        fields={"temperature": True},
        **invalid_parameter("invalid_type", "temperature"),
    ),
    chat(
        "W8 integer",
        fields={"max_tokens": 2.5},
        **invalid_parameter("invalid_type", "max_tokens"),
    ),
    chat(
        "W8 integral",
        fields={"max_tokens": 1.0},
        body_is=text_response("Hello", reason="length", completion=1),
    ),
    chat("W9", fields={"temperature": 0}, body_is=text_response()),
    chat(
        "W10",
        fields={"top_p": 1.5},
        **invalid_parameter("decimal_above_max_value", "top_p"),
    ),
    chat("W10 zero", fields={"top_p": 0}, body_is=text_response()),
    chat("W11", fields={"n": 2}, body_is=text_response(HELLO, HELLO, completion=6)),
    chat("W12", fields={"n": 0}, **invalid_parameter("integer_below_min_value", "n")),
    chat("W13", fields={"n": 129}, **invalid_parameter("integer_above_max_value", "n")),
    chat("W14", fields={"stop": " world"}, body_is=text_response("Hello", completion=int)),
    chat(
        "W15",
        fields={"stop": ["x", "!"]},
        body_is=text_response("Hello world", completion=int),
    ),
    chat(
        "W16",
        fields={"stop": ["1", "2", "3", "4", "!"]},
        body_is=text_response("Hello world", completion=int),
    ),
    chat(
        "W16 empty string",
        fields={"stop": [""]},
        **invalid_parameter("empty_string", "stop"),
    ),
    chat("W17", fields={"stop": "lo wor"}, body_is=text_response("Hel", completion=int)),
    chat(
        "W18",
        fields={"logprobs": True, "top_logprobs": 2},
        body_is=text_response(logprobs=logprobs(*PIECES, top=2)),
    ),
    chat(
        "W18 no alternatives",
        fields={"logprobs": True},
        body_is=text_response(logprobs=logprobs(*PIECES)),
    ),
    chat("W19", fields={"top_logprobs": 2}, **invalid_parameter(None, "top_logprobs")),
    chat(
        "W20",
        fields={"top_logprobs": 21, "logprobs": True},
        **invalid_parameter("integer_above_max_value", "top_logprobs"),
    ),
    chat(
        "W21",
        fields={"presence_penalty": -2.5},
        **invalid_parameter("decimal_below_min_value", "presence_penalty"),
    ),
    chat(
        "W22",
        fields={"seed": 2**63},
        **invalid_parameter("integer_above_max_value", "seed"),
    ),
    chat("W22 negative", fields={"seed": -(2**63)}, body_is=text_response()),
)

MESSAGES = (
    chat(
        "W23",
        fields={"messages": None},
        **invalid_parameter("missing_required_parameter", "messages"),
    ),
    chat_messages("W24", **invalid_parameter("empty_array", "messages")),
    chat_messages(
        "W25",
        {"role": "bot", "content": "hi"},
        **invalid_parameter("invalid_value", "messages[0].role"),
    ),
    chat_messages(
        "W26",
        {"role": "user"},
        **invalid_parameter("missing_required_parameter", "messages[0].content"),
    ),
    chat_messages(
        "W26 a number",
        {"role": "user", "content": 5},
        **invalid_parameter("invalid_type", "messages[0].content"),
    ),
    chat_messages(
        "W27",
        {
            "role": "user",
            "content": [{"type": "text", "text": "say"}, {"type": "text", "text": " hi"}],
        },
        body_is=text_response(),
    ),
    chat_messages(
        "W28",
        {"role": "user", "content": [IMAGE]},
        **invalid_parameter("unsupported_value", "messages[0].content[0].type"),
    ),
    chat_messages(
        "W29",
        HI,
        TOOL,
        **invalid_parameter(
            None,
            "messages.[1].role",
            "Invalid parameter: messages with role 'tool' must be a response to a preceding "
            "message with 'tool_calls'.",
        ),
    ),
    chat_messages(
        "W30",
        HI,
        tool_call_message("c1"),
        HI,
        **invalid_parameter(None, "messages.[2].role", re.compile(".*: c1")),
    ),
    chat_messages(
        "W30 one of two",
        HI,
        tool_call_message("c1", "c2"),
        TOOL,
        **invalid_parameter(None, "messages.[2].role", re.compile(".*: c2")),
    ),
    chat_messages("W31", HI, tool_call_message("c1"), TOOL, body_is=text_response(prompt=3)),
    chat_messages(
        "W32", {"role": "developer", "content": "be brief"}, HI, body_is=text_response(prompt=4)
    ),
    chat_messages(
        "W32 system later",
        HI,
        {"role": "system", "content": "be brief"},
        HI,
        body_is=text_response(prompt=6),
    ),
)

TOOLS = (
    chat("W33", fields={"tools": []}, **invalid_parameter("empty_array", "tools")),
    chat(
        "W34",
        fields={"tools": tools("f", "g"), "tool_choice": "required"},
        body_is=chat_response(CALLS, reason="tool_calls", completion=int),
    ),
    chat(
        "W34 named",
        fields={"tools": tools("g", "f"), "tool_choice": named_choice("function", "f")},
        body_is=chat_response(CALLS, reason="tool_calls", completion=int),
    ),
    chat("W35", fields={"tools": tools("f"), "tool_choice": "auto"}, body_is=text_response()),
    chat(
        "W35 asked for",
        fields={
            "tools": tools("f"),
            "messages": [{"role": "user", "content": "use the tool"}],
        },
        body_is=chat_response(CALLS, reason="tool_calls", prompt=3, completion=int),
    ),
    chat(
        "W36",
        fields={"tools": tools("f"), "tool_choice": named_choice("function", "nope")},
        **invalid_parameter("invalid_value", "tool_choice", re.compile(".*'nope'.*")),
    ),
    chat(
        "W37",
        fields={"tool_choice": "auto"},
        **invalid_parameter("invalid_value", "tool_choice"),
    ),
    chat("W37 none", fields={"tool_choice": "none"}, body_is=text_response()),
    chat(
        "W38",
        fields={"functions": functions("f"), "function_call": {"name": "f"}},
        body_is=chat_response(LEGACY, reason="function_call", completion=int),
    ),
    chat(
        "W39",
        fields={"response_format": {"type": "json_schema"}},
        **invalid_parameter("missing_required_parameter", "response_format.json_schema"),
    ),
    chat(
        "W40",
        fields={"response_format": {"type": "xml"}},
        **invalid_parameter("invalid_value", "response_format.type"),
    ),
)


# --- errors: W41 to W54 ---------------------------------------------------------------------------


BODY = msgspec.json.encode({"model": "mock", "messages": [HI]})
BASIC = "Basic dG9rZW46c2stdGVzdA=="
SECONDS = re.compile(r"[1-9]\d*")
URL = re.compile(r"Invalid URL \(POST .*/v1/nope\)")


def chat_with_key(id: str, **headers: str | None) -> Case:  # noqa: A002 - a Case's field
    """Build C with the key in another header or form."""
    sent_headers = {name.replace("_", "-"): completion for name, completion in headers.items()}
    return Case(
        id, "POST", CHAT, {"authorization": None} | sent_headers, BODY, body_is=text_response()
    )


def malformed_body(id: str, body: bytes) -> Case:  # noqa: A002 - as above
    """Build a request with an invalid body."""
    return Case(
        id,
        "POST",
        CHAT,
        body=body,
        **invalid_parameter(None, None, re.compile("We could not parse .*")),
    )


BODIES = (
    chat(
        "W41",
        fields={"foo": 1},
        body_is=text_response(),
        answer_headers={"x-interlingua-loss": None},
    ),
    chat(
        "W41 ignored",
        fields={"foo": 1},
        needs={"unknown": "ignore"},
        body_is=text_response(),
    ),
    chat(
        "W41 rejected",
        fields={"foo": 1},
        needs={"unknown": "reject"},
        **invalid_parameter(
            "unknown_parameter", "foo", "Unrecognized request argument supplied: foo"
        ),
    ),
    malformed_body("W42", b"{"),
    malformed_body("W42 empty", b""),
    malformed_body("W42 NaN", BODY[:-1] + b',"temperature":NaN}'),
    malformed_body("W42 Infinity", BODY[:-1] + b',"temperature":Infinity}'),
    malformed_body("W42 lone surrogate", BODY[:-1] + b',"user":"\\ud800"}'),
    malformed_body("W42 no UTF-8", BODY[:-1] + b',"user":"\xff"}'),
    malformed_body(
        "W42 too deep", BODY[:-1] + b',"metadata":' + b"[" * 15_000 + b"]" * 15_000 + b"}"
    ),
    malformed_body("W42 cut off", BODY[:-1]),
    Case(
        "W42 two alike", "POST", CHAT, body=b'{"model":"none",' + BODY[1:], body_is=text_response()
    ),
    malformed_body("W42 a mark in front", b"\xef\xbb\xbf" + BODY),
    malformed_body("W43", b"[]"),
    malformed_body("W43 a string", b'"mock"'),
    malformed_body("W43 null", b"null"),
    Case("W44", "POST", CHAT, {"content-type": None}, BODY, body_is=text_response()),
    Case(
        "W44 as a form",
        "POST",
        CHAT,
        {"content-type": "application/x-www-form-urlencoded"},
        BODY,
        body_is=text_response(),
    ),
    Case(
        "W44 compressed",
        "POST",
        CHAT,
        {"content-encoding": "gzip"},
        gzip.compress(BODY),
        body_is=text_response(),
    ),
    chat(
        "W45",
        fields={"model": "none"},
        **client_error(404, "model_not_found", "model", re.compile("The model `none` does not .*")),
    ),
    chat(
        "W45 missing",
        fields={"model": None},
        **invalid_parameter("missing_required_parameter", "model"),
    ),
    chat(
        "W45 empty",
        fields={"model": ""},
        **invalid_parameter("missing_required_parameter", "model"),
    ),
    chat("W45 a number", fields={"model": 5}, **invalid_parameter("invalid_type", "model")),
)

KEYS = (
    chat(
        "W46",
        headers={"authorization": None},
        answer_headers={"www-authenticate": "Bearer"},
        **client_error(401, None),
    ),
    chat(
        "W47",
        headers={"authorization": "Bearer sk-wrong-in-the-middle-0001"},
        **client_error(401, "invalid_api_key", message=re.compile("(?!.*middle).*")),
    ),
    chat_with_key("W48", api_key=KEY),
    chat_with_key("W48 x-api-key", x_api_key=KEY),
    chat_with_key("W48 basic", authorization=BASIC),
    chat_with_key("W48 lower case", authorization=f"bearer {KEY}"),
)

PATHS = (
    Case(
        "W49",
        "GET",
        CHAT,
        answer_headers={"allow": "POST"},
        **client_error(405, "method_not_supported"),
    ),
    Case("W50", "POST", "/v1/nope", body=BODY, **client_error(404, "unknown_url", message=URL)),
    Case("W50 slash at the end", "POST", f"{CHAT}/", body=BODY, body_is=text_response()),
    Case("W50 query", "POST", f"{CHAT}?api-version=1", body=BODY, body_is=text_response()),
)

WORKERS = (
    chat(
        "W51",
        fields={"model": "mock-down"},
        answer_headers={"retry-after": SECONDS},
        **server_error(503, "service_unavailable"),
    ),
    chat("W52", fields={"model": "mock-500"}, **server_error(502, "bad_gateway")),
    chat("W52 later", fields={"model": "mock-midfail"}, **server_error(502, "bad_gateway")),
    chat("W52 cut", fields={"model": "mock-cut"}, **server_error(502, "bad_gateway")),
    chat(
        "W53",
        fields={"model": "mock-429"},
        answer_headers={"retry-after": "2"},
        **server_error(429, "rate_limit_exceeded", "requests"),
    ),
    chat(
        "W54",
        fields={
            "model": "mock-ctx",
            "messages": [{"role": "user", "content": "word " * 20}],
        },
        **invalid_parameter(
            "context_length_exceeded",
            "messages",
            re.compile("This model's maximum context length is 8 tokens.*20 tokens.*"),
        ),
    ),
    chat_messages(
        "W54 fits", {"role": "user", "content": "word " * 8}, body_is=text_response(prompt=8)
    ),
)


# --- chat completions, streamed: W55 to W63 -------------------------------------------------------


END = chunk({}, "stop")
DONE = "[DONE]"
INCLUDE_USAGE = {"stream_options": {"include_usage": True}}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "content-length": None,
    "x-request-id": re.compile(".+"),
    "openai-version": "2020-10-01",
    "openai-processing-ms": re.compile(r"\d+"),
}
USAGE_CHUNK = {
    "id": str,
    "object": "chat.completion.chunk",
    "created": int,
    "model": "mock",
    "choices": [],
    "usage": usage(),
}
CALL_OPENING = chunk({"role": "assistant", "content": None})
CALL_START = {
    "index": 0,
    "id": CALL_ID,
    "type": "function",
    "function": {"name": "f", "arguments": ""},
}
FIRST_ARGUMENTS, SECOND_ARGUMENTS = (
    {"index": 0, "function": {"arguments": one}} for one in ('{"x"', ":1}")
)
STREAM_ERROR = error_body("server_error", "bad_gateway", None)


def check_two_choices(response: Response) -> None:
    """Each choice has its first chunk, its pieces and its finish reason."""
    check_one_response(response)
    choices = choices_by_index(response)
    expect(set(choices) == {0, 1}, f"indexes: {list(choices)}")
    for index, pieces in choices.items():
        wanted = [*text_chunks(*PIECES, index=index), chunk({}, "stop", index=index)]
        match([one["choices"][0] for one in wanted], pieces, f"choice {index}")
    expect(response.events[-1] == DONE, "there is no [DONE]")


def check_stop_string_withheld(response: Response) -> None:
    """No part of a stop string is sent."""
    check_one_response(response)
    pieces = choices_by_index(response)[0]
    content = "".join(one["delta"].get("content") or "" for one in pieces)
    expect(content == "Hel", f"the text: {content!r}")
    expect(pieces[-1]["finish_reason"] == "stop", f"the end: {pieces[-1]}")


STREAMS = (
    chat_stream("W17 stream", fields={"stop": "lo wor"}, check=check_stop_string_withheld),
    chat_stream("W55", events=[*text_chunks(*PIECES), END, DONE], answer_headers=STREAM_HEADERS),
    chat_stream(
        "W55 accepts JSON",
        headers={"accept": "application/json"},
        events=[*text_chunks(*PIECES), END, DONE],
    ),
    chat_stream(
        "W55 length",
        fields={"max_tokens": 1},
        events=[*text_chunks("Hello"), chunk({}, "length"), DONE],
    ),
    chat_stream(
        "W56",
        fields=INCLUDE_USAGE,
        events=[
            *text_chunks(*PIECES, usage=None),
            chunk({}, "stop", usage=None),
            USAGE_CHUNK,
            DONE,
        ],
    ),
    chat_stream(
        "W56 not wanted",
        fields={"stream_options": {"include_usage": False}},
        events=[*text_chunks(*PIECES), END, DONE],
    ),
    chat("W57", fields=INCLUDE_USAGE, **invalid_parameter(None, "stream_options")),
    chat_stream("W58", fields={"n": 2}, check=check_two_choices),
    chat_stream(
        "W59",
        fields={"tools": tools("f"), "tool_choice": "required"},
        events=[
            CALL_OPENING,
            *(
                chunk({"tool_calls": [one]})
                for one in (CALL_START, FIRST_ARGUMENTS, SECOND_ARGUMENTS)
            ),
            chunk({}, "tool_calls"),
            DONE,
        ],
    ),
    chat_stream(
        "W59 functions",
        fields={"functions": functions("f"), "function_call": {"name": "f"}},
        events=[
            CALL_OPENING,
            chunk({"function_call": {"name": "f", "arguments": ""}}),
            chunk({"function_call": {"arguments": '{"x"'}}),
            chunk({"function_call": {"arguments": ":1}"}}),
            chunk({}, "function_call"),
            DONE,
        ],
    ),
    chat(
        "W60",
        fields={"stream": True, "temperature": 9},
        **invalid_parameter("decimal_above_max_value", "temperature"),
    ),
    chat_stream(
        "W61",
        fields={"model": "mock-midfail"},
        events=[*text_chunks(*PIECES[:2]), STREAM_ERROR],
    ),
    chat_stream(
        "W61 cut",
        fields={"model": "mock-cut"},
        events=[*text_chunks(*PIECES[:2]), STREAM_ERROR],
    ),
    chat(
        "W62",
        fields={"stream": True, "model": "mock-down"},
        answer_headers={"retry-after": re.compile(r"[1-9]\d*")},
        **server_error(503, "service_unavailable"),
    ),
    chat(
        "W62 500",
        fields={"stream": True, "model": "mock-500"},
        **server_error(502, "bad_gateway"),
    ),
    chat_stream(
        "W63",
        fields={"logprobs": True},
        events=[
            *text_chunks(),
            *(chunk({"content": one}, logprobs=logprobs(one)) for one in PIECES),
            END,
            DONE,
        ],
    ),
    chat_stream(
        "W63 alternatives",
        fields={"logprobs": True, "top_logprobs": 2, "messages": [HI]},
        events=[
            *text_chunks(),
            *(chunk({"content": one}, logprobs=logprobs(one, top=2)) for one in PIECES),
            END,
            DONE,
        ],
    ),
)


# --- completions, embeddings and models: W64 to W83 -----------------------------------------------


HELLO_CHOICE = (HELLO, "stop")
VECTOR = [3, 2, 0.5, -0.25]
PACKED = base64.b64encode(struct.pack("<4f", *VECTOR)).decode()
LOGPROBS = {
    "tokens": list(PIECES),
    "token_logprobs": [-0.5, -0.5, -0.5],
    "top_logprobs": [{one: -0.5, "alt1": -1.5} for one in PIECES],
    "text_offset": [0, 5, 11],
}


def completion_chunk(choices: list[Any], used: Any) -> dict[str, Any]:
    """Expect one chunk of P's stream with usage requested."""
    return {
        "id": TEXT_ID,
        "object": "text_completion",
        "created": int,
        "model": "mock",
        "choices": choices,
        "usage": used,
    }


def text_chunk(text_chunks: str, reason: str | None = None) -> dict[str, Any]:
    """Expect one chunk with text."""
    choice = {"text": text_chunks, "index": 0, "logprobs": None, "finish_reason": reason}
    return completion_chunk([choice], None)


def check_model_list(response: Response) -> None:
    """Every model is listed with the keys that clients read."""
    cards = {one["id"]: one for one in response.json["data"]}
    expect({"mock", "org/m1"} <= set(cards), f"only {list(cards)}")
    for name, card in cards.items():
        wanted = {"id": name, "object": "model", "created": int, "owned_by": str}
        match(wanted, card, f"the model {name}", exact=False)


COMPLETIONS = (
    completion("W64", body_is=completion_response()),
    completion(
        "W65",
        fields={"prompt": ["a", "b c"], "n": 2},
        body_is=completion_response(
            HELLO_CHOICE, HELLO_CHOICE, HELLO_CHOICE, HELLO_CHOICE, prompt=3, completion=12
        ),
    ),
    completion(
        "W66",
        fields={"model": "mock-20"},
        body_is=completion_response(("abcdefghijklmnop", "length"), completion=16),
    ),
    completion(
        "W66 said",
        fields={"model": "mock-20", "max_tokens": 20},
        body_is=completion_response(("abcdefghijklmnopqrst", "stop"), completion=20),
    ),
    completion(
        "W67",
        fields={"echo": True},
        body_is=completion_response(("a bHello world!", "stop")),
    ),
    completion("W68", fields={"logprobs": 2}, body_is=completion_response(logprobs=LOGPROBS)),
    completion(
        "W69",
        fields={"logprobs": 6},
        **invalid_parameter("integer_above_max_value", "logprobs"),
    ),
    completion("W70", fields={"prompt": [1, 2, 3]}, body_is=completion_response(prompt=3)),
    completion(
        "W70 two",
        fields={"prompt": [[1, 2], [3]]},
        body_is=completion_response(HELLO_CHOICE, HELLO_CHOICE, prompt=3, completion=6),
    ),
    completion("W71", fields={"prompt": []}, **invalid_parameter("empty_array", "prompt")),
    completion("W71 empty string", fields={"prompt": ""}, body_is=completion_response(prompt=0)),
    completion(
        "W71 missing",
        fields={"prompt": None},
        **invalid_parameter("missing_required_parameter", "prompt"),
    ),
    completion(
        "W72",
        fields={"stream": True, "stream_options": {"include_usage": True}},
        content_type=EVENTS,
        events=[
            *map(text_chunk, PIECES),
            text_chunk("", "stop"),
            completion_chunk([], usage()),
            "[DONE]",
        ],
        check=check_one_response,
    ),
    completion("W73", fields={"best_of": 2, "n": 3}, **invalid_parameter(None, "best_of")),
    completion(
        "W74",
        fields={"prompt": ["hi"], "logprobs": None, "seed": None},
        body_is=completion_response(prompt=1),
    ),
)

EMBEDDINGS = (
    embeddings("W75", body_is=embeddings_response(VECTOR)),
    embeddings("W76", fields={"encoding_format": "base64"}, body_is=embeddings_response(PACKED)),
    embeddings("W77", fields={"encoding_format": None}, body_is=embeddings_response(VECTOR)),
    embeddings(
        "W78",
        fields={"input": ["a", "b"]},
        body_is=embeddings_response([1, 1, 0.5, -0.25], [1, 1, 0.5, -0.25]),
    ),
    embeddings(
        "W78 lengths",
        fields={"input": ["abc", "b c d"]},
        body_is=embeddings_response([3, 1, 0.5, -0.25], [5, 3, 0.5, -0.25], tokens=4),
    ),
    embeddings("W79", fields={"input": ""}, **invalid_parameter("empty_string", "input")),
    embeddings(
        "W79 empty array",
        fields={"input": []},
        **invalid_parameter("empty_array", "input"),
    ),
    embeddings(
        "W79 one of two",
        fields={"input": ["a", ""]},
        **invalid_parameter("empty_string", "input[1]"),
    ),
    embeddings(
        "W80",
        fields={"encoding_format": "int8"},
        **invalid_parameter("invalid_value", "encoding_format"),
    ),
    embeddings(
        "W81",
        fields={"input": ["a"] * 2049},
        **invalid_parameter("array_above_max_length", "input"),
    ),
    embeddings(
        "W81 as many as there may be",
        fields={"input": ["a"] * 2048},
        body_has={"usage": {"prompt_tokens": 2048}},
    ),
)

MODEL_LISTS = (
    Case("W82", "GET", MODELS, body_is={"object": "list", "data": list}, check=check_model_list),
    Case(
        "W83",
        "GET",
        f"{MODELS}/org%2Fm1",
        body_is={"id": "org/m1", "created": int, "object": "model", "owned_by": str},
    ),
    Case("W83 unknown", "GET", f"{MODELS}/none", **client_error(404, "model_not_found", "model")),
)

CASES = (
    *SCALARS,
    *MESSAGES,
    *TOOLS,
    *BODIES,
    *KEYS,
    *PATHS,
    *WORKERS,
    *STREAMS,
    *COMPLETIONS,
    *EMBEDDINGS,
    *MODEL_LISTS,
    *azure.CASES,
    *RESPONSES_CASES,
)
