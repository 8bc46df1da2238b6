"""The adapter creates the encoder that fits a request."""

from typing import Any

import pytest

from protocols.chat.embeddings import EmbeddingEncoder
from protocols.chat.responses import ChatEncoder, CompletionEncoder
from protocols.core.interfaces import ResponseContext
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.conftest import MakeCall

BODIES: list[tuple[str, dict[str, Any], type]] = [
    ("chat", {"messages": [{"role": "user", "content": "hi"}]}, ChatEncoder),
    ("completion", {"prompt": "hi"}, CompletionEncoder),
    ("embedding", {"input": "hi"}, EmbeddingEncoder),
]


@pytest.mark.parametrize(("operation", "body", "kind"), BODIES)
def test_each_operation_has_its_encoder_type(
    make_call: MakeCall,
    response_context: ResponseContext,
    operation: str,
    body: dict[str, Any],
    kind: type,
) -> None:
    adapter = OpenAI()
    call = make_call(operation, {"model": "m", **body})
    assert (
        type(adapter.create_encoder(call, adapter.decode_request(call), response_context)) is kind
    )
