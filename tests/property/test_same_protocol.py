"""An answer that is written anew between equal protocols is the worker's own, but for the model.

A client that speaks the protocol of the worker finds its id, its time and everything else in it,
also where a setting of the gateway demands that the answer is written anew.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from protocols.core.errors import WorkerFailed
from tests.property.test_unknown_keys import VALUE, add_key, list_places
from tests.property.test_unknown_response_keys import (
    CLIENTS,
    STREAMS,
    WHOLE,
    WORKERS,
    join_events,
    list_whole_cases,
    translate_response,
)

ID = "the-worker-s-own-id"
TIME = 1_234_567_890
FINGERPRINT = "the-worker-s-own-fingerprint"
CHATS = ("openai", "databricks", "tgi", "mindie", "ovms")
"""Protocols whose answers have the form of OpenAI's chat completions."""
OWN_IDS = frozenset({"mindie"})
"""Protocols whose clients cancel a request by the id of its answer, which is the gateway's."""


def identify(value: dict[str, Any], *, has_time: bool) -> dict[str, Any]:
    """The answer, or an event of one, with the worker's id and time in each place for them."""
    holders = [key for key in ("message", "response") if key in value]
    named: dict[str, Any] = {key: identify(value[key], has_time=has_time) for key in holders}
    if "id" in value and "index" not in value:
        named["id"] = ID
    if has_time and "id" in value:
        key = "created_at" if "output" in value else "created"
        named |= {key: TIME}
    return value | named


def list_values(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value that is no list and no object, with its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in items:
            yield from list_values(one, (*at, key))
    else:
        yield at, value


@pytest.mark.parametrize("name", CHATS)
def test_whole_answer_has_every_value_of_the_worker_s_answer(name: str) -> None:
    # given an answer with values at all levels, but for those that OVMS does not have
    sent = identify(WHOLE[name], has_time=True) | {
        "system_fingerprint": FINGERPRINT,
        "service_tier": "flex",
    }
    if name == "ovms":
        sent["usage"] = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}

    # when it is written anew
    written, lost = translate_response(name, WORKERS[name], msgspec.json.encode(sent), stream=False)

    # then the client has all of it
    received = dict(list_values(msgspec.json.decode(written)))
    changed = {path for path, one in list_values(sent) if one is not None and received[path] != one}
    assert changed <= {("model",)} | ({("id",)} if name in OWN_IDS else set())
    assert lost == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [*CHATS, "anthropic", "responses", "cohere"])
def test_answer_has_the_worker_s_id_and_time(name: str, *, stream: bool) -> None:
    has_time = name not in ("anthropic", "cohere")
    events = [identify(one, has_time=has_time) for one in STREAMS[name]]
    whole = identify(WHOLE[name], has_time=has_time)
    data = join_events(name, events) if stream else msgspec.json.encode(whole)

    written, _ = translate_response(name, WORKERS[name], data, stream=stream)

    assert (ID.encode() in written) == (name not in OWN_IDS)
    assert (str(TIME).encode() in written) == has_time


@pytest.mark.parametrize("other", ["anthropic", "responses", "ovms", "databricks"])
def test_client_of_another_protocol_gets_the_gateway_s_id_and_time(other: str) -> None:
    data = msgspec.json.encode(identify(WHOLE["openai"], has_time=True))

    written, _ = translate_response(other, WORKERS["openai"], data, stream=False)

    assert ID.encode() not in written
    assert str(TIME).encode() not in written


def has_place(name: str, place: tuple[Any, ...]) -> bool:
    """Whether an answer that is written anew has the object: blocks are cut anew."""
    items = [at for at, step in enumerate(place) if isinstance(step, int)]
    return name not in ("anthropic", "cohere") or all(place[at - 1] == "tool_calls" for at in items)


@pytest.mark.parametrize(
    ("name", "place"), [one for one in list_whole_cases() if has_place(*one.values)]
)
def test_unknown_key_of_a_whole_answer_reaches_clients_of_the_protocol(
    name: str, place: tuple[Any, ...]
) -> None:
    data = msgspec.json.encode(add_key(WHOLE[name], place))

    written, lost = translate_response(
        name, WORKERS[name], data, stream=False, clients={**CLIENTS, "anthropic": THINKING_CLIENT}
    )

    assert VALUE.encode() in written
    assert lost == []


THINKING = {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
THINKING_CLIENT = (CLIENTS["anthropic"][0], CLIENTS["anthropic"][1] | THINKING)
"""The client of an answer that has reasoning."""
MESSAGE_PLACES = ((0, "message"), (0, "message", "usage"), (4,), (4, "delta"), (4, "usage"))
"""Those of a stream of Anthropic's that belong to the message as a whole."""


def list_chunk_cases() -> Iterator[Any]:
    for name in (*CHATS, "anthropic"):
        for place in MESSAGE_PLACES if name == "anthropic" else list_places(STREAMS[name]):
            yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


@pytest.mark.parametrize(("name", "place"), list(list_chunk_cases()))
def test_unknown_key_of_a_stream_reaches_clients_of_the_protocol(
    name: str, place: tuple[Any, ...]
) -> None:
    events = list(STREAMS[name])
    events[place[0]] = add_key(events[place[0]], place[1:])

    written, lost = translate_response(name, WORKERS[name], join_events(name, events), stream=True)

    assert VALUE.encode() in written
    assert lost == []


SUMMARY = {"type": "summary_text", "text": "short"}
REASONING = {"type": "reasoning_text", "text": "long"}


@pytest.mark.parametrize(
    "options", [{}, {"reasoning": {"summary": "auto"}}], ids=["unasked", "asked"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("summary", "content"),
    [([SUMMARY], None), ([SUMMARY, SUMMARY], None), ([], [REASONING]), ([SUMMARY], [REASONING])],
)
def test_reasoning_of_a_response_is_what_the_worker_wrote(
    summary: list[Any], content: list[Any] | None, options: dict[str, Any], *, stream: bool
) -> None:
    item: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": summary}
    item |= {} if content is None else {"content": content}
    answer = WHOLE["responses"] | {"output": [item]}
    events: list[dict[str, Any]] = [
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": answer},
    ]
    data = join_events("responses", events) if stream else msgspec.json.encode(answer)
    path, fields = CLIENTS["responses"]

    written, lost = translate_response(
        "responses",
        WORKERS["responses"],
        data,
        stream=stream,
        clients={"responses": (path, fields | options)},
    )

    if stream:
        written = written.rstrip().rpartition(b"data: ")[2]
    body = msgspec.json.decode(written)
    [received] = (body["response"] if stream else body)["output"]
    assert (received["summary"], received.get("content")) == (summary, content)
    assert lost == []


@pytest.mark.parametrize("sent", [{}, {"status": None}, {"status": "completed"}], ids=str)
def test_response_has_the_status_that_its_worker_sent(sent: dict[str, Any]) -> None:
    """Servers of agents send none. A stream says it in the type of its last event."""
    answer = {key: one for key, one in WHOLE["responses"].items() if key != "status"} | sent
    last = {"type": "response.completed", "response": answer}

    whole, _ = translate_response(
        "responses", WORKERS["responses"], msgspec.json.encode(answer), stream=False
    )
    stream, _ = translate_response(
        "responses", WORKERS["responses"], join_events("responses", [last]), stream=True
    )

    received = msgspec.json.decode(whole)
    assert received["status"] == sent.get("status")
    assert (received["completed_at"] is None) == (received["status"] is None)
    assert b'"status":"completed"' in stream.rpartition(b"data: ")[2]


@pytest.mark.parametrize("other", ["openai", "anthropic", "ollama"])
def test_response_without_a_status_is_an_error_for_clients_of_other_protocols(other: str) -> None:
    answer = WHOLE["responses"] | {"status": None}

    with pytest.raises(WorkerFailed, match="no finish reason"):
        translate_response(other, WORKERS["responses"], msgspec.json.encode(answer), stream=False)


@pytest.mark.parametrize("worker", ["openai", "responses"])
@pytest.mark.parametrize(
    ("requested", "sent", "shown"),
    [
        (None, None, "default"),
        ("auto", None, "default"),
        ("flex", None, None),
        ("flex", "priority", "priority"),
    ],
)
def test_response_never_names_a_tier_that_nobody_named(
    worker: str, requested: str | None, sent: str | None, shown: str | None
) -> None:
    answer = WHOLE[worker] | ({} if sent is None else {"service_tier": sent})
    path, fields = CLIENTS["responses"]
    clients = {
        "responses": (path, fields | ({} if requested is None else {"service_tier": requested}))
    }

    written, _ = translate_response(
        "responses", WORKERS[worker], msgspec.json.encode(answer), stream=False, clients=clients
    )

    assert msgspec.json.decode(written)["service_tier"] == shown


KNOWN_CALL = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
UNKNOWN_CALL = {"id": "c1", "type": "mcp", "mcp": {"name": "g", "input": {"x": 1}}}


@pytest.mark.parametrize(
    "calls",
    [
        [UNKNOWN_CALL, KNOWN_CALL],
        [KNOWN_CALL, UNKNOWN_CALL],
        [UNKNOWN_CALL, KNOWN_CALL | {"id": "c3", "x": 1}, UNKNOWN_CALL | {"id": "c4"}],
        [UNKNOWN_CALL],
    ],
    ids=lambda calls: "-".join(one["type"] for one in calls),
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_of_unknown_types_keep_their_places(
    calls: list[dict[str, Any]], *, stream: bool
) -> None:
    # given an answer whose calls have their numbers
    numbered = [{"index": i, **call} for i, call in enumerate(calls)]
    choice = {"index": 0, "finish_reason": "tool_calls"}
    message = {"role": "assistant", "content": None, "tool_calls": numbered}
    answer = {"id": "a", "model": "w", "choices": [{**choice, "message": message}]}
    deltas: list[dict[str, Any]] = [{"tool_calls": [one]} for one in numbered]
    events = [{"choices": [{"index": 0, "delta": one}]} for one in deltas]
    last: dict[str, Any] = {"choices": [{**choice, "delta": {}}]}
    data = join_events("openai", [*events, last]) if stream else msgspec.json.encode(answer)

    # when it is written anew for a client of the protocol
    written, lost = translate_response("openai", WORKERS["openai"], data, stream=stream)

    # then the client has each call in its place, with its number
    if stream:
        chunks = [
            msgspec.json.decode(one.partition(b"data: ")[2])
            for one in written.split(b"\n\n")
            if b'"tool_calls":' in one
        ]
        received = [call for one in chunks for call in one["choices"][0]["delta"]["tool_calls"]]
        received.sort(key=lambda one: int(one["index"]))
        assert [one["id"] for one in received if "id" in one] == [one["id"] for one in calls]
    else:
        received = msgspec.json.decode(written)["choices"][0]["message"]["tool_calls"]
        assert received == numbered
    assert lost == []
