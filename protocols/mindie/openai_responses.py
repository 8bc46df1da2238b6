"""Events to OpenAI-style responses, with the server's order of keys.

The last event of a choice holds the finish reason and usage, but no text: the server hides the
text of the end token, so no text needs to be held back. It is sent at the end of the response,
when usage is known.

Source: MindIE-LLM 0695772, single_req_vllm_openai_infer_interface.cpp (EncodeStreamJsonObject,
EncodeNonStreamJsonObject) and single_req_vllm_openai_completions_infer_interface.cpp; for
1.0.RC1 the published page: the role in every chunk, an empty last delta, and no usage.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

from protocols.chat.extra_keys import ExtraKeyEncoder
from protocols.chat.responses import (
    CompletionTokensDetails,
    FunctionCallItem,
    PromptTokensDetails,
    ToolCallItem,
    build_prompt_details,
    build_tool_calls,
)
from protocols.core.aggregate import UnaryChoice, UnaryResponse, is_end_of_calls
from protocols.core.events import (
    ChoiceEnd,
    Event,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext, ResponseEncoder
from protocols.core.request import GenerationRequest
from protocols.core.response_losses import AS_TEXT, ONE_TEXT, USAGE_DETAILS
from protocols.core.sse import DONE_EVENT
from protocols.core.sse import format_event as framed
from protocols.mindie.decoder import SOURCE
from protocols.mindie.responses import (
    EARLY_FINISH_REASONS,
    BaseEncoder,
    build_json_response,
    encode_json,
)

OPENAI_FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "stop",
    "unknown": "stop",
}


class ResponseVariant(Struct, frozen=True):
    """The differences of chat and completions, and of the first and later releases."""

    is_chat: bool = True
    early: bool = False

    @property
    def unary_object(self) -> str:
        """The ``object`` of a unary response."""
        return "chat.completion" if self.is_chat else "text_completion"

    @property
    def chunk_object(self) -> str:
        """The ``object`` of a chunk."""
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def map_finish_reason(self, end: ChoiceEnd | UnaryChoice, *, called: bool) -> str:
        """Map a finish reason; the first releases have the words of the other endpoints."""
        if end.own_word is not None:
            return end.own_word
        if self.early:
            return EARLY_FINISH_REASONS[end.finish_reason]
        if end.finish_reason != "length" and is_end_of_calls(end, called=called):
            return "tool_calls"
        return OPENAI_FINISH_REASONS[end.finish_reason]


class OpenAiStyleEncoder(BaseEncoder):
    """Encodes a chat or completions response."""

    written_details = USAGE_DETAILS

    def __init__(
        self,
        variant: ResponseVariant,
        request: GenerationRequest,
        context: ResponseContext,
        headers: Headers,
    ) -> None:
        super().__init__(request, headers)
        self._variant = variant
        if variant.is_chat and not variant.early:
            self.content_losses = AS_TEXT
        self._context = context
        self._started = False
        self._prompt_tokens: int | None = None
        self._usage: Usage | None = None
        self._token_counts = [0] * request.choice_count
        self._text_offsets = [0] * request.choice_count
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        self._choices_with_calls: set[int] = set()
        self._choice_ends: list[ChoiceEnd] = []
        self._set_heads(context.created)

    def _set_heads(self, created: int) -> None:
        """Set the keys with which responses begin. The id is that by which clients cancel."""
        name, model = encode_json(self._request.client_id), encode_json(self._context.model)
        head = b'{"id":%b,"object":%b,"created":%d,"model":%b,'
        variant = self._variant
        self._unary_head = head % (name, encode_json(variant.unary_object), created, model)
        self._chunk_head = head % (name, encode_json(variant.chunk_object), created, model)
        self._templates.clear()

    def _keep_time(self, served: ResponseMetadata) -> None:
        """Show the time of a worker of this protocol."""
        if created := served.get_identity(SOURCE).get("created"):
            self._set_heads(created)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        self._keep_time(answer.metadata)
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
            case ToolCallStart() | ToolCallDelta() if self.content_losses is ONE_TEXT:
                pass
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
            case Usage():
                self._usage = event
            case ResponseMetadata():
                self._keep_time(event)
            case StreamEnd():
                last = b"".join([self._encode_final_chunk(end) for end in self._choice_ends])
                return self._encode_role_chunks() + last + DONE_EVENT
            case _:
                pass
        return b""

    def _encode_role_chunks(self) -> bytes:
        """Encode an empty role chunk for each choice, before the first text."""
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
        variant, content = self._variant, encode_json(event.text)
        if isinstance(event, ReasoningDelta) and variant.is_chat and not variant.early:
            return self._encode_delta(index, content=content, key=b"reasoning_content")
        if logprobs == b"null":
            head, tail = self._templates.get(index) or self._build_template(index)
            return head + content + tail
        return self._encode_delta(index, content=content, logprobs=logprobs)

    def _build_template(self, index: int) -> tuple[bytes, bytes]:
        """A chunk template, split where the text goes; JSON never contains the placeholder."""
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
        variant = self._variant
        called = end.index in self._choices_with_calls
        reason = encode_json(variant.map_finish_reason(end, called=called))
        if variant.early:
            return self._encode_chunk(end.index, b'"delta":{}', b"null", reason, b"")
        delta = b'"delta":{"role":"assistant","content":""}' if variant.is_chat else b'"text":""'
        usage = self._get_choice_usage(end.index)
        usage_field = b"" if usage is None else b'"usage":' + encode_json(build_usage(usage))
        return self._encode_chunk(end.index, delta, b"null", reason, usage_field)

    def _encode_stopped(self) -> bytes:
        """End every choice that has not ended; an unfinished tool call does not count."""
        open_choices = set(range(self._request.choice_count))
        open_choices -= {end.index for end in self._choice_ends}
        self._choices_with_calls -= open_choices
        self._choice_ends += [ChoiceEnd("content_filter", index) for index in sorted(open_choices)]
        return self._encode_event(StreamEnd())

    def _get_choice_usage(self, index: int) -> Usage | None:
        """The usage of one choice; the backend reports the total of all choices."""
        if self._request.choice_count == 1 and self._usage is not None:
            return self._usage
        prompt = self._usage.prompt_tokens if self._usage else self._prompt_tokens
        return None if prompt is None else Usage(prompt, self._token_counts[index])

    def _encode_chunk(
        self, index: int, content: bytes, logprobs: bytes, reason: bytes, usage: bytes
    ) -> bytes:
        more = b"" if self._variant.early and self._variant.is_chat else b',"logprobs":' + logprobs
        if not self._variant.is_chat:
            more += b',"stop_reason":null'
        choice = b'{"index":%d,%b%b,"finish_reason":%b}' % (index, content, more, reason)
        choices = b'"choices":[%b]' % choice
        parts = [usage, choices] if self._variant.is_chat else [choices, usage]
        return framed(self._chunk_head + b",".join(filter(None, parts)) + b"}")

    # --- unary responses --------------------------------------------------------------------------

    def _build_chat_choice(self, choice: UnaryChoice) -> dict[str, Any]:
        variant = self._variant
        text = choice.text + choice.refusal
        message: dict[str, Any] = {"role": "assistant", "content": text}
        result: dict[str, Any] = {"index": choice.index, "message": message}
        if variant.early:
            message["content"] = choice.reasoning + text
        else:
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            message["tool_calls"] = build_tool_calls(choice.tool_calls)
            result["logprobs"] = self._build_logprobs(choice.index, choice.logprobs)
        called = bool(choice.tool_calls)
        result["finish_reason"] = variant.map_finish_reason(choice, called=called)
        return result

    def _build_completion_choice(self, choice: UnaryChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.reasoning + choice.text + choice.refusal,
            "logprobs": self._build_logprobs(choice.index, choice.logprobs),
            "stop_reason": None,
            "finish_reason": self._variant.map_finish_reason(choice, called=False),
        }

    def _build_logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Any:
        if not tokens:
            return None
        if self._variant.is_chat:
            return {"content": [*map(_build_chat_logprob, tokens)]}
        columns = _CompletionLogprobs([], [], [], [])
        for token in tokens:
            columns.append_token(token, self._text_offsets[index])
            self._text_offsets[index] += len(token.token.encode())
        return columns


def create_openai_style_encoder(
    variant: ResponseVariant,
    request: GenerationRequest,
    context: ResponseContext,
    headers: Headers,
) -> ResponseEncoder:
    """The encoder of a chat or completions response."""
    encoder = OpenAiStyleEncoder(variant, request, context, headers)
    return ExtraKeyEncoder(encoder, SOURCE, _RESPONSE_KEYS)


_RESPONSE_KEYS: Final = frozenset({"id", "object", "created", "model", "choices", "usage"})


class _UsageBody(Struct):
    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType
    completion_tokens: int
    completion_tokens_details: CompletionTokensDetails | UnsetType
    total_tokens: int


def build_usage(usage: Usage) -> _UsageBody:
    """Build usage, with token details if they are known."""
    reasoning = usage.reasoning_tokens
    return _UsageBody(
        usage.prompt_tokens,
        build_prompt_details(usage),
        usage.completion_tokens,
        UNSET if reasoning is None else CompletionTokensDetails(reasoning),
        usage.total_tokens,
    )


def _build_token_logprob(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    data = token.token.encode() if token.data is None else token.data
    return {"token": token.token, "logprob": token.logprob, "bytes": list(data)}


def _build_chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return _build_token_logprob(token) | {"top_logprobs": [*map(_build_token_logprob, token.top)]}


class _CompletionLogprobs(Struct):
    """Logprobs of completions; the sampled token is the first of its alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None]]

    def append_token(self, token: TokenLogprob, offset: int) -> None:
        self.text_offset.append(offset)
        self.token_logprobs.append(token.logprob)
        self.tokens.append(token.token)
        alternatives = {top.token: top.logprob for top in token.top}
        self.top_logprobs.append({token.token: token.logprob, **alternatives})
