"""Answers: whole, and as a stream of events, in the key order of the server's writers.

No answer has an id. A stream begins with a handshake, which says that the prompt is done; it ends
with ``[DONE]``, before it usage where that was asked for. An error in a stream is a bare JSON
object, neither framed as an event nor followed by an end.

Source: openvinotoolkit/model_server, src/llm/apis/openai_completions.cpp, openai_json_response.hpp,
src/embeddings/embeddings_api.cpp; the early release: src/llm/http_llm_calculator.cc of 2024.
"""

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType, json

from gateway.core import types
from gateway.core.aggregate import Answer, ChoiceAnswer
from gateway.core.errors import GatewayError
from gateway.core.ports import About, Headers, Reply
from gateway.core.sse import DONE, event
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    End,
    Event,
    PromptEcho,
    Refusal,
    Text,
    Thought,
    TokenLogprob,
)
from protocols.ovms import errors

_encode = json.Encoder().encode
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "tool_calls": "tool_calls"}
_UNKNOWN = "unknown"

_MARK = "\x00"
_MARKED = _encode(_MARK)
"""What no model's name holds, so that it is found in a chunk where the text is to be."""

Payload = dict[str, Any]
_Piece = Text | Thought | Refusal | PromptEcho | CallStart | CallArguments


class Usage(Struct, frozen=True):
    """Tokens, in the order written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: types.Usage) -> "Usage":
        """From the internal one."""
        return cls(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


class _Chunk(Struct):
    choices: list[Payload]
    created: int
    model: str
    object: str
    usage: Usage | UnsetType | None = UNSET


class _Whole(Struct):
    choices: list[Payload]
    created: int
    model: str
    object: str
    usage: Usage | UnsetType = UNSET


class Form(Struct, frozen=True):
    """What tells a conversation from a completion, and the early release from today's."""

    chat: bool
    early: bool
    usage: bool = False
    """The stream ends with usage."""
    node: str = errors.GENERATOR

    @property
    def whole(self) -> str:
        """The ``object`` of a whole answer."""
        return "chat.completion" if self.chat else "text_completion"

    @property
    def chunk(self) -> str:
        """The ``object`` of a chunk: for completions, a name of this server's own."""
        return f"{self.whole}.chunk"


class GenerationEncoder:
    """Writes a conversation's or a completion's answer."""

    content_type = "text/event-stream"

    def __init__(self, form: Form, about: About) -> None:
        self._form = form
        self._about = about
        self._greeted = form.early
        self._usage: types.Usage | None = None
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def write(self, events: Sequence[Event]) -> bytes:
        """The chunks of these events. A piece and the end right behind it are one chunk."""
        out: list[bytes] = []
        for i, one in enumerate(events):
            match one:
                case Text() | Thought() | Refusal() | PromptEcho() | CallStart() | CallArguments():
                    out.append(self._said(one, events[i + 1] if i + 1 < len(events) else None))
                case End():
                    if i == 0 or getattr(events[i - 1], "index", None) != one.index:
                        out.append(self._choice(one.index, {}, one))
                case types.Usage():
                    self._usage = one
                case Done():
                    out.append(self._last())
                case _:
                    pass
        if out and not self._greeted:
            self._greeted = True
            out.insert(0, self._handshake())
        return b"".join(out)

    def error(self, error: GatewayError) -> bytes:
        """A bare object, so that a reader of events sees no event and an end that is missing."""
        return errors.body(errors.told(error, self._form.node))

    def whole(self, answer: Answer) -> Reply:
        """The answer in one piece."""
        about, form = self._about, self._form
        usage = Usage.of(answer.usage) if answer.usage and not form.early else UNSET
        choices = [self._whole_choice(choice) for choice in answer.choices]
        body = _Whole(choices, about.created, about.model, form.whole, usage)
        return Reply(200, _encode(body))

    # the stream

    def _said(self, one: _Piece, after: Event | None) -> bytes:
        """The chunk of a piece, and of the end if that comes right ``after``."""
        end = after if isinstance(after, End) and after.index == one.index else None
        if isinstance(one, Text) and one.text and end is None:
            head, tail = self._templates.get(one.index) or self._template(one.index)
            return head + _encode(one.text) + tail
        payload = self._payload(one)
        return self._choice(one.index, payload, end) if payload or end else b""

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """A chunk of text before and behind the text: the same for all of a choice's."""
        head, _, tail = self._choice(index, self._payload(Text(_MARK)), None).partition(_MARKED)
        self._templates[index] = head, tail
        return head, tail

    def _payload(self, one: _Piece) -> Payload:
        """What a piece adds to its choice; empty if nothing can be shown."""
        match one:
            case Text(text) | PromptEcho(_, text) | Refusal(text):
                if not self._form.chat:
                    return {"text": text} if text else {}
                return {"delta": {"content": text}} if text else {}
            case _ if not self._form.chat or self._form.early:
                return {}
            case Thought(text):
                return {"delta": {"reasoning_content": text}} if text else {}
            case CallStart(_, call, name_id, name):
                function: Payload = {"name": name}
                begun = {"id": name_id, "type": "function", "index": call, "function": function}
                return {"delta": {"tool_calls": [begun]}}
            case _:
                piece = {"index": one.call, "function": {"arguments": one.text}}
                return {"delta": {"tool_calls": [piece]}}

    def _nothing(self) -> Payload:
        if self._form.chat:
            return {"delta": {}}
        return {} if self._form.early else {"text": ""}

    def _choice(self, index: int, payload: Payload, end: End | None) -> bytes:
        reason = self._reason(end.reason) if end else None
        payload = payload or self._nothing()
        if self._form.early:
            choice = {"finish_reason": reason, "index": index, "logprobs": None, **payload}
        else:
            choice = {"index": index, "logprobs": None, **payload, "finish_reason": reason}
        return self._frame([choice], None if self._form.usage else UNSET)

    def _handshake(self) -> bytes:
        """It has no logprobs, and no usage even where usage was asked for."""
        begun: Payload = {"text": ""}
        if self._form.chat:
            begun = {"delta": {"role": "assistant", "content": None}}
        return self._frame([{"index": 0, **begun, "finish_reason": None}], UNSET)

    def _last(self) -> bytes:
        if not self._form.usage or self._usage is None:
            return DONE
        return self._frame([], Usage.of(self._usage)) + DONE

    def _frame(self, choices: list[Payload], usage: Usage | UnsetType | None) -> bytes:
        about = self._about
        chunk = _Chunk(choices, about.created, about.model, self._form.chunk, usage)
        return event(_encode(chunk))

    def _reason(self, reason: types.FinishReason) -> str:
        """The early release knew no other reason than ``stop``."""
        return "stop" if self._form.early else _REASONS.get(reason, _UNKNOWN)

    # the whole

    def _whole_choice(self, choice: ChoiceAnswer) -> Payload:
        out: Payload = {
            "finish_reason": self._reason(choice.reason),
            "index": choice.index,
            "logprobs": None if self._form.early else self._logprobs(choice),
        }
        if not self._form.chat:
            return out | {"text": choice.text}
        message: Payload = {"content": choice.text or choice.refusal}
        if choice.thought and not self._form.early:
            message["reasoning_content"] = choice.thought
        message["role"] = "assistant"
        if not self._form.early:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return out | {"message": message}

    def _logprobs(self, choice: ChoiceAnswer) -> Payload | None:
        tokens = choice.logprobs
        if not tokens:
            return None
        if self._form.chat:
            return {"content": [_chat_logprob(token) for token in tokens]}
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token.token: token.logprob} for token in tokens],
            "text_offset": list(_offsets(tokens)),
        }


def _chat_logprob(token: TokenLogprob) -> Payload:
    data = token.data if token.data is not None else token.token.encode()
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": list(data),
        "top_logprobs": [],
    }


def _offsets(tokens: Sequence[TokenLogprob]) -> Iterator[int]:
    """Where each token begins, in bytes of UTF-8, as this server counts."""
    at = 0
    for token in tokens:
        yield at
        at += len(token.token.encode())


class _Embedding(Struct):
    object: str
    embedding: tuple[float, ...] | str
    index: int


class _EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class _Embeddings(Struct):
    object: str
    data: list[_Embedding]
    usage: _EmbeddingUsage | UnsetType


class EmbeddingEncoder:
    """Writes vectors, always whole."""

    content_type = "application/json"

    def __init__(self, encoding: str) -> None:
        self._base64 = encoding == "base64"

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def write(self, events: Sequence[Event]) -> bytes:
        """Nothing: vectors are never streamed."""
        del events
        return b""

    def error(self, error: GatewayError) -> bytes:
        """The error's body."""
        return errors.body(errors.told(error, errors.EMBEDDER))

    def whole(self, answer: Answer) -> Reply:
        """The vectors, as numbers or as base64 of little-endian float32."""
        used = answer.usage
        data = [
            _Embedding("embedding", self._written(values), index)
            for index, values in enumerate(answer.vectors)
        ]
        usage = _EmbeddingUsage(used.prompt_tokens, used.prompt_tokens) if used else UNSET
        return Reply(200, _encode(_Embeddings("list", data, usage)))

    def _written(self, values: tuple[float, ...]) -> tuple[float, ...] | str:
        if not self._base64:
            return values
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
