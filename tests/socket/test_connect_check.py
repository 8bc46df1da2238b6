"""``interlingua doctor`` before things that are really broken."""

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

from gateway.app import surroundings
from gateway.config import load
from gateway.tools.doctor import Finding, entrances, examine, workers
from tests.conftest import Serve
from tests.fault.gateways import written
from tests.redis_server import RedisServer
from tests.serving import serving

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


def certificate(folder: Path, name: str, *, days: int, host: str = "127.0.0.1") -> Path:
    """A certificate and its key in one file, good for so many days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    alternatives = [x509.IPAddress(ipaddress.ip_address(host))]
    made = (
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
        made.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    return file


async def found(text: str) -> dict[str, Finding]:
    """The findings that are not good, or else the last good one, by what was looked at."""
    config = load(text, "doctor.yaml", env=os.environ, insecure=True)
    every = await examine(config, surroundings())
    return {one.what: one for one in sorted(every, key=lambda one: one.state == "bad")}


def pool(*urls: Any, dialect: str = "openai", **more: Any) -> str:
    told = {"dialect": dialect, "workers": list(urls), **more}
    return written(backends={"p": told}, models={"m": {"backend": "p"}})


@contextlib.asynccontextmanager
async def answering(answer: bytes, tls: Path | None = None) -> AsyncIterator[str]:
    """A worker that gives this answer to everything."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        await writer.drain()

    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
    async with serving(reply, tls=context) as url:
        yield url


def reply(status: str, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


# --- workers --------------------------------------------------------------------------------------


async def test_a_worker_that_is_well(serve: Serve) -> None:
    worker = await serve(written(admin={"address": "127.0.0.1:0"}))
    said = await found(pool(worker.url))
    assert said[f"p {worker.url}"] == Finding(
        "ok", f"p {worker.url}", "GET /v1/models is 200, as openai has it"
    )
    wrong = await found(pool(worker.url, dialect="triton"))
    assert wrong[f"p {worker.url}"].said == "GET /v2/health/ready is 404"
    assert wrong[f"p {worker.url}"].mend.startswith("is it triton?")
    own = await found(pool(worker.url, health={"path": "/nowhere"}))
    assert own[f"p {worker.url}"].said == "GET /nowhere is 404"


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (reply("401 Unauthorized"), "bad", "GET /v1/models is 401: it wants a key"),
        (reply("503 Busy"), "bad", "GET /v1/models is 503"),
        (reply("200 OK", b" <html>"), "bad", "GET /v1/models is answered by a page for people"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "bad", "what answers there speaks no HTTP"),
        (
            reply("200 OK", b"{}", "date: Wed, 21 Oct 2015 07:28:00 GMT"),
            "warn",
            "its clock is [0-9]+ s behind",
        ),
        (reply("200 OK", b"{}", "date: yesterday"), "ok", "GET /v1/models is 200, as openai has"),
    ],
)
async def test_a_worker_that_is_not(answer: bytes, state: str, said: str) -> None:
    async with answering(answer) as url:
        config = load(pool(url), "doctor.yaml", env={}, insecure=True)
        last = (await workers.examine(config, surroundings()))[-1]
        assert (last.state, last.what) == (state, f"p {url}")
        assert re.match(said, last.said), last


async def test_a_key_that_is_no_good() -> None:
    async with answering(reply("403 Forbidden")) as url:
        text = pool({"url": url, "auth": {"bearer": "canary"}})
        said = (await found(text))[f"p {url}"]
        assert said.said == "GET /v1/models is 403: its key is no good there"
        assert "canary" not in repr(said)


async def test_a_worker_that_is_nowhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
    said = await found(pool(refused, "http://nowhere.invalid:80"))
    assert said[f"p {refused}"].said == "nobody answers there: connection refused"
    assert said["p http://nowhere.invalid:80"].said.startswith("its name has no address: ")


async def test_workers_that_something_else_names(tmp_path: Path) -> None:
    async with answering(reply("200 OK")) as url:
        listed = tmp_path / "workers.yaml"
        listed.write_text(f'["{url}"]')
        said = await found(pool({"file": str(listed)}))
        assert said[f"p {url}"].state == "ok"
        nobody = await found(pool({"dns": "nowhere.invalid:80"}))
        assert nobody["p"].said == "nobody is named by nowhere.invalid:80"


async def test_a_worker_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as url:
        assert (await found(pool(url)))[f"p {url}"].said.startswith("nobody answers there: ")


# --- certificates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "host", "state", "said"),
    [
        (100, "127.0.0.1", "ok", "its certificate is good for 100 days"),
        (5, "127.0.0.1", "warn", "its certificate expires in 5 days"),
        (-3, "127.0.0.1", "bad", "its certificate is no good: certificate has expired"),
        (100, "127.0.0.2", "bad", "its certificate is no good: IP address mismatch"),
    ],
)
async def test_a_workers_certificate(
    days: int, host: str, state: str, said: str, tmp_path: Path
) -> None:
    pem = certificate(tmp_path, "worker", days=days, host=host)
    async with answering(reply("200 OK"), tls=pem) as url:
        config = load(pool(url, tls={"ca": str(pem)}), "d.yaml", env={}, insecure=True)
        first = (await workers.examine(config, surroundings()))[0]
        assert first.state == state
        assert first.said.startswith(said)
        assert (first.mend == "") == (state == "ok")


async def test_who_signed_it_and_who_speaks_what(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "worker", days=100)
    async with answering(reply("200 OK"), tls=pem) as url, answering(reply("200 OK")) as plain:
        unknown = (await found(pool(url)))[f"p {url}"]
        assert unknown.mend == "name who signed it: `tls: {ca: FILE}`"
        mixed = url.replace("https", "http"), plain.replace("http", "https")
        said = await found(pool(*mixed))
        assert said[f"p {mixed[0]}"].mend.startswith("write https://")
        assert said[f"p {mixed[1]}"].said.startswith("there is no TLS: ")


# --- where clients come in ------------------------------------------------------------------------


async def test_listeners_that_are_free_taken_or_a_gateways(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrances, "_PATIENCE", 0.2)
    gateway = await serve(written(admin={"address": "127.0.0.1:0"}))
    pem, good = (str(certificate(tmp_path, f"{days}", days=days)) for days in (-1, 20))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = taken.getsockname()[1]
        listeners = [
            {"address": f"127.0.0.1:{gateway.port}", "dialects": ["openai"]},
            {"address": f"127.0.0.1:{other}", "dialects": ["openai"]},
            {"address": "[::1]:0", "dialects": ["openai"], "tls": {"cert": pem, "key": pem}},
            {"address": "127.0.0.1:0", "dialects": ["openai"], "tls": {"cert": good, "key": good}},
        ]
        said = await found(written(listeners=listeners))
    assert said[f"listener 127.0.0.1:{gateway.port}"].said == "a gateway answers there"
    assert said[f"listener 127.0.0.1:{other}"].said == "can't be had: address already in use"
    assert said["listener [::1]:0"].said == "its certificate is no good: certificate has expired"
    assert said["listener 127.0.0.1:0"].said == "its certificate is good for 20 days"
    assert said["admin 127.0.0.1:0"].said == "is free"


# --- what is elsewhere ----------------------------------------------------------------------------


async def test_a_redis_that_is_there_and_one_that_is_not() -> None:
    with RedisServer() as redis:
        text = written(state={"redis": redis.url})
        said = (await found(text))["redis"]
        assert (said.state, said.said.startswith("version ")) == ("ok", True)
        redis.kill()
        said = (await found(text))["redis"]
        assert said.state == "bad"
        assert said.said.startswith("can't be asked: ")


async def test_a_redis_of_whom_nobody_knows_who_signed_it(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "redis", days=100)
    other = certificate(tmp_path, "other", days=100)
    async with answering(b"", tls=pem) as url:
        there = url.replace("https", "rediss")
        text = written(state={"redis": there, "tls": {"ca": str(other)}})
        assert (await found(text))["redis"].state == "bad"


async def test_collectors_that_are_there_and_that_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with answering(reply("404 Not Found")) as url:
        observe = {"traces": {"otlp": url}, "metrics": {"push": {"otlp": refused}}}
        said = await found(written(observe=observe))
    assert said[f"traces {url}"].state == "ok"
    assert said[f"figures {refused}"].state == "bad"


# --- the command ----------------------------------------------------------------------------------


def doctor(*arguments: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    low = f"ulimit -n {limit} && " if limit is not None else ""
    command = f'{low}exec "$0" -m gateway doctor "$@"'
    return subprocess.run(
        ["/bin/bash", "-c", command, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_is_said_and_the_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(written())
    result = doctor(str(file), limit=256)
    assert result.returncode == 0, result.stdout
    [line] = [one for one in result.stdout.splitlines() if "open files" in one]
    assert line == (
        "warn  open files: a process may have 256 files open: too few for 10,000 connections; "
        "raise the limit (ulimit -Hn 20064), or lower limits.connections"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
    file.write_text(pool(refused))
    result = doctor(str(file), "--json")
    assert result.returncode == 1
    [one] = [one for one in msgspec.json.decode(result.stdout) if one["state"] == "bad"]
    assert one["what"] == f"p {refused}"
