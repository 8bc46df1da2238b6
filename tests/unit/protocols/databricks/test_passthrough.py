"""Calls that are passed on to serving endpoints, and their answers."""

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


def tool(properties: int) -> dict[str, Any]:
    named = {f"p{i}": {"type": "string"} for i in range(properties)}
    parameters = {"type": "object", "properties": named}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


class Desk:
    """Hands calls of a client to a worker."""

    def __init__(self, make: MakeCall, about: ResponseContext) -> None:
        self._make, self.about = make, about

    def relay(
        self, path: str, body: Any, client: ClientAdapter | None = None
    ) -> PassthroughRequest | None:
        return Databricks().prepare_passthrough(
            client or Databricks(), self._make(path, body), self.about
        )

    def taken(
        self, path: str, body: Any, client: ClientAdapter | None = None
    ) -> PassthroughRequest:
        relay = self.relay(path, body, client)
        assert relay is not None
        return relay


@pytest.fixture
def desk(make: MakeCall, about: ResponseContext) -> Desk:
    return Desk(make, about)


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        CHAT | {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop": ["a"], "max_tokens": 4},
        CHAT | {"stream": True, "reasoning_effort": "low", "client_request_id": "r"},
        CHAT | {"tools": [tool(15)] * 32, "tool_choice": "auto"},
        CHAT | {"logprobs": True, "top_logprobs": 20, "usage_context": {"team": "a"}},
        TEXT | {"use_raw_prompt": True, "prompt": ["a", "b"], "stream": False},
        EMBED | {"instruction": "Represent", "encoding_format": "float"},
    ],
)
@pytest.mark.parametrize("path", [ENDPOINT, ENTITY])
def test_the_path_of_an_endpoint_names_the_model(
    desk: Desk, path: str, body: dict[str, Any]
) -> None:
    wire = desk.taken(path, body).upstream_request
    assert wire.path == SERVED
    assert wire.body == json.dumps(body, separators=(",", ":")).encode()


def test_the_body_says_nothing_where_the_path_does(desk: Desk) -> None:
    assert json.loads(desk.taken(ENDPOINT, CHAT | {"model": "x"}).upstream_request.body) == CHAT


@pytest.mark.parametrize("root", ["/serving-endpoints", "/ai-gateway/mlflow/v1"])
def test_the_paths_of_openais_clients_are_kept_apart(desk: Desk, root: str) -> None:
    for path, body in ((CHATS, CHAT), (TEXTS, TEXT), (EMBEDS, EMBED)):
        called = root + path.removeprefix("/serving-endpoints")
        wire = desk.taken(called, {"model": "ep-ab", **body}).upstream_request
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
        CHAT | {"tools": [tool(16)]},
        CHAT | {"tools": [tool(1)] * 33},
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
def test_whatever_else_there_is_goes_the_long_way(desk: Desk, body: Any) -> None:
    assert desk.relay(ENDPOINT, body) is None
    if isinstance(body, dict):
        path = CHATS if "messages" in body else TEXTS if "prompt" in body else EMBEDS
        assert desk.relay(path, {"model": "ep-ab", **body}) is None


def test_who_checks_the_order_of_roles_reads_every_body(desk: Desk) -> None:
    assert desk.relay(ENDPOINT, CHAT, Databricks(role_rules="strict")) is None


def test_another_dialects_client_is_translated(desk: Desk) -> None:
    assert desk.relay(CHATS, {"model": "ep-ab", **CHAT}, OpenAI()) is None


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_what_no_path_can_name_is_not_passed_on(desk: Desk, name: str) -> None:
    desk.about = replace(desk.about, backend_model=name)
    assert desk.relay(ENDPOINT, CHAT) is None


def test_silence_is_what_the_listener_takes_it_for(desk: Desk) -> None:
    for default in (True, False):
        relay = desk.taken(ENDPOINT, CHAT, Databricks(stream_default=default))
        assert isinstance(relay.request, GenerationRequest)
        assert relay.request.stream is default
    vectors = desk.taken(ENDPOINT, EMBED, Databricks(stream_default=True)).request
    assert isinstance(vectors, EmbeddingRequest)
    assert vectors.inputs == ("a", "b")


def test_the_headers_are_those_of_any_answer(desk: Desk) -> None:
    stream = dict(desk.taken(ENDPOINT, CHAT | {"stream": True}).build_headers())
    assert stream["Content-Type"] == "text/event-stream; charset=utf-8"
    assert stream["served-model-name"] == "m-a"
    assert desk.taken(ENDPOINT, EMBED).build_headers() == (
        ("Content-Type", "application/json"),
        ("served-model-name", "m-a"),
    )


# --- the way back ---------------------------------------------------------------------------------

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


def test_an_answer_names_the_model_that_served(desk: Desk) -> None:
    passage = desk.taken(ENDPOINT, CHAT).create_reader()
    passage.feed([ANSWER])
    data, events = passage.close()
    assert data == ANSWER.replace(b"meta-llama-072424", b"llama-3-8b")
    assert isinstance(events[-1], StreamEnd)
    stream = desk.taken(ENDPOINT, CHAT | {"stream": True}).create_reader()
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


def test_vectors_name_the_model_that_served(desk: Desk) -> None:
    body = b'{"id":"e","data":[{"embedding":[1.50]},{"embedding":[2]}],"model":"gte"}'
    passage = desk.taken(ENDPOINT, EMBED).create_reader()
    passage.feed([body])
    assert passage.close()[0] == body.replace(b"gte", b"llama-3-8b")


def test_a_stream_that_is_cut_is_told(desk: Desk) -> None:
    passage = desk.taken(ENDPOINT, CHAT | {"stream": True}).create_reader()
    passage.feed([CHUNKS[:100]])
    with pytest.raises(StreamBroken):
        passage.close()


def test_what_is_told_in_place_of_an_answer_is_read_by_its_code(desk: Desk) -> None:
    said = (
        b'{"error_code":"BAD_REQUEST","message":"the prompt has 9 tokens, the model\'s limit is 8"}'
    )
    for body in (CHAT, EMBED):
        passage = desk.taken(ENDPOINT, body).create_reader()
        passage.feed([said])
        with pytest.raises(ContextTooLong):
            passage.close()
