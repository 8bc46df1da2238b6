"""Conversations as one prompt."""

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


class Shout:
    """A template that shouts."""

    def render_prompt(self, request: GenerationRequest) -> str:
        return "|".join(message.text.upper() for message in request.messages)


def said(role: Any, *texts: str, **fields: Any) -> Message:
    return Message(role, tuple(TextPart(text) for text in texts), **fields)


def chat(*messages: Message, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="chat", messages=messages, **fields)


def text(*prompts: Any, mode: Any = "raw") -> GenerationRequest:
    how = PromptOptions(mode=mode)
    return GenerationRequest(model="m", kind="completion", prompts=prompts, templating=how)


TALK = (said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello"))


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (text("a b"), "a b"),
        (text("a", "b"), "a"),
        (text(), ""),
        (text("a", mode="server"), "a"),
        (chat(said("user", "Hi ", "there")), "Hi there"),
        (chat(said("assistant", "Hi")), "Assistant: Hi\nAssistant:"),
        (chat(*TALK), "System: Be brief.\nUser: Hi\nAssistant: Hello\nAssistant:"),
        (chat(said("developer", "x"), said("function", "y")), "System: x\nTool: y\nAssistant:"),
        (
            chat(*TALK, templating=PromptOptions(continue_final=True)),
            "System: Be brief.\nUser: Hi\nAssistant: Hello",
        ),
        (
            chat(*TALK, templating=PromptOptions(add_generation_prompt=False)),
            "System: Be brief.\nUser: Hi\nAssistant: Hello",
        ),
        (
            chat(
                said("user", "Sun?"),
                said("assistant", tool_calls=(ToolCall("1", "sky", '{"at":"x"}'),)),
                said("tool", "yes"),
            ),
            'User: Sun?\nAssistant: sky({"at":"x"})\nTool: yes\nAssistant:',
        ),
        (
            chat(
                Message("user", (ImagePart("https://x"), TextPart("What?"))),
                Message("assistant", (RefusalPart("No."),)),
            ),
            "User: What?\nAssistant: No.\nAssistant:",
        ),
    ],
)
def test_without_a_template(request_: GenerationRequest, prompt: str) -> None:
    assert build_prompt(request_, None) == prompt


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (chat(*TALK), "BE BRIEF.|HI|HELLO"),
        (text("a", mode="server"), "A"),
        (text("a"), "a"),
    ],
)
def test_with_a_template(request_: GenerationRequest, prompt: str) -> None:
    assert build_prompt(request_, Shout()) == prompt


@pytest.mark.parametrize("mode", ["raw", "server"])
def test_token_ids_are_no_text(mode: str) -> None:
    with pytest.raises(UnsupportedFeature):
        build_prompt(text((1, 2), mode=mode), Shout())


EVERYTHING = chat(
    Message(
        "user",
        (ImagePart("x"), AudioPart("x"), VideoPart("x"), FilePart("x"), TextPart("y")),
    ),
    tools=(Tool("f", parameters=Raw(b"{}")),),
)


@pytest.mark.parametrize(
    ("request_", "renderer", "losses"),
    [
        (text("a"), None, ()),
        (text("a", mode="server"), None, (replace(NO_TEMPLATE, field="prompt"),)),
        (text("a", mode="server"), Shout(), ()),
        (chat(*TALK), None, (NO_TEMPLATE,)),
        (chat(*TALK), Shout(), ()),
    ],
)
def test_what_is_lost(request_: GenerationRequest, renderer: Any, losses: Any) -> None:
    assert find_prompt_losses(request_, renderer, {}) == losses


def test_what_no_text_can_hold() -> None:
    names = {"messages": "input", "tools": "functions"}

    assert find_prompt_losses(EVERYTHING, None, names) == (
        UnsupportedParameter("input", "approximated", "no chat template", "messages"),
        UnsupportedParameter("input", "dropped", "audio, files, images, videos", "messages"),
        UnsupportedParameter("functions", "dropped", path="tools"),
    )
    assert find_prompt_losses(EVERYTHING, Shout(), names) == (
        UnsupportedParameter("input", "dropped", "audio, files, images, videos", "messages"),
        UnsupportedParameter("functions", "approximated", "calls come back as text", "tools"),
    )


def test_a_template_s_arguments_need_a_template() -> None:
    assert "templating.arguments" not in build_prompt_support(None)
    assert set(build_prompt_support(Shout())) == {
        *build_prompt_support(None),
        "templating.arguments",
    }
