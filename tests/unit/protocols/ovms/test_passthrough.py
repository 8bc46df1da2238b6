"""Requests and responses are passed through between servers of one release."""

import json
from typing import Any

import pytest

from protocols.core.errors import ContextTooLong, StreamBroken, WorkerFailed
from protocols.core.events import ResponseMetadata, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ClientAdapter, PassthroughRequest, ResponseContext
from protocols.core.request import EmbeddingRequest, GenerationRequest
from protocols.openai.endpoints import OpenAI
from protocols.ovms.endpoints import OVMS
from tests.unit.protocols.ovms.conftest import MakeCall

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "llama3", "messages": HI}
TEXT: dict[str, Any] = {"model": "llama3", "prompt": "a b"}
EMBED: dict[str, Any] = {"model": "llama3", "input": ["a", "b"]}
CHATS, TEXTS, EMBEDS = "/v3/chat/completions", "/v3/completions", "/v3/embeddings"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class PassthroughClient:
    """Passes a client's requests to a worker's adapter."""

    def __init__(self, make: MakeCall, response_context: ResponseContext) -> None:
        self._make, self._about = make, response_context

    def relay(
        self,
        path: str,
        body: Any,
        worker: str = "2026",
        client: ClientAdapter | None = None,
        **fields: Any,
    ) -> PassthroughRequest | None:
        call = self._make(path, body, **fields)
        return OVMS(worker).prepare_passthrough(client or OVMS(worker), call, self._about)

    def taken(self, path: str, body: Any, worker: str = "2026") -> PassthroughRequest:
        relay = self.relay(path, body, worker)
        assert relay is not None
        return relay


@pytest.fixture
def passthrough_client(make: MakeCall, response_context: ResponseContext) -> PassthroughClient:
    return PassthroughClient(make, response_context)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        ("/v3/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT),
        (CHATS, CHAT | {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 7, "min_p": 0.1}),
        (CHATS, CHAT | {"stream": True, "stream_options": {"include_usage": True}, "stop": "x"}),
        (CHATS, CHAT | {"tools": [TOOL], "tool_choice": "auto", "user": "u"}),
        (CHATS, CHAT | {"response_format": {"type": "json_object"}}),
        (CHATS, CHAT | {"logprobs": True, "never_heard_of": {"deep": [1.5]}}),
        (CHATS, CHAT | {"stream": True, "logprobs": False}),
        (TEXTS, TEXT | {"max_tokens": 4, "logprobs": 1, "ignore_eos": True}),
        (EMBEDS, EMBED | {"encoding_format": "base64"}),
        (EMBEDS, EMBED | {"input": "a"}),
    ],
)
def test_valid_request_is_passed_through(
    passthrough_client: PassthroughClient, path: str, body: Any
) -> None:
    relay = passthrough_client.taken(path, body)
    assert relay.upstream_request.path == "/v3" + path.removeprefix("/v3").removeprefix("/v1")
    usage = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    sent = json.loads(relay.upstream_request.body)
    assert sent == body | usage | {"model": "llama-3-8b"}
    assert list(sent)[: len(body)] == list(body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, b"{"),
        (CHATS, CHAT | {"messages": []}),
        (CHATS, CHAT | {"temperature": 3}),
        (CHATS, CHAT | {"seed": 2**32}),
        (CHATS, CHAT | {"top_k": 5.0}),
        (CHATS, CHAT | {"top_k": -1}),
        (CHATS, CHAT | {"stop": [str(i) for i in range(17)]}),
        (CHATS, CHAT | {"stream_options": {"include_usage": True}}),
        (CHATS, CHAT | {"stream": True, "stream_options": {"other": True}}),
        (CHATS, CHAT | {"stream": True, "logprobs": True}),
        (CHATS, CHAT | {"stream": True, "stop": "x", "include_stop_str_in_output": False}),
        (CHATS, CHAT | {"n": 2}),
        (CHATS, CHAT | {"best_of": 2}),
        (CHATS, CHAT | {"logit_bias": {}}),
        (CHATS, CHAT | {"tool_choice": "auto"}),
        (CHATS, CHAT | {"kv_transfer_params": {}}),
        (TEXTS, TEXT | {"prompt": ["a", "b"]}),
        (TEXTS, TEXT | {"prompt": ""}),
        (TEXTS, TEXT | {"echo": True}),
        (TEXTS, TEXT | {"logprobs": 2}),
        (EMBEDS, EMBED | {"input": [1, 2]}),
        (EMBEDS, EMBED | {"input": ["a"] * 501}),
        (EMBEDS, EMBED | {"dimensions": 3}),
        ("/v3/models", CHAT),
    ],
)
def test_request_outside_the_fast_path_is_translated(
    passthrough_client: PassthroughClient, path: str, body: Any
) -> None:
    assert passthrough_client.relay(path, body) is None


def test_profile_2024_passes_fewer_fields_through(passthrough_client: PassthroughClient) -> None:
    body = CHAT | {"diversity_penalty": 0.5, "stream": True, "max_tokens": 3}
    assert (
        json.loads(passthrough_client.taken(CHATS, body, "2024").upstream_request.body)[
            "diversity_penalty"
        ]
        == 0.5
    )
    assert passthrough_client.relay(TEXTS, TEXT, "2024") is not None

    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert passthrough_client.relay(CHATS, CHAT | {"messages": parts}, "2024") is None
    assert passthrough_client.relay(CHATS, CHAT | {"messages": parts}) is not None
    for fields in ({"ignore_eos": True}, {"stop": "x"}, {"logprobs": True}, {"tools": [TOOL]}):
        assert passthrough_client.relay(CHATS, CHAT | fields, "2024") is None


def test_client_of_another_profile_or_protocol_is_translated(
    passthrough_client: PassthroughClient,
) -> None:
    assert passthrough_client.relay(CHATS, CHAT, client=OVMS("2024")) is None
    assert passthrough_client.relay(CHATS, CHAT, client=OpenAI()) is None


def test_request_with_other_content_type_is_translated(
    passthrough_client: PassthroughClient,
) -> None:
    assert passthrough_client.relay(CHATS, CHAT, content_type="text/plain") is None


def test_passthrough_request_fields_for_load_balancing_are_read(
    passthrough_client: PassthroughClient,
) -> None:
    chat = passthrough_client.taken(CHATS, CHAT | {"stream": True, "user": "ann"}).request
    assert isinstance(chat, GenerationRequest)
    assert (chat.stream, chat.labels, chat.model) == (True, {"user": "ann"}, "llama-3-8b")

    vectors = passthrough_client.taken(EMBEDS, EMBED).request
    assert isinstance(vectors, EmbeddingRequest)
    assert vectors.inputs == ("a", "b")


def test_passthrough_response_headers_equal_ovms(passthrough_client: PassthroughClient) -> None:
    stream = passthrough_client.taken(CHATS, CHAT | {"stream": True})
    assert stream.build_headers() == (("Content-Type", "text/event-stream"),)
    for path, body in ((CHATS, CHAT), (EMBEDS, EMBED)):
        assert passthrough_client.taken(path, body).build_headers() == (
            ("Content-Type", "application/json"),
        )


# --- responses ------------------------------------------------------------------------------------

ANSWER = (
    b'{"choices":[{"finish_reason":"stop","index":0,"logprobs":null,"message":{"content":"Hi",'
    b'"role":"assistant","tool_calls":[]}}],"created":1,"model":"llama-3-8b","object":'
    b'"chat.completion","usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)
EVENTS = [
    (
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null},'
        b'"finish_reason":null}],"created":1,"model":"llama-3-8b","object":"chat.completion.chunk"}'
        b"\n\n"
    ),
    (
        b'data: {"choices":[{"index":0,"logprobs":null,"delta":{"content":"Hi"},"finish_reason":'
        b'"stop"}],"created":1,"model":"llama-3-8b","object":"chat.completion.chunk"}\n\n'
    ),
    b"data: [DONE]\n\n",
]


def test_unary_response_shows_the_public_model_name(passthrough_client: PassthroughClient) -> None:
    reader = passthrough_client.taken(CHATS, CHAT).create_reader()
    reader.feed([ANSWER])

    data, events = reader.close()

    assert data == ANSWER.replace(b"llama-3-8b", b"llama3")
    assert [e.completion_tokens for e in events if isinstance(e, Usage)] == [1]
    assert isinstance(events[-1], StreamEnd)


def test_stream_shows_the_public_model_name(passthrough_client: PassthroughClient) -> None:
    reader = passthrough_client.taken(CHATS, CHAT | {"stream": True}).create_reader()
    data, events = reader.feed([b"".join(EVENTS)])

    piece, end = EVENTS[1].replace(b'"stop"', b"null"), EVENTS[1].replace(b'"content":"Hi"', b"")
    written = b"".join((EVENTS[0], piece, end, *EVENTS[2:]))
    assert data == written.replace(b"llama-3-8b", b"llama3")
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["Hi"]
    assert isinstance(events[-1], StreamEnd)


def test_text_chunks_of_a_stream_are_passed_through_unparsed(
    passthrough_client: PassthroughClient,
) -> None:
    text = EVENTS[1].replace(b'"stop"', b"null").replace(b'"created":1', b'"created":1, "odd":1.50')
    reader = passthrough_client.taken(CHATS, CHAT | {"stream": True}).create_reader()

    data, events = reader.feed([EVENTS[0], text, text, *EVENTS[1:]])

    assert data is not None
    assert data.count(text.replace(b"llama-3-8b", b"llama3")) == 1
    assert {json.loads(one[6:])["created"] for one in data.split(b"\n\n")[:-2]} == {1}
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["Hi"] * 3


def test_null_usage_in_passed_through_chunks_is_removed_unless_the_client_requested_usage(
    passthrough_client: PassthroughClient,
) -> None:
    """The worker was asked for usage, and so writes ``"usage": null`` in each chunk."""
    first, text = (
        event.replace(b'"created":1', b'"created":1, "usage": null')
        for event in (EVENTS[0], EVENTS[1].replace(b'"stop"', b"null"))
    )
    with_usage = {"stream_options": {"include_usage": True}}
    for options, count in (({}, 0), (with_usage, 1)):
        body = CHAT | {"stream": True} | options
        data, _ = passthrough_client.taken(CHATS, body).create_reader().feed([first, text, text])
        assert data is not None
        assert (data.count(b'"usage": null') > 0) == (count > 0)


def test_embeddings_response_is_passed_through_unparsed(
    passthrough_client: PassthroughClient,
) -> None:
    body = b'{"object":"list","data":[{"embedding":[1.50]},{"embedding":[1]}]}'
    reader = passthrough_client.taken(EMBEDS, EMBED).create_reader()

    reader.feed([body])

    assert reader.close() == (body, [ResponseMetadata(), StreamEnd()])


def test_graph_error_in_a_stream_raises_worker_failed(
    passthrough_client: PassthroughClient,
) -> None:
    reader = passthrough_client.taken(CHATS, CHAT | {"stream": True}).create_reader()
    reader.feed([EVENTS[0]])
    error_body = b"Mediapipe execution failed. MP status - INTERNAL: boom"

    data, _ = reader.feed([b'{"error":"' + error_body + b'"}'])

    assert not data
    with pytest.raises(WorkerFailed):
        reader.close()


def test_truncated_stream_raises_stream_broken(passthrough_client: PassthroughClient) -> None:
    reader = passthrough_client.taken(CHATS, CHAT | {"stream": True}).create_reader()
    reader.feed([EVENTS[0]])
    with pytest.raises(StreamBroken):
        reader.close()


def test_error_body_with_status_200_raises_its_error(passthrough_client: PassthroughClient) -> None:
    error_body = b'{"error":"Input length exceeds pipeline capabilities: 9 > 8"}'
    for path, body in ((CHATS, CHAT), (EMBEDS, EMBED)):
        reader = passthrough_client.taken(path, body).create_reader()
        reader.feed([error_body])
        with pytest.raises(ContextTooLong):
            reader.close()
