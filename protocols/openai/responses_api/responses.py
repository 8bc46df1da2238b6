"""Events to the response object and the event stream of ``POST /v1/responses``.

Items never overlap in a stream: an item is closed before the next one begins. While a tool call is
open, everything but its own arguments waits, because workers interleave parallel calls.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from protocols.chat.errors import build_error_body
from protocols.chat.responses import HeaderBuilder, build_chat_logprobs
from protocols.chat.unary import UnaryEncoder
from protocols.core.aggregate import UnaryResponse
from protocols.core.custom_tools import CustomInputReader
from protocols.core.errors import (
    ClientError,
    ContextTooLong,
    GatewayError,
    QuotaExceeded,
    RateLimitExceeded,
)
from protocols.core.events import (
    PART_SEPARATOR,
    ChoiceEnd,
    Event,
    FieldValues,
    FinishReason,
    HostedToolCall,
    ReasoningDelta,
    RefusalDelta,
    ResponseExtra,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.extra import write_extra_fields
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext, StoredResponse
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.loss import list_names
from protocols.core.response_losses import ALL_WRITTEN, USAGE_DETAILS, CallLosses
from protocols.openai.responses_api.decoder import INCOMPLETE_PREFIX
from protocols.openai.responses_api.items import Item, seal_reasoning
from protocols.openai.responses_api.params import INCLUDE_LOGPROBS, INCLUDE_REASONING
from protocols.openai.responses_api.requests import SOURCE, ResponsesRequest
from protocols.openai.responses_api.tools import list_tool_objects

_encode = msgspec.json.Encoder().encode

_PART: Final = "content["
"""Begins the key of a part of a message, or of a key in it."""
_COMMON_TIERS: Final = (b"null", b'"auto"', b'"default"')
"""What clients ask for that want none in particular, as JSON."""
ItemStatus = Literal["completed", "incomplete"]


def build_usage(usage: Usage | None) -> Mapping[str, Any] | None:
    """The usage object. Codex needs the total, other clients both details."""
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": usage.cache_write_tokens or 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }


class EventWriter:
    """Writes numbered events. The name of each event stands in its ``event:`` line, too."""

    def __init__(self) -> None:
        self._number = 0
        self._keys: dict[str, dict[str, Any]] = {}

    def add_keys(self, values: FieldValues) -> None:
        """Keep the worker's keys for the next event of their type."""
        for (kind, name), value in values:
            self._keys.setdefault(kind, {})[name] = value

    def list_unwritten(self) -> list[str]:
        """The paths of the keys for which no event came."""
        return [
            f"response.events.{kind}.{name}" for kind in self._keys for name in self._keys[kind]
        ]

    def write(self, kind: str, **fields: Any) -> bytes:
        """One event."""
        more = self._keys.pop(kind, {}) if self._keys else {}
        data = _encode({"type": kind, "sequence_number": self._number, **more, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def write_delta(self, template: tuple[bytes, bytes], delta: str) -> bytes:
        """An event of a template."""
        head, tail = template
        data = _encode(delta)
        if self._keys and (more := self._keys.pop(head[7 : head.index(b"\n")].decode(), None)):
            data += b"," + _encode(more)[1:-1]
        event = head % self._number + data + tail
        self._number += 1
        return event


class _NoEventWriter(EventWriter):
    """Writes nothing: a response that is not streamed needs the items of its events only."""

    def write(self, kind: str, **fields: Any) -> bytes:
        """See ``EventWriter``."""
        del kind, fields
        return b""

    def write_delta(self, template: tuple[bytes, bytes], delta: str) -> bytes:
        """See ``EventWriter``."""
        del template, delta
        return b""


def build_delta_template(kind: str, place: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """A delta event, split where its delta belongs; the head needs the event's number."""
    fields = _encode(place)[1:-1].replace(b"%", b"%%")
    name = kind.encode()
    head = b'event: %b\ndata: {"type":"%b","sequence_number":%%d,%b,"delta":' % (name, name, fields)
    tail = b',"logprobs":[]}\n\n' if kind == "response.output_text.delta" else b"}\n\n"
    return head, tail


# --- items ----------------------------------------------------------------------------------------


class _MessageItem:
    """A message, with a part of text, of a refusal, or both."""

    def __init__(self, writer: EventWriter, id: str, index: int, *, logprobs: bool) -> None:  # noqa: A002
        self._writer = writer
        self.id = id
        self.index = index
        self._includes_logprobs = logprobs
        self._parts: list[dict[str, Any]] = []
        self._part_type = ""
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._template = b"", b""
        self.extra: dict[str, Any] = {}
        """The worker's keys that no event represents."""
        self._part_extra: dict[str, Any] = {}
        self.is_complete = False
        """Whether the worker's keys came, so that a further text is that of another message."""

    def build(self, status: str) -> dict[str, Any]:
        """The item."""
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": self._parts,
        }

    def begin(self) -> bytes:
        """The event that adds the item."""
        added = "response.output_item.added"
        return self._writer.write(added, output_index=self.index, item=self.build("in_progress"))

    def add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A piece of text."""
        begun = b"" if self._part_type == "output_text" else self._begin_part("output_text")
        self._pieces.append(text)
        if not logprobs or not self._includes_logprobs:
            return begun + self._writer.write_delta(self._template, text) if text else begun
        self._logprobs += logprobs
        return begun + self._writer.write(
            "response.output_text.delta",
            **self._place,
            delta=text,
            logprobs=build_chat_logprobs(logprobs).content,
        )

    def add_refusal(self, text: str) -> bytes:
        """A piece of a refusal."""
        begun = b"" if self._part_type == "refusal" else self._begin_part("refusal")
        self._pieces.append(text)
        return begun + self._writer.write_delta(self._template, text)

    def add_part_keys(self, number: int, values: dict[str, Any]) -> bytes:
        """The worker's keys of a part, after its text. The events of an earlier one are gone."""
        if number < len(self._parts):
            self._parts[number] |= values
            return b""
        self._part_extra |= values
        annotations = values.get("annotations")
        name, place = "response.output_text.annotation.added", self._place
        return b"".join(
            self._writer.write(name, **place, annotation_index=i, annotation=annotation)
            for i, annotation in enumerate(annotations if isinstance(annotations, list) else ())
        )

    def add_unknown_part(self, part: Any) -> bytes:
        """A part of the worker's that nobody knows."""
        ended, place = self.end_part(), self._place
        self._parts.append(part)
        added = self._writer.write("response.content_part.added", **place, part=part)
        return ended + added + self._writer.write("response.content_part.done", **place, part=part)

    def end(self, status: ItemStatus) -> tuple[bytes, Mapping[str, Any]]:
        """The last events, and the complete item."""
        ended = self.end_part()
        item = {**self.build(status), **self.extra}
        done = "response.output_item.done"
        return ended + self._writer.write(done, output_index=self.index, item=item), item

    @property
    def _place(self) -> dict[str, Any]:
        return {
            "item_id": self.id,
            "output_index": self.index,
            "content_index": len(self._parts),
        }

    def _build_part(self, text: str) -> dict[str, Any]:
        if self._part_type == "refusal":
            return {"type": "refusal", "refusal": text} | self._part_extra
        logprobs = build_chat_logprobs(self._logprobs).content
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return part | self._part_extra

    def _begin_part(self, kind: str) -> bytes:
        ended = self.end_part()
        self._part_type = kind
        self._template = build_delta_template(f"response.{kind}.delta", self._place)
        added = "response.content_part.added"
        return ended + self._writer.write(added, **self._place, part=self._build_part(""))

    def end_part(self) -> bytes:
        """The last events of the open part, if there is one."""
        if not self._part_type:
            return b""
        text, place = "".join(self._pieces), self._place
        part = self._build_part(text)
        if self._part_type == "refusal":
            done = self._writer.write("response.refusal.done", **place, refusal=text)
        else:
            done = self._writer.write(
                "response.output_text.done", **place, text=text, logprobs=part["logprobs"]
            )
        done += self._writer.write("response.content_part.done", **place, part=part)
        self._parts.append(part)
        self._part_type, self._pieces, self._logprobs, self._part_extra = "", [], [], {}
        return done


class _ReasoningItem:
    """Reasoning: as what the worker says it is, else as the summary that the client asked for."""

    def __init__(
        self,
        writer: EventWriter,
        id: str,  # noqa: A002 - the wire's word
        index: int,
        *,
        is_summary: bool,
        seals: bool,
    ) -> None:
        self._writer = writer
        self.id = id
        self.extra: dict[str, Any] = {}
        """The worker's keys that no event represents."""
        self._seals = seals
        self.index = index
        self._parts: list[dict[str, str]] = []
        """The complete parts."""
        self._pieces: list[str] = []
        self._signature: str | None = None
        self.sealed: str | None = None
        """All of it with its signature, at the end; None if it has no signature."""
        self._is_summary = self._is_default_summary = is_summary
        self._event = ""
        self._place: Mapping[str, Any] = {}
        self._template: Any = None
        self._place_part(is_summary=is_summary)

    @property
    def _part_type(self) -> str:
        return "summary_text" if self._is_summary else "reasoning_text"

    def _place_part(self, *, is_summary: bool) -> None:
        """Begin to count the next part, of the summary or of the reasoning itself."""
        self._is_summary = is_summary
        kind = "reasoning_summary_text" if is_summary else "reasoning_text"
        self._event = f"response.{kind}"
        part_index = "summary_index" if is_summary else "content_index"
        number = sum(part["type"] == self._part_type for part in self._parts)
        self._place = {"item_id": self.id, "output_index": self.index, part_index: number}
        self._template = build_delta_template(f"{self._event}.delta", self._place)

    def _build(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "summary": []}
        for part in self._parts:
            key = "summary" if part["type"] == "summary_text" else "content"
            item.setdefault(key, []).append(part)
        return item | {"status": status}

    def _write_part(self, step: str, text: str) -> bytes:
        name = "reasoning_summary_part" if self._is_summary else "content_part"
        part = {"type": self._part_type, "text": text}
        return self._writer.write(f"response.{name}.{step}", **self._place, part=part)

    def begin(self) -> bytes:
        """The event that adds the item."""
        item = self._build("in_progress")
        added = "response.output_item.added"
        return self._writer.write(added, output_index=self.index, item=item)

    def add(self, event: ReasoningDelta) -> bytes:
        """A piece of reasoning. It is what the worker says, or else what the client asked for."""
        text, ended = event.text, b""
        self._signature = event.signature or self._signature
        is_summary = self._is_default_summary if event.is_summary is None else event.is_summary
        if event.is_new_part:
            ended, text = self._end_part(), text.removeprefix(PART_SEPARATOR)
        if not text and not event.signature:
            return ended
        if is_summary != self._is_summary and event.text:
            ended += self._end_part()
            self._place_part(is_summary=is_summary)
        begun = b"" if self._pieces else self._write_part("added", "")
        self._pieces.append(text)
        written = self._writer.write_delta(self._template, text) if text else b""
        return ended + begun + written

    def _end_part(self) -> bytes:
        """The last events of the open part, if there is one."""
        if not self._pieces:
            return b""
        text = "".join(self._pieces)
        ended = self._writer.write(f"{self._event}.done", **self._place, text=text)
        ended += self._write_part("done", text)
        self._parts.append({"type": self._part_type, "text": text})
        self._pieces = []
        self._place_part(is_summary=self._is_summary)
        return ended

    def end(self, status: ItemStatus) -> tuple[bytes, Mapping[str, Any]]:
        """The last events, and the complete item. What the worker encrypted is not packed again."""
        ended = self._end_part()
        item = self._build(status)
        if self._seals or self._signature is not None:
            text = PART_SEPARATOR.join(part["text"] for part in self._parts)
            self.sealed = seal_reasoning(text, self._signature)
        if self._seals:
            item["encrypted_content"] = self.sealed
        item |= self.extra
        done = "response.output_item.done"
        return ended + self._writer.write(done, output_index=self.index, item=item), item


_decode_object = JsonDecoder(dict[str, Any]).decode


class _CallItem:
    """A call of a function, a custom tool or the client's tool search."""

    def __init__(
        self,
        writer: EventWriter,
        id: str,  # noqa: A002 - the wire's word
        index: int,
        fields: Mapping[str, Any],
        reader: CustomInputReader | None = None,
    ) -> None:
        """``fields`` are constant; ``reader`` takes the input out of the arguments."""
        self._writer = writer
        self.id = id
        self.index = index
        self._fields = fields
        self._reader = reader
        self._kind = fields["type"]
        self._key = "input" if self._kind == "custom_tool_call" else "arguments"
        event = (
            "custom_tool_call_input"
            if self._kind == "custom_tool_call"
            else "function_call_arguments"
        )
        self._event = f"response.{event}"
        place = {"item_id": id, "output_index": index}
        self._template = build_delta_template(f"{self._event}.delta", place)
        self._pieces: list[str] = []
        self.extra: dict[str, Any] = {}
        """The worker's keys that no event represents."""

    def _build(self, status: str, arguments: Any) -> dict[str, Any]:
        return {"id": self.id, **self._fields, "status": status, self._key: arguments}

    def begin(self) -> bytes:
        """The event that adds the item."""
        empty: Any = {} if self._kind == "tool_search_call" else ""
        item = self._build("in_progress", empty)
        added = "response.output_item.added"
        return self._writer.write(added, output_index=self.index, item=item)

    def add(self, text: str) -> bytes:
        """A piece of the arguments."""
        return self._add_piece(text if self._reader is None else self._reader.feed(text))

    def _add_piece(self, text: str) -> bytes:
        if not text:
            return b""
        self._pieces.append(text)
        if self._kind == "tool_search_call":  # its arguments are an object, and not streamed
            return b""
        return self._writer.write_delta(self._template, text)

    def list_further_arguments(self) -> FieldValues:
        """The arguments that are not the input of a custom tool."""
        return () if self._reader is None else self._reader.list_further_arguments()

    def end(self, status: ItemStatus) -> tuple[bytes, Mapping[str, Any]]:
        """The last events, and the complete item."""
        ended = b"" if self._reader is None else self._add_piece(self._reader.close())
        text: Any = "".join(self._pieces)
        if self._kind == "tool_search_call":
            text = _parse_search_arguments(text)
        else:
            if self._kind == "function_call" and not text and status == "completed":
                ended += self._add_piece("{}")
                text = "{}"
            more = {"name": self._fields["name"]} if self._kind == "function_call" else {}
            place = {"item_id": self.id, "output_index": self.index}
            ended += self._writer.write(f"{self._event}.done", **place, **more, **{self._key: text})
        item = {**self._build(status, text), **self.extra}
        done = "response.output_item.done"
        return ended + self._writer.write(done, output_index=self.index, item=item), item


def _parse_search_arguments(text: str) -> Any:
    try:
        return _decode_object(text)
    except msgspec.DecodeError:
        return {"query": text}


_OutputItem = _MessageItem | _ReasoningItem | _CallItem

# --- the response ---------------------------------------------------------------------------------

HEARTBEAT_INTERVAL: Final = 15.0
"""Seconds of a worker's silence until an event is sent."""
_SILENCES_BEFORE_START: Final = 2
"""A stream that has begun can't fail with a status any more."""
_GENERATED_CALL_ID: Final = re.compile(r"call_\d{1,4}_\d{1,4}")
"""An id that a decoder made, because the worker sent none. It would repeat in the next turn."""
FINISH_REASONS: Final[Mapping[FinishReason, str | None]] = {
    "eos": None,
    "stop": None,
    "length": "max_output_tokens",
    "tool_calls": None,
    "content_filter": "content_filter",
    "unknown": None,
}
"""Why a response is incomplete; None if it is complete."""
_ITEM_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
}


class ResponsesEncoder:
    """Encodes the response to a request of this API. See ``protocols.core.interfaces``."""

    content_type = "text/event-stream; charset=utf-8"
    writes_hosted_tools = True
    content_losses = ALL_WRITTEN
    written_details = USAGE_DETAILS
    extra_source = SOURCE

    def __init__(
        self,
        decoded: ResponsesRequest,
        about: ResponseContext,
        build_headers: HeaderBuilder,
        *,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
    ) -> None:
        self.heartbeat_interval = heartbeat_interval
        self.stored_response: StoredResponse | None = None
        self.losses = CallLosses()
        self._decoded = decoded
        self._about = about
        self._build_headers = build_headers
        self._started_at = about.clock()
        self._token = secrets.token_hex(16)
        self._id = f"resp_{self._token}"
        self._created = about.created
        self._extra: dict[tuple[str, ...], Any] = {}
        """The worker's keys of the response that no event represents."""
        self._writer = EventWriter()
        self._has_begun = False
        self._open_item: _OutputItem | None = None
        self._open_call = -1
        """The ``call_index`` of the open item, if it is a call."""
        self._waiting: list[Event] = []
        """Events that follow an open call."""
        self._call_ids: set[str] = set()
        self._item_count = 0
        self._output: list[Mapping[str, Any]] = []
        self._sealed: dict[str, str] = {}
        """Signed reasoning by the id of its item, for the store alone."""
        self._usage: Usage | None = None
        self._status = "completed"
        self._incomplete_reason: str | None = None
        self._final: Mapping[str, Any] = {}

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._build_headers()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        self._writer = _NoEventWriter()
        self.encode_events(response.events)
        return HttpResponse(200, _encode(self._final))

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``.

        Codex ignores ``error`` events, so a failure is always ``response.failed``. Open calls are
        left out, since Codex would run them.
        """
        begun = self._begin()
        if isinstance(self._open_item, _CallItem):
            self._open_item = None
        begun += self._end_item("incomplete")
        failure = {"code": _find_failure_code(error), "message": _build_failure_message(error)}
        self._final = self._build_response("failed", error=failure, is_over=True)
        if self._decoded.stores:
            self.stored_response = self._build_stored()
        return begun + self._writer.write("response.failed", response=self._final)

    def encode_heartbeat(self, silence: float) -> bytes:
        """See ``protocols.core.interfaces.SupportsHeartbeat``.

        Codex counts events, not comments, so the state of the response is sent again.
        """
        if not self._has_begun and silence < _SILENCES_BEFORE_START * self.heartbeat_interval:
            return b""
        response = self._build_response("in_progress")
        return self._begin() or self._writer.write("response.in_progress", response=response)

    # --- events -----------------------------------------------------------------------------------

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case Usage():
                self._usage = event
                return b""
            case StreamEnd():
                return self._end_response()
            case ResponseMetadata() if not self._has_begun:
                self._keep_identity(event)
                return b""
            case ResponseExtra(source=source, scope="response") if source == SOURCE:
                self._extra |= dict(event.values)
                return b""
            case ResponseExtra(scope="event", values=values) if len(values[0][0]) > 1:
                self._writer.add_keys(values)
                return b""
            case ResponseExtra(source=source) if source == SOURCE:
                return self._begin() + self._encode_output(event)
            case (
                TextDelta()
                | ReasoningDelta()
                | RefusalDelta()
                | ToolCallStart()
                | ToolCallDelta()
                | HostedToolCall()
                | ChoiceEnd()
            ):
                return self._begin() + self._encode_output(event)
            case _:
                return b""

    def _keep_identity(self, served: ResponseMetadata) -> None:
        """Show a worker's own id and time. What is stored here has an id that nobody can guess."""
        identity = served.get_identity(SOURCE)
        self._created = identity.get("created", self._created)
        if not self._decoded.stores:
            self._id = identity.get("id", self._id)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._build_response("in_progress")
        created = self._writer.write("response.created", response=response)
        return created + self._writer.write("response.in_progress", response=response)

    def _encode_output(self, event: Event) -> bytes:
        if isinstance(event, ChoiceEnd):
            return self._end_output(event)
        if self._open_call >= 0:
            if isinstance(event, ResponseExtra) and event.call_index == self._open_call:
                return self._encode_item_event(event)
            if isinstance(event, ToolCallDelta) and event.call_index == self._open_call:
                assert isinstance(self._open_item, _CallItem)  # noqa: S101 - as _open_call says
                return self._open_item.add(event.text)
            self._waiting.append(event)
            return b""
        return self._encode_item_event(event)

    def _encode_item_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text, logprobs=logprobs):
                if not text and not logprobs:
                    return b""
                begun, message = self._open_message()
                return begun + message.add_text(text, logprobs)
            case RefusalDelta(text):
                begun, message = self._open_message()
                return begun + (message.add_refusal(text) if text else b"")
            case ReasoningDelta():
                return self._encode_reasoning(event)
            case ResponseExtra(scope="part"):
                item = self._open_item
                return item.end_part() if isinstance(item, _MessageItem) else b""
            case ResponseExtra(scope="event", values=((path, fields),)):
                return self._write_worker_event(path[0], fields)
            case ResponseExtra(values=values) if self._open_item is not None:
                return self._add_item_keys(self._open_item, values)
            case ToolCallStart():
                return self._begin_call(event)
            case HostedToolCall():
                return self._encode_hosted_call(event)
            case _:  # the arguments of a call that parallel_tool_calls forbids
                return b""

    def _write_worker_event(self, kind: str, fields: Any) -> bytes:
        """An event that nobody knows; one about an item is that of the open one."""
        item = self._open_item
        place = {} if item is None else {"item_id": item.id, "output_index": item.index}
        values = {} if fields is True else fields
        values = {key: place.get(key) if one is None else one for key, one in values.items()}
        return self._writer.write(kind, **values)

    def _add_item_keys(self, item: _OutputItem, values: FieldValues) -> bytes:
        """Add the worker's keys of an item, and of the only part of a message."""
        item.extra |= {path[0]: value for path, value in values if not path[0].startswith(_PART)}
        if not isinstance(item, _MessageItem):
            return b""
        item.is_complete = True
        parts: dict[int, dict[str, Any]] = {}
        for path, value in values:
            if path[0].startswith(_PART) and path[1:]:
                number = int(path[0].removeprefix(_PART).removesuffix("]"))
                parts.setdefault(number, {})[path[1]] = value
        others = [one for path, one in values if path[0].startswith(_PART) and not path[1:]]
        written = [item.add_part_keys(number, keys) for number, keys in parts.items()]
        return b"".join((*written, *map(item.add_unknown_part, others)))

    def _encode_reasoning(self, event: ReasoningDelta) -> bytes:
        """A piece of reasoning. The worker's id is kept: what it encrypts is bound to it."""
        if not event.text and not event.signature and event.id is None:
            return b""
        item, begun = self._open_item, b""
        if not isinstance(item, _ReasoningItem) or event.id not in (None, item.id):
            begun = self._end_item("completed")
            item = _ReasoningItem(
                self._writer,
                event.id or self._make_item_id("reasoning"),
                len(self._output),
                is_summary=self._decoded.uses_summaries,
                seals=self._seals_reasoning,
            )
            self._open_item = item
            begun += item.begin()
        return begun + item.add(event)

    def writes_signature(self, event: ReasoningDelta) -> bool:
        """See ``protocols.core.interfaces.SupportsSignedReasoning``."""
        return event.redacted is None and (self._seals_reasoning or self._decoded.stores)

    @property
    def _seals_reasoning(self) -> bool:
        """Whether clients get reasoning packed, because nothing is stored for them."""
        return INCLUDE_REASONING in self._decoded.include or self._decoded.fields.get(
            "store"
        ) == Raw(b"false")

    def _open_message(self) -> tuple[bytes, _MessageItem]:
        item = self._open_item
        if isinstance(item, _MessageItem) and not item.is_complete:
            return b"", item
        ended = self._end_item("completed")
        name = self._make_item_id("message")
        logprobs = INCLUDE_LOGPROBS in self._decoded.include
        item = _MessageItem(self._writer, name, len(self._output), logprobs=logprobs)
        self._open_item = item
        return ended + item.begin(), item

    def _begin_call(self, event: ToolCallStart) -> bytes:
        if self._call_ids and self._decoded.request.parallel_tools is False:
            self.losses.add(event.call_index)
            return b""
        ended = self._end_item("completed")
        identity = self._decoded.tools.identify(event.name)
        is_custom = identity.kind == "custom" or event.kind == "custom"
        kind = "custom_tool_call" if is_custom else "function_call"
        fields: dict[str, Any] = {"type": kind, "call_id": self._make_call_id(event.id)}
        if identity.kind == "tool_search":
            fields = fields | {"type": "tool_search_call", "execution": "client"}
        else:
            fields["name"] = identity.name
        if identity.namespace is not None:
            fields["namespace"] = identity.namespace
        reader = CustomInputReader() if is_custom and event.kind != "custom" else None
        name = self._make_item_id(fields["type"])
        item = _CallItem(self._writer, name, len(self._output), fields, reader)
        self._open_item, self._open_call = item, event.call_index
        return ended + item.begin()

    def _encode_hosted_call(self, event: HostedToolCall) -> bytes:
        """A call that the worker made itself. It keeps its id, which the worker may check."""
        item = _decode_object(event.item)
        if not isinstance(item.get("id"), str):
            item["id"] = self._make_item_id(event.kind)
        ended, place = self._end_item("completed"), {"output_index": len(self._output)}
        self._output.append(item)
        added = {**item, "status": "in_progress"} if "status" in item else item
        written = [ended, self._writer.write("response.output_item.added", **place, item=added)]
        names = {"item_id": item["id"], **place}
        for kind, fields in event.events:
            values = {key: names.get(key, one) for key, one in fields.items()}
            written.append(self._writer.write(kind, **values))
        written.append(self._writer.write("response.output_item.done", **place, item=item))
        return b"".join(written)

    def _end_item(self, status: ItemStatus) -> bytes:
        if self._open_item is None:
            return b""
        ended, item = self._open_item.end(status)
        self._output.append(item)
        if isinstance(self._open_item, _CallItem):
            further = self._open_item.list_further_arguments()
            self.losses.add_arguments(self._open_call, further)
        sealed = getattr(self._open_item, "sealed", None)
        if sealed is not None and "encrypted_content" not in item:
            self._sealed[item["id"]] = sealed
        self._open_item, self._open_call = None, -1
        return ended

    def _end_output(self, event: ChoiceEnd) -> bytes:
        """End the last item; before it, encode what waited for an open call."""
        self._set_status(event)
        out = []
        while self._waiting:
            out.append(self._end_item("completed"))
            waiting, self._waiting = self._waiting, []
            out += [self._encode_output(one) for one in waiting]
        out.append(self._end_item("completed" if self._status == "completed" else "incomplete"))
        return b"".join(out)

    def _set_status(self, end: ChoiceEnd) -> None:
        word = end.own_word
        if word is not None and not word.startswith(INCOMPLETE_PREFIX):
            self._status = word
            return
        self._incomplete_reason = (
            FINISH_REASONS[end.finish_reason]
            if word is None
            else word.removeprefix(INCOMPLETE_PREFIX)
        )
        self._status = "completed" if self._incomplete_reason is None else "incomplete"

    def _end_response(self) -> bytes:
        begun = self._begin()
        self._final = self._build_response(self._status, is_over=True)
        if self._decoded.stores:
            self.stored_response = self._build_stored()
        kind = "completed" if self._status == "completed" else "incomplete"
        written = self._writer.write(f"response.{kind}", response=self._final)
        self.losses += list_names(self._writer.list_unwritten())
        return begun + written

    # --- objects ----------------------------------------------------------------------------------

    def _make_item_id(self, kind: str) -> str:
        """A new id, which nobody can guess."""
        self._item_count += 1
        return f"{_ITEM_PREFIXES.get(kind, 'item')}_{self._token}{self._item_count:02x}"

    def _make_call_id(self, name: str) -> str:
        if not name or name in self._call_ids or _GENERATED_CALL_ID.fullmatch(name):
            name = f"call_{secrets.token_hex(12)}"
        self._call_ids.add(name)
        return name

    def _build_response(
        self, status: str, error: Mapping[str, Any] | None = None, *, is_over: bool = False
    ) -> Mapping[str, Any]:
        decoded, about, fields = self._decoded, self._about, self._decoded.fields
        reason = self._incomplete_reason if status == "incomplete" else None
        completed_at = None
        if status == "completed":
            completed_at = self._created + int(about.clock() - self._started_at)

        def repeat(name: str, default: Any = None) -> Any:
            return fields.get(name, default)

        values = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": completed_at,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "instructions": repeat("instructions"),
            "max_output_tokens": repeat("max_output_tokens"),
            "max_tool_calls": repeat("max_tool_calls"),
            "model": about.model,
            "output": self._output if is_over else [],
            "parallel_tool_calls": repeat("parallel_tool_calls", default=True),
            "previous_response_id": repeat("previous_response_id"),
            "prompt_cache_key": repeat("prompt_cache_key"),
            "reasoning": _repeat_reasoning(fields),
            "safety_identifier": repeat("safety_identifier"),
            "service_tier": self._find_tier() if is_over else repeat("service_tier", "auto"),
            "store": decoded.stores,
            "temperature": repeat("temperature"),
            "text": _repeat_text(fields),
            "tool_choice": repeat("tool_choice", "auto"),
            "tools": list_tool_objects(fields.get("tools")),
            "top_logprobs": repeat("top_logprobs", 0),
            "top_p": repeat("top_p"),
            "truncation": repeat("truncation", "disabled"),
            "usage": build_usage(self._usage) if is_over else None,
            "user": repeat("user"),
            "metadata": repeat("metadata", {}),
        }
        if "presence_penalty" in fields:
            values["presence_penalty"] = repeat("presence_penalty")
        if "frequency_penalty" in fields:
            values["frequency_penalty"] = repeat("frequency_penalty")
        values |= {path[0]: one for path, one in self._extra.items() if len(path) == 1}
        write_extra_fields(values, {path: one for path, one in self._extra.items() if path[1:]})
        return values

    def _find_tier(self) -> str | None:
        """The tier of a worker that names none; None if the client asked for a certain one."""
        asked = self._decoded.fields.get("service_tier")
        return "default" if asked is None or bytes(asked) in _COMMON_TIERS else None

    def _build_stored(self) -> StoredResponse:
        """The response with its input, as ``state`` reads it. Input items get ids."""
        items: list[Item] = []
        names = [item["id"] for item in self._output]
        for item in self._decoded.input:
            kind = item.get("type") or "message"
            if item.get("id") is None:
                name = self._make_item_id(kind)
                names.append(name)
                item = {"id": name, "type": kind, **{k: v for k, v in item.items() if k != "id"}}  # noqa: PLW2901 - the item with its id
            items.append(item)
        body = {
            "response": self._final,
            "input": items,
            "history": self._decoded.history,
            "sealed": self._sealed,
        }
        return StoredResponse(self._final["id"], tuple(names), _encode(body))


class InputTokensEncoder(UnaryEncoder):
    """Encodes the number of tokens of a request's input."""

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return build_input_tokens_response(len(response.tokens.ids))


def build_input_tokens_response(count: int) -> HttpResponse:
    """The response to ``POST /responses/input_tokens``."""
    return HttpResponse(200, _encode({"object": "response.input_tokens", "input_tokens": count}))


def _repeat_reasoning(fields: Mapping[str, Raw]) -> Mapping[str, Any]:
    sent: Mapping[str, Any] = decode_json(fields["reasoning"]) if "reasoning" in fields else {}
    summary = sent.get("summary") or sent.get("generate_summary")
    return {"effort": sent.get("effort"), "summary": summary}


def _repeat_text(fields: Mapping[str, Raw]) -> Mapping[str, Any]:
    sent: Mapping[str, Any] = decode_json(fields["text"]) if "text" in fields else {}
    text = {"format": sent.get("format") or {"type": "text"}}
    if sent.get("verbosity") is not None:
        text["verbosity"] = sent["verbosity"]
    return text


def _find_failure_code(error: GatewayError) -> str:
    match error:
        case ContextTooLong():
            return "context_length_exceeded"
        case RateLimitExceeded():
            return "rate_limit_exceeded"
        case QuotaExceeded():
            return "insufficient_quota"
        case ClientError():
            return "invalid_prompt"
        case _:
            return "server_error"


def _build_failure_message(error: GatewayError) -> str:
    message = build_error_body(error)[1].message
    if isinstance(error, RateLimitExceeded) and error.retry_after is not None:
        return f"{message} Please try again in {error.retry_after:g}s."  # Codex reads the seconds
    return message
