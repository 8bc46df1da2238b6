"""Hundreds of thousands of requests, and clients that leave: memory, tasks and descriptors stay.

A gateway stands before another one, which says what it is told to. Requests come in equal parts:
whole answers and streams, translated and relayed; and of the streams that are given up some are
left after their first piece.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression

import msgspec
from msgspec import Struct

from gateway.runtime.process import raise_fd_limit
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.protocol_clients import wait_until

CLIENTS = 16
"""Connections that are kept."""
SLACK = 2 << 20
"""Bytes that memory may seem to grow by chance."""
EACH = 32
"""Bytes that a request may leave: an allocator gives little back."""
FEW = 4
"""Tasks and descriptors that are there by chance: probes, connections that just end."""
_TASKS = re.compile(r"^TASKS (\d+)$", re.MULTILINE)
_COLLECTION = re.compile(r"^LONGEST COLLECTION ([\d.]+) ms$", re.MULTILINE)
_LISTENERS = [{"address": "127.0.0.1:0", "protocols": ["openai", "triton"]}]


class SoakMeasurement(Struct, frozen=True):
    """How the gateway was after so many requests."""

    requests: int
    memory: int
    tasks: int
    descriptors: int

    def text(self) -> str:
        """As it is shown."""
        return (
            f"{self.requests:>8} requests  {self.memory / 2**20:7.1f} MiB"
            f"  {self.tasks:>4} tasks  {self.descriptors:>4} descriptors"
        )


class SoakResult(Struct, frozen=True):
    """All looks, the first once it was warm."""

    looks: Sequence[SoakMeasurement]

    @property
    def slope(self) -> float:
        """Bytes that memory grew by with each request."""
        requests = [float(one.requests) for one in self.looks]
        return linear_regression(requests, [one.memory for one in self.looks]).slope

    def growing(self) -> list[str]:
        """What is not flat."""
        first, last = self.looks[0], self.looks[-1]
        count = last.requests - first.requests
        grown = self.slope * count
        growing_values = []
        if grown > SLACK + EACH * count:
            growing_values.append(f"memory: {grown / 2**20:.1f} MiB in {count} requests")
        for name in ("tasks", "descriptors"):
            before, after = getattr(first, name), getattr(last, name)
            if after > before + FEW:
                growing_values.append(f"{name}: {before} to {after}")
        return growing_values


def _build_request(path: str, body: object, *more: str) -> bytes:
    data = msgspec.json.encode(body)
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


_CHAT = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
CALLS = [
    _build_request("/v1/chat/completions", _CHAT),
    _build_request("/v1/chat/completions", _CHAT | {"stream": True}),
    _build_request("/v2/models/far/generate", {"text_input": "hi", "max_tokens": 4}),
    _build_request(
        "/v2/models/far/generate_stream", {"text_input": "hi", "max_tokens": 4, "stream": True}
    ),
]
"""Relayed and translated, whole and streamed."""
LEFT = _build_request("/v1/chat/completions", _CHAT | {"model": "slow", "stream": True})


async def _head(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    assert head.startswith("http/1.1 200 "), head
    return head


async def _read_response(reader: asyncio.StreamReader) -> None:
    """Read one to its end."""
    head = await _head(reader)
    if match := re.search(r"content-length: (\d+)", head):
        await reader.readexactly(int(match[1]))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


async def _send_requests(port: int, count: int, first: int) -> None:
    """Ask so often, over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for number in range(first, first + count):
            writer.write(CALLS[number % len(CALLS)])
            await _read_response(reader)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _send_and_disconnect(port: int, count: int) -> None:
    """Ask so often, and leave each time when something has come."""
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LEFT)
        await _head(reader)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _run_interval(port: int, requests: int, cancelled: int) -> None:
    """All of an interval's, from ``CLIENTS`` connections at once."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            part = requests // CLIENTS + (number < requests % CLIENTS)
            tasks.create_task(_send_requests(port, part, number))
        for number in range(4):
            tasks.create_task(_send_and_disconnect(port, cancelled // 4 + (number < cancelled % 4)))


async def _request_report(gateway: GatewayProcess) -> None:
    """Have ``task_counter`` write its report."""
    reports = len(_TASKS.findall(gateway.read_output()))
    os.kill(gateway.process.pid, signal.SIGUSR1)
    await wait_until(lambda: len(_TASKS.findall(gateway.read_output())) > reports, 60)


async def _measure(gateway: GatewayProcess, requests: int) -> SoakMeasurement:
    """How it is when nothing runs."""
    await asyncio.sleep(0.5)
    await _request_report(gateway)
    tasks = int(_TASKS.findall(gateway.read_output())[-1])
    return SoakMeasurement(requests, gateway.memory(), tasks, gateway.descriptors())


async def run_soak(
    folder: Path,
    *,
    requests: int,
    cancelled: int,
    intervals: int = 20,
    show: Callable[[SoakMeasurement], None] = lambda _: None,
) -> SoakResult:
    """Send so many in so many intervals, and look after each; the first fifth is to get warm."""
    (folder / "worker").mkdir()
    off = {"access_log": {"format": "off"}}
    echo = {"kind": "echo", "script": ["one ", "two ", "three ", "four "]}
    backends = {"far": echo, "slow": echo | {"delay": "20ms"}}
    models = {name: {"backend": name} for name in backends}
    both = {"listeners": _LISTENERS, "observe": off, "models": models}
    behind = GatewayProcess(folder / "worker", build_config(**both, backends=backends))
    async with behind:
        patient = dict.fromkeys(("connect", "first_token", "idle"), "1m")  # of a busy machine
        pool = {"protocol": "openai", "workers": [behind.urls[0]], "timeouts": patient}
        text = build_config(**both, backends=dict.fromkeys(backends, pool))
        program = (sys.executable, "-m", "tests.soak.task_counter")
        async with GatewayProcess(folder, text, program=program) as gateway:
            looks = []
            for number in range(1, intervals + 1):
                try:
                    await _run_interval(gateway.port, requests // intervals, cancelled // intervals)
                except BaseExceptionGroup as e:
                    raise AssertionError(gateway.read_output()[-2000:]) from e
                looks.append(await _measure(gateway, requests // intervals * number))
                show(looks[-1])
    return SoakResult(looks[intervals // 5 :])


async def _start_stream(port: int) -> asyncio.StreamWriter:
    """Ask, and wait until something has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(LEFT)
    await reader.readuntil(b"data: ")
    return writer


async def abandon_streams(folder: Path, *, count: int, waves: int) -> tuple[int, float]:
    """Have ``count`` clients leave their streams at once, ``waves`` times.

    Returns the gateway's memory afterwards, in bytes, and the CPU time of the longest run of its
    garbage collector, in seconds.
    """
    raise_fd_limit()
    echo = {"kind": "echo", "script": ["one "] * 1000, "delay": "5s"}
    text = build_config(
        listeners=_LISTENERS,
        observe={"access_log": {"format": "off"}},
        backends={"slow": echo},
        models={"slow": {"backend": "slow"}},
    )
    program = (sys.executable, "-m", "tests.soak.task_counter")
    async with GatewayProcess(folder, text, program=program) as gateway:
        for _ in range(waves):
            begun = (_start_stream(gateway.port) for _ in range(count))
            for writer in await asyncio.gather(*begun):
                writer.transport.abort()
            await wait_until(lambda: gateway.descriptors() < FEW * 10, 60)
        memory = gateway.memory()
        await _request_report(gateway)
        return memory, float(_COLLECTION.findall(gateway.read_output())[-1]) / 1000
