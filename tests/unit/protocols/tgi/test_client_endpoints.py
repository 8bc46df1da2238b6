"""Paths, metadata, tokenization and errors."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import aggregate
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import (
    ClientDisconnected,
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidParameter,
    MalformedRequest,
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
from protocols.core.events import StreamEnd, TokenList
from protocols.core.interfaces import ResponseContext
from protocols.core.request import TokenizeRequest
from protocols.tgi import TGI
from tests.unit.protocols.tgi.conftest import MakeCall

UP = VersionInfo("1", "a", 100)
MODELS = [
    ModelInfo("one", (UP,), created=7, context_length=4096),
    ModelInfo("vec", (UP,), task="embedding"),
]


class CatalogStub:
    """A catalog of these models."""

    def __init__(self, models: Sequence[ModelInfo] = MODELS, *, ready: bool = True) -> None:
        self.ready = ready
        self._models = models

    def list_models(self) -> Sequence[ModelInfo]:
        return self._models

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        for info in self._models:
            if info.name == model:
                return info
        raise ModelNotFound("no", model=model)


def ask(call: Any, adapter: TGI | None = None) -> Any:
    response = (adapter or TGI()).handle_info_request(call, CatalogStub())
    assert response.status == 200
    return msgspec.json.decode(response.body)


def test_v1_paths_are_optional() -> None:
    assert any(one.path.startswith("/v1") for one in TGI().endpoints)
    assert not any(one.path.startswith("/v1") for one in TGI(v1=False).endpoints)


def test_info_describes_the_model_of_the_listener(make: MakeCall) -> None:
    call = make("/info", method="GET")

    first = ask(call)
    assert (first["model_id"], first["max_total_tokens"], first["max_input_tokens"]) == (
        "one", 4096, 4095,
    )  # fmt: skip

    second = ask(call, TGI(model="vec", max_best_of=3, max_stop_sequences=9))
    assert (second["model_id"], second["model_pipeline_tag"]) == ("vec", "feature-extraction")
    assert (second["max_best_of"], second["max_stop_sequences"]) == (3, 9)
    assert second["max_total_tokens"] is None


def test_info_without_models_is_an_error(make: MakeCall) -> None:
    with pytest.raises(ModelNotFound):
        TGI().handle_info_request(make("/info", method="GET"), CatalogStub([]))


def test_health_is_that_of_the_gateway(make: MakeCall) -> None:
    for path in ("/health", "/ping"):
        call = make(path, method="GET")
        assert call.endpoint.public
        assert TGI().handle_info_request(call, CatalogStub()).body == b""
        response = TGI().handle_info_request(call, CatalogStub(ready=False))
        assert (response.status, response.body) == (
            503, b'{"error":"unhealthy","error_type":"healthcheck"}',
        )  # fmt: skip


def test_models_are_listed(make: MakeCall) -> None:
    first, _ = ask(make("/v1/models", method="GET"))["data"]

    assert first == {"id": "one", "object": "model", "created": 7, "owned_by": "gateway"}


def test_tokens_have_offsets_in_bytes(make: MakeCall, response_context: ResponseContext) -> None:
    adapter, call = TGI(model="m"), make("/tokenize", {"inputs": "hé du"})
    request = adapter.decode_request(call)
    tokens = TokenList((104, 195, 169, 9), ("h", "", "é", " du"))

    encoder = adapter.create_encoder(call, request, response_context)
    response = encoder.encode_unary(aggregate([tokens, StreamEnd()]))

    assert isinstance(request, TokenizeRequest)
    assert (request.prompt, request.return_texts) == ("hé du", True)

    assert msgspec.json.decode(response.body) == [
        {"id": 104, "text": "h", "start": 0, "stop": 1},
        {"id": 195, "text": "", "start": 1, "stop": 2},
        {"id": 169, "text": "é", "start": 2, "stop": 3},
        {"id": 9, "text": " du", "start": 3, "stop": 6},
    ]


def test_tokens_without_all_their_texts_are_a_failure(
    make: MakeCall, response_context: ResponseContext
) -> None:
    adapter, call = TGI(model="m"), make("/tokenize", {"inputs": "ab"})
    encoder = adapter.create_encoder(call, adapter.decode_request(call), response_context)

    ids_only = aggregate([TokenList((97, 98)), StreamEnd()])

    with pytest.raises(WorkerFailed, match="did not send the text of each token"):
        encoder.encode_unary(ids_only)


def test_limits_are_checked(make: MakeCall) -> None:
    adapter = TGI(model="m", max_stop_sequences=1)
    call = make("/generate", {"inputs": "a", "parameters": {"stop": ["a", "b"]}})

    with pytest.raises(InvalidParameter) as excinfo:
        adapter.decode_request(call)

    text = "Input validation error: `stop` supports up to 1 stop sequences. Given: 2"
    assert msgspec.json.decode(adapter.encode_error(excinfo.value, call).body)["error"] == text


def test_ranges_have_the_texts_of_the_server(make: MakeCall) -> None:
    call = make("/generate", {"inputs": "a", "parameters": {"best_of": 3}})

    with pytest.raises(InvalidParameter) as excinfo:
        TGI().decode_request(call)

    text = "Input validation error: `best_of` must be > 0 and <= 2. Given: 3"
    assert msgspec.json.decode(TGI().encode_error(excinfo.value, call).body)["error"] == text


def test_range_of_a_parameter_without_a_text_of_its_own(make: MakeCall) -> None:
    call = make("/generate", {"inputs": "a", "parameters": {"seed": -1}})

    with pytest.raises(InvalidParameter) as excinfo:
        TGI().decode_request(call)

    body = msgspec.json.decode(TGI().encode_error(excinfo.value, call).body)
    assert body["error"] == "Input validation error: 'seed' must be at least 0, got -1"


ERRORS: list[tuple[GatewayError, int, str, str]] = [
    (MalformedRequest("x"), 400, "x", "validation"),
    (UnsupportedFeature("x"), 422, "x", "validation"),
    (ContextTooLong("x", tokens=9, limit=8), 422,
     "Input validation error: `inputs` must have less than 8 tokens. Given: 9", "validation"),
    (ContextTooLong("x"), 422, "x", "validation"),
    (ModelNotFound("x", model="m"), 404, "x", "not_found"),
    (PathNotFound("x"), 404, "x", "not_found"),
    (MethodNotAllowed("x", allowed=("GET",)), 405, "x", "method_not_allowed"),
    (RequestTooLarge("x", limit=1), 413, "x", "validation"),
    (Unauthorized("x", missing=True), 401, "unauthorized", "authentication"),
    (RateLimitExceeded("x", retry_after=1.5), 429, "Model is overloaded", "overloaded"),
    (QuotaExceeded("x"), 429, "Model is overloaded", "overloaded"),
    (ClientDisconnected("x"), 499, "x", "generation"),
    (Overloaded("x"), 503, "Model is overloaded", "overloaded"),
    (WorkerUnreachable("x"), 503, "Model is overloaded", "overloaded"),
    (DeadlineExceeded("x"), 504, "Request failed during generation: timeout", "generation"),
    (StreamBroken("x"), 500, "Incomplete generation", "incomplete_generation"),
    (WorkerFailed("x"), 424, "Request failed during generation: x", "generation"),
    (InternalError("x"), 500, "x", "internal"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "status", "text", "kind"), ERRORS, ids=lambda one: str(one)[:40])
def test_error_has_a_text_and_a_type(
    error: GatewayError, status: int, text: str, kind: str
) -> None:
    response = TGI().encode_error(error, None)

    assert response.status == status
    assert msgspec.json.decode(response.body) == {"error": text, "error_type": kind}


def test_error_headers_have_retry_advice() -> None:
    def headers(error: GatewayError) -> dict[str, str]:
        return dict(TGI().encode_error(error, None).headers)

    assert headers(MethodNotAllowed("x", allowed=("GET",)))["Allow"] == "GET"
    assert headers(Unauthorized("x", missing=True))["WWW-Authenticate"] == "Bearer"
    assert headers(RateLimitExceeded("x", retry_after=1.5))["Retry-After"] == "2"
    assert headers(WorkerUnreachable("x"))["Retry-After"] == "1"


def test_field_names_are_those_of_the_client(make: MakeCall) -> None:
    adapter = TGI()

    assert adapter.field_names(make("/generate", {}))["logprobs.top"] == "details"
    assert adapter.field_names(make("/v1/chat/completions", {}))["output"] == "response_format"
    assert adapter.field_names(make("/tokenize", {})) == {}


def test_openapi_describes_v1_only_where_it_is_served() -> None:
    assert {"generate", "chat"} <= TGI().openapi_fragment().operations.keys()

    fragment = TGI(v1=False).openapi_fragment()
    assert "chat" not in fragment.operations
    assert "GenerateResponse" in fragment.schemas
