"""The C programs: which responses the clients count as correct."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from tests.bench.c_programs import build_program, has_tls
from tests.bench.load_generator import TOKENS, LoadTarget, Outcome, Worker, run_load
from tests.bench.loads import Load
from tests.bench.traffic import Request, encode_all
from tests.fault.certificates import Authority
from tests.support.fakes import CLOSE, END, Reply, ScriptedWorker, chunked, make_reply

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/v2/models/m/generate"
ONCE = Load(name="once", clients=2, count=4, seconds=5.0)
STREAM = Load(name="stream", form="stream", clients=2, count=4, seconds=5.0)


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker(60)
    yield one
    one.close()


def make_target(
    port: int, folder: Path, path: str, *, end: str = "", body: str = "{}"
) -> LoadTarget:
    file = folder / "requests"
    file.write_bytes(encode_all([Request(path, [], body.encode())], ["Authorization: Bearer k"]))
    return LoadTarget(port, file, end)


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
def test_unary_responses_are_counted_as_correct(worker: Worker, tmp_path: Path, path: str) -> None:
    load_result = run_load(ONCE, make_target(worker.port, tmp_path, path))
    assert (
        load_result.completed,
        load_result.errors,
        load_result.tokens,
        load_result.connections,
    ) == (4, 0, 4, 2)
    assert load_result.latency is not None
    assert load_result.latency.p50 <= load_result.latency.max

    stats = worker.read_stats()
    assert (stats.requests, stats.streams) == (4, 0)


@pytest.mark.parametrize(("path", "begins"), [(CHAT, "chat.completion"), (TEXT, "text_completion")])
@pytest.mark.parametrize("stream", [False, True])
def test_worker_response_format_matches_the_request(
    worker: Worker, path: str, begins: str, *, stream: bool
) -> None:
    url = f"http://127.0.0.1:{worker.port}{path}"
    text = httpx.post(url, json={"stream": stream}, trust_env=False).text
    data = text.partition("data: ")[2].partition("\n")[0] if stream else text
    one = json.loads(data)

    assert one["object"].startswith(begins)

    inside = (
        one["choices"][0] if path == TEXT else one["choices"][0]["delta" if stream else "message"]
    )
    assert " @000" in inside["text" if path == TEXT else "content"]


@pytest.mark.parametrize("pace", [0, 1000])
@pytest.mark.parametrize(
    ("path", "end"), [(CHAT, "data: [DONE]"), (TEXT, "data: [DONE]"), (f"{GENERATE}_stream", "")]
)
def test_streams_are_counted_as_correct(
    worker: Worker, tmp_path: Path, path: str, end: str, pace: int
) -> None:
    worker.set_pace(pace)
    load_result = run_load(
        STREAM, make_target(worker.port, tmp_path, path, end=end, body='{"stream": true}')
    )

    assert (load_result.completed, load_result.errors, load_result.tokens) == (4, 0, 4 * TOKENS)
    assert load_result.token is not None
    assert load_result.first_token is not None
    assert (load_result.gap is not None) or not pace
    assert worker.read_stats().streams == 4


@pytest.mark.parametrize(("rate", "waited"), [(0, False), (1000, True)])
def test_open_loop_latency_includes_the_wait(
    worker: Worker, tmp_path: Path, rate: int, *, waited: bool
) -> None:
    """With one client and five requests due at once, the last waits for all others."""
    worker.set_pace(500)
    load = Load(name="open", form="stream", clients=1, rate=rate, count=5, seconds=9.0)

    load_result = run_load(load, make_target(worker.port, tmp_path, CHAT, body='{"stream": true}'))

    assert (load_result.completed, load_result.errors, load_result.connections) == (5, 0, 1)
    assert load_result.latency is not None
    assert (load_result.latency.max > load_result.seconds * 1e6 / 2) == waited


def test_large_request_bodies_are_accepted(worker: Worker, tmp_path: Path) -> None:
    load_result = run_load(ONCE, make_target(worker.port, tmp_path, CHAT, body="x" * 1_000_000))
    assert (load_result.completed, load_result.errors) == (4, 0)


@pytest.mark.skipif(not has_tls(), reason="OpenSSL's header files are not installed")
@pytest.mark.parametrize("size", [2, 3_000_000])
async def test_requests_are_sent_over_tls(tmp_path: Path, size: int) -> None:
    received: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            received.append(len(await reader.readexactly(length)))
            writer.write(make_reply(make_tokens(0) + b"x" * 700_000))
        writer.close()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(Authority(tmp_path).issue())

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        target = make_target(port, tmp_path, CHAT, body="x" * size)
        load_result = await asyncio.to_thread(run_load, replace(ONCE, tls=True), target)
        plain = await asyncio.to_thread(run_load, ONCE, target, grace=0.1)

    assert (load_result.completed, load_result.errors, load_result.connections) == (4, 0, 2)
    assert received == [size] * 4
    assert plain.errors


async def test_requests_are_sent_round_robin(tmp_path: Path) -> None:
    """With two clients and five requests, each is sent once before any is repeated."""
    file = tmp_path / "requests"
    paths = [f"/{number}" for number in range(5)]
    file.write_bytes(encode_all([Request(path, ["X-Id: 1"], b"{}") for path in paths]))

    async with ScriptedWorker([make_reply(make_tokens(0))]) as worker:
        port = int(worker.url.rpartition(":")[2])
        load = Load(name="turns", clients=2, count=10, seconds=5.0)
        load_result = await asyncio.to_thread(run_load, load, LoadTarget(port, file))

    assert (load_result.completed, load_result.errors) == (10, 0)
    assert sorted(request.path for request in worker.requests) == sorted(paths * 2)


def test_malformed_request_file_is_rejected(worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / "requests"
    for content in (b"", b"100\nPOST / HTTP/1.1\r\n\r\n", b"POST"):
        file.write_bytes(content)
        with pytest.raises(subprocess.CalledProcessError):
            run_load(ONCE, LoadTarget(worker.port, file))


def make_tokens(*numbers: int) -> bytes:
    return b"".join(b" @%03d%014d" % (number, 1) for number in numbers)


EVERY = make_tokens(*range(TOKENS))
ONE = len(make_tokens(0))
WRONG = "a token is lost, doubled or out of its place"
FEW = "there are too few tokens"
BROKE = "the answer broke off"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ([chunked(EVERY, b"[DONE]")], ""),
        ([chunked(EVERY[:700], EVERY[700:], b"[DONE]")], ""),
        ([make_reply(EVERY + b"[DONE]")], ""),
        ([chunked(EVERY)], "it has no end"),
        ([chunked(EVERY[:-ONE], b"[DONE]")], FEW),
        ([chunked(EVERY, EVERY[-ONE:], b"[DONE]")], WRONG),
        ([chunked(EVERY[: 10 * ONE], EVERY[11 * ONE :], b"[DONE]")], WRONG),
        ([chunked(EVERY[: 2 * ONE], EVERY[ONE:], b"[DONE]")], WRONG),
        ([chunked(make_tokens(1, 0, *range(2, TOKENS)), b"[DONE]")], WRONG),
        ([make_reply(EVERY + b"[DONE]", "500 Oops")], "the status is not 200"),
        ([chunked(EVERY, b"[DONE]").removesuffix(END), b""], "time is up"),
        ([make_reply(EVERY + b"[DONE]")[:-9], b""], "time is up"),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + EVERY], "time is up"),
        ([b"x" * 20_000], BROKE),
    ],
)
async def test_incorrect_response_is_counted_as_an_error(
    tmp_path: Path, reply: Reply, why: str
) -> None:
    async with ScriptedWorker(reply) as worker:
        port = int(worker.url.rpartition(":")[2])
        load_result = await send_once(make_target(port, tmp_path, "/", end="[DONE]"))
    assert (load_result.last_error, load_result.errors) == (why, int(bool(why)))


async def test_truncated_response_is_counted_as_an_error(tmp_path: Path) -> None:
    async with ScriptedWorker([chunked(EVERY).removesuffix(END), CLOSE]) as worker:
        port = int(worker.url.rpartition(":")[2])
        load_result = await send_once(make_target(port, tmp_path, "/"))
    assert (load_result.last_error, load_result.errors) == (BROKE, 1)


async def send_once(one: LoadTarget) -> Outcome:
    load = Load(name="one", form="stream", clients=1, count=1, seconds=0.3)
    return await asyncio.to_thread(run_load, load, one, grace=0.3)


def test_program_is_rebuilt_only_if_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench.c_programs.HERE", tmp_path)
    source = tmp_path / "small.c"
    source.write_text("int main(void) { return 0; }")
    first = build_program("small", tmp_path)
    build_time = first.stat().st_mtime_ns

    assert build_program("small", tmp_path) == first
    assert first.stat().st_mtime_ns == build_time

    source.write_text("int main(void) { return 1; }")
    assert build_program("small", tmp_path) != first

    source.write_text("int main(void) { return")
    with pytest.raises(RuntimeError, match=r"small\.c can't be compiled"):
        build_program("small", tmp_path)

    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="no C compiler"):
        build_program("small", tmp_path)
