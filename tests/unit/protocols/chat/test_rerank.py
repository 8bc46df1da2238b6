"""Reranking and scoring: requests and responses of clients and of workers."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from protocols.chat.rerank import MAX_DOCUMENTS, RerankDecoder, compute_logits, rank_documents
from protocols.core.aggregate import aggregate
from protocols.core.errors import (
    InvalidParameter,
    Overloaded,
    StreamBroken,
    UnknownParameter,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import RelevanceScore, ResponseExtra, ResponseMetadata, StreamEnd, Usage
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import RerankRequest
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
OPENAI = OpenAI()
RERANK = {"model": "m", "query": "red apple", "documents": ["green pear", "red apple", "red car"]}
SCORES = (0.0, 1.0, 0.5)


def decode(call: ClientRequest, adapter: OpenAI = OPENAI) -> RerankRequest:
    request = adapter.decode_request(call)
    assert isinstance(request, RerankRequest)
    return request


def answer(
    call: ClientRequest,
    response_context: ResponseContext,
    *scores: float,
    usage: Usage | None = None,
) -> Any:
    """Return the body of the response as JSON."""
    encoder = OPENAI.create_encoder(call, decode(call), response_context)
    events = [RelevanceScore(i, score) for i, score in enumerate(scores)]
    response = aggregate([*events, *([usage] if usage else []), StreamEnd()])
    return json.loads(encoder.encode_unary(response).body)


def find_error(call: ClientRequest, adapter: OpenAI = OPENAI) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as excinfo:
        adapter.decode_request(call)
    return excinfo.value


# --- requests of clients --------------------------------------------------------------------------


def test_rerank_request_is_decoded(make_call: MakeCall) -> None:
    options = {"top_n": 2, "truncate_prompt_tokens": -1, "max_tokens_per_doc": None}
    names = {"user": "u", "request_id": "r", "mm_processor_kwargs": {}}
    body: dict[str, Any] = {**RERANK, **options, **names}

    request = decode(make_call("rerank", body))

    assert request.queries == ("red apple",)
    assert request.documents == ("green pear", "red apple", "red car")
    assert (request.top_n, request.truncate, request.client_id) == (2, -1, "r")
    assert request.labels == {"user": "u"}
    assert list(request.extra) == ["mm_processor_kwargs"]


@pytest.mark.parametrize(
    ("query", "text"), [("q", "q"), ({"text": "q", "image": "x"}, "q"), ("", "")]
)
def test_query_is_a_text_or_an_object_with_text(make_call: MakeCall, query: Any, text: str) -> None:
    assert decode(make_call("rerank", {**RERANK, "query": query})).queries == (text,)


@pytest.mark.parametrize(
    ("documents", "fields", "texts"),
    [
        ("red apple", {}, ("red apple",)),
        ([{"text": "red car", "id": "k"}], {}, ("red car",)),
        ([{"title": "red", "body": "apple"}], {"rank_fields": ["title", "body"]}, ("red\napple",)),
        ([{"title": "red", "year": 3}], {"rank_fields": None}, ("title: red\nyear: 3",)),
    ],
)
def test_documents_are_texts_or_objects(
    make_call: MakeCall, documents: Any, fields: Mapping[str, Any], texts: tuple[str, ...]
) -> None:
    request = decode(make_call("rerank", {**RERANK, "documents": documents, **fields}))

    assert request.documents == texts


@pytest.mark.parametrize("top_n", [0, None])
def test_top_n_of_zero_or_null_means_all(make_call: MakeCall, top_n: Any) -> None:
    assert decode(make_call("rerank", {**RERANK, "top_n": top_n})).top_n is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_n": -1}, "top_n"),
        ({"top_n": "2"}, "top_n"),
        ({"return_documents": 1}, "return_documents"),
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": 5}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": [""] * (MAX_DOCUMENTS + 1)}, "documents"),
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"rank_fields": "title"}, "rank_fields"),
        ({"rank_fields": [1]}, "rank_fields"),
        ({"documents": [{"a": 1}], "rank_fields": ["a"]}, "documents[0].a"),
        ({"model": ""}, "model"),
    ],
)
def test_invalid_rerank_request_names_the_field(
    make_call: MakeCall, changes: Mapping[str, Any], param: str
) -> None:
    assert find_error(make_call("rerank", {**RERANK, **changes})).param == param


def test_unknown_field_is_rejected_if_the_listener_is_strict(make_call: MakeCall) -> None:
    strict = OpenAI(unknown="reject")
    bodies: dict[str, dict[str, Any]] = {
        "rerank": {**RERANK, "x": 1},
        "ranking": {**RANKING, "x": 1},
        "score": {"model": "m", "text_1": "a", "text_2": "b", "x": 1},
    }
    for operation, body in bodies.items():
        error = find_error(make_call(operation, body), strict)
        assert isinstance(error, UnknownParameter)
        assert error.param == "x"


RANKING = {
    "model": "m",
    "query": {"text": "red apple"},
    "passages": [{"text": text} for text in ("green pear", "red apple", "red car")],
}


def test_ranking_request_of_nvidia_is_decoded(make_call: MakeCall) -> None:
    request = decode(make_call("ranking", {**RANKING, "truncate": "END"}))

    assert request.queries == ("red apple",)
    assert request.documents == ("green pear", "red apple", "red car")
    assert list(request.extra) == ["truncate"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"query": "red"}, "query"),
        ({"query": None}, "query"),
        ({"query": {}}, "query.text"),
        ({"passages": []}, "passages"),
        ({"passages": ["a"]}, "passages[0]"),
    ],
)
def test_invalid_ranking_request_names_the_field(
    make_call: MakeCall, changes: Mapping[str, Any], param: str
) -> None:
    assert find_error(make_call("ranking", {**RANKING, **changes})).param == param


@pytest.mark.parametrize(
    ("first", "second"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
def test_score_request_has_one_of_four_pairs_of_names(
    make_call: MakeCall, first: str, second: str
) -> None:
    request = decode(make_call("score", {"model": "m", first: "a", second: ["b", "c"]}))

    assert (request.queries, request.documents) == (("a",), ("b", "c"))


def test_score_request_with_pairs_keeps_their_order(make_call: MakeCall) -> None:
    body = {"model": "m", "text_1": ["red", "car"], "text_2": ["red", "red"]}

    assert decode(make_call("score", body)).queries == ("red", "car")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"data_1": ["a", "b"], "data_2": ["a", "b", "c"]}, "data_2", "1:1, 1:N or N:N"),
        ({"queries": [], "documents": ["a"]}, "queries", "At least one text element"),
        ({"queries": "q", "documents": []}, "documents", "At least one text_pair element"),
        ({"queries": "q"}, "documents", "Missing"),
        ({"text_2": "q"}, "text_1", "Missing"),
        ({}, "queries", "Missing"),
        ({"text_1": 5, "text_2": "a"}, "text_1", "string or array"),
        ({"text_1": "a", "text_2": ["a", 5]}, "text_2", "string or array"),
        ({"text_1": "a", "text_2": ["a"] * (MAX_DOCUMENTS + 1)}, "text_2", "too long"),
    ],
)
def test_invalid_score_request_names_the_field(
    make_call: MakeCall, body: Mapping[str, Any], param: str, text: str
) -> None:
    error = find_error(make_call("score", {"model": "m", **body}))

    assert (error.param, text in error.message) == (param, True)


# --- responses to clients -------------------------------------------------------------------------


def test_ties_stay_in_their_order() -> None:
    assert rank_documents([0.0, 1.0, 0.0, 1.0], None) == [1, 3, 0, 2]


def test_rerank_response_has_the_fields_of_cohere_jina_and_vllm(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    body = answer(make_call("rerank", RERANK), response_context, *SCORES, usage=Usage(12))

    assert body == {
        "id": "r1",
        "object": "list",
        "model": "mock",
        "results": [
            {"index": 1, "relevance_score": 1.0, "document": {"text": "red apple"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "red car"}},
            {"index": 0, "relevance_score": 0.0, "document": {"text": "green pear"}},
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
        "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
    }


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (0, 3), (None, 3), (99, 3)])
def test_rerank_response_has_the_best_documents(
    make_call: MakeCall, response_context: ResponseContext, top_n: Any, count: int
) -> None:
    body = answer(make_call("rerank", {**RERANK, "top_n": top_n}), response_context, *SCORES)

    assert [one["index"] for one in body["results"]] == [1, 2, 0][:count]
    assert "usage" not in body


@pytest.mark.parametrize(
    ("operation", "fields", "document"),
    [
        ("rerank", {}, {"text": "red car", "id": "k"}),
        ("rerank_v1", {"return_documents": True}, {"text": "red car", "id": "k"}),
        ("rerank", {"return_documents": False}, None),
    ],
)
def test_documents_are_returned_whole_unless_declined(
    make_call: MakeCall,
    response_context: ResponseContext,
    operation: str,
    fields: Mapping[str, Any],
    document: Any,
) -> None:
    sent = {**RERANK, "documents": [{"text": "red car", "id": "k"}], **fields}
    body = answer(make_call(operation, sent), response_context, 0.5)

    assert body["results"][0].get("document") == document
    assert body["meta"]["api_version"]["version"] == "1"


def test_rankings_are_logits_in_descending_order(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    body = answer(make_call("ranking", RANKING), response_context, *SCORES, usage=Usage(12))

    assert [one["index"] for one in body["rankings"]] == [1, 2, 0]

    logits = [one["logit"] for one in body["rankings"]]
    assert logits == pytest.approx([13.8155, 0.0, -13.8155], abs=1e-3)
    assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}


def test_scores_outside_of_probabilities_are_taken_for_logits() -> None:
    assert compute_logits([0.5, -3.0]) == [0.5, -3.0]


def test_score_response_keeps_the_order_of_the_request(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    sent = {"model": "m", "queries": "red apple", "documents": ["green pear", "red apple"]}

    assert answer(make_call("score", sent), response_context, 0.0, 1.0, usage=Usage(4)) == {
        "id": "score-r1",
        "object": "list",
        "created": 1700000000,
        "model": "mock",
        "data": [
            {"index": 0, "object": "score", "score": 0.0},
            {"index": 1, "object": "score", "score": 1.0},
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


def test_unary_encoder_streams_nothing(
    make_call: MakeCall, response_context: ResponseContext
) -> None:
    call = make_call("rerank", RERANK)
    encoder = OPENAI.create_encoder(call, decode(call), response_context)

    assert encoder.encode_events([StreamEnd()]) == b""
    assert json.loads(encoder.encode_error_event(WorkerFailed("x"))[6:])["error"]["message"] == "x"
    assert dict(encoder.headers())["openai-version"] == "2020-10-01"


def test_errors_of_cohere_paths_have_a_message_of_their_own(make_call: MakeCall) -> None:
    error = Overloaded("busy", retry_after=2.0)
    for operation, has_message in (("rerank", False), ("rerank_v1", True)):
        reply = OPENAI.encode_error(error, make_call(operation, RERANK))
        body = json.loads(reply.body)
        assert body["error"]["message"]
        assert (body.get("message") == body["error"]["message"]) is has_message
        assert dict(reply.headers)["Retry-After"] == "2"


# --- workers --------------------------------------------------------------------------------------

PAIRS = RerankRequest(model="w", queries=("a", "b"), documents=("c", "d"))
ONE = RerankRequest(model="w", queries=("q",), documents=("c", "d"), truncate=5)


@pytest.mark.parametrize(
    "profile", [name for name in OpenAI.profiles if "rerank" in OpenAI(name).request_kinds]
)
def test_workers_that_rerank_get_the_query_and_the_documents(profile: str) -> None:
    wire = OpenAI(profile).encode_request(ONE)
    body = json.loads(wire.body)

    assert wire.path == "/v1/rerank"
    assert body.pop("truncate_prompt_tokens", None) == (
        5 if profile in ("vllm", "interlingua") else None
    )
    assert body == {"model": "w", "query": "q", "documents": ["c", "d"]}


@pytest.mark.parametrize("profile", ["vllm", "interlingua"])
def test_pairs_of_texts_are_scored(profile: str) -> None:
    wire = OpenAI(profile).encode_request(PAIRS)

    assert wire.path == "/v1/score"
    assert json.loads(wire.body) == {"model": "w", "text_1": ["a", "b"], "text_2": ["c", "d"]}


def test_worker_without_score_api_rejects_pairs_of_texts() -> None:
    with pytest.raises(UnsupportedFeature, match="one text with several"):
        OPENAI.encode_request(PAIRS)


def test_truncation_is_lost_at_workers_without_it() -> None:
    assert [one.field for one in OPENAI.unsupported_parameters(ONE, {})] == ["truncate"]
    assert OpenAI("vllm").unsupported_parameters(ONE, {}) == ()


def decode_worker(body: Any, request: RerankRequest = ONE) -> Any:
    decoder = OPENAI.create_decoder(request)
    assert isinstance(decoder, RerankDecoder)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert decoder.feed(data[:5]) == ()
    assert decoder.feed(data[5:]) == ()
    return list(decoder.close())


EVENTS = [RelevanceScore(1, 0.5), RelevanceScore(0, 0.25)]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (
            {
                "id": "i",
                "model": "x",
                "results": [
                    {"index": 1, "relevance_score": 0.5, "document": {"text": "d"}},
                    {"index": 0, "relevance_score": 0.25},
                ],
                "usage": {"prompt_tokens": 3, "total_tokens": 3},
            },
            [ResponseMetadata("x", id="i", source="scores"), *EVENTS, Usage(3), StreamEnd()],
        ),
        (
            {
                "data": [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}],
                "usage": {"total_tokens": 7},
            },
            [ResponseMetadata(source="scores"), *EVENTS, Usage(7), StreamEnd()],
        ),
        (
            [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}],
            [ResponseMetadata(source="scores"), *EVENTS, StreamEnd()],
        ),
        (
            {
                "results": [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}],
                "usage": {"total_tokens": -1},
            },
            [ResponseMetadata(source="scores"), *EVENTS, StreamEnd(has_ignored_usage=True)],
        ),
        (
            {"results": [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}], "usage": {}},
            [ResponseMetadata(source="scores"), *EVENTS, StreamEnd()],
        ),
    ],
    ids=["vllm", "score", "list", "implausible usage", "empty usage"],
)
def test_responses_of_workers_are_decoded(body: Any, events: Any) -> None:
    assert decode_worker(body) == events


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"results": [{"index": 0, "score": 1}]}, "lacks score 1"),
        ({"results": [{"index": 0, "score": 1}, {"index": 0, "score": 1}]}, "than one score 0"),
        ({"results": [{"index": 0}, {"index": 1, "score": 1}]}, "no score for document 0"),
        ({"results": [{"index": "0", "score": 1}]}, "can't be read"),
        ({}, "no results"),
        ({"error": {"message": "out of order", "code": 500}}, "error"),
        (b"{", "can't be read"),
    ],
)
def test_invalid_response_of_a_worker_fails(body: Any, text: str) -> None:
    with pytest.raises(WorkerFailed, match=text):
        decode_worker(body)


def test_empty_response_of_a_worker_is_broken() -> None:
    with pytest.raises(StreamBroken):
        decode_worker(b" ")


@pytest.mark.parametrize("key", ["results", "data", ""])
def test_unknown_keys_of_a_worker_s_scores_are_reported(key: str) -> None:
    scores = [{"index": i, "score": 0.5, "document": {"text": "a"}, f"x{i}": i} for i in range(3)]
    request = replace(ONE, documents=("a", "b", "c"))

    events = decode_worker({key: scores, "later": 7} if key else scores, request)

    extras = [one for one in events if isinstance(one, ResponseExtra)]
    values = {f"{one.path}.{'.'.join(path)}": value for one in extras for path, value in one.values}
    assert values == {
        **({"response.later": 7} if key else {}),
        **{f"response.results[{i}].x{i}": i for i in range(3)},
    }


@pytest.mark.parametrize("best", [1, 2])
def test_a_client_of_a_worker_s_protocol_gets_its_unknown_keys(
    make_call: MakeCall, response_context: ResponseContext, best: int
) -> None:
    call = make_call("rerank", {**RERANK, "documents": ["a", "b"], "top_n": best})
    request = decode(call)
    results = [{"index": i, "relevance_score": i / 2, "rank": {"of": i}} for i in range(2)]
    meta = {"billed_units": {"search_units": 7}, "warnings": ["w"]}
    usage = {"total_tokens": 3, "cost": 0.5}
    worker = {"results": results, "usage": usage, "meta": meta, "later": 7}
    encoder = OPENAI.create_encoder(call, request, response_context)

    body = json.loads(encoder.encode_unary(aggregate(decode_worker(worker, request))).body)

    assert [one["rank"] for one in body["results"]] == [{"of": 1}, {"of": 0}][:best]
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "cost": 0.5}
    assert (body["later"], body["meta"]) == (7, meta)


@pytest.mark.parametrize("name", ["tokens", "billed_units"])
@pytest.mark.parametrize(("usage", "count"), [(None, 3), ({}, 3), ({"prompt_tokens": 4}, 4)])
def test_cohere_s_tokens_of_input_count_where_there_is_no_usage(
    name: str, usage: Any, count: int
) -> None:
    results = [{"index": i, "relevance_score": 0.5} for i in range(2)]
    events = decode_worker(
        {"results": results, "usage": usage, "meta": {name: {"input_tokens": 3}}}
    )

    assert [one for one in events if isinstance(one, Usage)] == [Usage(count)]


def test_unknown_keys_of_passages_are_reported_or_passed_on(make_call: MakeCall) -> None:
    passages = [{"text": "a", "x": 1}, {"text": "b"}]
    request = decode(make_call("ranking", {**RANKING, "passages": passages}))
    own, _ = remove_extra_fields(request, None)

    other, losses = remove_extra_fields(request)
    body = json.loads(OPENAI.encode_request(own).body)

    assert [one.field for one in losses] == ["passages[0].x"]
    assert other.field_extra == ()
    assert body["documents"] == [{"text": "a", "x": 1}, "b"]


def test_unknown_keys_of_a_query_are_passed_on(make_call: MakeCall) -> None:
    body = {**RERANK, "query": {"text": "q", "x": 1}}

    sent = json.loads(OPENAI.encode_request(decode(make_call("rerank", body))).body)

    assert sent["query"] == {"text": "q", "x": 1}
