"""Triton's own client, over HTTP."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

TEXT = np.array([b"say hi"], dtype=np.object_)


@pytest.fixture
def client(gateway: str) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(gateway.removeprefix("http://")) as one:
        yield one


@pytest.fixture
def headers(key: str) -> dict[str, str]:
    """Anew for each test: the client writes into what it is given."""
    return {"Authorization": f"Bearer {key}"}


def prompt(*, binary: bool = True) -> list[InferInput]:
    one = InferInput("text_input", [1], "BYTES")
    return [one.set_data_from_numpy(TEXT, binary_data=binary)]


def test_health_needs_no_key(client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()


def test_models_are_ready_or_not(client: InferenceServerClient, headers: dict[str, str]) -> None:
    assert client.is_model_ready("chat", headers=headers)
    assert client.is_model_ready("chat", "1", headers=headers)
    assert not client.is_model_ready("nope", headers=headers)


def test_what_it_says_of_itself(client: InferenceServerClient, headers: dict[str, str]) -> None:
    server = client.get_server_metadata(headers=headers)
    model = client.get_model_metadata("chat", headers=headers)
    config = client.get_model_config("chat", headers=headers)
    index = client.get_model_repository_index(headers=headers)

    assert "binary_tensor_data" in server["extensions"]
    assert [one["name"] for one in model["inputs"]] == ["text_input"]
    assert [one["datatype"] for one in model["outputs"]] == ["BYTES"]
    assert config["name"] == "chat"
    assert [one["data_type"] for one in config["input"]] == ["TYPE_STRING"]
    assert "chat" in [one["name"] for one in index]


def test_infer_in_json(client: InferenceServerClient, headers: dict[str, str]) -> None:
    wanted = [InferRequestedOutput("text_output", binary_data=False)]
    answer = client.infer("chat", prompt(binary=False), outputs=wanted, headers=headers)

    assert answer.as_numpy("text_output").tolist() == ["Hello world!"]
    assert answer.get_response()["model_name"] == "chat"


@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
def test_infer_in_binary(
    client: InferenceServerClient, headers: dict[str, str], encoding: str | None
) -> None:
    wanted = [InferRequestedOutput("text_output", binary_data=True)]
    answer = client.infer(
        "chat",
        prompt(),
        model_version="1",
        outputs=wanted,
        request_id="mine",
        headers=headers,
        request_compression_algorithm=encoding,
        response_compression_algorithm=encoding,
    )

    assert answer.as_numpy("text_output").tolist() == [b"Hello world!"]
    assert answer.get_response()["id"] == "mine"


def test_infer_without_waiting(client: InferenceServerClient, headers: dict[str, str]) -> None:
    asked = [client.async_infer("chat", prompt(), headers=headers) for _ in range(4)]

    answers = [one.get_result().as_numpy("text_output").tolist() for one in asked]
    assert answers == [[b"Hello world!"]] * 4


@pytest.mark.parametrize("model", ["nope", "failing", "limited", "down"])
def test_an_error(client: InferenceServerClient, headers: dict[str, str], model: str) -> None:
    with pytest.raises(InferenceServerException) as found:
        client.infer(model, prompt(), headers=headers)

    assert found.value.message()
    assert found.value.status().isdecimal()


def test_no_key(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as found:
        client.infer("chat", prompt())

    assert found.value.status() in {"401", "403"}


def test_an_input_that_the_model_has_not(
    client: InferenceServerClient, headers: dict[str, str]
) -> None:
    other: Any = InferInput("text", [1], "BYTES").set_data_from_numpy(TEXT)

    with pytest.raises(InferenceServerException) as found:
        client.infer("chat", [other], headers=headers)

    assert "'text'" in found.value.message()
