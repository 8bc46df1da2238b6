"""Answers of the endpoints that name no model: the server's own, and those after TGI and vLLM.

Streams of the first two end with an event that says the whole text once more, and is ours to add:
it has no token of its own, so nothing need be held back for it.

Source: MindIE-LLM 0695772, single_req_self_develop_infer_interface.cpp,
single_req_tgi_text_infer_interface.cpp, single_req_vllm_infer_interface.cpp.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import ClientDisconnected, GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.core.sse import format_event as framed
from protocols.mindie import errors
from protocols.mindie.profiles import MindieProfile
from protocols.mindie.texts import (
    STOPPED_FINISH_REASON,
    STREAM_CONTENT_TYPE,
    ChunkTimer,
    build_json_response,
    encode_json,
    get_only_choice,
    join_choice_text,
    map_finish_reason,
)


class _StreamState:
    """What a stream has told so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_count = 0
        self.prompt_tokens = 0
        self.finish_reason = ""

    def update(self, event: Event, profile: MindieProfile) -> None:
        """Remember what the end will repeat."""
        match event:
            case TextDelta(text):
                self.texts.append(text)
                self.token_count += event.tokens
            case ReasoningDelta(text) | RefusalDelta(text):
                self.texts.append(text)
                self.token_count += 1
            case StreamStart(prompt_tokens):
                self.prompt_tokens = prompt_tokens or 0
            case Usage(prompt_tokens, completion_tokens):
                self.prompt_tokens = prompt_tokens
                self.token_count = max(self.token_count, completion_tokens)
            case ChoiceEnd(reason):
                self.finish_reason = map_finish_reason(reason, profile)
            case _:
                pass


def _get_token_ids(event: Event) -> list[int]:
    return list(event.token_ids) if isinstance(event, TextDelta) else []


# --- the server's own -----------------------------------------------------------------------------


class _NativeDetails(Struct):
    finish_reason: str
    generated_tokens: int
    generated_token_ids: list[int] | UnsetType
    seed: int | None


class _NativeToken(Struct):
    id: list[int]
    text: str | None


class _NativeChunk(Struct):
    prefill_time: int | None
    decode_time: int | None
    token: _NativeToken


class _NativeFinalChunk(Struct):
    prefill_time: int | None
    decode_time: int | None
    generated_text: str
    details: _NativeDetails | None
    token: _NativeToken


class NativeEncoder:
    """Writes the answer to /infer and /infer_token."""

    content_type = STREAM_CONTENT_TYPE

    def __init__(
        self,
        profile: MindieProfile,
        request: GenerationRequest,
        about: ResponseContext,
        headers: Headers,
    ) -> None:
        self._profile, self._request, self._headers = profile, request, headers
        self._timer = ChunkTimer(about.clock)
        self._state = _StreamState()

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``. What its client stopped has come to its end."""
        if isinstance(error, ClientDisconnected):
            self._state.finish_reason = STOPPED_FINISH_REASON
            return self._encode_final_event()
        return errors.encode_stream_error(error, self._request.timeout)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = get_only_choice(answer)
        body: dict[str, Any] = {"generated_text": join_choice_text(choice)}
        if self._request.want.details:
            tokens = answer.usage.completion_tokens if answer.usage else choice.tokens
            body["details"] = self._build_details(
                map_finish_reason(choice.finish_reason, self._profile), tokens, choice.token_ids
            )
        return build_json_response(encode_json(body))

    def _encode_event(self, event: Event) -> bytes:
        self._state.update(event, self._profile)
        match event:
            case TextDelta(text) | ReasoningDelta(text) | RefusalDelta(text):
                token = _NativeToken(_get_token_ids(event), text)
                return framed(encode_json(_NativeChunk(*self._timer.measure_chunk(), token)))
            case Timing():
                self._timer.set_backend_timing(event)
            case StreamEnd():
                return self._encode_final_event()
            case _:
                pass
        return b""

    def _encode_final_event(self) -> bytes:
        told = self._state
        details = self._build_details(told.finish_reason, told.token_count, UNSET)
        last = _NativeFinalChunk(
            *self._timer.measure_chunk(),
            "".join(told.texts),
            details if self._request.want.details else None,
            _NativeToken([], None),
        )
        return framed(encode_json(last))

    def _build_details(
        self, reason: str, tokens: int, ids: list[int] | UnsetType
    ) -> _NativeDetails:
        return _NativeDetails(reason, tokens, ids, self._request.sampling.seed)


# --- after TGI ------------------------------------------------------------------------------------


class _TgiToken(Struct):
    id: list[int]
    text: str
    logprob: None = None
    special: None = None


class _TgiStreamDetails(Struct):
    prompt_tokens: int
    finish_reason: str
    generated_tokens: int
    seed: int | None


class _TgiChunk(Struct):
    token: _TgiToken
    generated_text: str | None = None
    details: _TgiStreamDetails | None = None


class _TgiUnaryToken(Struct):
    id: int
    logprob: None = None
    special: None = None
    text: None = None


class _TgiUnaryDetails(Struct):
    prompt_tokens: int
    finish_reason: str
    generated_tokens: int
    prefill: list[_TgiUnaryToken]
    seed: int | None
    tokens: list[_TgiUnaryToken] | UnsetType


class TgiStyleEncoder:
    """Writes the answers of the endpoints after TGI; ``listed``: whole, as a list of one."""

    content_type = STREAM_CONTENT_TYPE

    def __init__(
        self,
        profile: MindieProfile,
        request: GenerationRequest,
        headers: Headers,
        *,
        listed: bool = False,
    ) -> None:
        self._profile, self._request, self._as_list = profile, request, listed
        self._headers = headers
        self._state = _StreamState()

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``. What its client stopped has come to its end."""
        if isinstance(error, ClientDisconnected):
            self._state.finish_reason = STOPPED_FINISH_REASON
            return self._encode_final_event()
        return errors.encode_stream_error(error, self._request.timeout)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        choice = get_only_choice(answer)
        body: dict[str, Any] = {}
        if self._request.want.details:
            body["details"] = self._build_details(answer, choice)
        body["generated_text"] = join_choice_text(choice)
        return build_json_response(encode_json([body] if self._as_list else body))

    def _build_details(self, answer: UnaryResponse, choice: UnaryChoice) -> _TgiUnaryDetails:
        usage = answer.usage
        return _TgiUnaryDetails(
            usage.prompt_tokens if usage else 0,
            map_finish_reason(choice.finish_reason, self._profile),
            usage.completion_tokens if usage else choice.tokens,
            [],
            self._request.sampling.seed,
            [_TgiUnaryToken(one) for one in choice.token_ids] or UNSET,
        )

    def _encode_event(self, event: Event) -> bytes:
        self._state.update(event, self._profile)
        match event:
            case TextDelta(text) | ReasoningDelta(text) | RefusalDelta(text):
                return framed(encode_json(_TgiChunk(_TgiToken(_get_token_ids(event), text))))
            case StreamEnd():
                return self._encode_final_event()
            case _:
                return b""

    def _encode_final_event(self) -> bytes:
        told = self._state
        details = None
        if self._request.want.details:
            seed = self._request.sampling.seed
            details = _TgiStreamDetails(
                told.prompt_tokens, told.finish_reason, told.token_count, seed
            )
        return framed(encode_json(_TgiChunk(_TgiToken([], ""), "".join(told.texts), details)))


# --- after vLLM -----------------------------------------------------------------------------------


class VllmStyleEncoder:
    """Writes the answers of the endpoint after vLLM: objects, each with a NUL byte behind it."""

    content_type = STREAM_CONTENT_TYPE

    def __init__(self, request: GenerationRequest, headers: Headers) -> None:
        self._request, self._headers = request, headers
        self._choice_count = request.choice_count

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``. What its client stopped just ends, as all does."""
        if isinstance(error, ClientDisconnected):
            return b""
        return errors.encode_stream_error(error, self._request.timeout)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """Every text begins with the prompt."""
        prompt = self._get_prompt()
        return build_json_response(
            encode_json({"text": [prompt + join_choice_text(choice) for choice in answer.choices]})
        )

    def _get_prompt(self) -> str:
        request = self._request
        if request.prompts:
            return str(request.prompts[0])
        return request.messages[0].text

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text, index) | ReasoningDelta(text, index) | RefusalDelta(text, index):
                texts = [""] * self._choice_count
                texts[index] = text
                return encode_json({"text": texts}) + b"\0"
            case _:
                return b""
