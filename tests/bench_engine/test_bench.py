"""What the figures are made of: costs of process trees, counts of tokens, tables."""

import os
import queue
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.bench_engine.busy import busy
from tests.bench_engine.client import counted
from tests.bench_engine.cost import resident, resident_alone, spent, tree
from tests.bench_engine.peers import HERE, PEERS
from tests.bench_engine.running import Measured, Report
from tests.bench_engine.table import BARS, BEGIN, END, renewed, tables
from tests.bench_engine.weights import Weights

BUSY = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}]); input()"
LOOP = "import time\nwhile time.process_time() < 0.4: pass"


def test_a_tree_is_charged_for_children_that_have_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", BUSY.format(LOOP)], stdin=subprocess.PIPE)
    assert parent.stdin is not None
    try:
        while spent(parent.pid) < 0.35:
            assert parent.poll() is None
        assert parent.pid in tree(os.getpid())
        assert resident(os.getpid()) >= resident_alone(os.getpid()) + resident_alone(parent.pid)
    finally:
        parent.stdin.close()
        parent.wait()
    assert spent(os.getpid()) >= 0.35
    assert resident_alone(parent.pid) == 0


def test_threads_that_have_ended_count() -> None:
    def busy() -> None:
        sum(range(6_000_000))

    before = spent(os.getpid())
    thread = threading.Thread(target=busy)
    thread.start()
    thread.join()
    assert spent(os.getpid()) > before


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
def test_the_last_usage_counts(answer: bytes, tokens: int) -> None:
    assert counted(answer) == tokens


def test_an_answer_without_usage_is_none() -> None:
    with pytest.raises(RuntimeError, match="no usage"):
        counted(b'{"prompt_tokens": 900}')


def report(**fields: Any) -> Report:
    measured = [
        Measured("ours", 16, [4.0, 6.0, 5.0], [1.0] * 3),
        Measured("generate-batch", 16, [8.0, 8.0, 8.0], [1.0] * 3),
        Measured("vllm", 16, [2.0, 3.0, 4.0], [1.0] * 3),
    ]
    given: dict[str, Any] = {
        "machine": "a machine",
        "load": (1.0, 2.0),
        "tokens": 32,
        "rounds": 3,
        "measured": measured,
        "missing": {"openvino": "no\nwheel"},
        "memory": {"ours": 10**9, "generate-batch": 0, "vllm": 0},
    }
    return Report(**(given | fields))


def test_bars_are_medians_of_the_rounds_own_ratios() -> None:
    said = tables(report())
    lines = {line.split(" | ")[0]: line for line in said.splitlines()}
    assert "| 5.0 (4.0 to 6.0) | 1,000 MB |" in said
    assert "| 0.62 | met |" in lines["| float32 / transformers' `generate_batch`, float32"]
    assert "| 2.00 | **missed** |" in lines["| float32 / vLLM on CPU, eager, float32"]
    assert "not measured" in lines["| int8 per row / OpenVINO GenAI, Q8_0"]
    assert "- not measured: OpenVINO GenAI: no wheel" in said
    met = tables(report(measured=[*report().measured[1:], Measured("ours", 16, [4.0] * 3, [1.0])]))
    assert "| 0.50 | goal met |" in met


@pytest.mark.parametrize(
    ("ratios", "end"),
    [([0.5, 0.7, 0.4], "0.50 | **missed** |"), ([0.7], "0.70 | met |"), ([0.95], "goal met |")],
)
def test_speed_ratio_with_a_busy_gateway(ratios: list[float], end: str) -> None:
    (line,) = [line for line in tables(report(busy=ratios)).splitlines() if "busy gateway" in line]
    assert line.endswith(end)
    assert "busy gateway" not in tables(report())


def test_what_is_kept_busy_is_asked_until_the_end() -> None:
    asked = queue.SimpleQueue[str]()

    class Listed(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.put(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Listed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with busy(server.server_port):
                assert [asked.get(timeout=30) for _ in range(50)] == ["/v1/models"] * 50
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(RuntimeError, match="nothing answers"), busy(server.server_port):
        pass


def test_a_page_gets_its_tables_anew() -> None:
    once = renewed(f"before\n{BEGIN}\nold\n{END}\nafter\n", report())
    assert once == renewed(once, report())
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once


def test_every_bar_and_environment_is_known() -> None:
    for bar in BARS:
        assert {bar.ours, bar.peer} <= PEERS.keys()
    envs = {peer.env for peer in PEERS.values()} - {""}
    assert {file.stem for file in (HERE / "peers").glob("*.txt")} == envs


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_one_thread_and_the_port(name: str) -> None:
    place = Path("weights")
    command = [str(part) for part in PEERS[name].command(Weights(*[place] * 4), 8123)]
    assert "8123" in command
    assert "weights" in command
