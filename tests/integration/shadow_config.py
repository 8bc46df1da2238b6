"""Gateways that shadow requests, and the workers that they shadow to."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
from msgspec import Struct
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.pipeline.shadow import ShadowManager
from gateway.pipeline.shadow_comparison import ShadowComparison
from gateway.runtime.gateway import Gateway, build_services
from tests.support.fakes import (
    CHUNKED,
    CLOSE,
    HANG,
    RESET,
    Reply,
    ScriptedWorker,
    chunk,
    chunked,
    make_reply,
)
from tests.support.waiting import PATIENCE

LISTEN = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, triton]}]
limits: {drain_timeout: 0s}
"""
SHADOW = 'shadow: {to: "2", share: 100%}'
NO_SHADOW = "protocol: openai"
"""Replaces SHADOW in a configuration without a shadow."""
ECHO = (
    LISTEN
    + """
backends:
  one: {kind: echo, script: [a, b, c]}
  two: {kind: echo, script: [SCRIPT]}
models:
  chat: {versions: {"1": {backend: one}, "2": {backend: two}}, split: {weights: {"1": 1, "2": 0}},
         SHADOW}
"""
)
WORKER_AS_SHADOW = (
    LISTEN
    + """
backends:
  one: {kind: echo, script: [a, b, c], delay: 5ms}
  tried: {protocol: PROTOCOL, workers: [WORKERS], health: {interval: 1h}, timeouts: {connect: 1s}}
models:
  chat: {versions: {"1": {backend: one}, "2": {backend: tried, model: new}},
         split: {weights: {"1": 1, "2": 0}}, SHADOW}
"""
)
ECHO_AS_SHADOW = WORKER_AS_SHADOW.replace("tried, model: new}}", "one}}").replace(
    '"1": {backend: one}', '"1": {backend: tried, model: new}'
)
"""The worker serves clients, and the echo backend is the shadow target."""


def build_echo_config(script: str = "a, b, c", shadow: str = SHADOW) -> str:
    return ECHO.replace("SCRIPT", script).replace("SHADOW", shadow)


def build_worker_config(
    *workers: ScriptedWorker,
    protocol: str = "openai",
    shadow: str = SHADOW,
    text: str = WORKER_AS_SHADOW,
) -> str:
    urls = ", ".join(f'"{worker.url}"' for worker in workers)
    return text.replace("PROTOCOL", protocol).replace("WORKERS", urls).replace("SHADOW", shadow)


HELLO = [{"role": "user", "content": "hi"}]
CHUNK = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"new","choices":[%s]}'


def build_text_event(text: str | None = None, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = json.dumps({"index": 0, "delta": delta, "finish_reason": finish})
    return b"data: " + (CHUNK % choice).encode() + b"\n\n"


STREAM = [
    build_text_event("a"),
    build_text_event("b"),
    build_text_event("c"),
    build_text_event(finish="stop"),
    b"data: [DONE]\n\n",
]


class ShadowGateway(Struct):
    """A running gateway, its request records and its shadow comparisons."""

    app: Gateway
    urls: list[str]
    http: httpx.AsyncClient
    shadows: ShadowManager
    records: list[RequestRecord]
    comparisons: list[ShadowComparison]
    more: asyncio.Event

    async def wait_for_comparison(self, times: int = 1) -> ShadowComparison:
        """Wait for ``times`` comparisons and return the last."""
        async with asyncio.timeout(PATIENCE):
            while len(self.comparisons) < times:
                self.more.clear()
                await self.more.wait()
        return self.comparisons[-1]

    async def stop(self) -> None:
        if not self.http.is_closed:
            await self.http.aclose()
            await self.app.stop()

    async def ask(
        self, headers: Mapping[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        body = {"model": "chat", "messages": HELLO, "temperature": 0, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)


StartGateway = Callable[[str], Awaitable[ShadowGateway]]


@asynccontextmanager
async def run_gateways() -> AsyncIterator[StartGateway]:
    """Start gateways; stop all of them at the end."""
    running: list[ShadowGateway] = []

    async def start(text: str) -> ShadowGateway:
        records: list[RequestRecord] = []
        comparisons: list[ShadowComparison] = []
        second_worker = asyncio.Event()
        shadows = ShadowManager(time.monotonic, comparisons.append, lambda _: second_worker.set())
        numbers = iter(range(1000))
        outside = replace(
            build_services(),
            observe_request=records.append,
            shadow_manager=shadows,
            wall_clock=lambda: 1_700_000_000.0,
            new_id=lambda: f"id-{next(numbers)}",
        )
        app = Gateway(load_text(text, "test.yaml", env=os.environ), outside)
        urls = await app.start()
        http = httpx.AsyncClient(base_url=urls[0], timeout=30)
        running.append(ShadowGateway(app, urls, http, shadows, records, comparisons, second_worker))
        return running[-1]

    yield start
    for one in running:
        await one.stop()


def get_visible_response(answer: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    """Return what a client sees of a response, without dates and times."""
    times = ("date", "openai-processing-ms")
    headers = {name: text for name, text in answer.headers.items() if name not in times}
    return answer.status_code, answer.content, headers


FLOOD = [build_text_event("x" * 50_000)] * 40
FAULTY_REPLIES: dict[str, Reply] = {
    "sends nothing": [HANG],
    "hangs in the headers": [b"HTTP/1.1 200 OK\r\n", HANG],
    "hangs in the stream": [CHUNKED + chunk(STREAM[0]), HANG],
    "closes the connection": [CLOSE],
    "resets the connection": [RESET],
    "closes in the stream": [CHUNKED + chunk(STREAM[0]), CLOSE],
    "omits the end of the stream": [chunked(*STREAM[:3])],
    "answers 500": [make_reply(b'{"error":{"message":"broken"}}', "500 Internal Server Error")],
    "answers 429": [make_reply(b'{"error":{"message":"slow"}}', "429 Too Many Requests")],
    "answers 400": [make_reply(b'{"error":{"message":"no"}}', "400 Bad Request")],
    "sends an invalid event": [chunked(b"data: nonsense\n\n")],
    "sends no HTTP": [b"hello\r\n\r\n"],
    "sends 2 MB": [chunked(*FLOOD, *STREAM)],
    "pauses": [
        CHUNKED + chunk(STREAM[0]),
        0.2,
        b"".join(map(chunk, STREAM[1:])) + b"0\r\n\r\n",
    ],
}
SUCCEEDING = ("sends 2 MB", "pauses")
