"""Fields that a worker adds to a passed-through response do not reach the client."""

import json
from typing import Any

import pytest

from tests.conftest import Serve
from tests.integration.test_passthrough import build_response, build_stream_reply
from tests.integration.test_passthrough_protocols import CONFIGURATION
from tests.support.fakes import ScriptedWorker

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {
    "openai": "/v1/chat/completions",
    "databricks": "/serving-endpoints/chat/invocations",
    "ovms": "/v3/chat/completions",
    "mindie": "/v1/chat/completions",
}
every_protocol = pytest.mark.parametrize("protocol", PATHS)
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def write(delta: Any, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c1", "created": 1, "model": "llama", "choices": [choice]} | fields
    return b"data: %b\n\n" % json.dumps(chunk).encode()


HEAD = write({"role": "assistant", "content": ""}) + write({"content": "a"})
TEXT = write({"content": "b"})
STOP = write({}, "stop")


async def ask(serve: Serve, protocol: str, *events: bytes, is_stream: bool = True) -> Any:
    """Send a request and return the chunks of the stream, or the unary response."""
    reply = build_stream_reply(*events) if is_stream else [build_response(b"".join(events))]
    body = {"messages": MESSAGES, "model": "chat"} | ({"stream": True} if is_stream else {})
    if protocol == "databricks":
        del body["model"]
    async with ScriptedWorker(reply) as worker:
        gateway = await serve(CONFIGURATION.format(protocol=protocol, worker=worker.url))
        response = await gateway.http.post(PATHS[protocol], json=body)
    assert response.status_code == 200, response.text
    [record] = gateway.records
    assert record.outcome == "ok", record
    if not is_stream:
        return response.json()
    assert "\r" not in response.text
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data:") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data:")) for block in blocks]


@pytest.mark.parametrize("position", [0, 2], ids=["in the first event", "later"])
@every_protocol
async def test_unknown_part_of_a_stream_is_reported(
    serve: Serve, protocol: str, position: int
) -> None:
    # given a worker whose stream has a part of its content that no encoder writes
    parts = [{"type": "reference", "reference_ids": [1]}, {"type": "text", "text": "z", "k": 1}]
    events = [HEAD, TEXT, STOP, DONE]
    events.insert(position, write({"role": "assistant", "content": parts}))
    body = {"messages": MESSAGES, "stream": True}
    if protocol != "databricks":
        body["model"] = "chat"

    # when a client of the same protocol asks for the stream
    reply = build_stream_reply(*events)
    async with ScriptedWorker(reply) as worker:
        gateway = await serve(CONFIGURATION.format(protocol=protocol, worker=worker.url))
        response = await gateway.http.post(PATHS[protocol], json=body)

    # then it gets the text, and the record says what it did not get, as a header may
    assert response.status_code == 200
    assert join_text(read_chunks(response.text)) == ("abz" if position else "zab")
    [record] = gateway.records
    lost = [one.field for one in record.unsupported_parameters]
    path = "response.choices[0].message.content"
    assert any(one.startswith(f"{path}[0]") for one in lost), lost
    assert f"{path}[1].k" in lost, lost
    if position == 0:
        assert f"{path}[1].k" in response.headers["x-interlingua-loss"]


def read_chunks(text: str) -> list[Any]:
    blocks = text.removesuffix("\n\n").split("\n\n")
    return [json.loads(one.removeprefix("data:")) for one in blocks[:-1]]


def join_text(chunks: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def list_finish_reasons(chunks: list[Any]) -> list[str]:
    return [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("finish_reason")
    ]


@every_protocol
@pytest.mark.parametrize(
    "line",
    [b"id: 7\n", b"retry: 5\n", b": ping\n", b"event: message\n", b": ping\n\n", b"id: 7\n\n"],
)
async def test_ids_retries_and_comments_of_a_stream_are_not_forwarded(
    serve: Serve, protocol: str, line: bytes
) -> None:
    chunks = await ask(serve, protocol, line + HEAD, line + TEXT, line + STOP, line + DONE)

    assert join_text(chunks) == "ab"
    assert list_finish_reasons(chunks) == ["stop"]


@every_protocol
@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
async def test_other_line_ends_of_a_stream_are_not_forwarded(
    serve: Serve, protocol: str, end: bytes
) -> None:
    events = (HEAD + TEXT + TEXT + STOP + DONE).replace(b"\n", end)

    assert join_text(await ask(serve, protocol, events)) == "abb"


@every_protocol
@pytest.mark.parametrize("word", ["eos_token", "stop_sequence", "eos"])
async def test_foreign_finish_reasons_of_a_stream_are_not_forwarded(
    serve: Serve, protocol: str, word: str
) -> None:
    chunks = await ask(serve, protocol, HEAD, TEXT, write({}, word), DONE)

    known_reasons = {"stop", "length", "unknown"} if protocol == "ovms" else {"stop", "length"}
    assert set(list_finish_reasons(chunks)) <= known_reasons


@every_protocol
async def test_foreign_finish_reasons_of_a_unary_response_are_not_forwarded(
    serve: Serve, protocol: str
) -> None:
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "finish_reason": "eos_token"}
    body = {"id": "c", "created": 1, "model": "llama", "choices": [choice], "usage": USAGE}

    response = await ask(serve, protocol, json.dumps(body).encode(), is_stream=False)

    assert response["choices"][0]["finish_reason"] == "stop"


@every_protocol
async def test_running_usage_of_a_stream_is_not_forwarded(serve: Serve, protocol: str) -> None:
    chunks = await ask(
        serve,
        protocol,
        write({"role": "assistant", "content": ""}, usage=USAGE),
        write({"content": "a"}, usage=USAGE),
        write({"content": "b"}, usage=USAGE),
        write({}, "stop", usage=USAGE),
        DONE,
    )

    assert join_text(chunks) == "ab"
    assert sum(chunk.get("usage") is not None for chunk in chunks) <= 1


@every_protocol
async def test_a_second_finish_of_a_choice_is_not_forwarded(serve: Serve, protocol: str) -> None:
    chunks = await ask(serve, protocol, HEAD, TEXT, STOP, STOP, write({}, "length"), DONE)

    assert list_finish_reasons(chunks) == ["stop"]


@every_protocol
async def test_tool_arguments_that_are_an_object_are_written_as_text(
    serve: Serve, protocol: str
) -> None:
    call = {
        "index": 0,
        "id": "t",
        "type": "function",
        "function": {"name": "f", "arguments": {"x": 1}},
    }
    chunks = await ask(
        serve, protocol, write({"tool_calls": [call]}), write({}, "tool_calls"), DONE
    )
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    body = {"id": "c", "created": 1, "model": "llama", "choices": [choice], "usage": USAGE}
    response = await ask(serve, protocol, json.dumps(body).encode(), is_stream=False)

    arguments = [
        one["function"].get("arguments") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        for one in choice["delta"].get("tool_calls") or ()
    ]
    assert json.loads("".join(arguments)) == {"x": 1}

    [unary] = response["choices"][0]["message"]["tool_calls"]
    assert json.loads(unary["function"]["arguments"]) == {"x": 1}


@every_protocol
@pytest.mark.parametrize(
    "spelling",
    [
        b'"model" :  "llama"',
        b'"model":\t"llama"',
        b'"model":"ll\\u0061ma"',
        b'"mod\\u0065l":"llama"',
    ],
)
async def test_the_worker_s_model_name_is_not_forwarded_in_any_spelling(
    serve: Serve, protocol: str, spelling: bytes
) -> None:
    name = "llama" if protocol == "databricks" else "chat"  # which names the served model
    odd = TEXT.replace(b'"model": "llama"', spelling)
    assert odd != TEXT

    chunks = await ask(serve, protocol, HEAD, TEXT, odd, odd, STOP, DONE)
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "c", "created": 1, "model": "llama", "choices": [choice], "usage": USAGE}
    unary = json.dumps(body).encode().replace(b'"model": "llama"', spelling)
    response = await ask(serve, protocol, unary, is_stream=False)

    assert join_text(chunks) == "abbb"
    assert {chunk["model"] for chunk in chunks} == {name}
    assert response["model"] == name


TRITON = """
listeners: [{{address: "127.0.0.1:0", protocols: [{{name: triton, profile: vllm}}]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: triton, profile: vllm, workers: ["{worker}"], health: {{interval: 1h}}}}
models:
  chat: {{backend: pool, model: llama}}
"""


@pytest.mark.parametrize("line", [b"id: 7\n", b"retry: 5\n", b": ping\n", b": ping\n\n"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_a_triton_stream_is_forwarded_without_ids_comments_and_the_worker_s_name(
    serve: Serve, line: bytes, end: bytes
) -> None:
    event = line + b'data: {"model_name" : "ll\\u0061ma","text_output":"a"}\n\n'
    reply = build_stream_reply(*[event.replace(b"\n", end)] * 3)

    async with ScriptedWorker(reply) as worker:
        gateway = await serve(TRITON.format(worker=worker.url))
        response = await gateway.http.post(
            "/v2/models/chat/generate_stream", json={"text_input": "x"}
        )

    assert response.text == 'data: {"model_name" : "chat","text_output":"a"}\n\n' * 3
