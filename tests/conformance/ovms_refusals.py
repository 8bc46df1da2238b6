"""What is refused, in the server's order and words."""

from typing import Any

from gateway.conformance.cases import Case
from gateway.conformance.ovms.words import HI, STREAMED, P, chat, embed, error, text

URL = error(400, "Invalid request URL")
METHOD = error(406, "Unsupported method")
NO_GRAPH = error(404, "Mediapipe graph definition with requested name is not found")
NO_KEY = error(500, "Unauthorized request due to invalid or missing api-key")
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


def front(detail: str) -> dict[str, Any]:
    """What is wrong before the model is looked up."""
    return error(412, f"The file is not valid json - {detail}")


def body(id: str, sent: Any, **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """A body sent as a conversation."""
    return Case(id, "POST", "/v3/chat/completions", body=sent, **rest)


FRONT_DOOR = (
    body("OV-12", NOT_JSON, **front("Cannot parse JSON body")),
    body("OV-12 empty", b"", **front("Cannot parse JSON body")),
    body("OV-12 depth", b'{"a":' * 100_000, **front("JSON body exceeds maximum nesting depth")),
    body("OV-13", [], **front("JSON body must be an object")),
    body("OV-14", {"messages": [HI]}, **front("model field is missing in JSON body")),
    chat("OV-14 5", {"model": 5}, **front("model field is not a string")),
    chat("OV-15", {"stream": "true"}, **front("stream field is not a boolean")),
    chat("OV-15 null", {"stream": None}, **front("stream field is not a boolean")),
    chat("OV-16", {"model": "nope"}, **NO_GRAPH),
    chat("OV-17", {}, headers={"content-type": "text/plain"}, **NO_GRAPH),
    chat("OV-17 none", {}, headers={"content-type": None}, **NO_GRAPH),
)
CONVERSATIONS = (
    chat(
        "OV-09",
        {"stream_options": {"include_usage": True}},
        **P("stream_options provided, but stream not set to true"),
    ),
    chat("OV-10", STREAMED | {"stream_options": {"x": 1}}, **P(OPTIONS, stream=True)),
    chat(
        "OV-11",
        STREAMED | {"stream_options": {"include_usage": 1}},
        **P("stream_options.include_usage is not a boolean", stream=True),
    ),
    body("OV-18", {"model": "mock"}, **P("Messages missing in request")),
    chat("OV-18 {}", {"messages": {}}, **P("Messages are not an array")),
    chat("OV-18 []", {"messages": []}, **P("Messages array cannot be empty")),
    chat(
        "OV-19",
        {"messages": [{"content": "say hi"}]},
        **P("Every message must have 'role' field"),
    ),
    chat("OV-20", {"messages": ["x"]}, **P("Message is not a JSON object")),
    chat("OV-21", {"messages": VIDEO}, **P("Unsupported content type")),
    chat(
        "OV-50",
        STREAMED | {"temperature": 9},
        **P("temperature out of range(0.0, 2.0)", stream=True),
    ),
    chat("OV-50 unknown model", STREAMED | {"model": "nope"}, **NO_GRAPH),
    chat(
        "OV-50 prompt too long",
        {"model": "mock-ctx", "messages": [{"role": "user", "content": WORDS}]},
        **P("Number of prompt tokens: 20 exceeds model max length: 8"),
    ),
)
PARAMETERS = (
    text("OV-22 []", {"prompt": []}, **P("prompt is not a string")),
    text("OV-22 list", {"prompt": ["a"]}, **P("prompt is not a string")),
    text("OV-22 empty", {"prompt": ""}, **P("prompt is missing")),
    chat("OV-23", {"max_tokens": 0}, **P("max_tokens value should be greater than 0")),
    text(
        "OV-23 completion",
        {"max_tokens": 0},
        **P("max_tokens value should be greater than 0 unless echo is set"),
    ),
    *(
        chat(f"OV-24 {given}", {"max_tokens": given}, **P("max_tokens is not an unsigned integer"))
        for given in (None, -1, 1.5)
    ),
    chat("OV-25", {"max_tokens": OVER}, **P("max_tokens value can't be greater than 4294967295")),
    chat("OV-28 2.1", {"temperature": 2.1}, **P("temperature out of range(0.0, 2.0)")),
    chat("OV-28 string", {"temperature": "1"}, **P("temperature is not a valid number")),
    chat("OV-28 3e9", {"temperature": 3_000_000_000}, **P("temperature is not a valid number")),
    chat("OV-29", {"top_p": 1.1}, **P("top_p out of range(0.0, 1.0)")),
    chat("OV-30", {"top_k": 0}, **P("top_k must be -1 (all tokens) or a positive integer")),
    chat("OV-31", {"min_p": 1.0}, **P("min_p out of range [0.0, 1.0)")),
    chat(
        "OV-32",
        {"frequency_penalty": -2.1},
        **P("frequency_penalty out of range(-2.0, 2.0)"),
    ),
    chat("OV-33", {"seed": -1}, **P("seed out of range [0, 4294967295]")),
    chat("OV-34", {"stop": 5}, **P("stop is not a string or array of strings")),
    chat("OV-34 mixed", {"stop": ["a", 1]}, **P("stop array contains non string element")),
    chat("OV-35", {"stop": ["a"] * 17}, **P("stop array must have no more than 16 strings")),
    chat("OV-35 16", {"stop": ["z"] * 16}, body_has={"object": "chat.completion"}),
    chat(
        "OV-38",
        STREAMED | {"include_stop_str_in_output": False},
        **P(STREAM_STOP, stream=True),
    ),
    chat("OV-39", {"n": 2}, **P("n value cannot be greater than best_of")),
    chat("OV-40", {"best_of": 20}, **P("best_of exceeds limit provided in graph config: 20")),
    chat(
        "OV-41",
        STREAMED | {"best_of": 2},
        **P("best_of cannot be used in streaming mode", stream=True),
    ),
    chat(
        "OV-42 stream",
        STREAMED | {"logprobs": True},
        **P("logprobs are not supported in streaming mode.", stream=True),
    ),
    text("OV-43", {"logprobs": 2}, **P("accepted logprobs value is currently 1 only")),
    embed(
        "OV-49 x",
        {"input": "a", "encoding_format": "x"},
        **P("encoding_format should either base64 or float", node="EmbeddingsExecutor"),
    ),
    embed(
        "OV-49 501 inputs",
        {"input": ["a"] * 501},
        why="the documentation names the limit, and the server's sources no text for it",
        **P(
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
    Case("OV-48", "POST", "/v3/foo", body={"model": "mock"}, **P(WRONG_ENDPOINT)),
    Case("OV-48 models", "POST", "/v3/models", body={"model": "mock"}, **P(WRONG_ENDPOINT)),
    Case("OV-48 unknown model", "POST", "/v3/foo", body={"model": "nope"}, **NO_GRAPH),
)
REFUSALS = (*FRONT_DOOR, *CONVERSATIONS, *PARAMETERS, *PATHS)
