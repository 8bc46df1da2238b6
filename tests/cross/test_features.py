"""What a client asks beside text: done by the worker, or by the gateway, or told as lost."""

import json

import pytest

from tests.cross.clients import CLIENTS, Client
from tests.cross.conftest import CrossEnvironment
from tests.cross.script import (
    ARGUMENTS,
    BEFORE_STOP,
    STOP,
    TEXT,
    TOKENS,
    TOOL,
    RequestOptions,
    get_logprob,
)
from tests.cross.workers.table import MADE, WORKERS

pytestmark = pytest.mark.asyncio(loop_scope="module")


def parametrize_clients_with(feature: str) -> pytest.MarkDecorator:
    """Each client that can ask for it, streamed and not."""
    ways = [(client, False) for client in CLIENTS if feature in client.can]
    ways += [(client, True) for client in CLIENTS if feature in client.can_stream]
    names = [f"{client.name}-{'stream' if stream else 'whole'}" for client, stream in ways]
    return pytest.mark.parametrize(("asker", "streamed"), ways, ids=names)


@parametrize_clients_with("stop")
async def test_stop_string_ends_the_text(
    floor: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    wish = RequestOptions(stream=streamed, stops=("nie", STOP))
    way = asker.way(wish)
    keeps = asker.keeps_streamed if streamed else asker.keeps_whole

    heard = await floor.hear(asker, worker, wish)

    assert heard.texts == {0: BEFORE_STOP + STOP if keeps else BEFORE_STOP}
    made = row.stop.get(way) or (MADE if asker.names_stop and not row.names_stop else None)
    ended = "stop" if made else row.ends.get("eos", "stop")
    assert heard.reasons == {0: asker.words[ended]}
    assert heard.done
    assert not heard.error
    lost = asker.usual(row, stream=streamed)
    if keeps and way not in row.keeps:
        lost |= row.loss("stopping.include_stop", MADE)
    if not (keeps and way in row.keeps):
        lost |= row.loss("stopping.stop", made)
    assert floor.lost == lost
    assert heard.usage is not None
    assert heard.usage[1] > 0


@parametrize_clients_with("n")
async def test_n_returns_two_choices(
    floor: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    wish = RequestOptions(stream=streamed, n=2)

    heard = await floor.hear(asker, worker, wish)

    assert heard.texts == {0: TEXT, 1: TEXT}
    ended = asker.words[row.ends.get("eos", "eos")]
    assert heard.reasons == {0: ended, 1: ended}
    assert heard.done
    made = None if row.alike == asker.name else row.n.get(asker.way(wish))
    assert floor.lost == asker.usual(row, stream=streamed) | row.loss("n", made)
    assert len(floor.stage.asked) == (2 if made else 1)
    assert heard.usage is not None
    if asker.way(wish) not in row.silent:
        assert heard.usage[1] == 2 * len(TOKENS)


@parametrize_clients_with("logprobs")
async def test_logprobs_are_returned_or_reported_as_lost(
    floor: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    wish = RequestOptions(stream=streamed, top=1 if asker.kind == "text" else 0)

    heard = await floor.hear(asker, worker, wish)

    assert heard.texts == {0: TEXT}
    lost = row.logprobs.get(asker.way(wish))
    usual = asker.usual(row, stream=streamed)
    assert floor.lost == usual | row.loss("logprobs.top", lost)
    values = [value for _, value in heard.logprobs]
    if lost == "dropped":
        assert values == []
    else:
        assert values == [get_logprob(token) for token in TOKENS]
        assert lost or [token for token, _ in heard.logprobs] == list(TOKENS)


@parametrize_clients_with("tools")
async def test_tool_call_is_returned_or_tools_are_reported_as_lost(
    floor: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    wish = RequestOptions(stream=streamed, tool=True)

    heard = await floor.hear(asker, worker, wish)

    usual = asker.usual(row, stream=streamed)
    assert floor.lost == usual | row.loss("tools", row.tools or None)
    assert heard.done
    if row.tools:
        assert heard.texts == {0: TEXT}
        assert heard.calls == {}
    else:
        [(name, arguments)] = heard.calls.values()
        assert (name, json.loads(arguments)) == (TOOL, json.loads("".join(ARGUMENTS)))
        assert heard.texts[0] == ""
        assert heard.reasons == {0: asker.words["tool_calls"]}
