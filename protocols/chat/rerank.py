"""Reranking and scoring: requests of clients, responses to them, and the same of workers.

Sources: the reference of Cohere's v1 and v2 API, Jina's, vLLM's protocol modules of rerank and
score, and NVIDIA's retrieval microservices (``/v1/ranking``). One reader takes the fields of all.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols import params
from protocols.chat.params import (
    NULL,
    as_array,
    as_object,
    as_text,
    conflict_error,
    empty_value_error,
    invalid_type_error,
    missing_error,
    null_to_none,
    too_long_error,
)
from protocols.chat.requests import (
    DEFAULT_REQUEST_RULES,
    RequestRules,
    collect_extra,
    read_model,
    set_request_info,
)
from protocols.chat.responses import EmbeddingUsage, ResponseStyle, encode_json
from protocols.chat.unary import (
    UnaryBodyDecoder,
    UnaryEncoder,
    add_extra_keys,
    keep_identity,
    list_unknown_keys,
)
from protocols.chat.wire_responses import read_text
from protocols.chat.worker_errors import raise_worker_error
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import WorkerFailed
from protocols.core.events import (
    Event,
    RelevanceScore,
    ResponseMetadata,
    StreamEnd,
    Usage,
)
from protocols.core.extra import KeyTree, read_extra_fields
from protocols.core.indices import check_indices
from protocols.core.interfaces import HttpResponse, ResponseContext
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.request import ExtraFields, RerankRequest
from protocols.core.token_counts import MAX_TIMESTAMP, MAX_TOKENS, read_integer
from protocols.core.vectors import encode_array
from protocols.json_body import build_answer_error, decode_value
from protocols.params import Param, ParamTable

MAX_DOCUMENTS: Final = 10_000
_COMMON_PARAMS: Final = (
    Param("truncate_prompt_tokens", "truncate", "int", minimum=-1),
    Param("priority", "priority", "int", minimum=0, maximum=255),
    Param("request_id", "client_id", "str"),
    Param("user", "labels.user", "str"),
)
RERANK_PARAMS: Final = ParamTable(
    Param("top_n", "top_n", "int", minimum=0, description="0 returns all documents."),
    Param("return_documents", "return_documents", "bool"),
    *_COMMON_PARAMS,
)
SCORE_PARAMS: Final = ParamTable(*_COMMON_PARAMS)

_RERANK_FIELDS: Final = frozenset({"model", "query", "documents", "rank_fields"})
_RANKING_FIELDS: Final = frozenset({"model", "query", "passages"})
_TEXT_KEYS: Final = {"text": None}
SCORE_FIELD_PAIRS: Final = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""The names of a score request's two texts; vLLM has renamed them several times."""
_SCORE_FIELDS: Final = frozenset({"model", *(name for pair in SCORE_FIELD_PAIRS for name in pair)})


# --- requests of clients --------------------------------------------------------------------------


def read_rerank(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    client_id: str | None = None,
    timeout: float | None = None,
) -> RerankRequest:
    """Decode a rerank request of Cohere's, Jina's or vLLM's API. Raises ClientError."""
    model, (query, query_extra) = read_model(fields), _read_query(fields)
    rank_fields = _read_rank_fields(fields)
    raw_documents = _read_documents(fields, "documents")
    documents = tuple(
        _read_document(raw, f"documents[{i}]", rank_fields) for i, raw in enumerate(raw_documents)
    )
    values = params.read_params(RERANK_PARAMS, fields)
    set_request_info(values, fields, client_id, timeout)
    if not values.get("top_n", 1):
        values["top_n"] = None
    return RerankRequest(
        model=model,
        queries=(query,),
        documents=documents,
        raw_documents=raw_documents,
        labels=values.get_section("labels"),
        extra=collect_extra(values, fields, RERANK_PARAMS, _RERANK_FIELDS, rules.unknown_fields),
        field_extra=query_extra,
        **values.build_request_arguments(),
    )


def read_ranking(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    client_id: str | None = None,
    timeout: float | None = None,
) -> RerankRequest:
    """Decode a ranking request of NVIDIA's API. Raises ClientError."""
    model = read_model(fields)
    raw_query = null_to_none(fields.get("query"))
    if raw_query is None:
        raise missing_error("query")
    texts = {"query": as_object(raw_query, "query")}
    for i, raw in enumerate(_read_documents(fields, "passages")):
        texts[f"passages[{i}]"] = as_object(raw, f"passages[{i}]")
    query, *documents = [as_text(one, "text", at) for at, one in texts.items()]
    unknown = [
        replace(extra, inside=("documents" + at.removeprefix("passages"),) if i else ("query",))
        for i, (at, one) in enumerate(texts.items())
        if (extra := read_extra_fields(one, at, _TEXT_KEYS)) is not None
    ]
    values = params.read_params(SCORE_PARAMS, fields)
    set_request_info(values, fields, client_id, timeout)
    return RerankRequest(
        model=model,
        queries=(query,),
        documents=tuple(documents),
        labels=values.get_section("labels"),
        extra=collect_extra(values, fields, SCORE_PARAMS, _RANKING_FIELDS, rules.unknown_fields),
        field_extra=tuple(unknown),
        **values.build_request_arguments(),
    )


def read_score(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    client_id: str | None = None,
    timeout: float | None = None,
) -> RerankRequest:
    """Decode a score request of vLLM's API: one text with several, or pairs of texts.

    Raises ClientError.
    """
    model = read_model(fields)
    first, second = _find_score_fields(fields)
    queries, documents = _read_texts(fields, first), _read_texts(fields, second)
    if not queries:
        raise _build_empty_error(first, "At least one text element must be given")
    if not documents:
        raise _build_empty_error(second, "At least one text_pair element must be given")
    if len(queries) not in (1, len(documents)):
        raise conflict_error(second, "Input lengths must be either 1:1, 1:N or N:N")
    values = params.read_params(SCORE_PARAMS, fields)
    set_request_info(values, fields, client_id, timeout)
    return RerankRequest(
        model=model,
        queries=queries,
        documents=documents,
        labels=values.get_section("labels"),
        extra=collect_extra(values, fields, SCORE_PARAMS, _SCORE_FIELDS, rules.unknown_fields),
        **values.build_request_arguments(),
    )


def _read_query(fields: Mapping[str, Raw]) -> tuple[str, tuple[ExtraFields, ...]]:
    """A string, or an object with ``text``, and the object's other keys."""
    raw = null_to_none(fields.get("query"))
    if raw is None:
        raise missing_error("query")
    value = decode_value(raw)
    match value:
        case str():
            return value, ()
        case {"text": str() as text}:
            extra = read_extra_fields(value, "query", _TEXT_KEYS)
            return text, () if extra is None else (replace(extra, inside=("query",)),)
        case _:
            raise invalid_type_error("query", "a string or an object with a text", value)


def _read_rank_fields(fields: Mapping[str, Raw]) -> tuple[str, ...]:
    raw = null_to_none(fields.get("rank_fields"))
    value = [] if raw is None else decode_value(raw)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid_type_error("rank_fields", "an array of strings", value)
    return tuple(value)


def _read_documents(fields: Mapping[str, Raw], name: str) -> tuple[Raw, ...]:
    """The documents, undecoded: an array, or one text."""
    raw = null_to_none(fields.get(name))
    if raw is None:
        raise missing_error(name)
    if isinstance(decode_value(raw), str):
        return (raw,)
    documents = as_array(raw, name)
    if not documents:
        raise empty_value_error(name, documents)
    if len(documents) > MAX_DOCUMENTS:
        raise too_long_error(name, MAX_DOCUMENTS, documents)
    return tuple(documents)


def _read_document(raw: Raw, at: str, rank_fields: Sequence[str]) -> str:
    """The text of a document that is a string or an object."""
    value = decode_value(raw)
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise invalid_type_error(at, "a string or an object", value)
    if rank_fields:
        for name in rank_fields:
            if not isinstance(value.get(name), str):
                raise invalid_type_error(f"{at}.{name}", "a string", value.get(name))
        return "\n".join(value[name] for name in rank_fields)
    if isinstance(value.get("text"), str):
        text: str = value["text"]
        return text
    return "\n".join(f"{name}: {_format_field(one)}" for name, one in value.items())


def _format_field(value: Any) -> str:
    return value if isinstance(value, str) else encode_json(value).decode()


def _find_score_fields(fields: Mapping[str, Raw]) -> tuple[str, str]:
    """The two names that the request uses. Raises InvalidParameter."""
    given = {name for name, raw in fields.items() if raw != NULL}
    for first, second in SCORE_FIELD_PAIRS:
        if {first, second} <= given:
            return first, second
    for first, second in SCORE_FIELD_PAIRS:
        if given & {first, second}:
            raise missing_error(second if first in given else first)
    raise missing_error(SCORE_FIELD_PAIRS[0][0])


def _read_texts(fields: Mapping[str, Raw], name: str) -> tuple[str, ...]:
    """A text or an array of texts."""
    value = decode_value(fields[name])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid_type_error(name, "a string or array of strings", value)
    if len(texts) > MAX_DOCUMENTS:
        raise too_long_error(name, MAX_DOCUMENTS, texts)
    return tuple(texts)


def _build_empty_error(name: str, text: str) -> Exception:
    error = empty_value_error(name)
    error.message = text
    return error


# --- responses to clients -------------------------------------------------------------------------


def rank_documents(scores: Sequence[float], top_n: int | None) -> list[int]:
    """The indices of the ``top_n`` best documents, best first; ties in their own order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]


class RerankResult(Struct, omit_defaults=True):
    """One document's score; ``document`` is an object with ``text``."""

    index: int
    relevance_score: float
    document: Raw | UnsetType = UNSET


class ApiVersion(Struct):
    """The version of Cohere's API."""

    version: str


class BilledUnits(Struct):
    """Cohere's unit: one search of up to 100 documents."""

    search_units: int


class RerankMeta(Struct):
    """Cohere's metadata."""

    api_version: ApiVersion
    billed_units: BilledUnits


SCORES_SOURCE: Final = "scores"
"""The source of the extra keys of what Cohere's, Jina's and vLLM's servers answer, one superset."""


class RerankResponse(Struct):
    """A superset of the responses of Cohere, Jina and vLLM."""

    id: str
    model: str
    results: list[RerankResult]
    meta: RerankMeta | UnsetType = UNSET
    object: Literal["list"] = "list"
    created: int | UnsetType = UNSET
    usage: EmbeddingUsage | UnsetType = UNSET


class RerankEncoder(UnaryEncoder):
    """Encodes the response to a rerank request.

    ``version`` is that of Cohere's API; version 2 never returns documents. Without a version, as in
    vLLM and Jina, documents are returned unless the client declines.
    """

    extra_source = SCORES_SOURCE

    def __init__(
        self,
        style: ResponseStyle,
        request: RerankRequest,
        context: ResponseContext,
        version: Literal["1", "2"] = "1",
    ) -> None:
        super().__init__(style, context)
        self._request, self._context, self._version = request, context, version

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        request, scores = self._request, response.scores
        with_documents = self._version == "1" and request.return_documents is not False
        results = [
            RerankResult(i, scores[i], self._build_document(i) if with_documents else UNSET)
            for i in rank_documents(scores, request.top_n)
        ]
        body = RerankResponse(self._context.id, self._context.model, encode_array(results))
        if not any(path[0] == "meta" for one in response.extra for path, _ in one.values):
            units = BilledUnits(math.ceil(len(request.documents) / 100))
            body.meta = RerankMeta(ApiVersion(self._version), units)
        body.usage = _build_usage(response)
        keep_identity(body, response, self.extra_source)
        return HttpResponse(200, add_extra_keys(encode_json(body), response, self.extra_source))

    def _build_document(self, index: int) -> Raw:
        """The document as an object, with all fields that the client sent."""
        raw = self._request.raw_documents[index]
        if bytes(raw)[:1] == b"{":
            return raw
        return Raw(b'{"text":' + bytes(raw) + b"}")


class RankingItem(Struct):
    """One passage's score."""

    index: int
    logit: float


class RankingResponse(Struct):
    """NVIDIA's response: all passages, best first."""

    rankings: list[RankingItem]
    usage: EmbeddingUsage | UnsetType = UNSET


_SMALLEST_PROBABILITY: Final = 1e-6


def compute_logits(scores: Sequence[float]) -> list[float]:
    """The scores as logits. If all lie between 0 and 1, they are taken for probabilities."""
    if not all(0 <= score <= 1 for score in scores):
        return list(scores)
    limited = (
        min(max(score, _SMALLEST_PROBABILITY), 1 - _SMALLEST_PROBABILITY) for score in scores
    )
    return [math.log(p / (1 - p)) for p in limited]


class RankingEncoder(UnaryEncoder):
    """Encodes the response to a ranking request."""

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        logits = compute_logits(response.scores)
        rankings = [RankingItem(i, logits[i]) for i in rank_documents(logits, None)]
        body = RankingResponse(encode_array(rankings), _build_usage(response))
        return HttpResponse(200, encode_json(body))


class ScoreItem(Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(Struct):
    """The scores of all pairs, in their order."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    object: Literal["list"] = "list"
    usage: EmbeddingUsage | UnsetType = UNSET


class ScoreEncoder(UnaryEncoder):
    """Encodes the response to a score request."""

    extra_source = SCORES_SOURCE

    def __init__(self, style: ResponseStyle, context: ResponseContext) -> None:
        super().__init__(style, context)
        self._context = context

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        context = self._context
        items = [ScoreItem(i, score) for i, score in enumerate(response.scores)]
        body = ScoreResponse(
            f"score-{context.id}", context.created, context.model, encode_array(items)
        )
        body.usage = _build_usage(response)
        keep_identity(body, response, self.extra_source)
        return HttpResponse(200, add_extra_keys(encode_json(body), response, self.extra_source))


def _build_usage(response: UnaryResponse) -> EmbeddingUsage | UnsetType:
    if response.usage is None:
        return UNSET
    return EmbeddingUsage(response.usage.prompt_tokens, response.usage.prompt_tokens)


# --- workers --------------------------------------------------------------------------------------


def write_rerank(request: RerankRequest) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request to a worker: ``rerank`` for one query, else ``score``.

    All documents are requested: the gateway sorts them and keeps the best.
    """
    if len(request.queries) == 1:
        objects = {one.inside for one in request.field_extra}
        documents = [
            _write_text(text, (f"documents[{i}]",) in objects)
            for i, text in enumerate(request.documents)
        ]
        query = _write_text(request.queries[0], ("query",) in objects)
        return "rerank", {"model": request.model, "query": query, "documents": documents}
    body = {"model": request.model, "text_1": request.queries, "text_2": request.documents}
    return "score", body


def _write_text(text: str, is_object: bool) -> str | dict[str, str]:  # noqa: FBT001 - one value each
    """A text; as an object if the client sent one, whose other keys go beside."""
    return {"text": text} if is_object else text


class _WireScore(Struct):
    """One item of a response: of ``results``, of ``data``, or of the list itself (SGLang, TEI)."""

    index: int
    relevance_score: float | None = None
    score: float | None = None


class _WireUsage(Struct):
    prompt_tokens: Any = None
    total_tokens: Any = None


class _WireScores(Struct):
    results: list[_WireScore] | None = None
    data: list[_WireScore] | None = None
    id: Any = None
    created: Any = None
    model: Any = None
    usage: _WireUsage | None = None
    meta: Any = None


_ANSWER_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("id", "object", "model", "created", "results", "data")),
    "usage": dict.fromkeys(("prompt_tokens", "total_tokens")),
    "meta": {"api_version": {}, "billed_units": {}, "tokens": {}},
}
"""No event represents Cohere's metadata: each key of it is an extra one."""
_SCORE_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("index", "relevance_score", "score", "text", "object")),
    "document": _TEXT_KEYS,
}
"""The text of a document is the client's own."""
_decode_scores = JsonDecoder(_WireScores | list[_WireScore]).decode


class RerankDecoder(UnaryBodyDecoder):
    """Decodes the response to a RerankRequest."""

    def __init__(
        self,
        request: RerankRequest,
        complaint: Any = raise_worker_error,
        source: str = SCORES_SOURCE,
    ) -> None:
        super().__init__(complaint)
        self._request, self._source = request, source

    def read_body(self, body: bytes) -> Sequence[Event]:
        """See ``protocols.chat.unary.UnaryBodyDecoder``."""
        try:
            wire = _decode_scores(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            self._raise_if_error(body)
            raise build_answer_error(e) from e
        if isinstance(wire, list):
            wire = _WireScores(results=wire)
        items = wire.results if wire.results is not None else wire.data
        if items is None:
            self._raise_if_error(body)
            raise WorkerFailed("The worker's answer has no results.")
        check_indices((item.index for item in items), len(self._request.documents), "score")
        scores: list[RelevanceScore] = []
        for item in items:
            score = item.score if item.relevance_score is None else item.relevance_score
            if score is None:
                raise WorkerFailed(f"The worker's answer has no score for document {item.index}.")
            scores.append(RelevanceScore(item.index, score))
        return [
            ResponseMetadata(
                read_text(wire.model),
                id=read_text(wire.id),
                created=read_integer(wire.created, MAX_TIMESTAMP),
                source=self._source,
            ),
            *list_unknown_keys(
                decode_json(body), self._source, _ANSWER_KEYS, (_SCORE_KEYS, "score")
            ),
            *scores,
            *_read_usage(wire),
        ]


def _read_usage(wire: _WireScores) -> list[Event]:
    """The last events. Some workers only report ``total_tokens``, Cohere's the tokens of input."""
    sent = None
    if wire.usage is not None:
        usage = wire.usage
        sent = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    meta: Any = wire.meta if isinstance(wire.meta, dict) else {}
    for counts in (meta.get("tokens"), meta.get("billed_units")):
        if sent is None and isinstance(counts, dict):
            sent = counts.get("input_tokens")
    tokens = read_integer(sent, MAX_DOCUMENTS * MAX_TOKENS)
    return [StreamEnd(sent is not None)] if tokens is None else [Usage(tokens), StreamEnd()]
