"""A run: every gateway is started, and each load is put on one after the other, round by round.

So what is compared stands side by side in time, and a neighbour on the machine disturbs all of it
alike. Before and after each group of them the baseline is measured; where it moved, the group is
measured once more if there is time, and marked if it moved again. Everything is bounded in count
and in time.
"""

import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx
import msgspec
from msgspec import Struct

from tests.bench import process
from tests.bench.c_programs import CACHE
from tests.bench.gateways import Gateway, LaunchCommand, LaunchContext, ProtocolPair
from tests.bench.load_generator import OPEN, Load, LoadTarget, Outcome, Worker, command, run_load
from tests.bench.results import MOVED, Results, Sample, StartMeasurement
from tests.bench.traffic import KEYS, Request, encode_all

_FIRST_REQUEST: Final = Load(name="the first request")
_WARM_UP: Final = (
    msgspec.structs.replace(_FIRST_REQUEST, count=400, clients=8, seconds=1.0),
    Load(name="the first streams", form="stream", count=16, clients=8, seconds=1.0),
)
_WATCHED: Final = 1.0
"""Seconds for which the rest of the machine is watched, at the beginning and at the end."""
_CORES: Final = 2
"""With as many, the gateway has one for itself."""
_MARGIN: Final = 120
"""Seconds by which a run may be late: what is begun is brought to its end."""
_OPEN_FILES: Final = 32_768

Log = Callable[[str], None]


class Plan(Struct, frozen=True, kw_only=True):
    """``gateways``: the first is the baseline. ``seconds`` is how long all of it may take."""

    gateways: Sequence[Gateway]
    loads: Sequence[Load]
    rounds: int
    seconds: int
    group: int
    """How many are measured between one measurement of the baseline and the next."""
    tries: int
    """How often a group is measured at most."""
    streams: bool
    """Whether a thousand open streams are tried."""
    against: str = ""
    """The gateway that ours is compared with in the end."""


class RunningGateway(Struct, frozen=True):
    """A gateway that answers."""

    gateway: Gateway
    pid: int
    asked: Callable[[ProtocolPair, Load], LoadTarget]


class StartFailed(Exception):
    """A gateway does not start, or does not answer rightly."""


@contextmanager
def lock_machine() -> Iterator[None]:
    """One run at a time on this machine. Raises BlockingIOError while there is another."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def run(plan: Plan, log: Log) -> Results:
    """Carry the plan out. Raises BlockingIOError while another run goes on."""
    with lock_machine(), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, most), most))
        others = process.busy(_WATCHED)
        session = _Runner(plan, Path(folder), log)
        with session.client, closing(Worker(plan.seconds + _MARGIN, session.client_core)) as worker:
            session.run_rounds(worker)
        return Results(
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            machine=process.machine(),
            revision=_revision(),
            others=max(others, process.busy(_WATCHED)),
            baseline=session.baseline,
            versions=session.versions,
            missing=session.missing,
            against=plan.against if plan.against not in session.missing else "",
            samples=session.samples,
            starts=session.starts,
            steps=[],
        )


class _Runner:
    """The rounds of a plan, and what they found."""

    def __init__(self, plan: Plan, folder: Path, log: Log) -> None:
        self._plan = plan
        self._folder = folder
        self._say = log
        self._until = time.monotonic() + plan.seconds
        self.client = httpx.Client(trust_env=False, timeout=10)
        cores = sorted(os.sched_getaffinity(0))
        self._gateway_core = cores[0] if len(cores) >= _CORES else None
        self.client_core = cores[-1] if len(cores) >= _CORES else None
        """Where the clients and the worker run."""
        self.baseline = ""
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.samples: list[Sample] = []
        self.starts: list[StartMeasurement] = []

    def run_rounds(self, worker: Worker) -> None:
        """Round by round, as long as there is time."""
        for gateway in self._plan.gateways:
            if (version := gateway.version()) is None:
                self.missing[gateway.name] = f"not installed: {gateway.get}"
            else:
                self.versions[gateway.name] = version
        for number in range(1, self._plan.rounds + 1):
            if self._time_is_up:
                break
            self._say(f"round {number} of {self._plan.rounds}")
            with ExitStack() as stack:
                running = self._start_gateways(number, worker, stack)
                for load in self._plan.loads:
                    self._run_load(number, load, running, worker)
                self._measure_memory(number, running, worker)

    @property
    def _time_is_up(self) -> bool:
        return time.monotonic() > self._until

    def _start_gateways(
        self, number: int, worker: Worker, stack: ExitStack
    ) -> list[RunningGateway]:
        running = []
        for gateway in self._plan.gateways:
            if gateway.name in self.missing:
                continue
            try:
                one, seconds = self._start_gateway(gateway, worker, stack)
            except StartFailed as why:
                self.missing[gateway.name] = f"does not run here (round {number}): {why}"
                self._say(f"  {gateway.name}: {why}")
                continue
            running.append(one)
            memory = process.memory(one.pid)
            self.starts.append(StartMeasurement(gateway.name, number, seconds, memory, memory))
        return running

    def _start_gateway(
        self, gateway: Gateway, worker: Worker, stack: ExitStack
    ) -> tuple[RunningGateway, float]:
        """Start a gateway and time its first response, in seconds. Raises StartFailed."""
        folder = self._folder / gateway.name
        folder.mkdir(exist_ok=True)
        context = LaunchContext(_free_port(), worker.port, folder, _free_port())
        began, process_ = time.monotonic(), worker.process
        if gateway.start is None:
            context = LaunchContext(worker.port, worker.port, folder, worker.port)
        else:
            process_ = stack.enter_context(
                _run_process(gateway.start(context), folder, self._gateway_core)
            )
        headers = gateway.headers(context)
        shared = not headers and gateway.keys == len(KEYS)

        def asked(pair: ProtocolPair, load: Load) -> LoadTarget:
            name = f"{pair.name}-{load.form}-{load.size if load.repeated else 'varied'}.requests"
            file = (self._folder if shared else folder) / name
            if not file.exists():
                file.write_bytes(encode_all(pair.requests(load, gateway.keys), headers))
            return LoadTarget(context.port, file, pair.end)

        one = RunningGateway(gateway, process_.pid, asked)
        seconds = []
        for pair in gateway.pairs:
            first = pair.requests(_FIRST_REQUEST, gateway.keys)[0]
            self._wait_for_response(
                process_, context.port, first, headers, began + gateway.start_timeout
            )
            seconds.append(time.monotonic() - began)
        for pair in gateway.pairs:
            self._warm_up(one, pair, worker)
        return one, seconds[0]

    def _wait_for_response(
        self,
        started: "subprocess.Popen[bytes]",
        port: int,
        request: Request,
        headers: Sequence[str],
        until: float,
    ) -> None:
        """Until it answers as it should. Raises StartFailed."""
        named = dict(header.split(": ", 1) for header in (*request.headers, *headers))
        url, why = f"http://127.0.0.1:{port}{request.path}", ""
        while time.monotonic() < until and started.poll() is None:
            try:
                answer = self.client.post(url, content=request.body, headers=named)
            except httpx.HTTPError as error:
                why = str(error)
            else:
                if answer.status_code == httpx.codes.OK and " @000" in answer.text:
                    return
                why = f"{answer.status_code} {answer.text[:200]}"
            time.sleep(0.01)
        raise StartFailed(f"no answer on {request.path}: {why}")

    def _warm_up(self, one: RunningGateway, pair: ProtocolPair, worker: Worker) -> None:
        worker.pace(0)
        for load in _WARM_UP:
            if load.form in one.gateway.forms:
                found = run_load(load, one.asked(pair, load), self.client_core)
                if found.errors:
                    raise StartFailed(f"{pair.name}, {load.form}: {found.why}")

    def _run_load(
        self, number: int, load: Load, running: Sequence[RunningGateway], worker: Worker
    ) -> None:
        """A load on each gateway, with the baseline between them."""
        worker.pace(load.pace)
        able = [one for one in running if load.form in one.gateway.forms]
        first = able[0] if able and able[0] is running[0] else None
        names = dict.fromkeys(pair.name for one in able for pair in one.gateway.pairs)
        pairs = [
            (one, pair)
            for name in names
            for one in able
            for pair in one.gateway.pairs
            if pair.name == name
        ]
        if number % 2 == 0:
            pairs.reverse()  # whoever is measured first has no advantage
        before = self._measure_baseline(load, first)
        for start in range(0, len(pairs), self._plan.group):
            if self._time_is_up:
                self._say(f"  {load.name}: time is up, and the rest is left out")
                return
            before = self._measure_group(
                number, load, pairs[start : start + self._plan.group], first, before
            )

    def _measure_group(
        self,
        number: int,
        load: Load,
        pairs: Sequence[tuple[RunningGateway, ProtocolPair]],
        baseline: RunningGateway | None,
        before: float | None,
    ) -> float | None:
        """Measure these; gives what the baseline took after them."""
        for left in reversed(range(self._plan.tries)):
            found = [(one, pair, *self._measure_cpu(load, one, pair)) for one, pair in pairs]
            after = self._measure_baseline(load, baseline)
            steady = before is None or after is None or _is_close(before, after)
            beside = None if before is None or after is None else (before + after) / 2
            before = after
            if steady or not left:
                self._record_samples(number, load, found, beside, steady=steady)
                break
        return before

    def _record_samples(
        self,
        number: int,
        load: Load,
        found: Sequence[tuple[RunningGateway, ProtocolPair, float, Outcome]],
        beside: float | None,
        *,
        steady: bool,
    ) -> None:
        for one, pair, cpu, outcome in found:
            name = one.gateway.name
            sample = Sample(
                name, pair.name, load.name, load.unit, number, cpu, beside, steady, outcome
            )
            self.samples.append(sample)
            self._say(_format_sample(sample))

    def _measure_baseline(self, load: Load, baseline: RunningGateway | None) -> float | None:
        if baseline is None:
            return None
        self.baseline = baseline.gateway.name
        return self._measure_cpu(load, baseline, baseline.gateway.pairs[0])[0]

    def _measure_cpu(
        self, load: Load, one: RunningGateway, pair: ProtocolPair
    ) -> tuple[float, Outcome]:
        """What a load costs the gateway, in microseconds for each of its units."""
        before = process.cpu(one.pid)
        outcome = run_load(load, one.asked(pair, load), self.client_core)
        used = process.cpu(one.pid) - before
        units = outcome.tokens if load.unit == "token" else outcome.completed
        return used / 1000 / max(units, 1), outcome

    def _measure_memory(
        self, number: int, running: Sequence[RunningGateway], worker: Worker
    ) -> None:
        """What is in memory when all is done; and with a thousand streams, in the first round."""
        for place, began in enumerate(self.starts):
            found = [one for one in running if one.gateway.name == began.gateway]
            if began.round != number or not found or found[0].gateway.start is None:
                continue
            told = msgspec.structs.replace(began, after=process.memory(found[0].pid))
            opens = self._plan.streams and number == 1 and OPEN.form in found[0].gateway.forms
            if opens and not self._time_is_up:
                told = self._measure_open_streams(told, found[0], worker)
            self.starts[place] = told

    def _measure_open_streams(
        self, began: StartMeasurement, one: RunningGateway, worker: Worker
    ) -> StartMeasurement:
        worker.pace(OPEN.pace)
        asked = one.asked(one.gateway.pairs[0], OPEN)
        opening = [*command(OPEN, asked, self.client_core), "grace=30"]
        with subprocess.Popen(opening, stdout=subprocess.PIPE) as load:
            time.sleep(OPEN.seconds + 2)
            memory = process.memory(one.pid) - began.after
            told, _ = load.communicate()
        outcome = msgspec.json.decode(told, type=Outcome)
        failed = f", {outcome.errors} failed: {outcome.why}" if outcome.errors else ""
        self._say(f"  {began.gateway}: {memory:.1f} MB for {OPEN.clients} open streams{failed}")
        return msgspec.structs.replace(began, streams=memory, streams_failed=outcome.errors)


def _is_close(one: float, other: float) -> bool:
    return max(one, other) <= min(one, other) * (1 + MOVED)


def _format_sample(sample: Sample) -> str:
    beside = f"{sample.ratio:6.2f} x baseline" if sample.ratio is not None else ""
    wrong = f"  {sample.outcome.errors} errors: {sample.outcome.why}" * bool(sample.outcome.errors)
    noise = "" if sample.steady else "  (noisy)"
    return (
        f"  {sample.load:28} {sample.gateway:28} {sample.pair:17} {sample.cpu:10.1f} us a"
        f" {sample.unit:8}{beside}{noise}{wrong}"
    )


@contextmanager
def _run_process(
    start: LaunchCommand, folder: Path, core: int | None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A gateway's process, with all that it starts itself."""
    taskset = shutil.which("taskset")
    pinned = [] if core is None or taskset is None else [taskset, "-c", str(core)]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(
            [*pinned, *start.command],
            env={**os.environ, **start.environment},
            cwd=start.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        _stop_process(started)


def _stop_process(started: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # SIGINT waits for nobody
        try:
            os.killpg(started.pid, number)
            started.wait(5)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            started.wait()
        return


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _revision() -> str:
    git = shutil.which("git")
    if git is None:
        return "?"
    found = subprocess.run(
        [git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "?"
