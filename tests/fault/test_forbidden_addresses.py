"""Requests go only where the configuration says, and never to a metadata service (61).

An operator may name any host: workers are in private networks and on this machine. An address that
can't be a worker's is rejected when the configuration is read; and the address of a name is checked
for each new connection. That redirects are not followed is fault 27.
"""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from tests.conftest import Serve
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.protocol_clients import (
    CHAT,
    STREAM,
    create_raw_worker,
    send_request,
    serve_gateway,
)
from tests.support.waiting import wait_until

CORPUS = [
    "file:///etc/passwd",
    "file://127.0.0.1/etc/passwd",
    "gopher://10.0.0.1/",
    "ftp://10.0.0.1/",
    "unix:///run/docker.sock",
    "javascript:alert(1)",
    "//10.0.0.1",
    "http:/10.0.0.1",
    "http:10.0.0.1",
    "http://",
    "http:///v1",
    "http://169.254.169.254",
    "http://169.254.169.254.",
    "http://169.254.169.254:80/latest",
    "http://[::ffff:169.254.169.254]",
    "http://[::ffff:a9fe:a9fe]",
    "http://[fe80::1]",
    "http://[fe80::1%25eth0]",
    "http://2852039166",
    "http://0xa9fea9fe",
    "http://0xa9.0xfe.0xa9.0xfe",
    "http://0251.0376.0251.0376",
    "http://169.254.43518",
    "http://127.1",
    "http://0",
    "http://0.0.0.0:8000",
    "http://[::]:8000",
    "http://224.0.0.1",
    "http://[ff02::1]",
    "http://user@10.0.0.1",
    "http://user:password@10.0.0.1",
    "http://10.0.0.1:80@169.254.169.254",
    "http://10.0.0.1\\@169.254.169.254",
    "http:\\\\10.0.0.1",
    "http://10.0.0.1\\.example",
    "http://10.0.0.1#@169.254.169.254",
    "http://10.0.0.1?@169.254.169.254",
    "http://10.0.0.1/?url=file:///etc/passwd",
    "http://10.0.0.1/../admin",
    "http://10.0.0.1/a//b",
    "http://10.0.0.1 .example",
    "http://10.0.0.1\t",
    "http://10.0.0.1\r\nX: y",
    "http://10.0.0.1:0",
    "http://10.0.0.1:99999",
    "http://10.0.0.1:80:81",
    "http://10.0.0.1:",
    "http://\uff11\uff10.0.0.1",
    "http://①②⑦.0.0.1",
    "http://exa\u202emple",
    "http://a..b",
    "http://[10.0.0.1]",
    "http://[::1",
]
ALLOWED = [
    "http://127.0.0.1:8000",
    "http://localhost:8000",
    "http://10.0.0.1/base",
    "https://[fd00::1]:8443",
    "http://workers.models.svc:8000",
]
METADATA = "169.254.169.254"


def build_pool_config(*workers: Any) -> str:
    backend = {"protocol": "openai", "workers": workers}
    return build_config(backends={"p": backend}, models={"m": {"backend": "p"}})


@pytest.mark.fault(61)
def test_configuration_rejects_forbidden_worker_urls() -> None:
    with pytest.raises(ConfigError) as excinfo:
        load_text(build_pool_config(*CORPUS), "g.yaml", env={})
    refused = re.findall(r"workers\[(\d+)\]", str(excinfo.value))
    assert [*map(int, refused)] == [*range(len(CORPUS))]


@pytest.mark.fault(61)
def test_configuration_accepts_any_other_host() -> None:
    load_text(build_pool_config(*ALLOWED), "g.yaml", env={})


@pytest.mark.fault(61)
async def test_admin_api_and_file_discovery_reject_forbidden_urls(
    tmp_path: Path,
) -> None:
    listed = tmp_path / "workers.yaml"
    listed.write_text('["http://127.0.0.1:9"]')
    async with GatewayProcess(
        tmp_path, build_pool_config({"file": str(listed), "refresh_interval": "100ms"})
    ) as gateway:
        admin = f"{gateway.urls[-1]}/-/workers"
        for url in CORPUS:
            response = await gateway.http.post(admin, json={"backend": "p", "url": url})
            assert response.status_code == httpx.codes.BAD_REQUEST, url
        assert await list_worker_urls(gateway.http, admin) == ["http://127.0.0.1:9"]

        listed.write_bytes(msgspec.json.encode(["http://127.0.0.1:10", CORPUS[11]]))
        await wait_for_log(gateway, "is an address that no worker can have")
        assert await list_worker_urls(gateway.http, admin) == ["http://127.0.0.1:9"]


async def list_worker_urls(http: httpx.AsyncClient, admin: str) -> list[str]:
    """Return the URLs of the workers in rotation."""
    return [one["url"] for one in (await http.get(admin)).json()["backends"]["p"]]


async def wait_for_log(gateway: GatewayProcess, text: str) -> None:
    await wait_until(lambda: text in gateway.read_output())


class StubNameResolution:
    """Replaces the system's resolver: the worker's name resolves to ``address``."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.request_count = 0

    def find(self, host: str, port: int, *args: Any, **options: Any) -> Sequence[Any]:
        """See socket.getaddrinfo."""
        del host, args, options
        self.request_count += 1
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (self.address, port))]


@pytest.mark.fault(61)
@pytest.mark.parametrize("address", [METADATA, f"::ffff:{METADATA}", "fe80::1", "0.0.0.0"])
async def test_dns_rebinding_to_a_forbidden_address_is_not_followed(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    address: str,
) -> None:
    """The name resolved to a worker when the configuration was read."""
    names = StubNameResolution("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", names.find)

    async with create_raw_worker([STREAM], [STREAM]) as worker:
        gateway = await serve_gateway(serve, worker.url.replace("127.0.0.1", "rebound.example"))
        assert (await send_request(gateway, CHAT, stream=True)).status_code == httpx.codes.OK

        names.address = address
        for one in gateway.app.backends.values():
            await one.aclose()  # closes connections: the next request needs a new one
            await one.start()
        query_count = names.request_count
        response = await send_request(gateway, CHAT, stream=True)

    assert response.status_code in (502, 503)
    assert names.request_count > query_count
    assert "resolves to a forbidden address" in caplog.text
    assert METADATA not in response.text
