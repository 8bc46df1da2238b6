"""A setting of a model changes nothing of an answer but what it names.

The answers of the property tests, each with an unknown key at each level, reach a client of the
worker's protocol alike from a plain model, one with a limit and a default, and a strict one.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.conftest import Serve
from tests.property.test_unknown_keys import add_key, list_places
from tests.property.test_unknown_response_keys import CLIENTS, STREAMS, WHOLE, join_events
from tests.support.fakes import Reply, ScriptedWorker

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"limits": {"max_tokens": 50}, "defaults": {"temperature": 0.5}},
    "strict": {"on_loss": "reject"},
}

IDENTITIES = re.compile(
    r'"(created|created_at|completed_at|max_output_tokens|temperature)":[0-9.]+|'
    r'"(\w+)":(?:50|0\.5|null)|\b[a-z]{2,9}[_-][0-9a-f]{8,}\b|[0-9a-f]{32}|[0-9a-f]{24}-[0-9a-f]{8}-[0-9a-f]+'
)
"""Ids and times of the gateway, and what the limit and the default name."""


class ChangingWorker(ScriptedWorker):
    """Gives the answer that was set last."""

    answer: Reply = ()

    def select_reply(self, body: bytes) -> Reply:
        """The answer to each request."""
        del body
        return self.answer


def build_reply(name: str, place: Sequence[Any], *, stream: bool) -> Reply:
    if stream:
        events = list(STREAMS[name])
        events[place[0]] = add_key(events[place[0]], tuple(place[1:]))
        body, kind = join_events(name, events), "text/event-stream"
    else:
        body = msgspec.json.encode(add_key(WHOLE[name], tuple(place)))
        kind = "application/json"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", WHOLE)
async def test_answers_of_all_models_are_equal(serve: Serve, name: str, *, stream: bool) -> None:
    protocol = "openai" if name == "responses" else name
    options = {"worker_api": "responses"} if name == "responses" else {}
    path, fields = CLIENTS[name]
    async with ChangingWorker() as worker:
        pool = {"protocol": protocol, "workers": [worker.url], "options": options}
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": [protocol]}],
            "backends": {"w": pool | {"health": {"interval": "1h"}}},
            "models": {model: {"backend": "w"} | one for model, one in MODELS.items()},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        gateway = await serve(json.dumps(config))
        different = []
        for place in list_places(STREAMS[name] if stream else WHOLE[name]):
            worker.answer = build_reply(name, place, stream=stream)
            seen = set()
            for model in MODELS:
                body = {"model": model, "stream": stream, **fields}
                reply = await gateway.http.post(path.replace("/m/", f"/{model}/"), json=body)
                lost = reply.headers.get("x-interlingua-loss", "")
                text = IDENTITIES.sub("", reply.text.replace(f'"{model}"', '"m"'))
                seen.add((reply.status_code, lost, text))
            if len(seen) > 1:
                different.append((place, seen))

    assert different == []
