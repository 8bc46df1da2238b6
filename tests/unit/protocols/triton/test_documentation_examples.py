"""The examples in the generate extension's documentation."""

from collections.abc import Callable
from typing import Any

import pytest

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import WorkerFailed

EXAMPLE = b"""{
  "id" : "42",
  "text_input" :  "client input",
  "parameters" :
    {
      "stream": false,
      "temperature": 0
    }
}"""
CURL = (
    b'{"id": "42", "text_input": "client input", "parameters": {"stream": false, "temperature": 0}}'
)


@pytest.mark.parametrize("body", [EXAMPLE, CURL])
@pytest.mark.parametrize("variant", ["generate", "generate_stream"])
@pytest.mark.parametrize("profile", ["vllm", "plain"])
def test_documented_generate_request_is_decoded(
    client_of: Callable[..., Any], profile: str, variant: str, body: bytes
) -> None:
    request = client_of(profile).decode(body, variant, "mymodel")
    assert request.model == "mymodel"
    assert request.kind == "completion"
    assert request.prompts == ("client input",)
    assert request.templating.mode == "raw"
    assert request.sampling.temperature == 0
    assert request.client_id == "42"
    assert request.stream is False
    assert request.extra == {}
    assert request.provided_fields == {"text_input", "stream", "temperature"}


@pytest.mark.parametrize("variant", ["generate", "generate_stream"])
def test_documented_generate_response(
    client_of: Callable[..., Any], describe: Callable[..., Any], variant: str
) -> None:
    client = client_of("plain")
    call = client.call(f"/v2/models/mymodel/{variant}", EXAMPLE, method="POST")
    encoder = client.adapter.create_encoder(
        call, client.adapter.decode_request(call), describe("mymodel")
    )
    reply = encoder.encode_unary(
        UnaryResponse([UnaryChoice(0, "model output", finish_reason="eos")])
    )
    response = (
        b'{"id":"42","model_name":"mymodel","model_version":"1","text_output":"model output"}'
    )
    framed = variant == "generate_stream"

    assert reply.status == 200
    assert reply.body == (b"data: " + response + b"\n\n" if framed else response)


def test_documented_generate_error(client: Any) -> None:
    call = client.call("/v2/models/mymodel/generate", EXAMPLE, method="POST")
    reply = client.adapter.encode_error(WorkerFailed("error message"), call)
    assert (reply.status, reply.body) == (400, b'{"error":"error message"}')
