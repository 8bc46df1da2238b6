"""Models for embeddings and reranking: tensors, requests and responses."""

import json
import struct
from typing import Any

import pytest

from protocols.core.aggregate import aggregate
from protocols.core.catalog import ModelInfo, ModelTask, VersionInfo
from protocols.core.errors import InvalidParameter, WorkerFailed
from protocols.core.events import Embedding, Event, RelevanceScore, StreamEnd
from protocols.core.interfaces import ClientRequest
from protocols.core.request import EmbeddingRequest, RerankRequest
from protocols.triton import Triton

VECTORS: list[Event] = [Embedding(0, (1.0, 0.5)), Embedding(1, (0.0, -0.25)), StreamEnd()]
SCORES: list[Event] = [RelevanceScore(0, 0.5), RelevanceScore(1, 0.25), StreamEnd()]
TEXTS = {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["a", "b"]}
QUERY = {"name": "query", "datatype": "BYTES", "shape": [1], "data": ["q"]}
DOCUMENTS = {"name": "documents", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}


def make_model(task: ModelTask) -> ModelInfo:
    return ModelInfo("m", (VersionInfo("1", "m", 100),), task)


class Catalog:
    ready = True

    def __init__(self, task: ModelTask) -> None:
        self._model = make_model(task)

    def list_models(self) -> list[ModelInfo]:
        return [self._model]

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        del model, version
        return self._model


def ask(client: Any, path: str, body: Any) -> ClientRequest:
    call: ClientRequest = client.call(f"/v2/models/m{path}", body, method="POST")
    return call


def answer(client: Any, describe: Any, path: str, body: Any, events: list[Event]) -> Any:
    call = ask(client, path, body)
    task: ModelTask = "embedding" if events is VECTORS else "rerank"
    request = client.adapter.decode_request(call, make_model(task))
    encoder = client.adapter.create_encoder(call, request, describe("m"))
    return encoder.encode_unary(aggregate(events))


@pytest.mark.parametrize("profile", Triton.profiles)
def test_embedding_model_describes_its_true_tensors(client_of: Any, profile: str) -> None:
    client = client_of(profile)
    client.catalog = Catalog("embedding")

    metadata = json.loads(client.get("/v2/models/m").body)
    assert metadata["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}]
    assert metadata["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]

    config = json.loads(client.get("/v2/models/m/config").body)
    assert config["output"] == [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [-1]}]
    assert config["model_transaction_policy"] == {"decoupled": False}


def test_rerank_model_describes_its_true_tensors(client: Any) -> None:
    client.catalog = Catalog("rerank")

    metadata = json.loads(client.get("/v2/models/m").body)
    assert metadata["inputs"] == [
        {"name": "query", "datatype": "BYTES", "shape": [1]},
        {"name": "documents", "datatype": "BYTES", "shape": [-1]},
    ]
    assert metadata["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [-1]}]

    config = json.loads(client.get("/v2/models/m/config").body)
    assert config["model_transaction_policy"] == {"decoupled": False}


@pytest.mark.parametrize(
    ("path", "body", "texts"),
    [
        ("/generate", {"text_input": "a", "id": "x", "dimensions": 8}, ("a",)),
        ("/generate", {"text_input": ["a", "b"], "id": "x"}, ("a", "b")),
        ("/infer", {"inputs": [TEXTS], "id": "x"}, ("a", "b")),
    ],
)
def test_texts_are_read_for_an_embedding_model(
    client: Any, path: str, body: Any, texts: tuple[str, ...]
) -> None:
    request = client.adapter.decode_request(ask(client, path, body), make_model("embedding"))

    assert isinstance(request, EmbeddingRequest)
    assert (request.model, request.inputs, request.client_id) == ("m", texts, "x")
    assert list(request.extra) == (["dimensions"] if "dimensions" in body else [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"query": "q", "documents": ["a", "b"]}),
        ("/infer", {"inputs": [QUERY, DOCUMENTS]}),
    ],
)
def test_query_and_documents_are_read_for_a_rerank_model(client: Any, path: str, body: Any) -> None:
    request = client.adapter.decode_request(ask(client, path, body), make_model("rerank"))

    assert isinstance(request, RerankRequest)
    assert (request.queries, request.documents) == (("q",), ("a", "b"))


def test_missing_and_unknown_inputs_are_named(client: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"missing required input.*'documents'"):
        client.adapter.decode_request(
            ask(client, "/infer", {"inputs": [QUERY]}), make_model("rerank")
        )
    with pytest.raises(InvalidParameter, match="unexpected inference input 'query'"):
        client.adapter.decode_request(
            ask(client, "/infer", {"inputs": [QUERY, TEXTS]}), make_model("embedding")
        )


def test_generate_returns_the_vectors(client: Any, describe: Any) -> None:
    body = {"text_input": ["a", "b"], "id": "x"}
    reply = answer(client, describe, "/generate", body, VECTORS)

    assert json.loads(reply.body) == {
        "id": "x",
        "embedding": [1.0, 0.5, 0.0, -0.25],
        "model_name": "m",
        "model_version": "1",
    }

    streamed = answer(client, describe, "/generate_stream", {"text_input": "a"}, VECTORS)
    assert streamed.body.startswith(b"data: {")
    assert json.loads(streamed.body[6:])["embedding"] == [1.0, 0.5, 0.0, -0.25]


def test_infer_returns_the_vectors_with_their_shape(client: Any, describe: Any) -> None:
    body = {"inputs": [TEXTS], "outputs": [{"name": "embedding"}]}
    reply = answer(client, describe, "/infer", body, VECTORS)

    assert json.loads(reply.body) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {
                "name": "embedding",
                "datatype": "FP32",
                "shape": [2, 2],
                "data": [1.0, 0.5, 0.0, -0.25],
            }
        ],
    }


def test_infer_returns_the_vectors_as_binary_data(client: Any, describe: Any) -> None:
    body = {"inputs": [TEXTS], "parameters": {"binary_data_output": True}}
    reply = answer(client, describe, "/infer", body, VECTORS)

    length = int(dict(reply.headers)["Inference-Header-Content-Length"])
    assert struct.unpack("<4f", reply.body[length:]) == (1.0, 0.5, 0.0, -0.25)


def test_infer_returns_the_scores(client: Any, describe: Any) -> None:
    body = {"inputs": [QUERY, DOCUMENTS]}
    [output] = json.loads(answer(client, describe, "/infer", body, SCORES).body)["outputs"]

    assert output == {"name": "scores", "datatype": "FP32", "shape": [2], "data": [0.5, 0.25]}


def test_encoder_of_numbers_streams_nothing(client: Any, describe: Any) -> None:
    call = ask(client, "/generate", {"text_input": "a"})
    request = client.adapter.decode_request(call, make_model("embedding"))

    encoder = client.adapter.create_encoder(call, request, describe("m"))

    assert encoder.encode_events(VECTORS) == b""
    assert encoder.headers() == ()
    assert b"error" in encoder.encode_error_event(WorkerFailed("x"))
