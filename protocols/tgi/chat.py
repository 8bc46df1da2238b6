"""Conversations for ``/v1/chat/completions``, and what can't be asked there.

They are written as for any worker that speaks OpenAI's words. What this server refuses, or takes
for something else, is said otherwise here, or left out and told of.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from protocols.core.interfaces import ResponseDecoder, UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    ReasoningPart,
    RefusalPart,
    TextPart,
    Tool,
    VideoPart,
)
from protocols.openai.decoder import GenerationDecoder
from protocols.openai.worker import RequestWriter
from protocols.tgi.faults import raise_worker_error
from protocols.tgi.tables import CHAT_PROFILE, TgiLimits

_CHAT_WRITER: Final = RequestWriter(CHAT_PROFILE, "/v1", powers=False)
_EMPTY_PARAMETERS: Final = Raw(b'{"type":"object","properties":{}}')
"""The parameters of a tool that has none; a server can't read a tool without any."""
_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    AudioPart: "audio",
    FilePart: "files",
    ReasoningPart: "earlier reasoning",
    VideoPart: "videos",
}


def encode_chat_request(request: GenerationRequest, limits: TgiLimits) -> UpstreamRequest:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    return _CHAT_WRITER.encode_request(_adapt_chat_request(request, limits))


def create_chat_decoder(request: GenerationRequest) -> ResponseDecoder:
    """What reads the answer. A stream that calls a tool ends without a finish reason."""
    return GenerationDecoder(request, complaint=raise_worker_error, ends_calls=True)


def find_unsupported_chat_parameters(
    request: GenerationRequest, limits: TgiLimits, names: Mapping[str, str]
) -> tuple[UnsupportedParameter, ...]:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    return (
        *_CHAT_WRITER.unsupported_parameters(_adapt_chat_request(request, limits), names),
        *_iter_unsupported_fields(request, names),
    )


def _iter_unsupported_fields(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """What ``_plain`` takes away that was meant."""
    for name in request.extra:
        yield UnsupportedParameter(name, "dropped")
    if request.sampling.logit_bias is not None:
        path = "sampling.logit_bias"
        yield UnsupportedParameter(names.get(path, "logit_bias"), "dropped", path=path)
    if request.output is not None and _has_callable_tools(request):
        wire = names.get("output", "response_format")
        yield UnsupportedParameter(wire, "dropped", "not beside tools", "output")
    unseen = {
        _UNSUPPORTED_PARTS[type(p)]
        for m in request.messages
        for p in m.parts
        if type(p) in _UNSUPPORTED_PARTS
    }
    if any(message.tool_calls and message.text for message in request.messages):
        unseen.add("text beside tool calls")
    if unseen:
        wire = names.get("messages", "messages")
        yield UnsupportedParameter(wire, "dropped", ", ".join(sorted(unseen)), "messages")


def _adapt_chat_request(request: GenerationRequest, limits: TgiLimits) -> GenerationRequest:
    """The request as this server reads it.

    Greedy is temperature 0 alone: a share of the probability would make it a draw. A seed has 63
    bits on the way there, and 64 are folded into them, so that the same one still gives the same
    answer. ``max_tokens`` has had no other name in all releases.
    """
    sampling, stopping = request.sampling, request.stopping
    greedy = sampling.do_sample is False or sampling.temperature == 0
    whole = sampling.top_p is not None and sampling.top_p >= 1
    offers = _has_callable_tools(request)
    return replace(
        request,
        n=None if request.n == 1 else request.n,
        messages=tuple(map(_adapt_message, request.messages)),
        sampling=replace(
            sampling,
            top_p=None if greedy or whole else sampling.top_p,
            seed=None if sampling.seed is None else sampling.seed % 2**63,
            logit_bias=None,
        ),
        stopping=replace(stopping, stop=stopping.stop[: limits.max_stop_strings]),
        tools=tuple(map(_add_parameters_schema, request.tools)) if offers else (),
        tool_choice=request.tool_choice if offers else None,
        output=None if offers else request.output,
        given=frozenset(),
        extra={},
    )


def _has_callable_tools(request: GenerationRequest) -> bool:
    """Whether there are tools to call; with ``none`` the model is not told of any."""
    return bool(request.tools) and request.tool_choice != "none"


def _add_parameters_schema(tool: Tool) -> Tool:
    return tool if tool.parameters is not None else replace(tool, parameters=_EMPTY_PARAMETERS)


def _adapt_message(message: Message) -> Message:
    """A turn has either content or calls, and its content is text and images."""
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls:
        return replace(message, role=role, parts=())
    parts = [TextPart(p.text) if isinstance(p, RefusalPart) else p for p in message.parts]
    kept = tuple(part for part in parts if isinstance(part, TextPart | ImagePart))
    return replace(message, role=role, parts=kept or (TextPart(""),))
