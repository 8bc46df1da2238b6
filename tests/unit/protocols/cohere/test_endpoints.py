"""Paths, errors and models of Cohere's API, and pass-through to its workers."""

import json
from typing import Any

import msgspec
import pytest

from protocols.cohere.endpoints import Cohere
from protocols.core import errors
from protocols.core.aggregate import UnaryResponse
from protocols.core.catalog import ModelInfo, ModelTask
from protocols.core.events import ChoiceEnd, RelevanceScore, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ModelSettings, PassthroughRequest, ResponseContext
from protocols.core.request import RerankRequest
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.cohere.conftest import (
    COHERE,
    REQUEST,
    TURNS,
    MakeCall,
    format_stream,
    make_end,
    make_event,
)

RERANK = b'{"model":"m","query":"q","documents":["a",{"text":"b"}],"top_n":1}'


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="no profile '1'"):
        Cohere("1")


def test_list_of_models_can_be_left_out() -> None:
    assert [one.path for one in Cohere("2", models=False).endpoints] == ["/v2/chat", "/v2/rerank"]


@pytest.mark.parametrize("stream", [True, False])
def test_routing(make: MakeCall, *, stream: bool) -> None:
    info = COHERE.read_routing_info(make({"stream": stream}))

    assert (info.model, info.stream) == ("m", stream)


def test_routing_of_rerank_and_of_no_json(make: MakeCall) -> None:
    assert COHERE.read_routing_info(make(RERANK, "/v2/rerank")).model == "m"
    with pytest.raises(errors.MalformedRequest):
        COHERE.read_routing_info(make(b"{"))


def test_rerank(make: MakeCall, response_context: ResponseContext) -> None:
    call = make(RERANK, "/v2/rerank")
    request = COHERE.decode_request(call)
    assert isinstance(request, RerankRequest)

    encoder = COHERE.create_encoder(call, request, response_context)
    body = json.loads(encoder.encode_unary(UnaryResponse(scores=[0.1, 0.9])).body)

    assert body["results"] == [{"index": 1, "relevance_score": 0.9}]
    assert body["meta"]["api_version"] == {"version": "2"}

    decoder = COHERE.create_decoder(request)
    decoder.feed(b'{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0}]}')
    assert RelevanceScore(1, 0.9) in decoder.close()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (errors.ModelNotFound("x", model="n"), 404, "model 'n' not found, make sure .*"),
        (errors.Unauthorized("x", missing=True), 401, "no api key supplied"),
        (errors.Unauthorized("x", missing=False), 401, "invalid api token"),
        (errors.UnsupportedEndpoint("x"), 501, "x"),
        (errors.ContentFiltered("x"), 498, "x"),
        (errors.WorkerFailed("x"), 502, "x"),
        (errors.InternalError("x"), 500, "x"),
    ],
)
def test_errors(make: MakeCall, error: errors.GatewayError, status: int, message: str) -> None:
    reply = COHERE.encode_error(error, make())

    assert reply.status == status
    body = json.loads(reply.body)
    assert body.keys() == {"message", "id"}
    assert body["id"] == "7f"
    assert body["message"].startswith(message.removesuffix(".*"))
    assert json.loads(COHERE.encode_error(error, None).body).keys() == {"message"}


class Models:
    """A catalog with a model for each task, one of which has an alias."""

    ready = True
    tasks: tuple[ModelTask, ...] = ("chat", "embedding", "rerank", "classify")

    def list_models(self) -> list[ModelInfo]:
        """Return the models."""
        return [
            ModelInfo(task, (), task, ("talk",) if task == "chat" else (), context_length=9)
            for task in self.tasks
        ]

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        """Return the first model."""
        del model, version
        return self.list_models()[0]


def test_models(make: MakeCall) -> None:
    def ask(path: str, query: str = "") -> Any:
        call = make(b"", path, method="GET", query=query)
        return json.loads(COHERE.handle_info_request(call, Models()).body)

    talk = {"name": "talk", "endpoints": ["chat"], "finetuned": False, "context_length": 9}
    names = [one["name"] for one in ask("/v1/models")["models"]]
    assert names == ["chat", "talk", "embedding", "rerank", "classify"]
    assert [one["name"] for one in ask("/v1/models", "endpoint=embed")["models"]] == ["embedding"]
    assert ask("/v1/models/talk") == talk
    assert ask("/v1/models", "endpoint=generate") == {"models": []}
    with pytest.raises(errors.InvalidParameter):
        ask("/v1/models", "endpoint=sing")


def test_names_of_fields_and_the_description(make: MakeCall) -> None:
    assert COHERE.field_names(make())["sampling.top_p"] == "p"
    assert COHERE.openapi_fragment().operations.keys() == {"chat", "rerank", "models", "model"}


def test_worker_errors_are_read() -> None:
    error = COHERE.read_error(400, {}, b'{"id":"x","message":"too long: context length is 9"}')

    assert isinstance(error, errors.ContextTooLong)


# --- pass-through ---------------------------------------------------------------------------------


def prepare(
    make: MakeCall, context: ResponseContext, changed: Any = b"", path: str = "/v2/chat"
) -> PassthroughRequest:
    prepared = COHERE.prepare_passthrough(COHERE, make(changed or {}, path), context)
    assert prepared is not None
    return prepared


def test_own_request_is_passed_through_with_the_name_of_the_workers_model(
    make: MakeCall, response_context: ResponseContext
) -> None:
    prepared = prepare(make, response_context, {"documents": ["a"], "mood": 1, "p": 0.5})

    assert json.loads(prepared.upstream_request.body) == {
        "model": "backend-m",
        "messages": TURNS,
        "documents": ["a"],
        "mood": 1,
        "p": 0.5,
    }
    assert prepared.request.model == "backend-m"
    assert prepared.build_headers() == (
        ("Content-Type", "application/json"),
        ("x-served-model", "v1"),
    )


@pytest.mark.parametrize(
    ("changed", "path"), [({"k": -1}, "/v2/chat"), ({"query": "q", "documents": []}, "/v2/rerank")]
)
def test_other_requests_are_translated(
    make: MakeCall, response_context: ResponseContext, changed: Any, path: str
) -> None:
    assert COHERE.prepare_passthrough(COHERE, make(changed, path), response_context) is None


def test_settings_that_the_api_cannot_carry_are_translated(
    make: MakeCall, response_context: ResponseContext
) -> None:
    hot = msgspec.structs.replace(
        response_context, settings=ModelSettings(defaults={"sampling.temperature": 1.5})
    )

    assert COHERE.prepare_passthrough(COHERE, make(), hot) is None
    assert COHERE.prepare_passthrough(OpenAI(), make(), response_context) is None


def test_unary_response_is_passed_through(
    make: MakeCall, response_context: ResponseContext
) -> None:
    reader = prepare(make, response_context).create_reader()
    body = b'{"id":"a","message":{"content":"x","citations":[]},"finish_reason":"COMPLETE"}'

    assert reader.feed([body]) == (b"", [])
    written, events = reader.close()

    assert written == body
    assert TextDelta("x") in events


def test_stream_is_passed_through_with_the_names_of_its_events(
    make: MakeCall, response_context: ResponseContext
) -> None:
    prepared = prepare(make, response_context, {"stream": True})
    reader = prepared.create_reader()
    counts = {"tokens": {"input_tokens": 1, "output_tokens": 2}}
    stream = format_stream(
        make_event("content-delta", 0, content={"text": "x"}),
        make_event("citation-start", 0, citations={"start": 0}),
        make_end(usage=counts),
    )

    written, events = reader.feed([stream + b"data: [DONE]\n\n"])

    assert written == stream + b"data: [DONE]\n\n"
    assert events[0] == TextDelta("x")
    assert events[-3:] == [ChoiceEnd("eos"), Usage(1, 2), StreamEnd()]
    assert prepared.create_encoder is not None
    assert prepared.create_encoder().content_type == "text/event-stream; charset=utf-8"


def test_implausible_counts_are_left_out(make: MakeCall, response_context: ResponseContext) -> None:
    reader = prepare(make, response_context, {"stream": True}).create_reader()
    stream = format_stream(
        make_end(usage={"tokens": {"input_tokens": -1}}), {"type": "debug", "delta": 5}
    )

    written, _ = reader.feed([stream + b"data: odd\n\n"])

    assert written is not None
    assert b"usage" not in written
    assert written.startswith(b"event: message-end\ndata: {")
    assert written.endswith(b"data: odd\n\n")


def test_decoder_of_conversations() -> None:
    decoder = COHERE.create_decoder(REQUEST)

    assert decoder.feed(format_stream(make_end())) == [ChoiceEnd("eos")]
