"""Azure OpenAI: the profile's paths, errors, content filter fields and workers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from protocols.core.aggregate import aggregate
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import (
    ContentFiltered,
    DeadlineExceeded,
    GatewayError,
    InternalError,
    InvalidParameter,
    MalformedRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    RateLimitExceeded,
    StoredObjectNotFound,
    Unauthorized,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.events import ChoiceEnd, Embedding, Event, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import EmbeddingRequest, GenerationRequest, Message, TextPart
from protocols.openai.endpoints import OpenAI
from tests.support.path_routers import get_path_router

AZURE = OpenAI("azure")
VERSION = "api-version=2024-10-21"
CHAT = "/openai/deployments/mock/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
EVENTS = (TextDelta("a"), TextDelta("b"), ChoiceEnd("eos"), Usage(1, 2), StreamEnd())


def make_call(
    path: str, body: Any = b"", *, query: str = VERSION, method: str = "POST"
) -> ClientRequest:
    match = get_path_router(AZURE).find_endpoint(method, path)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ClientRequest(match.endpoint, match.params, {}, query, data, path)


class ModelCatalogStub:
    ready = True

    def list_models(self) -> Sequence[ModelInfo]:
        return (ModelInfo("mock", (VersionInfo("1", "m", 100),), aliases=("gpt-4o",)),)

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        raise ModelNotFound("no", model=model)


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/openai/deployments/org%2Fm1/chat/completions"])
def test_deployment_of_the_path_counts(path: str) -> None:
    call = make_call(path, {**HI, "model": "other", "stream": True})

    info = AZURE.read_routing_info(call)
    request = AZURE.decode_request(call)

    expected = "org/m1" if "org" in path else "mock"
    assert (info.model, info.stream) == (expected, True)
    assert request.model == expected


def test_body_needs_no_model_below_a_deployment() -> None:
    for path in (CHAT, "/openai/v1/deployments/mock/chat/completions"):
        call = make_call(path, HI)
        assert not AZURE.read_routing_info(call).stream
        assert AZURE.decode_request(call).model == "mock"


def test_v1_paths_have_the_model_in_the_body_and_need_no_version() -> None:
    call = make_call("/openai/v1/chat/completions", {**HI, "model": "m"}, query="")

    assert AZURE.read_routing_info(call).model == "m"


@pytest.mark.parametrize("query", ["", "api-version=", "x=1"])
def test_missing_version_is_an_unknown_path(query: str) -> None:
    with pytest.raises(PathNotFound):
        AZURE.read_routing_info(make_call(CHAT, HI, query=query))


@pytest.mark.parametrize("version", ["banana", "2024-10-21-beta", "24-10-21"])
def test_version_is_a_date(version: str) -> None:
    with pytest.raises(InvalidParameter, match="must be a date"):
        AZURE.read_routing_info(make_call(CHAT, HI, query=f"api-version={version}"))


def test_versions_of_the_future_are_accepted() -> None:
    query = "api-version=2031-01-01-preview"
    assert AZURE.read_routing_info(make_call(CHAT, HI, query=query)).model == "mock"


def test_invalid_bodies_are_rejected() -> None:
    with pytest.raises(MalformedRequest):
        AZURE.read_routing_info(make_call(CHAT, b"{"))
    with pytest.raises(InvalidParameter):
        AZURE.read_routing_info(make_call(CHAT, {**HI, "stream": "yes"}))
    with pytest.raises(UnsupportedFeature, match="data_sources"):
        AZURE.decode_request(make_call(CHAT, {**HI, "model": "m", "data_sources": []}))


def test_listings_have_models_and_deployments() -> None:
    def ask(path: str) -> Any:
        call = make_call(path, method="GET")
        return json.loads(AZURE.handle_info_request(call, ModelCatalogStub()).body)

    assert ask("/openai/models")["data"][0]["id"] == "mock"
    assert ask("/openai/deployments")["data"] == [
        {"id": "mock", "model": "mock", "object": "deployment", "status": "succeeded"},
        {"id": "gpt-4o", "model": "mock", "object": "deployment", "status": "succeeded"},
    ]
    with pytest.raises(PathNotFound):
        AZURE.handle_info_request(
            make_call("/openai/models", method="GET", query=""), ModelCatalogStub()
        )


# --- responses ------------------------------------------------------------------------------------


def encode(adapter: OpenAI, response_context: ResponseContext, path: str = CHAT) -> Any:
    call = make_call(path, {**HI, "model": "m", "prompt": "a", "input": "a"})
    return adapter.create_encoder(call, adapter.decode_request(call), response_context)


def test_response_has_the_request_id_of_azure(response_context: ResponseContext) -> None:
    for path in ("chat/completions", "completions", "embeddings"):
        encoder = encode(AZURE, response_context, f"/openai/deployments/mock/{path}")
        assert dict(encoder.headers())["apim-request-id"] == response_context.id
    assert (
        "prompt_filter_results"
        not in encode(AZURE, response_context).encode_unary(aggregate(EVENTS)).body.decode()
    )


def test_synthetic_filter_results_are_in_all_choices(response_context: ResponseContext) -> None:
    encoder = encode(OpenAI("azure", filter_results="synthetic"), response_context)

    body = json.loads(encoder.encode_unary(aggregate(EVENTS)).body)

    safe = {"filtered": False, "severity": "safe"}
    assert body["prompt_filter_results"][0]["content_filter_results"]["violence"] == safe
    assert body["choices"][0]["content_filter_results"]["hate"] == safe
    assert "apim-request-id" in dict(encoder.headers())


def test_synthetic_filter_results_begin_a_stream(response_context: ResponseContext) -> None:
    encoder = encode(OpenAI("azure", filter_results="synthetic"), response_context)
    assert encoder.encode_events([Usage(1, 2)]) == b""

    events: Sequence[Event] = EVENTS
    wire = b"".join(encoder.encode_events([event]) for event in events).decode()

    first, *others, done, end = wire.split("\n\n")
    chunk = json.loads(first.removeprefix("data: "))
    assert (chunk["choices"], chunk["prompt_filter_results"][0]["prompt_index"]) == ([], 0)

    choices = [json.loads(one.removeprefix("data: "))["choices"] for one in others]
    assert all("content_filter_results" in one[0] for one in choices if one)
    assert (done, end) == ("data: [DONE]", "")
    assert encoder.content_type.startswith("text/event-stream")
    assert b"error" in encoder.encode_error_event(WorkerFailed("x"))


def test_synthetic_filter_results_are_not_for_embeddings(response_context: ResponseContext) -> None:
    encoder = encode(
        OpenAI("azure", filter_results="synthetic"),
        response_context,
        "/openai/deployments/m/embeddings",
    )

    reply = encoder.encode_unary(aggregate([Embedding(0, (1.0,)), Usage(1), StreamEnd()]))

    assert "content_filter_results" not in reply.body.decode()


# --- errors ---------------------------------------------------------------------------------------

ERRORS: list[tuple[GatewayError, int, str, str]] = [
    (ModelNotFound("x", model="m"), 404, "DeploymentNotFound", "The API deployment"),
    (PathNotFound("x"), 404, "404", "Resource not found"),
    (MethodNotAllowed("x", allowed=("GET",)), 405, "405", "x"),
    (Unauthorized("x", missing=False), 401, "401", "Access denied due to invalid"),
    (RateLimitExceeded("x", retry_after=2), 429, "429", "Requests to the chat operation"),
    (Overloaded("x"), 503, "503", "x"),
    (WorkerUnreachable("x"), 503, "503", "x"),
    (DeadlineExceeded("x"), 504, "Timeout", "x"),
    (WorkerFailed("x"), 502, "InternalServerError", "x"),
    (InternalError("x"), 500, "InternalServerError", "x"),
    (InvalidParameter("x", param="api-version"), 400, "BadRequest", "x"),
]


@pytest.mark.parametrize(("error", "status", "code", "text"), ERRORS, ids=lambda one: str(one)[:30])
def test_error_has_a_code_of_azure(error: GatewayError, status: int, code: str, text: str) -> None:
    reply = AZURE.encode_error(error, make_call(CHAT, HI))

    body = json.loads(reply.body)["error"]
    assert (reply.status, body["code"]) == (status, code)
    assert body["message"].startswith(text)
    assert body.keys() == {"code", "message"}


def test_errors_without_a_call_are_of_azure() -> None:
    assert json.loads(AZURE.encode_error(PathNotFound("x"), None).body)["error"]["code"] == "404"

    limited = AZURE.encode_error(RateLimitExceeded("x", retry_after=2), None)
    assert b"Requests to this operation" in limited.body
    assert dict(limited.headers)["Retry-After"] == "2"


def test_error_of_a_field_is_that_of_openai() -> None:
    error = InvalidParameter("x", param="temperature", problem="above", got=3)

    body = json.loads(AZURE.encode_error(error, make_call(CHAT, HI)).body)["error"]

    assert (body["param"], body["type"]) == ("temperature", "invalid_request_error")


def test_errors_below_v1_are_those_of_openai() -> None:
    call = make_call("/openai/v1/chat/completions", HI)

    body = json.loads(AZURE.encode_error(ModelNotFound("x", model="m"), call).body)["error"]

    assert body["code"] == "model_not_found"
    assert body.keys() == {"message", "type", "param", "code"}


def test_filtered_prompt_names_the_categories_of_the_worker() -> None:
    results = {"hate": {"filtered": True, "severity": "high"}}
    inner = {"code": "ResponsibleAIPolicyViolation", "content_filter_result": results}
    text = json.dumps({"error": {"code": "content_filter", "message": "no", "innererror": inner}})

    error = AZURE.read_error(400, {}, text.encode())
    body = json.loads(AZURE.encode_error(error, make_call(CHAT, HI)).body)["error"]

    assert body == {
        "message": "no", "type": None, "param": "prompt", "code": "content_filter",
        "status": 400, "innererror": inner,
    }  # fmt: skip


def test_filtered_prompt_without_categories() -> None:
    error = AZURE.read_error(400, {}, b'{"error":{"code":"content_filter"}}')

    assert isinstance(error, ContentFiltered)

    body = json.loads(AZURE.encode_error(error, None).body)["error"]

    assert body["innererror"]["content_filter_result"] == {}


# --- workers --------------------------------------------------------------------------------------

REQUEST = GenerationRequest(
    model="gpt 4/o", kind="chat", messages=(Message("user", (TextPart("hi"),)),)
)


@pytest.mark.parametrize(
    ("options", "path", "health"),
    [
        (
            {},
            "/openai/deployments/gpt%204%2Fo/chat/completions?api-version=2024-10-21",
            "/openai/models?api-version=2024-10-21",
        ),
        (
            {"api_version": "2025-01-01-preview"},
            "/openai/deployments/gpt%204%2Fo/chat/completions?api-version=2025-01-01-preview",
            "/openai/models?api-version=2025-01-01-preview",
        ),
        ({"api_version": "v1"}, "/openai/v1/chat/completions", "/openai/v1/models"),
    ],
)
def test_worker_has_the_deployment_in_its_path(
    options: Mapping[str, Any], path: str, health: str
) -> None:
    adapter = OpenAI("azure", **options)

    assert adapter.encode_request(REQUEST).path == path
    assert adapter.health_request.path == health

    embedding = adapter.encode_request(EmbeddingRequest(model="e", inputs=("a",)))
    assert embedding.path == path.replace("gpt%204%2Fo", "e").replace(
        "chat/completions", "embeddings"
    )


def test_request_is_passed_through_to_the_deployment(response_context: ResponseContext) -> None:
    call = make_call(CHAT, {**HI, "model": "other", "temperature": 0.5})

    passed = AZURE.prepare_passthrough(AZURE, call, response_context)

    assert passed is not None

    expected = f"/openai/deployments/{response_context.backend_model}/chat/completions?{VERSION}"
    assert passed.upstream_request.path == expected
    assert dict(passed.build_headers())["apim-request-id"] == response_context.id

    from_openai = AZURE.prepare_passthrough(OpenAI(), call, response_context)
    assert from_openai is not None
    assert "apim-request-id" not in dict(from_openai.build_headers())


def test_only_azure_clients_get_the_chunks_of_an_azure_worker(
    response_context: ResponseContext,
) -> None:
    call = make_call(CHAT, {**HI, "model": "other", "stream": True})
    first = {"id": "", "object": "", "created": 0, "model": "", "choices": []}
    wire = b"data: %b\n\n" % json.dumps({**first, "prompt_filter_results": []}).encode()

    azure = AZURE.prepare_passthrough(AZURE, call, response_context)
    others = AZURE.prepare_passthrough(OpenAI(), call, response_context)

    assert azure is not None
    assert others is not None

    forwarded, _ = azure.create_reader().feed([wire])
    assert forwarded is not None
    assert b"prompt_filter_results" in forwarded
    assert others.create_reader().feed([wire])[0] == b""


@pytest.mark.parametrize(
    ("usage", "shown"),
    [
        (
            {"prompt_tokens": 1, "completion_tokens": 2},
            {"prompt_tokens": 1, "completion_tokens": 2},
        ),
        ({"prompt_tokens": 1, "completion_tokens": 2**62}, None),
        ({"prompt_tokens": 1, "details": {"reasoning_tokens": -1}}, None),
        ("2", None),
        (None, None),
    ],
)
def test_implausible_usage_does_not_reach_azure_clients(
    response_context: ResponseContext, usage: Any, shown: Any
) -> None:
    call = make_call(CHAT, {**HI, "model": "other", "stream": True})
    passed = AZURE.prepare_passthrough(AZURE, call, response_context)
    assert passed is not None

    chunk = {"id": "c", "created": 1, "model": "w", "choices": []}

    data, _ = passed.create_reader().feed(
        [b"data: %b\n\n" % json.dumps(chunk | {"usage": usage}).encode()]
    )

    assert data is not None
    assert json.loads(data[6:]) == chunk | {"usage": shown, "model": response_context.model}


def test_broken_usage_ends_in_an_error(response_context: ResponseContext) -> None:
    call = make_call(CHAT, {**HI, "model": "other", "stream": True})
    passed = AZURE.prepare_passthrough(AZURE, call, response_context)

    assert passed is not None
    with pytest.raises(GatewayError):
        passed.create_reader().feed([b'data: {"usage": {"prompt\n\n'])


def test_request_is_translated_where_the_gateway_changes_it(
    response_context: ResponseContext,
) -> None:
    call = make_call(CHAT, {**HI, "model": "other"})
    own_data = make_call(CHAT, {**HI, "model": "other", "data_sources": []})

    assert AZURE.prepare_passthrough(AZURE, own_data, response_context) is None

    synthetic = OpenAI("azure", filter_results="synthetic")
    assert AZURE.prepare_passthrough(synthetic, call, response_context) is None


# --- the Responses API below /openai/v1 -----------------------------------------------------------


def test_responses_api_is_below_v1_and_has_the_errors_of_openai() -> None:
    adapter = OpenAI("azure")
    paths = {one.operation: one.path for one in adapter.endpoints if "responses" in one.path}
    assert paths["response"] == "/openai/v1/responses"
    assert paths["response cancellation"] == "/openai/v1/responses/{response_id}/cancel"

    endpoint = next(one for one in adapter.endpoints if one.operation == "response")
    call = ClientRequest(endpoint, {}, {}, "", b'{"model":"m","input":"hi"}', endpoint.path)
    request = adapter.decode_request(call)

    assert isinstance(request, GenerationRequest)
    assert [message.role for message in request.messages] == ["user"]

    error = StoredObjectNotFound("no", id="r", param="previous_response_id")
    body = json.loads(adapter.encode_error(error, call).body)
    assert body["error"]["code"] == "previous_response_not_found"
