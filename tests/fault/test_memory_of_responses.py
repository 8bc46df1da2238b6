"""The responses of workers take of ``limits.memory`` until their clients have them."""

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from backends.interfaces import StreamItem
from backends.pool import attempt
from backends.pool.attempt import Attempt
from backends.pool.pool import PoolBackend
from gateway.pipeline import dispatcher
from gateway.pipeline.strategies import TargetAttempt
from tests.conftest import RunningGateway, Serve
from tests.support.fakes import CHUNKED, END, ScriptedWorker, chunk, make_reply
from tests.support.waiting import PATIENCE, wait_until

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai, ollama]}}]
admin: {{address: "127.0.0.1:0"}}
limits: {{memory: 16MiB, body: 1MiB}}
backends:
  first:
    protocol: openai
    workers: ["{first}"]
    health: {{interval: 1h}}
  other: {{protocol: openai, workers: ["{other}"], health: {{interval: 1h}}}}
models:
  m: {{backend: first, fallback: [n]}}
  n: {{backend: other}}
  e: {{backend: first, task: embedding}}
"""
MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": MESSAGES}
VECTORS = 40


def build_answer(size: int) -> bytes:
    """A chat completion of so many bytes, and some."""
    message = {"role": "assistant", "content": "x" * size}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "1", "created": 1, "model": "m", "choices": [choice]}).encode()


def build_vectors() -> bytes:
    vector = [-0.0123456789] * 3000
    data = [{"object": "embedding", "index": i, "embedding": vector} for i in range(VECTORS)]
    return json.dumps({"object": "list", "model": "m", "data": data}).encode()


async def read_memory(gateway: RunningGateway) -> dict[str, Any]:
    """The memory in ``/-/status``."""
    async with httpx.AsyncClient(base_url=gateway.admin) as admin:
        memory: dict[str, Any] = (await admin.get("/-/status")).json()["memory"]
        return memory


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "passed through": ("/v1/chat/completions", BODY),
    "translated": ("/api/chat", {**BODY, "stream": False}),
    "vectors": ("/v1/embeddings", {"model": "e", "input": ["x"] * VECTORS}),
    "vectors, translated": ("/api/embed", {"model": "e", "input": ["x"] * VECTORS}),
}


@pytest.mark.fault(63)
@pytest.mark.parametrize("name", REQUESTS)
async def test_response_takes_memory_until_it_is_sent(serve: Serve, name: str) -> None:
    path, body = REQUESTS[name]
    whole = build_vectors() if "vectors" in name else build_answer(600_000)
    half, go_on = len(whole) // 2, asyncio.Event()
    reply = CHUNKED + chunk(whole[:half]), go_on, chunk(whole[half:]) + END
    async with ScriptedWorker([*reply]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        sending = asyncio.create_task(gateway.http.post(path, json=body))
        await wait_until(lambda: gateway.app.memory.get_use("responses") >= half)
        held = (await read_memory(gateway))["uses"]["responses"]
        go_on.set()
        response = await sending

        assert response.status_code == 200
        assert half <= held <= len(whole)
        await wait_until(lambda: not gateway.app.memory.get_use("responses"))


@pytest.mark.fault(63)
@pytest.mark.parametrize("name", REQUESTS)
async def test_response_without_room_gets_503_and_the_next_ones_are_served(
    serve: Serve, name: str
) -> None:
    """The worker is not at fault: it is not asked again, nor is another one, and stays healthy."""
    path, body = REQUESTS[name]
    small, too_large = make_reply(build_answer(10)), make_reply(build_answer(17 << 20))
    async with (
        ScriptedWorker([too_large], [small]) as worker,
        ScriptedWorker([small]) as other,
    ):
        gateway = await serve(CONFIG.format(first=worker.url, other=other.url))
        refused = await gateway.http.post(path, json=body)
        memory = await read_memory(gateway)
        served = await gateway.http.post(REQUESTS["passed through"][0], json=BODY)
        pool = gateway.app.backends["first"]
        assert isinstance(pool, PoolBackend)
        assert not pool.metrics.failures

    assert (refused.status_code, served.status_code) == (503, 200)
    assert int(refused.headers["retry-after"]) >= 1
    assert gateway.records[0].error == "MemoryExhausted"
    assert (worker.request_count, other.request_count) == (2, 0)
    assert memory["refused"] == 1
    assert memory["uses"]["responses"] == 0
    assert [record.worker_failures for record in gateway.records] == [(), ()]


@pytest.mark.fault(63)
async def test_event_of_a_stream_takes_memory_until_it_is_complete(serve: Serve) -> None:
    delta = {"index": 0, "delta": {"content": "x" * 1_000_000}, "finish_reason": None}
    first = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    events = [json.dumps({"id": "1", "model": "m", "choices": [one]}) for one in (first, delta)]
    large = f"data: {events[1]}\n\ndata: [DONE]\n\n".encode()
    go_on = asyncio.Event()
    reply = (
        CHUNKED + chunk(f"data: {events[0]}\n\n".encode()) + chunk(large[:600_000]),
        go_on,
        chunk(large[600_000:]) + END,
    )
    async with ScriptedWorker([*reply]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        body = {**BODY, "stream": True}
        sending = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
        await wait_until(lambda: gateway.app.memory.get_use("responses") > 256 << 10)
        go_on.set()
        response = await sending

        assert len(response.content) > 1_000_000
        await wait_until(lambda: not gateway.app.memory.get_use("responses"))


@pytest.mark.fault(63)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_pieces_of_two_bytes_take_little_more_than_is_counted(
    serve: Serve, *, is_stream: bool
) -> None:
    whole, never = build_answer(400_000)[:-9], asyncio.Event()
    pieces = b"".join(chunk(whole[i : i + 2]) for i in range(0, len(whole), 2))
    async with ScriptedWorker([CHUNKED + pieces, never]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        path, body = REQUESTS["passed through"][0], {**BODY, "stream": is_stream}
        tracemalloc.start()
        try:
            sending = asyncio.create_task(gateway.http.post(path, json=body))
            await wait_until(lambda: gateway.app.memory.get_use("responses") >= len(whole))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sending.cancel()

    assert held < 10 * len(whole)


@pytest.mark.fault(63)
async def test_end_of_the_budget_is_reached_and_left_over_sockets(serve: Serve) -> None:
    """Ten responses of 2.5 MiB at once: some fit, the others get 503, and then all fit again."""
    go_on, whole = asyncio.Event(), build_answer(5 << 19)
    reply: list[Any] = [CHUNKED + chunk(whole[:-9]), go_on, chunk(whole[-9:]) + END]
    async with ScriptedWorker(*(reply for _ in range(10)), [make_reply(whole)]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        path, _ = REQUESTS["passed through"]
        sending = [asyncio.create_task(gateway.http.post(path, json=BODY)) for _ in range(10)]
        await wait_until(lambda: sum(task.done() for task in sending) >= 4)
        go_on.set()
        statuses = [(await task).status_code for task in sending]
        await wait_until(lambda: not gateway.app.memory.get_use("responses"))
        later = [(await gateway.http.post(path, json=BODY)).status_code for _ in range(3)]

    assert set(statuses) == {200, 503}
    assert later == [200] * 3


@pytest.mark.fault(63)
async def test_clients_that_leave_free_the_memory_of_responses(serve: Serve) -> None:
    whole, never = build_answer(1 << 20), asyncio.Event()
    async with ScriptedWorker([CHUNKED + chunk(whole), never]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        sending = asyncio.create_task(gateway.http.post(REQUESTS["passed through"][0], json=BODY))
        await wait_until(lambda: gateway.app.memory.get_use("responses") >= len(whole))
        sending.cancel()

        await wait_until(lambda: not gateway.app.memory.get_use("responses"))


@pytest.mark.fault(63)
async def test_client_that_leaves_while_a_thread_decodes_frees_the_memory(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends its work, for nobody; the next request is served."""
    is_decoding, go_on = threading.Event(), threading.Event()
    decode = Attempt._decode_unary

    def wait(self: Attempt, chunks: Sequence[bytes]) -> list[StreamItem]:
        is_decoding.set()
        go_on.wait(PATIENCE)
        return decode(self, chunks)

    whole = make_reply(build_answer(1 << 20))
    async with ScriptedWorker([whole], [make_reply(build_answer(10))]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        path, _ = REQUESTS["passed through"]
        with monkeypatch.context() as patched:
            patched.setattr(Attempt, "_decode_unary", wait)
            sending = asyncio.create_task(gateway.http.post(path, json=BODY))
            await wait_until(is_decoding.is_set)
            held = gateway.app.memory.get_use("responses")
            sending.cancel()
            await wait_until(lambda: bool(gateway.records))
            freed = gateway.app.memory.get_use("responses")
            go_on.set()
        later = await gateway.http.post(path, json=BODY)

    assert held > 2 << 20
    assert freed == 0
    assert gateway.records[0].outcome == "cancelled"
    assert later.status_code == 200


STEPS: dict[str, tuple[type, str, str]] = {
    "decoded": (Attempt, "_decode_unary", "passed through"),
    "encoded": (TargetAttempt, "build_response", "translated"),
}
"""The method for a step, and a request for which a thread calls it."""


class CallCounter:
    """Replaces a method by one that waits, and counts how many threads are in it at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.active = self.most = 0
        self.go_on = threading.Event()
        method, lock = getattr(owner, name), threading.Lock()

        def wait(*values: Any) -> Any:
            with lock:
                self.active += 1
                self.most = max(self.most, self.active)
            self.go_on.wait(PATIENCE)
            with lock:
                self.active -= 1
            return method(*values)

        monkeypatch.setattr(owner, name, wait)


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("step", "huge", "expected"),
    [
        ("decoded", 1 << 30, attempt._MAX_DECODING),
        ("decoded", 300_000, 1),
        ("encoded", 1 << 30, dispatcher._MAX_ENCODING),
    ],
)
async def test_few_large_responses_are_decoded_and_encoded_at_the_same_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, step: str, huge: int, expected: int
) -> None:
    """Each holds several copies and the interpreter's lock; the others wait as they came."""
    monkeypatch.setattr(attempt, "_HUGE_BODY", huge)
    owner, method, name = STEPS[step]
    calls, whole = CallCounter(monkeypatch, owner, method), build_answer(300_000)
    path, body = REQUESTS[name]
    async with ScriptedWorker([make_reply(whole)]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        sending = [asyncio.create_task(gateway.http.post(path, json=body)) for _ in range(6)]
        # All of them have arrived, and some have room for what is read and written of them.
        least = (6 + 4 * expected) * len(whole)
        await wait_until(lambda: gateway.app.memory.get_use("responses") >= least)
        await wait_until(lambda: calls.active == expected)
        calls.go_on.set()
        statuses = [(await task).status_code for task in sending]

    assert statuses == [200] * 6
    assert calls.most == expected


@pytest.mark.fault(63)
@pytest.mark.parametrize("step", STEPS)
async def test_threads_of_clients_that_left_count_until_they_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Else clients that leave would start more and more of them."""
    owner, method, name = STEPS[step]
    calls, (path, body) = CallCounter(monkeypatch, owner, method), REQUESTS[name]
    async with ScriptedWorker([make_reply(build_answer(300_000))]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        sending = [asyncio.create_task(gateway.http.post(path, json=body)) for _ in range(2)]
        await wait_until(lambda: calls.active == 2)
        for task in sending:
            task.cancel()
        await wait_until(lambda: len(gateway.records) == 2)
        waiting = asyncio.create_task(gateway.http.post(path, json=body))
        await wait_until(lambda: gateway.app.memory.get_use("responses") > 300_000)
        await asyncio.sleep(0.1)  # for a call that must not begin
        assert calls.active == 2
        calls.go_on.set()
        assert (await waiting).status_code == 200

    assert calls.most == 2


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("answer", "status"),
    [(build_answer(17 << 20), 503), (build_answer(2 << 20)[:-9], 502)],
    ids=["without room", "cut off"],
)
async def test_failed_response_is_freed_at_once(serve: Serve, answer: bytes, status: int) -> None:
    """Without the garbage collector: neither an error nor its traceback keeps it."""
    async with ScriptedWorker([make_reply(answer)]) as worker:
        gateway = await serve(CONFIG.format(first=worker.url, other=worker.url))
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            response = await gateway.http.post(REQUESTS["passed through"][0], json=BODY)
            await wait_until(lambda: bool(gateway.records))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()

    assert response.status_code == status
    assert held < 1 << 20
