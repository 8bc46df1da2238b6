"""What a local model may be told in the configuration."""

from typing import Literal

from msgspec import Struct

from backends.torch.ipc import WatermarkSettings


class TorchSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A model and how it is served."""

    path: str
    """``package:NAME``, a folder, a ``.gguf`` file, or a name on the hub."""
    task: Literal["generate", "embedding"] | None = None
    """What the model is for, where its files would say something else."""
    device: str = "auto"
    dtype: str = "auto"
    max_concurrency: int = 16
    """Rows computed together; further requests wait."""
    queue: int = 256
    """Prompts that may wait; more are refused as overload."""
    threads: int | None = None
    kv_cache_memory: int = 1 << 30
    """Bytes for the keys and values of what is in work or may be wanted again."""
    context: int | None = None
    """A shorter limit than the model's own on prompt and answer together, in tokens."""
    chat_template: str | None = None
    """A tokenizer's folder, or a chat template's file, in the place of the model's own."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template: it is a program, and costs what it costs."""
    matryoshka: tuple[int, ...] | None = None
    """The sizes to which vectors may be cut; None is what the model's files say."""
    watermark: WatermarkSettings = WatermarkSettings()
    """How texts are marked where a request asks for it."""
