"""The tensor endpoint, for text: JSON and raw bytes, either way. Seen from a running server."""

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
def trt(client_of: Callable[..., Any]) -> Any:
    return client_of("trtllm")


def packed(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def raw(head: dict[str, Any], *data: bytes) -> tuple[bytes, dict[str, str]]:
    text = msgspec.json.encode(head)
    return text + b"".join(data), {HEADER: str(len(text))}


RAW_INPUTS = [
    {"name": "text_input", "shape": [1, 1], "datatype": "BYTES",
     "parameters": {"binary_data_size": 6}},
    {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32",
     "parameters": {"binary_data_size": 4}},
]  # fmt: skip
TWO = b"\x02\0\0\0"


def test_json_in_and_out(trt: Any) -> None:
    said = trt.post(PATH, {"id": "x", "inputs": [TEXT, TOKENS]})
    assert (said.status, said.kind) == (200, "application/json")
    assert said.body == (
        b'{"id":"x","model_name":"trt_like","model_version":"1","outputs":[{"name":"text_output",'
        b'"datatype":"BYTES","shape":[1,1],"data":["hi w0 w1"]}]}'
    )


def test_bytes_in_and_out(trt: Any) -> None:
    head = {"id": "b", "inputs": RAW_INPUTS, "parameters": {"binary_data_output": True}}
    said = trt.post(PATH, *raw(head, packed(b"hi"), TWO))
    expected = (
        b'{"id":"b","model_name":"trt_like","model_version":"1","outputs":[{"name":"text_output",'
        b'"datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":12}}]}'
    )
    assert (said.status, said.kind) == (200, "application/octet-stream")
    assert said.headers["Inference-Header-Content-Length"] == str(len(expected))
    assert said.body == expected + packed(b"hi w0 w1")


def test_json_and_bytes_may_be_mixed(trt: Any) -> None:
    counted = {"name": "return_num_output_tokens", "shape": [1, 1], "datatype": "BOOL",
               "parameters": {"binary_data_size": 1}}  # fmt: skip
    head = {
        "inputs": [TEXT, RAW_INPUTS[1], counted],
        "outputs": [
            {"name": "num_output_tokens", "parameters": {"binary_data": True}},
            {"name": "text_output"},
        ],
        "parameters": {"binary_data_output": True},
    }
    said = trt.post(PATH, *raw(head, TWO, b"\1"))
    head_length = int(said.headers["Inference-Header-Content-Length"])
    assert msgspec.json.decode(said.body[:head_length])["outputs"] == [
        {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": ["hi w0 w1"]},
        {"name": "num_output_tokens", "datatype": "INT32", "shape": [1, 1],
         "parameters": {"binary_data_size": 4}},
    ]  # fmt: skip
    assert said.body[head_length:] == TWO


def test_only_wanted_outputs_come(trt: Any) -> None:
    counted = {"name": "return_num_output_tokens", "shape": [1, 1], "datatype": "BOOL",
               "data": [True]}  # fmt: skip
    for outputs, names in (
        ([], ["text_output", "num_output_tokens"]),
        ([{"name": "num_output_tokens"}], ["num_output_tokens"]),
        ([{"name": "text_output"}, {"name": "text_output"}], ["text_output"]),
        ([{"name": "cum_log_probs"}], []),
    ):
        body = {"inputs": [TEXT, TOKENS, counted], "outputs": outputs}
        found = msgspec.json.decode(trt.post(PATH, body).body)
        assert [one["name"] for one in found["outputs"]] == names


def test_a_batch(trt: Any) -> None:
    inputs = [{**one, "shape": [2, 1], "data": one["data"] * 2} for one in (TEXT, TOKENS, QUIET)]  # type: ignore[operator]
    outputs = msgspec.json.decode(trt.post(PATH, {"inputs": inputs}).body)["outputs"]
    assert outputs == [
        {"name": "text_output", "datatype": "BYTES", "shape": [2, 1], "data": [" w0 w1"] * 2}
    ]


def test_what_nobody_knows_is_left_out(trt: Any) -> None:
    flag = {"name": "return_log_probs", "shape": [1, 1], "datatype": "BOOL", "data": [True]}
    found = msgspec.json.decode(trt.post(PATH, {"inputs": [TEXT, TOKENS, flag]}).body)
    assert [one["name"] for one in found["outputs"]] == ["text_output"]


def test_the_tokens_of_a_batch_s_prompts_are_counted_together(trt: Any) -> None:
    flag = {"name": "return_num_input_tokens", "shape": [2, 1], "datatype": "BOOL",
            "data": [True, True]}  # fmt: skip
    inputs = [{**TEXT, "shape": [2, 1], "data": ["a", "b"]},
              {**TOKENS, "shape": [2, 1], "data": [1, 1]}, flag]  # fmt: skip
    outputs = msgspec.json.decode(trt.post(PATH, {"inputs": inputs}).body)["outputs"]
    assert outputs[1] == {
        "name": "num_input_tokens", "datatype": "INT32", "shape": [1, 1], "data": [4],
    }  # fmt: skip


def test_the_decoupled_profile_has_shapes_without_a_batch(client: Any) -> None:
    body = {"inputs": [{**TEXT, "shape": [1]}], "parameters": {"max_tokens": 1, "n": 2}}
    outputs = msgspec.json.decode(client.post("/v2/models/vllm_like/infer", body).body)["outputs"]
    assert outputs == [
        {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["hi w0", "hi w0"]}
    ]
    said = client.post("/v2/models/vllm_like/infer", {"inputs": [TEXT]})
    assert said.error == (
        f"{TAG}unexpected shape for input 'text_input' for model 'vllm_like'. Expected [1], got"
        " [1,1]."
    )


def test_a_body_may_be_the_only_input_and_nothing_else(client_of: Callable[..., Any]) -> None:
    said = client_of("plain").post("/v2/models/vllm_like/infer", b"hi", {HEADER: "0"})
    assert said.kind == "application/octet-stream"
    assert said.body.endswith(b"}" + packed(b" w0 w1 w2"))
    refused = client_of("trtllm").post(PATH, b"hi", {HEADER: "0"})
    assert (refused.status, refused.error) == (
        400,
        (
            f"{TAG}Raw request must only have 1 input (found 1) to be deduced but got 30 inputs in"
            " 'trt_like' model configuration"
        ),
    )


def test_priority_and_timeout_have_a_meaning_here(trt: Any) -> None:
    body = {
        "inputs": [TEXT, TOKENS],
        "parameters": {"priority": 900, "timeout": 1_500_000, "sequence_id": "s", "x": 1},
    }
    request = trt.decode(body, "infer", "trt_like")
    assert (request.priority, request.timeout) == (255, 1.5)
    assert request.extra == {"x": msgspec.Raw(b"1")}
    nothing = {"inputs": [TEXT, TOKENS], "parameters": {"priority": 0, "timeout": 0}}
    request = trt.decode(nothing, "infer", "trt_like")
    assert (request.priority, request.timeout) == (None, None)


def test_ragged_log_probabilities_are_filled_up(trt: Any, describe: Callable[..., Any]) -> None:
    flag = {"name": "return_log_probs", "shape": [1, 1], "datatype": "BOOL", "data": [True]}
    many = {"name": "num_return_sequences", "shape": [1, 1], "datatype": "INT32", "data": [2]}
    call = trt.call(PATH, {"inputs": [TEXT, TOKENS, flag, many]}, method="POST")
    of = trt.dialect.create_encoder(call, trt.dialect.decode_request(call), describe("trt_like"))
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


def test_written_in_pieces_it_comes_at_the_end(trt: Any, describe: Callable[..., Any]) -> None:
    call = trt.call(PATH, {"inputs": [TEXT, TOKENS]}, method="POST")
    of = trt.dialect.create_encoder(call, trt.dialect.decode_request(call), describe("trt_like"))
    assert of.encode_events([TextDelta("x")]) == b""
    assert of.encode_events([ChoiceEnd("eos"), Usage(1, 1), StreamEnd()]).endswith(
        b'"data":["x"]}]}'
    )
    assert of.encode_error_event(WorkerFailed("no")) == b'{"error":"no"}'
    assert of.headers() == ()


def test_a_compressed_body_arrives_without_its_compression(trt: Any) -> None:
    body = {"inputs": [TEXT, TOKENS]}
    assert trt.post(PATH, body, {"content-encoding": "gzip"}).status == 200
    said = trt.post(PATH, body, {"content-encoding": "br"})
    assert (said.status, said.kind, said.error) == (
        501, "text/plain", "Unsupported compression type",
    )  # fmt: skip


def _with(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**TEXT, **changes}, TOKENS]}


def _parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": [TEXT, TOKENS], "parameters": parameters}


def unparsable(name: str, what: str) -> str:
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
    (b"[]", 500, unparsable("inputs", "non-existing object member 'inputs'")),
    ({}, 500, unparsable("inputs", "non-existing object member 'inputs'")),
    ({"inputs": 1}, 500, unparsable("inputs", ARRAY)),
    ({"id": 5}, 500, unparsable("id", STRING)),
    ({"inputs": [1]}, 400, f"{ONE_SOURCE} no field is set"),
    ({"inputs": [{}]}, 400, f"{ONE_SOURCE} no field is set"),
    (_with(parameters={"binary_data_size": 6}), 400, f"{ONE_SOURCE} set 'data' 'binary_data_size'"),
    (_with(name=5), 500, unparsable("name", STRING)),
    ({"inputs": [{"data": [1]}]}, 500, unparsable("name", "non-existing object member 'name'")),
    (_with(datatype=5), 500, unparsable("datatype", STRING)),
    (_with(datatype="XX"), 400, "invalid datatype for input text_input"),
    (_with(datatype="FP32"), 500, unparsable("data", "JSON non-number as double")),
    (_with(shape=1), 500, unparsable("shape", ARRAY)),
    (_with(shape=[-1, 1]), 500, unparsable("shape", UNSIGNED)),
    (_with(shape=[1.5, 1]), 500, unparsable("shape", UNSIGNED)),
    (_with(data="hi"), 500, unparsable("data", ARRAY)),
    (_with(data=[5]), 500, f"Unable to parse JSON bytes array: attempt to access {STRING}"),
    (_with(data=["a", "b"]), 400,
     f"{TAG}unexpected number of string elements 2 for inference {THERE}, expecting 1"),
    (_with(data=[]), 400, f"{TAG}expected 1 string elements for inference {THERE}, got 0"),
    (_with(shape=[2, 1]), 400,
     f"{TAG}input 'text_input' batch size does not match other inputs for 'trt_like'"),
    (_with(name="zzz"), 400, "unexpected inference input 'zzz' for model 'trt_like'"),
    ({"inputs": [TEXT, TEXT]}, 400, f"{TAG}input 'text_input' already exists in request"),
    ({"inputs": [TEXT, {**TOKENS, "datatype": "INT64"}]}, 400,
     (f"{TAG}inference input 'max_tokens' data-type is 'INT64', but model 'trt_like' expects"
      " 'INT32'")),
    ({"inputs": [TEXT, {"name": "max_tokens", "shape": [], "datatype": "INT32", "data": [1]}]}, 400,
     (f"{TAG}unexpected shape for input 'max_tokens' for model 'trt_like'. Expected [-1,1], got []."
     f"{NOTE}")),
    ({"inputs": [TEXT, {**TOKENS, "shape": [1, 1], "data": [1, 2]}]}, 400,
     (f"{TAG}input byte size mismatch for input 'max_tokens' for model 'trt_like'. Expected 4,"
      " got 8")),
    ({"inputs": [TEXT, TOKENS], "parameters": 1}, 500,
     "failed to get request params.: attempt to get members for non-object"),
    (_parameters(triton_x=1), 400, ("parameter keys starting with 'triton_' are reserved for Triton"
     " usage and should not be specified.")),
    (_parameters(x=[1]), 400, ("parameter 'x' has invalid type. It should be either 'int', 'bool',"
     " or 'string'.")),
    (_parameters(priority="a"), 500, unparsable("priority", UNSIGNED)),
    (_parameters(sequence_id=1.5), 500, unparsable("sequence_id", UNSIGNED)),
    (_parameters(binary_data_output=1), 500, unparsable("binary_data_output", BOOLEAN)),
    ({"inputs": [TEXT, TOKENS], "outputs": 1}, 500, unparsable("outputs", ARRAY)),
    ({"inputs": [TEXT, TOKENS], "outputs": [{}]}, 500,
     unparsable("name", "non-existing object member 'name'")),
    ({"inputs": [TEXT, TOKENS], "outputs": [{"name": "nope"}]}, 400,
     "unexpected inference output 'nope' for model 'trt_like'"),
    ({"inputs": [TEXT, TOKENS],
      "outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]}, 500,
     unparsable("binary_data", BOOLEAN)),
    ({"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES",
                  "parameters": {"shared_memory_region": "r"}}]}, 400,
     "Unable to find shared memory region: 'r'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "text"), REFUSED)
def test_what_is_wrong(trt: Any, body: Any, status: int, text: str) -> None:
    said = trt.post(PATH, body)
    assert (said.status, said.error, said.kind) == (status, text, "application/json")


def test_a_shape_that_is_not_the_model_s(trt: Any) -> None:
    for shape, printed in (([1], "[1]"), ([1, 1, 1], "[1,1,1]"), ([1, 2], "[1,2]")):
        said = trt.post(PATH, _with(shape=shape, data=["a"] * shape[-1]))
        assert said.error.startswith(f"{TAG}unexpected shape {EXPECTED} {printed}. NOTE: Setting a")


CUT: list[tuple[bytes, str]] = [
    (packed(b"hi") + b"\2\0\0", ("unexpected size for input 'max_tokens', expecting 1 additional"
     " bytes for model 'trt_like'")),
    (packed(b"hi") + TWO + b"zz", "unexpected additional input data for model 'trt_like'"),
    (b"\x09\0\0\0hi" + TWO, ("incomplete string data for inference input 'text_input', expecting"
     " string of length 9 but only 2 bytes available")),
    (b"\0\0\0\0hi" + TWO, ("incomplete string length indicator for inference input 'text_input',"
     " expecting 4 bytes but only 2 bytes available")),
    (packed(b"h\xff") + TWO, "input 'text_input' is not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "text"), CUT)
def test_bytes_that_are_no_tensors(trt: Any, data: bytes, text: str) -> None:
    said = trt.post(PATH, *raw({"inputs": RAW_INPUTS}, data))
    assert (said.status, said.error) == (400, text)


def test_a_type_that_no_input_has(trt: Any) -> None:
    small = {**RAW_INPUTS[1], "datatype": "INT8"}
    said = trt.post(PATH, *raw({"inputs": [TEXT, small]}, TWO))
    assert said.error == (
        f"{TAG}inference input 'max_tokens' data-type is 'INT8', but model 'trt_like' expects"
        " 'INT32'"
    )


def test_a_number_cut_in_two(trt: Any) -> None:
    cut = {**RAW_INPUTS[1], "parameters": {"binary_data_size": 3}}
    said = trt.post(PATH, *raw({"inputs": [TEXT, cut]}, b"\2\0\0"))
    assert (said.status, said.error) == (
        400, "input 'max_tokens' has 3 bytes, which is no whole number of INT32",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("-1", "inference header size should be in range (0, 3), got: -1"),
        ("4", "inference header size should be in range (0, 3), got: 4"),
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
    ],
)
def test_a_header_that_lies(trt: Any, header: str, text: str) -> None:
    said = trt.post(PATH, b"{ }", {HEADER: header})
    assert (said.status, said.kind, said.error) == (400, "text/plain", text)
