"""Threats of docs/threats.md that no other test covers: access, and upstream addresses."""

import asyncio
import gzip
import hashlib
import http.client
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from gateway.auth import failed_keys
from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.interfaces import Endpoint
from protocols.core.json_text import MAX_DEPTH
from protocols.core.units import has_dot_segment
from protocols.openai import OpenAI
from tests.conftest import CONFORMANCE, RunningGateway, Serve, find_conformance_prefix
from tests.support.tcp_server import run_server
from tests.support.waiting import PATIENCE

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
"""Endpoints of Triton, vLLM and OVMS for their operators."""
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
    """Raise the limit of failed keys, so that each attempt gets its own error."""
    monkeypatch.setattr(failed_keys, "_BURST", 100_000)


def list_endpoints() -> Iterator[tuple[str, Endpoint]]:
    """Return every endpoint of every protocol with the prefix of its listener."""
    for name in filter(REGISTERED.serves_clients, REGISTERED.names):
        prefix = find_conformance_prefix(name)
        for endpoint in REGISTERED.load_adapter_class(name)(None).endpoints:
            yield prefix, endpoint


async def get_status(running: RunningGateway, method: str, path: str, **headers: str) -> int:
    """Send a request with this path unchanged and return the response's status."""

    def ask() -> int:
        line = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        try:
            line.request(method, path, BODY, {"Content-Type": "application/json"} | headers)
            return line.getresponse().status
        finally:
            line.close()

    return await asyncio.to_thread(ask)


async def test_every_non_public_endpoint_requires_a_key(serve: Serve) -> None:
    """Statuses differ by protocol, so the error is read from the request's record."""
    running = await serve(CONFORMANCE)
    for prefix, endpoint in list_endpoints():
        path = prefix + endpoint.path.format_map(PathParameters())
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
            await get_status(running, endpoint.method, path, **headers)
            refused = running.records[-1].error == "Unauthorized"
            assert refused != endpoint.public, f"{endpoint.method} {path}"
        assert endpoint.method in ("GET", "HEAD") or not endpoint.public, path


class PathParameters(dict[str, str]):
    """A value for every path parameter."""

    def __missing__(self, key: str) -> str:
        return "1" if key == "version" else "mock"


async def test_unusual_path_spellings_do_not_bypass_authentication(serve: Serve) -> None:
    running = await serve(CONFORMANCE)
    assert await get_status(running, "POST", CHAT, Authorization="Bearer sk-test") == 200

    status = {path: await get_status(running, "POST", path) for path in ODD}
    assert set(status.values()) <= {400, 401, 404, 405}, status


async def test_client_listener_does_not_serve_admin_endpoints(serve: Serve) -> None:
    running = await serve(CONFORMANCE)
    for path in ADMIN:
        for method in ("GET", "POST", "DELETE"):
            status = await get_status(running, method, path, Authorization="Bearer sk-test")
            assert status in (404, 405), f"{method} {path}: {status}"


async def test_client_listener_does_not_forward_worker_operator_endpoints(serve: Serve) -> None:
    running = await serve(CONFORMANCE)
    for path in OPERATORS:
        for method in ("GET", "POST"):
            status = await get_status(running, method, path, Authorization="Bearer sk-test")
            assert status in (400, 404, 405, 503), f"{method} {path}: {status}"


@asynccontextmanager
async def run_canary_server() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Run a server that must get no request; yield the data that it received."""
    received: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))

    async with run_server(hear) as url:
        yield url, received


@pytest.mark.parametrize("worker", ["openai", "triton"])
async def test_request_fields_and_headers_cannot_choose_the_upstream_address(
    serve: Serve, worker: str
) -> None:
    """This holds for passed-through and for translated requests."""
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
            response = await running.http.post(CHAT, json=body | {name: url}, headers=headers)
            assert response.status_code in (200, 400), response.text

        response = await running.http.post(CHAT, json=body, headers=headers)

        assert response.status_code == 200
        assert behind.records
        assert received == []


def list_bodies_with_urls(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Return requests that name a URL in each field that may have one, by their paths."""
    chat = [
        {"type": "image_url", "image_url": {"url": f"{url}/a.png"}},
        {"type": "video_url", "video_url": {"url": f"{url}/a.mp4"}},
        {"type": "audio_url", "audio_url": {"url": f"{url}/a.wav"}},
    ]
    source = {"type": "url", "url": f"{url}/a.pdf"}
    return [
        *((CHAT, {"messages": [{"role": "user", "content": [part]}]}) for part in chat),
        *(
            ("/v1/messages", {"max_tokens": 9, "messages": [
                {"role": "user", "content": [{"type": kind, "source": source}]},
            ]})
            for kind in ("image", "document")
        ),
        *(
            ("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
            for part in (
                {"type": "input_image", "image_url": f"{url}/a.png"},
                {"type": "input_file", "file_url": f"{url}/a.pdf"},
            )
        ),
        (CHAT, {"messages": [{"role": "user", "content": f"see {url}/page"}]}),
        ("/api/chat", {"messages": [
            {"role": "user", "content": "hi", "images": [f"{url}/a.png"]},
        ]}),
    ]  # fmt: skip


@pytest.mark.parametrize("worker", ["openai", "anthropic", "tgi", "mindie", "ovms", "triton"])
async def test_no_url_of_a_body_is_fetched(serve: Serve, worker: str) -> None:
    """A URL is passed on as it is, or refused: the server that it names sees no connection."""
    async with run_canary_server() as (url, received), run_canary_server() as (target, requests):
        running = await serve(f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic, ollama]}}]
backends: {{w: {{protocol: {worker}, workers: ["{target}"], health: {{interval: 1h}}}}}}
models: {{mock: {{backend: w}}}}
""")
        for path, body in list_bodies_with_urls(url):
            response = await running.http.post(path, json={"model": "mock", **body})
            assert response.status_code >= 200

        assert received == []
        assert requests, "the worker itself is called"


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
    response = await running.http.post(CHAT, content=gzip.compress(BODY), headers=headers)

    assert response.status_code == 200

    bomb = gzip.compress(b" " * (32 << 20))
    assert len(bomb) < 64 << 10

    response = await running.http.post(CHAT, content=bomb, headers=headers)
    assert response.status_code == 413

    cut = gzip.compress(BODY)[:-8]
    response = await running.http.post(CHAT, content=cut, headers=headers)
    assert response.status_code == 400, "without its trailer the stream may be truncated"

    for rest in (b"x", gzip.compress(b" ")):
        twice = gzip.compress(BODY) + rest
        response = await running.http.post(CHAT, content=twice, headers=headers)
        assert response.status_code == 400, "others read what follows as well"


async def test_get_endpoints_respond_without_reading_the_body(serve: Serve) -> None:
    """The body never ends; the response is sent, and the connection is closed."""
    running = await serve(CONFORMANCE)
    for prefix, endpoint in list_endpoints():
        if endpoint.method != "GET":
            continue
        path = prefix + endpoint.path.format_map(PathParameters())
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            head = f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-test\r\n"
            writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
            response = await reader.read()
            writer.transport.abort()
        assert response.startswith(b"HTTP/1.1 "), path
        assert b"\r\nConnection: close\r\n" in response, path


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
    budget = mock.app.memory
    budget.limit = 10
    response = await mock.http.post(path, json={"model": "mock", **body})

    assert response.status_code in (429, 503), response.text
    assert int(response.headers["retry-after"]) >= 1
    assert mock.records[-1].error == "MemoryExhausted"

    budget.limit = 1 << 20
    response = await mock.http.post(path, json={"model": "mock", **body})
    assert mock.records[-1].error != "MemoryExhausted", response.text
    assert budget.get_use("bodies") == 0


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

        def note(*arguments: Any, **options: Any) -> Any:
            threads.setdefault(method, set()).add(threading.current_thread())
            return parse(*arguments, **options)

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


@pytest.mark.parametrize("name", CALLS)
async def test_body_nested_too_deep_is_refused_by_name(mock: RunningGateway, name: str) -> None:
    """The limit is a number that the error names, except where the real server has a text.

    Triton answers 500 for any body that it can't parse.
    """
    path, body = CALLS[name]

    async def send(depth: int) -> httpx.Response:
        value = "[" * (depth - 1) + "]" * (depth - 1)
        start = msgspec.json.encode({"model": "mock", **body}).decode()[:-1]
        return await mock.http.post(path, content=f'{start},"x":{value}}}')

    allowed, refused = await send(MAX_DEPTH), await send(MAX_DEPTH + 1)

    status = refused.status_code
    assert status == 500 if name.startswith("triton") else 400 <= status < 500
    if not name.startswith(("mindie", "ovms")):
        assert "nested too deep" in refused.text
        assert "more than 128 levels" in refused.text
    if name.startswith("openai"):
        assert allowed.status_code == 200


@pytest.mark.parametrize(
    ("field", "setting"),
    [("messages", "body_objects"), ("stop", "body_values")],
)
async def test_body_of_too_many_values_is_refused_before_it_is_decoded(
    mock: RunningGateway, monkeypatch: pytest.MonkeyPatch, field: str, setting: str
) -> None:
    """Values are counted first, since decoding them would delay other requests."""
    decoded: list[int] = []
    read = OpenAI.read_routing_info

    def note_decoding(adapter: OpenAI, call: Any) -> Any:
        decoded.append(len(call.body))
        return read(adapter, call)

    monkeypatch.setattr(OpenAI, "read_routing_info", note_decoding)
    value = '{"role":"user","content":"a"}' if field == "messages" else "0"
    count = 20_001 if field == "messages" else 1_000_001
    body = f'{{"model":"mock","{field}":[{",".join([value] * count)}]}}'

    response = await mock.http.post("/v1/chat/completions", content=body)
    assert (response.status_code, decoded) == (413, [])
    assert f"`limits.{setting}`" in response.json()["error"]["message"]

    text = "{,[" * (1 << 20)
    response = await mock.http.post(
        "/v1/chat/completions",
        json={"model": "mock", "messages": [{"role": "user", "content": text}]},
    )
    assert (response.status_code, len(decoded)) == (200, 1)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


RESTRICTED = f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic, {{name: cohere, prefix: /cohere}}, {{name: triton, prefix: /triton}}]}}]
backends: {{script: {{kind: echo}}}}
models: {{mock: {{backend: script}}, secret: {{backend: script}}}}
keys:
  - {{name: one, sha256: {digest("sk-one")}, models: [mock]}}
  - {{name: every, sha256: {digest("sk-every")}}}
"""  # noqa: E501
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, MESSAGES + b',"models":["secret"]'),
        (CHAT, MESSAGES + b',"fallbacks":[{"mock":["secret"]}]'),
        (CHAT, MESSAGES + b',"\\u006dodels":["secret"]'),
        (CHAT, MESSAGES + b',"user_config":{"model_list":[{"model_name":"mock"}]}'),
        (CHAT, MESSAGES + b',"extra_body":{"models":["secret"]}'),
        (CHAT, MESSAGES + b',"Models":["secret"]'),
        (CHAT, MESSAGES + b',"user":"' + b"x" * 300_000 + b'","models":["secret"]'),
        ("/v1/completions", b'"prompt":"hi","models":["secret"]'),
        ("/v1/embeddings", b'"input":"hi","models":["secret"]'),
        ("/v1/responses", b'"input":"hi","models":["secret"]'),
        ("/v1/images/generations", b'"prompt":"hi","models":["secret"]'),
        ("/v1/messages", b'"max_tokens":3,"models":["secret"],' + MESSAGES),
        ("/cohere/v2/chat", MESSAGES + b',"models":["secret"]'),
        ("/cohere/v2/rerank", b'"query":"q","documents":["a"],"models":["secret"]'),
        (CHAT, MESSAGES + b',"plugins":[{"allowed_models":["mock","secret"]}]'),
        ("/v1/responses", b'"input":"hi","tools":[{"type":"image_generation","model":"secret"}]'),
        ("/v1/images/generations", b'"prompt":"hi","x":{"model":"secret"}'),
        ("/v1/messages", b'"max_tokens":3,"tools":[{"type":"a","model":"secret"}],' + MESSAGES),
    ],
)
async def test_key_of_one_model_cannot_name_others_for_the_worker(
    serve: Serve, path: str, fields: bytes
) -> None:
    """Hosted gateways answer with one of ``models`` where the first one fails."""
    running = await serve(RESTRICTED)
    body = b'{"model":"mock",' + fields + b"}"
    headers = {"Content-Type": "application/json"}

    refused, other = [
        await running.http.post(
            path, content=body, headers=headers | {"Authorization": f"Bearer {key}"}
        )
        for key in ("sk-one", "sk-every")
    ]

    assert refused.status_code in (400, 422)
    assert "names further models" in refused.text
    assert "names further models" not in other.text


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "fallbacks",
        "MODELS",
        "models[0]",
        "fallbacks[0][model]",
        "models%5B0%5D",
        "models[]",
    ],
)
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
async def test_form_of_a_key_of_one_model_cannot_name_others(
    serve: Serve, path: str, name: str
) -> None:
    """Servers of forms read ``models[0]`` as an element of ``models``."""
    running = await serve(RESTRICTED)
    refused, other = [
        await running.http.post(
            path,
            data={"model": "mock", name: "secret"},
            files={"file": b"x"},
            headers={"Authorization": f"Bearer {key}"},
        )
        for key in ("sk-one", "sk-every")
    ]

    assert refused.status_code == 400
    assert "names further models" in refused.text
    assert "names further models" not in other.text


async def test_json_in_a_form_of_a_key_of_one_model_cannot_name_others(serve: Serve) -> None:
    """Some servers decode such fields; texts and files may say anything."""
    running = await serve(RESTRICTED)
    named = '{"model":"secret"}'
    texts = {"model": "mock", "prompt": named, "metadata[model]": "x", "style": "[no JSON"}

    refused, other = [
        await running.http.post(
            "/v1/images/edits",
            data=fields,
            files={"file": named.encode()},
            headers={"Authorization": "Bearer sk-one"},
        )
        for fields in (texts | {"tool": named}, texts)
    ]

    assert refused.status_code == 400
    assert "'tool.model' names further models" in refused.text
    assert "names further models" not in other.text


NAMED = '{"text_input":"q","models":["secret"]}'


@pytest.mark.parametrize(
    "body",
    [
        NAMED.encode().replace(b"{", b'{"\xff":1,'),
        b"\xef\xbb\xbf" + NAMED.encode(),
        NAMED.encode("utf-16"),
        NAMED.encode("utf-16-be"),
        NAMED.encode("utf-32"),
        NAMED.encode().replace(b"{", b'{"x":' + b"[" * 200 + b"]" * 200 + b","),
        NAMED.encode() + b"x",
    ],
)
async def test_body_that_only_a_worker_might_read_is_refused_for_a_key_of_one_model(
    serve: Serve, body: bytes
) -> None:
    """Triton's workers get bodies as they are, and may decode more than the gateway does."""
    running = await serve(RESTRICTED)
    refused, other = [
        await running.http.post(
            "/triton/v2/models/mock/generate",
            content=body,
            headers={"Authorization": f"Bearer {key}"},
        )
        for key in ("sk-one", "sk-every")
    ]

    assert refused.status_code == 400
    assert "an API key with a list of models needs" in refused.text
    assert "an API key with a list of models needs" not in other.text


@pytest.mark.parametrize(
    ("length", "body", "is_refused"),
    [
        (13, b'{"inputs":[]}\x00\x01', False),
        (0, b"\x01\x00\x00\x00q", False),
        (0, NAMED.encode(), True),
        (len(NAMED), NAMED.encode() + b"\x00\x01", True),
    ],
)
async def test_only_the_json_before_bytes_of_tensors_is_read(
    serve: Serve, length: int, body: bytes, is_refused: bool
) -> None:
    running = await serve(RESTRICTED)
    response = await running.http.post(
        "/triton/v2/models/mock/infer",
        content=body,
        headers={
            "Authorization": "Bearer sk-one",
            "Inference-Header-Content-Length": str(length),
        },
    )

    assert ("names further models" in response.text) == is_refused
    assert "an API key with a list of models needs" not in response.text


async def test_body_of_12_mib_passes_by_default(serve: Serve) -> None:
    """Agents send such bodies, with images."""
    running = await serve("""
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {e: {kind: echo, script: [noon]}}
models: {m: {backend: e}}
""")
    messages = [{"role": "user", "content": "A" * (12 << 20)}]
    response = await running.http.post(CHAT, json={"model": "m", "messages": messages})

    assert response.status_code == 200
