"""Measures a gateway under attack: its memory, and how long another client waits.

The other client is a process of its own, so that it does not wait for the attacker. Its requests
before the attack show how busy the machine is. Of each request it subtracts the time that it and
the gateway stood in the queue for a CPU, which other programs took: the system counts that.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

SAMPLE_INTERVAL = 0.02
PROBE_INTERVAL = 0.02
_CALM_TIME = 3.0
"""Seconds of requests before the attack."""
_PROBE_TIMEOUT = 60.0
_KIB = 1024


class Measurement(Struct):
    """What an attack did to the gateway."""

    memory_before: int
    """Bytes of resident memory before the attack."""
    memory_peak: int
    delay_before: float
    """Seconds that the slowest request of the other client took before the attack."""
    longest_delay: float
    """The same during the attack."""
    longest_on_cpu: float
    """The same without the time in which the gateway or the client waited for a CPU."""
    requests: int
    """Requests of the other client, during the attack."""
    failed: int
    """Requests of the other client that did not end with status 200."""
    outcome: str
    """What the attacker saw."""


def get_resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * _KIB


class _OtherClient:
    """A process that sends requests until it is asked for its report."""

    def __init__(self, pid: int, url: str) -> None:
        self._arguments = (sys.executable, "-m", __spec__.name, url, str(pid))

    async def start(self) -> None:
        """Start it; it has begun when this returns."""
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        await self._process.stdout.readline()

    def watch(self, pid: int) -> None:
        """Another process serves from now on, beside the last one."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % pid)

    async def read_report(self) -> dict[str, Any]:
        """End it, and return what it has measured."""
        output, _ = await self._process.communicate(b"\n")
        report: dict[str, Any] = json.loads(output)
        return report


async def measure(
    get_pid: Callable[[], int], url: str, attack: Callable[[], Awaitable[str]]
) -> Measurement:
    """Run an attack on the gateway at ``url``, and measure it meanwhile.

    ``get_pid`` is its process, which a handover replaces.
    """
    pid = get_pid()
    calm = _OtherClient(pid, url)
    await calm.start()
    await asyncio.sleep(_CALM_TIME)
    delay_before = (await calm.read_report())["longest"]
    before = peak = get_resident_memory(pid)
    probe = _OtherClient(pid, url)
    await probe.start()
    attacker = asyncio.ensure_future(attack())
    while not attacker.done():
        if pid != get_pid():
            pid = get_pid()
            probe.watch(pid)
        with suppress(FileNotFoundError):
            peak = max(peak, get_resident_memory(pid))
        await asyncio.wait([attacker], timeout=SAMPLE_INTERVAL)
    peak = max(peak, get_resident_memory(get_pid()))
    report = await probe.read_report()
    return Measurement(
        memory_before=before,
        memory_peak=peak,
        delay_before=delay_before,
        longest_delay=report["longest"],
        longest_on_cpu=report["longest_on_cpu"],
        requests=report["requests"],
        failed=report["failed"],
        outcome=await attacker,
    )


_BODY = b'{"model":"small","messages":[{"role":"user","content":"hi"}],"max_tokens":4}'


def _read_queue_times(pid: str) -> dict[str, float]:
    """Seconds that each thread of a process has waited for a CPU."""
    times = dict[str, float]()
    with suppress(OSError):  # it has ended, or the system counts nothing
        for thread in Path(f"/proc/{pid}/task").iterdir():
            text = (thread / "schedstat").read_text(encoding="utf-8")
            times[thread.name] = int(text.split()[1]) / 1e9
    return times


def _get_wait(before: dict[str, float], after: dict[str, float]) -> float:
    """The longest wait of a thread: one that holds the interpreter's lock stops the others."""
    return max((after[one] - before.get(one, 0.0) for one in after), default=0.0)


def _send_probes(host: str, port: int, pid: str) -> None:
    """Send a small request every 20 ms until an empty line arrives at standard input.

    Another line is the id of a process that replaces that of ``pid``.
    """
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
    ) % (f"{host}:{port}".encode(), len(_BODY), _BODY)
    import select  # noqa: PLC0415 - of this process only

    pids = [str(os.getpid()), pid]
    longest, longest_on_cpu, requests, failed = 0.0, 0.0, 0, 0
    print("begun", flush=True)  # noqa: T201
    while True:
        if select.select([sys.stdin], [], [], PROBE_INTERVAL)[0]:
            if not (line := sys.stdin.readline().strip()):
                break
            pids = [*pids[:1], *pids[1:][-1:], line]  # the former one may still answer
        before = [_read_queue_times(one) for one in pids]
        start = time.monotonic()
        try:
            with socket.create_connection((host, port), _PROBE_TIMEOUT) as client:
                client.sendall(request)
                response = b""
                while piece := client.recv(65536):
                    response += piece
        except OSError:
            response = b""
        delay = time.monotonic() - start
        after = [_read_queue_times(one) for one in pids]
        own, *others = map(_get_wait, before, after)
        waited = own + max(others)
        longest = max(longest, delay)
        longest_on_cpu = max(longest_on_cpu, delay - waited)
        requests += 1
        failed += not response.startswith(b"HTTP/1.1 200 ")
    report = {"longest": longest, "longest_on_cpu": longest_on_cpu}
    print(json.dumps({**report, "requests": requests, "failed": failed}))  # noqa: T201


if __name__ == "__main__":
    _host, _, _port = sys.argv[1].removeprefix("http://").partition(":")
    _send_probes(_host, int(_port), sys.argv[2])
