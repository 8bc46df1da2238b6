"""Every key of a worker's error reaches clients of the worker's own protocol.

Whole and as the last event of a stream, for each protocol that workers speak. Texts of errors that
are not the client's stay with the operator.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from gateway.runtime.build import build_adapter
from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.interfaces import ResponseContext
from protocols.core.worker_error_keys import restore_worker_keys
from tests.property.test_unknown_keys import KEY, VALUE, add_key, clock, list_places
from tests.property.test_unknown_response_keys import ADAPTERS, CLIENTS, WORKERS, build_call

CHAT_ERROR = {"error": {"message": "no", "type": "x_type", "param": "n", "code": "x_code"}}
TEXT_ERROR = {"error": "no", "error_type": "x_type"}
ERRORS: Mapping[str, dict[str, Any]] = {
    "openai": CHAT_ERROR,
    "responses": CHAT_ERROR,
    "anthropic": {
        "type": "error",
        "error": {"type": "x_type", "message": "no", "details": {"error_code": "x_code"}},
        "request_id": "req_w",
    },
    "databricks": {"error_code": "X_CODE", "message": "no", "details": [{"reason": "r"}]},
    "ovms": {"error": "no"},
    "tgi": TEXT_ERROR,
    "mindie": TEXT_ERROR,
    "triton": {"error": "no"},
    "cohere": {"message": "no", "id": "w"},
}
EVENTS: Mapping[str, dict[str, Any]] = {
    **{name: ERRORS[name] for name in ("openai", "anthropic", "databricks", "tgi", "triton")},
    "responses": {"type": "error", "message": "no", "param": "n", "code": "x_code"},
    "cohere": {"message": "no", "code": "x_code"},
}
"""The last events of streams, of servers whose errors in streams are JSON."""
ALL_WORKERS: Mapping[str, Any] = {**WORKERS, "triton": build_adapter("triton", None, {})}
ALL_CLIENTS = {
    **CLIENTS,
    "triton": ("/v2/models/m/generate_stream", {"text_input": "hi"}),
}
STATUSES = (400, 422, 429, 500, 503)


def build_request(name: str) -> tuple[Any, Any]:
    """A client of this protocol, and its request for a stream."""
    client = build_adapter(ADAPTERS.get(name, name), None, {})
    path, fields = ALL_CLIENTS[name]
    options = {} if name == "triton" else {"stream": True}
    return client, build_call(client, path, {"model": "m", **fields, **options})


def list_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Each key with a value that is no object, but for those of texts and of events."""
    for key, one in value.items():
        if isinstance(one, dict):
            yield from list_values(one)
        elif key != "message" and one not in ("no", "error"):
            yield key, one


def answer_whole(name: str, status: int, body: dict[str, Any], client: str = "") -> dict[str, Any]:
    """What a client gets of the worker's error; by default a client of the worker's protocol."""
    adapter, call = build_request(client or name)
    worker = ALL_WORKERS[name]
    error = worker.read_error(status, {}, msgspec.json.encode(body))
    error.worker_protocol = worker.name
    return decode(restore_worker_keys(adapter.encode_error(error, call).body, error, adapter.name))


def decode(written: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(written.rpartition(b"data: ")[2])
    return fields


def list_cases(errors: Mapping[str, dict[str, Any]]) -> Iterator[Any]:
    for name, body in errors.items():
        for place in list_places(body):
            yield pytest.param(name, place, id=f"{name}-{'.'.join(map(str, place))}")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(("name", "place"), list(list_cases(ERRORS)))
def test_every_key_of_an_error_reaches_clients_of_the_protocol(
    name: str, place: tuple[Any, ...], status: int
) -> None:
    body = add_key(ERRORS[name], place)

    received = dict(list_values(answer_whole(name, status, body)))

    assert received.items() >= dict(list_values(body)).items()


@pytest.mark.parametrize(("name", "place"), list(list_cases(EVENTS)))
def test_every_key_of_an_error_in_a_stream_reaches_clients_of_the_protocol(
    name: str, place: tuple[Any, ...]
) -> None:
    # given a stream that ends with an error
    event = add_key(EVENTS[name], place)
    worker = ALL_WORKERS[name]
    client, call = build_request(name)
    request = client.decode_request(call).bind_target("w", client.name)
    decoder = worker.create_decoder(request)

    # when its client gets the end
    with pytest.raises(GatewayError) as caught:
        decoder.feed(b"data: " + msgspec.json.encode(event) + b"\n\n")
    error = caught.value
    error.worker_protocol = worker.name
    encoder = client.create_encoder(call, request, ResponseContext("r", 1, "m", "1", "w", clock))
    written = restore_worker_keys(encoder.encode_error_event(error), error, client.name)

    # then it has every key
    received = dict(list_values(decode(written)))
    assert received.items() >= dict(list_values(event)).items()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ERRORS)
def test_clients_of_other_protocols_get_errors_of_their_own(name: str, client: str) -> None:
    body = add_key(ERRORS[name], ())

    written = answer_whole(name, 400, body, client)

    assert (KEY in written or KEY in str(written)) == (
        ADAPTERS.get(client, client) == ALL_WORKERS[name].name
    )


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("name", ERRORS)
def test_texts_of_errors_of_servers_do_not_reach_clients(name: str, status: int) -> None:
    secret = "No memory at 10.0.0.7:8000, /srv/x.py"
    body = ERRORS[name] | {KEY: [{"trace": secret, "number": 7}], "host": "10.0.0.7"}

    written = str(answer_whole(name, status, body))

    assert "10.0.0.7" not in written
    assert "'number': 7" in written


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_error_about_the_gateway_s_own_request_is_the_gateway_s(status: int) -> None:
    written = answer_whole("openai", status, CHAT_ERROR | {KEY: VALUE})

    assert written["error"]["code"] == "bad_gateway"
    assert KEY not in written


@pytest.mark.parametrize(
    "body",
    [
        {"object": "error", "message": "no", "type": "BadRequestError", "param": None, "code": 400},
        {"error": {"message": "no", "type": "BadRequestError", "code": 400}},
        {"error": "no", "type": "BadRequestError", "code": 400},
    ],
)
def test_forms_of_errors_become_the_one_that_openai_s_clients_read(body: dict[str, Any]) -> None:
    written = answer_whole("openai", 400, body)

    assert written["error"]["message"] == "no"
    assert "BadRequestError" in str(written)
    assert "400" in str(written)


@pytest.mark.parametrize("value", [7, True, [], ["x"], {"y": 1}])
@pytest.mark.parametrize("key", ["message", "type"])
def test_text_that_clients_read_stays_a_text(key: str, value: Any) -> None:
    error = answer_whole("openai", 400, {"error": CHAT_ERROR["error"] | {key: value}})["error"]

    assert isinstance(error[key], str)


def test_error_of_another_type_is_an_error_to_anthropic_s_clients() -> None:
    written = answer_whole("anthropic", 400, ERRORS["anthropic"] | {"type": "message"})

    assert written["type"] == "error"
    assert written["error"]["type"] == "x_type"


def test_failed_response_stays_the_one_that_was_streamed() -> None:
    # given a worker whose errors have an id, a status and an output, as a hosted API's may
    body = CHAT_ERROR | {"id": "w", "status": "completed", "output": "no", "object": "x", KEY: 1}
    response = {"id": "resp_1", "status": "failed", "object": "response", "output": []}
    event = {"type": "response.failed", "response": {**response, "error": {"message": "no"}}}
    error = WorkerFailed("no")
    error.worker_body, error.worker_protocol = body, "openai"

    # when the last event of a stream of the Responses API gets its keys
    written = b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"
    restored = decode(restore_worker_keys(written, error, "openai"))

    # then the error has them, and the response is the same
    assert restored["response"].items() >= (response | {KEY: 1}).items()
    assert restored["response"]["error"]["code"] == "x_code"
