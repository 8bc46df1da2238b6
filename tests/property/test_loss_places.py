"""A loss in a conversation is named by its path in the client's own body."""

import re
from typing import Any

import pytest

from protocols.core.errors import ClientError
from tests.property.test_unknown_keys import (
    CHAT,
    IMAGE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    list_requests,
    list_workers,
    prepare_request,
)
from tests.support.path_routers import get_adapter

CONVERSATIONS = ("messages", "input", "system")
SPEAKER = {
    **CHAT,
    "messages": [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "name": "Ann",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": IMAGE, "detail": "high"}},
                {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        *CHAT["messages"][1:],
    ],
}
BLOCKS = {
    **MESSAGES,
    "messages": [
        MESSAGES["messages"][0],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "aGk="},
                {
                    "type": "text",
                    "text": "a",
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}},
            ],
        },
        *MESSAGES["messages"][2:],
    ],
}
REASONING_TURN = {**OLLAMA["messages"][1], "thinking": "hm"}
ITEMS = {
    **RESPONSES,
    "instructions": "s",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": IMAGE, "detail": "high"},
            ],
        },
        *RESPONSES["input"][1:],
    ],
}
REQUESTS = [
    pytest.param("openai", "/v1/chat/completions", SPEAKER, id="openai"),
    pytest.param("tgi", "/v1/chat/completions", SPEAKER, id="tgi"),
    pytest.param("anthropic", "/v1/messages", BLOCKS, id="anthropic"),
    pytest.param("openai", "/v1/responses", ITEMS, id="responses"),
    pytest.param(
        "ollama",
        "/api/chat",
        {**OLLAMA, "messages": [OLLAMA["messages"][0], REASONING_TURN, OLLAMA["messages"][2]]},
        id="ollama",
    ),
    *list_requests(),
]


def find_value(body: Any, path: str) -> Any:
    """Return what stands at a path. Raises LookupError or TypeError."""
    for step in filter(None, re.split(r"[.\[\]]+", path)):
        body = body[int(step) if isinstance(body, list) else step]
    return body


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(("name", "path", "body"), REQUESTS)
def test_each_loss_in_a_conversation_is_named_by_the_client_s_path(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = get_adapter(name)
    try:
        _, losses = prepare_request(client, worker, path, body)
    except ClientError:
        return

    wrong = []
    for loss in losses:
        if loss.field in CONVERSATIONS:
            if loss.reason == "dropped":  # the whole conversation may be approximated
                wrong.append(loss)
        elif loss.field.startswith(CONVERSATIONS):
            try:
                find_value(body, loss.field)
            except (LookupError, TypeError, ValueError):
                wrong.append(loss)

    assert wrong == []
