"""Paths, model names, model lists and errors."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.core.catalog import (
    ModelFeatures,
    ModelInfo,
    ModelState,
    ModelWeights,
    VersionInfo,
)
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
    RateLimitExceeded,
    RequestTooLarge,
    Unauthorized,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.ollama import Ollama
from tests.unit.protocols.ollama.conftest import MakeCall

HI = [{"role": "user", "content": "hi"}]


class CatalogStub:
    """A catalog of three models, the second of which is not ready."""

    ready = True

    def __init__(self) -> None:
        up, down = VersionInfo("1", "a", 100), VersionInfo("1", "b", 100, ready=False)
        self._models = [
            ModelInfo("Llama3", (up,), aliases=("llama",), created=7, context_length=4096),
            ModelInfo("gone:7b", (down,)),
            ModelInfo("org/vec", (up,), task="embedding"),
        ]

    def list_models(self) -> Sequence[ModelInfo]:
        return self._models

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        raise ModelNotFound("no", model=model)


def ask(call: Any, adapter: Ollama | None = None) -> Any:
    response = (adapter or Ollama()).handle_info_request(call, CatalogStub())
    assert response.status == 200
    return msgspec.json.decode(response.body)


def test_unknown_profile_is_rejected() -> None:
    assert Ollama("0.9").name == "ollama"
    with pytest.raises(ValueError, match=r"known: 0\.9"):
        Ollama("1")


def test_root_and_version_need_no_key(make: MakeCall) -> None:
    for method in ("GET", "HEAD"):
        root, version = make("/", method=method), make("/api/version", method=method)
        assert root.endpoint.public
        assert version.endpoint.public
        response = Ollama().handle_info_request(root, CatalogStub())
        assert response.body == b"Ollama is running"
    assert ask(make("/api/version", method="GET"), Ollama(version="1.2.3")) == {"version": "1.2.3"}


def test_root_is_optional() -> None:
    assert "/" in {one.path for one in Ollama().endpoints}
    assert "/" not in {one.path for one in Ollama(root=False).endpoints}


def test_tags_lists_names_with_a_tag(make: MakeCall) -> None:
    first, second, third = ask(make("/api/tags", method="GET"))["models"]

    assert (first["name"], first["model"]) == ("Llama3:latest", "Llama3:latest")
    assert first["modified_at"] == "1970-01-01T00:00:07Z"
    assert len(first["digest"]) == 64
    assert first["capabilities"] == ["completion", "tools"]
    assert second["name"] == "gone:7b"
    assert (third["name"], third["capabilities"]) == ("org/vec:latest", ["embedding"])


def test_ps_lists_models_that_are_ready(make: MakeCall) -> None:
    first, second = ask(make("/api/ps", method="GET"))["models"]

    assert (first["name"], first["context_length"]) == ("Llama3:latest", 4096)
    assert (second["name"], "context_length" in second) == ("org/vec:latest", False)


class LoadingCatalogStub(CatalogStub):
    """The first model is loaded on demand; what is asked of it is recorded."""

    def __init__(self, *states: ModelState | None) -> None:
        super().__init__()
        versions = [VersionInfo(str(i), "a", 50, state=one) for i, one in enumerate(states)]
        self._models[0] = ModelInfo("Llama3", tuple(versions))
        self.requested: list[tuple[str, float | None]] = []

    def keep_model(self, model: ModelInfo, seconds: float | None) -> bool:
        self.requested.append((model.name, seconds))
        return model.name == "Llama3"


LOADED = ModelState(loaded=True, on_demand=True, memory_bytes=7, expires_in=60)
UNLOADED = ModelState(loaded=False, on_demand=True)
PERMANENT = ModelState(loaded=True, on_demand=True, memory_bytes=5)


WEIGHTS = ModelWeights("gguf", "qwen2", 7_615_616_512, "Q4_K_M", 4_683_073_184)
OTHER = ModelWeights("safetensors", "llama", 134_515_008, "BF16", 269_060_552)
IN_FILES = ModelState(loaded=False, on_demand=True, weights=WEIGHTS)
IN_MEMORY = ModelState(loaded=True, features=ModelFeatures(chat=True, weights=WEIGHTS))
OF_ANOTHER = ModelState(loaded=True, features=ModelFeatures(chat=True, weights=OTHER))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([IN_FILES], ("gguf", "qwen2", "7.6B", "Q4_K_M", 4_683_073_184)),
        ([IN_MEMORY, IN_FILES], ("gguf", "qwen2", "7.6B", "Q4_K_M", 4_683_073_184)),
        ([OF_ANOTHER], ("safetensors", "llama", "134.52M", "BF16", 269_060_552)),
        ([IN_MEMORY, OF_ANOTHER], ("", "gateway", "", "", 0)),
        ([IN_MEMORY, None], ("", "gateway", "", "", 0)),
        ([LOADED], ("", "gateway", "", "", 0)),
    ],
)
def test_details_are_those_of_the_files_of_every_version(
    make: MakeCall, states: list[ModelState | None], expected: tuple[str, str, str, str, int]
) -> None:
    catalog = LoadingCatalogStub(*states)
    listed, running, shown = (
        msgspec.json.decode(Ollama().handle_info_request(call, catalog).body)
        for call in (
            make("/api/tags", method="GET"),
            make("/api/ps", method="GET"),
            make("/api/show", {"model": "Llama3"}),
        )
    )
    names = ("format", "family", "parameter_size", "quantization_level")
    (model, *_) = listed["models"]
    assert (*(model["details"][name] for name in names), model["size"]) == expected
    assert model["details"]["families"] == [expected[1]]
    assert shown["details"] == model["details"]
    assert shown["model_info"]["general.architecture"] == expected[1]
    assert ("general.parameter_count" in shown["model_info"]) == bool(expected[0])
    in_memory = [one for one in running["models"] if one["name"] == model["name"]]
    assert all(one["details"] == model["details"] for one in in_memory)


@pytest.mark.parametrize(
    ("number", "text"),
    [(8 * 10**9, "8B"), (3 * 10**6, "3M"), (5400, "5K"), (270, "270"), (8_030_261_312, "8.0B")],
)
def test_numbers_of_parameters_are_written_as_by_ollama(
    make: MakeCall, number: int, text: str
) -> None:
    state = ModelState(loaded=False, weights=replace(WEIGHTS, parameters=number))
    call = make("/api/tags", method="GET")
    response = Ollama().handle_info_request(call, LoadingCatalogStub(state))
    (model, *_) = msgspec.json.decode(response.body)["models"]
    assert model["details"]["parameter_size"] == text


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([UNLOADED], None),
        ([UNLOADED, None], (0, "2318")),
        ([LOADED], (7, "1970-01-01T00:01:")),
        ([LOADED, LOADED], (14, "1970-01-01T00:01:")),
        ([LOADED, PERMANENT], (12, "2318")),
        ([LOADED, None], (7, "2318")),
    ],
)
def test_ps_tells_which_models_are_in_memory_and_for_how_long(
    make: MakeCall, states: list[ModelState | None], expected: tuple[int, str] | None
) -> None:
    call = make("/api/ps", method="GET")
    response = Ollama().handle_info_request(call, LoadingCatalogStub(*states))
    models = {one["name"]: one for one in msgspec.json.decode(response.body)["models"]}
    shown = models.get("Llama3:latest")
    assert (shown is None) == (expected is None)
    if shown is not None and expected is not None:
        assert shown["size"] == expected[0]
        assert shown["expires_at"].startswith(expected[1])


@pytest.mark.parametrize(
    ("path", "body", "seconds", "loss"),
    [
        ("/api/chat", {"model": "Llama3"}, None, None),
        ("/api/chat", {"model": "Llama3", "keep_alive": "1m"}, 60, None),
        ("/api/embed", {"model": "Llama3", "keep_alive": 0, "input": []}, 0, None),
        ("/api/chat", {"model": "gone:7b"}, None, None),
        ("/api/chat", {"model": "gone:7b", "keep_alive": 0}, 0, "keep_alive=dropped"),
    ],
)
def test_request_without_content_loads_its_model_or_gets_an_error(
    make: MakeCall, path: str, body: dict[str, Any], seconds: float | None, loss: str | None
) -> None:
    catalog = LoadingCatalogStub(UNLOADED)
    response = Ollama().handle_info_request(make(path, body), catalog)
    assert catalog.requested == [(body["model"], seconds)]
    assert dict(response.headers).get("x-interlingua-loss") == loss


@pytest.mark.parametrize("name", ["Llama3", "llama3:LATEST", "llama", "LLAMA:latest"])
def test_show_finds_a_model_by_any_of_its_names(make: MakeCall, name: str) -> None:
    body = ask(make("/api/show", {"model": name}))

    assert body["model_info"]["general.basename"] == "Llama3"
    assert body["model_info"]["gateway.context_length"] == 4096


def test_show_takes_the_former_field(make: MakeCall) -> None:
    body = ask(make("/api/show", {"name": "gone:7b"}))

    assert body["model_info"] == {
        "general.architecture": "gateway",
        "general.basename": "gone:7b",
    }


def test_show_of_an_unknown_model_raises(make: MakeCall) -> None:
    with pytest.raises(ModelNotFound):
        ask(make("/api/show", {"model": "nope"}))


def test_models_are_not_managed(make: MakeCall) -> None:
    calls = [
        make("/api/pull", {"model": "llama"}),
        make("/api/delete", {}, method="DELETE"),
        make("/api/blobs/sha256:1", b"x"),
    ]
    for call in calls:
        response = Ollama().handle_info_request(call, CatalogStub())
        assert response.status == 501
        assert b"model management is not supported" in response.body


def test_pull_of_a_known_model_may_succeed(make: MakeCall) -> None:
    adapter = Ollama(pull_known=True)

    assert ask(make("/api/pull", {"model": "llama"}), adapter) == {"status": "success"}
    with pytest.raises(ModelNotFound):
        ask(make("/api/pull", {"model": "nope"}), adapter)


@pytest.mark.parametrize(
    ("path", "body", "inform"),
    [
        ("/api/chat", {}, True),
        ("/api/chat", {"messages": None}, True),
        ("/api/chat", {"messages": []}, True),
        ("/api/chat", {"messages": HI}, False),
        ("/api/generate", {"prompt": ""}, True),
        ("/api/generate", {"prompt": "", "suffix": "x"}, False),
        ("/api/generate", {"prompt": "x"}, False),
        ("/api/embed", {"input": []}, True),
        ("/api/embed", {"input": "x"}, False),
        ("/api/embeddings", {}, True),
        ("/api/embeddings", {"prompt": "x"}, False),
    ],
    ids=str,
)
def test_requests_without_content_need_no_worker(
    make: MakeCall, path: str, body: dict[str, Any], inform: bool
) -> None:
    info = Ollama().read_routing_info(make(path, {"model": "m", **body}))

    assert info.inform is inform
    assert info.stream is (path in ("/api/chat", "/api/generate"))


def test_requests_without_content_load_and_unload(make: MakeCall) -> None:
    chat = ask(make("/api/chat", {"model": "llama"}))
    generate = ask(make("/api/generate", {"model": "llama", "keep_alive": "0s"}))

    assert (chat["message"]["content"], chat["done_reason"]) == ("", "load")
    assert (generate["response"], generate["done_reason"]) == ("", "unload")
    assert ask(make("/api/embed", {"model": "llama"})) == {"model": "llama", "embeddings": []}
    assert ask(make("/api/embeddings", {"model": "llama"})) == {"embedding": []}


def test_routing_info_has_both_forms_of_a_name(make: MakeCall) -> None:
    adapter = Ollama()

    assert adapter.read_routing_info(
        make("/api/chat", {"model": "m", "messages": HI})
    ).other_names == ("m:latest",)
    assert adapter.read_routing_info(
        make("/api/chat", {"model": "m:Latest", "messages": HI})
    ).other_names == ("m",)


def test_model_is_required(make: MakeCall) -> None:
    with pytest.raises(InvalidParameter, match="model"):
        Ollama().read_routing_info(make("/api/chat", {"model": None}))


def test_malformed_body_raises(make: MakeCall) -> None:
    with pytest.raises(MalformedRequest):
        Ollama().read_routing_info(make("/api/chat", b"{"))


ERRORS: list[tuple[GatewayError, int, str]] = [
    (MalformedRequest("the body is empty"), 400, "missing request body"),
    (MalformedRequest("bad"), 400, "bad"),
    (InvalidParameter("x", param="model", problem="missing"), 400, "model is required"),
    (InvalidParameter("x", param="top_logprobs", problem="above"), 400,
     "top_logprobs must be between 0 and 20"),
    (InvalidParameter("x", param="y"), 400, "x"),
    (ContextTooLong("x", tokens=9, limit=8), 400,
     "the input length exceeds the context length (9 tokens, limit 8)"),
    (ContextTooLong("x"), 400, "the input length exceeds the context length: x"),
    (ModelNotFound("x", model="m"), 404, "model 'm' not found"),
    (PathNotFound("x"), 404, "404 page not found"),
    (MethodNotAllowed("x", allowed=("GET", "HEAD")), 405, "405 method not allowed"),
    (RequestTooLarge("x", limit=1), 413, "x"),
    (Unauthorized("x", missing=True), 401, "unauthorized"),
    (RateLimitExceeded("x", retry_after=1.5), 429, "rate limit exceeded"),
    (ClientDisconnected("x"), 499, "request canceled"),
    (InternalError("x"), 500, "x"),
    (WorkerFailed("x"), 502, "x"),
    (Overloaded("x"), 503, "server busy, please try again.  maximum pending requests exceeded"),
    (WorkerUnreachable("x"), 503,
     "server busy, please try again.  maximum pending requests exceeded"),
    (DeadlineExceeded("x"), 504, "x"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "status", "text"), ERRORS, ids=lambda one: str(one)[:40])
def test_error_is_a_text(error: GatewayError, status: int, text: str) -> None:
    response = Ollama().encode_error(error, None)

    assert (response.status, msgspec.json.decode(response.body)) == (status, {"error": text})


def test_errors_of_models_depend_on_the_path(make: MakeCall) -> None:
    adapter = Ollama()
    missing = InvalidParameter("x", param="model", problem="missing")
    unknown = ModelNotFound("x", model="m")
    expected = {
        "/api/chat": (400, "model is required", "model 'M' not found"),
        "/api/generate": (404, "model '' not found", "model 'M' not found"),
        "/api/embed": (404, "model '' not found", 'model "M" not found, try pulling it first'),
        "/api/embeddings": (400, "model is required", 'model "M" not found, try pulling it first'),
    }
    for path, (status, text, unknown_text) in expected.items():
        response = adapter.encode_error(missing, make(path, {}))
        assert (response.status, msgspec.json.decode(response.body)["error"]) == (status, text)
        call = make(path, {"model": "M"})
        adapter.read_routing_info(call)
        response = adapter.encode_error(unknown, call)
        assert msgspec.json.decode(response.body)["error"] == unknown_text


def test_error_headers_have_retry_advice() -> None:
    adapter = Ollama()

    def headers(error: GatewayError) -> dict[str, str]:
        return dict(adapter.encode_error(error, None).headers)

    assert headers(MethodNotAllowed("x", allowed=("GET", "HEAD")))["Allow"] == "GET, HEAD"
    assert headers(Unauthorized("x", missing=True))["WWW-Authenticate"] == "Bearer"
    assert headers(RateLimitExceeded("x", retry_after=1.5))["Retry-After"] == "2"
    assert headers(WorkerUnreachable("x"))["Retry-After"] == "1"


def test_field_names_are_those_of_the_client(make: MakeCall) -> None:
    names = Ollama().field_names(make("/api/chat", {}))

    assert names["sampling.top_k"] == "options.top_k"
    assert names["reasoning.effort"] == "think"


def test_openapi_describes_json_and_lines() -> None:
    fragment = Ollama().openapi_fragment()

    content = fragment.operations["chat"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "application/x-ndjson"}
    assert {"ChatAnswer", "GenerateAnswer", "OllamaError"} <= fragment.schemas.keys()
