"""Conversations as one prompt."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.core.errors import Unsupported
from gateway.core.loss import Loss
from gateway.core.types import (
    AudioPart,
    FilePart,
    GenerateRequest,
    ImagePart,
    Message,
    RefusalPart,
    Templating,
    TextPart,
    Tool,
    ToolCall,
    VideoPart,
)
from protocols.rendering import carries, prompt_of, rendering_losses

NO_TEMPLATE = Loss("messages", "approximated", "no chat template", "messages")


class Shout:
    """A template that shouts."""

    def render_prompt(self, request: GenerateRequest) -> str:
        return "|".join(message.text.upper() for message in request.messages)


def said(role: Any, *texts: str, **fields: Any) -> Message:
    return Message(role, tuple(TextPart(text) for text in texts), **fields)


def chat(*messages: Message, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", kind="chat", messages=messages, **fields)


def text(*prompts: Any, mode: Any = "raw") -> GenerateRequest:
    how = Templating(mode=mode)
    return GenerateRequest(model="m", kind="completion", prompts=prompts, templating=how)


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
            chat(*TALK, templating=Templating(continue_final=True)),
            "System: Be brief.\nUser: Hi\nAssistant: Hello",
        ),
        (
            chat(*TALK, templating=Templating(add_generation_prompt=False)),
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
def test_without_a_template(request_: GenerateRequest, prompt: str) -> None:
    assert prompt_of(request_, None) == prompt


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (chat(*TALK), "BE BRIEF.|HI|HELLO"),
        (text("a", mode="server"), "A"),
        (text("a"), "a"),
    ],
)
def test_with_a_template(request_: GenerateRequest, prompt: str) -> None:
    assert prompt_of(request_, Shout()) == prompt


@pytest.mark.parametrize("mode", ["raw", "server"])
def test_token_ids_are_no_text(mode: str) -> None:
    with pytest.raises(Unsupported):
        prompt_of(text((1, 2), mode=mode), Shout())


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
def test_what_is_lost(request_: GenerateRequest, renderer: Any, losses: Any) -> None:
    assert rendering_losses(request_, renderer, {}) == losses


def test_what_no_text_can_hold() -> None:
    names = {"messages": "input", "tools": "functions"}

    assert rendering_losses(EVERYTHING, None, names) == (
        Loss("input", "approximated", "no chat template", "messages"),
        Loss("input", "dropped", "audio, files, images, videos", "messages"),
        Loss("functions", "dropped", path="tools"),
    )
    assert rendering_losses(EVERYTHING, Shout(), names) == (
        Loss("input", "dropped", "audio, files, images, videos", "messages"),
        Loss("functions", "approximated", "calls come back as text", "tools"),
    )


def test_a_template_s_arguments_need_a_template() -> None:
    assert "templating.arguments" not in carries(None)
    assert set(carries(Shout())) == {*carries(None), "templating.arguments"}
