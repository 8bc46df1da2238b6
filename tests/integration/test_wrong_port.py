"""Requests at the wrong port get an error that names the right one.

A pool of the wrong protocol is named in the log, with the right one.
"""

import asyncio
import re

import pytest

from backends.pool.pool import PoolBackend
from tests.conftest import RunningGateway, Serve
from tests.support.fakes import make_reply
from tests.support.ports import reserve_port
from tests.support.tcp_server import run_server

pytestmark = pytest.mark.asyncio
CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, ollama]}]
admin: {address: "127.0.0.1:ADMIN", sha256: DIGEST}
backends: {b: {kind: echo, script: [fine]}}
models: {m: {backend: b}}
""".replace("DIGEST", "0" * 64)


async def serve_on(serve: Serve, admin_port: int) -> RunningGateway:
    return await serve(CONFIG.replace("ADMIN", str(admin_port)))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/api/x")]
)
async def test_admin_listener_names_the_listeners_of_models(
    serve: Serve, method: str, path: str
) -> None:
    """Given a client's key, which is not the admin key."""
    gateway = await serve_on(serve, 0)
    headers = {"Authorization": "Bearer sk-client"}
    response = await gateway.http.request(method, f"{gateway.admin}{path}", headers=headers)

    assert response.status_code == 404
    assert response.json()["error"]["message"] == (
        f"this is the admin listener; models are served at {gateway.url}"
    )


async def test_unknown_paths_of_the_admin_listener_still_need_the_key(serve: Serve) -> None:
    gateway = await serve_on(serve, 0)

    assert (await gateway.http.get(f"{gateway.admin}/-/nothing")).status_code == 401


@pytest.mark.parametrize("path", ["/metrics", "/-/ui/", "/-/status", "/-/ready"])
async def test_listener_of_models_names_the_admin_listener(serve: Serve, path: str) -> None:
    admin_port = reserve_port()
    gateway = await serve_on(serve, admin_port)
    response = await gateway.http.get(path)

    assert response.status_code == 404
    assert f"it is at http://127.0.0.1:{admin_port}/-/ui/" in response.json()["error"]["message"]


async def test_listener_without_an_admin_listener_names_the_setting(serve: Serve) -> None:
    text = "\n".join(line for line in CONFIG.splitlines() if not line.startswith("admin"))
    response = await (await serve(text)).http.get("/metrics")

    assert response.status_code == 404
    assert "the setting admin" in response.json()["error"]["message"]


POOL = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {b: {kind: pool, protocol: PROTOCOL, workers: [URL]}}
models: {m: {backend: b}}
"""


@pytest.mark.parametrize(
    ("configured", "known_paths", "answered"),
    [
        (
            "openai",
            ["/v3/models", "/v2/health/ready"],  # as OpenVINO Model Server
            "GET /v2/health/ready (protocol: triton or mindie), GET /v3/models (protocol: ovms)",
        ),
        (
            "ovms",
            ["/v1/models", "/health"],  # as vLLM
            "GET /v1/models (protocol: openai or anthropic or cohere), GET /health (protocol: tgi)",
        ),
        ("openai", ["/"], None),
    ],
)
async def test_log_names_the_protocol_of_a_worker_without_the_path_of_the_health_check(
    serve: Serve,
    caplog: pytest.LogCaptureFixture,
    configured: str,
    known_paths: list[str],
    answered: str | None,
) -> None:
    async def answer_known_paths(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            status = "200 OK" if path in known_paths else "404 Not Found"
            writer.write(make_reply(b"{}", status))

    async with run_server(answer_known_paths) as url:
        gateway = await serve(POOL.replace("PROTOCOL", configured).replace("URL", url))
        pool = gateway.app.backends["b"]
        assert isinstance(pool, PoolBackend)
        await pool.warm_up()
        messages = [record.getMessage() for record in caplog.records]

    hint = (
        rf"worker {url} has no GET /v\d/models, but it answers (.*): set the protocol of its pool"
    )
    assert [match[1] for text in messages if (match := re.fullmatch(hint, text))] == (
        [answered] if answered else []
    )


@pytest.mark.parametrize("protocol", ["openai", "tgi", "triton"])
async def test_log_names_a_worker_that_is_the_admin_listener_of_a_gateway(
    serve: Serve, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    other = await serve_on(serve, 0)
    gateway = await serve(POOL.replace("PROTOCOL", protocol).replace("URL", str(other.admin)))
    pool = gateway.app.backends["b"]
    assert isinstance(pool, PoolBackend)
    await pool.warm_up()

    [message] = [text for text in caplog.messages if str(other.admin) in text]
    assert message == (
        f"worker {other.admin} is the admin listener of a gateway: set the URL of the pool's "
        "worker to a listener of models"
    )
