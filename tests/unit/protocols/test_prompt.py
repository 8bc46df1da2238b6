"""Conversations are rendered as one prompt."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.errors import UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    PromptOptions,
    RefusalPart,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from protocols.prompt import build_prompt, build_prompt_support, find_prompt_losses

NO_TEMPLATE = UnsupportedParameter("messages", "approximated", "no chat template", "messages")


class UppercaseRenderer:
    """A template that writes capitals."""

    def render_prompt(self, request: GenerationRequest) -> str:
        return "|".join(message.text.upper() for message in request.messages)


def build_message(role: Any, *texts: str, **fields: Any) -> Message:
    return Message(role, tuple(TextPart(text) for text in texts), **fields)


def make_chat(*messages: Message, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="chat", messages=messages, **fields)


def make_completion(*prompts: Any, mode: Any = "raw") -> GenerationRequest:
    how = PromptOptions(mode=mode)
    return GenerationRequest(model="m", kind="completion", prompts=prompts, templating=how)


TALK = (
    build_message("system", "Be brief."),
    build_message("user", "Hi"),
    build_message("assistant", "Hello"),
)


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (make_completion("a b"), "a b"),
        (make_completion("a", "b"), "a"),
        (make_completion(), ""),
        (make_completion("a", mode="server"), "a"),
        (make_chat(build_message("user", "Hi ", "there")), "Hi there"),
        (make_chat(build_message("assistant", "Hi")), "Assistant: Hi\nAssistant:"),
        (make_chat(*TALK), "System: Be brief.\nUser: Hi\nAssistant: Hello\nAssistant:"),
        (
            make_chat(build_message("developer", "x"), build_message("function", "y")),
            "System: x\nTool: y\nAssistant:",
        ),
        (
            make_chat(*TALK, templating=PromptOptions(continue_final=True)),
            "System: Be brief.\nUser: Hi\nAssistant: Hello",
        ),
        (
            make_chat(*TALK, templating=PromptOptions(add_generation_prompt=False)),
            "System: Be brief.\nUser: Hi\nAssistant: Hello",
        ),
        (
            make_chat(
                build_message("user", "Sun?"),
                build_message("assistant", tool_calls=(ToolCall("1", "sky", '{"at":"x"}'),)),
                build_message("tool", "yes"),
            ),
            'User: Sun?\nAssistant: sky({"at":"x"})\nTool: yes\nAssistant:',
        ),
        (
            make_chat(
                Message("user", (ImagePart("https://x"), TextPart("What?"))),
                Message("assistant", (RefusalPart("No."),)),
            ),
            "User: What?\nAssistant: No.\nAssistant:",
        ),
    ],
)
def test_prompt_without_a_chat_template(request_: GenerationRequest, prompt: str) -> None:
    assert build_prompt(request_, None) == prompt


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (make_chat(*TALK), "BE BRIEF.|HI|HELLO"),
        (make_completion("a", mode="server"), "A"),
        (make_completion("a"), "a"),
    ],
)
def test_prompt_with_a_chat_template(request_: GenerationRequest, prompt: str) -> None:
    assert build_prompt(request_, UppercaseRenderer()) == prompt


@pytest.mark.parametrize("mode", ["raw", "server"])
def test_token_ids_raise_unsupported_feature(mode: str) -> None:
    with pytest.raises(UnsupportedFeature):
        build_prompt(make_completion((1, 2), mode=mode), UppercaseRenderer())


EVERYTHING = make_chat(
    Message(
        "user",
        (ImagePart("x"), AudioPart("x"), VideoPart("x"), FilePart("x"), TextPart("y")),
    ),
    tools=(Tool("f", parameters=Raw(b"{}")),),
)


MEDIA = [
    UnsupportedParameter(f"messages[0].content[{k}]", "dropped", what, "messages")
    for k, what in enumerate(("images", "audio", "videos", "files"))
]


@pytest.mark.parametrize(
    ("request_", "renderer", "losses"),
    [
        (make_completion("a"), None, ()),
        (make_completion("a", mode="server"), None, (replace(NO_TEMPLATE, field="prompt"),)),
        (make_completion("a", mode="server"), UppercaseRenderer(), ()),
        (make_chat(*TALK), None, (NO_TEMPLATE,)),
        (make_chat(*TALK), UppercaseRenderer(), ()),
    ],
)
def test_prompt_losses_per_request(request_: GenerationRequest, renderer: Any, losses: Any) -> None:
    assert find_prompt_losses(request_, renderer, {}) == losses


def test_media_and_tools_are_reported_as_prompt_losses() -> None:
    names = {"messages": "input", "tools": "functions"}

    assert find_prompt_losses(EVERYTHING, None, names) == (
        UnsupportedParameter("input", "approximated", "no chat template", "messages"),
        *MEDIA,
        UnsupportedParameter("functions", "dropped", path="tools"),
    )
    assert find_prompt_losses(EVERYTHING, UppercaseRenderer(), names) == (
        *MEDIA,
        UnsupportedParameter("functions", "approximated", "calls come back as text", "tools"),
    )


def test_template_arguments_are_supported_only_with_a_renderer() -> None:
    assert "templating.arguments" not in build_prompt_support(None)
    assert set(build_prompt_support(UppercaseRenderer())) == {
        *build_prompt_support(None),
        "templating.arguments",
    }
