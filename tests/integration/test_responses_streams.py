"""Streams of the Responses API from a chat worker that is silent, breaks off, or lacks features."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import RunningGateway, Serve
from tests.support.chat_worker import Answer, ChatWorker

PATH = "/v1/responses"


async def serve_worker(serve: Serve, worker: ChatWorker, listener: str) -> RunningGateway:
    return await serve(
        f"""\
listeners: [{{address: "127.0.0.1:0", protocols: [{listener}]}}]
backends: {{o: {{protocol: openai, profile: openai, workers: ["{worker.url}"]}}}}
models: {{m: {{backend: o}}}}
"""
    )


async def stream(gateway: RunningGateway, path: str = PATH, **fields: Any) -> list[Any]:
    body = {"model": "m", "input": "hi", "stream": True, **fields}
    async with gateway.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        return [json.loads(line[6:]) async for line in answer.aiter_lines() if line[:5] == "data:"]


async def test_silent_worker_is_bridged_by_events(serve: Serve) -> None:
    """Given a worker that is silent before and within its answer."""
    script = Answer(text=(0.7, "a", 0.5, "b"))
    async with ChatWorker(lambda body: script) as worker:
        gateway = await serve_worker(serve, worker, "{name: openai, heartbeat_interval: 0.1}")
        events = await stream(gateway)

    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    first, last = (i for i, kind in enumerate(kinds) if kind == "response.output_text.delta")
    assert "response.in_progress" in kinds[2:first]
    assert "response.in_progress" in kinds[first:last]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    states = [event for event in events if event["type"] == "response.in_progress"]
    assert {(one["response"]["id"], one["response"]["status"]) for one in states} == {
        (events[0]["response"]["id"], "in_progress")
    }


@pytest.mark.parametrize(
    ("protocol", "path", "body"),
    [
        ("openai", PATH, {"input": "hi"}),
        (
            "anthropic",
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        ),
    ],
)
async def test_heartbeats_arrive_while_the_worker_is_silent_before_its_first_token(
    serve: Serve, protocol: str, path: str, body: dict[str, Any]
) -> None:
    """Given a worker that says nothing until the client has seen a sign of life."""
    seen = asyncio.Event()

    class SilentWorker(ChatWorker):
        async def _serve(self, request: web.Request) -> web.StreamResponse:
            await seen.wait()
            return await super()._serve(request)

    async with SilentWorker(lambda body: Answer(text=("a",))) as worker:
        name = f"{{name: {protocol}, heartbeat_interval: 0.1}}"
        gateway = await serve_worker(serve, worker, name)
        sent = {"model": "m", "stream": True, **body}
        async with gateway.http.stream("POST", path, json=sent) as answer:
            chunks = answer.aiter_raw()
            first = await anext(chunks)
            seen.set()
            rest = b"".join([chunk async for chunk in chunks])

    assert b"response.in_progress" in first or b"message_start" in first
    assert b'"a"' in rest


async def test_no_heartbeats_by_default_in_a_short_silence(serve: Serve) -> None:
    script = Answer(text=("a", 0.3, "b"))
    async with ChatWorker(lambda body: script) as worker:
        events = await stream(await serve_worker(serve, worker, "openai"))

    assert [event["type"] for event in events].count("response.in_progress") == 1


async def test_failed_response_is_stored(serve: Serve) -> None:
    """Given a worker that closes the connection after some text."""
    script = Answer(text=("a", None))
    async with ChatWorker(lambda body: script) as worker:
        gateway = await serve_worker(serve, worker, "openai")
        events = await stream(gateway)
        failed = events[-1]["response"]
        stored = await gateway.http.get(f"{PATH}/{failed['id']}")
        unstored = (await stream(gateway, store=False))[-1]["response"]
        missing = await gateway.http.get(f"{PATH}/{unstored['id']}")

    assert (events[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert stored.json() == failed
    assert missing.status_code == 404


@pytest.mark.parametrize("stream_", [False, True])
async def test_truncation_that_the_worker_lacks_is_reported(serve: Serve, stream_: bool) -> None:
    """Given a worker of OpenAI's chat completions, which can't drop the oldest items."""
    async with ChatWorker(lambda body: Answer(text=("ok",))) as worker:
        gateway = await serve_worker(serve, worker, "openai")
        body = {"model": "m", "input": "hi", "truncation": "auto", "stream": stream_}
        answer = await gateway.http.post(PATH, json=body)
        plain = await gateway.http.post(PATH, json={**body, "truncation": "disabled"})

    assert answer.status_code == 200
    assert answer.headers["x-interlingua-loss"] == "truncation=dropped"
    assert "x-interlingua-loss" not in plain.headers


@pytest.mark.parametrize(
    ("listener", "path"),
    [
        ("databricks, openai", "/serving-endpoints/responses"),
        (
            "{name: openai, profile: azure}",
            "/openai/responses?api-version=2025-04-01-preview",
        ),
        ("{name: openai, profile: azure}", "/openai/v1/responses"),
    ],
)
async def test_paths_of_other_services(serve: Serve, listener: str, path: str) -> None:
    async with ChatWorker(lambda body: Answer(text=("ok",))) as worker:
        gateway = await serve_worker(serve, worker, listener)
        answer = await gateway.http.post(path, json={"model": "m", "input": "hi"})
        events = await stream(gateway, path)

    assert answer.status_code == 200
    assert answer.json()["output"][0]["content"][0]["text"] == "ok"
    assert events[-1]["type"] == "response.completed"
