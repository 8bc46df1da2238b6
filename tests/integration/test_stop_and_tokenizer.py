"""A client can stop a running request by its id, and tokenize a text."""

import asyncio
import hashlib
from typing import Any

import pytest

from tests.conftest import RunningGateway, Serve
from tests.support.waiting import wait_until

SLOW = "/v2/models/slow/generate"
STOP = "/v2/models/slow/stopInfer"
BODY = {"id": "a1", "text_input": "hi"}


def build_key_config(name: str) -> str:
    return f"{{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}}}"


CONFIGURATION = f"""
listeners: [{{address: "127.0.0.1:0", protocols: [mindie]}}]
limits: {{drain_timeout: 1s}}
keys: [{build_key_config("one")}, {build_key_config("other")}]
backends:
  slow: {{kind: echo, script: [a, b, c, d, e], delay: 400ms}}
  far: {{protocol: openai, workers: ["http://127.0.0.1:1"]}}
models:
  slow: {{backend: slow, model: slow}}
  far: {{backend: far, model: far}}
"""


@pytest.fixture
async def gateway(serve: Serve) -> RunningGateway:
    return await serve(CONFIGURATION)


async def send_post(gateway: RunningGateway, path: str, body: Any, key: str = "one") -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return await gateway.http.post(path, json=body, headers=headers)


async def wait_until_running(gateway: RunningGateway) -> None:
    backend: Any = gateway.app.backends["slow"]
    await wait_until(lambda: backend.running)


@pytest.mark.parametrize("what", ["generate", "generate_stream"])
async def test_request_stopped_before_its_first_byte_gets_an_error(
    gateway: RunningGateway, what: str
) -> None:
    """A unary response has no byte before the generation ends."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(send_post(gateway, f"/v2/models/slow/{what}", BODY))
        await wait_until_running(gateway)
        stopped = await send_post(gateway, STOP, BODY)

    assert (stopped.status_code, stopped.json()) == (200, BODY)

    response = task.result()
    assert response.status_code == 400
    assert response.json() == {"error": "the request was stopped", "error_type": "Bad Request"}
    assert gateway.app.backends["slow"].running == 0  # type: ignore[attr-defined]


async def test_stop_infer_of_another_key_is_not_found(gateway: RunningGateway) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(send_post(gateway, SLOW, BODY))
        await wait_until_running(gateway)
        other = await send_post(gateway, STOP, BODY, key="other")

    assert (other.status_code, other.json()["error"]) == (404, "RequestId is a1 not found.")
    assert task.result().json()["text_output"] == "abcde"


async def test_stop_infer_of_a_finished_request_is_not_found(gateway: RunningGateway) -> None:
    await send_post(gateway, SLOW, {**BODY, "parameters": {"max_new_tokens": 1}})

    again = await send_post(gateway, STOP, BODY)

    assert again.status_code == 404


async def test_tokenizer_request_for_a_backend_without_tokenizer_returns_422(
    gateway: RunningGateway,
) -> None:
    response = await send_post(gateway, "/v1/tokenizer", {"inputs": "hi", "model": "far"})

    assert response.status_code == 422
    assert response.json()["error"] == "The model does not support the Tokenize API."


async def test_tokenizer_request_is_bounded_by_the_timeout_header(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(prepared: object, context: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(gateway.app.backends["slow"], "send_unary", never)
    response = await gateway.http.post(
        "/v1/tokenizer",
        json={"inputs": "hi", "model": "slow"},
        headers={"authorization": "Bearer one", "x-interlingua-timeout": "0.1"},
    )

    assert response.status_code == 500
    assert response.json()["error"] == "Engine callback timeout: server e2eTimeout"


async def test_mindie_responses_have_request_uuid_and_start_time_headers(
    gateway: RunningGateway,
) -> None:
    headers = {"x-request-id": "r-1", "authorization": "Bearer one"}
    for path in ("/v2/models/slow", "/v2/models/nope", "/v2/health/live"):
        response = await gateway.http.get(path, headers=headers)
        assert response.headers["RequestUUID"] == "r-1"
        assert len(response.headers["startTime"]) == 19
