"""Answers written anew have id, time and fingerprint of a worker with the client's protocol."""

from typing import Any

import msgspec
import pytest

from gateway.runtime.build import build_adapter
from protocols.core.aggregate import aggregate
from protocols.core.errors import WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
)
from protocols.core.extra import write_extra_fields
from protocols.core.interfaces import ResponseContext
from tests.property.test_unknown_response_keys import build_call

CONTEXT = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS: dict[tuple[str, str], dict[str, Any]] = {
    ("openai", "/v1/chat/completions"): CHAT,
    ("openai", "/v1/completions"): {"prompt": "hi"},
    ("databricks", "/serving-endpoints/chat/completions"): CHAT,
    ("databricks", "/serving-endpoints/m/invocations"): {"prompt": "hi"},
    ("ovms", "/v3/chat/completions"): CHAT,
    ("mindie", "/v1/chat/completions"): CHAT,
}


def create_encoder(name: str, path: str, fields: dict[str, Any]) -> Any:
    client: Any = build_adapter(name, None, {})
    call = build_call(client, path, {"model": "m", **fields})
    return client.create_encoder(call, client.decode_request(call), CONTEXT)


def answer(source: str, *more: Event) -> list[Event]:
    served = ResponseMetadata("w", "the-fingerprint", "the-id", 123456789, source)
    return [served, *more, TextDelta("hi"), ChoiceEnd("eos"), StreamEnd()]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("name", "path"), PATHS)
def test_chat_and_completions_have_them(name: str, path: str, *, stream: bool) -> None:
    fields = PATHS[name, path] | ({"stream": True} if stream else {})
    encoder = create_encoder(name, path, fields)
    events = answer(name, ResponseExtra(name, "choice", ((("x",), 5),)))

    written = (
        encoder.encode_events(events) if stream else encoder.encode_unary(aggregate(events)).body
    )

    assert b"123456789" in written
    assert b"the-fingerprint" in written
    assert b'"x":5' in written
    assert (b"the-id" in written) == (name != "mindie")


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_answers_of_workers_of_another_protocol_do_not(name: str, path: str) -> None:
    encoder = create_encoder(name, path, PATHS[name, path])

    written = encoder.encode_unary(aggregate(answer("other"))).body

    assert b"123456789" not in written
    assert b"the-id" not in written


def test_cohere_s_stream_begins_with_the_worker_s_id() -> None:
    encoder = create_encoder("cohere", "/v2/chat", CHAT | {"stream": True})

    assert b'"id":"the-id"' in encoder.encode_events(answer("cohere"))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/v1/rerank", "/v1/score"])
def test_vectors_classes_and_scores_have_id_and_time(path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/rerank": {"query": "q", "documents": ["a"]},
        "/v1/score": {"text_1": "q", "text_2": "a"},
    }
    fields = bodies.get(path, {"input": "hi"})
    client: Any = build_adapter("openai", "vllm", {})
    call = build_call(client, path, {"model": "m", **fields})
    request = client.decode_request(call)
    item = {"index": 0, "embedding": [0.5], "score": 0.5, "label": "A", "probs": [1.0]}
    keys = ("index", "embedding") if path == "/v1/embeddings" else item.keys() - {"embedding"}
    body = {"id": "the-id", "created": 123456789, "data": [{key: item[key] for key in keys}]}
    decoder = client.create_decoder(request)
    events = [*decoder.feed(msgspec.json.encode(body)), *decoder.close()]

    written = client.create_encoder(call, request, CONTEXT).encode_unary(aggregate(events)).body

    assert msgspec.json.decode(written)["id"] == "the-id"
    assert msgspec.json.decode(written)["created"] == 123456789


def test_encoder_with_extra_keys_writes_errors_as_before() -> None:
    encoder = create_encoder("ovms", "/v3/chat/completions", CHAT)

    assert encoder.encode_error_event(WorkerFailed("x"))
    assert encoder.headers() == ()


def test_key_without_a_place_is_left_out() -> None:
    written: dict[str, Any] = {"content": [{"a": 1}], "text": "t"}

    write_extra_fields(
        written,
        {("content[0]", "x"): 1, ("content[1]", "x"): 2, ("missing[0]", "in", "x"): 3},
    )

    assert written == {"content": [{"a": 1, "x": 1}], "text": "t"}
