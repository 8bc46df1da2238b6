"""The internal request, one for all protocols.

``None`` (or an empty tuple) means that the client did not set the field: the target's default
holds, unless the client's protocol promises another, which is then set here. Fields that have no
place here are kept in ``extra`` as the client sent them, for workers of the same protocol.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self, get_args

from msgspec import NODEFAULT, Raw, Struct
from msgspec.structs import fields, replace

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

FieldPath = tuple[str, ...]
"""A key, after those of the objects around it."""


class ExtraFields(Struct, frozen=True):
    """Keys of one object of the client's that nothing else here represents.

    ``at`` is the object's path in the client's body. Only workers of the client's protocol get
    them: see ``protocols.core.extra``.
    """

    at: str
    values: Mapping[FieldPath, Any]
    inside: FieldPath = ()
    """Where workers get the object, if it is inside the one that is written for it."""


KeptKeys = Mapping[type[Struct], frozenset[str]]
"""By the type of an object of a conversation: the unknown keys in it that a worker gets."""
NO_KEYS: Final[KeptKeys] = {}
CACHE_KEY: Final = "cache_control"
"""The key of a mark for the prompt cache, which Anthropic's API and others have."""


class _Located(Struct, frozen=True, kw_only=True, eq=False, repr_omit_defaults=True):
    """An object of a conversation. Two that say the same are equal, wherever they stand."""

    at: str = ""
    """Its path in the client's body; "" where ``protocols.core.places`` knows it."""

    def list_values(self) -> list[Any]:
        """The values of its fields, without its place."""
        return [getattr(self, name) for name in self.__struct_fields__ if name != "at"]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.list_values() == other.list_values()

    def __hash__(self) -> int:
        return hash(tuple(self.list_values()))


class TextPart(_Located, frozen=True, tag="text"):
    """Plain text."""

    text: str
    extra: ExtraFields | None = None
    continues: bool = False
    """It goes on with the text of the part before, which only ``extra`` keeps apart."""


class ImagePart(_Located, frozen=True, tag="image"):
    """An image by ``https:`` or ``data:`` URL; ``detail`` is auto, low or high."""

    url: str
    detail: str | None = None
    extra: ExtraFields | None = None


class AudioPart(_Located, frozen=True, tag="audio"):
    """Audio: base64 ``data`` in ``format`` (wav, mp3), or a URL."""

    data: str
    format: str | None = None
    extra: ExtraFields | None = None


class VideoPart(_Located, frozen=True, tag="video"):
    """A video by URL."""

    url: str
    extra: ExtraFields | None = None


class FilePart(_Located, frozen=True, tag="file"):
    """A file: an id known to the worker, or base64 data with its name."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    extra: ExtraFields | None = None


class RefusalPart(_Located, frozen=True, tag="refusal"):
    """An assistant's refusal."""

    text: str
    extra: ExtraFields | None = None


class ReasoningPart(_Located, frozen=True, tag="reasoning"):
    """An assistant's reasoning; ``signature`` lets the worker verify it."""

    text: str
    signature: str | None = None
    redacted: str | None = None
    """Encrypted reasoning, which only its worker can read; ``text`` is empty then."""
    extra: ExtraFields | None = None


ContentPart = TextPart | ImagePart | AudioPart | VideoPart | FilePart | RefusalPart | ReasoningPart


class ToolCall(_Located, frozen=True):
    """A call that the model made; ``arguments`` is JSON text, not parsed.

    ``at`` is the object with the name and the arguments.
    """

    id: str
    name: str
    arguments: str
    kind: str = "function"
    extra: ExtraFields | None = None


class Message(_Located, frozen=True, omit_defaults=True):
    """One turn of a conversation. No parts: the client sent no content."""

    role: Role
    parts: tuple[ContentPart, ...] = ()
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    is_error: bool = False
    extra: ExtraFields | None = None

    @property
    def text(self) -> str:
        """The text parts, joined."""
        parts = self.parts
        if len(parts) == 1 and type(parts[0]) is TextPart:
            return parts[0].text
        return "".join([part.text for part in parts if type(part) is TextPart])


class Tool(_Located, frozen=True):
    """A function the model may call; ``parameters`` is a JSON Schema as the client wrote it.

    A custom tool has its ``format`` there, as chat completions write it. ``at`` is the object with
    the name.
    """

    name: str
    description: str | None = None
    parameters: Raw | None = None
    strict: bool | None = None
    kind: Literal["function", "custom"] = "function"
    extra: ExtraFields | None = None
    wraps_text: bool = False
    """The function stands for a custom tool: see ``protocols.core.custom_tools``."""


class NamedTool(Struct, frozen=True, tag="named"):
    """This tool must be called."""

    name: str


class AllowedTools(Struct, frozen=True, tag="allowed"):
    """Only these tools may be called; ``mode`` says whether one must be."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class JsonObjectFormat(Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Struct, frozen=True, tag="json_schema"):
    """JSON after a schema; ``schema`` is kept as the client wrote it."""

    schema: Raw
    name: str = "schema"
    description: str | None = None
    strict: bool | None = None


class RegexFormat(Struct, frozen=True, tag="regex"):
    """Text that matches a regular expression."""

    pattern: str


class ChoiceFormat(Struct, frozen=True, tag="choice"):
    """One of these texts."""

    options: tuple[str, ...]


class GrammarFormat(Struct, frozen=True, tag="grammar"):
    """Text of a context-free grammar."""

    text: str


OutputFormat = JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat


class SamplingParams(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """How tokens are sampled. Canonical forms: greedy is temperature 0; "all" is top_k None."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    seed: int | None = None
    """-2**63 to 2**64 - 1, as the client sent it. A worker's range may be smaller."""
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    watermark: bool | None = None
    beam_width: int | None = None
    """Beam search of this width; None is sampling."""
    diversity_penalty: float | None = None
    length_penalty: float | None = None


class StopConditions(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """When a choice ends, and whether the stop string stays in the text."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    truncate_prompt: int | None = None
    """Keep the last so many prompt tokens; -1 keeps as many as the model takes."""
    overflow: Literal["error", "truncate"] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class LogprobsOptions(Struct, frozen=True):
    """``top`` alternatives of each token (0: only the token); ``prompt``: of prompt tokens, too.

    ``top`` -1 requests the whole vocabulary. Defaults of this section count as set by the client.
    """

    top: int = 0
    prompt: int | None = None


class ReasoningOptions(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """How much to reason, and whether to return it. ``budget`` is in tokens."""

    effort: str | None = None
    budget: int | None = None
    include: bool | None = None
    summary: str | None = None


class PromptOptions(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """How the prompt becomes the model's input.

    ``mode``: ``chat`` runs the messages through the model's chat template; ``raw`` gives prompts to
    the model as they are; ``server`` lets the server wrap a prompt as it would a user's message.
    """

    mode: Literal["chat", "raw", "server"] = "chat"
    template: str | None = None
    arguments: Mapping[str, Raw] | None = None
    continue_final: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class ResponseOptions(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """What the client wants in the response besides text. A backend may add more."""

    usage: Literal["none", "final", "each"] = "final"
    """``none``: the response has no usage field; ``each``: running usage in every event."""
    details: bool = False
    timing: bool = False
    token_ids: bool = False
    matched_stop: bool = False
    """The response names the stop string that ended it."""
    hides_reasoning: bool = False
    """The response has no reasoning, although the worker may reason."""
    has_items: bool = False
    """The response is a list of items, as in the Responses API."""


Prompt = str | tuple[int, ...]
"""Text, or token ids."""

SECTIONS: Final[Mapping[str, type[Struct]]] = {
    "templating": PromptOptions,
    "sampling": SamplingParams,
    "stopping": StopConditions,
    "reasoning": ReasoningOptions,
    "logprobs": LogprobsOptions,
    "response_options": ResponseOptions,
}
"""The sections of a request: its fields that are structs."""


class _BaseRequest(Struct, frozen=True, kw_only=True, dict=True, repr_omit_defaults=True):
    """What all requests share. These fields come after those of each kind of request."""

    model: str
    priority: int | None = None
    """0 to 255, lower first."""
    timeout: float | None = None
    """The client's timeout in seconds."""
    client_id: str | None = None
    """The client's own id of this request."""
    labels: Mapping[str, str] = {}
    """user, metadata and the like: for routing, logs and workers of the same protocol."""
    provided_fields: frozenset[str] = frozenset()
    """The wire names of the fields that the client sent with a value."""
    extra: Mapping[str, Raw] = {}
    field_extra: tuple[ExtraFields, ...] = ()
    """Unknown keys of fields that are objects, such as ``tool_choice`` or ``response_format``."""
    context_length: int | None = None
    """The target model's, if known: no plausible token count is larger."""
    source: str = ""
    """The name of the client's protocol, or of one of its APIs if the decoder set it: workers of
    another get no ``extra``."""

    @property
    def set_fields(self) -> Mapping[str, Any]:
        """Every value that differs from its default, by its path such as ``sampling.top_k``.

        None and empty values count as not set.
        """
        values: dict[str, Any] | None = self.__dict__.get("set_fields")
        if values is not None:  # functools.cached_property takes a lock in Python 3.11
            return values
        values = self.__dict__["set_fields"] = {}
        unsaid = _UNSET_VALUES[type(self)]
        for name, value in self.__rich_repr__():  # which leaves out all that is a default itself
            if name in _SECTION_PATHS:
                paths = _SECTION_PATHS[name]
                for field_name, one in value.__rich_repr__():
                    path, silence = paths[field_name]
                    if one is not None and one != silence:
                        values[path] = one
            elif value != unsaid[name]:
                values[name] = value
        return values

    def without_fields(self, **silent: bool) -> Self:
        """A copy without the fields whose argument is true; their default must be None."""
        values = dict(self.set_fields)
        silenced: dict[str, None] = {}
        for name, is_silent in silent.items():
            if is_silent:
                silenced[name] = None
                values.pop(name, None)
        return replace(self, **silenced).with_set_fields(values)

    def bind_target(self, model: str, source: str, context_length: int | None = None) -> Self:
        """A copy with the target's model name and context, from the client's protocol."""
        target: dict[str, Any] = {"model": model}
        if context_length is not None:
            target["context_length"] = context_length
        target["source"] = source
        copy, values = replace(self, **target), self.__dict__.get("set_fields")
        return copy if values is None else copy.with_set_fields({**values, **target})

    def with_set_fields(self, values: Mapping[str, Any]) -> Self:
        """This request, with ``set_fields`` already known."""
        self.__dict__["set_fields"] = values
        return self


class GenerationRequest(_BaseRequest, frozen=True):
    """A request for text: a conversation (``messages``), or one or more ``prompts``.

    The response has ``n`` choices for a conversation, and ``n`` for each prompt: choice ``i`` of
    prompt ``p`` has the index ``p * n + i``.
    """

    kind: Literal["chat", "completion"]
    messages: tuple[Message, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    templating: PromptOptions = PromptOptions()
    sampling: SamplingParams = SamplingParams()
    stopping: StopConditions = StopConditions()
    n: int | None = None
    best_of: int | None = None
    """Sample this many and return the ``n`` most likely."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tools: bool | None = None
    legacy_functions: bool = False
    """The client sent ``functions`` and expects ``function_call`` in the response."""
    output: OutputFormat | None = None
    reasoning: ReasoningOptions | None = None
    logprobs: LogprobsOptions | None = None
    echo: bool | None = None
    """Return the prompt before the text."""
    suffix: str | None = None
    """Append this to the text."""
    insert_before: str | None = None
    """Generate what comes between the prompt and this text."""
    stream: bool = False
    response_options: ResponseOptions = ResponseOptions()
    adapter: str | None = None
    keep_alive: float | None = None
    """How long a model that is loaded on demand stays after this request, in seconds; negative: for
    ever."""
    fills_context: bool = False
    """The client's protocol has no limit but the context where the client sets no ``max_tokens``:
    a worker's own default would cut the response short."""
    clamped_fields: Mapping[str, str] = {}
    """What the client's protocol changed to fit the target, by wire name: ``64000 to 4096``."""

    @property
    def choice_count(self) -> int:
        """The number of choices in the response."""
        count = self.n or 1
        return count * len(self.prompts) if self.prompts[1:] else count

    @property
    def sample_count(self) -> int:
        """The number of choices, samples or beams that are computed for the response."""
        width = max(self.n or 1, self.best_of or 1, self.sampling.beam_width or 1)
        return (len(self.prompts) or 1) * width


LEGACY_FIELD_NAMES: Final[Mapping[str, str]] = {
    "tools": "functions",
    "tool_choice": "function_call",
}
"""What the client calls these fields if it sent ``functions``."""
_GUIDES: Final = ("structured_outputs", "guided_")
"""How the names of fields begin that have an output format in vLLM's form."""


def select_names(request: GenerationRequest, names: Mapping[str, str]) -> Mapping[str, str]:
    """The wire names of fields, with those that this request uses where a protocol has several."""
    if request.legacy_functions:
        names = {**names, **LEGACY_FIELD_NAMES}
    if request.output is not None:
        sent = (name for name in request.provided_fields if name.startswith(_GUIDES))
        if (name := next(sent, None)) is not None:
            names = {**names, "output": name}
    return names


class EmbeddingRequest(_BaseRequest, frozen=True):
    """A request for one vector for each input."""

    kind: ClassVar[Literal["embedding"]] = "embedding"
    inputs: tuple[Prompt, ...]
    instruction: str | None = None
    dimensions: int | None = None
    encoding: Literal["float", "base64"] = "float"
    normalize: bool | None = None
    truncate: int | None = None
    overflow: Literal["error", "truncate"] | None = None
    keep_alive: float | None = None
    stream: Literal[False] = False


Request = GenerationRequest | EmbeddingRequest
"""What every protocol may carry."""


class RerankRequest(_BaseRequest, frozen=True):
    """A request for the relevance of each document to a query.

    ``queries`` is one query for all documents, or one for each document. The response has a score
    for each document; the encoder of the client's protocol sorts them and returns ``top_n``.
    """

    kind: ClassVar[Literal["rerank"]] = "rerank"
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    raw_documents: tuple[Raw, ...] = ()
    """The documents as the client sent them, if they are not only text."""
    top_n: int | None = None
    """Return so many of the best documents; None: all."""
    return_documents: bool | None = None
    truncate: int | None = None
    """Keep the first so many tokens of a query with its document; -1 keeps as many as fit."""
    stream: Literal[False] = False


class ClassifyRequest(_BaseRequest, frozen=True):
    """A request for the class of each input."""

    kind: ClassVar[Literal["classify"]] = "classify"
    inputs: tuple[Prompt, ...]
    truncate: int | None = None
    """Keep the first so many tokens of an input; -1 keeps as many as fit."""
    add_special_tokens: bool | None = None
    activation: bool | None = None
    """Whether to turn the logits into probabilities; None leaves it to the model."""
    stream: Literal[False] = False


class TokenizeRequest(_BaseRequest, frozen=True):
    """A request for the tokens of a text (``prompt``), or of a conversation (``messages``)."""

    kind: ClassVar[Literal["tokenize"]] = "tokenize"
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    templating: PromptOptions = PromptOptions()
    return_texts: bool = False
    """Return the text of each token, too."""
    stream: Literal[False] = False


class DetokenizeRequest(_BaseRequest, frozen=True):
    """A request for the text of these tokens."""

    kind: ClassVar[Literal["detokenize"]] = "detokenize"
    token_ids: tuple[int, ...]
    stream: Literal[False] = False


def build_tokenize_request(request: GenerationRequest, extra: Mapping[str, Raw]) -> TokenizeRequest:
    """The request for the tokens of a conversation and its tools."""
    return TokenizeRequest(
        model=request.model,
        messages=request.messages,
        tools=request.tools,
        templating=request.templating,
        provided_fields=request.provided_fields,
        extra=extra,
        field_extra=request.field_extra,
    )


AnyRequest = Request | RerankRequest | ClassifyRequest | TokenizeRequest | DetokenizeRequest
"""What a backend may get. Protocols that carry more than a Request say so in ``request_kinds``."""
RequestKind = Literal[
    "chat", "completion", "embedding", "rerank", "classify", "tokenize", "detokenize"
]


def _unset_values(kind: type[Struct]) -> Mapping[str, Any]:
    """The default of each field; () instead of None."""
    defaults = {
        one.name: one.default if one.default_factory is NODEFAULT else one.default_factory()
        for one in fields(kind)
    }
    return {name: () if one in (None, NODEFAULT) else one for name, one in defaults.items()}


_UNSET_VALUES: Final = {kind: _unset_values(kind) for kind in get_args(AnyRequest)}
_SECTION_PATHS: Final[Mapping[str, Mapping[str, tuple[str, Any]]]] = {
    name: {
        own: (f"{name}.{own}", silence if kind.__struct_config__.repr_omit_defaults else ())
        for own, silence in _unset_values(kind).items()
    }
    for name, kind in SECTIONS.items()
}
"""By section and field: the field's path, and the value that counts as not set.

In a section that shows its defaults in its repr, defaults count as set.
"""
