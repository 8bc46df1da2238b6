"""After hundreds of thousands of requests memory, tasks and descriptors have not grown.

The gateway's worker is another gateway with scripted responses. The requests are in equal parts
unary and streaming, translated and passed through; cancelled streams are cancelled after their
first event.
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
from tests.support.waiting import wait_until

CLIENTS = 16
"""Keep-alive connections."""
SLACK = 2 << 20
"""Bytes by which memory may vary."""
EACH = 32
"""Bytes that a request may leave behind: an allocator returns little memory."""
FEW = 4
"""Tasks and descriptors that vary: probes, and connections that are closing."""
_TASKS = re.compile(r"^TASKS (\d+)$", re.MULTILINE)
_COLLECTION = re.compile(r"^LONGEST COLLECTION ([\d.]+) ms$", re.MULTILINE)
_LISTENERS = [{"address": "127.0.0.1:0", "protocols": ["openai", "triton"]}]


class SoakMeasurement(Struct, frozen=True):
    """Memory, tasks and descriptors after some requests."""

    requests: int
    memory: int
    tasks: int
    descriptors: int

    def text(self) -> str:
        """Return it as a line."""
        return (
            f"{self.requests:>8} requests  {self.memory / 2**20:7.1f} MiB"
            f"  {self.tasks:>4} tasks  {self.descriptors:>4} descriptors"
        )


class SoakResult(Struct, frozen=True):
    """All measurements, the first after the warm-up."""

    looks: Sequence[SoakMeasurement]

    @property
    def slope(self) -> float:
        """Return the growth of memory per request in bytes."""
        requests = [float(one.requests) for one in self.looks]
        return linear_regression(requests, [one.memory for one in self.looks]).slope

    def growing(self) -> list[str]:
        """Return what has grown."""
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


def _build_request(path: str, body: object, *headers: str) -> bytes:
    data = msgspec.json.encode(body)
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
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
"""Passed through and translated, unary and streaming."""
LEFT = _build_request("/v1/chat/completions", _CHAT | {"model": "slow", "stream": True})


async def _head(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    assert head.startswith("http/1.1 200 "), head
    return head


async def _read_response(reader: asyncio.StreamReader) -> None:
    """Read a response to its end."""
    head = await _head(reader)
    if match := re.search(r"content-length: (\d+)", head):
        await reader.readexactly(int(match[1]))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


async def _send_requests(port: int, count: int, first: int) -> None:
    """Send requests over one connection."""
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
    """Send requests and disconnect from each after its first event."""
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LEFT)
        await _head(reader)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _run_interval(port: int, requests: int, cancelled: int) -> None:
    """Send an interval's requests over ``CLIENTS`` connections."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            part = requests // CLIENTS + (number < requests % CLIENTS)
            tasks.create_task(_send_requests(port, part, number))
        for number in range(4):
            tasks.create_task(_send_and_disconnect(port, cancelled // 4 + (number < cancelled % 4)))


async def _request_report(gateway: GatewayProcess) -> None:
    """Make ``task_counter`` write its report."""
    reports = len(_TASKS.findall(gateway.read_output()))
    os.kill(gateway.process.pid, signal.SIGUSR1)
    await wait_until(lambda: len(_TASKS.findall(gateway.read_output())) > reports, 60)


async def _measure(gateway: GatewayProcess, requests: int) -> SoakMeasurement:
    """Measure the idle gateway."""
    await asyncio.sleep(0.5)
    await _request_report(gateway)
    tasks = int(_TASKS.findall(gateway.read_output())[-1])
    return SoakMeasurement(
        requests, gateway.get_resident_memory(), tasks, gateway.count_descriptors()
    )


async def run_soak(
    folder: Path,
    *,
    requests: int,
    cancelled: int,
    intervals: int = 20,
    show: Callable[[SoakMeasurement], None] = lambda _: None,
) -> SoakResult:
    """Send the requests in intervals and measure after each; the first fifth is the warm-up."""
    (folder / "worker").mkdir()
    off = {"access_log": {"format": "off"}}
    echo = {"kind": "echo", "script": ["one ", "two ", "three ", "four "]}
    backends = {"far": echo, "slow": echo | {"delay": "20ms"}}
    models = {name: {"backend": name} for name in backends}
    both = {"listeners": _LISTENERS, "observe": off, "models": models}
    behind = GatewayProcess(folder / "worker", build_config(**both, backends=backends))
    async with behind:
        patient = dict.fromkeys(("connect", "first_token", "idle"), "1m")  # for a busy machine
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
    """Send a request and wait for its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(LEFT)
    await reader.readuntil(b"data: ")
    return writer


async def abandon_streams(folder: Path, *, count: int, waves: int) -> tuple[int, float]:
    """Let ``count`` clients disconnect from their streams at once, ``waves`` times.

    Returns the gateway's memory afterwards in bytes, and the CPU time of its longest garbage
    collection in seconds.
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
            await wait_until(lambda: gateway.count_descriptors() < FEW * 10, 60)
        memory = gateway.get_resident_memory()
        await _request_report(gateway)
        return memory, float(_COLLECTION.findall(gateway.read_output())[-1]) / 1000
