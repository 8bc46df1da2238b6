"""Stop strings, n, logprobs and tools are supported, emulated, or reported as lost."""

import json

import pytest

from tests.cross.client import Client
from tests.cross.clients import CLIENTS
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
from tests.cross.workers.table import WORKERS
from tests.cross.workers.worker import EMULATED

pytestmark = pytest.mark.asyncio(loop_scope="module")


def parametrize_clients_with(feature: str) -> pytest.MarkDecorator:
    """Parametrize with each client that has this feature, unary and streaming."""
    modes = [(client, False) for client in CLIENTS if feature in client.can]
    modes += [(client, True) for client in CLIENTS if feature in client.can_stream]
    names = [f"{client.name}-{'stream' if stream else 'unary'}" for client, stream in modes]
    return pytest.mark.parametrize(("capable_client", "streamed"), modes, ids=names)


CHAT_CLIENTS = ("openai chat", "openai completions", "anthropic")
STOP_PATHS = {
    "vllm": ("response.choices[0].stop_reason", CHAT_CLIENTS),
    "openai-both": (
        "response.choices[0].stop_reason",
        (*CHAT_CLIENTS, "openai responses"),
    ),
    "sglang": ("response.choices[0].matched_stop", CHAT_CLIENTS),
    "anthropic": ("response.stop_sequence", ("anthropic",)),
}
"""Where workers say which stop string matched, and the clients that get it."""


@parametrize_clients_with("stop")
async def test_stop_string_ends_the_text(
    environment: CrossEnvironment, capable_client: Client, worker: str, *, streamed: bool
) -> None:
    row = capable_client.adapt_worker(WORKERS[worker])
    options = RequestOptions(stream=streamed, stops=("nie", STOP))
    mode = capable_client.mode(options)
    keeps = capable_client.keeps_stop_in_stream if streamed else capable_client.keeps_stop_in_unary

    response = await environment.send_and_read(capable_client, worker, options)

    assert response.texts == {0: BEFORE_STOP + STOP if keeps else BEFORE_STOP}

    names_stop = row.names_stop or capable_client.name == row.passthrough_client
    emulation = row.stop.get(mode) or (
        EMULATED if capable_client.names_stop and not names_stop else None
    )
    ended = "stop" if emulation else row.reason_changes.get("eos", "stop")
    assert response.reasons == {0: capable_client.finish_reasons[ended]}
    assert response.done
    assert not response.error

    lost = capable_client.list_expected_losses(row, stream=streamed)
    if keeps and mode not in row.include_stop_modes:
        lost |= row.loss("stopping.include_stop", EMULATED)
    if not (keeps and mode in row.include_stop_modes):
        lost |= row.loss("stopping.stop", emulation)

    is_emulated = emulation or (keeps and mode not in row.include_stop_modes)
    if worker in STOP_PATHS and not is_emulated:
        path, clients = STOP_PATHS[worker]
        lost |= frozenset() if capable_client.name in clients else {(path, "dropped")}

    assert environment.lost == lost
    assert response.usage is not None
    assert response.usage[1] > 0


@parametrize_clients_with("n")
async def test_n_returns_two_choices(
    environment: CrossEnvironment, capable_client: Client, worker: str, *, streamed: bool
) -> None:
    row = capable_client.adapt_worker(WORKERS[worker])
    options = RequestOptions(stream=streamed, n=2)

    response = await environment.send_and_read(capable_client, worker, options)

    assert response.texts == {0: TEXT, 1: TEXT}

    ended = capable_client.finish_reasons[row.reason_changes.get("eos", "eos")]
    assert response.reasons == {0: ended, 1: ended}
    assert response.done

    emulation = (
        None
        if row.same_protocol_client == capable_client.name
        else row.n.get(capable_client.mode(options))
    )
    assert environment.lost == capable_client.list_expected_losses(row, stream=streamed) | row.loss(
        "n", emulation
    )
    assert len(environment.server.received) == (2 if emulation else 1)
    assert response.usage is not None
    if capable_client.mode(options) not in row.without_usage:
        assert response.usage[1] == 2 * len(TOKENS)


@parametrize_clients_with("logprobs")
async def test_logprobs_are_returned_or_reported_as_lost(
    environment: CrossEnvironment, capable_client: Client, worker: str, *, streamed: bool
) -> None:
    row = capable_client.adapt_worker(WORKERS[worker])
    options = RequestOptions(
        stream=streamed, top_logprobs=1 if capable_client.kind == "text" else 0
    )

    response = await environment.send_and_read(capable_client, worker, options)

    assert response.texts == {0: TEXT}

    lost = row.logprobs.get(capable_client.mode(options))
    if options.top_logprobs and capable_client.lists_alternatives and row.alternatives:
        lost = row.alternatives
    losses = capable_client.list_expected_losses(row, stream=streamed)
    assert environment.lost == losses | row.loss("logprobs.top", lost)

    values = [value for _, value in response.logprobs]
    if lost == "dropped":
        assert values == []
    else:
        assert values == [get_logprob(token) for token in TOKENS]
        assert lost or [token for token, _ in response.logprobs] == list(TOKENS)


@parametrize_clients_with("tools")
async def test_tool_call_is_returned_or_tools_are_reported_as_lost(
    environment: CrossEnvironment, capable_client: Client, worker: str, *, streamed: bool
) -> None:
    row = capable_client.adapt_worker(WORKERS[worker])
    options = RequestOptions(stream=streamed, tool=True)

    response = await environment.send_and_read(capable_client, worker, options)

    losses = capable_client.list_expected_losses(row, stream=streamed)
    assert environment.lost == losses | row.loss("tools", row.tools or None)
    assert response.done

    if row.tools:
        assert response.texts == {0: TEXT}
        assert response.calls == {}
    else:
        [(name, arguments)] = response.calls.values()
        assert (name, json.loads(arguments)) == (TOOL, json.loads("".join(ARGUMENTS)))
        assert response.texts[0] == ""
        assert response.reasons == {0: capable_client.finish_reasons["tool_calls"]}
