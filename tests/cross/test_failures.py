"""A worker's error reaches the client in its own protocol and never looks like a success."""

import json
from collections.abc import Mapping

import httpx
import pytest

from tests.cross.client import Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import TOKENS, RequestOptions
from tests.cross.workers.table import WORKERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRETS = ("0x7f00", "77", "12")
"""Internal details of workers that only their operators may see."""


async def test_worker_error_is_translated_to_the_client_status(
    environment: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    row = client.adapt_worker(WORKERS[worker])
    own = row.same_protocol_client == client.name

    for scenario, status in client.statuses.items():
        refusal = row.script.error_responses[scenario]

        response = await environment.send(client, worker, RequestOptions(stream=stream), scenario)

        assert response.status_code == (refusal.status if own else status), scenario
        message = client.read_error(
            json.loads(response.text.removeprefix("data: "))
        )  # a stream's first event, or the body
        assert ("must be at most" in message) is (scenario == "refused")
        assert own or not any(secret in message for secret in SECRETS)
        _check_retry(response, scenario, refusal.headers)

    assert len(environment.records) == len(client.statuses)
    assert "ok" not in {one.outcome for one in environment.records}


@pytest.mark.parametrize("scenario", ["broken", "short", "cut"])
async def test_truncated_stream_ends_with_an_error_and_no_finish_reason(
    environment: CrossEnvironment, client: Client, worker: str, scenario: str
) -> None:
    row = client.adapt_worker(WORKERS[worker])
    options = RequestOptions(stream=True)

    response = await environment.send_and_read(client, worker, options, scenario)

    assert response.texts == {0: "".join(TOKENS[:2])}

    if scenario == "short" and client.mode(options) in row.without_end_mark:
        assert not response.error
        return
    assert response.error
    assert row.same_protocol_client == client.name or "0x7f00" not in response.error
    assert set(response.reasons.values()) <= {"None"}
    assert not response.done or not client.end
    assert environment.record.outcome == "truncated"


async def test_truncated_unary_response_returns_an_error(
    environment: CrossEnvironment, client: Client, worker: str
) -> None:
    response = await environment.send(client, worker, RequestOptions(), "cut")

    assert response.status_code >= httpx.codes.BAD_REQUEST
    assert TOKENS[0] not in response.text
    assert environment.record.outcome == "worker_error"


def _check_retry(answer: httpx.Response, scenario: str, headers: Mapping[str, str]) -> None:
    """A worker's Retry-After is passed on, and an overload always has one."""
    if "retry_after" in headers:
        assert answer.headers["retry-after"] == headers["retry_after"]
    elif scenario == "busy":
        assert int(answer.headers["retry-after"]) >= 1
