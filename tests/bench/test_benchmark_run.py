"""A minimal run with real processes stays within its bounds."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.bench import interlingua, process, runner
from tests.bench.gateways import OPENAI, Gateway, LaunchCommand, LaunchContext, make_constant
from tests.bench.interlingua import (
    ALL_FEATURES,
    BARE_SERVER,
    INTERLINGUA,
    MANY_MODELS_AND_KEYS,
)
from tests.bench.loads import OPEN, Kind, Load, Traffic
from tests.bench.runner import Plan, lock_machine, run

KINDS: tuple[Kind, ...] = ("repeated", "images", "embeddings")
UNARY = Load(name="unary", clients=4, count=40, seconds=5.0)
STREAM = Load(name="stream", form="stream", clients=2, count=4, seconds=5.0, pace=100)
LOADS = [UNARY, STREAM]
DIRECT = replace(interlingua.DIRECT, loads=None)
ECHO = replace(BARE_SERVER, loads=None)
ABSENT = Gateway(name="absent", start=None, version=lambda: None, install_hint="ask for it")


@pytest.fixture(autouse=True)
def isolate_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a lock of the test's own, and measure no other load."""
    monkeypatch.setattr(runner, "CACHE", tmp_path)
    monkeypatch.setattr(runner, "_WATCH_TIME", 0.01)


def make_failing_start(messages: str) -> Callable[[LaunchContext], LaunchCommand]:
    return lambda context: LaunchCommand([sys.executable, "-c", messages])


def make_plan(*gateways: Gateway, seconds: int = 60, rounds: int = 1) -> Plan:
    return Plan(
        gateways=gateways,
        loads=LOADS,
        rounds=rounds,
        seconds=seconds,
        group_size=2,
        attempts=2,
    )


def test_every_gateway_runs_every_supported_load() -> None:
    messages: list[str] = []
    fails = Gateway(
        name="fails",
        start=make_failing_start("raise SystemExit(1)"),
        version=make_constant("1"),
        pairs=(OPENAI,),
    )
    results = run(make_plan(ECHO, DIRECT, ABSENT, fails, rounds=2), messages.append)

    keys = results.list_keys()
    both = [(DIRECT.name, OPENAI.name, load) for load in ("unary", "stream")]

    assert sorted(keys) == sorted([(BARE_SERVER.name, OPENAI.name, "unary"), *both])
    assert {sample.round for sample in results.samples} == {1, 2}
    assert [results.errors(key) for key in keys] == [0] * len(keys)
    assert all(sample.cpu > 0 for sample in results.samples)
    assert {one.load for one in results.samples if one.ratio is not None} == {"unary"}
    assert results.baseline == BARE_SERVER.name
    assert results.missing["absent"] == "not installed: ask for it"
    assert results.missing["fails"].startswith("does not run here (round 1): no answer on /v1/chat")
    assert messages[:2] == ["absent is left out: not installed: ask for it", "round 1 of 2"]


@pytest.mark.slow
def test_gateway_has_no_errors_in_any_protocol_pair() -> None:
    every = [
        *LOADS,
        *(
            replace(load, name=f"{kind} {load.form}", traffic=Traffic(kind=kind, size=200_000))
            for load in LOADS
            for kind in KINDS
            if kind != "embeddings" or load is UNARY
        ),
        replace(UNARY, name="tools", traffic=Traffic(tools=1)),
        replace(STREAM, name="streamed tools", traffic=Traffic(tools=1)),
        replace(UNARY, name="tls", tls=True, gateways=frozenset({INTERLINGUA.name})),
    ]
    variants = [
        replace(one, loads=frozenset({"unary", "stream"}))
        for one in (ALL_FEATURES, MANY_MODELS_AND_KEYS)
    ]
    plan = replace(make_plan(INTERLINGUA, *variants), loads=every)
    results = run(plan, lambda _: None)

    assert not results.missing

    keys = results.list_keys()
    assert {key[0] for key in keys} == {one.name for one in plan.gateways}
    assert {key[2] for key in keys} == {load.name for load in every}
    assert {key[1] for key in keys} == {pair.name for pair in INTERLINGUA.pairs}
    assert [results.errors(key) for key in keys] == [0] * len(keys)
    assert all(
        one.memory > 1 and one.memory_after > 1 and one.seconds > 0 for one in results.starts
    )
    assert len(results.starts) == len(plan.gateways)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_open_streams_and_processes_are_measured(
    monkeypatch: pytest.MonkeyPatch, *, apart: bool
) -> None:
    small = replace(OPEN, clients=50, count=50, pace=100_000)
    monkeypatch.setattr(runner, "OPEN", small)
    monkeypatch.setattr(runner, "_SCALING_ROUNDS", 1)
    monkeypatch.setattr(runner, "_APART", 2 if apart else 1_000)
    plan = replace(make_plan(DIRECT), loads=[], open_streams=[INTERLINGUA, ABSENT], scaling=True)
    results = run(plan, lambda _: None)
    [streams] = results.open_streams

    assert (streams.gateway, streams.streams) == (INTERLINGUA.name, 50)
    assert streams.per_stream > 1
    assert [one.processes for one in results.scaling] == [1, 2]
    assert [one.apart for one in results.scaling] == [apart, apart]
    assert results.compute_scaling() is not None


def test_order_of_gateways_is_reversed_every_round() -> None:
    """So no gateway always precedes another."""
    other = replace(DIRECT, name="other")
    results = run(replace(make_plan(DIRECT, other, rounds=2), against="other"), lambda _: None)
    order = [(one.round, one.gateway) for one in results.samples if one.load == "unary"]

    assert order == [(1, DIRECT.name), (1, "other"), (2, "other"), (2, DIRECT.name)]
    assert results.against == "other"


def test_missing_gateway_is_not_compared() -> None:
    results = run(replace(make_plan(DIRECT, ABSENT), against="absent"), lambda _: None)
    assert results.against == ""
    assert "absent" in results.missing


def test_gateway_with_incorrect_responses_is_not_measured() -> None:
    response = "HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\n @000"
    script = (
        "import socket, sys\n"
        "one = socket.create_server(('127.0.0.1', {port}))\n"
        "while True:\n"
        "    each = one.accept()[0]; each.recv(9999); each.sendall(b'"
        + response
        + "'); each.close()\n"
    )
    wrong = Gateway(
        name="wrong",
        start=lambda context: LaunchCommand(
            [sys.executable, "-c", script.format(port=context.port)]
        ),
        version=make_constant("1"),
        pairs=(OPENAI,),
    )

    results = run(make_plan(wrong), lambda _: None)

    assert results.samples == []
    assert "wrong" in results.missing


def test_run_stops_at_its_time_limit() -> None:
    messages: list[str] = []
    results = run(make_plan(DIRECT, seconds=0, rounds=3), messages.append)
    assert results.samples == []


def test_concurrent_runs_are_prevented() -> None:
    with lock_machine(), pytest.raises(BlockingIOError):
        run(make_plan(DIRECT), lambda _: None)
    with lock_machine():
        pass  # the lock is free again


def test_process_usage_includes_its_children() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    busy = "b = bytearray(40 << 20); sum(range(5_000_000)); print(flush=True); input()"

    with subprocess.Popen(
        [sys.executable, "-c", script, busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None

        parent.stdout.readline()
        assert len([*process.list_tree(parent.pid)]) == 2
        assert process.read_memory(parent.pid) > 40
        assert process.read_cpu_time(parent.pid) > 10_000_000

        parent.communicate(b"\n")

    assert process.read_cpu_time(parent.pid) == 0
    assert process.read_memory(parent.pid) == 0.0


def test_machine_load_and_description_are_read() -> None:
    assert 0 <= process.measure_machine_load(0.01) <= 1
    assert "cores of" in process.describe_machine()
