"""Requests for workers, their unsupported parameters, and pass-through.

A client's own request goes to a worker as it is, with the worker's model name: the worker knows
more of the protocol than the internal request does. Other requests are written anew. What this API
lacks and the gateway can do itself (several answers, more stop sequences) is reported as such.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import asdict, replace

from protocols import params
from protocols.chat.messages import MessageStyle, write_messages
from protocols.chat.rerank import write_rerank
from protocols.chat.tools import restrict_tools, write_tools
from protocols.cohere.decoder import ChatDecoder
from protocols.cohere.params import CHAT_PARAMS, MAX_STOP_SEQUENCES, WORKER_PARAMS
from protocols.cohere.requests import (
    CITATION_OPTIONS,
    DOCUMENTS,
    is_without_citations,
    take_documents,
)
from protocols.core import loss
from protocols.core.call_arguments import complete_schemas
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import (
    ParameterSupport,
    UnsupportedParameter,
    find_lost_reasoning,
    find_unseen_content,
)
from protocols.core.request import (
    AnyRequest,
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    RerankRequest,
    Tool,
    VideoPart,
)
from protocols.json_body import JSON_ERRORS, read_fields
from protocols.passthrough import JSON_HEADERS, apply_model_settings
from protocols.passthrough_readers import NameReplacer, UnaryPassthroughReader, VerbatimStreamReader
from protocols.prompt import find_conversation_losses, list_messages, require_generation

_encode = msgspec.json.Encoder().encode
_decode_object = JsonDecoder(dict[str, Any]).decode

CHAT_PATH: Final = "/v2/chat"
RERANK_PATH: Final = "/v2/rerank"
_SUPPORT: Final[Mapping[str, ParameterSupport]] = {
    **params.build_parameter_support(WORKER_PARAMS),
    "logprobs.top": ParameterSupport("logprobs", 0, 0),
    **dict.fromkeys(
        ("tools", "sampling.do_sample", "stopping.overflow", "reasoning.effort",
         "reasoning.budget", "reasoning.include"),
        ParameterSupport(""),
    ),
}  # fmt: skip
_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    AudioPart: "audio",
    FilePart: "files",
    VideoPart: "videos",
}
_STYLE: Final = MessageStyle(role_mapping=(("developer", "system"), ("function", "tool")))


# --- requests -------------------------------------------------------------------------------------


def encode_request(request: AnyRequest, source: str) -> UpstreamRequest:
    """See ``protocols.core.interfaces.UpstreamAdapter``; ``source`` is this protocol's name."""
    if isinstance(request, RerankRequest):
        return UpstreamRequest(RERANK_PATH, _encode(_write_rerank(request, source)), JSON_HEADERS)
    body = _write_chat(require_generation(request), source)  # type: ignore[arg-type]
    return UpstreamRequest(CHAT_PATH, _encode(body), JSON_HEADERS)


def _write_rerank(request: RerankRequest, source: str) -> dict[str, Any]:
    if len(request.queries) > 1:
        text = "The model's workers compare one text with several, not pairs of texts."
        raise UnsupportedFeature(text, param="text_1")
    _, body = write_rerank(request)
    if request.priority is not None:
        body["priority"] = request.priority
    return body | (dict(request.extra) if request.source == source else {})


def _write_chat(request: GenerationRequest, source: str) -> dict[str, Any]:
    messages, documents = take_documents(list_messages(request))
    values = dict(request.set_fields)
    if request.sampling.do_sample is False:
        values["sampling.temperature"] = 0.0
    if len(request.stopping.stop) > MAX_STOP_SEQUENCES:
        del values["stopping.stop"]  # the gateway looks for them
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_write_message(one) for one in write_messages(messages, _STYLE)],
        **params.write_params(WORKER_PARAMS, values),
        **_write_tools(request),
        **_write_thinking(request),
    }
    if documents:
        body[DOCUMENTS] = documents
    if isinstance(request.output, JsonSchemaFormat):
        body["response_format"] = {"type": "json_object", "json_schema": request.output.schema}
    elif isinstance(request.output, JsonObjectFormat):
        body["response_format"] = {"type": "json_object"}
    if request.logprobs is not None:
        body["logprobs"] = True
    if request.stream:
        body["stream"] = True
    if request.source == source:
        extra = {name: raw for name, raw in request.extra.items() if "." not in name}
        if is_without_citations(request):
            extra[CITATION_OPTIONS] = Raw(b'{"mode":"OFF"}')
        body = {**extra, **body}
    return body


def _write_message(wire: Any) -> dict[str, Any]:
    """A message in this API's form; ``wire`` is one in OpenAI's.

    An assistant's text before calls is its plan, unless it has more than text.
    """
    fields: dict[str, Any] = (
        wire
        if isinstance(wire, dict)
        else {name: value for name, value in asdict(wire).items() if value is not UNSET}
    )
    name = fields.pop("name", None)
    if fields["role"] == "tool":
        fields.setdefault("tool_call_id", name or "")
    if fields["role"] != "assistant":
        return fields
    content = fields.pop("content", None)
    blocks = _write_text(content) if isinstance(content, str) else list(content or ())
    blocks += _write_text(fields.pop("refusal", ""))
    if thought := fields.pop("reasoning_content", ""):
        blocks.insert(0, {"type": "thinking", "thinking": thought})
    is_plain = all(block.keys() == {"type", "text"} for block in blocks)
    text = "".join(block["text"] for block in blocks) if is_plain else ""
    if not is_plain:
        fields["content"] = blocks
    elif not fields.get("tool_calls"):
        fields["content"] = text
    elif text:
        fields["tool_plan"] = text
    return fields


def _write_text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _select_tools(request: GenerationRequest) -> tuple[Any, tuple[Tool, ...]]:
    """The choice and the tools: to call one of them is to be offered no other."""
    choice, tools = restrict_tools(request.tool_choice, complete_schemas(request.tools))
    if isinstance(choice, NamedTool):
        return "required", tuple(tool for tool in tools if tool.name == choice.name)
    return choice, tools


def _write_tools(request: GenerationRequest) -> dict[str, Any]:
    choice, tools = _select_tools(request)
    if not tools:
        return {}
    fields: dict[str, Any] = {"tools": write_tools([replace(tool, strict=None) for tool in tools])}
    if choice in ("required", "none"):
        fields["tool_choice"] = choice.upper()
    if all(tool.strict for tool in tools):
        fields["strict_tools"] = True
    return fields


def _write_thinking(request: GenerationRequest) -> dict[str, Any]:
    wanted = request.reasoning
    if wanted is None:
        return {}
    if wanted.include is False or wanted.effort == "none" or wanted.budget == 0:
        return {"thinking": {"type": "disabled"}}
    budget = {} if wanted.budget is None else {"token_budget": wanted.budget}
    return {"thinking": {"type": "enabled", **budget}}


# --- losses ---------------------------------------------------------------------------------------


def find_unsupported_parameters(
    request: AnyRequest, names: Mapping[str, str], source: str
) -> tuple[UnsupportedParameter, ...]:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    is_own = request.source in ("", source)
    if not isinstance(request, GenerationRequest):
        support = {"priority": ParameterSupport("priority")}
        return loss.find_unsupported_parameters(request, support, names, extra=is_own)
    support = dict(_SUPPORT)
    if isinstance(request.output, JsonObjectFormat | JsonSchemaFormat):
        support["output"] = ParameterSupport("response_format")
    if len(request.stopping.stop) > MAX_STOP_SEQUENCES:
        del support["stopping.stop"]
    if request.stopping.overflow == "truncate":
        del support["stopping.overflow"]
    return (
        *loss.find_unsupported_parameters(request, support, names, extra=is_own),
        *find_unseen_content(request.messages, _UNSUPPORTED_PARTS),
        *find_lost_reasoning(request.messages, sends_text=True),
        *_find_other_losses(request, names),
        *(
            UnsupportedParameter(name, "dropped")
            for name in request.extra
            if is_own and "." in name
        ),
    )


def _find_other_losses(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """The losses that depend on values."""
    strict = {bool(tool.strict) for tool in _select_tools(request)[1]}
    if len(strict) > 1:
        yield UnsupportedParameter(names.get("tools", "tools"), "approximated", "strict", "tools")
    wanted = request.reasoning
    if wanted is not None and wanted.budget is None and wanted.effort not in (None, "none"):
        path = "reasoning.effort"
        yield UnsupportedParameter(names.get(path, "reasoning"), "approximated", path=path)
    yield from find_conversation_losses(request, names)


# --- pass-through ---------------------------------------------------------------------------------


def build_passthrough(
    call: ClientRequest,
    about: ResponseContext,
    request: GenerationRequest,
    encoder: ResponseEncoder,
) -> PassthroughRequest | None:
    """A client's own valid request for a worker. ``encoder`` writes errors in the stream.

    None if the request must be translated.
    """
    fields: dict[str, Any] = {**read_fields(call), "model": about.backend_model}
    if not apply_model_settings(fields, about.settings, CHAT_PARAMS, WORKER_PARAMS):
        return None
    kind = encoder.content_type if request.stream else "application/json"
    response_headers: Headers = (("Content-Type", kind), *encoder.headers())

    def create_reader() -> PassthroughReader:
        decoder = ChatDecoder(request)

        def correct_counts(data: bytes, events: Sequence[Event]) -> bytes:
            del events
            return _leave_out_usage(data) if decoder.has_ignored_usage else data

        if request.stream:
            return _StreamReader(decoder, NameReplacer({}), correct_counts)
        return UnaryPassthroughReader(decoder, NameReplacer({}))

    return PassthroughRequest(
        request,
        UpstreamRequest(CHAT_PATH, _encode(fields), JSON_HEADERS),
        lambda: response_headers,
        create_reader,
        lambda: encoder,
    )


class _StreamReader(VerbatimStreamReader):
    """Reads a stream whose events have names."""

    line_prefixes = (b"event:", b"data:")


def _leave_out_usage(data: bytes) -> bytes:
    """The end of a stream without its token counts, which are implausible."""
    head, mark, payload = data.partition(b"data:")
    try:
        fields = _decode_object(payload)
    except JSON_ERRORS:
        return data
    if isinstance(delta := fields.get("delta"), dict):
        delta.pop("usage", None)
    return b"%b%b %b" % (head, mark, _encode(fields))
