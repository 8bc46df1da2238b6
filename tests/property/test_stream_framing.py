"""What stands between the events of a worker's stream never changes what a client gets.

Comments, ids, the time to reconnect and event names that a protocol does not use are framing of one
connection: the gateway resumes no stream, so no client can use them.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.runtime.build import build_adapter
from protocols.core.aggregate import aggregate
from protocols.core.events import TextDelta
from protocols.core.interfaces import ClientRequest, ResponseContext
from tests.property.test_unknown_keys import HEADERS, clock
from tests.property.test_unknown_response_keys import (
    CLIENTS,
    PROMPT_CLIENTS,
    PROMPT_STREAMS,
    PROMPT_WORKERS,
    STREAMS,
    WORKERS,
    join_events,
    translate_response,
)
from tests.support.path_routers import get_path_router

RANDOM_ID = re.compile(rb"\b([a-z]{2,4}_)[0-9a-f]{8,}")
TRANSLATED = ("responses", "tgi")
"""Streams that a client of their protocol does not get as they are from these workers."""
FRAMES: Mapping[str, bytes] = {
    "comment": b": ping\n\ndata: ",
    "comment in the event": b": ping\ndata: ",
    "id": b"id: 7\ndata: ",
    "time to reconnect": b"retry: 100\n\ndata: ",
    "event name": b"event: x_later\ndata: ",
    "event name after the data's": b"id: 7\nevent: x_later\n: a\ndata: ",
}


def add_frames(data: bytes, frame: bytes) -> bytes:
    """Return the stream with the lines of ``frame`` before each event."""
    return b"".join(frame + one for one in data.split(b"data: ")[1:])


def translate(
    client: str, worker: Any, data: bytes, *, clients: Any = CLIENTS
) -> tuple[bytes, list[str]]:
    """Return the client's stream without the random parts of ids, and what must be reported."""
    written, lost = translate_response(client, worker, data, stream=True, clients=clients)
    return RANDOM_ID.sub(rb"\1", written), lost


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("worker", STREAMS)
def test_framing_of_a_conversation_changes_nothing(worker: str, client: str, frame: bytes) -> None:
    data = join_events(worker, STREAMS[worker])

    plain = translate(client, WORKERS[worker], data)
    framed = translate(client, WORKERS[worker], add_frames(data, frame))

    assert framed == plain


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("client", PROMPT_CLIENTS)
@pytest.mark.parametrize("worker", PROMPT_STREAMS)
def test_framing_of_a_prompt_changes_nothing(worker: str, client: str, frame: bytes) -> None:
    data = join_events("", PROMPT_STREAMS[worker])
    adapter = PROMPT_WORKERS[worker]

    plain = translate(client, adapter, data, clients=PROMPT_CLIENTS)
    framed = translate(client, adapter, add_frames(data, frame), clients=PROMPT_CLIENTS)

    assert framed == plain


def pass_through(name: str, data: bytes) -> tuple[Any, Any]:
    """Return what a stream that is passed through says: as its reader sees it, and as a client."""
    client: Any = build_adapter(name, None, {})
    path, fields = CLIENTS[name]
    endpoint = get_path_router(client).find_endpoint("POST", path)
    body = msgspec.json.encode({"model": "m", "stream": True, **fields})
    call = ClientRequest(endpoint.endpoint, endpoint.params, HEADERS, "", body, path, "r")
    context = ResponseContext("r", 1, "m", "1", "w", clock)
    passed = WORKERS[name].prepare_passthrough(client, call, context)
    reader = passed.create_reader()
    written, events = reader.feed((data,))
    rest, last = reader.close()
    decoder = WORKERS[name].create_decoder(passed.request)
    shown = [*decoder.feed(written + rest), *decoder.close()]
    read = [
        replace(one, logprobs=()) if isinstance(one, TextDelta) else one for one in (*events, *last)
    ]  # the reader may leave them out: only the client needs them
    return aggregate(read), aggregate(shown).choices


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("name", [one for one in STREAMS if one not in TRANSLATED])
def test_framing_of_a_stream_that_is_passed_through_changes_nothing(
    name: str, frame: bytes
) -> None:
    data = join_events(name, STREAMS[name])

    assert pass_through(name, add_frames(data, frame)) == pass_through(name, data)
