"""The finish reason of tool calls: only complete calls are reported as such."""

import json
from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols.core.events import ChoiceEnd, StreamEnd, ToolCallDelta, ToolCallStart, Usage
from protocols.core.interfaces import ClientRequest, ResponseContext
from tests.support.path_routers import get_path_router

ENDPOINTS = {
    "openai": ("/v1/chat/completions", "tool_calls", "stop"),
    "databricks": ("/serving-endpoints/m/invocations", "tool_calls", "stop"),
    "mindie": ("/v1/chat/completions", "tool_calls", "stop"),
    "cohere": ("/v2/chat", "TOOL_CALL", "STOP_SEQUENCE"),
    "anthropic": ("/v1/messages", "tool_use", "stop_sequence"),
}


def encode_end(name: str, path: str, end: ChoiceEnd, response_context: ResponseContext) -> str:
    """Write a stream with one call that ends so."""
    adapter: Any = build_adapter(name, None, {})
    body = {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    }  # fmt: skip
    match = get_path_router(adapter).find_endpoint("POST", path)
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    call = ClientRequest(match.endpoint, match.params, headers, "", json.dumps(body).encode(), path)
    encoder = adapter.create_encoder(call, adapter.decode_request(call), response_context)
    calls = [ToolCallStart(0, 0, "1", "f"), ToolCallDelta(0, 0, '{"a": "')]
    text: str = encoder.encode_events([*calls, end, Usage(1, 2), StreamEnd()]).decode()
    return text.replace(" ", "")


@pytest.mark.parametrize("name", ENDPOINTS)
def test_stop_string_in_a_call_is_no_end_of_calls(
    name: str, response_context: ResponseContext
) -> None:
    path, complete, cut = ENDPOINTS[name]

    def encode(end: ChoiceEnd) -> str:
        return encode_end(name, path, end, response_context)

    for end in (
        ChoiceEnd("eos"),
        ChoiceEnd("tool_calls", matched_stop="x"),
        ChoiceEnd("stop", matched_stop=7),
    ):
        assert f'reason":"{complete}"' in encode(end)
    text = encode(ChoiceEnd("stop", matched_stop="x"))
    assert f'reason":"{cut}"' in text
    assert f'reason":"{complete}"' not in text
