"""The gateway meets the Databricks cases, and those that need more than one request."""

import base64
import struct

import msgspec
import openai
import pytest

from tests.conformance.cases import Case
from tests.conformance.conftest import RunCase
from tests.conformance.databricks import CASES
from tests.conftest import RunningGateway, Serve
from tests.support.fakes import ScriptedWorker, make_reply

CHAT = "/serving-endpoints/mock/invocations"
HI = {"role": "user", "content": "say hi"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("databricks", case)


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    assert {case.number for case in CASES} == {f"W{n}" for n in range(84, 103)}
    assert len({case.id for case in CASES}) == len(CASES)


BEFORE_A_WORKER = """
listeners: [{{address: "127.0.0.1:0", protocols: [databricks]}}]
limits: {{drain_timeout: 1s}}
backends: {{pool: {{protocol: openai, profile: vllm, workers: ["{url}"]}}}}
models: {{mock: {{backend: pool}}}}
"""
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "mock",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ],
}


async def test_w92_extra_params_strings_reach_the_worker_as_numbers(serve: Serve) -> None:
    async with ScriptedWorker([make_reply(msgspec.json.encode(ANSWER))]) as worker:
        gateway = await serve(BEFORE_A_WORKER.format(url=worker.url))
        body = {"messages": [HI], "extra_params": {"top_k": "5", "temperature": "0.5"}}

        response = await gateway.http.post(CHAT, json=body)

        assert response.status_code == 200

        sent = [one for one in worker.requests if one.method == "POST"]
        fields = msgspec.json.decode(sent[0].body)
        assert (fields["top_k"], fields["temperature"]) == (5, 0.5)
        assert "extra_params" not in fields


@pytest.fixture
def client(mock: RunningGateway) -> openai.AsyncOpenAI:
    url = f"{mock.url}/serving-endpoints"
    return openai.AsyncOpenAI(base_url=url, api_key="sk-test", max_retries=0)


async def test_w97_openai_client_completes_streams_and_lists_models(
    client: openai.AsyncOpenAI,
) -> None:
    async with client:
        completion = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "say hi"}]
        )
        assert completion.choices[0].message.content == "Hello world!"
        assert completion.usage is not None
        assert completion.usage.total_tokens == 5

        stream = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "say hi"}], stream=True
        )
        pieces = [one.choices[0].delta.content or "" async for one in stream]
        assert "".join(pieces) == "Hello world!"

        completed = await client.completions.create(model="mock", prompt="a b")
        assert completed.choices[0].text == "Hello world!"

        listed = await client.models.list()
        assert "ep-ab" in {one.id for one in listed.data}


async def test_w97_openai_client_gets_embeddings(client: openai.AsyncOpenAI) -> None:
    """The client requests base64 by default and decodes it."""
    async with client:
        embeddings = await client.embeddings.create(model="ep-emb", input="a b")
        assert embeddings.data[0].embedding == [3.0, 2.0, 0.5, -0.25]

        packed = await client.with_raw_response.embeddings.create(
            model="ep-emb", input="a b", encoding_format="base64"
        )
        text = msgspec.json.decode(packed.content)["data"][0]["embedding"]
        assert struct.unpack("<4f", base64.b64decode(text)) == (3.0, 2.0, 0.5, -0.25)


async def test_w98_openai_client_raises_not_found(client: openai.AsyncOpenAI) -> None:
    async with client:
        with pytest.raises(openai.NotFoundError, match="The given endpoint does not exist"):
            await client.chat.completions.create(
                model="nope", messages=[{"role": "user", "content": "say hi"}]
            )


async def test_broken_stream_raises_in_the_openai_client(client: openai.AsyncOpenAI) -> None:
    """In the protocol's own error format, the client would see only a short answer."""
    async with client:
        stream = await client.chat.completions.create(
            model="mock-cut", messages=[{"role": "user", "content": "say hi"}], stream=True
        )
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
