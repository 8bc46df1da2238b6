"""Keys of an OpenAI-like response that the gateway does not know, from a worker to its client.

A response is decoded with types that know all its keys, so that one without others costs nothing
more. If that fails, ``separate_unknown_keys`` puts the unknown keys of each object aside, and the
decoder emits them as ``ResponseExtra``. ``ExtraKeyWriter`` adds them to what the encoder wrote.
"""

from collections.abc import Container, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, get_args

import msgspec

from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import ChoiceEnd, Event, ResponseExtra, ResponseMetadata
from protocols.core.extra import KeyTree, find_unknown_keys, write_extra_fields
from protocols.core.interfaces import Headers, HttpResponse, ResponseEncoder
from protocols.core.json_text import JsonDecoder
from protocols.core.response_losses import (
    get_content_losses,
    get_single_losses,
    get_written_details,
)

EXTRA_KEY: Final = "(extra)"
"""The key under which the unknown keys of an object are put aside; no worker sends it."""
ObjectName = Literal[
    "chat.completion", "chat.completion.chunk", "text_completion", "text_completion.chunk", ""
]
"""What workers call a response or a chunk of it; any other word is as an unknown key."""
_RESPONSE_KEYS: Final[KeyTree] = {
    "object": frozenset(get_args(ObjectName)),
    **dict.fromkeys(("id", "created", "model", "system_fingerprint", "choices", "error")),
    "usage": {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")),
        "prompt_tokens_details": dict.fromkeys(("cached_tokens", "cache_write_tokens")),
        "completion_tokens_details": {"reasoning_tokens": None},
    },
}
_TOKEN_KEYS: Final = dict.fromkeys(("token", "logprob", "bytes"))
_CHAT_TOKEN_KEYS: Final[KeyTree] = {**_TOKEN_KEYS, "top_logprobs": _TOKEN_KEYS}
_CHOICE_KEYS: Final[KeyTree] = {
    **dict.fromkeys(
        ("index", "delta", "message", "text", "finish_reason", "stop_reason", "matched_stop",
         "token_ids")
    ),
    "logprobs": {
        **dict.fromkeys(("tokens", "token_logprobs", "top_logprobs", "text_offset")),
        **dict.fromkeys(("content", "refusal"), _CHAT_TOKEN_KEYS),
    },
}  # fmt: skip
_FUNCTION_KEYS: Final[KeyTree] = dict.fromkeys(("name", "arguments"))
_MESSAGE_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("content", "reasoning_content", "reasoning", "refusal", "tool_calls")),
    "role": frozenset({"assistant", ""}),
    "function_call": _FUNCTION_KEYS,
}
_CALL_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("index", "id")),
    "type": frozenset({"function", "custom"}),
    "function": _FUNCTION_KEYS,
    "custom": dict.fromkeys(("name", "input")),
}

_decode = JsonDecoder().decode
_encode = msgspec.json.Encoder().encode


# --- decoding -------------------------------------------------------------------------------------


def separate_unknown_keys(body: bytes | bytearray) -> Any:
    """A response as plain objects, each with its unknown keys under ``EXTRA_KEY``.

    Raises one of JSON_ERRORS.
    """
    response = _decode(body)
    if isinstance(response, dict):
        _store_unknown_keys(response, _RESPONSE_KEYS)
        for choice in _list_objects(response.get("choices")):
            _store_unknown_keys(choice, _CHOICE_KEYS)
            for key in ("delta", "message"):
                for message in _list_objects(choice.get(key)):
                    _store_unknown_keys(message, _MESSAGE_KEYS)
                    for call in _list_objects(message.get("tool_calls")):
                        _store_unknown_keys(call, _CALL_KEYS)
    return response


def _store_unknown_keys(value: dict[str, Any], known: KeyTree) -> None:
    value[EXTRA_KEY] = tuple(
        (path, one) for path, one in find_unknown_keys(value, known).items() if one is not None
    )


def _list_objects(value: Any) -> Iterator[dict[str, Any]]:
    """The value, or the values in it, if they are objects."""
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, dict):
            yield one


# --- encoding -------------------------------------------------------------------------------------


class ExtraKeyWriter:
    """Adds the unknown keys of a response to the events or the body of an encoder.

    ``source`` is the encoder's protocol: it does not write the keys of another.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self.pending: list[ResponseExtra] = []
        """The keys that have not been written."""

    @property
    def has_response_keys(self) -> bool:
        """Whether keys of the response itself, other than of its usage, are among them."""
        return any(
            event.scope == "response" and any(path[0] != "usage" for path, _ in event.values)
            for event in self.pending
        )

    def add(self, event: ResponseExtra) -> None:
        """Keep the keys until their object is written; a later chunk's replace an earlier one's."""
        if event.source != self._source:
            return
        if event.scope == "response":
            self._drop_response_keys({path for path, _ in event.values})
        self.pending.append(event)

    def _drop_response_keys(self, paths: AbstractSet[tuple[str, ...]]) -> None:
        for i, one in enumerate(self.pending):
            if one.scope == "response":
                left = tuple(value for value in one.values if value[0] not in paths)
                self.pending[i] = msgspec.structs.replace(one, values=left)

    def merge_events(self, data: bytes) -> bytes:
        """The encoder's SSE events with the keys of the objects that they hold."""
        blocks = data.split(b"\n\n")
        for i in reversed(range(len(blocks))):  # the first delta of a choice has only its role
            head, separator, payload = blocks[i].partition(b"data: ")
            if self.pending and payload.startswith(b"{"):
                payload = self._merge(payload, "delta", holds_usage_only=False)
                blocks[i] = head + separator + payload
        return b"\n\n".join(blocks)

    def merge_body(self, body: bytes) -> bytes:
        """The encoder's complete response with all keys."""
        return self._merge(body, "message", holds_usage_only=True) if self.pending else body

    def take_missing_deltas(self) -> Sequence[tuple[int, bytes]]:
        """The choice and a delta for each object that no event held, for ``merge_events``."""
        missing: dict[tuple[int, int], tuple[int, bytes]] = {}
        # Keys of the response itself are those of the next chunk.
        for event in [event for event in self.pending if event.scope != "response"]:
            if event.scope in ("tool_call", "unknown_call"):
                delta = b'"tool_calls":[{"index":%d}]' % event.call_index
                missing[event.index, event.call_index] = event.index, delta
            else:
                missing[event.index, -1] = event.index, b""
        return tuple(missing.values())

    def _merge(self, payload: bytes, key: str, *, holds_usage_only: bool) -> bytes:
        fields = _decode(payload)
        left = []
        # A whole message has its calls by their places, once those of unknown types are in it.
        for event in sorted(self.pending, key=lambda one: one.scope != "unknown_call"):
            target = _find_target(fields, event, key)
            if target is None:
                left.append(event)
                continue
            values = dict(event.values)
            if event.scope == "response" and not isinstance(fields.get("usage"), dict):
                usage = {path: one for path, one in values.items() if path[0] == "usage"}
                if usage and not holds_usage_only:
                    left.append(msgspec.structs.replace(event, values=tuple(usage.items())))
                values = {path: one for path, one in values.items() if path[0] != "usage"}
            write_extra_fields(target, values)
        self.pending = left
        return _encode(fields)


_OWN_EVENTS: Final = frozenset({ResponseExtra, ResponseMetadata})


class ExtraKeyEncoder:
    """An encoder of OpenAI-like responses that also writes the unknown keys of its own workers.

    ``keys`` are those of a response that ``encoder`` writes itself; ``source`` is its protocol.
    """

    def __init__(self, encoder: ResponseEncoder, source: str, keys: Container[str]) -> None:
        self._encoder, self._keys = encoder, keys
        self.extra_source = source
        self.content_type = encoder.content_type
        self.hidden_reasons: frozenset[str] = getattr(encoder, "hidden_reasons", frozenset())
        self.content_losses = get_content_losses(encoder)
        self.written_details = get_written_details(encoder)
        self.losses = get_single_losses(encoder)
        self._writer = ExtraKeyWriter(source)

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._encoder.headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        out: list[bytes] = []
        position = 0
        while position < len(events):
            event = events[position]
            if isinstance(event, ResponseExtra | ResponseMetadata):
                self._add(event)
            end = self._find_end(events, position)
            if not isinstance(event, ResponseExtra):
                out.append(self._encode(events[position:end]))
            position = end
        return b"".join(out)

    def _find_end(self, events: Sequence[Event], begin: int) -> int:
        """Where the events end that are encoded together from ``begin`` on.

        While there are keys to write, these are a piece and an end of its choice behind it.
        """
        if type(events[begin]) is ResponseExtra:
            return begin + 1
        if self._writer.pending:
            has_end = [ChoiceEnd] == [type(event) for event in events[begin + 1 : begin + 2]]
            return begin + 1 + has_end
        kinds = map(type, events[begin + 1 :])
        count = next((i for i, kind in enumerate(kinds) if kind in _OWN_EVENTS), None)
        return len(events) if count is None else begin + 1 + count

    def _add(self, event: ResponseExtra | ResponseMetadata) -> None:
        """Keep what the encoder does not write of an event."""
        if isinstance(event, ResponseExtra):
            self._writer.add(event)
            return
        for extra in event.list_unwritten(self.extra_source, self._keys):
            self._writer.add(extra)

    def _encode(self, events: Sequence[Event]) -> bytes:
        data = self._encoder.encode_events(events)
        return self._writer.merge_events(data) if data and self._writer.pending else data

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._encoder.encode_error_event(error)

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        written = self._encoder.encode_unary(response)
        self._add(response.metadata)
        for event in response.extra:
            self._writer.add(event)
        return msgspec.structs.replace(written, body=self._writer.merge_body(written.body))


def _find_target(fields: dict[str, Any], event: ResponseExtra, key: str) -> dict[str, Any] | None:
    """The object that an event's keys belong to, in a response or a chunk of it."""
    if event.scope == "response":
        return fields
    choice = next((one for one in fields["choices"] if one["index"] == event.index), None)
    if choice is None or event.scope == "choice":
        return choice
    message: dict[str, Any] = choice.setdefault(key, {})
    if event.scope == "message" or "function_call" in message:
        return message
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if key == "message":
        return _find_call(message, calls, event)
    found = next((one for one in calls if one["index"] == event.call_index), None)
    if found is None and choice.get("finish_reason") is not None:  # only unknown keys came of it
        found = {"index": event.call_index}
        message["tool_calls"] = [*calls, found]
    return found


def _find_call(
    message: dict[str, Any], calls: list[dict[str, Any]], event: ResponseExtra
) -> dict[str, Any] | None:
    """The call of a whole message; one of an unknown type is put into its place."""
    if event.scope != "unknown_call":
        return calls[event.call_index] if event.call_index < len(calls) else None
    if not calls:
        message["content"] = message["content"] or None
    found: dict[str, Any] = {}
    message["tool_calls"] = [*calls[: event.call_index], found, *calls[event.call_index :]]
    return found
