"""Paths, error codes, and the list of endpoints."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.paths import AdapterMount
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import (
    ClientDisconnected,
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
    VersionNotFound,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import RoutingInfo
from protocols.databricks import listing
from protocols.databricks.endpoints import Databricks

AB = ModelInfo(
    "ep-ab",
    (VersionInfo("m-a", "llama-3-8b", 80), VersionInfo("m-b", "mock", 20, ready=False)),
    created=1700000000,
)
EMB = ModelInfo(
    "ep-emb",
    (VersionInfo("1", "gte", 100, ready=False),),
    task="embedding",
    protocol_options={"databricks": {"pay_per_token": True}},
)


class ModelCatalogStub:
    ready = True

    def list_models(self) -> Sequence[ModelInfo]:
        return [AB, EMB]

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        for info in self.list_models():
            if model == info.name:
                return info
        raise ModelNotFound("no", model=model)


def test_adapter_name_path_prefixes_and_options() -> None:
    adapter = AdapterMount(Databricks()).adapter
    assert adapter.name == "databricks"
    assert adapter.path_prefixes == (
        "/serving-endpoints",
        "/api/2.0",
        "/ai-gateway",
        "/.well-known",
    )
    with pytest.raises(ValueError, match="it has 2026"):
        Databricks("1999")
    with pytest.raises(ValueError, match="strict or lenient"):
        Databricks(role_rules="loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt or flat"):
        Databricks(completion_index="both")  # type: ignore[arg-type]
    assert adapter.model_options == {"pay_per_token": bool}  # type: ignore[attr-defined]


NO_ENDPOINT = (
    "The given endpoint does not exist, please retry after checking the specified model and "
    "version deployment exists."
)


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (ClientError("odd"), 400, "BAD_REQUEST", "odd"),
        (UnsupportedFeature("can't", param="n"), 400, "INVALID_PARAMETER_VALUE", "can't"),
        (ContentFiltered("won't"), 400, "BAD_REQUEST", "won't"),
        (
            ContextTooLong("long", tokens=20, limit=8),
            400,
            "BAD_REQUEST",
            "Bad request: the prompt has 20 tokens, the model's limit is 8",
        ),
        (ContextTooLong("long"), 400, "BAD_REQUEST", "long"),
        (Unauthorized("no key", missing=True), 401, "UNAUTHENTICATED", "no key"),
        (Forbidden("m", model="m"), 404, "RESOURCE_DOES_NOT_EXIST", NO_ENDPOINT),
        (QuotaExceeded("spent"), 403, "PERMISSION_DENIED", "spent"),
        (ModelNotFound("m", model="m"), 404, "RESOURCE_DOES_NOT_EXIST", NO_ENDPOINT),
        (
            VersionNotFound("v", model="m", version="3"),
            404,
            "RESOURCE_DOES_NOT_EXIST",
            NO_ENDPOINT,
        ),
        (PathNotFound("p"), 404, "ENDPOINT_NOT_FOUND", "p"),
        (MethodNotAllowed("m", allowed=("POST",)), 405, "BAD_REQUEST", "m"),
        (RequestTooLarge("big", limit=1), 413, "BAD_REQUEST", "big"),
        (RateLimitExceeded("slow"), 429, "REQUEST_LIMIT_EXCEEDED", "slow"),
        (ClientDisconnected("gone"), 499, "CANCELLED", "gone"),
        (InternalError("bug"), 500, "INTERNAL_ERROR", "bug"),
        (WorkerFailed("failed"), 500, "INTERNAL_ERROR", "failed"),
        (StreamBroken("cut"), 500, "INTERNAL_ERROR", "cut"),
        (Overloaded("busy"), 503, "TEMPORARILY_UNAVAILABLE", "busy"),
        (WorkerUnreachable("away"), 503, "TEMPORARILY_UNAVAILABLE", "away"),
        (DeadlineExceeded("late"), 504, "DEADLINE_EXCEEDED", "late"),
    ],
)
def test_error_status_code_and_message(
    error: GatewayError, status: int, code: str, message: str
) -> None:
    reply = Databricks().encode_error(error, None)
    assert reply.status == status

    body = msgspec.json.decode(reply.body)
    assert list(body.items()) == [("error_code", code), ("message", message)]

    headers = dict(reply.headers)
    assert headers["Content-Type"] == "application/json"
    assert ("Retry-After" in headers) == (status in (429, 503))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RateLimitExceeded("slow", retry_after=2.0), "2"),
        (RateLimitExceeded("slow", retry_after=1.2), "2"),
        (RateLimitExceeded("slow"), "1"),
        (Overloaded("busy", retry_after=0.2), "1"),
        (WorkerUnreachable("away"), "1"),
    ],
)
def test_retry_after_header_is_rounded_up(error: GatewayError, seconds: str) -> None:
    assert dict(Databricks().encode_error(error, None).headers)["Retry-After"] == seconds


def test_method_not_allowed_has_an_allow_header() -> None:
    reply = Databricks().encode_error(MethodNotAllowed("m", allowed=("GET", "POST")), None)
    assert dict(reply.headers)["Allow"] == "GET, POST"


def fetch_info(make: Any, path: str) -> Any:
    call = make(path, method="GET")
    reply = Databricks().handle_info_request(call, ModelCatalogStub())
    assert reply.status == 200
    return msgspec.json.decode(reply.body)


@pytest.mark.parametrize("path", ["/api/2.0/serving-endpoints", "/api/2.0/serving-endpoints/"])
def test_serving_endpoint_list(make: Any, path: str) -> None:
    listed = fetch_info(make, path)
    assert list(listed) == ["endpoints"]

    first, second = listed["endpoints"]
    assert (first["name"], first["task"]) == ("ep-ab", "llm/v1/chat")
    assert first["state"] == {"ready": "READY", "config_update": "NOT_UPDATING"}
    assert first["creation_timestamp"] == 1700000000000

    entities = first["config"]["served_entities"]
    assert [(e["name"], e["entity_name"]) for e in entities] == [
        ("m-a", "llama-3-8b"),
        ("m-b", "mock"),
    ]
    assert "traffic_config" not in first["config"]
    assert (second["task"], second["state"]["ready"]) == ("llm/v1/embeddings", "NOT_READY")
    assert second["config"]["served_entities"][0]["foundation_model"]["name"] == "gte"


def test_serving_endpoint_details(make: Any) -> None:
    details = fetch_info(make, "/api/2.0/serving-endpoints/ep-ab")
    assert details["config"]["traffic_config"] == {
        "routes": [
            {"served_model_name": "m-a", "served_entity_name": "m-a", "traffic_percentage": 80},
            {"served_model_name": "m-b", "served_entity_name": "m-b", "traffic_percentage": 20},
        ]
    }

    states = [e["state"]["deployment"] for e in details["config"]["served_entities"]]
    assert states == ["DEPLOYMENT_READY", "DEPLOYMENT_RECOVERING"]
    assert details["permission_level"] == "CAN_QUERY"

    call = make("/api/2.0/serving-endpoints/nope", method="GET")
    with pytest.raises(ModelNotFound):
        Databricks().handle_info_request(call, ModelCatalogStub())


def test_endpoint_without_versions_has_no_routes() -> None:
    details = listing.build_endpoint_details(ModelInfo("empty", ()))
    assert msgspec.to_builtins(details.config)["traffic_config"] == {"routes": []}
    assert details.state.ready == "NOT_READY"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=15).filter(any))
def test_traffic_percentages_are_integers_that_sum_to_100(weights: list[int]) -> None:
    total = sum(weights)
    versions = tuple(
        VersionInfo(str(i), "m", round(100 * weight / total)) for i, weight in enumerate(weights)
    )
    traffic = listing.build_endpoint_details(ModelInfo("m", versions)).config.traffic_config

    assert isinstance(traffic, msgspec.Struct)

    shares = [route.traffic_percentage for route in traffic.routes]
    assert sum(shares) == 100
    assert all(0 <= share <= 100 for share in shares)


@pytest.mark.parametrize("root", ["/serving-endpoints", "/ai-gateway/mlflow/v1"])
def test_openai_model_list(make: Any, root: str) -> None:
    listed = fetch_info(make, f"{root}/models")
    assert listed["object"] == "list"
    assert [one["id"] for one in listed["data"]] == ["ep-ab", "ep-emb"]
    assert set(listed["data"][0]) == {"id", "object", "created", "owned_by"}


def test_databricks_config_endpoint_is_public(make: Any) -> None:
    call = make("/.well-known/databricks-config", method="GET")
    assert call.endpoint.public
    assert fetch_info(make, "/.well-known/databricks-config") == {}


def test_served_model_in_path_selects_the_version(make: Any) -> None:
    body: dict[str, Any] = {"messages": []}
    named = make("/serving-endpoints/ep-ab/served-models/m%2Fb/invocations", body)
    plain = make("/serving-endpoints/ep-ab/invocations", body)

    assert Databricks().read_routing_info(named) == RoutingInfo("ep-ab", "m/b")
    assert Databricks().read_routing_info(plain) == RoutingInfo("ep-ab")


def test_field_names_map_internal_paths_to_wire_names(make: Any) -> None:
    names = Databricks().field_names(make("/serving-endpoints/m/invocations"))
    assert names["stopping.max_tokens"] == "max_tokens"
    assert names["sampling.top_k"] == "top_k"
    assert names["stopping.overflow"] == "error_behavior"
    assert names["suffix"] == "suffix"
