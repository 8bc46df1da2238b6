"""A worker's response above the pool's size limit is an error."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from backends import echo
from gateway.pipeline.responder import Responder
from protocols.core import json_text
from protocols.core.aggregate import UnaryResponse, aggregate
from protocols.core.events import Event, FieldValues
from protocols.core.extra import list_paths
from protocols.core.loss import MAX_REPORTED
from protocols.core.request import RerankRequest
from protocols.core.sse import SseParser
from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, chunked, make_reply
from tests.support.tcp_server import run_server

ANSWER = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"fine"},"finish_reason":"stop"}]}'
)
LIMIT = 1 << 20
CHUNK = b"x" * (1 << 16)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, triton]}}]
backends:
  w:
    protocol: {protocol}
    workers: ["{url}"]
    health: {{interval: 1h}}
    retries: {{max: 0}}
    max_response_size: 1MiB
models: {{m: {{backend: w}}}}
"""
REQUESTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "openai": (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": ""}]},
    ),
    "triton": ("/v2/models/m/generate", {"text_input": "hi", "max_tokens": 4}),
}


MANY: Mapping[str, tuple[str, str]] = {
    "tool calls": (
        '"tool_calls":[',
        '{"index":%d,"id":"c%d","type":"function","function":{"name":"f","arguments":"{}"}}',
    ),
    "elements of a value": ('"content":[', '{"n":%d,"m":%d}'),
}
"""What a message or a delta may hold very often."""


def build_message(many: str, count: int, *, is_delta: bool) -> bytes:
    """A response, or a chunk of one, whose only choice has ``count`` of these."""
    start, item = MANY[many]
    items = ",".join(item % (i, i) for i in range(count))
    kind, finish = ("delta", "null") if is_delta else ("message", '"stop"')
    return (
        f'{{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,'
        f'"{kind}":{{"role":"assistant",{start}{items}]}},"finish_reason":{finish}}}]}}'
    ).encode()


@asynccontextmanager
async def endless_worker() -> AsyncIterator[tuple[str, list[int]]]:
    """A worker whose JSON never ends, and the number of bytes sent."""
    sent = [0]

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            return
        writer.write(HEAD + b'2\r\n{"\r\n')
        while not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
            await writer.drain()
            sent[0] += len(CHUNK)

    async with run_server(respond) as url:
        yield url, sent


@pytest.mark.fault(63)
@pytest.mark.parametrize("worker", ["openai", "triton"])
@pytest.mark.parametrize("client", REQUESTS)
async def test_a_worker_response_beyond_the_limit_is_a_worker_error(
    serve: Serve, client: str, worker: str
) -> None:
    """The client gets an error in its protocol, and reading stops soon after the limit."""
    path, body = REQUESTS[client]
    async with endless_worker() as (url, sent):
        running = await serve(CONFIG.format(protocol=worker, url=url))
        response = await running.http.post(path, json=body)
    assert response.status_code == (400 if client == "triton" else 502)

    error = response.json()["error"]
    message = error if client == "triton" else error["message"]
    assert message == "the worker's response is larger than 1048576 bytes (max_response_size)"

    record = running.records[-1]
    assert (record.outcome, record.error) == ("worker_error", "WorkerFailed")
    assert LIMIT <= sent[0] < LIMIT + (16 << 20)  # the rest is in socket buffers


@pytest.mark.fault(63)
@pytest.mark.parametrize("client", REQUESTS)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "in place of a stream"])
@pytest.mark.parametrize("many", MANY)
async def test_response_of_too_many_objects_is_refused_before_it_is_decoded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, many: str, client: str, *, stream: bool
) -> None:
    """No decoder sees the end of it, whatever the objects are."""
    monkeypatch.setattr("backends.pool.attempt.decode_end", pytest.fail)
    reply = make_reply(build_message(many, 200_000, is_delta=False))
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        gateway = await serve(config.replace("max_response_size: 1MiB", ""))
        path, body = REQUESTS[client]
        if stream:
            path, body = path.replace("generate", "generate_stream"), {**body, "stream": True}
        response = await gateway.http.post(path, json=body)

    assert response.status_code == (400 if client == "triton" else 502)
    assert "objects; `max_response_objects` allows 200000" in response.text
    assert gateway.records[-1].outcome == "worker_error"


@pytest.mark.fault(63)
@pytest.mark.parametrize(("calls", "in_thread"), [(10, False), (5000, True)])
async def test_large_response_is_written_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, calls: int, *, in_thread: bool
) -> None:
    """As it is decoded in one: with many calls, either would hold up the event loop."""
    threads = list[int]()

    def aggregate_events(events: Sequence[Event]) -> UnaryResponse:
        threads.append(threading.get_ident())
        return aggregate(events)

    monkeypatch.setattr("gateway.pipeline.strategies.aggregate", aggregate_events)
    reply = make_reply(build_message("tool calls", calls, is_delta=False))
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", url=worker.url))
        path, body = REQUESTS["openai"]
        response = await gateway.http.post(path, json=body)

    assert response.status_code == 200
    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == calls
    assert [thread != threading.get_ident() for thread in threads] == [in_thread]


@pytest.mark.fault(63)
async def test_many_events_are_recorded_in_several_turns_of_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5,000 tool calls there are two events each, and the gateway's other work goes on."""
    lengths = list[int]()

    def record(self: Responder, events: Sequence[Event], *, is_encoded: bool = False) -> int:
        lengths.append(len(events))
        return record_events(self, events, is_encoded=is_encoded)

    record_events = Responder._record_events
    monkeypatch.setattr(Responder, "_record_events", record)
    reply = make_reply(build_message("tool calls", 5000, is_delta=False))
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", url=worker.url))
        path, body = REQUESTS["openai"]
        response = await gateway.http.post(path, json=body)

    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == 5000
    assert sum(lengths) > 10_000
    assert max(lengths) <= 1001, "a batch, and the usage that the gateway has counted"


RANKING = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {script: {kind: echo}}
models: {m: {backend: script, task: rerank}}
"""


@pytest.mark.fault(63)
@pytest.mark.parametrize(("size", "in_thread"), [(10, False), (300_000, True)])
async def test_large_documents_are_ranked_by_the_script_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, size: int, *, in_thread: bool
) -> None:
    threads = list[int]()

    def rank_documents(request: RerankRequest) -> Sequence[Event]:
        threads.append(threading.get_ident())
        return rank(request)

    rank = echo._rank_documents
    monkeypatch.setattr(echo, "_rank_documents", rank_documents)
    gateway = await serve(RANKING)
    body = {"model": "m", "query": "a", "documents": ["a" * size, "b"]}
    response = await gateway.http.post("/v1/rerank", json=body)

    assert response.status_code == 200
    assert len(response.json()["results"]) == 2
    assert [thread != threading.get_ident() for thread in threads] == [in_thread]


@pytest.mark.fault(63)
@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_event_of_too_many_objects_ends_the_stream_with_an_error(
    serve: Serve, path: str, many: str
) -> None:
    """The text before it reaches the client; nothing behind it does."""
    text = b'{"id":"1","model":"m","choices":[{"index":0,"delta":{"content":"before"}}]}'
    events = [text, build_message(many, 20_000, is_delta=True), text.replace(b"before", b"behind")]
    reply = chunked(*(b"data: %b\n\n" % event for event in events))
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        gateway = await serve(config.replace("[openai, triton]", "[openai, anthropic]"))
        body = {"model": "m", "stream": True, "max_tokens": 9}
        message = [{"role": "user", "content": "hi"}]
        body["input" if path.endswith("responses") else "messages"] = message
        response = await gateway.http.post(path, json=body)

    assert "before" in response.text
    assert "behind" not in response.text
    assert "objects; the limit is 20000" in response.text
    assert gateway.records[-1].outcome == "truncated"


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("path", "api"),
    [("chat/completions", ""), ("messages", ""), ("chat/completions", "responses")],
    ids=["passed through", "translated", "the last event of the Responses API"],
)
async def test_large_event_is_decoded_in_a_thread_and_passed_on_in_parts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, api: str
) -> None:
    """Its 4,000 tool calls are two events each, which the event loop gets in several turns."""
    threads, lengths = set[int](), list[int]()

    def end_event(self: SseParser) -> bytes:
        data = end(self)
        if len(data) > 100_000:
            threads.add(threading.get_ident())
        return data

    def record(self: Responder, events: Sequence[Event], *, is_encoded: bool = False) -> int:
        lengths.append(len(events))
        return record_events(self, events, is_encoded=is_encoded)

    end, record_events = SseParser._pop_event, Responder._record_events
    monkeypatch.setattr(SseParser, "_pop_event", end_event)
    monkeypatch.setattr(Responder, "_record_events", record)
    event = json.loads(build_message("tool calls", 4000, is_delta=True))
    event["choices"][0]["finish_reason"] = "tool_calls"
    if api:
        calls = event["choices"][0]["delta"]["tool_calls"]
        output = [
            {"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls
        ]
        event = {"type": "response.completed", "response": {"id": "r", "output": output}}
    text = b"data: %b\n\n" % json.dumps(event).encode() + (b"" if api else b"data: [DONE]\n\n")
    reply = chunked(*(text[i : i + 50_000] for i in range(0, len(text), 50_000)))
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        option = f"options: {{worker_api: {api}}}" if api else ""
        config = config.replace("max_response_size: 1MiB", option)
        gateway = await serve(config.replace("[openai, triton]", "[openai, anthropic]"))
        message = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "stream": True, "max_tokens": 9, "messages": message}
        await gateway.http.post(f"/v1/{path}", json=body)

    assert gateway.records[-1].outcome == "ok"
    assert gateway.records[-1].first_token
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert sum(lengths) > 8000
    assert max(lengths) <= 1001, "a part, and the usage that the gateway has counted"


async def test_report_of_losses_that_is_full_costs_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many unknown elements of an event is a loss, and only the first are looked at."""
    paths = list[str]()

    def note_paths(at: str, values: FieldValues) -> Iterator[str]:
        for path in list_paths(at, values):
            paths.append(path)
            yield path

    monkeypatch.setattr("protocols.core.response_losses.list_paths", note_paths)
    text = b'{"id":"1","model":"m","choices":[{"index":0,"delta":{"content":"before"}}]}'
    event = build_message("elements of a value", 1000, is_delta=True)
    reply = chunked(*(b"data: %b\n\n" % one for one in (text, event, event)))
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIG.format(protocol="openai", url=worker.url))
        path, body = REQUESTS["triton"]
        body = {**body, "stream": True}
        await gateway.http.post(f"{path}_stream", json=body)

    assert len(gateway.records[-1].unsupported_parameters) == MAX_REPORTED + 1
    assert len(paths) == MAX_REPORTED + 1


def build_logprobs(tokens: int) -> list[dict[str, Any]]:
    """Log probabilities of so many tokens, with the most alternatives that services allow."""
    token = {"token": " a", "logprob": -1.25, "bytes": [32, 97]}
    return [{**token, "top_logprobs": [token] * 20}] * tokens


async def test_log_probabilities_of_a_long_answer_pass(serve: Serve) -> None:
    answer = json.loads(ANSWER)
    answer["choices"][0]["logprobs"] = {"content": build_logprobs(8000)}
    async with ScriptedWorker([make_reply(json.dumps(answer).encode())]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        gateway = await serve(config.replace("max_response_size: 1MiB", ""))
        path, body = REQUESTS["openai"]
        body = {**body, "logprobs": True, "top_logprobs": 20}
        response = await gateway.http.post(path, json=body)

    assert response.status_code == 200
    assert len(response.json()["choices"][0]["logprobs"]["content"]) == 8000


async def test_events_that_repeat_the_log_probabilities_of_a_stream_pass(serve: Serve) -> None:
    """The last events of a stream of the Responses API have those of all its tokens."""
    text = {
        "type": "output_text",
        "text": "hi",
        "annotations": [],
        "logprobs": build_logprobs(1500),
    }
    item = {"type": "message", "id": "m1", "role": "assistant", "content": [text]}
    place = {"item_id": "m1", "output_index": 0, "content_index": 0}
    events = [
        {"type": "response.output_text.delta", **place, "delta": "hi"},
        {**place, **text, "type": "response.output_text.done"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "r", "output": [item]}},
    ]
    reply = chunked(*(b"data: %b\n\n" % json.dumps(event).encode() for event in events))
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        options = "options: {worker_api: responses}"
        gateway = await serve(config.replace("max_response_size: 1MiB", options))
        path, body = REQUESTS["openai"]
        response = await gateway.http.post(path, json={**body, "stream": True})

    assert response.text.endswith("data: [DONE]\n\n")
    assert gateway.records[-1].outcome == "ok"


async def test_limits_of_objects_and_values_may_be_raised(serve: Serve) -> None:
    reply = make_reply(build_message("tool calls", 110_000, is_delta=False))
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        limits = "max_response_objects: 300000\n    max_response_values: 8000000"
        gateway = await serve(config.replace("max_response_size: 1MiB", limits))
        path, body = REQUESTS["openai"]
        response = await gateway.http.post(path, json=body)

    assert response.status_code == 200


VECTOR = [-0.0125] * 3072


@pytest.mark.fault(63)
@pytest.mark.parametrize("client", ["openai", "ollama"])
async def test_embeddings_of_2048_inputs_pass_by_default_one_vector_at_a_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """They have six million numbers, which are passed through or translated."""
    sizes = list[int]()

    def note_size(text: bytes | str | msgspec.Raw) -> None:
        sizes.append(len(text))

    monkeypatch.setattr(json_text, "check_depth", note_size)
    item = b'{"object":"embedding","index":%d,"embedding":' + json.dumps(VECTOR).encode() + b"}"
    items = b",".join(item % number for number in range(2048))
    reply = make_reply(b'{"object":"list","model":"m","data":[' + items + b"]}")
    inputs = ["a"] * 2048
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        config = config.replace("max_response_size: 1MiB", "")
        config = config.replace("[openai, triton]", "[openai, ollama]")
        gateway = await serve(config.replace("backend: w}", "backend: w, task: embedding}"))
        path = "/v1/embeddings" if client == "openai" else "/api/embed"
        response = await gateway.http.post(path, json={"model": "m", "input": inputs})

    assert response.status_code == 200
    assert len(reply) > 50 << 20
    assert response.content.count(b",") > 2048 * 3071
    assert max(sizes) < 1 << 20, "no decoder gets more at once"


@pytest.mark.fault(63)
async def test_vectors_are_read_whatever_else_a_response_has(serve: Serve) -> None:
    """Keys that the gateway does not know, and other keys with the name of a vector."""
    item = {"object": "embedding", "index": 0, "embedding": [0.5] * 100_000, "new": [1]}
    other = {**item, "index": 1, "embedding": [2.5], "about": {"embedding": [0]}}
    answer = {"object": "list", "model": "other", "data": [item, other], "embedding": [1, 2]}
    async with ScriptedWorker([make_reply(json.dumps(answer).encode())]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        config = config.replace("[openai, triton]", "[openai, ollama]")
        gateway = await serve(config.replace("backend: w}", "backend: w, task: embedding}"))
        inputs = ["a", "b"]
        same = await gateway.http.post("/v1/embeddings", json={"model": "m", "input": inputs})
        other_client = await gateway.http.post("/api/embed", json={"model": "m", "input": inputs})

    assert same.json() == {**answer, "model": "m"}
    first, second = other_client.json()["embeddings"]
    assert (len(first), second) == (100_000, [1.0]), "Ollama's are normalized"


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("setting", "status"), [("", 200), ("max_response_head: 16KiB", 502)], ids=["default", "16 KiB"]
)
async def test_head_of_20_kib_passes_by_default(serve: Serve, setting: str, status: int) -> None:
    reply = make_reply(ANSWER, set_cookie="x" * (20 << 10))
    async with ScriptedWorker([reply]) as worker:
        config = CONFIG.format(protocol="openai", url=worker.url)
        gateway = await serve(config.replace("max_response_size: 1MiB", setting))
        path, body = REQUESTS["openai"]
        response = await gateway.http.post(path, json=body)

    assert response.status_code == status
    [record] = gateway.records
    assert bool(record.worker_failures) == (status != HTTPStatus.OK)
    if status != HTTPStatus.OK:
        assert "16384 bytes (max_response_head)" in response.text
