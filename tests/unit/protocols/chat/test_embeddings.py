"""Embeddings, for clients and from workers: cases W75 to W78."""

import base64
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    Embedding,
    Event,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    Usage,
)
from protocols.core.interfaces import ClientRequest, ResponseContext, ResponseEncoder
from protocols.core.request import EmbeddingRequest
from protocols.core.vectors import find_vectors
from protocols.openai.endpoints import OpenAI
from protocols.passthrough import create_passthrough_decoder
from protocols.passthrough_readers import NameReplacer

MakeCall = Callable[..., ClientRequest]


def encode_unary_body(encoder: ResponseEncoder, events: Sequence[Event]) -> Any:
    fold = ResponseAccumulator()
    fold.add(events)
    return json.loads(encoder.encode_unary(fold.result()).body)


def decode_response(wire: str, size: int = 1 << 20) -> list[Event]:
    data, decoder = wire.encode(), OpenAI().create_decoder(EMBED)
    for start in range(0, len(data), size):
        assert decoder.feed(data[start : start + size]) == ()
    return [event for event in decoder.close() if not isinstance(event, ResponseMetadata)]


VECTORS: tuple[Event, ...] = (
    Embedding(1, (1.0, 2.0)),
    Embedding(0, (3.0, 2.0, 0.5, -0.25)),
    Usage(2),
    StreamEnd(),
)


def test_embeddings_response_with_float_vectors(
    response_context: ResponseContext, make_call: MakeCall
) -> None:
    request = EmbeddingRequest(model="m", inputs=("a b", "c"))
    encoder = OpenAI().create_encoder(make_call("embedding"), request, response_context)

    assert encode_unary_body(encoder, VECTORS) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 2.0, 0.5, -0.25]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 2.0]},
        ],
        "model": "mock",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


def test_base64_embeddings_response(response_context: ResponseContext, make_call: MakeCall) -> None:
    request = EmbeddingRequest(model="m", inputs=("a b", "c"), encoding="base64")
    encoder = OpenAI().create_encoder(make_call("embedding"), request, response_context)

    packed = encode_unary_body(encoder, VECTORS)["data"][0]["embedding"]

    assert struct.unpack("<4f", base64.b64decode(packed)) == (3.0, 2.0, 0.5, -0.25)


EMBED = EmbeddingRequest(model="m", inputs=("a", "b"))


def format_embeddings_response(*items: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"object": "list", "data": items, **fields})


def test_float_and_base64_embeddings_are_decoded() -> None:
    packed = base64.b64encode(struct.pack("<2f", 0.5, -0.25)).decode()
    wire = format_embeddings_response(
        {"index": 1, "embedding": packed},
        {"index": 0, "embedding": [1, 2.5]},
        usage={"prompt_tokens": 2, "total_tokens": 2},
    )

    assert decode_response(wire, size=7) == [
        Embedding(1, (0.5, -0.25)),
        Embedding(0, (1.0, 2.5)),
        Usage(2),
        StreamEnd(),
    ]


@pytest.mark.parametrize(
    "wire",
    [
        format_embeddings_response({"embedding": [1]}),
        format_embeddings_response({"embedding": [1], "index": 0}, {"embedding": [1], "index": 2}),
        format_embeddings_response({"embedding": "!"}, {"embedding": [1]}),
        '{"error": {"message": "x"}}',
        "[]",
    ],
)
def test_malformed_embeddings_response_raises_worker_failed(wire: str) -> None:
    with pytest.raises(WorkerFailed):
        decode_response(wire)


@pytest.mark.parametrize("vector", [[0.1, None, 0.3], [None], [[0.1], [0.2]], 5], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_a_vector_with_an_odd_value_is_never_shortened(vector: Any, count: int) -> None:
    """This holds too for a worker that sends one vector more, and no indices."""
    data = [{"embedding": vector}, *({"embedding": [0.5]} for _ in range(count - 1))]

    with pytest.raises(WorkerFailed):
        decode_response(json.dumps({"data": data}))


@pytest.mark.parametrize(("index", "lost"), [(0, 1), (1, 0), (7, 0)])
def test_vectors_that_share_one_index_are_in_the_order_of_the_inputs(index: int, lost: int) -> None:
    data = [{"embedding": [1], "index": index}, {"embedding": [2], "index": index}]

    events = decode_response(json.dumps({"data": data}))

    assert [one for one in events if isinstance(one, Embedding)] == [
        Embedding(0, (1.0,)),
        Embedding(1, (2.0,)),
    ]
    assert ResponseExtra("", "response", (((f"data[{lost}]", "index"), True),)) in events


def test_empty_response_raises_stream_broken() -> None:
    with pytest.raises(StreamBroken):
        decode_response("")


@pytest.mark.parametrize("indices", [(1, 0), (None, None)], ids=["indices", "none"])
def test_unknown_keys_come_back_in_the_object_that_had_them(
    indices: tuple[int | None, ...], response_context: ResponseContext, make_call: MakeCall
) -> None:
    names = ("first", "second")
    data = [{"embedding": [1], "index": i, "x": x} for i, x in zip(indices, names, strict=True)]
    usage = {"prompt_tokens": 2, "total_tokens": 2, "cost": 0.5}
    request = EmbeddingRequest(model="m", inputs=("a", "b"), encoding="base64")
    encoder = OpenAI().create_encoder(make_call("embedding"), request, response_context)

    events = decode_response(json.dumps({"data": data, "usage": usage, "region": "eu"}))

    body = encode_unary_body(encoder, events)
    assert body["region"] == "eu"
    assert body["usage"] == usage
    in_order = names[::-1] if indices == (1, 0) else names
    assert tuple(item["x"] for item in body["data"]) == in_order


def test_unknown_key_of_a_vector_is_reported_by_its_path() -> None:
    wire = json.dumps({"data": [{"embedding": [1], "x": 1}, {"embedding": [1]}]})

    [extra] = [one for one in decode_response(wire) if isinstance(one, ResponseExtra)]

    assert extra == ResponseExtra("openai", "data", ((("x",), 1),), 0)
    assert extra.path == "response.data[0]"


# --- large responses ------------------------------------------------------------------------------

LONG = [0.5] * 100_000
"""A vector of 500 KB of text: it is decoded apart from the rest."""


def build_large(**others: Any) -> dict[str, Any]:
    """A response to two inputs."""
    data = [{"index": 0, "embedding": LONG}, {"index": 1, "embedding": [2.5]}]
    return {"object": "list", "model": "worker", "data": data, **others}


@pytest.mark.parametrize(
    "others",
    [{}, {"new": 1}, {"object": {"embedding": [1]}}, {"new": {"embedding": [1, 2]}}],
    ids=["known keys", "unknown key", "vector elsewhere", "unknown vector elsewhere"],
)
def test_vectors_of_a_large_response_are_those_of_its_items(others: dict[str, Any]) -> None:
    request = EmbeddingRequest(model="m", inputs=("a", "b"))
    decoder = OpenAI().create_decoder(request)
    decoder.feed(json.dumps(build_large(**others)).encode())

    vectors = [one for one in decoder.close() if isinstance(one, Embedding)]

    assert vectors == [Embedding(0, tuple(LONG)), Embedding(1, (2.5,))]


@pytest.mark.parametrize("skims", [True, False])
def test_large_response_whose_vector_is_no_json_is_an_error(*, skims: bool) -> None:
    wire = json.dumps(build_large()).encode().replace(b"[2.5]", b"[2.5,,]")
    request = EmbeddingRequest(model="m", inputs=("a", "b"))
    decoder = create_passthrough_decoder(request, skims=skims)
    decoder.feed(wire)

    with pytest.raises(WorkerFailed):
        decoder.close()


def test_name_of_the_model_is_replaced_around_the_vectors_of_a_large_response() -> None:
    wire = json.dumps(build_large()).encode()
    names = NameReplacer({"model": "public"})

    written = names.replace_outside(wire, find_vectors(wire))

    assert written == wire.replace(b'"worker"', b'"public"')
    assert names.replace_outside(written, find_vectors(written)) is written
