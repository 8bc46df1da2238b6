"""The admin listener reports the state of a running gateway, and changes it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from msgspec.structs import replace

from gateway.config.loader import load_bytes
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from gateway.runtime.reload import ConfigSource
from tests.support.fakes import HANG, ScriptedWorker
from tests.support.waiting import PATIENCE

KEY = "sk-overview"
ID = "a/b%2F?c#/cancel"
TEXT = f"""
listeners:
  - {{address: "127.0.0.1:0", protocols: [openai, {{name: triton, profile: trtllm, prefix: /t}}]}}
  - {{address: "127.0.0.1:0", protocols: [ovms]}}
limits: {{shutdown_delay: 0s, body: 1KiB}}
admin: {{address: "127.0.0.1:0"}}
backends:
  fast: {{kind: echo, script: [a, b]}}
  slow: {{kind: echo, script: [a, b, c], delay: 30s}}
  begun: {{kind: echo, script: [a, b], delay: 100ms}}
  cut: {{kind: echo, script: [a, b], fail: {{mode: disconnect, after_chunks: 1}}}}
  pool:
    protocol: openai
    workers: [{{url: "WORKER", max_concurrency: 1, auth: {{bearer: "sk-secret"}}}}]
models:
  m:
    versions: {{"1": {{backend: fast}}, "2": {{backend: slow}}}}
    split: {{weights: {{"1": 3, "2": 1}}}}
  begun: {{backend: begun}}
  cut: {{backend: cut}}
  far: {{backend: pool}}
keys: [{{name: ann, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}]
"""


class RunningGateway:
    """A running gateway, and HTTP clients of its API and of its admin listener."""

    def __init__(
        self, file: Path, app: Gateway, urls: list[str], records: list[RequestRecord]
    ) -> None:
        self.file, self.app, self.records = file, app, records
        self.admin = httpx.AsyncClient(base_url=urls[-1], timeout=30)
        self.http = httpx.AsyncClient(base_url=urls[0], timeout=30, headers={"x-api-key": KEY})
        self.urls = urls

    async def chat(self, model: str, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=build_chat_body(model, **fields))

    async def requests(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = (await self.admin.get("/-/requests")).json()["requests"]
        return requests

    async def wait_for_requests(
        self, what: Callable[[list[dict[str, Any]]], object]
    ) -> list[dict[str, Any]]:
        """Wait until the requests in flight meet a condition, and return them."""
        async with asyncio.timeout(PATIENCE):
            while not what(requests := await self.requests()):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        return requests


def build_chat_body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "canary"}], **fields}


@asynccontextmanager
async def run_gateway(folder: Path, text: str = TEXT) -> AsyncIterator[RunningGateway]:
    file, records = folder / "gateway.yaml", list[RequestRecord]()
    async with ScriptedWorker([HANG]) as worker:
        file.write_text(text.replace("WORKER", worker.url))

        def read() -> Any:
            return load_bytes(file.read_bytes(), str(file), env={})

        services = replace(build_services(), observe_request=records.append)
        app = Gateway((first := read()).config, services, origin=ConfigSource(first, read))
        gateway = RunningGateway(file, app, await app.start(), records)
        async with gateway.admin, gateway.http:
            yield gateway
        await app.stop()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with run_gateway(tmp_path) as running:
        yield running


# --- reports --------------------------------------------------------------------------------------


async def test_config_endpoint_masks_secrets_and_reports_file_changes(
    gateway: RunningGateway,
) -> None:
    response = await gateway.admin.get("/-/config")
    digest = hashlib.sha256(gateway.file.read_bytes()).hexdigest()
    file = {"name": str(gateway.file), "hash": digest[:12], "differs": False}

    assert response.json()["hash"] == digest[:12]
    assert response.json()["file"] == file

    config = response.json()["config"]
    [worker] = config["backends"]["pool"]["workers"]
    auth = {"bearer": "***", "header": None, "query": None, "basic": None}

    assert worker["auth"] == auth
    assert config["keys"][0]["sha256"] == "***"
    assert config["admin"]["sha256"] is None
    assert config["backends"]["fast"]["script"] == ["a", "b"]

    lines = [line for _, _, line in response.json()["lines"]]
    assert 'auth: {bearer: "***"}' in "\n".join(lines)
    assert len(lines) == len(gateway.file.read_text().splitlines())
    for secret in ("sk-secret", hashlib.sha256(KEY.encode()).hexdigest()):
        assert secret not in response.text

    gateway.file.write_text("models: {}")
    assert (await gateway.admin.get("/-/config")).json()["file"]["differs"] is True

    gateway.file.unlink()
    gone = (await gateway.admin.get("/-/config")).json()["file"]
    assert (gone["hash"], gone["differs"]) == (None, False)


async def test_status_endpoint_reports_the_same_counts_as_the_metrics(
    gateway: RunningGateway,
) -> None:
    for _ in range(3):
        await gateway.chat("m@1", stream=True, stream_options={"include_usage": True})
    await gateway.chat("cut")
    status = (await gateway.admin.get("/-/status")).json()
    page = (await gateway.admin.get("/metrics")).text

    figures = {(one["model"], one["version"]): one for one in status["stats"]}
    one = figures["m", "1"]
    assert (one["requests"], one["errors"], one["completion_tokens"]) == (3, 0, 6)
    assert one["first_token_p95"] > 0
    assert one["tokens_per_second"] > 0
    assert figures["cut", "1"]["errors"] == 1

    lines = [line for line in page.splitlines() if line.startswith("interlingua_requests_total")]
    assert sum(float(line.split()[-1]) for line in lines) == 4
    assert status["models"][0] == {
        "name": "m",
        "task": "chat",
        "aliases": [],
        "versions": [
            {"name": "1", "backend": "fast", "backend_model": "m", "share": 75, "ready": True},
            {"name": "2", "backend": "slow", "backend_model": "m", "share": 25, "ready": True},
        ],
    }
    assert status["listeners"] == [
        {
            "url": gateway.urls[0],
            "protocols": [
                {"name": "openai", "profile": "", "prefix": ""},
                {"name": "triton", "profile": "trtllm", "prefix": "/t"},
            ],
        },
        {"url": gateway.urls[1], "protocols": [{"name": "ovms", "profile": "", "prefix": ""}]},
    ]
    assert status["backends"].keys() == {"fast", "slow", "begun", "cut", "pool"}

    [worker] = status["workers"]["pool"]
    assert (worker["state"], worker["limit"]) == ("up", 1)
    assert (status["processes"], status["running"], status["draining"]) == (1, 0, False)
    assert status["config_hash"] == gateway.app.active_snapshots[-1].config_hash
    assert 0 < status["recent_seconds"] <= status["uptime"]


async def test_requests_endpoint_reports_the_phase_and_progress_of_each_request(
    gateway: RunningGateway,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        begun = tasks.create_task(gateway.chat("begun", stream=True))
        streaming = await gateway.wait_for_requests(
            lambda requests: requests and requests[0]["tokens"]
        )
        await begun
        for _ in range(2):
            tasks.create_task(gateway.chat("far"))

        requests = await gateway.wait_for_requests(
            lambda requests: len(requests) == 2 and requests[1]["phase"] == "queued"
        )

        assert [one["phase"] for one in requests] == ["waiting", "queued"]
        assert requests[0]["age"] >= requests[1]["age"]
        assert requests[0]["backend"] == "pool"

        for one in requests:
            await gateway.admin.post(f"/-/requests/{one['id']}/cancel")
    await gateway.wait_for_requests(lambda requests: not requests)

    [one] = streaming
    assert one.pop("id")
    assert one.pop("age") > 0
    assert one == {
        "phase": "streaming",
        "protocol": "openai",
        "model": "begun",
        "version": "1",
        "backend": "begun",
        "key": "ann",
        "stream": True,
        "tokens": 1,
    }


async def test_history_counts_splits_and_errors_by_class_also_of_unknown_models(
    gateway: RunningGateway,
) -> None:
    for model in ("m@1", "nothing", "cut"):
        await gateway.chat(model, stream=True)
    await gateway.chat("m@1", temperature="hot")
    await gateway.http.post("/v1/chat/completions", json={}, headers={"x-api-key": "wrong"})
    history = (await gateway.admin.get("/-/history")).json()

    assert history["interval"] > 0

    versions = {(one["model"], one["version"]): one for one in history["versions"]}
    assert versions["m", "1"]["requests"] == 2
    assert versions["m", "1"]["split_requests"] == 0
    assert versions["m", "1"]["first_token_p50"] > 0

    errors = {
        (key[0], one["error"], one["origin"], one["count"])
        for key, version in versions.items()
        for one in version["errors"]
    }
    assert errors == {
        ("", "ModelNotFound", "client", 1),
        ("", "Unauthorized", "client", 1),
        ("m", "InvalidParameter", "client", 1),
        ("cut", "StreamBroken", "worker", 1),
    }


async def test_time_to_first_token_is_that_of_the_start_if_there_is_no_recent_one(
    gateway: RunningGateway,
) -> None:
    await gateway.chat("m@1", stream=True)
    [one] = (await gateway.admin.get("/-/status")).json()["stats"]

    assert sum(one["first_token_totals"]) == 1
    assert one["first_token_p50"] > 0


async def test_last_finished_requests_are_listed_without_their_content(
    gateway: RunningGateway,
) -> None:
    await gateway.http.get("/v1/models")
    await gateway.chat("m@1")
    await gateway.chat("nothing")
    response = await gateway.admin.get("/-/requests/finished")
    failed, done = response.json()["requests"]

    assert (done["model"], done["version"], done["key"], done["status"]) == ("m", "1", "ann", 200)
    assert done["duration"] > 0
    assert (failed["error"], failed["outcome"]) == ("ModelNotFound", "client_error")
    assert "canary" not in response.text
    assert KEY not in response.text

    for _ in range(205):
        await gateway.chat("m@1")
    assert len((await gateway.admin.get("/-/requests/finished")).json()["requests"]) == 200


async def test_explanation_is_also_returned_as_text(tmp_path: Path) -> None:
    text = """
    listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
    admin: {address: "127.0.0.1:0"}
    backends: {fast: {kind: echo}}
    models: {m: {backend: fast}}
    """
    async with run_gateway(tmp_path, text) as gateway:
        headers = {"x-interlingua-explain": "1", "x-request-id": "case"}
        await gateway.http.post("/v1/chat/completions", json=build_chat_body("m"), headers=headers)
        response = await gateway.admin.get("/-/explain/case?format=text")

        assert response.headers["content-type"].startswith("text/plain")
        assert "target     m@1: fast, as m" in response.text

        missing = await gateway.admin.get("/-/explain/other?format=text")
        assert (missing.status_code, missing.json()["error"]["field"]) == (404, "id")


# --- actions --------------------------------------------------------------------------------------


async def test_cancelled_request_gets_an_error_in_the_protocol_of_its_client(
    gateway: RunningGateway,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        for path, status, body in (
            ("/v1/chat/completions", 499, build_chat_body("m@2")),
            ("/t/v2/models/m@2/generate", 400, {"text_input": "x", "max_tokens": 5}),
        ):
            task = tasks.create_task(
                gateway.http.post(path, json=body, headers={"x-request-id": ID})
            )
            await gateway.wait_for_requests(len)
            ended = await gateway.admin.post(f"/-/requests/{quote(ID, safe='')}/cancel")
            assert (ended.status_code, ended.json()) == (200, {"cancelled": 1})
            response = await task
            assert response.status_code == status
            assert "the request was stopped" in response.text
    again = await gateway.admin.post(f"/-/requests/{quote(ID, safe='')}/cancel")

    assert (again.status_code, again.json()["error"]["field"]) == (404, "id")
    assert [one.error for one in gateway.records] == ["ClientDisconnected"] * 2


async def test_request_that_started_before_a_reload_is_listed_and_cancellable(
    gateway: RunningGateway,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(gateway.chat("m@2"))
        [before] = await gateway.wait_for_requests(len)
        gateway.file.write_text(gateway.file.read_text() + "# changed\n")

        assert (await gateway.admin.post("/-/reload")).status_code == 200

        [after] = await gateway.requests()
        assert after["id"] == before["id"]

        await gateway.admin.post(f"/-/requests/{after['id']}/cancel")
    assert task.result().status_code == 499


async def test_drain_state_survives_a_reload_and_can_be_cancelled(gateway: RunningGateway) -> None:
    assert (await gateway.admin.post("/-/drain")).json() == {"draining": True}

    gateway.file.write_text(gateway.file.read_text() + "# changed\n")
    await gateway.admin.post("/-/reload")
    assert (await gateway.admin.get("/-/ready")).status_code == 503
    assert (await gateway.admin.get("/-/status")).json()["draining"] is True
    assert (await gateway.chat("m@1")).status_code == 200

    assert (await gateway.admin.delete("/-/drain")).json() == {"draining": False}
    assert (await gateway.admin.get("/-/ready")).status_code == 200


# --- requests through the admin listener ----------------------------------------------------------


async def test_playground_forwards_requests_to_a_listener(gateway: RunningGateway) -> None:
    key = {"x-api-key": KEY, "Authorization": "Bearer of-the-admin"}
    played = await gateway.admin.post(
        "/-/playground/0/v1/chat/completions", json=build_chat_body("m@1"), headers=key
    )
    assert played.json()["choices"][0]["message"]["content"] == "ab"
    assert played.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert played.headers["x-content-type-options"] == "nosniff"
    assert gateway.records[-1].key == "ann"

    unkeyed = await gateway.admin.post(
        "/-/playground/0/v1/chat/completions", json=build_chat_body("m@1")
    )
    assert (unkeyed.status_code, "API key" in unkeyed.json()["error"]["message"]) == (401, True)

    head = await gateway.admin.head("/-/playground/0/v1/models", headers=key)
    assert (head.status_code, head.content) == (405, b"")

    described = await gateway.admin.get("/-/playground/1/openapi.json")
    assert "/v3/chat/completions" in described.json()["paths"]

    nobody = await gateway.admin.get("/-/playground/2/openapi.json")
    assert (nobody.status_code, nobody.json()["error"]["field"]) == (404, "listener")


async def test_playground_stream_breaks_where_the_upstream_stream_breaks(
    gateway: RunningGateway,
) -> None:
    url, key = "/-/playground/0/v1/chat/completions", {"x-api-key": KEY}
    async with gateway.admin.stream(
        "POST", url, json=build_chat_body("cut", stream=True), headers=key
    ) as response:
        lines = [line async for line in response.aiter_lines()]

    assert '"content":"a"' in "".join(lines)
    assert "data: [DONE]" not in lines
    assert "error" in [line for line in lines if line][-1]


@pytest.mark.parametrize("declared", [True, False])
async def test_playground_applies_the_body_size_limit(
    gateway: RunningGateway, *, declared: bool
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 512

    content = b" " * 1536 if declared else pieces()
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    url = "/-/playground/0/v1/chat/completions"

    assert (await gateway.admin.post(url, content=content, headers=headers)).status_code == 413


async def test_playground_rejects_a_malformed_chunked_body(gateway: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.admin.base_url.port)
    writer.write(
        b"POST /-/playground/0/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"X-Api-Key: " + KEY.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\n{\r\nzz\r\n"
    )

    assert (await reader.readline()).split()[1] == b"400"

    writer.close()


async def test_playground_client_disconnect_cancels_the_request(gateway: RunningGateway) -> None:
    url, key = "/-/playground/0/v1/chat/completions", {"x-api-key": KEY}
    async with gateway.admin.stream(
        "POST", url, json=build_chat_body("begun", stream=True), headers=key
    ):
        await gateway.wait_for_requests(len)

    await gateway.wait_for_requests(lambda requests: not requests)

    assert gateway.records[-1].outcome == "cancelled"


async def test_internal_error_truncates_the_playground_response(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A response that was not finished must not look complete."""

    async def begun(http: Any, sink: Any) -> None:
        sink.start(200, (("Content-Type", "text/plain"), ("Content-Length", "7")))
        sink.write(b"half")

    served: Callable[..., Awaitable[None]] = begun
    monkeypatch.setattr(gateway.app.active_snapshots[-1], "get_handler", lambda listener: served)

    with pytest.raises(httpx.RemoteProtocolError):
        await gateway.admin.get("/-/playground/0/v1/models")


# --- the admin page -------------------------------------------------------------------------------


async def test_admin_page_is_self_contained_and_needs_no_key(gateway: RunningGateway) -> None:
    for path in ("/", "/-/ui"):
        led = await gateway.admin.get(path)
        assert (led.status_code, led.headers["location"]) == (302, "/-/ui/")
    page = await gateway.admin.get("/-/ui/")

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert "://" not in page.text
    assert (await gateway.admin.get("/-/ui/app.js")).headers["content-type"].startswith("text/java")

    for name in ("nothing.js", "..%2Fcli.py", "../app.py", "index", ""):
        response = await gateway.admin.get(f"/-/ui/{name}") if name else None
        assert response is None or response.status_code == 404


async def test_cross_origin_requests_to_admin_endpoints_are_rejected(
    gateway: RunningGateway,
) -> None:
    paths = ("/-/drain", "/-/reload", "/-/requests/x/cancel", "/-/playground/0/v1/chat/completions")
    for path in paths:
        for origin in ("http://evil.example", "null", f"{gateway.urls[0]}"):
            response = await gateway.admin.post(path, headers={"Origin": origin})
            assert (path, response.status_code) == (path, 403)
    own = {"Origin": gateway.urls[-1]}
    second = [*own.items(), ("Origin", "http://evil.example")]

    assert (await gateway.admin.post("/-/drain", headers=second)).status_code == 403
    assert (await gateway.admin.post("/-/drain", headers=own)).status_code == 200
