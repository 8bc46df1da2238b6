"""The served models, as listing endpoints see them: names, never addresses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

ModelTask = Literal["chat", "embedding", "rerank", "classify"]
"""``chat`` models accept completions, too."""


class ModelWeights(Struct, frozen=True):
    """The weights of a model, as its files have them."""

    format: Literal["gguf", "safetensors"]
    family: str
    """The architecture, by its name in the files, as in ``llama``."""
    parameters: int
    """The number of weights."""
    quantization: str
    """The type of most weights, as in ``Q4_K_M`` or ``BF16``."""
    size_bytes: int
    """The size of the files."""

    def describe(self) -> str:
        """A text for a person."""
        return (
            f"{self.family}, {self.parameters / 1e6:,.1f} million parameters, {self.quantization}, "
            f"{self.size_bytes / 1e6:,.0f} MB of {self.format}"
        )


class ModelFeatures(Struct, frozen=True, omit_defaults=True):
    """What the engine understands of a model, from its files and its chat template."""

    task: Literal["embedding", "rerank", "classify"] | None = None
    """What it computes; None: text, which the other fields describe."""
    chat: bool = False
    """Whether it has a chat template."""
    tool_calls: str | None = None
    """The family in whose format it writes calls; None: its calls are not understood."""
    found_by: str | None = None
    """How that format was found out."""
    enforced: Literal["always", "with options", "never"] = "never"
    """When a grammar enforces calls; otherwise they are parsed."""
    functions_in: Literal["chat template", "system message"] | None = None
    """What puts the functions into the prompt."""
    reasoning: str | None = None
    """The marks around reasoning."""
    keeps_reasoning: bool = False
    """Whether earlier reasoning goes back to the model."""
    follows_effort: bool = False
    """Whether a reasoning effort changes the prompt."""
    problem: str | None = None
    """Why calls are not understood."""
    schema: bool = False
    """Whether a grammar can enforce a JSON schema, a regular expression or choices."""
    context_length: int | None = None
    """The largest sum of prompt and completion tokens; of another task, the longest input."""
    prompt_lookup: str | None = None
    """Whether tokens that have occurred before are computed several at a time, or why not."""
    weights: ModelWeights | None = None
    """None if they are not known."""

    def describe(self) -> Iterator[tuple[str, str]]:
        """Subjects and texts for a person."""
        if self.task is not None:
            yield "task", self.task
            yield "context", _describe_length(self.context_length)
            yield "weights", _describe_weights(self.weights)
            return
        yield "task", "text"
        yield "chat", "by the chat template" if self.chat else "no: it has no chat template"
        if self.tool_calls is None:
            yield "tool calls", f"not understood: {self.problem}"
        else:
            yield "tool calls", f"{self.tool_calls} (found by: {self.found_by})"
            parsed = "; otherwise they are parsed" if self.enforced == "with options" else ""
            yield "calls are enforced", f"{self.enforced}{parsed}"
            yield "functions are in", f"the {self.functions_in}"
        yield "reasoning", self.reasoning or "none"
        kept = "goes back to the model" if self.keeps_reasoning else "is not in the prompt"
        yield "earlier reasoning", kept
        yield "schema", "enforced by a grammar" if self.schema else "not enforced"
        yield "context", _describe_length(self.context_length)
        yield "prompt lookup", self.prompt_lookup or "unknown"
        yield "weights", _describe_weights(self.weights)


def _describe_weights(weights: ModelWeights | None) -> str:
    return "unknown" if weights is None else weights.describe()


def _describe_length(tokens: int | None) -> str:
    return "unknown" if tokens is None else f"{tokens} tokens"


class ModelState(Struct, frozen=True, omit_defaults=True):
    """A model that the gateway runs itself."""

    loaded: bool
    """Whether it is in memory."""
    on_demand: bool = False
    """Whether it is loaded at its first request and can be unloaded."""
    features: ModelFeatures | None = None
    """None before it has been loaded once."""
    weights: ModelWeights | None = None
    """Those in its files, before it has been loaded once; None if they are not known."""
    memory_bytes: int = 0
    """The memory that it takes, with its KV cache."""
    expires_in: int | None = None
    """After how many seconds without requests it is unloaded; None: never, or it has requests."""

    def describe(self) -> Iterator[tuple[str, str]]:
        """Subjects and texts for a person."""
        if self.features is not None:
            yield from self.features.describe()
            return
        yield "task", "unknown: it has not been loaded yet"
        yield "weights", _describe_weights(self.weights)

    @property
    def known_weights(self) -> ModelWeights | None:
        """The weights in its files; None if they are not known."""
        return self.weights if self.features is None else self.features.weights


class VersionInfo(Struct, frozen=True):
    """A version of a model."""

    name: str
    backend_model: str
    """The backend's name for the model; the public name where the caller may not see that."""
    share: int | None
    """Its part of the traffic split in percent; None where the caller may not see that."""
    ready: bool = True
    state: ModelState | None = None
    """Of a model that the gateway runs itself."""


class ModelInfo(Struct, frozen=True):
    """A public model, with its aliases."""

    name: str
    versions: tuple[VersionInfo, ...]
    task: ModelTask = "chat"
    aliases: tuple[str, ...] = ()
    created: int = 0
    """Unix time in seconds."""
    context_length: int | None = None
    """Largest sum of prompt and completion tokens."""
    max_tokens: int | None = None
    protocol_options: Mapping[str, Mapping[str, Any]] = {}
    """Settings of the model for one protocol, by the protocol's name."""
    list_aliases: bool = True
    """Whether listings of names to choose from have the aliases, too."""

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The name, and the aliases if they are listed."""
        return (self.name, *self.aliases) if self.list_aliases else (self.name,)

    @property
    def weights(self) -> ModelWeights | None:
        """The weights of every version; None if they are not known, or not the same."""
        states = [version.state for version in self.versions]
        known = {None if one is None else one.known_weights for one in states}
        return known.pop() if len(known) == 1 else None

    @property
    def ready(self) -> bool:
        """Whether at least one version is ready."""
        return any(version.ready for version in self.versions)


@runtime_checkable
class LoadsModels(Protocol):
    """A catalog through which local models can be loaded and unloaded."""

    def keep_model(self, model: ModelInfo, seconds: float | None) -> bool:
        """Load its versions that are loaded on demand, before the response is sent.

        They stay for this long after their last request; 0 unloads them; None: as configured.
        Returns False if there are none.
        """


class Catalog(Protocol):
    """A read-only view of the running configuration: the models that the caller may use."""

    @property
    def ready(self) -> bool:
        """Whether requests can be answered: false while it drains or loads all its models."""

    def list_models(self) -> Sequence[ModelInfo]:
        """These models, in the order of the configuration."""

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        """The model with this name or alias.

        Raises ModelNotFound or VersionNotFound.
        """
