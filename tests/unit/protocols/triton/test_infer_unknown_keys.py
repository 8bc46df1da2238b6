"""Keys of an infer request that no worker gets are reported with their place."""

import msgspec

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import ClientRequest
from protocols.triton.endpoints import Triton


def test_unknown_keys_of_tensors_and_beside_them_are_reported() -> None:
    adapter = Triton("vllm")
    path = "/v2/models/m/infer"
    match = PathRouter([AdapterMount(adapter)]).find_endpoint("POST", path)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    body = {
        "later": 1,
        "inputs": [{**tensor, "parameters": {"x": 2}}],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": False, "y": 3}}],
    }
    call = ClientRequest(match.endpoint, match.params, {}, "", msgspec.json.encode(body), path, "r")

    _, losses = remove_extra_fields(adapter.decode_request(call))

    assert [one.field for one in losses] == [
        "later",
        "inputs[0].parameters.x",
        "outputs[0].parameters.y",
    ]
