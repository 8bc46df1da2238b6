"""A client gets embeddings in the requested encoding, whichever the worker sends."""

import json
from typing import Any

import pytest

from protocols.chat.embeddings import EmbeddingEncoder
from protocols.chat.responses import ResponseStyle
from protocols.core.aggregate import aggregate
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import EmbeddingRequest
from protocols.openai.endpoints import OpenAI

FLOATS = [0.5, -0.25]
BASE64 = "AAAAPwAAgL4="
CONTEXT = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)


@pytest.mark.parametrize("written", [FLOATS, BASE64])
@pytest.mark.parametrize(
    ("encoding", "expected"), [(None, FLOATS), ("float", FLOATS), ("base64", BASE64)]
)
def test_the_client_s_encoding_counts(encoding: str | None, expected: Any, written: Any) -> None:
    """A worker's bytes are passed through only if they have this encoding."""
    adapter = OpenAI("vllm")
    [endpoint] = [one for one in adapter.endpoints if one.path == "/v1/embeddings"]
    body = {"model": "m", "input": "a"} | ({"encoding_format": encoding} if encoding else {})
    call = ClientRequest(endpoint, {}, {}, "", json.dumps(body).encode(), endpoint.path)
    passed = adapter.prepare_passthrough(OpenAI(), call, CONTEXT)

    assert passed is not None

    response = {
        "object": "list",
        "data": [{"index": 0, "embedding": written}],
        "model": "w",
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    }

    reader = passed.create_reader()
    reader.feed([json.dumps(response).encode()])
    data, events = reader.close()

    assert (data is None) == (written != expected)

    if data is None:
        request = passed.request
        assert isinstance(request, EmbeddingRequest)
        encoder = EmbeddingEncoder(ResponseStyle(), request, CONTEXT)
        data = encoder.encode_unary(aggregate(events)).body
    assert json.loads(data)["data"][0]["embedding"] == expected
