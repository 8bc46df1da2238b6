"""A streaming request in any protocol whose words are read as they arrive."""

import asyncio
import re

from tests.conftest import RunningGateway
from tests.fault.protocol_clients import Client
from tests.fault.worker_process import format_word
from tests.integration.test_end_to_end import JSON
from tests.support.waiting import PATIENCE, wait_until

_LATE = b"Engine callback timeout"
"""MindIE's text for a worker that is silent, and only for that."""
_WORD = re.compile(rb"t(\d+)\.* ")


class StreamingRequest:
    """A request that is sent at once, and its response so far."""

    def __init__(
        self, gateway: RunningGateway, client: Client, model: str = "m", *, stream: bool = True
    ) -> None:
        self.client = client
        self.data = bytearray()
        self.times: list[float] = []
        """When data arrived, on the event loop's clock."""
        self.status = 0
        self._front = gateway
        self._asks = client.protocol.call(model, stream=stream)
        self.task = asyncio.get_running_loop().create_task(self._listen())

    @property
    def words(self) -> list[int]:
        """The numbers of the words received, in order."""
        return [int(number) for number in _WORD.findall(self.data)]

    @property
    def is_complete(self) -> bool:
        """Whether the response ended without an error in its protocol."""
        client = self.client
        return (
            self.status == 200 and client.ends in self.data and client.error_text not in self.data
        )

    @property
    def has_error(self) -> bool:
        """Whether an error follows the text, without an end mark."""
        client = self.client
        rest = self.data[max(map(self.data.rfind, map(_encode_word, self.words)), default=0) :]
        ended = client.ends and client.ends in self.data
        reported = client.error_text in rest or (client.name.startswith("mindie") and _LATE in rest)
        return self.status == 200 and reported and not ended

    async def _listen(self) -> None:
        path, body = self._asks
        async with self._front.http.stream("POST", path, content=body, headers=JSON) as response:
            self.status = response.status_code
            async for data in response.aiter_raw():
                self.data += data
                self.times.append(asyncio.get_running_loop().time())


def _encode_word(number: int) -> bytes:
    return format_word(number).rstrip().encode()


async def wait_for_word(hearings: list[StreamingRequest], number: int) -> None:
    """Wait until each response has the word of this number."""
    await wait_until(lambda: all(number in one.words for one in hearings))


async def wait_for_end(hearings: list[StreamingRequest]) -> None:
    """Wait until each response has ended. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(one.task for one in hearings))
