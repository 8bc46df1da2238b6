"""A value of the wrong type in a worker's response is dropped alone.

Given a response of each worker protocol, unary and streamed, in which one value is replaced by one
of another type (each value in turn), the text, the tool call and the finish reason are decoded.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from gateway.runtime.build import build_adapter
from protocols.core.aggregate import aggregate
from protocols.core.events import ChoiceEnd, Event, TextDelta, ToolCallStart
from protocols.core.request import (
    GenerationRequest,
    LogprobsOptions,
    Message,
    ResponseOptions,
    TextPart,
)
from tests.protocols import find_rows

TEXT = "some text"
LOGPROBS = {
    "content": [
        {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []},
        {"token": "b", "logprob": -1.0, "bytes": None, "top_logprobs": [{"token": "c"}]},
    ]
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
CHAT: dict[str, Any] = {
    "id": "a",
    "created": 7,
    "model": "w",
    "system_fingerprint": "x",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": TEXT,
                "reasoning_content": "hm",
                "refusal": None,
                "annotations": [],
                "tool_calls": [CALL],
            },
            "logprobs": LOGPROBS,
            "finish_reason": "tool_calls",
            "stop_reason": None,
        }
    ],
    "usage": USAGE,
}
CHUNKS: list[dict[str, Any]] = [
    {"id": "a", "model": "w", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    {
        "id": "a",
        "model": "w",
        "choices": [{"index": 0, "delta": {"content": TEXT}, "logprobs": LOGPROBS}],
    },
    {
        "id": "a",
        "model": "w",
        "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **CALL}]}}],
    },
    {"id": "a", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"id": "a", "choices": [], "usage": USAGE},
]
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "w",
    "content": [
        {"type": "thinking", "thinking": "so", "signature": "s"},
        {"type": "text", "text": TEXT},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 2},
}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": "{}"},
    },
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
]
ITEMS: dict[str, Any] = {
    "id": "resp_1",
    "model": "w",
    "created_at": 7,
    "status": "completed",
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {
                    "type": "output_text",
                    "text": TEXT,
                    "annotations": [],
                    "logprobs": LOGPROBS["content"],
                }
            ],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}},
}
GENERATED: dict[str, Any] = {
    "generated_text": TEXT,
    "details": {
        "finish_reason": "length",
        "generated_tokens": 2,
        "prefill": [{"id": 1, "text": "hi", "logprob": -1.0}],
        "tokens": [{"id": 2, "text": TEXT, "logprob": -1.0, "special": False}],
        "top_tokens": [[{"id": 2, "text": TEXT, "logprob": -1.0, "special": False}]],
    },
}
TOKENS: list[dict[str, Any]] = [
    {"index": 1, "token": {"id": 2, "text": TEXT, "logprob": -1.0, "special": False}},
    {
        "index": 2,
        "token": {"id": 3, "text": "", "logprob": -1.0, "special": False},
        "top_tokens": [{"id": 3, "text": "", "logprob": -1.0, "special": False}],
        "generated_text": TEXT,
        "details": {"finish_reason": "length", "generated_tokens": 2, "input_length": 1},
    },
]
TENSORS: dict[str, Any] = {
    "model_name": "w",
    "model_version": "1",
    "text_output": TEXT,
    "finish_reason": "stop",
    "stop_reason": "None",
    "num_output_tokens": 2,
    "num_input_tokens": 1,
    "logprobs": '[{"1": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}]',
    "id": "x",
}
DETAILED: dict[str, Any] = {
    "id": "a",
    "model_name": "w",
    "text_output": TEXT,
    "prefill_time": 1,
    "decode_time": 2,
    "details": {"finish_reason": "length", "generated_tokens": 2, "batch_size": 1},
}
CONVERSATION = GenerationRequest(
    model="m",
    kind="chat",
    messages=(Message("user", (TextPart("hi"),)),),
    logprobs=LogprobsOptions(1),
    response_options=ResponseOptions(timing=True),
    source="another",
)
PROMPT = GenerationRequest(
    model="m",
    kind="completion",
    prompts=("hi",),
    logprobs=LogprobsOptions(1),
    response_options=ResponseOptions(timing=True),
    source="another",
)
OPENAI = build_adapter("openai", "vllm", {})
TEXT_ONLY = msgspec.structs.replace(PROMPT, logprobs=None)
WORKERS: Mapping[str, tuple[Any, GenerationRequest, dict[str, Any], list[dict[str, Any]]]] = {
    "openai": (OPENAI, CONVERSATION, CHAT, CHUNKS),
    "ovms": (build_adapter("ovms", None, {}), CONVERSATION, CHAT, CHUNKS),
    "databricks": (build_adapter("databricks", None, {}), CONVERSATION, CHAT, CHUNKS),
    "tgi chat": (build_adapter("tgi", None, {}), CONVERSATION, CHAT, CHUNKS),
    "anthropic": (build_adapter("anthropic", None, {}), CONVERSATION, MESSAGE, MESSAGE_EVENTS),
    "responses": (
        build_adapter("openai", "openai", {"worker_api": "responses"}),
        CONVERSATION,
        ITEMS,
        [],
    ),
    "tgi": (build_adapter("tgi", None, {}), PROMPT, GENERATED, TOKENS),
    "triton": (build_adapter("triton", None, {}), PROMPT, TENSORS, []),
    "mindie": (build_adapter("mindie", None, {}), TEXT_ONLY, DETAILED, []),
    **{
        name: (build_adapter(name, None, {}), CONVERSATION, answer, find_rows("EVENTS")[name])
        for name, answer in find_rows("ANSWER").items()
    },
}
ODD: tuple[Any, ...] = (5, -1, 1.5, "odd", True, None, [], [5], {}, {"x": 1})
WORDS = frozenset({"type", "finish_reason", "stop_reason", "status", "error"})
"""Words of enumerations, of which unknown ones are errors, and the name of an error."""


def list_values(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value without which the rest of the response can be decoded.

    Left out are the text, words of enumerations, the names of calls, and the choices: choices of
    another type are an error, since nobody knows what they would have held.
    """
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_values(inner, (*at, key))
    elif at[-1] in WORDS:
        return
    if at[-1:] == ("choices",) or at[-2:-1] == ("choices",):
        return
    if at and TEXT not in str(value) and at[-1] != "name" and not holds_name(value):
        yield at


def holds_name(value: Any) -> bool:
    """Return whether a value holds the name of a call or a finish reason."""
    shown = str(value)
    return any(word in shown for word in ("'name'", "'type'", "_reason'", "'status'"))


def is_possible(place: tuple[Any, ...], odd: Any) -> bool:
    """Return whether ``odd`` is the valid index of another choice."""
    return place[-1] == "index" and odd == 5 and "choices" in place[-3:]


def replace_value(body: Any, place: tuple[Any, ...], odd: Any) -> Any:
    """Return a copy with ``odd`` in this place."""
    changed = copy.deepcopy(body)
    target = changed
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = odd
    return changed


def check_rest(events: list[Event], *, has_call: bool) -> None:
    """Check that the text, the tool call and the finish reason were decoded."""
    assert TEXT in "".join(one.text for one in events if isinstance(one, TextDelta))
    assert sum(isinstance(one, ToolCallStart) for one in events) == has_call
    assert any(isinstance(one, ChoiceEnd) for one in events)
    aggregate(events)


def list_cases(*, stream: bool) -> Iterator[Any]:
    """Yield each worker protocol with each place of a value in its response."""
    for name, (_, _, whole, events) in WORKERS.items():
        body: Any = events if stream else whole
        for place in list_values(body):
            if not stream or len(place) > 1:
                yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


@pytest.mark.parametrize(("name", "place"), list(list_cases(stream=False)))
def test_wrong_type_in_a_unary_response_drops_only_that_value(
    name: str, place: tuple[Any, ...]
) -> None:
    worker, request, whole, _ = WORKERS[name]
    for odd in (one for one in ODD if not is_possible(place, one)):
        decoder = worker.create_decoder(request)
        data = msgspec.json.encode(replace_value(whole, place, odd))
        events = [*decoder.feed(data), *decoder.close()]

        check_rest(events, has_call=request is CONVERSATION)


@pytest.mark.parametrize(("name", "place"), list(list_cases(stream=True)))
def test_wrong_type_in_a_stream_drops_only_that_value(name: str, place: tuple[Any, ...]) -> None:
    worker, request, _, chunks = WORKERS[name]
    for odd in (one for one in ODD if not is_possible(place, one)):
        decoder = worker.create_decoder(msgspec.structs.replace(request, stream=True))
        payloads = [msgspec.json.encode(one) for one in replace_value(chunks, place, odd)]
        if "tokens" not in str(chunks[0]) and name not in ("anthropic", "tgi"):
            payloads.append(b"[DONE]")
        data = b"".join(b"data: %b\n\n" % one for one in payloads)
        events = [*decoder.feed(data), *decoder.close()]

        check_rest(events, has_call=request is CONVERSATION)
