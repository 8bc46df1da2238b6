"""/v1/tokenizer: truncation, and the format of tokens."""

from typing import Any

import pytest

from protocols.core.aggregate import aggregate
from protocols.core.events import StreamEnd, TokenList
from protocols.core.request import TokenizeRequest

PATH = "/v1/tokenizer"
INVALID = "Inputs in request body is invalid."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Req body converts to json fail."),
        (b"[]", INVALID),
        ({}, INVALID),
        ({"inputs": None}, INVALID),
        ({"inputs": 5}, INVALID),
        ({"inputs": ["a"]}, INVALID),
        ({"inputs": ""}, "Inputs data length in [0, 524288], but the length of inputs is 0"),
        (
            {"inputs": "x" * 524289},
            "Inputs data length in [0, 524288], but the length of inputs is 524289",
        ),
        ({"inputs": "hi"}, "Request contains not model or model null"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_tokenizer_inputs_return_422(bench: Any, body: Any, message: str) -> None:
    """The input is checked before the model, since a server always has one."""
    one = bench("rc1")
    assert one.refused(PATH, body) == (422, message)


def test_tokenizer_text_is_read_from_inputs(bench: Any) -> None:
    one = bench(model="m")
    call = one.call(PATH, {"inputs": "hi"})
    assert call.endpoint.task == "tokenize"
    assert one.adapter.read_routing_info(call).model == "m"

    request = one.adapter.decode_request(call)
    assert isinstance(request, TokenizeRequest)
    assert (request.model, request.prompt, request.return_texts) == ("m", "hi", True)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, b'["a","b"]'),
        ({"do_decode": True}, b'["a","b"]'),
        ({"do_decode": "no"}, b'["a","b"]'),
        ({"do_decode": False}, b"[]"),
    ],
)
def test_tokenizer_response_lists_token_texts_and_count(
    bench: Any, body: Any, tokens: bytes
) -> None:
    """A token without a text counts as well."""
    one = bench(model="m")
    call = one.call(PATH, {"inputs": "ab", **body})
    encoder = one.adapter.create_encoder(
        call, one.adapter.decode_request(call), one.build_response_context("m")
    )

    reply = encoder.encode_unary(aggregate([TokenList((1, 7, 8), ("", "a", "b")), StreamEnd()]))

    assert reply.body == b'{"token_number":3,"tokens":' + tokens + b"}"
    assert ("Connection", "close") in reply.headers
    assert encoder.encode_events([]) == b""
    assert ("RequestUUID", "r1") in encoder.headers()
