"""One prompt made of a conversation, for workers that take text alone.

A model's own template does it where there is one. Without it, what a lone user said is the prompt
as it stands, and a conversation becomes plain lines::

    System: Be brief.
    User: Hi
    Assistant:
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.core.errors import Unsupported
from gateway.core.loss import Carry, Loss
from gateway.core.ports import Renderer
from gateway.core.types import (
    AudioPart,
    FilePart,
    GenerateRequest,
    ImagePart,
    Message,
    Part,
    RefusalPart,
    TextPart,
    VideoPart,
)

_SPEAKERS: Final[Mapping[str, str]] = {
    "system": "System",
    "developer": "System",
    "user": "User",
    "assistant": "Assistant",
    "tool": "Tool",
    "function": "Tool",
}
_SEEN: Final[Mapping[type[Part], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
}
"""What no text can hold."""


def prompt_of(request: GenerateRequest, renderer: Renderer | None) -> str:
    """The text for the model: of a conversation, or the first prompt.

    Raises Unsupported for token ids, and ClientError when the model's template refuses.
    """
    if _is_raw(request):
        return _text(request)
    request = _conversation(request)
    if renderer is not None:
        return renderer.render_prompt(request)
    match request.messages:
        case (Message("user") as alone,):
            return _said(alone)
        case _:
            return _plain(request)


def rendering_losses(
    request: GenerateRequest, renderer: Renderer | None, names: Mapping[str, str]
) -> tuple[Loss, ...]:
    """What the prompt can't tell of the conversation; ``names`` as from ``Dialect.names``.

    It judges the paths of ``carries``, which a table of what the worker takes has to hold, too.
    """
    kinds = set()
    for message in request.messages:
        for part in message.parts:
            if type(part) in _SEEN:
                kinds.add(_SEEN[type(part)])
    if (renderer is not None and not kinds and not request.tools) or _is_raw(request):
        return ()
    path, shown = ("messages", "messages") if request.messages else ("prompts", "prompt")
    wire = names.get(path, shown)
    found = []
    if renderer is None:
        found.append(Loss(wire, "approximated", "no chat template", "messages"))
    if kinds:
        found.append(Loss(wire, "dropped", ", ".join(sorted(kinds)), "messages"))
    if request.tools:
        tools = names.get("tools", "tools")
        if renderer is None:
            found.append(Loss(tools, "dropped", path="tools"))
        else:
            found.append(Loss(tools, "approximated", "calls come back as text", "tools"))
    return tuple(found)


def carries(renderer: Renderer | None) -> dict[str, Carry]:
    """What becomes part of the prompt, or is told of by ``rendering_losses``."""
    carried = ("tools", "templating.continue_final", "templating.add_generation_prompt")
    arguments = () if renderer is None else ("templating.arguments",)
    return {path: Carry("") for path in (*carried, *arguments)}


def _is_raw(request: GenerateRequest) -> bool:
    return not request.messages and request.templating.mode != "server"


def _text(request: GenerateRequest) -> str:
    prompt = request.prompts[0] if request.prompts else ""
    if not isinstance(prompt, str):
        raise Unsupported("The model's workers take text, not token ids.", param="prompt")
    return prompt


def _conversation(request: GenerateRequest) -> GenerateRequest:
    """The request with a prompt that is to be wrapped as what a user said."""
    if request.messages:
        return request
    said = Message("user", (TextPart(_text(request)),))
    return msgspec.structs.replace(request, messages=(said,))


def _plain(request: GenerateRequest) -> str:
    lines = [f"{_SPEAKERS[message.role]}: {_said(message)}" for message in request.messages]
    how = request.templating
    if not how.continue_final and how.add_generation_prompt is not False:
        lines.append("Assistant:")
    return "\n".join(lines)


def _said(message: Message) -> str:
    """The text of a message; a call reads as in a program."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart | RefusalPart)]
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(filter(None, ("".join(texts), *calls)))
