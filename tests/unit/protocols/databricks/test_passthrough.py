"""Requests and responses are passed through between clients and serving endpoints."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from protocols.core.errors import ContextTooLong, StreamBroken
from protocols.core.events import StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ClientAdapter, PassthroughRequest, ResponseContext
from protocols.core.request import EmbeddingRequest, GenerationRequest
from protocols.databricks.endpoints import Databricks
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.databricks.conftest import MakeCall

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": HI}
TEXT: dict[str, Any] = {"prompt": "a b"}
EMBED: dict[str, Any] = {"input": ["a", "b"]}
ENDPOINT = "/serving-endpoints/ep-ab/invocations"
ENTITY = "/serving-endpoints/ep-ab/served-models/m-a/invocations"
SERVED = "/serving-endpoints/llama-3-8b/invocations"
CHATS = "/serving-endpoints/chat/completions"
TEXTS = "/serving-endpoints/completions"
EMBEDS = "/serving-endpoints/embeddings"


def build_tool(properties: int) -> dict[str, Any]:
    named = {f"p{i}": {"type": "string"} for i in range(properties)}
    parameters = {"type": "object", "properties": named}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


class PassthroughClient:
    """Passes a client's requests to a worker's adapter."""

    def __init__(self, make: MakeCall, response_context: ResponseContext) -> None:
        self._make, self.response_context = make, response_context

    def relay(
        self, path: str, body: Any, client: ClientAdapter | None = None
    ) -> PassthroughRequest | None:
        return Databricks().prepare_passthrough(
            client or Databricks(), self._make(path, body), self.response_context
        )

    def taken(
        self, path: str, body: Any, client: ClientAdapter | None = None
    ) -> PassthroughRequest:
        relay = self.relay(path, body, client)
        assert relay is not None
        return relay


@pytest.fixture
def passthrough_client(make: MakeCall, response_context: ResponseContext) -> PassthroughClient:
    return PassthroughClient(make, response_context)


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        CHAT | {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop": ["a"], "max_tokens": 4},
        CHAT | {"stream": True, "reasoning_effort": "low", "client_request_id": "r"},
        CHAT | {"tools": [build_tool(15)] * 32, "tool_choice": "auto"},
        CHAT | {"logprobs": True, "top_logprobs": 20, "usage_context": {"team": "a"}},
        TEXT | {"use_raw_prompt": True, "prompt": ["a", "b"], "stream": False},
        EMBED | {"instruction": "Represent", "encoding_format": "float"},
    ],
)
@pytest.mark.parametrize("path", [ENDPOINT, ENTITY])
def test_invocations_path_is_rewritten_to_the_backend_model(
    passthrough_client: PassthroughClient, path: str, body: dict[str, Any]
) -> None:
    wire = passthrough_client.taken(path, body).upstream_request
    assert wire.path == SERVED
    assert wire.body == json.dumps(body, separators=(",", ":")).encode()


def test_model_field_in_invocations_body_is_removed(passthrough_client: PassthroughClient) -> None:
    assert (
        json.loads(passthrough_client.taken(ENDPOINT, CHAT | {"model": "x"}).upstream_request.body)
        == CHAT
    )


@pytest.mark.parametrize("root", ["/serving-endpoints", "/ai-gateway/mlflow/v1"])
def test_openai_paths_are_passed_through_with_backend_model_in_body(
    passthrough_client: PassthroughClient, root: str
) -> None:
    for path, body in ((CHATS, CHAT), (TEXTS, TEXT), (EMBEDS, EMBED)):
        called = root + path.removeprefix("/serving-endpoints")
        wire = passthrough_client.taken(called, {"model": "ep-ab", **body}).upstream_request
        assert wire.path == path
        assert json.loads(wire.body) == {"model": "llama-3-8b", **body}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        {},
        {"inputs": "x"},
        CHAT | {"stream": "yes"},
        CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        CHAT | {"temperature": 3},
        CHAT | {"top_k": 0},
        CHAT | {"n": 1},
        CHAT | {"seed": 1},
        CHAT | {"max_completion_tokens": 4},
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
        CHAT | {"extra_params": {"seed": "1"}},
        CHAT | {"thinking": {"type": "disabled"}},
        CHAT | {"tools": [build_tool(16)]},
        CHAT | {"tools": [build_tool(1)] * 33},
        CHAT | {"tool_choice": "auto"},
        CHAT | {"reasoning_effort": "minimal"},
        CHAT | {"top_logprobs": 3},
        CHAT | {"usage_context": {"team": 1}},
        CHAT | {"never_heard_of": 1},
        TEXT | {"echo": True},
        TEXT | {"suffix": "."},
        TEXT | {"error_behavior": "truncate"},
        EMBED | {"encoding_format": "base64"},
        EMBED | {"dimensions": 3},
    ],
)
def test_request_outside_the_fast_path_is_translated(
    passthrough_client: PassthroughClient, body: Any
) -> None:
    assert passthrough_client.relay(ENDPOINT, body) is None
    if isinstance(body, dict):
        path = CHATS if "messages" in body else TEXTS if "prompt" in body else EMBEDS
        assert passthrough_client.relay(path, {"model": "ep-ab", **body}) is None


def test_strict_role_rules_disable_pass_through(passthrough_client: PassthroughClient) -> None:
    assert passthrough_client.relay(ENDPOINT, CHAT, Databricks(role_rules="strict")) is None


def test_client_of_another_protocol_is_translated(passthrough_client: PassthroughClient) -> None:
    assert passthrough_client.relay(CHATS, {"model": "ep-ab", **CHAT}, OpenAI()) is None


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_backend_model_that_is_no_path_segment_is_translated(
    passthrough_client: PassthroughClient, name: str
) -> None:
    passthrough_client.response_context = replace(
        passthrough_client.response_context, backend_model=name
    )
    assert passthrough_client.relay(ENDPOINT, CHAT) is None


def test_stream_default_of_the_listener_applies(passthrough_client: PassthroughClient) -> None:
    for default in (True, False):
        relay = passthrough_client.taken(ENDPOINT, CHAT, Databricks(stream_default=default))
        assert isinstance(relay.request, GenerationRequest)
        assert relay.request.stream is default
    vectors = passthrough_client.taken(ENDPOINT, EMBED, Databricks(stream_default=True)).request

    assert isinstance(vectors, EmbeddingRequest)
    assert vectors.inputs == ("a", "b")


def test_passthrough_response_headers_equal_translated_ones(
    passthrough_client: PassthroughClient,
) -> None:
    stream = dict(passthrough_client.taken(ENDPOINT, CHAT | {"stream": True}).build_headers())
    assert stream["Content-Type"] == "text/event-stream; charset=utf-8"
    assert stream["served-model-name"] == "m-a"
    assert passthrough_client.taken(ENDPOINT, EMBED).build_headers() == (
        ("Content-Type", "application/json"),
        ("served-model-name", "m-a"),
    )


# --- responses ------------------------------------------------------------------------------------

ANSWER = (
    b'{"id":"c1","object":"chat.completion","created":1,"model":"meta-llama-072424","choices":['
    b'{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)
CHUNKS = (
    b'data: {"id":"c1","model":"meta-llama-072424","choices":[{"index":0,"delta":'
    b'{"content":"Hi"}}]}\n\ndata: {"id":"c1","model":"meta-llama-072424","choices":[{"index":0,'
    b'"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


def test_response_shows_the_backend_model_name(passthrough_client: PassthroughClient) -> None:
    reader = passthrough_client.taken(ENDPOINT, CHAT).create_reader()
    reader.feed([ANSWER])
    data, events = reader.close()

    assert data == ANSWER.replace(b"meta-llama-072424", b"llama-3-8b")
    assert isinstance(events[-1], StreamEnd)

    stream = passthrough_client.taken(ENDPOINT, CHAT | {"stream": True}).create_reader()
    data, events = stream.feed([CHUNKS])
    assert data is not None
    assert data.endswith(b"data: [DONE]\n\n")

    shown = [json.loads(one[6:]) for one in data.split(b"\n\n")[:-2]]
    assert {(one["id"], one["model"]) for one in shown} == {("c1", "llama-3-8b")}
    assert [one["choices"][0]["delta"].get("content") for one in shown] == ["", "Hi", None]
    assert shown[-1]["choices"][0]["finish_reason"] == "stop"
    assert shown[-1]["usage"]["completion_tokens"] == 1
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["Hi"]
    assert [e.completion_tokens for e in events if isinstance(e, Usage)] == [1]


def test_embeddings_response_shows_the_backend_model_name(
    passthrough_client: PassthroughClient,
) -> None:
    body = b'{"id":"e","data":[{"embedding":[1.50]},{"embedding":[2]}],"model":"gte"}'
    reader = passthrough_client.taken(ENDPOINT, EMBED).create_reader()

    reader.feed([body])

    assert reader.close()[0] == body.replace(b"gte", b"llama-3-8b")


def test_truncated_stream_raises_stream_broken(passthrough_client: PassthroughClient) -> None:
    reader = passthrough_client.taken(ENDPOINT, CHAT | {"stream": True}).create_reader()
    reader.feed([CHUNKS[:100]])
    with pytest.raises(StreamBroken):
        reader.close()


def test_error_body_with_status_200_raises_its_error(passthrough_client: PassthroughClient) -> None:
    error_body = (
        b'{"error_code":"BAD_REQUEST","message":"the prompt has 9 tokens, the model\'s limit is 8"}'
    )
    for body in (CHAT, EMBED):
        reader = passthrough_client.taken(ENDPOINT, body).create_reader()
        reader.feed([error_body])
        with pytest.raises(ContextTooLong):
            reader.close()
