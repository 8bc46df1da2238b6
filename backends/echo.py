"""Answers without a model: deterministic, scripted, with delays. For tests and benchmarks.

One piece of the script is one token; without a script it repeats the prompt, word by word. Prompt
tokens are the prompt's words. It honours the parameters that shape a response (n, max_tokens, stop,
tools, logprobs) and ignores those that only choose tokens.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from backends.interfaces import (
    Backend,
    BackendRequest,
    EventSink,
    PreparedRequest,
    RequestContext,
    StreamItems,
)
from protocols.core.custom_tools import has_custom_tools, replace_custom_tools
from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    Overloaded,
    RateLimitExceeded,
    StreamBroken,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Classification,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    RelevanceScore,
    StreamEnd,
    StreamStart,
    TextDelta,
    TokenList,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from protocols.core.extra import remove_extra_fields
from protocols.core.interfaces import build_unsupported_kind_error
from protocols.core.loss import CONTENT_LABELS, UnsupportedParameter, find_unseen_content
from protocols.core.request import (
    AllowedTools,
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    NamedTool,
    Prompt,
    RerankRequest,
    TokenizeRequest,
    Tool,
)
from protocols.core.stop_strings import StopStringFilter
from protocols.core.units import ConfigSection, Duration

_MAX_LISTED_TOKENS: Final = 131_072
"""The most tokens of a text that are listed, which takes the event loop, without ``context``."""
TOOL_ARGUMENTS: Final = ('{"x"', ":1}")
"""The pieces of the arguments of every tool call."""


class ScriptedFailure(ConfigSection, frozen=True):
    """A simulated failure."""

    mode: Literal["error", "disconnect", "rate_limit", "unavailable"]
    """What happens: a worker error, a broken connection, a rate limit of the worker, or no
    available worker."""
    after_chunks: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """How many chunks of the response come before the failure."""
    retry_after: Duration = 2.0
    """The time after which a client may try again, for ``rate_limit`` and ``unavailable``."""

    def make_error(self) -> GatewayError:
        """The error that is raised."""
        match self.mode:
            case "error":
                return WorkerFailed("the worker answered with an error", status=500)
            case "disconnect":
                return StreamBroken("the worker's answer stopped before its end")
            case "rate_limit":
                return RateLimitExceeded("the worker is at its limit", retry_after=self.retry_after)
            case "unavailable":
                return Overloaded("no worker is available", retry_after=self.retry_after)


class ScriptedTurn(ConfigSection, frozen=True):
    """What a response holds beside its text."""

    reasoning: tuple[str, ...] = ()
    """The pieces of the reasoning, which comes first, one token each; by default none."""
    refusal: str = ""
    """A refusal that replaces the text; by default none."""
    finish_reason: Literal["eos", "content_filter"] = "eos"
    """Why a complete text ends."""
    tool_calls: Annotated[int, Meta(ge=1, le=128)] = 1
    """How many tools are called, of those that the request has."""
    tool_arguments: tuple[str, ...] = TOOL_ARGUMENTS
    """The pieces of the arguments of every tool call."""


DEFAULT_TURN: Final = ScriptedTurn()


class EchoBackend(Backend):
    """Returns ``script``, or the prompt. ``delay`` seconds pass before each piece."""

    ready = True

    def __init__(
        self,
        *,
        script: Sequence[str] = (),
        delay: float = 0.0,
        context: int | None = None,
        fail: ScriptedFailure | Mapping[str, Any] | None = None,
        turn: ScriptedTurn | Mapping[str, Any] = DEFAULT_TURN,
    ) -> None:
        self._script = tuple(script)
        self._turn = msgspec.convert(turn, ScriptedTurn)
        self._delay = delay
        self._context_length = context
        self._failure = None if fail is None else msgspec.convert(fail, ScriptedFailure)
        self._call_numbers = itertools.count()
        self.running = 0
        """How many requests are running. It drops when a client disconnects."""

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        """Parameters are supported, since there is no sampling that they could fail to change.

        Parts of known fields that have no place in the internal request (``tools.web_search``) are
        not, nor is content beside text.
        """
        original, _ = request.decode()
        replaced: tuple[UnsupportedParameter, ...] = ()
        if has_custom_tools(original):
            original, replaced = replace_custom_tools(original)
        decoded, foreign = remove_extra_fields(original)
        losses = tuple(
            UnsupportedParameter(name, "dropped") for name in decoded.extra if "." in name
        )
        if isinstance(decoded, GenerationRequest):
            losses += find_unseen_content(decoded.messages, CONTENT_LABELS)
        return PreparedRequest(decoded, losses + foreign + replaced)

    async def start(self) -> None:
        """Nothing to start."""

    async def aclose(self) -> None:
        """Nothing to release."""

    async def send(
        self, prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
    ) -> StreamItems:
        """The scripted events, one batch for each piece."""
        del sink
        request = prepared.request
        self.running += 1
        try:
            if self._failure is not None and self._failure.after_chunks == 0:
                raise self._failure.make_error()
            if not isinstance(request, GenerationRequest):
                limit = self._context_length or _MAX_LISTED_TOKENS
                if context.offload_to_thread:
                    yield None, await asyncio.to_thread(_answer_at_once, request, limit)
                else:
                    yield None, _answer_at_once(request, limit)
                return
            prompt_tokens, cut = self._count_prompt_tokens(request)
            yield None, [StreamStart(prompt_tokens)]
            tokens, reasoning_tokens = 0, 0
            for index in range(request.choice_count):
                for events in self._stream_choice(request, index, cut=cut):
                    if self._delay:
                        await asyncio.sleep(self._delay)
                    yield None, events
                    tokens += sum(e.tokens for e in events if isinstance(e, TextDelta))
                    reasoning_tokens += sum(isinstance(e, ReasoningDelta) for e in events)
                    if self._failure is not None and tokens >= self._failure.after_chunks:
                        raise self._failure.make_error()
            total, thought = tokens + reasoning_tokens, reasoning_tokens or None
            yield None, [Usage(prompt_tokens, total, None, thought), StreamEnd()]
        finally:
            self.running -= 1

    def _count_prompt_tokens(self, request: GenerationRequest) -> tuple[int, bool]:
        """The prompt's tokens, and whether it was cut to fit. Raises ContextTooLong."""
        tokens = sum(map(count_words, request.prompts)) + sum(
            count_words(m.text) for m in request.messages
        )
        limit = self._context_length
        if limit is None or tokens <= limit:
            return tokens, False
        if request.stopping.overflow == "truncate":
            return limit, True
        param = "messages" if request.messages else "prompt"
        raise ContextTooLong(
            f"the prompt has {tokens} tokens and the model takes {limit}",
            param=param,
            tokens=tokens,
            limit=limit,
        )

    def _stream_choice(
        self, request: GenerationRequest, index: int, *, cut: bool
    ) -> Iterator[Sequence[Event]]:
        turn = self._turn
        for piece in turn.reasoning:
            yield [ReasoningDelta(piece, index)]
        if tools := _choose_tools(request, turn.tool_calls):
            for number, tool in enumerate(tools):
                call_id = f"call_{next(self._call_numbers):024x}"
                yield [ToolCallStart(index, number, call_id, tool.name, tool.kind)]
                for piece in turn.tool_arguments:
                    yield [ToolCallDelta(index, number, piece)]
            yield [ChoiceEnd("tool_calls", index)]
            return
        if turn.refusal:
            yield [RefusalDelta(turn.refusal, index)]
            yield [ChoiceEnd("eos", index)]
            return
        if request.echo and request.prompts:
            yield [_make_prompt_echo(request, index)]
        pieces = self._script or tuple(_split_words(_get_scripted_text(request, index)))
        limit = request.stopping.max_tokens
        allowed = pieces if limit is None else pieces[:limit]
        stops = StopStringFilter(request.stopping.stop, include=bool(request.stopping.include_stop))
        for piece in allowed:
            text, matched = stops.feed(piece)
            yield [_make_text_delta(request, text, piece, index)]
            if matched is not None:
                yield [ChoiceEnd("stop", index, matched)]
                return
        if remainder := stops.flush():
            yield [TextDelta(remainder, index, tokens=0)]
        is_cut = cut or len(allowed) < len(pieces)
        yield [ChoiceEnd("length" if is_cut else turn.finish_reason, index)]


def _make_text_delta(request: GenerationRequest, text: str, piece: str, index: int) -> TextDelta:
    if request.logprobs is None:
        return TextDelta(text, index)
    named = (piece, *(f"alt{i}" for i in range(1, request.logprobs.top)))
    top = tuple(TopLogprob(name, -0.5 - i) for i, name in enumerate(named))
    return TextDelta(
        text, index, logprobs=(TokenLogprob(piece, -0.5, top[: request.logprobs.top]),)
    )


def _make_prompt_echo(request: GenerationRequest, index: int) -> PromptEcho:
    """The echo of the prompt."""
    text = _get_scripted_text(request, index)
    if request.logprobs is None:
        return PromptEcho(index, text)
    tokens = enumerate(_split_words(text))
    return PromptEcho(
        index, text, tuple(TokenLogprob(token, -0.5 if i else None) for i, token in tokens)
    )


def _choose_tools(request: GenerationRequest, most: int) -> Sequence[Tool]:
    """The tools that are called: required ones, or any if the user's last message says "tool"."""
    tools, choice = request.tools, request.tool_choice
    match choice:
        case "none":
            return ()
        case "required":
            return tools[:most]
        case NamedTool(name):
            return [tool for tool in tools if tool.name == name][:1]
        case AllowedTools(mode, names):
            tools = tuple(tool for tool in tools if tool.name in names)
            if mode == "required":
                return tools[:most]
        case _:
            pass
    users = [m for m in request.messages if m.role == "user"]
    return tools[:most] if users and "tool" in users[-1].text else ()


def _get_scripted_text(request: GenerationRequest, index: int) -> str:
    if request.messages:
        return request.messages[-1].text
    prompt = request.prompts[index // (request.n or 1)]
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def _split_words(text: str) -> Iterator[str]:
    """The words of ``text``, each but the first with the space before it."""
    for i, word in enumerate(text.split()):
        yield word if i == 0 else " " + word


def count_words(prompt: Prompt) -> int:
    """How many tokens a prompt has here: its words, or its token ids."""
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _answer_at_once(
    request: EmbeddingRequest
    | RerankRequest
    | ClassifyRequest
    | TokenizeRequest
    | DetokenizeRequest,
    max_tokens: int,
) -> Sequence[Event]:
    """The events of a response that is not generated; at most ``max_tokens`` are listed."""
    match request:
        case EmbeddingRequest():
            return _embed_inputs(request)
        case RerankRequest():
            return _rank_documents(request)
        case ClassifyRequest():
            return _classify_inputs(request)
        case TokenizeRequest():
            text = " ".join(message.text for message in request.messages)
            text = text if request.prompt is None else request.prompt
            if len(text.split(None, max_tokens)) > max_tokens:
                message = f"the text has more than {max_tokens} tokens, which the model takes"
                param = "messages" if request.prompt is None else "prompt"
                raise ContextTooLong(message, param=param, limit=max_tokens)
            words = tuple(_split_words(text))
            return [TokenList(tuple(range(len(words))), words), StreamEnd()]
        case DetokenizeRequest():
            raise build_unsupported_kind_error("detokenize")


def _rank_documents(request: RerankRequest) -> Sequence[Event]:
    """The share of a document's words that occur in the query."""
    queries = request.queries * (len(request.documents) if len(request.queries) == 1 else 1)
    events: list[Event] = []
    tokens = 0
    known_words = {query: frozenset(query.lower().split()) for query in set(queries)}
    counts = {query: count_words(query) for query in known_words}
    for index, (query, document) in enumerate(zip(queries, request.documents, strict=True)):
        known, words = known_words[query], document.lower().split()
        score = sum(word in known for word in words) / len(words) if words else 0.0
        events.append(RelevanceScore(index, score))
        tokens += counts[query] + len(words)
    return [*events, Usage(tokens), StreamEnd()]


_ECHO_LABELS = ("short", "long")
_LONG_INPUT = 10
"""From so many tokens on, an input is of the class ``long``."""


def _classify_inputs(request: ClassifyRequest) -> Sequence[Event]:
    """An input is ``long`` with a tenth of the probability for each of its tokens."""
    sizes = [count_words(one) for one in request.inputs]
    shares = [min(size / _LONG_INPUT, 1.0) for size in sizes]
    return [
        *(
            Classification(i, _ECHO_LABELS[share > 0.5], (1 - share, share))  # noqa: PLR2004
            for i, share in enumerate(shares)
        ),
        Usage(sum(sizes)),
        StreamEnd(),
    ]


def _embed_inputs(request: EmbeddingRequest) -> Sequence[Event]:
    prefix = request.instruction or ""
    inputs = [prefix + i if isinstance(i, str) else i for i in request.inputs]
    events: list[Event] = [
        Embedding(n, (float(len(i)), float(count_words(i)), 0.5, -0.25)[: request.dimensions])
        for n, i in enumerate(inputs)
    ]
    return [*events, Usage(sum(map(count_words, inputs))), StreamEnd()]
