"""Streams of every protocol, heard word by word while they come."""

import asyncio
import re

from tests.conftest import RunningGateway
from tests.fault.protocol_clients import Client, wait_until
from tests.fault.worker_process import format_word
from tests.integration.test_end_to_end import JSON

_LATE = b"Engine callback timeout"
"""How MindIE tells of a worker's silence, and of that only."""
_WORD = re.compile(rb"t(\d+)\.* ")


class StreamingRequest:
    """One request, sent at once, and what came of its answer so far."""

    def __init__(
        self, front: RunningGateway, client: Client, model: str = "m", *, stream: bool = True
    ) -> None:
        self.client = client
        self.data = bytearray()
        self.times: list[float] = []
        """When something came, on the event loop's clock."""
        self.status = 0
        self._front = front
        self._asks = client.way.call(model, stream=stream)
        self.task = asyncio.get_running_loop().create_task(self._listen())

    @property
    def words(self) -> list[int]:
        """The numbers of the words that came, in their order."""
        return [int(number) for number in _WORD.findall(self.data)]

    @property
    def is_complete(self) -> bool:
        """Whether it ended as a good answer does in its protocol."""
        client = self.client
        return (
            self.status == 200 and client.ends in self.data and client.error_text not in self.data
        )

    @property
    def has_error(self) -> bool:
        """Whether an error follows what came, and nothing looks like an end."""
        client = self.client
        rest = self.data[max(map(self.data.rfind, map(_encode_word, self.words)), default=0) :]
        ended = client.ends and client.ends in self.data
        reported = client.error_text in rest or (client.name.startswith("mindie") and _LATE in rest)
        return self.status == 200 and reported and not ended

    async def _listen(self) -> None:
        path, body = self._asks
        async with self._front.http.stream("POST", path, content=body, headers=JSON) as answer:
            self.status = answer.status_code
            async for data in answer.aiter_raw():
                self.data += data
                self.times.append(asyncio.get_running_loop().time())


def _encode_word(number: int) -> bytes:
    return format_word(number).rstrip().encode()


async def wait_for_word(hearings: list[StreamingRequest], number: int) -> None:
    """Waits until the word of this number has come in each."""
    await wait_until(lambda: all(number in one.words for one in hearings))


async def wait_for_end(hearings: list[StreamingRequest], within: float) -> None:
    """Waits until each answer has ended. Raises TimeoutError."""
    async with asyncio.timeout(within):
        await asyncio.gather(*(one.task for one in hearings))
