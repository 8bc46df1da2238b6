"""``repr`` of each object of a running request is one line of its state, with no key or prompt."""

import asyncio
import gc
import hashlib
from collections.abc import Iterator
from typing import Final

import uvloop

from backends.deadline_timer import DeadlineTimer
from backends.http.client import AsyncioHttpClient
from backends.http.connection import Http1Response, HttpConnection
from backends.pool.attempt import Attempt
from backends.pool.circuit_breaker import WorkerHealth
from backends.pool.discovery import WorkerDiscovery
from backends.pool.health_check import HealthChecker
from backends.pool.pool import PoolBackend
from backends.pool.worker_state import WorkerState
from backends.pool.workers import WorkerPool
from backends.write_batching import WriteBatcher
from gateway.config.loader import load_text
from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import ClientConnection
from gateway.http_server.listener import Listener
from gateway.http_server.overload import ConnectionTracker
from gateway.http_server.parser import RequestParser
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.handler import RequestHandler
from gateway.pipeline.responder import Responder
from gateway.pipeline.state import RequestState
from gateway.pipeline.strategies import TargetAttempt
from gateway.runtime.gateway import build_services
from gateway.runtime.snapshot import ConfigSnapshot
from protocols.chat.decoder import GenerationDecoder
from protocols.passthrough_readers import StreamPassthroughReader
from tests.integration.test_call_counts import CONFIG, build_token_chunk
from tests.support.fakes import CHUNKED

KEY: Final = "sk-never-shown"
PROMPT: Final = "a prompt that no line shows"
BODY: Final = (
    f'{{"model":"mock","stream":true,"messages":[{{"role":"user","content":"{PROMPT}"}}]}}'
)
REQUEST: Final = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {KEY}\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n{BODY}"
).encode()
TRACKER: Final = "<ConnectionTracker 1 connections, 0 idle, 0 waiting for their client>"
EXPECTED: Final = {
    ClientConnection: "<ClientConnection 127.0.0.1, in response, 0 requests queued>",
    RequestParser: "<RequestParser next head>",
    RequestHandler: "<RequestHandler 1 requests running>",
    Dispatcher: "<Dispatcher 1 requests running>",
    RequestState: "<RequestState {id} POST /v1/chat/completions, mock@1 []>",
    TargetAttempt: "<TargetAttempt {id} at mock@1, passed through>",
    Responder: "<Responder begun for <RequestState {id} POST /v1/chat/completions, mock@1 []>>",
    PoolBackend: "<PoolBackend openai, <WorkerPool 1 workers, 1 requests in flight, 0 queued>>",
    WorkerPool: "<WorkerPool 1 workers, 1 requests in flight, 0 queued>",
    WorkerState: "<WorkerState {url}, up, 1 in flight>",
    Attempt: "<Attempt at {url}, accepted>",
    AsyncioHttpClient: (
        "<AsyncioHttpClient [<_HostConnectionPool {host}, 1 connections open, 0 of them idle>]>"
    ),
    HttpConnection: "<HttpConnection <Http1Response 200, incomplete>>",
    Http1Response: "<Http1Response 200, incomplete>",
    StreamPassthroughReader: "<StreamPassthroughReader forwarding, 0 bytes pending>",
    GenerationDecoder: "<GenerationDecoder 1 choices, 0 ended>",
    DeadlineTimer: "<DeadlineTimer 1 targets>",
    WriteBatcher: "<WriteBatcher 0 writes pending>",
    Listener: f"<Listener 1 requests running, {TRACKER}>",
    ConnectionTracker: TRACKER,
    WorkerHealth: "<WorkerHealth healthy>",
    WorkerDiscovery: "<WorkerDiscovery pool, 1 workers, 0 of 0 sources failing>",
    HealthChecker: "<HealthChecker 1 workers>",
}


def find_objects(existing: set[int]) -> Iterator[object]:
    """Yield the objects of the classes in EXPECTED whose ids are not in ``existing``."""
    for one in gc.get_objects():
        if type(one) in EXPECTED and id(one) not in existing:
            yield one


async def collect_states() -> tuple[list[str], str, str]:
    """Run a stream; return what its objects show, its id and the worker's URL."""
    event = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Stream three tokens, and end when ``event`` is set."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.close()
            return
        writer.write(CHUNKED + b"".join(build_token_chunk("chat", n) for n in (1, 2, 3)))
        await event.wait()
        writer.close()

    worker = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{worker.sockets[0].getsockname()[1]}"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    text = CONFIG.format(protocol="openai", more="", url=url, digest=digest)
    existing = {id(one) for one in gc.get_objects() if type(one) in EXPECTED}
    snapshot = ConfigSnapshot(load_text(text, "test.yaml", env={}), build_services())
    [listener_id] = snapshot.handlers
    listener = Listener(snapshot.get_handler(listener_id), ServerLimitsConfig(connections=9))
    [backend] = snapshot.backends.values()
    await backend.start()
    port = await listener.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"token3.")
    shown = [repr(one) for one in find_objects(existing)]
    request_id = head.decode().partition("x-request-id: ")[2].partition("\r\n")[0]
    event.set()
    writer.close()
    await listener.drain(1)
    await listener.close()
    await backend.aclose()
    worker.close()
    return shown, request_id, url


def test_every_stateful_object_of_a_stream_shows_its_state() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        shown, request_id, url = runner.run(collect_states())

    values = {"id": request_id, "url": url, "host": url.removeprefix("http://")}
    for text in EXPECTED.values():
        assert text.format(**values) in shown
    assert not [one for one in shown if KEY in one or PROMPT in one or len(one) > 200]
