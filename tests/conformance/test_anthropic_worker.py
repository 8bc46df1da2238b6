"""Anthropic requests reach a worker of OpenAI's chat completions as the wire document says."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct

from gateway.config.loader import load_text
from gateway.runtime.gateway import Gateway, build_services
from tests.conformance.anthropic import (
    COUNT,
    HELLO,
    HI,
    MESSAGE,
    PDF,
    START,
    STREAM,
    TOOLS,
    delta,
    end,
    events,
    read_events,
    result,
    start,
    stop,
    text,
    usage,
)
from tests.conformance.cases import Case, Response, check_response
from tests.support.chat_worker import Answer, ChatWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIECES: Final = ("Hello", " world", "!")
ARGUMENTS: Final = ('{"x"', ":1}")
PROFILES: Final = ("openai", "vllm", "llamacpp")
MODELS: Final = (
    "mock", "mock-think", "mock-par", "mock-cached", "mock-ctx", "mock-down", "mock-500",
    "mock-429", "mock-midfail", "mock-vlm", "mock-stall", "mock-slow", "mock-full",
)  # fmt: skip
WINDOW: Final = 10
PNG: Final = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def answer(body: dict[str, Any]) -> Answer:
    """Return the answer of the wire document's fixture."""
    model, words = body["model"], _count_words(body["messages"])
    allowed = body.get("max_completion_tokens", body.get("max_tokens"))
    if model == "mock-ctx" and words > WINDOW:
        text = f"This model's maximum context length is {WINDOW} tokens. However, you requested "
        return Answer(status=400, error=f"{text}{words} tokens. Please reduce the length.")
    if model == "mock-full":
        text = f"This model's maximum context length is {WINDOW} tokens. However, you requested "
        return Answer(
            status=400, error=f"{text}104 tokens (4 in the messages, 100 in the completion)."
        )
    if model == "mock-500":
        return Answer(status=500, error="CUDA")
    if model == "mock-429":
        return Answer(status=429, error="Slow down", headers={"retry-after": "2"})
    if calls := _choose_calls(body):
        return Answer(calls=calls, reason="tool_calls", prompt_tokens=words)
    pieces: tuple[str | float | None, ...] = PIECES[:allowed]
    reason = "length" if len(pieces) < len(PIECES) else "stop"
    if model == "mock-midfail":
        pieces = (*PIECES[:2], None)
    if model == "mock-stall":
        pieces = (PIECES[0], 1.2, *PIECES[1:])
    if model == "mock-slow":
        pieces = (1.2, *PIECES)
    return Answer(
        text=pieces,
        reasoning=("Hmm", " ok") if model == "mock-think" else (),
        reason=reason,
        prompt_tokens=words,
        cached_tokens=1 if model == "mock-cached" else None,
    )


def _count_words(messages: list[dict[str, Any]]) -> int:
    texts = []
    for one in messages:
        content = one["content"] or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        texts += parts
    return sum(len(one.split()) for one in texts)


def _choose_calls(body: dict[str, Any]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    users = [one["content"] for one in body["messages"] if one["role"] == "user"]
    if not tools or choice == "none" or (choice == "auto" and "tool" not in str(users[-1])):
        return ()
    names = [tool["function"]["name"] for tool in tools]
    if body["model"] != "mock-par":
        names = names[:1] if isinstance(choice, str) else [choice["function"]["name"]]
    return tuple((name, f"call_{i + 1}", ARGUMENTS) for i, name in enumerate(names))


class AnthropicTestBench(Struct):
    """A gateway with one worker behind pools of several profiles."""

    http: httpx.AsyncClient
    worker: ChatWorker

    async def send(
        self,
        changed: Mapping[str, Any],
        *,
        profile: str = "openai",
        headers: Mapping[str, str] = {},
        path: str = "/v1/messages",
    ) -> httpx.Response:
        """Send the smallest request with these fields replaced, and return the response."""
        body = {**MESSAGE, **changed}
        body["model"] = f"{profile}-{body['model']}"
        sent = {"x-api-key": "sk-test", "anthropic-version": "2023-06-01", **headers}
        return await self.http.post(path, content=json.dumps(body), headers=sent)

    async def send_to_worker(self, changed: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
        """Send a request that must succeed, and return the body that the worker received."""
        response = await self.send(changed, **rest)
        assert response.status_code == 200, response.text
        return self.worker.bodies[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[AnthropicTestBench]:
    async with ChatWorker(answer) as worker:
        pools: dict[str, Any] = {
            profile: {"protocol": "openai", "profile": profile, "workers": [worker.url],
                      "retries": {"max": 0}, "breaker": {"consecutive_failures": 10_000}}
            for profile in PROFILES
        }  # fmt: skip
        models: dict[str, Any] = {
            f"{profile}-{model}": {"backend": profile, "model": model}
            for profile in PROFILES
            for model in MODELS
        }
        for profile in PROFILES:
            models[f"{profile}-mock-ctx"]["limits"] = {"context": WINDOW}
        pools["down"] = {"protocol": "openai", "workers": ["http://127.0.0.1:1"]}
        models["openai-mock-down"]["backend"] = "down"
        listener = {"address": "127.0.0.1:0", "protocols": [
            "openai",
            {"name": "anthropic", "heartbeat_interval": 0.2},
        ]}  # fmt: skip
        config = {"version": 1, "listeners": [listener], "limits": {"drain_timeout": "1s"},
                  "backends": pools, "models": models}  # fmt: skip
        gateway = Gateway(load_text(json.dumps(config), "test.json", env={}), build_services())
        [url] = await gateway.start()
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield AnthropicTestBench(http, worker)
        await gateway.stop()


def check(response: httpx.Response, **wanted: Any) -> None:
    """Send a streaming request and compare the stream with a case."""
    result = Response(response.status_code, dict(response.headers), response.content)
    check_response(Case("x", "POST", "/", **wanted), result)


def get_error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    return response.status_code, body["error"]["type"], body["error"]["message"]


# --- messages and the system ----------------------------------------------------------------------


async def test_an_13_system_text_is_the_first_message(bench: AnthropicTestBench) -> None:
    sent_body = await bench.send_to_worker({"system": "be kind"})

    assert sent_body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi there"},
    ]


async def test_an_14_system_blocks_are_joined_without_cache_control(
    bench: AnthropicTestBench,
) -> None:
    marked = {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}

    response = await bench.send({"system": [{"type": "text", "text": "A"}, marked]})

    sent_body = bench.worker.bodies[-1]
    assert sent_body["messages"][0] == {"role": "system", "content": "A\n\nB"}
    assert "cache_control" not in json.dumps(sent_body)
    assert response.headers["x-interlingua-loss"] == "system[1].cache_control=dropped"


async def test_an_15_billing_line_is_removed(bench: AnthropicTestBench) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; x"}

    sent_body = await bench.send_to_worker({"system": [billing, {"type": "text", "text": "S"}]})

    assert sent_body["messages"][0] == {"role": "system", "content": "S"}


async def test_an_16_system_message_keeps_its_place(bench: AnthropicTestBench) -> None:
    sent_body = await bench.send_to_worker({"messages": [HI, {"role": "system", "content": "b"}]})

    assert [one["role"] for one in sent_body["messages"]] == ["user", "system"]


async def test_an_12_texts_are_seen_in_order(bench: AnthropicTestBench) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b c"}]

    sent_body = await bench.send_to_worker({"messages": [{"role": "user", "content": parts}]})

    assert sent_body["messages"][0]["content"] == parts


# --- parameters -----------------------------------------------------------------------------------


async def test_an_21_sampling_of_the_newer_version_reaches_the_worker(
    bench: AnthropicTestBench,
) -> None:
    sent_body = await bench.send_to_worker(
        {"temperature": 0.5}, headers={"anthropic-version": "2026-10-21"}
    )

    assert sent_body["temperature"] == 0.5


async def test_an_22_top_k_is_sent_or_reported(bench: AnthropicTestBench) -> None:
    assert (await bench.send_to_worker({"top_k": 5}, profile="vllm"))["top_k"] == 5

    response = await bench.send({"top_k": 5})

    assert "top_k" not in bench.worker.bodies[-1]
    assert response.headers["x-interlingua-loss"] == "top_k=dropped"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_17_stop_sequence_is_named_where_the_worker_does_not_say_which(
    bench: AnthropicTestBench, *, stream: bool
) -> None:
    response = await bench.send({"stop_sequences": [" world"], "stream": stream})

    assert "stop" not in bench.worker.bodies[-1]

    if stream:
        events = list(read_events(Response(200, {}, response.content)))
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " world"}
    else:
        assert response.json()["content"] == [{"type": "text", "text": "Hello"}]
        assert response.json()["stop_sequence"] == " world"


async def test_an_46_output_config_is_a_response_format(bench: AnthropicTestBench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "xhigh"}

    response = await bench.send({"output_config": config})

    sent_body = bench.worker.bodies[-1]
    assert sent_body["response_format"]["json_schema"]["schema"] == schema
    assert sent_body["reasoning_effort"] == "high"
    assert "output_config.effort=clamped" in response.headers["x-interlingua-loss"]


async def test_an_47_fields_of_the_service_do_not_reach_the_worker(
    bench: AnthropicTestBench,
) -> None:
    response = await bench.send(
        {"metadata": {"user_id": "u-77"}, "context_management": {"edits": [{"type": "x-99"}]}},
        headers={"anthropic-beta": "zz-2099-01-01"},
        path="/v1/messages?beta=true",
    )

    assert response.status_code == 200

    sent_text = json.dumps(bench.worker.bodies[-1])
    assert not any(word in sent_text for word in ("u-77", "x-99", "zz-2099", "beta"))
    assert set(response.headers["x-interlingua-loss"].split(",")) == {
        "metadata=dropped",
        "context_management=dropped",
        "header.anthropic-beta=dropped",
    }


# --- tools ----------------------------------------------------------------------------------------


async def test_an_23_tools_are_functions(bench: AnthropicTestBench) -> None:
    sent_body = await bench.send_to_worker({"tools": TOOLS, "tool_choice": {"type": "any"}})

    assert sent_body["tool_choice"] == "required"
    assert sent_body["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]


async def test_an_25_named_tool(bench: AnthropicTestBench) -> None:
    sent_body = await bench.send_to_worker(
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}
    )

    assert sent_body["tool_choice"] == {"type": "function", "function": {"name": "f"}}


async def test_an_27_one_call_at_a_time(bench: AnthropicTestBench) -> None:
    response = await bench.send(
        {
            "model": "mock-par",
            "tools": [*TOOLS, {"name": "g", "input_schema": {}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "messages": [{"role": "user", "content": "tool"}],
        }
    )

    assert bench.worker.bodies[-1]["parallel_tool_calls"] is False
    assert [block["name"] for block in response.json()["content"]] == ["f"]


async def test_an_28_no_tool(bench: AnthropicTestBench) -> None:
    sent_body = await bench.send_to_worker({"tools": TOOLS, "tool_choice": {"type": "none"}})

    assert sent_body["tool_choice"] == "none"


async def test_an_29_parallel_calls_are_blocks_one_after_the_other(
    bench: AnthropicTestBench,
) -> None:
    response = await bench.send(
        {
            "model": "mock-par",
            "tools": [*TOOLS, {"name": "g", "input_schema": {}}],
            "tool_choice": {"type": "any"},
            **STREAM,
        }
    )

    blocks: list[dict[str, Any]] = []
    for event in read_events(Response(200, {}, response.content)):
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks)
                blocks.append({**block, "json": "", "open": True})
            case {"type": "content_block_delta", "index": index, "delta": piece}:
                assert index == len(blocks) - 1
                blocks[index]["json"] += piece["partial_json"]
            case {"type": "content_block_stop", "index": index}:
                blocks[index]["open"] = False
            case _:
                pass

    assert [(one["name"], one["json"], one["open"]) for one in blocks] == [
        ("f", '{"x":1}', False),
        ("g", '{"x":1}', False),
    ]
    assert blocks[0]["id"] != blocks[1]["id"]


def use(*names: str, **fields: Any) -> dict[str, Any]:
    """Build an assistant message that calls tools."""
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {"x": 1}} for name in names]
    return {"role": "assistant", "content": [*fields.get("before", ()), *calls]}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


async def test_an_30_calls_and_results(bench: AnthropicTestBench) -> None:
    turn = use("a", before=[{"type": "text", "text": "t"}])

    sent_body = await bench.send_to_worker({"messages": [HI, turn, user(result("a", content="r"))]})

    function = {"name": "f", "arguments": '{"x":1}'}
    assert sent_body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "t",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "a"},
    ]


async def test_an_31_results_are_sorted_before_the_text(bench: AnthropicTestBench) -> None:
    results = (result("b", content="B"), result("a", content="A"), {"type": "text", "text": "so"})

    sent_body = await bench.send_to_worker({"messages": [HI, use("a", "b"), user(*results)]})

    assert [(m["role"], m["content"]) for m in sent_body["messages"][2:]] == [
        ("tool", "A"),
        ("tool", "B"),
        ("user", "so"),
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [("boom", "Error: boom"), ("<tool_use_error>x", "<tool_use_error>x"), ("error 5", "error 5")],
)
async def test_an_32_failed_tool_is_marked(
    bench: AnthropicTestBench, content: str, text: str
) -> None:
    failed = result("a", content=content, is_error=True)

    sent_body = await bench.send_to_worker({"messages": [HI, use("a"), user(failed)]})

    assert sent_body["messages"][-1]["content"] == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}, "x\ny"),
     ({}, ""), ({"content": ""}, ""), ({"content": []}, "")],
)  # fmt: skip
async def test_an_33_texts_of_a_result(
    bench: AnthropicTestBench, fields: dict[str, Any], text: str
) -> None:
    sent_body = await bench.send_to_worker(
        {"messages": [HI, use("a"), user(result("a", **fields))]}
    )

    assert sent_body["messages"][-1]["content"] == text


async def test_an_34_image_of_a_result_follows_the_results(bench: AnthropicTestBench) -> None:
    image = {"type": "image", "source": PNG}

    sent_body = await bench.send_to_worker(
        {"model": "mock-vlm", "messages": [HI, use("a"), user(result("a", content=[image]))]}
    )

    tool, follower = sent_body["messages"][2:]
    assert (tool["role"], tool["content"]) == ("tool", "[image 1 of call a follows]")
    assert follower["role"] == "user"
    assert follower["content"] == [
        {"type": "text", "text": "[image 1 of call a]"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    ]


# --- images and documents -------------------------------------------------------------------------


async def test_an_37_images_by_data_and_by_url(bench: AnthropicTestBench) -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    turn = user({"type": "text", "text": "x"}, {"type": "image", "source": PNG}, by_url)

    sent_body = await bench.send_to_worker({"model": "mock-vlm", "messages": [turn]})

    urls = [part["image_url"]["url"] for part in sent_body["messages"][0]["content"][1:]]
    assert urls == ["data:image/png;base64,iVBORw0KGgo=", "https://x/y.png"]


async def test_an_38_pings_are_sent_while_the_worker_is_silent(bench: AnthropicTestBench) -> None:
    response = await bench.send({"model": "mock-stall", **STREAM})

    assert b"event: ping" in response.content.partition(b"Hello")[2]

    deltas = [
        event["delta"]["text"]
        for event in read_events(Response(200, {}, response.content))
        if event["type"] == "content_block_delta"
    ]
    assert "" in deltas
    assert "".join(deltas) == "Hello world!"


async def test_an_38_stream_starts_before_a_slow_worker(bench: AnthropicTestBench) -> None:
    async with bench.http.stream(
        "POST", "/v1/messages", json={**MESSAGE, "model": "openai-mock-slow", "stream": True}
    ) as response:
        pieces = [piece async for piece in response.aiter_bytes()]

    assert b"message_start" in pieces[0]
    assert b"Hello" not in pieces[0]
    assert b"message_stop" in pieces[-1]


async def test_an_39_document_is_text(bench: AnthropicTestBench) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "D"}

    sent_body = await bench.send_to_worker(
        {"messages": [user({"type": "document", "title": "T", "source": source})]}
    )

    assert sent_body["messages"][0]["content"] == '<document title="T">\nD\n</document>'


async def test_an_40_pdf_is_a_file(bench: AnthropicTestBench) -> None:
    sent_body = await bench.send_to_worker({"messages": [user(PDF)]})

    assert sent_body["messages"][0]["content"][0]["file"]["filename"] == "document.pdf"


# --- thinking -------------------------------------------------------------------------------------


async def test_an_41_thinking_precedes_the_text(bench: AnthropicTestBench) -> None:
    response = await bench.send(
        {"model": "mock-think", "thinking": {"type": "adaptive"}}, profile="vllm"
    )

    body = response.json()
    thinking, text = body["content"]

    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hmm ok")
    assert thinking["signature"]
    assert [text] == HELLO
    assert body["usage"]["output_tokens"] == 5


async def test_an_42_thinking_is_streamed_with_its_signature_last(
    bench: AnthropicTestBench,
) -> None:
    response = await bench.send(
        {"model": "mock-think", "thinking": {"type": "adaptive"}, **STREAM}, profile="vllm"
    )

    [signature] = [
        event["delta"]["signature"]
        for event in read_events(Response(200, {}, response.content))
        if event.get("delta", {}).get("type") == "signature_delta"
    ]
    check(
        response,
        **events(
            START,
            start(0, type="thinking", thinking="", signature=""),
            delta(0, "thinking_delta", thinking="Hmm"),
            delta(0, "thinking_delta", thinking=" ok"),
            delta(0, "signature_delta", signature=signature),
            stop(0),
            *text(1, *PIECES),
            *end("end_turn", usage(2, 5)),
        ),
    )


@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "disabled"}}])
async def test_an_43_thinking_is_sent_only_on_request(
    bench: AnthropicTestBench, fields: dict[str, Any]
) -> None:
    body = (await bench.send({"model": "mock-think", **fields})).json()

    assert (body["content"], body["usage"]["output_tokens"]) == (HELLO, 5)


async def test_an_45_thinking_of_every_turn_is_sent_to_the_worker(
    bench: AnthropicTestBench,
) -> None:
    """Its chat template decides which of it the model reads."""
    before = [
        {"type": "thinking", "thinking": "why", "signature": "gw1.x"},
        {"type": "redacted_thinking", "data": "s3cret"},
    ]
    old = {"role": "assistant", "content": [before[0], {"type": "text", "text": "so"}]}
    messages = [HI, old, HI, use("a", before=before), user(result("a", content="r"))]

    sent_body = await bench.send_to_worker({"messages": messages}, profile="vllm")

    assert "s3cret" not in json.dumps(sent_body)
    assert [one.get("reasoning_content") for one in sent_body["messages"]] == [
        None, "why", None, "why", None,
    ]  # fmt: skip


# --- errors and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "kind", "retry"),
    [("mock-down", 529, "overloaded_error", "1"), ("mock-500", 502, "api_error", None),
     ("mock-429", 429, "rate_limit_error", "2")],
)  # fmt: skip
async def test_an_52_failures_have_a_status(
    bench: AnthropicTestBench,
    model: str,
    status: int,
    kind: str,
    retry: str | None,
    *,
    stream: bool,
) -> None:
    response = await bench.send({"model": model, "stream": stream})

    assert get_error(response)[:2] == (status, kind)
    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("retry-after") == retry


async def test_an_53_prompt_too_long(bench: AnthropicTestBench) -> None:
    words = {"role": "user", "content": "word " * 20}

    response = await bench.send({"model": "mock-ctx", "messages": [words]})

    assert get_error(response)[::2] == (400, "prompt is too long: 20 tokens > 10 maximum")


async def test_an_54_max_tokens_is_clamped(bench: AnthropicTestBench) -> None:
    turn = {"role": "user", "content": "a b c d"}

    sent_body = await bench.send_to_worker({"model": "mock-ctx", "messages": [turn]})

    assert sent_body["max_completion_tokens"] <= 6


async def test_an_54_completion_that_does_not_fit_gets_the_service_error(
    bench: AnthropicTestBench,
) -> None:
    response = await bench.send({"model": "mock-full"})

    message = "input length and `max_tokens` exceed context limit: 4 + 100 > 10"
    assert get_error(response)[2].startswith(message)


async def test_an_55_broken_stream_ends_with_an_error(bench: AnthropicTestBench) -> None:
    response = await bench.send({"model": "mock-midfail", **STREAM})

    kinds = [event["type"] for event in read_events(Response(200, {}, response.content))]
    assert kinds[-1] == "error"
    assert "message_stop" not in kinds


async def test_an_56_cached_tokens_are_counted_separately(bench: AnthropicTestBench) -> None:
    body = (await bench.send({"model": "mock-cached"})).json()

    assert body["usage"] == usage(1, 3, 1)


async def test_an_57_tokens_are_estimated_if_no_worker_counts(bench: AnthropicTestBench) -> None:
    request_count = len(bench.worker.bodies)

    response = await bench.send({"system": "x"}, path=COUNT)

    assert response.json() == {"input_tokens": 3}
    assert response.headers["x-interlingua-loss"] == "input_tokens=approximated"
    assert len(bench.worker.bodies) == request_count


async def test_an_57_tokens_are_counted_by_a_worker_that_can(bench: AnthropicTestBench) -> None:
    request_count = len(bench.worker.bodies)

    response = await bench.send({"system": "x", "tools": TOOLS}, path=COUNT, profile="vllm")

    assert response.json() == {"input_tokens": 3}
    assert "x-interlingua-loss" not in response.headers
    assert len(bench.worker.bodies) == request_count


async def test_an_57_tokens_are_estimated_while_no_worker_answers(
    bench: AnthropicTestBench,
) -> None:
    response = await bench.send({"model": "mock-down"}, path=COUNT)

    assert response.json() == {"input_tokens": 2}


async def test_an_60_request_of_claude_code(bench: AnthropicTestBench) -> None:
    marker = {"type": "ephemeral"}
    body = {
        "model": "mock-ctx",
        "messages": [
            user({"type": "text", "text": "Say hi", "cache_control": marker}),
            {"role": "system", "content": "Available"},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123;"},
            {"type": "text", "text": "You", "cache_control": marker},
        ],
        "tools": [{"name": "Agent", "description": "d", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}}],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "max_tokens": 64000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }  # fmt: skip
    for stream in (True, False):
        sent_body = await bench.send_to_worker(
            {**body, "stream": stream}, path="/v1/messages?beta=true"
        )
        assert sent_body["max_completion_tokens"] < WINDOW
        assert "billing" not in json.dumps(sent_body)
        assert "$schema" in json.dumps(sent_body["tools"])
