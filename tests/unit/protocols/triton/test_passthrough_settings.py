"""A model's limit and defaults stand beside what a client sent, which is passed on unchanged."""

from typing import Any

import msgspec
import pytest

from protocols.core.interfaces import ClientRequest, ModelSettings, ResponseContext
from protocols.triton import Triton
from tests.support.path_routers import get_path_router

SETTINGS = ModelSettings(50, {"sampling.temperature": 0.5})
LIMIT = ModelSettings(50)
NAN = b'{"text_input": "hi", "parameters": {"max_tokens": NaN}}'


def pass_through(body: bytes, settings: ModelSettings) -> bytes | None:
    """Return the worker's body; None if the request must be translated."""
    adapter = Triton("vllm")
    path = "/v2/models/m/generate"
    match = get_path_router(adapter).find_endpoint("POST", path)
    call = ClientRequest(match.endpoint, match.params, {}, "", body, path, "r")
    context = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0, settings=settings)
    passed = adapter.prepare_passthrough(adapter, call, context)
    return None if passed is None else passed.upstream_request.body


@pytest.mark.parametrize(
    ("sent", "added"),
    [
        ({"text_input": "hi", "later": [1]}, {"max_tokens": 50, "temperature": 0.5}),
        ({"text_input": "hi", "parameters": {"max_tokens": 9}}, {"temperature": 0.5}),
        ({"text_input": "hi", "max_tokens": 50, "temperature": 1}, {}),
        ({"text_input": "hi", "parameters": 5}, {"max_tokens": 50, "temperature": 0.5}),
    ],
)
def test_settings_are_added_to_the_fields_that_were_sent(
    sent: dict[str, Any], added: dict[str, Any]
) -> None:
    body = msgspec.json.encode(sent)

    passed = pass_through(body, SETTINGS)

    assert passed is not None
    assert passed.startswith(body[:-1])
    assert msgspec.json.decode(passed) == {**sent, **added}


def test_a_request_that_says_all_is_the_same_bytes() -> None:
    body = b'{"text_input": "hi", "max_tokens": 5 }'

    assert pass_through(body, LIMIT) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"text_input": "hi", "max_tokens": 51}',
        b'{"text_input": "hi", "parameters": {"max_tokens": 51}}',
        b'{"text_input": "hi", "max_tokens": [5]}',
        b'{"text_input": "hi", "sampling_parameters": "{}"}',
        b'{"text_input": "hi", "max_tokens": 3, "max_tokens": 100}',
        b'{"text_input": "hi", "max_tokens": 100, "max_tokens": 3}',
        b'{"text_input": "hi", "parameters": {"max_tokens": 100}, "max_tokens": 3}',
        b'{"text_input": "hi", "parameters": {"max_tokens": 3, "max_tokens": 100}}',
        b'{"text_input": "hi", "parameters": {}, "parameters": {"max_tokens": 100}}',
        b'{"text_input": "hi", "max_tokens": true}',
        b'{"text_input": "hi", "max_tokens": -1}',
        b'{"text_input": "hi", "max_tokens": 5.5}',
        b'{"text_input": "hi", "max_tokens": null}',
        b"{}",
        b"no JSON",
        NAN,
    ],
)
def test_a_request_above_the_limit_or_not_plain_to_see_is_translated(body: bytes) -> None:
    assert pass_through(body, LIMIT) is None
