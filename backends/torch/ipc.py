"""Messages between the gateway and the engine process, and their translation from core types.

A frame is four bytes of length (big-endian) and a msgpack array of messages. The gateway sends
commands (``…Command``), the engine sends events (``…Event``). The gateway assigns the request ids;
each request ends in exactly one RequestFinishedEvent, TokensEvent, DetokenizedEvent or
RequestFailedEvent, unless it is cancelled.

``None`` means: the model's own default.
"""

import array
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from backends.torch.model_features import ModelFeatures
from backends.torch.model_files import EngineTask
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
    Classification,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    RelevanceScore,
    StreamStart,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    TopLogprob,
)
from protocols.core.loss import (
    CONTENT_LABELS,
    ParameterSupport,
    UnsupportedParameter,
    find_unseen_content,
    find_unsupported_parameters,
)
from protocols.core.request import (
    AllowedTools,
    AnyRequest,
    ChoiceFormat,
    ClassifyRequest,
    ContentPart,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningPart,
    RefusalPart,
    RegexFormat,
    RerankRequest,
    TokenizeRequest,
    Tool,
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
    reasoning: str = ""


class PromptInput(Struct, frozen=True, omit_defaults=True):
    """A conversation (``turns``), or prompts of text or token ids.

    ``as_user_message`` renders each prompt with the chat template as the only user message.
    ``truncate_to`` keeps this many of the last prompt tokens (-1: as many as fit); without it a
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

IPC_VERSION = 6
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
    """How many tokens may be sent before the client reads them; CreditCommand adds to it."""
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
    """Keep this many of the first tokens (-1: as many as fit); None: a longer text fails."""
    timeout: float | None = None


class RerankCommand(Struct, frozen=True, omit_defaults=True, tag="rerank"):
    """One score for each document, compared with the only query or with its own."""

    request_id: int
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    max_tokens: int | None = None
    """As in EmbedCommand, for a query and its document together."""
    timeout: float | None = None


class ClassifyCommand(Struct, frozen=True, omit_defaults=True, tag="classify"):
    """The class of each input."""

    request_id: int
    inputs: tuple[str | tuple[int, ...], ...]
    max_tokens: int | None = None
    """As in EmbedCommand."""
    special_tokens: bool = True
    activation: bool | None = None
    """False: logits instead of probabilities."""
    timeout: float | None = None


class TokenizeCommand(Struct, frozen=True, tag="tokenize"):
    """The tokens of a prompt or of a conversation."""

    request_id: int
    input: PromptInput


class DetokenizeCommand(Struct, frozen=True, tag="detokenize"):
    """The text of these tokens."""

    request_id: int
    ids: tuple[int, ...]


class CancelCommand(Struct, frozen=True, tag="cancel"):
    """Cancel the request."""

    request_id: int


class CreditCommand(Struct, frozen=True, tag="credit"):
    """The client has read this many more tokens."""

    request_id: int
    tokens: int


class ReadyEvent(Struct, frozen=True, tag="ready"):
    """The model is loaded. ``context_length`` covers prompt and output, in tokens."""

    task: EngineTask
    ipc_version: int
    context_length: int
    device: str
    dimensions: int | None = None
    cache_bytes: int = 0
    """The size of the KV cache."""
    features: ModelFeatures | None = None
    """What a model that generates text is understood to support."""


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

    The first token of a prompt has no log probability.
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


class ScoresEvent(Struct, frozen=True, gc=False, tag="scores"):
    """The scores of all documents, in their order."""

    request_id: int
    scores: tuple[float, ...]


class ClassesEvent(Struct, frozen=True, gc=False, tag="classes"):
    """The label of each input, and a number for each of the model's classes."""

    request_id: int
    labels: tuple[str, ...]
    numbers: tuple[tuple[float, ...], ...]


class TokensEvent(Struct, frozen=True, gc=False, tag="tokens"):
    """All tokens of a text, and the text that each completes."""

    request_id: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]


class DetokenizedEvent(Struct, frozen=True, gc=False, tag="detokenized"):
    """The text of all tokens."""

    request_id: int
    text: str


class RequestFinishedEvent(Struct, frozen=True, gc=False, tag="finished"):
    """The request is complete, with its usage in tokens and seconds."""

    request_id: int
    prompt_tokens: int
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    max_batch: int = 1
    """The largest batch that it was computed in."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    reasoning_tokens: int | None = None
    """The completion tokens that are reasoning; None if reasoning is not told apart."""


class RequestFailedEvent(Struct, frozen=True, gc=False, tag="failed"):
    """The request failed, before or after its first token."""

    request_id: int
    kind: FailureKind
    message: str
    param: str | None = None
    """The field that caused the failure."""
    tokens: int | None = None
    limit: int | None = None


RequestCommand = (
    GenerateCommand
    | EmbedCommand
    | RerankCommand
    | ClassifyCommand
    | TokenizeCommand
    | DetokenizeCommand
)
EngineCommand = RequestCommand | CancelCommand | CreditCommand
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
    | ScoresEvent
    | ClassesEvent
    | TokensEvent
    | DetokenizedEvent
    | RequestFinishedEvent
    | RequestFailedEvent
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[EngineCommand])
_event_decoder = msgspec.msgpack.Decoder(list[EngineEvent])


def encode_frame(messages: Sequence[EngineCommand] | Sequence[EngineEvent]) -> bytes:
    """Encode messages as one frame."""
    body = _encoder.encode(messages)
    return len(body).to_bytes(4, "big") + body


def read_body_length(header: bytes) -> int:
    """The length of a frame, from its first four bytes. Raises ValueError if it is too large."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def decode_commands(body: bytes) -> list[EngineCommand]:
    """Decode a frame from the gateway."""
    return _command_decoder.decode(body)


def decode_events(body: bytes) -> list[EngineEvent]:
    """Decode a frame from the engine."""
    return _event_decoder.decode(body)


# The output format and the functions of a request.

_FORMAT_PARAMS: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex",
                 "guided_choice", "guided_grammar", "guided_decoding", "guided_decoding_guide",
                 "grammar")  # fmt: skip
"""The fields by which clients set an output format."""


def build_output_format(request: GenerationRequest) -> OutputFormat | None:
    """The output format of a request."""
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
    """Which functions may be called, and whether one must be."""
    names = tuple(item.name for item in build_functions(request))
    allow_parallel = request.parallel_tools is not False
    match request.tool_choice:
        case NamedTool(name):
            function_choice = FunctionChoice(
                (name,) if name in names else (), required=True, parallel=False
            )
        case AllowedTools(mode, allowed):
            allowed_names = tuple(name for name in names if name in allowed)
            function_choice = FunctionChoice(allowed_names, mode == "required", allow_parallel)
        case choice:
            function_choice = FunctionChoice(names, choice == "required", allow_parallel)
    return function_choice if function_choice.names else None


def find_unsupported_tools(
    request: GenerationRequest, names: Mapping[str, str]
) -> list[UnsupportedParameter]:
    """The tools that are not supported: those that take free text instead of JSON."""
    custom = {tool.name for tool in request.tools if tool.kind == "custom"}
    unsupported = []
    if custom:
        unsupported.append(
            UnsupportedParameter(names.get("tools", "tools"), "dropped", "custom tools", "tools")
        )
    if isinstance(request.tool_choice, NamedTool) and request.tool_choice.name in custom:
        wire = names.get("tool_choice", "tool_choice")
        unsupported.append(UnsupportedParameter(wire, "dropped", "a custom tool", "tool_choice"))
    return unsupported


def _build_function(tool: Tool) -> FunctionDefinition:
    if tool.parameters is None:
        return FunctionDefinition(tool.name, tool.description, strict=tool.strict is True)
    return FunctionDefinition(
        tool.name, tool.description, bytes(tool.parameters), tool.strict is True
    )


# Core requests to commands, engine events to core events, unsupported parameters.

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
_GENERATION_SUPPORT["reasoning.effort"] = ParameterSupport(
    "reasoning_effort", reason="approximated"
)
"""It sets variables of the chat template, which may not have them."""
_GENERATION_SUPPORT["reasoning.include"] = ParameterSupport("include_reasoning")
_SAMPLING_DEFAULTS: Final[Mapping[str, float | None]] = {
    "temperature": 0, "top_p": 1, "top_k": None, "min_p": 0, "typical_p": 1, "seed": None,
}  # fmt: skip
"""Sampling parameters that beam search ignores, with the values that have no effect."""
_EMBEDDING_SUPPORT = {
    path: ParameterSupport(path)
    for path in ("instruction", "dimensions", "normalize", "truncate", "overflow")
}

_RERANK_SUPPORT = {"truncate": ParameterSupport("truncate")}
_CLASSIFY_SUPPORT = {
    path: ParameterSupport(path) for path in ("truncate", "add_special_tokens", "activation")
}
_TOKENIZE_SUPPORT = {
    path: ParameterSupport(path)
    for path in ("tools", *(f"templating.{name}" for name in _PARAMETER_SECTIONS["templating"]))
}

_UNSUPPORTED_PARTS: Final[Mapping[type[ContentPart], str]] = {
    **CONTENT_LABELS,
    RefusalPart: "refusals",
    ReasoningPart: "earlier reasoning",
}
_DEFAULT_WATERMARK: Final = WatermarkSettings()
_ROLE_ALIASES = {"developer": "system", "function": "tool"}


def find_unsupported_params(
    request: AnyRequest,
    names: Mapping[str, str],
    *,
    templates: bool,
    features: ModelFeatures | None = None,
) -> tuple[UnsupportedParameter, ...]:
    """The parameters of a request that the engine does not support.

    ``features`` are those of the model; None while it is loaded.
    """
    template_support = {"templating.template": ParameterSupport("template")} if templates else {}
    match request:
        case EmbeddingRequest():
            return find_unsupported_parameters(request, _EMBEDDING_SUPPORT, names)
        case RerankRequest():
            return find_unsupported_parameters(request, _RERANK_SUPPORT, names)
        case ClassifyRequest():
            return find_unsupported_parameters(request, _CLASSIFY_SUPPORT, names)
        case TokenizeRequest() | DetokenizeRequest():
            carries = {**_TOKENIZE_SUPPORT, **template_support}
            return find_unsupported_parameters(request, carries, names)
        case GenerationRequest():
            pass
    carries = {**_GENERATION_SUPPORT, **template_support}
    unsupported = (
        *find_unsupported_parameters(request, carries, names),
        *_find_unused_sampling(request, names),
    )
    unsupported = (*unsupported, *find_unsupported_tools(request, names))
    unseen = dict(_UNSUPPORTED_PARTS)
    if features is not None and features.keeps_reasoning:
        del unseen[ReasoningPart]
    return (*unsupported, *find_unseen_content(request, unseen, names))


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
    request_id: int,
    timeout: float,
    *,
    templates: bool,
    watermark: WatermarkSettings = _DEFAULT_WATERMARK,
    tenant: str | None = None,
) -> GenerateCommand:
    """Build the command for a request.

    ``watermark`` is the watermark of the text, if any; ``tenant`` is the caller, for fair queueing.
    """
    n = request.n or 1
    logprobs = request.logprobs
    return GenerateCommand(
        request_id=request_id,
        input=_build_prompt_input(request, templates=templates),
        sampling=_build_sampling_params(request, watermark),
        stopping=_build_stop_params(request),
        n=n,
        best_of=max(n, request.best_of or n),
        logprobs=None if logprobs is None else logprobs.top,
        prompt_logprobs=None if logprobs is None else _get_prompt_logprobs(request),
        token_ids=request.response_options.token_ids,
        echo=bool(request.echo) and bool(request.prompts),
        priority=128 if request.priority is None else request.priority,
        timeout=timeout,
        tenant=tenant,
        beams=build_beam_search_params(request),
        output_format=build_output_format(request),
        function_choice=build_function_choice(request),
    )


def _get_prompt_logprobs(request: GenerationRequest) -> int | None:
    """An echoed prompt has as many logprobs as the text, unless the request says otherwise."""
    if request.logprobs is None or not request.echo:
        return None
    if request.logprobs.prompt is not None:
        return request.logprobs.prompt
    return request.logprobs.top


def _build_prompt_input(request: GenerationRequest, *, templates: bool) -> PromptInput:
    templating = request.templating
    stopping = request.stopping
    truncate_to = stopping.truncate_prompt
    if truncate_to is None and stopping.overflow == "truncate":
        truncate_to = -1
    return PromptInput(
        turns=tuple(_build_turn(message) for message in request.messages),
        functions=build_functions(request),
        prompts=request.prompts,
        as_user_message=templating.mode == "server",
        template=templating.template if templates else None,
        template_arguments=msgspec.json.encode(
            {**_build_reasoning_arguments(request), **(templating.arguments or {})}
        ),
        continue_final=bool(templating.continue_final),
        generation_prompt=templating.add_generation_prompt is not False,
        special_tokens=templating.add_special_tokens,
        truncate_to=truncate_to,
    )


def _build_reasoning_arguments(request: GenerationRequest) -> dict[str, object]:
    """The variables by which chat templates turn reasoning on and off."""
    effort = None if request.reasoning is None else request.reasoning.effort
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}


def _build_turn(message: Message) -> ChatTurn:
    return ChatTurn(
        _ROLE_ALIASES.get(message.role, message.role),
        message.text,
        message.name,
        tuple(FunctionCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
        "".join(part.text for part in message.parts if isinstance(part, ReasoningPart)),
    )


def returns_best_only(request: GenerationRequest) -> bool:
    """Whether nothing is sent before all samples have ended, because the best are selected."""
    return (request.best_of or 0) > (request.n or 1) or build_beam_search_params(
        request
    ) is not None


def build_beam_search_params(request: GenerationRequest) -> BeamSearchParams | None:
    """The beam search, if it has more than one beam: a single beam is greedy sampling."""
    sampling = request.sampling
    width = max(sampling.beam_width or 0, request.n or 1)
    if sampling.beam_width is None or width == 1 or request.stopping.max_tokens == 0:
        return None
    penalty = sampling.length_penalty
    return BeamSearchParams(
        width,
        # With a diversity penalty, each beam differs from all others.
        groups=width if sampling.diversity_penalty else 1,
        diversity_penalty=sampling.diversity_penalty or 0.0,
        length_penalty=1.0 if penalty is None else penalty,
    )


def _build_sampling_params(
    request: GenerationRequest, watermark: WatermarkSettings
) -> EngineSamplingParams:
    sampling = request.sampling
    greedy = sampling.do_sample is False or sampling.beam_width is not None
    return EngineSamplingParams(
        temperature=0.0 if greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or {},
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        watermark=watermark if sampling.watermark else None,
    )


def _build_stop_params(request: GenerationRequest) -> StopParams:
    stopping = request.stopping
    return StopParams(
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens or 0,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        include_stop=bool(stopping.include_stop),
        ignore_eos=bool(stopping.ignore_eos),
        skip_special_tokens=stopping.skip_special_tokens is not False,
    )


def build_embed_command(request: EmbeddingRequest, request_id: int, timeout: float) -> EmbedCommand:
    """Build the command for a request."""
    max_tokens = request.truncate
    if max_tokens is None and request.overflow == "truncate":
        max_tokens = -1
    return EmbedCommand(
        request_id=request_id,
        inputs=request.inputs,
        instruction=request.instruction,
        dimensions=request.dimensions,
        normalize=request.normalize,
        max_tokens=max_tokens,
        timeout=timeout,
    )


def build_rerank_command(request: RerankRequest, request_id: int, timeout: float) -> RerankCommand:
    """Build the command for a request."""
    return RerankCommand(request_id, request.queries, request.documents, request.truncate, timeout)


def build_classify_command(
    request: ClassifyRequest, request_id: int, timeout: float
) -> ClassifyCommand:
    """Build the command for a request."""
    return ClassifyCommand(
        request_id,
        request.inputs,
        request.truncate,
        request.add_special_tokens is not False,
        request.activation,
        timeout,
    )


def build_tokenize_command(
    request: TokenizeRequest, request_id: int, *, templates: bool
) -> TokenizeCommand:
    """Build the command for a request, with the input of a request for text."""
    prompts = () if request.prompt is None else (request.prompt,)
    generation = GenerationRequest(
        model=request.model,
        kind="chat",
        messages=request.messages,
        prompts=prompts,
        tools=request.tools,
        templating=request.templating,
    )
    return TokenizeCommand(request_id, _build_prompt_input(generation, templates=templates))


# --- events -------------------------------------------------------------------------------------


def map_engine_event(event: EngineEvent) -> list[Event]:
    """Map an engine event to core events. The backend maps the end of a request itself."""
    match event:
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
        case ScoresEvent(_, scores):
            return [RelevanceScore(index, score) for index, score in enumerate(scores)]
        case ClassesEvent(_, labels, numbers):
            return [
                Classification(index, *one)
                for index, one in enumerate(zip(labels, numbers, strict=True))
            ]
        case _:
            return []


def _decode_vectors(first_index: int, dimensions: int, data: bytes) -> list[Embedding]:
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    offsets = range(0, len(values), dimensions)
    return [
        Embedding(first_index + number, tuple(values[at : at + dimensions]))
        for number, at in enumerate(offsets)
    ]


def _build_token_logprob(token: EngineToken) -> TokenLogprob:
    text, data = _decode_token(token.data)
    top = tuple(
        TopLogprob(
            *_decode_token(item.data)[:1], item.logprob, item.id, _decode_token(item.data)[1]
        )
        for item in token.top
    )
    return TokenLogprob(text, token.logprob, top, token.id, data)


def _decode_token(data: bytes) -> tuple[str, bytes | None]:
    """The text of a token, and its bytes if they are not the text in UTF-8."""
    text = data.decode(errors="replace")
    return text, None if text.encode() == data else data


def build_engine_error(event: RequestFailedEvent) -> GatewayError:
    """The error of a failed request."""
    match event.kind:
        case "invalid":
            return InvalidParameter(event.message, param=event.param or "")
        case "unsupported":
            return UnsupportedFeature(event.message, param=event.param)
        case "too_long":
            return ContextTooLong(
                event.message, param=event.param, tokens=event.tokens, limit=event.limit
            )
        case "overloaded":
            return Overloaded(event.message)
        case "deadline":
            return DeadlineExceeded(event.message)
        case "failed":
            return WorkerFailed(event.message)
