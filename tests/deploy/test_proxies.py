"""Real proxies in front of a listener that trusts them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.deploy.processes import wait_until
from tests.deploy.tools import LIBRARIES, find_tool
from tests.integration.test_command import Command
from tests.support.ports import reserve_port

CONFIG: Final = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai]
    trusted_proxies: ["127.0.0.1"]
    {more}
limits: {{shutdown_delay: 0s}}
backends: {{e: {{kind: echo, script: [hello]}}}}
models: {{chat: {{backend: e}}}}
"""
HAPROXY: Final = """
global
    log stdout format raw local0
defaults
    mode tcp
    timeout connect 5s
    timeout client 10s
    timeout server 10s
frontend clients
    bind 127.0.0.1:{port}
    default_backend gateway
backend gateway
    option httpchk GET /health
    server one {server} send-proxy-v2 check check-send-proxy inter 200ms
"""
NGINX: Final = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://{server};
            proxy_http_version 1.1;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }}
    }}
}}
"""
BODY: Final = {"model": "chat", "messages": [{"role": "user", "content": "a"}]}
CLIENT: Final = "127.0.0.7"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """The started processes, which are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


def ask(port: int, **headers: str) -> None:
    transport = httpx.HTTPTransport(local_address=CLIENT)
    with httpx.Client(transport=transport, timeout=30) as http:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        wait_until(lambda: is_served(http, url), "the proxy has no gateway")
        response = http.post(url, json=BODY, headers=headers | {"x-request-id": "the-one"})
    assert response.json()["choices"][0]["message"]["content"] == "hello"


def is_served(http: httpx.Client, url: str) -> bool:
    try:
        return http.post(url, json=BODY).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("proxy", ["haproxy", "nginx"])
def test_client_of_a_real_proxy_is_in_the_access_log(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], proxy: str
) -> None:
    program, port = find_tool(proxy), reserve_port()
    file = tmp_path / "gateway.yaml"
    file.write_text(CONFIG.format(more="proxy_protocol: v2" if proxy == "haproxy" else ""))
    gateway = Command("serve", str(file))
    try:
        server = gateway.serving().removeprefix("http://")
        config = tmp_path / f"{proxy}.conf"
        template = HAPROXY if proxy == "haproxy" else NGINX
        config.write_text(template.format(port=port, server=server, folder=tmp_path))
        arguments = ["-db", "-f"] if proxy == "haproxy" else ["-p", str(tmp_path), "-c"]
        libraries = os.pathsep.join((str(LIBRARIES), os.environ.get("LD_LIBRARY_PATH", "")))
        processes.append(
            subprocess.Popen(
                [program, *arguments, str(config)],
                env={**os.environ, "LD_LIBRARY_PATH": libraries},
            )
        )
        ask(port, **{"x-forwarded-for": "1.1.1.1"})
        line = f'"client":"{CLIENT}"'
        wait_until(lambda: '"id":"the-one"' in gateway.read_output(), gateway.read_output())
        [record] = [one for one in gateway.read_output().splitlines() if '"id":"the-one"' in one]
        assert line in record
        assert "1.1.1.1" not in record
        if proxy == "haproxy":  # its health checks open connections of their own
            wait_until(lambda: '"path":"/health"' in gateway.read_output(), gateway.read_output())
        assert gateway.stop() == 0
    finally:
        gateway.close()
