"""Workers with the infer endpoint: embeddings, scores, and text without generate."""

import json
from typing import Any

import pytest

from protocols.core import vectors
from protocols.core.errors import StreamBroken, UnsupportedFeature, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    RelevanceScore,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
    SamplingParams,
)
from protocols.core.sse import MAX_UNARY_BYTES
from protocols.triton import Triton

EMBED = EmbeddingRequest(model="m", inputs=("a b", "c"))
RERANK = RerankRequest(model="m", queries=("q",), documents=("c", "d"))
PROMPT = GenerationRequest(
    model="m", kind="completion", prompts=("hi",), sampling=SamplingParams(temperature=0.5)
)


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


def make_adapter(
    inputs: list[Any], outputs: list[Any], *, fields: dict[str, str] | None = None
) -> Triton:
    """Make an adapter that has read the metadata of a server without configurations."""
    adapter = Triton("plain", fields=fields)
    metadata = {"name": "m", "platform": "", "inputs": inputs, "outputs": outputs}
    adapter.load_metadata("m", [None, json.dumps(metadata).encode()])
    return adapter


def encode(adapter: Triton, request: Any) -> tuple[str, Any]:
    wire = adapter.encode_request(request)
    return wire.path, json.loads(wire.body)


def decode(adapter: Triton, request: Any, body: Any) -> Any:
    decoder = adapter.create_decoder(request)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert decoder.feed(data[:7]) == ()
    assert decoder.feed(data[7:]) == ()
    return list(decoder.close())


def outputs(name: str, *data: Any) -> dict[str, Any]:
    return {"model_name": "m", "outputs": [{**tensor(name, "FP32", len(data)), "data": data}]}


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", Triton.profiles)
def test_texts_to_embed_are_one_tensor(profile: str) -> None:
    assert encode(Triton(profile), EMBED) == (
        "/v2/models/m/infer",
        {
            "inputs": [{"name": "text_input", "shape": [2, 1], "datatype": "BYTES",
                        "data": ["a b", "c"]}],
            "outputs": [{"name": "embedding"}],
        },
    )  # fmt: skip


def test_query_and_documents_are_two_tensors() -> None:
    path, body = encode(Triton(), RERANK)

    assert path == "/v2/models/m/infer"
    assert body == {
        "inputs": [
            {"name": "query", "shape": [1], "datatype": "BYTES", "data": ["q"]},
            {"name": "documents", "shape": [2], "datatype": "BYTES", "data": ["c", "d"]},
        ],
        "outputs": [{"name": "scores"}],
    }


@pytest.mark.parametrize(
    ("shape", "sent"), [((-1, 1), [2, 1]), ((-1, -1), [2, 1]), ((-1,), [2]), ((1, -1), [1, 2])]
)
def test_shape_is_that_of_the_model(shape: tuple[int, ...], sent: list[int]) -> None:
    fields = {"text_input": "TEXT", "embedding": "VECTOR"}
    adapter = make_adapter(
        [tensor("TEXT", "BYTES", *shape)], [tensor("VECTOR", "FP32", -1, 4)], fields=fields
    )

    _, body = encode(adapter, EMBED)

    assert body["inputs"][0]["name"] == "TEXT"
    assert body["inputs"][0]["shape"] == sent
    assert body["outputs"] == [{"name": "VECTOR"}]
    assert adapter.unsupported_parameters(EMBED, {}) == ()


@pytest.mark.parametrize(("size", "shape"), [(8, [2, 1]), (0, [2])])
def test_shape_of_a_configuration_has_the_batch(size: int, shape: list[int]) -> None:
    adapter = Triton()
    dims = [1] if size else [-1]
    config = {
        "max_batch_size": size,
        "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": dims}],
        "output": [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [4]}],
    }

    adapter.load_metadata("m", [json.dumps(config).encode(), b"{}"])

    assert encode(adapter, EMBED)[1]["inputs"][0]["shape"] == shape


def test_model_that_takes_one_text_gets_one_at_a_time() -> None:
    adapter = make_adapter([tensor("text_input", "BYTES", 1)], [tensor("embedding", "FP32", 4)])
    one = EmbeddingRequest(model="m", inputs=("a",))

    assert [loss.path for loss in adapter.unsupported_parameters(EMBED, {})] == ["inputs"]
    assert adapter.unsupported_parameters(one, {}) == ()
    assert encode(adapter, one)[1]["inputs"][0]["shape"] == [1]


def test_token_ids_and_pairs_of_texts_are_rejected() -> None:
    with pytest.raises(UnsupportedFeature, match="not token ids"):
        Triton().encode_request(EmbeddingRequest(model="m", inputs=((1, 2),)))
    with pytest.raises(UnsupportedFeature, match="not pairs"):
        Triton().encode_request(RerankRequest(model="m", queries=("a", "b"), documents=("c", "d")))


def test_parameters_of_embeddings_are_lost() -> None:
    request = EmbeddingRequest(model="m", inputs=("a",), dimensions=8)

    assert [loss.field for loss in Triton().unsupported_parameters(request, {})] == ["dimensions"]
    assert Triton().unsupported_parameters(RERANK, {}) == ()


def test_text_is_generated_by_infer_where_generate_is_missing() -> None:
    fields = {"text_input": "PROMPT", "text_output": "ANSWER"}
    adapter = make_adapter(
        [tensor("PROMPT", "BYTES", -1)], [tensor("ANSWER", "BYTES", -1)], fields=fields
    )

    assert encode(adapter, PROMPT) == (
        "/v2/models/m/infer",
        {
            "inputs": [{"name": "PROMPT", "shape": [1], "datatype": "BYTES", "data": ["hi"]}],
            "outputs": [{"name": "ANSWER"}],
            "parameters": {"temperature": 0.5},
        },
    )

    events = decode(
        adapter, PROMPT, {"model_name": "m", "outputs": [{"name": "ANSWER", "data": ["hello"]}]}
    )
    assert [event for event in events if isinstance(event, TextDelta)] == [
        TextDelta("hello", tokens=2)
    ]
    assert ChoiceEnd("unknown") in events
    assert events[-1] == StreamEnd()

    anonymous = decode(adapter, PROMPT, {"outputs": [{"name": "ANSWER", "data": ["hello"]}]})
    assert not any(isinstance(event, ResponseMetadata) for event in anonymous)


def test_stream_of_a_server_without_generate_is_approximated() -> None:
    adapter = make_adapter(
        [tensor("text_input", "BYTES", -1)], [tensor("text_output", "BYTES", -1)]
    )
    request = GenerationRequest(model="m", kind="completion", prompts=("hi",), stream=True)

    losses = {(loss.path, loss.reason) for loss in adapter.unsupported_parameters(request, {})}
    assert ("stream", "approximated") in losses
    assert encode(adapter, request)[0] == "/v2/models/m/infer"


@pytest.mark.parametrize("request_", [PROMPT, EMBED, RERANK])
def test_missing_fields_are_named_with_the_tensors_of_the_worker(request_: Any) -> None:
    adapter = make_adapter(
        [tensor("PROMPT", "BYTES", -1), tensor("LIMIT", "INT32", 1)], [tensor("OUT", "FP32", -1)]
    )

    with pytest.raises(WorkerFailed) as excinfo:
        adapter.encode_request(request_)

    assert "takes the inputs PROMPT (BYTES), LIMIT (INT32) and returns OUT" in excinfo.value.message
    assert "fields: {" in excinfo.value.message


def test_missing_fields_of_a_model_without_tensors_are_named() -> None:
    with pytest.raises(WorkerFailed, match=r"inputs none and returns nothing; .*text_input: NAME"):
        make_adapter([], []).encode_request(EMBED)


def test_metadata_that_describes_no_model_is_ignored() -> None:
    adapter = Triton()
    adapter.load_metadata("m", [None, b"{"])

    assert encode(adapter, EMBED)[1]["inputs"][0]["shape"] == [2, 1]


# --- responses ------------------------------------------------------------------------------------


def test_vectors_are_decoded() -> None:
    body = outputs("embedding", [1, 0.5], [0, -1])

    assert decode(Triton(), EMBED, body) == [
        ResponseMetadata("m"),
        Embedding(0, (1.0, 0.5)),
        Embedding(1, (0.0, -1.0)),
        StreamEnd(),
    ]


def test_scores_are_decoded() -> None:
    assert decode(Triton(), RERANK, outputs("scores", 0.5, 2)) == [
        ResponseMetadata("m"),
        RelevanceScore(0, 0.5),
        RelevanceScore(1, 2.0),
        StreamEnd(),
    ]


@pytest.mark.parametrize(
    ("request_", "body", "text"),
    [
        (EMBED, outputs("embedding", 1, 2, 3), "as many numbers"),
        (EMBED, outputs("embedding"), "as many numbers"),
        (RERANK, outputs("scores", 1, 2, 3, 4), "as many numbers"),
        (RERANK, outputs("scores", "a", "b"), "no numbers"),
        (RERANK, outputs("logits", 1, 2), "no output scores; it has logits"),
        (RERANK, {"outputs": []}, "no output scores; it has none"),
        (RERANK, {"outputs": 5}, "can't be read"),
        (RERANK, b"{", "can't be read"),
        (RERANK, {"error": "CUDA is gone"}, "worker"),
    ],
)
def test_invalid_response_fails(request_: Any, body: Any, text: str) -> None:
    with pytest.raises(WorkerFailed, match=text):
        decode(Triton(), request_, body)


def test_empty_response_is_broken_and_a_huge_one_fails() -> None:
    decoder = Triton().create_decoder(EMBED)
    with pytest.raises(StreamBroken):
        decoder.close()
    with pytest.raises(WorkerFailed, match="too large"):
        decoder.feed(b" " * (MAX_UNARY_BYTES + 1))


@pytest.mark.parametrize("other", [{}, {"parameters": {"data": []}}])
def test_large_tensors_are_decoded_in_steps(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """Also if another key has the name of the tensors' arrays: then in one step."""
    lengths = list[int]()
    decode_step = vectors._decode_step

    def decode_piece(text: bytes) -> list[Any]:
        lengths.append(len(text))
        return decode_step(text)

    monkeypatch.setattr(vectors, "_decode_step", decode_piece)
    numbers = [number / 8 for number in range(100_000)]
    body = outputs("embedding", *numbers)
    body["outputs"].insert(0, {"name": "other", "data": [[1], [2]], **other})

    events = decode(make_adapter([], []), EmbeddingRequest(model="m", inputs=("a",)), body)

    assert events[1] == Embedding(0, tuple(numbers))
    assert bool(other) or len(lengths) > 1
    assert max(lengths, default=0) <= vectors.MAX_DECODED + 10
