"""A worker that leaves out a choice, or sends one twice, has failed: its clients get an error."""

import json
from collections.abc import Sequence
from typing import Any, Final

import pytest

from tests.conftest import Serve
from tests.support.fakes import CHUNKED, END, ScriptedWorker, chunk, make_reply

CONFIGURATION: Final = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, ovms, {name: mindie, prefix: /mindie}]
backends:
  pool: {protocol: PROTOCOL, workers: ["%s"], retries: {max: 0}, health: {interval: 1h}}
models: {m: {backend: pool, model: m}}
"""
CHAT: Final = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 1}
CLIENTS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "openai": ("openai", "/v1/chat/completions", CHAT | {"n": 2}),
    "translated": ("openai", "/serving-endpoints/chat/completions", CHAT | {"n": 2}),
    "openai-emulated": ("openai", "/v1/chat/completions", CHAT | {"n": 2, "stop": "x", "top_k": 3}),
    "openai-prompts": ("openai", "/v1/completions", {"model": "m", "prompt": ["a", "b"]}),
    "databricks": ("databricks", "/serving-endpoints/chat/completions", CHAT | {"n": 2}),
    "mindie": ("mindie", "/mindie/v1/chat/completions", CHAT | {"n": 2}),
}


def build_choice(index: int, *, stream: bool) -> dict[str, Any]:
    """A complete choice for both of OpenAI's endpoints."""
    content = {"delta" if stream else "message": {"content": f"text{index}"}}
    return {"index": index, **content, "text": f"text{index}", "finish_reason": "stop"}


def build_reply(indices: Sequence[int], *, stream: bool) -> Any:
    """The worker's answer with choices of these indices."""
    about = {"id": "c", "object": "x", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choices = [build_choice(index, stream=stream) for index in indices]
    if not stream:
        return [make_reply(json.dumps({**about, "choices": choices, "usage": usage}).encode())]
    events = [json.dumps({**about, "choices": [one]}) for one in choices] + ["[DONE]"]
    return [CHUNKED, *(chunk(f"data: {one}\n\n".encode()) for one in events), END]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("indices", [(0,), (1,), (0, 5), (0, 0), (1, 5, 1)], ids=str)
@pytest.mark.parametrize("client", CLIENTS)
async def test_an_answer_without_a_requested_choice_is_an_error(
    serve: Serve, client: str, indices: Sequence[int], *, stream: bool
) -> None:
    protocol, path, body = CLIENTS[client]
    async with ScriptedWorker(build_reply(indices, stream=stream)) as worker:
        gateway = await serve(CONFIGURATION.replace("PROTOCOL", protocol) % worker.url)
        response = await gateway.http.post(path, json=body | {"stream": stream})

    assert gateway.records[0].outcome != "ok"
    assert "[DONE]" not in response.text
    if not stream:
        assert response.status_code >= 500
    if client != "mindie":  # which tells no cause, like its server
        assert "choice" in response.text
        assert "error" in response.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_an_answer_in_another_order_is_complete(
    serve: Serve, client: str, *, stream: bool
) -> None:
    protocol, path, body = CLIENTS[client]
    async with ScriptedWorker(build_reply((1, 0), stream=stream)) as worker:
        gateway = await serve(CONFIGURATION.replace("PROTOCOL", protocol) % worker.url)
        response = await gateway.http.post(path, json=body | {"stream": stream})

    assert response.status_code == 200
    assert "text0" in response.text
    assert "text1" in response.text
    assert gateway.records[0].outcome == "ok"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_choice_beyond_those_requested_is_left_out_and_reported(
    serve: Serve, *, stream: bool
) -> None:
    async with ScriptedWorker(build_reply((0, 1), stream=stream)) as worker:
        gateway = await serve(CONFIGURATION.replace("PROTOCOL", "openai") % worker.url)
        response = await gateway.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})

    assert response.status_code == 200
    assert "text0" in response.text
    assert "text1" not in response.text
    assert gateway.records[0].outcome == "ok"
    assert "choices[1]" in str(gateway.records[0].unsupported_parameters)
    if not stream:
        assert "choices[1]" in response.headers["x-interlingua-loss"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/serving-endpoints/chat/completions"])
async def test_the_only_choice_of_a_worker_that_counts_from_1_has_the_index_0(
    serve: Serve, path: str, *, stream: bool
) -> None:
    async with ScriptedWorker(build_reply((1,), stream=stream)) as worker:
        gateway = await serve(CONFIGURATION.replace("PROTOCOL", "openai") % worker.url)
        response = await gateway.http.post(path, json=CHAT | {"stream": stream})

    assert response.status_code == 200
    assert "text1" in response.text
    assert '"index":1' not in response.text
    assert gateway.records[0].outcome == "ok"
    assert "choices[0].index" in str(gateway.records[0].unsupported_parameters)


@pytest.mark.parametrize(("text", "index"), [(["a", "b"], 0), ("a", 1)])
async def test_vectors_that_share_one_index_get_those_of_their_inputs(
    serve: Serve, text: str | list[str], index: int
) -> None:
    vectors = [{"embedding": [0.5 + i], "index": index} for i in range(len(text))]
    answer = {"object": "list", "data": vectors, "model": "m", "usage": {"prompt_tokens": 1}}
    async with ScriptedWorker([make_reply(json.dumps(answer).encode())]) as worker:
        gateway = await serve(CONFIGURATION.replace("PROTOCOL", "openai") % worker.url)
        response = await gateway.http.post("/v1/embeddings", json={"model": "m", "input": text})

    assert response.status_code == 200
    indexed = [(one["index"], one["embedding"]) for one in response.json()["data"]]
    assert indexed == [(i, [0.5 + i]) for i in range(len(text))]
    assert ".index=dropped" in response.headers["x-interlingua-loss"]
