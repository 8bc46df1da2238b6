"""Requests for workers that speak the Responses API: translated, or a client's own.

The worker stores nothing: the gateway sends the whole conversation with ``store: false``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocols import params
from protocols.chat.params import EXTENSION_PARAMS, REASONING_EFFORTS
from protocols.chat.tools import restrict_tools
from protocols.chat.upstream import WorkerProfile, wrap_prompt
from protocols.core.call_arguments import complete_schemas
from protocols.core.errors import ClientError
from protocols.core.events import Event
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.json_text import decode_json
from protocols.core.loss import (
    ParameterSupport,
    UnsupportedParameter,
    find_lost_names,
    find_lost_reasoning,
    find_unseen_content,
    find_unsupported_parameters,
)
from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    OutputFormat,
    ReasoningPart,
    RefusalPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    VideoPart,
)
from protocols.json_body import JSON_ERRORS, pop_fields
from protocols.openai.responses_api.decoder import ResponsesDecoder
from protocols.openai.responses_api.items import Item, open_reasoning
from protocols.openai.responses_api.params import (
    INCLUDE_LOGPROBS,
    INCLUDE_REASONING,
    RESPONSES_PARAMS,
)
from protocols.openai.responses_api.requests import (
    SOURCE,
    References,
    ResponsesRequest,
    read_request,
)
from protocols.params import Param, ParamTable
from protocols.passthrough import apply_model_settings

_encode = msgspec.json.Encoder().encode

_JSON_HEADERS: Final[Headers] = (("Content-Type", "application/json"),)
_MAX_LOGPROBS: Final = 20
_BASE_PARAMS: Final = (
    Param("max_output_tokens", "stopping.max_tokens", "int"),
    Param("temperature", "sampling.temperature", "float", minimum=0, maximum=2),
    Param("top_p", "sampling.top_p", "float", minimum=0, maximum=1),
    Param("parallel_tool_calls", "parallel_tools", "bool"),
)
_EXTENSIONS: Final = ("top_k", "min_p", "repetition_penalty", "include_stop_str_in_output")
_OPEN_PARAMS: Final = (
    *_BASE_PARAMS,
    *(param for param in EXTENSION_PARAMS if param.wire in _EXTENSIONS),
    Param("stop", "stopping.stop", "strings"),
    Param("seed", "sampling.seed", "int", minimum=-(2**63), maximum=2**63 - 1),
    *(
        Param(name, f"sampling.{name}", "float", minimum=-2, maximum=2)
        for name in ("presence_penalty", "frequency_penalty")
    ),
)
"""The parameters of workers other than OpenAI's own. Source: vLLM 0.32."""
_LABELS: Final = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_LABEL_PATHS: Final = [f"labels.{name}" for name in (*_LABELS, "metadata")]
_UNSENT_PARTS: Final[Mapping[type[ContentPart], str]] = {VideoPart: "videos"}
_TOOL_PREFIX: Final = "tools."
_CHAT_SOURCE: Final = "openai"
SHARED_FIELDS: Final = {"service_tier": "service_tier", "text.verbosity": "verbosity"}
"""Fields of this API that chat completions have, too, and their names there."""
_ITEM_PREFIXES: Final = ("input", "previous_response_id[", "text.format.", "tools[", "tool_choice.")
_GATEWAY_FIELDS: Final = frozenset(
    {"model", "input", "store", "previous_response_id", "stream_options"}
)
"""Fields of a client's own body that a worker does not get, or gets from the gateway."""


class ResponsesRequestWriter:
    """Encodes requests for the workers of one profile, under one path prefix."""

    def __init__(self, profile: WorkerProfile, prefix: str) -> None:
        self._is_original = "safety_identifier" in profile.labels
        """Whether workers are OpenAI's own: they have hosted tools, but no further parameters."""
        self._path = f"{prefix}/responses"
        self._params = ParamTable(*(_BASE_PARAMS if self._is_original else _OPEN_PARAMS))
        self._support = {
            **params.build_parameter_support(self._params),
            "tools": ParameterSupport("tools"),
            "logprobs.top": ParameterSupport("top_logprobs", 0, _MAX_LOGPROBS),
            "reasoning.effort": ParameterSupport("reasoning"),
        }

    def unsupported_parameters(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> tuple[UnsupportedParameter, ...]:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        support = dict(self._support)
        if self._is_original:
            support |= dict.fromkeys(_LABEL_PATHS, ParameterSupport(""))
        if _write_format(request.output) is not None:
            support["output"] = ParameterSupport("text", takes_description=True)
        if request.stopping.overflow == "error" or self._is_original:
            support["stopping.overflow"] = ParameterSupport("truncation")
        losses = find_unsupported_parameters(request, support, names, extra=True)
        return (*losses, *self._find_other_losses(request, names))

    def _find_other_losses(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> Iterator[UnsupportedParameter]:
        for name in request.extra:
            is_own = request.source == SOURCE and not name.startswith(_ITEM_PREFIXES)
            is_shared = request.source == _CHAT_SOURCE and name in SHARED_FIELDS.values()
            if not (is_own or is_shared):
                yield UnsupportedParameter(name, "dropped")
        yield from find_unseen_content(request.messages, _UNSENT_PARTS)
        if len(request.prompts) > 1:
            yield UnsupportedParameter(names.get("prompts", "prompt"), "dropped", path="prompts")
        yield from find_lost_names(request.messages, lambda _: True)
        yield from find_lost_reasoning(request.messages, sends_text=True)

    def encode_request(self, request: GenerationRequest) -> UpstreamRequest:
        """See ``protocols.core.interfaces.UpstreamAdapter``."""
        choice, tools = restrict_tools(request.tool_choice, complete_schemas(request.tools))
        body: dict[str, Any] = {
            "model": request.model,
            "input": list(write_items(request.messages or wrap_prompt(request))),
            **params.write_params(self._params, request.set_fields),
            "store": False,
        }
        if request.stream:
            body["stream"] = True
        if tools:
            body["tools"] = [_write_tool(tool) for tool in tools]
            if choice is not None:
                body["tool_choice"] = _write_choice(choice, tools)
        else:
            body.pop("parallel_tool_calls", None)
        form = _write_format(request.output)
        if form is not None:
            body["text"] = {"format": form}
        if request.reasoning is not None and request.reasoning.effort in REASONING_EFFORTS:
            body["reasoning"] = {"effort": request.reasoning.effort}
        if request.logprobs is not None:
            body["include"] = [INCLUDE_LOGPROBS]
            body["top_logprobs"] = min(max(request.logprobs.top, 0), _MAX_LOGPROBS)
        if request.stopping.overflow == "truncate" and self._is_original:
            body["truncation"] = "auto"
        self._write_labels(request, body)
        if request.source == SOURCE:
            _write_extra(request.extra, body)
        elif request.source == _CHAT_SOURCE:
            sent = request.extra
            _write_extra({path: sent[n] for path, n in SHARED_FIELDS.items() if n in sent}, body)
        return UpstreamRequest(self._path, _encode(body), _JSON_HEADERS)

    def _write_labels(self, request: GenerationRequest, body: dict[str, Any]) -> None:
        if not self._is_original:
            return
        body |= {name: request.labels[name] for name in _LABELS if name in request.labels}
        metadata = {
            name.removeprefix("metadata."): text
            for name, text in request.labels.items()
            if name.startswith("metadata.")
        }
        if metadata:
            body["metadata"] = metadata

    # --- pass-through -----------------------------------------------------------------------------

    def prepare_passthrough(
        self,
        call: ClientRequest,
        references: References,
        about: ResponseContext,
        create_encoder: Callable[[ResponsesRequest], ResponseEncoder],
        build_headers: Callable[[], Headers],
    ) -> PassthroughRequest | None:
        """A client's own request for a worker; None if it must be translated.

        The response is decoded and written anew, with the gateway's own ids. ``build_headers``
        returns the headers of a stream.
        """
        try:
            decoded = read_request(pop_fields(call), references, allows_hosted=True)
        except (*JSON_ERRORS, ClientError):
            return None
        is_understood = _has_own_params if self._is_original else _has_common_features
        if not is_understood(decoded):
            return None
        request = decoded.request.bind_target(about.backend_model, SOURCE, about.context_length)
        body = self._write_own(decoded, request)
        if not apply_model_settings(body, about.settings, RESPONSES_PARAMS, self._params):
            return None
        return PassthroughRequest(
            request,
            UpstreamRequest(self._path, _encode(body), _JSON_HEADERS),
            build_headers,
            partial(ResponsesPassthroughReader, request),
            partial(create_encoder, decoded),
            encodes_events=True,
        )

    def _write_own(self, decoded: ResponsesRequest, request: GenerationRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            name: raw for name, raw in decoded.fields.items() if name not in _GATEWAY_FIELDS
        }
        body["model"] = request.model
        items = (*decoded.history, *decoded.input)
        body["input"] = [_open_item(item) for item in items]
        body["store"] = False
        if INCLUDE_REASONING not in decoded.include or self._is_original:
            return body
        body["include"] = [name for name in decoded.include if name == INCLUDE_LOGPROBS]
        return body


class ResponsesPassthroughReader:
    """Decodes a worker's response to a client's own request; an encoder writes it anew."""

    def __init__(self, request: GenerationRequest) -> None:
        self._decoder: ResponseDecoder = ResponsesDecoder(request)

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        return None, self._decoder.close()


_FOREIGN_PARAMS: Final = frozenset(
    {"stop", "seed", "presence_penalty", "frequency_penalty"}
    | {param.wire for param in EXTENSION_PARAMS}
)
"""Parameters that OpenAI's own Responses API does not have."""
_COMMON_TOOLS: Final = frozenset({"function", "custom"})


def _has_own_params(decoded: ResponsesRequest) -> bool:
    """Whether OpenAI's own workers understand the request as it is."""
    return _FOREIGN_PARAMS.isdisjoint(decoded.fields)


def _has_common_features(decoded: ResponsesRequest) -> bool:
    """Whether workers other than OpenAI's own understand the request as it is."""
    request = decoded.request
    if request.extra.keys() & decoded.tools.dropped_tools.keys():
        return False
    if any(
        item.get("type") in ("additional_tools", "tool_search_output") for item in decoded.input
    ):
        return False
    tools = decode_json(decoded.fields.get("tools", b"[]"))
    return all(
        tool["type"] in _COMMON_TOOLS and "grammar" not in str(tool.get("format")) for tool in tools
    )


def _open_item(item: Item) -> Item:
    """An item whose sealed reasoning is in clear: the worker can't open what the gateway sealed."""
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str):
        return {name: value for name, value in item.items() if value is not None}
    part = open_reasoning(sealed)
    if part is None:
        return item
    opened = {name: value for name, value in item.items() if name != "encrypted_content"}
    if not opened.get("content"):
        opened["content"] = [{"type": "reasoning_text", "text": part.text}]
    return opened


# --- items ----------------------------------------------------------------------------------------


def write_items(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """The messages as input items."""
    kinds = {call.id: call.kind for message in messages for call in message.tool_calls}
    for number, message in enumerate(messages):
        if message.role == "assistant":
            yield from _write_assistant(message, number)
        elif message.tool_call_id is not None:
            is_custom = kinds.get(message.tool_call_id) == "custom"
            kind = "custom_tool_call_output" if is_custom else "function_call_output"
            output = _write_content(message.parts)
            yield {"type": kind, "call_id": message.tool_call_id, "output": output}
        else:
            role = "user" if message.role in ("tool", "function") else message.role
            yield {"type": "message", "role": role, "content": _write_content(message.parts)}


def _write_assistant(message: Message, number: int) -> Iterator[Mapping[str, Any]]:
    """Reasoning, text and calls of one message, each an item."""
    reasoning = [part.text for part in message.parts if isinstance(part, ReasoningPart)]
    if any(reasoning):
        content = [{"type": "reasoning_text", "text": text} for text in reasoning if text]
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content}
    parts: list[Mapping[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append({"type": "output_text", "text": part.text, "annotations": []})
        elif isinstance(part, RefusalPart):
            parts.append({"type": "refusal", "refusal": part.text})
    if parts or not (message.tool_calls or reasoning):
        yield {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": "completed",
            "content": parts,
        }
    for call in message.tool_calls:
        yield _write_call(call)


def _write_call(call: ToolCall) -> Mapping[str, Any]:
    fields = {"call_id": call.id, "name": call.name}
    if call.kind == "custom":
        return {"type": "custom_tool_call", **fields, "input": call.arguments}
    return {"type": "function_call", **fields, "arguments": call.arguments}


def _write_content(parts: Sequence[ContentPart]) -> str | list[Mapping[str, Any]]:
    """The content of a user's or system's message, or of a call's output."""
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return parts[0].text
    return [one for part in parts if (one := _write_part(part)) is not None]


def _write_part(part: ContentPart) -> Mapping[str, Any] | None:
    match part:
        case TextPart(text):
            return {"type": "input_text", "text": text}
        case ImagePart(url, detail):
            return {"type": "input_image", "image_url": url, "detail": detail or "auto"}
        case FilePart():
            names = ("file_id", "file_data", "filename")
            file = {name: value for name in names if (value := getattr(part, name)) is not None}
            return {"type": "input_file", **file}
        case AudioPart(data, form):
            return {"type": "input_audio", "input_audio": {"data": data, "format": form or "wav"}}
        case _:
            return None


def _write_tool(tool: Tool) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"type": tool.kind, "name": tool.name}
    if tool.description is not None:
        fields["description"] = tool.description
    if tool.kind == "custom":
        form = tool.parameters
        return fields if form is None else {**fields, "format": _flatten(form)}
    return fields | {"parameters": tool.parameters, "strict": bool(tool.strict)}


def _flatten(form: Raw) -> Mapping[str, Any]:
    """A custom tool's format: its grammar stands beside ``type`` in this API."""
    fields: dict[str, Any] = decode_json(form)
    grammar = fields.pop("grammar", None)
    return fields | grammar if isinstance(grammar, dict) else fields


def _write_choice(choice: ToolChoice, tools: Sequence[Tool]) -> Any:
    if not isinstance(choice, NamedTool):
        return choice
    kinds = {tool.name: tool.kind for tool in tools}
    return {"type": kinds.get(choice.name, "function"), "name": choice.name}


def _write_format(output: OutputFormat | None) -> Mapping[str, Any] | None:
    """``text.format``; None if it can't express the format."""
    match output:
        case JsonObjectFormat():
            return {"type": "json_object"}
        case JsonSchemaFormat(schema, name, description, strict):
            fields = {"name": name, "description": description, "schema": schema, "strict": strict}
            return {"type": "json_schema"} | {k: v for k, v in fields.items() if v is not None}
        case _:
            return None


def _write_extra(extra: Mapping[str, Raw], body: dict[str, Any]) -> None:
    """Fields that only this API has, each in its place."""
    for name, raw in extra.items():
        section, _, key = name.partition(".")
        if name.startswith(_ITEM_PREFIXES):
            continue  # reported
        if name.startswith(_TOOL_PREFIX):
            body.setdefault("tools", []).append(raw)
        elif not key:
            body.setdefault(name, raw)
        else:
            body[section] = {**body.get(section, {}), key: raw}
