"""``interlingua top`` before a running gateway, in a pipe and in a terminal."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from click.testing import CliRunner

from gateway.board import Frame
from gateway.cli import main
from tests.fault.gateways import GatewayProcess, written
from tests.serving import serving

CONFIGURATION = written(
    backends={
        "echo": {"kind": "echo", "script": ["Hello", " world"]},
        "far": {"dialect": "openai", "workers": ["http://127.0.0.1:9"]},
    },
    models={"m": {"backend": "echo"}, "gone": {"backend": "far"}},
)
HEAD = "MODEL VERSION REQ/S ERR/S TTFT P50 TTFT P95 TOKENS/S"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


@asynccontextmanager
async def busy(folder: Path) -> AsyncIterator[str]:
    """A gateway that has requests all the time; gives the admin listener's URL."""
    async with GatewayProcess(folder, CONFIGURATION) as gateway:

        async def ask() -> None:
            while True:
                for model in ("m", "m", "gone"):
                    body = {
                        "model": model,
                        "stream": True,
                        "messages": [{"role": "user", "content": "x"}],
                    }
                    await gateway.http.post(f"{gateway.urls[0]}/v1/chat/completions", json=body)
                    await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(ask())
            yield gateway.urls[-1]
            asking.cancel()


async def top(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    command = [sys.executable, "-m", "gateway", "top", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | (environment or {}),
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, out.decode()


async def test_one_frame_as_text_and_as_json(tmp_path: Path) -> None:
    async with busy(tmp_path) as url:
        code, said = await top(url, "--once", "--every", "0.5")
        assert code == 0
        assert said.startswith(f"{url}: ")
        assert "\x1b" not in said
        rows = {line.split()[0]: line.split() for line in said.splitlines() if line}
        assert rows["MODEL"] == [*HEAD.split()]
        assert float(rows["m"][2]) > 0
        assert float(rows["m"][3]) == 0
        assert rows["m"][5] == "ms"
        assert float(rows["gone"][2]) == float(rows["gone"][3]) > 0
        assert rows["far"][1] == "http://127.0.0.1:9"
        code, said = await top(url, "--once", "--every", "0.2", "--json")
        frame = msgspec.json.decode(said, type=Frame)
        assert {row.model for row in frame.rows} == {"m", "gone"}
        assert frame.seconds >= 0.2
        assert [worker.error for worker in frame.workers] == ["connect"]


async def test_a_terminal_is_drawn_on_until_ctrl_c_and_given_back(tmp_path: Path) -> None:
    async with busy(tmp_path) as url:
        for colours in (b"", b"\x1b[3"):
            seen = await asyncio.to_thread(drawn, url, {} if colours else {"NO_COLOR": "1"})
            assert seen.startswith(ENTER)
            assert seen.endswith(LEAVE)
            assert seen.count(b"\x1b[H") >= 3
            assert colours in seen
            assert colours or b"\x1b[3" not in seen
            plain = re.sub(rb"\x1b\[[?0-9]*[A-Za-z]", b"", seen)
            assert max(map(len, plain.split(b"\r\n"))) == 50
            assert (b"BACKEND" in seen) == bool(colours)  # the other terminal is too small


SETTLED = ("NO_COLOR", "COLUMNS", "LINES")
"""What the environment may say of a terminal, before the terminal does."""


def drawn(url: str, environment: dict[str, str]) -> bytes:
    """All that is written to a small terminal until three frames are there and Ctrl-C is typed."""
    ours, theirs = pty.openpty()
    lines = 12 if not environment else 5
    plain = {name: told for name, told in os.environ.items() if name not in SETTLED}
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 50, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "top", url, "--every", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=plain | environment,
    )
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"\x1b[H") < 4 and (more := os.read(ours, 1 << 16)):
            seen += more
        process.send_signal(signal.SIGINT)
        while LEAVE not in seen:
            seen += os.read(ours, 1 << 16)
        assert process.wait(10) == 0, seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return seen


async def test_what_can_not_be_read_for_now_is_said_on_the_board(tmp_path: Path) -> None:
    answers = [PAGE, WORKERS, b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0) if len(answers) > 1 else answers[0])

    async with serving(answer) as url:
        code, said = await top(url, "--once", "--every", "0.1")
    assert code == 0
    assert f"{url}/metrics answers 500" in said
    assert "m      1" in said


def _page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


PAGE = _page(
    b"# HELP interlingua_requests_total Requests.\n# TYPE interlingua_requests_total counter\n"
    b'interlingua_requests_total{model="m",version="1",outcome="ok"} 1\n'
)
WORKERS = _page(b'{"backends": {}}')


def test_what_is_no_gateway() -> None:
    result = CliRunner().invoke(main, ["top", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "http://127.0.0.1:9/metrics can't be asked" in result.stderr


async def test_a_page_that_is_something_else() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(_page(b"<html>"))

    async with serving(answer) as url:
        code, said = await top(url, environment={"INTERLINGUA_ADMIN_KEY": "sk-admin"})
    assert code == 2
    assert b"Bearer sk-admin" in heads[0]
    assert f"{url} is no gateway's admin listener" in said


async def test_frames_follow_each_other_in_a_pipe(tmp_path: Path) -> None:
    async with busy(tmp_path) as url:
        with (tmp_path / "said").open("w+b") as said:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "top", url, "--every", "0.1", "--json"),
                stdout=said,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            async with asyncio.timeout(20):
                while (tmp_path / "said").read_bytes().count(b"\n") < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
