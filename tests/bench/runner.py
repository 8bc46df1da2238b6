"""A run: all gateways are started, and each load is sent to one after the other, in rounds.

So compared measurements are close in time, and other load of the machine affects all of them. The
baseline is measured before and after each group of them; if it changed, the group is measured again
if there is time, and marked if it changed again. Everything is bounded in count and in time.
"""

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct
from msgspec.structs import replace

from tests.bench import interlingua, process
from tests.bench.c_programs import CACHE, has_tls
from tests.bench.gateways import Gateway, LaunchCommand, LaunchContext, ProtocolPair
from tests.bench.load_generator import (
    LoadTarget,
    Outcome,
    Worker,
    build_command,
    pin_to_cores,
    run_load,
)
from tests.bench.loads import KEYS, OPEN, UNARY, Load, Traffic
from tests.bench.results import (
    MOVED,
    OpenStreams,
    Results,
    Sample,
    ScalingSample,
    StartMeasurement,
)
from tests.bench.traffic import Request, encode_all
from tests.fault.certificates import Authority
from tests.support.ports import reserve_port

_WARM_UP: Final = (
    Load(name="the first requests", count=400, clients=8, seconds=1.0),
    Load(name="the first streams", form="stream", count=16, clients=8, seconds=1.0),
)
_WATCH_TIME: Final = 1.0
"""Seconds for which other load is measured, at the start and at the end."""
_MARGIN: Final = 120
"""Seconds by which a run may be late: a started measurement is completed."""
_OPEN_FILES: Final = 32_768
_OPEN_TIMEOUT: Final = 60.0
"""Seconds until all streams must be open."""
_APART: Final = 4
"""From this number of cores on, two processes and the clients have cores of their own."""
_SCALING_ROUNDS: Final = 3

Log = Callable[[str], None]


class Plan(Struct, frozen=True, kw_only=True):
    """``gateways``: the first is the baseline. ``seconds`` limits the time of the rounds."""

    gateways: Sequence[Gateway]
    loads: Sequence[Load]
    rounds: int
    seconds: int
    group_size: int
    """The number of measurements between two of the baseline."""
    attempts: int
    """How often a group is measured at most."""
    open_streams: Sequence[Gateway] = ()
    """Gateways whose memory with many open streams is measured."""
    scaling: bool = False
    """Whether one process and two are compared."""
    against: str = ""
    """The gateway that the measured gateway is compared with."""


class RunningGateway(Struct, frozen=True):
    """A gateway that responds."""

    gateway: Gateway
    pid: int
    find_target: Callable[[ProtocolPair, Load], LoadTarget]


class StartFailed(Exception):
    """A gateway does not start, or responds incorrectly."""


@contextmanager
def lock_machine() -> Iterator[None]:
    """Allow one run at a time on this machine. Raises BlockingIOError during another."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def run(plan: Plan, log: Log) -> Results:
    """Carry out the plan. Raises BlockingIOError during another run."""
    with lock_machine(), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, most), most))
        other_load = process.measure_machine_load(_WATCH_TIME)
        session = _Runner(plan, Path(folder), log)
        with (
            session.client,
            closing(Worker(plan.seconds + _MARGIN, session.client_cores)) as worker,
        ):
            session.run_rounds(worker)
            session.measure_open_streams(worker)
            session.measure_scaling(worker)
        return Results(
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            machine=process.describe_machine(),
            revision=_revision(),
            other_load=max(other_load, process.measure_machine_load(_WATCH_TIME)),
            baseline=session.baseline,
            versions=session.versions,
            missing=session.missing,
            against=plan.against if plan.against not in session.missing else "",
            samples=session.samples,
            starts=session.starts,
            open_streams=session.open_streams,
            scaling=session.scaling,
            steps=[],
        )


class _Runner:
    """The rounds of a plan and their results."""

    def __init__(self, plan: Plan, folder: Path, log: Log) -> None:
        self._plan = plan
        self._folder = folder
        self._log = log
        self._deadline = time.monotonic() + plan.seconds
        self._certificate = Authority(folder).issue().rename(folder / "certificate.pem")
        self.client = httpx.Client(trust_env=False, timeout=10)
        self._cores = sorted(os.sched_getaffinity(0))
        several = len(self._cores) > 1
        self._gateway_cores = str(self._cores[0]) if several else ""
        self.client_cores = str(self._cores[-1]) if several else ""
        """The cores of the clients and the worker."""
        self.baseline = ""
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.samples: list[Sample] = []
        self.starts: list[StartMeasurement] = []
        self.open_streams: list[OpenStreams] = []
        self.scaling: list[ScalingSample] = []

    # --- rounds -----------------------------------------------------------------------------------

    def run_rounds(self, worker: Worker) -> None:
        """Run the rounds while there is time."""
        for gateway in self._plan.gateways:
            if (version := gateway.version()) is None:
                self.missing[gateway.name] = f"not installed: {gateway.install_hint}"
                self._log(f"{gateway.name} is left out: {self.missing[gateway.name]}")
            else:
                self.versions[gateway.name] = version
        for number in range(1, self._plan.rounds + 1):
            loads = [load for load in self._plan.loads if number <= load.rounds]
            if self._time_is_up or not loads:
                break
            self._log(f"round {number} of {self._plan.rounds}")
            with ExitStack() as stack:
                running = self._start_gateways(number, loads, worker, stack)
                for load in loads:
                    self._run_load(number, load, running, worker)
                self._measure_memory(number, running)

    @property
    def _time_is_up(self) -> bool:
        return time.monotonic() > self._deadline

    def _start_gateways(
        self, number: int, loads: Sequence[Load], worker: Worker, stack: ExitStack
    ) -> list[RunningGateway]:
        running = []
        for gateway in self._plan.gateways:
            if gateway.name in self.missing or not any(map(gateway.supports, loads)):
                continue
            try:
                one, seconds = self._start_gateway(gateway, worker, stack)
            except StartFailed as error:
                self.missing[gateway.name] = f"does not run here (round {number}): {error}"
                self._log(f"  {gateway.name}: {error}")
                continue
            running.append(one)
            memory = process.read_memory(one.pid)
            self.starts.append(StartMeasurement(gateway.name, number, seconds, memory, memory))
        return running

    def _start_gateway(
        self, gateway: Gateway, worker: Worker, stack: ExitStack, cores: str = ""
    ) -> tuple[RunningGateway, float]:
        """Start a gateway and time its first response, in seconds. Raises StartFailed."""
        folder = self._folder / gateway.name
        folder.mkdir(exist_ok=True)
        context = LaunchContext(
            *(
                reserve_port(),
                worker.port,
                folder,
                reserve_port(),
                reserve_port(),
                self._certificate,
            )
        )
        started, popen = time.monotonic(), worker.process
        if gateway.start is None:
            context = LaunchContext(worker.port, worker.port, folder, worker.port)
        else:
            command = gateway.start(context)
            popen = stack.enter_context(_run_process(command, folder, cores or self._gateway_cores))
        headers = gateway.headers(context)
        one = RunningGateway(
            gateway, popen.pid, partial(self._find_target, gateway, context, headers)
        )
        seconds = []
        for pair in gateway.pairs:
            first = pair.make_requests(Traffic(keys=min(gateway.keys, len(KEYS))), "unary")[0]
            deadline = started + gateway.start_timeout
            self._wait_for_response(popen, context, first, headers, deadline)
            seconds.append(time.monotonic() - started)
        for pair in gateway.pairs:
            self._warm_up(one, pair, worker)
        return one, seconds[0]

    def _find_target(
        self,
        gateway: Gateway,
        context: LaunchContext,
        headers: Sequence[str],
        pair: ProtocolPair,
        load: Load,
    ) -> LoadTarget:
        """Return the port of a gateway and the file of a load's requests, written at first use."""
        removed = gateway.removed_headers
        shared = not headers and not removed and gateway.keys >= load.traffic.keys
        traffic = replace(load.traffic, keys=min(gateway.keys, load.traffic.keys))
        name = f"{pair.name}-{load.form}-{hash(traffic):x}.requests"
        file = (self._folder if shared else context.folder) / name
        if not file.exists():
            requests = pair.make_requests(traffic, load.form)
            file.write_bytes(encode_all(requests, headers, removed))
        port = context.tls_port if load.tls else context.port
        return LoadTarget(port, file, "" if traffic.kind == "embeddings" else pair.end)

    def _wait_for_response(
        self,
        popen: "subprocess.Popen[bytes]",
        context: LaunchContext,
        request: Request,
        headers: Sequence[str],
        deadline: float,
    ) -> None:
        """Wait for the first correct response. Raises StartFailed."""
        named = dict(header.split(": ", 1) for header in (*request.headers, *headers))
        url, error = f"http://127.0.0.1:{context.port}{request.path}", ""
        while time.monotonic() < deadline and popen.poll() is None:
            try:
                response = self.client.post(url, content=request.body, headers=named)
            except httpx.HTTPError as failure:
                error = str(failure)
            else:
                if response.status_code == httpx.codes.OK and " @000" in response.text:
                    return
                error = f"{response.status_code} {response.text[:200]}"
            time.sleep(0.01)
        log = context.folder / "log"
        lines = log.read_text("utf-8", "replace").strip().splitlines() if log.exists() else []
        log_note = f" (its log ends in: {lines[-1][:200]})" if lines else ""
        raise StartFailed(f"no answer on {request.path}: {error}{log_note}")

    def _warm_up(self, one: RunningGateway, pair: ProtocolPair, worker: Worker) -> None:
        worker.set_pace(0)
        for load in _WARM_UP:
            if load.form in one.gateway.forms:
                outcome = run_load(load, one.find_target(pair, load), self.client_cores)
                if outcome.errors:
                    raise StartFailed(f"{pair.name}, {load.form}: {outcome.last_error}")

    def _run_load(
        self, number: int, load: Load, running: Sequence[RunningGateway], worker: Worker
    ) -> None:
        """Run a load on each gateway, and on the baseline between them."""
        if load.tls and not has_tls():
            self._log(f"  {load.name} is left out: OpenSSL's header files are not installed")
            return
        worker.set_pace(load.pace)
        able = [one for one in running if one.gateway.supports(load)]
        baseline = able[0] if able and able[0].gateway is self._plan.gateways[0] else None
        names = dict.fromkeys(pair.name for one in able for pair in one.gateway.pairs)
        pairs = [
            (one, pair)
            for name in names
            for one in able
            for pair in one.gateway.pairs
            if pair.name == name and pair.supports(load)
        ]
        if number % 2 == 0:
            pairs.reverse()  # so that the order gives no gateway an advantage
        before = self._measure_baseline(load, baseline)
        for start in range(0, len(pairs), self._plan.group_size):
            if self._time_is_up:
                self._log(f"  {load.name}: time is up, and the rest is left out")
                return
            group = pairs[start : start + self._plan.group_size]
            before = self._measure_group(number, load, group, baseline, before)

    def _measure_group(
        self,
        number: int,
        load: Load,
        pairs: Sequence[tuple[RunningGateway, ProtocolPair]],
        baseline: RunningGateway | None,
        before: float | None,
    ) -> float | None:
        """Measure a group; return the baseline's CPU time after it."""
        for left in reversed(range(self._plan.attempts)):
            rows = [(one, pair, *self._measure_cpu(load, one, pair)) for one, pair in pairs]
            after = self._measure_baseline(load, baseline)
            stable = before is None or after is None or _is_close(before, after)
            mean = None if before is None or after is None else (before + after) / 2
            before = after
            if stable or not left:
                for one, pair, cpu, outcome in rows:
                    sample = Sample(
                        one.gateway.name,
                        *(pair.name, load.name, load.unit, number, cpu, mean, stable, outcome),
                    )
                    self.samples.append(sample)
                    self._log(_format_sample(sample))
                break
        return before

    def _measure_baseline(self, load: Load, baseline: RunningGateway | None) -> float | None:
        if baseline is None:
            return None
        self.baseline = baseline.gateway.name
        return self._measure_cpu(load, baseline, baseline.gateway.pairs[0])[0]

    def _measure_cpu(
        self, load: Load, one: RunningGateway, pair: ProtocolPair
    ) -> tuple[float, Outcome]:
        """Measure the gateway's CPU time under a load, in microseconds per unit."""
        target = one.find_target(pair, load)
        before = process.read_cpu_time(one.pid)
        outcome = run_load(load, target, self.client_cores)
        used = process.read_cpu_time(one.pid) - before
        units = outcome.tokens if load.unit == "token" else outcome.completed
        return used / 1000 / max(units, 1), outcome

    def _measure_memory(self, number: int, running: Sequence[RunningGateway]) -> None:
        """Measure the memory after all loads of a round."""
        pids = {one.gateway.name: one.pid for one in running if one.gateway.start is not None}
        for place, start in enumerate(self.starts):
            if start.round == number and start.gateway in pids:
                memory = process.read_memory(pids[start.gateway])
                self.starts[place] = replace(start, memory_after=memory)

    # --- open streams -----------------------------------------------------------------------------

    def measure_open_streams(self, worker: Worker) -> None:
        """Measure the memory of many open streams, in a new process of each gateway."""
        for gateway in self._plan.open_streams:
            if gateway.name in self.missing or gateway.version() is None:
                continue
            with ExitStack() as stack:
                try:
                    one, _ = self._start_gateway(gateway, worker, stack)
                except StartFailed as error:
                    self._log(f"  {gateway.name}: {error}")
                    continue
                usage = self._count_open_streams(one, worker)
            self.open_streams.append(usage)
            self._log(
                f"  {gateway.name}: {usage.per_stream:.1f} kB for each of {usage.streams} open"
                f" streams"
            )

    def _count_open_streams(self, one: RunningGateway, worker: Worker) -> OpenStreams:
        worker.set_pace(OPEN.pace)
        before = process.read_memory(one.pid)
        target = one.find_target(one.gateway.pairs[0], OPEN)
        command = build_command(OPEN, target, self.client_cores)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
            deadline = time.monotonic() + _OPEN_TIMEOUT
            streams = 0
            while streams < OPEN.clients and time.monotonic() < deadline and load.poll() is None:
                time.sleep(0.5)
                streams = worker.read_stats().open_streams
            time.sleep(OPEN.pace * 1.5 / 1e6)  # each stream has a token by then
            memory = process.read_memory(one.pid)
            load.kill()
        return OpenStreams(one.gateway.name, streams, (memory - before) * 1024 / max(streams, 1))

    # --- processes --------------------------------------------------------------------------------

    def measure_scaling(self, worker: Worker) -> None:
        """Compare one process with two on two cores; clients get other cores if there are some."""
        if not self._plan.scaling or len(self._cores) < 2:
            return
        apart = len(self._cores) >= _APART
        two = ",".join(map(str, self._cores[:2]))
        clients = ",".join(map(str, self._cores[2:-1] if apart else self._cores))
        load = replace(UNARY, clients=64, count=40_000)
        worker.set_pace(0)
        if apart:
            os.sched_setaffinity(worker.process.pid, self._cores[-1:])
        for _ in range(_SCALING_ROUNDS):
            for processes in (1, 2):
                cores = two if apart or processes > 1 else two.partition(",")[0]
                try:
                    sample = self._measure_processes(processes, load, worker, cores, clients)
                except StartFailed as error:
                    self._log(f"  {processes} processes: {error}")
                    return
                self.scaling.append(replace(sample, apart=apart))
                self._log(
                    f"  {processes} processes: {sample.cpu:.1f} us a request,"
                    f" {sample.rate:,.0f} a second"
                )

    def _measure_processes(
        self, processes: int, load: Load, worker: Worker, cores: str, clients: str
    ) -> ScalingSample:
        """Run a load on this many processes on these cores. Raises StartFailed."""
        gateway = replace(
            interlingua.INTERLINGUA,
            name=f"{processes} processes",
            start=partial(interlingua.start, processes=processes),
            pairs=interlingua.INTERLINGUA.pairs[:1],
        )
        with ExitStack() as stack:
            one, _ = self._start_gateway(gateway, worker, stack, cores)
            target = one.find_target(gateway.pairs[0], load)
            before = process.read_cpu_time(one.pid)
            outcome = run_load(load, target, clients)
            cpu = (process.read_cpu_time(one.pid) - before) / 1000 / max(outcome.completed, 1)
        return ScalingSample(processes, cpu, outcome.completed / outcome.seconds, apart=False)


def _is_close(one: float, other: float) -> bool:
    return max(one, other) <= min(one, other) * (1 + MOVED)


def _format_sample(sample: Sample) -> str:
    ratio = f"{sample.ratio:6.2f} x baseline" if sample.ratio is not None else ""
    errors = sample.outcome.errors
    wrong = f"  {errors} errors: {sample.outcome.last_error}" if errors else ""
    noise = "" if sample.stable else "  (noisy)"
    return (
        f"  {sample.load:40} {sample.gateway:34} {sample.pair:17} {sample.cpu:10.1f} us a"
        f" {sample.unit:8}{ratio}{noise}{wrong}"
    )


@contextmanager
def _run_process(
    command: LaunchCommand, folder: Path, cores: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a gateway's process; stop it and its descendants at the end."""
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen(
            [*pin_to_cores(cores), *command.command],
            env={**os.environ, **command.environment},
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield popen
    finally:
        _stop_process(popen)


def _stop_process(popen: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # SIGINT stops without draining
        try:
            os.killpg(popen.pid, number)
            popen.wait(5)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            popen.wait()
        return


def _revision() -> str:
    git = shutil.which("git")
    if git is None:
        return "?"
    result = subprocess.run(
        [git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "?"
