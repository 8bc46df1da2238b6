"""The admin listener over a real socket."""

import asyncio
import contextlib
import hashlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import WorkerDiscovery
from gateway.admin.api import (
    CONNECTION_LIMITS,
    AdminServer,
    AdminServices,
    WorkerSet,
    get_unready_reason,
)
from gateway.routing.router import Router

KEY = "sk-admin-canary"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
FIRST = "http://10.0.0.1:8000"


class Workers:
    """A WorkerSet over a Discovery, as the gateway makes one."""

    def __init__(self, *urls: str) -> None:
        self.discovery = WorkerDiscovery(
            "gpu", [WorkerConfig(url) for url in urls], [], lambda _: None
        )
        self.add_worker = self.discovery.add
        self.remove_worker = self.discovery.remove

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.discovery.workers]

    def report_workers(self) -> list[dict[str, Any]]:
        return [{"url": one.url, "weight": one.weight} for one in self.discovery.workers]


class Listening(Struct):
    """A running admin listener, a client of it, and what is behind it."""

    http: httpx.AsyncClient
    workers: Workers
    state: dict[str, str | None]
    server: AdminServer

    @property
    def port(self) -> int:
        return self.http.base_url.port or 0


@asynccontextmanager
async def admin(
    address: str = "127.0.0.1:0", sha256: str | None = None, pool: WorkerSet | None = None
) -> AsyncIterator[Listening]:
    workers, state = Workers(FIRST), dict[str, str | None](why=None)
    pools: dict[str, WorkerSet] = {"gpu": pool or workers}
    listener = AdminServer(
        address,
        AdminServices(get_unready_reason=lambda: state["why"], worker_sets=pools),
        sha256=sha256,
    )
    url = (await listener.listen()).replace("0.0.0.0", "127.0.0.1")
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        yield Listening(http, workers, state, listener)
    await listener.close()


@pytest.fixture
async def here() -> AsyncIterator[Listening]:
    async with admin() as listening:
        yield listening


def told(answer: httpx.Response) -> tuple[int, str | None]:
    """The status and the field of an error, of which everything else is checked."""
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert error.keys() == {"message", "field"}
    assert error["message"]
    assert answer.json().keys() == {"error"}
    return answer.status_code, error["field"]


# --- alive and ready -----------------------------------------------------------------------------


async def test_it_is_alive_and_ready_or_says_why_not(here: Listening) -> None:
    assert (await here.http.get("/-/live")).status_code == 200
    assert (await here.http.get("/-/ready")).json() == {"status": "ready"}

    here.state["why"] = "the gateway drains"

    assert (await here.http.get("/-/live")).status_code == 200
    assert (await here.http.head("/-/ready")).status_code == 503
    answer = await here.http.get("/-/ready")
    assert told(answer) == (503, None)
    assert answer.json()["error"]["message"] == "the gateway drains"


async def test_what_prometheus_reads_is_given_as_it_is() -> None:
    told = b"interlingua_requests_total 1\n"
    behind = AdminServices(
        get_unready_reason=lambda: None, worker_sets={}, render_metrics=lambda: told
    )
    listener = AdminServer("127.0.0.1:0", behind)
    async with httpx.AsyncClient(base_url=await listener.listen()) as http:
        answer = await http.get("/metrics")
    await listener.close()

    assert answer.content == told
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


class Standing(Struct):
    ready: bool


def test_what_stands_against_an_answer() -> None:
    router = Router({}, draw=lambda: 0.0)
    up, down = Standing(ready=True), Standing(ready=False)

    assert get_unready_reason(router, [down, up]) is None
    assert get_unready_reason(router, [down, down]) == "no backend is ready"
    assert get_unready_reason(router, []) == "no backend is ready"
    router.ready = False
    assert get_unready_reason(router, [up]) == "the gateway drains"


# --- workers -------------------------------------------------------------------------------------


async def test_workers_are_listed_added_and_removed(here: Listening) -> None:
    body = {"backend": "gpu", "url": "http://10.0.0.2:8000/", "weight": 3, "max_concurrency": 4}

    added = await here.http.post("/-/workers", json=body)
    again = await here.http.post("/-/workers", json=body | {"weight": 5})
    listed = await here.http.get("/-/workers")
    removed = await here.http.delete("/-/workers", params={"backend": "gpu", "url": FIRST})

    assert added.status_code == 201
    assert added.json() == body | {"url": "http://10.0.0.2:8000"}
    assert again.status_code == 200
    assert listed.json()["backends"] == {
        "gpu": [{"url": "http://10.0.0.2:8000", "weight": 5}, {"url": FIRST, "weight": 1}]
    }
    assert (removed.status_code, removed.content) == (204, b"")
    assert here.workers.urls == ["http://10.0.0.2:8000"]


async def test_a_worker_of_which_only_the_url_is_said_has_the_usual_rest(here: Listening) -> None:
    answer = await here.http.post("/-/workers", json={"backend": "gpu", "url": "http://w:1"})

    assert answer.json() == {
        "backend": "gpu",
        "url": "http://w:1",
        "weight": 1,
        "max_concurrency": None,
    }


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"backend": "nope"}, 404, "backend"),
        ({"backend": 1}, 400, "backend"),
        ({"url": None}, 400, "url"),
        ({"weight": 0}, 400, "weight"),
        ({"weight": 1001}, 400, "weight"),
        ({"weight": True}, 400, "weight"),
        ({"weight": "1"}, 400, "weight"),
        ({"max_concurrency": 0}, 400, "max_concurrency"),
        ({"bearer": "sk-1"}, 400, "bearer"),
    ],
)
async def test_a_wrong_field_is_named(
    here: Listening, change: dict[str, Any], status: int, field: str
) -> None:
    body = {"backend": "gpu", "url": "http://w:1"} | change

    assert told(await here.http.post("/-/workers", json=body)) == (status, field)
    assert here.workers.urls == [FIRST]


@pytest.mark.parametrize("missing", ["backend", "url"])
async def test_a_missing_field_is_named(here: Listening, missing: str) -> None:
    body = {"backend": "gpu", "url": "http://w:1"}
    del body[missing]

    assert told(await here.http.post("/-/workers", json=body)) == (400, missing)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:80",
        "file:///etc/passwd",
        "gopher://w:1",
        "http:w",
        "http://",
        "http://w:0",
        "http://w:99999",
        "http://user@w:1",
        "http://user:pass@w:1",
        "http://w\\@evil:1",
        "http://w:1?a=b",
        "http://w:1#x",
        "http://w:1/../x",
        "http://w:1/a b",
        "http://w:1/\n",
        "http://169.254.169.254/latest",
        "http://[fe80::1]:80",
        "http://[::ffff:169.254.169.254]",
        "http://2852039166",
        "http://0xa9fea9fe",
        "http://0.0.0.0:80",
    ],
)
async def test_61_an_address_that_is_no_workers_is_refused(here: Listening, url: str) -> None:
    answer = await here.http.post("/-/workers", json={"backend": "gpu", "url": url})

    assert told(answer) == (400, "url")
    assert here.workers.urls == [FIRST]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff{}",
        b"[" * 20_000,
        b'{"url": NaN}',
        b'{"a": "\\ud800"}',
    ],
)
async def test_a_body_that_is_no_object_is_refused(here: Listening, body: bytes) -> None:
    headers = {"content-type": "application/json"}

    assert told(await here.http.post("/-/workers", content=body, headers=headers)) == (400, None)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/jsonp"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_what_a_page_elsewhere_may_send_unasked_is_refused(
    here: Listening, headers: dict[str, str]
) -> None:
    body = b'{"backend": "gpu", "url": "http://w:1"}'

    assert told(await here.http.post("/-/workers", content=body, headers=headers)) == (415, None)
    assert here.workers.urls == [FIRST]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused(here: Listening, *, declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 8192

    content = b" " * (64 * 1024 + 1) if declared else pieces()
    headers = {"content-type": "application/json"}

    assert told(await here.http.post("/-/workers", content=content, headers=headers)) == (413, None)


async def test_a_body_that_does_not_come_is_not_waited_for(
    here: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admin.api._BODY_TIMEOUT", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(
        b"POST /-/workers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 10\r\n\r\n{"
    )

    assert (await reader.readline()).split()[1] == b"408"
    writer.close()


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ("", 400, "backend"),
        ("backend=gpu", 400, "url"),
        ("url=http://w:1", 400, "backend"),
        ("backend=gpu&backend=cpu&url=x", 400, "backend"),
        ("backend=gpu&url=x&force=1", 400, "force"),
        ("backend=nope&url=x", 404, "backend"),
        ("backend=gpu&url=http://10.0.0.99:1", 404, "url"),
        (f"backend=gpu&url={FIRST}", 409, "url"),
    ],
)
async def test_who_can_t_be_removed(here: Listening, query: str, status: int, field: str) -> None:
    assert told(await here.http.delete(f"/-/workers?{query}")) == (status, field)
    assert here.workers.urls == [FIRST]


async def test_who_can_t_be_added() -> None:
    class Full(Workers):
        def __init__(self) -> None:
            super().__init__(FIRST)
            self.add_worker = self.refuse

        def refuse(self, worker: WorkerConfig) -> bool:
            raise ValueError("there are enough workers")

    async with admin(pool=Full()) as listening:
        answer = await listening.http.post(
            "/-/workers", json={"backend": "gpu", "url": "http://w:1"}
        )

    assert told(answer) == (409, "url")
    assert "enough" in answer.text


# --- paths and faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/-/", "/-/nope", "/-/workers/", "/v1/models", "//-/live"])
async def test_another_path_is_not_there(here: Listening, path: str) -> None:
    url = f"http://127.0.0.1:{here.port}{path}"

    assert told(await here.http.get(url)) == (404, None)


async def test_another_method_is_told_which_there_are(here: Listening) -> None:
    answer = await here.http.put("/-/workers")

    assert told(answer) == (405, None)
    assert answer.headers["allow"].replace(" ", "").split(",") == ["DELETE", "GET", "HEAD", "POST"]


async def test_a_fault_of_ours_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Workers):
        def report_workers(self) -> list[dict[str, Any]]:
            raise RuntimeError("canary")

    with caplog.at_level(logging.ERROR, "interlingua"):
        async with admin(pool=Broken()) as listening:
            answer = await listening.http.get("/-/workers")

    assert told(answer) == (500, None)
    assert "canary" not in answer.text
    assert "canary" in caplog.text


async def test_nothing_is_kept_or_guessed_by_who_gets_it(here: Listening) -> None:
    for answer in (await here.http.get("/-/live"), await here.http.get("/nope")):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["server"] == "interlingua"


# --- who may ask ---------------------------------------------------------------------------------


def every_route() -> list[tuple[str, str]]:
    listener = AdminServer(
        "127.0.0.1:0", AdminServices(get_unready_reason=lambda: None, worker_sets={})
    )
    routes = listener.build_application().router.routes()
    found = [(route.method, str(route.resource.canonical)) for route in routes if route.resource]
    return [*found, ("GET", "/-/nope"), ("PUT", "/-/workers"), ("GET", "/-/live/"), ("POST", "/")]


@pytest.mark.parametrize(("method", "path"), every_route())
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {DIGEST}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"X-Api-Key": KEY},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
async def test_without_the_key_nothing_is_told(
    method: str, path: str, headers: dict[str, Any]
) -> None:
    async with admin(sha256=DIGEST) as listening:
        answer = await listening.http.request(method, path, headers=headers)

    if path in {"/-/live", "/-/ready"} and method in {"GET", "HEAD"}:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert method == "HEAD" or told(answer) == (401, None)


async def test_with_the_key_everything_is_open() -> None:
    async with admin("0.0.0.0:0", DIGEST.upper()) as listening:
        answer = await listening.http.get("/-/workers", headers={"Authorization": f"bearer  {KEY}"})
        named = await listening.http.get("/-/live", headers={"Host": "gateway.example"})

    assert answer.status_code == 200
    assert named.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8081",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "evil@127.0.0.1",
        "10.0.0.1",
        "[fd00::1]",
        "127.0.0.1:x",
        "localhost:1:2",
        "127.0.0.1, evil",
    ],
)
@pytest.mark.parametrize("path", ["/-/live", "/-/workers"])
async def test_on_this_machine_a_name_from_elsewhere_is_refused(
    here: Listening, host: str, path: str
) -> None:
    assert told(await here.http.get(path, headers={"Host": host})) == (403, None)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8081", "[::1]", "[::1]:8081"]
)
async def test_on_this_machine_its_own_names_are_good(here: Listening, host: str) -> None:
    assert (await here.http.get("/-/workers", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:8081", "gateway:8081"])
def test_beyond_this_machine_a_key_is_needed(address: str) -> None:
    behind = AdminServices(get_unready_reason=lambda: None, worker_sets={})
    with pytest.raises(ValueError, match="give a key"):
        AdminServer(address, behind)

    AdminServer(address, behind, sha256=DIGEST)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
async def test_it_listens_on_this_machine_without_one(address: str) -> None:
    if address.startswith("[") and not _has_ipv6():
        address = "127.0.0.2:0"
    async with admin(address) as listening:
        assert (await listening.http.get("/-/live")).status_code == 200


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_closing_lets_go_of_the_port() -> None:
    async with admin() as listening:
        port = listening.port
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


# --- limits ---------------------------------------------------------------------------------------


async def said(port: int, data: bytes) -> bytes:
    """What is answered until the connection ends."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


async def test_silent_connections_leave_room_and_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take a fixed share of the descriptors, and none of those of clients."""
    limits = replace(CONNECTION_LIMITS, header_timeout=1.0)
    monkeypatch.setattr("gateway.admin.api.CONNECTION_LIMITS", limits)
    async with admin() as listening:
        silent = [
            socket.create_connection(("127.0.0.1", listening.port), timeout=20) for _ in range(200)
        ]
        with contextlib.ExitStack() as stack:
            for one in silent:
                stack.enter_context(contextlib.closing(one))
            assert (await listening.http.get("/-/live")).status_code == 200
            assert listening.server.listener.connections <= limits.connections == 64
            assert listening.server.listener.refused_by_reason["idle_evicted"] > 100
            for one in silent:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.to_thread(one.recv, 1) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET /-/live HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: secret\r\n\r\n",
        (
            b"GET /-/live HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: secret\r\n"
            b"Authorization: b\r\n\r\n"
        ),
        b"secret\r\n\r\n",
        b"GET /secret\x00 HTTP/1.1\r\n\r\n",
        b"GET /-/live HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: secret\r\nConnection: close\r\n\r\n",
        b"GET /-/live HTTP/1.1\r\nHost: 127.0.0.1\r\nsecret\r\n\r\n",
        b"GET /-/live HTTP/1.1\r\nHost: 127.0.0.1\r\nA: secret" + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_malformed_input_is_neither_repeated_nor_logged_as_a_failure(
    here: Listening, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await said(here.port, data)
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    for word in (b"Python", b"aiohttp", b"secret", b"Traceback"):
        assert word not in answer
    assert [one for one in caplog.records if one.exc_info or one.levelno >= logging.ERROR] == []
