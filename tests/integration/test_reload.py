"""A reload replaces the configuration of a running gateway, over real sockets."""

import asyncio
import hashlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from backends.echo import EchoBackend
from gateway.config.loader import load_bytes, load_file
from gateway.config.registry import load_symbol
from gateway.observability.record import RequestRecord
from gateway.runtime import build
from gateway.runtime.gateway import Gateway as AppGateway
from gateway.runtime.gateway import build_services
from gateway.runtime.reload import ConfigSource, ReloadResult
from gateway.runtime.snapshot import ConfigSnapshot
from protocols.core.errors import WorkerUnreachable
from tests.fault.protocol_clients import (
    DONE,
    STARTED_STREAM,
    STOP,
    STREAM,
    create_raw_worker,
)
from tests.support.fakes import END, HANG, chunk
from tests.support.ports import reserve_port
from tests.support.waiting import PATIENCE, wait_until

PEMS = Path(__file__).parents[1] / "fault"
LISTENER = {
    "address": "127.0.0.1:0",
    "protocols": ["openai", {"name": "mindie", "prefix": "/mindie"}],
}
ECHO = {"kind": "echo", "script": ["Hello", " world"]}
SLOW = ECHO | {"delay": "150ms"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
REST = chunk(STOP) + chunk(DONE) + END
Parts = dict[str, Any]


class ReloadableGateway:
    """A gateway whose configuration is in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records = list[RequestRecord]()
        self.urls: list[str] = []

    def write(self, **parts: Any) -> None:
        """Write the default configuration with these changes to the file."""
        result: Parts = {
            "listeners": [LISTENER],
            "backends": {"echo": ECHO},
            "models": {"m": {"backend": "echo"}},
        }
        self.file.write_bytes(msgspec.json.format(msgspec.json.encode(result | parts)))

    async def start(self, **parts: Any) -> "ReloadableGateway":
        self.write(**parts)
        read = partial(load_file, str(self.file), env={})
        services = replace(build_services(), observe_request=self.records.append)
        first = read()
        self.app = AppGateway(first.config, services, origin=ConfigSource(first, read))
        self.urls = await self.app.start()
        self.http = httpx.AsyncClient(base_url=self.urls[0], timeout=30)
        return self

    async def reload(self, **parts: Any) -> ReloadResult:
        """Write a configuration and reload."""
        self.write(**parts)
        assert self.app.reloader is not None
        return await self.app.reloader.reload()

    async def reload_rejected(self, **parts: Any) -> list[str]:
        """Reload a rejected configuration, check that nothing changed, and return the errors."""
        before = self.app._current
        result = await self.reload(**parts)
        assert self.app._current is before
        assert not result.is_ok
        return [f"{one.path}: {one.message}" for one in result.issues]

    async def get_reply(self, model: str = "m") -> str:
        response = await self.http.post("/v1/chat/completions", json=CHAT | {"model": model})
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[ReloadableGateway]:
    reloadable = ReloadableGateway(tmp_path / "gateway.yaml")
    yield reloadable
    await reloadable.http.aclose()
    await reloadable.app.stop()


def build_pool_config(*urls: str, **parts: Any) -> Parts:
    return {"protocol": "openai", "workers": urls or ["http://127.0.0.1:9"]} | parts


# ── unchanged parts ───────────────────────────────────────────────────────────────────────────────


async def test_reload_keeps_unchanged_backends(gateway: ReloadableGateway) -> None:
    """A backend keeps its state when only other parts of the configuration change."""
    backends = {"one": build_pool_config(), "two": build_pool_config(), "echo": ECHO}
    models = {"m": {"backend": "one"}, "n": {"backend": "two"}, "o": {"backend": "echo"}}
    await gateway.start(backends=backends, models=models)
    before = dict(gateway.app.backends)
    new_models = models | {"p": {"backend": "echo", "model": "another"}, "q": {"backend": "one"}}
    await gateway.reload(backends=backends, models=new_models, limits={"body": "1MiB"})

    assert gateway.app.backends == before

    changed = backends | {"two": build_pool_config(policy="two_choices"), "new": ECHO}
    await gateway.reload(backends=changed, models=new_models)
    unchanged = [name for name, one in gateway.app.backends.items() if before.get(name) is one]

    assert unchanged == ["one", "echo"]


async def test_reload_recreates_a_pool_with_model_discovery_for_a_new_model(
    gateway: ReloadableGateway,
) -> None:
    backends = {"asks": build_pool_config(protocol="triton")}
    models = {"m": {"backend": "asks"}}
    await gateway.start(backends=backends, models=models)
    before = gateway.app.backends["asks"]
    await gateway.reload(backends=backends, models={"m": {"backend": "asks", "aliases": ["a"]}})

    assert gateway.app.backends["asks"] is before

    await gateway.reload(backends=backends, models=models | {"n": {"backend": "asks"}})
    assert gateway.app.backends["asks"] is not before


async def test_reload_recreates_a_pool_when_its_ca_file_changed(
    gateway: ReloadableGateway, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    shutil.copy(PEMS / "loopback.pem", ca)
    parts: Parts = {
        "backends": {"far": build_pool_config("https://127.0.0.1:9", tls={"ca": "ca.pem"})},
        "models": {"m": {"backend": "far"}},
    }
    await gateway.start(**parts)
    before = gateway.app.backends["far"]
    shutil.copy(ca, tmp_path / "same")
    (tmp_path / "same").replace(ca)
    await gateway.reload(**parts)

    assert gateway.app.backends["far"] is before

    shutil.copy(PEMS / "loopback-renewed.pem", ca)
    await gateway.reload(**parts)
    assert gateway.app.backends["far"] is not before


async def test_reload_reloads_a_local_model_only_for_its_own_settings(
    tmp_path: Path,
) -> None:
    """An alias, a limit or a further public model restarts no process; a new chat template does."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")

    def build_snapshot(former: ConfigSnapshot | None, **models: Any) -> ConfigSnapshot:
        weights = {"kind": "torch", "path": "a/model", "chat_template": str(template)}
        result = {"backends": {"local": weights}, "models": models}
        config = load_bytes(msgspec.json.encode(result), "x.yaml", env={}).config
        return ConfigSnapshot(config, build_services(), previous=former)

    one = build_snapshot(None, m={"backend": "local"})
    two = build_snapshot(one, m={"backend": "local", "aliases": ["a"]}, n={"backend": "local"})
    assert two.backends["local"] is one.backends["local"]

    template.write_text("{{ messages | length }}")
    three = build_snapshot(two, m={"backend": "local"})
    assert three.backends["local"] is not two.backends["local"]


async def test_reload_keeps_the_created_time_of_a_model(
    gateway: ReloadableGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.start()
    [before] = gateway.app.router.list_models()
    now = gateway.app._services.wall_clock()
    monkeypatch.setattr(
        gateway.app, "_services", replace(gateway.app._services, wall_clock=lambda: now + 99)
    )
    await gateway.reload(models={"m": {"backend": "echo"}, "n": {"backend": "echo"}})

    came = {info.name: info.created for info in gateway.app.router.list_models()}

    assert came == {"m": before.created, "n": int(now + 99)}


async def test_request_record_has_the_hash_of_its_configuration(gateway: ReloadableGateway) -> None:
    await gateway.start()
    await gateway.get_reply()
    result = await gateway.reload(models={"m": {"backend": "echo", "aliases": ["a"]}})
    await gateway.get_reply()

    digest = hashlib.sha256(gateway.file.read_bytes()).hexdigest()[:12]

    assert result.hash == gateway.records[1].config_hash == digest
    assert gateway.records[0].config_hash not in ("", digest)


async def test_reload_leaks_no_tasks_and_no_backends(gateway: ReloadableGateway) -> None:
    """After a reload there are no more tasks and open backends than before."""
    await gateway.start(backends={"p": build_pool_config()}, models={"m": {"backend": "p"}})
    tasks = len(asyncio.all_tasks())
    for number in range(20):
        changed = build_pool_config(queue={"max": number})
        assert (await gateway.reload(backends={"p": changed}, models={"m": {"backend": "p"}})).is_ok
    await wait_until(lambda: len(asyncio.all_tasks()) <= tasks)

    await gateway.reload()

    assert len(gateway.app.active_snapshots) == 1

    await wait_until(lambda: not gateway.app._closing_backends)


# ── requests in flight ────────────────────────────────────────────────────────────────────────────


async def collect_stream(
    gateway: ReloadableGateway, pieces: asyncio.Queue[bytes], model: str = "m"
) -> bytes:
    """Read a whole stream; append each piece to a list as it arrives."""
    received = b""
    body = CHAT | {"stream": True, "model": model}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for piece in response.aiter_bytes():
            received += piece
            pieces.put_nowait(piece)
    return received


async def test_removed_backend_is_closed_after_its_last_stream(
    gateway: ReloadableGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.start(backends={"echo": SLOW})
    old = gateway.app.backends["echo"]
    closed = asyncio.Event()

    async def close() -> None:
        closed.set()

    monkeypatch.setattr(old, "aclose", close)
    pieces = asyncio.Queue[bytes]()

    async with asyncio.TaskGroup() as tasks:
        stream_task = tasks.create_task(collect_stream(gateway, pieces))
        await pieces.get()
        result = await gateway.reload(backends={"other": ECHO}, models={"n": {"backend": "other"}})

        assert result.is_ok
        assert not closed.is_set()

        gone = await gateway.http.post("/v1/chat/completions", json=CHAT)
        assert await gateway.get_reply("n") == "Hello world"

    assert b"world" in stream_task.result()
    assert stream_task.result().endswith(b"data: [DONE]\n\n")
    assert gone.status_code == 404

    async with asyncio.timeout(PATIENCE):
        await closed.wait()


async def test_stream_of_a_removed_backend_ends_with_an_error_after_drain_timeout(
    gateway: ReloadableGateway,
) -> None:
    """A stream of a backend that stays goes on."""
    end = asyncio.Event()
    async with (
        create_raw_worker([STARTED_STREAM, HANG]) as gone,
        create_raw_worker([STARTED_STREAM, end, REST]) as stays,
    ):
        both = {"gone": build_pool_config(gone.url), "stays": build_pool_config(stays.url)}
        models = {"m": {"backend": "gone"}, "n": {"backend": "stays"}}
        drain = {"drain_timeout": "200ms"}
        await gateway.start(backends=both, models=models, limits=drain)
        pieces = asyncio.Queue[bytes]()
        async with asyncio.TaskGroup() as tasks:
            stream_tasks = [
                tasks.create_task(collect_stream(gateway, pieces, model)) for model in models
            ]
            await pieces.get()
            await pieces.get()
            await gateway.reload(
                backends={"stays": both["stays"]}, models={"n": models["n"]}, limits=drain
            )
            await asyncio.wait(stream_tasks[:1])
            end.set()

    broken, whole = (one.result() for one in stream_tasks)

    assert b'"error"' in broken
    assert b"[DONE]" not in broken
    assert b'"error"' not in whole
    assert whole.endswith(b"data: [DONE]\n\n")


async def test_stream_gets_a_new_drain_timeout_when_its_backend_is_removed(
    gateway: ReloadableGateway,
) -> None:
    """The stream began two reloads ago, and only the last reload removes its backend."""
    end = asyncio.Event()
    async with create_raw_worker([STARTED_STREAM, end, REST]) as worker:
        models = {"m": {"backend": "p"}}
        await gateway.start(
            backends={"p": build_pool_config(worker.url)},
            models=models,
            limits={"drain_timeout": "50ms"},
        )
        pieces = asyncio.Queue[bytes]()
        async with asyncio.TaskGroup() as tasks:
            stream_task = tasks.create_task(collect_stream(gateway, pieces))
            await pieces.get()
            await gateway.reload(
                backends={"p": build_pool_config(worker.url), "more": ECHO},
                models=models,
                limits={"drain_timeout": "30s"},
            )
            await asyncio.sleep(0.2)
            await gateway.reload(limits={"drain_timeout": "30s"})
            await asyncio.sleep(0.2)
            end.set()

    assert stream_task.result().endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in stream_task.result()


async def test_stop_infer_cancels_a_request_that_started_before_a_reload(
    gateway: ReloadableGateway,
) -> None:
    """The stop request uses the new configuration."""
    await gateway.start(backends={"echo": SLOW | {"script": ["a", "b", "c", "d", "e"]}})
    body = {"id": "a1", "text_input": "hi"}

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(gateway.http.post("/mindie/v2/models/m/generate", json=body))
        await wait_until(lambda: gateway.app.backends["echo"].running)  # type: ignore[attr-defined]
        await gateway.reload(models={"m": {"backend": "echo", "aliases": ["a"]}})
        stopped = await gateway.http.post("/mindie/v2/models/m/stopInfer", json=body)

    assert (stopped.status_code, stopped.json()) == (200, body)
    assert running.result().status_code == 400


async def test_gateway_stops_although_an_old_configuration_has_streams(
    gateway: ReloadableGateway,
) -> None:
    """Streams of old configurations get the drain timeout, and each backend is closed once."""
    async with create_raw_worker([STARTED_STREAM, HANG]) as worker:
        parts: Parts = {"models": {"m": {"backend": "p"}}, "limits": {"drain_timeout": "300ms"}}
        await gateway.start(backends={"p": build_pool_config(worker.url)}, **parts)
        pieces = asyncio.Queue[bytes]()
        hearing = asyncio.get_running_loop().create_task(collect_stream(gateway, pieces))
        await pieces.get()
        listener = {"address": f"127.0.0.1:{reserve_port()}", "protocols": ["openai"]}
        await gateway.reload(
            listeners=[listener],
            backends={"p": build_pool_config(worker.url, queue={"max": 1})},
            **parts,
        )
        await gateway.app.stop()
        await asyncio.gather(hearing, return_exceptions=True)
    assert len(gateway.records) == 1


# ── listeners ───────────────────────────────────────────────────────────────────────────────────


async def test_reload_adds_and_removes_listeners(gateway: ReloadableGateway) -> None:
    """A removed listener accepts no connections and closes the open ones after their responses."""
    first, second = (f"127.0.0.1:{reserve_port()}" for _ in "ab")
    keeps, goes, comes = LISTENER, LISTENER | {"address": first}, LISTENER | {"address": second}
    await gateway.start(listeners=[keeps, goes], backends={"echo": SLOW})

    async with httpx.AsyncClient(base_url=f"http://{first}", timeout=30) as client:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.post("/v1/chat/completions", json=CHAT))
            await wait_until(lambda: gateway.app.backends["echo"].running)  # type: ignore[attr-defined]

            assert (await gateway.reload(listeners=[keeps, comes])).is_ok

            await asyncio.sleep(0)
        with pytest.raises(httpx.ConnectError):
            await client.get("/v1/models")

    assert task.result().status_code == 200
    assert task.result().headers["connection"] == "close"
    async with httpx.AsyncClient(base_url=f"http://{second}", timeout=30) as client:
        assert (await client.get("/v1/models")).status_code == 200
    assert await gateway.get_reply() == "Hello world"

    await wait_until(lambda: not gateway.app._closing_listeners)


async def test_reload_changes_protocols_and_limits_of_a_listener_in_place(
    gateway: ReloadableGateway,
) -> None:
    """Connections stay open; limits of headers and connections hold for new ones."""
    await gateway.start()
    assert (await gateway.http.get("/mindie/v2/health/ready")).status_code == 200

    only = {"address": "127.0.0.1:0", "protocols": ["openai"]}
    few = {"connections_per_address": 1, "header": "1KiB"}
    await gateway.reload(listeners=[only], limits=few)

    assert (await gateway.http.get("/mindie/v2/health/ready")).status_code == 404
    async with httpx.AsyncClient(base_url=gateway.urls[0], timeout=30) as client:
        with pytest.raises(httpx.HTTPError):  # one is connected already
            await client.get("/health")

    await gateway.reload(listeners=[only], limits={"connections": 9, "header": "1KiB"})
    long = {"x-long": "x" * 2000}
    async with httpx.AsyncClient(base_url=gateway.urls[0], headers=long, timeout=30) as client:
        assert (await client.get("/health")).status_code == 431


async def test_reload_with_a_port_in_use_is_rejected_and_rolled_back(
    gateway: ReloadableGateway,
) -> None:
    await gateway.start()
    await gateway.get_reply()
    tasks = asyncio.all_tasks()
    comes = f"127.0.0.1:{reserve_port()}"

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        listeners = [LISTENER, *({"address": at, "protocols": ["openai"]} for at in (comes, taken))]
        backends = {"echo": ECHO, "far": build_pool_config()}
        [why] = await gateway.reload_rejected(listeners=listeners, backends=backends)

    assert why.startswith("listeners[2].address: the gateway can't listen there: ")
    assert why.endswith("address already in use")
    async with httpx.AsyncClient(base_url=f"http://{comes}", timeout=30) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    assert await gateway.get_reply() == "Hello world"

    await wait_until(lambda: asyncio.all_tasks() <= tasks)


async def test_reload_rejects_settings_that_need_a_restart_by_name(
    gateway: ReloadableGateway,
) -> None:
    """All such settings are named at once."""
    admin = f"127.0.0.1:{reserve_port()}"
    here = {"address": f"127.0.0.1:{reserve_port()}", "protocols": ["openai"]}
    pem = str(PEMS / "loopback.pem")
    await gateway.start(listeners=[LISTENER, here])
    encrypted = here | {"tls": {"cert": pem, "key": pem}}

    reasons = await gateway.reload_rejected(
        listeners=[LISTENER, encrypted],
        admin={"address": admin},
        observe={"access_log": {"format": "off"}},
        state={"redis": "redis://127.0.0.1:1"},
    )

    assert [why.partition(":")[::2] for why in reasons] == [
        (
            "listeners[1].tls",
            " turning TLS on or off needs a restart or another port",
        ),
        ("admin", " there is none for as long as the gateway runs; restart it"),
        ("observe", " can't change for as long as the gateway runs; restart it"),
        ("state", " can't change for as long as the gateway runs; restart it"),
    ]


# ── certificates ────────────────────────────────────────────────────────────────────────────────


def get_certificate_name(url: str, pem: Path) -> str:
    """Connect with this CA and return the name in the listener's certificate."""
    port = int(url.rpartition(":")[2])
    context = ssl.create_default_context(cafile=str(pem))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate = connection.getpeercert() or {}
    names = dict(pair for pairs in certificate["subject"] for pair in pairs)  # type: ignore[misc]
    return str(names["commonName"])


async def test_renewed_certificate_is_used_for_new_connections(
    gateway: ReloadableGateway, tmp_path: Path
) -> None:
    """Open connections stay; an incomplete file is rejected, and the old certificate remains."""
    pem = tmp_path / "tls.pem"
    shutil.copy(PEMS / "loopback.pem", pem)
    listeners = [LISTENER | {"tls": {"cert": "tls.pem", "key": "tls.pem"}}]
    await gateway.start(listeners=listeners)

    async def show(pem: Path) -> str:
        return await asyncio.to_thread(get_certificate_name, gateway.urls[0], pem)

    trusted = ssl.create_default_context(cafile=str(PEMS / "loopback.pem"))
    async with httpx.AsyncClient(base_url=gateway.urls[0], verify=trusted, timeout=30) as client:
        assert (await client.get("/health")).status_code == 200
        assert await show(PEMS / "loopback.pem") == "loopback test worker"

        pem.write_bytes((PEMS / "loopback-renewed.pem").read_bytes()[:-100])
        [why] = await gateway.reload_rejected(listeners=listeners)
        assert why.startswith("listeners[0].tls: can't be used: ")
        assert await show(PEMS / "loopback.pem") == "loopback test worker"

        shutil.copy(PEMS / "loopback-renewed.pem", pem)
        assert (await gateway.reload(listeners=listeners)).is_ok
        assert await show(PEMS / "loopback-renewed.pem") == "loopback test worker renewed"
        assert (await client.get("/health")).status_code == 200


# ── new parts ─────────────────────────────────────────────────────────────────────────────────────


async def test_workers_of_a_new_pool_are_probed_before_its_first_request(
    gateway: ReloadableGateway,
) -> None:
    """A worker that is down costs a request no attempt."""
    await gateway.start()
    async with create_raw_worker([STREAM]) as worker:
        both = build_pool_config(
            "http://127.0.0.1:9", worker.url, policy="round_robin", health={"fall": 1}
        )
        await gateway.reload(backends={"both": both}, models={"m": {"backend": "both"}})
        states = {one.url: one.state for one in gateway.app.backends["both"].report_workers()}  # type: ignore[attr-defined]

    assert states == {"http://127.0.0.1:9": "out", worker.url: "up"}


async def test_reload_continues_after_warmup_timeout_with_a_warning(
    gateway: ReloadableGateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far = build_pool_config(f"http://127.0.0.1:{silent.getsockname()[1]}")
        result = await gateway.reload(
            backends={"far": far},
            models={"m": {"backend": "far"}},
            limits={"warmup_timeout": "100ms"},
        )

    assert result.is_ok
    assert "far is not ready after 0.1 s and is used as it is" in caplog.text


async def test_reload_with_an_invalid_ca_file_is_rejected(
    gateway: ReloadableGateway, tmp_path: Path
) -> None:
    """The file has the CA certificates that a pool trusts."""
    (tmp_path / "ca.pem").write_text("no certificate")
    await gateway.start()
    far = build_pool_config("https://127.0.0.1:9", tls={"ca": "ca.pem"})
    backends = {"echo": ECHO, "far": far}

    [why] = await gateway.reload_rejected(backends=backends)

    assert why.startswith("backends.far.tls.ca: can't be used: no certificate or crl found; ")


class UnloadableBackend(EchoBackend):
    """A backend that fails to load, like a local model without files."""

    async def warm_up(self) -> None:
        raise WorkerUnreachable("there is no such model")


async def test_reload_with_a_backend_that_cannot_start_is_rejected(
    gateway: ReloadableGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.start()
    closed: list[EchoBackend] = []

    def fail_to_start(named: object) -> object:
        return UnloadableBackend if named is EchoBackend else named

    async def close(backend: EchoBackend) -> None:
        closed.append(backend)

    monkeypatch.setattr(UnloadableBackend, "aclose", close)
    monkeypatch.setattr(build, "load_symbol", lambda name: fail_to_start(load_symbol(name)))
    [why] = await gateway.reload_rejected(backends={"echo": ECHO, "new": ECHO})

    assert why == "backends.new: it can't be used: there is no such model"
    assert len(closed) == 1

    monkeypatch.undo()
    assert await gateway.get_reply() == "Hello world"


# ── the admin listener ────────────────────────────────────────────────────────────────────────────


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def test_admin_worker_changes_end_when_their_pool_is_recreated(
    gateway: ReloadableGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """They last while the pool does, and the admin listener shows the current pools."""
    ended = "far: the admin API's change of http://10.0.0.1:8000 ends with this reload"
    parts: Parts = {"admin": {"address": "127.0.0.1:0"}, "models": {"m": {"backend": "far"}}}
    await gateway.start(backends={"far": build_pool_config()}, **parts)

    async with httpx.AsyncClient(base_url=gateway.urls[-1], timeout=30) as admin:
        added = {"backend": "far", "url": "http://10.0.0.1:8000"}
        assert (await admin.post("/-/workers", json=added)).status_code == 201

        await gateway.reload(
            backends={"far": build_pool_config()}, limits={"body": "1MiB"}, **parts
        )
        backends = (await admin.get("/-/workers")).json()["backends"]
        assert ended not in caplog.text

        changed = build_pool_config(queue={"max": 1})
        await gateway.reload(backends={"far": changed, "more": build_pool_config()}, **parts)
        left = (await admin.get("/-/workers")).json()["backends"]

    assert [one["url"] for one in backends["far"]] == ["http://10.0.0.1:8000", "http://127.0.0.1:9"]
    assert ended in caplog.text
    assert {name: len(workers) for name, workers in left.items()} == {"far": 1, "more": 1}


async def test_reload_applies_new_keys_to_open_connections(gateway: ReloadableGateway) -> None:
    """The new keys hold even for a client that repeats the same request head."""

    def keys(**held: str) -> Parts:
        return {"keys": [{"name": name, "sha256": hash_key(key)} for name, key in held.items()]}

    await gateway.start(**keys(ann="one"))
    gateway.http.headers["authorization"] = "Bearer one"
    for _ in range(4):
        assert await gateway.get_reply() == "Hello world"

    await gateway.reload(**keys(bob="two"))
    refused = await gateway.http.post("/v1/chat/completions", json=CHAT | {"model": "m"})
    assert refused.status_code == 401

    await gateway.reload(**keys(bob="two", eve="one"))
    assert await gateway.get_reply() == "Hello world"
    assert [one.key for one in gateway.records] == ["ann"] * 4 + ["", "eve"]


async def test_reload_applies_a_new_admin_key(gateway: ReloadableGateway) -> None:
    at = {"address": "127.0.0.1:0"}
    await gateway.start(admin=at | {"sha256": hash_key("one")})
    await gateway.reload(admin=at | {"sha256": hash_key("two")})

    async with httpx.AsyncClient(base_url=gateway.urls[-1], timeout=30) as admin:
        statuses = [
            (await admin.post("/-/reload", headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("one", "two")
        ]

    assert statuses == [401, 200]


async def test_admin_reload_endpoint_returns_configuration_errors_as_json(
    gateway: ReloadableGateway,
) -> None:
    parts: Parts = {"admin": {"address": "127.0.0.1:0"}}
    await gateway.start(**parts)
    before = gateway.app._current
    gateway.write(models={"m": {"backend": "nobody"}}, **parts)
    async with httpx.AsyncClient(base_url=gateway.urls[-1], timeout=30) as admin:
        response = await admin.post("/-/reload")
        page = (await admin.get("/metrics")).text
    body = response.json()
    [complaint] = body["issues"]

    assert response.status_code == 422
    assert body["error"] == {
        "message": f"{gateway.file} is invalid; the configuration is unchanged",
        "field": None,
    }
    assert complaint["path"] == "models.m.backend"
    assert complaint["message"] == "there is no backend 'nobody'; known: echo"
    assert f'interlingua_config_info{{hash="{body["hash"]}"}} 1.0' in page
    assert gateway.app._current is before


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://elsewhere.example", 403), ("null", 403), ("HOST", 200), (None, 200)],
)
async def test_admin_reload_endpoint_rejects_cross_origin_requests(
    gateway: ReloadableGateway, origin: str | None, status: int
) -> None:
    """A browser sends a request without a body for any page, without a preflight."""
    await gateway.start(admin={"address": "127.0.0.1:0"})
    url = gateway.urls[-1]

    headers = {} if origin is None else {"origin": origin.replace("HOST", url)}

    async with httpx.AsyncClient(base_url=url, timeout=30) as admin:
        assert (await admin.post("/-/reload", headers=headers)).status_code == status


async def test_gateway_without_a_configuration_source_has_no_reload_endpoint(
    tmp_path: Path,
) -> None:
    text = msgspec.json.encode(
        {
            "listeners": [LISTENER],
            "admin": {"address": "127.0.0.1:0"},
            "backends": {"echo": ECHO},
            "models": {"m": {"backend": "echo"}},
        }
    )
    app = AppGateway(load_bytes(text, "x.yaml", env={}).config, build_services())

    urls = await app.start()

    async with httpx.AsyncClient(base_url=urls[-1], timeout=30) as admin:
        assert (await admin.post("/-/reload")).status_code == 404

    await app.stop()
