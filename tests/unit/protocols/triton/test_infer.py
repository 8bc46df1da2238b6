"""The infer endpoint for text: JSON and binary, as recorded from a running server."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import WorkerFailed
from protocols.core.events import ChoiceEnd, StreamEnd, TextDelta, TokenLogprob, Usage

PATH = "/v2/models/trt_like/infer"
HEADER = "inference-header-content-length"
TEXT = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["hi"]}
TOKENS = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [2]}
QUIET = {"name": "exclude_input_in_output", "shape": [1, 1], "datatype": "BOOL", "data": [True]}
TAG = "[request id: <id_unknown>] "
ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
    " 'shared_memory_region' in 'parameters'. But"
)


@pytest.fixture
def trtllm_client(client_of: Callable[..., Any]) -> Any:
    return client_of("trtllm")


def pack_texts(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def make_binary(head: dict[str, Any], *data: bytes) -> tuple[bytes, dict[str, str]]:
    text = msgspec.json.encode(head)
    return text + b"".join(data), {HEADER: str(len(text))}


RAW_INPUTS = [
    {"name": "text_input", "shape": [1, 1], "datatype": "BYTES",
     "parameters": {"binary_data_size": 6}},
    {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32",
     "parameters": {"binary_data_size": 4}},
]  # fmt: skip
TWO = b"\x02\0\0\0"


@pytest.mark.parametrize(
    ("operation", "headers", "json_size"),
    [
        ("infer", {HEADER: "60"}, 60),
        ("infer", {HEADER: "101"}, 100),
        ("infer", {HEADER: "-1"}, 100),
        ("infer", {HEADER: "60x"}, 100),
        ("infer", {}, 100),
        ("generate", {HEADER: "60"}, 100),
    ],
)
def test_only_tensors_with_a_valid_length_have_data_behind_their_json(
    trtllm_client: Any, operation: str, headers: dict[str, str], json_size: int
) -> None:
    call = trtllm_client.call(f"/v2/models/trt_like/{operation}", method="POST")

    assert trtllm_client.adapter.get_json_size(call.endpoint, headers, 100) == json_size


def test_infer_with_json_input_and_output(trtllm_client: Any) -> None:
    response = trtllm_client.post(PATH, {"id": "x", "inputs": [TEXT, TOKENS]})
    assert (response.status, response.kind) == (200, "application/json")
    assert response.body == (
        b'{"id":"x","model_name":"trt_like","model_version":"1","outputs":[{"name":"text_output",'
        b'"datatype":"BYTES","shape":[1,1],"data":["hi w0 w1"]}]}'
    )


def test_infer_with_binary_input_and_output(trtllm_client: Any) -> None:
    head = {"id": "b", "inputs": RAW_INPUTS, "parameters": {"binary_data_output": True}}
    response = trtllm_client.post(PATH, *make_binary(head, pack_texts(b"hi"), TWO))
    expected = (
        b'{"id":"b","model_name":"trt_like","model_version":"1","outputs":[{"name":"text_output",'
        b'"datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":12}}]}'
    )

    assert (response.status, response.kind) == (200, "application/octet-stream")
    assert response.headers["Inference-Header-Content-Length"] == str(len(expected))
    assert response.body == expected + pack_texts(b"hi w0 w1")


def test_infer_with_mixed_json_and_binary_tensors(trtllm_client: Any) -> None:
    count_flag = {"name": "return_num_output_tokens", "shape": [1, 1], "datatype": "BOOL",
               "parameters": {"binary_data_size": 1}}  # fmt: skip
    head = {
        "inputs": [TEXT, RAW_INPUTS[1], count_flag],
        "outputs": [
            {"name": "num_output_tokens", "parameters": {"binary_data": True}},
            {"name": "text_output"},
        ],
        "parameters": {"binary_data_output": True},
    }
    response = trtllm_client.post(PATH, *make_binary(head, TWO, b"\1"))

    head_length = int(response.headers["Inference-Header-Content-Length"])

    assert msgspec.json.decode(response.body[:head_length])["outputs"] == [
        {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": ["hi w0 w1"]},
        {"name": "num_output_tokens", "datatype": "INT32", "shape": [1, 1],
         "parameters": {"binary_data_size": 4}},
    ]  # fmt: skip
    assert response.body[head_length:] == TWO


def test_infer_returns_only_requested_outputs(trtllm_client: Any) -> None:
    count_flag = {"name": "return_num_output_tokens", "shape": [1, 1], "datatype": "BOOL",
               "data": [True]}  # fmt: skip
    for outputs, names in (
        ([], ["text_output", "num_output_tokens"]),
        ([{"name": "num_output_tokens"}], ["num_output_tokens"]),
        ([{"name": "text_output"}, {"name": "text_output"}], ["text_output"]),
        ([{"name": "cum_log_probs"}], []),
    ):
        body = {"inputs": [TEXT, TOKENS, count_flag], "outputs": outputs}
        response = msgspec.json.decode(trtllm_client.post(PATH, body).body)
        assert [one["name"] for one in response["outputs"]] == names


def test_infer_batch(trtllm_client: Any) -> None:
    inputs = [{**one, "shape": [2, 1], "data": one["data"] * 2} for one in (TEXT, TOKENS, QUIET)]  # type: ignore[operator]
    outputs = msgspec.json.decode(trtllm_client.post(PATH, {"inputs": inputs}).body)["outputs"]
    assert outputs == [
        {"name": "text_output", "datatype": "BYTES", "shape": [2, 1], "data": [" w0 w1"] * 2}
    ]


def test_unavailable_log_probs_output_is_omitted(trtllm_client: Any) -> None:
    flag = {"name": "return_log_probs", "shape": [1, 1], "datatype": "BOOL", "data": [True]}
    body = msgspec.json.decode(trtllm_client.post(PATH, {"inputs": [TEXT, TOKENS, flag]}).body)
    assert [one["name"] for one in body["outputs"]] == ["text_output"]


def test_num_input_tokens_of_a_batch_is_the_sum(trtllm_client: Any) -> None:
    flag = {"name": "return_num_input_tokens", "shape": [2, 1], "datatype": "BOOL",
            "data": [True, True]}  # fmt: skip
    inputs = [{**TEXT, "shape": [2, 1], "data": ["a", "b"]},
              {**TOKENS, "shape": [2, 1], "data": [1, 1]}, flag]  # fmt: skip

    outputs = msgspec.json.decode(trtllm_client.post(PATH, {"inputs": inputs}).body)["outputs"]

    assert outputs[1] == {
        "name": "num_input_tokens", "datatype": "INT32", "shape": [1, 1], "data": [4],
    }  # fmt: skip


def test_vllm_profile_shapes_have_no_batch_dimension(client: Any) -> None:
    body = {"inputs": [{**TEXT, "shape": [1]}], "parameters": {"max_tokens": 1, "n": 2}}
    outputs = msgspec.json.decode(client.post("/v2/models/vllm_like/infer", body).body)["outputs"]
    assert outputs == [
        {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["hi w0", "hi w0"]}
    ]

    response = client.post("/v2/models/vllm_like/infer", {"inputs": [TEXT]})
    assert response.error == (
        f"{TAG}unexpected shape for input 'text_input' for model 'vllm_like'. Expected [1], got"
        " [1,1]."
    )


def test_raw_body_is_deduced_as_the_single_input(client_of: Callable[..., Any]) -> None:
    response = client_of("plain").post("/v2/models/vllm_like/infer", b"hi", {HEADER: "0"})
    assert response.kind == "application/octet-stream"
    assert response.body.endswith(b"}" + pack_texts(b" w0 w1 w2"))

    refused = client_of("trtllm").post(PATH, b"hi", {HEADER: "0"})
    assert (refused.status, refused.error) == (
        400,
        (
            f"{TAG}Raw request must only have 1 input (found 1) to be deduced but got 30 inputs in"
            " 'trt_like' model configuration"
        ),
    )


def test_infer_priority_and_timeout_are_decoded(trtllm_client: Any) -> None:
    body = {
        "inputs": [TEXT, TOKENS],
        "parameters": {"priority": 900, "timeout": 1_500_000, "sequence_id": "s", "x": 1}
        | {"sequence_start": True},
    }
    request = trtllm_client.decode(body, "infer", "trt_like")
    assert (request.priority, request.timeout) == (255, 1.5)
    assert request.extra == {
        "x": msgspec.Raw(b"1"),
        "sequence_id": msgspec.Raw(b'"s"'),
        "sequence_start": msgspec.Raw(b"true"),
    }

    nothing = {"inputs": [TEXT, TOKENS], "parameters": {"priority": 0, "timeout": 0}}
    request = trtllm_client.decode(nothing, "infer", "trt_like")
    assert (request.priority, request.timeout) == (None, None)


def test_ragged_log_probs_are_padded_with_zeros(
    trtllm_client: Any, describe: Callable[..., Any]
) -> None:
    flag = {"name": "return_log_probs", "shape": [1, 1], "datatype": "BOOL", "data": [True]}
    many = {"name": "num_return_sequences", "shape": [1, 1], "datatype": "INT32", "data": [2]}
    call = trtllm_client.call(PATH, {"inputs": [TEXT, TOKENS, flag, many]}, method="POST")
    of = trtllm_client.adapter.create_encoder(
        call, trtllm_client.adapter.decode_request(call), describe("trt_like")
    )
    half = TokenLogprob("a", -0.5)
    choices = [
        UnaryChoice(0, "aa", tokens=2, logprobs=[half, half]),
        UnaryChoice(1, "a", tokens=1, logprobs=[half]),
    ]

    outputs = msgspec.json.decode(of.encode_unary(UnaryResponse(choices)).body)["outputs"]

    assert [(one["name"], one["shape"], one["data"]) for one in outputs] == [
        ("text_output", [1, 2], ["aa", "a"]),
        ("cum_log_probs", [1, 2], [-1.0, -0.5]),
        ("output_log_probs", [1, 2, 2], [-0.5, -0.5, -0.5, 0.0]),
    ]


def test_infer_response_is_written_at_the_end_of_the_events(
    trtllm_client: Any, describe: Callable[..., Any]
) -> None:
    call = trtllm_client.call(PATH, {"inputs": [TEXT, TOKENS]}, method="POST")
    of = trtllm_client.adapter.create_encoder(
        call, trtllm_client.adapter.decode_request(call), describe("trt_like")
    )

    assert of.encode_events([TextDelta("x")]) == b""
    assert of.encode_events([ChoiceEnd("eos"), Usage(1, 1), StreamEnd()]).endswith(
        b'"data":["x"]}]}'
    )
    assert of.encode_error_event(WorkerFailed("no")) == b'{"error":"no"}'
    assert of.headers() == ()


def test_infer_accepts_gzip_and_rejects_other_encodings(trtllm_client: Any) -> None:
    body = {"inputs": [TEXT, TOKENS]}
    assert trtllm_client.post(PATH, body, {"content-encoding": "gzip"}).status == 200

    response = trtllm_client.post(PATH, body, {"content-encoding": "br"})
    assert (response.status, response.kind, response.error) == (
        501, "text/plain", "Unsupported compression type",
    )  # fmt: skip


def change_input(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**TEXT, **changes}, TOKENS]}


def add_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": [TEXT, TOKENS], "parameters": parameters}


def format_parse_error(name: str, what: str) -> str:
    return f"Unable to parse '{name}': attempt to access {what}"


STRING = "JSON non-string as string"
ARRAY = "JSON non-array as array"
UNSIGNED = "JSON non-unsigned-integer as unsigned-integer"
BOOLEAN = "JSON non-boolean as boolean"
THERE = "input 'text_input' for model 'trt_like'"
NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
    " prepended to each input shape. If you want to specify the full shape including the batch dim"
    " in your input dims config, try setting max_batch_size to zero. See the model configuration"
    " docs for more info on max_batch_size."
)
EXPECTED = "for input 'text_input' for model 'trt_like'. Expected [-1,1], got"

REFUSED: list[tuple[Any, int, str]] = [
    (b"{", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
    (b"[]", 500, format_parse_error("inputs", "non-existing object member 'inputs'")),
    ({}, 500, format_parse_error("inputs", "non-existing object member 'inputs'")),
    ({"inputs": 1}, 500, format_parse_error("inputs", ARRAY)),
    ({"id": 5}, 500, format_parse_error("id", STRING)),
    ({"inputs": [1]}, 400, f"{ONE_SOURCE} no field is set"),
    ({"inputs": [{}]}, 400, f"{ONE_SOURCE} no field is set"),
    (
        change_input(parameters={"binary_data_size": 6}),
        400,
        f"{ONE_SOURCE} set 'data' 'binary_data_size'",
    ),
    (change_input(name=5), 500, format_parse_error("name", STRING)),
    (
        {"inputs": [{"data": [1]}]},
        500,
        format_parse_error("name", "non-existing object member 'name'"),
    ),
    (change_input(datatype=5), 500, format_parse_error("datatype", STRING)),
    (change_input(datatype="XX"), 400, "invalid datatype for input text_input"),
    (change_input(datatype="FP32"), 500, format_parse_error("data", "JSON non-number as double")),
    (change_input(shape=1), 500, format_parse_error("shape", ARRAY)),
    (change_input(shape=[-1, 1]), 500, format_parse_error("shape", UNSIGNED)),
    (change_input(shape=[1.5, 1]), 500, format_parse_error("shape", UNSIGNED)),
    (change_input(data="hi"), 500, format_parse_error("data", ARRAY)),
    (change_input(data=[5]), 500, f"Unable to parse JSON bytes array: attempt to access {STRING}"),
    (
        change_input(data=["a", "b"]),
        400,
        f"{TAG}unexpected number of string elements 2 for inference {THERE}, expecting 1",
    ),
    (change_input(data=[]), 400, f"{TAG}expected 1 string elements for inference {THERE}, got 0"),
    (
        change_input(shape=[2, 1]),
        400,
        f"{TAG}input 'text_input' batch size does not match other inputs for 'trt_like'",
    ),
    (change_input(name="zzz"), 400, "unexpected inference input 'zzz' for model 'trt_like'"),
    ({"inputs": [TEXT, TEXT]}, 400, f"{TAG}input 'text_input' already exists in request"),
    (
        {"inputs": [TEXT, {**TOKENS, "datatype": "INT64"}]},
        400,
        (
            f"{TAG}inference input 'max_tokens' data-type is 'INT64', but model 'trt_like' expects"
            " 'INT32'"
        ),
    ),
    (
        {"inputs": [TEXT, {"name": "max_tokens", "shape": [], "datatype": "INT32", "data": [1]}]},
        400,
        (
            f"{TAG}unexpected shape for input 'max_tokens' for model 'trt_like'. "
            f"Expected [-1,1], got [].{NOTE}"
        ),
    ),
    (
        {"inputs": [TEXT, {**TOKENS, "shape": [1, 1], "data": [1, 2]}]},
        400,
        (
            f"{TAG}input byte size mismatch for input 'max_tokens' for model 'trt_like'. "
            "Expected 4, got 8"
        ),
    ),
    (
        {"inputs": [TEXT, TOKENS], "parameters": 1},
        500,
        "failed to get request params.: attempt to get members for non-object",
    ),
    (
        add_parameters(triton_x=1),
        400,
        (
            "parameter keys starting with 'triton_' are reserved for Triton"
            " usage and should not be specified."
        ),
    ),
    (
        add_parameters(x=[1]),
        400,
        ("parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ),
    (add_parameters(priority="a"), 500, format_parse_error("priority", UNSIGNED)),
    (add_parameters(sequence_id=1.5), 500, format_parse_error("sequence_id", UNSIGNED)),
    (add_parameters(binary_data_output=1), 500, format_parse_error("binary_data_output", BOOLEAN)),
    ({"inputs": [TEXT, TOKENS], "outputs": 1}, 500, format_parse_error("outputs", ARRAY)),
    (
        {"inputs": [TEXT, TOKENS], "outputs": [{}]},
        500,
        format_parse_error("name", "non-existing object member 'name'"),
    ),
    (
        {"inputs": [TEXT, TOKENS], "outputs": [{"name": "nope"}]},
        400,
        "unexpected inference output 'nope' for model 'trt_like'",
    ),
    (
        {
            "inputs": [TEXT, TOKENS],
            "outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}],
        },
        500,
        format_parse_error("binary_data", BOOLEAN),
    ),
    (
        {
            "inputs": [
                {
                    "name": "text_input",
                    "shape": [1, 1],
                    "datatype": "BYTES",
                    "parameters": {"shared_memory_region": "r"},
                }
            ]
        },
        400,
        "Unable to find shared memory region: 'r'",
    ),
]


@pytest.mark.parametrize(("body", "status", "text"), REFUSED)
def test_invalid_infer_request_status_and_text(
    trtllm_client: Any, body: Any, status: int, text: str
) -> None:
    response = trtllm_client.post(PATH, body)
    assert (response.status, response.error, response.kind) == (status, text, "application/json")


def test_unexpected_input_shape_is_rejected(trtllm_client: Any) -> None:
    for shape, printed in (([1], "[1]"), ([1, 1, 1], "[1,1,1]"), ([1, 2], "[1,2]")):
        response = trtllm_client.post(PATH, change_input(shape=shape, data=["a"] * shape[-1]))
        assert response.error.startswith(
            f"{TAG}unexpected shape {EXPECTED} {printed}. NOTE: Setting a"
        )


CUT: list[tuple[bytes, str]] = [
    (
        pack_texts(b"hi") + b"\2\0\0",
        (
            "unexpected size for input 'max_tokens', expecting 1 additional"
            " bytes for model 'trt_like'"
        ),
    ),
    (pack_texts(b"hi") + TWO + b"zz", "unexpected additional input data for model 'trt_like'"),
    (
        b"\x09\0\0\0hi" + TWO,
        (
            "incomplete string data for inference input 'text_input', expecting"
            " string of length 9 but only 2 bytes available"
        ),
    ),
    (
        b"\0\0\0\0hi" + TWO,
        (
            "incomplete string length indicator for inference input 'text_input',"
            " expecting 4 bytes but only 2 bytes available"
        ),
    ),
    (pack_texts(b"h\xff") + TWO, "input 'text_input' is not UTF-8"),
]


@pytest.mark.parametrize(("data", "text"), CUT)
def test_malformed_binary_tensor_data_returns_400(
    trtllm_client: Any, data: bytes, text: str
) -> None:
    response = trtllm_client.post(PATH, *make_binary({"inputs": RAW_INPUTS}, data))
    assert (response.status, response.error) == (400, text)


def test_unexpected_input_datatype_is_rejected(trtllm_client: Any) -> None:
    small = {**RAW_INPUTS[1], "datatype": "INT8"}
    response = trtllm_client.post(PATH, *make_binary({"inputs": [TEXT, small]}, TWO))
    assert response.error == (
        f"{TAG}inference input 'max_tokens' data-type is 'INT8', but model 'trt_like' expects"
        " 'INT32'"
    )


def test_partial_binary_number_returns_400(trtllm_client: Any) -> None:
    cut = {**RAW_INPUTS[1], "parameters": {"binary_data_size": 3}}
    response = trtllm_client.post(PATH, *make_binary({"inputs": [TEXT, cut]}, b"\2\0\0"))
    assert (response.status, response.error) == (
        400,
        "input 'max_tokens' has 3 bytes, which is no whole number of INT32",
    )


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("-1", "inference header size should be in range (0, 3), got: -1"),
        ("4", "inference header size should be in range (0, 3), got: 4"),
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        ("9" * 5000, f"Unable to parse Inference-Header-Content-Length, got: {'9' * 5000}"),
    ],
)
def test_invalid_inference_header_length_returns_400(
    trtllm_client: Any, header: str, text: str
) -> None:
    response = trtllm_client.post(PATH, b"{ }", {HEADER: header})
    assert (response.status, response.kind, response.error) == (400, "text/plain", text)
