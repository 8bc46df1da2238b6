"""LiteLLM's providers: the prefix of ``litellm_params.model``, and the endpoint that it stands for.

Names, addresses and variables are LiteLLM's own: docs.litellm.ai, "Supported Models & Providers".
"""

import re
from collections.abc import Mapping
from typing import Final, cast
from urllib.parse import urlsplit

from msgspec import Struct

from backends.http.interfaces import join_path
from gateway.config.registry import ProtocolRegistry
from gateway.tools.migrate.yaml_file import (
    Env,
    EnvText,
    NoteCollector,
    SourceValue,
    UnsupportedEntry,
)
from protocols import PROTOCOLS
from protocols.core import units
from protocols.core.interfaces import UpstreamAdapter, get_request_kinds

_SLASHES: Final = 2
"""The slashes before the host."""
_UNSPECIFIED_HOST: Final = re.compile(r"^(https?://)(?:0\.0\.0\.0|\[::\])(?=[:/]|$)")
"""The host of a server that listens on all addresses; as a destination it is this machine."""


class Provider(Struct, frozen=True):
    """A provider. ``url`` is its default address, ``key`` the variable that holds its key."""

    protocol: str = "openai"
    profile: str | None = None
    url: str | Env | None = None
    key: str | None = None
    root: str = "/v1"
    """The end of LiteLLM's addresses, which this gateway adds by itself."""
    address: str | None = None
    """The pattern of an address, with the base and the model's name as its groups."""
    hint: str = ""
    """The note if the address does not match."""
    keyed: bool = False
    """Whether ``key`` is sent to any address, and not only to ``url``."""
    note: str = ""
    """What changes by the migration."""
    key_header: str | None = None
    """The header of the key; None: ``Authorization``, as a bearer token."""


def _service(url: str, key: str, profile: str | None = None) -> Provider:
    return Provider(url=url, key=key, profile=profile)


def _is_available(provider: Provider) -> bool:
    """Whether this gateway has the provider's protocol, and its profile."""
    if provider.protocol not in PROTOCOLS:
        return False
    profiles = ProtocolRegistry(PROTOCOLS).get_profiles(provider.protocol)
    return provider.profile is None or provider.profile in profiles


_OPENAI: Final = _service("https://api.openai.com", "OPENAI_API_KEY")
_OLLAMA: Final = Provider(
    profile="ollama",
    url="http://127.0.0.1:11434",
    note="Ollama is called by its OpenAI API, below /v1",
)

PROVIDERS: Final[Mapping[str, Provider]] = {
    "openai": _OPENAI,
    "text-completion-openai": _OPENAI,
    "custom_openai": Provider(),
    "openai_like": Provider(),
    "hosted_vllm": Provider(profile="vllm"),
    "litellm_proxy": Provider(),
    "lm_studio": Provider(),
    "llamafile": Provider(profile="llamacpp", url="http://127.0.0.1:8080"),
    "xinference": Provider(),
    "ollama": _OLLAMA,
    "ollama_chat": _OLLAMA,
    "groq": _service("https://api.groq.com/openai", "GROQ_API_KEY", "groq"),
    "mistral": _service("https://api.mistral.ai", "MISTRAL_API_KEY", "mistral"),
    "deepseek": _service("https://api.deepseek.com", "DEEPSEEK_API_KEY", "deepseek"),
    "openrouter": _service("https://openrouter.ai/api", "OPENROUTER_API_KEY", "openrouter"),
    "together_ai": _service("https://api.together.xyz", "TOGETHERAI_API_KEY"),
    "fireworks_ai": _service("https://api.fireworks.ai/inference", "FIREWORKS_AI_API_KEY"),
    "nvidia_nim": _service("https://integrate.api.nvidia.com", "NVIDIA_NIM_API_KEY"),
    "cerebras": _service("https://api.cerebras.ai", "CEREBRAS_API_KEY"),
    "sambanova": _service("https://api.sambanova.ai", "SAMBANOVA_API_KEY"),
    "xai": _service("https://api.x.ai", "XAI_API_KEY", "xai"),
    "gemini": Provider(
        profile="gemini",
        url="https://generativelanguage.googleapis.com/v1beta/openai",
        key="GEMINI_API_KEY",
        note="Gemini is called by its OpenAI API, below /v1beta/openai",
    ),
    "zai": _service("https://api.z.ai/api/paas/v4", "ZAI_API_KEY"),
    "dashscope": _service(
        "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"
    ),
    "volcengine": _service("https://ark.cn-beijing.volces.com/api/v3", "VOLCENGINE_API_KEY"),
    "moonshot": _service("https://api.moonshot.ai", "MOONSHOT_API_KEY"),
    "deepinfra": _service("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "azure": Provider(
        profile="azure",
        url=Env("AZURE_API_BASE"),
        key="AZURE_API_KEY",
        root="",
        keyed=True,
        key_header="api-key",
    ),
    "anthropic": Provider(
        protocol="anthropic",
        url="https://api.anthropic.com",
        key="ANTHROPIC_API_KEY",
        keyed=True,
        key_header="x-api-key",
    ),
    **dict.fromkeys(
        ("cohere", "cohere_chat"),
        Provider(protocol="cohere", url="https://api.cohere.com", key="COHERE_API_KEY", keyed=True),
    ),
    "databricks": Provider(
        protocol="databricks", root="/serving-endpoints", key="DATABRICKS_API_KEY", keyed=True
    ),
    "huggingface": Provider(protocol="tgi", root=""),
    "triton": Provider(
        protocol="triton",
        root="",
        address=r"(.*)/v2/models/([^/]+)/(?:generate|generate_stream)",
        hint="must end in /v2/models/MODEL/generate",
    ),
}

CLIENT_PROTOCOLS: Final = ("openai", "anthropic")
"""The protocols of LiteLLM's clients: its proxy serves ``/v1/messages``, too."""
ORGANIZATION_HEADERS: Final = {"openai": "OpenAI-Organization"}
"""The header of ``organization``, by protocol."""
MOCK_BACKEND: Final = "echo"
"""The kind of backend that answers with a fixed text."""

UNSUPPORTED_PROVIDERS: Final = frozenset({
    "ai21", "aleph_alpha", "anthropic_text", "anyscale", "azure_ai",
    "azure_text", "baseten", "bedrock", "cloudflare", "codestral",
    "datarobot", "deepgram", "elevenlabs", "featherless_ai",
    "github", "github_copilot", "gradient_ai", "jina_ai", "meta_llama",
    "nlp_cloud", "novita", "nscale", "oci", "oobabooga", "palm", "perplexity", "petals",
    "predibase", "recraft", "replicate", "sagemaker", "sagemaker_chat", "snowflake", "topaz",
    "vertex_ai", "vllm", "voyage", "watsonx", "watsonx_text",
})  # fmt: skip
"""Providers of LiteLLM whose protocol this gateway does not have."""

_PROVIDERS_BY_NAME: Final[Mapping[str, str]] = {
    "claude-": "anthropic",
    "command-": "cohere",
    "embed-": "cohere",
    "gemini-": "vertex_ai",
    "rerank-": "cohere",
}
"""The provider that LiteLLM takes for a model without one, by how the model's name begins."""


class ProviderEndpoint(Struct, frozen=True):
    """A worker's base URL, its provider, its name of the model (None: the public one), comments."""

    url: str | Env | EnvText
    provider: Provider
    model: str | None
    comments: tuple[str, ...]


def resolve_endpoint(
    model: SourceValue,
    provider_setting: SourceValue | None,
    address: SourceValue | None,
    notes: NoteCollector,
) -> ProviderEndpoint:
    """Find the endpoint of an entry. Raises UnsupportedEntry."""
    provider, name = _find_provider(model, provider_setting)
    comments = (provider.note,) if provider.note else ()
    if address is None:
        if provider.url is None:
            raise UnsupportedEntry(model, "no api_base")
        if model.text == "*":
            reason = "all models go to OpenAI; write entries such as `anthropic/*` for others"
            notes.add(model, "changed", reason)
            comments = (*comments, reason)
        return ProviderEndpoint(provider.url, provider, name, comments)
    if isinstance(address.value, Env | EnvText):
        if provider.address is not None:
            reason = f"the variable must hold the base URL alone, since an address {provider.hint}"
            notes.add(address, "changed", reason)
            comments = (*comments, reason)
        return ProviderEndpoint(address.value, provider, name, comments)
    text = _UNSPECIFIED_HOST.sub(r"\g<1>127.0.0.1", address.text)
    if text != address.text:
        notes.add(
            address, "changed", "its host is 127.0.0.1 now, which is where workers are called"
        )
    if provider.address is not None:
        match = re.fullmatch(provider.address, text)
        if match is None:
            raise UnsupportedEntry(address, provider.hint)
        text, name = match.groups()
    url, has_root = _parse_base(address, text, provider)
    if provider.root and not has_root and not provider.note:
        reason = f"requests go to {provider.root}, as the protocol requires"
        notes.add(address, "changed", reason)
        comments = (*comments, reason)
    return ProviderEndpoint(url, provider, name, comments)


def _find_provider(
    model: SourceValue, provider_setting: SourceValue | None
) -> tuple[Provider, str | None]:
    """Find the provider and its name of the model. Raises UnsupportedEntry."""
    prefix, _, name = model.text.partition("/")
    if provider_setting is not None:
        prefix, name = provider_setting.text, model.text.removeprefix(f"{provider_setting.text}/")
    elif not name or (prefix not in PROVIDERS and prefix not in UNSUPPORTED_PROVIDERS):
        found = (by for start, by in _PROVIDERS_BY_NAME.items() if model.text.startswith(start))
        prefix, name = next(found, "openai"), model.text
    provider = PROVIDERS.get(prefix)
    if provider is None or not _is_available(provider):
        raise UnsupportedEntry(model, f"provider {prefix!r} is not supported")
    return provider, name


def list_tasks(provider: Provider) -> frozenset[str]:
    """The kinds of requests that the provider's workers may answer."""
    registry = ProtocolRegistry(PROTOCOLS)
    adapter = registry.create_adapter(provider.protocol, provider.profile, {})
    return frozenset(get_request_kinds(cast("UpstreamAdapter", adapter)))


def _parse_base(address: SourceValue, text: str, provider: Provider) -> tuple[str, bool]:
    """A worker's base URL, and whether the protocol's path followed. Raises UnsupportedEntry."""
    try:
        url = str(units.SCALAR_TYPES["worker"].parse(text))
    except ValueError as error:
        raise UnsupportedEntry(address, f"the address {error}") from None
    roots = (
        ProtocolRegistry(PROTOCOLS)
        .create_adapter(provider.protocol, provider.profile, {})
        .path_prefixes
    )
    for root in filter(None, roots):
        if url.endswith(root):
            return url.removesuffix(root), True
    if provider.root and url.count("/") > _SLASHES:
        parts = urlsplit(url)
        if join_path(parts.path, f"{provider.root}/") == f"{parts.path}/":
            return url, True
        raise UnsupportedEntry(
            address,
            f"the path of {provider.protocol} is {provider.root}, and the address has another",
        )
    if provider.profile == "azure":
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc}", True
    return url, False
