"""Answers of the endpoints that name no model: the server's own, and those after TGI and vLLM.

Streams of the first two end with an event that says the whole text once more, and is ours to add:
it has no token of its own, so nothing need be held back for it.

Source: MindIE-LLM 0695772, single_req_self_develop_infer_interface.cpp,
single_req_tgi_text_infer_interface.cpp, single_req_vllm_infer_interface.cpp.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from gateway.core.aggregate import Answer, ChoiceAnswer
from gateway.core.errors import ClientGone, GatewayError
from gateway.core.ports import About, Headers, Reply
from gateway.core.sse import event as framed
from gateway.core.types import (
    Done,
    End,
    Event,
    GenerateRequest,
    Refusal,
    Start,
    Text,
    Thought,
    Timing,
    Usage,
)
from protocols.mindie import errors
from protocols.mindie.profiles import Profile
from protocols.mindie.texts import (
    CONTENT_TYPE,
    STOPPED,
    Stopwatch,
    encode,
    only,
    reason_of,
    reply,
    said,
)


class _Told:
    """What a stream has told so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_count = 0
        self.prompt_tokens = 0
        self.finish_reason = ""

    def update(self, event: Event, profile: Profile) -> None:
        """Remember what the end will repeat."""
        match event:
            case Text(text):
                self.texts.append(text)
                self.token_count += event.tokens
            case Thought(text) | Refusal(text):
                self.texts.append(text)
                self.token_count += 1
            case Start(prompt_tokens):
                self.prompt_tokens = prompt_tokens or 0
            case Usage(prompt_tokens, completion_tokens):
                self.prompt_tokens = prompt_tokens
                self.token_count = max(self.token_count, completion_tokens)
            case End(reason):
                self.finish_reason = reason_of(reason, profile)
            case _:
                pass


def _ids(event: Event) -> list[int]:
    return list(event.token_ids) if isinstance(event, Text) else []


# --- the server's own -----------------------------------------------------------------------------


class _NativeDetails(Struct):
    finish_reason: str
    generated_tokens: int
    generated_token_ids: list[int] | UnsetType
    seed: int | None


class _NativeToken(Struct):
    id: list[int]
    text: str | None


class _NativePiece(Struct):
    prefill_time: int | None
    decode_time: int | None
    token: _NativeToken


class _NativeLast(Struct):
    prefill_time: int | None
    decode_time: int | None
    generated_text: str
    details: _NativeDetails | None
    token: _NativeToken


class NativeEncoder:
    """Writes the answer to /infer and /infer_token."""

    content_type = CONTENT_TYPE

    def __init__(
        self, profile: Profile, request: GenerateRequest, about: About, headers: Headers
    ) -> None:
        self._profile, self._request, self._headers = profile, request, headers
        self._timer = Stopwatch(about.clock)
        self._state = _Told()

    def headers(self) -> Headers:
        """See ``gateway.core.ports.Encoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``gateway.core.ports.Encoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``gateway.core.ports.Encoder``. What its client stopped has come to its end."""
        if isinstance(error, ClientGone):
            self._state.finish_reason = STOPPED
            return self._encode_final_event()
        return errors.broken(error, self._request.timeout)

    def encode_unary(self, answer: Answer) -> Reply:
        """See ``gateway.core.ports.Encoder``."""
        choice = only(answer)
        body: dict[str, Any] = {"generated_text": said(choice)}
        if self._request.want.details:
            tokens = answer.usage.completion_tokens if answer.usage else choice.tokens
            body["details"] = self._build_details(
                reason_of(choice.finish_reason, self._profile), tokens, choice.token_ids
            )
        return reply(encode(body))

    def _encode_event(self, event: Event) -> bytes:
        self._state.update(event, self._profile)
        match event:
            case Text(text) | Thought(text) | Refusal(text):
                token = _NativeToken(_ids(event), text)
                return framed(encode(_NativePiece(*self._timer.measure_chunk(), token)))
            case Timing():
                self._timer.set_backend_timing(event)
            case Done():
                return self._encode_final_event()
            case _:
                pass
        return b""

    def _encode_final_event(self) -> bytes:
        told = self._state
        details = self._build_details(told.finish_reason, told.token_count, UNSET)
        last = _NativeLast(
            *self._timer.measure_chunk(),
            "".join(told.texts),
            details if self._request.want.details else None,
            _NativeToken([], None),
        )
        return framed(encode(last))

    def _build_details(
        self, reason: str, tokens: int, ids: list[int] | UnsetType
    ) -> _NativeDetails:
        return _NativeDetails(reason, tokens, ids, self._request.sampling.seed)


# --- after TGI ------------------------------------------------------------------------------------


class _Token(Struct):
    id: list[int]
    text: str
    logprob: None = None
    special: None = None


class _LastDetails(Struct):
    prompt_tokens: int
    finish_reason: str
    generated_tokens: int
    seed: int | None


class _Piece(Struct):
    token: _Token
    generated_text: str | None = None
    details: _LastDetails | None = None


class _WholeToken(Struct):
    id: int
    logprob: None = None
    special: None = None
    text: None = None


class _WholeDetails(Struct):
    prompt_tokens: int
    finish_reason: str
    generated_tokens: int
    prefill: list[_WholeToken]
    seed: int | None
    tokens: list[_WholeToken] | UnsetType


class InputsEncoder:
    """Writes the answers of the endpoints after TGI; ``listed``: whole, as a list of one."""

    content_type = CONTENT_TYPE

    def __init__(
        self, profile: Profile, request: GenerateRequest, headers: Headers, *, listed: bool = False
    ) -> None:
        self._profile, self._request, self._as_list = profile, request, listed
        self._headers = headers
        self._state = _Told()

    def headers(self) -> Headers:
        """See ``gateway.core.ports.Encoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``gateway.core.ports.Encoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``gateway.core.ports.Encoder``. What its client stopped has come to its end."""
        if isinstance(error, ClientGone):
            self._state.finish_reason = STOPPED
            return self._encode_final_event()
        return errors.broken(error, self._request.timeout)

    def encode_unary(self, answer: Answer) -> Reply:
        """See ``gateway.core.ports.Encoder``."""
        choice = only(answer)
        body: dict[str, Any] = {}
        if self._request.want.details:
            body["details"] = self._build_details(answer, choice)
        body["generated_text"] = said(choice)
        return reply(encode([body] if self._as_list else body))

    def _build_details(self, answer: Answer, choice: ChoiceAnswer) -> _WholeDetails:
        usage = answer.usage
        return _WholeDetails(
            usage.prompt_tokens if usage else 0,
            reason_of(choice.finish_reason, self._profile),
            usage.completion_tokens if usage else choice.tokens,
            [],
            self._request.sampling.seed,
            [_WholeToken(one) for one in choice.token_ids] or UNSET,
        )

    def _encode_event(self, event: Event) -> bytes:
        self._state.update(event, self._profile)
        match event:
            case Text(text) | Thought(text) | Refusal(text):
                return framed(encode(_Piece(_Token(_ids(event), text))))
            case Done():
                return self._encode_final_event()
            case _:
                return b""

    def _encode_final_event(self) -> bytes:
        told = self._state
        details = None
        if self._request.want.details:
            seed = self._request.sampling.seed
            details = _LastDetails(told.prompt_tokens, told.finish_reason, told.token_count, seed)
        return framed(encode(_Piece(_Token([], ""), "".join(told.texts), details)))


# --- after vLLM -----------------------------------------------------------------------------------


class PromptEncoder:
    """Writes the answers of the endpoint after vLLM: objects, each with a NUL byte behind it."""

    content_type = CONTENT_TYPE

    def __init__(self, request: GenerateRequest, headers: Headers) -> None:
        self._request, self._headers = request, headers
        self._choice_count = request.choice_count

    def headers(self) -> Headers:
        """See ``gateway.core.ports.Encoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``gateway.core.ports.Encoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``gateway.core.ports.Encoder``. What its client stopped just ends, as all does."""
        if isinstance(error, ClientGone):
            return b""
        return errors.broken(error, self._request.timeout)

    def encode_unary(self, answer: Answer) -> Reply:
        """Every text begins with the prompt."""
        prompt = self._get_prompt()
        return reply(encode({"text": [prompt + said(choice) for choice in answer.choices]}))

    def _get_prompt(self) -> str:
        request = self._request
        if request.prompts:
            return str(request.prompts[0])
        return request.messages[0].text

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case Text(text, index) | Thought(text, index) | Refusal(text, index):
                texts = [""] * self._choice_count
                texts[index] = text
                return encode({"text": texts}) + b"\0"
            case _:
                return b""
