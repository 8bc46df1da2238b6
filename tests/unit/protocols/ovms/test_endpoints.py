"""Paths, statuses and model lists."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gateway.routing.paths import AdapterMount, PathRouter
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import (
    ClientError,
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    InternalError,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimitExceeded,
    RequestTooLarge,
    StreamBroken,
    Unauthorized,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.ovms.endpoints import OVMS


class ModelCatalogStub:
    """A catalog of two models, the second of which is not ready."""

    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready
        up, down = VersionInfo("1", "m-a", 100), VersionInfo("1", "m-b", 100, ready=False)
        self._models = [
            ModelInfo("llama3", (up,), aliases=("llama",), created=7),
            ModelInfo("gone", (down,)),
        ]

    def list_models(self) -> Sequence[ModelInfo]:
        return self._models

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        for info in self._models:
            if model in (info.name, *info.aliases):
                return info
        raise ModelNotFound("no", model=model)


def test_adapter_name_path_prefixes_and_profiles() -> None:
    adapter = AdapterMount(OVMS()).adapter
    assert adapter.name == "ovms"
    assert adapter.path_prefixes == ("/v3",)
    with pytest.raises(ValueError, match="2026, 2024"):
        OVMS("2025")


def test_v1_and_kserve_paths_are_optional() -> None:
    def tops(adapter: OVMS) -> set[str]:
        return {endpoint.path.split("/")[1] for endpoint in adapter.endpoints}

    assert tops(OVMS()) == {"v3"}
    assert tops(OVMS(v1=True, kserve=True)) == {"v3", "v1", "v2"}
    assert OVMS(v1=True, kserve=True).path_prefixes == ("/v3", "/v1", "/v2")


REFUSALS: list[tuple[GatewayError, int, str]] = [
    (
        ModelNotFound("m", model="m"),
        404,
        "Mediapipe graph definition with requested name is not found",
    ),
    (PathNotFound("p"), 400, "Invalid request URL"),
    (PathNotFound("p", method="PUT"), 406, "Unsupported method"),
    (MethodNotAllowed("m", allowed=("GET", "POST")), 406, "Unsupported method"),
    (
        Unauthorized("u", missing=True),
        500,
        "Unauthorized request due to invalid or missing api-key",
    ),
    (
        Forbidden("m", model="m"),
        404,
        "Mediapipe graph definition with requested name is not found",
    ),
    (RequestTooLarge("too much", limit=9), 413, "too much"),
    (RateLimitExceeded("slow"), 429, "slow"),
    (QuotaExceeded("spent"), 429, "spent"),
    (Overloaded("busy"), 503, "Server is not ready"),
    (WorkerUnreachable("away"), 503, "Server is not ready"),
    (InternalError("bug"), 500, "bug"),
]
INSIDE: list[tuple[GatewayError, str]] = [
    (
        ContextTooLong("long", tokens=20, limit=8),
        "Number of prompt tokens: 20 exceeds model max length: 8",
    ),
    (ContextTooLong("long"), "long"),
    (UnsupportedFeature("can't", param="tools"), "can't"),
    (ContentFiltered("won't"), "won't"),
    (WorkerFailed("failed"), "failed"),
    (StreamBroken("cut"), "cut"),
    (DeadlineExceeded("late"), "late"),
    (ClientError("odd"), "odd"),
]


@pytest.mark.parametrize(("error", "status", "text"), REFUSALS)
def test_error_status_and_text(error: GatewayError, status: int, text: str) -> None:
    reply = OVMS().encode_error(error, None)
    assert (reply.status, msgspec.json.decode(reply.body)) == (status, {"error": text})
    assert ("Content-Type", "application/json") in reply.headers


@pytest.mark.parametrize(("error", "inner"), INSIDE)
def test_graph_error_text(error: GatewayError, inner: str) -> None:
    reply = OVMS().encode_error(error, None)
    text = msgspec.json.decode(reply.body)["error"]

    assert reply.status == 400
    assert text == (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "LLMExecutor" failed: {inner}'
    )


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(RateLimitExceeded("slow", retry_after=1.2), "2"), (Overloaded("busy", retry_after=0.1), "1")],
)
def test_retry_after_header_is_rounded_up(error: GatewayError, seconds: str) -> None:
    assert ("Retry-After", seconds) in OVMS().encode_error(error, None).headers


def test_error_of_a_streaming_request_has_the_stream_content_type(make: Any) -> None:
    """The header is sent before the graph runs; its error is then a plain JSON object."""
    body = {"model": "llama3", "stream": True}
    reply = OVMS().encode_error(UnsupportedFeature("x"), make("/v3/chat/completions", body))
    assert (reply.status, reply.headers) == (400, (("Content-Type", "text/event-stream"),))
    assert reply.body.startswith(b'{"error":"Mediapipe')

    gateway = OVMS().encode_error(ModelNotFound("m", model="m"), make("/v3/chat/completions", body))
    assert gateway.headers == (("Content-Type", "application/json"),)


@pytest.mark.parametrize("path", ["/v3/chat/completions", "/v3/nope", "/v3/a/b", "/v1/embeddings"])
def test_get_is_an_info_request_and_put_returns_406(path: str) -> None:
    adapter = OVMS(v1=True)
    paths = PathRouter([AdapterMount(adapter)])

    match = paths.find_endpoint("GET", path)

    assert match.endpoint.task == "inform"
    with pytest.raises(MethodNotAllowed) as excinfo:
        paths.find_endpoint("PUT", path)
    assert adapter.encode_error(excinfo.value, None).status == 406


def test_get_on_chat_completions_is_an_invalid_url(make: Any) -> None:
    adapter = OVMS()
    call = make("/v3/chat/completions", method="GET")
    with pytest.raises(PathNotFound) as excinfo:
        adapter.handle_info_request(call, ModelCatalogStub())

    reply = adapter.encode_error(excinfo.value, call)
    assert (reply.status, reply.body) == (400, b'{"error":"Invalid request URL"}')


def test_model_list_and_model_entry(make: Any) -> None:
    adapter = OVMS()
    listed = adapter.handle_info_request(make("/v3/models", method="GET"), ModelCatalogStub())
    one = b'{"id":"llama3","object":"model","created":7,"owned_by":"OVMS"}'

    assert listed.body == b'{"data":[' + one + b'],"object":"list"}'
    assert (
        adapter.handle_info_request(
            make("/v3/models/llama3", method="GET"), ModelCatalogStub()
        ).body
        == one
    )

    alias = adapter.handle_info_request(
        make("/v3/models/llama", method="GET"), ModelCatalogStub()
    ).body
    assert alias == one.replace(b"llama3", b"llama")


def test_model_name_in_path_may_contain_a_slash(make: Any) -> None:
    call = make("/v3/models/org/m1", method="GET")
    with pytest.raises(ModelNotFound) as excinfo:
        OVMS().handle_info_request(call, ModelCatalogStub())
    assert excinfo.value.model == "org/m1"


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_kserve_infer_returns_model_not_found(make: Any, version: str) -> None:
    adapter = OVMS(kserve=True)
    call = make(f"/v2/models/llama3{version}/infer")

    with pytest.raises(ModelNotFound) as excinfo:
        adapter.handle_info_request(call, ModelCatalogStub())
    assert adapter.encode_error(excinfo.value, call).status == 404
    with pytest.raises(MethodNotAllowed):
        PathRouter([AdapterMount(adapter)]).find_endpoint(
            "GET", f"/v2/models/llama3{version}/infer"
        )


@pytest.mark.parametrize("name", ["nope", "gone"])
def test_unknown_or_unavailable_model_returns_500(make: Any, name: str) -> None:
    adapter = OVMS()
    call = make(f"/v3/models/{name}", method="GET")
    with pytest.raises(ModelNotFound) as excinfo:
        adapter.handle_info_request(call, ModelCatalogStub())

    reply = adapter.encode_error(excinfo.value, call)
    assert (reply.status, reply.body) == (500, b'{"error":"Model not found"}')


@pytest.mark.parametrize(
    ("path", "ready", "status", "body"),
    [
        ("/v2", True, 200, b'{"name":"OpenVINO Model Server","version":"2026"}'),
        ("/v2/health/live", False, 200, b""),
        ("/v2/health/ready", True, 200, b""),
        ("/v2/health/ready", False, 503, b'{"error":"Server is not ready"}'),
        ("/v2/models/llama3/ready", True, 200, b""),
        ("/v2/models/llama3/versions/1/ready", True, 200, b""),
        ("/v2/models/gone/ready", True, 503, b'{"error":"Server is not ready"}'),
    ],
)
def test_server_metadata_and_health_endpoints(
    make: Any, path: str, ready: bool, status: int, body: bytes
) -> None:
    call = make(path, method="GET")
    assert call.endpoint.public is ("/models/" not in path)

    reply = OVMS(kserve=True).handle_info_request(call, ModelCatalogStub(ready=ready))
    assert (reply.status, reply.body) == (status, body)


def test_field_names_map_internal_paths_to_wire_names(make: Any) -> None:
    names = OVMS().field_names(make("/v3/completions"))
    assert names["sampling.beam_width"] == "best_of"
    assert names["stopping.stop"] == "stop"
    assert names["stopping.include_stop"] == "include_stop_str_in_output"
