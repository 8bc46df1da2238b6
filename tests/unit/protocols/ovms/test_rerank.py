"""Reranking: requests and responses of clients and of workers."""

import json
from typing import Any

import pytest

from protocols.core.aggregate import aggregate
from protocols.core.errors import InvalidParameter, WorkerFailed
from protocols.core.events import Event, RelevanceScore, ResponseMetadata, StreamEnd
from protocols.core.interfaces import ClientRequest, Endpoint
from protocols.core.request import RerankRequest
from protocols.ovms import OVMS

OVMS_ADAPTER = OVMS()
ENDPOINT = Endpoint("POST", "/v3/rerank", operation="rerank")
BODY = {"model": "m", "query": "q", "documents": ["a", "b", "c"]}
SCORES: list[Event] = [*(RelevanceScore(i, s) for i, s in enumerate((0.5, 2, 1))), StreamEnd()]
ONE = RerankRequest(model="w", queries=("q",), documents=("a", "b"), truncate=5)


def make_call(body: Any = b"", content_type: str = "application/json") -> ClientRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ClientRequest(ENDPOINT, {}, {"content-type": content_type}, "", data, ENDPOINT.path)


def decode(**fields: Any) -> RerankRequest:
    request = OVMS_ADAPTER.decode_request(make_call({**BODY, **fields}))
    assert isinstance(request, RerankRequest)
    return request


def answer(**fields: Any) -> Any:
    context: Any = None
    encoder = OVMS_ADAPTER.create_encoder(make_call(BODY), decode(**fields), context)
    assert encoder.headers() == ()
    assert encoder.encode_events(SCORES) == b""
    return json.loads(encoder.encode_unary(aggregate(SCORES)).body)


def test_every_root_has_the_endpoint() -> None:
    paths = {one.path for one in OVMS(v1=True).endpoints if one.operation == "rerank"}

    assert paths == {"/v3/rerank", "/v1/rerank", "/v3/v1/rerank"}
    assert OVMS_ADAPTER.read_routing_info(make_call(BODY)).model == "m"


def test_request_is_decoded() -> None:
    request = decode(top_n=2, return_documents=True, rank_fields=["a"], max_chunks_per_doc=3)

    assert (request.model, request.queries, request.documents) == ("m", ("q",), ("a", "b", "c"))
    assert (request.top_n, request.return_documents) == (2, True)
    assert list(request.extra) == ["max_chunks_per_doc"]
    assert decode(top_n=None, rank_fields=None, return_documents=None).top_n is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"query": 5}, "query is not a string"),
        ({"documents": "a"}, "documents is not an array"),
        ({"documents": []}, "documents array is empty"),
        ({"documents": [5]}, "documents array element is neither string nor object"),
        ({"documents": ["a", {}]}, "all documents have to be the same type (string or objects)"),
        ({"documents": [{"text": "a"}]}, "document title field is missing"),
        ({"documents": [{"title": "a", "text": 5}]}, "document text field have to be string"),
        ({"documents": [{"title": "a", "text": "b"}]}, "document map not supported"),
        ({"top_n": 1.5}, "top_n accepts integer values"),
        ({"rank_fields": "a"}, "rank_fields is not an array"),
        ({"rank_fields": [1]}, "rank_fields array element is not a string"),
        ({"return_documents": 1}, "return_documents accepts boolean values"),
    ],
)
def test_invalid_request_has_the_text_of_the_graph(fields: dict[str, Any], text: str) -> None:
    call = make_call({**BODY, **fields})
    with pytest.raises(InvalidParameter) as excinfo:
        OVMS_ADAPTER.decode_request(call)

    reply = OVMS_ADAPTER.encode_error(excinfo.value, call)

    assert reply.status == 400
    assert json.loads(reply.body)["error"].endswith(f'"RerankExecutor" failed: {text}')


@pytest.mark.parametrize("name", ["query", "documents"])
def test_missing_field_is_named(name: str) -> None:
    body = {key: value for key, value in BODY.items() if key != name}
    with pytest.raises(InvalidParameter, match=f"{name} field is missing in request"):
        OVMS_ADAPTER.decode_request(make_call(body))


def test_body_that_is_not_json_is_named_for_the_calculator() -> None:
    with pytest.raises(InvalidParameter, match="Non-json request received in rerank calculator"):
        OVMS_ADAPTER.decode_request(make_call(b"q", "text/plain"))


@pytest.mark.parametrize(
    ("fields", "indices"),
    [({}, [1, 2, 0]), ({"top_n": 2}, [1, 2]), ({"top_n": 0}, []), ({"top_n": -1}, [1, 2, 0])],
)
def test_response_has_the_best_documents(fields: dict[str, Any], indices: list[int]) -> None:
    assert [one["index"] for one in answer(**fields)["results"]] == indices


def test_documents_are_returned_on_request() -> None:
    assert answer(top_n=1) == {"results": [{"index": 1, "relevance_score": 2.0}]}
    assert answer(top_n=1, return_documents=True) == {
        "results": [{"index": 1, "relevance_score": 2.0, "document": {"text": "b"}}]
    }


def test_error_inside_a_response_is_of_the_node() -> None:
    context: Any = None
    encoder = OVMS_ADAPTER.create_encoder(make_call(BODY), decode(), context)

    assert b"RerankExecutor" in encoder.encode_error_event(WorkerFailed("x"))


def test_workers_get_the_query_and_all_documents() -> None:
    wire = OVMS_ADAPTER.encode_request(ONE)

    assert wire.path == "/v3/rerank"
    assert json.loads(wire.body) == {"model": "w", "query": "q", "documents": ["a", "b"]}
    assert [one.path for one in OVMS_ADAPTER.unsupported_parameters(ONE, {})] == ["truncate"]


def test_responses_of_workers_are_decoded() -> None:
    decoder = OVMS_ADAPTER.create_decoder(ONE)
    results = [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]

    decoder.feed(json.dumps({"results": results}).encode())

    assert list(decoder.close()) == [
        ResponseMetadata(source="ovms"),
        RelevanceScore(1, 0.5),
        RelevanceScore(0, 0.25),
        StreamEnd(),
    ]
