"""MLflow's deployments client for Databricks."""

from typing import Any

import pytest
from mlflow.deployments import get_deploy_client
from requests import HTTPError

CHAT = {"messages": [{"role": "user", "content": "say hi"}]}


@pytest.fixture
def client(gateway: str, key: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DATABRICKS_HOST", gateway)
    monkeypatch.setenv("DATABRICKS_TOKEN", key)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # or it retries for minutes
    return get_deploy_client("databricks")


def test_chat_prediction(client: Any) -> None:
    response = client.predict(endpoint="chat", inputs=CHAT)

    assert response["object"] == "chat.completion"
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "Hello world!"}


def test_completion_prediction(client: Any) -> None:
    response = client.predict(endpoint="chat", inputs={"prompt": "say hi", "max_tokens": 1})

    assert response["choices"][0]["text"] == "Hello"


def test_embeddings_prediction(client: Any) -> None:
    response = client.predict(endpoint="embed", inputs={"input": ["a", "b c"]})

    assert [one["embedding"][0] for one in response["data"]] == [1.0, 3.0]


def test_streamed_chat_prediction(client: Any) -> None:
    choices = [chunk["choices"][0] for chunk in client.predict_stream(endpoint="chat", inputs=CHAT)]

    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hello world!"
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("endpoint", ["broken", "cut"])
def test_last_chunk_of_a_broken_stream_contains_the_error(client: Any, endpoint: str) -> None:
    *chunks, last = client.predict_stream(endpoint=endpoint, inputs=CHAT)

    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert set(last) == {"error"}


def test_endpoints_are_listed_and_retrieved(client: Any) -> None:
    assert {"chat", "embed", "ab"} <= {one["name"] for one in client.list_endpoints()}
    assert client.get_endpoint("chat")["state"]["ready"] == "READY"


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        ("nope", {}, (404, "RESOURCE_DOES_NOT_EXIST")),
        ("chat", {"temperature": 3}, (400, "INVALID_PARAMETER_VALUE")),
        ("failing", {}, (500, "INTERNAL_ERROR")),
    ],
)
def test_error_response_raises_http_error_with_its_code(
    client: Any, endpoint: str, fields: dict[str, object], expected: tuple[int, str]
) -> None:
    with pytest.raises(HTTPError) as excinfo:
        client.predict(endpoint=endpoint, inputs=CHAT | fields)

    response: Any = excinfo.value.response
    assert (response.status_code, response.json()["error_code"]) == expected
