"""A client's own bytes for a worker of the same dialect.

The protocol has hardly any fields of its own: a model is what its server says it is. So a body goes
on whatever it holds, and what is wrong with it the server says.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from protocols.chat import errors
from protocols.chat.errors import WorkerErrorBody
from protocols.core import sse
from protocols.core.errors import (
    GatewayError,
    MalformedRequest,
    StreamBroken,
    UnsupportedFeature,
    UpstreamErrorText,
    WorkerFailed,
)
from protocols.core.events import ChoiceEnd, Event, StreamEnd, StreamStart, TextDelta, Usage
from protocols.core.interfaces import (
    ClientRequest,
    PassthroughRequest,
    ResponseContext,
    UpstreamRequest,
)
from protocols.core.request import GenerationRequest
from protocols.triton import errors as triton_errors
from protocols.triton import rapidjson, requests
from protocols.triton.decoder import FINISH_REASONS
from protocols.triton.params import PROMPT_INPUT, TEXT_OUTPUT, TritonProfile
from protocols.triton.rapidjson import OrderedFields
from protocols.triton.responses import GenerateEncoder
from protocols.triton.tensors import (
    CHUNKED_JSON_HEADERS,
    EVENT_STREAM,
    JSON_HEADERS,
    encode_json,
    flatten_values,
)
from protocols.triton.upstream import build_model_path, get_model_name

# The way back of a relayed call: a worker's own bytes, and what they tell of tokens and ends.
#
# What is passed on is not held against anything: a model may answer what it likes. Only errors are
# told anew, short and clean, in the shape that they have here.

_EVENT_BOUNDARY: Final = re.compile(rb"\r?\n\r?\n")
_BOUNDARY_OVERLAP: Final = 3
"""Bytes of a boundary that may have come before its end does."""
_MAX_EVENT_BYTES: Final = 1 << 24
"""Bytes of one event."""
_MAX_LENIENT_PARSE_BYTES: Final = 1 << 20
"""Bytes of an answer that are worth a second look for what JSON does not have."""
_METADATA_OUTPUTS: Final = frozenset(
    {"id", "model_name", "model_version", "finish_reason", "stop_reason", "num_input_tokens",
     "num_output_tokens", "cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"}
)  # fmt: skip
"""What is no text, whatever the outputs of a model are called."""
_NO_REASON: Final = "None"

_CLIENT_ERROR_PATTERN: Final = re.compile(
    r"\[request id: |has invalid type\. It should|The schema can not convert"
    r"|already exists in request|Converting keyword|Expected JSON object"
    r"|generate expects model|exceeds the maximum allowed input size"
)
"""What the server itself complains of was the client's doing, as nobody else touched its call."""
_JSON_ERROR_PATTERN: Final = re.compile(
    r"failed to parse the request JSON buffer|\battempt to \w+ "
)
"""Its JSON layer's complaints, which it calls errors of its own."""
_GATEWAY_ONLY_STATUSES: Final = frozenset({401, 403, 407, 429})
"""What a worker says to the gateway: of its key, and of how often it comes."""


class ModelNames:
    """A model's name at the worker, and the one that the client knows."""

    def __init__(self, worker: str, client: str) -> None:
        self._is_renamed = worker != client
        self._client_name = client
        # An instance's name is its model's, and its device's and its own number.
        self._quoted_pattern = re.compile(rf"'{re.escape(worker)}(?=(?:_\d+_\d+)?')")
        self._replacements = [
            (_encode_model_name(worker, blank), _encode_model_name(client, blank))
            for blank in (b"", b" ")
        ]

    def rename_in_body(self, data: bytes) -> bytes:
        """Whole events or a whole body. Within a JSON text the quotes would be escaped."""
        if self._is_renamed:
            for old, new in self._replacements:
                data = data.replace(old, new)
        return data

    def rename_in_text(self, text: str) -> str:
        """A sentence of the server's."""
        return self._quoted_pattern.sub(lambda _: f"'{self._client_name}", text)


def _encode_model_name(name: str, blank: bytes) -> bytes:
    return b'"model_name":%b%b' % (blank, encode_json(name))


# --- errors ---------------------------------------------------------------------------------------


def read_passthrough_error(
    names: ModelNames, status: int, headers: Mapping[str, str], body: bytes
) -> GatewayError:
    """What an answer of this status means, which the client is to hear as the worker said it."""
    framed = body.startswith(b"data:")
    if framed:
        body = body.removeprefix(b"data:").partition(b"\n\n")[0]
    return errors.read_worker_error(
        status, headers, body.strip(), partial(_map_passthrough_error, names, framed)
    )


def _map_passthrough_error(
    names: ModelNames,
    framed: bool,  # noqa: FBT001 - given once, for all
    status: int,
    fault: WorkerErrorBody,
    retry_after: float | None = None,
) -> GatewayError:
    inside = status == 200  # noqa: PLR2004 - told in an answer that looked good
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
    got: Mapping[str, Any], names: ModelNames, status: int, *, framed: bool
) -> None:
    """Raises what an answer tells of; returns if it tells of nothing."""
    if got.get("error") is not None:
        raise _map_passthrough_error(
            names, framed, status, errors.find_worker_error(got) or WorkerErrorBody()
        )


# --- what is told ---------------------------------------------------------------------------------


class _ResponseTracker:
    """What an answer tells, as far as the gateway keeps books of it."""

    def __init__(self, *, in_pieces: bool) -> None:
        self._token_per_event = in_pieces
        self._prompt_tokens: int | None = None
        self._token_count: int | None = None
        self._finish_reason: str | None = None

    def add(self, got: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        counts = _list_counts(got, "num_output_tokens")
        if counts:
            self._token_count = (self._token_count or 0) + sum(counts)
        if self._prompt_tokens is None and (told := _list_counts(got, "num_input_tokens")):
            self._prompt_tokens = told[0]
            events.append(StreamStart(told[0]))
        for one in _list_values(got, "finish_reason"):
            if isinstance(one, str) and (self._finish_reason is None or one != _NO_REASON):
                self._finish_reason = one
        texts = _list_values(got, TEXT_OUTPUT) if TEXT_OUTPUT in got else _list_other_outputs(got)
        text = "".join([str(one) for one in texts if one is not None])
        if text:
            alone = 1 if self._token_per_event else math.ceil(len(text) / 4)
            events.append(TextDelta(text, tokens=sum(counts) if counts else alone))
        return events

    def close(self) -> list[Event]:
        """Raises StreamBroken where the model tells how it ends, and did not."""
        if self._token_per_event and self._finish_reason == _NO_REASON:
            raise StreamBroken("The worker's stream stopped before its end.")
        events: list[Event] = [
            ChoiceEnd(FINISH_REASONS.get(self._finish_reason or "") or "unknown")
        ]
        if self._prompt_tokens is not None and self._token_count is not None:
            events.append(Usage(self._prompt_tokens, self._token_count))
        return [*events, StreamEnd()]


def _list_values(got: Mapping[str, Any], name: str) -> list[Any]:
    return flatten_values(got[name]) if name in got else []


def _list_counts(got: Mapping[str, Any], name: str) -> list[int]:
    return [one for one in _list_values(got, name) if type(one) is int and one >= 0]


def _list_other_outputs(got: Mapping[str, Any]) -> list[Any]:
    return [
        one for name in got if name not in _METADATA_OUTPUTS for one in flatten_values(got[name])
    ]


def _parse_object(body: bytes) -> Mapping[str, Any]:
    """The object that an answer or an event is. Raises WorkerFailed."""
    text = body.decode(errors="replace").encode()
    try:
        got = (
            msgspec.json.decode(text)
            if len(text) > _MAX_LENIENT_PARSE_BYTES
            else rapidjson.parse_value(text)
        )
    except (MalformedRequest, msgspec.DecodeError, RecursionError) as e:
        raise WorkerFailed("The worker's answer can't be read.") from e
    if not isinstance(got, dict):
        raise WorkerFailed("The worker's answer is not in its dialect.")
    return got


# --- passages -------------------------------------------------------------------------------------


class TritonUnaryPassthroughReader:
    """An answer in one piece."""

    def __init__(self, names: ModelNames) -> None:
        self._names = names
        self._body = bytearray()

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        self._body += b"".join(pieces)
        return b"", ()

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        body = bytes(self._body)
        if not body.strip():
            raise StreamBroken("The worker's answer is empty.")
        got = _parse_object(body)
        _raise_response_error(got, self._names, 200, framed=False)
        account = _ResponseTracker(in_pieces=False)
        events = account.add(got)
        return self._names.rename_in_body(body), [*events, *account.close()]


class TritonStreamPassthroughReader:
    """A stream, by whole events; its end is the end of the body, which is one without events, too.

    An event that tells of an error ends it.
    """

    def __init__(self, names: ModelNames) -> None:
        self._names = names
        self._tracker = _ResponseTracker(in_pieces=True)
        self._sse_parser = sse.SseParser(limit=_MAX_EVENT_BYTES)
        self._pending = bytearray()
        self._pending_error: GatewayError | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        held, end = self._pending, 0
        events: list[Event] = []
        at = max(0, len(held) - _BOUNDARY_OVERLAP)
        held += b"".join(pieces)
        while boundary := _EVENT_BOUNDARY.search(held, at):
            try:
                events += self._read_event(bytes(held[end : boundary.end()]))
            except GatewayError as error:
                if not end:
                    raise
                self._pending_error = error  # told when what came before it is passed on
                break
            at = end = boundary.end()
        whole = bytes(held[:end])
        del held[:end]
        if len(held) > _MAX_EVENT_BYTES:
            raise WorkerFailed(f"The worker sent an event of more than {_MAX_EVENT_BYTES} bytes.")
        return self._names.rename_in_body(whole), events

    def close(self) -> tuple[bytes | None, Sequence[Event]]:
        """See ``protocols.core.interfaces.PassthroughReader``."""
        if self._pending_error is not None:
            raise self._pending_error
        if self._pending.strip():
            raise StreamBroken("The worker's stream stopped inside an event.")
        return b"", self._tracker.close()

    def _read_event(self, block: bytes) -> list[Event]:
        """What a block of lines tells."""
        events: list[Event] = []
        for payload in self._sse_parser.feed(block):
            got = _parse_object(payload)
            _raise_response_error(got, self._names, 400, framed=True)
            events += self._tracker.add(got)
        if self._sse_parser.stray_line is not None:
            _raise_response_error(
                _parse_object(self._sse_parser.stray_line), self._names, 400, framed=True
            )
            raise WorkerFailed("The worker's answer is not in its dialect.")
        return events


_PARAMETERS_KEY: Final = "parameters"
_NON_PROMPT_FIELDS: Final = frozenset({"id", _PARAMETERS_KEY})
_NO_FIELDS: Final = OrderedFields([], [])


def build_passthrough(
    call: ClientRequest, about: ResponseContext, profile: TritonProfile
) -> PassthroughRequest | None:
    """See ``protocols.core.interfaces.SupportsPassthrough``. Both sides have this profile."""
    variant = call.endpoint.operation
    if variant not in {"generate", "generate_stream"} or requests.is_compressed(call):
        return None
    try:
        fields = rapidjson.fields_of(call)
    except MalformedRequest:
        fields = _NO_FIELDS
    if profile.cancel_flag and profile.cancel_flag in _iter_field_names(fields):
        return None  # it may be another client's request that it ends
    streams = variant == "generate_stream"
    model = about.backend_model
    request = GenerationRequest(
        model=model, kind="completion", prompts=_find_prompts(fields), stream=streams
    )
    names = ModelNames(get_model_name(model), about.model)
    headers = (("Content-Type", EVENT_STREAM),) if streams else CHUNKED_JSON_HEADERS
    return PassthroughRequest(
        request,
        UpstreamRequest(f"{build_model_path(model)}/{variant}", call.body, JSON_HEADERS),
        lambda: headers,
        partial(TritonStreamPassthroughReader if streams else TritonUnaryPassthroughReader, names),
        partial(GenerateEncoder, request, about, profile, framed=streams),
        partial(read_passthrough_error, names),
    )


def _parse_readable_fields(body: bytes) -> OrderedFields:
    """What of the body can be read."""
    try:
        return rapidjson.parse_fields(body)
    except MalformedRequest:
        return _NO_FIELDS


def _iter_field_names(fields: OrderedFields) -> Iterator[str]:
    """The names of all fields, those of the parameters among them."""
    yield from fields.names
    if (nested := fields.get(_PARAMETERS_KEY)) is not None:
        yield from _parse_readable_fields(bytes(nested)).names


def _find_prompts(fields: OrderedFields) -> tuple[str, ...]:
    """What the prompt seems to be: the first text, unless one is called so."""
    for name in (PROMPT_INPUT, *(one for one in fields.names if one not in _NON_PROMPT_FIELDS)):
        if (raw := fields.get(name)) is not None:
            texts = [
                one for one in flatten_values(rapidjson.parse_value(raw)) if isinstance(one, str)
            ]
            if texts:
                return tuple(texts)
    return ()
