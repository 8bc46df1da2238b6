"""Pass-through of requests and responses between client and worker of one profile.

The protocol has hardly any fields of its own: the model defines them. So any body is passed on, and
the worker reports what is wrong with it.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from protocols.chat import worker_errors
from protocols.chat.worker_errors import WorkerErrorBody
from protocols.core import sse
from protocols.core.errors import (
    GatewayError,
    MalformedRequest,
    StreamBroken,
    UnsupportedFeature,
    UpstreamErrorText,
    WorkerFailed,
)
from protocols.core.events import Event, StreamStart, TextDelta
from protocols.core.finish_reasons import FinishReasonTable
from protocols.core.interfaces import (
    NO_SETTINGS,
    ClientRequest,
    ModelSettings,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
    UpstreamRequest,
)
from protocols.core.json_text import decode_json
from protocols.core.request import GenerationRequest
from protocols.core.token_counts import UsageReader
from protocols.json_body import JSON_ERRORS, build_answer_error
from protocols.params import Param
from protocols.passthrough import apply_model_settings
from protocols.passthrough_readers import (
    NameReplacer,
    TokenCountReplacer,
    UnaryPassthroughReader,
    VerbatimStreamReader,
)
from protocols.triton import errors as triton_errors
from protocols.triton import rapidjson, requests
from protocols.triton.decoder import FINISH_REASONS
from protocols.triton.formats import (
    CHUNKED_JSON_HEADERS,
    EVENT_STREAM,
    JSON_HEADERS,
)
from protocols.triton.model_config import PACKED_PARAMETERS
from protocols.triton.params import PROMPT_INPUT, TEXT_OUTPUT, TritonProfile
from protocols.triton.rapidjson import OrderedFields
from protocols.triton.responses import GenerateEncoder
from protocols.triton.tensors import flatten_values
from protocols.triton.upstream import build_model_path, get_model_name

# Responses are not validated: a model may return anything. Only errors are rewritten, in the format
# of this protocol.

_MAX_LENIENT_PARSE_BYTES: Final = 1 << 20
"""Bytes that require a closer look for values that are not JSON."""
_METADATA_OUTPUTS: Final = frozenset(
    {"id", "model_name", "model_version", "finish_reason", "stop_reason", "num_input_tokens",
     "num_output_tokens", "cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}
)  # fmt: skip
"""Outputs that are never text, whatever the model calls its outputs."""
_NO_REASON: Final = "None"
_LIMITED_FIELD: Final = "stopping.max_tokens"

_CLIENT_ERROR_PATTERN: Final = re.compile(
    r"\[request id: |has invalid type\. It should|The schema can not convert"
    r"|already exists in request|Converting keyword|Expected JSON object"
    r"|generate expects model|exceeds the maximum allowed input size"
)
"""Errors of the server that are the client's, since the gateway did not change the request."""
_JSON_ERROR_PATTERN: Final = re.compile(
    r"failed to parse the request JSON buffer|\battempt to \w+ "
)
"""Errors of its JSON parser, which Triton reports with status 500."""
_GATEWAY_ONLY_STATUSES: Final = frozenset({401, 403, 407, 429})
"""Statuses that concern the gateway itself: its credentials and its request rate."""


class ModelNames:
    """A model's name at the worker, and its public name."""

    def __init__(self, worker: str, client: str) -> None:
        self._client_name = client
        # The name of an instance consists of model, device and number.
        self._quoted_pattern = re.compile(rf"'{re.escape(worker)}(?=(?:_\d+_\d+)?')")
        self.replacer = NameReplacer({"model_name": client}, only=worker)
        """Replaces names in responses."""

    def rename_in_text(self, text: str) -> str:
        """Replaces names in an error text."""
        return self._quoted_pattern.sub(lambda _: f"'{self._client_name}", text)


# --- errors ---------------------------------------------------------------------------------------


def read_passthrough_error(
    names: ModelNames, status: int, headers: Mapping[str, str], body: bytes
) -> GatewayError:
    """Map an error response whose text the client may see unchanged."""
    framed = body.startswith(b"data:")
    if framed:
        body = body.removeprefix(b"data:").partition(b"\n\n")[0]
    return worker_errors.read_worker_error(
        status, headers, body.strip(), partial(_map_passthrough_error, names, framed)
    )


def _map_passthrough_error(
    names: ModelNames,
    framed: bool,  # noqa: FBT001 - given once, for all
    status: int,
    fault: WorkerErrorBody,
    retry_after: float | None = None,
) -> GatewayError:
    inside = status == 200  # noqa: PLR2004 - reported in a successful response
    error = triton_errors.map_worker_error(0 if inside else status, fault, retry_after)
    match error:
        case WorkerFailed(status=400) if _CLIENT_ERROR_PATTERN.search(fault.text):
            error = UnsupportedFeature(fault.text)
        case WorkerFailed(status=500) if _JSON_ERROR_PATTERN.search(fault.text):
            error = MalformedRequest(fault.text)
    if fault.text and status not in _GATEWAY_ONLY_STATUSES:
        error.upstream_error = UpstreamErrorText(status, names.rename_in_text(fault.text), framed)
    return error


def _raise_response_error(
    fields: Mapping[str, Any], names: ModelNames, status: int, *, framed: bool
) -> None:
    """Raise the error in a response; returns if there is none."""
    if fields.get("error") is not None:
        fault = worker_errors.find_worker_error(fields) or WorkerErrorBody()
        raise worker_errors.apply_mapper(
            partial(_map_passthrough_error, names, framed), status, fault
        )


# --- token counts and finish reasons --------------------------------------------------------------


_PROMPT_TOKENS: Final = TokenCountReplacer("num_input_tokens")
_COMPLETION_TOKENS: Final = TokenCountReplacer("num_output_tokens", keeps_lists=True)


_FINISH_REASONS: Final = FinishReasonTable(
    FINISH_REASONS.source,
    {word: reason for word, reason in FINISH_REASONS.words.items() if reason is not None},
    is_optional=True,
)
"""Clients of the same protocol get the words with which a server says that it cancelled."""


class _ResponseTracker:
    """Collects what the gateway records of a response."""

    def __init__(self, request: GenerationRequest, *, token_per_event: bool) -> None:
        self._usage_reader = UsageReader(request)
        self._token_per_event = token_per_event
        self._prompt_tokens: int | None = None
        self._token_count: int | None = None
        self._finish_reason: str | None = None

    def add(self, outputs: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        before, reader = self._token_count or 0, self._usage_reader
        counts = _list_values(outputs, "num_output_tokens")
        if counts:
            self._token_count = reader.add_completion_tokens(self._token_count, counts)
        for count in _list_values(outputs, "num_input_tokens")[:1]:
            prompt_tokens = reader.read_prompt_tokens(count)
            if self._prompt_tokens is None and prompt_tokens is not None:
                self._prompt_tokens = prompt_tokens
                events.append(StreamStart(prompt_tokens))
        for reason in _list_values(outputs, "finish_reason"):
            if isinstance(reason, str) and (self._finish_reason is None or reason != _NO_REASON):
                self._finish_reason = reason
                _FINISH_REASONS.read_word(reason, "")  # raises an error at once
        values = (
            _list_values(outputs, TEXT_OUTPUT)
            if TEXT_OUTPUT in outputs
            else _list_other_outputs(outputs)
        )
        if text := "".join([str(value) for value in values if value is not None]):
            estimate = 1 if self._token_per_event else math.ceil(len(text) / 4)
            tokens = (
                self._token_count - before if counts and self._token_count is not None else None
            )
            events.append(TextDelta(text, tokens=estimate if tokens is None else tokens))
        return events

    def correct_counts(self, data: bytes, events: Sequence[Event]) -> bytes:
        """``data`` with the gateway's own count of tokens, if the worker's are implausible."""
        if not self._usage_reader.has_ignored:
            return data
        tokens = sum(event.tokens for event in events if type(event) is TextDelta)
        return _PROMPT_TOKENS.remove(_COMPLETION_TOKENS.replace(data, tokens))

    def close(self) -> list[Event]:
        """Raise StreamBroken if the model reports finish reasons, and sent none."""
        if self._token_per_event and self._finish_reason == _NO_REASON:
            raise StreamBroken("The worker's stream stopped before its end.")
        word = None if self._finish_reason == _NO_REASON else self._finish_reason
        end = _FINISH_REASONS.read_word(word, "").build_end()
        usage = self._usage_reader.read_usage(self._prompt_tokens, self._token_count)
        return [end, *self._usage_reader.build_end(usage)]


def _list_values(outputs: Mapping[str, Any], name: str) -> list[Any]:
    return flatten_values(outputs[name]) if name in outputs else []


def _list_other_outputs(outputs: Mapping[str, Any]) -> list[Any]:
    return [
        value
        for name in outputs
        if name not in _METADATA_OUTPUTS
        for value in flatten_values(outputs[name])
    ]


def _parse_object(body: bytes) -> Mapping[str, Any]:
    """Decode the object of a response or an event. Raises WorkerFailed."""
    text = body.decode(errors="replace").encode()
    try:
        fields = (
            decode_json(text)
            if len(text) > _MAX_LENIENT_PARSE_BYTES
            else rapidjson.parse_value(text)
        )
    except (MalformedRequest, msgspec.DecodeError) as e:
        raise build_answer_error(e) from e
    if not isinstance(fields, dict):
        raise WorkerFailed("The worker's response does not follow its protocol.")
    return fields


class _UnaryDecoder:
    """Decodes what the gateway records of a unary response."""

    def __init__(self, request: GenerationRequest, names: ModelNames) -> None:
        self._names = names
        self._tracker = _ResponseTracker(request, token_per_event=False)
        self.correct_counts = self._tracker.correct_counts
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._body += data
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        body = bytes(self._body)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        outputs = _parse_object(body)
        _raise_response_error(outputs, self._names, 200, framed=False)
        return [*self._tracker.add(outputs), *self._tracker.close()]


class _StreamDecoder:
    """Decodes what the gateway records of a stream, which may have no events."""

    def __init__(self, request: GenerationRequest, names: ModelNames) -> None:
        self._names = names
        self._tracker = _ResponseTracker(request, token_per_event=True)
        self.correct_counts = self._tracker.correct_counts
        self._sse_parser = sse.SseParser()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        events: list[Event] = []
        for payload in self._sse_parser.feed(data):
            self._read_event(payload, events)
        if (line := self._sse_parser.stray_line) is not None:
            _raise_response_error(_parse_object(line), self._names, 400, framed=True)
            raise WorkerFailed("The worker's response does not follow its protocol.")
        return events

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        events = sse.read_last_event(self._sse_parser, self._read_event)
        if self._sse_parser.stray_line is not None:
            raise StreamBroken("The worker's stream stopped inside an event.")
        return events + self._tracker.close()

    def _read_event(self, payload: bytes, events: list[Event]) -> None:
        outputs = _parse_object(payload)
        _raise_response_error(outputs, self._names, 400, framed=True)
        events += self._tracker.add(outputs)


# --- requests -------------------------------------------------------------------------------------

_PARAMETERS_KEY: Final = "parameters"
_NON_PROMPT_FIELDS: Final = frozenset({"id", _PARAMETERS_KEY})
_NO_FIELDS: Final = OrderedFields([], [])
_encode = msgspec.json.Encoder().encode


_NAMES: Final = frozenset({"model_name", "model_version", "id"})


def merge_stream(data: bytes) -> bytes:
    """The response of generate that the events of a stream make: their texts are joined.

    A value that is no text is the last one's. An error is the whole response.
    """
    merged: dict[str, Any] = {}
    parser = sse.SseParser()
    for payload in (*parser.feed(data), *parser.close()):
        try:
            fields = decode_json(payload, kind=dict[str, Any])
        except JSON_ERRORS as e:
            raise build_answer_error(e) from e
        if "error" in fields:
            return payload
        for name, value in fields.items():
            before = merged.get(name)
            merged[name] = _join(before, value) if before is not None else value
            if name in _NAMES and before is not None:
                merged[name] = before
    return msgspec.json.encode(merged) if merged else data


def _join(before: Any, value: Any) -> Any:
    match before, value:
        case str(), str():
            return before + value
        case list(), list() if len(before) == len(value):
            return [_join(old, new) for old, new in zip(before, value, strict=True)]
        case _:
            return value


class _CollectingReader:
    """Reads a stream as the response to a client that did not ask for one."""

    def __init__(self, reader: PassthroughReader) -> None:
        self._reader = reader
        self._pieces: list[bytes] = []

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._pieces += pieces
        return b"", ()

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._reader.feed((merge_stream(b"".join(self._pieces)),))
        return self._reader.close()


def build_passthrough(
    call: ClientRequest, about: ResponseContext, profile: TritonProfile, *, collects: bool
) -> PassthroughRequest | None:
    """See ``protocols.core.interfaces.SupportsPassthrough``. Both sides have this profile.

    ``collects``: the model refuses generate, so that its stream is collected.
    """
    operation = call.endpoint.operation
    if operation not in {"generate", "generate_stream"} or requests.is_compressed(call):
        return None
    try:
        fields = rapidjson.fields_of(call)
    except MalformedRequest:
        fields = _NO_FIELDS
    if profile.cancel_flag and profile.cancel_flag in _iter_field_names(fields):
        return None  # it may cancel another client's request
    data = _apply_model_settings(call.body, fields, profile, about.settings)
    if data is None:
        return None
    stream = operation == "generate_stream"
    model, endpoint = about.backend_model, "generate_stream" if collects else operation
    request = GenerationRequest(
        model=model,
        kind="completion",
        prompts=_find_prompts(fields),
        stream=stream,
        context_length=about.context_length,
    )
    names = ModelNames(get_model_name(model), about.model)
    headers = (("Content-Type", EVENT_STREAM),) if stream else CHUNKED_JSON_HEADERS

    def create_reader() -> PassthroughReader:
        if stream:
            events = _StreamDecoder(request, names)
            return VerbatimStreamReader(events, names.replacer, events.correct_counts)
        body = _UnaryDecoder(request, names)
        reader = UnaryPassthroughReader(body, names.replacer, body.correct_counts)
        return _CollectingReader(reader) if collects else reader

    return PassthroughRequest(
        request,
        UpstreamRequest(f"{build_model_path(model)}/{endpoint}", data, JSON_HEADERS),
        lambda: headers,
        create_reader,
        partial(GenerateEncoder, request, about, profile, framed=stream),
        partial(read_passthrough_error, names),
    )


def _apply_model_settings(
    body: bytes, fields: OrderedFields, profile: TritonProfile, settings: ModelSettings
) -> bytes | None:
    """The body with the model's defaults and its limit beside its own fields.

    None if it must be translated: what it asks for is not plain to see, or is above the limit. A
    name that stands in it twice is not: the model may read either value.
    """
    if settings is NO_SETTINGS:
        return body
    names = [*_iter_field_names(fields)]
    if not fields or PACKED_PARAMETERS in names or len(set(names)) < len(names):
        return None
    sent: dict[str, Any] = dict(fields)
    if _PARAMETERS_KEY in fields:
        with contextlib.suppress(MalformedRequest):
            sent = {**fields.parse_nested(_PARAMETERS_KEY), **sent}
    rows = profile.parameters
    try:
        if not all(_is_plain_count(sent[row.wire]) for row in rows if _is_limited(row, sent)):
            return None
        is_applied = apply_model_settings(sent, settings, rows, rows)
    except JSON_ERRORS:
        return None
    if not is_applied:
        return None
    added = {name: value for name, value in sent.items() if name not in names}
    head, brace, tail = body.rpartition(b"}")
    return b"%b,%b%b%b" % (head, _encode(added)[1:-1], brace, tail) if added else body


def _is_limited(row: Param, sent: Mapping[str, Any]) -> bool:
    return row.field == _LIMITED_FIELD and row.wire in sent


def _is_plain_count(raw: bytes) -> bool:
    """Whether it is a number of tokens. Raises what ``JSON_ERRORS`` lists."""
    value = decode_json(raw)
    return type(value) is int and value >= 0


def _iter_field_names(fields: OrderedFields) -> Iterator[str]:
    """Return the names of all fields, including those of the parameters."""
    yield from fields.names
    if _PARAMETERS_KEY in fields:
        with contextlib.suppress(MalformedRequest):
            yield from fields.parse_nested(_PARAMETERS_KEY).names


def _find_prompts(fields: OrderedFields) -> tuple[str, ...]:
    """Find the prompt: the prompt input, otherwise the first text."""
    for name in (PROMPT_INPUT, *(name for name in fields.names if name not in _NON_PROMPT_FIELDS)):
        if name in fields:
            values = flatten_values(fields.get_value(name))
            texts = [value for value in values if isinstance(value, str)]
            if texts:
                return tuple(texts)
    return ()
