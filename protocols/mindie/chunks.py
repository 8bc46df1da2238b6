"""Answers to conversations and completions: OpenAI's shapes in the server's order of keys.

A stream's last event of a choice carries the finish reason and usage. It has no text: the model's
end is a token of its own, whose text the server leaves out; so nothing is held back. It waits for
the end of the answer, when usage is known.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp (EncodeStreamJsonObject,
EncodeNonStreamJsonObject) and single_req_vllm_openai_completions_infer_interface.cpp; for 1.0.RC1
the published page: the role in every chunk, a bare last delta, and no usage.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from protocols.core import events as core_events
from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import ClientDisconnected, GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.core.sse import DONE_EVENT
from protocols.core.sse import format_event as framed
from protocols.mindie import errors
from protocols.mindie.texts import STREAM_CONTENT_TYPE, build_json_response, encode_json
from protocols.openai.pieces import FunctionCallItem, ToolCallItem, build_tool_calls

_OPENAI_FINISH_REASONS: Mapping[FinishReason, str] = {
    "length": "length",
    "tool_calls": "tool_calls",
}
"""All else is ``stop``."""
_EARLY_OPENAI_FINISH_REASONS: Mapping[FinishReason, str] = {
    "length": "length",
    "content_filter": "stop_sequence",
    "unknown": "invalid flag",
}


class ResponseVariant(Struct, frozen=True):
    """What tells conversations from completions, and the first releases from the later."""

    is_chat: bool = True
    early: bool = False

    @property
    def unary_object(self) -> str:
        """The ``object`` of a whole answer."""
        return "chat.completion" if self.is_chat else "text_completion"

    @property
    def chunk_object(self) -> str:
        """The ``object`` of a chunk."""
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def map_finish_reason(self, reason: FinishReason, *, called: bool) -> str:
        """A finish reason's name: whatever is no length is an end."""
        if self.early:
            return _EARLY_OPENAI_FINISH_REASONS.get(reason, "eos_token")
        if called and reason != "length":
            return "tool_calls"
        return _OPENAI_FINISH_REASONS.get(reason, "stop")


class OpenAiStyleEncoder:
    """Writes the answer to a conversation or a completion."""

    content_type = STREAM_CONTENT_TYPE

    def __init__(
        self,
        form: ResponseVariant,
        request: GenerationRequest,
        about: ResponseContext,
        headers: Headers,
    ) -> None:
        self._variant, self._request, self._headers = form, request, headers
        about_it = b'"created":%d,"model":%b' % (about.created, encode_json(about.model))
        head = b'{"id":%b,"object":%b,' + about_it + b","
        self._unary_head = head % (encode_json(request.client_id), encode_json(form.unary_object))
        self._chunk_head = head % (encode_json(request.client_id), encode_json(form.chunk_object))
        self._started = False
        self._prompt_tokens: int | None = None
        self._usage: core_events.Usage | None = None
        self._token_counts = [0] * request.choice_count
        self._text_offsets = [0] * request.choice_count
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._choices_with_calls: set[int] = set()
        self._choice_ends: list[ChoiceEnd] = []

    def headers(self) -> Headers:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return self._headers

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        return b"".join([self._encode_event(event) for event in events])

    def encode_error_event(self, error: GatewayError) -> bytes:
        """See ``protocols.core.interfaces.ResponseEncoder``. What its client stopped has come to its end."""
        if isinstance(error, ClientDisconnected):
            return self._encode_stopped()
        return errors.encode_stream_error(error, self._request.timeout)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        write = self._build_chat_choice if self._variant.is_chat else self._build_completion_choice
        body = b'"choices":' + encode_json([write(choice) for choice in answer.choices])
        if answer.usage is not None:
            body += b',"usage":' + encode_json(build_usage(answer.usage))
        return build_json_response(self._unary_head + body + b"}")

    # --- a stream ---------------------------------------------------------------------------------

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case TextDelta() | ReasoningDelta() | RefusalDelta():
                return self._encode_role_chunks() + self._encode_text(event)
            case ToolCallStart(index, call, name_id, name):
                piece = ToolCallItem(call, name_id, "function", FunctionCallItem(name, ""))
                return self._encode_role_chunks() + self._encode_call(index, piece)
            case ToolCallDelta(index, call, text):
                piece = ToolCallItem(call, function=FunctionCallItem(arguments=text))
                return self._encode_role_chunks() + self._encode_call(index, piece)
            case StreamStart(prompt_tokens):
                self._prompt_tokens = prompt_tokens
            case ChoiceEnd():
                self._choice_ends.append(event)
            case core_events.Usage():
                self._usage = event
            case StreamEnd():
                last = b"".join([self._encode_final_chunk(end) for end in self._choice_ends])
                return self._encode_role_chunks() + last + DONE_EVENT
            case _:
                pass
        return b""

    def _encode_role_chunks(self) -> bytes:
        """Before the first piece of a conversation, an empty one for each choice."""
        if self._started or self._variant.early or not self._variant.is_chat:
            return b""
        self._started = True
        return b"".join(
            [self._encode_delta(i, content=b'""') for i in range(self._request.choice_count)]
        )

    def _encode_text(self, event: TextDelta | ReasoningDelta | RefusalDelta) -> bytes:
        index, logprobs = event.index, b"null"
        if isinstance(event, TextDelta):
            self._token_counts[index] += event.tokens
            if event.logprobs:
                logprobs = encode_json(self._build_logprobs(index, event.logprobs))
        if not event.text and logprobs == b"null":
            return b""
        apart = (
            isinstance(event, ReasoningDelta) and self._variant.is_chat and not self._variant.early
        )
        if not apart and logprobs == b"null":
            head, tail = self._templates.get(index) or self._build_template(index)
            return head + encode_json(event.text) + tail
        key = b"reasoning_content" if apart else b"content"
        return self._encode_delta(
            index, content=encode_json(event.text), key=key, logprobs=logprobs
        )

    def _build_template(self, index: int) -> tuple[bytes, bytes]:
        """A piece of plain text, cut where the text belongs; JSON never holds the mark."""
        head, _, tail = self._encode_delta(index, content=b"\0").partition(b"\0")
        self._templates[index] = head, tail
        return head, tail

    def _encode_call(self, index: int, piece: ToolCallItem) -> bytes:
        self._choices_with_calls.add(index)
        return self._encode_delta(index, content=b"[%b]" % encode_json(piece), key=b"tool_calls")

    def _encode_delta(
        self, index: int, *, content: bytes, key: bytes = b"content", logprobs: bytes = b"null"
    ) -> bytes:
        if not self._variant.is_chat:
            return self._encode_chunk(index, b'"text":' + content, logprobs, b"null", b"")
        delta = b'"delta":{"role":"assistant","%b":%b}' % (key, content)
        return self._encode_chunk(index, delta, logprobs, b"null", b"")

    def _encode_final_chunk(self, end: ChoiceEnd) -> bytes:
        reason = encode_json(
            self._variant.map_finish_reason(
                end.finish_reason, called=end.index in self._choices_with_calls
            )
        )
        if self._variant.early:
            return self._encode_chunk(end.index, b'"delta":{}', b"null", reason, b"")
        said = (
            b'"delta":{"role":"assistant","content":""}' if self._variant.is_chat else b'"text":""'
        )
        usage = self._get_choice_usage(end.index)
        told = b"" if usage is None else b'"usage":' + encode_json(build_usage(usage))
        return self._encode_chunk(end.index, said, b"null", reason, told)

    def _encode_stopped(self) -> bytes:
        """The end of every choice that had none; a call that it had begun is none."""
        cut = set(range(self._request.choice_count)) - {end.index for end in self._choice_ends}
        self._choices_with_calls -= cut
        self._choice_ends.extend(ChoiceEnd("content_filter", index) for index in sorted(cut))
        return self._encode_event(StreamEnd())

    def _get_choice_usage(self, index: int) -> core_events.Usage | None:
        """Each choice tells its own tokens; the backend's figure is for all of them."""
        if self._request.choice_count == 1 and self._usage is not None:
            return self._usage
        prompt = self._usage.prompt_tokens if self._usage else self._prompt_tokens
        return None if prompt is None else core_events.Usage(prompt, self._token_counts[index])

    def _encode_chunk(
        self, index: int, said: bytes, logprobs: bytes, reason: bytes, usage: bytes
    ) -> bytes:
        more = b"" if self._variant.early and self._variant.is_chat else b',"logprobs":' + logprobs
        if not self._variant.is_chat:
            more += b',"stop_reason":null'
        choice = b'{"index":%d,%b%b,"finish_reason":%b}' % (index, said, more, reason)
        choices = b'"choices":[%b]' % choice
        parts = [usage, choices] if self._variant.is_chat else [choices, usage]
        return framed(self._chunk_head + b",".join(filter(None, parts)) + b"}")

    # --- a whole answer ---------------------------------------------------------------------------

    def _build_chat_choice(self, choice: UnaryChoice) -> dict[str, Any]:
        form = self._variant
        text = choice.text + choice.refusal
        message: dict[str, Any] = {"role": "assistant", "content": text}
        whole: dict[str, Any] = {"index": choice.index, "message": message}
        if form.early:
            message["content"] = choice.reasoning + text
        else:
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            message["tool_calls"] = build_tool_calls(choice.tool_calls)
            whole["logprobs"] = self._build_logprobs(choice.index, choice.logprobs)
        whole["finish_reason"] = form.map_finish_reason(
            choice.finish_reason, called=bool(choice.tool_calls)
        )
        return whole

    def _build_completion_choice(self, choice: UnaryChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.reasoning + choice.text + choice.refusal,
            "logprobs": self._build_logprobs(choice.index, choice.logprobs),
            "stop_reason": None,
            "finish_reason": self._variant.map_finish_reason(choice.finish_reason, called=False),
        }

    def _build_logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Any:
        if not tokens:
            return None
        if self._variant.is_chat:
            return {"content": [_build_chat_logprob(one) for one in tokens]}
        start = self._text_offsets[index]
        columns = _CompletionLogprobs([], [], [], [])
        for one in tokens:
            columns.append_token(one, start)
            start += len(one.token.encode())
        self._text_offsets[index] = start
        return columns


# --- the small shapes -----------------------------------------------------------------------------


class _PromptTokensDetails(Struct):
    cached_tokens: int


class _CompletionTokensDetails(Struct):
    reasoning_tokens: int


class _UsageBody(Struct):
    prompt_tokens: int
    prompt_tokens_details: _PromptTokensDetails | UnsetType
    completion_tokens: int
    completion_tokens_details: _CompletionTokensDetails | UnsetType
    total_tokens: int


def build_usage(usage: core_events.Usage) -> _UsageBody:
    """Usage, its details where they are known."""
    cached, thought = usage.cached_tokens, usage.reasoning_tokens
    return _UsageBody(
        usage.prompt_tokens,
        UNSET if cached is None else _PromptTokensDetails(cached),
        usage.completion_tokens,
        UNSET if thought is None else _CompletionTokensDetails(thought),
        usage.total_tokens,
    )


def _build_token_logprob(token: str, logprob: float | None, data: bytes | None) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": logprob,
        "bytes": list(token.encode() if data is None else data),
    }


def _build_chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    top = [_build_token_logprob(other.token, other.logprob, other.data) for other in one.top]
    return {**_build_token_logprob(one.token, one.logprob, one.data), "top_logprobs": top}


class _CompletionLogprobs(Struct):
    """The older form. The token that came is the first among its alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None]]

    def append_token(self, one: TokenLogprob, offset: int) -> None:
        self.text_offset.append(offset)
        self.token_logprobs.append(one.logprob)
        self.tokens.append(one.token)
        others: Iterable[tuple[str, float]] = ((other.token, other.logprob) for other in one.top)
        self.top_logprobs.append({one.token: one.logprob} | dict(others))
