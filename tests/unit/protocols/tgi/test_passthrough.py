"""A client's bytes are passed through to a worker of the same protocol."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import WorkerError
from protocols.core.events import ChoiceEnd, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import PassthroughRequest, ResponseContext
from protocols.openai.endpoints import OpenAI
from protocols.tgi import TGI
from tests.unit.protocols.tgi.conftest import MakeCall

BODY = {"inputs": "a", "parameters": {"max_new_tokens": 2, "details": True}}
PREFILL = {"inputs": "a", "parameters": {"details": True, "decoder_input_details": True}}
END = {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 1}
EVENTS = (
    b'data:{"index":1,"token":{"id":5,"text":"b","logprob":-0.5,"special":false},"odd":1}\n\n',
    b'data:{"index":2,"token":{"id":6,"text":"c","logprob":-1,"special":false},'
    b'"generated_text":"bc","details":' + msgspec.json.encode(END) + b"}\n\n",
)
ANSWER = b'{"generated_text":"bc","details":' + msgspec.json.encode(END | {"odd": 1}) + b"}"


def prepare(
    make: MakeCall,
    response_context: ResponseContext,
    path: str = "/generate_stream",
    body: Any = BODY,
    client: Any = None,
) -> PassthroughRequest | None:
    client = client or TGI(model="m")
    return TGI().prepare_passthrough(client, make(path, body), response_context)


def passed(*args: Any, **options: Any) -> PassthroughRequest:
    passthrough = prepare(*args, **options)
    assert passthrough is not None
    return passthrough


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", BODY),
        ("/generate_stream", {"inputs": "a", "parameters": {"details": True, "odd": 1}, "odd": 1}),
        ("/", BODY | {"stream": True}),
        ("/generate", PREFILL),
        ("/", PREFILL),
    ],
)
def test_body_reaches_the_worker_unchanged(
    make: MakeCall, response_context: ResponseContext, path: str, body: Any
) -> None:
    wire = passed(make, response_context, path, body).upstream_request

    assert (wire.path, wire.body) == (path, msgspec.json.encode(body))


def test_name_of_the_gateways_model_stays_in_the_gateway(
    make: MakeCall, response_context: ResponseContext
) -> None:
    wire = passed(make, response_context, body=BODY | {"model": "m"}).upstream_request

    assert msgspec.json.decode(wire.body) == BODY


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", {"inputs": ""}),
        ("/generate_stream", {"inputs": "a", "parameters": {"details": True, "truncate": 0}}),
        ("/generate_stream", {"inputs": "a", "parameters": {"details": True, "stop": ["x"]}}),
        ("/generate_stream", {"inputs": "a"}),
        ("/generate", BODY),
    ],
)
def test_other_bodies_are_translated(
    make: MakeCall, response_context: ResponseContext, path: str, body: Any
) -> None:
    assert prepare(make, response_context, path, body) is None


def test_other_endpoints_and_clients_are_translated(
    make: MakeCall, response_context: ResponseContext
) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

    assert prepare(make, response_context, "/v1/chat/completions", chat) is None
    assert prepare(make, response_context, "/tokenize", {"inputs": "a"}) is None
    assert prepare(make, response_context, client=TGI(model="m", prompts="chat")) is None
    assert prepare(make, response_context, client=OpenAI()) is None


def test_request_beyond_the_limits_of_the_worker_is_translated(
    make: MakeCall, response_context: ResponseContext
) -> None:
    parameters = {"details": True, "decoder_input_details": True, "best_of": 3, "do_sample": True}
    body = {"inputs": "a", "parameters": parameters}

    client = TGI(model="m", max_best_of=4)
    assert prepare(make, response_context, "/generate", body, client) is None


def test_response_is_passed_on_as_it_is(make: MakeCall, response_context: ResponseContext) -> None:
    passthrough = passed(make, response_context, "/generate", PREFILL)
    reader = passthrough.create_reader()
    reader.feed([ANSWER[:9], ANSWER[9:]])

    body, events = reader.close()

    assert body == ANSWER
    assert Usage(1, 2) in events
    assert dict(passthrough.build_headers())["Content-Type"] == "application/json"


def test_stream_is_passed_on_as_it_is(make: MakeCall, response_context: ResponseContext) -> None:
    passthrough = passed(make, response_context, "/generate_stream")
    reader = passthrough.create_reader()
    parts = [reader.feed([EVENTS[0] + EVENTS[1][:9]]), reader.feed([EVENTS[1][9:]]), reader.close()]

    assert b"".join(data for data, _ in parts if data) == b"".join(EVENTS)

    events = [event for _, batch in parts for event in batch]
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["b", "c"]
    assert events[-3:] == [ChoiceEnd("length"), Usage(1, 2), StreamEnd()]
    assert dict(passthrough.build_headers())["Content-Type"] == "text/event-stream"


def test_error_in_a_stream_is_written_by_the_gateway(
    make: MakeCall, response_context: ResponseContext
) -> None:
    passthrough = passed(make, response_context, "/generate_stream")
    error = b'data:{"error":"secret host","error_type":"generation"}\n\n'
    reader = passthrough.create_reader()

    assert reader.feed([EVENTS[0] + error])[0] == EVENTS[0]
    with pytest.raises(WorkerError) as excinfo:
        reader.close()

    assert passthrough.create_encoder is not None

    written = passthrough.create_encoder().encode_error_event(excinfo.value)
    assert written.startswith(b"data:")
    assert b"secret host" not in written


@pytest.mark.parametrize("claim", [b"-1", b"4611686018427387904", b'"2"', b"2.5"])
def test_implausible_token_counts_of_a_stream_do_not_reach_the_client(
    make: MakeCall, response_context: ResponseContext, claim: bytes
) -> None:
    reader = passed(make, response_context).create_reader()
    count = b'"generated_tokens":%b'

    data, events = reader.feed([b"".join(EVENTS).replace(count % b"2", count % claim)])

    assert data == b"".join(EVENTS)
    assert StreamEnd(has_ignored_usage=True) in [*events, *reader.close()[1]]


def test_response_with_implausible_token_counts_is_encoded_again(
    make: MakeCall, response_context: ResponseContext
) -> None:
    reader = passed(make, response_context, "/generate", PREFILL).create_reader()

    reader.feed([ANSWER.replace(b'"generated_tokens":2', b'"generated_tokens":-2')])
    body, events = reader.close()

    assert body is None
    assert events[-1] == StreamEnd(has_ignored_usage=True)
