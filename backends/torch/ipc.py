"""Messages between the gateway and the engine process.

A frame is four bytes of length (big-endian) and a msgpack array of messages. The gateway sends
commands (``…Command``), the engine sends events (``…Event``). The gateway assigns the request ids;
each request ends in exactly one RequestFinishedEvent, TokensEvent, DetokenizedEvent or
RequestFailedEvent, unless it is cancelled.

``None`` means: the model's own default.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from backends.torch.model_files import EngineTask
from backends.torch.settings import WatermarkSettings
from protocols.core.catalog import ModelFeatures


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


class OutputRule(Struct, frozen=True, omit_defaults=True):
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


IPC_VERSION = 8
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
    output_format: OutputRule | None = None
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
    """What the model is understood to support."""
    memory_bytes: int = 0
    """The memory of the process without the KV cache."""


class ProgressEvent(Struct, frozen=True, tag="progress"):
    """Progress of loading, for the log."""

    text: str


class LoadFailedEvent(Struct, frozen=True, tag="load_failed"):
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
    draft_tokens: int = 0
    """Tokens of drafts that were computed: see ``prompt_lookup``."""
    accepted_draft_tokens: int = 0
    """Those of them that were generated."""


class HeartbeatEvent(Struct, frozen=True, omit_defaults=True, tag="heartbeat"):
    """Sent each second. ``step_seconds``: duration of the current step so far."""

    active: int
    waiting: int
    step_seconds: float = 0.0
    stats: EngineStats = EngineStats()


class PrefillDoneEvent(Struct, frozen=True, tag="prefill_done"):
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


class PromptEchoEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="prompt_echo"):
    """The prompt of a choice, with logprobs if requested."""

    request_id: int
    choice: int
    text: str
    tokens: tuple[EngineToken, ...] = ()


class TextEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="text"):
    """Text of a choice and its number of tokens; ids and logprobs if requested."""

    request_id: int
    choice: int
    text: str
    token_count: int
    ids: tuple[int, ...] = ()
    tokens: tuple[EngineToken, ...] = ()


class ToolCallEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="tool_call"):
    """The start of a tool call, the ``call``-th of this choice."""

    request_id: int
    choice: int
    call: int
    id: str
    name: str
    token_count: int = 0
    """The number of tokens."""


class ToolArgumentsEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="tool_arguments"):
    """A delta of a call's arguments (JSON text) and its number of tokens."""

    request_id: int
    choice: int
    call: int
    text: str
    token_count: int = 0


class ReasoningEvent(Struct, frozen=True, gc=False, omit_defaults=True, tag="reasoning"):
    """A delta of the reasoning and its number of tokens."""

    request_id: int
    choice: int
    text: str
    token_count: int = 0


class ChoiceEndEvent(Struct, frozen=True, gc=False, tag="choice_end"):
    """A choice is complete; ``stop`` is the string or token id that ended it."""

    request_id: int
    choice: int
    reason: Literal["eos", "stop", "length", "tool_calls"]
    stop: str | int | None = None


class EmbeddingsEvent(Struct, frozen=True, gc=False, tag="embeddings"):
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


class RequestFinishedEvent(Struct, frozen=True, gc=False, tag="request_finished"):
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


class RequestFailedEvent(Struct, frozen=True, gc=False, tag="request_failed"):
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
