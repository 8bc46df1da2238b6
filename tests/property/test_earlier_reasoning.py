"""Reasoning in the history of a request reaches the worker, or is reported, or refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from protocols.core.errors import ClientError
from tests.property.test_unknown_keys import CALL, FUNCTION, list_workers, prepare
from tests.support.path_routers import get_adapter

TEXT = "text-of-a-thought"
QUESTION = {"role": "user", "content": "q"}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHAT_PATHS = {
    "openai": "/v1/chat/completions",
    "tgi": "/v1/chat/completions",
    "ovms": "/v3/chat/completions",
    "mindie": "/v1/chat/completions",
    "databricks": "/serving-endpoints/m/invocations",
}
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": TEXT, "signature": "c2ln"},
    {"type": "redacted_thinking", "data": TEXT},
]
ITEM = {"type": "reasoning", "id": "rs_1", "summary": []}
PART = {"type": "reasoning_text", "text": TEXT}
SUMMARY = {"type": "summary_text", "text": TEXT}
ITEMS: list[dict[str, Any]] = [
    {**ITEM, "summary": [SUMMARY]},
    {**ITEM, "content": [PART]},
    {
        **ITEM,
        "summary": [{"type": "summary_text", "text": TEXT}],
        "content": [{**PART, "text": "x"}],
    },
    {**ITEM, "encrypted_content": TEXT},
]


def list_requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return a client protocol, a path and a body with an earlier thought after a question."""
    turn: dict[str, Any]
    for name, path in CHAT_PATHS.items():
        for key in ("reasoning_content", "reasoning"):
            turn = {"role": "assistant", "content": "a", key: TEXT}
            yield name, path, {"model": "m", "messages": [QUESTION, turn, QUESTION]}
            turn = {"role": "assistant", "content": None, "tool_calls": [CALL], key: TEXT}
            result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
            yield name, path, {"model": "m", "messages": [QUESTION, turn, result], "tools": TOOLS}
    for block in BLOCKS:
        for more in ([{"type": "text", "text": "a"}], []):
            turns = [QUESTION, {"role": "assistant", "content": [block, *more]}, QUESTION]
            yield "anthropic", "/v1/messages", {"model": "m", "max_tokens": 9, "messages": turns}
    for item in ITEMS:
        for after in ([{"role": "assistant", "content": "a"}], []):
            yield (
                "openai",
                "/v1/responses",
                {"model": "m", "input": [QUESTION, item, *after, QUESTION]},
            )
    turn = {"role": "assistant", "content": "a", "thinking": TEXT}
    yield "ollama", "/api/chat", {"model": "m", "messages": [QUESTION, turn, QUESTION]}
    parts = [{"type": "thinking", "thinking": TEXT}, {"type": "text", "text": "a"}]
    turn = {"role": "assistant", "content": parts}
    yield "cohere", "/v2/chat", {"model": "m", "messages": [QUESTION, turn, QUESTION]}


PLACES = ("messages[1]", "messages.1", "input[1]", "messages", "input")


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
def test_earlier_reasoning_is_sent_reported_or_refused(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    if name == "databricks":
        body = {key: one for key, one in body.items() if key != "model"}

    try:
        sent, reported = prepare(get_adapter(name), worker, path, body)
    except ClientError:
        return

    is_reported = any(one.startswith(PLACES) for one in reported)
    assert TEXT.encode() in sent or is_reported
