"""The metadata endpoints of the server and its models."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

INPUTS = [
    ("text_input", "BYTES"), ("stream", "BOOL"), ("sampling_parameters", "BYTES"),
    ("exclude_input_in_output", "BOOL"), ("return_finish_reason", "BOOL"),
    ("return_num_output_tokens", "BOOL"),
]  # fmt: skip


def test_server_metadata(client: Any) -> None:
    response = client.get("/v2")
    server = msgspec.json.decode(response.body)

    assert list(server) == ["name", "version", "extensions"]
    assert server["name"] == "triton"
    assert "binary_tensor_data" in server["extensions"]
    assert response.kind == "application/json"


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health_response_body_is_empty(client_of: Callable[..., Any], path: str) -> None:
    response = client_of().get(path)
    assert (response.status, response.body, response.kind) == (200, b"", "text/plain")
    assert client_of(status="sane").get(path).kind == "application/json"


def test_draining_gateway_is_live_and_not_ready(client: Any) -> None:
    client.catalog.ready = False
    assert client.get("/v2/health/live").status == 200

    response = client.get("/v2/health/ready")
    assert (response.status, response.body) == (400, b"")


@pytest.mark.parametrize("path", ["/v2/models/vllm_like", "/v2/models/vllm_like/versions/01"])
def test_model_metadata(client: Any, path: str) -> None:
    model = msgspec.json.decode(client.get(path).body)
    assert list(model) == ["name", "versions", "platform", "inputs", "outputs"]
    assert (model["name"], model["versions"], model["platform"]) == ("vllm_like", ["1"], "python")
    assert model["inputs"][:6] == [
        {"name": name, "datatype": datatype, "shape": [1]} for name, datatype in INPUTS
    ]
    assert model["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": [-1]}


def test_model_metadata_of_a_batching_model(client_of: Callable[..., Any]) -> None:
    model = msgspec.json.decode(client_of("trtllm").get("/v2/models/trt_like").body)
    assert model["inputs"][:2] == [
        {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [-1, 1]},
    ]


def test_model_config(client_of: Callable[..., Any]) -> None:
    config = msgspec.json.decode(client_of("trtllm").get("/v2/models/trt_like/config").body)
    assert (config["name"], config["max_batch_size"]) == ("trt_like", 4)
    assert config["input"][1] == {
        "name": "max_tokens", "data_type": "TYPE_INT32", "format": "FORMAT_NONE", "dims": [1],
        "optional": False,
    }  # fmt: skip
    assert config["model_transaction_policy"] == {"decoupled": False}

    vllm = msgspec.json.decode(client_of().get("/v2/models/vllm_like/config").body)
    assert (vllm["backend"], vllm["model_transaction_policy"]) == ("vllm", {"decoupled": True})
    assert vllm["input"][0]["data_type"] == "TYPE_STRING"


READY = [
    ("/v2/models/vllm_like/ready", 200),
    ("/v2/models/vllm_like/versions/1/ready", 200),
    ("/v2/models/vllm_like/versions/9/ready", 400),
    ("/v2/models/asleep/ready", 400),
    ("/v2/models/nope/ready", 400),
]


@pytest.mark.parametrize(("path", "status"), READY)
def test_model_ready_status(client: Any, path: str, status: int) -> None:
    response = client.get(path)
    body = b"" if status == 200 else b'{"error":"Model version not ready"}'
    assert (response.status, response.body, response.kind) == (status, body, "text/plain")


STATS = [
    ("/v2/models/vllm_like/stats", 200, b'{"model_stats":[{"name":"vllm_like","version":"1"}]}'),
    ("/v2/models/stats", 200,
     (b'{"model_stats":[{"name":"named","version":"1"},{"name":"trt_like","version":"1"},'
     b'{"name":"vllm_like","version":"1"}]}')),
    ("/v2/models/asleep/stats", 400, b'{"error":"requested model \'asleep\' is not available"}'),
    ("/v2/models/vllm_like/versions/9/stats", 400,
     b'{"error":"requested model version is not available for model \'vllm_like\'"}'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "status", "body"), STATS)
def test_model_statistics(client: Any, path: str, status: int, body: bytes) -> None:
    response = client.get(path)
    assert (response.status, response.body) == (status, body)


READY_MODELS = (
    b'{"name":"named","version":"1","state":"READY"},'
    b'{"name":"trt_like","version":"1","state":"READY"},'
    b'{"name":"vllm_like","version":"1","state":"READY"}'
)
ASLEEP = b'{"name":"asleep","version":"1","state":"UNAVAILABLE","reason":"no worker can answer"},'
INDEX = [
    (b"", b"[" + ASLEEP + READY_MODELS + b"]"),
    (b"{}", b"[" + ASLEEP + READY_MODELS + b"]"),
    (b"[]", b"[" + ASLEEP + READY_MODELS + b"]"),
    (b'{"ready":false}', b"[" + ASLEEP + READY_MODELS + b"]"),
    (b'{"ready":true}', b"[" + READY_MODELS + b"]"),
]


@pytest.mark.parametrize(("body", "listed"), INDEX)
def test_repository_index(client: Any, body: bytes, listed: bytes) -> None:
    for path in ("/v2/repository/index", "/v2/repository/any/index"):
        response = client.post(path, body)
        assert (response.status, response.body) == (200, listed)


@pytest.mark.parametrize("body", [b'{"ready":1}', b'{"ready":null}'])
def test_repository_index_requires_a_boolean_ready_field(
    client_of: Callable[..., Any], body: bytes
) -> None:
    for status, code in (("strict", 500), ("sane", 400)):
        response = client_of(status=status).post("/v2/repository/index", body)
        assert response.status == code
        assert response.error == "attempt to access JSON non-boolean as boolean"


def test_model_without_workers_has_no_available_versions(client: Any) -> None:
    for path in ("/v2/models/asleep", "/v2/models/asleep/config"):
        response = client.get(path)
        assert response.status == 404
        assert response.error == "Request for unknown model: 'asleep' has no available versions"
    response = client.get("/v2/models/asleep/versions/1")

    assert response.status == 503
    assert response.error == "Request for unknown model: 'asleep' version 1 is not at ready state"


def test_model_load_and_unload_are_rejected(client: Any) -> None:
    for what in ("load", "unload"):
        response = client.post(f"/v2/repository/models/vllm_like/{what}")
        assert response.status == 503
        assert response.error == (
            "explicit model load / unload is not allowed if polling is enabled"
        )
    response = client.post("/v2/repository/models/nope/unload")

    assert (response.status, response.body, response.kind) == (200, b"", "application/json")
    assert client.post("/v2/repository/models/nope/load", b"{").status == 500


@pytest.mark.parametrize("what", ["load", "unload"])
def test_named_repository_returns_501(client: Any, what: str) -> None:
    response = client.post(f"/v2/repository/r/models/nope/{what}")
    assert response.status == 501
    assert response.error == "'repository_name' specification is not supported"


@pytest.mark.parametrize("kind", ["systemsharedmemory", "cudasharedmemory"])
def test_shared_memory_endpoints_are_empty_or_404(client: Any, kind: str) -> None:
    assert client.get(f"/v2/{kind}/status").body == b"[]"
    for path in ("region/r/register", "unregister", "region/r/unregister"):
        assert client.post(f"/v2/{kind}/{path}").status == 404
    assert client.get(f"/v2/{kind}/region/r/status").status == 404


@pytest.mark.parametrize(
    "path",
    ["/v2/", "/v2/health/live/", "/v2/models/vllm_like/", "/v2/models/vllm_like/versions/x/ready",
     "/v2/models/", "/v2/logging"],
)  # fmt: skip
def test_inexact_paths_return_404(client: Any, path: str) -> None:
    response = client.get(path)
    assert (response.status, response.kind, response.body) == (
        404,
        "text/plain",
        b'{"error":"Not Found"}',
    )
