"""The Responses API over a socket: requests to workers, stored responses, OpenAI's client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response as SdkResponse
from pydantic import BaseModel

from tests.conformance.openai_responses import CUSTOM_TOOL, TOOL
from tests.conftest import RunningGateway, Serve
from tests.support.fakes import ScriptedWorker

PATH = "/v1/responses"
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "w",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world!"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
}


def respond(body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


class ResponsesGateway:
    """A gateway in front of one chat worker that always gives the same answer."""

    def __init__(self, worker: ScriptedWorker, gateway: RunningGateway) -> None:
        self._worker = worker
        self.http = gateway.http
        self.records = gateway.records

    async def create(self, **fields: Any) -> Any:
        """Send a request to the Responses API and return the response."""
        body = {"model": "m", "input": "say hi"} | fields
        response = await self.http.post(PATH, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def worker_body(self) -> Any:
        """The body of the worker's last request."""
        return json.loads(self._worker.requests[-1].body)

    @property
    def worker_messages(self) -> list[tuple[str, Any]]:
        """The roles and contents of the messages in the worker's last request."""
        return [(one["role"], one["content"]) for one in self.worker_body["messages"]]


@pytest.fixture
async def gateway(serve: Serve) -> AsyncIterator[ResponsesGateway]:
    async with ScriptedWorker([respond(ANSWER)]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"w": {"protocol": "openai", "workers": [worker.url]}},
            "models": {"m": {"backend": "w"}},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        yield ResponsesGateway(worker, await serve(json.dumps(config)))


# --- requests to workers --------------------------------------------------------------------------


async def test_rs_05_to_08_messages(gateway: ResponsesGateway) -> None:
    await gateway.create(input=[{"role": "user", "content": "say hi"}])
    assert gateway.worker_messages == [("user", "say hi")]

    parts = [{"type": "input_text", "text": "say"}, {"type": "input_text", "text": " hi"}]
    await gateway.create(input=[{"role": "user", "content": parts}])
    assert [part["text"] for part in gateway.worker_messages[0][1]] == ["say", " hi"]

    await gateway.create(instructions="be brief", temperature=None, tools=None, store=None)
    assert gateway.worker_messages == [("system", "be brief"), ("user", "say hi")]
    assert sorted(gateway.worker_body) == ["messages", "model"]


async def test_rs_20_22_23_calls(gateway: ResponsesGateway) -> None:
    user = {"role": "user", "content": "x"}
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"}
        for n in (1, 2)
    ]
    outputs: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": f"c{n}", "output": f"{n}"} for n in (1, 2)
    ]

    await gateway.create(tools=[TOOL], tool_choice="none", input=[user, *calls, *outputs])

    _, assistant, first, second = gateway.worker_body["messages"]
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert (first["tool_call_id"], first["content"]) == ("c1", "1")
    assert (second["tool_call_id"], second["content"]) == ("c2", "2")
    assert gateway.worker_body["tool_choice"] == "none"
    assert gateway.worker_body["tools"][0]["function"]["name"] == "f"


async def test_rs_28_29_34_35_tools_and_format(gateway: ResponsesGateway) -> None:
    history = [
        {"type": "custom_tool_call", "call_id": "c9", "name": "p", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c9", "output": "ok"},
    ]
    space = {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}

    await gateway.create(tools=[CUSTOM_TOOL, space], input=history, text={"format": form})

    assistant, tool = gateway.worker_body["messages"]
    assert assistant["tool_calls"][0]["custom"] == {"name": "p", "input": "a"}
    assert tool["content"] == "ok"
    custom, member = gateway.worker_body["tools"]
    assert custom == {"type": "custom", "custom": {"name": "p"}}
    assert member["function"]["name"] == "n__f"

    schema = {name: value for name, value in form.items() if name != "type"}
    assert gateway.worker_body["response_format"] == {"type": "json_schema", "json_schema": schema}


# --- stored responses -----------------------------------------------------------------------------


async def test_rs_52_stored_response_and_its_input(gateway: ResponsesGateway) -> None:
    response = await gateway.create()

    stored = await gateway.http.get(f"{PATH}/{response['id']}")
    items = (await gateway.http.get(f"{PATH}/{response['id']}/input_items")).json()

    assert stored.json() == response

    [item] = items["data"]
    assert item["content"] == [{"type": "input_text", "text": "say hi"}]
    assert item["id"]
    assert items["has_more"] is False


async def test_rs_53_previous_response(gateway: ResponsesGateway) -> None:
    first = await gateway.create(instructions="A")
    second = await gateway.create(previous_response_id=first["id"], input="again")

    await gateway.create(previous_response_id=second["id"], input="and again")

    assert second["previous_response_id"] == first["id"]
    assert gateway.worker_messages == [
        ("user", "say hi"),
        ("assistant", "Hello world!"),
        ("user", "again"),
        ("assistant", "Hello world!"),
        ("user", "and again"),
    ]


async def test_rs_54_response_that_is_not_stored(gateway: ResponsesGateway) -> None:
    response = await gateway.create(store=False)

    answer = await gateway.http.get(f"{PATH}/{response['id']}")
    body = {"model": "m", "input": "x", "previous_response_id": response["id"]}

    refused = await gateway.http.post(PATH, json=body)

    assert answer.status_code == 404
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "previous_response_not_found"


async def test_rs_55_item_references(gateway: ResponsesGateway) -> None:
    response = await gateway.create()
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}

    await gateway.create(input=[{"role": "user", "content": "a"}, reference])

    assert gateway.worker_messages == [("user", "a"), ("assistant", "Hello world!")]
    assert (
        await gateway.http.get(f"{PATH}/{reference['id']}")
    ).status_code == 404  # not a response's id


async def test_rs_56_deleted_response(gateway: ResponsesGateway) -> None:
    response = await gateway.create()

    deleted = await gateway.http.delete(f"{PATH}/{response['id']}")

    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    assert (await gateway.http.get(f"{PATH}/{response['id']}")).status_code == 404
    assert (await gateway.http.delete(f"{PATH}/{response['id']}")).status_code == 404


async def test_streamed_response_is_stored_before_its_end_is_sent(mock: RunningGateway) -> None:
    body = {"model": "mock", "input": "x", "stream": True}
    async with mock.http.stream("POST", PATH, json=body) as response:
        events = [
            json.loads(line[6:]) async for line in response.aiter_lines() if line[:5] == "data:"
        ]

    stored = await mock.http.get(f"{PATH}/{events[-1]['response']['id']}")

    assert events[-1]["type"] == "response.completed"
    assert stored.json() == events[-1]["response"]


async def test_one_key_never_sees_the_responses_of_another(serve: Serve) -> None:
    digests = {
        "a": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
        "b": "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d",
    }
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"e": {"kind": "echo"}},
        "models": {"m": {"backend": "e"}},
        "keys": [{"name": name, "sha256": digest} for name, digest in digests.items()],
        "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
    }
    http = (await serve(json.dumps(config))).http
    own, other = ({"authorization": f"Bearer {name}"} for name in digests)
    response = (await http.post(PATH, json={"model": "m", "input": "x"}, headers=own)).json()
    body = {"model": "m", "input": "x", "previous_response_id": response["id"]}

    assert (await http.get(f"{PATH}/{response['id']}", headers=own)).status_code == 200
    assert (await http.get(f"{PATH}/{response['id']}", headers=other)).status_code == 404
    assert (await http.delete(f"{PATH}/{response['id']}", headers=other)).status_code == 404
    assert (await http.post(PATH, json=body, headers=own)).status_code == 200
    assert (await http.post(PATH, json=body, headers=other)).status_code == 400


async def test_without_a_store_nothing_is_stored(serve: Serve) -> None:
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"e": {"kind": "echo"}},
        "models": {"m": {"backend": "e"}},
        "stored_responses": {"enabled": False},
        "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
    }
    http = (await serve(json.dumps(config))).http

    response = (await http.post(PATH, json={"model": "m", "input": "x"})).json()

    assert response["store"] is False
    assert (await http.get(f"{PATH}/{response['id']}")).status_code == 404


# --- OpenAI's own client --------------------------------------------------------------------------


class Answer(BaseModel):
    """The type that OpenAI's client parses the response to."""

    x: int


@asynccontextmanager
async def connect(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return OpenAI's client without retries."""
    base_url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_rs_41_stream_helper(mock: RunningGateway) -> None:
    async with connect(mock) as client:
        async with client.responses.stream(model="mock-think", input="say hi") as stream:
            worker_body = [event.type async for event in stream]
            final = await stream.get_final_response()
        again = await client.responses.retrieve(final.id)
        items = [item async for item in client.responses.input_items.list(final.id)]

        await client.responses.delete(final.id)

        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(final.id)

    assert final.output_text == "Hello world!"
    assert worker_body[-1] == "response.completed"
    assert again.output_text == "Hello world!"
    assert len(items) == 1


async def test_client_calls_a_tool_and_parses(mock: RunningGateway) -> None:
    tool: Any = TOOL | {"strict": True}

    async with connect(mock) as client:
        called = await client.responses.create(
            model="mock", input="x", tools=[tool], tool_choice="required"
        )
        parsed = await client.responses.parse(model="mock", input="x", tools=[tool])

    call = called.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"x": 1}
    assert parsed.output_text == "Hello world!"

    SdkResponse.model_validate(called.model_dump())


async def test_client_with_an_output_type(serve: Serve) -> None:
    config = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "backends": {"e": {"kind": "echo", "script": ['{"x"', ":7}"]}},
        "models": {"m": {"backend": "e"}},
        "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
    }
    async with connect(await serve(json.dumps(config))) as client:
        parsed = await client.responses.parse(model="m", input="x", text_format=Answer)
        async with client.responses.stream(model="m", input="x", text_format=Answer) as stream:
            streamed = await stream.get_final_response()

    assert parsed.output_parsed == Answer(x=7)
    assert streamed.output_parsed == Answer(x=7)


async def test_unknown_paths_below_a_response_are_not_found(mock: RunningGateway) -> None:
    answers = [
        await mock.http.post(f"{PATH}/resp_1/cancelled"),
        await mock.http.post(f"{PATH}/compact/x"),
    ]

    assert [one.json()["error"]["code"] for one in answers] == ["unknown_url"] * 2


# --- further endpoints ----------------------------------------------------------------------------


async def test_input_tokens_are_estimated_where_no_worker_counts(gateway: ResponsesGateway) -> None:
    body = {"model": "m", "input": "a text of 24 characters."}
    response = await gateway.http.post(f"{PATH}/input_tokens", json=body)

    assert response.json() == {"object": "response.input_tokens", "input_tokens": 6}
    assert response.headers["x-interlingua-loss"] == "input_tokens=approximated"
    [record] = gateway.records
    assert (record.status, record.outcome, record.error) == (200, "ok", "")
    assert record.failed_attempts == ("m@1 UnsupportedEndpoint",)
    assert [one.field for one in record.unsupported_parameters] == ["input_tokens"]


async def test_an_estimate_reports_headers_and_query_that_nobody_reads(
    gateway: ResponsesGateway,
) -> None:
    response = await gateway.http.post(
        f"{PATH}/input_tokens?later=1",
        json={"model": "m", "input": "a text"},
        headers={"OpenAI-Beta": "x=1"},
    )

    lost = "input_tokens=approximated,header.openai-beta=dropped,query.later=dropped"
    assert response.headers["x-interlingua-loss"] == lost


async def test_stored_response_cannot_be_cancelled(gateway: ResponsesGateway) -> None:
    name = (await gateway.create())["id"]
    response = await gateway.http.post(f"{PATH}/{name}/cancel")

    unknown = await gateway.http.post(f"{PATH}/resp_unknown/cancel")

    assert (response.status_code, unknown.status_code) == (400, 404)
    assert response.json()["error"]["message"] == "Cannot cancel a synchronous response."


async def test_compaction_is_refused_by_name(gateway: ResponsesGateway) -> None:
    response = await gateway.http.post(f"{PATH}/compact", json={"model": "m", "input": "x"})

    assert response.status_code == 400
    assert "Compaction of responses is not supported" in response.json()["error"]["message"]


# --- hosted tools ---------------------------------------------------------------------------------

SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}}
SEARCHED = {
    "id": "resp_w",
    "created_at": 1,
    "model": "w",
    "status": "completed",
    "output": [
        SEARCH,
        {
            "type": "message",
            "id": "msg_w",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "found", "annotations": []}],
        },
    ],
    "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
}


@asynccontextmanager
async def search_gateway(serve: Serve, on_loss: str = "report") -> AsyncIterator[RunningGateway]:
    """A gateway in front of a Responses API worker that runs web searches itself."""
    async with ScriptedWorker([respond(SEARCHED)]) as worker:
        backend = {"protocol": "openai", "workers": [worker.url], "options": {"worker_api": "both"}}
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {
                "w": backend,
                "only": backend | {"options": {"worker_api": "responses"}},
            },
            "models": {
                "m": {"backend": "w"},
                "chat": {"backend": "only", "on_loss": on_loss},
            },
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        yield await serve(json.dumps(config))


async def test_search_of_the_worker_reaches_a_client_of_the_same_api(serve: Serve) -> None:
    async with search_gateway(serve) as gateway:
        body = {"model": "m", "input": "q", "tools": [{"type": "web_search"}]}
        response = (await gateway.http.post(PATH, json=body)).json()

    assert response["output"][0] == SEARCH
    assert response["output"][1]["content"][0]["text"] == "found"


@pytest.mark.parametrize(
    ("on_loss", "header"),
    [("report", "response.output[0].web_search_call=dropped"), ("ignore", None)],
)
async def test_search_of_the_worker_is_reported_to_other_clients(
    serve: Serve, on_loss: str, header: str | None
) -> None:
    async with search_gateway(serve, on_loss) as gateway:
        body = {"model": "chat", "messages": [{"role": "user", "content": "q"}]}
        response = await gateway.http.post("/v1/chat/completions", json=body)

    assert response.json()["choices"][0]["message"]["content"] == "found"
    assert response.headers.get("x-interlingua-loss") == header


@pytest.mark.parametrize("text", ["hm", ""], ids=["shown", "omitted"])
async def test_signed_reasoning_of_a_stored_response_goes_back_to_its_worker(
    serve: Serve, text: str
) -> None:
    # given a worker that signs its reasoning, and has to get it back
    thinking = {"type": "thinking", "thinking": text, "signature": "c2ln"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    answer = {"id": "msg_1", "content": [thinking, use], "stop_reason": "tool_use"}
    async with ScriptedWorker([respond(answer)], [respond(answer)]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
            "backends": {"w": {"protocol": "anthropic", "workers": [worker.url]}},
            "models": {"m": {"backend": "w"}},
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        gateway = ResponsesGateway(worker, await serve(json.dumps(config)))

        # when a response is continued
        first = await gateway.create(tools=[TOOL], max_output_tokens=99)
        result = {"type": "function_call_output", "call_id": "toolu_1", "output": "1"}
        await gateway.create(previous_response_id=first["id"], input=[result], tools=[TOOL])

        # then the worker gets its signature, and the client did not
        assert gateway.worker_body["messages"][1]["content"] == [thinking, use]
        assert "encrypted_content" not in json.dumps(first)
