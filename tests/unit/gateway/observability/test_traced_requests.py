"""Every kind of request for a model can be traced."""

import pytest
from msgspec.structs import replace

from gateway.observability.semconv import OPERATION_NAMES
from protocols.core.request import (
    AnyRequest,
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
    TokenizeRequest,
)
from tests.support.otlp_collector import decode_attributes
from tests.unit.gateway.observability.test_tracing import RECORD, trace_request

REQUESTS: list[AnyRequest] = [
    GenerationRequest(kind="chat", model="m"),
    GenerationRequest(kind="completion", model="m", prompts=("a",)),
    EmbeddingRequest(model="m", inputs=("a",)),
    RerankRequest(model="m", queries=("a",), documents=("b",)),
    ClassifyRequest(model="m", inputs=("a",)),
    TokenizeRequest(model="m", prompt="a"),
    DetokenizeRequest(model="m", token_ids=(1,)),
]


def test_every_operation_is_among_the_requests() -> None:
    assert {request.kind for request in REQUESTS} == OPERATION_NAMES.keys()


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: str(request.kind))
def test_span_of_an_attempt_names_the_operation(request_: AnyRequest) -> None:
    record = replace(RECORD, operation=request_.kind)
    span = trace_request(record, request=request_)[-1]

    name = decode_attributes(span.attributes)["gen_ai.operation.name"]

    assert name == OPERATION_NAMES[request_.kind]
