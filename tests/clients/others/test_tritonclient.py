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
    """New for each test: the client modifies its headers."""
    return {"Authorization": f"Bearer {key}"}


def make_inputs(*, binary: bool = True) -> list[InferInput]:
    one = InferInput("text_input", [1], "BYTES")
    return [one.set_data_from_numpy(TEXT, binary_data=binary)]


def test_health_endpoints_require_no_key(client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()


def test_model_readiness_is_reported(
    client: InferenceServerClient, headers: dict[str, str]
) -> None:
    assert client.is_model_ready("chat", headers=headers)
    assert client.is_model_ready("chat", "1", headers=headers)
    assert not client.is_model_ready("nope", headers=headers)


def test_server_and_model_metadata_are_served(
    client: InferenceServerClient, headers: dict[str, str]
) -> None:
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


def test_infer_with_json_tensors(client: InferenceServerClient, headers: dict[str, str]) -> None:
    wanted = [InferRequestedOutput("text_output", binary_data=False)]
    response = client.infer("chat", make_inputs(binary=False), outputs=wanted, headers=headers)

    assert response.as_numpy("text_output").tolist() == ["Hello world!"]
    assert response.get_response()["model_name"] == "chat"


@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
def test_infer_with_binary_tensors_and_compression(
    client: InferenceServerClient, headers: dict[str, str], encoding: str | None
) -> None:
    wanted = [InferRequestedOutput("text_output", binary_data=True)]
    response = client.infer(
        "chat",
        make_inputs(),
        model_version="1",
        outputs=wanted,
        request_id="mine",
        headers=headers,
        request_compression_algorithm=encoding,
        response_compression_algorithm=encoding,
    )

    assert response.as_numpy("text_output").tolist() == [b"Hello world!"]
    assert response.get_response()["id"] == "mine"


def test_async_infer_requests(client: InferenceServerClient, headers: dict[str, str]) -> None:
    requests = [client.async_infer("chat", make_inputs(), headers=headers) for _ in range(4)]

    answers = [one.get_result().as_numpy("text_output").tolist() for one in requests]
    assert answers == [[b"Hello world!"]] * 4


@pytest.mark.parametrize("model", ["nope", "failing", "limited", "down"])
def test_failed_infer_raises_with_status_and_message(
    client: InferenceServerClient, headers: dict[str, str], model: str
) -> None:
    with pytest.raises(InferenceServerException) as excinfo:
        client.infer(model, make_inputs(), headers=headers)

    assert excinfo.value.message()
    assert excinfo.value.status().isdecimal()


def test_infer_without_a_key_is_rejected(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as excinfo:
        client.infer("chat", make_inputs())

    assert excinfo.value.status() in {"401", "403"}


def test_unknown_input_is_named_in_the_error(
    client: InferenceServerClient, headers: dict[str, str]
) -> None:
    other: Any = InferInput("text", [1], "BYTES").set_data_from_numpy(TEXT)

    with pytest.raises(InferenceServerException) as excinfo:
        client.infer("chat", [other], headers=headers)

    assert "'text'" in excinfo.value.message()
