"""Keys of an infer request that the gateway does not know, with their place."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.core.catalog import ModelInfo
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import ClientRequest
from protocols.triton.endpoints import Triton
from tests.support.path_routers import get_path_router

TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
OUTPUT = {"name": "text_output", "parameters": {"binary_data": False, "y": 3}}
BODY = {
    "later": 1,
    "inputs": [{**TENSOR, "parameters": {"x": 2}}],
    "outputs": [OUTPUT],
    "parameters": {"z": 4},
}
LOST = ["later", "inputs[0].parameters.x", "outputs[0].parameters.y"]


def decode(adapter: Triton, body: Any = BODY, model: ModelInfo | None = None) -> Any:
    path = "/v2/models/m/infer"
    match = get_path_router(adapter).find_endpoint("POST", path)
    call = ClientRequest(match.endpoint, match.params, {}, "", msgspec.json.encode(body), path, "r")
    return adapter.decode_request(call, model).bind_target("w", "triton")


def test_unknown_keys_of_tensors_and_beside_them_are_reported_to_other_workers() -> None:
    _, losses = remove_extra_fields(decode(Triton("vllm")))

    assert [one.field for one in losses] == LOST


@pytest.mark.parametrize("profile", Triton.profiles)
def test_they_reach_the_same_tensors_of_a_worker(profile: str) -> None:
    adapter = Triton(profile)
    request = decode(Triton("vllm"))

    wire = adapter.encode_request(request)
    body = msgspec.json.decode(wire.body)

    assert wire.path == "/v2/models/w/infer"
    assert body["later"] == 1
    assert body["inputs"][0] == {**TENSOR, "shape": [1, 1], "parameters": {"x": 2}}
    assert body["outputs"][0] == {"name": "text_output", "parameters": {"y": 3}}
    assert adapter.get_kept_keys(request) is None
    assert not {*LOST} & {one.field for one in adapter.unsupported_parameters(request, {})}


def test_they_are_reported_where_a_model_may_stream_and_so_takes_no_tensors() -> None:
    adapter = Triton("vllm")
    request = replace(decode(adapter), stream=True)

    losses = [one.field for one in adapter.unsupported_parameters(request, {})]

    assert [one for one in losses if one in LOST] == LOST[1:]
    assert adapter.encode_request(request).path.endswith("/generate_stream")


def test_parameters_of_embeddings_reach_a_worker() -> None:
    adapter = Triton("vllm")
    tensor = {**TENSOR, "shape": [1, 1]}
    request = decode(adapter, {"inputs": [tensor], "parameters": {"z": 4}}, EMBEDDING)

    assert msgspec.json.decode(adapter.encode_request(request).body)["parameters"] == {"z": 4}
    assert adapter.unsupported_parameters(request, {}) == ()


EMBEDDING = ModelInfo("m", (), "embedding")
