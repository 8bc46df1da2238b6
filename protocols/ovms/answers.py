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
    def from_event(cls, usage: types.Usage) -> "Usage":
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

    is_chat: bool
    early: bool
    with_usage: bool = False
    """The stream ends with usage."""
    graph_node: str = errors.GENERATOR

    @property
    def unary_object(self) -> str:
        """The ``object`` of a whole answer."""
        return "chat.completion" if self.is_chat else "text_completion"

    @property
    def chunk_object(self) -> str:
        """The ``object`` of a chunk: for completions, a name of this server's own."""
        return f"{self.unary_object}.chunk"


class GenerationEncoder:
    """Writes a conversation's or a completion's answer."""

    content_type = "text/event-stream"

    def __init__(self, form: Form, about: About) -> None:
        self._variant = form
        self._context = about
        self._handshake_sent = form.early
        self._usage: types.Usage | None = None
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """The chunks of these events. A piece and the end right behind it are one chunk."""
        out: list[bytes] = []
        for i, one in enumerate(events):
            match one:
                case Text() | Thought() | Refusal() | PromptEcho() | CallStart() | CallArguments():
                    out.append(
                        self._encode_delta(one, events[i + 1] if i + 1 < len(events) else None)
                    )
                case End():
                    if i == 0 or getattr(events[i - 1], "index", None) != one.index:
                        out.append(self._encode_choice(one.index, {}, one))
                case types.Usage():
                    self._usage = one
                case Done():
                    out.append(self._encode_final_chunk())
                case _:
                    pass
        if out and not self._handshake_sent:
            self._handshake_sent = True
            out.insert(0, self._encode_handshake())
        return b"".join(out)

    def encode_error_event(self, error: GatewayError) -> bytes:
        """A bare object, so that a reader of events sees no event and an end that is missing."""
        return errors.body(errors.told(error, self._variant.graph_node))

    def encode_unary(self, answer: Answer) -> Reply:
        """The answer in one piece."""
        about, form = self._context, self._variant
        usage = Usage.from_event(answer.usage) if answer.usage and not form.early else UNSET
        choices = [self._build_unary_choice(choice) for choice in answer.choices]
        body = _Whole(choices, about.created, about.model, form.unary_object, usage)
        return Reply(200, _encode(body))

    # the stream

    def _encode_delta(self, one: _Piece, after: Event | None) -> bytes:
        """The chunk of a piece, and of the end if that comes right ``after``."""
        end = after if isinstance(after, End) and after.index == one.index else None
        if isinstance(one, Text) and one.text and end is None:
            head, tail = self._templates.get(one.index) or self._build_template(one.index)
            return head + _encode(one.text) + tail
        payload = self._build_payload(one)
        return self._encode_choice(one.index, payload, end) if payload or end else b""

    def _build_template(self, index: int) -> tuple[bytes, bytes]:
        """A chunk of text before and behind the text: the same for all of a choice's."""
        head, _, tail = self._encode_choice(
            index, self._build_payload(Text(_MARK)), None
        ).partition(_MARKED)
        self._templates[index] = head, tail
        return head, tail

    def _build_payload(self, one: _Piece) -> Payload:
        """What a piece adds to its choice; empty if nothing can be shown."""
        match one:
            case Text(text) | PromptEcho(_, text) | Refusal(text):
                if not self._variant.is_chat:
                    return {"text": text} if text else {}
                return {"delta": {"content": text}} if text else {}
            case _ if not self._variant.is_chat or self._variant.early:
                return {}
            case Thought(text):
                return {"delta": {"reasoning_content": text}} if text else {}
            case CallStart(_, call, name_id, name):
                function: Payload = {"name": name}
                begun = {"id": name_id, "type": "function", "index": call, "function": function}
                return {"delta": {"tool_calls": [begun]}}
            case _:
                piece = {"index": one.call_index, "function": {"arguments": one.text}}
                return {"delta": {"tool_calls": [piece]}}

    def _build_empty_payload(self) -> Payload:
        if self._variant.is_chat:
            return {"delta": {}}
        return {} if self._variant.early else {"text": ""}

    def _encode_choice(self, index: int, payload: Payload, end: End | None) -> bytes:
        reason = self._map_finish_reason(end.finish_reason) if end else None
        payload = payload or self._build_empty_payload()
        if self._variant.early:
            choice = {"finish_reason": reason, "index": index, "logprobs": None, **payload}
        else:
            choice = {"index": index, "logprobs": None, **payload, "finish_reason": reason}
        return self._encode_chunk([choice], None if self._variant.with_usage else UNSET)

    def _encode_handshake(self) -> bytes:
        """It has no logprobs, and no usage even where usage was asked for."""
        begun: Payload = {"text": ""}
        if self._variant.is_chat:
            begun = {"delta": {"role": "assistant", "content": None}}
        return self._encode_chunk([{"index": 0, **begun, "finish_reason": None}], UNSET)

    def _encode_final_chunk(self) -> bytes:
        if not self._variant.with_usage or self._usage is None:
            return DONE
        return self._encode_chunk([], Usage.from_event(self._usage)) + DONE

    def _encode_chunk(self, choices: list[Payload], usage: Usage | UnsetType | None) -> bytes:
        about = self._context
        chunk = _Chunk(choices, about.created, about.model, self._variant.chunk_object, usage)
        return event(_encode(chunk))

    def _map_finish_reason(self, reason: types.FinishReason) -> str:
        """The early release knew no other reason than ``stop``."""
        return "stop" if self._variant.early else _REASONS.get(reason, _UNKNOWN)

    # the whole

    def _build_unary_choice(self, choice: ChoiceAnswer) -> Payload:
        out: Payload = {
            "finish_reason": self._map_finish_reason(choice.finish_reason),
            "index": choice.index,
            "logprobs": None if self._variant.early else self._build_logprobs(choice),
        }
        if not self._variant.is_chat:
            return out | {"text": choice.text}
        message: Payload = {"content": choice.text or choice.refusal}
        if choice.reasoning and not self._variant.early:
            message["reasoning_content"] = choice.reasoning
        message["role"] = "assistant"
        if not self._variant.early:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.tool_calls
            ]
        return out | {"message": message}

    def _build_logprobs(self, choice: ChoiceAnswer) -> Payload | None:
        tokens = choice.logprobs
        if not tokens:
            return None
        if self._variant.is_chat:
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
        self._is_base64 = encoding == "base64"

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Nothing: vectors are never streamed."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """The error's body."""
        return errors.body(errors.told(error, errors.EMBEDDER))

    def encode_unary(self, answer: Answer) -> Reply:
        """The vectors, as numbers or as base64 of little-endian float32."""
        used = answer.usage
        data = [
            _Embedding("embedding", self._encode_vector(values), index)
            for index, values in enumerate(answer.embeddings)
        ]
        usage = _EmbeddingUsage(used.prompt_tokens, used.prompt_tokens) if used else UNSET
        return Reply(200, _encode(_Embeddings("list", data, usage)))

    def _encode_vector(self, values: tuple[float, ...]) -> tuple[float, ...] | str:
        if not self._is_base64:
            return values
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
