"""The served models, as listing endpoints see them: names, never addresses."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

ModelTask = Literal["chat", "embedding", "rerank", "classify"]
"""``chat`` models accept completions, too."""


class VersionInfo(Struct, frozen=True):
    """A version of a model."""

    name: str
    backend_model: str
    """The backend's name for the model; the public name where the caller may not see that."""
    share: int | None
    """Its part of the traffic split in percent; None where the caller may not see that."""
    ready: bool = True


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
    def ready(self) -> bool:
        """Whether at least one version is ready."""
        return any(version.ready for version in self.versions)


class Catalog(Protocol):
    """A read-only view of the running configuration: the models that the caller may use."""

    @property
    def ready(self) -> bool:
        """Whether the gateway accepts requests (false while it drains)."""

    def list_models(self) -> Sequence[ModelInfo]:
        """These models, in the order of the configuration."""

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        """The model with this name or alias.

        Raises ModelNotFound or VersionNotFound.
        """
