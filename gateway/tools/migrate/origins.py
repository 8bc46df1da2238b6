"""Whom LiteLLM means by what stands before the slash in ``litellm_params.model``.

Names, addresses and variables are LiteLLM's own: docs.litellm.ai, "Supported Models & Providers".
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct


class Origin(Struct, frozen=True):
    """A kind of worker. ``url`` is where it is unless the file says so, ``key`` a variable."""

    dialect: str = "openai"
    profile: str | None = None
    url: str | None = None
    key: str | None = None
    root: str = "/v1"
    """What the other one has at the end of its addresses, and this one adds by itself."""
    address: str | None = None
    """What an address must look like, with the base and the model's name as its groups."""
    mend: str = ""
    """How that is told."""
    keyed: bool = False
    """Whether ``key`` is shown wherever it is, and not only at ``url``."""
    note: str = ""
    """What is not as it was."""


def _service(url: str, key: str) -> Origin:
    return Origin(url=url, key=key)


_OPENAI: Final = _service("https://api.openai.com", "OPENAI_API_KEY")
_OLLAMA: Final = Origin(
    url="http://127.0.0.1:11434", note="Ollama is asked in OpenAI's words now, below /v1"
)

ORIGINS: Final[Mapping[str, Origin]] = {
    "openai": _OPENAI,
    "text-completion-openai": _OPENAI,
    "custom_openai": Origin(),
    "openai_like": Origin(),
    "hosted_vllm": Origin(profile="vllm"),
    "litellm_proxy": Origin(),
    "lm_studio": Origin(),
    "llamafile": Origin(profile="llamacpp", url="http://127.0.0.1:8080"),
    "xinference": Origin(),
    "ollama": _OLLAMA,
    "ollama_chat": _OLLAMA,
    "groq": _service("https://api.groq.com/openai", "GROQ_API_KEY"),
    "mistral": _service("https://api.mistral.ai", "MISTRAL_API_KEY"),
    "deepseek": _service("https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    "openrouter": _service("https://openrouter.ai/api", "OPENROUTER_API_KEY"),
    "together_ai": _service("https://api.together.xyz", "TOGETHERAI_API_KEY"),
    "fireworks_ai": _service("https://api.fireworks.ai/inference", "FIREWORKS_AI_API_KEY"),
    "nvidia_nim": _service("https://integrate.api.nvidia.com", "NVIDIA_NIM_API_KEY"),
    "cerebras": _service("https://api.cerebras.ai", "CEREBRAS_API_KEY"),
    "sambanova": _service("https://api.sambanova.ai", "SAMBANOVA_API_KEY"),
    "xai": _service("https://api.x.ai", "XAI_API_KEY"),
    "databricks": Origin(
        dialect="databricks", root="/serving-endpoints", key="DATABRICKS_API_KEY", keyed=True
    ),
    "huggingface": Origin(dialect="tgi", root=""),
    "triton": Origin(
        dialect="triton",
        root="",
        address=r"(.*)/v2/models/([^/]+)/(?:generate|generate_stream)",
        mend="it does not end in /v2/models/MODEL/generate",
    ),
}

CLIENTS: Final = "openai"
"""What the other one's clients speak."""
MOCK: Final = "echo"
"""What gives an answer that is always the same."""

FOREIGN: Final = frozenset({
    "ai21", "aleph_alpha", "anthropic", "anthropic_text", "anyscale", "azure", "azure_ai",
    "azure_text", "baseten", "bedrock", "cloudflare", "codestral", "cohere", "cohere_chat",
    "dashscope", "datarobot", "deepgram", "deepinfra", "elevenlabs", "featherless_ai",
    "gemini", "github", "github_copilot", "gradient_ai", "jina_ai", "meta_llama", "moonshot",
    "nlp_cloud", "novita", "nscale", "oci", "oobabooga", "palm", "perplexity", "petals",
    "predibase", "recraft", "replicate", "sagemaker", "sagemaker_chat", "snowflake", "topaz",
    "vertex_ai", "vllm", "volcengine", "voyage", "watsonx", "watsonx_text",
})  # fmt: skip
"""Known to the other one, and spoken to in words, or at paths, that no dialect here has."""
