"""Every client protocol gets the same response from every worker protocol."""

import pytest

from tests.cross.client import Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import PROMPT_TOKENS, TEXT, TOKENS, RequestOptions
from tests.cross.workers.table import WORKERS

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_response_in_small_packets_is_translated(
    environment: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    row = client.adapt_worker(WORKERS[worker])
    options = RequestOptions(stream=stream)

    response = await environment.send_and_read(client, worker, options, "packets")

    assert response.texts == {0: TEXT}
    assert response.reasons == {0: client.finish_reasons[row.reason_changes.get("eos", "eos")]}
    assert response.done
    assert not response.error
    assert environment.lost == client.list_expected_losses(row, stream=stream)
    _check_usage(
        environment,
        response.usage,
        len(TOKENS),
        has_usage=client.mode(options) not in row.without_usage,
    )


async def test_max_tokens_limits_the_response(
    environment: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    row = client.adapt_worker(WORKERS[worker])
    options = RequestOptions(stream=stream, max_tokens=2)

    response = await environment.send_and_read(client, worker, options)

    assert response.texts == {0: "".join(TOKENS[:2])}

    ended = row.reason_changes.get("length", "length")
    if client.infers_length and environment.record.usage is not None:
        ended = ended if environment.record.usage.source == "estimated" else "length"
    assert response.reasons == {0: client.finish_reasons[ended]}
    assert response.done
    assert environment.lost == client.list_expected_losses(row, stream=stream, limited=True)
    _check_usage(
        environment, response.usage, 2, has_usage=client.mode(options) not in row.without_usage
    )


def _check_usage(
    environment: CrossEnvironment,
    usage: tuple[int | None, int] | None,
    token_count: int,
    *,
    has_usage: bool,
) -> None:
    """The usage is the worker's if it reports one, else counted or estimated.

    A unary response without usage has no events to count, so its usage is estimated.
    """
    used = environment.record.usage
    assert used is not None
    assert usage is not None
    assert usage[0] in (None, used.prompt_tokens)
    assert usage[1] == used.completion_tokens
    if has_usage:
        assert (used.prompt_tokens, used.source) == (PROMPT_TOKENS, "worker")
        assert usage[1] == token_count
    else:
        assert used.source in ("counted", "estimated")
        assert 0 < usage[1] <= len(TEXT)
