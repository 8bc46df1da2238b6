"""Unknown keys of a worker's response are kept or reported."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.chat.decoder import GenerationDecoder
from protocols.chat.responses import ChatEncoder, CompletionEncoder, ResponseStyle
from protocols.core.aggregate import aggregate
from protocols.core.errors import WorkerFailed
from protocols.core.events import Event, ResponseExtra, TextDelta, ToolCallStart
from protocols.core.interfaces import ResponseContext
from protocols.core.request import GenerationRequest, ResponseOptions, Tool

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
        "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 3, "audio_tokens": 4},
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
    """Decode a JSON body, or the chunks of a stream."""
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


def chunk(delta: dict[str, Any], reason: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "a", "model": "w", "choices": [choice], **fields}


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


@pytest.mark.parametrize("key", ["message", "delta"])
def test_unknown_words_of_a_message_reach_a_client_of_the_worker_s_protocol(key: str) -> None:
    call = {"id": "c1", "type": "later", "function": {"name": "f", "arguments": "{}"}}
    message: dict[str, Any] = {"role": "model", "content": "hi", "tool_calls": [call]}
    request = chat(stream=key == "delta")
    choice = {"index": 0, key: message, "finish_reason": "tool_calls"}

    events = decode({"choices": [choice]}, request=request)

    if key == "delta":
        deltas = [one["choices"][0]["delta"] for one in encode_stream([events], request)]
        calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
        roles = [delta["role"] for delta in deltas if "role" in delta]
    else:
        encoder = ChatEncoder(ResponseStyle(), request, CONTEXT)
        (written,) = msgspec.json.decode(encoder.encode_unary(aggregate(events)).body)["choices"]
        calls, roles = written["message"]["tool_calls"], [written["message"]["role"]]
    assert (calls[0]["type"], roles[-1]) == ("later", "model")


CUSTOM_CALL: dict[str, Any] = {"id": "c1", "type": "custom", "custom": {"name": "f", "input": "x"}}


def test_a_client_of_the_worker_s_protocol_gets_a_custom_call_as_it_is() -> None:
    """It must not become a call of a function with the input as its arguments."""
    request = chat()
    message = {"role": "assistant", "tool_calls": [CUSTOM_CALL]}
    answer = ANSWER | {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    response = aggregate(decode(answer, request=request))

    encoder = ChatEncoder(ResponseStyle(), request, CONTEXT)
    (choice,) = msgspec.json.decode(encoder.encode_unary(response).body)["choices"]
    assert choice["message"]["tool_calls"] == [CUSTOM_CALL]


def test_a_client_of_the_worker_s_protocol_gets_a_custom_call_of_a_stream() -> None:
    request = chat(stream=True)
    start = {"index": 0, "id": "c1", "type": "custom", "custom": {"name": "f", "input": ""}}
    delta = {"index": 0, "custom": {"input": "x"}}
    chunks = [chunk({"tool_calls": [start]}), chunk({"tool_calls": [delta]})]

    events = decode(*chunks, chunk({}, "tool_calls"), request=request)

    deltas = [one["choices"][0]["delta"] for one in encode_stream([events], request)]
    calls = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
    assert calls == [start, delta]


@pytest.mark.parametrize(("kind", "expected"), [("custom", "custom"), ("function", "function")])
def test_a_client_of_another_protocol_gets_a_custom_call_if_it_has_custom_tools(
    kind: Any, expected: str
) -> None:
    request = replace(chat(), source="databricks", tools=(Tool("f", kind=kind),))
    message = {"role": "assistant", "tool_calls": [CUSTOM_CALL]}
    answer = ANSWER | {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    events = decode(answer, request=request, source="openai")

    assert [one.kind for one in events if isinstance(one, ToolCallStart)] == [expected]


@pytest.mark.parametrize("together", [True, False])
def test_a_client_of_the_worker_s_protocol_gets_every_key_of_a_stream(*, together: bool) -> None:
    """This holds for events in one batch and in single batches."""
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


def test_a_value_of_each_chunk_is_written_with_its_own_chunk() -> None:
    """The first chunk has only a role, which the encoder writes with the first text."""
    request = chat(stream=True)
    deltas = [{"role": "assistant"}, {"content": "a"}, {"content": "b"}]
    events = decode(
        *(chunk(delta, mask=f"m{i}") for i, delta in enumerate(deltas)),
        chunk({}, "stop"),
        request=request,
    )

    for batches in ([events], [[one] for one in events]):
        texts = [one for one in encode_stream(batches, request) if "mask" in one]
        assert [one["mask"] for one in texts] == ["m1", "m2"]
        assert texts[1]["choices"][0]["delta"] == {"content": "b"}


def test_keys_of_another_choice_wait_for_its_delta() -> None:
    request = chat(stream=True)
    batch: list[Event] = [
        ResponseExtra("", "message", ((("x",), 1),), 1),
        ResponseExtra("", "response", ((("x",), 2),)),
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


@pytest.mark.parametrize("content", ["", "hi"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_call_of_an_unknown_type_is_written_in_its_place(content: str, count: int) -> None:
    functions = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}][
        :count
    ]
    unknown = {"id": "c2", "type": "mcp", "mcp": {"x": 1}}
    answer = {
        **ANSWER["choices"][0]["message"],
        "content": content,
        "tool_calls": [unknown, *functions],
    }
    choice = {**ANSWER["choices"][0], "message": answer}
    request = chat()
    events = decode({**ANSWER, "choices": [choice]}, request=request)

    body = ChatEncoder(ResponseStyle(), request, CONTEXT).encode_unary(aggregate(events)).body
    streamed = encode_stream([events], chat(stream=True))

    message = msgspec.json.decode(body)["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == (content or None, [unknown, *functions])
    assert {"index": 0, **unknown} in [
        call
        for one in streamed
        for choice in one["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]


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


def test_a_client_that_did_not_ask_for_usage_gets_no_chunk_without_choices() -> None:
    request = chat(stream=True, usage="none")
    last = {"id": "a", "model": "w", "choices": [], "usage": ANSWER["usage"], "timings": 1}
    events = decode(
        chunk({"content": "a"}, service_tier="default"),
        chunk({}, "stop"),
        last | {"service_tier": "default"},
        request=request,
    )

    for batches in ([events], [[one] for one in events]):
        chunks = encode_stream(batches, request)
        assert all(one["choices"] for one in chunks)
        assert [one["service_tier"] for one in chunks if "service_tier" in one] == ["default"]


@pytest.mark.parametrize(
    ("reported", "written"),
    [({}, None), ({"usage": ANSWER["usage"]}, ANSWER["usage"])],
    ids=["without usage", "with usage"],
)
def test_keys_of_the_last_chunk_are_written_once_with_the_usage(
    reported: dict[str, Any], written: Any
) -> None:
    request = chat(stream=True)
    last = {"id": "a", "model": "w", "choices": [], "timings": 1, **reported}
    events = decode(chunk({"content": "a"}), chunk({}, "stop"), last, request=request)

    (final,) = [one for one in encode_stream([events], request) if not one["choices"]]
    assert (final["timings"], final["usage"]) == (1, written)


def test_usage_keys_of_a_chunk_with_a_choice_wait_for_the_usage() -> None:
    request = chat(stream=True)
    last = chunk({}, "stop", usage=ANSWER["usage"], provider="p")
    events = decode(chunk({"content": "a"}), last, request=request)

    *_, finish, final = encode_stream([events], request)
    assert (finish["provider"], finish["usage"]) == ("p", None)
    assert (final["choices"], final["usage"]) == ([], ANSWER["usage"])


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
