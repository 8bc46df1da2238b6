"""Decodes requests for messages and for their token count.

Blocks become parts of messages in their order. What has no place in the internal request is kept in
``extra``, and so is reported as lost unless the worker speaks this protocol, too.
"""

import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from protocols.anthropic.params import (
    BETA_HEADER,
    EFFORTS,
    MAX_MESSAGES,
    MAX_MODEL_LENGTH,
    MAX_TOOL_NAME_LENGTH,
    MAX_USER_ID_LENGTH,
    MESSAGE_PARAMS,
    MIN_THINKING_BUDGET,
    SAMPLING_FIELDS,
    SERVICE_TIERS,
    VERSION_HEADER,
    as_fields,
    as_object,
    decode_fields,
    field_error,
    invalid_choice_error,
    invalid_type_error,
    missing_error,
    read_choice,
    read_optional_bool,
    read_optional_string,
    read_string,
    select_present_fields,
)
from protocols.core.catalog import ModelInfo
from protocols.core.errors import (
    ContextTooLong,
    InvalidParameter,
    UnknownParameter,
    UnsupportedFeature,
)
from protocols.core.extra import KeyTree, add_unknown_keys
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    CACHE_KEY,
    ContentPart,
    ExtraFields,
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonSchemaFormat,
    Message,
    NamedTool,
    OutputFormat,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from protocols.core.token_counts import IMAGE_TOKENS
from protocols.json_body import decode_value, read_fields
from protocols.params import ParsedParams, read_params

_encode = msgspec.json.Encoder().encode

VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""The versions of the API, the default first. The second has no sampling parameters."""
OWN_SIGNATURE: Final = "gw1."
"""The prefix of signatures that the gateway made: no worker can verify them."""
BILLING_PREFIX: Final = "x-anthropic-billing-header"
"""The first system block of Claude Code, which differs between conversations and would keep workers
from reusing their prompt cache."""


class RequestRules(Struct, frozen=True, kw_only=True):
    """How a listener reads requests."""

    unknown: Literal["ignore", "reject"] = "ignore"
    strict_version: bool = False
    server_tools: Literal["reject", "drop"] = "reject"
    over_limit: Literal["clamp", "error"] = "clamp"
    mid_system: Literal["keep", "fold"] = "keep"


_KNOWN_FIELDS: Final = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config",
     "output_format", *(param.wire for param in MESSAGE_PARAMS)}
)  # fmt: skip
"""Fields that the internal request has."""
_SERVICE_FIELDS: Final = frozenset(
    {"metadata", "service_tier", "cache_control", "speed", "inference_geo", "diagnostics",
     "user_profile_id", "context_management", "container", "mcp_servers", "betas", "thread",
     "fallbacks", "compaction", "fallback_credit_token"}
)  # fmt: skip
"""Fields that only workers of this protocol know."""
_MODES: Final = ("enabled", "adaptive", "between_tools", "disabled")


# --- the request ----------------------------------------------------------------------------------


def read_model(fields: Mapping[str, Raw]) -> str:
    """The model's name. Raises InvalidParameter."""
    if "model" not in fields:
        raise missing_error("model")
    model = decode_value(fields["model"])
    if not isinstance(model, str):
        raise invalid_type_error("model", "a valid string", model)
    if not 0 < len(model) <= MAX_MODEL_LENGTH:
        text = f"String should have 1 to {MAX_MODEL_LENGTH} characters"
        raise field_error("model", text, "too_long" if model else "empty", model)
    return model


def read_request(
    call: ClientRequest, rules: RequestRules, model: ModelInfo | None = None
) -> GenerationRequest:
    """Decode a request for a message, or for its token count. Raises ClientError."""
    fields = select_present_fields(read_fields(call))
    name = read_model(fields)
    counts_only = call.endpoint.operation == "count_tokens"
    if "max_tokens" not in fields and not counts_only:
        raise missing_error("max_tokens")
    values = read_params(MESSAGE_PARAMS, fields)
    values.provided_fields = set(fields)
    _check_version(call, rules, values)
    _check_stop_strings(values)
    _check_service_fields(fields, rules)
    reader = ConversationReader()
    messages = reader.read(fields)
    if rules.mid_system == "fold":
        messages = _fold_system(messages)
    tools = _read_tools(fields, rules, reader)
    choice, parallel = _read_tool_choice(fields, tools)
    if tools and parallel is not None:
        values["parallel_tools"] = parallel
    clamped: dict[str, str] = {}
    if not counts_only:
        _read_thinking(call, fields, values, has_tools=bool(tools))
        _limit_max_tokens(values, model, rules, clamped, (messages, tools))
    output = _read_output_config(fields, values, clamped)
    if messages[-1].role == "assistant":
        values["templating.continue_final"] = True
        values["templating.add_generation_prompt"] = False
    values["response_options.matched_stop"] = bool(values.get("stopping.stop"))
    if (timeout := _read_timeout(call)) is not None and not values.get("stream"):
        values["timeout"] = timeout
    return GenerationRequest(
        model=name,
        kind="chat",
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        output=output,
        extra=_collect_extra(fields, reader, _UNCOUNTED_FIELDS if counts_only else frozenset()),
        clamped_fields=clamped,
        **values.build_request_arguments(),
    )


def is_changed(call: ClientRequest, rules: RequestRules) -> bool:
    """Whether the listener moves a system message or leaves out a tool of a valid request."""
    fields = select_present_fields(read_fields(call))
    if rules.mid_system == "fold":
        turns = decode_value(fields["messages"])
        if any(turn["role"] == "system" for turn in turns):
            return True
    tools = decode_value(fields["tools"]) if "tools" in fields else []
    return rules.server_tools == "drop" and any(map(_is_server_tool, tools))


def _check_version(call: ClientRequest, rules: RequestRules, values: ParsedParams) -> None:
    version = call.headers.get(VERSION_HEADER, VERSIONS[0])
    if not _is_date(version):
        text = f"Input should be a date such as {VERSIONS[0]}, got {version[:32]!r}"
        raise field_error(VERSION_HEADER, text)
    if rules.strict_version and version >= VERSIONS[1]:
        for name in SAMPLING_FIELDS:
            if name in values.provided_fields:
                raise UnknownParameter(f"{name} is not in version {version}", param=name)


def _is_date(text: str) -> bool:
    year, _, rest = text.partition("-")
    month, _, day = rest.partition("-")
    return (len(year), len(month), len(day)) == (4, 2, 2) and (year + month + day).isdecimal()


def _check_stop_strings(values: ParsedParams) -> None:
    for i, stop in enumerate(values.get("stopping.stop", ())):
        if not stop.strip():
            raise field_error(
                f"stop_sequences[{i}]", "each stop sequence must contain non-whitespace", "empty"
            )


def _check_service_fields(fields: Mapping[str, Raw], rules: RequestRules) -> None:
    """Check the fields that the gateway passes on or loses."""
    metadata = decode_fields(fields, "metadata")
    user = read_optional_string(metadata, "user_id", "metadata")
    if user is not None and len(user) > MAX_USER_ID_LENGTH:
        text = f"String should have at most {MAX_USER_ID_LENGTH} characters"
        raise field_error("metadata.user_id", text, "too_long", user)
    if "service_tier" in fields:
        tier = decode_value(fields["service_tier"])
        if tier not in SERVICE_TIERS:
            raise invalid_choice_error("service_tier", SERVICE_TIERS, tier)
    if "mcp_servers" in fields and decode_value(fields["mcp_servers"]) != []:
        raise UnsupportedFeature("remote MCP servers are not available here", param="mcp_servers")
    if rules.unknown == "reject":
        for name in fields.keys() - _KNOWN_FIELDS - _SERVICE_FIELDS:
            raise UnknownParameter(f"{name[:64]} is not a field", param=name[:64])


_UNCOUNTED_FIELDS: Final = frozenset(param.wire for param in MESSAGE_PARAMS) - {"max_tokens"}
"""Fields of messages that a request for a token count has not; clients send the whole request of a
message, in which ``max_tokens`` is required."""


def _collect_extra(
    fields: Mapping[str, Raw], reader: "ConversationReader", more: frozenset[str]
) -> dict[str, Raw]:
    """What only workers of this protocol know; ``more`` are fields that others know elsewhere."""
    known_fields = _KNOWN_FIELDS - more
    extra = {name: raw for name, raw in fields.items() if name not in known_fields}
    extra |= reader.unknown
    for name, known in _OBJECT_KEYS.items():
        if name in fields:
            value = decode_fields(fields, name)
            further = _KEYS_OF_TYPES.get((name, str(value.get("type"))))
            add_unknown_keys(extra, value, name, {**known, further: None} if further else known)
    if extra.get("mcp_servers") == Raw(b"[]"):
        del extra["mcp_servers"]
    return extra


def _read_timeout(call: ClientRequest) -> float | None:
    """The client's timeout in seconds, from its library's header; a hint, never an error."""
    try:
        seconds = float(call.headers.get("x-stainless-timeout", ""))
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None  # noqa: PLR2004 - and no infinity


# --- limits ---------------------------------------------------------------------------------------

_BYTES_PER_TOKEN: Final = 3
"""Fewer than most texts have, so that a prompt is rather counted too long than too short."""


def _limit_max_tokens(
    values: ParsedParams,
    model: ModelInfo | None,
    rules: RequestRules,
    clamped: dict[str, str],
    prompt: tuple[Sequence[Message], Sequence[Tool]],
) -> None:
    """Limit ``max_tokens`` to what the model can generate: clients ask for far more than that.

    0 becomes 1, which no worker refuses: the encoder leaves that token out.
    """
    requested = values["stopping.max_tokens"]
    if requested == 0:
        values["stopping.max_tokens"] = 1
        return
    if model is None:
        return
    limit = requested
    if model.max_tokens is not None and rules.over_limit == "clamp":
        limit = min(limit, model.max_tokens)
    if model.context_length is not None and limit > 0:
        tokens = sum(map(_estimate_message, prompt[0])) + sum(map(_estimate_tool, prompt[1]))
        room = max(model.context_length - tokens, 1)
        if limit > room and rules.over_limit == "error" and tokens < model.context_length:
            raise ContextTooLong(
                f"input length and `max_tokens` exceed context limit: {tokens} + {requested} > "
                f"{model.context_length}, decrease input length or `max_tokens` and try again",
                param="max_tokens",
            )
        limit = min(limit, room)
    if limit < requested:
        values["stopping.max_tokens"] = limit
        clamped["max_tokens"] = f"{requested} to {limit}"


def _estimate_message(message: Message) -> int:
    tokens = sum(_estimate_text(call.arguments) for call in message.tool_calls)
    for part in message.parts:
        tokens += _estimate_text(part.text) if isinstance(part, TextPart) else IMAGE_TOKENS
    return tokens


def _estimate_tool(tool: Tool) -> int:
    size = len(tool.name) + len(tool.description or "") + len(tool.parameters or b"")
    return -(-size // _BYTES_PER_TOKEN)


def _estimate_text(text: str) -> int:
    return max(len(text.split()), -(-len(text.encode()) // _BYTES_PER_TOKEN))


# --- conversations --------------------------------------------------------------------------------

_ROLES: Final = ("user", "assistant", "system")
_USER_ROLES: Final = frozenset({"user", "ctx", "msg"})
_SERVER_RESULTS: Final = "_tool_result"
_MEDIA_TYPES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")


_TURN_KEYS: Final = dict.fromkeys(("role", "content"))
_SHARED_KEYS: Final[KeyTree] = {"type": None}
_SOURCE_KEYS: Final[Mapping[str, KeyTree]] = {
    **dict.fromkeys(("base64", "text"), dict.fromkeys(("type", "media_type", "data"))),
    "url": dict.fromkeys(("type", "url")),
    "content": dict.fromkeys(("type", "content")),
    "file": dict.fromkeys(("type", "file_id")),
}
"""The keys of sources, by their type."""
_BLOCK_KEYS: Final[Mapping[str, KeyTree]] = {
    "text": {**_SHARED_KEYS, "text": None},
    "image": {**_SHARED_KEYS, "source": None},
    "document": {**_SHARED_KEYS, "source": None, "title": None, "context": None},
    "search_result": {**_SHARED_KEYS, **dict.fromkeys(("source", "title", "content"))},
    "tool_use": {**_SHARED_KEYS, **dict.fromkeys(("id", "name", "input"))},
    "tool_result": {**_SHARED_KEYS, **dict.fromkeys(("tool_use_id", "content", "is_error"))},
    "tool_reference": {**_SHARED_KEYS, "tool_name": None},
    "thinking": {**_SHARED_KEYS, "thinking": None, "signature": None},
    "redacted_thinking": {**_SHARED_KEYS, "data": None},
    "server_tool_use": {**_SHARED_KEYS, **dict.fromkeys(("id", "name", "input"))},
}
"""The keys of blocks."""
_SERVER_RESULT_KEYS: Final = {**_SHARED_KEYS, **dict.fromkeys(("tool_use_id", "content"))}
_SERVER_ERROR_KEYS: Final = {**_SHARED_KEYS, "error_code": None}
_SHOWN_RESULT_KEYS: Final[KeyTree] = {
    "type": frozenset({"web_search_result"}),
    **dict.fromkeys(("title", "url")),
}
"""What is shown of each item that a service's own tool found."""
_OBJECT_KEYS: Final[Mapping[str, KeyTree]] = {
    "thinking": dict.fromkeys(("type", "display")),
    "tool_choice": dict.fromkeys(("type", "disable_parallel_tool_use")),
    "output_config": {"effort": None, "format": dict.fromkeys(("type", "schema"))},
    "output_format": dict.fromkeys(("type", "schema")),
}
"""The keys of the objects beside the conversation."""
_KEYS_OF_TYPES: Final[Mapping[tuple[str, str], str]] = {
    ("thinking", "enabled"): "budget_tokens",
    ("tool_choice", "tool"): "name",
}
"""The further key of an object of a type."""
_TOOL_KEYS: Final = dict.fromkeys(("type", "name", "description", "input_schema", "strict"))


PartT = TypeVar("PartT", bound=ContentPart)


class _Turn(Struct):
    """The blocks of one message, as they are read."""

    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    results: list[Message] = []


class ConversationReader:
    """Reads ``system`` and ``messages``, and the keys of their blocks that no message has."""

    def __init__(self) -> None:
        self.unknown: dict[str, Raw] = {}
        """The keys that no block has, by their path."""
        self._pending_calls: Sequence[ToolCall] = ()
        """The calls of the previous assistant message, which the next message must answer."""
        self._call_place = ""
        self._continues = False
        """The conversation continues another one, whose last calls the first message may answer."""

    def read(self, fields: Mapping[str, Raw]) -> list[Message]:
        """The messages, those of the system first. Raises ClientError."""
        if "messages" not in fields:
            raise missing_error("messages")
        values = decode_value(fields["messages"])
        if not isinstance(values, list):
            raise invalid_type_error("messages", "a valid list", values)
        if not values:
            raise field_error("messages", "at least one message is required", "empty", values)
        if len(values) > MAX_MESSAGES:
            text = f"List should have at most {MAX_MESSAGES} items"
            raise field_error("messages", text, "too_long", values)
        thread = decode_value(fields["thread"]) if "thread" in fields else None
        self._continues = isinstance(thread, dict) and thread.get("type") == "continue"
        messages: list[Message] = []
        delayed: list[Message] = []
        """Messages of the system between tool calls and their results."""
        for i, value in enumerate(values):
            at = f"messages[{i}]"
            turn = as_fields(value, at)
            role = read_string(turn, "role", at)
            add_unknown_keys(self.unknown, turn, at, _TURN_KEYS)
            if role == "system":
                target = delayed if self._pending_calls else messages
                target += self._read_system(turn.get("content"), f"{at}.content")
            elif role == "assistant":
                self._check_answered(i)
                self._continues = False
                messages.append(self._read_assistant(turn, at))
                self._call_place = f"messages[{i + 1}]"
            elif role in _USER_ROLES:
                messages += self._read_user(turn, at)
                messages += delayed
                delayed = []
            else:
                raise invalid_choice_error(f"{at}.role", _ROLES, role)
        self._check_answered(len(values))
        system: list[Message] = []
        if "system" in fields:
            system = self._read_system(decode_value(fields["system"]), "system")
        return _join_leading_system(system + messages)

    def _check_answered(self, place: int) -> None:
        if self._pending_calls:
            raise _unanswered_error(self._call_place or f"messages[{place}]", self._pending_calls)

    def _read_system(self, content: Any, at: str) -> list[Message]:
        """One message of the texts, or none."""
        is_text = isinstance(content, str)
        texts = [TextPart(content)] if is_text else list(self._read_texts(content, at))
        texts = [one for one in texts if not one.text.startswith(BILLING_PREFIX)]
        parts = _join_texts([one for one in texts if one.text], "\n\n")
        return [Message("system", parts, at=at)] if parts else []

    def _read_texts(self, content: Any, at: str) -> Iterator[TextPart]:
        """The texts of a list of text blocks."""
        for k, block, kind in self._iterate_blocks(content, at):
            place = f"{at}[{k}]"
            if kind != "text":
                raise invalid_choice_error(f"{place}.type", ("text",), kind)
            yield from self._mark_last((TextPart(read_string(block, "text", place)),), place)

    def _iterate_blocks(
        self, content: Any, at: str
    ) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        """The position, the block and its type."""
        if content is None:
            raise missing_error(at)
        if not isinstance(content, list):
            raise invalid_type_error(at, "a valid list", content)
        for k, value in enumerate(content):
            block = as_fields(value, f"{at}[{k}]")
            kind = read_string(block, "type", f"{at}[{k}]")
            if block.get("citations") in ([], {"enabled": False}):
                block = {name: one for name, one in block.items() if name != "citations"}
            if (known := _BLOCK_KEYS.get(kind)) is not None:
                add_unknown_keys(self.unknown, block, f"{at}[{k}]", known)
            source = block.get("source")
            if isinstance(source, dict) and (keys := _SOURCE_KEYS.get(str(source.get("type")))):
                add_unknown_keys(self.unknown, source, f"{at}[{k}].source", keys)
            yield k, block, kind

    def take_mark(self, at: str) -> ExtraFields | None:
        """The mark for the cache of the block or tool at this path, which has a place."""
        mark = self.unknown.pop(f"{at}.{CACHE_KEY}", None)
        return None if mark is None else ExtraFields(at, {(CACHE_KEY,): mark})

    def _mark_last(self, parts: Sequence[PartT], at: str) -> Sequence[PartT]:
        """The parts of a block, the last with the block's mark unless it has one or is blank."""
        if not parts or parts[-1].extra is not None or parts[-1] == TextPart(""):
            return parts
        mark = self.take_mark(at)
        return parts if mark is None else (*parts[:-1], replace(parts[-1], extra=mark))

    # --- assistant messages -----------------------------------------------------------------------

    def _read_assistant(self, value: Mapping[str, Any], at: str) -> Message:
        content, place, at = value.get("content"), at, f"{at}.content"
        if isinstance(content, str):
            return Message("assistant", (TextPart(content, at=at),), at=at)
        turn = _Turn()
        for k, block, kind in self._iterate_blocks(content, at):
            self._read_assistant_block(block, kind, f"{at}[{k}]", turn)
        identifiers = [call.id for call in turn.calls]
        if len(set(identifiers)) < len(identifiers):
            raise field_error(at, "`tool_use` ids must be unique", "value")
        self._pending_calls = turn.calls
        return Message("assistant", tuple(turn.parts), tool_calls=tuple(turn.calls), at=place)

    def _read_assistant_block(
        self, block: Mapping[str, Any], kind: str, at: str, turn: _Turn
    ) -> None:
        match kind:
            case "tool_use":
                if "input" not in block:
                    raise missing_error(f"{at}.input")
                arguments = _encode(as_object(block["input"], f"{at}.input")).decode()
                identifier, name = read_string(block, "id", at), read_string(block, "name", at)
                mark = self.take_mark(at)
                turn.calls.append(ToolCall(identifier, name, arguments, extra=mark, at=at))
            case "thinking":
                text = read_string(block, "thinking", at)
                signature = read_optional_string(block, "signature", at)
                is_own = signature is None or signature.startswith(OWN_SIGNATURE)
                turn.parts.append(ReasoningPart(text, None if is_own else signature, at=at))
            case "redacted_thinking":
                data = read_string(block, "data", at)
                turn.parts.append(ReasoningPart("", redacted=data, at=at))
            case "text" | "document":
                turn.parts += self._read_part(block, kind, at)
            case "server_tool_use":
                name = read_string(block, "name", at)
                text = f"[{name}: {_encode(block.get('input')).decode()}]"
                turn.parts.append(TextPart(text, self.take_mark(at)))
            case _ if kind.endswith(_SERVER_RESULTS) and kind not in _UNSUPPORTED_BLOCKS:
                add_unknown_keys(self.unknown, block, at, _SERVER_RESULT_KEYS)
                result = self._read_server_result(block.get("content"), kind, at)
                turn.parts += self._mark_last((result,), at)
            case _:
                raise _unknown_block_error(kind, at)

    def _read_server_result(self, content: Any, kind: str, at: str) -> TextPart:
        """The result of a tool that the service ran, as text; what it leaves out is reported."""
        name, place = kind.removesuffix(_SERVER_RESULTS), f"{at}.content"
        match content:
            case {"error_code": str() as code}:
                add_unknown_keys(self.unknown, content, place, _SERVER_ERROR_KEYS)
                return TextPart(f"[{name} failed: {code}]")
            case list():
                lines = []
                for k, one in enumerate(content):
                    match one:
                        case {"title": str() as title, "url": str() as url}:
                            add_unknown_keys(self.unknown, one, f"{place}[{k}]", _SHOWN_RESULT_KEYS)
                            lines.append(f"{title} - {url}")
                        case _:
                            self.unknown[f"{place}[{k}]"] = Raw(_encode(one))
                return TextPart("\n".join(lines) or f"[{name} result]")
            case _:
                if content is not None:
                    self.unknown[place] = Raw(_encode(content))
                return TextPart(f"[{name} result]")

    # --- user messages ----------------------------------------------------------------------------

    def _read_user(self, value: Mapping[str, Any], place: str) -> list[Message]:
        """The results of the previous message's calls in their order, and the rest."""
        content, at = value.get("content"), f"{place}.content"
        turn = _Turn()
        if isinstance(content, str):
            turn.parts.append(TextPart(content))
        else:
            if content == []:
                text = "user messages must have non-empty content"
                raise field_error(place, text, "empty", content)
            for k, block, kind in self._iterate_blocks(content, at):
                if kind == "tool_result":
                    turn.results.append(self._read_tool_result(block, f"{at}[{k}]", turn.results))
                else:
                    turn.parts += self._read_user_part(block, kind, f"{at}[{k}]")
        calls, self._pending_calls = self._pending_calls, ()
        by_id = {result.tool_call_id: result for result in turn.results}
        if missing := [call for call in calls if call.id not in by_id]:
            raise _unanswered_error(place, missing)
        messages = turn.results if self._continues else [by_id[call.id] for call in calls]
        if turn.parts or not messages:
            messages.append(Message("user", tuple(turn.parts) or (TextPart(""),), at=place))
        return messages

    def _read_tool_result(
        self, block: Mapping[str, Any], at: str, others: Sequence[Message]
    ) -> Message:
        identifier = read_string(block, "tool_use_id", at)
        is_known = any(call.id == identifier for call in self._pending_calls)
        if not is_known and not self._continues:
            raise field_error(
                at,
                f"unexpected `tool_use_id` found in `tool_result` blocks: {identifier[:128]}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous "
                "message.",
            )
        if any(one.tool_call_id == identifier for one in others):
            text = (
                f"each `tool_use` must have a single result, found several for {identifier[:128]}"
            )
            raise field_error(at, text)
        is_error = bool(read_optional_bool(block, "is_error", at))
        parts = self._read_result_parts(block.get("content"), f"{at}.content")
        if is_error:
            parts = _name_error(parts)
        parts = tuple(self._mark_last(parts, at))
        return Message("tool", parts, tool_call_id=identifier, is_error=is_error, at=at)

    def _read_result_parts(self, content: Any, at: str) -> tuple[ContentPart, ...]:
        """The parts of a tool's result; neighbouring texts are joined by a newline."""
        if content is None or isinstance(content, str):
            return (TextPart(content or ""),)
        parts: list[ContentPart] = []
        for k, block, kind in self._iterate_blocks(content, at):
            for part in self._read_user_part(block, kind, f"{at}[{k}]", in_result=True):
                last = parts[-1] if parts else None
                if isinstance(part, TextPart) and isinstance(last, TextPart):
                    parts[-1:] = _join_texts((last, part), "\n")
                else:
                    parts.append(part)
        return tuple(parts) or (TextPart(""),)

    def _read_user_part(
        self, block: Mapping[str, Any], kind: str, at: str, *, in_result: bool = False
    ) -> Sequence[ContentPart]:
        if kind == "tool_reference" and in_result:
            name = read_string(block, "tool_name", at)
            return (TextPart(f"[tool {name} is now available]"),)
        if kind not in _PART_KINDS:
            raise _unknown_block_error(kind, at)
        return self._read_part(block, kind, at)

    def _read_part(self, block: Mapping[str, Any], kind: str, at: str) -> Sequence[ContentPart]:
        return self._mark_last(self._read_unmarked_part(block, kind, at), at)

    def _read_unmarked_part(
        self, block: Mapping[str, Any], kind: str, at: str
    ) -> Sequence[ContentPart]:
        match kind:
            case "text":
                text = read_string(block, "text", at)
                return (TextPart(text),) if text else ()
            case "image":
                return (_read_image(block, at),)
            case "search_result":
                texts = self._read_texts(block.get("content"), f"{at}.content")
                head = [TextPart(read_string(block, name, at)) for name in ("title", "source")]
                return _join_texts((*head, *texts), "\n")
            case _:
                return self._read_document(block, at)

    def _read_document(self, block: Mapping[str, Any], at: str) -> Sequence[ContentPart]:
        if "source" not in block:
            raise missing_error(f"{at}.source")
        place = at
        source, at = as_fields(block["source"], f"{at}.source"), f"{at}.source"
        title = read_optional_string(block, "title", at)
        match kind := read_string(source, "type", at):
            case "text":
                parts: list[ContentPart] = [TextPart(read_string(source, "data", at))]
            case "content":
                content = source.get("content")
                parts = [TextPart(content)] if isinstance(content, str) else []
                if not parts:
                    for k, one, inner in self._iterate_blocks(content, f"{at}.content"):
                        parts += self._read_user_part(one, inner, f"{at}.content[{k}]")
            case "base64":
                read_choice(source, "media_type", at, ("application/pdf",))
                data = f"data:application/pdf;base64,{_read_base64(source, at)}"
                return (FilePart(file_data=data, filename=title or "document.pdf", at=place),)
            case "url" | "file":
                raise UnsupportedFeature(f"{kind} sources are not supported", param=at)
            case _:
                raise invalid_choice_error(f"{at}.type", _DOCUMENT_SOURCES, kind)
        named = f' title="{title}"' if title else ""
        context = read_optional_string(block, "context", at)
        opening = f"<document{named}>\n" + (f"{context}\n" if context else "")
        return _wrap_parts(opening, parts, "\n</document>")


_PART_KINDS: Final = frozenset({"text", "image", "document", "search_result"})
_DOCUMENT_SOURCES: Final = ("base64", "text", "content", "url", "file")
_UNSUPPORTED_BLOCKS: Final = frozenset(
    {"container_upload", "mcp_tool_use", "mcp_tool_result", "compaction", "fallback"}
)


def _read_base64(source: Mapping[str, Any], at: str) -> str:
    """The ``data`` of a source, which must be base64."""
    data = read_string(source, "data", at)
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        raise field_error(f"{at}.data", "Invalid base64 data", got=data[:32]) from None
    return data


def _read_image(block: Mapping[str, Any], at: str) -> ImagePart:
    if "source" not in block:
        raise missing_error(f"{at}.source")
    place = at
    source, at = as_fields(block["source"], f"{at}.source"), f"{at}.source"
    match kind := read_string(source, "type", at):
        case "base64":
            media_type = read_choice(source, "media_type", at, _MEDIA_TYPES)
            data = _read_base64(source, at)
            return ImagePart(f"data:{media_type};base64,{data}", at=place)
        case "url":
            url = read_string(source, "url", at)
            if not url.startswith(("https://", "http://")):
                raise field_error(f"{at}.url", "Only http and https URLs are supported", got=url)
            return ImagePart(url, at=place)
        case "file":
            raise UnsupportedFeature("file sources are not supported", param=at)
        case _:
            raise invalid_choice_error(f"{at}.type", ("base64", "url", "file"), kind)


def _join_texts(texts: Iterable[TextPart], separator: str = "") -> tuple[TextPart, ...]:
    """The texts as one, which goes on in another part behind one that is marked for the cache."""
    joined: list[TextPart] = []
    for one in texts:
        text = one.text if one.continues or not joined else separator + one.text
        if joined and joined[-1].extra is None:
            joined[-1] = replace(joined[-1], text=joined[-1].text + text, extra=one.extra)
        else:
            joined.append(replace(one, text=text, continues=one.continues or bool(joined)))
    return tuple(joined)


def _wrap_parts(opening: str, parts: Sequence[ContentPart], closing: str) -> list[ContentPart]:
    """The parts between two texts, which are joined with the texts at the ends."""
    wrapped: list[ContentPart] = [TextPart(opening)]
    for part in (*parts, TextPart(closing)):
        last = wrapped[-1]
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            wrapped[-1:] = _join_texts((last, part))
        else:
            wrapped.append(part)
    return wrapped


def _name_error(parts: tuple[ContentPart, ...]) -> tuple[ContentPart, ...]:
    """The result of a failed tool, for workers that know no such results."""
    text = parts[0].text if isinstance(parts[0], TextPart) else ""
    if text.lower().startswith(("error", "<tool_use_error>")):
        return parts
    rest = parts[1:] if isinstance(parts[0], TextPart) else parts
    first = parts[0] if isinstance(parts[0], TextPart) else TextPart("")
    return (replace(first, text=f"Error: {text}"), *rest)


def _unknown_block_error(kind: str, at: str) -> Exception:
    if kind in _UNSUPPORTED_BLOCKS:
        return UnsupportedFeature(f"{kind[:64]} is not supported", param=f"{at}.type")
    return field_error(
        at,
        f"Input tag '{kind[:64]}' found using 'type' does not match any of the expected tags",
        got=kind,
    )


def _unanswered_error(at: str, calls: Sequence[ToolCall]) -> InvalidParameter:
    names = ", ".join(call.id for call in calls)[:300]
    return field_error(
        at,
        f"`tool_use` ids were found without `tool_result` blocks immediately after: {names}. Each "
        "`tool_use` block must have a corresponding `tool_result` block in the next message.",
    )


def _join_leading_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with those of the system at their head joined."""
    count = next((i for i, one in enumerate(messages) if one.role != "system"), len(messages))
    if count <= 1:
        return list(messages)
    texts = [part for one in messages[:count] for part in one.parts if isinstance(part, TextPart)]
    return [Message("system", _join_texts(texts, "\n\n"), at="system"), *messages[count:]]


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with those of the system between others as part of the message before.

    After an assistant's message they come before the user's next one. No user's message is added
    after the results of tools, since many chat templates drop the reasoning before it.
    """
    folded: list[Message] = []
    waiting: list[ContentPart] = []
    for i, message in enumerate(messages):
        if message.role == "system" and i:
            reminder = _wrap_parts("<system-reminder>\n", message.parts, "\n</system-reminder>")
            if folded[-1].role in ("user", "tool"):
                folded[-1] = _append_parts(folded[-1], reminder)
            else:
                waiting += reminder
        elif waiting and message.role == "user":
            parts = (*waiting, *message.parts)
            folded.append(replace(message, parts=parts))
            waiting = []
        else:
            folded.append(message)
    return [*folded, Message("user", tuple(waiting))] if waiting else folded


def _append_parts(message: Message, more: Sequence[ContentPart]) -> Message:
    """The message with further texts; those of a tool's result are joined."""
    kept, last = message.parts[:-1], message.parts[-1]
    first = more[0]
    if message.role == "tool" and isinstance(last, TextPart) and isinstance(first, TextPart):
        parts = (*kept, *_join_texts((last, first), "\n"), *more[1:])
    else:
        parts = (*message.parts, *more)
    return replace(message, parts=parts)


# --- tools ----------------------------------------------------------------------------------------


def _read_tools(
    fields: Mapping[str, Raw], rules: RequestRules, reader: ConversationReader
) -> tuple[Tool, ...]:
    if "tools" not in fields:
        return ()
    values = decode_value(fields["tools"])
    if not isinstance(values, list):
        raise invalid_type_error("tools", "a valid list", values)
    tools: dict[str, Tool] = {}
    for i, value in enumerate(values):
        at = f"tools[{i}]"
        item = as_fields(value, at)
        kind = read_optional_string(item, "type", at) or "custom"
        if _is_server_tool(item):
            if rules.server_tools == "drop":
                reader.unknown[f"tools.{kind}"] = Raw(_encode(item))
                continue
            text = f"server tool {kind[:64]} is not available on this gateway"
            raise UnsupportedFeature(text, param=at)
        add_unknown_keys(reader.unknown, item, at, _TOOL_KEYS)
        tool = replace(_read_tool(item, at), extra=reader.take_mark(at))
        if tool.name in tools:
            raise field_error("tools", "Tool names must be unique.", got=tool.name)
        tools[tool.name] = tool
    return tuple(tools.values())


def _is_server_tool(item: Mapping[str, Any]) -> bool:
    """Whether only the vendor's service runs it."""
    return (item.get("type") or "custom") != "custom"


def _read_tool(item: Mapping[str, Any], at: str) -> Tool:
    name = read_string(item, "name", at)
    if not 0 < len(name) <= MAX_TOOL_NAME_LENGTH or not _is_tool_name(name):
        text = "String should match pattern '^[a-zA-Z0-9_-]{1,128}$'"
        raise field_error(f"{at}.name", text, got=name)
    if "input_schema" not in item:
        raise missing_error(f"{at}.input_schema")
    schema = as_object(item["input_schema"], f"{at}.input_schema")
    schema = {"type": "object", **schema}
    if schema["type"] != "object":
        text = "Input should be 'object'"
        raise field_error(f"{at}.input_schema.type", text, got=schema["type"])
    description = read_optional_string(item, "description", at)
    strict = read_optional_bool(item, "strict", at)
    return Tool(name, description, Raw(_encode(schema)), strict)


def _is_tool_name(name: str) -> bool:
    return name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()


_CHOICES: Final[Mapping[str, Literal["auto", "required", "none"]]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}


def _read_tool_choice(
    fields: Mapping[str, Raw], tools: Sequence[Tool]
) -> tuple[ToolChoice | None, bool | None]:
    """The choice, and whether several tools may be called at once."""
    if "tool_choice" not in fields:
        return None, None
    value = decode_fields(fields, "tool_choice")
    kind = read_choice(value, "type", "tool_choice", (*_CHOICES, "tool"))
    single = read_optional_bool(value, "disable_parallel_tool_use", "tool_choice")
    if not tools and kind != "none":
        raise field_error("tool_choice", "tools are required with this choice", "conflict")
    parallel = None if single is None else not single
    if kind != "tool":
        return _CHOICES[kind], parallel
    name = read_string(value, "name", "tool_choice")
    if all(tool.name != name for tool in tools):
        text = f"Tool '{name[:128]}' not found in provided tools"
        raise field_error("tool_choice.name", text, got=name)
    return NamedTool(name), parallel


# --- thinking and output --------------------------------------------------------------------------

_LOW_BUDGET: Final = 4096
_MEDIUM_BUDGET: Final = 16384


def _read_thinking(
    call: ClientRequest, fields: Mapping[str, Raw], values: ParsedParams, *, has_tools: bool
) -> None:
    if "thinking" not in fields:
        return
    value = decode_fields(fields, "thinking")
    mode = read_choice(value, "type", "thinking", _MODES)
    if "display" in value:
        read_choice(value, "display", "thinking", ("summarized", "omitted"))
    if mode == "disabled":
        return
    values["reasoning.include"] = True
    if mode != "enabled":
        return
    at = "thinking.enabled.budget_tokens"
    budget = value.get("budget_tokens")
    if budget is None:
        raise missing_error(at)
    if type(budget) is not int:
        raise invalid_type_error(at, "a valid integer", budget)
    if budget < MIN_THINKING_BUDGET:
        text = f"Input should be greater than or equal to {MIN_THINKING_BUDGET}"
        raise field_error(at, text, "below", budget)
    interleaves = has_tools and "interleaved-thinking" in call.headers.get(BETA_HEADER, "")
    if budget >= values["stopping.max_tokens"] and not interleaves:
        text = "`max_tokens` must be greater than `thinking.budget_tokens`"
        raise field_error("max_tokens", text, "conflict", budget)
    values["reasoning.budget"] = budget
    values["reasoning.effort"] = (
        "low" if budget < _LOW_BUDGET else "medium" if budget < _MEDIUM_BUDGET else "high"
    )


def read_display(fields: Mapping[str, Raw]) -> Literal["omitted", "shown"]:
    """Whether thinking is sent with its text, by a valid request."""
    return "omitted" if decode_fields(fields, "thinking").get("display") == "omitted" else "shown"


def _read_output_config(
    fields: Mapping[str, Raw], values: ParsedParams, clamped: dict[str, str]
) -> OutputFormat | None:
    config = decode_fields(fields, "output_config")
    if "effort" in config:
        effort = read_choice(config, "effort", "output_config", EFFORTS)
        if effort in EFFORTS[3:]:
            clamped["output_config.effort"] = f"{effort} to high"
            effort = "high"
        values["reasoning.effort"] = effort
    if "format" in config:
        return _read_format(
            as_fields(config["format"], "output_config.format"), "output_config.format"
        )
    if "output_format" in fields:
        return _read_format(decode_fields(fields, "output_format"), "output_format")
    return None


def _read_format(value: Mapping[str, Any], at: str) -> OutputFormat:
    read_choice(value, "type", at, ("json_schema",))
    if "schema" not in value:
        raise missing_error(f"{at}.schema")
    schema = as_object(value["schema"], f"{at}.schema")
    return JsonSchemaFormat(Raw(_encode(schema)), "output", strict=True)
