"""Decodes chat, generate and embeddings requests.

A field that no target can honour is kept in ``extra`` and therefore reported as a loss. Source:
ollama 0.9, api/types.go and server/routes.go.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from protocols import params
from protocols.chat.params import (
    NULL,
    as_array,
    as_object,
    invalid_type_error,
    missing_error,
    null_to_none,
)
from protocols.chat.tools import read_tools
from protocols.core.catalog import ModelInfo, ModelTask
from protocols.core.errors import InvalidParameter, UnsupportedFeature
from protocols.core.extra import KeyTree, add_unknown_keys
from protocols.core.request import (
    ContentPart,
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    OutputFormat,
    PromptOptions,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCall,
)
from protocols.json_body import decode_value
from protocols.ollama.params import CHAT_PARAMS, EMBEDDING_PARAMS, REQUEST_PARAMS, read_options
from protocols.params import ParamTable, ParsedParams

Fields = Mapping[str, Raw]
_encode = msgspec.json.Encoder().encode
_FORMAT_NAME: Final = "response"

# --- capabilities ---------------------------------------------------------------------------------

MODEL_OPTIONS: Final[Mapping[str, type]] = {
    "tools": bool,
    "insert": bool,
    "vision": bool,
    "thinking": bool,
}
"""Settings of a model: what it can do."""


class Capabilities(Struct, frozen=True):
    """What a model can do. Without settings it calls tools, and whether it takes images is open."""

    task: ModelTask
    tools: bool = True
    insert: bool = False
    vision: bool | None = None
    thinking: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Their names on the wire."""
        if self.task != "chat":
            return (self.task,)
        return ("completion", *(name for name in MODEL_OPTIONS if getattr(self, name)))


def get_capabilities(model: ModelInfo, protocol: str) -> Capabilities:
    """The capabilities of a model, by its settings for ``protocol``."""
    return Capabilities(model.task, **model.protocol_options.get(protocol, {}))


class _Target(Struct, frozen=True):
    """The target model, under the name that the client sent; None if it is not known."""

    name: str
    capabilities: Capabilities | None

    def can(self, name: str) -> bool:
        """Whether the model can do this, or may be able to."""
        return self.capabilities is None or getattr(self.capabilities, name) is not False

    def require(self, name: str) -> None:
        """Raises UnsupportedFeature if the model can't do this."""
        if not self.can(name):
            raise UnsupportedFeature(f"{self.name} does not support {name}")

    def require_task(self, task: ModelTask, name: str) -> None:
        """Raises UnsupportedFeature if the model has another task; ``name`` is that of this one."""
        if self.capabilities is not None and self.capabilities.task != task:
            raise UnsupportedFeature(f'"{self.name}" does not support {name}')


# --- chat and generate ----------------------------------------------------------------------------

_CHAT_FIELDS: Final = frozenset(
    {"model", "name", "messages", "tools", "format", "options", "think", "keep_alive"}
    | {row.wire for row in CHAT_PARAMS}
)
_GENERATE_FIELDS: Final = (_CHAT_FIELDS - {"messages", "tools"}) | {
    "prompt", "system", "suffix", "images", "raw",
}  # fmt: skip
_EMBEDDING_FIELDS: Final = frozenset(
    {"model", "input", "prompt", "options", "keep_alive"} | {row.wire for row in EMBEDDING_PARAMS}
)


def read_chat(
    fields: Fields, name: str, capabilities: Capabilities | None, *, stream: bool
) -> GenerationRequest:
    """Decode a chat request. Raises ClientError."""
    target = _Target(name, capabilities)
    target.require_task("chat", "chat")
    values, extra = _read_generation_params(fields, _CHAT_FIELDS, target, stream=stream)
    messages = _MessageReader(target, extra).read_messages(fields.get("messages"))
    tools = _read_tools(fields)
    if tools:
        target.require("tools")
    return GenerationRequest(
        model=name,
        kind="chat",
        messages=messages,
        tools=tools,
        output=_read_format(fields),
        extra=extra,
        **values.build_request_arguments(),
    )


def read_generate(
    fields: Fields, name: str, capabilities: Capabilities | None, *, stream: bool
) -> GenerationRequest:
    """Decode a generate request: a user's message, or a prompt as it is. Raises ClientError."""
    target = _Target(name, capabilities)
    target.require_task("chat", "generate")
    values, extra = _read_generation_params(fields, _GENERATE_FIELDS, target, stream=stream)
    is_raw = values.pop("request.raw", False)
    prompt, system = read_text(fields, "prompt"), read_text(fields, "system")
    suffix, images = read_text(fields, "suffix"), _read_images(fields, target, "images")
    template, context = read_text(fields, "template"), null_to_none(fields.get("context"))
    if is_raw and (template or system or context is not None):
        text = "raw mode does not support template, system, or context"
        raise InvalidParameter(text, param="raw", problem="conflict")
    if suffix:
        target.require("insert")
    shared = {
        "model": name,
        "output": _read_format(fields),
        "extra": extra,
        **values.build_request_arguments(),
    }
    if is_raw or suffix:
        if images:
            raise UnsupportedFeature("a prompt without a template takes no images", param="images")
        shared["templating"] = PromptOptions(mode="raw")
        return GenerationRequest(
            kind="completion",
            prompts=(prompt,),
            insert_before=suffix or None,
            fills_context=True,
            **shared,
        )
    messages = [Message("user", (TextPart(prompt), *images))]
    if system:
        messages.insert(0, Message("system", (TextPart(system),)))
    return GenerationRequest(kind="chat", messages=tuple(messages), **shared)


def _read_generation_params(
    fields: Fields, own_fields: Collection[str], target: _Target, *, stream: bool
) -> tuple[ParsedParams, dict[str, Raw]]:
    """The scalar parameters, and the fields without a place in the request."""
    values = params.read_params(REQUEST_PARAMS, fields)
    extra = _collect_extra(fields, own_fields)
    read_options(fields, values, extra)
    values.provided_fields = {name for name, raw in fields.items() if raw != NULL}
    values["stream"] = stream
    values["keep_alive"] = read_keep_alive(fields)
    top = values.pop("request.top_logprobs", 0)
    if values.pop("request.logprobs", False):
        values["logprobs.top"] = top
    if (truncate := values.pop("stopping.overflow", None)) is not None:
        values["stopping.overflow"] = "truncate" if truncate else "error"
    effort = _read_think(fields, target)
    if effort is not None:
        values["reasoning.effort"] = effort
    if decode_value(fields.get("think", NULL)) is False:
        values["response_options.hides_reasoning"] = True
    return values, extra


def _collect_extra(fields: Fields, own_fields: Collection[str]) -> dict[str, Raw]:
    """The fields that no target can honour."""
    return {n: raw for n, raw in fields.items() if n not in own_fields and raw != NULL}


_THINK_LEVELS: Final[Mapping[Any, str]] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "xhigh",
}


def _read_think(fields: Fields, target: _Target) -> str | None:
    """The reasoning effort, if the model reasons."""
    raw = null_to_none(fields.get("think"))
    if raw is None:
        return None
    value = decode_value(raw)
    if value is False:
        return "none" if target.can("thinking") else None
    if value is not True and (not isinstance(value, str) or value not in _THINK_LEVELS):
        shown = f'"{value[:32]}"' if isinstance(value, str) else _encode(value)[:32].decode()
        accepted = '"high", "medium", "low", "max", true, or false'
        text = f"invalid think value: {shown} (must be {accepted})"
        raise InvalidParameter(text, param="think", got=value)
    if not target.can("thinking"):
        raise UnsupportedFeature(f'"{target.name}" does not support thinking')
    return "medium" if value is True else _THINK_LEVELS[value]


def read_keep_alive(fields: Fields) -> float | None:
    """``keep_alive`` in seconds, negative for ever. Raises InvalidParameter."""
    raw = null_to_none(fields.get("keep_alive"))
    if raw is None:
        return None
    value = decode_value(raw)
    if isinstance(value, str):
        return _parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = {bool: "bool", list: "[]interface {}"}.get(type(value), "map[string]interface {}")
        raise InvalidParameter(
            f"Unsupported type: '{kind}'", param="keep_alive", problem="type", got=value
        )
    return float(min(value, _LONGEST))


_DURATION: Final = re.compile(r"[+-]?(?:[0-9]*\.?[0-9]+(?:ns|us|µs|ms|s|m|h))+|[+-]?0", re.ASCII)
_DURATION_PART: Final = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")
_UNIT_SECONDS: Final[Mapping[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "m": 60,
    "h": 3600,
}
_LONGEST: Final = 1 << 62


def _parse_duration(text: str) -> float:
    """A duration in Go's notation, such as ``1h30m``, in seconds."""
    if len(text) > 64 or not _DURATION.fullmatch(text):  # noqa: PLR2004 - no duration is longer
        message = f'time: invalid duration "{text[:64]}"'
        raise InvalidParameter(message, param="keep_alive", got=text)
    seconds = sum(float(part) * _UNIT_SECONDS[unit] for part, unit in _DURATION_PART.findall(text))
    return -seconds if text.startswith("-") else seconds


def _read_format(fields: Fields) -> OutputFormat | None:
    raw = null_to_none(fields.get("format"))
    value = "" if raw is None else decode_value(raw)
    if raw is None or value == "":
        return None
    if value == "json":
        return JsonObjectFormat()
    if isinstance(value, dict):
        return JsonSchemaFormat(raw, _FORMAT_NAME, strict=False)
    shown = bytes(raw)[:64].decode("utf-8", "replace")
    text = f'invalid format: {shown}; expected "json" or a valid JSON Schema object'
    raise InvalidParameter(text, param="format", got=value)


def _read_tools(fields: Fields) -> tuple[Tool, ...]:
    raw = null_to_none(fields.get("tools"))
    if raw is None or not as_array(raw, "tools"):
        return ()
    return read_tools(fields, kinds=("function",))


def read_text(fields: Fields, name: str) -> str:
    """A string; "" if it is absent. Raises InvalidParameter."""
    raw = null_to_none(fields.get(name))
    value = "" if raw is None else decode_value(raw)
    if not isinstance(value, str):
        raise invalid_type_error(name, "a string", value)
    return value


# --- messages -------------------------------------------------------------------------------------

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


_MESSAGE_KEYS: Final[Mapping[str, KeyTree]] = {
    **dict.fromkeys(("system", "user"), dict.fromkeys(("role", "content", "images"))),
    "assistant": dict.fromkeys(("role", "content", "images", "thinking", "tool_calls")),
    "tool": dict.fromkeys(("role", "content", "tool_name", "name", "tool_call_id")),
}
"""The keys that are read, by the message's role."""
_EMPTY_VALUES: Final = (Raw(b"[]"), Raw(b'""'))
_CALL_KEYS: Final = {
    **dict.fromkeys(("id", "type")),
    "function": dict.fromkeys(("index", "name", "arguments", "description")),
}


class _MessageReader:
    """Reads the messages, and pairs the results of tools with their calls.

    ollama-python sends neither the id of a call nor that of a result. A result belongs to the call
    with its id, else to the first open call of the tool that it names, else to the first open call.
    One without any, such as after a cut history, becomes a user's message.
    """

    def __init__(self, target: _Target, extra: dict[str, Raw]) -> None:
        self._target = target
        self._extra = extra
        self._call_count = 0
        self._open_calls: list[ToolCall] = []

    def read_messages(self, raw: Raw | None) -> tuple[Message, ...]:
        """The messages. Raises InvalidParameter."""
        items = as_array(null_to_none(raw) or Raw(b"[]"), "messages")
        return tuple(
            self._read_message(as_object(item, f"messages[{i}]"), f"messages[{i}]")
            for i, item in enumerate(items)
        )

    def _read_message(self, fields: Fields, at: str) -> Message:
        role = _ROLES.get(_read_item_text(fields, "role", at).lower())
        if role is None:
            text = f"invalid role at '{at}.role': must be one of system, user, assistant, or tool"
            raise InvalidParameter(text, param=f"{at}.role")
        said = {name: raw for name, raw in fields.items() if raw not in _EMPTY_VALUES}
        add_unknown_keys(self._extra, said, at, _MESSAGE_KEYS[role])
        content = _read_item_text(fields, "content", at)
        if role == "tool":
            return self._read_tool_result(fields, content, at)
        parts: list[ContentPart] = []
        if role == "assistant" and (thinking := _read_item_text(fields, "thinking", at)):
            parts.append(ReasoningPart(thinking, at=f"{at}.thinking"))
        if content:
            parts.append(TextPart(content))
        parts += _read_images(fields, self._target, f"{at}.images")
        calls = self._read_calls(fields, at) if role == "assistant" else ()
        if not parts and not calls:
            parts.append(TextPart(""))
        return Message(role, tuple(parts), tool_calls=calls)

    def _read_calls(self, fields: Fields, at: str) -> tuple[ToolCall, ...]:
        raw = null_to_none(fields.get("tool_calls"))
        items = () if raw is None else as_array(raw, f"{at}.tool_calls")
        calls = tuple(
            self._read_call(as_object(item, f"{at}.tool_calls[{i}]"), f"{at}.tool_calls[{i}]")
            for i, item in enumerate(items)
        )
        self._open_calls = list(calls)
        return calls

    def _read_call(self, fields: Fields, at: str) -> ToolCall:
        function = as_object(fields.get("function", NULL), f"{at}.function")
        add_unknown_keys(self._extra, {**fields, "function": function}, at, _CALL_KEYS)
        arguments = null_to_none(function.get("arguments")) or Raw(b"{}")
        as_object(arguments, f"{at}.function.arguments")
        text = msgspec.json.format(arguments, indent=-1).decode()
        self._call_count += 1
        call_id = _read_item_text(fields, "id", at) or f"call_{self._call_count:08}"
        name = _read_item_text(function, "name", f"{at}.function")
        if not name:
            raise missing_error(f"{at}.function.name")
        return ToolCall(call_id, name, text)

    def _read_tool_result(self, fields: Fields, content: str, at: str) -> Message:
        name = _read_item_text(fields, "tool_name", at) or _read_item_text(fields, "name", at)
        call = self._take_call(_read_item_text(fields, "tool_call_id", at), name)
        if call is None:
            self._extra[f"{at}.role"] = fields["role"]
            label = f"[tool {name}]" if name else "[tool]"
            return Message("user", (TextPart(f"{label} {content}"),))
        return Message("tool", (TextPart(content),), tool_call_id=call.id)

    def _take_call(self, call_id: str, name: str) -> ToolCall | None:
        calls = self._open_calls
        by_id = [call for call in calls if call.id == call_id]
        by_name = [call for call in calls if call.name == name]
        matches = by_id or by_name or calls
        if not matches:
            return None
        call = matches[0]
        calls.remove(call)
        return call


def _read_item_text(fields: Fields, name: str, at: str) -> str:
    raw = null_to_none(fields.get(name))
    value = "" if raw is None else decode_value(raw)
    if not isinstance(value, str):
        raise invalid_type_error(f"{at}.{name}", "a string", value)
    return value


_IMAGE_TYPES: Final = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
)


def _read_images(fields: Fields, target: _Target, at: str) -> Sequence[ImagePart]:
    """The images, base64 without a type, as ``data:`` URLs."""
    raw = null_to_none(fields.get("images"))
    if raw is None:
        return ()
    images = []
    for i, item in enumerate(as_array(raw, at)):
        value = decode_value(item)
        if not isinstance(value, str):
            raise invalid_type_error(f"{at}[{i}]", "a string", value)
        images.append(ImagePart(_build_image_url(value, f"{at}[{i}]"), at=f"{at}[{i}]"))
    if images:
        target.require("vision")
    return images


def _build_image_url(text: str, at: str) -> str:
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        data = b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise InvalidParameter(f"'{at}' must be base64 of an image", param=at)
    kind = next((kind for start, kind in _IMAGE_TYPES if data.startswith(start)), None)
    if kind is None:
        is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
        kind = "webp" if is_webp else "png"
    return f"data:image/{kind};base64,{encoded}"


# --- embeddings -----------------------------------------------------------------------------------


def read_inputs(fields: Fields) -> tuple[str, ...]:
    """The inputs of ``/api/embed``; none for "". Raises InvalidParameter."""
    raw = null_to_none(fields.get("input"))
    value = "" if raw is None else decode_value(raw)
    if isinstance(value, str):
        return (value,) if value else ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidParameter("invalid input type", param="input", problem="type", got=value)
    return tuple(value)


def read_embedding(
    fields: Fields, name: str, capabilities: Capabilities | None, inputs: tuple[str, ...]
) -> EmbeddingRequest:
    """Decode an embeddings request. Raises ClientError.

    ``dimensions`` is not for the target: the response's encoder shortens the vectors.
    """
    target = _Target(name, capabilities)
    target.require_task("embedding", "embeddings")
    values = params.read_params(EMBEDDING_PARAMS, fields)
    extra = _collect_extra(fields, _EMBEDDING_FIELDS)
    read_options(fields, values, extra, ParamTable())
    values.pop("request.dimensions", None)
    values["keep_alive"] = read_keep_alive(fields)
    if (truncate := values.pop("overflow", None)) is not None:
        values["overflow"] = "truncate" if truncate else "error"
    values.provided_fields = {n for n, raw in fields.items() if raw != NULL}
    return EmbeddingRequest(
        model=name, inputs=inputs, extra=extra, **values.build_request_arguments()
    )


def read_dimensions(fields: Fields) -> int | None:
    """The length to which vectors are shortened. Raises InvalidParameter."""
    values = params.read_params(EMBEDDING_PARAMS, fields)
    dimensions: int = values.get("request.dimensions") or 0
    return dimensions if dimensions > 0 else None
