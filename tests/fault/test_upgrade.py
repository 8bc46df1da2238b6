"""An upgrade in place (49): a new process takes over the listeners, and no request is lost."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.runtime.handover import InheritedSockets
from tests.fault.gateway_process import build_config
from tests.fault.protocol_clients import DONE, WELL, build_event
from tests.fault.upgrade import GatewayChain, run_upgrades
from tests.support.fakes import CHUNKED, END, ScriptedWorker, chunk

RATE = 100.0
"""Requests per second that a shared machine can send. ``upgrade.py`` has an option for it."""
SLOW = {"echo": {"kind": "echo", "script": ["t0 ", "t1 ", "t2 "], "delay": "300ms"}}
LISTENER = {"address": "127.0.0.1:0", "protocols": ["openai"]}
SERVE = (sys.executable, "-m", "gateway", "serve")
REQUEST = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.fault(49)
@pytest.mark.slow
async def test_upgrade_under_load_loses_no_request(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """This holds in every protocol, for streams and unary responses, on all connections."""
    result = await run_upgrades(tmp_path, upgrades=2, rate=RATE)
    record_property("requests a second", round(result.rate))

    assert result.history.violations() == []
    assert result.lost == 0
    assert result.codes == [0, 0]
    assert len(result.history.observations) > 100, "too few requests were sent"


async def get_status_on_new_connection(url: str) -> int:
    """Send a request on a new connection and return the status."""
    async with httpx.AsyncClient(timeout=30) as client:
        return (await client.get(f"{url}/v1/models")).status_code


@pytest.mark.fault(49)
async def test_running_stream_finishes_in_the_old_process(tmp_path: Path) -> None:
    """The listeners, the admin listener's too, and the upgrade socket belong to the new process."""
    go_on = asyncio.Event()
    first, rest = (
        CHUNKED + chunk(build_event("one")),
        chunk(build_event(" two", "stop") + DONE) + END,
    )

    async with ScriptedWorker([first, go_on, rest], probed=WELL) as worker:
        pool = {"protocol": "openai", "workers": [worker.url]}
        line = GatewayChain(
            tmp_path, build_config(backends={"pool": pool}, models={"m": {"backend": "pool"}})
        )
        old = await line.start()
        try:
            url = f"{old.urls[0]}/v1/chat/completions"
            async with old.http.stream("POST", url, json=REQUEST) as stream:
                text = stream.aiter_text()
                received = await anext(text)
                new = await line.start()
                assert new.urls == old.urls
                assert old.process.poll() is None
                assert await get_status_on_new_connection(new.urls[0]) == httpx.codes.OK
                ready = await new.http.get(f"{new.urls[-1]}/-/ready")
                assert ready.json() == {"status": "ready"}
                go_on.set()
                received += "".join([part async for part in text])
            assert received.endswith("data: [DONE]\n\n")
        finally:
            await line.close()

    assert not (tmp_path / "handover").exists()


@pytest.mark.fault(49)
async def test_failed_new_process_leaves_the_old_one_serving(tmp_path: Path) -> None:
    """The new process has the sockets already when it exits, with an error or silently."""
    line = GatewayChain(tmp_path, build_config(backends=SLOW))
    old = await line.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            here = {"address": f"127.0.0.1:{taken.getsockname()[1]}", "protocols": ["openai"]}
            line.file.write_text(build_config(listeners=[LISTENER, here]))
            with pytest.raises(AssertionError, match="can't listen"):
                await line.start()
        with InheritedSockets(str(tmp_path / "handover")) as heir:
            [taken] = heir.take_sockets(("127.0.0.1:0", 0))
            taken.close()
        assert old.process.poll() is None
        for _ in range(5):
            assert await get_status_on_new_connection(old.urls[0]) == httpx.codes.OK
        line.file.write_text(build_config())
        new = await line.start()
        assert new.urls == old.urls
    finally:
        await line.close()


def close_first_connection(listener: socket.socket) -> None:
    """Close the first connection without an answer."""
    listener.accept()[0].close()


@pytest.mark.fault(49)
def test_handover_without_sockets_ends_the_start_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "handover"
    file = tmp_path / "gateway.yaml"
    file.write_text(build_config())

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        Thread(target=close_first_connection, args=[other]).start()
        command = (*SERVE, str(file), "--handover", str(path))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)

    assert done.returncode == 1
    assert "can't listen: the gateway that runs there gives nothing" in done.stderr


@pytest.mark.fault(49)
def test_handover_is_rejected_with_several_processes(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(build_config())
    command = ["serve", str(file), "--processes", "2", "--handover", "x"]

    done = CliRunner().invoke(main, command)

    assert (done.exit_code, "works only with one process" in done.output) == (2, True)
