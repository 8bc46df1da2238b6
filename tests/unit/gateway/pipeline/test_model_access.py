"""Bodies of keys with a list of models: which part is JSON, and which can't be read."""

import pytest

from gateway.pipeline.model_access import check_named_models
from protocols.core.errors import ClientError, InvalidParameter
from protocols.core.interfaces import ClientRequest, Endpoint
from protocols.json_body import read_unchecked_fields

LENGTH = "inference-header-content-length"
TENSORS = b"\x05\x00\x00\x00hello"


def make_request(body: bytes, length: str = "") -> ClientRequest:
    endpoint = Endpoint("POST", "/v1/chat/completions", "generate", "chat")
    headers = {LENGTH: length} if length else {}
    return ClientRequest(endpoint, {}, headers, "", body, endpoint.path)


async def test_only_the_json_before_the_bytes_of_tensors_is_read() -> None:
    await check_named_models(make_request(b'{"a": 1}' + TENSORS, "8"))
    with pytest.raises(InvalidParameter, match="'models' names further models"):
        await check_named_models(make_request(b'{"models": 1}' + TENSORS, "13"))


@pytest.mark.parametrize("length", ["", "0" * 19 + "8" + "1" * 5000, "9" * 5000, "-8", "eight"])
async def test_body_with_a_length_that_says_nothing_is_refused_if_it_is_no_json(
    length: str,
) -> None:
    with pytest.raises(ClientError, match="needs a body of JSON"):
        await check_named_models(make_request(b'{"a": 1}' + TENSORS, length))


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "Models",
        "model\u017f",
        "fallbac\u212as",
        "%6dodels",
        "models[0]",
        " models",
        "preset",
        "providerOptions",
        "router_settings_override",
    ],
)
async def test_decoded_field_that_names_models_is_refused(name: str) -> None:
    call = make_request(b'{"model": "m", "%b": 1}' % name.encode())
    read_unchecked_fields(call)

    with pytest.raises(InvalidParameter, match="names further models"):
        await check_named_models(call)


async def test_text_of_a_decoded_body_names_no_models() -> None:
    call = make_request(b'{"model": "m", "messages": [{"models": "\\u0041"}]}')
    read_unchecked_fields(call)

    await check_named_models(call)


@pytest.mark.parametrize(
    "name", ["models", "model\u017f", r"model\u017f", r"fallbac\u212As", "\u212a"]
)
async def test_name_in_what_is_no_json_is_refused(name: str) -> None:
    """A worker might read more than the gateway does."""
    with pytest.raises(ClientError, match="needs a body of JSON"):
        await check_named_models(make_request(b'{"a": 1, "%b": 1,}' % name.encode()))
