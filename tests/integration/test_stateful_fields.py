"""Fields that later requests depend on are kept, passed on or rejected, never dropped."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import RunningGateway, Serve
from tests.support.chat_worker import Answer, ChatWorker
from tests.support.web_server import run_web_server

HI = {"role": "user", "content": "hi"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
CONTINUE = {"type": "continue", "previous_message_id": "msg_1"}

CONFIG = """\
listeners: [{{address: "127.0.0.1:0", protocols: [openai, anthropic, ollama]}}]
backends:
  o: {{protocol: openai, profile: vllm, workers: ["{openai}"]}}
  a: {{protocol: anthropic, workers: ["{anthropic}"]}}
models:
  m: {{backend: o, protocol: openai}}
  plain: {{backend: a, protocol: anthropic}}
  limited: {{backend: a, protocol: anthropic, limits: {{max_tokens: 100}}}}
"""


class AnthropicWorker:
    """Answers each message with ``msg_1`` and records the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self.error: tuple[int, str, str] | None = None
        """Status, type and code of the error to answer with."""

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if self.error is not None:
            status, kind, code = self.error
            error = {"type": kind, "message": "no thread", "details": {"error_code": code}}
            return web.json_response({"type": "error", "error": error}, status=status)
        usage = {"input_tokens": 1, "output_tokens": 1}
        content = [{"type": "text", "text": "ok"}]
        reply = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
        rest = {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        return web.json_response(reply | {"content": content} | rest)


@pytest.fixture
async def anthropic_worker() -> AsyncIterator[AnthropicWorker]:
    worker, app = AnthropicWorker(), web.Application()
    app.router.add_post("/v1/messages", worker.answer)
    async with run_web_server(app) as worker.url:
        yield worker


@pytest.fixture
async def chat_worker() -> AsyncIterator[ChatWorker]:
    async with ChatWorker(lambda body: Answer(text=("ok",))) as worker:
        yield worker


@pytest.fixture
async def gateway(
    serve: Serve, chat_worker: ChatWorker, anthropic_worker: AnthropicWorker
) -> RunningGateway:
    urls = {"openai": chat_worker.url, "anthropic": anthropic_worker.url}
    return await serve(CONFIG.format(**urls))


async def send_message(gateway: RunningGateway, **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": [HI]} | fields
    return await gateway.http.post("/v1/messages", json=body)


# --- threads of Anthropic clients -----------------------------------------------------------------


async def test_creating_a_thread_that_no_worker_keeps_is_reported(gateway: RunningGateway) -> None:
    response = await send_message(gateway, thread={"type": "create"})

    assert response.status_code == 200
    assert "thread=dropped" in response.headers["x-interlingua-loss"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["and now?", [RESULT], [RESULT, {"type": "text", "text": "?"}]])
async def test_continuing_a_lost_thread_makes_the_client_send_the_whole_history(
    gateway: RunningGateway, chat_worker: ChatWorker, content: Any, *, stream: bool
) -> None:
    response = await send_message(
        gateway,
        thread=CONTINUE,
        messages=[{"role": "user", "content": content}],
        stream=stream,
    )

    assert response.status_code == 404
    assert response.json()["error"] | {"message": ""} == {
        "type": "not_found_error",
        "message": "",
        "details": {"error_code": "thread_not_found"},
    }
    assert not chat_worker.bodies


@pytest.mark.parametrize("model", ["plain", "limited"])
@pytest.mark.parametrize("thread", [{"type": "create"}, CONTINUE])
async def test_anthropic_worker_gets_the_thread_unchanged(
    gateway: RunningGateway, anthropic_worker: AnthropicWorker, model: str, thread: dict[str, Any]
) -> None:
    turn = {"role": "user", "content": [RESULT] if thread == CONTINUE else "hi"}

    response = await send_message(gateway, model=model, thread=thread, messages=[turn])

    assert response.status_code == 200
    assert "thread" not in response.headers.get("x-interlingua-loss", "")

    [body] = anthropic_worker.bodies
    assert body["thread"] == thread
    assert json.dumps(body["messages"]).count("toolu_1") == (1 if thread == CONTINUE else 0)


@pytest.mark.parametrize("model", ["plain", "limited"])
@pytest.mark.parametrize(
    "error",
    [
        (404, "not_found_error", "thread_not_found"),
        (400, "invalid_request_error", "thread_already_continued"),
    ],
)
async def test_error_of_a_worker_about_a_thread_reaches_the_client_with_its_code(
    gateway: RunningGateway,
    anthropic_worker: AnthropicWorker,
    model: str,
    error: tuple[int, str, str],
) -> None:
    anthropic_worker.error = error

    response = await send_message(gateway, model=model, thread=CONTINUE)

    text = response.json()["error"]
    assert (response.status_code, text["type"], text["details"]["error_code"]) == error
    assert "no thread" in text["message"]


@pytest.mark.parametrize("model", ["plain", "limited"])
async def test_anthropic_worker_gets_the_container(
    gateway: RunningGateway, anthropic_worker: AnthropicWorker, model: str
) -> None:
    response = await send_message(gateway, model=model, container="container_1")

    assert response.status_code == 200
    assert anthropic_worker.bodies[0]["container"] == "container_1"


async def test_tool_result_without_call_is_still_refused_outside_threads(
    gateway: RunningGateway,
) -> None:
    response = await send_message(gateway, messages=[{"role": "user", "content": [RESULT]}])

    assert response.status_code == 400
    assert "toolu_1" in response.json()["error"]["message"]


# --- every protocol -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/messages", {"container": "container_1"}, "container"),
        ("/v1/messages", {"cached_content": "cachedContents/1"}, "cached_content"),
        (
            "/v1/messages",
            {"extra_body": {"google": {"cached_content": "cachedContents/1"}}},
            "extra_body.google.cached_content",
        ),
        (
            "/v1/responses",
            {"google": {"thinking_config": {}, "cached_content": "cachedContents/1"}},
            "google.cached_content",
        ),
        ("/v1/messages", {"compaction": {"type": "enabled"}}, "compaction"),
        ("/v1/messages", {"previous_message_id": "msg_1"}, "previous_message_id"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "msg_1"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "file_id",
        ),
        ("/api/generate", {"context": [1, 2, 3]}, "tokens of an earlier answer"),
    ],
)
async def test_field_that_refers_to_missing_state_is_rejected(
    gateway: RunningGateway, chat_worker: ChatWorker, path: str, fields: dict[str, Any], named: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"max_tokens": 9, "messages": [HI]},
        "/v1/responses": {"input": "hi"},
        "/api/generate": {"prompt": "hi", "stream": False},
    }

    response = await gateway.http.post(path, json={"model": "m"} | bodies[path] | fields)

    assert 400 <= response.status_code < 500
    assert named in response.text
    assert not chat_worker.bodies


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "background": False, "prompt_cache_key": "k"}),
        ("/api/generate", {"prompt": "hi", "context": [], "stream": False, "keep_alive": "5m"}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
        ("/v1/messages", {"max_tokens": 9, "messages": [HI], "container": None, "thread": None}),
        ("/v1/messages", {"max_tokens": 9, "messages": [HI], "context_management": {"edits": []}}),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [HI],
                "extra_body": {"google": {"cached_content": "", "safety_settings": []}},
            },
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [HI], "trace": {"session_id": "s", "container": "c"}},
        ),
    ],
)
async def test_field_without_which_the_answer_is_the_same_costs_no_request(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    response = await gateway.http.post(path, json={"model": "m"} | body)

    assert response.status_code == 200
