"""What is asked of each gateway: how many clients, at which pace, for how long."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import httpx
import msgspec
from msgspec import Struct

from tests.bench.building import built

TOKENS: Final = 100
"""Of each stream."""

Form = Literal["whole", "stream"]


class Load(Struct, frozen=True, kw_only=True):
    """``pace`` is in microseconds between tokens, 0 for a stream that comes at once.

    ``seconds`` is how long requests are begun, and ``count`` how many at most. ``rate`` is in
    requests a second, whether the ones before are answered or not; 0 lets each client ask anew when
    it has its answer. ``size`` is about how large the body is, in bytes.
    """

    name: str
    form: Form = "whole"
    clients: int = 32
    count: int = 20_000
    seconds: float = 2.0
    pace: int = 0
    rate: int = 0
    size: int = 650

    @property
    def unit(self) -> Literal["request", "token", "stream"]:
        """What the CPU is divided by."""
        if self.form == "whole":
            return "request"
        return "token" if self.pace else "stream"


WHOLE: Final = Load(name="whole, 32 clients")
BURST: Final = Load(name="burst, 32 clients", form="stream", count=2_000)
PACED: Final = Load(
    name="10 ms a token, 32 clients", form="stream", count=64, pace=10_000, seconds=3.0
)
QUICK: Final = (
    msgspec.structs.replace(WHOLE, seconds=0.4),
    msgspec.structs.replace(BURST, seconds=0.4),
    msgspec.structs.replace(PACED, count=32),
)
FULL: Final = (
    Load(name="whole, 1 client", clients=1, seconds=1.5),
    WHOLE,
    Load(name="whole, 256 clients", clients=256, count=6_000),
    Load(name="whole, 200 a second", clients=64, rate=200, count=400, seconds=3.0),
    Load(name="whole, body of 40 kB", clients=8, size=40_000, seconds=1.5),
    Load(name="whole, body of 1 MB", clients=4, size=1_000_000, seconds=1.5, count=400),
    BURST,
    PACED,
    Load(
        name="10 ms a token, 256 clients",
        form="stream",
        clients=256,
        count=512,
        pace=10_000,
        seconds=3.0,
    ),
    Load(
        name="10 ms a token, 32 a second",
        form="stream",
        clients=64,
        rate=32,
        count=96,
        pace=10_000,
        seconds=4.0,
    ),
)
"""``QUICK`` has the same three for a shorter time, under the same names."""
OPEN: Final = Load(
    name="100 ms a token, 1,000 clients",
    form="stream",
    clients=1_000,
    count=1_000,
    pace=100_000,
    seconds=4.0,
)
"""The memory that open streams take is measured in the middle of it."""


class Spread(Struct, frozen=True):
    """Of measured times, in microseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Outcome(Struct, frozen=True):
    """What the clients saw. ``why`` is what the last error was."""

    completed: int
    errors: int
    why: str
    tokens: int
    connections: int
    seconds: float
    latency: Spread | None
    first_token: Spread | None
    gap: Spread | None
    token: Spread | None


class Told(Struct, frozen=True):
    """What the worker has seen."""

    requests: int
    streams: int
    connections: int


class Worker:
    """The worker, until closed; it would end by itself after ``seconds``."""

    def __init__(self, seconds: int, core: int | None = None) -> None:
        command = [*pinned(core), str(built("worker")), str(TOKENS), str(seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def pace(self, microseconds: int) -> None:
        """How tokens come from now on."""
        httpx.get(f"http://127.0.0.1:{self.port}/_pace/{microseconds}", trust_env=False)

    def told(self) -> Told:
        """What it has seen so far."""
        answer = httpx.get(f"http://127.0.0.1:{self.port}/_told", trust_env=False)
        return msgspec.json.decode(answer.content, type=Told)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class Asked(Struct, frozen=True):
    """Where requests go: ``end`` is what a stream must have at its end."""

    port: int
    path: str
    body: Path
    headers: Sequence[str] = ()
    end: str = ""


def command(load: Load, asked: Asked, core: int | None = None) -> list[str]:
    """What puts the load on a gateway."""
    told: dict[str, object] = {
        "clients": load.clients,
        "count": load.count,
        "seconds": load.seconds,
        "rate": load.rate,
        "tokens": TOKENS if load.form == "stream" else 1,
        "end": asked.end if load.form == "stream" else "",
    }
    return [
        *pinned(core),
        str(built("load")),
        str(asked.port),
        asked.path,
        str(asked.body),
        *[f"{name}={value}" for name, value in told.items()],
        *[f"header={header}" for header in asked.headers],
    ]


def put(load: Load, asked: Asked, core: int | None = None, *, grace: float = 10.0) -> Outcome:
    """Put the load on a gateway, and wait for its end: ``grace`` seconds for the last answers."""
    more = f"grace={grace}"
    ended = subprocess.run([*command(load, asked, core), more], capture_output=True, check=True)
    return msgspec.json.decode(ended.stdout, type=Outcome)


def pinned(core: int | None) -> list[str]:
    """What a command begins with that is to run on one core."""
    taskset = shutil.which("taskset")
    return [] if core is None or taskset is None else [taskset, "-c", str(core)]
