"""The case runner sends what a case says and reports every mismatch."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.conformance.cases import Case, Mismatch, Response, check_response, match, run_case

YES: list[tuple[Any, Any]] = [
    (..., None),
    (str, "a"),
    (int, 1),
    (bool, True),
    (float, 0.5),
    (re.compile("a.c"), "abc"),
    (lambda actual: actual > 1, 2),
    ({"a": 1, "b": ...}, {"a": 1, "b": [2]}),
    ([1, {"a": str}], [1, {"a": "x"}]),
    (3.0, 3),
]
NO: list[tuple[Any, Any, str]] = [
    (str, 1, "x: wanted a value of type str, got 1"),
    (int, True, "x: wanted a value of type int, got True"),
    (1, True, "x: wanted 1, got True"),
    (None, 0, "x: wanted None, got 0"),
    (re.compile("a.c"), "abcd", "x: wanted what matches 'a.c', got 'abcd'"),
    (re.compile("a.c"), 5, "x: wanted what matches 'a.c', got 5"),
    (callable, 5, "x: wanted what satisfies callable, got 5"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x: wanted the keys a, b, got b, a"),
    ({"a": 1}, {"a": 1, "b": 2}, "x: wanted the keys a, got a, b"),
    ({"a": {"b": 1}}, {"a": {"b": 2}}, "x.a.b: wanted 1, got 2"),
    ({"a": 1}, [], "x: wanted an object, got []"),
    ([1], {}, "x: wanted an array, got {}"),
    ([1, 2], [1, 3], "x[1]: wanted 2, got 3"),
    ([1, 2], [1], "x: wanted 2 items, got 1; the last is 1"),
    ([1], [], "x: wanted 1 items, got 0; the last is nothing"),
]


@pytest.mark.parametrize(("wanted", "actual"), YES)
def test_match_accepts_expected_values(wanted: Any, actual: Any) -> None:
    match(wanted, actual, "x")


@pytest.mark.parametrize(("wanted", "actual", "mismatch"), NO)
def test_match_reports_mismatches(wanted: Any, actual: Any, mismatch: str) -> None:
    with pytest.raises(Mismatch) as excinfo:
        match(wanted, actual, "x")

    assert str(excinfo.value) == mismatch


def test_partial_match_ignores_additional_keys() -> None:
    match({"b": {"c": 1}}, {"a": 0, "b": {"c": 1, "d": 2}}, "x", exact=False)

    with pytest.raises(Mismatch, match=r"x\.b: wanted e, got only c"):
        match({"b": {"e": 1}}, {"b": {"c": 1}}, "x", exact=False)


JSON = {"content-type": "application/json; charset=utf-8", "retry-after": "2"}
EVENTS = {"content-type": "text/event-stream"}
OK = Response(200, JSON, b'{"a":1}')
STREAM = Response(200, EVENTS, b'data: {"a":1}\n\ndata: [DONE]\n\n')
BAD: list[tuple[dict[str, Any], Response, str]] = [
    ({"status": 400}, OK, "status: wanted 400, got 200"),
    ({"content_type": "text/plain"}, OK, "content-type: wanted 'text/plain', got 'application/jso"),
    ({"answer_headers": {"Retry-After": "3"}}, OK, "Retry-After: wanted '3', got '2'"),
    ({"answer_headers": {"retry-after": None}}, OK, "retry-after: wanted None, got '2'"),
    ({"body_is": {"a": 2}}, OK, "body.a: wanted 2, got 1"),
    ({"body_is": b'{"a": 1}'}, OK, "body: wanted b'{\"a\": 1}', got b'{\"a\":1}'"),
    ({"body_has": {"b": 2}}, OK, "body: wanted b, got only a"),
    ({"body_has": {}}, Response(200, JSON, b"x"), "the body is not JSON: b'x'"),
    ({"events": [{"a": 1}]}, STREAM, "events: wanted 1 items, got 2; the last is '[DONE]'"),
    ({"events": []}, Response(200, EVENTS, b"", cut=True), "the stream broke after b''"),
    ({"events": []}, OK, "content-type: wanted 'text/event-stream'"),
]


@pytest.mark.parametrize(("row", "answer", "mismatch"), BAD)
def test_wrong_response_is_a_mismatch(row: dict[str, Any], answer: Response, mismatch: str) -> None:
    with pytest.raises(Mismatch) as excinfo:
        check_response(Case("X1", "GET", "/", **row), answer)

    assert mismatch in str(excinfo.value)


def test_events_are_parsed_without_loss() -> None:
    body = b'data: {"a":1}\n\ndata:x\n\n: ping\n\nevent: e\ndata: 1\n\n{"error":"e"}'

    response = Response(200, EVENTS, body)

    assert response.events == [{"a": 1}, "x", ": ping", "event: e\ndata: 1", '{"error":"e"}']
    assert response.chunks == [{"a": 1}]


async def test_case_request_is_sent_as_declared() -> None:
    requests: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={"n": len(requests)})

    numbers: list[int] = []
    http = httpx.AsyncClient(base_url="http://x/y", transport=httpx.MockTransport(serve))
    case = Case(
        "X1 twice",
        "POST",
        "/a%2Fb",
        headers={"X-Own": "1"},
        body={"a": [1]},
        times=2,
        across=lambda answers: numbers.extend(answer.json["n"] for answer in answers),
    )

    await run_case(http, case)
    await run_case(http, Case("X2", "PUT", "/a", headers={"Authorization": None}, body=b"{"))

    assert case.number == "X1"
    assert numbers == [1, 2]
    assert requests[0].url.raw_path == b"/y/a%2Fb"
    assert requests[0].content == b'{"a":[1]}'
    assert requests[0].headers["authorization"] == "Bearer sk-test"
    assert (requests[0].headers["content-type"], requests[0].headers["x-own"]) == (
        "application/json",
        "1",
    )
    assert requests[2].method == "PUT"
    assert requests[2].content == b"{"
    assert "authorization" not in requests[2].headers


async def test_meanwhile_case_is_sent_during_the_response() -> None:
    """It is sent after the first bytes of the response and before the next."""
    paths: list[str] = []

    async def body() -> AsyncIterator[bytes]:
        for piece in (b"[1,", b"2]"):
            paths.append(piece.decode())
            yield piece

    def serve(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(
            200, headers=JSON, content=body() if request.url.path == "/a" else b"3"
        )

    http = httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(serve))
    inner = Case("X1 meanwhile", "POST", "/b", body_is=3)

    await run_case(http, Case("X1", "POST", "/a", meanwhile=inner, body_is=[1, 2]))
    with pytest.raises(Mismatch, match="wanted 4, got 3"):
        await run_case(http, Case("X2", "POST", "/a", meanwhile=replace(inner, body_is=4)))

    assert paths[:4] == ["/a", "[1,", "/b", "2]"]
