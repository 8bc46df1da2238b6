"""The kinds of requests that an upstream adapter supports."""

from typing import cast

import pytest

from protocols.core.interfaces import (
    BASIC_KINDS,
    PassthroughReader,
    PassthroughRequest,
    SupportsRequestKinds,
    UpstreamAdapter,
    UpstreamRequest,
    build_unsupported_kind_error,
    get_query_parameters,
    get_request_kinds,
)
from protocols.core.request import RequestKind, TokenizeRequest
from protocols.core.restricted import RestrictedAdapter
from protocols.databricks import Databricks
from protocols.openai import OpenAI
from protocols.tgi import TGI

OPENAI = cast("UpstreamAdapter", OpenAI("vllm"))


def create_reader() -> PassthroughReader:
    raise AssertionError


def test_request_without_its_body_keeps_the_rest() -> None:
    sent = UpstreamRequest("/v1/x", b"body", (("a", "1"),), "PUT")
    passed = PassthroughRequest(TokenizeRequest(model="m"), sent, tuple, create_reader)

    bodiless = passed.without_body()

    assert bodiless.upstream_request == UpstreamRequest("/v1/x", b"", (("a", "1"),), "PUT")
    assert bodiless.request is passed.request


def test_adapter_without_request_kinds_takes_the_basic_ones() -> None:
    adapter = cast("UpstreamAdapter", Databricks())

    assert not isinstance(adapter, SupportsRequestKinds)
    assert get_request_kinds(adapter) == BASIC_KINDS == {"chat", "completion", "embedding"}


def test_request_kinds_of_an_adapter_survive_its_restriction() -> None:
    restricted = cast("UpstreamAdapter", RestrictedAdapter(OPENAI, ("n",)))

    assert get_request_kinds(restricted) == get_request_kinds(OPENAI) > BASIC_KINDS


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rerank", "Rerank (Score)"), ("tokenize", "Tokenize"), ("detokenize", "Detokenize")],
)
def test_error_of_an_unsupported_kind_names_the_api(kind: RequestKind, name: str) -> None:
    error = build_unsupported_kind_error(kind)

    assert error.message == f"The model does not support the {name} API."
    assert error.param == "model"


def test_an_adapter_without_query_parameters_knows_none() -> None:
    assert get_query_parameters(TGI()) == frozenset()
    assert get_query_parameters(OpenAI("vllm")) == {"api-version"}
