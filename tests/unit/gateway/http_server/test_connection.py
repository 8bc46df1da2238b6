"""A closed connection leaves no objects behind."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import uvloop

from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.connection import ClientConnection
from gateway.http_server.listener import Listener
from gateway.pipeline.http import HttpRequest, ResponseWriter
from tests.support.waiting import PATIENCE

REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


class RequestLocal:
    """A local variable of an abandoned request."""

    def __init__(self, task: asyncio.Task[object] | None) -> None:
        self.task = task


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disables the garbage collector, so that objects are freed by reference counting only."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_abandoned_stream_leaves_no_reference_cycle(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the task with its cancellation error nor the parser refers back."""
    alive = weakref.WeakSet[object]()
    made_parser = ClientConnection.__init__

    def note_parts(self: ClientConnection, *arguments: object) -> None:
        made_parser(self, *arguments)  # type: ignore[arg-type]
        alive.add(self)
        alive.add(self._parser)

    monkeypatch.setattr(ClientConnection, "__init__", note_parts)

    async def stream(http: HttpRequest, writer: ResponseWriter) -> None:
        task = asyncio.current_task()
        held = RequestLocal(task)
        alive.add(held)
        alive.add(task)
        await http.body(10)
        writer.start(200, ())
        writer.write(b"data")
        await writer.drain()
        await asyncio.Event().wait()

    async def abandon() -> None:
        listener = Listener(stream, ServerLimitsConfig())
        port = await listener.listen("127.0.0.1", 0)
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await reader.readuntil(b"data")
            assert len(alive) == 4
            writer.transport.abort()
            async with asyncio.timeout(PATIENCE):
                while alive:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
        await listener.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(abandon())
