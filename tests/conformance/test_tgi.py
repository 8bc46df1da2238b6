"""The gateway meets the TGI cases, also those about what a worker receives."""

from typing import Any

import msgspec
import pytest

from tests.conformance.cases import Case
from tests.conformance.conftest import RunCase
from tests.conformance.tgi import CASES
from tests.conftest import Serve
from tests.support.fakes import ScriptedWorker, make_reply

WITH_WORKER = {21}
"""The number of the case below."""

BEFORE_A_WORKER = """
listeners: [{{address: "127.0.0.1:0", protocols: [tgi]}}]
limits: {{drain_timeout: 1s}}
backends: {{pool: {{protocol: openai, profile: vllm, workers: ["{url}"]}}}}
models: {{mock: {{backend: pool}}}}
"""
COMPLETION = {
    "id": "1",
    "object": "text_completion",
    "created": 1,
    "model": "mock",
    "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
}
CHAT = {
    **COMPLETION,
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ],
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("tgi", case)


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    numbers = set(range(1, 31)) - WITH_WORKER
    assert {case.number for case in CASES} == {f"TG-{n:02}" for n in numbers}
    assert len({case.id for case in CASES}) == len(CASES)


async def send(
    serve: Serve, path: str, body: Any, answer: Any = COMPLETION
) -> tuple[dict[str, Any], Any]:
    """Send a request; return the worker's request and the response."""
    async with ScriptedWorker([make_reply(msgspec.json.encode(answer))]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))

        response = await gateway.http.post(path, json=body)

        assert response.status_code == 200, response.text
        [sent] = [one for one in worker.requests if one.method == "POST"]
        fields: dict[str, Any] = msgspec.json.decode(sent.body)
        return fields, response.json()


async def test_tg21_a_request_without_parameters_samples(serve: Serve) -> None:
    sent, _ = await send(serve, "/generate", {"inputs": "a b"})

    assert sent.get("temperature") != 0
    assert sent["prompt"] == "a b"


async def test_tg21_a_request_with_parameters_is_greedy(serve: Serve) -> None:
    sent, _ = await send(serve, "/generate", {"inputs": "a b", "parameters": {}})

    assert sent["temperature"] == 0


async def test_tg29_tgi_response_format_becomes_a_json_schema(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_object", "value": schema}
    body = {"model": "tgi", "messages": [{"role": "user", "content": "x"}], "response_format": form}

    sent, _ = await send(serve, "/v1/chat/completions", body, CHAT)

    assert sent["model"] == "mock"
    assert sent["response_format"]["json_schema"]["schema"] == schema


async def test_tg30_regex_becomes_a_structured_output(serve: Serve) -> None:
    grammar = {"type": "regex", "value": "[0-9]+"}

    sent, _ = await send(serve, "/generate", {"inputs": "a", "parameters": {"grammar": grammar}})

    assert sent["structured_outputs"] == {"regex": "[0-9]+"}


async def test_stop_string_to_include_is_requested_from_the_worker(serve: Serve) -> None:
    sent, _ = await send(serve, "/", {"inputs": "a", "parameters": {"stop": ["x"]}})

    assert (sent["stop"], sent["include_stop_str_in_output"]) == (["x"], True)
