"""Feedback: valid bodies, authorization, the rate limit, and response ids."""

import asyncio
import json
from collections.abc import Mapping  # noqa: TC003 - beside asyncio
from typing import Any

import msgspec
import pytest

from gateway.auth.api_keys import Principal
from gateway.config.schema import FeedbackConfig
from gateway.observability.record import Feedback, RequestRecord
from gateway.pipeline import feedback
from gateway.pipeline.feedback import (
    FeedbackEndpoint,
    FeedbackForbidden,
    ResponseIdReader,
    find_response_id,
    read_feedback,
)
from gateway.pipeline.http import ResponseWriter
from gateway.pipeline.state import RequestState
from protocols.core.errors import (
    ClientError,
    GatewayError,
    InvalidParameter,
    MalformedRequest,
    MethodNotAllowed,
    RateLimitExceeded,
    RequestNotFound,
    RequestTooLarge,
    Unauthorized,
)
from protocols.core.interfaces import Headers

GOOD = {"request_id": "r1", "name": "thumbs_up", "value": True}


class FakeStore:
    """A store that answers from a list and repeats the last answer."""

    def __init__(self, *is_known: bool | None) -> None:
        self.results = [*is_known]
        self.stored: list[Feedback] = []

    def record_feedback(self, one: Feedback) -> None:
        self.stored.append(one)

    async def find_request(self, one: Feedback) -> bool | None:
        assert one.target
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]


class FakeRequest:
    """A request with this body."""

    path, query, peer = "/v1/feedback", "", ""

    def __init__(self, body: bytes, method: str = "POST", **headers: str) -> None:
        self.method = method
        self.headers: Mapping[str, str] = {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        self._body = body

    async def body(self, limit: int) -> bytes:
        if len(self._body) > limit:
            raise RequestTooLarge("too large", limit=limit)
        return self._body

    def reserve_memory(self, size: int) -> None:
        """Do nothing: feedback has no references."""

    def reserve_response(self, size: int) -> None:
        """Do nothing: no worker answers it."""


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "_LOOKUP_DELAYS", (0.0, 0.0, 0.0))


def make_endpoint(store: FakeStore, amount: int = 100) -> FeedbackEndpoint:
    return FeedbackEndpoint(FeedbackConfig((amount, 60)), store, lambda: 0.0, lambda: 50.0)


def send(
    store: FakeStore, body: object = GOOD, principal: Principal | None = None, **headers: str
) -> tuple[int, object]:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    response = asyncio.run(make_endpoint(store).answer(FakeRequest(data, **headers), principal))
    return response.status, msgspec.json.decode(response.body)


@pytest.mark.parametrize(
    ("value", "kind", "number", "category"),
    [
        (True, "boolean", 1.0, ""),
        (False, "boolean", 0.0, ""),
        (4, "number", 4.0, ""),
        (-2.5, "number", -2.5, ""),
        (0, "number", 0.0, ""),
        ("helpful", "category", None, "helpful"),
    ],
)
def test_value_is_stored_with_its_kind(
    value: object, kind: str, number: float | None, category: str
) -> None:
    store = FakeStore(True)
    body = {**GOOD, "value": value, "comment": "so so"}
    assert send(store, body) == (
        200,
        {"object": "feedback", "request_id": "r1", "name": "thumbs_up", "value": value},
    )

    [one] = store.stored
    assert (one.kind, one.number, one.category) == (kind, number, category)
    assert (one.at, one.key, one.any_key, one.column) == (50.0, "", False, "id")
    assert (one.target, one.name, one.comment) == ("r1", "thumbs_up", "so so")


def test_response_id_names_the_request() -> None:
    store = FakeStore(True)
    status, reply = send(store, {"response_id": "msg_1", "name": "a", "value": 1})

    assert status == 200
    assert reply == {"object": "feedback", "response_id": "msg_1", "name": "a", "value": 1}
    assert (store.stored[0].column, store.stored[0].target) == ("response_id", "msg_1")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "a", "value": 1}, "request_id"),
        ({**GOOD, "response_id": "x"}, "request_id"),
        ({**GOOD, "request_id": ""}, "request_id"),
        ({**GOOD, "request_id": "x" * 257}, "request_id"),
        ({**GOOD, "request_id": "a\nb"}, "request_id"),
        ({**GOOD, "request_id": 5}, "request_id"),
        ({**GOOD, "request_id": None}, "request_id"),
        ({**GOOD, "name": ""}, "name"),
        ({**GOOD, "name": "9lives"}, "name"),
        ({**GOOD, "name": "a" * 65}, "name"),
        ({**GOOD, "name": "a b"}, "name"),
        ({**GOOD, "name": "a\n"}, "name"),
        ({**GOOD, "name": "a=b"}, "name"),
        ({**GOOD, "name": None}, "name"),
        ({**GOOD, "value": None}, "value"),
        ({**GOOD, "value": [True]}, "value"),
        ({**GOOD, "value": {}}, "value"),
        ({**GOOD, "value": ""}, "value"),
        ({**GOOD, "value": "x" * 65}, "value"),
        ({**GOOD, "value": "a\x00b"}, "value"),
        ({**GOOD, "value": 1e10}, "value"),
        ({**GOOD, "value": -(10**30)}, "value"),
        ({**GOOD, "comment": "x" * 11}, "comment"),
        ({**GOOD, "comment": 1}, "comment"),
        ({**GOOD, "user": "x"}, "user"),
        ({"request_id": "a", "name": "a"}, "value"),
        ({"request_id": "a", "value": 1}, "name"),
    ],
)
def test_invalid_field_is_refused_by_name(body: dict[str, object], field: str) -> None:
    data = _encode(body)
    with pytest.raises(InvalidParameter) as error:
        read_feedback(data, 10)
    assert error.value.param == field
    assert field in error.value.message


def _encode(body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"request_id": "r", "name": "a", "value": NaN}',
        b'{"request_id": "\xff"}',
        b'{"request_id": "\\ud800", "name": "a", "value": 1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_feedback(body, 10)


def test_number_beyond_every_float_is_refused() -> None:
    with pytest.raises(ClientError):
        read_feedback(b'{"request_id": "r", "name": "a", "value": 1e999}', 10)


def test_key_needs_the_right_to_send_feedback() -> None:
    store = FakeStore(True)
    with pytest.raises(FeedbackForbidden, match="feedback: true"):
        send(store, principal=Principal("web", ""))
    assert not store.stored

    send(store, principal=Principal("web", "", feedback=True))
    send(store, principal=Principal("ops", "", feedback=True, feedback_on_all_keys=True))
    assert [(one.key, one.any_key) for one in store.stored] == [("web", False), ("ops", True)]


def test_unknown_request_is_refused_after_further_searches() -> None:
    store = FakeStore(False)
    with pytest.raises(RequestNotFound) as error:
        send(store)
    assert error.value.param == "request_id"
    assert "'r1'" in error.value.message
    assert not store.stored


def test_request_whose_row_is_written_late_is_found() -> None:
    for answers in ((False, False, True), (None, True), (None, False, True)):
        store = FakeStore(*answers)
        assert send(store)[0] == 200
        assert len(store.stored) == 1


def test_feedback_is_accepted_while_the_database_is_unavailable() -> None:
    store = FakeStore(None)
    assert send(store)[0] == 200
    assert len(store.stored) == 1


def test_each_key_has_a_limit_of_its_own() -> None:
    store = FakeStore(True)
    now = 0.0
    endpoint = FeedbackEndpoint(FeedbackConfig((2, 60)), store, lambda: now, lambda: 50.0)
    first, second = (Principal(name, "", feedback=True) for name in "ab")

    async def judge(principal: Principal) -> None:
        await endpoint.answer(FakeRequest(msgspec.json.encode(GOOD)), principal)

    async def judge_often() -> None:
        nonlocal now
        await judge(first)
        await judge(first)
        with pytest.raises(RateLimitExceeded, match="at most 2 judgements in 60 s") as error:
            await judge(first)
        refused = endpoint.build_error(error.value)
        assert (refused.status, dict(refused.headers)["Retry-After"]) == (429, "30")
        await judge(second)
        now += 30
        await judge(first)

    asyncio.run(judge_often())
    assert len(store.stored) == 4
    assert endpoint.results == {"accepted": 4, "RateLimitExceeded": 1}


def test_number_of_limited_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "_MAX_KEYS", 3)
    endpoint = make_endpoint(FakeStore(True))

    async def judge() -> None:
        for n in range(10):
            principal = Principal(f"k{n}", "", feedback=True)
            await endpoint.answer(FakeRequest(msgspec.json.encode(GOOD)), principal)

    asyncio.run(judge())
    assert [*endpoint._limits] == ["k7", "k8", "k9"]


def test_other_methods_encodings_and_large_bodies_are_refused() -> None:
    endpoint = make_endpoint(FakeStore(True))
    for request, kind in (
        (FakeRequest(b"", "GET"), MethodNotAllowed),
        (FakeRequest(b"x" * 100_000), RequestTooLarge),
        (FakeRequest(b"{}", content_encoding="gzip"), ClientError),
    ):
        with pytest.raises(kind):
            asyncio.run(endpoint.answer(request, None))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidParameter("no", param="value"), 400),
        (MalformedRequest("no"), 400),
        (Unauthorized("no", missing=True), 401),
        (FeedbackForbidden("no"), 403),
        (RequestNotFound("no", id="r"), 404),
        (MethodNotAllowed("no", allowed=("POST",)), 405),
        (RequestTooLarge("no", limit=1), 413),
        (GatewayError("no"), 500),
    ],
)
def test_errors_have_one_shape(error: GatewayError, status: int) -> None:
    response = make_endpoint(FakeStore(True)).build_error(error)
    assert response.status == status
    assert msgspec.json.decode(response.body) == {
        "error": {"message": "no", "type": type(error).__name__, "param": error.param}
    }


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"id":"chatcmpl-1","choices":[{"id":"x"}]}', "chatcmpl-1"),
        (b'{"choices":[{"id":"call_1"}],"id":"cmpl-2"}', "cmpl-2"),
        (b'data: {"id":"chatcmpl-3","choices":[]}\n\ndata: {"id":"other"}\n\n', "chatcmpl-3"),
        (b'event: message_start\ndata: {"type":"x","message":{"id":"msg_4"}}\n\n', "msg_4"),
        (b'event: response.created\ndata: {"type":"x","response":{"id":"resp_5"}}\n\n', "resp_5"),
        (b'{"id":5}', ""),
        (b'{"id":null,"message":{"id":7}}', ""),
        (b'{"message":"text"}', ""),
        (b'{"id":"' + b"x" * 300 + b'"}', ""),
        (b'{"text":"\\"id\\":\\"no\\""}', ""),
        (b"data: [DONE]\n\n", ""),
        (b'{"id":"cut', ""),
        (b"\xff\xfe", ""),
        (b"", ""),
    ],
)
def test_response_id_is_read_from_the_response(body: bytes, name: str) -> None:
    assert find_response_id(body) == name


class _Sink:
    started = needs_drain = False

    def __init__(self) -> None:
        self.data = b""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        del status, headers
        self.data += body

    def start(self, status: int, headers: Headers) -> None:
        del status, headers

    def write(self, data: bytes) -> None:
        self.data += data

    def finish(self) -> None:
        self.data += b"|"

    def flush(self) -> None:
        raise AssertionError("nothing bridges a silence here")

    async def drain(self) -> None:
        pass


def observe_ids(sink: _Sink, record: RequestRecord) -> ResponseWriter:
    """Return the writer that reads a response's id."""
    http: Any = None  # not used
    request = RequestState(http, sink, record)
    request.add_stage(ResponseIdReader())
    return request.writer


def test_reader_of_ids_passes_everything_on() -> None:
    sink, record = _Sink(), RequestRecord("r")
    writer = observe_ids(sink, record)
    writer.start(200, ())
    for chunk in (b": ping\n\n", b'data: {"id":"a"}\n\n', b'data: {"id":"b"}\n\n'):
        writer.write(chunk)
    writer.finish()

    assert record.response_id == "a"
    assert sink.data == b': ping\n\ndata: {"id":"a"}\n\ndata: {"id":"b"}\n\n|'

    failed = RequestRecord("s", status=500)
    observe_ids(sink, failed).send_response(500, (), b'{"id":"x"}')
    assert failed.response_id == ""
