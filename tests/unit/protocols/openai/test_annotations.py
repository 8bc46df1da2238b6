"""Citations of a text between chat completions and the Responses API, whole and in streams."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocols.core.aggregate import aggregate
from protocols.core.events import Event, ResponseExtra
from protocols.core.extra import list_paths
from protocols.core.interfaces import ResponseContext
from tests.property.test_unknown_response_keys import WORKERS, build_call
from tests.unit.protocols.chat.streams import format_event

FACTS = {"start_index": 1, "end_index": 4, "url": "https://e.org/a", "title": "A"}
IN_CHAT = {"type": "url_citation", "url_citation": FACTS}
IN_RESPONSES = {"type": "url_citation", **FACTS}
FILE = {"type": "file_citation", "file_id": "f", "index": 0}


def ask(path: str, fields: dict[str, Any], worker: str, data: bytes) -> tuple[str, list[Event]]:
    """What a client gets, and the events of the worker's answer."""
    client = WORKERS["openai"]
    call = build_call(client, path, {"model": "m", **fields})
    request = client.decode_request(call).bind_target("w", client.name)
    decoder = WORKERS[worker].create_decoder(request)
    events = [*decoder.feed(data), *decoder.close()]
    context = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)
    encoder = client.create_encoder(call, request, context)
    if request.stream:
        return encoder.encode_events(events).decode(), events
    return encoder.encode_unary(aggregate(events)).body.decode(), events


def list_lost(events: Sequence[Event], source: str) -> list[str]:
    """The paths that are reported to a client whose encoder writes this source."""
    lost = [one for one in events if isinstance(one, ResponseExtra) and one.source != source]
    return [path for one in lost for path in list_paths(one.path, one.values)]


def ask_responses(*deltas: dict[str, Any], stream: bool) -> tuple[str, list[Event]]:
    """A client of the Responses API asks a chat worker."""
    fields = {"input": "hi", "stream": stream}
    choices = [{"index": 0, "delta": one, "finish_reason": None} for one in deltas]
    if stream:
        chunks = [{"model": "w", "choices": [one]} for one in choices]
        chunks[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
        data = b"".join(map(format_event, chunks)) + b"data: [DONE]\n\n"
    else:
        message = {key: value for one in deltas for key, value in one.items()}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        data = msgspec.json.encode({"model": "w", "choices": [choice]})
    return ask("/v1/responses", fields, "openai", data)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_citation_of_a_chat_worker_reaches_clients_of_the_responses_api(*, stream: bool) -> None:
    written, events = ask_responses({"annotations": [IN_CHAT]}, {"content": "text"}, stream=stream)

    assert encode(IN_RESPONSES)[1:-1] in written
    assert ("response.output_text.annotation.added" in written) == stream
    assert list_lost(events, "openai responses") == []


@pytest.mark.parametrize("tier", ["flex", "x-tier"])
def test_service_tier_of_a_chat_worker_is_that_of_the_response(tier: str) -> None:
    choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}
    answer = {"model": "w", "choices": [choice], "service_tier": tier, "x": 1}

    written, events = ask("/v1/responses", {"input": "hi"}, "openai", msgspec.json.encode(answer))

    assert msgspec.json.decode(written)["service_tier"] == tier
    assert list_lost(events, "openai responses") == ["response.x"]


def encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "deltas",
    [
        ({"content": "text", "annotations": [FILE]},),
        ({"annotations": [IN_CHAT], "content": ""},),
    ],
    ids=["another type", "no text"],
)
def test_annotation_that_the_responses_api_can_t_have_is_reported(
    deltas: tuple[dict[str, Any], ...], *, stream: bool
) -> None:
    _, events = ask_responses(*deltas, stream=stream)

    lost = list_lost(events, "openai responses")
    assert lost == ["response.choices[0].message.annotations"]


def test_annotations_of_another_form_and_other_keys_are_reported_as_they_are() -> None:
    _, events = ask_responses({"content": "a", "annotations": 5, "x": 1}, stream=False)
    assert len(list_lost(events, "openai responses")) == 2

    _, events = ask_responses({"content": "a", "annotations": [IN_CHAT], "x": 1}, stream=False)
    assert list_lost(events, "openai responses") == ["response.choices[0].message.x"]


def ask_chat(*annotations: Any, stream: bool, **keys: Any) -> tuple[str, list[Event]]:
    """A chat client asks a worker with the Responses API."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    items = [
        {
            "type": "message",
            "id": f"msg_{i}",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "text", "annotations": [*annotations]}],
            **keys,
        }
        for i in range(2)
    ]
    response = {"id": "r", "model": "w", "status": "completed", "output": items}
    data = msgspec.json.encode(response)
    if stream:
        data = format_event({"type": "response.completed", "response": response})
    return ask("/v1/chat/completions", fields, "responses", data)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_citation_of_a_responses_worker_reaches_chat_clients_at_its_place(*, stream: bool) -> None:
    """The texts of both messages are one text in chat."""
    written, events = ask_chat(IN_RESPONSES, stream=stream)

    moved = {**IN_CHAT, "url_citation": {**FACTS, "start_index": 5, "end_index": 8}}
    for citation in (IN_CHAT, moved):
        annotation = msgspec.json.decode(msgspec.json.encode(citation))
        assert annotation in list_annotations(written, stream=stream)
    assert list_lost(events, "openai") == []


def list_annotations(written: str, *, stream: bool) -> list[Any]:
    """The annotations that a chat client collects."""
    blocks = [one[6:] for one in written.split("\n\n") if one.startswith("data: {")]
    answers = [msgspec.json.decode(one) for one in (blocks if stream else [written])]
    key = "delta" if stream else "message"
    holders = [one[key] for answer in answers for one in answer["choices"]]
    return [one for holder in holders for one in holder.get("annotations", ())]


def test_annotation_that_chat_can_t_have_is_reported() -> None:
    _, events = ask_chat(FILE, stream=False)

    assert list_lost(events, "openai") == [
        f"response.output[{i}].content[0].annotations" for i in range(2)
    ]


def test_other_unknown_keys_of_an_item_are_left_alone() -> None:
    _, events = ask_chat(IN_RESPONSES, stream=False, x=1)

    assert list_lost(events, "openai") == [f"response.output[{i}].x" for i in range(2)]

    _, events = ask_chat(stream=False, x=1)

    assert list_lost(events, "openai") == [f"response.output[{i}].x" for i in range(2)]
