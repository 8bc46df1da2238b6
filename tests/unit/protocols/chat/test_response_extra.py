"""Keys of a worker's response that the gateway does not know."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.chat.decoder import GenerationDecoder
from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.core.aggregate import aggregate
from protocols.core.errors import WorkerFailed
from protocols.core.events import Event, ResponseExtra, TextDelta
from protocols.core.interfaces import ResponseContext
from protocols.core.request import GenerationRequest, ResponseOptions

CONTEXT = ResponseContext("1", 7, "m", "v1", "backend", lambda: 0.0)
SIGNATURE = {"google": {"thought_signature": "abc"}}
ANSWER: dict[str, Any] = {
    "id": "a",
    "created": 7,
    "model": "w",
    "provider": "p",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "hi",
                "reasoning_details": [{"data": "E"}],
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}", "inner": 1},
                        "extra_content": SIGNATURE,
                    },
                    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
            "finish_reason": "tool_calls",
            "native_finish_reason": "STOP",
        }
    ],
    "usage": {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "cost": 0.5,
        "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 4},
    },
}


def chat(*, stream: bool = False, usage: Any = "final", legacy: bool = False) -> GenerationRequest:
    return GenerationRequest(
        model="m",
        kind="chat",
        stream=stream,
        legacy_functions=legacy,
        response_options=ResponseOptions(usage=usage),
    )


def decode(*bodies: Any, request: GenerationRequest, source: str = "") -> list[Event]:
    """The events of a JSON body, or of the chunks of a stream."""
    decoder = GenerationDecoder(request, source=source)
    if not request.stream:
        return [*decoder.feed(msgspec.json.encode(bodies[0])), *decoder.close()]
    events: list[Event] = []
    for body in bodies:
        events += decoder.feed(b"data: " + msgspec.json.encode(body) + b"\n\n")
    return [*events, *decoder.feed(b"data: [DONE]\n\n"), *decoder.close()]


def encode_stream(batches: Sequence[Sequence[Event]], request: GenerationRequest) -> list[Any]:
    encoder = ChatEncoder(ResponseStyle(), request, CONTEXT)
    data = b"".join(encoder.encode_events(batch) for batch in batches)
    payloads = [block.removeprefix(b"data: ") for block in data.split(b"\n\n")]
    return [msgspec.json.decode(one) for one in payloads if one.startswith(b"{")]


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "a", "model": "w", "choices": [choice], **more}


def test_a_client_of_the_worker_s_protocol_gets_every_key_of_a_whole_response() -> None:
    request = chat()
    response = aggregate(decode(ANSWER, request=request))
    body = msgspec.json.decode(
        ChatEncoder(ResponseStyle(), request, CONTEXT).encode_unary(response).body
    )

    assert body["provider"] == "p"
    (choice,) = body["choices"]
    assert choice["native_finish_reason"] == "STOP"
    assert choice["message"]["reasoning_details"] == [{"data": "E"}]
    assert choice["message"]["tool_calls"] == ANSWER["choices"][0]["message"]["tool_calls"]
    assert body["usage"] == ANSWER["usage"]


@pytest.mark.parametrize("together", [True, False])
def test_a_client_of_the_worker_s_protocol_gets_every_key_of_a_stream(*, together: bool) -> None:
    """Whether the events arrive in one batch or each alone makes no difference."""
    request = chat(stream=True)
    start = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
        "extra_content": SIGNATURE,
    }
    rest = {"index": 0, "function": {"arguments": "{}"}, "late": 1}
    events = decode(
        chunk({"role": "assistant", "content": "a", "x": 1}, provider="p"),
        chunk({"content": "b"}, provider="p"),
        chunk({"content": "c", "y": 2}, provider="p"),
        chunk({"tool_calls": [start]}),
        chunk({"tool_calls": [rest]}),
        chunk({}, "tool_calls", x_groq={"id": "r"}),
        {"id": "a", "model": "w", "choices": [], "usage": ANSWER["usage"]},
        request=request,
    )
    chunks = encode_stream([events] if together else [[one] for one in events], request)

    deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
    shown = [one for one in deltas if one.keys() & {"x", "y", "tool_calls"}]
    if together:
        assert shown == [
            {"content": "a", "x": 1},
            {"content": "c", "y": 2},
            {"tool_calls": [start]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}, "late": 1}]},
        ]
    else:
        merged = {key: value for one in shown for key, value in one.items() if key in "xy"}
        calls = [call for one in shown for call in one.get("tool_calls", ())]
        assert merged == {"x": 1, "y": 2}
        assert {key for call in calls for key in call} == {*start, "late"}
    assert [one["provider"] for one in chunks if "provider" in one] == ["p"]
    assert [one["x_groq"] for one in chunks if "x_groq" in one] == [{"id": "r"}]
    assert [one["usage"] for one in chunks if one.get("usage")] == [ANSWER["usage"]]


def test_keys_of_another_choice_wait_for_its_delta() -> None:
    request = chat(stream=True)
    batch: list[Event] = [
        ResponseExtra("", "message", ((("x",), 1),), 1),
        TextDelta("a"),
        TextDelta("b", 1),
    ]

    deltas = [one["choices"][0] for one in encode_stream([batch], request)]
    assert [one["index"] for one in deltas if "x" in one["delta"]] == [1]
    assert [one["delta"] for one in deltas if one["delta"].get("content")] == [
        {"content": "a"},
        {"content": "b", "x": 1},
    ]


def test_each_call_keeps_its_own_keys() -> None:
    calls = [
        {"index": i, "id": f"c{i}", "function": {"name": "f", "arguments": "{}"}, "x": i + 1}
        for i in range(2)
    ]
    request = chat(stream=True)
    events = decode(chunk({"tool_calls": calls}), chunk({}, "tool_calls"), request=request)
    message = aggregate(events)
    whole = ChatEncoder(ResponseStyle(), request, CONTEXT).encode_unary(message).body

    written = msgspec.json.decode(whole)["choices"][0]["message"]["tool_calls"]
    assert [one["x"] for one in written] == [1, 2]
    streamed = [
        call
        for one in encode_stream([events], request)
        for call in one["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [(one["index"], one["x"]) for one in streamed if "x" in one] == [(0, 1), (1, 2)]


def test_a_delta_of_unknown_keys_only_is_written() -> None:
    request = chat(stream=True)
    events = decode(
        chunk({"content": "a"}),
        chunk({"audio": {"id": "s"}}),
        chunk({}, "stop"),
        request=request,
    )

    chunks = encode_stream([events], request)
    assert {"audio": {"id": "s"}} in [one["choices"][0]["delta"] for one in chunks]


def test_keys_of_a_usage_chunk_that_the_client_did_not_request_are_written() -> None:
    request = chat(stream=True, usage="none")
    last = {"id": "a", "model": "w", "choices": [], "usage": ANSWER["usage"], "timings": 1}
    events = decode(chunk({"content": "a"}), chunk({}, "stop"), last, request=request)

    final = encode_stream([events], request)[-1]
    assert (final["choices"], final["timings"], "usage" in final) == ([], 1, False)


def test_keys_before_the_name_of_a_call_are_kept() -> None:
    request = chat(stream=True)
    events = decode(
        chunk({"tool_calls": [{"index": 0, "id": "c1", "x": 1}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}),
        chunk({}, "tool_calls"),
        request=request,
    )

    (extra,) = [one for one in events if isinstance(one, ResponseExtra)]
    assert (extra.scope, extra.values) == ("tool_call", ((("x",), 1),))


def test_keys_of_another_protocol_are_not_written() -> None:
    request = chat()
    response = aggregate(decode(ANSWER, request=request, source="databricks"))
    body = msgspec.json.decode(
        ChatEncoder(ResponseStyle(), request, CONTEXT).encode_unary(response).body
    )

    assert "provider" not in body
    assert [one.path for one in response.extra] == [
        "response",
        "response.choices[0]",
        "response.choices[0].message",
        "response.choices[0].message.tool_calls[0]",
    ]


def test_a_call_of_older_functions_keeps_its_keys_in_the_message() -> None:
    request = chat(legacy=True)
    response = aggregate(decode(ANSWER, request=request))
    body = msgspec.json.decode(
        ChatEncoder(ResponseStyle(), request, CONTEXT).encode_unary(response).body
    )

    message = body["choices"][0]["message"]
    assert message["extra_content"] == SIGNATURE
    assert message["function"] == {"inner": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_completions_keep_the_keys_of_a_choice(*, stream: bool) -> None:
    request = GenerationRequest(model="m", kind="completion", prompts=("p",), stream=stream)
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "x": 1}
    body = {"id": "a", "model": "w", "choices": [choice], "y": 2}
    events = decode(body, request=request)
    encoder = CompletionEncoder(ResponseStyle(), request, CONTEXT)
    data = encoder.encode_events(events) if stream else encoder.encode_unary(aggregate(events)).body

    assert b'"x":1' in data
    assert b'"y":2' in data


def test_an_empty_list_is_kept_before_the_first_choice() -> None:
    request = chat(stream=True)
    first = {"id": "a", "model": "w", "choices": [], "prompt_filter_results": []}
    events = decode(first, chunk({"content": "a"}), chunk({}, "stop"), request=request)

    chunks = encode_stream([events], request)
    assert [one["prompt_filter_results"] for one in chunks if "prompt_filter_results" in one] == [
        []
    ]


def test_null_and_known_keys_make_no_events() -> None:
    request = chat(stream=True)
    body = chunk({"content": "a", "annotations": None}, service_tier=None, prompt_token_ids=None)
    events = decode(body, body | {"z": None}, chunk({}, "stop"), request=request)

    assert not [one for one in events if isinstance(one, ResponseExtra)]
    assert [one.text for one in events if isinstance(one, TextDelta)] == ["a", "a"]


@pytest.mark.parametrize("body", [[1], 5, "x", [{"choices": []}]], ids=str)
def test_chunk_that_is_no_object_is_a_failure_of_the_worker(body: Any) -> None:
    with pytest.raises(WorkerFailed, match="can't be read"):
        decode(body, request=chat(stream=True))
