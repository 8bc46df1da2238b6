"""The settings of a local model: its section of the configuration."""

from typing import Annotated, Literal

from msgspec import Meta

from backends.interfaces import BackendSettings
from backends.torch.model_files import ENGINE_TASKS, MODEL_TASKS, ModelError, detect_local_task
from protocols.core.catalog import ModelTask
from protocols.core.units import (
    ConfigSection,
    DeviceName,
    Duration,
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
    """A local model, run by the gateway's own engine."""

    path: WeightsPath
    """The model: a folder, a file, a hub's name or ``package:NAME``."""
    task: Literal["generate", "embedding", "rerank", "classify"] | None = None
    """What the model is used for; by default its files decide."""
    device: DeviceName = "auto"
    """The device that runs the model; ``auto`` is the accelerator if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "quantized"] = "auto"
    """The number format of the weights; ``auto`` is float32 on a CPU, elsewhere that of the files;
    GPTQ, AWQ and compressed-tensors weights stay quantized.
    ``int8`` is for text generation on a CPU: faster and smaller, with slightly other outputs.
    ``quantized`` keeps the 4-bit weights of a GGUF file as they are, and makes the finer ones int8:
    about as large as the file."""
    keep_alive: Duration | None = None
    """Load the model at its first request, and unload it after this time without requests; a
    request of Ollama's API may change the time. By default the model is loaded at start and
    stays."""
    max_concurrency: PositiveInt = 16
    """How many sequences are computed at a time; further requests wait."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads; by default at most one for each core that the process may use."""
    kv_cache_memory: Size = 1 << 30
    """The size of the KV cache, including the prefix cache; a context that does not fit is served
    shorter, which the log says."""
    context: TokenCount | None = None
    """A context length below the model's own, in tokens of prompt and output; by default the
    model's own."""
    queue: PositiveInt = 256
    """Limit of waiting prompts, also of requests that wait for the model to be loaded; more are
    rejected as overload."""
    prefill_chunk: Annotated[int, Meta(ge=32, le=65536)] = 256
    """Prompt tokens computed in one step. More are faster, but take more memory, and responses that
    are being generated wait longer for their next token."""
    prompt_lookup: Literal["auto", "off", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] = (
        "auto"
    )
    """Whether tokens that have occurred before are computed several at a time. ``auto``: if the
    output stays the same, which is checked when the model is loaded. A number is the most tokens at
    a time, also for a model whose outputs then differ by rounding."""
    share_prefix_cache: bool = False
    """Whether API keys share the prefix cache. This saves memory and time if all keys belong to one
    trusted group; otherwise a key can find out which prompts another has sent."""
    watermark: WatermarkSettings = WatermarkSettings()
    """The watermark that a request may ask for."""
    chat_template: TemplatePath | None = None
    """A tokenizer's folder, or a chat template file, that replaces the model's own template."""
    unknown_tool_calls: Literal["reject", "text"] = "reject"
    """What happens to `tools` if the format in which the model writes calls is not known: they are
    refused, or they are served and calls arrive as text, which is reported as a loss."""
    trust_request_chat_template: bool = False
    """Whether a request may contain a chat template, which is a program of unbounded cost."""
    matryoshka: Annotated[tuple[TokenCount, ...], Meta(min_length=1)] | None = None
    """The dimensions to which embeddings may be truncated; by default those that the model's files
    name."""

    @property
    def model_task(self) -> ModelTask | None:
        """See ``BackendSettings``: by the settings, else by the model's files if they are here."""
        task = ENGINE_TASKS.get(self.task)
        if task is None:
            try:
                task = detect_local_task(self.path)
            except ModelError:
                return None
        return None if task is None else MODEL_TASKS[task]
