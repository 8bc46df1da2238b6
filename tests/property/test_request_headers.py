"""A header that means something to a protocol's servers is sent on or reported, never refused.

The headers come from the tables of the client protocols, with a name for each of their prefixes
that no table lists.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.errors import ClientError
from protocols.core.request_headers import HeaderDecision
from tests.property.test_unknown_keys import REQUESTS, list_workers, prepare_request
from tests.support.path_routers import get_adapter

DATE = "2023-06-01"
"""A value that all headers may have."""


def list_headers(client: Any) -> Mapping[str, HeaderDecision]:
    """Return each header of the protocol, and for each prefix one that the table lacks."""
    table = client.request_headers
    unknown: dict[str, HeaderDecision] = {f"{one}x-unknown": "reported" for one in table.prefixes}
    return {**table.decisions, **unknown}


def list_cases() -> Iterator[Any]:
    """Return a client protocol, a path and a body for each of its endpoints."""
    for name in PROTOCOLS:
        bodies = dict(reversed(REQUESTS[name]))
        for path, body in bodies.items():
            yield pytest.param(name, path, body, id=f"{name}{path}")


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(("name", "path", "body"), list(list_cases()))
def test_each_header_is_sent_on_or_reported(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = get_adapter(name)
    headers = list_headers(client)
    try:
        _, without = prepare_request(client, worker, path, body)
        sent, reported = prepare_request(
            client, worker, path, body, headers=dict.fromkeys(headers, DATE)
        )
    except ClientError:  # such a worker does not answer these requests
        return

    expected = {
        f"header.{one}"
        for one, decision in headers.items()
        if decision != "handled" and (one, DATE) not in sent.headers
    }
    assert {one.field for one in reported} == {*(one.field for one in without), *expected}


@pytest.mark.parametrize("worker", list_workers())
@pytest.mark.parametrize(("name", "path", "body"), list(list_cases()))
def test_no_header_is_a_reason_to_refuse(
    name: str, path: str, body: dict[str, Any], worker: Any
) -> None:
    client = get_adapter(name)
    try:
        prepare_request(client, worker, path, body, on_loss="reject")
    except ClientError:
        return

    headers = dict.fromkeys(list_headers(client), DATE)
    prepare_request(client, worker, path, body, on_loss="reject", headers=headers)


FORWARDED = {
    "anthropic": ("/v1/messages", "anthropic-beta"),
    "openai": ("/v1/chat/completions", "openai-beta"),
}


@pytest.mark.parametrize("name", [one for one in PROTOCOLS if one != "ollama"])
@pytest.mark.parametrize("settings", [{}, {"max_tokens": 50}, {"on_loss": "reject"}])
def test_a_worker_of_the_client_s_protocol_gets_the_forwarded_headers(
    name: str, settings: dict[str, Any]
) -> None:
    client = get_adapter(name)
    forwarded = client.request_headers.forwarded
    assert forwarded == {FORWARDED[name][1]} if name in FORWARDED else not forwarded
    path, body = REQUESTS[name][0]

    sent, _ = prepare_request(
        client, client, path, body, headers=dict.fromkeys(forwarded, "a-1,b-2"), **settings
    )

    assert forwarded <= {one for one, value in sent.headers if value == "a-1,b-2"}


@pytest.mark.parametrize("value", ["", "é", "a" * 2049, "a\tb"])
def test_a_header_that_may_not_be_sent_is_reported(value: str) -> None:
    client = build_adapter("anthropic", None, {})
    path, body = REQUESTS["anthropic"][0]

    sent, reported = prepare_request(client, client, path, body, headers={"anthropic-beta": value})

    assert "anthropic-beta" not in dict(sent.headers)
    assert [one.field for one in reported] == ["header.anthropic-beta"]
