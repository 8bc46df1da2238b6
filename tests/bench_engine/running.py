"""One run: every peer is started once, and all are measured in turns on the same machine."""

import asyncio
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from msgspec import Struct

from tests.bench_engine.busy_gateway import run_busy_load
from tests.bench_engine.client import accepts_connections, complete_prompts, count_tokens, post
from tests.bench_engine.cost import measure_cpu_seconds, measure_tree_memory
from tests.bench_engine.peers import PEERS, PLACE, Peer, build_environment, install
from tests.bench_engine.weights import Weights, prepare
from tests.support.ports import reserve_port

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a haiku about the sea in winter.",
    "Explain what a proxy server does and why one would put it before several model servers.",
    "Name three fruits and say what they taste like.",
    "Tell me a story about a dragon who learns to cook, short and friendly, for small children.",
    "What is twelve times twelve, and how do you work it out?",
    "Translate good morning to Spanish, Italian and Portuguese.",
    "Why is the sky blue at noon and red in the evening?",
)
WORDS = "the a of gateway model worker request answer token batch row memory time cost on in to by"
TEXTS = 64
"""Texts per embedding request."""
BUSY_CLIENTS = 16
"""Concurrent responses while the gateway is kept busy."""
STARTING = 240.0
"""Timeout of a start in seconds."""


class Measurement(Struct, frozen=True):
    """Milliseconds of CPU time per token (or text), by round, with further numbers."""

    peer: str
    at: int
    costs: list[float]
    walls: list[float]

    @property
    def cost(self) -> float:
        """The median."""
        return statistics.median(self.costs)


class Report(Struct, frozen=True):
    """The results of a run."""

    machine: str
    load: tuple[float, float]
    """The machine's load average before and after."""
    tokens: int
    rounds: int
    threads: int
    """Of each engine."""
    measurements: list[Measurement]
    missing: Mapping[str, str]
    """Peers that could not be measured, and why."""
    memory: Mapping[str, int]
    """Memory of each at the end, in bytes."""
    busy: Sequence[float] = ()
    """By round: our decoding speed with a busy gateway, divided by that with an idle one."""


def run(
    names: Sequence[str], sizes: Sequence[int], rounds: int, tokens: int, threads: int
) -> Report:
    """Start, warm up, and measure in turns."""
    PLACE.mkdir(parents=True, exist_ok=True)
    weights = prepare(PLACE / "weights")
    missing: dict[str, str] = {}
    before = os.getloadavg()[0]
    with ExitStack() as stack:
        servers: dict[str, tuple[int, int]] = {}
        for name in names:
            try:
                servers[name] = stack.enter_context(serving(name, weights, threads))
                warm_up(name, *servers[name], tokens)
            except (RuntimeError, OSError, TimeoutError) as error:
                servers.pop(name, None)
                missing[name] = f"{error}"[:400]
                click.echo(f"{name}: {missing[name]}", err=True)
        measurements = _rounds(servers, sizes, rounds, tokens)
        memory = {name: measure_tree_memory(pid) for name, (pid, _) in servers.items()}
        slowed = [_slowed(servers["ours"], i, tokens) for i in range(rounds) if "ours" in servers]
    load = (before, os.getloadavg()[0])
    return Report(_machine(), load, tokens, rounds, threads, measurements, missing, memory, slowed)


def warm_up(name: str, pid: int, port: int, tokens: int) -> None:
    """Make a first measurement and discard it. Some servers listen before they have loaded."""
    end = time.monotonic() + STARTING
    while True:
        try:
            _measure(name, pid, port, (2, -1, tokens))
        except RuntimeError as error:
            if " 503 " not in f"{error}" or time.monotonic() > end:
                raise
            time.sleep(0.5)
        else:
            return


def _rounds(
    servers: Mapping[str, tuple[int, int]], sizes: Sequence[int], rounds: int, tokens: int
) -> list[Measurement]:
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds):
        # Each round begins with another peer, so that the order changes.
        turn = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
        for name in turn:
            for size in PEERS[name].sizes or sizes:
                cost, wall = _measure(name, *servers[name], (size, number, tokens))
                taken.setdefault((name, size), []).append((cost, wall))
                click.echo(f"round {number + 1}: {name} at {size}: {cost:.2f} ms", err=True)
    return [
        Measurement(name, size, [cost for cost, _ in both], [wall for _, wall in both])
        for (name, size), both in taken.items()
    ]


def _measure(name: str, pid: int, port: int, how: tuple[int, int, int]) -> tuple[float, float]:
    """Return milliseconds of CPU time and of wall time per token or text."""
    size, number, tokens = how
    before, began = measure_cpu_seconds(pid), time.monotonic()
    responses = asyncio.run(_ask(PEERS[name], port, size, number, tokens))
    cost, wall = measure_cpu_seconds(pid) - before, time.monotonic() - began
    wanted = TEXTS if PEERS[name].vectors else size * tokens
    if responses != wanted:
        raise RuntimeError(f"{responses} tokens came where {wanted} were wanted")
    return cost * 1000 / responses, wall * 1000 / responses


def _slowed(server: tuple[int, int], number: int, tokens: int) -> float:
    """Return our decoding speed with a busy gateway, divided by that with an idle one."""
    pid, port = server
    # These prompts have prefixes of their own.
    _, idle = _measure("ours", pid, port, (BUSY_CLIENTS, 100 + 2 * number, tokens))
    with run_busy_load(port):
        _, wall = _measure("ours", pid, port, (BUSY_CLIENTS, 101 + 2 * number, tokens))
    click.echo(f"round {number + 1}: busy: {idle / wall:.2f}", err=True)
    return idle / wall


async def _ask(peer: Peer, port: int, size: int, number: int, tokens: int) -> int:
    if peer.vectors:
        return await _embed(peer, port, number)
    # The prefixes differ, so that no peer has cached one.
    prompts = [f"{number}.{i} {QUESTIONS[i % len(QUESTIONS)]} ({i})" for i in range(size)]
    if peer.batch:
        return count_tokens(await post(port, "/", {"prompts": prompts, "max_tokens": tokens}))
    body = {
        "model": peer.model or str(PLACE / "weights" / "smollm2"),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if peer.endless else {}),
    }
    return await complete_prompts(port, [{**body, "prompt": prompt} for prompt in prompts])


async def _embed(peer: Peer, port: int, number: int) -> int:
    words = WORDS.split()
    texts = [
        " ".join(words[(i * 7 + j * (number + 3)) % len(words)] for j in range(4 + i * 37 % 147))
        for i in range(TEXTS)
    ]
    if peer.batch:
        return count_tokens(await post(port, "/", {"prompts": texts, "max_tokens": 0}))
    body = {"model": peer.model, "input": texts, "encoding_format": "base64"}
    return (await post(port, "/v1/embeddings", body)).count(b'"embedding":"')


# --- processes ----------------------------------------------------------------------------------


@contextmanager
def serving(name: str, weights: Weights, threads: int = 1) -> Iterator[tuple[int, int]]:
    """Run a peer; yield its process and its port. Raises RuntimeError if it does not start."""
    peer, port = PEERS[name], reserve_port()
    if why := install(peer.env):
        raise RuntimeError(why)
    log = PLACE / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, peer.command(weights, port, threads))],
            env=build_environment(threads),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await(process, port, log)
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + STARTING
    while not asyncio.run(accepts_connections(port)):
        if process.poll() is not None or time.monotonic() > end:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"it does not start: {''.join(last)}")
        time.sleep(0.5)


def _machine() -> str:
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return f"{cpu}, {os.cpu_count()} cores"
