"""OpenAI's paths work without ``/v1``, and health pages have the paths that LiteLLM uses."""

import openai
import pytest

from tests.conftest import RunningGateway, Serve

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/chat/completions": CHAT,
    "/completions": {"model": "mock", "prompt": "hi", "max_tokens": 9},
    "/embeddings": {"model": "ep-emb", "input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_path_without_v1_is_that_with_v1(mock: RunningGateway, path: str) -> None:
    short = await mock.http.post(path, json=BODIES[path])
    full = await mock.http.post(f"/v1{path}", json=BODIES[path])

    assert short.status_code == 200

    short_body, full_body = short.json(), full.json()
    assert short_body.keys() == full_body.keys()
    assert [record.status for record in mock.records] == [200, 200]
    assert {record.protocol for record in mock.records} == {"openai"}


async def test_models_are_listed_without_v1(mock: RunningGateway) -> None:
    assert (await mock.http.get("/models")).json() == (await mock.http.get("/v1/models")).json()
    assert (await mock.http.get("/models/mock")).json()["id"] == "mock"
    assert (await mock.http.get("/models/nope")).status_code == 404


async def test_openai_client_streams_without_v1(mock: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=mock.url, api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == "Hello world!"


async def test_health_pages_distinguish_liveness_and_readiness(mock: RunningGateway) -> None:
    live, ready = "/health/liveliness", "/health/readiness"
    assert (await mock.http.get(live)).json() == "I'm alive!"
    assert (await mock.http.get(ready)).status_code == 200

    mock.app.set_draining()

    assert (await mock.http.get(live)).status_code == 200
    assert (await mock.http.get("/health/liveness")).status_code == 200
    assert (await mock.http.get(ready)).status_code == 503


async def test_shared_path_behind_a_parameter_is_found_at_load(serve: Serve) -> None:
    text = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, {name: ovms, v1: true}]}]
backends: {a: {kind: echo}}
models: {m: {backend: a}}
"""
    with pytest.raises(Exception, match="belongs to openai on this listener already"):
        await serve(text)
