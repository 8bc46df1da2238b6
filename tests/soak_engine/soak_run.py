"""Many short requests to the engine, and what must hold throughout.

Each request ends exactly once: with an end of each choice and a last event, with an error of the
gateway, or by its client's disconnect. Whenever no request runs, nothing is held.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing

import click
from msgspec import Struct

from backends.interfaces import Deadline, PreparedRequest, RequestContext, ignore_memory
from backends.torch.backend import TorchBackend
from backends.torch.engine_client import EngineProcess
from protocols.core.errors import GatewayError
from protocols.core.events import ChoiceEnd, Event, StreamEnd, Usage
from protocols.core.request import GenerationRequest
from tests.bench_engine.cost import measure_process_memory, measure_tree_memory
from tests.soak_engine.random_requests import draw_request

TOGETHER = 24
"""Concurrent requests; the engine has slots for 16 choices."""
LEAVING = 0.25
"""The share of clients that disconnect early."""
HURRIED = 0.03
"""The share of requests with a very short deadline."""
SETTLED = 30.0
"""Seconds in which everything must be released."""
SLACK = 24 << 20
"""Bytes by which a process may grow from the first counted checkpoint to the last.

An allocator does not return everything, and tables reach their size.
"""


class Checkpoint(Struct, frozen=True):
    """The state when no request runs."""

    requests: int
    gateway_memory: int
    """Bytes of the gateway's process."""
    engine: int
    tasks: int


class Soak:
    """A soak: its random numbers, counts and checkpoints."""

    def __init__(self, backend: TorchBackend, seed: int, say: Callable[[str], None]) -> None:
        self._backend = backend
        self._dice = random.Random(seed)
        self._say = say
        self.ends: Counter[str] = Counter()
        self.checkpoints: list[Checkpoint] = []

    async def run(self, requests: int, checkpoints: int) -> None:
        """Send requests, with checkpoints between them. Raises AssertionError where one fails."""
        process = self._backend.process
        each = -(-requests // checkpoints)
        for start in range(0, requests, each):
            await self._some(min(each, requests - start))
            await self._check(start + each)
        assert self._backend.process is process, "the engine was restarted"

    async def _some(self, count: int) -> None:
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                request = draw_request(self._dice)
                seconds = 0.01 if self._dice.random() < HURRIED else 60.0
                disconnect_after = (
                    self._dice.randrange(8) if self._dice.random() < LEAVING else None
                )
                self.ends[await self._one(request, seconds, disconnect_after)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(TOGETHER):
                group.create_task(client())

    async def _one(
        self, request: GenerationRequest, seconds: float, disconnect_after: int | None
    ) -> str:
        """Send one request and return how it ended."""
        events: list[Event] = []
        context = RequestContext(
            "soak", Deadline(time.monotonic, seconds), time.monotonic, ignore_memory
        )
        number = 0
        try:
            async with aclosing(self._backend.send(PreparedRequest(request), context)) as response:
                async for _, batch in response:
                    events.extend(batch)
                    if number == disconnect_after:
                        return "left"
                    number += 1
        except GatewayError as error:
            assert not any(isinstance(event, StreamEnd) for event in events)
            return type(error).__name__
        check_complete(request, events)
        return "done"

    async def _check(self, requests: int) -> None:
        """Assert that nothing is held while no request runs."""
        process = self._backend.process
        assert process is not None
        assert process.pid is not None
        end = time.monotonic() + SETTLED
        await wait_for_heartbeats(process, 2)
        while held := (process.active, process.waiting, process.stats.used_blocks):
            if held == (0, 0, 0):
                break
            assert time.monotonic() < end, f"rows, waiting and blocks still held: {held}"
            await asyncio.sleep(0.2)
        assert not process._queues
        checkpoint = Checkpoint(
            requests,
            measure_process_memory(os.getpid()),
            measure_tree_memory(process.pid),
            len(asyncio.all_tasks()),
        )
        self.checkpoints.append(checkpoint)
        self._say(
            f"{requests} requests: gateway {checkpoint.gateway_memory >> 20} MB, "
            f"engine {checkpoint.engine >> 20} MB, "
            f"{checkpoint.tasks} tasks, {process.stats.steps} steps, {dict(self.ends)}"
        )


async def wait_for_heartbeats(process: EngineProcess, count: int) -> None:
    """Wait for this many heartbeats, so that their statistics are current."""
    for _ in range(count):
        last = process.stats
        while process.stats is last:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)


def check_complete(request: GenerationRequest, events: Sequence[Event]) -> None:
    """A complete response has an end of each choice, a last usage, and one end, which is last."""
    ends = Counter(event.index for event in events if isinstance(event, ChoiceEnd))
    assert ends == Counter(range(request.n or 1)), ends
    assert [type(event) for event in events].count(StreamEnd) == 1
    assert isinstance(events[-1], StreamEnd)
    assert any(isinstance(event, Usage) for event in events)


def check_flat(checkpoints: Sequence[Checkpoint], warm: int) -> None:
    """Memory and tasks have not grown since the ``warm``-th checkpoint."""
    first, last = checkpoints[warm], checkpoints[-1]
    assert last.tasks == first.tasks
    assert last.gateway_memory - first.gateway_memory < SLACK, "the gateway's memory grows"
    assert last.engine - first.engine < SLACK, "the engine's memory grows"


async def run_soak(path: str, requests: int, checkpoints: int, seed: int) -> Soak:
    """Run a soak with the model in this folder."""
    backend = TorchBackend(path=path, threads=1, max_concurrency=16, queue=64)
    await backend.start()
    try:
        await backend.warm_up()
        one = Soak(backend, seed, click.echo)
        await one.run(requests, checkpoints)
    finally:
        await backend.aclose()
    return one
