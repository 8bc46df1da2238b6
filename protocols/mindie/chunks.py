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

from gateway.core import types
from gateway.core.aggregate import Answer, ChoiceAnswer
from gateway.core.errors import ClientGone, GatewayError
from gateway.core.ports import About, Headers, Reply
from gateway.core.sse import DONE
from gateway.core.sse import event as framed
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    End,
    Event,
    FinishReason,
    GenerateRequest,
    Refusal,
    Start,
    Text,
    Thought,
    TokenLogprob,
)
from protocols.mindie import errors
from protocols.mindie.texts import CONTENT_TYPE, encode, reply
from protocols.openai.pieces import CallPiece, Function, calls_of

_REASONS: Mapping[FinishReason, str] = {"length": "length", "tool_calls": "tool_calls"}
"""All else is ``stop``."""
_EARLY_REASONS: Mapping[FinishReason, str] = {
    "length": "length",
    "content_filter": "stop_sequence",
    "unknown": "invalid flag",
}


class Form(Struct, frozen=True):
    """What tells conversations from completions, and the first releases from the later."""

    chat: bool = True
    early: bool = False

    @property
    def whole(self) -> str:
        """The ``object`` of a whole answer."""
        return "chat.completion" if self.chat else "text_completion"

    @property
    def chunk(self) -> str:
        """The ``object`` of a chunk."""
        return "chat.completion.chunk" if self.chat else "text_completion"

    def reason(self, reason: FinishReason, *, called: bool) -> str:
        """A finish reason's name: whatever is no length is an end."""
        if self.early:
            return _EARLY_REASONS.get(reason, "eos_token")
        if called and reason != "length":
            return "tool_calls"
        return _REASONS.get(reason, "stop")


class Encoder:
    """Writes the answer to a conversation or a completion."""

    content_type = CONTENT_TYPE

    def __init__(
        self, form: Form, request: GenerateRequest, about: About, headers: Headers
    ) -> None:
        self._form, self._request, self._headers = form, request, headers
        about_it = b'"created":%d,"model":%b' % (about.created, encode(about.model))
        head = b'{"id":%b,"object":%b,' + about_it + b","
        self._whole = head % (encode(request.client_id), encode(form.whole))
        self._chunk = head % (encode(request.client_id), encode(form.chunk))
        self._begun = False
        self._prompt_tokens: int | None = None
        self._usage: types.Usage | None = None
        self._tokens = [0] * request.choices
        self._offsets = [0] * request.choices
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._called: set[int] = set()
        self._ends: list[End] = []

    def headers(self) -> Headers:
        """See ``gateway.core.ports.Encoder``."""
        return self._headers

    def write(self, events: Sequence[Event]) -> bytes:
        """See ``gateway.core.ports.Encoder``."""
        return b"".join([self._write(event) for event in events])

    def error(self, error: GatewayError) -> bytes:
        """See ``gateway.core.ports.Encoder``. What its client stopped has come to its end."""
        if isinstance(error, ClientGone):
            return self._stopped()
        return errors.broken(error, self._request.timeout)

    def whole(self, answer: Answer) -> Reply:
        """See ``gateway.core.ports.Encoder``."""
        write = self._message if self._form.chat else self._completion
        body = b'"choices":' + encode([write(choice) for choice in answer.choices])
        if answer.usage is not None:
            body += b',"usage":' + encode(usage_of(answer.usage))
        return reply(self._whole + body + b"}")

    # --- a stream ---------------------------------------------------------------------------------

    def _write(self, event: Event) -> bytes:
        match event:
            case Text() | Thought() | Refusal():
                return self._opened() + self._say(event)
            case CallStart(index, call, name_id, name):
                piece = CallPiece(call, name_id, "function", Function(name, ""))
                return self._opened() + self._call(index, piece)
            case CallArguments(index, call, text):
                piece = CallPiece(call, function=Function(arguments=text))
                return self._opened() + self._call(index, piece)
            case Start(prompt_tokens):
                self._prompt_tokens = prompt_tokens
            case End():
                self._ends.append(event)
            case types.Usage():
                self._usage = event
            case Done():
                last = b"".join([self._last(end) for end in self._ends])
                return self._opened() + last + DONE
            case _:
                pass
        return b""

    def _opened(self) -> bytes:
        """Before the first piece of a conversation, an empty one for each choice."""
        if self._begun or self._form.early or not self._form.chat:
            return b""
        self._begun = True
        return b"".join([self._piece(i, content=b'""') for i in range(self._request.choices)])

    def _say(self, event: Text | Thought | Refusal) -> bytes:
        index, logprobs = event.index, b"null"
        if isinstance(event, Text):
            self._tokens[index] += event.tokens
            if event.logprobs:
                logprobs = encode(self._logprobs(index, event.logprobs))
        if not event.text and logprobs == b"null":
            return b""
        apart = isinstance(event, Thought) and self._form.chat and not self._form.early
        if not apart and logprobs == b"null":
            head, tail = self._templates.get(index) or self._template(index)
            return head + encode(event.text) + tail
        key = b"reasoning_content" if apart else b"content"
        return self._piece(index, content=encode(event.text), key=key, logprobs=logprobs)

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """A piece of plain text, cut where the text belongs; JSON never holds the mark."""
        head, _, tail = self._piece(index, content=b"\0").partition(b"\0")
        self._templates[index] = head, tail
        return head, tail

    def _call(self, index: int, piece: CallPiece) -> bytes:
        self._called.add(index)
        return self._piece(index, content=b"[%b]" % encode(piece), key=b"tool_calls")

    def _piece(
        self, index: int, *, content: bytes, key: bytes = b"content", logprobs: bytes = b"null"
    ) -> bytes:
        if not self._form.chat:
            return self._frame(index, b'"text":' + content, logprobs, b"null", b"")
        delta = b'"delta":{"role":"assistant","%b":%b}' % (key, content)
        return self._frame(index, delta, logprobs, b"null", b"")

    def _last(self, end: End) -> bytes:
        reason = encode(self._form.reason(end.reason, called=end.index in self._called))
        if self._form.early:
            return self._frame(end.index, b'"delta":{}', b"null", reason, b"")
        said = b'"delta":{"role":"assistant","content":""}' if self._form.chat else b'"text":""'
        usage = self._usage_of(end.index)
        told = b"" if usage is None else b'"usage":' + encode(usage_of(usage))
        return self._frame(end.index, said, b"null", reason, told)

    def _stopped(self) -> bytes:
        """The end of every choice that had none; a call that it had begun is none."""
        cut = set(range(self._request.choices)) - {end.index for end in self._ends}
        self._called -= cut
        self._ends.extend(End("content_filter", index) for index in sorted(cut))
        return self._write(Done())

    def _usage_of(self, index: int) -> types.Usage | None:
        """Each choice tells its own tokens; the backend's figure is for all of them."""
        if self._request.choices == 1 and self._usage is not None:
            return self._usage
        prompt = self._usage.prompt_tokens if self._usage else self._prompt_tokens
        return None if prompt is None else types.Usage(prompt, self._tokens[index])

    def _frame(
        self, index: int, said: bytes, logprobs: bytes, reason: bytes, usage: bytes
    ) -> bytes:
        more = b"" if self._form.early and self._form.chat else b',"logprobs":' + logprobs
        if not self._form.chat:
            more += b',"stop_reason":null'
        choice = b'{"index":%d,%b%b,"finish_reason":%b}' % (index, said, more, reason)
        choices = b'"choices":[%b]' % choice
        parts = [usage, choices] if self._form.chat else [choices, usage]
        return framed(self._chunk + b",".join(filter(None, parts)) + b"}")

    # --- a whole answer ---------------------------------------------------------------------------

    def _message(self, choice: ChoiceAnswer) -> dict[str, Any]:
        form = self._form
        text = choice.text + choice.refusal
        message: dict[str, Any] = {"role": "assistant", "content": text}
        whole: dict[str, Any] = {"index": choice.index, "message": message}
        if form.early:
            message["content"] = choice.thought + text
        else:
            if choice.thought:
                message["reasoning_content"] = choice.thought
            message["tool_calls"] = calls_of(choice.calls)
            whole["logprobs"] = self._logprobs(choice.index, choice.logprobs)
        whole["finish_reason"] = form.reason(choice.reason, called=bool(choice.calls))
        return whole

    def _completion(self, choice: ChoiceAnswer) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.thought + choice.text + choice.refusal,
            "logprobs": self._logprobs(choice.index, choice.logprobs),
            "stop_reason": None,
            "finish_reason": self._form.reason(choice.reason, called=False),
        }

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Any:
        if not tokens:
            return None
        if self._form.chat:
            return {"content": [_chat_logprob(one) for one in tokens]}
        start = self._offsets[index]
        columns = _Columns([], [], [], [])
        for one in tokens:
            columns.add(one, start)
            start += len(one.token.encode())
        self._offsets[index] = start
        return columns


# --- the small shapes -----------------------------------------------------------------------------


class _CachedTokens(Struct):
    cached_tokens: int


class _ReasoningTokens(Struct):
    reasoning_tokens: int


class _Usage(Struct):
    prompt_tokens: int
    prompt_tokens_details: _CachedTokens | UnsetType
    completion_tokens: int
    completion_tokens_details: _ReasoningTokens | UnsetType
    total_tokens: int


def usage_of(usage: types.Usage) -> _Usage:
    """Usage, its details where they are known."""
    cached, thought = usage.cached_tokens, usage.reasoning_tokens
    return _Usage(
        usage.prompt_tokens,
        UNSET if cached is None else _CachedTokens(cached),
        usage.completion_tokens,
        UNSET if thought is None else _ReasoningTokens(thought),
        usage.total_tokens,
    )


def _token(token: str, logprob: float | None, data: bytes | None) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": logprob,
        "bytes": list(token.encode() if data is None else data),
    }


def _chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    top = [_token(other.token, other.logprob, other.data) for other in one.top]
    return {**_token(one.token, one.logprob, one.data), "top_logprobs": top}


class _Columns(Struct):
    """The older form. The token that came is the first among its alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None]]

    def add(self, one: TokenLogprob, offset: int) -> None:
        self.text_offset.append(offset)
        self.token_logprobs.append(one.logprob)
        self.tokens.append(one.token)
        others: Iterable[tuple[str, float]] = ((other.token, other.logprob) for other in one.top)
        self.top_logprobs.append({one.token: one.logprob} | dict(others))
