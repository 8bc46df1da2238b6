"""Requests for workers, their unsupported parameters, and pass-through.

A client's own message goes to a worker as it is, with the worker's model name: the worker knows
more of the protocol than the internal request does.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols import params
from protocols.anthropic.decoder import MessageDecoder
from protocols.anthropic.params import (
    BETA_HEADER,
    DEFAULT_MAX_TOKENS,
    MESSAGE_PARAMS,
    VERSION_HEADER,
)
from protocols.anthropic.requests import VERSIONS
from protocols.chat.tools import restrict_tools
from protocols.core import loss
from protocols.core.call_arguments import (
    complete_schemas,
    find_half_written_calls,
    read_arguments,
)
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import Event, StreamEnd, TextDelta
from protocols.core.interfaces import (
    ClientRequest,
    Headers,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    ResponseDecoder,
    ResponseEncoder,
    UpstreamRequest,
)
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import LossReason, ParameterSupport, UnsupportedParameter
from protocols.core.places import locate_part
from protocols.core.request import (
    CACHE_KEY,
    AudioPart,
    ContentPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonSchemaFormat,
    KeptKeys,
    Message,
    NamedTool,
    ReasoningPart,
    Request,
    TokenizeRequest,
    Tool,
    ToolCall,
    VideoPart,
)
from protocols.core.token_counts import has_implausible_counts
from protocols.json_body import JSON_ERRORS, build_answer_error, read_fields
from protocols.params import Param, ParamTable
from protocols.passthrough import JSON_HEADERS, apply_model_settings
from protocols.passthrough_readers import NameReplacer, VerbatimStreamReader
from protocols.prompt import find_conversation_losses, list_messages, require_generation

_encode = msgspec.json.Encoder().encode
_decode_fields = JsonDecoder(dict[str, Raw]).decode
_decode_object = JsonDecoder(dict[str, Any]).decode
_decode_value = JsonDecoder().decode

MESSAGES_PATH: Final = "/v1/messages"
COUNT_PATH: Final = "/v1/messages/count_tokens"
WORKER_HEADERS: Final[Headers] = (
    ("Content-Type", "application/json"),
    (VERSION_HEADER, VERSIONS[0]),
)

WORKER_PARAMS: Final = ParamTable(
    Param("max_tokens", "stopping.max_tokens", "int", 1),
    Param("stop_sequences", "stopping.stop", "strings"),
    Param("temperature", "sampling.temperature", "float", 0, 1),
    Param("top_p", "sampling.top_p", "float", 0, 1),
    Param("top_k", "sampling.top_k", "int", 0),
)
"""The parameters of the API's first version, which also has those of sampling."""
_SUPPORT: Final[Mapping[str, ParameterSupport]] = {
    **params.build_parameter_support(WORKER_PARAMS),
    "stopping.stop": ParameterSupport("stop_sequences", reports_match=True),
    "labels.user": ParameterSupport("metadata.user_id"),
    **{
        path: ParameterSupport("")
        for path in (
            "tools", "parallel_tools", "sampling.do_sample", "reasoning.effort",
            "reasoning.budget", "reasoning.include", "templating.continue_final",
            "templating.add_generation_prompt",
        )
    },
}  # fmt: skip
_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    AudioPart: "audio",
    VideoPart: "videos",
}
_EFFORTS: Final[Mapping[str, str]] = {"minimal": "low"}
_MIN_BUDGET: Final = 1024


# --- requests -------------------------------------------------------------------------------------


def encode_request(request: Request, source: str) -> UpstreamRequest:
    """See ``protocols.core.interfaces.UpstreamAdapter``; ``source`` is this protocol's name."""
    request = require_generation(request)
    body = _build_body(request, source)
    return UpstreamRequest(MESSAGES_PATH, _encode(body), _build_headers(body))


def _build_headers(body: Mapping[str, Any]) -> Headers:
    """The headers of a request; the service wants one for messages of the system between others."""
    if any(turn["role"] == "system" for turn in body["messages"]):
        return (*WORKER_HEADERS, (BETA_HEADER, _SYSTEM_MESSAGES_BETA))
    return WORKER_HEADERS


_SYSTEM_MESSAGES_BETA: Final = "mid-conversation-system-2026-04-07"


def _build_body(request: GenerationRequest, source: str) -> dict[str, Any]:
    _refuse_foreign_files(list_messages(request))
    system, messages = _write_messages(list_messages(request))
    values = dict(request.set_fields)
    if request.sampling.do_sample is False:
        values["sampling.temperature"] = 0.0
    values.setdefault("stopping.max_tokens", DEFAULT_MAX_TOKENS)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        **params.write_params(WORKER_PARAMS, values),
        **_write_tools(request),
        **_write_reasoning(request, body_limit=values["stopping.max_tokens"]),
    }
    if stops := [stop for stop in body.pop("stop_sequences", ()) if stop.strip()]:
        body["stop_sequences"] = stops
    if system:
        body["system"] = system
    if isinstance(request.output, JsonSchemaFormat):
        form = {"type": "json_schema", "schema": request.output.schema}
        body["output_config"] = {**body.get("output_config", {}), "format": form}
    if "user" in request.labels:
        body["metadata"] = {"user_id": request.labels["user"]}
    if request.source == source:
        body = {**{name: raw for name, raw in request.extra.items() if "." not in name}, **body}
    elif CACHE_KEY in request.extra:
        body[CACHE_KEY] = request.extra[CACHE_KEY]
    if request.stream:
        body["stream"] = True
    return body


def _refuse_foreign_files(messages: Iterable[Message]) -> None:
    """Raise UnsupportedFeature for a file that only another service has."""
    for i, message in enumerate(messages):
        for k, part in enumerate(message.parts):
            if isinstance(part, FilePart) and part.file_data is None:
                text = "The model's workers do not have files of another service."
                raise UnsupportedFeature(text, param=locate_part(message, i, k))


def _write_tools(request: GenerationRequest) -> dict[str, Any]:
    choice, tools = restrict_tools(request.tool_choice, complete_schemas(request.tools))
    if not tools:
        return {}
    fields: dict[str, Any] = {"tools": list(map(_write_tool, tools))}
    match choice:
        case NamedTool(name):
            fields["tool_choice"] = {"type": "tool", "name": name}
        case "required":
            fields["tool_choice"] = {"type": "any"}
        case "auto" | "none":
            fields["tool_choice"] = {"type": choice}
        case _ if request.parallel_tools is not None:
            fields["tool_choice"] = {"type": "auto"}
        case _:
            pass
    if request.parallel_tools is not None and choice != "none":
        fields["tool_choice"]["disable_parallel_tool_use"] = not request.parallel_tools
    return fields


def _write_tool(tool: Tool) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.parameters,
        "strict": tool.strict,
        **_find_cache_mark(tool),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _write_reasoning(request: GenerationRequest, *, body_limit: int) -> dict[str, Any]:
    wanted = request.reasoning
    if wanted is None:
        return {}
    if wanted.include is False or wanted.effort == "none" or wanted.budget == 0:
        return {"thinking": {"type": "disabled"}}
    fields: dict[str, Any] = {}
    if wanted.budget is not None and wanted.budget >= _MIN_BUDGET and body_limit > _MIN_BUDGET:
        budget = min(wanted.budget, body_limit - 1)
        fields["thinking"] = {"type": "enabled", "budget_tokens": budget}
    elif wanted.effort is not None or wanted.include or wanted.budget is not None:
        fields["thinking"] = {"type": "adaptive"}
    if wanted.effort is not None:
        effort = _EFFORTS.get(wanted.effort, wanted.effort)
        fields["output_config"] = {"effort": effort}
    return fields


# --- messages -------------------------------------------------------------------------------------


def _write_messages(
    messages: Sequence[Message],
) -> tuple[str | list[dict[str, Any]], list[dict[str, Any]]]:
    """The text of the system, or its blocks if one is marked for the cache, and the turns.

    All results of one turn's tools stand in one message, which the user's next text joins.
    """
    count = next((i for i, one in enumerate(messages) if one.role not in _SYSTEM_ROLES), 0)
    system = _write_system(messages[:count])
    turns: list[dict[str, Any]] = []
    has_results = False
    ids = _CallIds()
    for message in messages[count:]:
        role = _ROLES[message.role]
        blocks = list(_write_blocks(message, ids))
        if not blocks:
            continue  # the service refuses empty messages
        if has_results and role == "user":
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
        has_results = message.role in _RESULT_ROLES
    for turn in turns:
        if len(turn["content"]) == 1 and turn["content"][0].keys() == {"type", "text"}:
            turn["content"] = turn["content"][0]["text"]
    return system, turns


def _write_system(messages: Sequence[Message]) -> str | list[dict[str, Any]]:
    ids = _CallIds()
    blocks = [block for one in messages for block in _write_blocks(one, ids)]
    if any(CACHE_KEY in block for block in blocks):
        return blocks
    return "\n\n".join(one.text for one in messages if one.text.strip())


KEPT_KEYS: Final[KeptKeys] = dict.fromkeys(
    (Message, *get_args(ContentPart), ToolCall, Tool), frozenset({CACHE_KEY})
)
"""Objects that clients of other protocols, too, mark for the prompt cache."""


def _find_cache_mark(*items: Message | ContentPart | ToolCall | Tool) -> dict[str, Any]:
    """The mark of one of these objects, as a field of a block."""
    for item in items:
        for path, value in item.extra.values.items() if item.extra is not None else ():
            if path[-1] == CACHE_KEY:
                return {CACHE_KEY: value}
    return {}


_SAFE_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNSAFE_CHARACTERS: Final = re.compile(r"[^a-zA-Z0-9_-]")


def _make_safe_id(name: str) -> str:
    """The id of a call as the service takes it: the same one in the call and in its result.

    Clients keep their own id, since the service names only its own calls.
    """
    if _SAFE_ID.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{_UNSAFE_CHARACTERS.sub('_', name)[:48]}_{digest}"


class _CallIds:
    """The ids of a conversation's calls. The service takes each only once; clients repeat them.

    Of calls with the same id, the first result is that of the first call.
    """

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._waiting: dict[str, list[str]] = {}
        """By the client's id: those of the last message's calls without a result."""

    def name_calls(self, names: Sequence[str]) -> list[str]:
        """The ids of the calls of one message, by the client's."""
        self._waiting |= {name: [] for name in names}
        return [self._name_call(name) for name in names]

    def _name_call(self, name: str) -> str:
        found, number = _make_safe_id(name), 1
        while found in self._used:
            number += 1
            found = _make_safe_id(f"{name}#{number}")
        self._used.add(found)
        self._waiting[name].append(found)
        return found

    def name_result(self, name: str) -> str:
        """The id of the call that a result is of, by the client's."""
        waiting = self._waiting.get(name)
        if not waiting:
            return _make_safe_id(name)
        return waiting.pop(0) if waiting[1:] else waiting[0]


_SYSTEM_ROLES: Final = ("system", "developer")
_RESULT_ROLES: Final = ("tool", "function")
_ROLES: Final[Mapping[str, str]] = {
    "assistant": "assistant",
    **dict.fromkeys(_SYSTEM_ROLES, "system"),
    **dict.fromkeys(("user", *_RESULT_ROLES), "user"),
}


def _write_blocks(message: Message, ids: _CallIds) -> Iterator[dict[str, Any]]:
    match message.role:
        case "tool" | "function":
            content = list(_write_parts(message.parts))
            plain = all(block["type"] == "text" for block in content)
            plain = plain and not any(CACHE_KEY in block for block in content[:-1])
            yield {
                "type": "tool_result",
                "tool_use_id": ids.name_result(message.tool_call_id or message.name or ""),
                "content": "\n".join(block["text"] for block in content) if plain else content,
                **({"is_error": True} if message.is_error else {}),
                **_find_cache_mark(message, *(message.parts if plain else ())),
            }
        case _:
            blocks = list(_write_parts(message.parts))
            names = ids.name_calls([call.id for call in message.tool_calls])
            for call, name in zip(message.tool_calls, names, strict=True):
                arguments = read_arguments(call.arguments)
                block = {"type": "tool_use", "id": name, "name": call.name}
                blocks.append({**block, "input": arguments, **_find_cache_mark(call)})
            if blocks and (mark := _find_cache_mark(message)):
                blocks[-1] = {**mark, **blocks[-1]}
            yield from blocks


def _write_parts(parts: Iterable[ContentPart]) -> Iterator[dict[str, Any]]:
    for part in parts:
        mark = _find_cache_mark(part)
        for block in _write_part(part):
            yield {**block, **mark} if mark else block


def _write_part(part: ContentPart) -> Iterator[dict[str, Any]]:
    match part:
        case ReasoningPart(redacted=str() as data):
            yield {"type": "redacted_thinking", "data": data}
        case ReasoningPart(text, str() as signature):
            yield {"type": "thinking", "thinking": text, "signature": signature}
        case ImagePart(url):
            yield {"type": "image", "source": _write_image_source(url)}
        case FilePart(file_data=str() as data):
            media_type, encoded = _split_data_url(data, "application/pdf")
            source = {"type": "base64", "media_type": media_type, "data": encoded}
            title = {} if part.filename is None else {"title": part.filename}
            yield {"type": "document", "source": source, **title}
        case ReasoningPart() | AudioPart() | VideoPart() | FilePart():
            pass  # reported as losses, or refused
        case _ if part.text.strip():  # the service refuses blank texts
            yield _write_text(part.text)
        case _:
            pass


def _write_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _write_image_source(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    media_type, data = _split_data_url(url, "image/png")
    return {"type": "base64", "media_type": media_type, "data": data}


_MEDIA_TYPE_ALIASES: Final = {"image/jpg": "image/jpeg"}
"""Names that clients write, and Anthropic refuses."""


def _split_data_url(url: str, default: str) -> tuple[str, str]:
    """The media type and the base64 data of a data URL, or of data alone."""
    head, comma, data = url.partition(",")
    if not comma:
        return default, url
    media_type = head.removeprefix("data:").partition(";")[0].lower()
    return _MEDIA_TYPE_ALIASES.get(media_type, media_type) or default, data


# --- losses ---------------------------------------------------------------------------------------


def find_unsupported_parameters(
    request: Request, names: Mapping[str, str], source: str
) -> tuple[UnsupportedParameter, ...]:
    """See ``protocols.core.interfaces.UpstreamAdapter``."""
    if not isinstance(request, GenerationRequest):
        return loss.find_unsupported_parameters(request, {}, names)
    support = dict(_SUPPORT)
    if isinstance(request.output, JsonSchemaFormat):
        support["output"] = ParameterSupport("output_config")
    if request.stopping.overflow == "error":
        support["stopping.overflow"] = ParameterSupport("")
    is_own = request.source in ("", source)
    kept = request if is_own else replace(request, extra=_remove_mark(request.extra))
    found = loss.find_unsupported_parameters(kept, support, names, extra=is_own)
    others = _find_other_losses(request, names)
    return (*found, *others, *_find_changed_keys(request, is_own=is_own))


def _remove_mark(extra: Mapping[str, Raw]) -> dict[str, Raw]:
    """The unknown fields but for a mark for the cache, which each protocol writes alike."""
    return {name: raw for name, raw in extra.items() if name != CACHE_KEY}


def _find_other_losses(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """The losses that depend on values."""
    if request.stopping.max_tokens is None:
        path = "stopping.max_tokens"
        detail = f"to {DEFAULT_MAX_TOKENS}"
        yield UnsupportedParameter(names.get(path, "max_tokens"), "defaulted", detail, path)
    if any(not stop.strip() for stop in request.stopping.stop):
        path = "stopping.stop"
        yield UnsupportedParameter(names.get(path, "stop"), "dropped", "blank", path)
    if (wanted := request.reasoning) is not None:
        if wanted.effort in _EFFORTS:
            path = "reasoning.effort"
            yield UnsupportedParameter(names.get(path, "reasoning"), "approximated", path=path)
        yield from _find_changed_budget(request, wanted.budget or 0, names)
    yield from loss.find_lost_parts(request.messages, _describe_lost_part)
    for one in loss.find_lost_parts(request.messages, _describe_image_detail):
        yield replace(one, reason="approximated")
    yield from find_conversation_losses(request, names)


def _find_changed_budget(
    request: GenerationRequest, budget: int, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    """The loss of a budget that the service does not take, or not with this limit of tokens."""
    limit = request.stopping.max_tokens or DEFAULT_MAX_TOKENS
    reason: LossReason = "approximated"
    detail = ""
    if budget >= _MIN_BUDGET:
        if budget < limit:
            return
        if limit > _MIN_BUDGET:
            reason, detail = "clamped", f"{budget} to {limit - 1}"
    if budget > 0:
        path = "reasoning.budget"
        yield UnsupportedParameter(names.get(path, "reasoning"), reason, detail, path)


def _find_changed_keys(
    request: GenerationRequest, *, is_own: bool
) -> Iterator[UnsupportedParameter]:
    """The keys of blocks, which are not written again, and half-written arguments of calls."""
    for name in request.extra:
        if "." in name and is_own:
            yield UnsupportedParameter(name, "dropped")
    yield from find_half_written_calls(request)


def _describe_lost_part(part: ContentPart) -> str | None:
    """What is not sent: also reasoning that no worker can verify."""
    match part:
        case ReasoningPart(signature=None, redacted=None):
            return loss.REASONING
        case _:
            return _UNSUPPORTED_PARTS.get(type(part))


def _describe_image_detail(part: ContentPart) -> str | None:
    """How closely the model looks at an image, if the client chose it."""
    is_chosen = isinstance(part, ImagePart) and part.detail not in (None, "auto")
    return "the detail of images" if is_chosen else None


# --- pass-through ---------------------------------------------------------------------------------


def build_passthrough(
    call: ClientRequest,
    about: ResponseContext,
    request: GenerationRequest,
    encoder: ResponseEncoder,
    *,
    clamps: bool,
) -> PassthroughRequest | None:
    """A client's own valid request for a worker. ``encoder`` writes errors in the stream.

    ``clamps``: more tokens than the model's limit become the limit. None if the request must be
    translated.
    """
    fields: dict[str, Any] = {**read_fields(call), "model": about.backend_model}
    clamped: dict[str, str] = {}
    if clamps and about.settings.max_tokens is not None:
        _clamp_tokens(fields, about.settings.max_tokens, clamped)
    if not apply_model_settings(fields, about.settings, MESSAGE_PARAMS, WORKER_PARAMS):
        return None
    kind = encoder.content_type if request.stream else "application/json"
    response_headers = (("Content-Type", kind), *encoder.headers())

    def create_reader() -> PassthroughReader:
        decoder = MessageDecoder(request)
        if request.stream:
            return _StreamReader(decoder, about.model, request)
        return _UnaryReader(decoder, about.model, request)

    return PassthroughRequest(
        request,
        UpstreamRequest(MESSAGES_PATH, _encode(fields), _build_passthrough_headers(call)),
        lambda: response_headers,
        create_reader,
        lambda: encoder,
        unsupported_parameters=tuple(
            UnsupportedParameter(name, "clamped", detail) for name, detail in clamped.items()
        ),
    )


def _clamp_tokens(fields: dict[str, Any], limit: int, clamped: dict[str, str]) -> None:
    """Limit ``max_tokens``, and the budget of thinking, which must be smaller."""
    requested = _decode_value(fields.get("max_tokens", b"null"))
    if type(requested) is not int or requested <= limit:
        return
    fields["max_tokens"] = Raw(b"%d" % limit)
    clamped["max_tokens"] = f"{requested} to {limit}"
    thinking = _decode_value(fields.get("thinking", b"null"))
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    if type(budget) is int and budget >= limit:
        if limit <= _MIN_BUDGET:
            raise UnsupportedFeature(
                f"thinking.budget_tokens must be at least {_MIN_BUDGET} and less than max_tokens, "
                f"which is limited to {limit} for this model.",
                param="thinking.budget_tokens",
            )
        fields["thinking"] = {**thinking, "budget_tokens": limit - 1}
        clamped["thinking.budget_tokens"] = f"{budget} to {limit - 1}"


def _build_passthrough_headers(call: ClientRequest) -> Headers:
    """The headers of a client's own request; the pool adds those that are forwarded."""
    version = call.headers.get(VERSION_HEADER, VERSIONS[0])
    return (*JSON_HEADERS, (VERSION_HEADER, version))


def build_count_passthrough(call: ClientRequest, about: ResponseContext) -> PassthroughRequest:
    """A client's own request for the number of tokens of a conversation."""
    fields: dict[str, Any] = {**read_fields(call), "model": about.backend_model}
    return PassthroughRequest(
        TokenizeRequest(model=about.backend_model),
        UpstreamRequest(COUNT_PATH, _encode(fields), _build_passthrough_headers(call)),
        lambda: JSON_HEADERS,
        _CountReader,
    )


class _CountReader:
    """Reads a number of tokens, which is passed on."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._chunks += pieces
        return b"", ()

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        body = b"".join(self._chunks).strip()
        try:
            _decode_object(body)
        except JSON_ERRORS as e:
            raise build_answer_error(e) from e
        return body, (StreamEnd(),)


class _UnaryReader:
    """Reads a message, which the client gets with its own name of the model."""

    def __init__(self, decoder: ResponseDecoder, model: str, request: GenerationRequest) -> None:
        self._decoder = decoder
        self._model = model
        self._request = request
        self._chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._chunks += pieces
        return b"", self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        events = self._decoder.close()
        body = b"".join(self._chunks).strip()
        if not body.startswith(b"{"):
            return None, events
        fields: dict[str, Any] = {**_decode_fields(body), "model": self._model}
        usage = _decode_value(fields.get("usage", b"{}"))
        if has_implausible_counts(usage, self._request):
            fields["usage"] = {"input_tokens": 0, "output_tokens": _estimate_tokens(events)}
        return _encode(fields), events


class _StreamReader(VerbatimStreamReader):
    """Reads a stream, of which only the first event names the model."""

    def __init__(self, decoder: ResponseDecoder, model: str, request: GenerationRequest) -> None:
        super().__init__(decoder, NameReplacer({"model": model}), self._correct_usage)
        self._request = request
        self._token_count = 0

    def _write(self, block: bytes, events: Sequence[Event]) -> bytes:
        if events:
            self._decoder.feed(b"")  # raises an error that follows the events of this block
        self._token_count += _estimate_tokens(events)
        lines = [line for line in block.splitlines() if line.startswith((b"event:", b"data:"))]
        event = b"\n".join(lines)
        if b'"message_start"' in event:
            event = self._names.replace(event)
        if b'"usage"' in event:
            event = self._correct_counts(event, events)
        return event + b"\n\n" if lines else b""

    def _correct_usage(self, event: bytes, events: Sequence[Event]) -> bytes:
        """The event with the gateway's own counts, if the worker's are implausible."""
        del events
        head, _, payload = event.partition(b"data:")
        fields = _decode_object(payload)
        message = fields.get("message")
        holder = message if isinstance(message, dict) else fields
        if "usage" not in holder or not has_implausible_counts(holder["usage"], self._request):
            return event
        holder["usage"] = {"input_tokens": 0, "output_tokens": self._token_count}
        return b"%bdata: %b" % (head, _encode(fields))


def _estimate_tokens(events: Sequence[Event]) -> int:
    """The tokens of the texts in these events: at least one for each four characters."""
    return sum(
        max(event.tokens, math.ceil(len(event.text) / 4))
        for event in events
        if type(event) is TextDelta
    )
