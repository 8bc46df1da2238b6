"""Retries and fallbacks of a request share a retry budget and the tried workers (57).

Attempts are counted, so nothing depends on the machine's speed.
"""

import json
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.conftest import RunningGateway, Serve
from tests.support.fakes import CLOSE, RESET, Reply, ScriptedWorker, make_reply

REQUESTS = 100
ANSWER = [
    make_reply(
        b'{"id":"1","object":"chat.completion","created":1,"model":"x","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"fine"},"finish_reason":"stop"}]}'
    )
]
FAILURES: dict[str, Reply] = {
    "500": [make_reply(b'{"error":{"message":"no"}}', "500 Internal Server Error")],
    "503": [make_reply(b'{"error":{"message":"no"}}', "503 Service Unavailable")],
    "429": [make_reply(b'{"error":{"message":"no"}}', "429 Too Many Requests")],
    "closed": [CLOSE],
    "reset": [RESET],
}
HEALTHY = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""It closes, so that no request is sent on its connection, which would be tried again for free."""
"""Closes the connection, since a request on an idle one that closes would be replayed."""
BREAKER = "{consecutive_failures: 1000, min_requests: 1000}"


def make_pool(name: str, urls: list[str], settings: str = "") -> str:
    workers = ", ".join(f'"{url}"' for url in urls)
    return f"""  {name}: {{protocol: openai, workers: [{workers}], policy: round_robin,
    breaker: {BREAKER}{settings}}}
"""


def make_config(g: list[str], h: list[str], settings: str = "", *, model: str = "g") -> str:
    """Two targets; ``model`` is the workers' name of the second one's model."""
    pools = make_pool("g", g, settings) + make_pool("h", h, settings)
    return f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
{pools}
models:
  g: {{backend: g, fallback: [h]}}
  h: {{backend: h, model: {model}}}
"""


async def send(gateway: RunningGateway, number: int, model: str = "g") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": str(number)}]}
    return await gateway.http.post("/v1/chat/completions", json=body)


def list_repeated_attempts(workers: list[ScriptedWorker]) -> list[tuple[str, int]]:
    """Return the requests that one worker got twice."""
    counts = [
        Counter(request.headers["x-request-id"] for request in worker.requests)
        for worker in workers
    ]
    return [item for count in counts for item in count.items() if item[1] > 1]


def start_worker(reply: Reply) -> ScriptedWorker:
    return ScriptedWorker(reply, probed=HEALTHY)


@pytest.mark.fault(57)
@pytest.mark.parametrize("failure", FAILURES)
async def test_fallback_to_same_workers_stays_within_retry_budget(
    serve: Serve, failure: str
) -> None:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(start_worker(FAILURES[failure])) for _ in range(4)
        ]
        urls = [worker.url for worker in workers]
        gateway = await serve(make_config(urls, urls[::-1]))
        answers = [await send(gateway, number) for number in range(REQUESTS)]

    assert all(answer.status_code >= 429 for answer in answers)
    assert sum(worker.request_count for worker in workers) <= 1.2 * REQUESTS + 3
    assert not list_repeated_attempts(workers)


@pytest.mark.fault(57)
@pytest.mark.parametrize("failure", [*FAILURES, "unreachable"])
async def test_fallback_to_other_workers_loses_no_request(serve: Serve, failure: str) -> None:
    async with AsyncExitStack() as stack:
        dead = ["http://127.0.0.1:1"]
        if failure != "unreachable":
            workers = [
                await stack.enter_async_context(start_worker(FAILURES[failure])) for _ in range(2)
            ]
            dead = [worker.url for worker in workers]
        good = await stack.enter_async_context(start_worker(ANSWER))
        gateway = await serve(make_config(dead, [good.url]))
        answers = [await send(gateway, number) for number in range(REQUESTS)]

    assert {answer.status_code for answer in answers} == {200}
    assert good.request_count == REQUESTS


async def test_fallback_prefers_worker_that_failed_pool_does_not_have(serve: Serve) -> None:
    async with start_worker(FAILURES["500"]) as bad, start_worker(ANSWER) as good:
        gateway = await serve(make_config([bad.url], [bad.url, good.url]))
        answers = [await send(gateway, number) for number in range(REQUESTS)]

    assert {answer.status_code for answer in answers} == {200}
    assert (bad.request_count, good.request_count) == (REQUESTS, REQUESTS)


async def test_fallback_uses_untried_worker_within_retry_budget(serve: Serve) -> None:
    async with start_worker(FAILURES["500"]) as bad, start_worker(ANSWER) as good:
        urls = [bad.url, good.url]
        settings = ", retries: {max: 0}"
        gateway = await serve(make_config(urls, urls, settings))
        answers = [await send(gateway, number) for number in range(6)]

    assert {answer.status_code for answer in answers} == {200}
    assert not list_repeated_attempts([bad, good])


async def test_fallback_without_worker_left_reports_first_error(serve: Serve) -> None:
    async with start_worker(FAILURES["429"]) as bad:
        gateway = await serve(make_config([bad.url], [bad.url]))
        response = await send(gateway, 0)

    assert response.status_code == 429
    assert bad.request_count == 1
    assert gateway.records[0].failed_attempts == ("h@1 all workers tried",)
    assert gateway.records[0].model == "g"


async def test_pools_of_same_workers_share_retry_budget(serve: Serve) -> None:
    async with start_worker(FAILURES["500"]) as a, start_worker(FAILURES["500"]) as b:
        config = make_config([a.url, b.url], [b.url, a.url]).replace(", fallback: [h]", "")
        gateway = await serve(config)
        for number in range(10):
            await send(gateway, number, "g")
            await send(gateway, number, "h")

    assert a.request_count + b.request_count <= 1.2 * 20 + 3


async def test_prompt_too_long_for_one_model_falls_back_to_another_at_the_same_worker(
    serve: Serve,
) -> None:
    too_long = make_reply(
        b'{"error":{"message":"too long","code":"context_length_exceeded"}}', "400 Bad Request"
    )
    async with ScriptedWorker([too_long], ANSWER, probed=HEALTHY) as worker:
        config = make_config([worker.url], [worker.url])
        gateway = await serve(
            config.replace("g: {backend: g,", "g: {limits: {context: 8}, backend: g,").replace(
                "h: {backend: h,", "h: {limits: {context: 16}, backend: h,"
            )
        )
        response = await send(gateway, 0)

    assert response.status_code == 200
    assert worker.request_count == 2


MODEL_REFUSALS: dict[str, Reply] = {
    "429": FAILURES["429"],
    "503": FAILURES["503"],
    "529": [make_reply(b'{"error":{"message":"overloaded"}}', "529 Overloaded")],
    "404": [
        make_reply(
            b'{"error":{"message":"The model `g` does not exist","code":"model_not_found"}}',
            "404 Not Found",
        )
    ],
}


@pytest.mark.fault(57)
@pytest.mark.parametrize("refusal", MODEL_REFUSALS)
async def test_refused_model_falls_back_to_another_model_at_same_url(
    serve: Serve, refusal: str
) -> None:
    replies = [*MODEL_REFUSALS[refusal], *ANSWER] * 30
    async with ScriptedWorker(*([one] for one in replies), probed=HEALTHY) as worker:
        gateway = await serve(make_config([worker.url], [worker.url], model="other"))
        answers = [await send(gateway, number) for number in range(30)]

    assert {answer.status_code for answer in answers} == {200}
    assert [json.loads(one.body)["model"] for one in worker.requests] == ["g", "other"] * 30


async def test_failed_worker_gets_no_other_model_of_same_request(serve: Serve) -> None:
    async with start_worker(FAILURES["500"]) as worker:
        gateway = await serve(make_config([worker.url], [worker.url], model="other"))
        response = await send(gateway, 0)

    assert response.status_code == 502
    assert worker.request_count == 1


async def test_unknown_path_is_no_refusal_of_the_model(serve: Serve) -> None:
    unknown = [make_reply(b'{"detail":"Not Found"}', "404 Not Found")]
    async with start_worker(unknown) as worker:
        gateway = await serve(make_config([worker.url], [worker.url], model="other"))
        response = await send(gateway, 0)

    assert response.status_code == 502
    assert worker.request_count == 1


async def test_retry_after_of_one_model_leaves_other_models_alone(serve: Serve) -> None:
    busy = [make_reply(b'{"error":{"message":"no"}}', "429 Too Many Requests", retry_after="60")]
    async with ScriptedWorker(busy, ANSWER, probed=HEALTHY) as a, start_worker(ANSWER) as b:
        config = make_config([a.url, b.url], [a.url])
        gateway = await serve(config.replace("h: {backend: h, model: g}", "h: {backend: g}"))
        for number in range(5):  # the first gets the 429
            await send(gateway, number)
        refused_for_a = a.request_count
        for number in range(4):
            await send(gateway, number, "h")

    assert refused_for_a == 1, "the worker gets no request for the model that it rejected"
    assert [json.loads(one.body)["model"] for one in a.requests] == ["g", "h", "h"]
