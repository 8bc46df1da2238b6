"""What goes wrong at a worker is told in the client's words, and never looks like an answer."""

import json
from collections.abc import Mapping

import httpx
import pytest

from tests.cross.clients import Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import TOKENS, RequestOptions
from tests.cross.workers.table import WORKERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRETS = ("0x7f00", "77", "12")
"""What only a worker's own people are to read of its complaints."""


async def test_worker_error_is_translated_to_the_client_status(
    floor: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    row = client.sees(WORKERS[worker])
    own = row.alike == client.name
    for play, status in client.statuses.items():
        refusal = row.desk.refusals[play]

        answer = await floor.ask(client, worker, RequestOptions(stream=stream), play)

        assert answer.status_code == (refusal.status if own else status), play
        told = client.told(
            json.loads(answer.text.removeprefix("data: "))
        )  # its first event, or all
        assert ("must be at most" in told) is (play == "refused")
        assert own or not any(secret in told for secret in SECRETS)
        _check_retry(answer, play, refusal.headers)
    assert len(floor.records) == len(client.statuses)
    assert "ok" not in {one.outcome for one in floor.records}


@pytest.mark.parametrize("play", ["broken", "short", "cut"])
async def test_truncated_stream_ends_with_an_error_and_no_finish_reason(
    floor: CrossEnvironment, client: Client, worker: str, play: str
) -> None:
    row = client.sees(WORKERS[worker])
    wish = RequestOptions(stream=True)

    heard = await floor.hear(client, worker, wish, play)

    assert heard.texts == {0: "".join(TOKENS[:2])}
    if play == "short" and client.way(wish) in row.endless:
        assert not heard.error
        return
    assert heard.error
    assert row.alike == client.name or "0x7f00" not in heard.error
    assert set(heard.reasons.values()) <= {"None"}
    assert not heard.done or not client.end
    assert floor.record.outcome == "truncated"


async def test_truncated_unary_response_returns_an_error(
    floor: CrossEnvironment, client: Client, worker: str
) -> None:
    answer = await floor.ask(client, worker, RequestOptions(), "cut")

    assert answer.status_code >= httpx.codes.BAD_REQUEST
    assert TOKENS[0] not in answer.text
    assert floor.record.outcome == "worker_error"


def _check_retry(answer: httpx.Response, play: str, told: Mapping[str, str]) -> None:
    """When to come again is passed on; who is only busy has always such a time."""
    if "retry_after" in told:
        assert answer.headers["retry-after"] == told["retry_after"]
    elif play == "busy":
        assert int(answer.headers["retry-after"]) >= 1
