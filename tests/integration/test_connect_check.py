"""``interlingua check --connect`` names each worker and service that can't be used, and why."""

import asyncio
import contextlib
import datetime as dt
import ipaddress
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.config.loader import load_text
from gateway.runtime.gateway import build_services
from gateway.tools import connect_check
from gateway.tools.connect_check import Finding, check_connections, check_workers
from tests.conftest import Serve
from tests.fault.gateway_process import build_config
from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer
from tests.support.tcp_server import run_server

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


def create_certificate(folder: Path, name: str, *, days: int, host: str = "127.0.0.1") -> Path:
    """Create a certificate and its key in one file, valid for some days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    alternatives = [x509.IPAddress(ipaddress.ip_address(host))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 100 * DAY)
        .not_valid_after(NOW + days * DAY + DAY / 2)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"{name}.pem"
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    file.write_bytes(
        certificate.public_bytes(pem)
        + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    return file


async def collect_findings(text: str) -> dict[str, Finding]:
    """Return each subject's findings that are not ok, or else its last ok finding."""
    config = load_text(text, "gateway.yaml", env=os.environ, insecure=True)
    every = await check_connections(config, build_services())
    return {one.subject: one for one in sorted(every, key=lambda one: one.state == "error")}


def build_pool_config(*urls: Any, protocol: str = "openai", **fields: Any) -> str:
    pool = {"protocol": protocol, "workers": list(urls), **fields}
    return build_config(backends={"p": pool}, models={"m": {"backend": "p"}})


@contextlib.asynccontextmanager
async def run_static_worker(answer: bytes, tls: Path | None = None) -> AsyncIterator[str]:
    """Run a worker that answers every request with these bytes."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        await writer.drain()

    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
    async with run_server(reply, tls=context) as url:
        yield url


def reply(status: str, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


# --- workers --------------------------------------------------------------------------------------


async def test_healthy_worker_passes_and_wrong_protocol_or_health_path_is_reported(
    serve: Serve,
) -> None:
    worker = await serve(build_config(admin={"address": "127.0.0.1:0"}))
    findings = await collect_findings(build_pool_config(worker.url))
    assert findings[f"worker {worker.url} (backend p)"] == Finding(
        "ok",
        f"worker {worker.url} (backend p)",
        "GET /v1/models answered 200, as the protocol openai requires",
    )

    wrong = await collect_findings(build_pool_config(worker.url, protocol="triton"))
    assert wrong[f"worker {worker.url} (backend p)"].message == "GET /v2/health/ready answered 404"
    assert wrong[f"worker {worker.url} (backend p)"].hint.endswith(
        "the worker speaks the protocol triton"
    )

    own = await collect_findings(build_pool_config(worker.url, health={"path": "/nowhere"}))
    assert own[f"worker {worker.url} (backend p)"].message == "GET /nowhere answered 404"


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (reply("401 Unauthorized"), "error", "GET /v1/models answered 401: a key is required"),
        (reply("503 Busy"), "error", "GET /v1/models answered 503"),
        (reply("200 OK", b" <html>"), "error", "GET /v1/models answered with a web page"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "error", "the response is not HTTP"),
        (
            reply("200 OK", b"{}", "date: Wed, 21 Oct 2015 07:28:00 GMT"),
            "warning",
            "the clock is [0-9]+ s behind",
        ),
        (reply("200 OK", b"{}", "date: yesterday"), "ok", "GET /v1/models answered 200, as the"),
    ],
)
async def test_unhealthy_worker_is_reported_with_its_problem(
    answer: bytes, state: str, message: str
) -> None:
    async with run_static_worker(answer) as url:
        config = load_text(build_pool_config(url), "gateway.yaml", env={}, insecure=True)
        last = (await check_workers(config, build_services()))[-1]

        assert (last.state, last.subject) == (state, f"worker {url} (backend p)")
        assert re.match(message, last.message), last


async def test_rejected_worker_key_is_reported_without_the_key() -> None:
    async with run_static_worker(reply("403 Forbidden")) as url:
        text = build_pool_config({"url": url, "auth": {"bearer": "canary"}})
        finding = (await collect_findings(text))[f"worker {url} (backend p)"]

        assert finding.message == "GET /v1/models answered 403: the key is not accepted"
        assert "canary" not in repr(finding)


async def test_check_reports_the_response_to_the_path_below_the_workers_url() -> None:
    paths: list[bytes] = []

    async def reply_to_one_path(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        paths.append(head.partition(b" HTTP/1.1\r\n")[0])
        is_known = head.startswith(b"GET /api/paas/v4/models?key=canary ")
        writer.write(reply("200 OK" if is_known else "404 Not Found"))
        await writer.drain()

    auth = {"query": {"name": "key", "value": "canary"}}
    async with run_server(reply_to_one_path) as url:
        at = f"{url}/api/paas/v4"
        findings = await collect_findings(build_pool_config({"url": at, "auth": auth}))
        astray = await collect_findings(build_pool_config({"url": f"{url}/base", "auth": auth}))

    finding = findings[f"worker {at} (backend p)"]
    assert (finding.state, finding.message) == (
        "ok",
        "GET /api/paas/v4/models answered 200, as the protocol openai requires",
    )

    wrong = astray[f"worker {url}/base (backend p)"]
    assert (wrong.state, wrong.message) == ("error", "GET /base/v1/models answered 404")
    assert wrong.hint == (
        "check the path of the worker's url, and that the worker speaks the protocol openai"
    )
    assert paths[-1] == b"GET /base/v1/models?key=canary"
    assert "canary" not in repr((finding, wrong))


async def test_refused_connection_and_unresolvable_name_are_reported() -> None:
    refused = f"http://127.0.0.1:{reserve_port()}"
    findings = await collect_findings(build_pool_config(refused, "http://nowhere.invalid:80"))

    assert findings[f"worker {refused} (backend p)"].message == "connection refused"
    assert findings["worker http://nowhere.invalid:80 (backend p)"].message.startswith(
        "the name nowhere.invalid does not resolve: "
    )


async def test_workers_from_file_and_dns_discovery_are_checked(tmp_path: Path) -> None:
    async with run_static_worker(reply("200 OK")) as url:
        listed = tmp_path / "workers.yaml"
        listed.write_text(f'["{url}"]')
        findings = await collect_findings(build_pool_config({"file": str(listed)}))

        assert findings[f"worker {url} (backend p)"].state == "ok"

        nobody = await collect_findings(build_pool_config({"dns": "nowhere.invalid:80"}))
        assert nobody["backend p"].message == "no worker is named by nowhere.invalid:80"


async def test_worker_timeout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_check, "_WORKER_TIMEOUT", 0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with run_server(silent) as url:
        assert (await collect_findings(build_pool_config(url)))[
            f"worker {url} (backend p)"
        ].message == "timed out"


# --- certificates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "host", "state", "message"),
    [
        (100, "127.0.0.1", "ok", "certificate is valid for 100 days"),
        (5, "127.0.0.1", "warning", "certificate expires in 5 days"),
        (-3, "127.0.0.1", "error", "certificate not accepted: certificate has expired"),
        (100, "127.0.0.2", "error", "certificate not accepted: IP address mismatch"),
    ],
)
async def test_worker_certificate_expiry_and_host_mismatch_are_reported(
    days: int, host: str, state: str, message: str, tmp_path: Path
) -> None:
    pem = create_certificate(tmp_path, "worker", days=days, host=host)
    async with run_static_worker(reply("200 OK"), tls=pem) as url:
        config = load_text(
            build_pool_config(url, tls={"ca": str(pem)}), "d.yaml", env={}, insecure=True
        )
        first = (await check_workers(config, build_services()))[0]

        assert first.state == state
        assert first.message.startswith(message)
        assert (first.hint == "") == (state == "ok")


async def test_unknown_ca_and_mixed_http_and_https_get_a_hint(tmp_path: Path) -> None:
    pem = create_certificate(tmp_path, "worker", days=100)
    async with (
        run_static_worker(reply("200 OK"), tls=pem) as url,
        run_static_worker(reply("200 OK")) as plain,
    ):
        unknown = (await collect_findings(build_pool_config(url)))[f"worker {url} (backend p)"]
        assert unknown.hint == "set the CA that signed it: `tls: {ca: FILE}`"

        mixed = url.replace("https", "http"), plain.replace("http", "https")
        findings = await collect_findings(build_pool_config(*mixed))
        assert findings[f"worker {mixed[0]} (backend p)"].hint.startswith("write https://")
        assert findings[f"worker {mixed[1]} (backend p)"].message.startswith(
            "TLS handshake failed: "
        )


# --- listeners ------------------------------------------------------------------------------------


async def test_listener_addresses_and_certificates_are_checked(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect_check, "_LISTENER_TIMEOUT", 0.2)
    gateway = await serve(build_config(admin={"address": "127.0.0.1:0"}))
    pem, good = (str(create_certificate(tmp_path, f"{days}", days=days)) for days in (-1, 20))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = taken.getsockname()[1]
        listeners = [
            {"address": f"127.0.0.1:{gateway.port}", "protocols": ["openai"]},
            {"address": f"127.0.0.1:{other}", "protocols": ["openai"]},
            {"address": "[::1]:0", "protocols": ["openai"], "tls": {"cert": pem, "key": pem}},
            {"address": "127.0.0.1:0", "protocols": ["openai"], "tls": {"cert": good, "key": good}},
        ]
        findings = await collect_findings(build_config(listeners=listeners))

    assert findings[f"listener 127.0.0.1:{gateway.port}"].message == "a gateway is listening there"
    assert (
        findings[f"listener 127.0.0.1:{other}"].message == "cannot listen: address already in use"
    )
    assert (
        findings["listener [::1]:0"].message == "certificate not accepted: certificate has expired"
    )
    assert findings["listener 127.0.0.1:0"].message == "certificate is valid for 20 days"
    assert findings["admin listener 127.0.0.1:0"].message == "the address is free"


# --- other services -------------------------------------------------------------------------------


async def test_reachable_and_unreachable_redis_are_reported() -> None:
    with RedisServer() as redis:
        text = build_config(state={"redis": redis.url})
        finding = (await collect_findings(text))["redis"]
        assert (finding.state, finding.message.startswith("version ")) == ("ok", True)

        redis.kill()
        finding = (await collect_findings(text))["redis"]
        assert finding.state == "error"
        assert finding.message.startswith("cannot connect: ")


async def test_redis_certificate_of_an_unknown_ca_is_reported(tmp_path: Path) -> None:
    pem = create_certificate(tmp_path, "redis", days=100)
    other = create_certificate(tmp_path, "other", days=100)
    async with run_static_worker(b"", tls=pem) as url:
        there = url.replace("https", "rediss")
        text = build_config(state={"redis": there, "tls": {"ca": str(other)}})
        assert (await collect_findings(text))["redis"].state == "error"


async def test_reachable_and_unreachable_otlp_collectors_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with run_static_worker(reply("404 Not Found")) as url:
        observe = {"traces": {"otlp": url}, "metrics": {"push": {"otlp": refused}}}
        findings = await collect_findings(build_config(observe=observe))

    assert findings[f"collector of traces {url}"].state == "ok"
    assert findings[f"collector of metrics {refused}"].state == "error"


# --- the command ----------------------------------------------------------------------------------


def run_check(*arguments: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    low = f"ulimit -n {limit} && " if limit is not None else ""
    command = f'{low}exec "$0" -m gateway check --connect "$@"'
    return subprocess.run(
        ["/bin/bash", "-c", command, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_output_and_exit_code_of_check_connect(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(build_config())
    result = run_check(str(file), limit=256)

    assert result.returncode == 0, result.stdout

    [line] = [one for one in result.stdout.splitlines() if "open files" in one]
    assert line == (
        "warning  open files: the limit of 256 is too low for 10,000 connections; "
        "raise the limit (ulimit -Hn 20064), or lower limits.connections"
    )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
    file.write_text(build_pool_config(refused))
    result = run_check(str(file), "--json")

    assert result.returncode == 1

    [one] = [
        one for one in msgspec.json.decode(result.stdout)["findings"] if one["state"] == "error"
    ]
    assert one["subject"] == f"worker {refused} (backend p)"
