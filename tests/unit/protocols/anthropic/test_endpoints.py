"""The endpoints beside messages, and the routing information."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.anthropic.endpoints import Anthropic
from protocols.core.aggregate import aggregate
from protocols.core.catalog import ModelInfo, VersionInfo
from protocols.core.errors import ClientError, MalformedRequest, ModelNotFound, WorkerFailed
from protocols.core.events import StreamEnd, TokenList
from protocols.core.interfaces import (
    ClientRequest,
    RateLimitStatus,
    ResponseContext,
    RoutingInfo,
)
from protocols.core.request import TokenizeRequest
from protocols.core.token_counts import estimate_prompt_tokens
from tests.unit.protocols.anthropic.conftest import MakeCall

VERSIONS = (VersionInfo("1", "b", 100),)


class FakeCatalog:
    """A catalog of three models, one with an alias."""

    ready = True

    def __init__(self, *models: ModelInfo) -> None:
        self._models = models

    def list_models(self) -> tuple[ModelInfo, ...]:
        return self._models

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        del version
        for info in self._models:
            if model in (info.name, *info.aliases):
                return info
        raise ModelNotFound("no such model", model=model)


CATALOG = FakeCatalog(
    ModelInfo("a", VERSIONS, aliases=("claude-a",), created=0, context_length=4096, max_tokens=100),
    ModelInfo("org/b", VERSIONS, created=1_767_225_600),
)


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("", ["a", "claude-a", "org/b"], False),
        ("limit=1000", ["a", "claude-a", "org/b"], False),
        ("limit=2", ["a", "claude-a"], True),
        ("limit=2&after_id=claude-a", ["org/b"], False),
        ("limit=1&before_id=org/b", ["claude-a"], True),
        ("before_id=claude-a", ["a"], False),
        ("after_id=a&before_id=org/b", ["claude-a"], False),
        ("after_id=nope", ["a", "claude-a", "org/b"], False),
    ],
)
def test_models_are_listed_by_pages(
    make: MakeCall, query: str, names: list[str], *, has_more: bool
) -> None:
    call = make(path="/v1/models", method="GET", query=query)

    body = msgspec.json.decode(Anthropic().handle_info_request(call, CATALOG).body)

    assert [item["id"] for item in body["data"]] == names
    assert (body["first_id"], body["last_id"]) == (names[0], names[-1])
    assert body["has_more"] is has_more


def test_aliases_that_are_not_listed_are_left_out(make: MakeCall) -> None:
    catalog = FakeCatalog(ModelInfo("a", VERSIONS, aliases=("claude-a",), list_aliases=False))
    call = make(path="/v1/models", method="GET")

    body = msgspec.json.decode(Anthropic().handle_info_request(call, catalog).body)

    assert [item["id"] for item in body["data"]] == ["a"]


def test_empty_list(make: MakeCall) -> None:
    reply = Anthropic().handle_info_request(make(path="/v1/models", method="GET"), FakeCatalog())

    assert msgspec.json.decode(reply.body) == {
        "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "²"])
def test_invalid_page_size_is_rejected(make: MakeCall, limit: str) -> None:
    call = make(path="/v1/models", method="GET", query=f"limit={limit}")

    with pytest.raises(ClientError, match="limit: "):
        Anthropic().handle_info_request(call, CATALOG)


def test_one_model(make: MakeCall) -> None:
    reply = Anthropic().handle_info_request(make(path="/v1/models/org%2Fb", method="GET"), CATALOG)

    assert msgspec.json.decode(reply.body) == {
        "type": "model",
        "id": "org/b",
        "display_name": "org/b",
        "created_at": "2026-01-01T00:00:00Z",
        "lifecycle": "active",
    }
    assert ("request-id", "req_7f") in reply.headers
    with pytest.raises(ModelNotFound):
        Anthropic().handle_info_request(make(path="/v1/models/c", method="GET"), CATALOG)


def test_root_answers_a_head_request(make: MakeCall) -> None:
    reply = Anthropic().handle_info_request(make(path="/", method="HEAD"), CATALOG)

    assert (reply.status, reply.body) == (200, b"")


COUNT = "/v1/messages/count_tokens"


def count_call(make: MakeCall, **fields: object) -> ClientRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9}], **fields}
    return make(msgspec.json.encode(body), COUNT)


def test_token_count_needs_no_max_tokens(make: MakeCall, response_context: ResponseContext) -> None:
    call = count_call(make, system="s", tools=[{"name": "f", "input_schema": {}}])

    request = Anthropic().decode_request(call)

    assert isinstance(request, TokenizeRequest)
    assert [message.role for message in request.messages] == ["system", "user"]
    assert [tool.name for tool in request.tools] == ["f"]

    encoder = Anthropic().create_encoder(call, request, response_context)
    token_count = aggregate([TokenList((5, 6, 7)), StreamEnd()])
    assert encoder.encode_unary(token_count).body == b'{"input_tokens":3}'
    assert encoder.headers() == (("request-id", "req_7f"),)
    assert encoder.encode_events([StreamEnd()]) == b""
    assert b"api_error" in encoder.encode_error_event(WorkerFailed("x"))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 3),
        ({"tools": [{"name": "f", "description": "12", "input_schema": {}}]}, 8),
        ({"messages": [{"role": "user", "content": ""}]}, 1),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "https://x"}}
                        ],
                    },
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "abcd"}]},
                ]
            },
            1501,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": ""},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
                ]
            },
            1,
        ),
    ],
)
def test_tokens_are_estimated(make: MakeCall, fields: dict[str, object], count: int) -> None:
    call = count_call(make, **fields)
    request = Anthropic().decode_request(call)
    assert isinstance(request, TokenizeRequest)
    reply = Anthropic().encode_token_count(call, estimate_prompt_tokens(request))

    assert msgspec.json.decode(reply.body) == {"input_tokens": count}


@pytest.mark.parametrize(
    ("changed", "info"),
    [({}, RoutingInfo("m")), ({"stream": True}, RoutingInfo("m", stream=True)),
     ({"stream": None, "model": "x"}, RoutingInfo("x"))],
)  # fmt: skip
def test_routing_info(make: MakeCall, changed: dict[str, object], info: RoutingInfo) -> None:
    assert Anthropic().read_routing_info(make(changed)) == info


def test_body_that_is_no_json_is_refused(make: MakeCall) -> None:
    call = replace(make({}), body=b"{")
    with pytest.raises(MalformedRequest):
        Anthropic().read_routing_info(call)


def test_stream_must_be_a_boolean(make: MakeCall) -> None:
    with pytest.raises(ClientError, match="stream: Input should be a valid boolean"):
        Anthropic().read_routing_info(make({"stream": 1}))


def test_rate_limit_headers() -> None:
    requests, tokens = RateLimitStatus(9, 8, 1.0), RateLimitStatus(99, 5, 2.0)

    assert Anthropic().rate_limit_headers(requests, tokens) == (
        ("anthropic-ratelimit-requests-limit", "9"),
        ("anthropic-ratelimit-requests-remaining", "8"),
        ("anthropic-ratelimit-tokens-limit", "99"),
        ("anthropic-ratelimit-tokens-remaining", "5"),
    )
    assert Anthropic().rate_limit_headers(None, None) == ()


def test_field_names(make: MakeCall) -> None:
    assert Anthropic().field_names(make())["stopping.stop"] == "stop_sequences"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"effort": None}}, "thinking"),
        ({"messages": [{"role": "user", "content": 'the key "effort"'}]}, "thinking"),
        ({"metadata": {"effort": "low"}}, "thinking"),
    ],
)
def test_effort_has_the_name_of_the_field_that_sets_it(
    make: MakeCall, fields: dict[str, Any], expected: str
) -> None:
    assert Anthropic().field_names(make(fields))["reasoning.effort"] == expected


def test_schema_describes_every_endpoint() -> None:
    fragment = Anthropic().openapi_fragment()
    assert fragment.operations.keys() == {one.operation for one in Anthropic().endpoints}


def test_unknown_profile_is_rejected() -> None:
    with pytest.raises(ValueError, match="it has 2023-06-01"):
        Anthropic("1")
