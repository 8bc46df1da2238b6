"""The conformance cases TR-01 to TR-52, byte for byte and in order.

Two are left out, since they concern no codec: 50 (a queue), and the part of 39 with ``stream`` on
the unary path, where the original fails with status 200 and the gateway requests a unary response.
"""

from collections.abc import Callable
from typing import Any

import pytest

GENERATE = "/v2/models/vllm_like/generate"
STREAM = "/v2/models/vllm_like/generate_stream"
TRT = "/v2/models/trt_like/generate"
NO_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
NO_BOOLEAN = "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
NO_SIGNED = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
NO_UNSIGNED = (
    "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
)
NO_SHAPE = "The schema can not convert input 'text_input' to tensor with proper shape"
NO_ID = "Unable to parse 'id': attempt to access JSON non-string as string"
NO_OBJECT = "attempt to get members for non-object"
NO_PARAMETERS = (
    "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
)
CONVERTING = "Converting keyword: 'parameters': "
TWICE = "[request id: <id_unknown>] input 'text_input' already exists in request"


def format_error(reason: str) -> str:
    return f"failed to parse the request JSON buffer: {reason}"


def format_type_error(name: str) -> str:
    return f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."


def format_unknown_model_error(model: str, version: str = "") -> str:
    return f"Request for unknown model: '{model}'{version} is not found"


STOL = (
    "failed to get model version from specified version string '99999999999999999999' (details:"
    " stol), version should be an integral value > 0"
)
MISSING = (
    "[request id: <id_unknown>] expected number of inputs between 1 and 6 but got 0 inputs for"
    " model 'vllm_like'. Got input(s) [], but missing required input(s) ['text_input']. Please"
    " provide all required input(s)."
)

ERRORS: list[tuple[str, str, str, bytes, int, str]] = [
    ("02", "GET", "/v2/", b"", 404, "Not Found"),
    ("04", "POST", "/v2/health/live", b"", 405, "Method Not Allowed"),
    ("05", "GET", "/v2/models/nope", b"", 404, format_unknown_model_error("nope")),
    (
        "06",
        "GET",
        "/v2/models/vllm_like/versions/9",
        b"",
        404,
        format_unknown_model_error("vllm_like", " version 9"),
    ),
    ("07", "GET", "/v2/models/nope/ready", b"", 400, "Model version not ready"),
    ("08", "GET", "/v2/models/nope/stats", b"", 400, "requested model 'nope' is not available"),
    ("09", "GET", "/v2/repository/index", b"", 405, "Method Not Allowed"),
    (
        "10",
        "POST",
        "/v2/repository/models/nope/load",
        b"",
        500,
        "failed to load 'nope', failed to poll from model repository",
    ),
    ("14", "POST", GENERATE, b'{"text_input":"hi","id":42}', 500, NO_ID),
    ("15", "POST", GENERATE, b'{"text_input":"hi","id":null}', 500, NO_ID),
    (
        "18",
        "POST",
        "/v2/models/vllm_like/versions/2/generate",
        b'{"text_input":"a"}',
        404,
        format_unknown_model_error("vllm_like", " version 2"),
    ),
    ("18", "POST", "/v2/models/vllm_like/versions/abc/generate", b"{", 404, "Not Found"),
    ("18", "POST", "/v2/models/vllm_like/versions/-1/generate", b"{", 404, "Not Found"),
    ("19", "POST", "/v2/models/vllm_like/versions/99999999999999999999/generate", b"{", 400, STOL),
    ("20", "GET", GENERATE, b"", 405, "Method Not Allowed"),
    ("20", "PUT", GENERATE, b"", 405, "Method Not Allowed"),
    ("21", "POST", GENERATE, b"{", 500, format_error("Missing a name for object member. at 1")),
    ("22", "POST", GENERATE, b"hello", 500, format_error("Invalid value. at 0")),
    ("23", "POST", GENERATE, b"", 500, format_error("The document is empty. at 0")),
    (
        "24",
        "POST",
        GENERATE,
        b'{"text_input":"a"} x',
        500,
        format_error("The document root must not be followed by other values. at 19"),
    ),
    ("25", "POST", GENERATE, b"[]", 500, NO_OBJECT),
    ("25", "POST", GENERATE, b'"x"', 500, NO_OBJECT),
    ("25", "POST", GENERATE, b"null", 500, NO_OBJECT),
    ("26", "POST", GENERATE, b"{}", 400, MISSING),
    ("26", "POST", GENERATE, b'{"id":"z"}', 400, MISSING.replace("<id_unknown>", "z")),
    ("27", "POST", GENERATE, b'{"text_input":null}', 500, NO_STRING),
    ("27", "POST", GENERATE, b'{"text_input":5}', 500, NO_STRING),
    ("28", "POST", GENERATE, b'{"text_input":["a","b"]}', 400, NO_SHAPE),
    ("28", "POST", GENERATE, b'{"text_input":[]}', 400, NO_SHAPE),
    ("30", "POST", GENERATE, b'{"text_input":"a","parameters":null}', 500, NO_PARAMETERS),
    ("30", "POST", GENERATE, b'{"text_input":"a","parameters":1}', 500, NO_PARAMETERS),
    ("30", "POST", GENERATE, b'{"text_input":"a","parameters":[]}', 500, NO_PARAMETERS),
    ("30", "POST", GENERATE, b'{"text_input":"a","parameters":"{}"}', 500, NO_PARAMETERS),
    (
        "32",
        "POST",
        GENERATE,
        b'{"text_input":"a","parameters":{"x":null}}',
        400,
        CONVERTING + format_type_error("x"),
    ),
    (
        "32",
        "POST",
        GENERATE,
        b'{"text_input":"a","parameters":{"x":[1]}}',
        400,
        CONVERTING + format_type_error("x"),
    ),
    (
        "32",
        "POST",
        GENERATE,
        b'{"text_input":"a","parameters":{"x":{"y":1}}}',
        400,
        CONVERTING + format_type_error("x"),
    ),
    ("33", "POST", GENERATE, b'{"text_input":"a","stop":["x"]}', 400, format_type_error("stop")),
    (
        "35",
        "POST",
        GENERATE,
        b'{"text_input":"a","parameters":{"text_input":"b"}}',
        400,
        CONVERTING + TWICE,
    ),
    ("36", "POST", GENERATE, b'{"text_input":"a","text_input":"b"}', 400, TWICE),
    (
        "36",
        "POST",
        GENERATE,
        b'{"id":"q","text_input":"a","text_input":"b"}',
        400,
        TWICE.replace("<id_unknown>", "q"),
    ),
    ("37", "POST", GENERATE, b'{"text_input":"a","sampling_parameters":{}}', 500, NO_STRING),
    ("38", "POST", GENERATE, b'{"text_input":"a","stream":"true"}', 500, NO_BOOLEAN),
    ("38", "POST", GENERATE, b'{"text_input":"a","stream":1}', 500, NO_BOOLEAN),
    ("38", "POST", GENERATE, b'{"text_input":"a","stream":null}', 500, NO_BOOLEAN),
    ("42", "POST", GENERATE, b'{"text_input":"a","fail_at":0}', 400, "engine exploded"),
]

TRT_ERRORS = [
    ("48", b'{"text_input":"a"}', 400,
     ("[request id: <id_unknown>] expected number of inputs between 2 and 30 but got 1 inputs for"
     " model 'trt_like'. Got input(s) ['text_input'], but missing required input(s)"
     " ['max_tokens']. Please provide all required input(s).")),
    ("48", b'{"text_input":"a","max_tokens":5.5}', 500, NO_SIGNED),
    ("48", b'{"text_input":"a","max_tokens":"5"}', 500, NO_SIGNED),
    ("48", b'{"text_input":"a","max_tokens":1,"seed":-1}', 500, NO_UNSIGNED),
    ("49", b'{"text_input":["a","b"],"max_tokens":1}', 400,
     ("[request id: <id_unknown>] input 'text_input' batch size does not match other inputs for"
     " 'trt_like'")),
    ("49", b'{"text_input":["a","b","c","d","e"],"max_tokens":[1,1,1,1,1]}', 400,
     "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'trt_like'"),
]  # fmt: skip


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: f"{row[0]} {row[3].decode()}")
def test_conformance_error_status_and_text(
    client: Any, row: tuple[str, str, str, bytes, int, str]
) -> None:
    case, method, path, body, status, text = row
    response = client.ask(method, path, body)
    assert (response.status, response.error) == (status, text), case


@pytest.mark.parametrize(("case", "body", "status", "text"), TRT_ERRORS)
def test_conformance_trtllm_error_status_and_text(
    client_of: Callable[..., Any], case: str, body: bytes, status: int, text: str
) -> None:
    response = client_of("trtllm").post(TRT, body)
    assert (response.status, response.error) == (status, text), case


ANSWERS = [
    ("11", b'{"id":"42","text_input":"hi","parameters":{"max_tokens":2,"temperature":0}}',
     b'{"id":"42","model_name":"vllm_like","model_version":"1","text_output":"hi w0 w1"}'),
    ("12", b'{"text_input":"hi","parameters":{"max_tokens":2,"temperature":0}}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":"hi w0 w1"}'),
    ("13", b'{"text_input":"hi","id":""}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":"hi w0 w1 w2"}'),
    ("16", rb'{"text_input":"hi","id":"a\"b\\c\nd\u00e9\u0000zz"}',
     (b'{"id":"a\\"b\\\\c\\nd\xc3\xa9","model_name":"vllm_like","model_version":"1",'
     b'"text_output":"hi w0 w1 w2"}')),
    ("28", b'{"text_input":["a"]}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":"a w0 w1 w2"}'),
    ("29", b'{"text_input":""}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":" w0 w1 w2"}'),
    ("31", b'{"text_input":"a","parameters":{}}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":"a w0 w1 w2"}'),
    ("35", b'{"parameters":{"text_input":"a"}}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":"a w0 w1 w2"}'),
    ("37", rb'{"text_input":"a","sampling_parameters":"{\"max_tokens\":1}","max_tokens":3}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":"a w0"}'),
    ("39", b'{"text_input":"a","stream":true,"max_tokens":1}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":" w0"}'),
    ("40", b'{"text_input":"a","return_finish_reason":true,"return_num_output_tokens":true}',
     (b'{"finish_reason":"stop","model_name":"vllm_like","model_version":"1","num_output_tokens":3,'
     b'"text_output":"a w0 w1 w2"}')),
    ("41", b'{"text_input":"a","n":2}',
     b'{"model_name":"vllm_like","model_version":"1","text_output":["a w0 w1 w2","a w0 w1 w2"]}'),
]  # fmt: skip


@pytest.mark.parametrize(("case", "body", "answer"), ANSWERS)
def test_conformance_unary_response_bytes(
    client: Any, case: str, body: bytes, answer: bytes
) -> None:
    response = client.post(GENERATE, body)
    assert (response.status, response.kind, response.body) == (200, "application/json", answer), (
        case
    )


def test_17_version_with_leading_zero_is_normalized(client: Any) -> None:
    response = client.post("/v2/models/vllm_like/versions/01/generate", {"text_input": "a"})
    assert response.body == (
        b'{"model_name":"vllm_like","model_version":"1","text_output":"a w0 w1 w2"}'
    )


def make_event(text: str, name: bytes = b"") -> bytes:
    id_part = b'"id":"%s",' % name if name else b""
    rest = b'"model_name":"vllm_like","model_version":"1","text_output":"%s"}' % text.encode()
    return b"data: {" + id_part + rest + b"\n\n"


EXPLODED = b'data: {"error":"engine exploded"}\n\n'
STREAMS = [
    ("43", b'{"text_input":"a","id":"s1","stream":true}', 200,
     make_event(" w0", b"s1") + make_event(" w1", b"s1") + make_event(" w2", b"s1")),
    ("44", b'{"text_input":"a"}', 200, make_event("a w0 w1 w2")),
    ("45", b'{"text_input":"a","stream":true,"fail_at":0}', 400, EXPLODED),
    ("45", b'{"text_input":"a","fail_at":0}', 400, EXPLODED),
    ("46", b'{"text_input":"a","stream":true,"fail_at":2}', 200,
     make_event(" w0") + make_event(" w1") + EXPLODED),
    ("47", b'{"text_input":"a","stream":true,"max_tokens":0}', 200, b""),
]  # fmt: skip


@pytest.mark.parametrize(("case", "body", "status", "answer"), STREAMS)
def test_conformance_stream_bytes(
    client: Any, case: str, body: bytes, status: int, answer: bytes
) -> None:
    response = client.post(STREAM, body)
    assert (response.status, response.body) == (status, answer), case
    assert response.kind == "text/event-stream; charset=utf-8"


def test_49_batch_request_returns_lists(client_of: Callable[..., Any]) -> None:
    body = {
        "text_input": ["a", "b"],
        "max_tokens": [2, 2],
        "temperature": [1, 1],
        "exclude_input_in_output": [True, True],
    }
    response = client_of("trtllm").post(TRT, body)

    assert response.body == (
        b'{"model_name":"trt_like","model_version":"1","text_output":[" w0 w1"," w0 w1"]}'
    )


def test_51_compressed_generate_body_returns_400(client: Any) -> None:
    for path in (GENERATE, STREAM):
        response = client.post(path, {"text_input": "a"}, {"content-encoding": "gzip"})
        assert response.status == 400
        assert response.kind == "application/json"
        assert response.error == "Unsupported content-encoding, only 'identity' is supported."
