"""Events to unary responses and streams, in the key order of the server.

No response has an id. A stream begins with a handshake chunk once the prompt is processed; it ends
with ``[DONE]``, preceded by usage if requested. An error in a stream is a bare JSON object, which
is neither an event nor followed by an end.

Source: openvinotoolkit/model_server, src/llm/apis/openai_completions.cpp, openai_json_response.hpp,
src/embeddings/embeddings_api.cpp; the first release: src/llm/http_llm_calculator.cc of 2024.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, json
from msgspec.structs import replace

from protocols.chat.embeddings import encode_base64
from protocols.chat.rerank import rank_documents
from protocols.chat.responses import EmbeddingUsage, GenerationUsage, build_usage
from protocols.chat.unary import add_extra_keys
from protocols.core import events as core_events
from protocols.core.aggregate import UnaryChoice, UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import (
    ChoiceEnd,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import RerankRequest
from protocols.core.response_losses import AS_TEXT, NO_DETAILS, TEXT_AND_REFUSAL, USAGE_DETAILS
from protocols.core.sse import DONE_EVENT, format_event
from protocols.core.vectors import encode_array
from protocols.ovms import errors

_encode = json.Encoder().encode
FINISH_REASONS: Final[Mapping[core_events.FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "unknown",
    "unknown": "unknown",
}

_TEXT_MARK = "\x00"
_ENCODED_TEXT_MARK = _encode(_TEXT_MARK)
"""A placeholder that no model name contains, to find the text's place in a chunk."""

ChoicePayload = dict[str, Any]
_DeltaEvent = TextDelta | ReasoningDelta | RefusalDelta | PromptEcho | ToolCallStart | ToolCallDelta


class _CompletionChunk(Struct):
    choices: list[ChoicePayload]
    created: int
    model: str
    object: str
    usage: GenerationUsage | UnsetType | None = UNSET


class _CompletionBody(Struct):
    choices: list[ChoicePayload]
    created: int
    model: str
    object: str
    usage: GenerationUsage | UnsetType = UNSET


SOURCE: Final = "ovms"
RESPONSE_KEYS: Final = frozenset(_CompletionBody.__struct_fields__)
"""The keys of a chat or completions response."""


class ResponseVariant(Struct, frozen=True):
    """The differences of chat and completions, and of the first and later releases."""

    is_chat: bool
    early: bool
    with_usage: bool = False
    """Whether the stream ends with usage."""
    graph_node: str = errors.GENERATION_NODE

    @property
    def unary_object(self) -> str:
        """The ``object`` of a unary response."""
        return "chat.completion" if self.is_chat else "text_completion"

    @property
    def chunk_object(self) -> str:
        """The ``object`` of a chunk; for completions, a name that only this server uses."""
        return f"{self.unary_object}.chunk"


class GenerationEncoder:
    """Encodes a chat or completions response."""

    content_type = "text/event-stream"

    def __init__(self, form: ResponseVariant, context: ResponseContext) -> None:
        self._variant = form
        self._context = context
        self._handshake_sent = form.early
        self.hidden_reasons = core_events.INCOMPLETE_REASONS if form.early else frozenset()
        self.written_details = NO_DETAILS if form.early else USAGE_DETAILS
        self.content_losses = AS_TEXT if form.is_chat and not form.early else TEXT_AND_REFUSAL
        self._usage: core_events.Usage | None = None
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def headers(self) -> Headers:
        """Empty: no extra headers."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Encode chunks. A delta and a choice end right after it share one chunk."""
        out: list[bytes] = []
        for i, one in enumerate(events):
            match one:
                case (
                    TextDelta()
                    | ReasoningDelta()
                    | RefusalDelta()
                    | PromptEcho()
                    | ToolCallStart()
                    | ToolCallDelta()
                ):
                    out.append(
                        self._encode_delta(one, events[i + 1] if i + 1 < len(events) else None)
                    )
                case ChoiceEnd():
                    before = events[i - 1] if i else None
                    if not isinstance(before, _DeltaEvent) or before.index != one.index:
                        out.append(self._encode_choice(one.index, {}, one))
                case core_events.Usage():
                    self._usage = one
                case ResponseMetadata():
                    self._keep_time(one)
                case StreamEnd():
                    out.append(self._encode_final_chunk())
                case _:
                    pass
        if out and not self._handshake_sent:
            self._handshake_sent = True
            out.insert(0, self._encode_handshake())
        return b"".join(out)

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode a bare object: a client sees no event, and no end marker."""
        return errors.encode_error_body(errors.get_error_text(error, self._variant.graph_node))

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """Encode a unary response."""
        self._keep_time(response.metadata)
        context, form = self._context, self._variant
        usage = build_usage(response.usage) if response.usage and not form.early else UNSET
        choices = [self._build_unary_choice(choice) for choice in response.choices]
        body = _CompletionBody(choices, context.created, context.model, form.unary_object, usage)
        return HttpResponse(200, _encode(body))

    def _keep_time(self, served: ResponseMetadata) -> None:
        """Show the time of a worker of this protocol."""
        if created := served.get_identity(SOURCE).get("created"):
            self._context = replace(self._context, created=created)
            self._templates.clear()

    # streams

    def _encode_delta(self, one: _DeltaEvent, after: Event | None) -> bytes:
        """Encode the chunk of a delta, including the choice end if that comes right ``after``."""
        end = after if isinstance(after, ChoiceEnd) and after.index == one.index else None
        if isinstance(one, TextDelta) and one.text and end is None:
            head, tail = self._templates.get(one.index) or self._build_template(one.index)
            return head + _encode(one.text) + tail
        payload = self._build_payload(one)
        return self._encode_choice(one.index, payload, end) if payload or end else b""

    def _build_template(self, index: int) -> tuple[bytes, bytes]:
        """Build the chunk template of a choice: the bytes before and after the text."""
        head, _, tail = self._encode_choice(
            index, self._build_payload(TextDelta(_TEXT_MARK)), None
        ).partition(_ENCODED_TEXT_MARK)
        self._templates[index] = head, tail
        return head, tail

    def _build_payload(self, one: _DeltaEvent) -> ChoicePayload:
        """Build the delta of an event; empty if it has nothing to show."""
        match one:
            case TextDelta(text) | PromptEcho(_, text) | RefusalDelta(text):
                if not self._variant.is_chat:
                    return {"text": text} if text else {}
                return {"delta": {"content": text}} if text else {}
            case _ if not self._variant.is_chat or self._variant.early:
                return {}
            case ReasoningDelta(text):
                return {"delta": {"reasoning_content": text}} if text else {}
            case ToolCallStart(_, call, name_id, name):
                function: ChoicePayload = {"name": name}
                call_item = {"id": name_id, "type": "function", "index": call, "function": function}
                return {"delta": {"tool_calls": [call_item]}}
            case _:
                piece = {"index": one.call_index, "function": {"arguments": one.text}}
                return {"delta": {"tool_calls": [piece]}}

    def _build_empty_payload(self) -> ChoicePayload:
        if self._variant.is_chat:
            return {"delta": {}}
        return {} if self._variant.early else {"text": ""}

    def _encode_choice(self, index: int, payload: ChoicePayload, end: ChoiceEnd | None) -> bytes:
        reason = self._map_finish_reason(end) if end else None
        payload = payload or self._build_empty_payload()
        if self._variant.early:
            choice = {"finish_reason": reason, "index": index, "logprobs": None, **payload}
        else:
            choice = {"index": index, "logprobs": None, **payload, "finish_reason": reason}
        return self._encode_chunk([choice], None if self._variant.with_usage else UNSET)

    def _encode_handshake(self) -> bytes:
        """Encode the last chunk, without logprobs; it holds usage only if requested."""
        payload: ChoicePayload = {"text": ""}
        if self._variant.is_chat:
            payload = {"delta": {"role": "assistant", "content": None}}
        return self._encode_chunk([{"index": 0, **payload, "finish_reason": None}], UNSET)

    def _encode_final_chunk(self) -> bytes:
        if not self._variant.with_usage or self._usage is None:
            return DONE_EVENT
        return self._encode_chunk([], build_usage(self._usage)) + DONE_EVENT

    def _encode_chunk(
        self, choices: list[ChoicePayload], usage: GenerationUsage | UnsetType | None
    ) -> bytes:
        context = self._context
        chunk = _CompletionChunk(
            choices, context.created, context.model, self._variant.chunk_object, usage
        )
        return format_event(_encode(chunk))

    def _map_finish_reason(self, end: ChoiceEnd | UnaryChoice) -> str:
        """Map a finish reason; the first release has only ``stop``."""
        if end.own_word is not None:
            return end.own_word
        return "stop" if self._variant.early else FINISH_REASONS[end.finish_reason]

    # unary responses

    def _build_unary_choice(self, choice: UnaryChoice) -> ChoicePayload:
        out: ChoicePayload = {
            "finish_reason": self._map_finish_reason(choice),
            "index": choice.index,
            "logprobs": None if self._variant.early else self._build_logprobs(choice),
        }
        if not self._variant.is_chat:
            return out | {"text": choice.text + choice.refusal}
        message: ChoicePayload = {"content": choice.text + choice.refusal}
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

    def _build_logprobs(self, choice: UnaryChoice) -> ChoicePayload | None:
        tokens = choice.logprobs
        if not tokens:
            return None
        if self._variant.is_chat:
            return {"content": [_build_chat_logprob(token) for token in tokens]}
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token.token: token.logprob} for token in tokens],
            "text_offset": list(_iter_text_offsets(tokens)),
        }


def _build_chat_logprob(token: TokenLogprob) -> ChoicePayload:
    return _build_token(token) | {"top_logprobs": [_build_token(one) for one in token.top]}


def _build_token(token: TokenLogprob | TopLogprob) -> ChoicePayload:
    data = token.data if token.data is not None else token.token.encode()
    return {"token": token.token, "logprob": token.logprob, "bytes": list(data)}


def _iter_text_offsets(tokens: Sequence[TokenLogprob]) -> Iterator[int]:
    """Return the start of each token, in bytes of UTF-8, as this server counts."""
    at = 0
    for token in tokens:
        yield at
        at += len(token.token.encode())


class Embedding(Struct):
    """The embedding of one input."""

    object: Literal["embedding"]
    embedding: tuple[float, ...] | str
    index: int


class EmbeddingList(Struct):
    """The response of embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    usage: EmbeddingUsage | UnsetType = UNSET


class OvmsEmbeddingEncoder:
    """Encodes embeddings, which are always unary."""

    content_type = "application/json"
    extra_source = SOURCE

    def __init__(self, encoding: str) -> None:
        self._is_base64 = encoding == "base64"

    def headers(self) -> Headers:
        """Empty: no extra headers."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Empty: embeddings are never streamed."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode the error body."""
        return errors.encode_error_body(errors.get_error_text(error, errors.EMBEDDING_NODE))

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """Encode the vectors as numbers, or as base64 of little-endian float32."""
        used = response.usage
        encode = encode_base64 if self._is_base64 else encode_array
        data = [
            Embedding("embedding", encode(values), index)
            for index, values in enumerate(response.embeddings)
        ]
        usage = EmbeddingUsage(used.prompt_tokens, used.prompt_tokens) if used else UNSET
        body = _encode(EmbeddingList("list", data, usage))
        return HttpResponse(200, add_extra_keys(body, response, self.extra_source))


class DocumentText(Struct):
    """A returned document."""

    text: str


class RankedDocument(Struct):
    """The score of one document."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankResults(Struct):
    """The response of reranking: the best documents first."""

    results: list[RankedDocument]


class OvmsRerankEncoder:
    """Encodes the scores of documents, which are always unary."""

    content_type = "application/json"
    extra_source = SOURCE

    def __init__(self, request: RerankRequest) -> None:
        self._request = request

    def headers(self) -> Headers:
        """Empty: no extra headers."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Empty: scores are never streamed."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode the error body."""
        return errors.encode_error_body(errors.get_error_text(error, errors.RERANK_NODE))

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """Encode the best documents, without them unless they are requested."""
        request, scores = self._request, response.scores
        limit = request.top_n
        if limit is not None and limit < 0:
            limit = None  # the server compares it as an unsigned number
        results = [
            RankedDocument(
                i,
                scores[i],
                DocumentText(request.documents[i]) if request.return_documents else UNSET,
            )
            for i in rank_documents(scores, limit)
        ]
        body = _encode(RerankResults(encode_array(results)))
        return HttpResponse(200, add_extra_keys(body, response, self.extra_source))


# --- metadata -------------------------------------------------------------------------------------


class ModelCard(Struct):
    """A model in a list."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str = "OVMS"


class ModelList(Struct):
    """The models that can answer."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class KserveServerMetadata(Struct):
    """The server's name and version."""

    name: str
    version: str
