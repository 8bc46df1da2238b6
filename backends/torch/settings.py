"""The settings of a local model: its section of the configuration."""

from typing import Annotated, Literal

from msgspec import Meta

from backends.interfaces import BackendSettings
from protocols.core.units import (
    ConfigSection,
    DeviceName,
    PositiveInt,
    Size,
    TemplatePath,
    TokenCount,
    WeightsPath,
)


class WatermarkSettings(ConfigSection, frozen=True, omit_defaults=True):
    """The watermark that a request may ask for, with the parameters of transformers' detector."""

    key: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 15485863
    """The secret by which the watermark is found or removed; the default is public."""
    ratio: Annotated[float, Meta(gt=0, le=0.99)] = 0.25
    """The share of the vocabulary that is favoured; each token favours another set."""
    bias: Annotated[float, Meta(gt=0, le=100)] = 2.0
    """Added to the logits of the favoured tokens."""
    scheme: Literal["lefthash", "selfhash"] = "lefthash"
    """``selfhash`` includes the token itself in the hash, which is slower."""
    width: Annotated[int, Meta(ge=1, le=64)] = 1
    """How many preceding tokens seed the hash; ``lefthash`` uses only the last one."""


class TorchSettings(BackendSettings, frozen=True, tag="torch"):
    """A local model.

    ``task`` overrides what the model's files say. ``matryoshka`` lists the dimensions to which
    embeddings may be truncated; it defaults to those that the model's files name.
    ``kv_cache_memory`` is the size of the KV cache, including the prefix cache; a context that does
    not fit is served shorter, which the log says.
    """

    path: WeightsPath
    task: Literal["generate", "embedding", "rerank"] | None = None
    device: DeviceName = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """``int8`` is for text generation on a CPU: faster and smaller, with slightly other outputs."""
    max_concurrency: PositiveInt = 16
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    kv_cache_memory: Size = 1 << 30
    context: TokenCount | None = None
    """A context length below the model's own, in tokens of prompt and output."""
    queue: PositiveInt = 256
    """Limit of waiting prompts; more are rejected as overload."""
    prefill_chunk: Annotated[int, Meta(ge=32, le=65536)] = 256
    """Prompt tokens computed in one step. More are faster, but take more memory, and responses that
    are being generated wait longer for their next token."""
    share_prefix_cache: bool = False
    """Whether API keys share the prefix cache. This saves memory and time if all keys belong to one
    trusted group; otherwise a key can find out which prompts another has sent."""
    watermark: WatermarkSettings = WatermarkSettings()
    chat_template: TemplatePath | None = None
    """A tokenizer's folder, or a chat template file, that replaces the model's own template."""
    trust_request_chat_template: bool = False
    """Whether a request may contain a chat template, which is a program of unbounded cost."""
    matryoshka: Annotated[tuple[TokenCount, ...], Meta(min_length=1)] | None = None
