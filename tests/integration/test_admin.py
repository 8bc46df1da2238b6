"""The admin listener over a real socket: health, workers, access and limits."""

import asyncio
import contextlib
import hashlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import WorkerDiscovery
from gateway.admin.api import AdminServer
from gateway.admin.http import CONNECTION_LIMITS
from gateway.admin.services import AdminServices, WorkerSet, get_unready_reason
from gateway.config.schema import AdminConfig
from gateway.routing.router import Router
from tests.support.waiting import PATIENCE

KEY = "sk-admin-canary"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
FIRST = "http://10.0.0.1:8000"


class Workers:
    """A WorkerSet over a WorkerDiscovery, as the gateway creates it."""

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


class AdminClient(Struct):
    """A running admin listener, an HTTP client of it, and the workers behind it."""

    http: httpx.AsyncClient
    workers: Workers
    state: dict[str, str | None]
    server: AdminServer

    @property
    def port(self) -> int:
        return self.http.base_url.port or 0


@asynccontextmanager
async def run_admin_listener(
    address: str = "127.0.0.1:0",
    sha256: str | None = None,
    pool: WorkerSet | None = None,
    key_for: Literal["all", "changes"] = "all",
) -> AsyncIterator[AdminClient]:
    workers, state = Workers(FIRST), dict[str, str | None](why=None)
    pools: dict[str, WorkerSet] = {"gpu": pool or workers}
    listener = AdminServer(
        AdminConfig(address, sha256, key_for),
        AdminServices(get_unready_reason=lambda: state["why"], worker_sets=pools),
    )
    url = (await listener.listen()).replace("0.0.0.0", "127.0.0.1")
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield AdminClient(http, workers, state, listener)
    await listener.close()


@pytest.fixture
async def admin_client() -> AsyncIterator[AdminClient]:
    async with run_admin_listener() as admin:
        yield admin


def parse_error(answer: httpx.Response) -> tuple[int, str | None]:
    """Check the shape of an error response; return its status and the field it names."""
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert error.keys() == {"message", "field"}
    assert error["message"]
    assert answer.json().keys() == {"error"}
    return answer.status_code, error["field"]


# --- liveness and readiness -----------------------------------------------------------------------


async def test_live_and_ready_endpoints_report_liveness_and_the_unready_reason(
    admin_client: AdminClient,
) -> None:
    assert (await admin_client.http.get("/-/live")).status_code == 200
    assert (await admin_client.http.get("/-/ready")).json() == {"status": "ready"}

    admin_client.state["why"] = "the gateway drains"

    assert (await admin_client.http.get("/-/live")).status_code == 200
    assert (await admin_client.http.head("/-/ready")).status_code == 503

    response = await admin_client.http.get("/-/ready")
    assert parse_error(response) == (503, None)
    assert response.json()["error"]["message"] == "the gateway drains"


async def test_metrics_endpoint_serves_the_rendered_metrics_unchanged() -> None:
    page = b"interlingua_requests_total 1\n"
    behind = AdminServices(
        get_unready_reason=lambda: None, worker_sets={}, render_metrics=lambda: page
    )
    listener = AdminServer(AdminConfig("127.0.0.1:0"), behind)
    async with httpx.AsyncClient(base_url=await listener.listen(), timeout=30) as http:
        response = await http.get("/metrics")

    await listener.close()

    assert response.content == page
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


class StubBackend(Struct):
    ready: bool


def test_unready_reason_names_missing_backends_or_the_drain() -> None:
    router = Router({}, draw=lambda: 0.0)
    up, down = StubBackend(ready=True), StubBackend(ready=False)

    assert get_unready_reason(router, {"a": down, "b": up}) is None
    assert get_unready_reason(router, {"a": down, "b": down}) == "no backend is ready"
    assert get_unready_reason(router, {}) == "no backend is ready"

    router.ready = False
    assert get_unready_reason(router, {"b": up}) == "the gateway drains"


# --- workers -------------------------------------------------------------------------------------


async def test_workers_are_listed_added_and_removed(admin_client: AdminClient) -> None:
    body = {"backend": "gpu", "url": "http://10.0.0.2:8000/", "weight": 3, "max_concurrency": 4}

    added = await admin_client.http.post("/-/workers", json=body)
    again = await admin_client.http.post("/-/workers", json=body | {"weight": 5})
    listed = await admin_client.http.get("/-/workers")

    removed = await admin_client.http.delete("/-/workers", params={"backend": "gpu", "url": FIRST})

    assert added.status_code == 201
    assert added.json() == body | {"url": "http://10.0.0.2:8000"}
    assert again.status_code == 200
    assert listed.json()["backends"] == {
        "gpu": [{"url": "http://10.0.0.2:8000", "weight": 5}, {"url": FIRST, "weight": 1}]
    }
    assert (removed.status_code, removed.content) == (204, b"")
    assert admin_client.workers.urls == ["http://10.0.0.2:8000"]


async def test_added_worker_with_only_a_url_has_default_weight_and_concurrency(
    admin_client: AdminClient,
) -> None:
    response = await admin_client.http.post(
        "/-/workers", json={"backend": "gpu", "url": "http://w:1"}
    )

    assert response.json() == {
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
async def test_add_worker_error_names_the_invalid_field(
    admin_client: AdminClient, change: dict[str, Any], status: int, field: str
) -> None:
    body = {"backend": "gpu", "url": "http://w:1"} | change

    assert parse_error(await admin_client.http.post("/-/workers", json=body)) == (status, field)
    assert admin_client.workers.urls == [FIRST]


@pytest.mark.parametrize("missing", ["backend", "url"])
async def test_add_worker_error_names_the_missing_field(
    admin_client: AdminClient, missing: str
) -> None:
    body = {"backend": "gpu", "url": "http://w:1"}
    del body[missing]

    assert parse_error(await admin_client.http.post("/-/workers", json=body)) == (400, missing)


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
async def test_61_add_worker_rejects_invalid_or_internal_addresses(
    admin_client: AdminClient, url: str
) -> None:
    response = await admin_client.http.post("/-/workers", json={"backend": "gpu", "url": url})

    assert parse_error(response) == (400, "url")
    assert admin_client.workers.urls == [FIRST]


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
async def test_body_that_is_not_a_json_object_is_rejected(
    admin_client: AdminClient, body: bytes
) -> None:
    headers = {"content-type": "application/json"}

    assert parse_error(
        await admin_client.http.post("/-/workers", content=body, headers=headers)
    ) == (400, None)


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
async def test_cross_origin_simple_request_content_types_are_rejected(
    admin_client: AdminClient, headers: dict[str, str]
) -> None:
    body = b'{"backend": "gpu", "url": "http://w:1"}'

    assert parse_error(
        await admin_client.http.post("/-/workers", content=body, headers=headers)
    ) == (415, None)
    assert admin_client.workers.urls == [FIRST]


@pytest.mark.parametrize("declared", [True, False])
async def test_too_large_body_is_rejected(admin_client: AdminClient, *, declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 8192

    content = b" " * (64 * 1024 + 1) if declared else pieces()
    headers = {"content-type": "application/json"}

    assert parse_error(
        await admin_client.http.post("/-/workers", content=content, headers=headers)
    ) == (413, None)


async def test_body_read_times_out_with_408(
    admin_client: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admin.http._BODY_TIMEOUT", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", admin_client.port)

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
async def test_remove_worker_errors_name_status_and_field(
    admin_client: AdminClient, query: str, status: int, field: str
) -> None:
    assert parse_error(await admin_client.http.delete(f"/-/workers?{query}")) == (status, field)
    assert admin_client.workers.urls == [FIRST]


async def test_add_worker_to_a_full_worker_set_is_a_conflict() -> None:
    class Full(Workers):
        def __init__(self) -> None:
            super().__init__(FIRST)
            self.add_worker = self.refuse

        def refuse(self, worker: WorkerConfig) -> bool:
            raise ValueError("there are enough workers")

    async with run_admin_listener(pool=Full()) as admin:
        response = await admin.http.post("/-/workers", json={"backend": "gpu", "url": "http://w:1"})

    assert parse_error(response) == (409, "url")
    assert "enough" in response.text


# --- paths and internal errors --------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/-/", "/-/nope", "/-/workers/", "/v1/models", "//-/live"])
async def test_unknown_path_returns_404(admin_client: AdminClient, path: str) -> None:
    url = f"http://127.0.0.1:{admin_client.port}{path}"

    assert parse_error(await admin_client.http.get(url)) == (404, None)


async def test_wrong_method_returns_405_with_an_allow_header(admin_client: AdminClient) -> None:
    response = await admin_client.http.put("/-/workers")

    assert parse_error(response) == (405, None)
    assert response.headers["allow"].replace(" ", "").split(",") == [
        "DELETE",
        "GET",
        "HEAD",
        "POST",
    ]


async def test_internal_error_response_hides_the_exception_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Workers):
        def report_workers(self) -> list[dict[str, Any]]:
            raise RuntimeError("canary")

    with caplog.at_level(logging.ERROR, "interlingua"):
        async with run_admin_listener(pool=Broken()) as admin:
            response = await admin.http.get("/-/workers")

    assert parse_error(response) == (500, None)
    assert "canary" not in response.text
    assert "canary" in caplog.text


async def test_responses_have_no_store_nosniff_and_server_headers(
    admin_client: AdminClient,
) -> None:
    for response in (await admin_client.http.get("/-/live"), await admin_client.http.get("/nope")):
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["server"] == "interlingua"


# --- authentication -------------------------------------------------------------------------------


def list_routes() -> list[tuple[str, str]]:
    listener = AdminServer(
        AdminConfig("127.0.0.1:0"),
        AdminServices(get_unready_reason=lambda: None, worker_sets={}),
    )
    routes = listener.build_application().router.routes()
    routes_found = [
        (route.method, str(route.resource.canonical)) for route in routes if route.resource
    ]
    return [
        *routes_found,
        ("GET", "/-/nope"),
        ("PUT", "/-/workers"),
        ("GET", "/-/live/"),
        ("POST", "/"),
    ]


@pytest.mark.parametrize(("method", "path"), list_routes())
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
async def test_missing_or_wrong_admin_key_returns_401(
    method: str, path: str, headers: dict[str, Any]
) -> None:
    async with run_admin_listener(sha256=DIGEST) as admin:
        response = await admin.http.request(method, path, headers=headers)

    if path in {"/-/live", "/-/ready"} and method in {"GET", "HEAD"}:
        assert response.status_code == 200
    else:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert method == "HEAD" or parse_error(response) == (401, None)


async def test_admin_key_grants_access_with_any_host_header() -> None:
    async with run_admin_listener("0.0.0.0:0", DIGEST.upper()) as admin:
        response = await admin.http.get("/-/workers", headers={"Authorization": f"bearer  {KEY}"})
        named = await admin.http.get("/-/live", headers={"Host": "gateway.example"})

    assert response.status_code == 200
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
async def test_loopback_listener_rejects_foreign_host_headers(
    admin_client: AdminClient, host: str, path: str
) -> None:
    assert parse_error(await admin_client.http.get(path, headers={"Host": host})) == (403, None)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8081", "[::1]", "[::1]:8081"]
)
async def test_loopback_listener_accepts_loopback_host_headers(
    admin_client: AdminClient, host: str
) -> None:
    assert (await admin_client.http.get("/-/workers", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:8081", "gateway:8081"])
def test_non_loopback_address_requires_an_admin_key(address: str) -> None:
    behind = AdminServices(get_unready_reason=lambda: None, worker_sets={})
    with pytest.raises(ValueError, match="give a key"):
        AdminServer(AdminConfig(address), behind)

    AdminServer(AdminConfig(address, DIGEST), behind)


async def test_key_for_changes_leaves_pages_open_and_protects_changes() -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    url = {"backend": "gpu", "url": FIRST}
    async with run_admin_listener(sha256=DIGEST, key_for="changes") as admin:
        assert (await admin.http.get("/-/workers")).status_code == 200
        assert (await admin.http.get("/metrics")).status_code == 200
        assert (await admin.http.delete("/-/workers", params=url)).status_code == 401
        assert (await admin.http.post("/-/workers", json=url)).status_code == 401

        response = await admin.http.post("/-/workers", json=url, headers=key)
        assert response.status_code == 200


async def test_key_for_changes_is_ignored_beyond_loopback() -> None:
    async with run_admin_listener("0.0.0.0:0", DIGEST, key_for="changes") as admin:
        assert (await admin.http.get("/-/workers")).status_code == 401


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
async def test_loopback_address_needs_no_admin_key(address: str) -> None:
    if address.startswith("[") and not _has_ipv6():
        address = "127.0.0.2:0"
    async with run_admin_listener(address) as admin:
        assert (await admin.http.get("/-/live")).status_code == 200


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_close_releases_the_port() -> None:
    async with run_admin_listener() as admin:
        port = admin.port
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


# --- limits ---------------------------------------------------------------------------------------


async def send_raw_bytes(port: int, data: bytes) -> bytes:
    """Send bytes and return the response until the connection ends."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


async def test_idle_admin_connections_are_evicted_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The admin listener has a share of the file descriptors of its own."""
    limits = replace(CONNECTION_LIMITS, header_timeout=1.0)
    monkeypatch.setattr("gateway.admin.api.CONNECTION_LIMITS", limits)
    async with run_admin_listener() as admin:
        silent = [
            socket.create_connection(("127.0.0.1", admin.port), timeout=30) for _ in range(200)
        ]
        with contextlib.ExitStack() as stack:
            for one in silent:
                stack.enter_context(contextlib.closing(one))
            assert (await admin.http.get("/-/live")).status_code == 200
            assert admin.server.listener.connections <= limits.connections == 64
            assert admin.server.listener.refused_by_reason["idle_evicted"] > 100
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
async def test_malformed_request_is_neither_echoed_nor_logged_as_an_error(
    admin_client: AdminClient, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    response = await send_raw_bytes(admin_client.port, data)
    assert response.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    for word in (b"Python", b"aiohttp", b"secret", b"Traceback"):
        assert word not in response
    assert [one for one in caplog.records if one.exc_info or one.levelno >= logging.ERROR] == []
