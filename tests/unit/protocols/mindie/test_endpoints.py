"""Paths, profiles, statuses and metadata endpoints."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import (
    ClientDisconnected,
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
    RequestNotFound,
    RequestTooLarge,
    StreamBroken,
    Unauthorized,
    UnsupportedEncoding,
    UnsupportedFeature,
    VersionNotFound,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.interfaces import ClientAdapter, HttpResponse
from protocols.core.request import GenerationRequest
from protocols.mindie.endpoints import MindIE

GENERATE = "/v2/models/nope/generate"
CHAT = "/v1/chat/completions"
CLOSE = ("Connection", "close")
JSON = ("Content-Type", "application/json")
STAMPS = (("RequestUUID", "r1"), ("startTime", "1707275960000000000"))


class ModelCatalogStub:
    """A catalog of one model."""

    def __init__(self, *, ready: bool = True, up: bool = True) -> None:
        self.ready = ready
        versions = (VersionInfo("1", "served", 100, ready=up),)
        self._model = ModelInfo("llama", versions, aliases=("l",), created=7, context_length=4096)

    def list_models(self) -> Sequence[ModelInfo]:
        return [self._model]

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        if model not in ("llama", "l"):
            raise ModelNotFound("no such model", model=model)
        return self._model


def encode_error_response(
    bench: Any, error: GatewayError, path: str = GENERATE, body: Any = b""
) -> HttpResponse:
    one = bench()
    reply: HttpResponse = one.adapter.encode_error(error, one.call(path, body))
    return reply


# --- profiles -------------------------------------------------------------------------------------


def test_profiles_are_accepted_and_unknown_ones_rejected() -> None:
    adapter: ClientAdapter = MindIE()
    assert adapter.name == "mindie"
    assert MindIE.profiles == ("2x", "1x", "rc1")

    for profile in MindIE.profiles:
        MindIE(profile)
    with pytest.raises(ValueError, match=r"'3x' is not a profile of mindie; accepted: 2x, 1x, rc1"):
        MindIE("3x")


@pytest.mark.parametrize(
    ("path", "body", "model", "stream"),
    [
        ("/v2/models/m/generate", b"{", "m", False),
        ("/v2/models/m.1-a_B/generate_stream", b"{", "m.1-a_B", True),
        ("/v2/models/m/infer", b"{", "m", False),
        (CHAT, {"model": "m"}, "m", False),
        (CHAT, {"model": "m", "stream": True}, "m", True),
        (CHAT, {"model": "m", "stream": "x"}, "m", False),
        ("/v1/completions", {"model": "m", "stream": True}, "m", True),
    ],
)
def test_routing_info_is_read_from_path_or_body(
    bench: Any, path: str, body: Any, model: str, stream: bool
) -> None:
    """If the path names the model, the body is not read."""
    one = bench()
    envelope = one.adapter.read_routing_info(one.call(path, body))
    assert (envelope.model, envelope.stream, envelope.version) == (model, stream, None)


@pytest.mark.parametrize("name", ["a%2Fb", "m@1", "m%20n", "%E4%BD%A0"])
def test_invalid_model_name_in_path_raises_path_not_found(bench: Any, name: str) -> None:
    one = bench()
    for method, path in (
        ("POST", f"/v2/models/{name}/generate"),
        ("POST", f"/v2/models/{name}/stopInfer"),
    ):
        with pytest.raises(PathNotFound):
            one.adapter.read_routing_info(one.call(path, {"id": "a"}, method=method))
    with pytest.raises(PathNotFound):
        one.adapter.handle_info_request(
            one.call(f"/v2/models/{name}", method="GET"), ModelCatalogStub()
        )


def test_version_in_path_raises_path_not_found(bench: Any) -> None:
    with pytest.raises(PathNotFound):
        bench().call("/v2/models/m/versions/1/generate")


def test_stop_infer_echoes_the_body_and_unknown_id_is_404(bench: Any) -> None:
    one = bench()
    call = one.call("/v2/models/m/stopInfer", {"id": "a123", "x": 1})
    assert call.endpoint.task == "stop"
    assert one.adapter.read_routing_info(call).client_id == "a123"
    assert one.adapter.handle_info_request(call, ModelCatalogStub()).body == b'{"id":"a123","x":1}'

    reply = one.adapter.encode_error(RequestNotFound("no such request", id="a123"), call)
    assert reply.status == 404
    assert reply.body == b'{"error":"RequestId is a123 not found.","error_type":"NotFoundError"}'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Failed to parse context to json body."),
        ({}, "Not found id."),
        ({"id": None}, "id must not be null."),
        ({"id": 5}, "id must be string type."),
        (
            {"id": "a b"},
            (
                "The id can contain only digits, letters, underscores(_), hyphens(-) and no more "
                "than 256 words in length."
            ),
        ),
    ],
)
def test_invalid_stop_infer_body_returns_422(bench: Any, body: Any, message: str) -> None:
    assert bench().refused("/v2/models/m/stopInfer", body) == (422, message)


def test_request_without_id_gets_a_generated_client_id(bench: Any) -> None:
    """The request has the id that the response shows."""
    request = bench().decode(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert isinstance(request, GenerationRequest)
    assert request.client_id == "endpoint_common_0"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (ModelNotFound("", model="nope"), 404, "NotFoundError", "Model nope not found."),
        (UnsupportedFeature("can't"), 422, "Input Validation Error", "can't"),
        (
            ContextTooLong("too long"),
            424,
            "Generation Error",
            "Failed to enqueue inferRequest. too long",
        ),
        (ContentFiltered("no"), 400, "Bad Request", "no"),
        (ClientDisconnected("left"), 400, "Bad Request", "left"),
        (Unauthorized("who?", missing=True), 401, "Unauthorized", "who?"),
        (Forbidden("", model="nope"), 404, "NotFoundError", "Model nope not found."),
        (Overloaded("busy"), 503, "Service Unavailable", "busy"),
        (WorkerUnreachable("no worker"), 503, "Service Unavailable", "no worker"),
        (
            DeadlineExceeded(""),
            500,
            "Incomplete Generation",
            "Engine callback timeout: server e2eTimeout",
        ),
        (
            DeadlineExceeded("", which="first_token"),
            500,
            "Incomplete Generation",
            "Engine callback timeout: server tokenTimeout",
        ),
        (WorkerFailed("10.0.0.1"), 500, "Incomplete Generation", "Failed to get engine response."),
        (StreamBroken("cut"), 500, "Incomplete Generation", "Failed to get engine response."),
        (GatewayError("?"), 500, "Incomplete Generation", "?"),
    ],
)
def test_error_status_and_error_type(
    bench: Any, error: GatewayError, status: int, kind: str, message: str
) -> None:
    reply = encode_error_response(bench, error)
    assert reply.status == status
    assert reply.body == msgspec.json.encode({"error": message, "error_type": kind})
    assert reply.headers[:2] == (JSON, CLOSE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"parameters": {"timeout": 3}}, "client timeout"),
        ({"parameters": {}}, "server e2eTimeout"),
        ({"parameters": 5}, "server e2eTimeout"),
        (b"{", "server e2eTimeout"),
    ],
)
def test_deadline_error_names_client_or_server_timeout(bench: Any, body: Any, message: str) -> None:
    reply = encode_error_response(bench, DeadlineExceeded(""), body=body)
    assert msgspec.json.decode(reply.body)["error"] == f"Engine callback timeout: {message}"


def test_unknown_model_in_body_returns_422(bench: Any) -> None:
    for path in (CHAT, "/v1/completions"):
        for error in (
            ModelNotFound("", model="x"),
            VersionNotFound("", model="x", version="2"),
        ):
            reply = encode_error_response(bench, error, path, {})
            assert reply.status == 422
            assert reply.body == (
                b'{"error":"Got model x, but not found in server",'
                b'"error_type":"Input Validation Error"}'
            )


@pytest.mark.parametrize(
    "error",
    [
        PathNotFound("?"),
        MethodNotAllowed("?", allowed=("GET",)),
        VersionNotFound("", model="m", version="2"),
    ],
)
def test_unknown_path_method_or_version_returns_404_without_body(
    bench: Any, error: GatewayError
) -> None:
    assert encode_error_response(bench, error) == HttpResponse(404, b"", (CLOSE, *STAMPS))
    assert bench().adapter.encode_error(PathNotFound("?"), None) == HttpResponse(404, b"", (CLOSE,))


@pytest.mark.parametrize(("limit", "shown"), [(8 << 20, b"8"), (1 << 19, b"0.5")])
def test_request_too_large_returns_413_with_limit(bench: Any, limit: int, shown: bytes) -> None:
    reply = encode_error_response(bench, RequestTooLarge("", limit=limit))
    assert reply.status == 413

    message = b"Request body too large. Maximum allowed size is " + shown + b"MB."
    assert reply.body == b'{"message":"' + message + b'"}'


def test_request_too_large_without_a_known_limit_keeps_its_text(bench: Any) -> None:
    reply = encode_error_response(bench, RequestTooLarge("the prompt is too large", limit=None))
    assert (reply.status, reply.body) == (413, b'{"message":"the prompt is too large"}')


def test_internal_error_is_plain_text_with_json_content_type(bench: Any) -> None:
    reply = encode_error_response(bench, InternalError("secret"))
    assert (reply.status, reply.body) == (500, b"Server internal error")
    assert JSON in reply.headers


@pytest.mark.parametrize("error", [RateLimitExceeded("slow"), QuotaExceeded("slow")])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (GENERATE, b'{"error":"slow","code":429}'),
        (CHAT, b'{"error":{"message":"slow","type":"server_error","code":429}}'),
        ("/generate", b'{"error":"slow","error_type":"overloaded"}'),
        ("/", b'{"error":"slow","error_type":"overloaded"}'),
    ],
)
def test_rate_limit_body_depends_on_the_endpoint(
    bench: Any, error: GatewayError, path: str, message: bytes
) -> None:
    reply = encode_error_response(bench, error, path)
    assert (reply.status, reply.body) == (429, message)


def test_retry_after_header_is_rounded_up(bench: Any) -> None:
    after = ("Retry-After", "2")
    assert encode_error_response(bench, RateLimitExceeded("", retry_after=1.5)).headers == (
        JSON,
        CLOSE,
        after,
        *STAMPS,
    )
    assert encode_error_response(bench, Overloaded("", retry_after=2.0)).headers == (
        JSON,
        CLOSE,
        after,
        *STAMPS,
    )


# --- metadata -------------------------------------------------------------------------------------


def fetch_info(
    bench: Any, path: str, models: ModelCatalogStub | None = None, **options: Any
) -> Any:
    one = bench(**options)
    reply = one.adapter.handle_info_request(
        one.call(path, method="GET"), models or ModelCatalogStub()
    )
    assert reply.status == 200
    assert reply.headers == (JSON, CLOSE, *STAMPS)
    return msgspec.json.decode(reply.body)


def test_server_metadata(bench: Any) -> None:
    assert fetch_info(bench, "/v2") == {
        "name": "MindIE Server",
        "version": "2.0.0",
        "extensions": {
            "max_iter_times": 512,
            "prefill_policy_type": 0,
            "decode_policy_type": 0,
            "max_prefill_batch_size": 50,
            "max_prefill_tokens": 8192,
        },
    }
    assert fetch_info(bench, "/v2", max_iter_times=9)["extensions"]["max_iter_times"] == 9


def test_model_metadata_and_config(bench: Any) -> None:
    tensor = {"shape": [-1], "datatype": "UINT32"}
    assert fetch_info(bench, "/v2/models/l") == {
        "name": "l",
        "platform": "MindIE Server",
        "inputs": [{"name": "input0"} | tensor],
        "outputs": [{"name": "output0"} | tensor],
    }

    config = fetch_info(bench, "/v2/models/llama/config")
    assert list(config) == [
        *("model_name", "input_datatype", "output_datatype", "max_seq_len", "npu_mem_size"),
        *("cpu_mem_size", "world_size", "model_weight_path", "model_instance_type"),
    ]
    assert (config["max_seq_len"], config["npu_mem_size"]) == (4096, -1)


def test_slot_count_is_zero_when_not_ready(bench: Any) -> None:
    path = "/v2/models/llama/getSlotCount"
    free = fetch_info(bench, path)

    assert list(free) == ["total_slots", "free_slots", "available_tokens_length"]
    assert free["free_slots"] > 0
    for models in (ModelCatalogStub(up=False), ModelCatalogStub(ready=False)):
        assert fetch_info(bench, path, models)["free_slots"] == 0


def test_info_describes_the_model(bench: Any) -> None:
    info = fetch_info(bench, "/info")
    assert info["models"] == [
        {
            "model_device_type": "npu",
            "model_dtype": "float16",
            "model_id": "llama",
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
            "max_total_tokens": 4096,
        }
    ]
    assert list(info)[:4] == [
        *("docker_label", "max_batch_total_tokens", "max_best_of", "max_concurrent_requests")
    ]
    assert info["max_input_length"] == 4096


def test_model_list_and_model_entry(bench: Any) -> None:
    entry = {"id": "llama", "object": "model", "created": 7, "owned_by": "MindIE Server"}
    assert fetch_info(bench, "/v1/models") == {"object": "list", "data": [entry]}
    assert fetch_info(bench, "/v1/models/llama") == entry
    assert fetch_info(bench, "/v1/models/l")["id"] == "l"


def test_info_request_for_unknown_model_raises_model_not_found(bench: Any) -> None:
    one = bench()
    for path in ("/v1/models/x", "/v2/models/x", "/v2/models/x/ready", "/v2/models/x/config"):
        with pytest.raises(ModelNotFound):
            one.adapter.handle_info_request(one.call(path, method="GET"), ModelCatalogStub())


STOPPED = b'{"error":"The service has been stopped.","error_type":"Service Unavailable"}'


@pytest.mark.parametrize(
    ("path", "down"),
    [
        ("/v2/health/live", 200),
        ("/v2/health/ready", 503),
        ("/health", 503),
        ("/v2/models/llama/ready", 503),
    ],
)
def test_health_endpoints_report_liveness_and_readiness(bench: Any, path: str, down: int) -> None:
    """It is live until it stops, and ready when a worker is."""
    one = bench()
    call = one.call(path, method="GET")
    assert call.endpoint.public is ("/models/" not in path)
    assert one.adapter.handle_info_request(call, ModelCatalogStub()) == HttpResponse(
        200, b"", (CLOSE, *STAMPS)
    )
    assert one.adapter.handle_info_request(call, ModelCatalogStub(up=False)) == HttpResponse(
        down, b"", (CLOSE, *STAMPS)
    )

    stopping = one.adapter.handle_info_request(call, ModelCatalogStub(ready=False))
    assert (stopping.status, stopping.body) == (503, STOPPED)


@pytest.mark.parametrize(
    ("probe", "status", "body"),
    [
        ("timed", 200, b'{"status":"healthy"}'),
        ("timed-1", 200, b'{"status":"healthy"}'),
        ("timed-600", 200, b'{"status":"healthy"}'),
        *[
            (
                probe,
                404,
                (
                    b'{"error":"Wait time should be in range of [1, 600], input is not valid",'
                    b'"error_type":"NotFoundError"}'
                ),
            )
            for probe in ("timed-0", "timed-601", "timed-000")
        ],
        *[
            (
                probe,
                404,
                (
                    b'{"error":"Max wait time is 600, input is invalid or too long",'
                    b'"error_type":"NotFoundError"}'
                ),
            )
            for probe in ("timed-0001", f"timed-{10**30}")
        ],
    ],
)
def test_the_timed_health_check_answers_for_valid_wait_times(
    bench: Any, probe: str, status: int, body: bytes
) -> None:
    one = bench()
    call = one.call(f"/health/{probe}", method="GET")
    assert call.endpoint.public

    up = one.adapter.handle_info_request(call, ModelCatalogStub())
    down = one.adapter.handle_info_request(call, ModelCatalogStub(up=False))
    stopping = one.adapter.handle_info_request(call, ModelCatalogStub(ready=False))

    assert (up.status, up.body) == (status, body)
    assert (down.status, down.body) == (503, b"")
    assert (stopping.status, stopping.body) == (200, b'{"status":"healthy"}')


@pytest.mark.parametrize(
    "probe", ["timed-", "timed-x", "timed--1", "timed1", "info", "timed-\u0661"]
)
def test_other_paths_below_the_health_check_are_unknown(bench: Any, probe: str) -> None:
    one = bench()
    call = one.call(f"/health/{probe}", method="GET")

    with pytest.raises(PathNotFound) as excinfo:
        one.adapter.handle_info_request(call, ModelCatalogStub())
    assert one.adapter.encode_error(excinfo.value, call).status == 404


def test_unknown_content_encoding_is_an_unsupported_media_type(bench: Any) -> None:
    reply = encode_error_response(bench, UnsupportedEncoding("not br"))

    assert reply.status == 415
    assert msgspec.json.decode(reply.body) == {
        "error": "not br",
        "error_type": "Unsupported Media Type",
    }
