"""43: confidential text of clients, workers and the configuration is not disclosed.

Every text that a client or a worker sends contains one canary word, and so do the keys. The word
must never be in the log at its most verbose level, on the admin pages, or in usage rows. The log
has the text of a worker's error, without the key that it quotes.
"""

import hashlib
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cross.clients import CLIENTS
from tests.cross.conftest import PROTOCOLS
from tests.cross.script import RequestOptions
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.fakes import ScriptedWorker

CANARY = "kanari7f3a"
KEY = f"{CANARY}-key"
REQUEST_FIELDS = (
    RequestOptions(),
    RequestOptions(stream=True),
    RequestOptions(stops=(f"{CANARY}-stop",), tool=True),
    RequestOptions(stream=True, stops=(f"{CANARY}-stop",), n=2),
)
TOKEN = f"{CANARY}-token"
REFUSED = (
    f'{{"error": {{"message": "out of memory, said to {TOKEN}", '
    f'"param": "{CANARY}", "code": "{CANARY}"}}}}'
)
PLAIN_FIELDS = frozenset({"role", "type", "model", "tool_choice"})
"""Fields whose values are words of the protocol."""


def insert_canary(value: Any, name: str = "") -> Any:
    """Yield the body with the canary in every text, and with a number replaced by it."""
    match value:
        case str() if name not in PLAIN_FIELDS:
            return f"{CANARY} {value}"
        case dict():
            return {key: insert_canary(one, key) for key, one in value.items()}
        case list():
            return [insert_canary(one, name) for one in value]
        case _:
            return value


def list_request_bodies(model: str) -> Iterator[tuple[str, Any]]:
    """Return paths and bodies: valid requests of every protocol, and invalid variants."""
    for client in CLIENTS:
        for request_fields in REQUEST_FIELDS:
            path = (request_fields.stream and client.stream_path) or client.path
            fields = dict(insert_canary(client.fields(model, request_fields)))
            path = path.replace("MODEL", model)
            yield path, fields
            yield path, fields | {"user": CANARY, "unknown": CANARY, "metadata": {"a": CANARY}}
            for name in fields.keys() - {"model"}:
                yield path, fields | {name: {"a": CANARY}}
            yield path, f'{{"model": "{model}", "{CANARY}'
    embedding = {"model": model, "input": [CANARY]}
    yield "/v1/embeddings", embedding
    yield "/v1/embeddings", embedding | {"dimensions": CANARY}


def build_canary_config(worker: str, usage: Path) -> str:
    return build_config(
        listeners=[{"address": "127.0.0.1:0", "protocols": PROTOCOLS}],
        backends={
            "says": {"kind": "echo"},
            "fails": {"kind": "echo", "fail": {"mode": "error"}},
            "cut": {"kind": "echo", "fail": {"mode": "disconnect", "after_chunks": 1}},
            "worker": {
                "protocol": "openai",
                "workers": [{"url": worker, "auth": {"bearer": TOKEN}}],
                "retries": {"max": 1},
            },
        },
        models={name: {"backend": name} for name in ("says", "fails", "cut", "worker")},
        keys=[{"name": "web", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        observe={"usage": str(usage)},
    )


@pytest.mark.fault(43)
@pytest.mark.slow
async def test_confidential_text_is_not_in_logs_usage_or_admin_pages(
    tmp_path: Path,
) -> None:
    file = tmp_path / "usage.sqlite"
    reply = (
        f"HTTP/1.1 500 {CANARY}\r\nContent-Type: application/json\r\nX-A: {CANARY}\r\n"
        f"Content-Length: {len(REFUSED)}\r\n\r\n{REFUSED}"
    ).encode()
    healthy = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    responses, sent = [], 0
    async with ScriptedWorker([reply], probed=healthy) as worker:
        text = build_canary_config(worker.url, file)
        async with GatewayProcess(tmp_path, text, "--log-level", "debug") as gateway:
            for model in ("says", "fails", "cut", "worker"):
                for path, body in list_request_bodies(model):
                    responses.append(await _send_request(gateway, path, body, KEY))
            responses.append(
                await _send_request(gateway, "/v1/chat/completions", "{}", f"{CANARY}-wrong")
            )
            sent = len(responses)
            pages = [
                (await gateway.http.get(f"{gateway.urls[-1]}{path}")).text
                for path in ("/metrics", "/-/workers", "/-/ready")
            ]

            assert await gateway.stop() == 0

        assert any(CANARY in request.body.decode() for request in worker.requests)

    assert sum(CANARY in one.text for one in responses) > 50
    assert {200, 400, 401, 500} <= {one.status_code for one in responses}
    assert len([one for one in gateway.read_records() if one.protocol]) == sent

    with closing(sqlite3.connect(file)) as rows:
        usage = "\n".join(rows.iterdump())
    assert usage.count("INSERT") > sent / 2

    [texts] = {
        tuple({failure.text for failure in one.worker_failures})
        for one in gateway.read_records()
        if one.worker_failures
    }
    assert texts == ("out of memory, said to ***",)
    for output in (gateway.read_output(), usage, *pages):
        assert CANARY not in output


async def _send_request(gateway: GatewayProcess, path: str, body: Any, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "user-agent": CANARY, "x-canary": CANARY}
    url = f"{gateway.urls[0]}{path}?secret={CANARY}"
    if isinstance(body, str):
        return await gateway.http.post(url, content=body, headers=headers)
    return await gateway.http.post(url, json=body, headers=headers)


def list_processes(pid: int) -> list[int]:
    """A process and all that it started, also in turn."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in list_processes(int(child)))]


@pytest.mark.fault(43)
async def test_command_lines_of_processes_have_no_secret(tmp_path: Path) -> None:
    text = build_canary_config("http://127.0.0.1:1", tmp_path / "usage.sqlite")
    async with GatewayProcess(tmp_path, text, "--processes", "2") as gateway:
        pids = list_processes(gateway.process.pid)
        command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]

    assert len(command_lines) >= 3
    assert all(CANARY.encode() not in line for line in command_lines)


@pytest.mark.fault(43)
async def test_output_of_a_crash_has_no_confidential_text(tmp_path: Path) -> None:
    text = build_canary_config("http://127.0.0.1:1", tmp_path / "usage.sqlite")
    gateway = await GatewayProcess(tmp_path, text, "--log-level", "debug").__aenter__()
    body = {"model": "says", "messages": [{"role": "user", "content": CANARY}]}
    response = await _send_request(gateway, "/v1/chat/completions", body, KEY)
    gateway.process.send_signal(signal.SIGABRT)
    gateway.process.wait(30)
    await gateway.http.aclose()

    assert CANARY in response.text
    assert CANARY not in gateway.read_output()
