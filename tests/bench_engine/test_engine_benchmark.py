"""The engine benchmark: costs of process trees, token counts, and tables."""

import os
import queue
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.bench_engine.busy_gateway import run_busy_load
from tests.bench_engine.client import count_tokens
from tests.bench_engine.cost import (
    list_process_tree,
    measure_cpu_seconds,
    measure_peak_memory,
    measure_process_memory,
    measure_tree_memory,
)
from tests.bench_engine.peers import HERE, PEERS, build_environment
from tests.bench_engine.running import Measurement, Report
from tests.bench_engine.table import BARS, BEGIN, END, format_tables, replace_tables
from tests.bench_engine.weights import Weights

BUSY = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}]); input()"
LOOP = "import time\nwhile time.process_time() < 0.4: pass"


def test_cpu_time_of_a_process_tree_includes_exited_children() -> None:
    parent = subprocess.Popen([sys.executable, "-c", BUSY.format(LOOP)], stdin=subprocess.PIPE)
    assert parent.stdin is not None

    try:
        while measure_cpu_seconds(parent.pid) < 0.35:
            assert parent.poll() is None
        assert parent.pid in list_process_tree(os.getpid())
        assert measure_tree_memory(os.getpid()) >= measure_process_memory(
            os.getpid()
        ) + measure_process_memory(parent.pid)
    finally:
        parent.stdin.close()
        parent.wait()
    assert measure_cpu_seconds(os.getpid()) >= 0.35
    assert measure_process_memory(parent.pid) == 0


def test_peak_memory_includes_what_has_been_freed() -> None:
    size = 64 << 20
    before = measure_process_memory(os.getpid())
    filled = bytearray(b"x" * size)
    del filled
    assert measure_peak_memory(os.getpid()) >= before + size
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert measure_peak_memory(process.pid) == 0


def test_cpu_time_includes_finished_threads() -> None:
    def busy() -> None:
        sum(range(6_000_000))

    before = measure_cpu_seconds(os.getpid())
    thread = threading.Thread(target=busy)
    thread.start()

    thread.join()

    assert measure_cpu_seconds(os.getpid()) > before


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (
            b'data: {"usage":{"completion_tokens":3}}\n\ndata: {"usage":{"completion_tokens":48}}',
            48,
        ),
        (b'{"usage": {"completion_tokens": 16, "prompt_tokens": 900}}', 16),
        (b'{"tokens": 512}', 512),
    ],
)
def test_last_usage_has_the_token_count(answer: bytes, tokens: int) -> None:
    assert count_tokens(answer) == tokens


def test_response_without_usage_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no usage"):
        count_tokens(b'{"prompt_tokens": 900}')


def make_report(**fields: Any) -> Report:
    measurements = [
        Measurement("ours", 16, [4.0, 6.0, 5.0], [1.0] * 3),
        Measurement("generate-batch", 16, [8.0, 8.0, 8.0], [1.0] * 3),
        Measurement("vllm", 16, [2.0, 3.0, 4.0], [1.0] * 3),
    ]
    values: dict[str, Any] = {
        "machine": "a machine",
        "load": (1.0, 2.0),
        "tokens": 32,
        "rounds": 3,
        "threads": 2,
        "measurements": measurements,
        "missing": {"openvino": "no\nwheel"},
        "memory": {"ours": 10**9, "generate-batch": 0, "vllm": 0},
    }
    return Report(**(values | fields))


def test_speed_goals_use_the_median_ratio_of_the_rounds() -> None:
    text = format_tables(make_report())
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert "| 5.0 (4.0 to 6.0) | 1,000 MB |" in text
    assert "2 threads of each engine" in text
    assert "| 0.62 | met |" in lines["| float32 / transformers' `generate_batch`, float32"]
    assert "| 2.00 | **missed** |" in lines["| float32 / vLLM on CPU, eager, float32"]
    assert "not measured" in lines["| int8 per row / OpenVINO GenAI, Q8_0"]
    assert "- not measured: OpenVINO GenAI: no wheel" in text
    assert not any("llama.cpp" in line for line in lines)

    met = format_tables(
        make_report(
            measurements=[
                *make_report().measurements[1:],
                Measurement("ours", 16, [4.0] * 3, [1.0]),
            ]
        )
    )
    assert "| 0.50 | goal met |" in met


@pytest.mark.parametrize(
    ("ratios", "end"),
    [([0.5, 0.7, 0.4], "0.50 | **missed** |"), ([0.7], "0.70 | met |"), ([0.95], "goal met |")],
)
def test_speed_ratio_with_a_busy_gateway_is_reported(ratios: list[float], end: str) -> None:
    (line,) = [
        line
        for line in format_tables(make_report(busy=ratios)).splitlines()
        if "busy gateway" in line
    ]

    assert line.endswith(end)
    assert "busy gateway" not in format_tables(make_report())


def test_busy_load_sends_requests_until_the_end() -> None:
    requests = queue.SimpleQueue[str]()

    class Listed(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests.put(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Listed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with run_busy_load(server.server_port):
                assert [requests.get(timeout=30) for _ in range(50)] == ["/v1/models"] * 50
        finally:
            server.shutdown()
            thread.join()

    with pytest.raises(RuntimeError, match="nothing answers"), run_busy_load(server.server_port):
        pass


def test_tables_of_a_page_are_replaced() -> None:
    once = replace_tables(
        f"before\n{BEGIN}\nold\n{END}\nafter\n", [make_report(), make_report(threads=1)]
    )
    assert once == replace_tables(once, [make_report(), make_report(threads=1)])
    assert once.index("2 threads of each") < once.index("1 thread of each")
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once


def test_every_speed_goal_and_environment_has_a_peer() -> None:
    for bar in BARS:
        assert {bar.own, bar.peer} <= PEERS.keys()
    envs = {peer.env for peer in PEERS.values()} - {""}
    assert {file.stem for file in (HERE / "peers").glob("*.txt")} == envs


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_command_contains_its_weights_and_port(name: str) -> None:
    place = Path("weights")
    command = [str(part) for part in PEERS[name].command(Weights(*[place] * 5), 8123, 2)]

    assert "8123" in command
    assert "weights" in command


def test_number_of_threads_reaches_the_peers() -> None:
    command = [*map(str, PEERS["ours"].command(Weights(*[Path("weights")] * 5), 8123, 2))]

    assert command[command.index("--threads") + 1] == "2"
    assert build_environment(2)["OMP_NUM_THREADS"] == "2"
