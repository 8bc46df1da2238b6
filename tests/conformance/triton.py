"""Triton Inference Server: cases TR-01 to TR-52, without 34 and 50.

Those two need a model's parameters and its queue; they are in test_triton.py. The models:
``vllm_like`` takes what the vLLM backend takes and answers " w0", " w1" ..., by default three
words; ``vllm_fails_first`` and ``vllm_fails_third`` fail in place of that word; ``trt_like`` takes
what the TensorRT-LLM ensemble takes, in batches of four.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.conformance.cases import Case, Response, expect

VLLM = "/v2/models/vllm_like"
TRT = "/v2/models/trt_like"
PLAIN = "text/plain"
EVENTS = "text/event-stream; charset=utf-8"

UNKNOWN = "Request for unknown model: 'nope' is not found"
NO_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
NO_BOOLEAN = "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
NO_SIGNED = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
NO_UNSIGNED = (
    "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
)
NO_SHAPE = "The schema can not convert input 'text_input' to tensor with proper shape"
NO_ID = "Unable to parse 'id': attempt to access JSON non-string as string"
NO_MEMBERS = "attempt to get members for non-object"
NO_OBJECT = (
    "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
)
NESTED = "Converting keyword: 'parameters': "
TWICE = "[request id: <id_unknown>] input 'text_input' already exists in request"
NO_VERSION = (
    "failed to get model version from specified version string '99999999999999999999' "
    "(details: stol), version should be an integral value > 0"
)
MISSING = (
    "[request id: <id_unknown>] expected number of inputs between 1 and 6 but got 0 inputs for "
    "model 'vllm_like'. Got input(s) [], but missing required input(s) ['text_input']. Please "
    "provide all required input(s)."
)
OTHER_BATCH = (
    "[request id: <id_unknown>] input 'text_input' batch size does not match other inputs for "
    "'trt_like'"
)
LARGE_BATCH = "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'trt_like'"
ENCODED = "Unsupported content-encoding, only 'identity' is supported."
FIXED = "explicit model load / unload is not allowed if polling is enabled"
OUR_MODELS = "a gateway's models are its configuration's; no client loads or unloads them"
ONE_RESPONSE = (
    "its own server has answered 200 when it finds that there is more than one response; asked for "
    "one, we give one"
)


def get(id: str, path: str, **rest: Any) -> Case:  # noqa: A002 - a Case's field
    """Build a metadata request."""
    return Case(id, "GET", path, **rest)


def post(id: str, path: str, body: Any = b"", **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a request with a body of bytes or JSON."""
    sent = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Case(id, "POST", path, body=sent, **rest)


def generate(id: str, body: Any, model: str = VLLM, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a generate request."""
    return post(id, f"{model}/generate", body, **rest)


def generate_stream(id: str, body: Any, model: str = VLLM, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a generate_stream request with the exact expected bytes."""
    kind = {"content-type": EVENTS}
    return post(
        id,
        f"{model}/generate_stream",
        body,
        **{"content_type": "text/event-stream", "answer_headers": kind, **rest},
    )


def generate_trtllm(id: str, body: Any, **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a generate request for the TensorRT-LLM model."""
    return generate(id, body, TRT, profile="trtllm", **rest)


def error(status: int, text: Any, **rest: Any) -> dict[str, Any]:
    """Expect an error with exactly this key."""
    return {"status": status, "body_is": {"error": text}, **rest}


def json_error(reason: str) -> dict[str, Any]:
    """Expect an error that the body is not JSON."""
    return error(500, f"failed to parse the request JSON buffer: {reason}")


def invalid_parameter(name: str, before: str = "") -> dict[str, Any]:
    """Expect an error for a parameter that is not a scalar."""
    must = "It should be either 'int', 'bool', or 'string'."
    return error(400, f"{before}parameter '{name}' has invalid type. {must}")


def generate_response(
    text: Any, *, model: str = "vllm_like", name: str = "", **extra_fields: Any
) -> bytes:
    """Expect a unary response or the data of an event, with sorted keys."""
    fields = {"model_name": model, "model_version": "1", "text_output": text, **extra_fields}
    if name:
        fields["id"] = name
    return msgspec.json.encode(fields, order="sorted")


def stream_body(*data: bytes) -> bytes:
    """Expect a stream of exactly these events, without an end mark."""
    return b"".join(b"data: " + one + b"\n\n" for one in data)


def expected_response(text: Any, **fields: Any) -> dict[str, Any]:
    """Expect these bytes."""
    return {"body_is": generate_response(text, **fields)}


def check_server_metadata(answer: Response) -> None:
    """The server has a name, a version and extensions."""
    metadata = answer.json
    expect(list(metadata) == ["name", "version", "extensions"], f"keys: {list(metadata)}")
    expect(metadata["name"] == "triton", f"another's name: {metadata['name']}")
    expect("binary_tensor_data" in metadata["extensions"], f"extensions: {metadata['extensions']}")


def check_all_ready(answer: Response) -> None:
    """Every listed model is ready."""
    expect(answer.json, "no model is listed")
    for one in answer.json:
        expect(list(one) == ["name", "version", "state"], f"keys: {list(one)}")
        expect(one["state"] == "READY", f"not ready: {one}")


def check_mock_ready(answer: Response) -> None:
    """The model is still loaded."""
    expect({"name": "mock_llm", "version": "1", "state": "READY"} in answer.json, "it is not there")


CHUNKED: Mapping[str, Any] = {"transfer-encoding": "chunked", "content-length": None}
A = {"text_input": "a"}
AW = expected_response("a w0 w1 w2")
EXPLODED = {"error": str}
BATCH = {"max_tokens": [2, 2], "exclude_input_in_output": [True, True]}
NO_MAX = re.compile(r".*but missing required input\(s\) \['max_tokens'\]\. Please .*")

SERVER = (
    get("TR-01", "/v2", check=check_server_metadata),
    get("TR-02", "/v2/", **error(404, "Not Found", content_type=PLAIN)),
    get(
        "TR-03",
        "/v2/health/live",
        body_is=b"",
        content_type=PLAIN,
        answer_headers={"content-length": "0"},
    ),
    post("TR-04", "/v2/health/live", **error(405, "Method Not Allowed", content_type=PLAIN)),
    get("TR-05", "/v2/models/nope", **error(404, UNKNOWN)),
    get(
        "TR-06",
        f"{VLLM}/versions/9",
        **error(404, "Request for unknown model: 'vllm_like' version 9 is not found"),
    ),
    get(
        "TR-07",
        "/v2/models/nope/ready",
        **error(400, "Model version not ready", content_type=PLAIN),
    ),
    get(
        "TR-08",
        "/v2/models/nope/stats",
        **error(400, "requested model 'nope' is not available"),
    ),
    post("TR-09", "/v2/repository/index", {"ready": True}, check=check_all_ready),
    get("TR-09 GET", "/v2/repository/index", **error(405, "Method Not Allowed")),
    post("TR-10", "/v2/repository/models/nope/unload", body_is=b""),
    post(
        "TR-10 load",
        "/v2/repository/models/nope/load",
        **error(500, "failed to load 'nope', failed to poll from model repository"),
    ),
)

GENERATE = (
    generate(
        "TR-11",
        {"id": "42", "text_input": "hi", "parameters": {"max_tokens": 2, "temperature": 0}},
        answer_headers=CHUNKED,
        **expected_response("hi w0 w1", name="42"),
    ),
    generate(
        "TR-12",
        {"text_input": "hi", "parameters": {"max_tokens": 2, "temperature": 0}},
        **expected_response("hi w0 w1"),
    ),
    generate("TR-13", A | {"id": ""}, **AW),
    generate("TR-14", A | {"id": 42}, **error(500, NO_ID)),
    generate("TR-15", A | {"id": None}, **error(500, NO_ID)),
    generate("TR-16", A | {"id": 'q"b\\n\né'}, **expected_response("a w0 w1 w2", name='q"b\\n\né')),
    generate(
        "TR-16 escaped",
        rb'{"text_input":"a","id":"\u00e9"}',
        **expected_response("a w0 w1 w2", name="é"),
    ),
    generate("TR-17", A, f"{VLLM}/versions/1", **AW),
    generate(
        "TR-18",
        A,
        f"{VLLM}/versions/2",
        **error(404, "Request for unknown model: 'vllm_like' version 2 is not found"),
    ),
    generate("TR-18 abc", A, f"{VLLM}/versions/abc", **error(404, "Not Found", content_type=PLAIN)),
    generate("TR-19", A, f"{VLLM}/versions/99999999999999999999", **error(400, NO_VERSION)),
    get("TR-20", f"{VLLM}/generate", **error(405, "Method Not Allowed")),
    Case("TR-20 PUT", "PUT", f"{VLLM}/generate", body=A, **error(405, "Method Not Allowed")),
    generate("TR-21", b"{", **json_error("Missing a name for object member. at 1")),
    generate("TR-22", b"hello", **json_error("Invalid value. at 0")),
    generate("TR-23", b"", **json_error("The document is empty. at 0")),
    generate(
        "TR-24",
        b'{"text_input":"a"} x',
        **json_error("The document root must not be followed by other values. at 19"),
    ),
    generate("TR-25", b"[]", **error(500, NO_MEMBERS)),
    generate("TR-25 string", b'"x"', **error(500, NO_MEMBERS)),
    generate("TR-25 null", b"null", **error(500, NO_MEMBERS)),
    generate("TR-26", b"{}", **error(400, MISSING)),
    generate("TR-27", {"text_input": None}, **error(500, NO_STRING)),
    generate("TR-27 number", {"text_input": 5}, **error(500, NO_STRING)),
    generate("TR-28", {"text_input": ["a"]}, **AW),
    generate("TR-28 two", {"text_input": ["a", "b"]}, **error(400, NO_SHAPE)),
    generate("TR-28 none", {"text_input": []}, **error(400, NO_SHAPE)),
    generate("TR-29", {"text_input": ""}, **expected_response(" w0 w1 w2")),
    generate("TR-30", A | {"parameters": None}, **error(500, NO_OBJECT)),
    generate("TR-30 number", A | {"parameters": 1}, **error(500, NO_OBJECT)),
    generate("TR-30 array", A | {"parameters": []}, **error(500, NO_OBJECT)),
    generate("TR-30 string", A | {"parameters": "{}"}, **error(500, NO_OBJECT)),
    generate("TR-31", A | {"parameters": {}}, **AW),
    generate("TR-32", A | {"parameters": {"x": None}}, **invalid_parameter("x", NESTED)),
    generate("TR-32 array", A | {"parameters": {"x": [1]}}, **invalid_parameter("x", NESTED)),
    generate("TR-32 object", A | {"parameters": {"x": {"y": 1}}}, **invalid_parameter("x", NESTED)),
    generate("TR-33", A | {"stop": ["x"]}, **invalid_parameter("stop")),
    generate("TR-35", {"parameters": A}, **AW),
    generate("TR-35 twice", A | {"parameters": {"text_input": "b"}}, **error(400, NESTED + TWICE)),
    generate("TR-36", b'{"text_input":"a","text_input":"b"}', **error(400, TWICE)),
    generate("TR-37", A | {"sampling_parameters": {"max_tokens": 1}}, **error(500, NO_STRING)),
    generate(
        "TR-37 string", A | {"sampling_parameters": '{"max_tokens":1}'}, **expected_response("a w0")
    ),
    generate("TR-38", A | {"stream": "true"}, **error(500, NO_BOOLEAN)),
    generate("TR-38 number", A | {"stream": 1}, **error(500, NO_BOOLEAN)),
    generate("TR-38 null", A | {"stream": None}, **error(500, NO_BOOLEAN)),
    generate("TR-39", A | {"stream": True}, why=ONE_RESPONSE, **expected_response(" w0 w1 w2")),
    generate("TR-39 one", A | {"stream": True, "max_tokens": 1}, **expected_response(" w0")),
    generate(
        "TR-40",
        A | {"return_finish_reason": True, "return_num_output_tokens": True},
        **expected_response("a w0 w1 w2", finish_reason="length", num_output_tokens=3),
    ),
    generate("TR-41", A | {"n": 2}, **expected_response(["a w0 w1 w2", "a w0 w1 w2"])),
    generate("TR-42", A, "/v2/models/vllm_fails_first", **error(400, str)),
)

GENERATE_STREAM = (
    generate_stream(
        "TR-43",
        A | {"stream": True, "id": "s1"},
        body_is=stream_body(*(generate_response(f" w{k}", name="s1") for k in range(3))),
    ),
    generate_stream("TR-44", A, body_is=stream_body(generate_response("a w0 w1 w2"))),
    generate_stream(
        "TR-45", A | {"stream": True}, "/v2/models/vllm_fails_first", status=400, events=[EXPLODED]
    ),
    generate_stream(
        "TR-46",
        A | {"stream": True},
        "/v2/models/vllm_fails_third",
        events=[
            *({"model_name": str, "model_version": "1", "text_output": f" w{k}"} for k in range(2)),
            EXPLODED,
        ],
    ),
    generate_stream("TR-47", A | {"stream": True, "max_tokens": 0}, body_is=b""),
)

BATCHES = (
    generate_trtllm("TR-48", A, **error(400, NO_MAX)),
    generate_trtllm("TR-48 5.5", A | {"max_tokens": 5.5}, **error(500, NO_SIGNED)),
    generate_trtllm("TR-48 '5'", A | {"max_tokens": "5"}, **error(500, NO_SIGNED)),
    generate_trtllm("TR-48 seed", A | {"max_tokens": 1, "seed": -1}, **error(500, NO_UNSIGNED)),
    generate_trtllm(
        "TR-48 temperature",
        A | {"max_tokens": 1, "temperature": 1},
        **expected_response("a w0", model="trt_like"),
    ),
    generate_trtllm(
        "TR-49",
        BATCH | {"text_input": ["a", "b"]},
        **expected_response([" w0 w1"] * 2, model="trt_like"),
    ),
    generate_trtllm(
        "TR-49 mismatch",
        {"text_input": ["a", "b"], "max_tokens": 1},
        **error(400, OTHER_BATCH),
    ),
    generate_trtllm(
        "TR-49 five",
        {"text_input": list("abcde"), "max_tokens": [1] * 5},
        **error(400, LARGE_BATCH),
    ),
)

REST = (
    generate("TR-51", A, headers={"content-encoding": "gzip"}, **error(400, ENCODED)),
    generate(
        "TR-51 answer",
        A,
        headers={"accept-encoding": "gzip"},
        answer_headers={"content-encoding": None},
        **AW,
    ),
    post("TR-52", "/v2/repository/models/mock_llm/unload", why=OUR_MODELS, **error(503, FIXED)),
    post("TR-52 index", "/v2/repository/index", why=OUR_MODELS, check=check_mock_ready),
)

CASES = (*SERVER, *GENERATE, *GENERATE_STREAM, *BATCHES, *REST)
