"""Requests to workers that speak Messages, and their losses."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.anthropic.endpoints import Anthropic
from protocols.core.errors import UnsupportedFeature
from protocols.core.request import (
    AllowedTools,
    AudioPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningOptions,
    ReasoningPart,
    RefusalPart,
    SamplingParams,
    StopConditions,
    TextPart,
    Tool,
    ToolCall,
)

HI = Message("user", (TextPart("hi"),))
TOOL = Tool("f", "D", Raw(b'{"type":"object"}'))


def ask(*messages: Message, **fields: Any) -> GenerationRequest:
    fields.setdefault("stopping", StopConditions(max_tokens=9))
    return GenerationRequest(model="w", kind="chat", messages=messages or (HI,), **fields)


def encode(request: GenerationRequest) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(Anthropic().encode_request(request).body)
    return body


def find_losses(request: Any, **names: str) -> list[tuple[str, str]]:
    unsupported = Anthropic().unsupported_parameters(request, names)
    return [(one.path or one.field, one.reason) for one in unsupported]


def test_smallest_request() -> None:
    wire = Anthropic().encode_request(ask())

    assert wire.path == "/v1/messages"
    assert dict(wire.headers)["anthropic-version"] == "2023-06-01"
    assert msgspec.json.decode(wire.body) == {
        "model": "w", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
    }  # fmt: skip
    assert find_losses(ask()) == []


def test_max_tokens_has_a_default() -> None:
    request = ask(stopping=StopConditions())

    assert encode(request)["max_tokens"] == 4096
    assert find_losses(request) == [("stopping.max_tokens", "defaulted")]


def test_scalars_are_written_within_their_ranges() -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.5, top_k=7, min_p=0.1)
    stopping = StopConditions(max_tokens=5, stop=("END", " "), overflow="error")
    request = ask(sampling=sampling, stopping=stopping, stream=True)

    body = encode(request)

    assert (body["temperature"], body["top_p"], body["top_k"]) == (1, 0.5, 7)
    assert (body["stop_sequences"], body["stream"]) == (["END"], True)
    assert find_losses(request) == [
        ("sampling.temperature", "clamped"),
        ("sampling.min_p", "dropped"),
        ("stopping.stop", "dropped"),
    ]
    assert encode(ask(sampling=SamplingParams(do_sample=False)))["temperature"] == 0


def test_blank_stop_strings_are_not_sent() -> None:
    request = ask(stopping=StopConditions(max_tokens=1, stop=("\n",)))

    assert "stop_sequences" not in encode(request)


# --- messages -------------------------------------------------------------------------------------


def test_system_and_later_system_messages() -> None:
    system = Message("system", (TextPart("A"),))
    developer = Message("developer", (TextPart("B"),))

    wire = Anthropic().encode_request(ask(system, developer, HI, system))

    body = msgspec.json.decode(wire.body)
    assert body["system"] == "A\n\nB"
    assert body["messages"] == [
        {"role": "user", "content": "hi"}, {"role": "system", "content": "A"},
    ]  # fmt: skip
    assert dict(wire.headers)["anthropic-beta"].startswith("mid-conversation-system")


def test_parts_become_blocks() -> None:
    parts = (
        TextPart("a"),
        TextPart(""),
        ImagePart("https://x"),
        ImagePart("data:image/gif;base64,R0"),
        ImagePart("data:,R0"),
        FilePart(file_data="data:application/pdf;base64,JV", filename="a.pdf"),
        FilePart(file_data="JV"),
        RefusalPart("no"),
        AudioPart("x"),
    )
    request = ask(Message("user", parts))

    assert encode(request)["messages"][0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "source": {"type": "url", "url": "https://x"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "R0"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JV"},
            "title": "a.pdf",
        },
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JV"},
        },
        {"type": "text", "text": "no"},
    ]

    lost, changed = Anthropic().unsupported_parameters(request, {})
    assert (lost.path, lost.detail) == ("messages", "audio")
    assert (changed.field, changed.reason) == ("messages[0].refusal", "approximated")


def test_file_of_another_service_is_rejected() -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        encode(ask(Message("user", (FilePart(file_id="f"),))))

    assert refused.value.param == "messages[0].content[0]"


def test_calls_and_results() -> None:
    calls = (
        ToolCall("a", "f", '{"x":1}'),
        ToolCall("b", "f", ""),
        ToolCall("c", "g", ""),
    )
    image = (TextPart("t"), ImagePart("https://x"))
    request = ask(
        HI,
        Message("assistant", (TextPart("so"),), tool_calls=calls),
        Message("tool", (TextPart("A"), TextPart("B")), tool_call_id="a"),
        Message("tool", image, tool_call_id="b", is_error=True),
        Message("function", (), name="c"),
        Message("user", (TextPart("and"),)),
        Message("user", (TextPart("next"),)),
    )

    _, assistant, user, last = encode(request)["messages"]

    assert [block.get("input") for block in assistant["content"]] == [
        None, {"x": 1}, {}, {},
    ]  # fmt: skip
    assert user["content"] == [
        {"type": "tool_result", "tool_use_id": "a", "content": "A\nB"},
        {
            "type": "tool_result",
            "tool_use_id": "b",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "image", "source": {"type": "url", "url": "https://x"}},
            ],
            "is_error": True,
        },
        {"type": "tool_result", "tool_use_id": "c", "content": ""},
        {"type": "text", "text": "and"},
    ]
    assert last == {"role": "user", "content": "next"}
    assert find_losses(request) == []


def test_result_of_a_call_in_an_earlier_conversation_keeps_its_id() -> None:
    request = ask(Message("tool", (TextPart("A"),), tool_call_id="a"))

    body = encode(request)

    assert body["messages"][0]["content"][0]["tool_use_id"] == "a"


def test_reasoning_is_sent_to_workers_only_with_a_signature() -> None:
    parts = (ReasoningPart("T", "S"), ReasoningPart("", redacted="R"), ReasoningPart("U"))
    request = ask(HI, Message("assistant", (*parts, TextPart("a"))))

    assert encode(request)["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "T", "signature": "S"},
        {"type": "redacted_thinking", "data": "R"},
        {"type": "text", "text": "a"},
    ]
    assert find_losses(request) == [("messages", "dropped")]

    signed = ask(HI, Message("assistant", parts[:2]))
    assert find_losses(signed) == []


@pytest.mark.parametrize(
    ("detail", "lost"),
    [(None, []), ("auto", []), ("high", [("messages", "approximated")])],
)
def test_chosen_detail_of_an_image_is_lost(detail: str | None, lost: list[Any]) -> None:
    request = ask(Message("user", (ImagePart("https://x/y.png", detail),)))

    assert find_losses(request) == lost


@pytest.mark.parametrize("written", ["image/jpg", "image/jpeg", "IMAGE/JPEG"])
def test_media_type_of_an_image_is_one_that_anthropic_takes(written: str) -> None:
    request = ask(Message("user", (ImagePart(f"data:{written};base64,/9j/"),)))

    [block] = encode(request)["messages"][0]["content"]

    assert block["source"] == {"type": "base64", "media_type": "image/jpeg", "data": "/9j/"}


def test_names_are_lost() -> None:
    [loss] = Anthropic().unsupported_parameters(
        ask(Message("user", (TextPart("x"),), name="n")), {}
    )

    assert (loss.reason, loss.detail) == ("dropped", "names")


def test_prompt_is_a_users_message() -> None:
    request = GenerationRequest(
        model="w", kind="completion", prompts=("a", "b"), stopping=StopConditions(max_tokens=1)
    )

    assert encode(request)["messages"] == [{"role": "user", "content": "a"}]
    assert find_losses(request, prompts="prompt") == [
        ("prompts", "dropped"), ("messages", "approximated"),
    ]  # fmt: skip
    with pytest.raises(UnsupportedFeature):
        encode(GenerationRequest(model="w", kind="completion", prompts=((1, 2),)))
    assert encode(GenerationRequest(model="w", kind="completion"))["messages"] == []


def test_empty_messages_and_blank_texts_are_left_out() -> None:
    messages = (
        Message("system", (TextPart(" \n"),)),
        Message("user", (TextPart("a"), TextPart(" "))),
        Message("assistant", ()),
        Message("assistant", (TextPart(""),)),
        Message("user", (TextPart("b"),)),
    )
    body = encode(GenerationRequest(model="w", kind="chat", messages=messages))

    assert "system" not in body
    assert body["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]


def test_embeddings_are_rejected() -> None:
    request = EmbeddingRequest(model="w", inputs=("x",), dimensions=3)

    assert find_losses(request) == [("dimensions", "dropped")]
    with pytest.raises(UnsupportedFeature):
        Anthropic().encode_request(request)


# --- tools, reasoning and output ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "parallel", "wanted"),
    [
        (None, None, None),
        (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
        ("auto", None, {"type": "auto"}),
        ("required", True, {"type": "any", "disable_parallel_tool_use": False}),
        ("none", False, {"type": "none"}),
        (NamedTool("f"), None, {"type": "tool", "name": "f"}),
        (AllowedTools("required", ("f",)), None, {"type": "any"}),
    ],
)
def test_tools_are_written(choice: Any, parallel: bool | None, wanted: Any) -> None:
    tools = (TOOL, Tool("g"))
    request = ask(tools=tools, tool_choice=choice, parallel_tools=parallel)

    body = encode(request)

    assert body["tools"][0] == {"name": "f", "description": "D", "input_schema": {"type": "object"}}
    assert body.get("tool_choice") == wanted
    if not isinstance(choice, AllowedTools):
        assert body["tools"][1]["input_schema"] == {"type": "object", "properties": {}}
    assert find_losses(request) == []


@pytest.mark.parametrize(
    ("reasoning", "fields", "losses"),
    [
        (ReasoningOptions(effort="none"), {"thinking": {"type": "disabled"}}, []),
        (ReasoningOptions(include=False), {"thinking": {"type": "disabled"}}, []),
        (
            ReasoningOptions(effort="minimal"),
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            [("reasoning.effort", "approximated")],
        ),
        (ReasoningOptions(include=True), {"thinking": {"type": "adaptive"}}, []),
        (
            ReasoningOptions(budget=2000),
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            [],
        ),
        (
            ReasoningOptions(budget=9),
            {"thinking": {"type": "adaptive"}},
            [("reasoning.budget", "approximated")],
        ),
        (
            ReasoningOptions(budget=9000),
            {"thinking": {"type": "enabled", "budget_tokens": 3999}},
            [("reasoning.budget", "clamped")],
        ),
        (ReasoningOptions(summary="auto"), {}, [("reasoning.summary", "dropped")]),
    ],
)
def test_reasoning_is_thinking(
    reasoning: ReasoningOptions, fields: dict[str, Any], losses: list[tuple[str, str]]
) -> None:
    request = ask(reasoning=reasoning, stopping=StopConditions(max_tokens=4000))

    body = encode(request)

    assert {name: body[name] for name in ("thinking", "output_config") if name in body} == fields
    assert find_losses(request) == losses


def test_budget_without_room_below_the_limit_is_no_budget() -> None:
    request = ask(reasoning=ReasoningOptions(budget=2000), stopping=StopConditions(max_tokens=1024))

    assert encode(request)["thinking"] == {"type": "adaptive"}
    assert find_losses(request) == [("reasoning.budget", "approximated")]


def test_output_format() -> None:
    schema = JsonSchemaFormat(Raw(b'{"type":"object"}'))
    request = ask(output=schema, reasoning=ReasoningOptions(effort="low"))

    assert encode(request)["output_config"] == {
        "effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}},
    }  # fmt: skip
    assert find_losses(request) == []
    assert find_losses(ask(output=JsonObjectFormat())) == [("output", "dropped")]


def test_user_and_fields_of_the_same_protocol() -> None:
    extra = {"service_tier": Raw(b'"auto"')}
    request = ask(labels={"user": "u"}, extra=extra, source="anthropic")

    body = encode(request)

    assert body["metadata"] == {"user_id": "u"}
    assert body["service_tier"] == "auto"
    assert find_losses(request) == []

    foreign = ask(extra=extra, source="openai")
    assert "service_tier" not in encode(foreign)
    assert find_losses(foreign) == [("service_tier", "dropped")]
