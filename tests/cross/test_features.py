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
from tests.cross.workers.table import EMULATED, WORKERS

pytestmark = pytest.mark.asyncio(loop_scope="module")


def parametrize_clients_with(feature: str) -> pytest.MarkDecorator:
    """Each client that can ask for it, streamed and not."""
    ways = [(client, False) for client in CLIENTS if feature in client.can]
    ways += [(client, True) for client in CLIENTS if feature in client.can_stream]
    names = [f"{client.name}-{'stream' if stream else 'whole'}" for client, stream in ways]
    return pytest.mark.parametrize(("asker", "streamed"), ways, ids=names)


@parametrize_clients_with("stop")
async def test_stop_string_ends_the_text(
    environment: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    options = RequestOptions(stream=streamed, stops=("nie", STOP))
    way = asker.way(options)
    keeps = asker.keeps_streamed if streamed else asker.keeps_whole

    response = await environment.send_and_read(asker, worker, options)

    assert response.texts == {0: BEFORE_STOP + STOP if keeps else BEFORE_STOP}
    emulation = row.stop.get(way) or (EMULATED if asker.names_stop and not row.names_stop else None)
    ended = "stop" if emulation else row.ends.get("eos", "stop")
    assert response.reasons == {0: asker.words[ended]}
    assert response.done
    assert not response.error
    lost = asker.list_expected_losses(row, stream=streamed)
    if keeps and way not in row.keeps:
        lost |= row.loss("stopping.include_stop", EMULATED)
    if not (keeps and way in row.keeps):
        lost |= row.loss("stopping.stop", emulation)
    assert environment.lost == lost
    assert response.usage is not None
    assert response.usage[1] > 0


@parametrize_clients_with("n")
async def test_n_returns_two_choices(
    environment: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    options = RequestOptions(stream=streamed, n=2)

    response = await environment.send_and_read(asker, worker, options)

    assert response.texts == {0: TEXT, 1: TEXT}
    ended = asker.words[row.ends.get("eos", "eos")]
    assert response.reasons == {0: ended, 1: ended}
    assert response.done
    emulation = None if row.same_protocol_client == asker.name else row.n.get(asker.way(options))
    assert environment.lost == asker.list_expected_losses(row, stream=streamed) | row.loss(
        "n", emulation
    )
    assert len(environment.server.received) == (2 if emulation else 1)
    assert response.usage is not None
    if asker.way(options) not in row.silent:
        assert response.usage[1] == 2 * len(TOKENS)


@parametrize_clients_with("logprobs")
async def test_logprobs_are_returned_or_reported_as_lost(
    environment: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    options = RequestOptions(stream=streamed, top=1 if asker.kind == "text" else 0)

    response = await environment.send_and_read(asker, worker, options)

    assert response.texts == {0: TEXT}
    lost = row.logprobs.get(asker.way(options))
    losses = asker.list_expected_losses(row, stream=streamed)
    assert environment.lost == losses | row.loss("logprobs.top", lost)
    values = [value for _, value in response.logprobs]
    if lost == "dropped":
        assert values == []
    else:
        assert values == [get_logprob(token) for token in TOKENS]
        assert lost or [token for token, _ in response.logprobs] == list(TOKENS)


@parametrize_clients_with("tools")
async def test_tool_call_is_returned_or_tools_are_reported_as_lost(
    environment: CrossEnvironment, asker: Client, worker: str, *, streamed: bool
) -> None:
    row = asker.sees(WORKERS[worker])
    options = RequestOptions(stream=streamed, tool=True)

    response = await environment.send_and_read(asker, worker, options)

    losses = asker.list_expected_losses(row, stream=streamed)
    assert environment.lost == losses | row.loss("tools", row.tools or None)
    assert response.done
    if row.tools:
        assert response.texts == {0: TEXT}
        assert response.calls == {}
    else:
        [(name, arguments)] = response.calls.values()
        assert (name, json.loads(arguments)) == (TOOL, json.loads("".join(ARGUMENTS)))
        assert response.texts[0] == ""
        assert response.reasons == {0: asker.words["tool_calls"]}
