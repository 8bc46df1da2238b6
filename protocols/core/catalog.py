"""What the gateway serves, as a dialect's listing endpoints see it: names, never addresses."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

ModelTask = Literal["chat", "embedding"]
"""``chat`` models also take completions."""


class VersionInfo(Struct, frozen=True):
    """A numbered target of a model; ``share`` is its part of the split in percent."""

    name: str
    backend_model: str
    """The backend's name for the model."""
    share: int
    ready: bool = True


class ModelInfo(Struct, frozen=True):
    """A public model. ``aliases`` are further names of it."""

    name: str
    versions: tuple[VersionInfo, ...]
    task: ModelTask = "chat"
    aliases: tuple[str, ...] = ()
    created: int = 0
    """Unix seconds."""
    context_length: int | None = None
    """The longest prompt and answer together, in tokens."""
    max_tokens: int | None = None
    protocol_options: Mapping[str, Mapping[str, Any]] = {}
    """What only one dialect asks of a model, under that dialect's name."""

    @property
    def ready(self) -> bool:
        """Whether at least one version can answer."""
        return any(version.ready for version in self.versions)


class Catalog(Protocol):
    """A read-only view of the running configuration."""

    @property
    def ready(self) -> bool:
        """Whether the gateway takes requests (false while it drains)."""

    def list_models(self) -> Sequence[ModelInfo]:
        """Every public model, in the order of the configuration."""

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        """The model of this name or alias.

        Raises ModelNotFound or VersionNotFound.
        """
