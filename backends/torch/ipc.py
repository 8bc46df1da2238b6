"""Messages between the gateway and the engine process, and their translation from core types.

A frame is four bytes of length (big-endian) and a msgpack array of messages. The gateway sends
commands (``…Command``), the engine sends events (``…Event``). The gateway assigns the request ids;
each request ends in exactly one RequestFinishedEvent, TokensEvent or RequestFailedEvent, unless it
is cancelled.

``None`` means: the model's own default.
"""

import array
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from backends.torch.settings import WatermarkSettings
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidParameter,
    Overloaded,
    UnsupportedFeature,
    WorkerFailed,
)
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
)
from protocols.core.loss import ParameterSupport, UnsupportedParameter, find_unsupported_parameters
from protocols.core.request import (
    AllowedTools,
    AudioPart,
    ChoiceFormat,
    ContentPart,
    EmbeddingRequest,
    FilePart,
    GenerationRequest,
    GrammarFormat,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    Request,
    Tool,
    VideoPart,
)

# The parts of GenerateCommand.


class EngineSamplingParams(Struct, frozen=True, omit_defaults=True):
    """Sampling parameters."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    watermark: WatermarkSettings | None = None


class BeamSearchParams(Struct, frozen=True, omit_defaults=True):
    """Beam search with ``width`` beams.

    ``groups`` search separately with equal shares of the width; ``diversity_penalty`` is subtracted
    from a token's log probability for each earlier group that chose it in the same step. The score
    of a text is its log probability divided by its length to the power of ``length_penalty``.
    """

    width: int
    groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0


class StopParams(Struct, frozen=True, omit_defaults=True):
    """Stop conditions of a choice."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class OutputFormat(Struct, frozen=True, omit_defaults=True):
    """A constraint on the output.

    ``text`` is a JSON Schema, a regular expression, a JSON array of choices, or a grammar in Lark
    or GBNF notation. ``param`` is the client's name of the parameter, for errors.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    lenient: bool = False
    """Unsupported keys of a schema are ignored."""
    param: str = "response_format"


class FunctionDefinition(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. ``parameters`` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: bytes = b'{"type":"object","properties":{},"additionalProperties":false}'
    strict: bool = False
    """All keys of its schema must be enforced."""


class FunctionChoice(Struct, frozen=True, omit_defaults=True):
    """Which functions may be called, whether one must be, and whether several may."""

    names: tuple[str, ...]
    required: bool = False
    parallel: bool = True


class FunctionCall(Struct, frozen=True, omit_defaults=True):
    """A tool call in the conversation; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class ChatTurn(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation. ``call_id``: the call whose result it is."""

    role: str
    content: str
    name: str | None = None
    calls: tuple[FunctionCall, ...] = ()
    call_id: str | None = None


class PromptInput(Struct, frozen=True, omit_defaults=True):
    """A conversation (``turns``), or prompts of text or token ids.

    ``as_user_message`` renders each prompt with the chat template as the only user message.
    ``truncate_to`` keeps so many of the last prompt tokens (-1: as many as fit); without it a
    prompt that is too long fails.
    """

    turns: tuple[ChatTurn, ...] = ()
    functions: tuple[FunctionDefinition, ...] = ()
    """The functions offered to the model."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    as_user_message: bool = False
    template: str | None = None
    template_arguments: bytes = b"{}"
    """Further variables of the template: a JSON object."""
    continue_final: bool = False
    generation_prompt: bool = True
    special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens; None: to prompts, not to conversations."""
    truncate_to: int | None = None


__all__ = [
    "BeamSearchParams",
    "ChatTurn",
    "EngineSamplingParams",
    "FunctionCall",
    "FunctionChoice",
    "FunctionDefinition",
    "OutputFormat",
    "PromptInput",
    "StopParams",
]
"""Those that stand elsewhere; what follows needs no list."""

IPC_VERSION = 3
MAX_FRAME_BYTES = 256 * 1024 * 1024

FailureKind = Literal["invalid", "unsupported", "too_long", "overloaded", "deadline", "failed"]


class GenerateCommand(Struct, frozen=True, omit_defaults=True, tag="generate"):
    """Generate ``n`` choices for each prompt: the likeliest of ``best_of`` if that is more.

    With ``beams`` they are the best beams, returned at the end, and ``best_of`` is ignored.
    """

    request_id: int
    input: PromptInput
    sampling: EngineSamplingParams = EngineSamplingParams()
    stopping: StopParams = StopParams()
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    """Alternatives per token; -1: all; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, in PromptEchoEvent."""
    token_ids: bool = False
    echo: bool = False
    priority: int = 128
    timeout: float | None = None
    initial_credit: int = 512
    """How many tokens may be sent unread; CreditCommand adds to it."""
    tenant: str | None = None
    """The caller: waiting requests take turns between tenants."""
    beams: BeamSearchParams | None = None
    output_format: OutputFormat | None = None
    function_choice: FunctionChoice | None = None


class EmbedCommand(Struct, frozen=True, omit_defaults=True, tag="embed"):
    """One vector for each input."""

    request_id: int
    inputs: tuple[str | tuple[int, ...], ...]
    instruction: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    """Keep so many of the first tokens (-1: as many as fit); None: a longer text fails."""
    timeout: float | None = None


class TokenizeCommand(Struct, frozen=True, tag="tokenize"):
    """The tokens of a text."""

    request_id: int
    text: str


class CancelCommand(Struct, frozen=True, tag="cancel"):
    """Cancel the request."""

    request_id: int


class CreditCommand(Struct, frozen=True, tag="credit"):
    """The client has read so many tokens."""

    request_id: int
    tokens: int


class ReadyEvent(Struct, frozen=True, tag="ready"):
    """The model is loaded. ``context_length`` covers prompt and output, in tokens."""

    task: Literal["generate", "embed"]
    ipc_version: int
    context_length: int
    device: str
    dimensions: int | None = None
    cache_bytes: int = 0
    """The size of the KV cache."""


class ProgressEvent(Struct, frozen=True, tag="progress"):
    """Progress of loading, for the log."""

    text: str


class LoadFailedEvent(Struct, frozen=True, tag="broken"):
    """The model can't be loaded, and a restart would not help."""

    text: str


class EngineStats(Struct, frozen=True, gc=False, array_like=True):
    """The engine's state and its totals since the start. Times are in seconds."""

    blocks: int = 0
    """Blocks of the KV cache."""
    used_blocks: int = 0
    """Blocks in use by sequences."""
    preemptions: int = 0
    """Preemptions of sequences and prompts."""
    steps: int = 0
    seconds: float = 0.0
    """Time spent in steps."""
    batched_sequences: int = 0
    """Sequences and prompts in the last step."""
    prompt_tokens: int = 0
    """Prompt tokens computed by the model."""
    completion_tokens: int = 0
    """Generated tokens."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    queue_seconds: float = 0.0
    """Sums over finished requests: queue, prefill and decode time."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class HeartbeatEvent(Struct, frozen=True, omit_defaults=True, tag="heartbeat"):
    """Sent each second. ``step_seconds``: duration of the current step so far."""

    active: int
    waiting: int
    step_seconds: float = 0.0
    stats: EngineStats = EngineStats()


class PrefillDoneEvent(Struct, frozen=True, tag="started"):
    """The first prompt's prefill is done. The count covers all prompts."""

    request_id: int
    prompt_tokens: int


class TokenAlternative(Struct, frozen=True, gc=False, array_like=True):
    """An alternative of a generated token."""

    id: int
    data: bytes
    logprob: float


class EngineToken(Struct, frozen=True, gc=False, array_like=True):
    """A token, its bytes and its log probability in the model's own distribution.

    A prompt's first token has none.
    """

    id: int
    data: bytes
    logprob: float | None
    top: tuple[TokenAlternative, ...] = ()


class PromptEchoEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="prompt"):
    """The prompt of a choice, with logprobs if requested."""

    request_id: int
    choice: int
    text: str
    tokens: tuple[EngineToken, ...] = ()


class TextEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="piece"):
    """Text of a choice and its number of tokens; ids and logprobs if requested."""

    request_id: int
    choice: int
    text: str
    token_count: int
    ids: tuple[int, ...] = ()
    tokens: tuple[EngineToken, ...] = ()


class ToolCallEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="called"):
    """The start of a tool call, the ``call``-th of this choice."""

    request_id: int
    choice: int
    call: int
    id: str
    name: str
    token_count: int = 0
    """The number of tokens."""


class ToolArgumentsEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="argued"):
    """A delta of a call's arguments (JSON text) and its number of tokens."""

    request_id: int
    choice: int
    call: int
    text: str
    token_count: int = 0


class ReasoningEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="thinking"):
    """A delta of the reasoning and its number of tokens."""

    request_id: int
    choice: int
    text: str
    token_count: int = 0


class ChoiceEndEvent(Struct, frozen=True, gc=False, tag="ended"):
    """A choice is complete; ``stop`` is the string or token id that ended it."""

    request_id: int
    choice: int
    reason: Literal["eos", "stop", "length", "tool_calls"]
    stop: str | int | None = None


class EmbeddingsEvent(Struct, frozen=True, gc=False, tag="vectors"):
    """Vectors from input ``first`` on: little-endian float32, ``dimensions`` each."""

    request_id: int
    first_index: int
    dimensions: int
    data: bytes


class TokensEvent(Struct, frozen=True, gc=False, tag="tokens"):
    """All tokens of a text, and the text that each completes."""

    request_id: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]


class RequestFinishedEvent(Struct, frozen=True, gc=False, tag="finished"):
    """The job is done: what it took, in tokens and in seconds."""

    request_id: int
    prompt_tokens: int
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    max_batch: int = 1
    """The most rows that were computed together with it."""
    cached_tokens: int = 0
    """So many of the prompt tokens were known, and not read again."""


class RequestFailedEvent(Struct, frozen=True, gc=False, tag="failed"):
    """The job came to nothing, or broke off."""

    request_id: int
    kind: FailureKind
    message: str
    param: str | None = None
    """The name of the field to blame."""
    tokens: int | None = None
    limit: int | None = None


EngineCommand = GenerateCommand | EmbedCommand | TokenizeCommand | CancelCommand | CreditCommand
EngineEvent = (
    ReadyEvent
    | ProgressEvent
    | LoadFailedEvent
    | HeartbeatEvent
    | PrefillDoneEvent
    | PromptEchoEvent
    | TextEvent
    | ToolCallEvent
    | ToolArgumentsEvent
    | ReasoningEvent
    | ChoiceEndEvent
    | EmbeddingsEvent
    | TokensEvent
    | RequestFinishedEvent
    | RequestFailedEvent
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[EngineCommand])
_event_decoder = msgspec.msgpack.Decoder(list[EngineEvent])


def encode_frame(messages: Sequence[EngineCommand] | Sequence[EngineEvent]) -> bytes:
    """One frame of these messages."""
    body = _encoder.encode(messages)
    return len(body).to_bytes(4, "big") + body


def read_body_length(header: bytes) -> int:
    """The length that a frame's first four bytes announce."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def decode_commands(body: bytes) -> list[EngineCommand]:
    """What the gateway sent."""
    return _command_decoder.decode(body)


def decode_events(body: bytes) -> list[EngineEvent]:
    """What the engine sent."""
    return _event_decoder.decode(body)


# What an answer is asked to be, and what it may call: core requests to messages.

_FORMAT_PARAMS: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex",
                 "guided_choice", "guided_grammar", "guided_decoding", "guided_decoding_guide",
                 "grammar")  # fmt: skip
"""Where clients ask for a form."""


def build_output_format(request: GenerationRequest) -> OutputFormat | None:
    """The form of the answer."""
    param = next(
        (name for name in _FORMAT_PARAMS if name in request.provided_fields), _FORMAT_PARAMS[0]
    )
    match request.output:
        case None:
            return None
        case JsonObjectFormat():
            return OutputFormat("json", '{"type":"object"}', param=param)
        case JsonSchemaFormat(schema, strict=strict):
            return OutputFormat("json", bytes(schema).decode(), strict is False, param)
        case RegexFormat(pattern):
            return OutputFormat("regex", pattern, param=param)
        case ChoiceFormat(options):
            return OutputFormat("choice", msgspec.json.encode(options).decode(), param=param)
        case GrammarFormat(text):
            return OutputFormat("grammar", text, param=param)


def build_functions(request: GenerationRequest) -> tuple[FunctionDefinition, ...]:
    """The functions in the prompt; empty if the model must not call any."""
    if request.tool_choice == "none":
        return ()
    return tuple(_build_function(tool) for tool in request.tools if tool.kind == "function")


def build_function_choice(request: GenerationRequest) -> FunctionChoice | None:
    """Which of them may be called, and whether one must be."""
    names = tuple(one.name for one in build_functions(request))
    several = request.parallel_tools is not False
    match request.tool_choice:
        case NamedTool(name):
            chosen = FunctionChoice((name,) if name in names else (), required=True, parallel=False)
        case AllowedTools(mode, allowed):
            kept = tuple(name for name in names if name in allowed)
            chosen = FunctionChoice(kept, mode == "required", several)
        case choice:
            chosen = FunctionChoice(names, choice == "required", several)
    return chosen if chosen.names else None


def find_unsupported_tools(
    request: GenerationRequest, names: Mapping[str, str]
) -> list[UnsupportedParameter]:
    """What can't be offered: tools that take free text instead of JSON."""
    custom = {tool.name for tool in request.tools if tool.kind == "custom"}
    found = []
    if custom:
        found.append(
            UnsupportedParameter(names.get("tools", "tools"), "dropped", "custom tools", "tools")
        )
    if isinstance(request.tool_choice, NamedTool) and request.tool_choice.name in custom:
        wire = names.get("tool_choice", "tool_choice")
        found.append(UnsupportedParameter(wire, "dropped", "a custom tool", "tool_choice"))
    return found


def _build_function(tool: Tool) -> FunctionDefinition:
    if tool.parameters is None:
        return FunctionDefinition(tool.name, tool.description, strict=tool.strict is True)
    return FunctionDefinition(
        tool.name, tool.description, bytes(tool.parameters), tool.strict is True
    )


# Core requests to messages, messages to core events; and what the engine does not do.

_PARAMETER_SECTIONS = {
    "sampling": (
        "temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "seed",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "watermark", "beam_width", "diversity_penalty",
        "length_penalty",
    ),
    "stopping": (
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos",
        "truncate_prompt", "overflow", "skip_special_tokens",
    ),
    "": (
        "n", "best_of", "echo", "priority",
        "tools", "parallel_tools", "output",
    ),
    "logprobs": (
        "top", "prompt",
    ),
    "templating": (
        "arguments", "continue_final", "add_generation_prompt", "add_special_tokens",
    ),
}  # fmt: skip
_GENERATION_SUPPORT = {
    f"{section}.{name}" if section else name: ParameterSupport(name)
    for section, fields in _PARAMETER_SECTIONS.items()
    for name in fields
}
_SAMPLING_DEFAULTS: Final[Mapping[str, float | None]] = {
    "temperature": 0, "top_p": 1, "top_k": None, "min_p": 0, "typical_p": 1, "seed": None,
}  # fmt: skip
"""What a beam search, which draws nothing, does not look at; and what says as much."""
_EMBEDDING_SUPPORT = {
    path: ParameterSupport(path)
    for path in ("instruction", "dimensions", "normalize", "truncate", "overflow")
}

_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    ImagePart: "images",
    AudioPart: "audio",
    VideoPart: "videos",
    FilePart: "files",
    RefusalPart: "refusals",
    ReasoningPart: "earlier reasoning",
}
_DEFAULT_WATERMARK: Final = WatermarkSettings()
_ROLE_ALIASES = {"developer": "system", "function": "tool"}


def find_unsupported_params(
    request: Request, names: Mapping[str, str], *, templates: bool
) -> tuple[UnsupportedParameter, ...]:
    """What the engine will not do of a request."""
    if isinstance(request, EmbeddingRequest):
        return find_unsupported_parameters(request, _EMBEDDING_SUPPORT, names)
    carries = (
        {**_GENERATION_SUPPORT, "templating.template": ParameterSupport("template")}
        if templates
        else _GENERATION_SUPPORT
    )
    found = (
        *find_unsupported_parameters(request, carries, names),
        *_find_unused_sampling(request, names),
    )
    found = (*found, *find_unsupported_tools(request, names))
    parts = {type(part) for message in request.messages for part in message.parts}
    if unseen := sorted(told for kind, told in _UNSUPPORTED_PARTS.items() if kind in parts):
        where = names.get("messages", "messages")
        return (*found, UnsupportedParameter(where, "dropped", ", ".join(unseen), "messages"))
    return found


def _find_unused_sampling(
    request: GenerationRequest, names: Mapping[str, str]
) -> Iterator[UnsupportedParameter]:
    if request.sampling.beam_width is None:
        return
    for name, neutral in _SAMPLING_DEFAULTS.items():
        if getattr(request.sampling, name) not in (None, neutral):
            path = f"sampling.{name}"
            yield UnsupportedParameter(
                names.get(path, name), "dropped", "a beam search draws nothing", path
            )


# --- requests -----------------------------------------------------------------------------------


def build_generate_command(
    request: GenerationRequest,
    job: int,
    timeout: float,
    *,
    templates: bool,
    watermark: WatermarkSettings = _DEFAULT_WATERMARK,
    tenant: str | None = None,
) -> GenerateCommand:
    """The engine's order for this request.

    ``watermark`` is the watermark of the text, if any; ``tenant`` is the caller, for fair queueing.
    """
    n = request.n or 1
    logprobs = request.logprobs
    return GenerateCommand(
        job,
        _build_prompt_input(request, templates=templates),
        _build_sampling_params(request, watermark),
        _build_stop_params(request),
        n,
        max(n, request.best_of or n),
        None if logprobs is None else logprobs.top,
        None if logprobs is None else _get_prompt_logprobs(request),
        request.response_options.token_ids,
        bool(request.echo) and bool(request.prompts),
        128 if request.priority is None else request.priority,
        timeout,
        tenant=tenant,
        beams=build_beam_search_params(request),
        output_format=build_output_format(request),
        function_choice=build_function_choice(request),
    )


def _get_prompt_logprobs(request: GenerationRequest) -> int | None:
    """An echo has the logprobs that the text has, unless others were asked for."""
    if request.logprobs is None or not request.echo:
        return None
    if request.logprobs.prompt is not None:
        return request.logprobs.prompt
    return request.logprobs.top


def _build_prompt_input(request: GenerationRequest, *, templates: bool) -> PromptInput:
    how = request.templating
    stopping = request.stopping
    keep = stopping.truncate_prompt
    if keep is None and stopping.overflow == "truncate":
        keep = -1
    return PromptInput(
        turns=tuple(_build_turn(message) for message in request.messages),
        functions=build_functions(request),
        prompts=request.prompts,
        as_user_message=how.mode == "server",
        template=how.template if templates else None,
        template_arguments=msgspec.json.encode(how.arguments or {}),
        continue_final=bool(how.continue_final),
        generation_prompt=how.add_generation_prompt is not False,
        special_tokens=how.add_special_tokens,
        truncate_to=keep,
    )


def _build_turn(message: Message) -> ChatTurn:
    return ChatTurn(
        _ROLE_ALIASES.get(message.role, message.role),
        message.text,
        message.name,
        tuple(FunctionCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
    )


def returns_best_only(request: GenerationRequest) -> bool:
    """Whether nothing is told of an answer before its end, since the best are chosen then."""
    return (request.best_of or 0) > (request.n or 1) or build_beam_search_params(
        request
    ) is not None


def build_beam_search_params(request: GenerationRequest) -> BeamSearchParams | None:
    """The search, where there is anything to search: a beam alone is the likeliest token's way."""
    given = request.sampling
    width = max(given.beam_width or 0, request.n or 1)
    if given.beam_width is None or width == 1 or request.stopping.max_tokens == 0:
        return None
    penalty = given.length_penalty
    return BeamSearchParams(
        width,
        # Whoever wants beams to differ wants each to differ from all others.
        groups=width if given.diversity_penalty else 1,
        diversity_penalty=given.diversity_penalty or 0.0,
        length_penalty=1.0 if penalty is None else penalty,
    )


def _build_sampling_params(
    request: GenerationRequest, watermark: WatermarkSettings
) -> EngineSamplingParams:
    given = request.sampling
    greedy = given.do_sample is False or given.beam_width is not None
    return EngineSamplingParams(
        temperature=0.0 if greedy else given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        typical_p=given.typical_p,
        seed=given.seed,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=given.logit_bias or {},
        allowed_token_ids=given.allowed_token_ids,
        bad_words=given.bad_words,
        watermark=watermark if given.watermark else None,
    )


def _build_stop_params(request: GenerationRequest) -> StopParams:
    given = request.stopping
    return StopParams(
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens or 0,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        include_stop=bool(given.include_stop),
        ignore_eos=bool(given.ignore_eos),
        skip_special_tokens=given.skip_special_tokens is not False,
    )


def build_embed_command(request: EmbeddingRequest, job: int, timeout: float) -> EmbedCommand:
    """The engine's order for this request."""
    keep = request.truncate
    if keep is None and request.overflow == "truncate":
        keep = -1
    return EmbedCommand(
        job,
        request.inputs,
        request.instruction,
        request.dimensions,
        request.normalize,
        keep,
        timeout,
    )


# --- answers ------------------------------------------------------------------------------------


def map_engine_event(news: EngineEvent) -> list[Event]:
    """The events that a message means; the client sees to Finished, Tokens and Failed."""
    match news:
        case PrefillDoneEvent(_, prompt_tokens):
            return [StreamStart(prompt_tokens)]
        case TextEvent(_, choice, text, count, ids, tokens):
            return [TextDelta(text, choice, count, ids, tuple(map(_build_token_logprob, tokens)))]
        case PromptEchoEvent(_, choice, text, tokens):
            return [PromptEcho(choice, text, tuple(map(_build_token_logprob, tokens)))]
        case ToolCallEvent(_, choice, call, number, name):
            return [ToolCallStart(choice, call, number, name)]
        case ToolArgumentsEvent(_, choice, call, text):
            return [ToolCallDelta(choice, call, text)]
        case ReasoningEvent(_, choice, text):
            return [ReasoningDelta(text, choice)]
        case ChoiceEndEvent(_, choice, reason, stop):
            return [ChoiceEnd(reason, choice, stop)]
        case EmbeddingsEvent(_, first, dimensions, data):
            return list(_decode_vectors(first, dimensions, data))
        case _:
            return []


def _decode_vectors(first: int, dimensions: int, data: bytes) -> list[Embedding]:
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    rows = range(0, len(values), dimensions)
    return [
        Embedding(first + number, tuple(values[at : at + dimensions]))
        for number, at in enumerate(rows)
    ]


def _build_token_logprob(token: EngineToken) -> TokenLogprob:
    text, data = _decode_token(token.data)
    top = tuple(
        TopLogprob(*_decode_token(one.data)[:1], one.logprob, one.id, _decode_token(one.data)[1])
        for one in token.top
    )
    return TokenLogprob(text, token.logprob, top, token.id, data)


def _decode_token(data: bytes) -> tuple[str, bytes | None]:
    """A token's text, and its bytes where they are not that text's."""
    text = data.decode(errors="replace")
    return text, None if text.encode() == data else data


def build_engine_error(failed: RequestFailedEvent) -> GatewayError:
    """The error that a failed job means."""
    match failed.kind:
        case "invalid":
            return InvalidParameter(failed.message, param=failed.param or "")
        case "unsupported":
            return UnsupportedFeature(failed.message, param=failed.param)
        case "too_long":
            return ContextTooLong(
                failed.message, param=failed.param, tokens=failed.tokens, limit=failed.limit
            )
        case "overloaded":
            return Overloaded(failed.message)
        case "deadline":
            return DeadlineExceeded(failed.message)
        case "failed":
            return WorkerFailed(failed.message)
