"""A worker that answers in steps, so that load is counted and not timed.

It holds all requests that it gets and answers them when the test says so.
"""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from tests.fault.history import WorkerLogLine
from tests.fault.protocol_clients import STREAM, UNARY_RESPONSE, WELL
from tests.support.tcp_server import run_server


class SteppedWorker:
    """``inside`` are the requests held now, ``sizes`` those of all bodies in order.

    ``lines`` is its log.
    """

    def __init__(self) -> None:
        self.inside: list[asyncio.Future[None]] = []
        self.sizes: list[int] = []
        self.lines: list[WorkerLogLine] = []
        self.most = 0
        self.url = ""
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.url = await self._open.enter_async_context(run_server(self._serve))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.step()
        await self._open.aclose()

    def step(self) -> None:
        """Answer all requests held."""
        for one in self.inside:
            one.set_result(None)
        self.inside = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get"):
                writer.write(WELL)
                continue
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            self.sizes.append(length)
            id_ = head.partition(b"x-request-id:")[2].partition(b"\r\n")[0].strip().decode()
            self.lines.append(WorkerLogLine(id_, "received"))
            mine = asyncio.get_running_loop().create_future()
            self.inside.append(mine)
            self.most = max(self.most, len(self.inside))
            await mine
            writer.write(STREAM if b'"stream":true' in body else UNARY_RESPONSE)
            self.lines.append(WorkerLogLine(id_, "completed"))
