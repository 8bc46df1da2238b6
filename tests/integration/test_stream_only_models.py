"""A Triton model that answers generate with an error, since it may only be streamed.

Its stream is collected for clients that asked for none, also in pass-through.
"""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

REFUSAL = json.dumps(
    {
        "error": "generate expects model to produce exactly 1 response, use generate stream for "
        "model that generates various number of responses"
    }
).encode()
PIECES: tuple[dict[str, Any], ...] = (
    {"model_name": "w", "text_output": "a", "SCORES": [["x"], 1]},
    {"model_name": "w", "text_output": "b", "SCORES": [["y"], 2]},
)
STREAM = make_reply(
    b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in PIECES),
    content_type="text/event-stream",
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def build_config(url: str, protocol: str) -> str:
    return json.dumps(
        {
            "listeners": [{"address": "127.0.0.1:0", "protocols": [protocol]}],
            "backends": {"w": {"protocol": "triton", "workers": [url]}},
            "models": {"m": {"backend": "w", "model": "w"}},
        }
    )


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
async def test_the_stream_is_collected_and_the_model_is_known_from_then_on(
    serve: Serve, status: str
) -> None:
    replies = ([make_reply(REFUSAL, status)], [STREAM], [STREAM])
    async with ScriptedWorker(*replies) as worker:
        front = await serve(build_config(worker.url, "openai"))
        answers = [await front.http.post("/v1/chat/completions", json=CHAT) for _ in range(2)]

    texts = [one.json()["choices"][0]["message"]["content"] for one in answers]
    assert texts == ["ab", "ab"]
    paths = [one.path.rpartition("/")[2] for one in worker.requests]
    assert paths == ["generate", "generate_stream", "generate_stream"]


async def test_pass_through_keeps_each_output_of_the_collected_stream(serve: Serve) -> None:
    replies = ([make_reply(REFUSAL)], [STREAM])
    async with ScriptedWorker(*replies) as worker:
        front = await serve(build_config(worker.url, "triton"))
        body = {"text_input": "hi", "x": 1}
        answer = await front.http.post("/v2/models/m/generate", json=body)

    assert answer.json() == {"model_name": "m", "text_output": "ab", "SCORES": [["xy"], 2]}
    assert json.loads(worker.requests[-1].body) == body


async def test_an_error_in_the_collected_stream_is_the_response(serve: Serve) -> None:
    broken = make_reply(
        b'data: {"text_output":"a"}\n\ndata: {"error":"out of memory"}\n\n',
        content_type="text/event-stream",
    )
    replies = ([make_reply(REFUSAL)], [broken])
    async with ScriptedWorker(*replies) as worker:
        front = await serve(build_config(worker.url, "triton"))
        answer = await front.http.post("/v2/models/m/generate", json={"text_input": "hi"})

    assert answer.json() == {"error": "out of memory"}


async def test_a_stream_that_is_not_json_is_a_worker_failure(serve: Serve) -> None:
    broken = make_reply(b"data: no\n\n", content_type="text/event-stream")
    replies = ([make_reply(REFUSAL)], [broken])
    async with ScriptedWorker(*replies) as worker:
        front = await serve(build_config(worker.url, "triton"))
        answer = await front.http.post("/v2/models/m/generate", json={"text_input": "hi"})

    assert answer.status_code == 400
    assert "can't be read" in answer.json()["error"]
