"""A stream that has begun keeps its prompt at most once.

Until then the client's body may be needed for a fallback, and the worker's for a retry; afterwards
a long stream of an agent would hold three times its prompt.
"""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.conftest import Serve
from tests.support.fakes import CHUNKED, HANG, ScriptedWorker, chunk

SIZE: Final = 1 << 20
PROMPT: Final = "x" * SIZE
CONFIGURATION: Final = """
listeners:
  - {address: "127.0.0.1:0", protocols: [openai, anthropic, {name: cohere, prefix: /cohere}]}
backends:
  pool: {protocol: %s, workers: ["%s"], health: {interval: 1h}}
models: {m: {backend: pool}}
"""
CHAT: Final = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
TOKEN: Final = CHAT | {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
WORKERS: Final[dict[str, bytes]] = {
    "openai": b"data: " + json.dumps(TOKEN).encode() + b"\n\n",
    "triton": b'data: {"model_name": "m", "model_version": "1", "text_output": "hi"}\n\n',
}
MESSAGES: Final = [{"role": "user", "content": PROMPT}]
CLIENTS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "stream": True},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": MESSAGES, "stream": True},
    "/cohere/v2/chat": {"model": "m", "messages": MESSAGES, "stream": True},
}


@pytest.fixture
def traced_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def open_stream(port: int, path: str, body: bytes) -> asyncio.StreamWriter:
    """Open a stream and wait for its first token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"hi")
    return writer


@pytest.mark.usefixtures("traced_memory")
@pytest.mark.parametrize("protocol", WORKERS)
@pytest.mark.parametrize("path", CLIENTS)
async def test_open_stream_keeps_its_prompt_once(serve: Serve, path: str, protocol: str) -> None:
    body = json.dumps(CLIENTS[path]).encode()
    async with ScriptedWorker([CHUNKED, chunk(WORKERS[protocol]), HANG]) as worker:
        gateway = await serve(CONFIGURATION % (protocol, worker.url))
        before = tracemalloc.get_traced_memory()[0]

        writer = await open_stream(gateway.port, path, body)

        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        writer.close()
    assert held / SIZE < 2.5, "one copy is the worker's of this test, one the decoded prompt"
