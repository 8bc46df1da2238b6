"""Builds chunks of a stream, and decodes streams."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from protocols.core.errors import GatewayError
from protocols.core.request import GenerationRequest

HEADING = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "worker's"}
STREAMED = GenerationRequest(model="worker's", kind="chat", stream=True)


def build_chunk(
    delta: Any = None, finish: str | None = None, heading: Any = None, **fields: Any
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish} | fields
    return (heading or HEADING) | {"choices": [choice]}


def format_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def format_text_event(text: str) -> bytes:
    return format_event(build_chunk({"content": text}))


def run_steps(step: Callable[[Any], Any], close: Callable[[], Any], parts: Sequence[Any]) -> Any:
    """Return the results of these steps, and the error that ends them."""
    events: list[Any] = []
    try:
        events.extend(step(part) for part in parts)
        events.append(close())
    except GatewayError as error:
        return events, type(error), error.message
    return events


def flatten(batches: Any) -> Any:
    """Return the events without their batches."""
    return [event for batch in batches for event in batch]
