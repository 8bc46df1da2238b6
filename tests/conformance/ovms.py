"""OpenVINO Model Server: cases OV-01 to OV-50, under ``/v3`` and, where mounted, ``/v1``.

A model is a MediaPipe graph: ``graph_error`` expects its error inside the server's own sentence.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from tests.conformance.cases import EVENTS, JSON, Case, Response, expect

HI = {"role": "user", "content": "say hi"}
PIECES = ("Hello", " world", "!")


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Expect usage with ordered keys."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


USAGE = usage_of(2, 3)
STREAMED = {"stream": True}


def chat(id: str, fields: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build a chat request with fields added or replaced."""
    body = {"model": "mock", "messages": [HI]} | fields
    return Case(id, "POST", "/v3/chat/completions", body=body, **rest)


def completion(id: str, fields: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a completion request with fields added or replaced."""
    return Case(
        id, "POST", "/v3/completions", body={"model": "mock", "prompt": "a b"} | fields, **rest
    )


def embeddings(id: str, fields: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build an embeddings request."""
    return Case(id, "POST", "/v3/embeddings", body={"model": "ep-emb"} | fields, **rest)


def error(status: int, text: str) -> dict[str, Any]:
    """Expect an error outside the graph."""
    return {"status": status, "body_is": {"error": text}}


NO_KEY = error(500, "Unauthorized request due to invalid or missing api-key")


def mediapipe_error(inner: str, node: str) -> str:
    """Expect the server's text around an error of a graph's node."""
    return (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "{node}" failed: {inner}'
    )


def graph_error(inner: str, *, node: str = "LLMExecutor", stream: bool = False) -> dict[str, Any]:
    """Expect an error of the graph; a stream has sent its headers already."""
    kind = EVENTS if stream else JSON
    return error(400, mediapipe_error(inner, node)) | {"content_type": kind}


def chat_choice(
    text: str = "Hello world!", reason: str = "stop", *, index: int = 0, logprobs: Any = None
) -> dict[str, Any]:
    """Expect a choice of a chat response."""
    return {
        "finish_reason": reason,
        "index": index,
        "logprobs": logprobs,
        "message": {"content": text, "role": "assistant", "tool_calls": []},
    }


def completion_choice(
    text: str = "Hello world!", reason: str = "stop", *, logprobs: Any = None
) -> dict[str, Any]:
    """Expect a choice of a completion."""
    return {"finish_reason": reason, "index": 0, "logprobs": logprobs, "text": text}


def response(
    *choices: dict[str, Any], kind: str = "chat.completion", usage: Mapping[str, int] = USAGE
) -> dict[str, Any]:
    """Expect a unary response without id, with ordered keys."""
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
    """Expect a chunk of a stream."""
    return {"choices": list(choices), "created": int, "model": "mock", "object": kind, **usage}


def delta(text: str | None, reason: str | None = None) -> dict[str, Any]:
    """Expect a choice in a chunk of a chat stream."""
    content = {} if text is None else {"content": text}
    return {"index": 0, "logprobs": None, "delta": content, "finish_reason": reason}


def completion_delta(text: str, reason: str | None = None) -> dict[str, Any]:
    """Expect a choice in a chunk of a completion stream."""
    return {"index": 0, "logprobs": None, "text": text, "finish_reason": reason}


HANDSHAKE = chunk(
    {"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
)
STREAM = [HANDSHAKE, *(chunk(delta(text)) for text in PIECES), chunk(delta(None, "stop")), "[DONE]"]
WITH_USAGE = [
    HANDSHAKE,
    *(chunk(delta(text), usage=None) for text in PIECES),
    chunk(delta(None, "stop"), usage=None),
    chunk(usage=USAGE),
    "[DONE]",
]
TEXT_KIND = "text_completion.chunk"
TEXT_STREAM = [
    chunk({"index": 0, "text": "", "finish_reason": None}, kind=TEXT_KIND),
    *(chunk(completion_delta(text), kind=TEXT_KIND) for text in PIECES),
    chunk(completion_delta("", "stop"), kind=TEXT_KIND),
    "[DONE]",
]


def token_logprobs(text: str) -> dict[str, Any]:
    """Expect a token's logprobs in a chat response."""
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}


# --- responses ------------------------------------------------------------------------------------


def check_broken_stream(response: Response) -> None:
    """The stream has the text so far and then a plain JSON object, no event and no end."""
    text, _, rest = response.text.rpartition("\n\n")
    expect('"content":" world"' in text, f"before the error: {text[-200:]}")
    expect(rest.startswith('{"error":"Mediapipe execution failed.'), f"at the end: {rest[:200]}")
    expect("[DONE]" not in response.text, "an end was made up")
    expect('"finish_reason":"' not in response.text, "a reason was made up")


def check_models(response: Response) -> None:
    """Models have four keys, in the list and one by one."""
    for one in response.json["data"]:
        expect(list(one) == ["id", "object", "created", "owned_by"], f"keys: {list(one)}")
        expect((one["object"], one["owned_by"]) == ("model", "OVMS"), f"another's: {one}")
    expect({"mock", "org/m1"} <= {one["id"] for one in response.json["data"]}, "models are missing")


STREAMED_WITH_USAGE = STREAMED | {"stream_options": {"include_usage": True}}
BLANK = [{"role": "user"}]
SHORT = usage_of(2, 1)
LOGPROBS = {
    "tokens": list(PIECES),
    "token_logprobs": [-0.5, -0.5, -0.5],
    "top_logprobs": [{piece: -0.5} for piece in PIECES],
    "text_offset": [0, 5, 11],
}


def embeddings_response(*embeddings: Any, tokens: int) -> dict[str, Any]:
    """Expect embeddings; the response names no model."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "embedding": one, "index": i}
            for i, one in enumerate(embeddings)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


RESPONSES = (
    chat("OV-01", {}, body_is=response(chat_choice())),
    chat("OV-02", {"stop": "zzz"}, body_has={"choices": [chat_choice()]}),
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
    completion("OV-03", {}, body_is=response(completion_choice(), kind="text_completion")),
    chat("OV-04", STREAMED, events=[HANDSHAKE, *[...] * 5]),
    chat("OV-05", STREAMED, events=STREAM),
    completion("OV-06", STREAMED, events=TEXT_STREAM),
    chat("OV-07", STREAMED_WITH_USAGE, events=WITH_USAGE),
    chat("OV-08", STREAMED, events=STREAM, answer_headers={"cache-control": "no-cache"}),
    chat("OV-10 {}", STREAMED | {"stream_options": {}}, events=STREAM),
    chat(
        "OV-19 without content",
        {"messages": BLANK},
        body_is=response(chat_choice(), usage=usage_of(0, 3)),
    ),
    chat(
        "OV-26",
        {"max_completion_tokens": 1, "max_tokens": 3},
        body_is=response(chat_choice("Hello", "length"), usage=SHORT),
    ),
    completion(
        "OV-27",
        {"max_tokens": 0, "echo": True},
        body_is=response(
            completion_choice("a b", "length"), kind="text_completion", usage=usage_of(2, 0)
        ),
    ),
    completion(
        "OV-27 echo", {"echo": True}, body_has={"choices": [completion_choice("a bHello world!")]}
    ),
    chat("OV-28 2.0", {"temperature": 2.0}, body_is=response(chat_choice())),
    chat("OV-30 -1", {"top_k": -1}, body_is=response(chat_choice())),
    chat(
        "OV-36",
        {"stop": " world"},
        body_is=response(chat_choice("Hello"), usage=usage_of(2, 2)),
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
        body_is=response(chat_choice(), chat_choice(index=1), usage=usage_of(2, 6)),
    ),
    chat("OV-40 19", {"best_of": 19}, body_is=response(chat_choice())),
    chat(
        "OV-42",
        {"logprobs": True},
        body_is=response(
            chat_choice(logprobs={"content": [token_logprobs(text) for text in PIECES]})
        ),
    ),
    completion(
        "OV-43 1",
        {"logprobs": 1},
        body_is=response(completion_choice(logprobs=LOGPROBS), kind="text_completion"),
    ),
    chat("OV-44", {"max_tokens": 1}, body_is=response(chat_choice("Hello", "length"), usage=SHORT)),
    chat(
        "OV-44 stream",
        STREAMED | {"max_tokens": 1},
        events=[HANDSHAKE, chunk(delta("Hello")), chunk(delta(None, "length")), "[DONE]"],
    ),
    Case(
        "OV-46", "GET", "/v3/models", body_is={"data": list, "object": "list"}, check=check_models
    ),
    Case(
        "OV-46 without a key",
        "GET",
        "/v3/models",
        headers={"authorization": None},
        **NO_KEY,  # unlike the server, so that models stay hidden
    ),
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
    embeddings(
        "OV-49", {"input": "a b"}, body_is=embeddings_response([3, 2, 0.5, -0.25], tokens=2)
    ),
    embeddings(
        "OV-49 list",
        {"input": ["a b", "c"]},
        body_is=embeddings_response([3, 2, 0.5, -0.25], [1, 1, 0.5, -0.25], tokens=3),
    ),
    embeddings(
        "OV-49 base64",
        {"input": "a b", "encoding_format": "base64"},
        body_is=embeddings_response("AABAQAAAAEAAAAA/AACAvg==", tokens=2),
    ),
    embeddings(
        "OV-49 500 inputs",
        {"input": ["a"] * 500},
        body_has={"object": "list", "data": lambda data: len(data) == 500},
    ),
    *(
        chat(
            f"OV-50 {model}",
            STREAMED | {"model": model},
            content_type=EVENTS,
            check=check_broken_stream,
        )
        for model in ("mock-midfail", "mock-cut")
    ),
)


# --- errors, in the server's order and wording ----------------------------------------------------


URL = error(400, "Invalid request URL")
METHOD = error(406, "Unsupported method")
NO_GRAPH = error(404, "Mediapipe graph definition with requested name is not found")
OPTIONS = "Found unexpected stream options. Properties accepted in stream_options: include_usage"
STREAM_STOP = "include_stop_str_in_output cannot be set to false if streaming is used"
WRONG_ENDPOINT = (
    "Wrong endpoint. Allowed endpoints: /v[13]/chat/completions, /v[13]/completions, "
    "/v[13]/responses, /v[13]/tokenize"
)
OVER = 2**32
WORDS = " ".join(["word"] * 20)
NOT_JSON = b"{"
VIDEO = [{"role": "user", "content": [{"type": "video"}]}]


def json_error(detail: str) -> dict[str, Any]:
    """Expect an error found before the model is looked up."""
    return error(412, f"The file is not valid json - {detail}")


def body(id: str, sent: Any, **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build a chat request with this body."""
    return Case(id, "POST", "/v3/chat/completions", body=sent, **rest)


BODIES = (
    body("OV-12", NOT_JSON, **json_error("Cannot parse JSON body")),
    body("OV-12 empty", b"", **json_error("Cannot parse JSON body")),
    body("OV-12 depth", b'{"a":' * 15_000, **json_error("JSON body exceeds maximum nesting depth")),
    body("OV-13", [], **json_error("JSON body must be an object")),
    body("OV-14", {"messages": [HI]}, **json_error("model field is missing in JSON body")),
    chat("OV-14 5", {"model": 5}, **json_error("model field is not a string")),
    chat("OV-15", {"stream": "true"}, **json_error("stream field is not a boolean")),
    chat("OV-15 null", {"stream": None}, **json_error("stream field is not a boolean")),
    chat("OV-16", {"model": "nope"}, **NO_GRAPH),
    chat("OV-17", {}, headers={"content-type": "text/plain"}, **NO_GRAPH),
    chat("OV-17 none", {}, headers={"content-type": None}, **NO_GRAPH),
)
CONVERSATIONS = (
    chat(
        "OV-09",
        {"stream_options": {"include_usage": True}},
        **graph_error("stream_options provided, but stream not set to true"),
    ),
    chat("OV-10", STREAMED | {"stream_options": {"x": 1}}, **graph_error(OPTIONS, stream=True)),
    chat(
        "OV-11",
        STREAMED | {"stream_options": {"include_usage": 1}},
        **graph_error("stream_options.include_usage is not a boolean", stream=True),
    ),
    body("OV-18", {"model": "mock"}, **graph_error("Messages missing in request")),
    chat("OV-18 {}", {"messages": {}}, **graph_error("Messages are not an array")),
    chat("OV-18 []", {"messages": []}, **graph_error("Messages array cannot be empty")),
    chat(
        "OV-19",
        {"messages": [{"content": "say hi"}]},
        **graph_error("Every message must have 'role' field"),
    ),
    chat("OV-20", {"messages": ["x"]}, **graph_error("Message is not a JSON object")),
    chat("OV-21", {"messages": VIDEO}, **graph_error("Unsupported content type")),
    chat(
        "OV-50",
        STREAMED | {"temperature": 9},
        **graph_error("temperature out of range(0.0, 2.0)", stream=True),
    ),
    chat("OV-50 unknown model", STREAMED | {"model": "nope"}, **NO_GRAPH),
    chat(
        "OV-50 prompt too long",
        {"model": "mock-ctx", "messages": [{"role": "user", "content": WORDS}]},
        **graph_error("Number of prompt tokens: 20 exceeds model max length: 8"),
    ),
)
PARAMETERS = (
    completion("OV-22 []", {"prompt": []}, **graph_error("prompt is not a string")),
    completion("OV-22 list", {"prompt": ["a"]}, **graph_error("prompt is not a string")),
    completion("OV-22 empty", {"prompt": ""}, **graph_error("prompt is missing")),
    chat("OV-23", {"max_tokens": 0}, **graph_error("max_tokens value should be greater than 0")),
    completion(
        "OV-23 completion",
        {"max_tokens": 0},
        **graph_error("max_tokens value should be greater than 0 unless echo is set"),
    ),
    *(
        chat(
            f"OV-24 {value}",
            {"max_tokens": value},
            **graph_error("max_tokens is not an unsigned integer"),
        )
        for value in (None, -1, 1.5)
    ),
    chat(
        "OV-25",
        {"max_tokens": OVER},
        **graph_error("max_tokens value can't be greater than 4294967295"),
    ),
    chat("OV-28 2.1", {"temperature": 2.1}, **graph_error("temperature out of range(0.0, 2.0)")),
    chat("OV-28 string", {"temperature": "1"}, **graph_error("temperature is not a valid number")),
    chat(
        "OV-28 3e9",
        {"temperature": 3_000_000_000},
        **graph_error("temperature is not a valid number"),
    ),
    chat("OV-29", {"top_p": 1.1}, **graph_error("top_p out of range(0.0, 1.0)")),
    chat(
        "OV-30", {"top_k": 0}, **graph_error("top_k must be -1 (all tokens) or a positive integer")
    ),
    chat("OV-31", {"min_p": 1.0}, **graph_error("min_p out of range [0.0, 1.0)")),
    chat(
        "OV-32",
        {"frequency_penalty": -2.1},
        **graph_error("frequency_penalty out of range(-2.0, 2.0)"),
    ),
    chat("OV-33", {"seed": -1}, **graph_error("seed out of range [0, 4294967295]")),
    chat("OV-34", {"stop": 5}, **graph_error("stop is not a string or array of strings")),
    chat(
        "OV-34 mixed", {"stop": ["a", 1]}, **graph_error("stop array contains non string element")
    ),
    chat(
        "OV-35", {"stop": ["a"] * 17}, **graph_error("stop array must have no more than 16 strings")
    ),
    chat("OV-35 16", {"stop": ["z"] * 16}, body_has={"object": "chat.completion"}),
    chat(
        "OV-38",
        STREAMED | {"include_stop_str_in_output": False},
        **graph_error(STREAM_STOP, stream=True),
    ),
    chat("OV-39", {"n": 2}, **graph_error("n value cannot be greater than best_of")),
    chat(
        "OV-40",
        {"best_of": 20},
        **graph_error("best_of exceeds limit provided in graph config: 20"),
    ),
    chat(
        "OV-41",
        STREAMED | {"best_of": 2},
        **graph_error("best_of cannot be used in streaming mode", stream=True),
    ),
    chat(
        "OV-42 stream",
        STREAMED | {"logprobs": True},
        **graph_error("logprobs are not supported in streaming mode.", stream=True),
    ),
    completion(
        "OV-43", {"logprobs": 2}, **graph_error("accepted logprobs value is currently 1 only")
    ),
    embeddings(
        "OV-49 x",
        {"input": "a", "encoding_format": "x"},
        **graph_error("encoding_format should either base64 or float", node="EmbeddingsExecutor"),
    ),
    embeddings(
        "OV-49 501 inputs",
        {"input": ["a"] * 501},
        why="the documentation names the limit, and the server's sources no text for it",
        **graph_error(
            "The number of input documents exceeds allowed configured value: 500",
            node="EmbeddingsExecutor",
        ),
    ),
)
KSERVE = {"kserve": True}
PATHS = (
    Case("OV-45", "GET", "/v3/chat/completions", **URL),
    Case("OV-45 deep", "GET", "/v3/a/b/c", **URL),
    Case("OV-45 nope", "GET", "/nope", alone=True, **URL),
    Case("OV-45 PUT", "PUT", "/v3/chat/completions", **METHOD),
    Case("OV-45 PUT deep", "PUT", "/v3/a/b/c", **METHOD),
    Case("OV-45 DELETE models", "DELETE", "/v3/models", **METHOD),
    Case("OV-45 PUT nope", "PUT", "/nope", alone=True, **METHOD),
    Case("OV-45 POST nope", "POST", "/nope", alone=True, **URL),
    Case("OV-45 infer", "GET", "/v2/models/mock/infer", needs=KSERVE, **METHOD),
    Case(
        "OV-45 infer of a version",
        "GET",
        "/v2/models/mock/versions/1/infer",
        needs=KSERVE,
        **METHOD,
    ),
    Case("OV-45 POST health", "POST", "/v2/health/ready", needs=KSERVE, **METHOD),
    Case("OV-45 POST infer", "POST", "/v2/models/mock/infer", body={}, needs=KSERVE, **NO_GRAPH),
    chat("OV-47", {}, headers={"authorization": "Bearer wrong"}, **NO_KEY),
    chat("OV-47 none", {}, headers={"authorization": None}, **NO_KEY),
    Case("OV-48", "POST", "/v3/foo", body={"model": "mock"}, **graph_error(WRONG_ENDPOINT)),
    Case(
        "OV-48 models", "POST", "/v3/models", body={"model": "mock"}, **graph_error(WRONG_ENDPOINT)
    ),
    Case("OV-48 unknown model", "POST", "/v3/foo", body={"model": "nope"}, **NO_GRAPH),
)
ERRORS = (*BODIES, *CONVERSATIONS, *PARAMETERS, *PATHS)


# --- the same cases under other roots -------------------------------------------------------------


_V3 = tuple(case for case in (*RESPONSES, *ERRORS) if case.path.startswith("/v3/"))


def _under_root(root: str, cases: Iterable[Case], needs: Mapping[str, Any]) -> Iterator[Case]:
    """Return the same cases under another root."""
    for case in cases:
        path = root + case.path.removeprefix("/v3")
        yield replace(case, id=f"{case.id} {root}", path=path, needs={**case.needs, **needs})


CASES = (
    *RESPONSES,
    *ERRORS,
    *_under_root("/v1", _V3, {"v1": True}),
    *_under_root(
        "/v3/v1", (case for case in _V3 if case.number in {"OV-01", "OV-46", "OV-48"}), {}
    ),
)
