"""The cases of reranking, scoring, classification and tokenization for OpenAI.

The model ``mock`` scores a document by the share of its words that occur in the query, and its
tokens are words. It classifies an input as ``long`` with a tenth of the probability for each word.
"""

from typing import Any

from tests.conformance.cases import Case

QUERY = {"model": "mock", "query": "red apple", "documents": ["green pear", "red apple", "red car"]}
RANKING = {
    "model": "mock",
    "query": {"text": "red apple"},
    "passages": [{"text": text} for text in QUERY["documents"]],
}
PAIRS = {"model": "mock", "queries": "red apple", "documents": ["green pear", "red apple"]}


def rerank(
    id: str,  # noqa: A002 - a Case's field
    path: str = "/rerank",
    *,
    fields: dict[str, Any] | None = None,
    **rest: Any,
) -> Case:
    """Build R with fields added or replaced."""
    return Case(id, "POST", path, body=QUERY | (fields or {}), **rest)


def score(id: str, *, fields: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a score request."""
    return Case(id, "POST", "/score", body={"model": "mock"} | fields, **rest)


def tokenize(id: str, *, fields: dict[str, Any], **rest: Any) -> Case:  # noqa: A002 - as above
    """Build a tokenize request."""
    return Case(id, "POST", "/tokenize", body={"model": "mock"} | fields, **rest)


def rejected(param: str, status: int = 400) -> dict[str, Any]:
    """Expect an error that names a field."""
    return {"status": status, "body_has": {"error": {"param": param}}}


def result(index: int, score: float, text: str | None = None) -> dict[str, Any]:
    """Expect one result, with the given document."""
    fields: dict[str, Any] = {"index": index, "relevance_score": score}
    return fields if text is None else {**fields, "document": {"text": text}}


BEST = result(1, 1.0, "red apple")
ALL = [BEST, result(2, 0.5, "red car"), result(0, 0.0, "green pear")]

CASES = (
    rerank(
        "RR-01",
        body_has={
            "results": ALL,
            "model": "mock",
            "usage": {"prompt_tokens": 12, "total_tokens": 12},
        },
    ),
    rerank("RR-02 1", fields={"top_n": 1}, body_has={"results": [BEST]}),
    *(
        rerank(f"RR-02 {top_n}", fields={"top_n": top_n}, body_has={"results": ALL})
        for top_n in (0, None, 99)
    ),
    rerank("RR-03", fields={"top_n": -1}, **rejected("top_n")),
    rerank("RR-03 string", fields={"top_n": "2"}, **rejected("top_n")),
    rerank(
        "RR-04",
        fields={"documents": ["b", "a"]},
        body_has={"results": [result(0, 0.0, "b"), result(1, 0.0, "a")]},
    ),
    rerank("RR-05 no documents", fields={"documents": []}, **rejected("documents")),
    rerank("RR-05 null documents", fields={"documents": None}, **rejected("documents")),
    rerank("RR-05 no query", fields={"query": None}, **rejected("query")),
    rerank(
        "RR-06",
        fields={"documents": "red apple"},
        body_has={"results": [result(0, 1.0, "red apple")]},
    ),
    rerank(
        "RR-07",
        "/v1/rerank",
        fields={"documents": [{"text": "red car", "id": "k"}], "return_documents": True},
        body_has={
            "results": [
                {
                    "index": 0,
                    "relevance_score": 0.5,
                    "document": {"text": "red car", "id": "k"},
                }
            ]
        },
    ),
    rerank(
        "RR-08",
        "/v1/rerank",
        fields={
            "documents": [{"title": "red", "body": "apple"}],
            "rank_fields": ["title", "body"],
            "return_documents": False,
        },
        body_has={"results": [result(0, 1.0)]},
    ),
    rerank(
        "RR-09",
        fields={"return_documents": False, "top_n": 1},
        body_has={"results": [result(1, 1.0)]},
    ),
    rerank(
        "RR-11 message",
        "/v1/rerank",
        fields={"model": "none"},
        status=404,
        body_has={"message": str, "error": dict},
    ),
    Case(
        "RR-13",
        "POST",
        "/v1/ranking",
        body=RANKING,
        body_has={"rankings": [{"index": i, "logit": float} for i in (1, 2, 0)]},
    ),
    Case("RR-14", "POST", "/v1/ranking", body=RANKING | {"query": "red"}, **rejected("query")),
    Case(
        "RR-14 no passages",
        "POST",
        "/v1/ranking",
        body=RANKING | {"passages": []},
        **rejected("passages"),
    ),
    score(
        "RR-15",
        fields=PAIRS,
        body_has={
            "object": "list",
            "data": [
                {"index": 0, "score": 0.0, "object": "score"},
                {"index": 1, "score": 1.0, "object": "score"},
            ],
        },
    ),
    score(
        "RR-16",
        fields={"text_1": ["red", "car"], "text_2": ["red", "red"]},
        body_has={
            "data": [
                {"index": 0, "score": 1.0, "object": "score"},
                {"index": 1, "score": 0.0, "object": "score"},
            ]
        },
    ),
    score(
        "RR-17",
        fields={"data_1": ["a", "b"], "data_2": ["a", "b", "c"]},
        status=400,
        body_has={"error": {"message": "Input lengths must be either 1:1, 1:N or N:N"}},
    ),
    score(
        "RR-18",
        fields={"queries": [], "documents": ["a"]},
        status=400,
        body_has={"error": {"message": "At least one text element must be given"}},
    ),
    score(
        "RR-18 no documents",
        fields={"queries": "a", "documents": []},
        status=400,
        body_has={"error": {"message": "At least one text_pair element must be given"}},
    ),
    *(
        Case(
            f"RR-19 {path}",
            "POST",
            path,
            body={"model": "mock", "input": ["good day", "a b c d e f g h i j"]},
            body_has={
                "object": "list",
                "model": "mock",
                "data": [
                    {"index": 0, "label": "short", "probs": [0.8, 0.2], "num_classes": 2},
                    {"index": 1, "label": "long", "probs": [0.0, 1.0], "num_classes": 2},
                ],
                "usage": {"prompt_tokens": 12, "total_tokens": 12},
            },
        )
        for path in ("/classify", "/v1/classify")
    ),
    Case(
        "RR-19 messages",
        "POST",
        "/classify",
        body={"model": "mock", "messages": [{"role": "user", "content": "hi"}]},
        **rejected("messages"),
    ),
    Case("RR-19 no input", "POST", "/classify", body={"model": "mock"}, **rejected("input")),
    tokenize(
        "TK-01",
        fields={"prompt": "red apple"},
        body_is={"count": 2, "max_model_len": ..., "tokens": [0, 1], "token_strs": None},
    ),
    tokenize(
        "TK-02",
        fields={"prompt": "red apple", "return_token_strs": True},
        body_has={"token_strs": ["red", " apple"]},
    ),
    tokenize("TK-03", fields={"prompt": ""}, body_has={"count": 0, "tokens": []}),
    tokenize(
        "TK-04",
        fields={"messages": [{"role": "user", "content": "hi"}]},
        body_has={"count": 1, "tokens": [0]},
    ),
    tokenize("TK-05", fields={"prompt": ["a"]}, **rejected("prompt")),
    tokenize("TK-05 neither", fields={}, **rejected("prompt")),
    tokenize(
        "TK-05 both",
        fields={"prompt": "a", "messages": [{"role": "user", "content": "hi"}]},
        **rejected("messages"),
    ),
    tokenize(
        "TK-06",
        fields={
            "messages": [{"role": "user", "content": "hi"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        **rejected("continue_final_message"),
    ),
    *(
        Case(
            f"TK-08 {tokens}",
            "POST",
            "/detokenize",
            body={"model": "mock", "tokens": tokens},
            **rejected("tokens" if tokens is None else "tokens[0]"),
        )
        for tokens in ([-1], [1.5], ["a"], None)
    ),
    Case(
        "TK-09",
        "POST",
        "/v1/tokenize",
        body={"model": "nope", "prompt": "a"},
        status=404,
        body_has={"error": {"code": "model_not_found"}},
    ),
    Case(
        "TK-10",
        "POST",
        "/v1/detokenize",
        body={"model": "mock", "tokens": [1]},
        status=501,
        body_has={"error": {"type": "not_implemented_error"}},
    ),
)
"""The public cases of the wire document that this model supports."""
