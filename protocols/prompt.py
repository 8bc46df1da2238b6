"""Renders a conversation as one prompt, for workers that accept only text.

The model's chat template does this if there is one. Otherwise a single user message is the prompt
unchanged, and a longer conversation becomes plain lines::

    System: Be brief.
    User: Hi
    Assistant:
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from protocols.core.call_arguments import find_half_written_calls
from protocols.core.errors import UnsupportedFeature
from protocols.core.interfaces import PromptRenderer
from protocols.core.loss import (
    CONTENT_LABELS,
    ParameterSupport,
    UnsupportedParameter,
    find_lost_names,
    find_spoken_refusals,
    find_unseen_content,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    RefusalPart,
    Request,
    TextPart,
)

_ROLE_NAMES: Final[Mapping[str, str]] = {
    "system": "System",
    "developer": "System",
    "user": "User",
    "assistant": "Assistant",
    "tool": "Tool",
    "function": "Tool",
}


def build_prompt(request: GenerationRequest, renderer: PromptRenderer | None) -> str:
    """The prompt text: the rendered conversation, or the first prompt.

    Raises UnsupportedFeature for token ids, and ClientError if the chat template rejects the
    messages.
    """
    if _is_raw(request):
        return _read_prompt_text(request)
    request = _to_conversation(request)
    if renderer is not None:
        return renderer.render_prompt(request)
    match request.messages:
        case (Message("user") as message,):
            return _format_message(message)
        case _:
            return _format_conversation(request)


def require_generation(request: Request) -> GenerationRequest:
    """The request, for workers without embeddings. Raises UnsupportedFeature."""
    if isinstance(request, EmbeddingRequest):
        raise UnsupportedFeature("The model's workers do not support embeddings.")
    return request


def require_texts(request: EmbeddingRequest) -> tuple[str, ...]:
    """The inputs, for workers that take no token ids. Raises UnsupportedFeature."""
    texts = tuple(text for text in request.inputs if isinstance(text, str))
    if len(texts) < len(request.inputs):
        raise UnsupportedFeature("The model's workers take text, not token ids.", param="input")
    return texts


def find_prompt_losses(
    request: GenerationRequest, renderer: PromptRenderer | None, names: Mapping[str, str]
) -> tuple[UnsupportedParameter, ...]:
    """The losses of a conversation rendered as a prompt.

    ``names`` is the result of ``ClientAdapter.field_names``. A worker's table must also have the
    paths of ``build_prompt_support``, whose losses are reported here.
    """
    unseen = find_unseen_content(request.messages, CONTENT_LABELS)
    if renderer is not None:  # without one, calls are text
        unseen += tuple(find_half_written_calls(request))
    if (renderer is not None and not unseen and not request.tools) or _is_raw(request):
        return ()
    path, shown = ("messages", "messages") if request.messages else ("prompts", "prompt")
    wire = names.get(path, shown)
    losses = []
    if renderer is None:
        losses.append(UnsupportedParameter(wire, "approximated", "no chat template", "messages"))
    losses += unseen
    if request.tools:
        tools = names.get("tools", "tools")
        if renderer is None:
            losses.append(UnsupportedParameter(tools, "dropped", path="tools"))
        else:
            losses.append(
                UnsupportedParameter(tools, "approximated", "calls come back as text", "tools")
            )
    return tuple(losses)


def list_messages(request: GenerationRequest) -> Sequence[Message]:
    """The conversation, or a prompt as a user's message."""
    if request.messages:
        return request.messages
    prompt = request.prompts[0] if request.prompts else ""
    if not isinstance(prompt, str):
        raise UnsupportedFeature("The model's workers take text, not token ids.", param="prompt")
    return (Message("user", (TextPart(prompt),)),)


def find_conversation_losses(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """What APIs lose that have conversations with functions only, without names of speakers."""
    if len(request.prompts) > 1:
        yield UnsupportedParameter(names.get("prompts", "prompt"), "dropped", path="prompts")
    if not request.messages and request.templating.mode != "server":
        wire = names.get("prompts", "prompt")
        yield UnsupportedParameter(wire, "approximated", "as a user's message", "messages")
    yield from find_lost_names(request.messages, lambda one: one.role != "function")
    yield from find_spoken_refusals(request.messages)


def build_prompt_support(renderer: PromptRenderer | None) -> dict[str, ParameterSupport]:
    """Paths that are part of the prompt, or reported by ``find_prompt_losses``."""
    carried = ("tools", "templating.continue_final", "templating.add_generation_prompt")
    arguments = () if renderer is None else ("templating.arguments",)
    return {path: ParameterSupport("") for path in (*carried, *arguments)}


def _is_raw(request: GenerationRequest) -> bool:
    return not request.messages and request.templating.mode != "server"


def _read_prompt_text(request: GenerationRequest) -> str:
    prompt = request.prompts[0] if request.prompts else ""
    if not isinstance(prompt, str):
        raise UnsupportedFeature("The model's workers take text, not token ids.", param="prompt")
    return prompt


def _to_conversation(request: GenerationRequest) -> GenerationRequest:
    """The request with its prompt as a user message."""
    if request.messages:
        return request
    message = Message("user", (TextPart(_read_prompt_text(request)),))
    return msgspec.structs.replace(request, messages=(message,))


def _format_conversation(request: GenerationRequest) -> str:
    lines = [
        f"{_ROLE_NAMES[message.role]}: {_format_message(message)}" for message in request.messages
    ]
    how = request.templating
    if not how.continue_final and how.add_generation_prompt is not False:
        lines.append("Assistant:")
    return "\n".join(lines)


def _format_message(message: Message) -> str:
    """The text of a message; a tool call looks like a function call."""
    if not message.tool_calls and len(message.parts) == 1:
        part = message.parts[0]
        return part.text if isinstance(part, TextPart | RefusalPart) else ""
    texts = [part.text for part in message.parts if isinstance(part, TextPart | RefusalPart)]
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(filter(None, ("".join(texts), *calls)))
