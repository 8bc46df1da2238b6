"""What is asked of each gateway: how many clients, at which pace, for how long."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Literal

import httpx
import msgspec
from msgspec import Struct

from tests.bench import responses
from tests.bench.c_programs import build_program

TOKENS: Final = 100
"""Of each stream."""

Form = Literal["whole", "stream"]


class Load(Struct, frozen=True, kw_only=True):
    """``pace`` is in microseconds between tokens, 0 for a stream that comes at once.

    ``seconds`` is how long requests are begun, and ``count`` how many at most. ``rate`` is in
    requests a second, whether the ones before are answered or not; 0 lets each client ask anew when
    it has its answer. A ``repeated`` load sends one request again and again, whose body is about
    ``size`` bytes; any other sends varied requests (traffic.py).
    """

    name: str
    form: Form = "whole"
    clients: int = 32
    count: int = 20_000
    seconds: float = 2.0
    pace: int = 0
    rate: int = 0
    repeated: bool = False
    size: int = 650

    @property
    def unit(self) -> Literal["request", "token", "stream"]:
        """What the CPU is divided by."""
        if self.form == "whole":
            return "request"
        return "token" if self.pace else "stream"


WHOLE: Final = Load(name="non-streaming, 32 clients", count=3_000)
BURST: Final = Load(name="burst of 100 tokens, 32 clients", form="stream", count=600)
PACED: Final = Load(
    name="20 tokens a second, 256 clients",
    form="stream",
    clients=256,
    count=256,
    pace=50_000,
)
REPEATED: Final = (
    msgspec.structs.replace(WHOLE, name=f"repeated: {WHOLE.name}", repeated=True),
    msgspec.structs.replace(BURST, name=f"repeated: {BURST.name}", repeated=True),
)
"""The same bytes each time, for comparison."""
QUICK: Final = (WHOLE, BURST, *REPEATED, PACED)
FULL: Final = (
    WHOLE,
    Load(name="non-streaming, 1 client", clients=1, count=3_000, seconds=1.5),
    Load(name="non-streaming, 256 clients", clients=256, count=6_000),
    Load(name="non-streaming, 200 a second", clients=64, rate=200, count=400, seconds=3.0),
    BURST,
    *REPEATED,
    Load(
        name="repeated: body of 40 kB",
        clients=8,
        count=20_000,
        size=40_000,
        seconds=1.5,
        repeated=True,
    ),
    Load(
        name="repeated: body of 1 MB",
        clients=4,
        count=400,
        size=1_000_000,
        seconds=1.5,
        repeated=True,
    ),
    PACED,
    Load(
        name="20 tokens a second, 16 streams a second",
        form="stream",
        clients=256,
        rate=16,
        count=64,
        pace=50_000,
        seconds=4.0,
    ),
)
"""``QUICK`` has some of them under the same names.

Paced streams come last: right after them, a repeated load was seen to cost two times as much.
"""
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


class WorkerStats(Struct, frozen=True):
    """What the worker has seen."""

    requests: int
    streams: int
    connections: int


class Worker:
    """The worker, until closed; it would end by itself after ``seconds``."""

    def __init__(self, seconds: int, core: int | None = None) -> None:
        with tempfile.NamedTemporaryFile(prefix="responses-") as file:
            file.write(responses.encode())
            file.flush()
            numbers = [str(TOKENS), str(seconds)]
            command = [*pin_to_core(core), str(build_program("worker")), *numbers, file.name]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert self.process.stdout is not None
            self.port = int(self.process.stdout.readline())

    def pace(self, microseconds: int) -> None:
        """How tokens come from now on."""
        httpx.get(f"http://127.0.0.1:{self.port}/_pace/{microseconds}", trust_env=False)

    def told(self) -> WorkerStats:
        """What it has seen so far."""
        answer = httpx.get(f"http://127.0.0.1:{self.port}/_told", trust_env=False)
        return msgspec.json.decode(answer.content, type=WorkerStats)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class LoadTarget(Struct, frozen=True):
    """Where requests go, and the file that holds them; ``end`` is what a stream must end with."""

    port: int
    requests: Path
    end: str = ""


def command(load: Load, asked: LoadTarget, core: int | None = None) -> list[str]:
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
        *pin_to_core(core),
        str(build_program("load")),
        str(asked.port),
        str(asked.requests),
        *[f"{name}={value}" for name, value in told.items()],
    ]


def run_load(
    load: Load, asked: LoadTarget, core: int | None = None, *, grace: float = 10.0
) -> Outcome:
    """Put the load on a gateway, and wait for its end: ``grace`` seconds for the last answers."""
    more = f"grace={grace}"
    ended = subprocess.run([*command(load, asked, core), more], capture_output=True, check=True)
    return msgspec.json.decode(ended.stdout, type=Outcome)


def pin_to_core(core: int | None) -> list[str]:
    """What a command begins with that is to run on one core."""
    taskset = shutil.which("taskset")
    return [] if core is None or taskset is None else [taskset, "-c", str(core)]
