"""Requests for workers of the Responses API."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.core.events import StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ClientRequest, PassthroughRequest, ResponseContext
from protocols.core.request import (
    AllowedTools,
    AudioPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    PromptOptions,
    ReasoningOptions,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from protocols.openai import OpenAI
from protocols.openai.responses_api.decoder import ResponsesDecoder
from protocols.openai.responses_api.items import seal_reasoning
from protocols.openai.responses_api.responses import ResponsesEncoder
from tests.unit.protocols.openai.responses_api.test_decoder import TEXT, finish, write

HI = (Message("user", (TextPart("hi"),)),)
ORIGINAL = OpenAI(worker_api="responses")
OPEN = OpenAI("vllm", worker_api="both")
CLIENT = OpenAI()
ABOUT = ResponseContext("r", 1, "m", "1", "w", lambda: 0.0)


def make(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**({"model": "w", "kind": "chat", "messages": HI} | fields))


def encode(adapter: OpenAI = ORIGINAL, **fields: Any) -> dict[str, Any]:
    wire = adapter.encode_request(make(**fields))
    assert wire.path == "/v1/responses"
    body: dict[str, Any] = msgspec.json.decode(wire.body)
    assert body.pop("store") is False
    assert body.pop("model") == "w"
    return body


def find_losses(adapter: OpenAI = ORIGINAL, **fields: Any) -> list[str]:
    losses = adapter.unsupported_parameters(make(**fields), {})
    return [f"{one.field}={one.reason}" for one in losses]


def test_smallest_request() -> None:
    assert encode() == {"input": [{"type": "message", "role": "user", "content": "hi"}]}
    assert find_losses() == []


def test_parameters() -> None:
    fields: Any = {
        "stopping": StopConditions(max_tokens=5, overflow="truncate"),
        "sampling": SamplingParams(temperature=0.5, top_p=0.5),
        "reasoning": ReasoningOptions(effort="low"),
        "logprobs": LogprobsOptions(2),
        "stream": True,
        "labels": {"user": "u", "metadata.a": "b", "client_metadata.c": "d"},
        "parallel_tools": False,
        "tools": (Tool("f"),),
    }

    body = encode(**fields)

    del body["input"], body["tools"]
    assert body == {
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "stream": True,
        "user": "u",
        "metadata": {"a": "b"},
    }
    assert find_losses(**fields) == ["client_metadata=dropped"]


def test_other_workers_take_more_parameters_and_no_labels() -> None:
    sampling = SamplingParams(top_k=3, seed=1, presence_penalty=1.0)
    stopping = StopConditions(stop=("x",), overflow="error")
    fields: Any = {"sampling": sampling, "stopping": stopping, "labels": {"user": "u"}}

    body = encode(OpenAI("vllm", worker_api="responses"), **fields)

    assert {name: body[name] for name in ("top_k", "seed", "stop", "presence_penalty")} == {
        "top_k": 3, "seed": 1, "stop": ["x"], "presence_penalty": 1.0,
    }  # fmt: skip
    assert "user" not in body
    assert find_losses(OpenAI("vllm", worker_api="responses"), **fields) == ["user=dropped"]
    assert find_losses(**fields) == [
        "top_k=dropped", "seed=dropped", "presence_penalty=dropped", "stop=dropped"
    ]  # fmt: skip


def test_truncation_is_openais_own() -> None:
    stopping = StopConditions(overflow="truncate")

    assert find_losses(stopping=stopping) == []
    assert find_losses(OpenAI("vllm", worker_api="responses"), stopping=stopping) == [
        "overflow=dropped"
    ]


def test_reasoning_that_only_another_service_can_read_is_lost() -> None:
    parts = (ReasoningPart("hm", "signature"), ReasoningPart("", redacted="sealed"))
    messages = (Message("user", (TextPart("a"),)), Message("assistant", parts))

    [_, item] = encode(messages=messages)["input"]

    assert item["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert find_losses(messages=messages) == [
        "messages[1].reasoning_content.signature=dropped",
        "messages[1].reasoning_content=dropped",
    ]


def test_messages_as_items() -> None:
    messages = (
        Message("system", (TextPart("s"),)),
        Message("user", (TextPart("a"), ImagePart("data:x"), FilePart(file_data="AA"),
                         AudioPart("AA", "wav"), VideoPart("v"))),
        Message("assistant", (ReasoningPart("hm"), TextPart("t"), RefusalPart("no")),
                tool_calls=(ToolCall("1", "f", "{}"), ToolCall("2", "p", "x", "custom"))),
        Message("tool", (TextPart("42"),), tool_call_id="1"),
        Message("tool", (), tool_call_id="2"),
        Message("assistant", ()),
        Message("assistant", (), tool_calls=(ToolCall("3", "f", "{}"),)),
        Message("function", (TextPart("old"),), name="f"),
    )  # fmt: skip

    items = encode(messages=messages)["input"]

    assert items[1]["content"] == [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:x", "detail": "auto"},
        {"type": "input_file", "file_data": "AA"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    assert [item["type"] for item in items] == [
        "message", "message", "reasoning", "message", "function_call", "custom_tool_call",
        "function_call_output", "custom_tool_call_output", "message", "function_call", "message",
    ]  # fmt: skip
    assert [part["type"] for part in items[3]["content"]] == ["output_text", "refusal"]
    assert (items[5]["input"], items[7]["output"], items[10]["role"]) == ("x", [], "user")
    assert find_losses(messages=messages) == [
        "messages[1].content[4]=dropped",
        "messages[7].name=dropped",
    ]


def test_tools_and_choice() -> None:
    tools = (
        Tool("f", "d", Raw(b'{"type":"object"}'), strict=True),
        Tool("g"),
        Tool("p", None, Raw(b'{"type":"text"}'), kind="custom"),
        Tool("q", kind="custom"),
        Tool(
            "r",
            None,
            Raw(b'{"type":"grammar","grammar":{"syntax":"regex","definition":"a"}}'),
            kind="custom",
        ),
    )

    body = encode(tools=tools, tool_choice=NamedTool("p"))

    first, second, third, fourth, fifth = body["tools"]
    assert (first["description"], first["strict"]) == ("d", True)
    assert second["parameters"] == {"type": "object", "properties": {}}
    assert third == {"type": "custom", "name": "p", "format": {"type": "text"}}
    assert fourth == {"type": "custom", "name": "q"}
    assert fifth["format"] == {"type": "grammar", "syntax": "regex", "definition": "a"}
    assert body["tool_choice"] == {"type": "custom", "name": "p"}

    allowed = encode(tools=tools, tool_choice=AllowedTools("required", ("g",)))
    assert ([one["name"] for one in allowed["tools"]], allowed["tool_choice"]) == (
        ["g"],
        "required",
    )
    assert "tool_choice" not in encode(tools=tools)
    assert "parallel_tool_calls" not in encode(parallel_tools=True)


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        (JsonObjectFormat(), {"type": "json_object"}),
        (JsonSchemaFormat(Raw(b"{}"), "n", strict=True),
         {"type": "json_schema", "name": "n", "schema": {}, "strict": True}),
    ],
)  # fmt: skip
def test_output_format(output: Any, wanted: Any) -> None:
    assert encode(output=output)["text"] == {"format": wanted}
    assert find_losses(output=output) == []


def test_format_that_cannot_be_sent_is_a_loss() -> None:
    assert "text" not in encode(output=RegexFormat("a"))
    assert find_losses(output=RegexFormat("a")) == ["output=dropped"]


def test_fields_of_this_api_come_back_to_their_place() -> None:
    extra = {
        "tools.web_search": Raw(b'{"type":"web_search"}'),
        "text.verbosity": Raw(b'"low"'),
        "service_tier": Raw(b'"flex"'),
        "input[0]": Raw(b"null"),
    }

    body = encode(extra=extra, source="openai responses")

    assert (body["tools"], body["text"]) == ([{"type": "web_search"}], {"verbosity": "low"})
    assert body["service_tier"] == "flex"
    assert find_losses(extra=extra, source="openai responses") == ["input[0]=dropped"]
    assert "text" not in encode(extra=extra, source="anthropic")
    assert len(find_losses(extra=extra, source="anthropic")) == 4


def test_fields_that_both_apis_have_reach_workers_of_the_other() -> None:
    chat_fields = {"verbosity": Raw(b'"low"'), "service_tier": Raw(b'"flex"'), "seed": Raw(b"1")}
    own_fields = {"text.verbosity": Raw(b'"low"'), "service_tier": Raw(b'"flex"')}

    body = encode(extra=chat_fields, source="openai")
    chat_request = make(extra=own_fields, source="openai responses")
    chat_body = msgspec.json.decode(OpenAI("openai").encode_request(chat_request).body)

    assert (body["text"], body["service_tier"]) == ({"verbosity": "low"}, "flex")
    assert find_losses(extra=chat_fields, source="openai") == ["seed=dropped"]
    assert (chat_body["verbosity"], chat_body["service_tier"]) == ("low", "flex")
    assert find_losses(OpenAI("openai"), extra=own_fields, source="openai responses") == []


def test_prompts_go_through_the_workers_template() -> None:
    wrapped: Any = {
        "kind": "completion", "messages": (), "prompts": ("a",),
        "templating": PromptOptions(mode="server"),
    }  # fmt: skip

    assert encode(**wrapped)["input"][0]["content"] == "a"
    assert find_losses(**wrapped | {"prompts": ("a", "b")}) == ["prompt=dropped"]


def test_other_requests_use_the_other_endpoints() -> None:
    raw = make(kind="completion", messages=(), prompts=("a",))
    vectors = EmbeddingRequest(model="w", inputs=("a",))

    assert ORIGINAL.encode_request(raw).path == "/v1/completions"
    assert ORIGINAL.encode_request(vectors).path == "/v1/embeddings"
    assert OPEN.encode_request(make()).path == "/v1/chat/completions"
    assert OPEN.encode_request(make(source="openai responses")).path == "/v1/responses"
    assert CLIENT.encode_request(make(source="openai responses")).path == "/v1/chat/completions"
    assert isinstance(ORIGINAL.create_decoder(make()), ResponsesDecoder)
    assert not isinstance(OPEN.create_decoder(make()), ResponsesDecoder)


def test_unknown_worker_api_is_an_error() -> None:
    wrong: Any = "soap"

    with pytest.raises(ValueError, match="worker_api is one of chat, responses, both"):
        OpenAI(worker_api=wrong)


# --- pass-through ---------------------------------------------------------------------------------


def prepare(adapter: OpenAI = ORIGINAL, **body: Any) -> PassthroughRequest | None:
    endpoint = next(one for one in CLIENT.endpoints if one.operation == "response")
    content = msgspec.json.encode({"model": "m", "input": "hi"} | body)
    call = ClientRequest(endpoint, {}, {}, "", content, endpoint.path)
    CLIENT.set_references(call, {})
    return adapter.prepare_passthrough(CLIENT, call, ABOUT)


def forwarded(adapter: OpenAI = ORIGINAL, **body: Any) -> dict[str, Any]:
    prepared = prepare(adapter, **body)
    assert prepared is not None
    assert prepared.upstream_request.path == "/v1/responses"
    sent: dict[str, Any] = msgspec.json.decode(prepared.upstream_request.body)
    return sent


def test_own_request_is_forwarded_with_the_whole_conversation() -> None:
    body = forwarded(
        temperature=None, store=True, client_metadata={"a": "b"}, tools=[{"type": "file_search"}],
        tool_choice={"type": "file_search"}, max_tool_calls=3,
    )  # fmt: skip

    assert body == {
        "model": "w",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        ],
        "store": False,
        "client_metadata": {"a": "b"},
        "tools": [{"type": "file_search"}],
        "tool_choice": {"type": "file_search"},
        "max_tool_calls": 3,
    }


def test_response_to_a_forwarded_request_is_encoded_again() -> None:
    prepared = prepare(stream=True)
    assert prepared is not None

    reader = prepared.create_reader()
    data, events = reader.feed([write(finish(TEXT))])
    assert prepared.create_encoder is not None

    encoder = prepared.create_encoder()

    assert data is None
    assert TextDelta("ab") in events
    assert [type(one) for one in events][-2:] == [Usage, StreamEnd]
    assert reader.close() == (None, ())
    assert isinstance(encoder, ResponsesEncoder)
    assert b"response.completed" in encoder.encode_events(events)
    assert dict(prepared.build_headers())["Content-Type"].startswith("text/event-stream")


def test_sealed_reasoning_is_opened() -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": []}
    items = [
        {"role": "user", "content": "x", "status": None},
        sealed | {"encrypted_content": seal_reasoning("hm", None)},
        sealed | {"encrypted_content": seal_reasoning("no", None), "content": [{"text": "own"}]},
        sealed | {"encrypted_content": "gAAA"},
    ]
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]

    original = forwarded(input=items, include=include)
    other = forwarded(OPEN, input=items, include=include)

    assert other["input"][0] == {"role": "user", "content": "x"}
    assert other["input"][1]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert other["input"][2]["content"] == [{"text": "own"}]
    assert other["input"][3]["encrypted_content"] == "gAAA"
    assert original["input"][3]["encrypted_content"] == "gAAA"
    assert other["include"] == ["message.output_text.logprobs"]
    assert original["include"] == include


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": []}]},
        {"tools": [{"type": "custom", "name": "p", "format": {
            "type": "grammar", "syntax": "lark", "definition": "x"}}]},
        {"input": [{"type": "additional_tools", "tools": []}]},
        {"temperature": 9},
    ],
)  # fmt: skip
def test_what_other_workers_may_not_understand_is_translated(body: Any) -> None:
    assert prepare(OPEN, **body) is None


def test_what_openai_does_not_have_is_translated() -> None:
    assert prepare(ORIGINAL, stop="x") is None
    assert prepare(OPEN, stop="x", tools=[{"type": "function", "name": "f"}]) is not None


def test_no_request_is_forwarded_between_different_apis() -> None:
    chat = next(one for one in CLIENT.endpoints if one.operation == "chat")
    content = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    call = ClientRequest(chat, {}, {}, "", content, chat.path)

    assert prepare(CLIENT) is None
    assert ORIGINAL.prepare_passthrough(CLIENT, call, ABOUT) is None
    assert OPEN.prepare_passthrough(CLIENT, call, ABOUT) is not None
