"""The admin listener of several processes when these do not answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx
import pytest
from msgspec import Struct

from gateway.multiprocess.admin_proxy import AdminProxy
from gateway.multiprocess.ipc import ProcessReady

if TYPE_CHECKING:
    from gateway.multiprocess.serving_process import ServingProcess


class UnreachableProcess(Struct, eq=False):
    """A process that has exited without the proxy's knowledge."""

    admin_socket: str
    ready_message: ProcessReady | None = ProcessReady((), ())


async def do_nothing() -> object:
    return None


@asynccontextmanager
async def run_admin_proxy(*members: UnreachableProcess) -> AsyncIterator[httpx.AsyncClient]:
    proxy = AdminProxy(
        "127.0.0.1:0",
        lambda: cast("list[ServingProcess]", members),
        lambda: b"own 1.0\n",
        do_nothing,
    )
    async with httpx.AsyncClient(base_url=await proxy.listen(), timeout=30) as http:
        yield http
    await proxy.close()


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/-/workers",
        "/-/status",
        "/-/config",
        "/-/playground/0/v1/models",
        "/-/ready",
        "/-/live",
        "/-/explain/x",
    ],
)
async def test_get_returns_503_if_no_process_is_ready(path: str, tmp_path: Path) -> None:
    """The supervisor's own metrics need the key, which only processes verify."""
    starting = UnreachableProcess(str(tmp_path / "a"), None)
    for members in [(), (starting,), (UnreachableProcess(str(tmp_path / "b")),)]:
        async with run_admin_proxy(*members) as http:
            response = await http.get(path)
        assert response.status_code == 503
        assert response.json() == {"error": {"message": "no process is ready", "field": None}}


async def test_post_returns_503_if_no_process_is_ready() -> None:
    async with run_admin_proxy() as http:
        for path in ("/-/drain", "/-/requests/x/cancel"):
            assert (await http.post(path)).status_code == 503


async def test_slow_request_body_is_rejected_with_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.multiprocess.admin_proxy._BODY_TIMEOUT", 0.05)
    async with run_admin_proxy() as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        writer.write(b"POST /-/workers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")

        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")

        writer.close()
