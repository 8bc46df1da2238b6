"""The settings of a local model."""

from typing import Literal

from msgspec import Struct

from backends.torch.ipc import WatermarkSettings


class TorchSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a local model."""

    path: str
    """``package:NAME``, a folder, a ``.gguf`` file, or a name on the hub."""
    task: Literal["generate", "embedding"] | None = None
    """The model's task; None: as its files say."""
    device: str = "auto"
    dtype: str = "auto"
    max_concurrency: int = 16
    """Sequences computed together; further requests wait."""
    queue: int = 256
    """Limit of waiting prompts; more are rejected as overload."""
    threads: int | None = None
    kv_cache_memory: int = 1 << 30
    """Size of the KV cache in bytes, with its prefix cache."""
    share_prefix_cache: bool = False
    """Whether API keys share the prefix cache; then response times and ``cached_tokens`` tell one
    key which prompts another has sent."""
    context: int | None = None
    """A context length below the model's own, in tokens of prompt and output."""
    chat_template: str | None = None
    """A tokenizer's folder or a chat template file, instead of the model's own template."""
    trust_request_chat_template: bool = False
    """Whether requests may set a chat template, which is a program with unbounded cost."""
    matryoshka: tuple[int, ...] | None = None
    """Allowed embedding dimensions; None: as the model's files say."""
    watermark: WatermarkSettings = WatermarkSettings()
    """The watermark of requests that ask for one."""
