"""Readers of responses that are passed through, whole and as streams.

A response keeps the client's contract. An event of a stream is forwarded as it is only if its type
says that it holds nothing but a piece of text, or of the arguments of one tool call, as the event
before it, which was decoded and encoded as a sample; any other event is decoded and written by the
client's encoder. A unary response is forwarded if the encoder would write the same.

What must never happen:

- A worker's name of the model, or an error of its own, in a client's response.
- A stream in which forwarded and encoded events do not fit together: they have one id, one model
  and one count of calls, and the decoder knows what was forwarded without it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import contains
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from protocols.chat.chunks import (
    CHUNK_RUNS,
    ChunkRun,
)
from protocols.chat.wire_responses import WireChoice, WireDelta, read_text_response
from protocols.core.errors import GatewayError, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    ResponseExtra,
    StreamEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.interfaces import ResponseDecoder, ResponseEncoder
from protocols.core.json_text import TEXT_ERRORS, decode_json
from protocols.core.request import Request
from protocols.core.sse import (
    MAX_EVENT_BYTES,
    has_lone_surrogate,
    normalize_newlines,
    split_plain_events,
)
from protocols.core.token_counts import UsageReader
from protocols.core.vectors import Span, find_vectors, list_gaps
from protocols.json_body import JSON_ERRORS

_encode = msgspec.json.Encoder().encode

_ESCAPED_LETTER: Final = re.compile(rb"\\u00[4-7]")
"""A letter that is written as an escape may belong to a key."""
_QUOTED_KEYS: Final = {key: b'"%b"' % key.encode() for key in ("id", "model", "model_name")}
_PATTERNS: Final = {
    key: re.compile(rb'%b\s*+:\s*+("(?:[^"\\]|\\.)*+")' % quoted_key)
    for key, quoted_key in _QUOTED_KEYS.items()
}
"""Finds the values of the keys that are replaced."""


class NameReplacer(Struct, frozen=True):
    """Replaces the values of some keys in JSON, in any spelling.

    A model's name is replaced wherever it stands, another key only in the outermost of the objects
    that have it: a tool call has an id of its own.
    ``names`` are the new values by key; ``only`` replaces no other value than this.
    """

    names: Mapping[str, str]
    only: str | None = None

    def shows(self, data: bytes, model: Any) -> bool:
        """Whether the only name in ``data`` is this one of the model, and the new value is, too."""
        return self.names == {"model": model} and data.count(_QUOTED_KEYS["model"]) == 1

    def replace(self, data: bytes) -> bytes:
        """``data`` with the new values."""
        for key, name in self.names.items():
            start = data.find(_QUOTED_KEYS[key])
            if start >= 0:
                data = self._replace_values(data, start, key, _encode(name))
        return data

    def replace_outside(self, data: bytes, spans: Sequence[Span]) -> bytes:
        """``data`` with the new values, but what is in ``spans`` as it is."""
        copied = 0
        parts: list[bytes] = []
        for start, end in list_gaps(data, spans):
            gap = data[start:end]
            if (replaced := self.replace(gap)) != gap:
                parts += (data[copied:start], replaced)
                copied = end
        return b"".join((*parts, data[copied:])) if parts else data

    def _replace_values(self, data: bytes, start: int, key: str, value: bytes) -> bytes:
        """``data`` with the new values of a key, which first occurs at ``start``."""
        quoted_key, match = _QUOTED_KEYS[key], _PATTERNS[key].match
        copied = 0
        parts: list[bytes] = []
        is_anywhere = key == "model" or data.find(quoted_key, start + 1) < 0
        outermost = None if is_anywhere else _find_outermost(data, quoted_key)
        while start >= 0:
            found = match(data, start) if outermost is None or start in outermost else None
            if found is not None and (self.only is None or self._is_only(found[1])):
                value_start, value_end = found.span(1)
                parts += (data[copied:value_start], value)
                copied = value_end
            start = data.find(quoted_key, start + 1)
        parts.append(data[copied:])
        return b"".join(parts)

    def _is_only(self, value: bytes) -> bool:
        try:
            return bool(decode_json(value) == self.only)
        except JSON_ERRORS:
            return False


_find_tokens: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|[][{}]').finditer
"""The strings and brackets of JSON."""


def _find_outermost(data: bytes, quoted_key: bytes) -> frozenset[int] | None:
    """Where a key stands in the outermost of the objects that have it; None if there is none."""
    depth = 0
    places: dict[int, list[int]] = {}
    for token in _find_tokens(data):
        text = token[0]
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
        elif text == quoted_key:
            places.setdefault(depth, []).append(token.start())
    return frozenset(places[min(places)]) if places else None


_VALUE: Final = rb'(\[[^][]*+\]|\{[^{}]*+\}|"(?:[^"\\]|\\.)*+"|[^][{}",\s]++)'
"""A JSON value that holds at most one list or object."""


class TokenCountReplacer:
    """Replaces the values of a key that holds a worker's implausible token count.

    ``keeps_lists``: a value in a list stays in a list.
    """

    def __init__(self, key: str, *, keeps_lists: bool = False) -> None:
        self._keeps_lists = keeps_lists
        quoted_key = re.escape(b'"%b"' % key.encode())
        self._value = re.compile(rb"(%b\s*+:\s*+)%b" % (quoted_key, _VALUE))
        self._member = re.compile(
            rb"(?:,\s*+%b\s*+:\s*+%b)|(?:%b\s*+:\s*+%b\s*+,?+)"
            % (quoted_key, _VALUE, quoted_key, _VALUE)
        )

    def replace(self, data: bytes, count: int) -> bytes:
        """``data`` with this count."""

        def write_count(found: re.Match[bytes]) -> bytes:
            in_list = self._keeps_lists and found[2][:1] == b"["
            return found[1] + (b"[%d]" if in_list else b"%d") % count

        return self._value.sub(write_count, data)

    def remove(self, data: bytes) -> bytes:
        """``data`` without the key."""
        return self._member.sub(b"", data)


CountCorrection = Callable[[bytes, Sequence[Event]], bytes]
"""Corrects the token counts in a response or an event, for which these events were decoded."""


class RunningCountCorrection:
    """A ``CountCorrection`` of the tokens so far, which a stream's events have under ``key``.

    ``has_ignored_counts`` tells whether a count of the worker was implausible.
    """

    def __init__(self, key: str, has_ignored_counts: Callable[[], bool]) -> None:
        self._replacer = TokenCountReplacer(key)
        self._has_ignored_counts = has_ignored_counts
        self._tokens = 0

    def __call__(self, data: bytes, events: Sequence[Event]) -> bytes:
        """See ``CountCorrection``."""
        self._tokens += sum(event.tokens for event in events if type(event) is TextDelta)
        return self._replacer.replace(data, self._tokens) if self._has_ignored_counts() else data


class UnaryPassthroughReader:
    """Reads a unary response that may hold anything; a stream is encoded.

    ``correct_counts`` is applied if the token counts are implausible; without it, such a response
    is encoded.
    """

    def __init__(
        self,
        decoder: ResponseDecoder,
        names: NameReplacer,
        correct_counts: CountCorrection | None = None,
    ) -> None:
        self._decoder = decoder
        self._names = names
        self._correct_counts = correct_counts
        self._chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._chunks += pieces
        return b"", self._decoder.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        body = b"".join(self._chunks).strip()
        events = self._decoder.close()
        if body[:1] != b"{":
            return None, events
        if _has_ignored_usage(events):
            if self._correct_counts is None:
                return None, events
            body = self._correct_counts(body, events)
        return self._names.replace(body), events


def _has_ignored_usage(events: Sequence[Event]) -> bool:
    """Whether the response ended, and its token counts are implausible."""
    end = events[-1] if events else None
    return type(end) is StreamEnd and end.has_ignored_usage


class UnaryDecoder(ResponseDecoder, Protocol):
    """A decoder that also tells how the worker wrote the choices of a unary response."""

    @property
    def unary_choices(self) -> Sequence[WireChoice]:
        """The choices, once they are decoded; none of embeddings, and of a stream."""


class DecoderFactory(Protocol):
    """Creates the decoder of the response to a request.

    ``skims``: it decodes a unary response only as far as the gateway itself needs it.
    """

    def __call__(self, request: Any, *, skims: bool = False) -> UnaryDecoder:
        """The decoder."""


class StandardUnaryReader(Struct, eq=False):
    """Reads a unary response that is decoded and encoded if it deviates from the protocol.

    A JSON document is decoded once, when all of it is there; a response with one text by
    ``read_text_response``, and any other by the skimming decoder.
    """

    _request: Request
    _create_decoder: DecoderFactory
    _names: NameReplacer
    _finish_reasons: frozenset[str]
    _reads_text: bool
    """Whether the response has one text, and the decoder makes the events of
    ``read_text_response``."""
    _skimmer: UnaryDecoder | None = None
    """Once it is needed: at once for what is no JSON document."""
    _chunks: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        is_first = not self._chunks
        self._chunks += pieces
        if is_first and not pieces[0].startswith(b"{"):
            self._skimmer = self._create_decoder(self._request, skims=True)
        return b"", () if self._skimmer is None else self._skimmer.feed(b"".join(pieces))

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        document = b"".join(self._chunks)
        self._chunks = []
        if self._skimmer is None and self._reads_text and not _has_escaped_letters(document):
            text = read_text_response(document, UsageReader(self._request))
            if text is not None:
                body = document.strip()
                is_shown = self._names.shows(body, text[0].model)
                return body if is_shown else self._names.replace(body), text[1]
        events, is_standard, is_complete = self._skim(document)
        body = document.strip()
        if not is_complete:
            del document, events  # of a large response only one copy is held
            decoder = self._create_decoder(self._request)
            events = [*decoder.feed(body), *decoder.close()]
        if not is_standard:
            return None, events
        vectors = find_vectors(body) if self._request.kind == "embedding" else []
        return self._names.replace_outside(body, vectors), events

    def _skim(self, document: bytes) -> tuple[Sequence[Event], bool, bool]:
        """The events, whether the client may have the document, and whether they are all.

        Raises what the decoder raises.
        """
        skimmer, self._skimmer = self._skimmer, None
        if skimmer is None:
            skimmer = self._create_decoder(self._request, skims=True)
            events: Sequence[Event] = [*skimmer.feed(document), *skimmer.close()]
        else:
            events = skimmer.close()
        if document.lstrip()[:1] != b"{":
            return events, False, True
        choices = skimmer.unary_choices
        is_standard = not _has_ignored_usage(events) and self._is_standard(document, choices)
        if self._request.kind == "embedding" and ResponseExtra in map(type, events):
            is_standard = False  # its indices are wrong
        # Without usage, tokens are counted, by their log probabilities if there are any.
        is_complete = is_standard and not (choices and Usage not in map(type, events))
        return events, is_standard, is_complete

    def _is_standard(self, body: bytes, choices: Sequence[WireChoice]) -> bool:
        """Whether the client may have the body as the worker wrote it."""
        request = self._request
        if request.kind == "embedding":
            return _has_encoding(body, request.encoding)
        count = request.choice_count
        if choices[count:] or not choices[count - 1 :]:  # too many, or too few
            return False
        for choice in choices:
            message = choice.message
            reason = choice.finish_reason
            if type(reason) is not str or reason not in self._finish_reasons:
                return False
            if choice.index is not None and not 0 <= choice.index < count:
                return False
            if message is not None and (
                message.reasoning  # has one name, as in streams
                or message.function_call is not None
                or (message.tool_calls and not _has_standard_calls(message, reason))
            ):
                return False
        return not _has_escaped_letters(body)


def _has_escaped_letters(body: bytes) -> bool:
    """Whether a key that the gateway looks for may be written with escapes."""
    return b"\\u00" in body and _ESCAPED_LETTER.search(body) is not None


def _has_standard_calls(message: WireDelta, reason: str) -> bool:
    """Whether the encoder would write these tool calls, and the end after them, as they are."""
    calls = message.tool_calls
    return (
        type(calls) is list
        and reason not in _REASONS_WITHOUT_CALLS
        and message.content != ""
        and len({call.id for call in calls}) == len(calls)
        and all(
            call.type == "function"
            and call.id
            and call.function is not None
            and call.function.name
            and type(call.function.arguments) is str
            for call in calls
        )
    )


_REASONS_WITHOUT_CALLS: Final = frozenset({"stop", "function_call"})
"""Finish reasons that the encoder replaces after a tool call."""
_VECTOR: Final = re.compile(rb'"embedding"\s*:\s*(["\[])')


def _has_encoding(body: bytes, encoding: str) -> bool:
    """Whether the first vector of a response has this form; none has any form."""
    match = _VECTOR.search(body)
    return match is None or (match[1] == b'"') == (encoding == "base64")


_NULL_USAGE: Final = re.compile(rb',\s*"usage"\s*:\s*null')
"""What OpenAI's events have before the one with the usage. In a string its quotes are escaped."""
_EVENT_BREAK: Final = b"\n\ndata: "
"""What stands between the data of two events."""
_NEWLINE: Final = ord("\n")
"""A search for a number takes a tenth of the time of one for bytes."""
_MAX_RUN: Final = 64
"""How many events are decoded together: those behind one that is not similar, for nothing."""


def _find_replacements(
    block: bytes, written: bytes, sample: Any, shown: Any
) -> Sequence[tuple[bytes, bytes]] | None:
    """What is replaced in a sample's events, so that they are as the one that was written for it.

    None if that is not all that differs.
    """
    if sample.choices.item.delta != shown.choices.item.delta:
        return None
    replacements = []
    for key, old, new in (("model", sample.model, shown.model), ("id", sample.id, shown.id)):
        if key == "id" and not new:
            continue
        spelling = _PATTERNS[key].search(block)
        if spelling is None or not (spelling[1] == _encode(old) or decode_json(spelling[1]) == old):
            return None
        if old != new:
            prefix = spelling[0][: spelling.start(1) - spelling.start()]
            replacements.append((spelling[0], prefix + _encode(new)))
    if (member := _NULL_USAGE.search(block)) and not _NULL_USAGE.search(written):
        replacements.append((member[0], b""))
    return replacements


class _SimilarEvents:
    """Forwards the events of a stream that are like the one before, but for a piece of content.

    This is a piece of text, of reasoning, or of the arguments of one tool call. All of them have
    the id and the model of the sample.
    """

    def __init__(
        self, run: ChunkRun, sample: Any, last: Event, replacements: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """``last`` is the event that was decoded of the sample."""
        self._decode_each = run.decoder.decode_each
        self._get_identity, self._get_piece = run.get_identity, run.get_piece
        self._identity = run.get_identity(sample)
        self._last = last
        self.unread = ""
        """What was forwarded since the last call of ``take_unread``: arguments, or some text."""
        self._replacements = replacements

    @classmethod
    def create(cls, block: bytes, written: bytes, last: Event) -> "_SimilarEvents | None":
        """For the events that follow ``block``, for which the encoder wrote ``written``.

        ``last`` is what it ends with. None if they must not be forwarded.
        """
        for run in CHUNK_RUNS[type(last)]:
            decode = run.decoder.decode
            try:
                sample, shown = decode(block[6:]), decode(written.rpartition(b"data: ")[2])
                replacements = _find_replacements(block, written, sample, shown)
            except JSON_ERRORS:
                continue
            return None if replacements is None else cls(run, sample, last, replacements)
        return None

    def forward(
        self, payloads: Sequence[bytes], start: int, events: list[Event]
    ) -> tuple[int, bytes]:
        """Forward the events with the payloads from ``start`` on, up to one that must be decoded.

        Returns how many these are and their bytes for the client. Their content is added, as one
        event: what is written of each is known.
        """
        run = payloads[start : start + _MAX_RUN]
        chunks: list[Any] = []
        try:  # noqa: SIM105 - suppress() would be three calls
            chunks.extend(self._decode_each(run))
        except TEXT_ERRORS:
            pass  # it holds something else; what was decoded before it stays in the list
        identities = [*map(self._get_identity, chunks)]
        if (count := identities.count(self._identity)) != len(identities):
            others = (n for n, one in enumerate(identities) if one != self._identity)
            count = next(others)
        if count != len(run):
            del chunks[count:]
            run = run[:count]
        if not count:
            return 0, b""
        data = _EVENT_BREAK.join(run)
        for old, new in self._replacements:
            parts = data.split(old)
            # Payloads have no newline: of n - 1 breaks, one is in each part that is not at an end.
            if len(parts) != count + 1 or (
                count > 1 and not all(map(contains, parts[1:-1], repeat(_NEWLINE)))
            ):
                return self._forward_replaceable(run, events)
            data = new.join(parts)
        if pieces := [*filter(None, map(self._get_piece, chunks))]:
            events.append(self._make_event("".join(pieces), len(pieces)))
        return count, b"data: %b\n\n" % data

    def _make_event(self, text: str, tokens: int) -> Event:
        """The event of the content of some of them."""
        last = self._last
        if type(last) is ToolCallDelta:
            self.unread += text
            return ToolCallDelta(0, last.call_index, text)
        self.unread = text
        if type(last) is TextDelta:
            return TextDelta(text, tokens=tokens)
        return ReasoningDelta(text)

    def _forward_replaceable(
        self, payloads: Sequence[bytes], events: list[Event]
    ) -> tuple[int, bytes]:
        """Forward those before the first that has a replaced text more than once, or not at all."""
        count = 0
        while all(payloads[count].count(old) == 1 for old, _ in self._replacements):
            count += 1
        return self.forward(payloads[:count], 0, events)

    def take_unread(self) -> bytes:
        """What was forwarded, as one event: the decoder must know it.

        Arguments decide whether what comes next begins another call, and with any content an end
        that came before was none.
        """
        delta: dict[str, Any]
        if type(self._last) is ToolCallDelta:
            piece = {"index": self._last.call_index, "function": {"arguments": self.unread}}
            delta = {"tool_calls": [piece]}
        else:
            key = "content" if type(self._last) is TextDelta else "reasoning_content"
            delta = {key: self.unread}
        self.unread = ""
        return b'data: {"choices":[{"delta":%b}]}\n\n' % _encode(delta)


class StreamPassthroughReader:
    """Reads a stream by complete events. An error event is never forwarded.

    ``create_encoder`` makes the encoder of events that are decoded. Without ``forwards`` these are
    all.
    """

    def __init__(
        self,
        decoder: ResponseDecoder,
        create_encoder: Callable[[], ResponseEncoder] | None,
        *,
        forwards: bool = True,
    ) -> None:
        self._decoder = decoder
        self._create_encoder = create_encoder
        self._encoder: ResponseEncoder | None = None
        self._forwards = forwards
        self._sampled: type[Event] | None = None
        """The kind of content of the last sample of those that are forwarded."""
        self._similar_events: _SimilarEvents | None = None
        self._pending = bytearray()
        self._after_cr = False
        self._has_started = False
        self._is_unary = False
        self._pending_error: GatewayError | None = None

    def __repr__(self) -> str:
        way = "decoding" if self._similar_events is None else "forwarding"
        return f"<StreamPassthroughReader {way}, {len(self._pending)} bytes pending>"

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        events: list[Event] = []
        is_inside = self._pending or self._after_cr or self._is_unary
        payloads = None if is_inside else split_plain_events(data)
        complete = b""
        if payloads is None:
            if not self._has_started and (self._is_unary or self._begins_object(data)):
                pending, self._pending, self._is_unary = bytes(self._pending), bytearray(), True
                return None, self._decoder.feed(pending + data)
            complete = self._take_complete(data)
            if not complete:
                return b"", ()
        self._has_started = True
        out: list[bytes] = []
        try:
            if payloads is None:
                self._read_events(complete, out, events)
            else:
                self._read_payloads(payloads, out, events)
        except GatewayError as error:
            if not out:
                raise
            self._pending_error = error  # raised after the preceding events are passed on
        return b"".join(out), events

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        reports = self._read_forwarded()
        block = bytes(self._pending)
        events = [*self._decoder.feed(block), *self._decoder.close()]
        data = None if self._is_unary else self._write(block.strip(), events)
        return data, [*reports, *events]

    def _begins_object(self, data: bytes) -> bool:
        """Whether the body is a JSON object instead of a stream."""
        return (bytes(self._pending[:64]) + data[:64]).lstrip()[:1] == b"{"

    def _take_complete(self, data: bytes) -> bytes:
        """The complete events among the bytes so far, with LF as line ends; the rest is kept."""
        if self._after_cr or b"\r" in data:
            data, self._after_cr = normalize_newlines(data, after_cr=self._after_cr)
        pending = self._pending
        if not pending and data.endswith(b"\n\n"):
            return data
        start = max(len(pending) - 1, 0)
        pending += data
        blank_line = pending.rfind(b"\n\n", start)
        end = 0 if blank_line < 0 else blank_line + 2
        complete = bytes(pending[:end])
        del pending[:end]
        if len(pending) > MAX_EVENT_BYTES:
            raise WorkerFailed(f"The worker sent an event of more than {MAX_EVENT_BYTES} bytes.")
        return complete

    def _read_events(self, complete: bytes, out: list[bytes], events: list[Event]) -> None:
        """Forward or decode these events."""
        payloads = split_plain_events(complete)
        if payloads is not None:
            self._read_payloads(payloads, out, events)
            return
        for block in complete.split(b"\n\n")[:-1]:
            if block.startswith(b"data: ") and block.find(b"\n") < 0:
                self._read_payloads([block[6:]], out, events)
            else:
                self._decode(block, out, events)

    def _read_payloads(
        self, payloads: Sequence[bytes], out: list[bytes], events: list[Event]
    ) -> None:
        """Forward these events, or decode those that can't be."""
        position, end = 0, len(payloads)
        while position < end:
            if self._similar_events is not None:
                count, data = self._similar_events.forward(payloads, position, events)
                position += count
                out.append(data)
                if count == _MAX_RUN or position == end:
                    continue
            self._decode(b"data: " + payloads[position], out, events)
            position += 1

    def _decode(self, block: bytes, out: list[bytes], events: list[Event]) -> None:
        """Decode an event, and write it with the encoder."""
        events += self._read_forwarded()
        # The decoder may keep half a character back: nothing must overtake it.
        if b"\\u" in block and has_lone_surrogate(block):
            self._forwards = False
            self._similar_events = None
        decoded = self._decoder.feed(block + b"\n\n")
        if written := self._write(block, decoded):
            out.append(written)
        if not decoded:
            return
        events += decoded
        self._decoder.feed(b"")  # raises an error that follows these events
        kinds = {*map(type, decoded)}
        kind = type(decoded[-1])
        if ChoiceEnd in kinds or ToolCallStart in kinds:
            self._forwards = self._forwards and ChoiceEnd not in kinds
            self._sampled = self._similar_events = None
        elif self._forwards and written and kind is not self._sampled and kind in CHUNK_RUNS:
            self._sampled = kind
            self._similar_events = _SimilarEvents.create(block, written, decoded[-1])

    def _read_forwarded(self) -> Sequence[Event]:
        """Tell the decoder what was forwarded; what it reports of an event before that is new."""
        if self._similar_events is None or not self._similar_events.unread:
            return ()
        decoded = self._decoder.feed(self._similar_events.take_unread())
        return [event for event in decoded if isinstance(event, ResponseExtra)]

    def _write(self, block: bytes, events: Sequence[Event]) -> bytes:
        """The bytes for the client of an event that was decoded."""
        del block
        if not events:
            return b""
        if self._encoder is None:
            assert self._create_encoder is not None  # noqa: S101 - the subclass writes without it
            self._encoder = self._create_encoder()
        return self._encoder.encode_events(events)


class VerbatimStreamReader(StreamPassthroughReader):
    """Reads a stream whose events hold more than an encoder could write: all data is forwarded.

    ``correct_counts`` corrects the token counts of each event.
    """

    line_prefixes: tuple[bytes, ...] = (b"data:",)
    """The lines of an event that are forwarded."""

    def __init__(
        self,
        decoder: ResponseDecoder,
        names: NameReplacer,
        correct_counts: CountCorrection,
    ) -> None:
        super().__init__(decoder, None, forwards=False)
        self._names = names
        self._correct_counts = correct_counts

    def _write(self, block: bytes, events: Sequence[Event]) -> bytes:
        if events:
            self._decoder.feed(b"")  # raises an error that follows the events of this block
        lines = [line for line in block.splitlines() if line.startswith(self.line_prefixes)]
        if not lines:
            return b""
        data = self._correct_counts(b"\n".join(lines), events)
        return self._names.replace(data) + b"\n\n"
