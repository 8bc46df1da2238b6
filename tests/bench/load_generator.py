"""Runs the two C programs, the worker and the clients, and parses their reports."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import httpx
import msgspec
from msgspec import Struct

from tests.bench import responses
from tests.bench.c_programs import build_program
from tests.bench.loads import Load

TOKENS: Final = 100
"""Tokens of each stream."""


class Spread(Struct, frozen=True):
    """Percentiles of times, in microseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Outcome(Struct, frozen=True):
    """What the clients received. ``last_error`` describes the last incorrect response."""

    completed: int
    errors: int
    last_error: str
    tokens: int
    connections: int
    seconds: float
    latency: Spread | None
    first_token: Spread | None
    gap: Spread | None
    token: Spread | None


class WorkerStats(Struct, frozen=True):
    """What the worker received. ``open_streams`` are those that run now."""

    requests: int
    streams: int
    connections: int
    open_streams: int


class Worker:
    """A running worker, until closed or for ``seconds``."""

    def __init__(self, seconds: int, cores: str = "") -> None:
        with tempfile.NamedTemporaryFile(prefix="responses-") as file:
            file.write(responses.encode())
            file.flush()
            numbers = [str(TOKENS), str(seconds)]
            command = [*pin_to_cores(cores), str(build_program("worker")), *numbers, file.name]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert self.process.stdout is not None
            self.port = int(self.process.stdout.readline())

    def set_pace(self, microseconds: int) -> None:
        """Set the time between tokens; 0 sends them all at once."""
        httpx.get(f"http://127.0.0.1:{self.port}/_pace/{microseconds}", trust_env=False)

    def read_stats(self) -> WorkerStats:
        """Return what the worker has received so far."""
        response = httpx.get(f"http://127.0.0.1:{self.port}/_stats", trust_env=False)
        return msgspec.json.decode(response.content, type=WorkerStats)

    def close(self) -> None:
        """Stop the worker."""
        self.process.kill()
        self.process.communicate()


class LoadTarget(Struct, frozen=True):
    """A port and a file of requests; ``end`` is the end mark of streams."""

    port: int
    requests: Path
    end: str = ""


def build_command(load: Load, target: LoadTarget, cores: str = "") -> list[str]:
    """Build the command that sends the load to a gateway."""
    options: dict[str, object] = {
        "clients": load.clients,
        "count": load.count,
        "seconds": load.seconds,
        "rate": load.rate,
        "tokens": _count_tokens(load),
        "end": target.end if load.form == "stream" else "",
        "tls": int(load.tls),
    }
    return [
        *pin_to_cores(cores),
        str(build_program("load")),
        str(target.port),
        str(target.requests),
        *[f"{name}={value}" for name, value in options.items()],
    ]


def _count_tokens(load: Load) -> int:
    """Return how many tokens each response must have."""
    if load.traffic.kind == "embeddings":
        return 0
    return TOKENS if load.form == "stream" else 1


def run_load(load: Load, target: LoadTarget, cores: str = "", *, grace: float = 10.0) -> Outcome:
    """Send the load to a gateway; wait up to ``grace`` seconds for the last responses."""
    command = [*build_command(load, target, cores), f"grace={grace}"]
    completed = subprocess.run(command, capture_output=True, check=True)
    return msgspec.json.decode(completed.stdout, type=Outcome)


def pin_to_cores(cores: str) -> list[str]:
    """Return a command prefix that pins a process to these cores, such as ``0,1``."""
    taskset = shutil.which("taskset")
    return [taskset, "-c", cores] if cores and taskset else []
