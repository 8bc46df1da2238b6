"""Clients that send requests at a fixed rate and record what they observe.

async with LoadGenerator(gateway.port) as load:
    await load.run(rate=200, until=event)
load.observations
"""

import asyncio
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp

from tests.fault.history import ClientObservation, ObservedEnd
from tests.fault.protocol_clients import CLIENTS, Client
from tests.integration.test_end_to_end import JSON

_WORD = re.compile(rb"t(\d+) ")
PATIENCE = 60.0
"""Seconds after which a request without a response counts as lost."""


class LoadGenerator:
    """Sends requests in every protocol in turn, streamed and unary.

    One of every ``disconnect_every`` requests disconnects after its first word; 0: none.
    """

    def __init__(
        self, port: int, clients: Sequence[Client] = CLIENTS, *, disconnect_every: int = 0
    ) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._clients = clients
        self._disconnect_every = disconnect_every
        self._number = 0
        self.observations: list[ClientObservation] = []
        self.rate = 0.0
        """The measured rate in requests per second."""

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        limits = aiohttp.ClientTimeout(total=PATIENCE)
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def run(self, rate: float, until: asyncio.Event) -> None:
        """Send ``rate`` requests per second until the event, then wait for all responses."""
        loop = asyncio.get_running_loop()
        began, first = loop.time(), self._number
        async with asyncio.TaskGroup() as tasks:
            while not until.is_set():
                due = began + (self._number - first) / rate
                if (left := due - loop.time()) > 0:
                    await asyncio.sleep(left)
                tasks.create_task(self.one(self._number))
                self._number += 1
            self.rate = (self._number - first) / (loop.time() - began)

    async def one(self, number: int) -> None:
        """Send the request of this number."""
        client = self._clients[number % len(self._clients)]
        stream = number // len(self._clients) % 2 == 0
        disconnects = bool(self._disconnect_every) and number % self._disconnect_every == 1
        path, body = client.protocol.call("m", stream=stream)
        headers = JSON | {"x-request-id": f"q{number}"}
        end: ObservedEnd = "cut"
        status, received = 0, b""
        try:
            async with self._session.post(self._url + path, data=body, headers=headers) as response:
                status = response.status
                async for data in response.content.iter_any():
                    received += data
                    if disconnects and _WORD.search(received):
                        end = "left"
                        response.close()
                        break
                else:
                    end = _classify_response(client, status, received, stream=stream)
        except (aiohttp.ClientError, TimeoutError):
            pass  # remains "cut"
        words = tuple(int(word) for word in _WORD.findall(received))
        self.observations.append(
            ClientObservation(f"q{number}", client.name, stream, end, status, len(received), words)
        )


def _classify_response(client: Client, status: int, data: bytes, *, stream: bool) -> ObservedEnd:
    """Classify a response whose body is complete in HTTP."""
    if status != 200:
        return "error" if data else "cut"
    if not stream:
        return "complete"
    if client.error_text in data:
        return "error event"
    return "complete" if client.ends in data else "cut"
