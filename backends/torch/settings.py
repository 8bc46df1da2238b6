"""What a local model may be told in the configuration."""

from msgspec import Struct


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """A model and how it is served."""

    path: str
    """``package:NAME``, a folder, a ``.gguf`` file, or a name on the hub."""
    device: str = "auto"
    dtype: str = "auto"
    max_concurrency: int = 16
    """Rows computed together; further requests wait."""
    queue: int = 256
    """Prompts that may wait; more are refused as overload."""
    threads: int | None = None
    context: int | None = None
    """A shorter limit than the model's own on prompt and answer together, in tokens."""
    trust_templates: bool = False
    """Whether a request may bring a chat template: it is a program, and costs what it costs."""
