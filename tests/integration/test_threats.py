"""Threats of docs/threats.md that are met in no other place: who gets in, and where it may lead."""

import asyncio
import gzip
import http.client
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.auth import failed_keys
from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.interfaces import Endpoint
from protocols.core.units import has_dot_segment
from protocols.openai import OpenAI
from tests.conftest import CONFORMANCE, RunningGateway, Serve
from tests.support.tcp_server import run_server

REGISTERED = ProtocolRegistry(PROTOCOLS)
CHAT = "/v1/chat/completions"
ADMIN = ["/metrics", "/-/live", "/-/ready", "/-/workers", "/-/config", "/-/reload", "/-/drain"]
OPERATORS = [
    "/v2/systemsharedmemory/region/a/register",
    "/v2/cudasharedmemory/region/a/register",
    "/v2/repository/models/mock/load",
    "/v2/repository/models/mock/unload",
    "/v2/trace/setting",
    "/v2/logging",
    "/v1/load_lora_adapter",
    "/v1/config/reload",
    "/collective_rpc",
    "/sleep",
    "/reset_prefix_cache",
]
"""What Triton, vLLM and OVMS keep for those who run them."""
ODD = [
    f"/{CHAT}",
    "/v1//chat/completions",
    "/V1/chat/completions",
    "/v1/chat/Completions",
    f"{CHAT}.",
    f"{CHAT}/",
    f"{CHAT}//",
    f"{CHAT}%00",
    f"{CHAT}%2f",
    f"{CHAT};x=health",
    f"{CHAT}?x=/health",
    "/v1%2fchat%2fcompletions",
    "/v1/chat%2Fcompletions",
    f"/.{CHAT}",
    f"/health/..{CHAT}",
    f"/health/%2e%2e{CHAT}",
    f"/health{CHAT}",
    f"http://127.0.0.1{CHAT}",
    f"http://health{CHAT}",
    "/ignore/../v1/chat/completions",
    "*",
]
BODY = b'{"model": "mock", "messages": [{"role": "user", "content": "hi"}]}'


@pytest.fixture(autouse=True)
def _many_wrong_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many attempts gets its own answer, not that of one attempt too many."""
    monkeypatch.setattr(failed_keys, "_BURST", 100_000)


def list_endpoints() -> Iterator[tuple[str, Endpoint]]:
    """Every endpoint of every protocol, and the prefix under which it is."""
    for name in filter(REGISTERED.serves_clients, REGISTERED.names):
        prefix = f"/{name}" if name in ("mindie", "tgi") else ""
        for endpoint in REGISTERED.load_adapter_class(name)(None).endpoints:
            yield prefix, endpoint


async def get_status(running: RunningGateway, method: str, path: str, **headers: str) -> int:
    """Of the answer to a path that is sent as it stands."""

    def ask() -> int:
        line = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        try:
            line.request(method, path, BODY, {"Content-Type": "application/json"} | headers)
            return line.getresponse().status
        finally:
            line.close()

    return await asyncio.to_thread(ask)


async def test_every_non_public_endpoint_requires_a_key(serve: Serve) -> None:
    """Each protocol has a status of its own for that, so the record is asked what it meant."""
    running = await serve(CONFORMANCE)
    for prefix, endpoint in list_endpoints():
        path = prefix + endpoint.path.format_map(PathParameters())
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
            await get_status(running, endpoint.method, path, **headers)
            refused = running.records[-1].error == "Unauthorized"
            assert refused != endpoint.public, f"{endpoint.method} {path}"
        assert endpoint.method in ("GET", "HEAD") or not endpoint.public, path


class PathParameters(dict[str, str]):
    """A name for every part of a path that is one."""

    def __missing__(self, key: str) -> str:
        return "1" if key == "version" else "mock"


async def test_unusual_path_spellings_do_not_bypass_authentication(serve: Serve) -> None:
    running = await serve(CONFORMANCE)
    assert await get_status(running, "POST", CHAT, Authorization="Bearer sk-test") == 200
    got = {path: await get_status(running, "POST", path) for path in ODD}
    assert set(got.values()) <= {400, 401, 404, 405}, got


async def test_client_listener_does_not_serve_admin_endpoints(serve: Serve) -> None:
    running = await serve(CONFORMANCE)
    for path in ADMIN:
        for method in ("GET", "POST", "DELETE"):
            got = await get_status(running, method, path, Authorization="Bearer sk-test")
            assert got in (404, 405), f"{method} {path}: {got}"


async def test_client_listener_does_not_forward_worker_operator_endpoints(serve: Serve) -> None:
    running = await serve(CONFORMANCE)
    for path in OPERATORS:
        for method in ("GET", "POST"):
            got = await get_status(running, method, path, Authorization="Bearer sk-test")
            assert got in (400, 404, 405, 503), f"{method} {path}: {got}"


@asynccontextmanager
async def run_canary_server() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that must get no request, and the data that it received."""
    received: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))

    async with run_server(hear) as url:
        yield url, received


@pytest.mark.parametrize("worker", ["openai", "triton"])
async def test_request_fields_and_headers_cannot_choose_the_upstream_address(
    serve: Serve, worker: str
) -> None:
    """The client's bytes are passed on where the protocols are the same, and else translated."""
    behind = await serve(CONFORMANCE.partition("\nkeys:")[0])
    running = await serve(f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{w: {{protocol: {worker}, workers: ["{behind.url}"]}}}}
models: {{mock: {{backend: w}}}}
""")
    async with run_canary_server() as (url, received):
        names = ("api_base", "base_url", "url", "proxy", "worker", "backend", "endpoint")
        body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-forwarded-host": url, "x-original-url": url, "forwarded": f"host={url}"}
        for name in names:
            answer = await running.http.post(CHAT, json=body | {name: url}, headers=headers)
            assert answer.status_code in (200, 400), answer.text
        answer = await running.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200
        assert behind.records
        assert received == []


@pytest.mark.parametrize("worker", ["triton", "databricks", "mindie"])
async def test_no_worker_gets_a_dot_segment_as_the_name_of_a_model(
    serve: Serve, worker: str
) -> None:
    async with run_canary_server() as (url, received):
        running = await serve(f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{w: {{protocol: {worker}, workers: ["{url}"], health: {{interval: 1h}}}}}}
models: {{"*": {{backend: w}}}}
""")
        for name in (".", "..", "%2e%2e", "a/../b"):
            body = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
            response = await running.http.post(CHAT, json=body)
            assert response.status_code == 404, response.text
            assert response.json()["error"]["code"] == "model_not_found"
        paths = {data.split(b" ")[1].decode() for data in received if data}
        assert not any(map(has_dot_segment, paths)), paths


async def test_decompressed_body_is_limited_in_size(serve: Serve) -> None:
    running = await serve(CONFORMANCE.replace("\nlimits: {", "\nlimits: {body: 64KiB, "))
    headers = {"Authorization": "Bearer sk-test", "Content-Encoding": "gzip"}
    answer = await running.http.post(CHAT, content=gzip.compress(BODY), headers=headers)
    assert answer.status_code == 200
    bomb = gzip.compress(b" " * (32 << 20))
    assert len(bomb) < 64 << 10
    answer = await running.http.post(CHAT, content=bomb, headers=headers)
    assert answer.status_code == 413
    cut = gzip.compress(BODY)[:-8]
    answer = await running.http.post(CHAT, content=cut, headers=headers)
    assert answer.status_code == 400, "without its trailer, nobody knows whether it is whole"


async def test_get_endpoints_respond_without_reading_the_body(serve: Serve) -> None:
    """The body never ends; the answer comes, and the connection closes."""
    running = await serve(CONFORMANCE)
    for prefix, endpoint in list_endpoints():
        if endpoint.method != "GET":
            continue
        path = prefix + endpoint.path.format_map(PathParameters())
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            head = f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-test\r\n"
            writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
            answer = await reader.read()
            writer.transport.abort()
        assert answer.startswith(b"HTTP/1.1 "), path
        assert b"\r\nConnection: close\r\n" in answer, path


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "openai completions": ("/v1/completions", {"prompt": "hi"}),
    "openai embeddings": ("/v1/embeddings", {"input": "hi"}),
    "triton": ("/v2/models/mock/generate", {"text_input": "hi"}),
    "triton stream": ("/v2/models/mock/generate_stream", {"text_input": "hi", "stream": True}),
    "ovms": ("/v3/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "mindie": ("/mindie/generate", {"inputs": "hi"}),
    "mindie tokenizer": ("/mindie/v1/tokenizer", {"inputs": "hi"}),
    "databricks": (
        "/serving-endpoints/mock/invocations",
        {"messages": [{"role": "user", "content": "hi"}]},
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_bodies_above_the_memory_budget_get_retry_after(
    mock: RunningGateway, name: str
) -> None:
    path, body = CALLS[name]
    budget = mock.app._body_budget
    budget.limit = 10
    answer = await mock.http.post(path, json={"model": "mock", **body})
    assert answer.status_code in (429, 503), answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert mock.records[-1].error == "Overloaded"
    budget.limit = 1 << 20
    answer = await mock.http.post(path, json={"model": "mock", **body})
    assert mock.records[-1].error != "Overloaded", answer.text
    assert budget.used == 0


@pytest.mark.parametrize("name", CALLS)
async def test_large_body_is_parsed_outside_the_event_loop_thread(
    mock: RunningGateway, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = CALLS[name]
    threads = dict[str, set[threading.Thread]]()

    def watch(adapter: type, method: str) -> None:
        parse = getattr(adapter, method, None)
        if parse is None:
            return

        def note(*arguments: Any, **more: Any) -> Any:
            threads.setdefault(method, set()).add(threading.current_thread())
            return parse(*arguments, **more)

        monkeypatch.setattr(adapter, method, note)

    for protocol in filter(REGISTERED.serves_clients, REGISTERED.names):
        for method in ("read_routing_info", "decode_request", "read_text"):
            watch(REGISTERED.load_adapter_class(protocol), method)
    data = msgspec.json.encode({"model": "mock", **body}) + b" " * (300 << 10)
    for encoding in ("identity", "gzip"):
        content = gzip.compress(data) if encoding == "gzip" else data
        headers = {"content-type": "application/json", "content-encoding": encoding}
        await mock.http.post(path, content=content, headers=headers)
    assert threads
    assert all(threading.main_thread() not in one for one in threads.values()), threads


@pytest.mark.parametrize(
    ("field", "setting"),
    [("messages", "body_objects"), ("stop", "body_values")],
)
async def test_body_of_too_many_values_is_refused_before_it_is_decoded(
    mock: RunningGateway, monkeypatch: pytest.MonkeyPatch, field: str, setting: str
) -> None:
    """What takes long to decode, and would delay others, is counted first."""
    decoded: list[int] = []
    read = OpenAI.read_routing_info

    def note_decoding(adapter: OpenAI, call: Any) -> Any:
        decoded.append(len(call.body))
        return read(adapter, call)

    monkeypatch.setattr(OpenAI, "read_routing_info", note_decoding)
    value = '{"role":"user","content":"a"}' if field == "messages" else "0"
    count = 20_001 if field == "messages" else 1_000_001
    body = f'{{"model":"mock","{field}":[{",".join([value] * count)}]}}'

    answer = await mock.http.post("/v1/chat/completions", content=body)
    assert (answer.status_code, decoded) == (413, [])
    assert f"`limits.{setting}`" in answer.json()["error"]["message"]

    text = "{,[" * (1 << 20)
    answer = await mock.http.post(
        "/v1/chat/completions",
        json={"model": "mock", "messages": [{"role": "user", "content": text}]},
    )
    assert (answer.status_code, len(decoded)) == (200, 1)
