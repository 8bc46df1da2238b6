"""The cost of a response grows linearly with its events, for any input."""

import json
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gateway.runtime.build import build_adapter
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    Timing,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import ClientRequest, ResponseContext
from tests.support.path_routers import get_path_router
from tests.unit.protocols.test_worker_claims import PROTOCOLS, build

pytestmark = pytest.mark.slow
"""Each Python instruction is traced."""

FEW, MANY = 25, 250
MOST: Final = 11
"""The cost of ``MANY`` events is at most this multiple of that of ``FEW``."""


def count_instructions(run: Callable[[], object]) -> int:
    """Return the number of Python instructions executed."""
    count = 0

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal count
        del value
        if event == "opcode":
            count += 1
        elif event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def write_chunk(delta: Any, **fields: Any) -> Any:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return {"id": "c", "created": 1, "model": "m"} | fields | {"choices": [choice]}


CHAT_FORMS: dict[str, Callable[[int], Any]] = {
    "text": lambda _: write_chunk({"content": "ab"}),
    "created": lambda i: write_chunk({"content": "ab"}, created=i),
    "obfuscation": lambda i: write_chunk({"content": "ab"}) | {"obfuscation": "x" * (i % 7)},
    "running usage": lambda i: (
        write_chunk({"content": "ab"}) | {"usage": {"prompt_tokens": 1, "completion_tokens": i}}
    ),
    "implausible usage": lambda i: (
        write_chunk({"content": "ab"}) | {"usage": {"prompt_tokens": 1, "completion_tokens": -i}}
    ),
    "reasoning": lambda i: write_chunk({"reasoning_content" if i % 2 else "content": "ab"}),
    "refusal": lambda i: write_chunk({"refusal" if i % 3 else "content": "ab"}),
    "other text": lambda i: write_chunk({"content": "ab" if i % 2 else "cd", "x": i}),
    "tool calls with indexes": lambda i: write_chunk(
        {"tool_calls": [{"index": i, "id": f"c{i}", "function": {"name": "f", "arguments": "{}"}}]}
    ),
    "tool calls with ids": lambda i: write_chunk(
        {"tool_calls": [{"id": f"c{i}", "function": {"name": "f", "arguments": "{}"}}]}
    ),
    "tool calls without ids": lambda _: write_chunk(
        {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    ),
    "tool arguments": lambda i: write_chunk(
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": "12"} | ({} if i else {"name": "f"})}
            ]
        }
    ),
    "tool arguments before the name": lambda _: write_chunk(
        {"tool_calls": [{"index": 0, "function": {"arguments": "12"}}]}
    ),
    "empty": lambda _: write_chunk({}),
}
TEXT_FORMS: dict[str, dict[str, Callable[[int], Any]]] = {
    "triton": {
        "text": lambda _: {"model_name": "m", "text_output": "ab"},
        "counts": lambda i: {"model_name": "m", "text_output": "ab", "num_output_tokens": i % 5},
        "other fields": lambda i: {"model_name": "m", "text_output": "ab", "x": i},
        "reasons": lambda _: {"model_name": "m", "text_output": "ab", "finish_reason": "None"},
    },
    "tgi generate": {
        "text": lambda i: {"token": {"id": i, "text": "ab", "special": False}},
        "logprobs": lambda i: {
            "token": {"id": i, "text": "ab", "logprob": -1.0, "special": False},
            "top_tokens": [{"id": i, "text": "ab", "logprob": -1.0}],
        },
    },
    "mindie generate": {
        "text": lambda _: {"model_name": "m", "text_output": "ab"},
        "counts": lambda i: {
            "model_name": "m",
            "text_output": "ab",
            "details": {"generated_tokens": i, "batch_size": 1, "queue_wait_time": i},
            "decode_time": i,
        },
    },
}
FRAMINGS: dict[str, Callable[[Sequence[bytes]], Sequence[bytes]]] = {
    "one by one": lambda events: events,
    "at once": lambda events: [b"".join(events)],
    "in pieces": lambda events: _split(b"".join(events), 7),
    "comments": lambda events: [b"".join(b": ping\n\n" + event for event in events)],
    "CRLF": lambda events: [b"".join(events).replace(b"\n", b"\r\n")],
    "CR": lambda events: [b"".join(events).replace(b"\n", b"\r")],
}


CASES = [
    pytest.param(name, form, framing, id=f"{name}, {label}, {framing_label}")
    for name in PROTOCOLS
    for label, form in TEXT_FORMS.get(name, CHAT_FORMS).items()
    for framing_label, framing in FRAMINGS.items()
    if label == "text" or framing_label == "at once" or name == "openai"
]


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize(("name", "form", "framing"), CASES)
def test_a_decoder_reads_ten_times_the_events_for_ten_times_the_cost(
    name: str,
    form: Callable[[int], Any],
    framing: Callable[[Sequence[bytes]], Sequence[bytes]],
) -> None:
    def measure(count: int) -> int:
        adapter, request = build(name)
        decoder = adapter.create_decoder(replace(request, stream=True))
        events = [b"data: %b\n\n" % json.dumps(form(i)).encode() for i in range(count)]
        pieces = framing(events)

        def feed() -> None:
            for piece in pieces:
                decoder.feed(piece)

        return count_instructions(feed)

    measure(10)
    assert measure(MANY) <= MOST * measure(FEW)


@pytest.mark.parametrize("stray", [b"x\n", b"x", b"\n", b"\r", b"data: \n"])
@pytest.mark.parametrize("name", ["openai", "mindie generate", "triton", "tgi generate"])
def test_a_decoder_reads_lines_without_events_at_a_linear_cost(name: str, stray: bytes) -> None:
    def measure(count: int) -> int:
        adapter, request = build(name)
        decoder = adapter.create_decoder(replace(request, stream=True))

        def feed() -> None:
            try:
                for _ in range(count):
                    decoder.feed(stray)
            except Exception:  # noqa: BLE001 - an error ends it sooner
                return

        return count_instructions(feed)

    assert measure(MANY) <= MOST * measure(FEW)


EVENT_FORMS: dict[str, Callable[[int], Sequence[Event]]] = {
    "text": lambda _: [TextDelta("ab")],
    "reasoning": lambda _: [ReasoningDelta("ab")],
    "tool calls": lambda i: [ToolCallStart(0, i, f"c{i}", "f"), ToolCallDelta(0, i, "{}")],
    "tool arguments": lambda i: [
        *([] if i else [ToolCallStart(0, 0, "c", "f")]),
        ToolCallDelta(0, 0, "12"),
    ],
    "usage": lambda i: [TextDelta("ab"), Usage(1, i)],
    "timing": lambda i: [Timing(0.1, 0.1, 0.1, i), TextDelta("ab")],
}
ENDPOINTS: dict[str, tuple[str, str | None, str, Any]] = {
    "openai chat": ("openai", None, "/v1/chat/completions", {"messages": "chat"}),
    "openai completion": ("openai", None, "/v1/completions", {"prompt": "hi"}),
    "databricks": (
        "databricks", None, "/serving-endpoints/m/invocations", {"messages": "chat"}
    ),
    "ovms chat": ("ovms", None, "/v3/chat/completions", {"messages": "chat"}),
    "ovms completion": ("ovms", None, "/v3/completions", {"prompt": "hi"}),
    "mindie chat": ("mindie", None, "/v1/chat/completions", {"messages": "chat"}),
    "mindie text": (
        "mindie", None, "/v2/models/m/generate_stream",
        {"text_input": "hi", "parameters": {"details": True}},
    ),
    "mindie tgi": ("mindie", None, "/generate_stream", {"inputs": "hi", "parameters": {}}),
    "mindie native": ("mindie", None, "/infer", {"inputs": "hi", "stream": True}),
    "triton": ("triton", "vllm", "/v2/models/m/generate_stream", {"text_input": "hi"}),
}  # fmt: skip


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("form", EVENT_FORMS.values(), ids=EVENT_FORMS.keys())
@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS.keys())
def test_an_encoder_writes_ten_times_the_events_for_ten_times_the_cost(
    endpoint: tuple[str, str | None, str, Any],
    form: Callable[[int], Sequence[Event]],
    response_context: ResponseContext,
    *,
    at_once: bool,
) -> None:
    def measure(count: int) -> int:
        encoder = create_encoder(endpoint, response_context)
        batches: list[Sequence[Event]] = [form(i) for i in range(count)]
        if at_once:
            batches = [[event for batch in batches for event in batch]]
        batches = [
            [ResponseMetadata("m")],
            *batches,
            [ChoiceEnd("eos"), Usage(1, count), StreamEnd()],
        ]

        def write() -> None:
            for batch in batches:
                encoder.encode_events(batch)

        return count_instructions(write)

    measure(10)
    assert measure(MANY) <= MOST * measure(FEW)


def create_encoder(
    endpoint: tuple[str, str | None, str, Any], response_context: ResponseContext
) -> Any:
    name, profile, path, fields = endpoint
    adapter: Any = build_adapter(name, profile, {})
    body = fields | ({"model": "m"} if "serving" not in path and "/v2/" not in path else {})
    if "messages" in body:
        body |= {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    match = get_path_router(adapter).find_endpoint("POST", path)
    headers = {"content-type": "application/json"}
    call = ClientRequest(match.endpoint, match.params, headers, "", json.dumps(body).encode(), path)
    return adapter.create_encoder(call, adapter.decode_request(call), response_context)


@pytest.mark.parametrize("form", EVENT_FORMS.values(), ids=EVENT_FORMS.keys())
def test_the_fold_of_ten_times_the_events_costs_ten_times_as_much(
    form: Callable[[int], Sequence[Event]],
) -> None:
    def measure(count: int) -> int:
        fold = ResponseAccumulator()
        batches: list[Sequence[Event]] = [
            *(form(i) for i in range(count)),
            [ChoiceEnd("eos"), StreamEnd()],
        ]

        def add() -> None:
            for batch in batches:
                fold.add(batch)
            fold.result()

        return count_instructions(add)

    measure(10)
    assert measure(MANY) <= MOST * measure(FEW)
