"""The same question in every client dialect has the same answer from every worker dialect."""

import pytest

from tests.cross.clients import Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import PROMPT_TOKENS, TEXT, TOKENS, RequestOptions
from tests.cross.workers.table import WORKERS

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_response_in_small_packets_is_translated(
    floor: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    row = client.sees(WORKERS[worker])
    wish = RequestOptions(stream=stream)

    heard = await floor.hear(client, worker, wish, "packets")

    assert heard.texts == {0: TEXT}
    assert heard.reasons == {0: client.words[row.ends.get("eos", "eos")]}
    assert heard.done
    assert not heard.error
    assert floor.lost == client.usual(row, stream=stream)
    _check_usage(floor, heard.usage, len(TOKENS), told=client.way(wish) not in row.silent)


async def test_max_tokens_limits_the_response(
    floor: CrossEnvironment, client: Client, worker: str, *, stream: bool
) -> None:
    row = client.sees(WORKERS[worker])
    wish = RequestOptions(stream=stream, most=2)

    heard = await floor.hear(client, worker, wish)

    assert heard.texts == {0: "".join(TOKENS[:2])}
    ended = row.ends.get("length", "length")
    if client.counts and floor.record.usage is not None:
        ended = ended if floor.record.usage.source == "estimated" else "length"
    assert heard.reasons == {0: client.words[ended]}
    assert heard.done
    assert floor.lost == client.usual(row, stream=stream, limited=True)
    _check_usage(floor, heard.usage, 2, told=client.way(wish) not in row.silent)


def _check_usage(
    floor: CrossEnvironment, heard: tuple[int | None, int] | None, made: int, *, told: bool
) -> None:
    """The worker's own figures where it has any, and what the gateway counts where not.

    In a whole answer without figures there is nothing to be counted, only to be estimated.
    """
    used = floor.record.usage
    assert used is not None
    assert heard is not None
    assert heard[0] in (None, used.prompt_tokens)
    assert heard[1] == used.completion_tokens
    if told:
        assert (used.prompt_tokens, used.source) == (PROMPT_TOKENS, "worker")
        assert heard[1] == made
    else:
        assert used.source in ("counted", "estimated")
        assert 0 < heard[1] <= len(TEXT)
