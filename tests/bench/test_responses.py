"""The worker's responses are valid JSON and server-sent events in every style."""

import base64
import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench import responses
from tests.bench.load_generator import TOKENS, Worker
from tests.bench.responses import STYLES

MODELS = [f"{style}-{number}" for style in STYLES for number in (0, 4)]
TOKEN = re.compile(r" @(\d{3})\d{14}$")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    one = Worker(60)
    yield one
    one.close()


def post_json(worker: Worker, path: str, **body: Any) -> httpx.Response:
    response = httpx.post(f"http://127.0.0.1:{worker.port}{path}", json=body, trust_env=False)
    assert response.status_code == 200
    return response


def post_chat(worker: Worker, model: str, **fields: Any) -> httpx.Response:
    return post_json(worker, "/v1/chat/completions", model=model, messages=[], **fields)


def parse_chunks(response: httpx.Response) -> list[Any]:
    """Return each event's JSON; an event is one line of data, and the last is the end mark."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("model", [*MODELS, "mock"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_unary_responses_are_chat_completions(
    worker: Worker, model: str, *, logprobs: bool
) -> None:
    body = post_chat(worker, model, logprobs=logprobs).json()
    assert (body["object"], body["model"]) == ("chat.completion", model)

    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"

    mark = TOKEN.search(choice["message"]["content"])
    assert mark is not None
    assert mark[1] == "000"
    assert bool(choice["logprobs"]) == (logprobs and model != "mock")

    usage = body["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert ("timings" in body) == model.startswith("llama-cpp")


@pytest.mark.parametrize("model", [*MODELS, "mock"])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_streams_consist_of_chat_completion_chunks(
    worker: Worker, model: str, *, logprobs: bool, usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = parse_chunks(post_chat(worker, model, stream=True, logprobs=logprobs, **options))
    assert {(one["object"], one["model"]) for one in chunks} == {("chat.completion.chunk", model)}
    assert [one["choices"] for one in chunks].count([]) == usage
    assert bool(chunks[-1].get("usage")) == usage

    choices = [one["choices"][0] for one in chunks if one["choices"]]
    content = [choice["delta"].get("content") or "" for choice in choices]
    marks = [mark[1] for text in content if (mark := TOKEN.search(text))]

    assert marks == [f"{number:03d}" for number in range(TOKENS)]
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]

    carrying = [one for one in chunks if one["choices"] and has_token(one)]
    assert all(
        bool(one["choices"][0].get("logprobs")) == (logprobs and model != "mock")
        for one in carrying
    )

    padded = model.endswith("-4") and not logprobs
    assert all(("obfuscation" in one) == padded for one in carrying)


TOOLS: Any = {"tools": [{"type": "function", "function": {"name": "get_weather"}}]}
RESULT: Any = {"messages": [{"role": "tool", "tool_call_id": "call_1", "content": "{}"}]}


@pytest.mark.parametrize("model", MODELS)
def test_requests_with_tools_get_tool_calls(worker: Worker, model: str) -> None:
    [choice] = post_chat(worker, model, **TOOLS).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None

    [call] = choice["message"]["tool_calls"]
    assert " @000" in json.loads(call["function"]["arguments"])["city"]

    chunks = parse_chunks(post_chat(worker, model, stream=True, **TOOLS))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]

    assert [call["function"].get("name") for call in calls] == ["get_weather"] + [None] * TOKENS

    arguments = json.loads("".join(call["function"]["arguments"] for call in calls))
    assert arguments["city"].count("@") == TOKENS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_requests_with_a_tool_result_get_text(worker: Worker) -> None:
    body = {"model": "vllm-0", **TOOLS, **RESULT}
    [choice] = post_json(worker, "/v1/chat/completions", **body).json()["choices"]

    assert choice["finish_reason"] == "stop"
    assert TOKEN.search(choice["message"]["content"])


@pytest.mark.parametrize(
    ("usage_input", "count"),
    [
        ('one "text", \\ here', 1),
        (["a"], 1),
        (["a]", 'b", "c', "", "\\"], 4),
        (["x"] * 2_000, 2_000),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_have_a_vector_for_each_input(
    worker: Worker, usage_input: Any, count: int, encoding: str
) -> None:
    body = {"model": "vllm-0", "input": usage_input, "encoding_format": encoding}
    response = post_json(worker, "/v1/embeddings", **body).json()

    assert [one["index"] for one in response["data"]] == [*range(count)]

    for one in response["data"]:
        vector = one["embedding"]
        if encoding == "base64":
            vector = struct.unpack("<384f", base64.b64decode(vector))
        assert len(vector) == 384
        assert all(-0.1 <= value <= 0.1 for value in vector)


def has_token(chunk: Any) -> bool:
    return bool(TOKEN.search(chunk["choices"][0]["delta"].get("content") or ""))


def test_response_styles_match_their_servers(worker: Worker) -> None:
    lines = {
        style: post_chat(worker, f"{style}-0", stream=True).text.splitlines()[2] for style in STYLES
    }
    assert lines["vllm"].startswith('data: {"id":"chatcmpl-')
    assert '"token_ids":null' in lines["vllm"]
    assert lines["tgi"].startswith('data: {"object":"chat.completion.chunk","id":""')
    assert lines["llama-cpp"].startswith('data: {"choices":[{"finish_reason":null')
    assert lines["python"].startswith('data: {"id": "chatcmpl-')

    raw = post_chat(worker, "python-0").text
    assert raw.isascii()
    assert not all(post_chat(worker, "vllm-0").text.isascii() for _ in range(5))


def test_responses_have_distinct_ids_and_padding(worker: Worker) -> None:
    one, two = (post_chat(worker, "vllm-4", stream=True) for _ in range(2))
    assert len({chunk["id"] for chunk in parse_chunks(one) + parse_chunks(two)}) == 2
    assert len({len(chunk["obfuscation"]) for chunk in parse_chunks(one)[1:-1]}) > 5
    assert len({len(post_chat(worker, "tgi-0").content) for _ in range(5)}) > 1

    same = {re.sub(r"@\d{17}", "", post_chat(worker, "mock").text) for _ in range(5)}
    assert len(same) == 1


def test_created_field_advances_in_llama_cpp_style_only(worker: Worker) -> None:
    """llama.cpp and TGI write the current second into each chunk, vLLM the response's."""
    worker.set_pace(12_000)
    seconds = {
        style: {
            chunk["created"] for chunk in parse_chunks(post_chat(worker, f"{style}-0", stream=True))
        }
        for style in ("llama-cpp", "vllm")
    }

    worker.set_pace(0)

    assert len(seconds["llama-cpp"]) > 1
    assert len(seconds["vllm"]) == 1
    assert all(abs(second - time.time()) < 30 for times in seconds.values() for second in times)


@pytest.mark.parametrize("model", MODELS)
def test_triton_response_names_the_model_of_the_path(worker: Worker, model: str) -> None:
    body = post_json(worker, f"/v2/models/{model}/generate", text_input="a").json()
    assert body["model_name"] == model
    assert TOKEN.search(body["text_output"])

    streamed = post_json(worker, f"/v2/models/{model}/generate_stream", text_input="a").text
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-1]]
    assert len(events) == TOKENS
    assert all(TOKEN.search(one["text_output"]) for one in events)


def test_every_placeholder_is_replaced(worker: Worker) -> None:
    text = responses.encode().decode()
    assert not re.search("<[a-z ]+>", text)

    code = Path(responses.__file__).with_name("worker.c").read_text("utf-8")
    [names] = re.findall(r"enum placeholder \{(.*?)\}", code, re.DOTALL)
    assert len(names.split(",")) == len(responses.PLACEHOLDERS)

    answers = [post_chat(worker, model).text for model in MODELS]
    assert not any(re.search("[\x0e-\x1f]", answer) for answer in answers)
