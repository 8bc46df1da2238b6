"""The fast path for routing information equals that for any body."""

import json
from typing import Any

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from protocols.core.errors import ClientError
from protocols.core.interfaces import ClientRequest, RoutingInfo
from protocols.openai.endpoints import OpenAI, _read_any_routing_info
from tests.unit.protocols.conftest import endpoint

ADAPTER = OpenAI()
STRAY: st.SearchStrategy[Any] = st.sampled_from([None, True, False, 5, 1.5, "", "a", "é", [], {}])
FIELDS = {
    "model": st.text(max_size=3) | STRAY,
    "stream": st.booleans() | STRAY,
    "request_id": STRAY,
    "messages": STRAY,
}


def create_client_request(body: bytes, client_id: str | None = None) -> ClientRequest:
    row = endpoint("chat")
    headers = {} if client_id is None else {"x-client-request-id": client_id}
    return ClientRequest(row, {}, headers, "", body, row.path)


def read_routing_info_both_ways(body: bytes, client_id: str | None = None) -> Any:
    """Return the routing information, which must be equal by both paths."""
    results: list[Any] = []
    for peek in (ADAPTER.read_routing_info, lambda call: _read_any_routing_info(call, client_id)):
        try:
            results.append(peek(create_client_request(body, client_id)))
        except ClientError as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]
    return results[0]


@forall(
    fields=st.fixed_dictionaries({}, optional=FIELDS),
    client_id=st.sampled_from([None, "", "c-1"]),
    escaped=st.booleans(),
)
def test_routing_info_from_fields_equals_full_parsing(
    fields: dict[str, Any], client_id: str | None, *, escaped: bool
) -> None:
    read_routing_info_both_ways(json.dumps(fields, ensure_ascii=escaped).encode(), client_id)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"model":"a","\xff":1}',
        b'{"model":"a"} x',
        b'{"model":"a","x":' + b"[" * 100_000,
        b'{"model":"a","stream":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model":"a","request_id":"r-1"}',
        b'{"model":"a","stream":1,"request_id":"r-1"}',
    ],
)
def test_routing_info_of_malformed_body_equals_full_parsing(body: bytes) -> None:
    read_routing_info_both_ways(body)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"", RoutingInfo("a")),
        (b',"stream":true', RoutingInfo("a", stream=True)),
        (b',"stream": null', RoutingInfo("a")),
        (b',"stream":1,"stream":true', RoutingInfo("a", stream=True)),
        (b',"model":"b"', RoutingInfo("b")),
        (b',"x":"\xff"', RoutingInfo("a")),
        (b',"request_id":"r-1"', RoutingInfo("a", client_id="r-1")),
    ],
)
def test_routing_info_has_model_and_stream(fields: bytes, expected: RoutingInfo) -> None:
    assert read_routing_info_both_ways(b'{"model":"a"' + fields + b"}") == expected


def test_heartbeat_interval_has_a_minimum() -> None:
    with pytest.raises(ValueError, match=r"heartbeat_interval of openai must be at least 0\.1"):
        OpenAI(heartbeat_interval=0)
