"""A unary endpoint that is sent ``stream: true`` answers with a complete response."""

from typing import Any

import pytest

from tests.conftest import MOCK, Serve

TURN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/embeddings", {"input": "a"}, "data"),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}, "results"),
        ("/v1/score", {"text_1": "a", "text_2": "a"}, "data"),
        ("/classify", {"input": "a"}, "data"),
        ("/tokenize", {"prompt": "a"}, "tokens"),
        ("/v1/responses/input_tokens", {"input": "a"}, "input_tokens"),
        ("/v1/messages/count_tokens", {"messages": [TURN]}, "input_tokens"),
    ],
)
async def test_field_stream_changes_nothing(
    serve: Serve, path: str, body: dict[str, Any], key: str
) -> None:
    gateway = await serve(MOCK)
    response = await gateway.http.post(path, json={"model": "mock", "stream": True, **body})

    assert response.status_code == 200
    assert response.json()[key]
    assert [record.stream for record in gateway.records] == [False]
